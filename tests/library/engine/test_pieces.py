"""Long vectors in pieces: the bits of the whole, an order, and errors that say where a message broke off."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from functools import partial
from itertools import islice, pairwise
from typing import Any

import networkx as nx
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from gossip_modules import (
    CompleteGraph,
    FlatVector,
    GossipDataParallel,
    LaplacianMixing,
    MatchaGraph,
    MetropolisHastingsMixing,
    MixingManager,
    MixingWeights,
    NetworkXGraph,
    NPeerDynamicDirectedExponentialGraph,
    OverlapEngine,
    PushPull,
    PushSum,
    RingGraph,
    Schedule,
    UniformMixing,
    connect,
    select_graph,
)
from gossip_modules.engine.overlap import _Filling
from gossip_modules.flat.layout import PIECE_ALIGNMENT, PIECE_BYTES, FlatLayout, Part
from gossip_modules.transport.staging import MAX_STAGED, Staging
from tests.harness.problems import fill_, loss_of, sgd, train
from tests.harness.ranks import CPU, TIMEOUT, HangUp, assert_no_gossip_threads, run_ranks, solo_group
from tests.harness.reference import Oracle, flatten, uniform

PIECE = PIECE_ALIGNMENT
BOTH: tuple[dict[str, Any], ...] = ({}, {"piece_bytes": PIECE})  # options of a gossiper: whole, in pieces
SECONDS = 0.4
PATIENCE = 10.0
DIGRAPH = NetworkXGraph(nx.DiGraph([(0, 1), (1, 2), (2, 3), (3, 0), (0, 2)]))
DTYPES = (torch.float32, torch.float64, torch.bfloat16)
LAYOUTS = {
    "one segment": FlatLayout.of([(torch.float32, 1003)]),
    "wide": FlatLayout.of([(torch.float32, 333), (torch.float64, 200)]),
    "mixed": FlatLayout.of([(torch.float32, 333), (torch.bfloat16, 711), (torch.float64, 97)], num_slices=2),
    "tails": FlatLayout.of([(torch.bfloat16, 1), (torch.float64, 65), (torch.float32, 129), (torch.float16, 131)]),
}
every_layout = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())


def random_vector(seed: int, layout: FlatLayout) -> FlatVector:
    """Values and weight from this seed."""
    generator = torch.Generator().manual_seed(seed)
    vector = FlatVector.zeros(layout, CPU)
    for segment in vector.segments:
        segment.copy_(torch.randn(segment.shape, generator=generator))
    vector.weight.copy_(torch.rand(1, generator=generator, dtype=torch.float64) + 0.5)
    return vector


def assert_same_bits(x: FlatVector, y: FlatVector) -> None:
    """Values and weight."""
    assert torch.equal(x.raw, y.raw)
    assert torch.equal(x.weight, y.weight)


# Cuts.


@every_layout
@pytest.mark.parametrize("num_bytes", [PIECE, 2 * PIECE, 5 * PIECE, PIECE_BYTES])
def test_pieces_partition_the_vector(layout: FlatLayout, num_bytes: int) -> None:
    places = layout.pieces(num_bytes)
    assert places[0][0] == 0
    assert places[-1][1] == layout.num_bytes
    assert all(stop == start for (_, stop), (start, _) in pairwise(places))
    assert all(0 < stop - start <= num_bytes for start, stop in places)
    vector = random_vector(0, layout)
    pieces = vector.pieces(num_bytes)
    assert len(pieces) == len(places)
    for dtype, whole in zip((s.dtype for s in layout.segments), vector.segments, strict=True):
        assert torch.equal(torch.cat([x for piece in pieces for x in piece.segments if x.dtype is dtype]), whole)


@every_layout
def test_cuts_keep_vectorised_loops_in_step(layout: FlatLayout) -> None:
    for start, _ in layout.pieces(PIECE)[1:]:
        segment = max((s for s in layout.segments if s.start <= start), key=lambda s: s.start)
        assert (start - segment.start) % PIECE_ALIGNMENT == 0


@pytest.mark.parametrize("num_bytes", [0, -PIECE, PIECE - 1, 64])
def test_other_sizes_are_refused(num_bytes: int) -> None:
    with pytest.raises(ValueError, match=rf"got piece_bytes={num_bytes}, expected a positive multiple of 256"):
        PushPull(piece_bytes=num_bytes)
    with pytest.raises(ValueError, match="got piece_bytes="):
        LAYOUTS["mixed"].pieces(num_bytes)


def test_pieces_share_memory_and_are_made_once() -> None:
    vector = random_vector(0, LAYOUTS["mixed"])
    pieces = vector.pieces(PIECE)
    assert vector.pieces(PIECE) is pieces
    assert vector.slice(1, 2) is vector.slice(1, 2)
    assert vector.slice(1, 2).pieces(PIECE) is vector.slice(1, 2).pieces(PIECE)
    for piece in pieces:
        piece.raw.fill_(7)
    assert bool((vector.raw == 7).all())
    assert vector.pieces(vector.layout.num_bytes) == (vector,)
    assert len(vector.pieces()) == 1, "no test vector is longer than a piece of real size"


def test_pieces_of_a_copy_are_those_of_the_copy() -> None:
    vector = random_vector(0, LAYOUTS["mixed"])
    before = [piece.raw.clone() for piece in vector.pieces(PIECE)]
    for twin in (copy.deepcopy(vector), vector.clone()):
        for piece in twin.pieces(PIECE):
            piece.raw.zero_()
        assert not twin.raw.any()
    assert all(torch.equal(piece.raw, x) for piece, x in zip(vector.pieces(PIECE), before, strict=True))


def test_pieces_follow_storage_that_is_replaced() -> None:
    vector = random_vector(0, LAYOUTS["mixed"])
    vector.pieces(PIECE)
    vector.raw = vector.raw.clone()
    vector.pieces(PIECE)[0].raw.zero_()
    assert not vector.raw[:PIECE].any()


# Arithmetic.

COEFFICIENTS = [(0.5, [0.5]), (0.2, [0.5, 0.3]), (1.0, []), (1.0, [0.0]), (-0.43, [0.7, 0.73]), (0.3, [0.9])]


@every_layout
@pytest.mark.parametrize(("own", "weights"), COEFFICIENTS)
def test_arithmetic_in_pieces_gives_the_bits_of_the_whole(layout: FlatLayout, own: float, weights: list[float]) -> None:
    others = [random_vector(1 + i, layout) for i in range(len(weights))]
    combined, pieced = random_vector(0, layout), random_vector(0, layout)
    combined.combine_(own, others, weights)
    for k, piece in enumerate(pieced.pieces(PIECE)):
        piece.combine_segments_(own, [other.pieces(PIECE)[k] for other in others], weights)
    pieced.combine_weight_(own, others, weights)
    assert_same_bits(pieced, combined)

    whole, pieced = random_vector(0, layout), random_vector(0, layout)
    alpha, factor = whole.difference_(own - 1, others, weights), pieced.factor(weights)
    assert alpha == (1.0 if factor is None else factor)
    for k, piece in enumerate(pieced.pieces(PIECE)):
        parts = [other.pieces(PIECE)[k] for other in others]
        piece.difference_segments_(own - 1, parts, weights, alpha=factor)
    pieced.difference_weight_(own - 1, others, weights, alpha=factor)
    assert_same_bits(pieced, whole)

    x, y = random_vector(9, layout), random_vector(9, layout)
    x.add_segments_(whole, alpha=alpha)
    for piece, part in zip(y.pieces(PIECE), pieced.pieces(PIECE), strict=True):
        piece.add_segments_(part, alpha=alpha)
    assert_same_bits(y, x)


@every_layout
@pytest.mark.parametrize("num_bytes", [64, 1 << 20])
def test_apply_and_refresh_is_an_addition_and_a_copy(
    layout: FlatLayout, num_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gossip_modules.flat.vector.CACHED_BYTES", num_bytes)
    x, correction = random_vector(0, layout), random_vector(1, layout)
    expected, weights = x.clone(), (x.weight.clone(), correction.weight.clone())
    expected.add_segments_(correction, alpha=0.3)
    x.apply_and_refresh_(correction, alpha=0.3)
    assert torch.equal(x.raw, expected.raw)
    assert torch.equal(correction.raw, expected.raw)
    assert (x.weight, correction.weight) == weights


def test_ever_more_pieces_are_filled_between_two_posts() -> None:
    layout = FlatLayout.of([(torch.float32, 12 * PIECE // 4)])
    x, s = random_vector(0, layout), random_vector(1, layout)
    expected = x.clone().add_(s, alpha=0.5)
    pieces = tuple(zip(x.pieces(PIECE), s.pieces(PIECE), strict=True))
    counts = []
    with _Filling(x, s, pieces, alpha=0.5) as filling:
        for k in range(5):
            filling.fill(k)
            counts.append(filling._num_done)
        assert filling._is_done.is_set(), "training goes on"
    assert counts == [1, 3, 7, 12, 12]
    assert_same_bits(x, expected)
    assert torch.equal(s.raw, x.raw)


# Rounds.

MIXINGS: dict[str, tuple[type[PushPull], MixingManager]] = {
    "one peer": (PushPull, UniformMixing(NPeerDynamicDirectedExponentialGraph(4))),
    "two peers": (PushSum, UniformMixing(CompleteGraph(4, peers_per_itr=2))),
    "irregular": (PushPull, MetropolisHastingsMixing(NetworkXGraph(nx.star_graph(3)))),
    "push-sum weights": (PushSum, UniformMixing(DIGRAPH)),
    "uneven peers": (PushSum, UniformMixing(NPeerDynamicDirectedExponentialGraph(4, peers_per_itr={0: 2, 2: 1}))),
}


def bound(gossiper: PushPull, mixing: MixingManager, group: dist.ProcessGroup) -> PushPull:
    """Ready to talk on a group of the tests."""
    gossiper.bind(mixing, connect(group, module_device=CPU, timeout=TIMEOUT))
    return gossiper


@pytest.mark.parametrize(("make", "mixing"), MIXINGS.values(), ids=MIXINGS.keys())
@pytest.mark.parametrize("name", ["one segment", "mixed"])
def test_rounds_in_pieces_give_the_bits_of_the_whole(make: type[PushPull], mixing: MixingManager, name: str) -> None:
    """Synchronous and as a correction, with as many bytes sent."""
    layout = LAYOUTS[name]

    def rounds(gossiper: PushPull, rank: int) -> list[FlatVector]:
        s, results = random_vector(rank, layout), []
        for t in range(3):
            c = s.clone()
            gossiper.start(c, 2 * t)
            alpha = gossiper.difference(c)
            results.append(c)
            s = s.clone().add_(c, alpha=alpha)
            results.append(gossiper.mix(s, 2 * t + 1).clone())
        return results

    def body(group: dist.ProcessGroup) -> None:
        whole, pieced = (bound(make(**options), mixing, group) for options in BOTH)
        x, y = rounds(whole, group.rank()), rounds(pieced, group.rank())
        assert len(pieced.pieces(x[0])) > 5
        for one, other in zip(x, y, strict=True):
            assert_same_bits(one, other)
        assert whole.transport.num_bytes_sent == pieced.transport.num_bytes_sent > 0

    run_ranks(4, body)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64, torch.complex128])
@pytest.mark.parametrize("shape", [(1,), (3, 100), (257,)])
def test_any_tensor_in_pieces(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    def body(group: dist.ProcessGroup) -> None:
        x = torch.randn(shape, generator=torch.Generator().manual_seed(group.rank()), dtype=dtype)
        mixing = UniformMixing(RingGraph(3, peers_per_itr=2))
        whole, pieced = (bound(PushSum(**options), mixing, group) for options in BOTH)
        assert torch.equal(whole.average(x, num_rounds=2), pieced.average(x, num_rounds=2))

    run_ranks(3, body)


def test_buffers_with_weights_of_their_own_wait_for_the_whole() -> None:
    mixing = LaplacianMixing(MatchaGraph(select_graph(0), budget=1.0))
    layout = FlatLayout.of([(torch.float32, [Part((30, 9)), Part((130,), is_buffer=True)])])

    def body(group: dist.ProcessGroup) -> None:
        whole, pieced = (bound(PushPull(**options), mixing, group) for options in BOTH)
        for step in (PushPull.finish, PushPull.difference):
            x, y = random_vector(group.rank(), layout), random_vector(group.rank(), layout)
            for gossiper, s in ((whole, x), (pieced, y)):
                gossiper.start(s, 0)
                step(gossiper, s)
            assert_same_bits(x, y)

    run_ranks(8, body)


def test_a_correction_with_weights_for_buffers_takes_no_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    mixing = LaplacianMixing(MatchaGraph(select_graph(0), budget=1.0))
    layout = FlatLayout.of([(torch.float32, [Part((30, 9)), Part((130,), is_buffer=True)]), (torch.bfloat16, 70)])
    monkeypatch.setattr(FlatVector, "clone", lambda _: pytest.fail("a copy of the model"))

    def body(group: dist.ProcessGroup) -> None:
        gossiper = bound(PushPull(), mixing, group)
        assert mixing.buffer_weights(group.rank(), 0) != mixing.weights(group.rank(), 0)
        x, y, c = (random_vector(group.rank(), layout) for _ in range(3))
        gossiper.start(x, 0)
        gossiper.finish(x)
        gossiper.start(c, 1)
        y.add_(c, alpha=gossiper.difference(c))
        torch.testing.assert_close(y.segments[0], x.segments[0], rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(y.segments[1], x.segments[1], rtol=0.02, atol=0.02)
        assert torch.equal(y.weight, x.weight)

    run_ranks(8, body)


def test_a_rank_without_peers_mixes_all_its_pieces() -> None:
    gossiper = bound(PushSum(piece_bytes=PIECE), UniformMixing(RingGraph(1)), solo_group())
    s = random_vector(0, LAYOUTS["mixed"])
    assert_same_bits(gossiper.mix(s.clone(), 0), s)
    calls: list[int] = []
    gossiper.start_filling(s, 1, calls.append)
    assert calls == list(range(len(gossiper.pieces(s))))
    gossiper.difference(s)
    assert not any(x.any() for x in s.segments)


def test_nothing_ends_that_has_not_begun() -> None:
    gossiper = bound(PushSum(piece_bytes=PIECE), UniformMixing(RingGraph(1)), solo_group())
    for step in (gossiper.finish, gossiper.difference):
        with pytest.raises(AssertionError, match=r"no round is in flight: start\(\) comes first"):
            step(random_vector(0, LAYOUTS["mixed"]))


def test_narrow_messages_stay_whole() -> None:
    gossiper = bound(PushPull(wire_dtype=torch.bfloat16, piece_bytes=PIECE), UniformMixing(RingGraph(1)), solo_group())
    s = random_vector(0, LAYOUTS["mixed"])
    assert gossiper.pieces(s) == (s,)
    assert repr(gossiper) == "PushPull(wire_dtype=torch.bfloat16, piece_bytes=256)"
    assert repr(PushSum(piece_bytes=PIECE_BYTES)) == "PushSum()"


def test_ranks_must_cut_alike() -> None:
    def body(group: dist.ProcessGroup) -> None:
        with pytest.raises(ValueError, match="piece_bytes=256"):
            GossipDataParallel(wide(), gossiper=PushSum(piece_bytes=PIECE << group.rank()), process_group=group)

    run_ranks(2, body)


# Who overrides what.


class Halved(PushPull):
    """Half of each correction: its `decode` needs the whole."""

    def decode(self, s: FlatVector, weights: MixingWeights) -> None:
        before = s.clone()
        super().decode(s, weights)
        s.combine_(0.5, [before], [0.5])


class Doubling:
    """Not a gossiper, but before one in the order of methods."""

    def encode(self, s: FlatVector, *args: Any) -> Any:
        """Reads s, which must be there."""
        s.segments[0].mul_(2)
        return super().encode(s, *args)  # type: ignore[misc]


class Doubled(Doubling, PushSum):
    """Encodes by a base of its own."""


class Quiet(PushSum):
    """Overrides nothing that sees messages."""

    def __repr__(self) -> str:
        return "Quiet()"


class Outspoken(Halved):
    """Says that it knows what it does."""

    is_piecewise = True


def test_who_overrides_a_method_gets_whole_messages() -> None:
    piecewise = {cls: cls.is_piecewise for cls in (PushPull, PushSum, Quiet, Outspoken, Halved, Doubled)}
    assert list(piecewise.values()) == [True, True, True, True, False, False]

    class Heir(Halved):
        """Of a class that is not piecewise."""

    assert not Heir.is_piecewise

    def body(group: dist.ProcessGroup) -> None:
        mixing = UniformMixing(RingGraph(2))
        for make in (Halved, Doubled):
            whole, pieced = (bound(make(**options), mixing, group) for options in BOTH)
            x, y = (random_vector(group.rank(), LAYOUTS["mixed"]) for _ in range(2))
            assert_same_bits(whole.mix(x, 0), pieced.mix(y, 1))
            assert pieced.pieces(y) == (y,)

    run_ranks(2, body)


@pytest.mark.parametrize("make", [PushPull, Doubled])
def test_what_is_filled_is_what_is_sent(make: type[PushPull]) -> None:
    """In pieces, and for a gossiper that wants the whole; each piece is filled once and in order."""

    def body(group: dist.ProcessGroup) -> None:
        mixing = UniformMixing(RingGraph(2))
        plain, filled = (bound(make(piece_bytes=PIECE), mixing, group) for _ in range(2))
        x = random_vector(group.rank(), LAYOUTS["wide"])
        s, calls = x.like(), []
        s.weight.copy_(x.weight)

        def fill(k: int) -> None:
            if k < len(filled.pieces(s)):
                calls.append(k)
                filled.pieces(s)[k].raw.copy_(filled.pieces(x)[k].raw)

        filled.start_filling(s, 1, fill)
        filled.finish(s)
        assert calls == list(range(len(filled.pieces(s))))
        assert_same_bits(plain.mix(x.clone(), 0), s)

    run_ranks(2, body)


# On the wire.


def numbered(rank: int, k: int, length: int = 4) -> Tensor:
    """Piece k of this rank."""
    return torch.arange(length) + 100.0 * rank + 10.0 * k


def test_a_piece_arrives_before_the_next_is_filled() -> None:
    """So filling and mixing hide under the transfer: rank 1 fills piece k + 1 when rank 0 has got piece k."""
    arrived = [threading.Event() for _ in range(4)]

    def body(group: dist.ProcessGroup) -> None:
        transport = connect(group, module_device=CPU, timeout=TIMEOUT)
        peer = 1 - transport.rank
        sends, recvs = [torch.zeros(4) for _ in arrived], [torch.zeros(4) for _ in arrived]
        calls: list[int] = []

        def fill(k: int) -> None:
            calls.append(k)
            if transport.rank == 1 and k > 0:
                assert arrived[k - 1].wait(PATIENCE), f"piece {k - 1} waits for piece {k}"
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


def test_a_piece_has_arrived_when_all_peers_have_sent_it() -> None:
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
def test_who_breaks_off_in_mid_vector_is_named(is_dead: bool, is_iterated: bool) -> None:
    """Of three pieces the first comes: rank 1 then dies, or says nothing more for longer than the timeout."""
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
        pattern = r"^rank 0: round 7, piece [123] of 3: receive from rank 1 failed after \d+\.\d s"
        seen: list[int] = []
        with pytest.raises((ConnectionError, TimeoutError), match=pattern) as caught:
            seen.extend(pending.arrivals()) if is_iterated else pending.wait()
        assert caught.type is (ConnectionError if is_dead else TimeoutError)
        assert seen in ([], [0]), "a connection that closes may take with it what has come"

    run_ranks(2, body)


def test_vectors_of_two_lengths_do_not_meet() -> None:
    """The pieces of the shorter one are as long as the first ones of the longer, but they are not the whole."""

    def body(group: dist.ProcessGroup) -> None:
        gossiper, rank = PushPull(piece_bytes=PIECE), group.rank()
        transport = connect(group, module_device=CPU, timeout=timedelta(seconds=SECONDS))
        gossiper.bind(UniformMixing(RingGraph(2)), transport)
        x = torch.full((PIECE // 4 * (2 + rank),), float(rank))
        pattern = rf"^rank {rank}: round 0, piece \d of {2 + rank}: (send to|receive from) rank {1 - rank} failed"
        with pytest.raises((ConnectionError, TimeoutError), match=pattern):
            gossiper.mix(x, 0)
        assert bool((x == rank).all())

    run_ranks(2, body)


def test_twins_of_a_long_round_are_kept() -> None:
    """Tensors that cannot go on the wire: here those of the CPU, on a wire that is no device at all."""
    staging, tensors = Staging(torch.device("meta")), [torch.zeros(4) for _ in range(3 * MAX_STAGED)]
    for _ in range(2):
        staging.expect(len(tensors))
        twins = [staging.twin(x, keep=True) for x in tensors]
    assert all(staging.twin(x, fill=True, keep=True) is twin for x, twin in zip(tensors, twins, strict=True))
    others = [torch.zeros(8) for _ in range(40 * MAX_STAGED)]
    for x in others:
        staging.twin(x, keep=True)
    assert len(staging._twins) <= 12 * MAX_STAGED
    assert Staging(CPU).twin(tensors[0]) is tensors[0]


# Overlap.


def wide(seed: int = 0) -> nn.Module:
    """Some 1500 bytes, so that it is sent in seven pieces."""
    return fill_(nn.Sequential(nn.Linear(3, 64), nn.Tanh(), nn.Linear(64, 2)), seed)


def train_both(group: dist.ProcessGroup, **options: Any) -> list[Any]:
    """The same training whole and in pieces."""
    results = []
    for pieces in BOTH:
        gossiper = PushSum(**pieces)
        wrapper = GossipDataParallel(
            wide(group.rank()), gossiper=gossiper, init_sync=False, process_group=group, **options
        )
        assert len(gossiper.pieces(wrapper._gossiped)) == (7 if pieces else 1)
        steps = train(wrapper, sgd(wrapper.module), group.rank(), 6)
        wrapper.close()
        stats = wrapper.comm_stats()
        results.append((steps, flatten(wrapper.module), stats["bytes_sent"], stats["num_rounds"]))
        assert stats["wait_seconds"] > 0
    return results


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("graph", [NPeerDynamicDirectedExponentialGraph(4), DIGRAPH], ids=str)
def test_training_in_pieces_gives_the_bits_of_the_whole(graph: Any, overlap: bool) -> None:
    for schedule in (Schedule(), Schedule(gossip_every=2, average_every=2)):
        body = partial(train_both, graph=graph, overlap=overlap, schedule=schedule)
        for (steps, end, *counts), (other_steps, other_end, *other_counts) in run_ranks(4, body):
            assert all(torch.equal(x, y) for x, y in zip(steps, other_steps, strict=True))
            assert torch.equal(end, other_end)
            assert counts == other_counts


@pytest.mark.parametrize("max_staleness", [0, 2])
def test_overlap_in_pieces_equals_the_oracle(max_staleness: int) -> None:
    def body(group: dist.ProcessGroup) -> Any:
        gossiper = PushSum(piece_bytes=PIECE)
        wrapper = GossipDataParallel(
            wide(group.rank()),
            graph=DIGRAPH,
            gossiper=gossiper,
            overlap=True,
            max_staleness=max_staleness,
            init_sync=False,
            process_group=group,
        )
        engine = wrapper._engine
        assert isinstance(engine, OverlapEngine)
        engine.is_eager = False
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
    """Rank 0 of two. `error` is raised after `num_sent` pieces of the next round."""

    def __init__(self) -> None:
        self.rank, self.world_size, self.num_bytes_sent = 0, 2, 0
        self.device = CPU
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

    def all_reduce(self, x: Tensor, *, what: str) -> None:
        """See `Transport`."""

    def broadcast(self, x: Tensor, *, source: int, what: str) -> None:
        """See `Transport`."""

    def all_gather(self, out: Tensor, x: Tensor, *, what: str) -> None:
        """See `Transport`."""


NUM_PIECES = 3


class BreakingOff(Scripted):
    """`error` is raised when `num_sent` pieces have come."""

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
@pytest.mark.parametrize("num_sent", range(NUM_PIECES))
@pytest.mark.parametrize("make", [UniformMixing, Forgetful])
def test_a_synchronous_round_that_breaks_off_leaves_no_vector_torn(
    make: type[UniformMixing], num_sent: int, error: BaseException
) -> None:
    gossiper, transport = PushSum(piece_bytes=PIECE), BreakingOff()
    transport.error, transport.num_sent = error, num_sent
    gossiper.bind(make(RingGraph(2)), transport)
    s = random_vector(0, FlatLayout.of([(torch.float32, PIECE // 4 * NUM_PIECES)]))
    before = s.clone()
    with pytest.raises(type(error)):
        gossiper.mix(s, 0)
    torch.testing.assert_close(s.segments, before.segments, rtol=1e-6, atol=2e-6)  # PEER's last digit
    assert torch.equal(s.weight, before.weight)


def scripted() -> tuple[OverlapEngine, Scripted, FlatVector]:
    """An engine, its network, and x: 2.0 everywhere."""
    gossiper, transport = PushPull(piece_bytes=PIECE), Scripted()
    gossiper.bind(UniformMixing(RingGraph(2)), transport)
    return OverlapEngine(gossiper, Schedule()), transport, FlatVector.over(torch.full((PIECE // 4 * NUM_PIECES,), 2.0))


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
    assert transport.sent == [2.0] * NUM_PIECES + [7.0] * NUM_PIECES
    assert (engine.t, engine.step, engine.stats.num_rounds, engine.stats.max_staleness) == (2, 2, 2, 0)
    engine.close()
    assert_no_gossip_threads()


@pytest.mark.parametrize("is_submitted", [False, True])
def test_an_interrupt_between_landing_and_submission_loses_nothing(
    is_submitted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, transport, x = scripted()
    engine.round(x)
    thread = engine._thread
    assert thread is not None
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
    assert transport.sent == [2.0] * NUM_PIECES + [6.0] * NUM_PIECES
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


@pytest.mark.parametrize("num_sent", range(NUM_PIECES))
def test_a_round_that_fails_while_it_is_sent_leaves_x_whole(num_sent: int) -> None:
    """The correction of the round before is applied in full, once; the error is raised by who waits for the round."""
    engine, transport, x = scripted()
    engine.round(x)
    assert engine._flight is not None
    engine._flight.future.exception(PATIENCE)
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
    gossiper, transport = PushPull(piece_bytes=PIECE), Scripted()
    gossiper.bind(UniformMixing(RingGraph(2)), transport)
    for is_eager in (True, False):
        engine = OverlapEngine(gossiper, Schedule(), max_staleness=1, is_eager=is_eager)
        x = FlatVector.over(torch.full((PIECE // 4 * NUM_PIECES,), 2.0))
        written = []
        for _ in range(5):
            written.append(engine.round(x))
            if engine.is_in_flight:
                assert engine._flight is not None
                engine._flight.future.exception(PATIENCE)
        engine.flush(x)
        assert written == ([False, True, False, True, False] if is_eager else [False, False, True, False, True])
        assert value(x) == 9.0
        assert engine.stats.max_staleness == int(not is_eager)
        engine.close()
