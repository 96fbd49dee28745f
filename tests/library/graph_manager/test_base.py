"""Every graph keeps the contract of GraphManager in every round and for every world size, or says why it cannot."""

from __future__ import annotations

import copy
import doctest
import pickle
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from math import log2
from types import ModuleType
from typing import Any

import networkx as nx
import numpy as np
import pytest

from gossip_modules.graph_manager import base as graph_manager
from gossip_modules.graph_manager import dynamic_graphs, shift_graph, static_graphs
from gossip_modules.graph_manager.base import GraphManager
from gossip_modules.graph_manager.dynamic_graphs import (
    DynamicBipartiteCompleteGraph,
    DynamicBipartiteExponentialGraph,
    DynamicBipartiteLinearGraph,
    DynamicDirectedExponentialGraph,
    DynamicDirectedLinearGraph,
    NPeerDynamicDirectedExponentialGraph,
)
from gossip_modules.graph_manager.shift_graph import MirroredGraph, ShiftGraph
from gossip_modules.graph_manager.static_graphs import (
    CompleteGraph,
    HypercubeGraph,
    NetworkXGraph,
    RingGraph,
    TorusGraph,
)

SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16)
PEERS = (1, 2, 3, 4, 15)


def naive_row(distances: Sequence[int], n: int) -> list[int]:
    """The row of rank 0, the long way round."""
    row: list[int] = []
    for distance in distances:
        peer = distance % n
        if peer != 0 and peer not in row:
            row.append(peer)
    return row


def exponents(n: int) -> range:
    return range(round(log2(n)) + 2)


def both(distances: Sequence[int]) -> list[int]:
    return [signed for distance in distances for signed in (distance, -distance)]


def torus_sides(n: int) -> tuple[int, int]:
    return max(((r, n // r) for r in range(1, n + 1) if n % r == 0 and r * r <= n), key=lambda sides: sides[0])


def naive_torus_row(n: int) -> list[int]:
    rows, columns = torus_sides(n)
    return naive_row([1 % columns, columns - 1, columns if rows > 1 else 0, (rows - 1) * columns], n)


# Per class: for which n it exists, and the row of an active rank 0 by the definition.
SHIFT_GRAPHS: dict[type[ShiftGraph], tuple[Callable[[int], bool], Callable[[int, int], list[int]]]] = {
    DynamicDirectedExponentialGraph: (
        lambda n: True,
        lambda n, p: naive_row(both([2**i for i in exponents(n) if 2**i <= n - 1]), n),
    ),
    NPeerDynamicDirectedExponentialGraph: (
        lambda n: True,
        lambda n, p: naive_row(
            [j * (p + 1) ** i for i in exponents(n) if (p + 1) ** i <= n - 1 for j in range(1, p + 1)], n
        ),
    ),
    DynamicBipartiteExponentialGraph: (
        lambda n: n == 1 or n % 2 == 0,
        lambda n, p: naive_row(both([1, *(1 + 2**i for i in exponents(n) if i >= 1 and 2**i <= n - 1)]), n),
    ),
    DynamicDirectedLinearGraph: (lambda n: True, lambda n, p: naive_row(both(range(1, n, 2)), n)),
    DynamicBipartiteLinearGraph: (
        lambda n: n == 1 or n % 2 == 0,
        lambda n, p: naive_row(both(range(1, n, 2)), n),
    ),
    RingGraph: (lambda n: True, lambda n, p: naive_row([1, -1], n)),
    TorusGraph: (lambda n: n <= 3 or torus_sides(n)[0] > 1, lambda n, p: naive_torus_row(n)),
    HypercubeGraph: (lambda n: n in (1, 2, 4, 8, 16), lambda n, p: [2**i for i in exponents(n) if 2**i < n]),
    CompleteGraph: (lambda n: True, lambda n, p: list(range(1, n))),
}


def chorded_cycle(n: int) -> nx.DiGraph:
    """A directed cycle, and every second rank also sends three ahead: irregular for most n."""
    graph = nx.DiGraph()
    graph.add_nodes_from(range(n))
    graph.add_edges_from((i, (i + 1) % n) for i in range(n) if n > 1)
    graph.add_edges_from((i, (i + 3) % n) for i in range(0, n, 2) if n != 3 and n > 1)
    return graph


NETWORKS: dict[str, Callable[[int], nx.Graph]] = {
    "path": nx.path_graph,
    "star": lambda n: nx.star_graph(n - 1),
    "complete": nx.complete_graph,
    "wheel": lambda n: nx.wheel_graph(n) if n > 3 else nx.complete_graph(n),
    "chorded cycle": chorded_cycle,
}


class Chain(GraphManager):
    """The least that a graph of your own needs: each rank sends to the ranks next to it."""

    def phone_book(self, rank: int) -> Sequence[int]:
        return tuple(peer for peer in (rank - 1, rank + 1) if 0 <= peer < self.world_size)


def families() -> Iterator[tuple[str, list[GraphManager]]]:
    """Per family, the graphs of all sizes and of all the peers per round that exist."""
    schedule = {0: 2, 7: 1}
    for cls, (exists, row) in SHIFT_GRAPHS.items():
        members: list[GraphManager] = []
        for n in filter(exists, SIZES):
            counts: list[Any] = [p for p in PEERS if n == 1 or p <= len(row(n, p))]
            counts += [schedule] if 2 in counts else []
            members += [cls(n, peers_per_itr=p) for p in counts]
        yield cls.__name__, members
    for name, network in NETWORKS.items():
        members = []
        for n in SIZES:
            graph = network(n)
            most = max(dict(graph.out_degree if graph.is_directed() else graph.degree).values())
            counts = [None, 1, 2, schedule] if n == 1 or most > 1 else [None, 1]
            members += [NetworkXGraph(graph, peers_per_itr=p) for p in counts]
        yield name, members
    yield "DynamicBipartiteCompleteGraph", [DynamicBipartiteCompleteGraph(n) for n in SIZES]
    yield "Chain", [Chain(n, peers_per_itr=p) for n in SIZES for p in ((1, 2) if n > 2 else (1,))]


EVERY_GRAPH = pytest.mark.parametrize("graphs", [pytest.param(graphs, id=name) for name, graphs in families()])


def edges(graph: GraphManager, t: int) -> set[tuple[int, int]]:
    return {(i, j) for i in range(graph.world_size) for j in graph.out_peers(i, t)}


def some_rounds(graph: GraphManager) -> range:
    """Two periods, or past every switch of a schedule."""
    return range(min(2 * graph.period, 48) or 24)


@EVERY_GRAPH
def test_peers_are_distinct_others_of_the_phone_book(graphs: list[GraphManager]) -> None:
    for graph in graphs:
        for rank in range(graph.world_size):
            book = tuple(graph.phone_book(rank))
            assert len(set(book)) == len(book)
            assert rank not in book
            for t in some_rounds(graph):
                peers = graph.out_peers(rank, t)
                assert len(set(peers)) == len(peers) == graph.out_degree(rank, t)
                assert set(peers) <= set(book)
                is_left_out = isinstance(graph, DynamicBipartiteCompleteGraph) and graph.world_size % 2 and not peers
                assert len(peers) == min(graph.num_peers(t), len(book)) or is_left_out


@EVERY_GRAPH
def test_in_peers_are_the_transpose_of_out_peers(graphs: list[GraphManager]) -> None:
    for graph in graphs:
        for t in some_rounds(graph):
            transpose = [(j, i) for i in range(graph.world_size) for j in graph.in_peers(i, t)]
            assert len(set(transpose)) == len(transpose)
            assert set(transpose) == edges(graph, t)


@EVERY_GRAPH
def test_period_is_the_least_after_which_peers_repeat(graphs: list[GraphManager]) -> None:
    for graph in graphs:
        rounds = [edges(graph, t) for t in range(2 * graph.period or 24)]
        assert graph.is_dynamic == any(one != rounds[0] for one in rounds)
        for t, one in enumerate(rounds):
            assert one == edges(graph, graph.canonical_round(t))
            assert graph.canonical_round(t) in set(graph.distinct_rounds())
        for shorter in range(1, graph.period):
            assert any(rounds[t] != rounds[t + shorter] for t in range(graph.period))
        assert rounds[: graph.period] == rounds[graph.period :] or graph.period == 0


@EVERY_GRAPH
def test_predicates_say_what_the_rounds_show(graphs: list[GraphManager]) -> None:
    for graph in graphs:
        n = graph.world_size
        is_regular, is_symmetric = True, True
        for t in graph.distinct_rounds():
            degrees = {len(peers(rank, t)) for rank in range(n) for peers in (graph.in_peers, graph.out_peers)}
            is_regular &= len(degrees) == 1
            round_edges = edges(graph, t)
            is_symmetric &= {(j, i) for i, j in round_edges} == round_edges
            if graph.is_bipartite:
                assert all(graph.is_passive(i) != graph.is_passive(j) for i, j in round_edges)
        assert graph.is_regular == is_regular
        assert graph.is_symmetric == is_symmetric
        assert graph.is_bipartite or not any(graph.is_passive(rank) for rank in range(n))


@EVERY_GRAPH
def test_one_period_connects_all_ranks(graphs: list[GraphManager]) -> None:
    for graph in graphs:
        union = nx.DiGraph()
        union.add_nodes_from(range(graph.world_size))
        # The last segment of a schedule goes on for ever, so it has to connect the ranks without the others.
        union.add_edges_from(edge for t in range(100, 100 + (graph.period or 24)) for edge in edges(graph, t))
        assert nx.is_strongly_connected(union)


@EVERY_GRAPH
def test_survives_copies_and_pickling(graphs: list[GraphManager]) -> None:
    for graph in graphs:
        for copied in (copy.deepcopy(graph), pickle.loads(pickle.dumps(graph))):  # noqa: S301
            assert repr(copied) == repr(graph)
            assert all(edges(copied, t) == edges(graph, t) for t in range(5))


def test_graphs_with_the_same_repr_have_the_same_peers() -> None:
    graphs: dict[str, list[list[tuple[int, ...]]]] = {}
    for graph in (graph for _, members in families() for graph in members):
        schedule = [[graph.out_peers(rank, t) for rank in range(graph.world_size)] for t in range(24)]
        assert graphs.setdefault(repr(graph), schedule) == schedule
    assert repr(RingGraph(4)) == "RingGraph(4, peers_per_itr=1)"
    assert repr(RingGraph(4, peers_per_itr={9: 1, 0: 2})) == "RingGraph(4, peers_per_itr={0: 2, 9: 1})"
    assert repr(RingGraph(4, peers_per_itr={0: 2})) == repr(RingGraph(4, peers_per_itr=2))
    assert repr(TorusGraph(12, shape=(2, 6))) != repr(TorusGraph(12))
    assert repr(NetworkXGraph(nx.path_graph(4))) != repr(NetworkXGraph(nx.cycle_graph(4)))


@pytest.mark.parametrize("cls", SHIFT_GRAPHS)
@pytest.mark.parametrize("n", SIZES)
def test_rows_are_those_of_the_definition_or_refused(cls: type[ShiftGraph], n: int) -> None:
    exists, row = SHIFT_GRAPHS[cls]
    for p in PEERS:
        if not exists(n):
            with pytest.raises(ValueError, match=rf"got (world_size={n}|peers_per_itr={p}), .*expected"):
                cls(n, peers_per_itr=p)
        elif n > 1 and p > len(row(n, p)):
            with pytest.raises(ValueError, match=rf"{cls.__name__}: got peers_per_itr={p}, expected 1 to \d+: .*Lower"):
                cls(n, peers_per_itr=p)
        else:
            graph = cls(n, peers_per_itr=p)
            active = 1 if graph.is_bipartite and n > 1 else 0
            expected = [graph.add(active, shift) for shift in row(n, p)]
            assert list(graph.phone_book(active)) == expected
            assert graph.is_bipartite == issubclass(cls, MirroredGraph)


# The rows of rank 0 of the published implementation of SGP (its first release, where bipartite rows are mirrored).
@pytest.mark.parametrize(
    ("cls", "rows"),
    [
        (
            DynamicDirectedExponentialGraph,
            {2: [1], 4: [1, 3, 2], 5: [1, 4, 2, 3], 6: [1, 5, 2, 4], 8: [1, 7, 2, 6, 4], 16: [1, 15, 2, 14, 4, 12, 8]},
        ),
        (
            DynamicBipartiteExponentialGraph,
            {2: [1], 4: [3, 1], 6: [5, 1, 3], 8: [7, 1, 5, 3], 16: [15, 1, 13, 3, 11, 5, 7, 9]},
        ),
        (
            DynamicDirectedLinearGraph,
            {2: [1], 4: [1, 3], 5: [1, 4, 3, 2], 6: [1, 5, 3], 8: [1, 7, 3, 5], 16: [1, 15, 3, 13, 5, 11, 7, 9]},
        ),
        (
            NPeerDynamicDirectedExponentialGraph,
            {2: [1], 4: [1, 2], 5: [1, 2, 4], 6: [1, 2, 4], 8: [1, 2, 4], 16: [1, 2, 4, 8]},
        ),
    ],
)
def test_rows_are_those_of_the_ancestor(cls: type[ShiftGraph], rows: dict[int, list[int]]) -> None:
    assert {n: list(cls(n).phone_book(0)) for n in rows} == rows


def test_active_rows_mirror_passive_rows() -> None:
    rows = {2: [0], 4: [2, 0], 6: [2, 0, 4], 8: [2, 0, 4, 6], 16: [2, 0, 4, 14, 6, 12, 10, 8]}
    assert {n: list(DynamicBipartiteExponentialGraph(n).phone_book(1)) for n in rows} == rows


@pytest.mark.parametrize("cls", [DynamicBipartiteExponentialGraph, DynamicBipartiteLinearGraph])
@pytest.mark.parametrize("n", [2, 4, 6, 12])
def test_bipartite_ranks_exchange_in_pairs(cls: type[MirroredGraph], n: int) -> None:
    graph = cls(n)
    for t in range(2 * graph.period):
        for rank in range(n):
            (peer,) = graph.out_peers(rank, t)
            assert graph.in_peers(rank, t) == (peer,)
            assert graph.out_peers(peer, t) == (rank,)
            assert graph.is_passive(rank) == (rank % 2 == 0)


@pytest.mark.parametrize("n", [n for n in SIZES if n > 1])
def test_every_active_rank_meets_every_passive_rank_once_or_twice_per_period(n: int) -> None:
    """In pairs; with an odd world one passive rank has none."""
    graph = DynamicBipartiteCompleteGraph(n)
    met: list[tuple[int, int]] = []
    for t in range(graph.period):
        paired = [rank for rank in range(n) if graph.out_peers(rank, t)]
        assert len(paired) == n - n % 2
        for rank in paired:
            (peer,) = graph.out_peers(rank, t)
            assert graph.in_peers(rank, t) == (peer,)
            assert graph.out_peers(peer, t) == (rank,)
            assert graph.is_passive(rank) != graph.is_passive(peer)
            if graph.is_passive(peer):
                met.append((rank, peer))
    assert set(met) == {(active, passive) for active in range(1, n, 2) for passive in range(0, n, 2)}
    assert max(Counter(met).values(), default=0) <= 2


def test_meeting_every_passive_rank_mixes_much_faster_than_a_ring() -> None:
    for n in (63, 64):
        graph, errors = DynamicBipartiteCompleteGraph(n), np.eye(n) - 1 / n
        for t in range(100):
            mixed = np.eye(n)
            for rank in range(n):
                for peer in graph.in_peers(rank, t):
                    mixed[rank, [rank, peer]] = 0.5
            errors = mixed @ errors
        assert np.linalg.norm(errors, 2) < 1e-6  # a ring takes thousands of rounds


@pytest.mark.parametrize("base", [2, 3, 4])
def test_exact_powers_are_counted_in_integers(base: int) -> None:
    # In floating point log(243) / log(3) rounds down to 4.
    powers = [base**i for i in range(6)]
    exact = NPeerDynamicDirectedExponentialGraph(powers[5], peers_per_itr=base - 1)
    assert list(exact.phone_book(0)) == [j * power for power in powers[:5] for j in range(1, base)]
    assert powers[5] in NPeerDynamicDirectedExponentialGraph(powers[5] + 1, peers_per_itr=base - 1).phone_book(0)


def test_window_walks_through_the_row_and_wraps() -> None:
    graph = DynamicDirectedExponentialGraph(8, peers_per_itr=2)  # row 1 7 2 6 4
    assert [graph.out_peers(0, t) for t in range(6)] == [(1, 7), (2, 6), (4, 1), (7, 2), (6, 4), (1, 7)]
    assert graph.period == 5


@pytest.mark.parametrize(
    "graph",
    [
        RingGraph(6),
        RingGraph(6, peers_per_itr=2),
        CompleteGraph(6, peers_per_itr=5),
        HypercubeGraph(8, peers_per_itr=3),
        TorusGraph(12, peers_per_itr=4),
        DynamicDirectedExponentialGraph(8, peers_per_itr=5),
    ],
    ids=repr,
)
def test_the_whole_row_at_once_is_static(graph: GraphManager) -> None:
    assert (graph.is_dynamic, graph.period) == (False, 1)
    assert graph.out_peers(2, 0) == graph.out_peers(2, 12345)


def test_directed_ring_always_sends_forward() -> None:
    graph = RingGraph(5)
    assert all(graph.out_peers(4, t) == (0,) and graph.in_peers(4, t) == (3,) for t in range(4))
    assert not graph.is_symmetric
    assert RingGraph(5, peers_per_itr=2).is_symmetric
    assert RingGraph(2).is_symmetric


def test_torus_neighbours_are_the_adjacent_cells() -> None:
    for n in (4, 6, 9, 12, 16):
        grid = nx.grid_2d_graph(*torus_sides(n), periodic=True)
        columns = torus_sides(n)[1]
        length = len(naive_torus_row(n))
        graph = TorusGraph(n, peers_per_itr=length)
        for row, column in grid.nodes:
            neighbours = {r * columns + c for r, c in grid[row, column]} - {row * columns + column}
            assert set(graph.out_peers(row * columns + column, 0)) >= neighbours
    assert TorusGraph(12, shape=(1, 12)).phone_book(0) == (1, 11)
    assert TorusGraph(12, shape=(6, 2)).phone_book(0) == (1, 2, 10)


def test_hypercube_exchanges_along_one_dimension_per_round() -> None:
    graph = HypercubeGraph(8)
    assert [graph.out_peers(5, t) for t in range(3)] == [(4,), (7,), (1,)]
    assert graph.is_symmetric


class TestPeersPerItrSchedule:
    def test_switches_at_the_round_given(self) -> None:
        graph = NPeerDynamicDirectedExponentialGraph(9, peers_per_itr={0: 2, 3000: 1})
        before, after = (NPeerDynamicDirectedExponentialGraph(9, peers_per_itr=p) for p in (2, 1))
        for t in (0, 1, 2998, 2999):
            assert graph.num_peers(t) == 2
            assert graph.out_peers(4, t) == before.out_peers(4, t)
        for t in (3000, 3001, 5000):
            assert graph.num_peers(t) == 1
            assert graph.out_peers(4, t) == after.out_peers(4, t - 3000)
        assert (graph.period, graph.is_dynamic) == (0, True)

    def test_phone_book_is_the_union_of_the_segments(self) -> None:
        graph = NPeerDynamicDirectedExponentialGraph(9, peers_per_itr={0: 2, 10: 1})
        assert graph.phone_book(0) == (1, 2, 3, 6, 4, 8)  # p=2: 1 2 3 6; p=1: 1 2 4 8

    def test_distinct_rounds_of_a_short_segment_stop_at_its_end(self) -> None:
        graph = NPeerDynamicDirectedExponentialGraph(16, peers_per_itr={0: 1, 2: 3, 50: 1})
        assert list(graph.distinct_rounds()) == [0, 1, 2, 3, 50, 51, 52, 53]
        assert [graph.canonical_round(t) for t in (1, 5, 49, 54)] == [1, 3, 3, 50]

    def test_symmetric_in_one_segment_only_is_not_symmetric(self) -> None:
        assert RingGraph(5, peers_per_itr={0: 2}).is_symmetric
        assert not RingGraph(5, peers_per_itr={0: 2, 10: 1}).is_symmetric

    @pytest.mark.parametrize("schedule", [{}, {1: 2}, {-1: 1, 0: 1}, {0: 1, 2.5: 2}, {0: 1, True: 2}])
    def test_refuses_rounds_that_leave_a_gap(self, schedule: dict[int, int]) -> None:
        with pytest.raises(ValueError, match=r"got peers_per_itr=.*expected \{first round: peers\}.*Write e\.g\."):
            RingGraph(4, peers_per_itr=schedule)

    def test_refuses_too_many_peers_in_a_later_segment(self) -> None:
        with pytest.raises(ValueError, match=r"got peers_per_itr=3, expected 1 to 2: with world_size=6"):
            RingGraph(6, peers_per_itr={0: 1, 100: 3})


@pytest.mark.parametrize("cls", SHIFT_GRAPHS)
@pytest.mark.parametrize("peers_per_itr", [1, 7, {0: 2, 3: 1}])
def test_a_world_of_one_has_no_peers(cls: type[ShiftGraph], peers_per_itr: int | dict[int, int]) -> None:
    graph = cls(1, peers_per_itr=peers_per_itr)
    assert (tuple(graph.phone_book(0)), graph.out_peers(0, 5), graph.in_peers(0, 5)) == ((), (), ())
    assert (graph.period, graph.is_dynamic, graph.is_regular, graph.is_symmetric) == (1, False, True, True)
    assert (graph.num_peers(3), graph.out_degree(0, 3)) == (0, 0)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RingGraph(0), r"got world_size=0, expected an integer of at least 1\. Give"),
        (lambda: RingGraph(-3), r"got world_size=-3, expected"),
        (lambda: RingGraph("4"), r"got world_size='4', expected an integer"),  # type: ignore[arg-type]
        (lambda: RingGraph(4.0), r"got world_size=4.0, expected an integer"),  # type: ignore[arg-type]
        (lambda: RingGraph(True), r"got world_size=True, expected an integer"),
        (lambda: RingGraph(4, peers_per_itr=0), r"got peers_per_itr=0, expected an integer of at least 1"),
        (lambda: RingGraph(4, peers_per_itr=1.5), r"got peers_per_itr=1\.5, expected an integer"),  # type: ignore[arg-type]
        (lambda: RingGraph(4, peers_per_itr={0: 1, 5: 0}), r"got peers_per_itr\[5\]=0, expected an integer"),
        (lambda: RingGraph(9, peers_per_itr=3), r"RingGraph: got peers_per_itr=3, expected 1 to 2: .* Lower"),
        (lambda: DynamicBipartiteExponentialGraph(5), r"got world_size=5, expected an even number.*or take RingGraph"),
        (lambda: DynamicBipartiteLinearGraph(7), r"got world_size=7, expected an even number"),
        (lambda: DynamicBipartiteCompleteGraph(5, peers_per_itr=2), r"got peers_per_itr=2, expected 1: .* makes pairs"),
        (lambda: HypercubeGraph(12), r"got world_size=12, expected a power of two\. Start 8 or 16 ranks"),
        (lambda: TorusGraph(7), r"got world_size=7, a prime, expected a product.*Take RingGraph\(7\)"),
        (lambda: TorusGraph(12, shape=(3, 5)), r"got shape=\(3, 5\), expected .* == 12, e\.g\. \(3, 4\)"),
        (lambda: TorusGraph(12, shape=(12,)), r"got shape=\(12,\), expected"),  # type: ignore[arg-type]
        (lambda: TorusGraph(12, shape=(-3, -4)), r"got rows=-3, expected"),
        (lambda: NetworkXGraph(nx.Graph()), r"got the nodes \[\], expected the ranks 0 to 0"),
        (lambda: NetworkXGraph(nx.path_graph(["a", "b"])), r"got the nodes \['a', 'b'\].*convert_node_labels_to_int"),
        (lambda: NetworkXGraph(nx.Graph([(0, 1), (1, 1)])), r"self-loops at \[1\], expected none.*selfloop_edges"),
        (lambda: NetworkXGraph(nx.Graph([(0, 1), (2, 3)])), r"in 2 pieces .*expected a connected graph.*Add edges"),
        (lambda: NetworkXGraph(nx.DiGraph([(0, 1)])), r"in 2 pieces .*expected a strongly connected digraph"),
        (lambda: NetworkXGraph(nx.path_graph(9), peers_per_itr=3), r"got peers_per_itr=3, expected 1 to 2"),
        (lambda: RingGraph(4).out_peers(4, 0), r"got rank 4, expected 0 to 3"),
        (lambda: RingGraph(4).in_peers(-1, 0), r"got rank -1, expected 0 to 3"),
        (lambda: RingGraph(4).phone_book(9), r"got rank 9, expected 0 to 3"),
        (lambda: RingGraph(4).out_peers(0, -1), r"got round t=-1, expected t >= 0"),
    ],
)
def test_refuses_with_got_expected_remedy(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


class Strides(ShiftGraph):
    """Multiples of 3."""

    def shifts(self, num_peers: int) -> Sequence[int]:
        return tuple(range(3, self.world_size, 3))


class FarPairs(MirroredGraph):
    """Pairs at the distances 1 and 5."""

    def shifts(self, num_peers: int) -> Sequence[int]:
        return (1, 5)


def test_refuses_shifts_that_do_not_connect() -> None:
    assert Strides(8).out_peers(7, 1) == (5,)
    assert FarPairs(6).is_symmetric
    for make in (lambda: Strides(9), lambda: FarPairs(8)):
        with pytest.raises(
            ValueError, match=r"got shifts that never lead .* expected a graph that is strongly connected"
        ):
            make()


def test_networkx_rows_are_sorted_neighbours() -> None:
    graph = NetworkXGraph(nx.Graph([(0, 2), (0, 1), (0, 3), (3, 2)]))
    assert [graph.out_peers(rank, 9) for rank in range(4)] == [(1, 2, 3), (0,), (0, 3), (0, 2)]
    assert graph.in_peers(0, 0) == (1, 2, 3)
    directed = NetworkXGraph(nx.DiGraph([(0, 1), (1, 2), (2, 0), (0, 2)]))
    assert (directed.out_peers(0, 0), directed.in_peers(0, 0), directed.in_peers(2, 0)) == ((1, 2), (2,), (0, 1))


def test_networkx_two_colours_are_active_and_passive() -> None:
    graph = NetworkXGraph(nx.Graph([(0, 3), (3, 1), (1, 2)]))
    assert graph.is_bipartite
    assert [graph.is_passive(rank) for rank in range(4)] == [True, True, False, False]
    assert not NetworkXGraph(nx.cycle_graph(5)).is_bipartite


def test_networkx_period_is_the_least_common_multiple_of_the_rows() -> None:
    # Degrees 2, 3, 4 and leaves: rows repeat after that many rounds.
    graph = NetworkXGraph(nx.Graph([(0, 1), (1, 2), (1, 3), (2, 4), (2, 5), (2, 6), (0, 7)]), peers_per_itr=1)
    assert graph.period == 12
    assert not graph.is_regular


def test_networkx_period_beyond_2_to_the_31_counts_as_never() -> None:
    # Hubs with 2, 3, 5, ..., 29 leaves and one edge more to each neighbouring hub make a long common period.
    tree = nx.Graph()
    hubs: list[int] = []
    for degree in (4, 9, 5, 7, 11, 13, 17, 19, 23, 29):
        hub = tree.number_of_nodes()
        num_leaves = degree - (2 if 0 < len(hubs) < 9 else 1)
        tree.add_edges_from((hub, hub + 1 + leaf) for leaf in range(num_leaves))
        hubs.append(hub)
    tree.add_edges_from(pairwise(hubs))
    graph = NetworkXGraph(tree, peers_per_itr=1)
    assert graph.period == 0
    assert graph.is_dynamic
    assert not graph.is_regular
    assert graph.canonical_round(10**12) == 10**12
    assert set(graph.in_peers(hubs[3], 10**12)) <= set(tree[hubs[3]])


def test_scan_of_a_long_schedule_gives_up_with_false() -> None:
    graph = CompleteGraph(1000)  # 999 rounds of 1000 ranks
    seen: list[int] = []

    def look(t: int) -> bool:
        seen.append(t)
        return True

    assert not graph.in_every_round(look)
    assert 0 < len(seen) < 999
    assert CompleteGraph(100).in_every_round(lambda t: True)


@pytest.mark.parametrize("cls", SHIFT_GRAPHS)
def test_a_million_ranks_cost_nothing(cls: type[ShiftGraph]) -> None:
    n = 2**20 if cls is HypercubeGraph else 1_000_000

    def query() -> None:
        graph = cls(n, peers_per_itr={0: 2, 10: 1})
        assert len(graph.out_peers(n - 1, 10**9)) == 1
        assert len(graph.in_peers(7, 3)) == 2
        assert graph.phone_book(n - 1)[-1] != n - 1

    seconds = []
    for _ in range(3):  # the least of three: others may use this machine
        start = time.perf_counter()
        query()
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < 10e-3
    tracemalloc.start()
    try:
        query()
        assert tracemalloc.get_traced_memory()[1] < 32 * 1024
    finally:
        tracemalloc.stop()


def test_lazy_rows_are_sequences() -> None:
    graph = DynamicDirectedLinearGraph(1_000_001)
    row = graph.phone_book(3)
    assert (len(row), row[0], row[1], row[-1]) == (1_000_000, 4, 2, 5)  # the last is -999,999, which is +2
    assert row[:3] == (4, 2, 6)
    assert row[4:1:-2] == (8, 6)
    with pytest.raises(IndexError):
        row[1_000_000]
    assert DynamicDirectedLinearGraph(8).phone_book(0) == (1, 7, 3, 5)
    assert DynamicDirectedLinearGraph(8).phone_book(0) == DynamicDirectedLinearGraph(8).phone_book(0)
    assert DynamicDirectedLinearGraph(8).phone_book(0) != (1, 7, 3)
    assert list(CompleteGraph(4).phone_book(2)) == [3, 0, 1]


@pytest.mark.parametrize("module", [dynamic_graphs, graph_manager, shift_graph, static_graphs])
def test_examples_run(module: ModuleType) -> None:
    assert doctest.testmod(module).failed == 0
