"""AD-PSGD: no update is lost, no model is torn, nobody waits, and whoever is missing is named."""

from __future__ import annotations

import copy
import io
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, cast

import networkx as nx
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from gossip_modules import (
    BilatGossipDataParallel,
    DynamicBipartiteCompleteGraph,
    DynamicBipartiteExponentialGraph,
    DynamicBipartiteLinearGraph,
    GossipDataParallel,
    MetropolisHastingsMixing,
    NetworkXGraph,
    RingGraph,
)
from gossip_modules.ad_psgd.engine import BilateralEngine
from gossip_modules.flat.vector import FlatVector
from tests.harness.named_group import NamedGroup
from tests.harness.problems import adamw, fill_, loss_of, mlp, net, sgd, train_step
from tests.harness.processes import Outcome, run_processes
from tests.harness.ranks import TIMEOUT, assert_no_gossip_threads, gossip_threads, run_ranks, solo_group
from tests.harness.reference import flatten

PATIENCE = 10.0
HEADER_BYTES, REPLY_BYTES = 24, 8
X = torch.ones(2, 3)


@pytest.fixture(autouse=True)
def all_threads_end() -> Iterator[None]:
    """Every test closes its wrappers, and no thread of theirs is left."""
    yield
    assert_no_gossip_threads()


def wrap(module: nn.Module, group: dist.ProcessGroup, **options: Any) -> BilatGossipDataParallel:
    """The wrapper on a group of the tests; every rank keeps its own start."""
    return BilatGossipDataParallel(module, process_group=group, **{"init_sync": False, **options})


def engine_of(wrapper: BilatGossipDataParallel) -> BilateralEngine:
    """Its engine."""
    return cast(BilateralEngine, wrapper._engine)


def is_active(wrapper: BilatGossipDataParallel) -> bool:
    """Whether this rank asks."""
    return engine_of(wrapper)._asker is not None


class Meeting:
    """All ranks go on until the last of those with a task has done it."""

    def __init__(self, num_ranks: int) -> None:
        self._barrier = threading.Barrier(num_ranks)
        self._left = num_ranks
        self._lock = threading.Lock()
        self._deadline = time.monotonic() + 4 * PATIENCE
        self._computing = threading.Event()

    def wait(self) -> None:
        """For all ranks."""
        self._barrier.wait(PATIENCE)

    def run(self, step: Callable[[], object], is_done: Callable[[], bool]) -> None:
        """`step()` until `is_done()` on this rank and on all others."""
        has_told = False
        while self._left:
            assert time.monotonic() < self._deadline, "no progress"
            step()
            self._computing.wait(5e-4)  # lets go of the interpreter, as kernels do
            if not has_told and is_done():
                has_told = True
                with self._lock:
                    self._left -= 1


def one_exchange(wrapper: BilatGossipDataParallel, meeting: Meeting) -> None:
    """Each active rank asks once and is answered, no rank has anything in flight; collective."""
    if not is_active(wrapper):
        wrapper(X)
    meeting.wait()
    if is_active(wrapper):
        wrapper(X)
    wrapper.settle()


# No update is lost.


@pytest.mark.parametrize(("n", "num_exchanges"), [(1, 0), (2, 200), (3, 200), (4, 1000), (5, 200)])
def test_without_gradients_the_sum_stays_and_the_spread_vanishes(n: int, num_exchanges: int) -> None:
    """So many concurrent exchanges, while training threads apply what they bring."""
    meeting = Meeting(n)

    def body(group: dist.ProcessGroup) -> tuple[Tensor, Tensor, float, int]:
        wrapper = wrap(mlp(group.rank()), group)
        start = flatten(wrapper.module)
        share = num_exchanges // (n // 2) if is_active(wrapper) else 0
        meeting.run(lambda: wrapper(X), lambda: wrapper.comm_stats()["num_rounds"] >= share)
        wrapper.settle()
        assert not engine_of(wrapper).is_in_flight
        end = flatten(wrapper.module)
        distance = wrapper.consensus_distance()
        wrapper.close()
        return start, end, distance, int(wrapper.comm_stats()["num_rounds"])

    results = run_ranks(n, body)
    start, end = torch.stack([result[0] for result in results]), torch.stack([result[1] for result in results])
    assert (start.sum(0) - end.sum(0)).abs().max() < 1e-6 * n * start.abs().max()
    assert n == 1 or (start - start.mean(0)).abs().max() > 0.1
    assert (end - end.mean(0)).abs().max() < 1e-4
    assert max(result[2] for result in results) < 1e-4
    counts = [result[3] for result in results]
    assert sum(counts[1::2]) == sum(counts[0::2]) >= num_exchanges


@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize("make", [sgd, adamw])
def test_the_mean_is_that_of_all_applied_updates(make: Callable[..., torch.optim.Optimizer], n: int) -> None:
    """sum_i x_i = sum_i x_i(0) + sum of what each optimizer has added, to its own rank, at its own pace."""
    meeting = Meeting(n)

    def body(group: dist.ProcessGroup) -> tuple[Tensor, Tensor, Tensor]:
        wrapper = wrap(mlp(group.rank()).double(), group)
        optimizer = make(wrapper)
        start = flatten(wrapper.module)
        updates = torch.zeros_like(start)
        steps = 0

        def step() -> None:
            nonlocal steps
            loss_of(wrapper, group.rank(), steps).backward()
            before = flatten(wrapper.module)
            optimizer.step()
            updates.add_(flatten(wrapper.module) - before)
            optimizer.zero_grad()
            steps += 1
            if steps % 7 == group.rank():
                wrapper.eval()
                wrapper.train()

        meeting.run(step, lambda: steps >= 30 * (1 + group.rank()) and engine_of(wrapper).t >= 40 * is_active(wrapper))
        wrapper.settle()
        end = flatten(wrapper.module)
        with wrapper.averaged():
            averaged = flatten(wrapper.module)
        assert torch.equal(flatten(wrapper.module), end)
        wrapper.close()
        return start + updates, end, averaged

    results = run_ranks(n, body)
    expected = sum(result[0] for result in results) / n
    assert updates_matter(results)
    for _, _, averaged in results:
        torch.testing.assert_close(averaged, expected, rtol=0, atol=1e-12)


def updates_matter(results: list[tuple[Tensor, Tensor, Tensor]]) -> bool:
    """Whether ranks have really exchanged: no rank is where its own updates alone would have led it."""
    return all((alone - end).abs().max() > 1e-3 for alone, end, _ in results)


class Constant(nn.Module):
    """All entries of its parameter are equal, always: a torn model would show at once."""

    def __init__(self, start: float, length: int = 50_000) -> None:
        super().__init__()
        self.values = nn.Parameter(torch.full((length,), start, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        assert (self.values == self.values[0]).all(), "torn"
        return self.values.sum() * x


@pytest.mark.parametrize("n", [2, 3])
def test_no_model_is_torn(n: int) -> None:
    """Neither what a rank trains, nor what it receives from a peer that takes steps meanwhile."""
    meeting = Meeting(n)

    def body(group: dist.ProcessGroup) -> tuple[float, int]:
        wrapper = wrap(Constant(float(group.rank())), group)
        optimizer = torch.optim.SGD(wrapper.parameters(), lr=1.0)
        deliver, num_received = engine_of(wrapper).mailbox.deliver, 0

        def check(correction: FlatVector, *, alpha: float) -> None:
            nonlocal num_received
            (values,) = correction.segments
            assert (values == values[0]).all(), "torn"
            num_received += 1
            deliver(correction, alpha=alpha)

        engine_of(wrapper).mailbox.deliver = check  # type: ignore[method-assign]

        def step() -> None:
            wrapper(torch.ones(())).backward()
            optimizer.step()
            optimizer.zero_grad()

        meeting.run(step, lambda: num_received >= 50)
        wrapper.close()
        return float(cast(Constant, wrapper.module).values.detach()[0]), num_received

    assert all(count >= 50 for _, count in run_ranks(n, body))


def test_exchanges_during_eval_are_applied_afterwards() -> None:
    meeting = Meeting(2)

    def body(group: dist.ProcessGroup) -> Tensor:
        wrapper = wrap(fill_(nn.Linear(3, 2).double(), group.rank()), group)
        start = flatten(wrapper.module)
        if group.rank() == 0:
            wrapper(X.double())
            wrapper.eval()
            meeting.wait()
            meeting.wait()
            assert torch.equal(flatten(wrapper.module), start)  # nothing changes while it is evaluated
        else:
            meeting.wait()
            for _ in range(5):
                wrapper(X.double())
                wrapper.flush()
            assert not torch.equal(flatten(wrapper.module), start)
            meeting.wait()
        wrapper.train()
        wrapper.settle()
        end = flatten(wrapper.module)
        wrapper.close()
        return torch.stack([start, end])

    starts, ends = torch.stack(run_ranks(2, body)).unbind(1)
    torch.testing.assert_close(starts.sum(0), ends.sum(0), rtol=0, atol=1e-14)
    torch.testing.assert_close(ends[0], ends[1], rtol=0, atol=1e-14)


def test_a_peer_that_trains_on_while_this_one_is_averaged_changes_nothing() -> None:
    """The average is lent; who asks in the meantime hears that there is nothing to say."""
    meeting = Meeting(2)

    def body(group: dist.ProcessGroup) -> Tensor:
        wrapper = wrap(mlp(group.rank()).double(), group)
        start = flatten(wrapper.module)
        with wrapper.averaged():
            average = flatten(wrapper.module)
            if group.rank() == 0:
                meeting.wait()
                assert torch.equal(flatten(wrapper.module), average)
        assert torch.equal(flatten(wrapper.module), start)
        if group.rank() == 1:
            for _ in range(5):
                wrapper(X.double())
                wrapper.flush()
            assert engine_of(wrapper).t == 5
            assert torch.equal(flatten(wrapper.module), start)
            meeting.wait()
        meeting.wait()
        one_exchange_double(wrapper, meeting)
        end = flatten(wrapper.module)
        wrapper.close()
        return torch.stack([start, end, average])

    starts, ends, averages = torch.stack(run_ranks(2, body)).unbind(1)
    torch.testing.assert_close(averages[0], starts.mean(0), rtol=0, atol=1e-14)
    torch.testing.assert_close(ends, averages, rtol=0, atol=1e-14)


def one_exchange_double(wrapper: BilatGossipDataParallel, meeting: Meeting) -> None:
    """As `one_exchange`, for a model in float64."""
    if not is_active(wrapper):
        wrapper(X.double())
    meeting.wait()
    if is_active(wrapper):
        wrapper(X.double())
    wrapper.settle()


def test_average_is_not_undone_by_what_peers_had_published_before() -> None:
    meeting = Meeting(2)

    def body(group: dist.ProcessGroup) -> Tensor:
        wrapper = wrap(mlp(group.rank()).double(), group)
        if group.rank() == 0:
            wrapper(X.double())  # publishes what is not the average
        wrapper.average_()
        average = flatten(wrapper.module)
        meeting.wait()
        if group.rank() == 1:
            for _ in range(5):
                wrapper(X.double())
                wrapper.flush()
        wrapper.settle()
        assert torch.equal(flatten(wrapper.module), average)
        wrapper.close()
        return average

    first, second = run_ranks(2, body)
    assert torch.equal(first, second)


def test_settle_leaves_nothing_in_flight_anywhere() -> None:
    """Each active rank has just asked when all ranks settle, again and again."""

    def body(group: dist.ProcessGroup) -> list[Tensor]:
        wrapper = wrap(mlp(group.rank()).double(), group)
        states = [flatten(wrapper.module)]
        for i in range(40):
            for _ in range((group.rank() + i) % 3 + 1):
                wrapper(X.double())
            wrapper.settle()  # those who come out of it first ask the others at once
            assert not engine_of(wrapper).is_in_flight
            states.append(flatten(wrapper.module))
        wrapper.close()
        return states

    states = torch.stack([torch.stack(one) for one in run_ranks(4, body)])
    assert (states.sum(0) - states[:, 0].sum(0)).abs().max() < 1e-13


@pytest.mark.parametrize("graph", [DynamicBipartiteExponentialGraph, DynamicBipartiteLinearGraph])
def test_other_graphs_and_weights(graph: type[DynamicBipartiteExponentialGraph]) -> None:
    meeting = Meeting(4)

    def body(group: dist.ProcessGroup) -> Tensor:
        wrapper = wrap(mlp(group.rank()).double(), group, mixing=MetropolisHastingsMixing(graph(4)))
        start = flatten(wrapper.module)
        for _ in range(6):
            one_exchange_double(wrapper, meeting)
        end = flatten(wrapper.module)
        wrapper.close()
        return torch.stack([start, end])

    starts, ends = torch.stack(run_ranks(4, body)).unbind(1)
    torch.testing.assert_close(ends.sum(0), starts.sum(0), rtol=0, atol=1e-13)
    assert (ends - ends.mean(0)).norm() < 0.3 * (starts - starts.mean(0)).norm()


# Like other wrappers.


def test_a_world_of_one_is_plain_training() -> None:
    bare, module = net(), net()
    wrapper = wrap(module, solo_group())
    first, second = sgd(bare), sgd(module)
    for step in range(5):
        train_step(bare, first, 0, step)
        train_step(wrapper, second, 0, step)
    wrapper.settle()
    assert gossip_threads() == []
    wrapper.close()
    assert torch.equal(flatten(bare), flatten(module))
    assert wrapper.comm_stats()["bytes_sent"] == 0


def test_all_dtypes_meet() -> None:
    meeting = Meeting(2)
    dtypes = (torch.float32, torch.float64, torch.bfloat16)

    class Towers(nn.Module):
        """One layer per dtype."""

        def __init__(self, start: float) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(3, 2, dtype=dtype) for dtype in dtypes])
            for parameter in self.parameters():
                parameter.detach().fill_(start)

        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([layer(x.to(next(layer.parameters()).dtype)).double() for layer in self.layers])

    def body(group: dist.ProcessGroup) -> None:
        wrapper = wrap(Towers(8.0 * group.rank()), group)
        one_exchange(wrapper, meeting)
        for parameter, dtype in zip(wrapper.module.parameters(), dtypes, strict=False):
            assert (parameter == 4.0).all(), dtype
        assert {parameter.dtype for parameter in wrapper.parameters()} == set(dtypes)
        wrapper.close()

    run_ranks(2, body)


@pytest.mark.parametrize("gossip_buffers", [True, False])
def test_buffers_are_averaged_or_stay_local(gossip_buffers: bool) -> None:
    meeting = Meeting(2)

    def body(group: dist.ProcessGroup) -> tuple[float, int]:
        model = net(group.rank())
        norm = model.get_submodule("norm")
        norm.momentum = 0.0  # type: ignore[assignment]
        model.get_buffer("norm.running_mean").fill_(float(group.rank()))
        wrapper = wrap(model, group, gossip_buffers=gossip_buffers)
        one_exchange(wrapper, meeting)
        wrapper.close()
        return float(model.get_buffer("norm.running_mean")[0]), int(model.get_buffer("norm.num_batches_tracked"))

    assert run_ranks(2, body) == ([(0.5, 1)] * 2 if gossip_buffers else [(0.0, 1), (1.0, 1)])


@pytest.mark.parametrize("num_exchanges", [1, 3])
def test_variances_that_decay_while_an_exchange_is_under_way_stay_variances(num_exchanges: int) -> None:
    """A BatchNorm at 100 says so, gets 1 from its peer, and is at .01 when that is there."""
    meeting = Meeting(2)

    def body(group: dist.ProcessGroup) -> list[float]:
        norm = nn.BatchNorm1d(3).double()
        norm.momentum = 1.0
        wrapper = wrap(norm, group)
        data = torch.tensor([[-1.0], [1.0]], dtype=torch.float64).expand(2, 3) * 10.0 ** group.rank() / 2**0.5
        for _ in range(3):
            wrapper(data)  # and publishes, at the second one
            wrapper.settle()
        deliver, num_delivered = engine_of(wrapper).mailbox.deliver, 0
        wrapper(data)
        meeting.wait()

        def decay_then_deliver(correction: FlatVector, *, alpha: float) -> None:
            nonlocal num_delivered
            norm.running_var.fill_(0.01)  # type: ignore[union-attr]
            deliver(correction, alpha=alpha)
            num_delivered += 1

        engine_of(wrapper).mailbox.deliver = decay_then_deliver  # type: ignore[method-assign]
        meeting.wait()
        for _ in range(num_exchanges * is_active(wrapper)):
            wrapper(data)
            wrapper.flush()
        meeting.wait()
        wrapper.settle()
        assert num_delivered >= num_exchanges
        variances = norm.running_var.tolist()  # type: ignore[union-attr]
        wrapper.eval()
        assert wrapper(data).isfinite().all()
        wrapper.close()
        return variances

    for variances in run_ranks(2, body):
        assert min(variances) > 0.0099


def test_frozen_parameters_stay() -> None:
    meeting = Meeting(2)

    def body(group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
        model = mlp(group.rank())
        model.get_submodule("0").requires_grad_(False)
        frozen = model.get_parameter("0.weight").clone()
        wrapper = wrap(model, group)
        one_exchange(wrapper, meeting)
        wrapper.close()
        assert torch.equal(model.get_parameter("0.weight"), frozen)
        return model.get_parameter("2.weight").detach(), frozen

    first, second = run_ranks(2, body)
    torch.testing.assert_close(first[0], second[0])
    assert not torch.equal(first[1], second[1])


def test_forwards_of_one_step_ask_once() -> None:
    """The rest of its forwards are in `no_sync()`; a step asks once at most, and not while an answer is out."""
    meeting = Meeting(2)

    def body(group: dist.ProcessGroup) -> None:
        wrapper = wrap(mlp(group.rank()), group)
        if is_active(wrapper):
            meeting.wait()
            for step in range(4):
                with wrapper.no_sync():
                    for _ in range(3):
                        wrapper(X)
                        assert engine_of(wrapper).t == step + 1
                wrapper(X)
                wrapper.flush()
        else:
            wrapper(X)
            meeting.wait()
        wrapper.settle()
        assert wrapper.comm_stats()["num_rounds"] == 4
        wrapper.close()

    run_ranks(2, body)


def test_backward_through_a_graph_from_before_a_correction_raises() -> None:
    def body(group: dist.ProcessGroup) -> None:
        wrapper = wrap(mlp(group.rank()), group)
        early = loss_of(wrapper, 0, 0)
        wrapper.settle()
        wrapper(X)
        wrapper.settle()
        assert wrapper.comm_stats()["num_rounds"] > 0
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            early.backward()
        wrapper.close()

    run_ranks(2, body)


def test_a_copy_is_local() -> None:
    meeting = Meeting(2)

    def body(group: dist.ProcessGroup) -> None:
        wrapper = wrap(mlp(group.rank()), group)
        one_exchange(wrapper, meeting)
        num_threads = len(gossip_threads())
        twin = copy.deepcopy(wrapper)
        meeting.wait()
        assert len(gossip_threads()) == num_threads
        values = flatten(twin.module)
        assert torch.equal(values, flatten(wrapper.module))
        assert twin.get_extra_state() == wrapper.get_extra_state()
        for _ in range(3):
            wrapper(X)
            twin(X)
        wrapper.settle()
        assert torch.equal(flatten(twin.module), values)
        twin.load_state_dict(wrapper.state_dict())
        assert torch.equal(flatten(twin.module), flatten(wrapper.module))
        twin.close()
        wrapper.close()

    run_ranks(2, body)


def test_another_dtype_after_wrapping_is_refused() -> None:
    wrapper = wrap(mlp(), solo_group())
    wrapper(X)
    wrapper.double()
    with pytest.raises(ValueError, match=r"dtypes, trained tensors or device .*changed .*before wrapping"):
        wrapper(X.double())
    wrapper.close()


# Checkpoints.


def test_a_run_goes_on_where_it_stopped() -> None:
    """Parameters, rounds and momentum are those of the checkpoint, and no mass is lost between."""
    meeting = Meeting(2)

    def body(group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
        def start(seed: int) -> tuple[BilatGossipDataParallel, torch.optim.Optimizer]:
            wrapper = wrap(mlp(seed).double(), group)
            return wrapper, sgd(wrapper)

        wrapper, optimizer = start(group.rank())
        for step in range(10):
            train_step(wrapper, optimizer, group.rank(), step)
        wrapper.settle()
        file = io.BytesIO()
        torch.save({"model": wrapper.state_dict(), "optimizer": optimizer.state_dict()}, file)
        saved, t = flatten(wrapper.module), engine_of(wrapper).t
        wrapper.close()
        meeting.wait()

        other, its_optimizer = start(77 + group.rank())
        if group.rank() == 1:  # trains before rank 0 has loaded anything
            load(other, its_optimizer, file)
            for _ in range(3):
                other(X.double())
                other.flush()
            meeting.wait()
        else:
            meeting.wait()
            load(other, its_optimizer, file)
        assert torch.equal(flatten(other.module), saved)
        assert engine_of(other).t == t + 3 * group.rank()
        meeting.wait()
        updates = saved.clone()
        for step in range(10):
            loss_of(other, group.rank(), step).backward()
            if step == 0:
                other.flush()
                meeting.wait()  # both have something to say from here on, so that the next one is an exchange
            before = flatten(other.module)
            its_optimizer.step()
            its_optimizer.zero_grad()
            updates += flatten(other.module) - before
        other.settle()
        assert other.comm_stats()["num_rounds"] > 0
        end = flatten(other.module)
        other.close()
        return updates, end

    first, second = run_ranks(2, body)
    torch.testing.assert_close(first[0] + second[0], first[1] + second[1], rtol=0, atol=1e-13)


def load(wrapper: BilatGossipDataParallel, optimizer: torch.optim.Optimizer, file: io.BytesIO) -> None:
    """Take back what was saved."""
    file.seek(0)
    state = torch.load(file, weights_only=True)
    wrapper.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])


@pytest.mark.filterwarnings("ignore:the state dict holds no gossip state")  # on both threads, who share the filters
def test_what_is_loaded_does_not_meet_what_was_published_before() -> None:
    """Also in the middle of a run: the next exchange is with the loaded model, not with the old one."""
    meeting = Meeting(2)

    def body(group: dist.ProcessGroup) -> Tensor:
        wrapper = wrap(mlp(group.rank()).double(), group)
        for _ in range(3):
            wrapper(X.double())
        meeting.wait()
        wrapper.load_state_dict({f"module.{key}": x for key, x in mlp(5).double().state_dict().items()})
        meeting.wait()
        if group.rank() == 1:
            for _ in range(3):
                wrapper(X.double())
                wrapper.flush()
        wrapper.settle()
        one_exchange_double(wrapper, meeting)
        end = flatten(wrapper.module)
        wrapper.close()
        return end

    for end in run_ranks(2, body):
        assert torch.equal(end, flatten(mlp(5).double()))


# Nobody waits.


def test_a_passive_rank_answers_while_its_training_is_stuck() -> None:
    is_over = threading.Event()

    def body(group: dist.ProcessGroup) -> int:
        wrapper = wrap(mlp(group.rank()), group)
        if group.rank() == 0:
            wrapper(X)
            is_over.set()
            is_over.clear()
            assert is_over.wait(PATIENCE)
        else:
            deadline = time.monotonic() + PATIENCE
            while wrapper.comm_stats()["num_rounds"] < 20:  # rank 0 may not have begun
                assert time.monotonic() < deadline
                wrapper(X)
                wrapper.flush()
            is_over.set()
        wrapper.settle()
        num_rounds = int(wrapper.comm_stats()["num_rounds"])
        wrapper.close()
        return num_rounds

    assert run_ranks(2, body) == [20, 20]


class Gate:
    """Holds the listener of a passive rank just before it reads y."""

    def __init__(self, wrapper: BilatGossipDataParallel) -> None:
        self.entered, self.opened = threading.Event(), threading.Event()
        self._mailbox = engine_of(wrapper).mailbox
        self._snapshot = self._mailbox.snapshot
        self._mailbox.snapshot = self._wait  # type: ignore[method-assign]

    def _wait(self, out: FlatVector) -> None:
        self.entered.set()
        assert self.opened.wait(PATIENCE), "nobody opened the gate"
        self._snapshot(out)


def test_training_goes_on_while_no_answer_comes_and_staleness_says_so() -> None:
    gates: list[Gate] = []
    ready, asked = threading.Event(), threading.Event()

    def body(group: dist.ProcessGroup) -> tuple[float, float, float]:
        wrapper = wrap(mlp(group.rank()), group)
        if group.rank() == 0:
            wrapper(X)
            gates.append(Gate(wrapper))
            ready.set()
            for _ in range(2):
                assert asked.wait(PATIENCE)
                wrapper(X)  # no lock is held over the network
        else:
            snapshot = engine_of(wrapper).mailbox.snapshot

            def tell(out: FlatVector) -> None:
                snapshot(out)
                asked.set()

            engine_of(wrapper).mailbox.snapshot = tell  # type: ignore[method-assign]
            assert ready.wait(PATIENCE)
            before = flatten(wrapper.module)
            wrapper(X)
            assert asked.wait(PATIENCE)
            assert gates[0].entered.wait(PATIENCE)
            for _ in range(3):
                wrapper(X)
                assert engine_of(wrapper).t == 1
                assert torch.equal(flatten(wrapper.module), before)
            gates[0].opened.set()
            wrapper.flush()
            assert not torch.equal(flatten(wrapper.module), before)
        wrapper.settle()
        stats = wrapper.comm_stats()
        wrapper.close()
        return stats["num_rounds"], stats["mean_staleness"], stats["max_staleness"]

    passive, active = run_ranks(2, body)
    assert active == (1.0, 3.0, 3.0)
    assert passive[0] == 1.0


def test_bytes_are_those_of_headers_replies_and_models() -> None:
    meeting = Meeting(2)

    def body(group: dist.ProcessGroup) -> tuple[float, float, int]:
        wrapper = wrap(mlp(group.rank()), group)
        assert wrapper.comm_stats()["bytes_sent"] == 0
        if not is_active(wrapper):
            wrapper(X)
        meeting.wait()
        for _ in range(5 * is_active(wrapper)):
            wrapper(X)
            wrapper.flush()
        meeting.wait()
        wrapper.flush()
        stats = wrapper.comm_stats()
        meeting.wait()  # who closes says goodbye, which the other one returns
        wrapper.close()
        return stats["num_rounds"], stats["bytes_sent"], wrapper._buffer.vector.layout.num_bytes

    passive, active = run_ranks(2, body)
    assert passive == (5, 5 * (REPLY_BYTES + passive[2]), passive[2])
    assert active == (5, 5 * (HEADER_BYTES + active[2]), active[2])


# What is refused.


@pytest.mark.parametrize(
    ("graph", "message"),
    [
        (lambda: RingGraph(4), r"got RingGraph\(4.*, expected a bipartite graph with one peer per round"),
        (lambda: DynamicBipartiteExponentialGraph(4, peers_per_itr=2), r"expected a bipartite graph with one peer"),
        (lambda: NetworkXGraph(nx.path_graph(4)), r"expected a bipartite graph with one peer per round"),
        (lambda: DynamicBipartiteExponentialGraph(6), r"got a graph of 6 ranks, expected 4"),
    ],
)
def test_graphs_without_pairs_are_refused(graph: Callable[[], Any], message: str) -> None:
    def body(group: dist.ProcessGroup) -> None:
        with pytest.raises(ValueError, match=message):
            wrap(mlp(), group, graph=graph())

    run_ranks(4, body)


def test_a_group_that_cannot_listen_is_refused() -> None:
    group = NamedGroup("mpi4py", dist.HashStore(), 0, 1, TIMEOUT)
    with pytest.raises(ValueError, match=r"backend for cpu tensors is \w+, expected gloo.*new_group\(backend='gloo'\)"):
        wrap(mlp(), group)


@pytest.mark.parametrize("difference", ["options", "model", "graph"])
def test_ranks_that_disagree_are_named(difference: str) -> None:
    def body(group: dist.ProcessGroup) -> None:
        is_odd_one = group.rank() == 2
        model = net() if is_odd_one and difference == "model" else mlp()
        options: dict[str, Any] = {}
        if is_odd_one and difference == "options":
            options["gossip_buffers"] = False
        if is_odd_one and difference == "graph":
            options["graph"] = DynamicBipartiteCompleteGraph(4)
        with pytest.raises(ValueError, match=rf"ranks do not agree with rank 0: rank 2: {difference}"):
            wrap(model, group, **options)

    run_ranks(4, body)


# The end.


def test_close_is_quick_idempotent_and_final() -> None:
    def body(group: dist.ProcessGroup) -> None:
        wrapper = wrap(mlp(group.rank()), group)
        wrapper(X)
        for _ in range(2):
            wrapper.close()
        values = flatten(wrapper.module)
        rounds = wrapper.comm_stats()["num_rounds"]
        wrapper(X)
        wrapper.eval()
        wrapper.state_dict()
        assert wrapper.comm_stats()["num_rounds"] == rounds
        assert torch.equal(flatten(wrapper.module), values)

    run_ranks(4, body)


def test_a_passive_rank_that_closes_early_is_no_error_for_the_others() -> None:
    has_begun = threading.Barrier(4)

    def body(group: dist.ProcessGroup) -> tuple[Tensor, Tensor, int]:
        wrapper = wrap(mlp(group.rank()).double(), group)
        start = flatten(wrapper.module)
        wrapper(X.double())
        has_begun.wait(PATIENCE)
        deadline = time.monotonic() + PATIENCE
        while is_active(wrapper) and len(engine_of(wrapper)._gone) < 2:
            assert time.monotonic() < deadline
            wrapper(X.double())
            wrapper.flush()
        t = engine_of(wrapper).t
        for _ in range(5 * is_active(wrapper)):
            wrapper(X.double())
            wrapper.flush()
            assert engine_of(wrapper)._asking is None  # nobody is left to ask
        wrapper.close()
        return start, flatten(wrapper.module), t

    results = run_ranks(4, body)
    starts, ends, _ = zip(*results, strict=True)
    torch.testing.assert_close(sum(starts), sum(ends), rtol=0, atol=1e-13)


def test_an_active_rank_that_closes_early_is_no_error_for_the_others() -> None:
    meeting = Meeting(3)

    def body(group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
        wrapper = wrap(mlp(group.rank()).double(), group, graph=DynamicBipartiteCompleteGraph(3))
        start = flatten(wrapper.module)
        for _ in range(5):
            wrapper(X.double())
        meeting.wait()
        if is_active(wrapper):
            wrapper.close()
        meeting.wait()
        for _ in range(5):
            wrapper(X.double())
        wrapper.close()
        return start, flatten(wrapper.module)

    starts, ends = zip(*run_ranks(3, body), strict=True)
    torch.testing.assert_close(sum(starts), sum(ends), rtol=0, atol=1e-13)


def test_an_error_of_the_listener_is_raised_in_training() -> None:
    def body(group: dist.ProcessGroup) -> None:
        wrapper = wrap(mlp(group.rank()), group)
        if group.rank() == 0:

            def fail(correction: FlatVector, *, alpha: float) -> None:
                raise MemoryError("no room for a correction")

            engine_of(wrapper).mailbox.deliver = fail  # type: ignore[method-assign]
            wrapper(X)
            for thread in engine_of(wrapper)._background._threads:
                thread.join(PATIENCE)
                assert not thread.is_alive()
            for _ in range(2):
                with pytest.raises(MemoryError, match="no room for a correction"):
                    wrapper(X)
            assert not wrapper._engine.is_in_flight
            assert wrapper.state_dict()  # a last checkpoint
            with pytest.raises(MemoryError, match="no room for a correction"):
                wrapper.settle()
        else:
            deadline = time.monotonic() + PATIENCE
            while wrapper.comm_stats()["num_rounds"] < 1:
                assert time.monotonic() < deadline
                wrapper(X)
                wrapper.flush()
        wrapper.close()

    run_ranks(2, body)


def test_an_error_of_the_listener_that_nobody_has_seen_is_raised_on_close() -> None:
    def body(group: dist.ProcessGroup) -> None:
        wrapper = wrap(mlp(group.rank()), group)
        if group.rank() == 0:
            engine_of(wrapper)._background.fail(MemoryError("no room for a correction"))
            with pytest.raises(MemoryError, match="no room"):
                wrapper.close()
        wrapper.close()

    run_ranks(2, body)


def test_an_interrupted_flush_loses_nothing() -> None:
    may_answer = threading.Event()

    def body(group: dist.ProcessGroup) -> Tensor:
        wrapper = wrap(mlp(group.rank()).double(), group)
        start = flatten(wrapper.module)
        if group.rank() == 0:
            wrapper(X.double())
            may_answer.set()
        else:
            assert may_answer.wait(PATIENCE)
            wrapper(X.double())
            asking = engine_of(wrapper)._asking
            assert asking is not None

            def interrupt() -> float:
                del asking.result
                raise KeyboardInterrupt

            asking.result = interrupt  # type: ignore[assignment, method-assign]
            with pytest.raises(KeyboardInterrupt):
                wrapper.flush()
            assert wrapper._engine.is_in_flight
        wrapper.settle()
        wrapper.close()
        return flatten(wrapper.module) - start

    first, second = run_ranks(2, body)
    assert first.abs().max() > 0
    torch.testing.assert_close(first, -second, rtol=0, atol=1e-13)


def test_a_passive_rank_that_closes_while_it_answers_says_what_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gossip_modules.ad_psgd.exchange.GOODBYE_TIMEOUT", timedelta(milliseconds=100))
    is_answering, is_over = threading.Event(), threading.Event()

    def body(group: dist.ProcessGroup) -> None:
        wrapper = wrap(mlp(group.rank()), group)
        mailbox = engine_of(wrapper).mailbox
        if group.rank() == 0:
            snapshot = mailbox.snapshot

            def late(out: FlatVector) -> None:
                is_answering.set()
                assert is_over.wait(PATIENCE)
                snapshot(out)

            mailbox.snapshot = late  # type: ignore[method-assign]
            wrapper(X)
            assert is_answering.wait(PATIENCE)
            with pytest.warns(UserWarning, match="closed while a peer was being answered"):
                engine_of(wrapper).close()
            is_over.set()
        else:
            while not is_answering.is_set():
                wrapper(X)
                is_answering.wait(1e-3)
            assert is_over.wait(PATIENCE)
            wrapper.flush()
        wrapper.close()

    run_ranks(2, body)


def test_a_wrapper_that_is_lost_leaves_its_peers() -> None:
    def body(group: dist.ProcessGroup) -> None:
        wrapper = wrap(mlp(group.rank()), group)
        wrapper(X)
        wrapper.settle()
        if group.rank() == 0:
            with pytest.warns(ResourceWarning, match=r"a BilatGossipDataParallel was lost without close\(\)"):
                del wrapper
            return
        deadline = time.monotonic() + PATIENCE
        while not engine_of(wrapper)._gone:
            assert time.monotonic() < deadline
            wrapper(X)
            wrapper.flush()
        wrapper.close()

    run_ranks(2, body)


# Who dies or does not answer is named, by all.


def hang_up(wrapper: BilatGossipDataParallel) -> None:
    """What the others see at the end of a process: all connections of this rank close."""
    transport = wrapper._transport
    with pytest.raises(TimeoutError):
        transport.exchange({}, {1 - transport.rank % 2: [X]}, tag=9).wait(timedelta(milliseconds=1))
    engine_of(wrapper)._background.close(PATIENCE)
    with pytest.raises(ConnectionError):
        wrapper.close()


def error_of(call: Callable[[], object]) -> tuple[BaseException, float]:
    """What it raises in the end, called again and again, and after how many seconds."""
    start = time.monotonic()
    while time.monotonic() < start + PATIENCE:
        try:
            call()
        except (ConnectionError, TimeoutError) as error:
            return error, time.monotonic() - start
        threading.Event().wait(1e-3)
    raise AssertionError("no error")


@pytest.mark.parametrize("graph", [DynamicBipartiteExponentialGraph, DynamicBipartiteLinearGraph])
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("doing", ["training", "settling", "averaging"])
def test_all_name_a_rank_that_has_died_at_once(
    victim: int, graph: type[DynamicBipartiteExponentialGraph], doing: str
) -> None:
    """Also those who never talk to it, and no other, although all who know end too."""
    meeting = Meeting(4)

    def body(group: dist.ProcessGroup) -> float:
        # A collective that is given up stays with its thread until this time is over.
        wrapper = wrap(mlp(group.rank()), group, graph=graph(4), timeout=timedelta(seconds=10))
        for _ in range(3):
            wrapper(X)
        wrapper.settle()
        meeting.wait()
        if group.rank() == victim:
            hang_up(wrapper)
            return 0.0
        calls = {
            "training": lambda: wrapper(X),
            "settling": wrapper.settle,
            "averaging": wrapper.consensus_distance,
        }
        error, seconds = error_of(calls[doing])
        assert isinstance(error, ConnectionError)
        assert re.match(rf"rank {group.rank()}: rank {victim} has died: ", str(error)), error
        with pytest.raises(ConnectionError, match=f"rank {victim} has died"):
            wrapper(X)
        assert wrapper.state_dict()  # a last checkpoint
        wrapper.close()
        return seconds

    assert max(run_ranks(4, body)) < 5.0  # of 10 to wait


def test_an_exchange_has_the_timeout_and_all_name_who_does_not_answer() -> None:
    """Rank 0 has stopped in the middle of an exchange; the others hear of it from rank 1, or 3."""
    gates: list[Gate] = []
    meeting, is_over = Meeting(4), Meeting(4)
    seconds = 1.0

    def body(group: dist.ProcessGroup) -> float:
        wrapper = wrap(mlp(group.rank()), group, timeout=timedelta(seconds=seconds))
        wrapper(X)
        wrapper.settle()
        if group.rank() == 0:
            wrapper(X)
            gates.append(Gate(wrapper))
        meeting.wait()
        if group.rank() == 0:
            is_over.wait()
            gates[0].opened.set()
            error, _ = error_of(lambda: wrapper(X))  # its own clock, or what the others say
            assert re.search(r"^rank 0: (rank [13] has given this rank up|answering .* has not ended)", str(error)), (
                error
            )
            wrapper.close()
            return 0.0

        def step() -> None:
            wrapper(X)
            wrapper.flush()

        error, waited = error_of(step)
        assert isinstance(error, TimeoutError)
        assert re.search(
            r"rank 0 has not ended after|rank 0 has not answered for \d\.\d s: rank \d says so", str(error)
        ), error
        is_over.wait()
        wrapper.close()
        return waited

    assert max(run_ranks(4, body)) < seconds + 1.0


def test_a_copy_does_not_outlive_the_threads() -> None:
    """After a failure and a close no thread is left, and the wrapper can still be copied."""

    def body(group: dist.ProcessGroup) -> None:
        wrapper = wrap(mlp(group.rank()), group)
        if group.rank() == 1:
            hang_up(wrapper)
            return
        error_of(lambda: wrapper(X))
        twin = copy.deepcopy(wrapper)
        twin(X)
        wrapper.close()

    run_ranks(2, body)
    assert_no_gossip_threads()


def test_the_state_of_another_engine_is_refused() -> None:
    other = GossipDataParallel(mlp(), process_group=solo_group())
    wrapper = wrap(mlp(), solo_group())
    with pytest.raises(ValueError, match="got the state of a LockstepEngine, expected that of a BilateralEngine"):
        wrapper.load_state_dict(other.state_dict())
    with pytest.raises(ValueError, match="got gossip state without a push-sum weight, expected that of a GossipData"):
        other.load_state_dict(wrapper.state_dict())
    wrapper.close()
    other.close()


# Processes: a peer that dies or hangs.

NUM_RANKS = 4
FIRST_STEPS = 10
MISSED_NOBODY = "missed nobody"
SECONDS = 2.0


def lose_a_peer(rank: int, victim: int, how: int, seconds: float) -> str:
    """Train; one rank gets a signal when all have met. Returns after so many seconds, unless somebody is missed."""
    wrapper = BilatGossipDataParallel(mlp(), timeout=timedelta(seconds=SECONDS))
    optimizer = sgd(wrapper)
    for step in range(FIRST_STEPS):
        train_step(wrapper, optimizer, rank, step)
        wrapper.flush()
    dist.barrier()
    if rank == victim:
        os.kill(os.getpid(), how)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        train_step(wrapper, optimizer, rank, 0)
    wrapper.close()
    return MISSED_NOBODY


def outcomes_of(victim: int, how: signal.Signals) -> list[Outcome]:
    """How the ranks ended; all of them did, by themselves (a stopped one is killed by the helper)."""
    hung = (victim,) if how is signal.SIGSTOP else ()
    body_seconds = SECONDS + 1.5 if (victim, how) != (1, signal.SIGSTOP) else 0.5
    return run_processes(NUM_RANKS, lose_a_peer, victim, int(how), body_seconds, expect_result=False, hung=hung)


@pytest.mark.e2e
@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_is_killed_is_named_by_all(victim: int) -> None:
    outcomes = outcomes_of(victim, signal.SIGKILL)
    for rank in {*range(NUM_RANKS)} - {victim}:
        pattern = rf"^ConnectionError: rank {rank}: rank {victim} has died: "
        assert re.search(pattern, outcomes[rank].error), outcomes[rank]
        assert outcomes[rank].exit_code == 1


@pytest.mark.e2e
def test_a_passive_rank_that_stops_is_named_by_all() -> None:
    outcomes = outcomes_of(0, signal.SIGSTOP)
    for rank in (1, 2, 3):
        pattern = rf"^TimeoutError: rank {rank}: .*rank 0 has not (ended after|answered for \d\.\d s: rank \d says so)"
        assert re.search(pattern, outcomes[rank].error), outcomes[rank]
        assert outcomes[rank].exit_code == 1


@pytest.mark.e2e
def test_an_active_rank_that_stops_between_exchanges_is_missed_by_nobody() -> None:
    outcomes = outcomes_of(1, signal.SIGSTOP)
    for rank in (0, 2, 3):
        assert (outcomes[rank].result, outcomes[rank].exit_code) == (MISSED_NOBODY, 0), outcomes[rank]
