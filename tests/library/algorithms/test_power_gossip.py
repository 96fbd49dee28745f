"""PowerGossip against the power iteration of every link in one process; its two ends; what it sends."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import networkx as nx
import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from gossip_modules import GossipDataParallel, PowerGossip, RelaySGD, RingGraph
from gossip_modules.extend import FlatVector
from gossip_modules.flat.layout import FlatLayout, TensorSpec
from gossip_modules.graph_manager import CompleteGraph, NetworkXGraph
from gossip_modules.mixing_manager import MetropolisHastingsMixing, MixingManager
from gossip_modules.rounds.memory import Memory
from gossip_modules.rounds.requests import Round, Vectors
from tests.harness.problems import mlp, net
from tests.harness.ranks import CPU, run_ranks, solo_group
from tests.library.algorithms.contract import DYNAMIC, STATIC, bound, restored, ring, vector_of
from tests.library.algorithms.test_choco import coded, train_dense, train_ranks
from tests.library.algorithms.test_compressed import rounds_of

MIXINGS = {**{name: STATIC[name] for name in ("ring", "star", "path")}, **DYNAMIC}
ITERATIONS = pytest.mark.parametrize("num_iterations", [1, 2, 3])


def best_step(W: Tensor) -> float:
    """2 / (lambda_min+ + lambda_max) of I - W."""
    eigenvalues = np.linalg.eigvalsh((torch.eye(len(W)) - W).numpy())
    positive = eigenvalues[eigenvalues > 1e-9]
    return float(2 / (positive.min() + positive.max()))


class Dense:
    """Algorithm 1 of the paper for one matrix per rank [n, rows, columns]: a factor per link, the same for both ends.

    Args:
        right: the first right factor of each link i < j; as many columns as the rank.
    """

    def __init__(self, x: Tensor, right: dict[tuple[int, int], Tensor], step_size: float) -> None:
        self.x, self.step_size = x.clone(), step_size
        self.basis = {link: factor.clone() for link, factor in right.items()}
        self.num = dict.fromkeys(right, 0)

    def iterate(self, W: Tensor) -> Tensor:
        """One iteration of every link of W, all from the same x."""
        change = torch.zeros_like(self.x)
        for (i, j), basis in self.basis.items():
            if W[i, j]:
                difference = self.x[j] - self.x[i]
                is_left = self.num[i, j] % 2 == 1
                A = torch.linalg.qr(basis).Q
                # The estimate is a projection: which orthonormal basis of the span is taken makes no difference.
                factor = difference.mT @ A if is_left else difference @ A
                estimate = A @ factor.mT if is_left else factor @ A.mT
                change[j] -= self.step_size * W[i, j] * estimate
                change[i] += self.step_size * W[i, j] * estimate
                self.basis[i, j] = factor
                self.num[i, j] += 1
        self.x += change
        return self.x.clone()


def links_of(mixing: MixingManager) -> list[tuple[int, int]]:
    """Every link that the graph ever has."""
    graph = mixing.graph
    return [(i, j) for i in range(graph.world_size) for j in graph.phone_book(i) if i < j]


def first_factors(mixing: MixingManager, columns: int, rank: int, seed: int = 0) -> dict[tuple[int, int], Tensor]:
    """Random right factors of the tests' own."""
    generator = torch.Generator().manual_seed(seed)
    return {link: torch.randn(columns, rank, generator=generator).double() for link in links_of(mixing)}


def begun(factors: list[dict[tuple[int, int], Tensor]], rows: list[int], **options: Any) -> PowerGossip:
    """PowerGossip that begins with these right factors, one dict per matrix. rows: of each matrix."""

    class Begun(PowerGossip):
        def round(self, v: Vectors, m: Memory, k: int) -> Round:
            for peer in v.peers:
                right = [chosen[min(v.rank, peer), max(v.rank, peer)].clone()[None] for chosen in factors]
                left = [torch.zeros(1, n, factor.shape[-1]).double() for n, factor in zip(rows, right, strict=True)]
                m.link(peer, partial(dict[str, Any], left=left, right=right, iterations=0))
            yield from super().round(v, m, k)

    return Begun(**options)


# The algorithm.


@pytest.mark.parametrize("graph", MIXINGS)
@pytest.mark.parametrize(("rank", "num_iterations"), [(1, 3), (2, 2)])
def test_rounds_are_those_of_the_paper(graph: str, rank: int, num_iterations: int) -> None:
    """Two matrices and a vector, float64, starting from factors that the test has chosen."""
    mixing, num_rounds = MIXINGS[graph], 6
    layout = FlatLayout.of([(torch.float64, [TensorSpec((4, 5)), TensorSpec((6, 2, 2)), TensorSpec((3,))])])
    factors = [first_factors(mixing, columns, rank) for columns in (5, 4)]

    def body(group: dist.ProcessGroup) -> list[Tensor]:
        gossiper = bound(begun(factors, [4, 6], rank=rank, num_iterations=num_iterations), mixing, group)
        s = vector_of(group.rank(), layout)
        return [gossiper.mix(s, t).segments[0].clone() for t in range(num_rounds)]

    ranks = run_ranks(4, body)
    x = torch.stack([vector_of(rank, layout).segments[0] for rank in range(4)])
    step_size = best_step(mixing.matrix(0)) if graph in STATIC else 1.0
    step_size = round(step_size, 6)
    dense = [
        Dense(part.view(4, *shape), factor, step_size)
        for part, shape, factor in zip(x[:, :44].split([20, 24], 1), ((4, 5), (6, 4)), factors, strict=True)
    ]
    vectors = x[:, 44:]
    for t in range(num_rounds):
        W = mixing.matrix(t)
        for _ in range(num_iterations):
            matrices = [matrix.iterate(W).flatten(1) for matrix in dense]
        vectors = vectors + step_size * (W @ vectors - vectors)
        got = torch.stack([rank[t] for rank in ranks])
        torch.testing.assert_close(got, torch.cat([*matrices, vectors], dim=1), rtol=0, atol=1e-11)


def test_training_equals_the_dense_one() -> None:
    """Matrices by power iteration, vectors at the same step size, batch norm statistics by W itself."""
    mixing = STATIC["star"]
    W, step_size = mixing.matrix(0), round(best_step(mixing.matrix(0)), 6)
    shapes = [tuple(p.shape) for p in coded(net()) if p.dim() > 1]
    factors = [first_factors(mixing, columns, 1) for _, columns in shapes]
    dense = [Dense(torch.zeros(4, *shape).double(), factor, step_size) for shape, factor in zip(shapes, factors)]

    def make() -> PowerGossip:
        return begun(factors, [rows for rows, _ in shapes])

    def mix(stacks: list[Tensor]) -> None:
        for stack, matrix in zip(stacks, dense, strict=False):
            matrix.x = stack.clone()
            stack.copy_(matrix.iterate(W))
        for stack in stacks[len(dense) :]:
            stack += step_size * (torch.tensordot(W, stack, 1) - stack)

    for got, want in zip(train_ranks(make, mixing, 6), train_dense(mix, W, 6), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-11)


def low_rank(rows: int, columns: int, rank: int, seed: int) -> Tensor:
    """A random matrix of that rank, float64."""
    generator = torch.Generator().manual_seed(seed)
    draw = torch.randn(rows + columns, rank, generator=generator, dtype=torch.float64)
    return draw[:rows] @ draw[rows:].T


@pytest.mark.parametrize(("rank", "idle"), [(1, 0), (1, 1), (2, 2), (3, 3)])
def test_a_fixed_difference_of_low_rank_is_gone_in_two_iterations(rank: int, idle: int) -> None:
    """Also after rounds between equal models, whose difference is zero, whichever half is next."""

    def body(group: dist.ProcessGroup) -> None:
        for num_iterations in (1, 2):
            gossiper = bound(PowerGossip(rank=rank, num_iterations=num_iterations), ring(2), group)
            x = low_rank(7, 5, 5, seed=9)
            for t in range(idle):
                gossiper.mix(x, t)
            assert torch.equal(x, low_rank(7, 5, 5, seed=9)), "equal models have moved"
            other = low_rank(7, 5, rank, seed=10)
            x += group.rank() * other
            for t in range(2 // num_iterations):
                gossiper.mix(x, idle + t)
            torch.testing.assert_close(x, low_rank(7, 5, 5, seed=9) + other / 2, rtol=0, atol=1e-12)

    run_ranks(2, body)


def test_convergence_is_linear_with_nothing_tuned() -> None:
    """The logarithm of the error falls at a constant rate, down to rounding."""
    layout = FlatLayout.of([(torch.float64, [TensorSpec((5, 5))])])
    _, *rest = rounds_of(PowerGossip, ring(4), 100, layout)
    errors = [float((x - x.mean(0)).square().sum()) for x in rest]
    digits = [np.log10(errors[t] / errors[t + 30]) for t in (9, 39, 69)]
    assert min(digits) > 1.5
    assert max(digits) < 2 * min(digits)
    assert errors[-1] < 1e-8 * errors[0]


@pytest.mark.parametrize(
    ("mixing", "expected"),
    [
        (ring(1), 1.0),
        (ring(2), 1.0),
        (ring(8), 2 / ((2 - 2**0.5) / 3 + 4 / 3)),  # eigenvalues (2 - 2 cos(2 pi k / 8)) / 3
        (MetropolisHastingsMixing(NetworkXGraph(nx.star_graph(5))), 2 / (1 / 6 + 1)),  # L / 6 with 1 and n = 6
        (MetropolisHastingsMixing(CompleteGraph(5, peers_per_itr=4)), 1.0),
        (DYNAMIC["bipartite"], 1.0),
    ],
    ids=str,
)
def test_default_step_size_is_the_best_of_plain_gossip(mixing: MixingManager, expected: float) -> None:
    assert PowerGossip().step_size_on(mixing) == pytest.approx(expected, abs=1e-6)
    assert PowerGossip(step_size=0.7).step_size_on(mixing) == 0.7


# Both ends.

DTYPES = FlatLayout.of(
    [
        (torch.float32, [TensorSpec((6, 4)), TensorSpec((6, 4)), TensorSpec((5, 3)), TensorSpec((9,))]),
        (torch.bfloat16, [TensorSpec((7, 3))]),
        (torch.float64, [TensorSpec((3, 8)), TensorSpec((2, 2, 2, 2)), TensorSpec((3,), True)]),
        (torch.float16, [TensorSpec((4, 4)), TensorSpec((5,))]),
    ]
)


@pytest.mark.parametrize("graph", ["star", *DYNAMIC])
@pytest.mark.parametrize(("warm_start", "num_iterations"), [(True, 1), (True, 2), (False, 3)])
def test_both_ends_hold_the_same_bits(graph: str, warm_start: bool, num_iterations: int) -> None:
    options: dict[str, Any] = {"num_iterations": num_iterations, "warm_start": warm_start, "check_every": 1}

    def body(group: dist.ProcessGroup) -> list[dict[str, Any]]:
        gossiper, s = bound(PowerGossip(rank=2, **options), MIXINGS[graph], group), vector_of(group.rank(), DTYPES)
        states = []
        for t in range(3):
            gossiper.mix(s, t)
            states.append(restored(gossiper.state_dict()))
        return states

    for t, states in enumerate(zip(*run_ranks(4, body), strict=True)):
        for i, j in links_of(MIXINGS[graph]):
            ends = [states[a]["memory"].get("links", {}).get(b) for a, b in ((i, j), (j, i))]
            if graph in DYNAMIC and ends == [None, None]:
                continue
            assert ends[0]["iterations"] == ends[1]["iterations"]
            for side in ("left", "right"):
                for one, other in zip(ends[0][side], ends[1][side], strict=True):
                    assert torch.equal(one, other), (t, i, j)
                    is_used = t > 0 or num_iterations > 1
                    assert graph in DYNAMIC or not is_used or bool(one.any())


@pytest.mark.parametrize("check_every", [1, 4])
def test_ends_that_differ_are_an_error_in_time(check_every: int) -> None:
    """A state that is wrong in every round: the next checksum sees it."""

    def body(group: dist.ProcessGroup) -> None:
        gossiper, s = bound(PowerGossip(check_every=check_every), ring(2), group), vector_of(group.rank())
        message = (
            rf"rank {group.rank()}: round \d: rank {1 - group.rank()} sent digest \d+ before message number \d+, "
            r"expected \d+: the two ranks have exchanged other messages or hold different states; resume all ranks"
        )
        for t in range(2):
            gossiper.mix(s, t)
        error = None
        for t in range(2, 3 + check_every):
            if group.rank() == 1:
                gossiper.state_dict()["memory"]["links"][0]["left"][0][0, 0, 0] += 1e-3
            try:
                gossiper.mix(s, t)
            except RuntimeError as caught:
                error = caught
                break
        assert error is not None
        assert re.search(message, str(error)), error

    run_ranks(2, body)


def test_checks_can_be_off() -> None:
    def body(group: dist.ProcessGroup) -> None:
        gossiper, s = bound(PowerGossip(check_every=0), ring(2), group), vector_of(group.rank())
        gossiper.mix(s, 0)
        if group.rank() == 1:
            gossiper.state_dict()["memory"]["links"][0]["left"][0].add_(1)
        gossiper.mix(s, 1)

    run_ranks(2, body)


def test_links_count_their_own_iterations() -> None:
    """On a graph that changes, a link that rests keeps its factors and goes on with the half that is next."""
    mixing = DYNAMIC["MATCHA"]

    def body(group: dist.ProcessGroup) -> dict[str, Any]:
        gossiper, s = bound(PowerGossip(), mixing, group), vector_of(group.rank())
        for t in range(9):
            gossiper.mix(s, t)
        return gossiper.state_dict()

    for rank, state in enumerate(run_ranks(4, body)):
        iterations = {peer: link["iterations"] for peer, link in state["memory"]["links"].items()}
        expected = {peer: sum(peer in mixing.graph.out_peers(rank, t) for t in range(9)) for peer in iterations}
        assert iterations == expected
        assert 0 < min(expected.values()) < 9


# What is sent.


def num_bytes(side: int, shapes: list[tuple[int, int]], rank: int) -> int:
    """Of an iteration in float32: the header, and each batch rounded up to 8; side 0 is left factors, m each."""
    batches = dict.fromkeys(shapes, 0)
    for shape in shapes:
        batches[shape] += 4 * shape[side] * min(rank, *shape)
    return 8 + sum(-(-size // 8) * 8 for size in batches.values())


SHAPES = [(3, 50), (3, 50), (11, 7), (64, 64)]


@ITERATIONS
@pytest.mark.parametrize("rank", [1, 4])
def test_bytes_are_those_of_one_factor(rank: int, num_iterations: int) -> None:
    """r m or r n numbers in turn; vectors and buffers in full, once a round; a header and a message per iteration."""
    layout = FlatLayout.of([(torch.float32, [*map(TensorSpec, SHAPES), TensorSpec((13,)), TensorSpec((5,), True)])])

    def body(group: dist.ProcessGroup) -> None:
        gossiper = bound(PowerGossip(rank=rank, num_iterations=num_iterations), STATIC["star"], group)
        exchange, messages = gossiper.transport.exchange, []

        def counted(sends: Any, recvs: Any, *, tag: int, what: str = "") -> Any:
            messages.append({peer: len(tensors) for peer, tensors in sends.items()})
            return exchange(sends, recvs, tag=tag, what=what)

        gossiper.transport.exchange = counted  # type: ignore[method-assign, assignment]
        s, num_peers, iteration = vector_of(group.rank(), layout), 3 if group.rank() == 0 else 1, 0
        for t in range(3):
            before = gossiper.transport.num_bytes_sent
            gossiper.mix(s, t)
            expected = 56 + 24
            for _ in range(num_iterations):
                expected += num_bytes(iteration % 2, SHAPES, rank)
                iteration += 1
            assert gossiper.transport.num_bytes_sent - before == num_peers * expected
        assert messages == [dict.fromkeys(messages[0], 1)] * 3 * num_iterations * 2
        assert len(messages[0]) == num_peers

    run_ranks(4, body)


@pytest.mark.parametrize("compress_vectors", [None, True])
def test_vectors_in_code_are_one_matrix(compress_vectors: bool | None) -> None:
    """100 numbers in 10 x 10 and one that stays exact: 10 numbers a message, and they come to agree.

    A model that has no matrices is sent so by default.
    """
    layout = FlatLayout.of([(torch.float32, [TensorSpec((60,)), TensorSpec((40,)), TensorSpec((5,), True)])])

    def body(group: dist.ProcessGroup) -> Tensor:
        made = PowerGossip(compress_vectors=compress_vectors)
        gossiper, s = bound(made, ring(2), group), vector_of(group.rank(), layout)
        for t in range(25):
            gossiper.mix(s, t)
        assert gossiper.transport.num_bytes_sent == 25 * (8 + 40 + 24)
        return s.segments[0]

    first, second = run_ranks(2, body)
    start = [vector_of(rank, layout).segments[0] for rank in range(2)]
    torch.testing.assert_close(first + second, start[0] + start[1])
    assert float((first - second)[:100].norm()) < 0.3 * float((start[0] - start[1])[:100].norm())


@pytest.mark.parametrize("compress_vectors", [False, True])
def test_matrices_are_found_in_any_shard(compress_vectors: bool) -> None:
    """A cut leaves torn rows and whole ones: a difference of rank one is gone in two iterations, row by row."""
    layout = FlatLayout.of([(torch.float64, [*map(TensorSpec, [(10, 7), (10, 7), (9,)])])], num_shards=3)
    difference = torch.cat([low_rank(10, 7, 1, seed).flatten() for seed in (0, 1)])

    def body(group: dist.ProcessGroup) -> None:
        s = FlatVector.zeros(layout, CPU)
        s.segments[0][:140] += group.rank() * difference
        for k in range(3):
            shard = s.shard(k, 3)
            gossiper = bound(PowerGossip(compress_vectors=compress_vectors), ring(2), group)
            for t in range(2):
                gossiper.mix(shard, t)
            for segment in shard.layout.segments:
                for first, spec in segment.places():
                    if spec.is_matrix:
                        got = shard.segments[0][first : first + spec.numel]
                        start = k * shard.raw.numel() // 8 + first
                        want = difference[start : start + spec.numel] / 2
                        torch.testing.assert_close(got, want, rtol=0, atol=1e-12)

    run_ranks(2, body)


# Mistakes.


@pytest.mark.parametrize(
    ("option", "value", "least"),
    [
        *(("rank", value, 1) for value in (0, -1, 1.0, True, "1")),
        *(("num_iterations", value, 1) for value in (0, 2.0)),
        *(("check_every", value, 0) for value in (-1, None)),
    ],
)
def test_counts_must_be_integers(option: str, value: Any, least: int) -> None:
    options: dict[str, Any] = {option: value}
    message = rf"PowerGossip: got {option}={value!r}, expected an integer of at least {least}"
    with pytest.raises(ValueError, match=message):
        PowerGossip(**options)


def test_a_state_of_another_rank_is_refused() -> None:
    def body(group: dist.ProcessGroup) -> dict[str, Any]:
        gossiper = bound(PowerGossip(), ring(3), group)
        gossiper.mix(vector_of(group.rank()), 0)
        return restored(gossiper.state_dict())

    states = run_ranks(3, body)
    resumed = bound(PowerGossip(), ring(1), solo_group())
    with pytest.raises(
        ValueError, match=r"got the state of links to \[0, 2\], expected \[\]; load the checkpoint of this"
    ):
        resumed.load_state_dict(states[1])


def test_a_directed_link_is_refused() -> None:
    make: Callable[[], MixingManager] = lambda: MetropolisHastingsMixing(RingGraph(4))  # noqa: E731
    with pytest.raises(ValueError, match="expected a graph whose peers answer each other"):
        bound(PowerGossip(), make(), solo_group())


def test_ends_out_of_step_by_one_iteration() -> None:
    """One sends left factors, the other right ones, of other sizes: an error all the same, on both."""
    layout = FlatLayout.of([(torch.float32, [TensorSpec((40, 3))])])

    def body(group: dist.ProcessGroup) -> None:
        gossiper, s = bound(PowerGossip(), ring(2), group), vector_of(group.rank(), layout)
        for t in range(2):
            gossiper.mix(s, t)
            if t == 0:
                state = restored(gossiper.state_dict())
        if group.rank() == 1:
            gossiper.load_state_dict(state)
        with pytest.raises(
            RuntimeError, match=rf"rank {group.rank()}: round 2: rank {1 - group.rank()} sent its message"
        ):
            gossiper.mix(s, 2)

    run_ranks(2, body)


@pytest.mark.parametrize("algorithm", [PowerGossip(), RelaySGD()], ids=repr)
def test_a_narrow_wire_would_have_no_effect(algorithm: Any) -> None:
    with pytest.raises(ValueError, match=r"got wire_dtype=torch.bfloat16 with \w+\(.*\), expected one of them"):
        GossipDataParallel(mlp(), process_group=solo_group(), algorithm=algorithm, wire_dtype=torch.bfloat16)
