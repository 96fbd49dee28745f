"""WAGMA-SGD with a membership: workers die, stand still, leave and join, and nobody who lives raises."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from gossip_modules import GroupAverageDataParallel, Membership
from gossip_modules.engine.liveness import Liveness
from gossip_modules.flat.vector import FlatVector
from gossip_modules.graph_manager.named_graphs import undirected_ring
from gossip_modules.membership.links import LinkTransport
from gossip_modules.membership.view import Change
from gossip_modules.mixing_manager import MetropolisHastingsMixing
from gossip_modules.testing import Chaos, Join, Kill, Stop, StoreKill, Worker
from gossip_modules.wagma import engine as engine_module
from gossip_modules.wagma.engine import WaitAvoidingEngine
from gossip_modules.wagma.worker import WaitAvoidingWorker
from gossip_modules.wagma.wrapper import choose_groups
from tests.harness.ranks import assert_no_gossip_threads
from tests.library.membership.test_links import Ended, run_links

AFTER = 12  # steps, after the last change


class Train:
    """The loop of a worker: it ends `AFTER` steps after the change that `is_last` names, at one step on all.

    Args:
        num_workers: that begin.
        is_last: of a change of the generation.
        slow: the ranks of workers whose steps take ten times as long.
        min_deadline: of the membership.
        settles: whether all workers settle at the end.
        options: of the wrapper.
    """

    def __init__(
        self,
        num_workers: int,
        is_last: Callable[[Change], bool],
        *,
        slow: tuple[int, ...] = (),
        min_deadline: float = 20.0,
        settles: bool = False,
        **options: Any,
    ) -> None:
        self.settles = settles
        self.num_workers, self.is_last, self.slow, self.options = num_workers, is_last, slow, options
        self.min_deadline = min_deadline

    def __call__(self, worker: Worker) -> dict[str, Any]:
        torch.manual_seed(worker.rank)
        net = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
        membership = worker.membership(min_workers=self.num_workers, timeout=60, min_deadline=self.min_deadline)
        model = GroupAverageDataParallel(net, membership=membership, **self.options)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        membership.track(optimizer=optimizer)
        changes: list[Change] = []
        ends: list[int] = []
        membership.on_change(changes.append)
        membership.on_change(lambda change: ends.append(change.step + AFTER) if self.is_last(change) else None)
        first = membership.join()
        if first == 0:
            model.settle()  # so that workers have settled unequally often
        had_momentum = bool(optimizer.state)
        values, rounds = {}, []
        for step in membership.steps(1 << 30):
            if ends and step >= ends[0]:
                break
            out = model(torch.randn(8, 4))
            values[step] = net[0].weight.detach().flatten().tolist()  # type: ignore[operator]
            rounds.append(model.round)
            optimizer.zero_grad()
            out.pow(2).mean().backward()
            optimizer.step()
            time.sleep(0.02 if worker.rank in self.slow else 0.002)
        stats = model.comm_stats()
        if self.settles:
            model.settle()
        model.close()
        return {
            "first": first,
            "had_momentum": had_momentum,
            "values": values,
            "changes": [(c.generation, c.step, c.members) for c in changes],
            "rounds": rounds,
            "stats": stats,
            "counter": int(net[1].num_batches_tracked),  # type: ignore[arg-type]
        }


def has_joined(change: Change) -> bool:
    return change.generation > 1 and bool(change.joined)


def check_alike(results: dict[int, dict[str, Any]]) -> None:
    """Who was in a generation knows the same of it; steps only grow, and one is one round at least."""
    known: dict[int, tuple[int, tuple[int, ...]]] = {}
    for result in results.values():
        for generation, step, members in result["changes"]:
            assert known.setdefault(generation, (step, members)) == (step, members)
        steps = list(result["values"])
        assert steps == sorted(set(steps))
        assert result["rounds"] == sorted(set(result["rounds"]))


@pytest.mark.parametrize("overlap", [False, True], ids=["in place", "overlapped"])
def test_survivors_go_on_and_a_newcomer_gets_the_state_of_training(overlap: bool) -> None:
    train = Train(3, has_joined, overlap=overlap, sync_period=5, settles=True)
    results = Chaos([Kill(step=10, rank=0), Join(step=12)]).run(train, 3)
    assert_no_gossip_threads()
    assert sorted(results) == [1, 2, 3]
    check_alike(results)
    newcomer = results[3]
    assert newcomer["had_momentum"]
    assert newcomer["first"] >= 12
    assert newcomer["counter"] > len(newcomer["values"])
    assert all(result["stats"]["deaths"] >= 1 for rank, result in results.items() if rank < 3)
    assert newcomer["stats"]["generation"] >= 3


def test_former_generations_are_let_go_of_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else their connections stay until garbage is collected."""
    former: list[weakref.ref[WaitAvoidingWorker]] = []
    rebind = WaitAvoidingEngine.rebind

    def noting(engine: WaitAvoidingEngine, weights: Any, transport: LinkTransport, x: FlatVector) -> None:
        former.append(weakref.ref(engine.worker))
        rebind(engine, weights, transport, x)

    monkeypatch.setattr(WaitAvoidingEngine, "rebind", noting)
    gc.disable()
    try:
        Chaos([Kill(step=10, rank=0), Join(step=12)]).run(Train(3, has_joined), 3)
        assert_no_gossip_threads()
        # Of the worlds of one, and of the first generation. On a loaded machine the next one is that with the newcomer.
        assert len(former) >= 4 + 2
        assert [worker for worker in former if worker() is not None] == []
    finally:
        gc.enable()


def test_all_are_equal_after_an_average_of_the_new_generation() -> None:
    """Every round is an average over all that live."""
    results = Chaos([Kill(10, 0), Kill(10, 1), Join(14)]).run(Train(4, has_joined, sync_period=1), 4)
    check_alike(results)
    first = results[4]["first"]
    for step in range(first + 2, first + AFTER - 2):
        values = [torch.tensor(result["values"][step]) for result in results.values()]
        assert len(values) == 3
        assert all(torch.allclose(value, values[0], atol=1e-6) for value in values)


def test_a_slow_rank_comes_to_the_next_generation_with_the_others() -> None:
    """Without averages over all ranks, which would bound by how much it is behind."""
    train = Train(3, lambda change: change.generation > 1, slow=(2,), sync_period=0)
    results = Chaos([Kill(20, 0)]).run(train, 3)
    check_alike(results)
    assert all(result["changes"] for result in results.values())


def test_one_that_is_left_alone_trains_and_takes_others_in() -> None:
    train = Train(2, lambda change: len(change.members) == 2 and change.generation > 1, group_size=2)
    results = Chaos([Kill(5, 1), Join(30)]).run(train, 2)
    assert sorted(results) == [0, 2]
    check_alike(results)


def test_the_store_dies_with_a_worker() -> None:
    train = Train(3, lambda change: len(change.members) == 2, sync_period=5)
    results = Chaos([StoreKill(5, seconds=0.5), Kill(8, 0)]).run(train, 3)
    assert sorted(results) == [1, 2]
    check_alike(results)


# One generation, step by step.

MIXING = MetropolisHastingsMixing(undirected_ring(3))


def engine_over(transport: LinkTransport, x: FlatVector, *, sync_period: int = 2) -> WaitAvoidingEngine:
    groups = choose_groups(None)(transport.world_size)
    return WaitAvoidingEngine(groups, transport, x, sync_period=sync_period, overlap=False, on_nonfinite="raise")


@pytest.mark.parametrize("is_global", [False, True], ids=["group", "all"])
def test_a_round_that_lacks_a_rank_leaves_the_model_as_it_is(is_global: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 2 ends after a round; each of the others goes on alone, and asks once for another generation."""
    monkeypatch.setattr(engine_module, "_PATIENCE", -1.0)

    def body(transport: LinkTransport, barrier: Any) -> list[Any]:
        x, asked = FlatVector.over(torch.full((5,), float(transport.rank))), []
        transport.on_broken = lambda: asked.append(1)
        engine = engine_over(transport, x, sync_period=1 if is_global else 0)
        engine.round(x)
        barrier.wait()
        if transport.rank == 2:
            raise Ended
        num_rounds, deadline = 1, time.monotonic() + 30
        while not engine.is_cut_off:
            engine.round(x)
            num_rounds += 1
            assert time.monotonic() < deadline
        before = x.raw.clone()
        for _ in range(3):
            engine.round(x)
        with pytest.raises(ConnectionError):
            engine.settle(x)
        engine.close()
        assert torch.equal(x.raw, before)
        if is_global:
            assert x.segments[0].tolist() == 5 * [1.0]
        return [engine.t >= num_rounds + 3, asked]

    results, lost = run_links(3, MIXING, body)
    assert_no_gossip_threads()
    assert results == [[True, [1]], [True, [1]], None]
    assert lost == {0: set(), 1: set()}


def test_the_membership_is_told_the_late_rank() -> None:
    """And not by those who only see that rounds have ended."""

    def body(transport: LinkTransport, barrier: Any) -> bool:
        x = FlatVector.over(torch.zeros(5))
        engine = engine_over(transport, x)
        engine.round(x)
        barrier.wait()
        if transport.rank == 0:
            with pytest.raises(TimeoutError, match="rank 2 did not come"):
                engine.worker.liveness.give_up("waiting", 1.0, 2)
        deadline = time.monotonic() + 30
        while not engine.worker.liveness.has_failed:
            time.sleep(0.005)
            assert time.monotonic() < deadline
        engine.close()
        return engine.is_cut_off

    assert run_links(3, MIXING, body) == ([True, True, True], {0: {2}, 1: set(), 2: set()})


def test_a_rank_whose_membership_has_ended_has_no_peers_though_its_threads_do_not_know(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Liveness, "listen", lambda liveness, handle: None)

    def body(transport: LinkTransport, barrier: Any) -> list[bool]:
        engine = engine_over(transport, FlatVector.over(torch.zeros(5)))
        barrier.wait()
        had_peers = engine.has_peers
        transport.close()
        return [had_peers, engine.has_peers, engine.is_cut_off]

    assert run_links(2, MetropolisHastingsMixing(undirected_ring(2)), body)[0] == 2 * [[True, False, False]]


@pytest.mark.soak
def test_a_rank_that_stands_still_is_awaited_until_the_timeout() -> None:
    def body(transport: LinkTransport, barrier: Any) -> int:
        transport.whole.timeout = timedelta(seconds=5)
        x = FlatVector.over(torch.zeros(5))
        engine = engine_over(transport, x)
        barrier.wait()
        if transport.rank != 2:
            engine.round(x)
            assert engine.is_cut_off
        barrier.wait()
        engine.close()
        return engine.t

    results, lost = run_links(3, MIXING, body)
    assert results == [1, 1, 0]
    assert lost[0] | lost[1] == {2}
    assert lost[2] == set()


# Arguments.


def test_groups_exist_for_any_number_of_workers() -> None:
    assert [choose_groups(4)(n).group_size for n in range(1, 10)] == [1, 2, 2, 4, 4, 4, 4, 4, 4]
    assert [choose_groups(None)(n).group_size for n in (1, 2, 3, 4, 7, 8, 16)] == [1, 2, 2, 2, 2, 4, 4]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"wait_avoiding": False}, "got wait_avoiding=False with a membership, expected True"),
        ({"group_size": 1}, "got group_size=1 with a membership, expected a power of two from 2 on"),
        ({"group_size": 6}, "got group_size=6 with a membership, expected a power of two from 2 on"),
        (
            {"comm_device": "cuda"},
            "got comm_device=cuda with a membership, expected 'cpu', as its messages are in host memory, or None",
        ),
        ({"init_sync": False}, "got init_sync=False with a membership, expected True: its workers begin"),
        ({"timeout": 7}, "got timeout=7 s with a membership, which has a timeout of 60 s, expected none"),
        ({"membership": "node0:29400"}, r"expected a Membership; pass Membership\('node0:29400', min_workers="),
        ({"membership": 4}, r"got membership=4, expected a Membership; pass Membership\('host:port', min_workers="),
    ],
)
def test_options_that_do_not_fit_a_membership_are_refused(options: dict[str, Any], message: str) -> None:
    membership = Membership(dist.HashStore(), min_workers=1)
    with pytest.raises(ValueError, match=message):
        GroupAverageDataParallel(nn.Linear(2, 1), **{"membership": membership, **options})
    membership.close()


def test_another_wrapper_is_refused_at_the_door() -> None:
    """The job goes on."""

    def body(worker: Worker) -> bool:
        membership = worker.membership(min_workers=2, timeout=30, min_deadline=20.0)
        if worker.rank < 2:
            model = GroupAverageDataParallel(nn.Linear(4, 1), membership=membership)
            for _ in membership.steps(40):
                model(torch.ones(2, 4)).sum().backward()
                time.sleep(0.005)
            model.close()
            return True
        with pytest.raises(ValueError, match="refused this worker, which differs from it"):
            GroupAverageDataParallel(nn.Linear(4, 1), membership=membership, sync_period=3)
        return False

    results = Chaos([Join(5)]).run(body, 2)
    assert_no_gossip_threads()
    assert results == {0: True, 1: True, 2: False}


@pytest.mark.soak
def test_processes_get_real_signals() -> None:
    """The store ends, too; the worker that is stopped is left out, and joins again."""
    events = [Kill(20, 0), StoreKill(40, seconds=0.5), Join(60), Stop(150, 1, seconds=6.0)]
    results = Chaos(events, backend="processes", seconds=55).run(train_in_a_process, 3)
    assert sorted(results) == [1, 2, 3]
    assert results[3]["first"] >= 60
    assert results[2]["deaths"] >= 2
    assert results[2]["joins"] >= 2


def train_in_a_process(worker: Worker) -> dict[str, Any]:
    """Until all three have been there again for a while."""
    torch.set_num_threads(1)
    membership = worker.membership(min_workers=3, timeout=60, min_deadline=2.0)
    model = GroupAverageDataParallel(nn.Linear(4, 1), membership=membership, sync_period=5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    membership.track(optimizer=optimizer)
    ends: list[int] = []
    membership.on_change(lambda c: ends.append(c.step + AFTER) if c.step > 150 and len(c.members) == 3 else None)
    first = membership.join()
    for step in membership.steps(1 << 30):
        if ends and step >= ends[0]:
            break
        optimizer.zero_grad()
        model(torch.ones(2, 4)).pow(2).mean().backward()
        optimizer.step()
        is_waiting = step >= 60 and membership.world_size < 3  # of two, the stopped one might be the one that goes on
        time.sleep(0.2 if is_waiting and step < 150 else 0.01)
    deaths, joins = membership.num_deaths, membership.num_joins
    model.close()
    return {"first": first, "deaths": deaths, "joins": joins}
