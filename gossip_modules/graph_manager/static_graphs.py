"""Well-known graphs (ring, torus, hypercube, complete), and any graph of networkx.

All but the ring walk through their row like the dynamic graphs when `peers_per_itr` is less than the length of the
row, and are static when it is the whole row.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from hashlib import sha256
from math import isqrt
from typing import TYPE_CHECKING, Any

from .base import GraphManager, as_count
from .edge_coloring import excerpt
from .shift_graph import ShiftGraph, distinct

if TYPE_CHECKING:
    import networkx as nx


class RingGraph(ShiftGraph):
    """A ring that never changes: one peer per round is the directed ring (always +1), two are both neighbours.

    >>> RingGraph(5, peers_per_itr=2).out_peers(rank=0, t=7)
    (1, 4)
    """

    def shifts(self, num_peers: int) -> Sequence[int]:
        return distinct((1, self.world_size - 1))

    def _round_shifts(self, t: int) -> tuple[int, ...]:
        return tuple(self._rows[self.num_peers(t)][: self.num_peers(t)])

    def _segment_period(self, num_peers: int) -> int:
        return 1


class TorusGraph(ShiftGraph):
    """A grid of ranks, row by row, whose sides are glued: peers to the right, left, below and above.

    `peers_per_itr=4` is the static torus; fewer peers take turns, all ranks in the same direction. A side of length
    1 or 2 has fewer distinct neighbours.

    Args:
        world_size: the number of ranks n.
        peers_per_itr: the number of peers per round, or a schedule of it.
        shape: (rows, columns) with `rows * columns == world_size`; by default the most square one.

    >>> TorusGraph(12).phone_book(0)  # 3 x 4
    (1, 3, 4, 8)
    """

    def __init__(
        self,
        world_size: int,
        *,
        peers_per_itr: int | Mapping[int, int] = 1,
        shape: tuple[int, int] | None = None,
    ) -> None:
        n = as_count("world_size", world_size)
        rows = next(r for r in range(isqrt(n), 0, -1) if n % r == 0)
        if shape is None and rows == 1 and n > 3:
            raise ValueError(
                f"TorusGraph: got world_size={n}, a prime, expected a product of two sides >= 2. Take RingGraph({n}), "
                f"which is what a torus of one row is, or start one rank more or less."
            )
        self.shape = shape or (rows, n // rows)
        if len(self.shape) != 2 or as_count("rows", self.shape[0]) * as_count("columns", self.shape[1]) != n:
            raise ValueError(
                f"TorusGraph: got shape={shape}, expected (rows, columns) with rows * columns == world_size == {n}, "
                f"e.g. {(rows, n // rows)}."
            )
        super().__init__(world_size, peers_per_itr=peers_per_itr)

    def shifts(self, num_peers: int) -> Sequence[int]:
        # The shift that leads to the cell (row, column) is the rank of that cell.
        rows, columns = self.shape
        return distinct((1 % columns, columns - 1, 1 % rows * columns, (rows - 1) * columns))

    def add(self, rank: int, shift: int) -> int:
        rows, columns = self.shape
        row = (rank // columns + shift // columns) % rows
        return row * columns + (rank + shift) % columns

    def negate(self, shift: int) -> int:
        rows, columns = self.shape
        return -(shift // columns) % rows * columns + -shift % columns

    def __repr__(self) -> str:
        return f"{super().__repr__()[:-1]}, shape={self.shape})"

    def _connects(self, shifts: Iterable[int]) -> bool:
        return True  # one period visits the whole row, and one step along each side leads everywhere


class HypercubeGraph(ShiftGraph):
    """Ranks whose binary digits differ in one place are neighbours: `rank XOR 2^i`; n is a power of two.

    `peers_per_itr=log2(n)` is the static hypercube. With one peer, round t exchanges along dimension `t mod
    log2(n)` in pairs, and log2(n) rounds of uniform averaging give the exact average: the dimension exchange of
    Cybenko, "Dynamic load balancing for distributed memory multiprocessors", Journal of Parallel and Distributed
    Computing, 1989.

    >>> HypercubeGraph(8).phone_book(5)
    (4, 7, 1)
    """

    def shifts(self, num_peers: int) -> Sequence[int]:
        return tuple(1 << i for i in range(self.world_size.bit_length() - 1))

    def add(self, rank: int, shift: int) -> int:
        return rank ^ shift

    def negate(self, shift: int) -> int:
        return shift

    def _check_world_size(self) -> None:
        n = self.world_size
        if n & (n - 1):
            below = 1 << (n.bit_length() - 1)
            raise ValueError(
                f"HypercubeGraph: got world_size={n}, expected a power of two. Start {below} or {2 * below} ranks, or "
                f"take NPeerDynamicDirectedExponentialGraph, which works for every size."
            )

    def _connects(self, shifts: Iterable[int]) -> bool:
        return True  # one period visits the whole row, that is every dimension


class CompleteGraph(ShiftGraph):
    """All ranks with all: `peers_per_itr=n-1` is static and averages exactly; fewer peers take turns: +1, +2, +3, ...

    >>> CompleteGraph(4, peers_per_itr=3).out_peers(rank=1, t=0)
    (2, 3, 0)
    """

    def shifts(self, num_peers: int) -> Sequence[int]:
        return range(1, self.world_size)


class NetworkXGraph(GraphManager):
    """Any connected networkx graph, or strongly connected digraph, with nodes 0..n-1. Edge weights are not looked at.

    The row of a rank is its neighbours (digraph: successors) in ascending order. Ranks with a shorter row than others
    come around earlier, so with `peers_per_itr` a round of an undirected graph is in general neither symmetric nor
    regular. The graph is copied: changing it afterwards has no effect here.

    Args:
        graph: the networkx graph; an edge u -> v means that u sends to v.
        peers_per_itr: the number of peers per round, or a schedule of it. None: all neighbours in every round, which
            is a static graph.

    Raises:
        ValueError: the nodes are not 0..n-1, there are self-loops, the graph is not connected, or peers_per_itr is
            more than any rank has.

    >>> import networkx as nx
    >>> NetworkXGraph(nx.star_graph(3)).out_peers(rank=0, t=0)
    (1, 2, 3)
    """

    def __init__(self, graph: nx.Graph, *, peers_per_itr: int | Mapping[int, int] | None = None) -> None:
        import networkx as nx

        n = graph.number_of_nodes()
        if n == 0 or set(graph.nodes) != set(range(n)):
            raise ValueError(
                f"NetworkXGraph: got the nodes {excerpt(graph.nodes)}, expected the ranks 0 to {max(n - 1, 0)}. "
                f"Rename them with networkx.convert_node_labels_to_integers(graph)."
            )
        if loops := sorted(nx.nodes_with_selfloops(graph)):
            raise ValueError(
                f"NetworkXGraph: got self-loops at {excerpt(loops)}, expected none: a rank's share of itself is a "
                f"matter of mixing. Remove them with graph.remove_edges_from(list(networkx.selfloop_edges(graph)))."
            )
        components = nx.strongly_connected_components if graph.is_directed() else nx.connected_components
        pieces = sorted((sorted(piece) for piece in components(graph)), key=len)
        if len(pieces) > 1:
            wanted = "strongly connected digraph" if graph.is_directed() else "connected graph"
            raise ValueError(
                f"NetworkXGraph: got a graph in {len(pieces)} pieces (one is {excerpt(pieces[0])}), "
                f"expected a {wanted}: the ranks could never agree. Add edges between the pieces."
            )
        self._out = _sorted_rows(graph.adj, n)
        self._in = _sorted_rows(graph.pred, n) if graph.is_directed() else self._out
        most = max(map(len, self._out))
        super().__init__(n, peers_per_itr=most or 1 if peers_per_itr is None else peers_per_itr)
        asked = max(self._segments.values())
        if asked > most:
            raise self._too_many_peers(asked, most)
        self._colors = nx.bipartite.color(graph) if not graph.is_directed() and nx.is_bipartite(graph) else None

    def phone_book(self, rank: int) -> Sequence[int]:
        self._check_rank(rank)
        return self._out[rank]

    def in_peers(self, rank: int, t: int) -> tuple[int, ...]:
        self._check_rank(rank)
        start, num_peers = self._segment(t)
        return tuple(j for j in self._in[rank] if self._is_in_window(j, rank, num_peers, t - start))

    def out_degree(self, rank: int, t: int) -> int:
        return min(self.num_peers(t), len(self.phone_book(rank)))

    @property
    def is_bipartite(self) -> bool:
        """Whether the networkx graph is undirected and has two classes; passive is the class of rank 0."""
        return self._colors is not None

    def is_passive(self, rank: int) -> bool:
        self._check_rank(rank)
        return self._colors is not None and self._colors[rank] == self._colors[0]

    def __repr__(self) -> str:
        return f"{super().__repr__()[:-1]}, edges_sha256={self._digest})"

    def _is_in_window(self, rank: int, peer: int, num_peers: int, step: int) -> bool:
        """Whether `peer`, which is in the row of `rank`, is in the `window` of this step, without making the window."""
        row = self._out[rank]
        return num_peers >= len(row) or (bisect_left(row, peer) - num_peers * step) % len(row) < num_peers

    @cached_property
    def _digest(self) -> str:
        return sha256(repr(self._out).encode()).hexdigest()


class ChainGraph(NetworkXGraph):
    """A chain: rank i and rank i + 1 are neighbours, and the ends have one neighbour each; it never changes.

    >>> ChainGraph(4).phone_book(1)
    (0, 2)
    """

    def __init__(self, world_size: int) -> None:
        import networkx as nx

        super().__init__(nx.path_graph(as_count("world_size", world_size)))


class DoubleBinaryTreeGraph(NetworkXGraph):
    """The links of two binary trees over all ranks, where an inner rank of one is a leaf of the other; never changes.

    In the first tree rank i - 1 is below the nearest of the numbers around i that are divisible by a higher power of
    two. The second one is the first with its ranks in reverse, for odd n with every rank moved on by one. Each tree has
    a depth of about log2 n, and a rank has three neighbours in it at most. From Sanders, Speck, Traeff, "Two-tree
    algorithms for full bandwidth broadcast, reduction and scan", Parallel Computing, 2009.

    Attributes:
        trees: the links (i, j) of each tree.

    >>> DoubleBinaryTreeGraph(4).trees
    (((0, 1), (1, 3), (2, 1)), ((3, 2), (2, 0), (1, 2)))
    """

    def __init__(self, world_size: int) -> None:
        import networkx as nx

        n = as_count("world_size", world_size)
        first = tuple((i - 1, above - 1) for i in range(1, n + 1) if (above := _above(i, n)))
        move = (lambda rank: (rank + 1) % n) if n % 2 else (lambda rank: n - 1 - rank)
        self.trees = first, tuple((move(i), move(j)) for i, j in first)
        links = nx.empty_graph(n)
        links.add_edges_from(link for tree in self.trees for link in tree)
        super().__init__(links)


def _above(i: int, n: int) -> int:
    """The number above i in the binary tree of the numbers 1 to n in their order; 0: it is the root."""
    bit = i & -i
    above = (i - bit) | 2 * bit
    return above if above <= n else i - bit


def networkx_graph(graph: GraphManager) -> nx.Graph:
    """The links that an undirected graph ever uses, as a networkx graph with ascending nodes: a base for MATCHA.

    Raises:
        ValueError: the graph is directed.

    >>> networkx_graph(RingGraph(4, peers_per_itr=2)).number_of_edges()
    4
    """
    import networkx as nx

    if not graph.is_symmetric:
        raise ValueError(f"got {graph!r}, expected an undirected graph, e.g. RingGraph(n, peers_per_itr=2).")
    links = nx.Graph()
    links.add_nodes_from(range(graph.world_size))
    links.add_edges_from((i, j) for i in range(graph.world_size) for j in graph.phone_book(i))
    return links


def _sorted_rows(neighbours: Mapping[Any, Iterable[Any]], n: int) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(sorted(map(int, neighbours[rank]))) for rank in range(n))
