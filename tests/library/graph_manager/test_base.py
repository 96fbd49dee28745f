"""What holds of every graph, and the rows of the shift graphs."""

from __future__ import annotations

import copy
import pickle
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

import networkx as nx
import numpy as np
import pytest

from gossip_modules.graph_manager import (
    CompleteGraph,
    DynamicBipartiteCompleteGraph,
    DynamicBipartiteExponentialGraph,
    DynamicBipartiteLinearGraph,
    DynamicDirectedExponentialGraph,
    DynamicDirectedLinearGraph,
    EquiDynGraph,
    EquiStaticGraph,
    HypercubeGraph,
    MirroredGraph,
    NetworkXGraph,
    NPeerDynamicDirectedExponentialGraph,
    RandomGraph,
    RandomMatchingGraph,
    RandomPushGraph,
    RingGraph,
    ShiftGraph,
    StaticExponentialGraph,
    TorusGraph,
)
from gossip_modules.graph_manager.base import GraphManager
from gossip_modules.graph_manager.base_graph import BaseGraph
from tests.library.graph_manager.families import SHIFT_GRAPHS

SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16)


PEERS = (1, 2, 3, 4, 15)


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
    base_graphs: list[GraphManager] = [BaseGraph(n, p) for n in SIZES for p in PEERS if p < n]
    yield "BaseGraph", [*base_graphs, BaseGraph(1), BaseGraph(7, schedule), BaseGraph(12, schedule)]
    counts = [(n, p) for n in SIZES for p in PEERS if p < max(2, n)]
    equi_static: list[GraphManager] = [EquiStaticGraph(n, p, seed=1) for n, p in counts]
    equi_static += [EquiStaticGraph(n, directed=False) for n in SIZES]
    yield "EquiStaticGraph", [*equi_static, EquiStaticGraph(9, schedule), EquiStaticGraph(8, 3, directed=False)]
    equi_dyn: list[GraphManager] = [EquiDynGraph(n, p) for n, p in counts]
    equi_dyn += [EquiDynGraph(n, directed=False, seed=2) for n in SIZES]
    yield "EquiDynGraph", [*equi_dyn, EquiDynGraph(7, schedule)]
    yield "RandomMatchingGraph", [RandomMatchingGraph(n, seed=3) for n in (1, 2, 3, 4, 7, 8)]
    few = [(n, p) for n, p in counts if n in (1, 2, 3, 5, 8)]
    yield "RandomPushGraph", [*(RandomPushGraph(n, p) for n, p in few), RandomPushGraph(9, schedule)]
    yield "StaticExponentialGraph", [*map(StaticExponentialGraph, SIZES), StaticExponentialGraph(9, schedule)]
    yield "Chain", [Chain(n, peers_per_itr=p) for n in SIZES for p in ((1, 2) if n > 2 else (1,))]


EVERY_GRAPH = pytest.mark.parametrize("graphs", [pytest.param(graphs, id=name) for name, graphs in families()])


def edges(graph: GraphManager, t: int) -> set[tuple[int, int]]:
    return {(i, j) for i in range(graph.world_size) for j in graph.out_peers(i, t)}


def some_rounds(graph: GraphManager) -> range:
    """Two periods, or past every switch of a schedule."""
    return range(min(2 * graph.period, 48) or 24)


def distinct_rounds(graph: GraphManager) -> Iterator[int]:
    """All of them, or the first ones of a graph whose rounds are random."""
    return islice(graph.distinct_rounds(), 24 if isinstance(graph, RandomGraph) else None)


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
                makes_pairs = isinstance(graph, DynamicBipartiteCompleteGraph | RandomMatchingGraph)
                is_left_out = not peers and (
                    (makes_pairs and graph.world_size % 2) or (isinstance(graph, EquiDynGraph) and not graph.directed)
                )
                has_fewer = isinstance(graph, BaseGraph) and len(peers) < graph.num_peers(t)
                assert len(peers) == min(graph.num_peers(t), len(book)) or is_left_out or has_fewer


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
            assert graph.canonical_round(t) in set(distinct_rounds(graph))
        for shorter in range(1, graph.period):
            assert any(rounds[t] != rounds[t + shorter] for t in range(graph.period))
        assert rounds[: graph.period] == rounds[graph.period :] or graph.period == 0


@EVERY_GRAPH
def test_predicates_agree_with_the_rounds(graphs: list[GraphManager]) -> None:
    for graph in graphs:
        n = graph.world_size
        is_regular, is_symmetric = True, True
        for t in distinct_rounds(graph):
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
    assert repr(EquiStaticGraph(8)) == "EquiStaticGraph(8, peers_per_itr=3, seed=0, directed=True)"
    assert len({repr(EquiDynGraph(8, directed=flag, seed=seed)) for flag in (True, False) for seed in (0, 1)}) == 4
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
