"""A base graph as matchings: sets of links that can be used at the same time, since no two of them share a rank."""

from __future__ import annotations

import math
import operator
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import cycle, pairwise, product
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:  # functions that need it import it: `import gossip_modules` does not wait for networkx
    import networkx as nx

Edge: TypeAlias = tuple[int, int]  # (u, v) with u < v
Matching: TypeAlias = tuple[Edge, ...]  # ascending

_PREDEFINED: tuple[tuple[Matching, ...], ...] = (
    (
        ((0, 4), (1, 5), (2, 3), (6, 7)),
        ((1, 7), (3, 6)),
        ((0, 1), (3, 7), (5, 6)),
        ((0, 7), (1, 2)),
        ((1, 3),),
    ),
    (
        ((0, 12), (1, 9), (2, 3), (4, 8), (5, 14), (6, 11), (7, 13), (10, 15)),
        ((2, 14), (3, 15), (5, 6), (9, 10), (11, 13)),
        ((0, 10), (2, 5), (3, 14), (4, 13), (8, 11)),
        ((5, 11), (8, 13), (14, 15)),
        ((2, 11),),
    ),
    (
        ((0, 8), (1, 10), (2, 7), (3, 13), (4, 9), (5, 6), (11, 14), (12, 15)),
        ((0, 11), (1, 9), (2, 3), (4, 5), (6, 8), (14, 15)),
        ((0, 6), (1, 4), (2, 11), (3, 8), (12, 14)),
        ((0, 5), (3, 6), (8, 11)),
        ((0, 3), (2, 8), (6, 7), (11, 12)),
        ((0, 2), (4, 6), (5, 8), (7, 11)),
        ((0, 4), (2, 6), (3, 7), (8, 15)),
        ((0, 9), (3, 5), (6, 11), (8, 14)),
        ((0, 1), (2, 5), (3, 4), (6, 13), (7, 8), (11, 15)),
        ((8, 12),),
    ),
    (
        ((0, 2), (1, 13), (3, 12), (4, 8), (5, 7), (6, 15), (9, 10), (11, 14)),
        ((0, 11), (1, 15), (2, 6), (3, 9), (4, 12), (5, 13), (7, 14), (8, 10)),
        ((0, 5), (1, 8), (2, 7), (3, 15), (4, 14), (6, 11), (9, 13), (10, 12)),
        ((0, 7), (1, 12), (2, 11), (4, 9), (5, 14), (8, 13)),
        ((1, 5), (4, 10), (6, 7), (8, 14), (12, 13)),
        ((1, 14), (2, 8), (3, 13), (5, 9), (7, 11)),
        ((0, 8), (1, 9), (5, 12), (13, 14)),
        ((1, 3), (2, 5), (8, 9), (10, 14), (13, 15)),
        ((1, 4), (5, 8), (10, 13), (12, 14)),
        ((1, 10), (2, 14), (3, 5), (4, 13), (9, 12)),
        ((0, 14), (1, 2), (5, 6), (8, 12)),
        ((5, 15), (9, 14)),
        ((5, 11),),
    ),
    (
        ((0, 10), (1, 5), (2, 7), (3, 15), (4, 11), (6, 12), (8, 9), (13, 14)),
        ((1, 14), (2, 15), (5, 6), (8, 13), (9, 10), (11, 12)),
        ((1, 8), (2, 10), (3, 9), (5, 12), (6, 11)),
        ((0, 6), (1, 7), (5, 15), (9, 11), (12, 14)),
        ((1, 6), (2, 5), (8, 12), (11, 14)),
        ((3, 14), (5, 10), (11, 13), (12, 15)),
        ((9, 12),),
        ((0, 12),),
    ),
    (
        ((0, 1), (2, 3), (4, 5), (6, 7)),
        ((0, 7), (1, 2), (3, 4), (5, 6)),
    ),
)
"""The links of each predefined graph, see `predefined_matchings`."""


def decompose(graph: nx.Graph, *, costs: Mapping[Edge, float] | None = None) -> list[Matching]:
    """Edge colouring: the links of `graph` as at most max degree + 1 matchings, and as max degree if it is bipartite.

    A link takes a colour that is free at both ends, else one made free by swapping two colours along a path, which
    always succeeds on bipartite graphs (König), else by turning a fan as well, which always succeeds. From Misra and
    Gries, "A constructive proof of Vizing's theorem", Information Processing Letters, 1992. Depends on the links
    only, not on the order in which the graph holds them. Costs O(|V| |E|) as a rule.

    With `costs` a matching takes as long as its slowest link, so links of similar cost belong together. Links are
    then coloured from slow to fast with as few colours as their degrees allow; first fit from slow to fast, which never
    swaps but may need up to 2 max degree - 1 matchings, or the colouring without costs is taken where its total is
    lower. So the full schedule never takes longer than without `costs`; where some links are slow, clearly shorter.

    Args:
        graph: undirected, connected, with the ranks 0..n-1 as nodes; not changed.
        costs: the seconds of each link; None: all links cost the same.

    Returns:
        The matchings, large ones first (with `costs`: slow ones first); the edges (u, v) of each ascending, u < v.

    Raises:
        ValueError: the graph is not as above, or there is not one cost for each link.

    >>> import networkx as nx
    >>> decompose(nx.cycle_graph(4))
    [((0, 1), (2, 3)), ((0, 3), (1, 2))]
    """
    edges = graph_edges(graph)
    if costs is None:
        return sorted(_colored([edges]), key=lambda matching: (-len(matching), matching))
    seconds = link_costs(edges, costs)
    slow_to_fast = sorted(edges, key=lambda edge: (-seconds[edge], edge))
    levels = [[e for e in slow_to_fast if seconds[e] == level] for level in sorted(set(seconds.values()), reverse=True)]
    candidates = (_colored(levels), _colored([slow_to_fast], num_colors=len(edges)), _colored([edges]))
    best = min(candidates, key=lambda matchings: sum(max(seconds[e] for e in matching) for matching in matchings))
    return sorted(best, key=lambda matching: (-max(seconds[e] for e in matching), -len(matching), matching))


def graph_edges(graph: nx.Graph) -> list[Edge]:
    """The links (u, v), u < v, ascending, of a graph that gossip can run on.

    Raises:
        ValueError: the graph is directed or not connected, has parallel links or self-loops, or its nodes are not
            0..n-1.
    """
    if graph.is_directed() or graph.is_multigraph():
        raise ValueError(
            f"got a {type(graph).__name__}, expected an undirected graph without parallel links: a matched pair "
            f"exchanges both ways. Convert it with networkx.Graph(graph)."
        )
    check_ranks(graph)
    return sorted((min(int(u), int(v)), max(int(u), int(v))) for u, v in graph.edges)


def check_ranks(graph: nx.Graph) -> None:
    """Raise ValueError unless the nodes are 0..n-1 and all of them connected, without self-loops.

    A digraph must be strongly connected.
    """
    import networkx as nx

    n = graph.number_of_nodes()
    if n == 0 or set(graph.nodes) != set(range(n)):
        raise ValueError(
            f"got the nodes {excerpt(graph.nodes)}, expected the ranks 0 to {max(n - 1, 0)}. Add links to the missing "
            f"ranks, or rename them with networkx.convert_node_labels_to_integers(graph)."
        )
    if loops := sorted(nx.nodes_with_selfloops(graph)):
        raise ValueError(
            f"got self-loops at {excerpt(loops)}, expected none: a rank's share of itself is a matter of mixing. "
            f"Remove them with graph.remove_edges_from(list(networkx.selfloop_edges(graph)))."
        )
    components = nx.strongly_connected_components if graph.is_directed() else nx.connected_components
    pieces = sorted((sorted(piece) for piece in components(graph)), key=len)
    if len(pieces) > 1:
        raise ValueError(
            f"got a graph in {len(pieces)} pieces (one is {excerpt(pieces[0])}), expected a "
            f"{'strongly connected digraph' if graph.is_directed() else 'connected graph'}: the ranks could never "
            f"agree. Add edges between the pieces."
        )


def as_matchings(matchings: Iterable[Iterable[Iterable[int]]]) -> tuple[Matching, ...]:
    """`matchings`, checked and in the form that `decompose` returns, in the same order. None at all: a world of one.

    Raises:
        ValueError: a pair is no link, a rank is twice in one matching, a link is there twice, or the links do not
            connect all ranks.
    """
    import networkx as nx

    if isinstance(matchings, str) or not isinstance(matchings, Iterable):
        raise ValueError(
            f"got {matchings!r} as a base graph, expected a networkx graph or its matchings. Write e.g. "
            "networkx.cycle_graph(8), or [[(0, 1)], [(1, 2)]]."
        )
    checked = tuple(tuple(sorted(_as_edge(pair) for pair in matching)) for matching in matchings)
    links = nx.Graph() if checked else nx.empty_graph(1)
    for index, matching in enumerate(checked):
        ranks = [rank for edge in matching for rank in edge]
        if len(set(ranks)) < len(ranks) or not matching:
            raise ValueError(
                f"got {excerpt(matching)} as matching {index}, expected at least one link and no rank twice: a rank "
                f"talks to one peer per matching. Make matchings with decompose(graph)."
            )
        if twice := [edge for edge in matching if links.has_edge(*edge)]:
            raise ValueError(
                f"got the links {excerpt(twice)} again in matching {index}, expected each link in one matching. Remove "
                f"the second."
            )
        links.add_edges_from(matching)
    check_ranks(links)
    return checked


def world_size(matchings: Sequence[Matching]) -> int:
    """The number of ranks that checked matchings connect."""
    return 1 + max((v for matching in matchings for _, v in matching), default=0)


def link_costs(edges: Iterable[Edge], costs: Mapping[Edge, float]) -> dict[Edge, float]:
    """The cost of each link, in the order of `edges`; in `costs` a link may be (u, v) or (v, u).

    Raises:
        ValueError: links without a cost or costs without a link, or a cost that is not finite and positive.
    """
    given = {(min(edge), max(edge)): float(cost) for edge, cost in costs.items()}
    wanted = list(edges)
    if len(given) < len(costs) or set(given) != set(wanted):
        missing, unknown = sorted(set(wanted) - set(given)), sorted(set(given) - set(wanted))
        raise ValueError(
            f"got {len(costs)} costs, none for the links {excerpt(missing)} and some for {excerpt(unknown)} which "
            f"are no links, expected one cost for each of the {len(wanted)} links. Measure them all."
        )
    if wrong := {edge: cost for edge, cost in given.items() if not (math.isfinite(cost) and cost > 0)}:
        raise ValueError(f"got the costs {wrong}, expected finite seconds above 0. Measure these links again.")
    return {edge: given[edge] for edge in wanted}


def predefined_matchings(index: int) -> tuple[Matching, ...]:
    """The links of a predefined graph, in as many matchings as its max degree, which is the fewest possible.

    The graphs are from Wang, Sahu, Yang, Joshi, Kar, "MATCHA: Speeding Up Decentralized SGD via Matching
    Decomposition Sampling", ICC 2019, arXiv:1905.09435.

    Args:
        index: the number of the graph. 0: Erdos-Renyi, 8 ranks, max degree 5 (its Fig. 1); 1, 2, 3: geometric, 16
            ranks, max degree 5, 10, 13 (Fig. A.3 a, b, c); 4: Erdos-Renyi, 16 ranks, max degree 8 (Fig. 3 b); 5: a ring
            of 8.

    Raises:
        ValueError: there is no such graph.

    >>> predefined_matchings(5)[1]
    ((0, 7), (1, 2), (3, 4), (5, 6))
    """
    if index not in range(len(_PREDEFINED)):
        raise ValueError(f"got graph {index!r}, expected 0 to {len(_PREDEFINED) - 1}: the predefined base graphs.")
    return _PREDEFINED[index]


def select_graph(index: int) -> nx.Graph:
    """The predefined graph `index`, see `predefined_matchings`; nodes in ascending order.

    >>> select_graph(5).number_of_edges()
    8
    """
    import networkx as nx

    matchings = predefined_matchings(index)
    graph = nx.empty_graph(world_size(matchings))
    graph.add_edges_from(sorted(edge for matching in matchings for edge in matching))
    return graph


def matchings_of(graph: nx.Graph, *, costs: Mapping[Edge, float] | None = None) -> tuple[Matching, ...]:
    """The matchings that a plan for `graph` uses: the published ones of a predefined graph, else `decompose(graph)`.

    A graph with the links of a predefined one is that graph, however it was made. Its other decompositions into as few
    matchings have other probabilities and another, often worse, rho. With `costs` links of similar cost belong
    together, so `decompose` serves every graph.

    Args and Raises: as `decompose`.

    >>> matchings_of(select_graph(0)) == predefined_matchings(0)
    True
    """
    edges = graph_edges(graph)
    if costs is None:
        for matchings in _PREDEFINED:
            if edges == sorted(edge for matching in matchings for edge in matching):
                return matchings
    return tuple(decompose(graph, costs=costs))


def _colored(levels: Sequence[Sequence[Edge]], *, num_colors: int | None = None) -> list[Matching]:
    """Colour the links level by level, each level with `num_colors`, or as many as the degrees up to it ask for."""
    coloring = _Coloring()
    degrees: Counter[int] = Counter()
    for edges in levels:
        degrees.update(rank for edge in edges for rank in edge)
        for u, v in edges:
            coloring.add(u, v, num_colors=num_colors or max(degrees.values()))
    by_color: dict[int, list[Edge]] = defaultdict(list)
    for u, peers in coloring.peers.items():
        for color, v in peers.items():
            if u < v:
                by_color[color].append((u, v))
    return [tuple(sorted(by_color[color])) for color in sorted(by_color)]


class _Coloring:
    """A partial edge colouring: `peers[u][c]` is the rank that u meets in colour c."""

    def __init__(self) -> None:
        self.peers: dict[int, dict[int, int]] = defaultdict(dict)

    def add(self, u: int, v: int, *, num_colors: int) -> None:
        """Colour the link u-v with one of `num_colors` >= max degree, or with one more where that takes a fan."""
        colors = range(num_colors)
        color = next((c for c in colors if c not in self.peers[u] and c not in self.peers[v]), None)
        if color is not None:
            self._set(u, v, color)
            return
        for c, d in product(self._free(u, num_colors), self._free(v, num_colors)):
            if self._path(v, c, d)[-1] != u:
                self._swap(v, c, d)
                self._set(u, v, c)
                return
        self._turn_fan(u, v, num_colors + 1)

    def _turn_fan(self, u: int, v: int, num_colors: int) -> None:
        """The step of Misra and Gries; `num_colors` leaves a free colour at every rank."""
        fan, links = [v], []  # links[i] is the colour of u-fan[i + 1], free at fan[i]
        around_u = self.peers[u]
        while free := [c for c in self._free(fan[-1], num_colors) if c in around_u and around_u[c] not in fan]:
            fan.append(around_u[free[0]])
            links.append(free[0])
        c, d = self._free(u, num_colors)[0], self._free(fan[-1], num_colors)[0]
        self._swap(u, d, c)  # now d is free at u; the link of the fan that had d, if there is one, has c
        links = [c if color == d else color for color in links]
        end = 0  # of the fan, the ranks up to the first one where d is free
        while d in self.peers[fan[end]]:
            end += 1
        for i in range(end):
            self._unset(u, fan[i + 1], links[i])
            self._set(u, fan[i], links[i])
        self._set(u, fan[end], d)

    def _free(self, u: int, num_colors: int) -> list[int]:
        return [c for c in range(num_colors) if c not in self.peers[u]]

    def _path(self, start: int, first: int, second: int) -> list[int]:
        """The ranks on the path from `start` whose links have the colours first, second, first, ..."""
        path, color = [start], first
        while color in self.peers[path[-1]]:
            path.append(self.peers[path[-1]][color])
            color = second if color == first else first
        return path

    def _swap(self, start: int, first: int, second: int) -> None:
        links = list(pairwise(self._path(start, first, second)))
        for (u, v), color in zip(links, cycle((first, second)), strict=False):
            self._unset(u, v, color)
        for (u, v), color in zip(links, cycle((second, first)), strict=False):
            self._set(u, v, color)

    def _set(self, u: int, v: int, color: int) -> None:
        self.peers[u][color], self.peers[v][color] = v, u

    def _unset(self, u: int, v: int, color: int) -> None:
        del self.peers[u][color], self.peers[v][color]


def _as_edge(pair: Iterable[int]) -> Edge:
    try:
        u, v = (operator.index(rank) for rank in pair)
    except (TypeError, ValueError):
        u = v = -1
    if u == v or min(u, v) < 0:
        raise ValueError(
            f"got {pair!r} as a link, expected a pair of different ranks from 0 on. Write matchings as lists "
            "of links, e.g. [[(0, 1)], [(1, 2)]]."
        ) from None
    return min(u, v), max(u, v)


def excerpt(items: Iterable[Any]) -> str:
    """The first few of `items`, for an error message."""
    shown = list(items)
    return f"{shown[:8]}"[:-1] + (", ...]" if len(shown) > 8 else "]")
