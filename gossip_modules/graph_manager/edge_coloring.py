"""A base graph as matchings: sets of links that can be used at the same time, since no two of them share a rank."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:  # functions that need it import it: `import gossip_modules` does not wait for networkx
    import networkx as nx

Edge: TypeAlias = tuple[int, int]  # (u, v) with u < v
Matching: TypeAlias = tuple[Edge, ...]  # ascending


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
        return sorted(_vizing([edges]), key=lambda matching: (-len(matching), matching))
    seconds = link_costs(edges, costs)
    slow_to_fast = sorted(edges, key=lambda edge: (-seconds[edge], edge))
    levels = [[e for e in slow_to_fast if seconds[e] == level] for level in sorted(set(seconds.values()), reverse=True)]
    candidates = (_vizing(levels), _first_fit(slow_to_fast), _vizing([edges]))
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
    n = graph.number_of_nodes()
    if n == 0 or set(graph.nodes) != set(range(n)):
        raise ValueError(
            f"got the nodes {excerpt(graph.nodes)}, expected the ranks 0 to {max(n - 1, 0)}. Rename them with "
            f"networkx.convert_node_labels_to_integers(graph)."
        )
    edges = sorted((min(int(u), int(v)), max(int(u), int(v))) for u, v in graph.edges)
    _check_connected(n, edges)
    return edges


def as_matchings(matchings: Iterable[Iterable[Iterable[int]]]) -> tuple[Matching, ...]:
    """`matchings`, checked and in the form that `decompose` returns, in the same order. None at all: a world of one.

    Raises:
        ValueError: a pair is no link, a rank is twice in one matching, a link is there twice, or the links do not
            connect all ranks.
    """
    if isinstance(matchings, str) or not isinstance(matchings, Iterable):
        raise ValueError(
            f"got {matchings!r} as a base graph, expected a networkx graph or its matchings. Write e.g. "
            "networkx.cycle_graph(8), or [[(0, 1)], [(1, 2)]]."
        )
    checked = tuple(tuple(sorted(_as_edge(pair) for pair in matching)) for matching in matchings)
    seen: set[Edge] = set()
    for index, matching in enumerate(checked):
        ranks = [rank for edge in matching for rank in edge]
        if len(set(ranks)) < len(ranks) or not matching:
            raise ValueError(
                f"got {excerpt(matching)} as matching {index}, expected at least one link and no rank twice: a rank "
                f"talks to one peer per matching. Make matchings with decompose(graph)."
            )
        if twice := seen.intersection(matching):
            raise ValueError(
                f"got the links {excerpt(sorted(twice))} again in matching {index}, expected each link in one "
                f"matching. Remove the second."
            )
        seen.update(matching)
    ranks_seen = {rank for edge in seen for rank in edge}
    if ranks_seen != set(range(len(ranks_seen))):
        raise ValueError(
            f"got matchings of the ranks {excerpt(sorted(ranks_seen))}, expected each of 0 to "
            f"{max(ranks_seen)}: the others could never agree with them. Add links to the missing ranks."
        )
    _check_connected(max(len(ranks_seen), 1), sorted(seen))
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


def _first_fit(edges: Iterable[Edge]) -> list[Matching]:
    matchings: list[list[Edge]] = []
    ranks: list[set[int]] = []
    for edge in edges:
        color = next((c for c, used in enumerate(ranks) if used.isdisjoint(edge)), len(ranks))
        if color == len(ranks):
            matchings.append([])
            ranks.append(set())
        matchings[color].append(edge)
        ranks[color].update(edge)
    return [tuple(sorted(matching)) for matching in matchings]


def _vizing(levels: Sequence[Sequence[Edge]]) -> list[Matching]:
    """Colour the links level by level, each level with as many colours as the degrees up to it ask for."""
    coloring = _Coloring()
    degrees: dict[int, int] = {}
    for edges in levels:
        for rank in (rank for edge in edges for rank in edge):
            degrees[rank] = degrees.get(rank, 0) + 1
            coloring.peers.setdefault(rank, {})
        for u, v in edges:
            coloring.add(u, v, num_colors=max(degrees.values()))
    by_color: dict[int, list[Edge]] = {}
    for u, peers in coloring.peers.items():
        for color, v in peers.items():
            if u < v:
                by_color.setdefault(color, []).append((u, v))
    return [tuple(sorted(by_color[color])) for color in sorted(by_color)]


class _Coloring:
    """A partial edge colouring: `peers[u][c]` is the rank that u meets in colour c."""

    def __init__(self) -> None:
        self.peers: dict[int, dict[int, int]] = {}

    def add(self, u: int, v: int, *, num_colors: int) -> None:
        """Colour the link u-v with one of `num_colors` >= max degree, or with one more where that takes a fan."""
        free_u, free_v = self._free(u, num_colors), self._free(v, num_colors)
        if common := sorted(set(free_u) & set(free_v)):
            self._set(u, v, common[0])
            return
        for c in free_u:
            for d in free_v:
                if self._path(v, c, d)[-1] != u:
                    self._swap(v, c, d)
                    self._set(u, v, c)
                    return
        self._turn_fan(u, v, num_colors + 1)

    def _turn_fan(self, u: int, v: int, num_colors: int) -> None:
        """The step of Misra and Gries; `num_colors` leaves a free colour at every rank."""
        fan, links = [v], []  # links[i] is the colour of u-fan[i + 1], free at fan[i]
        while True:
            free = (c for c in self._free(fan[-1], num_colors) if c in self.peers[u] and self.peers[u][c] not in fan)
            color = next(free, None)
            if color is None:
                break
            fan.append(self.peers[u][color])
            links.append(color)
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
        path = self._path(start, first, second)
        links = [(u, v, second if i % 2 else first) for i, (u, v) in enumerate(pairwise(path))]
        for link in links:
            self._unset(*link)
        for u, v, color in links:
            self._set(u, v, first if color == second else second)

    def _set(self, u: int, v: int, color: int) -> None:
        assert color not in self.peers[u], f"colour {color} is taken at {u}"
        assert color not in self.peers[v], f"colour {color} is taken at {v}"
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


def _check_connected(n: int, edges: Sequence[Edge]) -> None:
    if loops := [u for u, v in edges if u == v]:
        raise ValueError(
            f"got self-loops at {excerpt(loops)}, expected none: a rank has itself without a link. Remove them with "
            f"graph.remove_edges_from(list(networkx.selfloop_edges(graph)))."
        )
    import networkx as nx

    graph = nx.Graph()
    graph.add_nodes_from(range(n))
    graph.add_edges_from(edges)
    if len(pieces := sorted((sorted(piece) for piece in nx.connected_components(graph)), key=len)) > 1:
        raise ValueError(
            f"got a base graph in {len(pieces)} pieces (one is {excerpt(pieces[0])}), expected a connected one: the "
            f"ranks could never agree. Add links between the pieces."
        )


def excerpt(items: Iterable[Any]) -> str:
    """The first few of `items`, for an error message."""
    shown = list(items)
    return f"{shown[:8]}"[:-1] + (", ...]" if len(shown) > 8 else "]")
