"""Chunks on the wire and in the overlapping engine, against real and scripted networks."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from functools import partial
from itertools import islice
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from gossip_modules import GossipDataParallel, RingGraph, Schedule, connect
from gossip_modules.extend import FlatVector, OverlapEngine, PushPull, PushSum
from gossip_modules.flat.layout import FlatLayout
from gossip_modules.graph_manager import NPeerDynamicDirectedExponentialGraph
from gossip_modules.mixing_manager import MixingWeights, UniformMixing
from gossip_modules.transport.deadline import Deadline
from gossip_modules.transport.exchange import MAX_STAGED, Staging
from gossip_modules.transport.traffic import PeerTraffic
from tests.harness.problems import loss_of, sgd, train
from tests.harness.progress import engine_of, flight_of, local_of, thread_of
from tests.harness.ranks import CPU, TIMEOUT, HangUp, assert_no_gossip_threads, run_ranks
from tests.harness.reference import Oracle, flatten, uniform
from tests.library.engine.vectors import BOTH, CHUNK, DIGRAPH, random_vector, wide

SECONDS = 0.4


PATIENCE = 10.0


# On the wire.


def numbered(rank: int, k: int, length: int = 4) -> Tensor:
    """Chunk k of this rank."""
    return torch.arange(length) + 100.0 * rank + 10.0 * k


def test_a_chunk_arrives_before_the_next_is_filled() -> None:
    """So filling and mixing hide under the transfer: rank 1 fills chunk k + 1 when rank 0 has got chunk k."""
    arrived = [threading.Event() for _ in range(4)]

    def body(group: dist.ProcessGroup) -> None:
        transport = connect(group, module_device=CPU, timeout=TIMEOUT)
        peer = 1 - transport.rank
        sends, recvs = [torch.zeros(4) for _ in arrived], [torch.zeros(4) for _ in arrived]
        calls: list[int] = []

        def fill(k: int) -> None:
            calls.append(k)
            if transport.rank == 1 and k > 0:
                assert arrived[k - 1].wait(PATIENCE), f"chunk {k - 1} waits for chunk {k}"
            sends[k].copy_(numbered(transport.rank, k))

        pending = transport.exchange({peer: sends}, {peer: recvs}, tag=0, fill=fill)
        assert calls == [0, 1, 2, 3]
        order = []
        for k in pending.arrivals():
            assert torch.equal(recvs[k], numbered(peer, k))
            order.append(k)
            if transport.rank == 0:
                arrived[k].set()
        assert order == [0, 1, 2, 3]
        assert transport.num_bytes_sent == 4 * 16

    run_ranks(2, body)


def test_a_chunk_has_arrived_when_all_peers_have_sent_it() -> None:
    """Also where peers send different numbers of tensors, and where a rank only sends."""

    def body(group: dist.ProcessGroup) -> None:
        transport = connect(group, module_device=CPU, timeout=TIMEOUT)
        if transport.rank == 0:
            recvs = {1: [torch.zeros(4) for _ in range(3)], 2: [torch.zeros(4) for _ in range(2)]}
            seen = []
            for k in transport.exchange({}, recvs, tag=0).arrivals():
                seen.append(k)
                assert all(torch.equal(xs[k], numbered(j, k)) for j, xs in recvs.items() if k < len(xs))
            assert seen == [0, 1, 2]
        else:
            sends = [numbered(transport.rank, k) for k in range(4 - transport.rank)]
            assert list(transport.exchange({0: sends}, {}, tag=0).arrivals()) == list(range(4 - transport.rank))
        assert list(transport.exchange({}, {}, tag=1).arrivals()) == []

    run_ranks(3, body)


def test_wait_goes_on_where_arrivals_were_left() -> None:
    def body(group: dist.ProcessGroup) -> None:
        transport = connect(group, module_device=CPU, timeout=TIMEOUT)
        peer = 1 - transport.rank
        recvs = [torch.zeros(4) for _ in range(3)]
        sends = [numbered(transport.rank, k) for k in range(3)]
        pending = transport.exchange({peer: sends}, {peer: recvs}, tag=0)
        assert next(iter(pending.arrivals())) == 0
        assert next(iter(pending.arrivals())) == 1
        pending.wait()
        assert torch.equal(recvs[2], numbered(peer, 2))
        assert list(pending.arrivals()) == []
        pending.wait()

    run_ranks(2, body)


@pytest.mark.parametrize("is_dead", [False, True])
@pytest.mark.parametrize("is_iterated", [False, True])
def test_a_rank_that_breaks_off_in_mid_vector_is_named(is_dead: bool, is_iterated: bool) -> None:
    """Of three chunks the first comes: rank 1 then dies, or says nothing more for longer than the timeout."""
    timeout = timedelta(seconds=20 if is_dead else SECONDS)

    def body(group: dist.ProcessGroup) -> None:
        transport = connect(group, module_device=CPU, timeout=timeout)
        if transport.rank == 1:
            first = numbered(1, 0)
            group.send([first], 0, transport.wire_tag(7, 16, total_bytes=3 * 16)).wait(TIMEOUT)
            if is_dead:
                raise HangUp
            return
        recvs = [torch.zeros(4) for _ in range(3)]
        pending = transport.exchange({}, {1: recvs}, tag=7)
        pattern = r"^rank 0: round 7, chunk [123] of 3: receive from rank 1 failed after \d+\.\d s"
        seen: list[int] = []
        with pytest.raises((ConnectionError, TimeoutError), match=pattern) as caught:
            seen.extend(pending.arrivals()) if is_iterated else pending.wait()
        assert caught.type is (ConnectionError if is_dead else TimeoutError)
        assert seen in ([], [0]), "a connection that closes may take with it what has come"

    run_ranks(2, body)


def test_vectors_of_two_lengths_do_not_meet() -> None:
    """The chunks of the shorter one are as long as the first ones of the longer, but they are not the whole."""

    def body(group: dist.ProcessGroup) -> None:
        gossiper, rank = PushPull(chunk_bytes=CHUNK), group.rank()
        transport = connect(group, module_device=CPU, timeout=timedelta(seconds=SECONDS))
        gossiper.bind(UniformMixing(RingGraph(2)), transport)
        x = torch.full((CHUNK // 4 * (2 + rank),), float(rank))
        pattern = rf"^rank {rank}: round 0, chunk \d of {2 + rank}: (send to|receive from) rank {1 - rank} failed"
        with pytest.raises((ConnectionError, TimeoutError), match=pattern):
            gossiper.mix(x, 0)
        assert bool((x == rank).all())

    run_ranks(2, body)


def test_buffers_of_a_long_round_are_kept() -> None:
    """Tensors that cannot go on the wire: here those of the CPU, on a wire that is no device at all."""
    staging, tensors = Staging(torch.device("meta")), [torch.zeros(4) for _ in range(3 * MAX_STAGED)]
    for _ in range(2):
        staging.expect(len(tensors))
        buffers = [staging.buffer_for(x, keep=True) for x in tensors]
    assert all(
        staging.buffer_for(x, fill=True, keep=True) is buffer for x, buffer in zip(tensors, buffers, strict=True)
    )
    others = [torch.zeros(8) for _ in range(40 * MAX_STAGED)]
    for x in others:
        staging.buffer_for(x, keep=True)
    assert len(staging._buffers) <= 12 * MAX_STAGED
    assert Staging(CPU).buffer_for(tensors[0]) is tensors[0]


def train_both(group: dist.ProcessGroup, **options: Any) -> list[Any]:
    """The same training whole and in chunks."""
    results = []
    for chunks in BOTH:
        gossiper = PushSum(**chunks)
        wrapper = GossipDataParallel(
            wide(group.rank()), algorithm=gossiper, init_sync=False, process_group=group, **options
        )
        assert len(gossiper.chunks(local_of(wrapper).vector)) == (7 if chunks else 1)
        steps = train(wrapper, sgd(wrapper.module), group.rank(), 6)
        wrapper.close()
        stats = wrapper.comm_stats()
        results.append((steps, flatten(wrapper.module), stats["bytes_sent"], stats["num_rounds"]))
        assert stats["wait_seconds"] > 0
    return results


@pytest.mark.parametrize(
    ("graph", "overlap"), [(NPeerDynamicDirectedExponentialGraph(4), False), (DIGRAPH, True)], ids=str
)
def test_training_in_chunks_gives_the_bits_of_the_whole(graph: Any, overlap: bool) -> None:
    for schedule in (Schedule(), Schedule(gossip_every=2, average_every=2)):
        body = partial(train_both, graph=graph, overlap=overlap, schedule=schedule)
        for (steps, end, *counts), (other_steps, other_end, *other_counts) in run_ranks(4, body):
            assert all(torch.equal(x, y) for x, y in zip(steps, other_steps, strict=True))
            assert torch.equal(end, other_end)
            assert counts == other_counts


@pytest.mark.parametrize("max_staleness", [0, 2])
def test_overlap_in_chunks_equals_the_oracle(max_staleness: int) -> None:
    def body(group: dist.ProcessGroup) -> Any:
        gossiper = PushSum(chunk_bytes=CHUNK)
        wrapper = GossipDataParallel(
            wide(group.rank()),
            graph=DIGRAPH,
            algorithm=gossiper,
            overlap=True,
            max_staleness=max_staleness,
            init_sync=False,
            process_group=group,
        )
        engine = engine_of(wrapper)
        engine.overlap.is_eager = False
        steps = train(wrapper, sgd(wrapper.module), group.rank(), 9)
        wrapper.close()
        return steps

    ranks = run_ranks(4, body)
    models = [wide(rank).double() for rank in range(4)]
    optimizers = [sgd(model) for model in models]
    oracle = Oracle(models, optimizers, uniform(DIGRAPH), overlap=True, max_staleness=max_staleness)
    for k, step in enumerate(oracle.run(9, loss_of)):
        for i, want in enumerate(step):
            got = torch.stack([rank[i][k] for rank in ranks])
            torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)


# The engine, against a network that answers at once; the peer always sends PEER.

PEER = 10.0


class Scripted:
    """Rank 0 of two. `error` is raised after `num_sent` chunks of the next round."""

    timeout, is_elastic = TIMEOUT, False
    lost: frozenset[int] = frozenset()

    def __init__(self) -> None:
        self.rank, self.world_size, self.num_bytes_sent = 0, 2, 0
        self.device, self.traffic = CPU, PeerTraffic()
        self.names: Sequence[int] = (0, 1)
        self.error: BaseException | None = None
        self.num_sent = 0
        self.sent: list[float] = []
        self.before_fill: Callable[[], None] = lambda: None

    def exchange(
        self,
        sends: Mapping[int, Sequence[Tensor]],
        recvs: Mapping[int, Sequence[Tensor]],
        *,
        tag: int,
        what: str = "",
        fill: Callable[[int], None] | None = None,
    ) -> Scripted:
        """See `Transport`."""
        assert fill is not None
        self.before_fill()
        for k, x in enumerate(sends[1]):
            if self.error is not None and k == self.num_sent:
                raise self.error
            fill(k)
            self.sent.append(float(x.view(torch.float32)[0]))
        self.recvs = recvs[1]
        return self

    def wait(self, timeout: timedelta | None = None) -> None:
        """See `Pending`."""
        list(self.arrivals())

    def arrivals(self) -> Iterator[int]:
        """See `Pending`."""
        for k, x in enumerate(self.recvs):
            x.view(torch.float32).fill_(PEER)
            yield k

    def within(self, deadline: Deadline) -> AbstractContextManager[None]:
        """See `Transport`."""
        return nullcontext()

    def all_reduce(self, x: Tensor, *, what: str) -> None:
        """See `Transport`."""

    def barrier(self, *, what: str) -> None:
        """See `Transport`."""

    def broadcast(self, x: Tensor, *, source: int, what: str) -> None:
        """See `Transport`."""

    def all_to_all(self, out: Tensor, x: Tensor, *, what: str) -> None:
        """See `Transport`."""

    def all_gather(self, out: Tensor, x: Tensor, *, what: str) -> None:
        """See `Transport`."""


NUM_CHUNKS = 3


class BreakingOff(Scripted):
    """`error` is raised when `num_sent` chunks have come."""

    def exchange(self, sends: Any, recvs: Mapping[int, Sequence[Tensor]], **options: Any) -> BreakingOff:
        """See `Transport`."""
        self.recvs = recvs[1]
        return self

    def arrivals(self) -> Iterator[int]:
        """See `Pending`."""
        yield from islice(super().arrivals(), self.num_sent)
        assert self.error is not None
        raise self.error


class Forgetful(UniformMixing):
    """Takes over what the peer says."""

    def weights(self, rank: int, t: int) -> MixingWeights:
        """See `MixingManager`."""
        return MixingWeights(own=0.0, inp={1 - rank: 1.0})


@pytest.mark.parametrize("error", [ConnectionError("rank 1 has gone"), KeyboardInterrupt()], ids=repr)
@pytest.mark.parametrize("num_sent", range(NUM_CHUNKS))
@pytest.mark.parametrize("make", [UniformMixing, Forgetful])
def test_a_synchronous_round_that_breaks_off_leaves_no_vector_torn(
    make: type[UniformMixing], num_sent: int, error: BaseException
) -> None:
    gossiper, transport = PushSum(chunk_bytes=CHUNK), BreakingOff()
    transport.error, transport.num_sent = error, num_sent
    gossiper.bind(make(RingGraph(2)), transport)
    s = random_vector(0, FlatLayout.of([(torch.float32, CHUNK // 4 * NUM_CHUNKS)]))
    before = s.clone()
    with pytest.raises(type(error)):
        gossiper.mix(s, 0)
    torch.testing.assert_close(s.segments, before.segments, rtol=1e-6, atol=2e-6)  # PEER's last digit
    assert torch.equal(s.push_sum_weight, before.push_sum_weight)


def scripted() -> tuple[OverlapEngine, Scripted, FlatVector]:
    """An engine, its network, and x: 2.0 everywhere."""
    gossiper, transport = PushPull(chunk_bytes=CHUNK), Scripted()
    gossiper.bind(UniformMixing(RingGraph(2)), transport)
    return OverlapEngine(gossiper, Schedule()), transport, FlatVector.over(torch.full((CHUNK // 4 * NUM_CHUNKS,), 2.0))


def value(x: FlatVector) -> float:
    """Of a vector of equal elements."""
    assert len(x.segments[0].unique()) == 1, f"a torn vector: {x.segments[0].unique()}"
    return float(x.segments[0][0])


def test_the_gossip_thread_corrects_copies_and_sends() -> None:
    engine, transport, x = scripted()
    assert not engine.round(x)
    assert engine.stats.wait_seconds > 0
    x.segments[0].add_(1.0)
    assert engine.round(x)
    assert value(x) == 2.0 + 1.0 + (PEER - 2.0) / 2
    assert engine.flush(x)
    assert value(x) == 7.0 + (PEER - 7.0) / 2
    assert transport.sent == [2.0] * NUM_CHUNKS + [7.0] * NUM_CHUNKS
    assert (engine.t, engine.step, engine.stats.num_rounds, engine.stats.max_staleness) == (2, 2, 2, 0)
    engine.close()
    assert_no_gossip_threads()


@pytest.mark.parametrize("is_submitted", [False, True])
def test_an_interrupt_between_applying_and_submitting_loses_nothing(
    is_submitted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, transport, x = scripted()
    engine.round(x)
    thread = thread_of(engine)
    submit = thread.submit

    def interrupted(*args: Any) -> None:
        if is_submitted:
            submit(*args)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(thread, "submit", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.round(x)
    assert engine.is_in_flight
    assert engine.flush(x)  # as who saves a checkpoint
    assert value(x) == 6.0 + (PEER - 6.0) / 2, "the correction was lost, or applied twice"
    assert transport.sent == [2.0] * NUM_CHUNKS + [6.0] * NUM_CHUNKS
    assert not engine.flush(x)
    engine.round(x)
    engine.flush(x)
    assert value(x) == 9.0
    engine.close()


def test_an_interrupt_leaves_no_vector_torn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control-C while the gossip thread works on x: training gets it when x is whole."""
    engine, transport, x = scripted()
    engine.round(x)
    go_on = threading.Event()
    transport.before_fill = lambda: assert_set(go_on)

    class Interrupted(threading.Event):
        """Its first wait."""

        is_first = True

        def wait(self, timeout: float | None = None) -> bool:
            if self.is_first:
                self.is_first = False
                go_on.set()
                raise KeyboardInterrupt
            return super().wait(PATIENCE)

    with monkeypatch.context() as patch:
        patch.setattr("gossip_modules.engine.overlap.threading.Event", Interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.round(x)
    assert value(x) == 6.0
    engine.flush(x)
    assert value(x) == 8.0
    engine.close()


def assert_set(event: threading.Event) -> None:
    """In time."""
    assert event.wait(PATIENCE), "nobody went on"


@pytest.mark.parametrize("num_sent", range(NUM_CHUNKS))
def test_a_round_that_fails_while_it_is_sent_leaves_x_whole(num_sent: int) -> None:
    """The correction of the round before is applied in full, once; the error is raised by who waits for the round."""
    engine, transport, x = scripted()
    engine.round(x)
    flight_of(engine).future.exception(PATIENCE)
    transport.error, transport.num_sent = ConnectionError("rank 1 has gone"), num_sent
    assert engine.round(x)
    assert value(x) == 6.0
    with pytest.raises(ConnectionError, match="rank 1 has gone"):
        engine.flush(x)
    assert value(x) == 6.0
    assert not engine.is_in_flight
    engine.close()
    assert_no_gossip_threads()


def test_a_copy_of_an_engine_goes_on_alone() -> None:
    engine, _, x = scripted()
    engine.round(x)
    engine.flush(x)
    twin, y = copy.deepcopy(engine), copy.deepcopy(x)
    twin.round(y)
    twin.flush(y)
    assert (value(x), value(y)) == (6.0, 8.0)
    assert (engine.t, twin.t) == (1, 2)
    engine.close()
    twin.close()
    assert_no_gossip_threads()


def test_rounds_that_are_late_are_filled_too() -> None:
    """max_staleness: the correction lands in the forward that starts the next round, or before it."""
    gossiper, transport = PushPull(chunk_bytes=CHUNK), Scripted()
    gossiper.bind(UniformMixing(RingGraph(2)), transport)
    for is_eager in (True, False):
        engine = OverlapEngine(gossiper, Schedule(), max_staleness=1, is_eager=is_eager)
        x = FlatVector.over(torch.full((CHUNK // 4 * NUM_CHUNKS,), 2.0))
        written = []
        for _ in range(5):
            written.append(engine.round(x))
            if engine.is_in_flight:
                flight_of(engine).future.exception(PATIENCE)
        engine.flush(x)
        assert written == ([False, True, False, True, False] if is_eager else [False, False, True, False, True])
        assert value(x) == 9.0
        assert engine.stats.max_staleness == int(not is_eager)
        engine.close()
