"""When rounds run: against a network that answers when the test says so."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from gossip_modules import GossipDataParallel, RingGraph, Schedule
from gossip_modules.engine.lockstep import LockstepEngine
from gossip_modules.extend import FlatVector, OverlapEngine, PushSum, SyncEngine
from gossip_modules.mixing_manager import UniformMixing
from gossip_modules.transport.deadline import Deadline
from gossip_modules.transport.traffic import PeerTraffic
from tests.harness.problems import fill_, loss_of, mlp
from tests.harness.progress import flight_of, local_of, thread_of
from tests.harness.ranks import HangUp, assert_no_gossip_threads, gossip_threads, run_ranks

PEER = 10.0  # what the peer always sends
PATIENCE = 20.0


class ScriptedTransport:
    """Rank 0 of two; the message of round t arrives when `gates[t]` is set, or is the error in `errors[t]`."""

    timeout, is_elastic = timedelta(seconds=PATIENCE), False
    lost: frozenset[int] = frozenset()

    def __init__(self) -> None:
        self.rank, self.world_size, self.num_bytes_sent = 0, 2, 0
        self.device = torch.device("cpu")
        self.names: Sequence[int] = (0, 1)
        self.traffic = PeerTraffic()
        self.gates = [threading.Event() for _ in range(64)]  # made at once: two threads ask for the same one
        self.errors: dict[int, Exception] = {}
        self.posted: list[int] = []
        self.sent: list[Tensor] = []

    def __deepcopy__(self, memo: dict[int, object]) -> ScriptedTransport:
        return self

    def exchange(
        self,
        sends: Mapping[int, Sequence[Tensor]],
        recvs: Mapping[int, Sequence[Tensor]],
        *,
        tag: int,
        what: str = "",
        fill: Callable[[int], None] | None = None,
    ) -> ScriptedPending:
        """See `Transport`."""
        assert fill is None, "vectors of one chunk are copied by the training thread"
        self.posted.append(tag)
        self.sent.append(sends[1][0].view(torch.float32).clone())
        return ScriptedPending(self, tag, recvs[1][0])

    def within(self, deadline: Deadline) -> AbstractContextManager[None]:
        """See `Transport`."""
        return nullcontext()

    def all_reduce(self, x: Tensor, *, what: str) -> None:
        """See `Transport`."""
        x += PEER

    def barrier(self, *, what: str) -> None:
        """See `Transport`."""

    def broadcast(self, x: Tensor, *, source: int, what: str) -> None:
        """See `Transport`."""

    def all_to_all(self, out: Tensor, x: Tensor, *, what: str) -> None:
        """See `Transport`."""

    def all_gather(self, out: Tensor, x: Tensor, *, what: str) -> None:
        """See `Transport`."""


class ScriptedPending:
    """A message on its way."""

    lost: frozenset[int] = frozenset()

    def __init__(self, transport: ScriptedTransport, t: int, inbox: Tensor) -> None:
        self.transport, self.t, self.inbox = transport, t, inbox

    def wait(self, timeout: timedelta | None = None) -> None:
        """See `Pending`."""
        assert self.transport.gates[self.t].wait(PATIENCE), f"nobody opened round {self.t}"
        if self.t in self.transport.errors:
            raise self.transport.errors[self.t]
        self.inbox.view(torch.float32).fill_(PEER)

    def arrivals(self) -> Iterator[int]:
        """See `Pending`."""
        self.wait()
        yield 0


def scripted(num_open: int = 0) -> tuple[PushSum, ScriptedTransport]:
    """A gossiper over a scripted network whose first rounds are open."""
    gossiper, transport = PushSum(), ScriptedTransport()
    for t in range(num_open):
        transport.gates[t].set()
    gossiper.bind(UniformMixing(RingGraph(2)), transport)
    return gossiper, transport


def vector(value: float = 0.0) -> FlatVector:
    """x: four float32."""
    return FlatVector.over(torch.full((4,), value))


def value(x: FlatVector) -> float:
    """The value of a vector of equal elements."""
    assert len(x.segments[0].unique()) == 1
    return float(x.segments[0][0])


def arrive(engine: OverlapEngine) -> None:
    """Return when the round in flight is complete."""
    flight_of(engine).future.exception(PATIENCE)


def make_engine(overlap: bool, gossiper: PushSum, schedule: Schedule) -> LockstepEngine:
    """Either engine."""
    return OverlapEngine(gossiper, schedule) if overlap else SyncEngine(gossiper, schedule)


# The law.


def test_synchronous_rounds_mix_at_once() -> None:
    gossiper, _ = scripted(num_open=2)
    engine, x = SyncEngine(gossiper, Schedule()), vector(2.0)
    assert engine.round(x)
    assert value(x) == 6.0  # (2 + 10) / 2
    assert not engine.is_in_flight
    assert not engine.flush(x)
    assert engine.round(x)
    assert value(x) == 8.0
    assert (engine.t, engine.step, engine.stats.num_rounds, engine.stats.max_staleness) == (2, 2, 2, 0)


def test_overlapped_rounds_keep_the_steps_taken_meanwhile() -> None:
    """x <- x + (W - I) s: s = 2, x has taken a step of 1 since."""
    gossiper, transport = scripted()
    engine, x = OverlapEngine(gossiper, Schedule()), vector(2.0)
    assert not engine.round(x)
    assert engine.is_in_flight
    x.segments[0].add_(1.0)
    transport.gates[0].set()
    assert engine.round(x)
    assert value(x) == 2.0 + 1.0 + (10.0 - 2.0) / 2
    transport.gates[1].set()
    assert engine.flush(x)
    assert value(x) == 7.0 + (10.0 - 7.0) / 2
    assert torch.stack(transport.sent)[:, 0].tolist() == [2.0, 7.0]
    assert not engine.flush(x)
    assert value(x) == 8.5
    engine.close()


@pytest.mark.parametrize("overlap", [False, True])
def test_schedule_skips_and_averages(overlap: bool) -> None:
    gossiper, transport = scripted(num_open=9)
    engine = make_engine(overlap, gossiper, Schedule(gossip_every=2, average_every=2))
    x = vector(2.0)
    values = []
    for _ in range(4):
        engine.round(x)
        engine.flush(x)
        values.append(value(x))
    assert values == [6.0, 6.0, 8.0, 8.0]  # gossip, skip, the mean of 6 and 10, skip
    assert transport.posted == [0]
    assert engine.t == 2
    engine.close()


def test_a_step_on_a_changed_layout_gets_a_new_snapshot() -> None:
    gossiper, _ = scripted(num_open=2)
    engine = OverlapEngine(gossiper, Schedule())
    for x in (vector(2.0), FlatVector.over(torch.full((6,), 2.0))):
        engine.round(x)
        engine.flush(x)
        assert value(x) == 6.0
    engine.close()


# Staleness.


@pytest.mark.parametrize("max_staleness", range(5))
@pytest.mark.parametrize("is_eager", [False, True])
def test_a_round_that_never_arrives_early_is_applied_at_its_last_forward(max_staleness: int, is_eager: bool) -> None:
    gossiper, transport = scripted()
    engine = OverlapEngine(gossiper, Schedule(), max_staleness=max_staleness, is_eager=is_eager)
    x = vector()
    for t in range(3):
        if t:
            transport.gates[t - 1].set()  # only now: all forwards before went on without it
        assert engine.round(x) is (t > 0)
        for _ in range(max_staleness):
            assert not engine.round(x)
    assert engine.t == 3
    assert (engine.stats.num_rounds, engine.stats.max_staleness) == (2, max_staleness)
    assert engine.stats.total_staleness == 2 * max_staleness
    transport.gates[2].set()
    engine.flush(x)
    engine.close()


def test_training_waits_at_the_last_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    gossiper, transport = scripted()
    engine, x = OverlapEngine(gossiper, Schedule(), max_staleness=1), vector()
    engine.round(x)
    engine.round(x)
    assert engine.stats.wait_seconds == 0
    result, is_waiting = thread_of(engine).result, threading.Event()

    def wait(*args: Any, **kwargs: Any) -> float:
        is_waiting.set()
        return result(*args, **kwargs)

    monkeypatch.setattr(thread_of(engine), "result", wait)
    training = threading.Thread(target=engine.round, args=(x,))
    training.start()
    assert is_waiting.wait(PATIENCE)
    assert training.is_alive()
    assert value(x) == 0.0
    transport.gates[0].set()
    training.join(PATIENCE)
    assert not training.is_alive()
    assert value(x) == 5.0
    assert engine.stats.wait_seconds > 0
    transport.gates[1].set()
    engine.flush(x)
    engine.close()


@pytest.mark.parametrize("lateness", [0, 1, 2])
def test_eager_rounds_are_applied_as_soon_as_they_are_there(lateness: int) -> None:
    gossiper, transport = scripted()
    engine, x = OverlapEngine(gossiper, Schedule(), max_staleness=2), vector()
    engine.round(x)
    for _ in range(lateness):
        assert not engine.round(x)
    transport.gates[0].set()
    arrive(engine)
    assert engine.round(x)
    assert engine.stats.total_staleness == lateness
    assert value(x) == 5.0
    for _ in range(1 - lateness):
        assert not engine.round(x)  # the next one starts at its fixed step, early or not
    assert engine.is_in_flight is (lateness == 2)
    engine.round(x)
    assert engine.t == 2
    transport.gates[1].set()
    engine.flush(x)
    engine.close()


def test_fixed_staleness_ignores_early_arrival() -> None:
    gossiper, _ = scripted(num_open=9)
    engine, x = OverlapEngine(gossiper, Schedule(), max_staleness=2, is_eager=False), vector()
    written = []
    for _ in range(7):
        written.append(engine.round(x))
        if engine.is_in_flight:
            arrive(engine)
    assert written == [False, False, False, True, False, False, True]
    engine.flush(x)
    engine.close()


def test_a_sparser_schedule_than_the_staleness_stays() -> None:
    gossiper, transport = scripted(num_open=9)
    engine, x = OverlapEngine(gossiper, Schedule(gossip_every=3), max_staleness=1), vector()
    for _ in range(7):
        engine.round(x)
    engine.flush(x)
    assert transport.posted == [0, 1, 2]
    engine.close()


# Errors and the end.


@pytest.mark.parametrize("flush", [False, True])
def test_an_error_of_the_gossip_thread_is_raised_in_training(flush: bool) -> None:
    gossiper, transport = scripted(num_open=2)
    transport.errors[0] = TimeoutError("rank 1 is late")
    engine, x = OverlapEngine(gossiper, Schedule()), vector(2.0)
    engine.round(x)
    with pytest.raises(TimeoutError, match="rank 1 is late"):
        (engine.flush if flush else engine.round)(x)
    assert value(x) == 2.0
    engine.close()
    assert_no_gossip_threads()


@pytest.mark.parametrize("is_complete", [False, True])
def test_an_interrupt_while_waiting_keeps_the_correction(is_complete: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control-C before the round is complete, or just after: who then saves a checkpoint flushes again."""
    gossiper, transport = scripted()
    engine, x = OverlapEngine(gossiper, Schedule()), vector(2.0)
    engine.round(x)

    def interrupted(*_: Any, **__: Any) -> float:
        if is_complete:
            transport.gates[0].set()
            arrive(engine)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(thread_of(engine), "result", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.flush(x)
    assert engine.is_in_flight
    assert value(x) == 2.0
    transport.gates[0].set()
    assert engine.flush(x)
    assert value(x) == 6.0
    assert engine.stats.num_rounds == 1
    engine.close()


def test_close_is_idempotent_and_ends_the_thread() -> None:
    gossiper, transport = scripted()
    engine, x = OverlapEngine(gossiper, Schedule()), vector()
    engine.close()
    engine.round(x)
    assert [thread.name for thread in gossip_threads()] == ["gossip-0"]
    assert all(thread.daemon for thread in gossip_threads())
    engine.close()
    engine.close()
    transport.gates[0].set()
    assert_no_gossip_threads()
    SyncEngine(*scripted()[:1], Schedule()).close()


def test_a_wrapper_raises_the_error_of_its_thread_and_closes() -> None:
    """End to end: the peer hangs up while a round is under way."""

    def body(group: dist.ProcessGroup) -> None:
        wrapper = GossipDataParallel(
            mlp(),
            overlap=True,
            graph=RingGraph(2),
            process_group=group,
            init_sync=False,
        )
        if local_of(wrapper).transport.rank == 1:
            raise HangUp
        loss_of(wrapper, 0, 0)
        with pytest.raises(ConnectionError, match=r"rank 0: round 0: .*rank 1 failed after"):
            loss_of(wrapper, 0, 1)
        wrapper.close()

    run_ranks(2, body)
    assert_no_gossip_threads()


# State and copies.


@pytest.mark.parametrize("overlap", [False, True])
def test_state_round_trips(overlap: bool) -> None:
    gossiper, transport = scripted(num_open=9)
    engine = make_engine(overlap, gossiper, Schedule(gossip_every=2))
    x = vector()
    for _ in range(5):
        engine.round(x)
        engine.flush(x)
    other = make_engine(overlap, gossiper, Schedule(gossip_every=2))
    other.load_state_dict(engine.state_dict())
    assert (other.t, other.step) == (3, 5)
    other.round(x)
    assert not other.is_in_flight
    other.round(x)
    other.flush(x)
    assert transport.posted == [0, 1, 2, 3]
    engine.close()
    other.close()


def test_deepcopy_has_no_thread_and_goes_on_alone() -> None:
    gossiper, _ = scripted(num_open=9)
    engine, x = OverlapEngine(gossiper, Schedule(), max_staleness=1), vector()
    engine.round(x)
    with pytest.raises(AssertionError, match="flush"):
        copy.deepcopy(engine)
    engine.flush(x)
    twin = copy.deepcopy(engine)
    assert twin.overlap is not None
    assert (twin.t, twin.step, twin.overlap.max_staleness) == (engine.t, engine.step, 1)
    assert len(gossip_threads()) == 1
    y = x.clone()
    for _ in range(3):
        twin.round(y)
    twin.flush(y)
    assert engine.t == 1
    assert value(x) == 5.0
    engine.close()
    twin.close()
    assert_no_gossip_threads()


def test_rounds_run_without_autograd() -> None:
    """Grad mode is per thread: parameters that require grad are written all the same."""

    def body(group: dist.ProcessGroup) -> None:
        model = fill_(torch.nn.Linear(3, 2), 0)
        wrapper = GossipDataParallel(model, overlap=True, process_group=group)
        for _ in range(3):
            wrapper(torch.ones(1, 3))
        wrapper.close()
        assert all(p.is_leaf and p.requires_grad for p in model.parameters())

    run_ranks(2, body)
