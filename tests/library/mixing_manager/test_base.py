"""Mixing weights: sums of rows and columns, the mean that they keep, and the speed at which ranks agree."""

from __future__ import annotations

import copy
import doctest
import math
import pickle
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import networkx as nx
import numpy as np
import pytest
import torch
from torch import Tensor

from gossip_modules.graph_manager import (
    CompleteGraph,
    DynamicBipartiteExponentialGraph,
    DynamicBipartiteLinearGraph,
    DynamicDirectedExponentialGraph,
    DynamicDirectedLinearGraph,
    HypercubeGraph,
    NetworkXGraph,
    NPeerDynamicDirectedExponentialGraph,
    RingGraph,
    TorusGraph,
)
from gossip_modules.graph_manager.base import GraphManager
from gossip_modules.matcha.graph import MatchaGraph
from gossip_modules.mixing_manager import LaplacianMixing
from gossip_modules.mixing_manager import base as mixing_manager
from gossip_modules.mixing_manager import matrix as matrix_mixing
from gossip_modules.mixing_manager.base import MetropolisHastingsMixing, MixingManager, MixingWeights, UniformMixing
from gossip_modules.mixing_manager.matrix import MatrixMixing

# A directed graph whose ranks have different degrees: uniform weights are column-stochastic only.
IRREGULAR = nx.DiGraph([(0, 1), (1, 2), (2, 3), (3, 0), (0, 2), (0, 3)])


SIZES = (1, 2, 3, 4, 6, 8, 9, 12, 16)


def graphs_of_size(n: int) -> Iterator[GraphManager]:
    yield DynamicDirectedExponentialGraph(n)
    yield NPeerDynamicDirectedExponentialGraph(n)
    yield DynamicDirectedLinearGraph(n)
    yield RingGraph(n)
    yield CompleteGraph(n, peers_per_itr=max(1, n - 1))
    yield NetworkXGraph(nx.path_graph(n))
    yield NetworkXGraph(nx.star_graph(n - 1))
    if n > 2:
        yield RingGraph(n, peers_per_itr=2)
        yield NPeerDynamicDirectedExponentialGraph(n, peers_per_itr=2)
        yield NPeerDynamicDirectedExponentialGraph(n, peers_per_itr={0: 2, 5: 1})
        yield NetworkXGraph(nx.cycle_graph(n), peers_per_itr=1)
    if n % 2 == 0:
        yield DynamicBipartiteExponentialGraph(n)
        yield DynamicBipartiteLinearGraph(n)
    if n in (4, 8, 16):
        yield HypercubeGraph(n)
        yield HypercubeGraph(n, peers_per_itr=2)
    if n > 3:
        yield TorusGraph(n, peers_per_itr=2)
    if n == 4:
        yield NetworkXGraph(IRREGULAR)
        yield NetworkXGraph(IRREGULAR, peers_per_itr=1)
        yield NetworkXGraph(nx.star_graph(3), peers_per_itr={0: 3, 5: 1})


def mixings_of_size(n: int) -> Iterator[MixingManager]:
    for graph in graphs_of_size(n):
        yield UniformMixing(graph)
        if graph.is_symmetric:
            yield MetropolisHastingsMixing(graph)
        yield MatrixMixing(graph, UniformMixing(graph).matrix)


EVERY_SIZE = pytest.mark.parametrize("n", SIZES)


def ones(n: int) -> Tensor:
    return torch.ones(n, dtype=torch.float64)


def product_of_period(mixing: MixingManager) -> Tensor:
    product = torch.eye(mixing.graph.world_size, dtype=torch.float64)
    for t in range(mixing.period):
        product = mixing.matrix(t) @ product
    return product


@EVERY_SIZE
def test_weights_are_on_the_edges_and_the_rows_of_the_matrix(n: int) -> None:
    for mixing in mixings_of_size(n):
        for t in range(8):
            matrix = mixing.matrix(t)
            assert (matrix.shape, matrix.dtype) == ((n, n), torch.float64)
            for rank in range(n):
                own, inp = mixing.weights(rank, t)
                assert tuple(inp) == mixing.graph.in_peers(rank, t)
                row = dict.fromkeys(range(n), 0.0) | {rank: own} | dict(inp)
                assert matrix[rank].tolist() == [row[j] for j in range(n)]


@EVERY_SIZE
def test_predicates_agree_with_the_sums(n: int) -> None:
    for mixing in mixings_of_size(n):
        ranks = ones(n)
        matrices = [mixing.matrix(t) for t in mixing.graph.distinct_rounds()]
        are_rows = all(torch.allclose(matrix @ ranks, ranks, atol=1e-12) for matrix in matrices)
        are_columns = all(torch.allclose(ranks @ matrix, ranks, atol=1e-12) for matrix in matrices)
        assert mixing.is_row_stochastic == are_rows
        assert mixing.is_column_stochastic == are_columns
        assert mixing.is_doubly_stochastic == (are_rows and are_columns)


@EVERY_SIZE
def test_is_symmetric_agrees_with_the_matrices(n: int) -> None:
    for mixing in mixings_of_size(n):
        matrices = [mixing.matrix(t) for t in mixing.graph.distinct_rounds()]
        assert mixing.is_symmetric == all(torch.allclose(matrix, matrix.T, rtol=0, atol=1e-12) for matrix in matrices)


def test_symmetry_is_asked_of_every_matrix_of_a_schedule() -> None:
    graph = RingGraph(3, peers_per_itr=2)
    even, skew = (
        torch.full((3, 3), 1 / 3).double(),
        torch.tensor([[0.5, 0.5, 0], [0, 0.5, 0.5], [0.5, 0, 0.5]]).double(),
    )
    assert MatrixMixing(graph, [even, even]).is_symmetric
    assert not MatrixMixing(graph, [even, skew]).is_symmetric
    assert not MatrixMixing(graph, skew).is_symmetric


def test_laplacian_weights_are_symmetric_on_random_graphs_too() -> None:
    graph = MatchaGraph(nx.cycle_graph(4), budget=0.5)
    assert graph.is_dynamic
    assert LaplacianMixing(graph).is_symmetric
    assert MetropolisHastingsMixing(graph).is_symmetric
    assert LaplacianMixing(NetworkXGraph(nx.star_graph(4))).is_symmetric


@EVERY_SIZE
def test_push_sum_finds_the_mean(n: int) -> None:
    for mixing in mixings_of_size(n):
        generator = torch.Generator().manual_seed(n)
        x, w = torch.randn(n, 3, dtype=torch.float64, generator=generator), ones(n)
        mean = x.mean(0)
        matrices = {t: mixing.matrix(t) for t in mixing.graph.distinct_rounds()}
        for t in range(1500):
            matrix = matrices[mixing.graph.canonical_round(t)]
            x, w = matrix @ x, matrix @ w
            if t < 12:  # the total is kept in each round, also across the switch of a schedule
                torch.testing.assert_close(x.mean(0), mean, atol=1e-12, rtol=0)
                assert float(w.sum()) == pytest.approx(n, abs=1e-9)
                assert not mixing.is_doubly_stochastic or torch.allclose(w, ones(n), atol=1e-12)
            if (x / w[:, None] - mean).abs().max() < 1e-9 and t >= 12:
                break
        torch.testing.assert_close(x / w[:, None], mean.expand(n, 3), atol=1e-8, rtol=0)


@EVERY_SIZE
def test_repr_tells_weights_apart_and_survives_copies(n: int) -> None:
    for mixing in mixings_of_size(n):
        for copied in (copy.deepcopy(mixing), pickle.loads(pickle.dumps(mixing))):  # noqa: S301
            assert repr(copied) == repr(mixing)
            assert torch.equal(copied.matrix(3), mixing.matrix(3))
        assert repr(mixing.graph) in repr(mixing)


@EVERY_SIZE
def test_spectral_gap_is_the_second_eigenvalue_of_a_period(n: int) -> None:
    for graph in graphs_of_size(n):
        mixing = UniformMixing(graph)
        if graph.period == 0:
            with pytest.raises(
                ValueError, match=r"num_rounds=None and a schedule of period 0, expected .* Give num_rounds"
            ):
                mixing.spectral_gap()
            assert 0 < mixing.spectral_gap(num_rounds=20) <= 1
            continue
        moduli = torch.linalg.eigvals(product_of_period(mixing)).abs().sort().values.tolist()
        assert moduli[-1] == pytest.approx(1)
        second = moduli[-2] if len(moduli) > 1 else 0.0
        # An eigenvalue 0 of a defective product comes out as far as eps^(1/3) from 0.
        assert (1 - mixing.spectral_gap()) ** graph.period == pytest.approx(second, abs=1e-5)


def test_spectral_gap_of_known_graphs() -> None:
    ring = RingGraph(8, peers_per_itr=2)  # eigenvalues (1 + 2 cos(2 pi k / n)) / 3
    assert UniformMixing(ring).spectral_gap() == pytest.approx(1 - (1 + 2 * math.cos(math.pi / 4)) / 3)
    directed = RingGraph(5)  # eigenvalues (1 + exp(2 pi i k / n)) / 2
    assert UniformMixing(directed).spectral_gap() == pytest.approx(1 - math.cos(math.pi / 5))
    star = NetworkXGraph(nx.star_graph(3))  # Metropolis on a star: I - Laplacian / n, second eigenvalue 1 - 1 / n
    assert MetropolisHastingsMixing(star).spectral_gap() == pytest.approx(1 / 4)
    assert UniformMixing(CompleteGraph(7, peers_per_itr=6)).spectral_gap() == 1
    assert UniformMixing(RingGraph(1)).spectral_gap() == 1


def test_spectral_gap_of_a_part_of_a_period() -> None:
    pairs = UniformMixing(DynamicBipartiteExponentialGraph(8))
    assert pairs.spectral_gap(num_rounds=1) == pytest.approx(0)  # one matching leaves the other pairs alone
    assert pairs.spectral_gap() > 0.2
    with pytest.raises(ValueError, match=r"got num_rounds=0 .* expected at least one round"):
        pairs.spectral_gap(num_rounds=0)


def test_spectral_gap_of_a_long_horizon_does_not_underflow() -> None:
    mixing = UniformMixing(RingGraph(4, peers_per_itr=2))  # second eigenvalue 1 / 3, and 3 ** -1000 is no double
    assert mixing.spectral_gap(num_rounds=1000) == pytest.approx(2 / 3)


def test_spectral_gap_is_negative_where_the_error_grows() -> None:
    weights = torch.tensor([[-1.0, 2.0], [2.0, -1.0]], dtype=torch.float64)  # eigenvalues 1 and -3
    assert MatrixMixing(RingGraph(2), weights).spectral_gap() == pytest.approx(-2)


@pytest.mark.parametrize(
    "graph",
    [
        *(NPeerDynamicDirectedExponentialGraph(2**k) for k in range(1, 6)),
        NPeerDynamicDirectedExponentialGraph(9, peers_per_itr=2),
        NPeerDynamicDirectedExponentialGraph(27, peers_per_itr=2),
        NPeerDynamicDirectedExponentialGraph(16, peers_per_itr=3),
        *(HypercubeGraph(2**k) for k in range(1, 6)),
        CompleteGraph(6, peers_per_itr=5),
    ],
    ids=repr,
)
def test_finite_time_graphs_average_exactly_in_one_period(graph: GraphManager) -> None:
    n = graph.world_size
    mixing = UniformMixing(graph)
    torch.testing.assert_close(product_of_period(mixing), torch.full((n, n), 1 / n, dtype=torch.float64))
    assert mixing.spectral_gap() == 1
    assert graph.period <= max(1, math.log2(n))


def test_uniform_weights_are_those_of_the_senders() -> None:
    mixing = UniformMixing(NetworkXGraph(IRREGULAR))  # 0 sends to three ranks, the others to one
    assert mixing.weights(3, 0) == MixingWeights(own=1 / 2, inp={0: 1 / 4, 2: 1 / 2})
    assert mixing.is_column_stochastic
    assert not mixing.is_doubly_stochastic


def test_uniform_on_an_irregular_graph_may_still_be_doubly_stochastic() -> None:
    # A pair beside a triangle: degrees differ between ranks, but not between those that talk to each other.
    class PairAndTriangle(GraphManager):
        def phone_book(self, rank: int) -> tuple[int, ...]:
            return ((1,), (0,), (3, 4), (2, 4), (2, 3))[rank]

    mixing = UniformMixing(PairAndTriangle(5, peers_per_itr=2))
    assert not mixing.graph.is_regular
    assert mixing.is_doubly_stochastic


def test_metropolis_weights_look_at_both_degrees() -> None:
    mixing = MetropolisHastingsMixing(NetworkXGraph(nx.path_graph(4)))
    assert mixing.weights(0, 0) == MixingWeights(own=1 - 1 / 3, inp={1: 1 / 3})
    assert mixing.matrix(0).tolist() == mixing.matrix(0).T.tolist()


@pytest.mark.parametrize("graph", [RingGraph(5), RingGraph(5, peers_per_itr={0: 2, 9: 1}), NetworkXGraph(IRREGULAR)])
def test_metropolis_refuses_directed_rounds(graph: GraphManager) -> None:
    with pytest.raises(ValueError, match=r"MetropolisHastingsMixing: got .*expected a graph whose peers answer.*Take"):
        MetropolisHastingsMixing(graph)


class Lazy(MixingManager):
    """Weights of your own in a few lines: half of everything stays where it is."""

    def weights(self, rank: int, t: int) -> MixingWeights:
        peers = self.graph.in_peers(rank, t)
        return MixingWeights(own=0.5 if peers else 1.0, inp=dict.fromkeys(peers, 0.5 / max(1, len(peers))))


def test_a_mixing_of_your_own_knows_its_sums() -> None:
    assert Lazy(RingGraph(6, peers_per_itr=2)).is_doubly_stochastic
    star = Lazy(NetworkXGraph(nx.star_graph(3)))
    assert star.is_row_stochastic
    assert not star.is_column_stochastic


@pytest.mark.parametrize("mixing_class", [UniformMixing, MetropolisHastingsMixing])
def test_regular_graphs_cost_nothing(mixing_class: Callable[[GraphManager], MixingManager]) -> None:
    mixing = mixing_class(DynamicBipartiteExponentialGraph(10**6))
    assert mixing.is_doubly_stochastic
    assert mixing.is_symmetric
    assert mixing.weights(7, 3) == MixingWeights(own=0.5, inp=dict.fromkeys(mixing.graph.in_peers(7, 3), 0.5))


def test_uniform_mixing_is_symmetric_where_its_matrices_are() -> None:
    graphs = [
        RingGraph(5),
        RingGraph(5, peers_per_itr=2),
        DynamicBipartiteExponentialGraph(6),
        NetworkXGraph(nx.star_graph(3)),  # symmetric, not regular
    ]
    for graph in graphs:
        mixing = UniformMixing(graph)
        matrices = [mixing.matrix(t) for t in range(max(mixing.period, 1))]
        assert mixing.is_symmetric == all(torch.equal(matrix, matrix.T) for matrix in matrices), graph


class TestMatrixMixing:
    RING = ((0.5, 0.25, 0.25), (0.25, 0.5, 0.25), (0.25, 0.25, 0.5))

    @pytest.mark.parametrize("make", [np.array, torch.tensor, list, lambda rows: [torch.tensor(row) for row in rows]])
    def test_takes_arrays_tensors_and_lists(self, make: Callable[[Any], Any]) -> None:
        mixing = MatrixMixing(RingGraph(3, peers_per_itr=2), make(self.RING))
        assert mixing.matrix(5).tolist() == [list(row) for row in self.RING]
        assert mixing.weights(1, 7) == MixingWeights(own=0.5, inp={0: 0.25, 2: 0.25})
        assert mixing.is_doubly_stochastic

    def test_copies_the_matrix(self) -> None:
        given = torch.tensor(self.RING, dtype=torch.float64)
        mixing = MatrixMixing(RingGraph(3, peers_per_itr=2), given)
        before = repr(mixing)
        given.zero_()
        mixing.matrix(0).zero_()
        assert mixing.matrix(0).tolist() == [list(row) for row in self.RING]
        assert repr(mixing) == before
        assert repr(MatrixMixing(RingGraph(3, peers_per_itr=2), torch.eye(3))) != before

    def test_one_direction_of_stochasticity_is_enough(self) -> None:
        graph = NetworkXGraph(nx.complete_graph(2))
        columns = MatrixMixing(graph, [[0.5, 1.0], [0.5, 0.0]])
        assert (columns.is_column_stochastic, columns.is_row_stochastic) == (True, False)
        rows = MatrixMixing(graph, [[0.5, 0.5], [1.0, 0.0]])
        assert (rows.is_column_stochastic, rows.is_row_stochastic) == (False, True)
        assert rows.weights(1, 0) == MixingWeights(own=0.0, inp={0: 1.0})

    def test_zero_weights_keep_their_key(self) -> None:
        assert MatrixMixing(RingGraph(2), torch.eye(2)).weights(0, 0) == MixingWeights(own=1.0, inp={1: 0.0})

    def test_laplacian_weights_may_be_negative(self) -> None:
        star = nx.star_graph(3)
        laplacian = nx.laplacian_matrix(star).toarray()
        mixing = MatrixMixing(NetworkXGraph(star), np.eye(4) - 0.5 * laplacian)
        assert mixing.weights(0, 0).own == -0.5
        assert mixing.is_doubly_stochastic

    def test_sequence_is_used_in_turn(self) -> None:
        ring = RingGraph(2)
        mixing = MatrixMixing(ring, [torch.eye(2), torch.full((2, 2), 0.5)])
        assert mixing.period == 2
        assert [mixing.weights(0, t).own for t in range(5)] == [1.0, 0.5, 1.0, 0.5, 1.0]
        assert mixing.spectral_gap() == 1

    def test_sequence_and_graph_of_other_periods(self) -> None:
        graph = NPeerDynamicDirectedExponentialGraph(4)  # period 2
        half = [UniformMixing(graph).matrix(t) for t in range(2)]
        eye = torch.eye(4, dtype=torch.float64)
        mixing = MatrixMixing(graph, [half[0], half[1], eye, half[1]])
        assert mixing.period == 4
        with pytest.raises(ValueError, match=r"off the edges of the graph in round 3, first W\["):
            MatrixMixing(graph, [half[0], half[1], eye])

    def test_function_follows_the_rounds_of_the_graph(self) -> None:
        graph = NPeerDynamicDirectedExponentialGraph(9, peers_per_itr={0: 2, 10: 1})
        uniform = UniformMixing(graph)
        mixing = MatrixMixing(graph, uniform.matrix)
        assert mixing.period == 0
        for t in (0, 1, 9, 10, 13, 99):
            assert torch.equal(mixing.matrix(t), uniform.matrix(t))
            assert mixing.weights(4, t) == uniform.weights(4, t)

    @pytest.mark.parametrize(
        ("graph", "weights", "message"),
        [
            (RingGraph(3), torch.eye(2), r"got a W of shape \[1, 2, 2\], expected \[3, 3\]"),
            (RingGraph(2), [0.5, 0.5], r"got a W of shape \[1, 2\], expected \[2, 2\]"),
            (RingGraph(2), [[1.0], [0.0, 1.0]], r"got a W that is no matrix .*expected numbers \[2, 2\]. Give"),
            (RingGraph(2), "W", r"got a W that is no matrix .*expected numbers"),
            (RingGraph(2), [[math.nan, 1], [1, 0]], r"NaN or infinite entries, expected finite"),
            (RingGraph(2), [[math.inf, 1], [1, 0]], r"NaN or infinite entries, expected finite"),
            (RingGraph(3), [[0.5, 0.5, 0], [0, 0.5, 0.5], [0.5, 0, 0.5]], r"3 weights off the edges .*0, 1"),
            (
                RingGraph(2),
                [[0.5, 0.4], [0.4, 0.5]],
                r"row 0 of round 0 sums to 0.9 \(2 rows are off\) and column 0 of",
            ),
            (
                RingGraph(2),
                [[1.0, 0.0], [0.0, 1.1]],
                r"row 1 of round 0 sums to 1.1 \(1 rows are off\) and column 1 of",
            ),
            (RingGraph(2), [torch.eye(2), torch.zeros(2, 2)], r"row 0 of round 1 sums to 0"),
            (
                HypercubeGraph(4),
                torch.eye(4),
                r"a W of 1 matrices for .* of period 2, expected a static.*Give a function",
            ),
            (RingGraph(4, peers_per_itr={0: 2, 3: 1}), [torch.eye(4)] * 2, r"of period 0, expected .*Give a function"),
            (CompleteGraph(2**17), lambda t: torch.eye(1), r"more than 65536 matrices .*expected fewer. Derive"),
        ],
    )
    def test_refuses_with_got_expected_remedy(self, graph: GraphManager, weights: Any, message: str) -> None:
        with pytest.raises(ValueError, match=f"MatrixMixing: .*{message}"):
            MatrixMixing(graph, weights)

    def test_sums_may_be_off_by_rounding_only(self) -> None:
        MatrixMixing(RingGraph(2), torch.full((2, 2), 0.5) + 4e-7)
        with pytest.raises(ValueError, match=r"to sum to 1 within 1e-06 in every round\. Divide"):
            MatrixMixing(RingGraph(2), torch.full((2, 2), 0.5) + 1e-6)


@pytest.mark.parametrize("module", [matrix_mixing, mixing_manager])
def test_examples_run(module: ModuleType) -> None:
    assert doctest.testmod(module).failed == 0
