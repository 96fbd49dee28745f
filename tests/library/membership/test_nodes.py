"""Nodes of several processes, here threads, that are each one worker of a membership: they fall and join as one."""

from __future__ import annotations

import copy
import re
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import networkx as nx
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from gossip_modules import (
    D2,
    Choco,
    DiLoCo,
    GossipDataParallel,
    Membership,
    PowerGossip,
    QGDSGDm,
    RingGraph,
    SignNorm,
    StreamingDiLoCo,
)
from gossip_modules.flat.vector import FlatVector
from gossip_modules.graph_manager import GraphManager, NetworkXGraph
from gossip_modules.transport.shared_group import Use
from tests.harness.problems import loss_of, mlp, sgd
from tests.harness.progress import engine_of, round_of, step_of
from tests.harness.ranks import HangUp, run_ranks, thread_group
from tests.harness.reference import flatten

PER_NODE = 2
SECONDS = 60.0  # of any wait: nothing here should take as long
NUM_STEPS = 6


def chorded(n: int) -> GraphManager:
    """A directed ring with a chord, on which push-sum weights move."""
    return NetworkXGraph(nx.DiGraph([*((i, (i + 1) % n) for i in range(n)), *([(0, 2)] if n > 2 else [])]))


class Signs(Choco):
    """CHOCO-SGD, of which each process makes one for itself."""

    def __init__(self) -> None:
        super().__init__(SignNorm(), step_size=0.4)


SYNC_PERIOD = 3


class Process:
    """One process of a node: what its training loop has."""

    def __init__(self, group: dist.ProcessGroup, nodes: Nodes, *, seed: int = 0, **options: Any) -> None:
        self.node, self.local = divmod(group.rank(), PER_NODE)
        inside = self.inside = nodes.group_of(self.node, self.local)
        self.membership = Membership(nodes.store, min_workers=nodes.min_workers, timeout=SECONDS, min_deadline=20.0)
        self.changes: list[Any] = []
        self.membership.on_change(self.changes.append)
        options = {"nprocs_per_node": PER_NODE, "process_group": inside, **options}
        self.model = GossipDataParallel(mlp(seed), membership=self.membership, **options)
        self.optimizer = sgd(self.model)
        self.membership.track(optimizer=self.optimizer)
        self.mixed: dict[int, Tensor] = {}  # the model after the round of each step

    def step(self, step: int) -> Tensor:
        """A training step on a batch of this process; the model after it."""
        loss = loss_of(self.model, PER_NODE * self.membership.rank + self.local, step)
        self.mixed[step] = flatten(self.model.module)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return flatten(self.model.module)

    def train(self, until: threading.Event, *, at_step: Callable[[int], None] = lambda step: None) -> dict[int, Tensor]:
        """The model after each step, up to the one at which some process of the node sees that it is time to leave."""
        models = {}
        for step in self.membership.steps(1 << 30):
            at_step(step)
            models[step] = self.step(step)
            if until.is_set() and self.local == 1:
                self.membership.leave()
        self.model.close()
        return models


class Nodes:
    """The nodes of a job."""

    def __init__(self, count: int, *, min_workers: int) -> None:
        self.store = dist.HashStore()
        self.stores = [dist.HashStore() for _ in range(count)]
        self.min_workers = min_workers
        self.num_groups: Counter[tuple[int, int]] = Counter()
        self.lock = threading.Lock()

    def group_of(self, node: int, local: int) -> dist.ProcessGroup:
        """A new group of the processes of a node."""
        with self.lock:
            number = self.num_groups[node, local]
            self.num_groups[node, local] += 1
        return thread_group(dist.PrefixStore(str(number), self.stores[node]), local, PER_NODE)

    def run(self, body: Callable[[dist.ProcessGroup], Any]) -> list[Any]:
        return run_ranks(PER_NODE * len(self.stores), body)


def reference(num_nodes: int, **options: Any) -> list[list[Tensor]]:
    """The same with one rank per node and no membership, on the batches of the processes of each node in turn."""

    def body(group: dist.ProcessGroup) -> list[Tensor]:
        model = GossipDataParallel(mlp(), process_group=group, **options)
        optimizer, models = sgd(model), []
        for step in range(NUM_STEPS):
            optimizer.zero_grad()
            with model.no_sync():
                loss_of(model, PER_NODE * group.rank(), step).backward()
            loss_of(model, PER_NODE * group.rank() + 1, step).backward()
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.grad.div_(PER_NODE)
            optimizer.step()
            models.append(flatten(model.module))
        model.flush()
        models.append(flatten(model.module))
        model.close()
        return models

    return run_ranks(num_nodes, body)


def same(name: str, *, atol: float = 0.0, marks: Any = (), **options: Any) -> Any:
    """A case whose options are the same with a membership and without."""
    return pytest.param(options, options, atol, id=name, marks=marks)


@pytest.mark.parametrize(
    ("elastic", "fixed", "atol"),
    [
        pytest.param({"graph": chorded}, {"graph": chorded(3)}, 0.0, id="SGP"),
        same("Overlap SGP", overlap=True),
        same("D-PSGD", push_sum=False, graph=RingGraph, marks=pytest.mark.soak),
        same("CHOCO", algorithm=Signs, push_sum=False, atol=1e-6),  # with a membership its sums are in another order
        same(
            "PowerGossip overlapped",
            algorithm=PowerGossip,
            overlap=True,
            push_sum=False,
            atol=1e-6,
            marks=pytest.mark.soak,
        ),
        same("DiLoCo", algorithm=DiLoCo(SYNC_PERIOD)),
        same(
            "StreamingDiLoCo", algorithm=StreamingDiLoCo(4, fragments=[["0"], ["2"]], delay=1), marks=pytest.mark.soak
        ),
        same("D2", algorithm=D2()),
        same("QG-DSGDm", algorithm=QGDSGDm(), marks=pytest.mark.soak),
    ],
)
def test_without_faults_models_are_those_of_a_run_without_a_membership(
    elastic: dict[str, Any], fixed: dict[str, Any], atol: float
) -> None:
    nodes = Nodes(3, min_workers=3)

    def body(group: dist.ProcessGroup) -> dict[str, Any]:
        process = Process(group, nodes, **elastic)
        process.membership.join()
        # The order of the nodes is that in which they came: each takes the batches of its rank.
        models = [process.step(step) for step in process.membership.steps(NUM_STEPS)]
        wrapper = process.model
        wrapper.flush()
        models.append(flatten(wrapper.module))
        distance = wrapper.consensus_distance()
        with wrapper.averaged():
            average = flatten(wrapper.module)
        state = wrapper.averaged_state_dict()
        node = process.membership.rank
        wrapper.close()
        place = node, process.local
        return {"place": place, "models": models, "distance": distance, "average": average, "state": state}

    expected = reference(3, **fixed)
    results = sorted(nodes.run(body), key=lambda result: result["place"])
    assert [result["place"] for result in results] == [(node, local) for node in range(3) for local in range(PER_NODE)]
    for result in results:
        for got, want in zip(result["models"], expected[result["place"][0]], strict=True):
            torch.testing.assert_close(got, want, rtol=0, atol=atol)
        for got, want in zip(result["models"], results[PER_NODE * result["place"][0]]["models"], strict=True):
            assert torch.equal(got, want), "a node holds one model"
        assert result["distance"] == results[0]["distance"] > 0
        assert torch.equal(result["average"], results[0]["average"])
        assert bool(result["state"]) == (result["place"] == (0, 0))
    if not fixed.get("push_sum", True):  # else x counts, of which z is not the mean
        mean = torch.stack([models[-1] for models in expected]).mean(0)
        torch.testing.assert_close(results[0]["average"], mean, rtol=0, atol=1e-6)


def test_a_checkpoint_waits_for_the_round_in_flight_in_all_processes_of_a_node() -> None:
    nodes = Nodes(2, min_workers=2)

    def body(group: dist.ProcessGroup) -> tuple[int, Tensor]:
        process = Process(group, nodes, overlap=True)
        process.membership.join()
        for step in process.membership.steps(NUM_STEPS):
            process.step(step)
        assert engine_of(process.model).is_in_flight
        saved = {name: x for name, x in process.model.state_dict().items() if name.startswith("module.")}
        assert not engine_of(process.model).is_in_flight
        process.model.close()
        return process.membership.rank, torch.cat([x.flatten() for x in saved.values()])

    results = nodes.run(body)
    for rank, saved in results:
        assert all(torch.equal(saved, other) for theirs, other in results if theirs == rank)


def die(process: Process) -> None:
    """As at the end of a process: its connections close, and nobody is told."""
    membership = process.membership
    membership.release()
    engine_of(process.model).close()
    with suppress(RuntimeError):  # a wait that ends by its timeout closes the connections
        process.inside.recv([torch.empty(1)], 1 - process.local, 0).wait(timedelta(milliseconds=1))


@pytest.mark.parametrize(
    ("options", "dies"),
    [
        pytest.param({"push_sum": False, "graph": RingGraph}, 0, id="D-PSGD", marks=pytest.mark.soak),
        pytest.param({"overlap": True}, 1, id="Overlap SGP", marks=pytest.mark.soak),
        pytest.param({"algorithm": Signs}, 0, id="CHOCO"),
        pytest.param({"algorithm": PowerGossip, "overlap": True}, 1, id="PowerGossip", marks=pytest.mark.soak),
        pytest.param({"algorithm": DiLoCo(SYNC_PERIOD)}, 0, id="DiLoCo"),
        pytest.param({"algorithm": D2()}, 0, id="D2", marks=pytest.mark.soak),
        pytest.param({"algorithm": QGDSGDm()}, 0, id="QG-DSGDm", marks=pytest.mark.soak),
    ],
)
def test_a_node_falls_and_joins_as_one(options: dict[str, Any], dies: int) -> None:
    """Two nodes, then a third one; one of them loses a process, falls, and comes again."""
    nodes = Nodes(4, min_workers=2)
    may_come = [threading.Event() for _ in range(4)]
    may_fall, over = threading.Event(), threading.Event()
    for event in may_come[:2]:
        event.set()
    results: dict[tuple[int, int], dict[str, Any]] = {}
    errors: list[Exception] = []

    def body(group: dist.ProcessGroup) -> None:
        node, local = divmod(group.rank(), PER_NODE)
        assert may_come[node].wait(SECONDS)
        process = Process(group, nodes, seed=node, **options)
        member = process.membership
        first = member.join()
        momentum = [state["momentum_buffer"].clone() for state in process.optimizer.state.values()]
        seen = []

        def at_step(step: int) -> None:
            seen.append((step, member.number, member.rank, member.world_size, member.turn(step), member.generation))
            if len(seen) >= 4:  # of this node
                may_come[2].set()
                if node == 2 and member.world_size == 3:
                    may_fall.set()
                if node == 3 and member.world_size == 3:
                    over.set()
            if (node, local) == (1, dies) and may_fall.is_set():
                die(process)
                raise HangUp

        try:
            models = process.train(over, at_step=at_step)
        except ConnectionError as error:
            errors.append(error)
            die(process)
            may_come[3].set()
            raise HangUp from None
        changes = [(c.generation, c.step, c.rank, c.members, c.joined, dict(c.left)) for c in process.changes]
        stats = {name: process.model.comm_stats()[name] for name in ("generation", "live", "joins", "deaths")}
        results[node, local] = {
            "all": (first, seen, changes, stats),
            "momentum": momentum,
            "models": models,
            "mixed": process.mixed,
            "worker": process.model.worker,
        }

    nodes.run(body)
    assert [node for node, local in sorted(results) if local == 0] == [0, 2, 3]
    for node in (0, 2, 3):
        one, two = results[node, 0], results[node, 1]
        assert one["all"] == two["all"]
        assert one["worker"].replace(".0", ".1") == two["worker"] != one["worker"]
        assert one["models"].keys() == two["models"].keys()
        for x, y in zip([*one["models"].values(), *one["momentum"]], [*two["models"].values(), *two["momentum"]]):
            assert torch.equal(x, y)
    for newcomer in (results[2, 0], results[3, 0]):
        first, *_ = newcomer["all"]
        assert first > 0
        assert newcomer["momentum"], "the state of the optimizer came from the donor"
    _, _, changes, _ = results[0, 0]["all"]
    assert [len(members) for _, _, _, members, _, _ in changes][:4] == [2, 3, 2, 3]
    assert list(changes[2][5].values()) == ["its connection closed"]
    if isinstance(options.get("algorithm"), DiLoCo):
        check_anchor(results[3, 0], [results[0, 0], results[2, 0]])
    (error,) = errors
    assert re.search(rf"rank {dies} (is gone|did not take part)", str(error))


def check_anchor(newcomer: dict[str, Any], others: list[dict[str, Any]]) -> None:
    """After its first outer step a node that has joined has the model of the others: they move one anchor."""
    step = next(step for step in sorted(newcomer["mixed"]) if step % SYNC_PERIOD == 0)
    for other in others:
        assert torch.equal(newcomer["mixed"][step], other["mixed"][step])


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"push_sum": False, "graph": RingGraph}, id="D-PSGD"),
        pytest.param({"algorithm": Signs}, id="CHOCO"),
        pytest.param({"overlap": True}, id="Overlap SGP"),
    ],
)
def test_infinities_are_raised_in_all_processes_of_a_node_which_may_go_on(options: dict[str, Any]) -> None:
    """The other node goes on without an error."""
    nodes = Nodes(2, min_workers=2)

    def body(group: dist.ProcessGroup) -> dict[str, Any]:
        process = Process(group, nodes, **options)
        model, member, is_sick = process.model, process.membership, False
        seen: list[int] = []
        raised: list[int] = []
        for step in member.steps(NUM_STEPS):
            seen.append(step)
            if step == 1:
                model.flush()
                saved = [parameter.detach().clone() for parameter in model.parameters()]
            if member.rank == 1 and step == 2 and not is_sick:
                is_sick = True
                next(model.parameters()).detach()[0, 0] = float("inf")
            try:
                if is_sick and not raised:
                    loss_of(model, group.rank(), step)
                else:
                    process.step(step)
            except FloatingPointError:
                raised.append(step)
                if is_sick:
                    with torch.no_grad():
                        for parameter, value in zip(model.parameters(), saved, strict=True):
                            parameter.copy_(value)
        model.flush()
        counts = round_of(model), step_of(model), member.worker.generations.clock if process.local == 0 else 0
        place = member.rank, process.local
        result = {"place": place, "seen": seen, "raised": raised, "counts": counts, "model": flatten(model.module)}
        model.close()
        return result

    results = sorted(nodes.run(body), key=lambda result: result["place"])
    failing = 3 if options.get("overlap") else 2
    assert [result["raised"] for result in results] == [[]] * PER_NODE + [[failing]] * PER_NODE
    for result in results:
        assert sorted(result["seen"]) == sorted([*range(NUM_STEPS), *result["raised"]])  # that step comes again
        assert result["counts"] == results[result["place"][1]]["counts"]
        assert result["counts"][:2] == (NUM_STEPS, NUM_STEPS)
        assert bool(result["model"].isfinite().all())
        assert torch.equal(result["model"], results[PER_NODE * result["place"][0]]["model"])


def test_after_an_error_in_a_round_all_processes_have_the_model_of_the_first_one() -> None:
    nodes = Nodes(1, min_workers=1)

    def body(group: dist.ProcessGroup) -> list[Tensor]:
        process, leads = Process(group, nodes, push_sum=False, schedule=2), group.rank() == 0
        models, engine = [process.step(0)], engine_of(process.model)

        def half(x: FlatVector) -> bool:
            x.segments[0].mul_(0.5)
            raise KeyError("half written")

        if leads:
            engine.round = half
        with pytest.raises(KeyError if leads else RuntimeError, match="half written"):
            process.step(1)
        vars(engine).pop("round", None)
        models += [process.step(1), process.step(2)]  # step 1 has no round, after which they would be equal anyway
        process.model.close()
        return models

    one, two = nodes.run(body)
    assert all(map(torch.equal, one, two))


def states_after(num_steps: int, **options: Any) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """The state dict, and that of the engine, in each process of a node that is alone."""
    nodes = Nodes(1, min_workers=1)

    def body(group: dist.ProcessGroup) -> tuple[dict[str, Any], dict[str, Any]]:
        process = Process(group, nodes, **options)
        for step in range(num_steps):
            process.step(step)
        states = process.model.state_dict(), process.model.get_extra_state()["engine"]
        process.model.close()
        return states

    return nodes.run(body)


def test_the_memory_of_a_method_is_in_the_state_of_the_first_process_of_a_node() -> None:
    """The others have the model and the counters, from which no first process goes on."""
    (_, plain), (_, other_plain) = states_after(3, push_sum=False)
    assert plain == other_plain
    (first, kept), (second, counters) = states_after(3, algorithm=QGDSGDm())
    assert kept["gossiper"]["memory"]["num_rounds"] == 3
    assert counters["gossiper"] == {}
    assert (kept["t"], kept["step"]) == (counters["t"], counters["step"]) == (3, 3)
    nodes = Nodes(1, min_workers=1)

    def body(group: dist.ProcessGroup) -> tuple[int, Tensor]:
        process = Process(group, nodes, algorithm=QGDSGDm())
        wrapper = process.model
        if group.rank() == 0:
            with pytest.raises(ValueError, match=r"got the state of a process that follows QGDSGDm.*, expected"):
                wrapper.load_state_dict(second)
        else:
            wrapper.load_state_dict(second)
            assert wrapper.get_extra_state()["engine"] == counters
        wrapper.load_state_dict(first)
        x = process.step(3)
        num_steps = wrapper.get_extra_state()["engine"]["step"]
        wrapper.close()
        return num_steps, x

    (num_steps, one), (num_steps_of_other, two) = nodes.run(body)
    assert num_steps == num_steps_of_other == 4
    assert torch.equal(one, two)


def test_errors_and_refusals() -> None:
    nodes = Nodes(1, min_workers=1)

    def body(group: dist.ProcessGroup) -> None:
        leads = group.rank() == 0
        with pytest.raises(ValueError, match=r"got nprocs_per_node=3 and a membership in a world of 2 processes"):
            Process(group, nodes, nprocs_per_node=3)
        with pytest.raises(ValueError, match="got nprocs_per_node=0, expected 1 or more"):
            Process(group, nodes, nprocs_per_node=0, process_group=None)
        process = Process(group, nodes)
        member = process.membership
        with pytest.raises(ValueError, match="got membership of job 'job' in a second wrapper"):
            GossipDataParallel(mlp(), membership=member, nprocs_per_node=PER_NODE, process_group=group)
        assert member.join() == 0
        with pytest.raises(ZeroDivisionError if leads else RuntimeError) as raised:
            member._as_one(lambda: 1 / 0)  # type: ignore[arg-type,return-value]
        if not leads:
            assert str(raised.value).startswith("process 0, the first one of this worker, failed: ZeroDivisionError:")
        process.step(0)
        if not leads:  # a copy is a snapshot, which one process may take by itself
            snapshot = copy.deepcopy(process.model)
            assert torch.equal(flatten(snapshot.module), flatten(process.model.module))
            snapshot.eval()
            loss_of(snapshot, 0, 1)
        inside = nodes.group_of(0, group.rank())
        with pytest.raises(ValueError, match="refused this worker, which differs from it: overlap"):
            Process(group, nodes, overlap=True, process_group=inside)
        with pytest.raises(
            ValueError, match=r"ranks do not agree with rank 0: rank 1: overlap: got True, expected Fal"
        ):
            Process(group, nodes, overlap=not leads, process_group=inside)
        assert len(Use(inside).shared.taken) == 1, "a wrapper that is refused gives its channels back"
        process.model.close()

    nodes.run(body)
