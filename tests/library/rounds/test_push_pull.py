"""Rounds of the exact gossipers are products with W(t)."""

from __future__ import annotations

import copy
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from gossip_modules import RingGraph
from gossip_modules.extend import FlatVector, PushPull, PushSum
from gossip_modules.flat.layout import FlatLayout
from gossip_modules.graph_manager import GraphManager, NPeerDynamicDirectedExponentialGraph
from gossip_modules.mixing_manager import MatrixMixing, MixingManager, MixingWeights, UniformMixing
from gossip_modules.rounds import push_pull
from gossip_modules.transport.exchange import Messages
from tests.harness.ranks import CPU, run_ranks, solo_group
from tests.library.rounds.bound import DIGRAPH, DOUBLY_STOCHASTIC, bound, value_of

TWO_WAYS = RingGraph(4, peers_per_itr=2)
GOSSIPERS: dict[str, Callable[[], PushPull]] = {"PushPull": PushPull, "PushSum": PushSum}


@pytest.mark.parametrize("mixing", DOUBLY_STOCHASTIC, ids=str)
@pytest.mark.parametrize("name", GOSSIPERS)
def test_rounds_are_the_matrices(name: str, mixing: MixingManager) -> None:
    def body(group: dist.ProcessGroup) -> list[Tensor]:
        gossiper, x = bound(GOSSIPERS[name](), mixing, group), value_of(group.rank())
        return [gossiper.mix(x, t).clone() for t in range(5)]

    ranks = run_ranks(4, body)
    expected = torch.stack([value_of(rank) for rank in range(4)])
    mean = expected.mean(0)
    for t in range(5):
        expected = mixing.matrix(t) @ expected
        got = torch.stack([rank[t] for rank in ranks])
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)
        torch.testing.assert_close(got.mean(0), mean, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("make", "mixing"),
    [
        *((make, mixing) for make in (PushPull, PushSum) for mixing in DOUBLY_STOCHASTIC),
        (PushSum, UniformMixing(DIGRAPH)),
    ],
    ids=str,
)
def test_difference_is_finish_minus_the_sent_vector(make: Callable[[], PushPull], mixing: MixingManager) -> None:
    """The law: s + alpha * difference(s) = W s, weight included; and s is only read between start and then."""

    def body(group: dist.ProcessGroup) -> None:
        gossiper = bound(make(), mixing, group)
        for t in range(3):
            s = FlatVector.over(value_of(group.rank()))
            s.push_sum_weight.fill_(0.5 + group.rank())
            finished, before = s.clone(), s.clone()
            gossiper.start(finished, t)
            assert torch.equal(finished.raw, before.raw)
            gossiper.finish(finished)
            gossiper.start(s, t)
            alpha = gossiper.difference(s)
            before.add_(s, alpha=alpha)
            torch.testing.assert_close(before.segments[0], finished.segments[0], rtol=0, atol=1e-12)
            if gossiper.is_weighted:
                torch.testing.assert_close(before.push_sum_weight, finished.push_sum_weight, rtol=0, atol=1e-12)

    run_ranks(4, body)


@pytest.mark.parametrize("name", GOSSIPERS)
def test_average_is_exact_after_one_period_of_the_exponential_graph(name: str) -> None:
    mixing = UniformMixing(NPeerDynamicDirectedExponentialGraph(4))

    def body(group: dist.ProcessGroup) -> Tensor:
        x = value_of(group.rank())
        result = bound(GOSSIPERS[name](), mixing, group).average(x, num_rounds=2)
        assert torch.equal(x, value_of(group.rank())), "average() changes its input"
        return result

    mean = torch.stack([value_of(rank) for rank in range(4)]).mean(0)
    for result in run_ranks(4, body):
        torch.testing.assert_close(result, mean, rtol=0, atol=1e-15)


SHAPES: list[tuple[tuple[int, ...], torch.dtype]] = [
    ((), torch.float32),
    ((1,), torch.float64),
    ((3, 1, 7), torch.float32),
    ((0,), torch.float32),
    ((5,), torch.complex64),
    ((2, 3), torch.complex128),
    ((33,), torch.bfloat16),
    ((33,), torch.float16),
]


@pytest.mark.parametrize("name", GOSSIPERS)
def test_any_shape_and_dtype(name: str) -> None:
    mixing = UniformMixing(NPeerDynamicDirectedExponentialGraph(2))

    def body(group: dist.ProcessGroup) -> list[Tensor]:
        gossiper = bound(GOSSIPERS[name](), mixing, group)
        return [gossiper.average(value_of(group.rank(), shape, dtype), num_rounds=1) for shape, dtype in SHAPES]

    first, second = run_ranks(2, body)
    for (shape, dtype), x, y in zip(SHAPES, first, second, strict=True):
        mean = (value_of(0, shape, dtype) + value_of(1, shape, dtype)) / 2
        assert x.shape == shape
        assert x.dtype is dtype
        torch.testing.assert_close(x, mean)
        torch.testing.assert_close(y, mean)


@pytest.mark.parametrize("name", GOSSIPERS)
def test_tensors_with_holes(name: str) -> None:
    """`average` takes any strides; `mix` works in place, so it names what it cannot take."""

    def body(group: dist.ProcessGroup) -> Tensor:
        gossiper = bound(GOSSIPERS[name](), UniformMixing(RingGraph(2)), group)
        x = value_of(group.rank(), (4, 6))[:, ::2].t()
        with pytest.raises(ValueError, match="expected a contiguous"):
            gossiper.mix(x, 0)
        return gossiper.average(x, num_rounds=1)

    mean = (value_of(0, (4, 6)) + value_of(1, (4, 6)))[:, ::2].t() / 2
    for result in run_ranks(2, body):
        torch.testing.assert_close(result, mean)


@pytest.mark.parametrize("make", [PushPull, PushSum])
def test_several_dtypes_travel_in_one_message(make: Callable[[], PushPull]) -> None:
    layout = FlatLayout.of([(torch.float32, 3), (torch.bfloat16, 5), (torch.float64, 2)])

    def vector(rank: int) -> FlatVector:
        s = FlatVector.zeros(layout, CPU)
        for segment in s.segments:
            segment.copy_(value_of(rank, tuple(segment.shape)))
        return s

    def body(group: dist.ProcessGroup) -> FlatVector:
        gossiper = bound(make(), UniformMixing(RingGraph(2)), group)
        before = gossiper.transport.num_bytes_sent
        s = gossiper.mix(vector(group.rank()), 0)
        assert gossiper.transport.num_bytes_sent - before == layout.num_bytes
        return s

    for s in run_ranks(2, body):
        for x, first, second in zip(s.segments, vector(0).segments, vector(1).segments, strict=True):
            torch.testing.assert_close(x, ((first.double() + second.double()) / 2).to(x.dtype))


def test_messages_of_two_lengths_in_turn() -> None:
    def body(group: dist.ProcessGroup) -> None:
        gossiper = bound(PushPull(), UniformMixing(RingGraph(2)), group)
        for t, length in enumerate((3, 8, 3)):
            x = gossiper.mix(torch.full((length,), float(group.rank())), t)
            assert bool((x == 0.5).all())

    run_ranks(2, body)


@pytest.mark.parametrize("make", [PushPull, PushSum])
def test_world_of_one_keeps_its_value(make: Callable[[], PushPull]) -> None:
    gossiper = bound(make(), UniformMixing(RingGraph(1)), solo_group())
    x = value_of(0)
    assert torch.equal(gossiper.average(x, num_rounds=3), x)
    s = FlatVector.over(x.clone())
    gossiper.start(s, 0)
    gossiper.difference(s)
    assert not s.segments[0].any()
    assert gossiper.transport.num_bytes_sent == 0


class Annealed(MixingManager):
    """Ranks keep more of themselves from round to round, on a graph whose period is 1."""

    def weights(self, rank: int, t: int) -> MixingWeights:
        """See `MixingManager`."""
        share = 1 / (2 + t)
        return MixingWeights(1 - share, dict.fromkeys(self.graph.in_peers(rank, t), share))


class Lazy(MixingManager):
    """Half of another mixing, whose period may be longer than that of its graph."""

    def __init__(self, base: MixingManager) -> None:
        super().__init__(base.graph)
        self.base = base

    def weights(self, rank: int, t: int) -> MixingWeights:
        """See `MixingManager`."""
        own, inp = self.base.weights(rank, t)
        return MixingWeights((1 + own) / 2, {peer: weight / 2 for peer, weight in inp.items()})


class Squares(GraphManager):
    """A graph whose peers repeat otherwise than its phone book."""

    def phone_book(self, rank: int) -> tuple[int, ...]:
        """See `GraphManager`."""
        return tuple((rank + i) % self.world_size for i in range(1, self.world_size))

    def out_peers(self, rank: int, t: int) -> tuple[int, ...]:
        """See `GraphManager`."""
        return ((rank + 1 + t * t % 5 // 2) % self.world_size,)


@pytest.mark.parametrize(
    "mixing",
    [
        Annealed(RingGraph(4)),
        Lazy(MatrixMixing(TWO_WAYS, [UniformMixing(TWO_WAYS).matrix(0), torch.eye(4)])),
        UniformMixing(Squares(4)),
    ],
    ids=["annealed", "lazy", "squares"],
)
def test_weights_and_peers_of_a_users_class_are_asked_for_in_every_round(mixing: MixingManager) -> None:
    def body(group: dist.ProcessGroup) -> list[Tensor]:
        gossiper, x = bound(PushPull(), mixing, group), value_of(group.rank())
        return [gossiper.mix(x, t).clone() for t in range(7)]

    ranks = run_ranks(4, body)
    expected = torch.stack([value_of(rank) for rank in range(4)])
    for t in range(7):
        expected = mixing.matrix(t) @ expected
        torch.testing.assert_close(torch.stack([rank[t] for rank in ranks]), expected, rtol=0, atol=1e-12)


def test_messages_are_made_once_for_each_set_of_peers_of_one_vector(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new vector, a new weight, a narrow wire and a copy of the mixer have messages of their own."""
    mixing, makers = UniformMixing(NPeerDynamicDirectedExponentialGraph(4)), list[int]()

    class Counted(Messages):
        def __init__(self, messages: Mapping[int, Sequence[Tensor]]) -> None:
            super().__init__(messages)
            makers.append(threading.get_ident())

    monkeypatch.setattr(push_pull, "Messages", Counted)
    mean = torch.stack([value_of(rank) for rank in range(4)]).mean(0)

    def body(group: dist.ProcessGroup) -> None:
        gossiper = bound(PushPull(), mixing, group)
        first, second = (FlatVector.over(value_of(group.rank())) for _ in range(2))

        def num_made(s: FlatVector, rounds: range) -> int:
            before = makers.count(threading.get_ident())
            for t in rounds:
                gossiper.mix(s, t)
            return makers.count(threading.get_ident()) - before

        assert num_made(first, range(8)) == 2 * mixing.period == 4  # what it sends, and what it receives
        assert num_made(second, range(8, 10)) == 4
        for s in (first, second):
            torch.testing.assert_close(s.segments[0], mean, rtol=0, atol=1e-15)
        assert num_made(second, range(10, 12)) == 0
        second.push_sum_weight = second.push_sum_weight.clone()
        assert num_made(second, range(12, 14)) == 4
        assert not copy.deepcopy(gossiper)._prepared
        third = FlatVector.over(value_of(group.rank()))
        assert num_made(third, range(14, 16)) == 4
        memory = weakref.ref(third.raw)
        del third
        assert memory() is None, "messages live as long as the vector that they send"
        gossiper.narrow(torch.bfloat16)
        assert num_made(second, range(16, 20)) == 4

    run_ranks(4, body)
