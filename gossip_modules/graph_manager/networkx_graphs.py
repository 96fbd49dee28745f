"""Graphs from networkx: any graph of your own, chains, double binary trees, and the base graphs of MATCHA."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import TYPE_CHECKING

from ..checks import checked_integer
from .base import GraphManager
from .matchings import check_ranks

if TYPE_CHECKING:
    import networkx as nx


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

    Attributes:
        is_bipartite: whether the networkx graph is undirected and has two classes; passive is the class of rank 0.

    >>> import networkx as nx
    >>> NetworkXGraph(nx.star_graph(3)).out_peers(rank=0, t=0)
    (1, 2, 3)
    """

    def __init__(self, graph: nx.Graph, *, peers_per_itr: int | Mapping[int, int] | None = None) -> None:
        import networkx as nx

        check_ranks(graph)
        n = graph.number_of_nodes()
        self._out, self._in = (
            tuple(tuple(sorted(map(int, neighbours[rank]))) for rank in range(n))
            for neighbours in (graph.adj, graph.pred if graph.is_directed() else graph.adj)
        )
        most = max(map(len, self._out))
        super().__init__(n, peers_per_itr=most or 1 if peers_per_itr is None else peers_per_itr)
        asked = max(self._segments.values())
        if asked > most:
            raise self._too_many_peers(asked, most)
        self.is_bipartite = not graph.is_directed() and nx.is_bipartite(graph)
        self._colors = nx.bipartite.color(graph) if self.is_bipartite else None

    def phone_book(self, rank: int) -> Sequence[int]:
        self._check_rank(rank)
        return self._out[rank]

    def in_peers(self, rank: int, t: int) -> tuple[int, ...]:
        self._check_rank(rank)
        num_peers = self.num_peers(t)
        return tuple(j for j in self._in[rank] if num_peers >= len(self._out[j]) or rank in self.out_peers(j, t))

    def out_degree(self, rank: int, t: int) -> int:
        return min(self.num_peers(t), len(self.phone_book(rank)))

    def is_passive(self, rank: int) -> bool:
        self._check_rank(rank)
        return self._colors is not None and self._colors[rank] == self._colors[0]

    def __repr__(self) -> str:
        return f"{super().__repr__()[:-1]}, edges_sha256={sha256(repr(self._out).encode()).hexdigest()})"


class ChainGraph(NetworkXGraph):
    """A chain: rank i and rank i + 1 are neighbours, and the ends have one neighbour each; it never changes.

    >>> ChainGraph(4).phone_book(1)
    (0, 2)
    """

    def __init__(self, world_size: int) -> None:
        import networkx as nx

        super().__init__(nx.path_graph(checked_integer("world_size", world_size, 1, "give the number of ranks")))


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

        n = checked_integer("world_size", world_size, 1, "give the number of ranks")
        first = tuple((i - 1, above - 1) for i in range(1, n + 1) if (above := _above(i, n)))
        moved = [(rank + 1) % n if n % 2 else n - 1 - rank for rank in range(n)]
        self.trees = first, tuple((moved[i], moved[j]) for i, j in first)
        links = nx.empty_graph(n)
        links.add_edges_from(link for tree in self.trees for link in tree)
        super().__init__(links)


def _above(i: int, n: int) -> int:
    """The number above i in the binary tree of the numbers 1 to n in their order; 0: it is the root."""
    bit = i & -i
    above = (i - bit) | 2 * bit
    return above if above <= n else i - bit


def petersen_graph() -> nx.Graph:
    """The graph of Petersen: 10 ranks with three neighbours each, two hops apart at most."""
    import networkx as nx

    return nx.petersen_graph()


def dyck_graph() -> nx.Graph:
    """The graph of Dyck: 32 ranks with three neighbours each, five hops apart at most."""
    import networkx as nx

    return nx.LCF_graph(32, [5, -5, 13, -13], 8)


def networkx_graph(graph: GraphManager) -> nx.Graph:
    """The links that an undirected graph ever uses, as a networkx graph with ascending nodes: a base for MATCHA.

    Raises:
        ValueError: the graph is directed.

    >>> from gossip_modules.graph_manager import RingGraph
    >>> networkx_graph(RingGraph(4, peers_per_itr=2)).number_of_edges()
    4
    """
    import networkx as nx

    if not graph.is_symmetric:
        raise ValueError(f"got {graph!r}, expected an undirected graph, e.g. RingGraph(n, peers_per_itr=2).")
    links = nx.empty_graph(graph.world_size)
    links.add_edges_from((i, j) for i in range(graph.world_size) for j in graph.phone_book(i))
    return links
