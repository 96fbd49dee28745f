"""MATCHA: a random communication graph that uses each matching of a base graph with a planned probability."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from hashlib import sha256
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ..graph_manager.matchings import Edge, Matching, as_matchings, matchings_of, world_size
from ..graph_manager.random_graphs import ActivatedGraph, random_bits, unit_interval
from ..mixing_manager.laplacians import as_probabilities, dpsgd_weight, mixing_weight, periodic_dpsgd_weight
from ..old_names import takes_old_arguments
from .planning import ActivationPlan, best_connected, budget_limit, matching_costs, smallest_rho

if TYPE_CHECKING:
    import networkx as nx

_SAME_RHO = 1e-6  # machines that round differently agree on rho to this


class MatchaGraph(ActivatedGraph):
    """MATCHA: round t uses matching j of the base graph with probability p_j, so links that matter are used more often.

    Before training, on every rank (the file of each step is on the right):

        M_1, ..., M_m = the matchings of the base graph                      graph_manager/matchings.py
        p = argmax_p lambda_2(sum_j p_j L_j)  within the budget              matcha/planning.py
        alpha = argmin_alpha || E[W^T W] - J ||_2                            mixing_manager/laplacians.py

    Round t, after the local SGD step; L_j is the Laplacian of M_j:

        B_j = 1 with probability p_j, else 0, for each matching j            active(t)
        W = I - alpha sum_j B_j L_j                                          mixing_manager/graph_weights.py
        x_i = W_ii x_i + sum_k W_ik x_k over the peers k of this round       PushPull

    The links of a matching are used at the same time, so a round costs as much as its active matchings: sum_j p_j c_j
    on average, which is at most the budget. p makes the expected graph as well connected as the budget allows, and
    `alpha` is the best weight of a link for it: mix with `LaplacianMixing(graph)`. The B_j of round t are a pure
    function of (seed, t), so all ranks draw the same ones and nothing is stored per round. With `budget=1` all links
    are used in all rounds, which is D-PSGD on a static graph.

    Wang, Sahu, Yang, Joshi, Kar, "MATCHA: Speeding Up Decentralized SGD via Matching Decomposition Sampling", ICC 2019,
    arXiv:1905.09435.

    Args:
        base: the base graph, undirected and connected with the nodes 0..n-1. `matchings_of` turns it into matchings:
            the published ones for a predefined graph, else the result of `decompose`. Or the matchings themselves.
        budget: the share of the cost of all matchings that a round may take on average; above 0, at most 1.
        budget_seconds: instead of `budget`, the expected seconds per round; needs `costs`.
        seed: the seed of the B_j, the same on all ranks; at least 0.
        costs: the seconds that each link takes; a matching takes as long as its slowest link. None: each matching
            costs 1.
        joint: whether p and alpha are chosen together for the smallest rho (`joint_probabilities`), instead of one
            after the other.
        periodic: whether to run periodic D-PSGD instead: all matchings or none, with the budget as the probability.
        probabilities: instead of a budget, the probability of each matching, e.g. planned by one rank for all.

    Attributes:
        matchings: the links of each matching.
        probabilities: p, a tuple of floats.
        alpha: the weight of a link.
        expected_cost, full_cost: sum_j p_j c_j and sum_j c_j; in seconds with `costs`, else in matchings.

    Raises:
        ValueError: the base graph, the budget, the costs, the probabilities or the seed are not as above, or p is given
            in several ways.

    >>> import networkx as nx
    >>> graph = MatchaGraph(nx.cycle_graph(4), budget=0.5, seed=1)
    >>> [graph.out_peers(0, t) for t in range(5)]
    [(3,), (1,), (1, 3), (1,), (3,)]
    """

    @takes_old_arguments()
    def __init__(
        self,
        base: nx.Graph | Sequence[Sequence[Edge]],
        *,
        budget: float | None = None,
        budget_seconds: float | None = None,
        seed: int = 0,
        costs: Mapping[Edge, float] | None = None,
        joint: bool = False,
        periodic: bool = False,
        probabilities: Sequence[float] | None = None,
    ) -> None:
        import networkx as nx

        _check_one_way_to_choose(joint, periodic, probabilities, budget, budget_seconds)
        self.matchings = matchings_of(base, costs=costs) if isinstance(base, nx.Graph) else as_matchings(base)
        self.is_periodic = periodic
        seconds = matching_costs(self.matchings, costs)
        if probabilities is None:
            limit = budget_limit(seconds, budget, budget_seconds, has_costs=costs is not None)
            plan = _plan(self.matchings, seconds, limit, joint=joint, periodic=periodic)
        else:
            p = as_probabilities(probabilities, len(self.matchings))
            plan = ActivationPlan(p, *mixing_weight(self.matchings, p))
        p, self.alpha, self._rho = plan
        self.probabilities: tuple[float, ...] = tuple(p.tolist())
        self.expected_cost, self.full_cost = float(p @ seconds), float(seconds.sum())
        self._rows = _rows(self.matchings)
        super().__init__(len(self._rows), max(map(len, self._rows)) or 1, seed=seed)

    @staticmethod
    def from_plan(
        path: str | PathLike[str], *, seed: int = 0, joint: bool = False, world_size: int | None = None
    ) -> MatchaGraph:
        """The graph of a plan that `python -m gossip_modules.matcha --output plan.json` wrote.

        It has the matchings, probabilities and rho of the plan. Wrapping a model raises an error if the ranks have
        read different plans.

        Args:
            path: the JSON file.
            seed: the seed of the activations, the same on all ranks.
            joint: whether to take the probabilities that were chosen together with alpha.
            world_size: the number of ranks that the plan must be for; None: any.

        Raises:
            ValueError: there is no such file, it is no plan or a damaged one, or the plan is for other ranks.
        """
        try:
            plan = json.loads(Path(path).read_bytes())
            chosen = plan["joint"] if joint else plan
            if chosen is None:
                raise ValueError("plans of more than 64 ranks hold no joint optimum; leave joint out")
            graph = MatchaGraph(plan["matchings"], probabilities=chosen["probabilities"], seed=seed)
            planned_rho = float(chosen["rho"])
            if not abs(graph.rho - planned_rho) <= _SAME_RHO:
                raise ValueError(f"its rho is {planned_rho:.6f}, but {graph.rho:.6f} for its probabilities")
        except (OSError, KeyError, TypeError, ValueError) as error:
            reason = f"{error} is missing" if isinstance(error, KeyError) else error
            raise ValueError(
                f"got a plan that cannot be used, {path}: {reason}. Expected JSON with matchings, probabilities and "
                "rho: write it again with python -m gossip_modules.matcha --output."
            ) from error
        if world_size is not None and graph.world_size != world_size:
            raise ValueError(
                f"got the plan {path} for {graph.world_size} ranks, expected one for the {world_size} that take part. "
                f"Start {graph.world_size}, or make a plan for {world_size}: python -m gossip_modules.matcha --help."
            )
        return graph

    @property
    def rho(self) -> float:
        """An upper bound on the factor by which a round shrinks the squared distance from the average, in expectation.

        It takes the weight `alpha` for each link.
        """
        return self._rho

    def active(self, t: int) -> list[bool]:
        """B_j of round `t`: whether each matching is used. The list is kept for the next query: do not change it."""
        found: list[bool] = self._drawn(t)
        return found

    def phone_book(self, rank: int) -> Sequence[int]:
        """The neighbours of `rank` in the base graph, ascending."""
        self._check_rank(rank)
        return tuple(peer for peer, _ in self._rows[rank])

    def out_peers(self, rank: int, t: int) -> tuple[int, ...]:
        self._check_rank(rank)
        active = self.active(t)
        return tuple(peer for peer, matching in self._rows[rank] if active[matching])

    def in_peers(self, rank: int, t: int) -> tuple[int, ...]:
        return self.out_peers(rank, t)

    @cached_property
    def is_regular(self) -> bool:
        """Whether in each round that can occur all ranks have the same degree."""
        if self.is_periodic and self.is_dynamic:
            return len({len(row) for row in self._rows}) == 1
        is_certain = [p == 1 for p in self.probabilities]
        degrees = {sum(is_certain[matching] for _, matching in row) for row in self._rows}
        random = [m for m, p in zip(self.matchings, self.probabilities, strict=True) if 0 < p < 1]
        return len(degrees) == 1 and all(2 * len(matching) == self.world_size for matching in random)

    def __repr__(self) -> str:
        """Complete, see `GraphManager`; alpha is a function of the rest."""
        digest = sha256(repr(self.matchings).encode()).hexdigest()
        periodic = ", periodic=True" if self.is_periodic else ""
        return (
            f"{type(self).__name__}({self.world_size}, matchings_sha256={digest}, "
            f"probabilities={self.probabilities}, seed={self.seed}{periodic})"
        )

    def _is_certain(self, num_peers: int) -> bool:
        return all(p in (0, 1) for p in self.probabilities)

    def _draw(self, t: int) -> list[bool]:
        num_draws = 1 if self.is_periodic else len(self.matchings)
        uniform = unit_interval(random_bits(self.seed, t, num_draws))  # [0, 1), so p = 0 is never and p = 1 always
        return np.less(uniform, self.probabilities).tolist()


def _check_one_way_to_choose(
    joint: bool,
    periodic: bool,
    probabilities: Sequence[float] | None,
    budget: float | None,
    budget_seconds: float | None,
) -> None:
    if joint + periodic + (probabilities is not None) > 1:
        raise ValueError(
            f"got joint={joint}, periodic={periodic} and probabilities={probabilities}, expected at most one of "
            f"them: each is another way to choose p. Leave the others out."
        )
    if probabilities is not None and not (budget is None and budget_seconds is None):
        raise ValueError(
            f"got probabilities beside {budget=} and {budget_seconds=}, expected one of them: a budget is used to "
            f"choose p. Leave one out."
        )


def _plan(
    matchings: Sequence[Matching], seconds: npt.NDArray[np.float64], limit: float, *, joint: bool, periodic: bool
) -> ActivationPlan:
    if not matchings:
        return ActivationPlan(np.empty(0), alpha=1.0, rho=0.0)  # a world of one always agrees
    if joint:
        return smallest_rho(matchings, seconds, limit)
    if periodic:
        share = limit / float(seconds.sum())
        return ActivationPlan(np.full(len(matchings), share), *periodic_dpsgd_weight(matchings, share))
    p = best_connected(matchings, seconds, limit)
    return ActivationPlan(p, *(dpsgd_weight(matchings) if (p == 1).all() else mixing_weight(matchings, p)))


def _rows(matchings: Sequence[Matching]) -> list[list[tuple[int, int]]]:
    """Per rank the pairs (peer, index of the matching), ascending."""
    rows: list[list[tuple[int, int]]] = [[] for _ in range(world_size(matchings))]
    for index, matching in enumerate(matchings):
        for u, v in matching:
            rows[u].append((v, index))
            rows[v].append((u, index))
    return [sorted(row) for row in rows]
