"""MATCHA's processors: its graphs, by the arguments of its README."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..graph_manager.matchings import Edge
from ..matcha.graph import MatchaGraph

if TYPE_CHECKING:
    import networkx as nx


class MatchaProcessor(MatchaGraph):
    """`MatchaGraph(base_graph, budget=commBudget)`, made as in MATCHA's README.

    Args:
        base_graph: a networkx graph, or with `issubgraph=True` its matchings. `select_graph(i)` serves both.
        commBudget: the share of the matchings that a round uses on average; above 0, at most 1.
        rank: the rank of this process.
        size: the number of ranks, which the graph must have.
        iterations: the number of rounds in `active_flags`. Rounds after them are drawn as well.
        issubgraph: whether `base_graph` is a list of matchings.
        seed: the seed of the activations, the same on all ranks. It takes the place of `numpy.random.seed`.

    Raises:
        ValueError: the arguments contradict each other, or see `MatchaGraph`.
    """

    _is_fixed = False

    def __init__(
        self,
        base_graph: nx.Graph | Sequence[Sequence[Edge]],
        commBudget: float,
        rank: int,
        size: int,
        iterations: int = 0,
        issubgraph: bool = False,
        *,
        seed: int = 0,
    ) -> None:
        name = type(self).__name__
        if not issubgraph and isinstance(base_graph, list | tuple):
            raise ValueError(
                f"{name}: got matchings as base_graph with issubgraph=False, expected a networkx graph; pass "
                "issubgraph=True"
            )
        is_fixed = self._is_fixed and commBudget < 1
        super().__init__(base_graph, budget=commBudget, seed=seed, periodic=is_fixed)
        if size != self.world_size:
            raise ValueError(
                f"{name}: got size={size} for a graph of {self.world_size} ranks, expected the same number; start "
                f"{self.world_size} ranks, or take another graph"
            )
        self._check_rank(rank)
        self.rank, self.iterations = rank, iterations

    @property
    def neighbor_weight(self) -> float:
        """The weight of a link, `alpha`."""
        return self.alpha

    @property
    def neighbors_info(self) -> list[list[int]]:
        """The partner of each rank in each matching, -1 for none; `neighbors_info[matching][rank]`."""
        info = [[-1] * self.world_size for _ in self.matchings]
        for row, matching in zip(info, self.matchings, strict=True):
            for u, v in matching:
                row[u], row[v] = v, u
        return info

    @property
    def active_flags(self) -> list[list[int]]:
        """Whether each matching is used, 1 or 0, in each of the first `iterations` rounds."""
        return [[int(is_active) for is_active in self.active(t)] for t in range(self.iterations)]


class FixedProcessor(MatchaProcessor):
    """`MatchaGraph(base_graph, budget=commBudget, periodic=True)`: D-PSGD; a round uses all matchings, or none.

    With `commBudget=1` every round uses the whole graph. See `MatchaProcessor` for the arguments.
    """

    _is_fixed = True
