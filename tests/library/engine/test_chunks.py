"""Vectors that are sent and mixed in chunks: the bits of the whole."""

from __future__ import annotations

import copy
from itertools import pairwise

import networkx as nx
import pytest
import torch
import torch.distributed as dist

from gossip_modules import GossipDataParallel, MatchaGraph, RingGraph, connect
from gossip_modules.engine.overlap import Filling
from gossip_modules.extend import FlatVector, PushPull, PushSum
from gossip_modules.flat.layout import CHUNK_ALIGNMENT, CHUNK_BYTES, FlatLayout, TensorSpec
from gossip_modules.graph_manager import (
    CompleteGraph,
    NetworkXGraph,
    NPeerDynamicDirectedExponentialGraph,
    select_graph,
)
from gossip_modules.mixing_manager import (
    LaplacianMixing,
    MetropolisHastingsMixing,
    MixingManager,
    UniformMixing,
)
from tests.harness.cases import each_once
from tests.harness.ranks import CPU, TIMEOUT, run_ranks, solo_group
from tests.library.engine.vectors import BOTH, CHUNK, DIGRAPH, random_vector, wide

DTYPES = (torch.float32, torch.float64, torch.bfloat16)


LAYOUTS = {
    "one segment": FlatLayout.of([(torch.float32, 1003)]),
    "wide": FlatLayout.of([(torch.float32, 333), (torch.float64, 200)]),
    "mixed": FlatLayout.of([(torch.float32, 333), (torch.bfloat16, 711), (torch.float64, 97)], num_shards=2),
    "tails": FlatLayout.of([(torch.bfloat16, 1), (torch.float64, 65), (torch.float32, 129), (torch.float16, 131)]),
}


every_layout = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())


def assert_same_bits(x: FlatVector, y: FlatVector) -> None:
    """Values and weight."""
    assert torch.equal(x.raw, y.raw)
    assert torch.equal(x.push_sum_weight, y.push_sum_weight)


# Cuts.


@every_layout
@pytest.mark.parametrize("num_bytes", [CHUNK, 2 * CHUNK, 5 * CHUNK, CHUNK_BYTES])
def test_chunks_partition_the_vector(layout: FlatLayout, num_bytes: int) -> None:
    places = layout.chunks(num_bytes)
    assert places[0][0] == 0
    assert places[-1][1] == layout.num_bytes
    assert all(stop == start for (_, stop), (start, _) in pairwise(places))
    assert all(0 < stop - start <= num_bytes for start, stop in places)
    vector = random_vector(0, layout)
    chunks = vector.chunks(num_bytes)
    assert len(chunks) == len(places)
    for dtype, whole in zip((s.dtype for s in layout.segments), vector.segments, strict=True):
        assert torch.equal(torch.cat([x for chunk in chunks for x in chunk.segments if x.dtype is dtype]), whole)


@every_layout
def test_cuts_keep_vectorised_loops_in_step(layout: FlatLayout) -> None:
    for start, _ in layout.chunks(CHUNK)[1:]:
        segment = max((s for s in layout.segments if s.start <= start), key=lambda s: s.start)
        assert (start - segment.start) % CHUNK_ALIGNMENT == 0


@pytest.mark.parametrize("num_bytes", [0, -CHUNK, CHUNK - 1, 64])
def test_other_sizes_are_refused(num_bytes: int) -> None:
    with pytest.raises(ValueError, match=rf"got chunk_bytes={num_bytes}, expected a positive multiple of 256"):
        PushPull(chunk_bytes=num_bytes)
    with pytest.raises(ValueError, match="got chunk_bytes="):
        LAYOUTS["mixed"].chunks(num_bytes)


def test_chunks_share_memory_and_are_made_once() -> None:
    vector = random_vector(0, LAYOUTS["mixed"])
    chunks = vector.chunks(CHUNK)
    assert vector.chunks(CHUNK) is chunks
    assert vector.shard(1, 2) is vector.shard(1, 2)
    assert vector.shard(1, 2).chunks(CHUNK) is vector.shard(1, 2).chunks(CHUNK)
    for chunk in chunks:
        chunk.raw.fill_(7)
    assert bool((vector.raw == 7).all())
    assert vector.chunks(vector.layout.num_bytes) == (vector,)
    assert len(vector.chunks()) == 1, "no test vector is longer than a chunk of real size"


def test_chunks_of_a_copy_are_those_of_the_copy() -> None:
    vector = random_vector(0, LAYOUTS["mixed"])
    before = [chunk.raw.clone() for chunk in vector.chunks(CHUNK)]
    for twin in (copy.deepcopy(vector), vector.clone()):
        for chunk in twin.chunks(CHUNK):
            chunk.raw.zero_()
        assert not twin.raw.any()
    assert all(torch.equal(chunk.raw, x) for chunk, x in zip(vector.chunks(CHUNK), before, strict=True))


# Arithmetic.

COEFFICIENTS = [(0.5, [0.5]), (0.2, [0.5, 0.3]), (1.0, []), (1.0, [0.0]), (-0.43, [0.7, 0.73]), (0.3, [0.9])]


@every_layout
@pytest.mark.parametrize(("own", "weights"), COEFFICIENTS)
def test_arithmetic_in_chunks_gives_the_bits_of_the_whole(layout: FlatLayout, own: float, weights: list[float]) -> None:
    others = [random_vector(1 + i, layout) for i in range(len(weights))]
    combined, chunked = random_vector(0, layout), random_vector(0, layout)
    combined.combine_(own, others, weights)
    for k, chunk in enumerate(chunked.chunks(CHUNK)):
        chunk.combine_segments_(own, [other.chunks(CHUNK)[k] for other in others], weights)
    chunked.combine_weight_(own, others, weights)
    assert_same_bits(chunked, combined)

    whole, chunked = random_vector(0, layout), random_vector(0, layout)
    alpha, factor = whole.difference_(own - 1, others, weights), chunked.factor(weights)
    assert alpha == (1.0 if factor is None else factor)
    for k, chunk in enumerate(chunked.chunks(CHUNK)):
        messages = [other.chunks(CHUNK)[k] for other in others]
        chunk.combine_segments_(own - 1, messages, weights, alpha=factor)
    chunked.combine_weight_(own - 1, others, weights, alpha=factor)
    assert_same_bits(chunked, whole)

    x, y = random_vector(9, layout), random_vector(9, layout)
    x.add_segments_(whole, alpha=alpha)
    for chunk, other in zip(y.chunks(CHUNK), chunked.chunks(CHUNK), strict=True):
        chunk.add_segments_(other, alpha=alpha)
    assert_same_bits(y, x)


@every_layout
@pytest.mark.parametrize("num_bytes", [64, 1 << 20])
def test_apply_and_refresh_is_an_addition_and_a_copy(
    layout: FlatLayout, num_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gossip_modules.flat.vector.CACHED_BYTES", num_bytes)
    x, correction = random_vector(0, layout), random_vector(1, layout)
    expected, weights = x.clone(), (x.push_sum_weight.clone(), correction.push_sum_weight.clone())
    expected.add_segments_(correction, alpha=0.3)
    x.apply_and_refresh_(correction, alpha=0.3)
    assert torch.equal(x.raw, expected.raw)
    assert torch.equal(correction.raw, expected.raw)
    assert (x.push_sum_weight, correction.push_sum_weight) == weights


def test_ever_more_chunks_are_filled_between_two_posts() -> None:
    layout = FlatLayout.of([(torch.float32, 12 * CHUNK // 4)])
    x, s = random_vector(0, layout), random_vector(1, layout)
    expected = x.clone().add_(s, alpha=0.5)
    chunks = tuple(zip(x.chunks(CHUNK), s.chunks(CHUNK), strict=True))
    counts = []
    with Filling(x, s, chunks, alpha=0.5) as filling:
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


@pytest.mark.parametrize(("kind", "name"), each_once(list(MIXINGS), ["one segment", "mixed"]))
def test_rounds_in_chunks_give_the_bits_of_the_whole(kind: str, name: str) -> None:
    """Synchronous and as a correction, with as many bytes sent."""
    make, mixing = MIXINGS[kind]
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
        whole, chunked = (bound(make(**options), mixing, group) for options in BOTH)
        x, y = rounds(whole, group.rank()), rounds(chunked, group.rank())
        assert len(chunked.chunks(x[0])) > 5
        for one, other in zip(x, y, strict=True):
            assert_same_bits(one, other)
        assert whole.transport.num_bytes_sent == chunked.transport.num_bytes_sent > 0

    run_ranks(4, body)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64, torch.complex128])
@pytest.mark.parametrize("shape", [(1,), (3, 100), (257,)])
def test_any_tensor_in_chunks(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    def body(group: dist.ProcessGroup) -> None:
        x = torch.randn(shape, generator=torch.Generator().manual_seed(group.rank()), dtype=dtype)
        mixing = UniformMixing(RingGraph(3, peers_per_itr=2))
        whole, chunked = (bound(PushSum(**options), mixing, group) for options in BOTH)
        assert torch.equal(whole.average(x, num_rounds=2), chunked.average(x, num_rounds=2))

    run_ranks(3, body)


def test_buffers_with_weights_of_their_own_wait_for_the_whole() -> None:
    mixing = LaplacianMixing(MatchaGraph(select_graph(0), budget=1.0))
    layout = FlatLayout.of([(torch.float32, [TensorSpec((30, 9)), TensorSpec((130,), is_buffer=True)])])

    def body(group: dist.ProcessGroup) -> None:
        whole, chunked = (bound(PushPull(**options), mixing, group) for options in BOTH)
        for step in (PushPull.finish, PushPull.difference):
            x, y = random_vector(group.rank(), layout), random_vector(group.rank(), layout)
            for gossiper, s in ((whole, x), (chunked, y)):
                gossiper.start(s, 0)
                step(gossiper, s)
            assert_same_bits(x, y)

    run_ranks(8, body)


def test_a_correction_with_weights_for_buffers_takes_no_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    mixing = LaplacianMixing(MatchaGraph(select_graph(0), budget=1.0))
    specs = [TensorSpec((30, 9)), TensorSpec((130,), is_buffer=True)]
    layout = FlatLayout.of([(torch.float32, specs), (torch.bfloat16, 70)])
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
        assert torch.equal(y.push_sum_weight, x.push_sum_weight)

    run_ranks(8, body)


def test_a_rank_without_peers_mixes_all_its_chunks() -> None:
    gossiper = bound(PushSum(chunk_bytes=CHUNK), UniformMixing(RingGraph(1)), solo_group())
    s = random_vector(0, LAYOUTS["mixed"])
    assert_same_bits(gossiper.mix(s.clone(), 0), s)
    calls: list[int] = []
    gossiper.start_filling(s, 1, calls.append)
    assert calls == list(range(len(gossiper.chunks(s))))
    gossiper.difference(s)
    assert not any(x.any() for x in s.segments)


def test_nothing_ends_that_has_not_begun() -> None:
    gossiper = bound(PushSum(chunk_bytes=CHUNK), UniformMixing(RingGraph(1)), solo_group())
    for step in (gossiper.finish, gossiper.difference):
        with pytest.raises(AssertionError, match=r"no round is in flight: start\(\) comes first"):
            step(random_vector(0, LAYOUTS["mixed"]))


def test_narrow_messages_stay_whole() -> None:
    gossiper = bound(PushPull(wire_dtype=torch.bfloat16, chunk_bytes=CHUNK), UniformMixing(RingGraph(1)), solo_group())
    s = random_vector(0, LAYOUTS["mixed"])
    assert gossiper.chunks(s) == (s,)
    assert repr(gossiper) == "PushPull(wire_dtype=torch.bfloat16, chunk_bytes=256)"
    assert repr(PushSum(chunk_bytes=CHUNK_BYTES)) == "PushSum()"


def test_ranks_must_cut_alike() -> None:
    def body(group: dist.ProcessGroup) -> None:
        with pytest.raises(ValueError, match="chunk_bytes=256"):
            GossipDataParallel(wide(), algorithm=PushSum(chunk_bytes=CHUNK << group.rank()), process_group=group)

    run_ranks(2, body)


# Who overrides what.


@pytest.mark.parametrize("make", [PushPull, PushSum])
def test_the_filled_chunks_are_sent(make: type[PushPull]) -> None:
    """Each chunk is filled once and in order."""

    def body(group: dist.ProcessGroup) -> None:
        mixing = UniformMixing(RingGraph(2))
        plain, filled = (bound(make(chunk_bytes=CHUNK), mixing, group) for _ in range(2))
        x = random_vector(group.rank(), LAYOUTS["wide"])
        s, calls = x.like(), []
        s.push_sum_weight.copy_(x.push_sum_weight)

        def fill(k: int) -> None:
            if k < len(filled.chunks(s)):
                calls.append(k)
                filled.chunks(s)[k].raw.copy_(filled.chunks(x)[k].raw)

        filled.start_filling(s, 1, fill)
        filled.finish(s)
        assert calls == list(range(len(filled.chunks(s))))
        assert_same_bits(plain.mix(x.clone(), 0), s)

    run_ranks(2, body)
