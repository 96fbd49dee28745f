"""Static graphs, schedules of peers, mistakes and very many ranks."""

from __future__ import annotations

import doctest
import time
import tracemalloc
from collections.abc import Callable, Sequence
from itertools import pairwise
from types import ModuleType

import networkx as nx
import pytest

from gossip_modules.graph_manager import (
    CompleteGraph,
    DynamicBipartiteCompleteGraph,
    DynamicBipartiteExponentialGraph,
    DynamicBipartiteLinearGraph,
    DynamicDirectedLinearGraph,
    HypercubeGraph,
    MirroredGraph,
    NetworkXGraph,
    NPeerDynamicDirectedExponentialGraph,
    RingGraph,
    ShiftGraph,
    TorusGraph,
    base,
    networkx_graphs,
    shift_graphs,
)
from tests.library.graph_manager.families import SHIFT_GRAPHS, naive_torus_row, torus_sides


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
        (lambda: RingGraph(0), r"got world_size=0, expected an integer of at least 1; give"),
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
        (lambda: TorusGraph(12, shape=(-3, -4)), r"got shape=\(-3, -4\), expected"),
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


@pytest.mark.parametrize("module", [base, networkx_graphs, shift_graphs])
def test_examples_run(module: ModuleType) -> None:
    assert doctest.testmod(module).failed == 0
