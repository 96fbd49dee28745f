"""MATCHA's random communication graph: in each round every matching of a base graph is used or not, by its coin."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from hashlib import sha256
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ..graph_manager.base import GraphManager
from ..graph_manager.edge_coloring import Edge, Matching, as_matchings, world_size
from ..graph_manager.predefined_graphs import matchings_of
from .activation import best_connected, budget_limit, matching_costs
from .joint_activation import ActivationPlan, smallest_rho
from .laplacians import as_probabilities, dpsgd_weight, mixing_weight, periodic_dpsgd_weight

if TYPE_CHECKING:
    import networkx as nx
    from typing_extensions import Self

_SAME_RHO = 1e-6  # machines that round differently agree on rho to this


class MatchaGraph(GraphManager):
    """Round t uses matching j of the base graph with probability p_j: few links at a time, the critical ones often.

    Links of a matching work at the same time, so a round costs the matchings that are active: sum_j p_j c_j on
    average, at most the budget. p keeps the expected graph connected as well as the budget allows and `alpha` is the
    best weight for it: mix with `LaplacianMixing(graph)`. Wang, Sahu, Yang, Joshi, Kar, "MATCHA: Speeding Up
    Decentralized SGD via Matching Decomposition Sampling", ICC 2019, arXiv:1905.09435.

    The coins of round t are a pure function of (seed, t), so all ranks toss alike and nothing is stored per round.
    With `budget=1` all links are used in all rounds: D-PSGD, and a static graph.

    Args:
        base: the base graph, undirected and connected with nodes 0..n-1, which `matchings_of` turns into matchings:
            those published for a predefined graph, else those of `decompose`; or the matchings themselves. Not changed.
        budget: share of the cost of the full schedule that a round may take on average; above 0, at most 1.
        budget_seconds: instead of `budget`: expected seconds per round, with `costs` only.
        seed: of the coins, the same on all ranks; at least 0.
        costs: seconds per link; a matching takes as long as its slowest. None: each matching costs one.
        joint: choose p and alpha together for the smallest rho (`joint_probabilities`), not p alone first.
        periodic: periodic D-PSGD instead: one coin for all matchings, with the budget as its probability.
        probabilities: instead of a budget: p, one per matching, e.g. planned by one rank for all.

    Attributes:
        matchings: the links of each matching.
        probabilities: p, a tuple of floats.
        alpha, rho: the weight of a link, and the factor by which the squared distance from the average shrinks per
            round in expectation, or better.
        expected_cost, full_cost: sum_j p_j c_j and sum_j c_j, in seconds with `costs`, else in matchings.

    Raises:
        ValueError: a base graph, budget, costs, probabilities or seed that are not as above, or several ways to
            choose p.

    >>> import networkx as nx
    >>> graph = MatchaGraph(nx.cycle_graph(4), budget=0.5, seed=1)
    >>> [graph.out_peers(0, t) for t in range(5)]
    [(3,), (1,), (1, 3), (1,), (3,)]
    """

    matchings: tuple[Matching, ...]
    probabilities: tuple[float, ...]

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

        if isinstance(seed, bool) or not isinstance(seed, (int, np.integer)) or seed < 0:
            raise ValueError(f"got seed={seed!r}, expected an int of at least 0, the same on all ranks.")
        if joint + periodic + (probabilities is not None) > 1:
            raise ValueError(
                f"got joint={joint}, periodic={periodic} and probabilities={probabilities}, expected at most one of "
                f"them: each is another way to choose p. Leave the others out."
            )
        if probabilities is not None and not (budget is None and budget_seconds is None):
            raise ValueError(
                f"got probabilities beside {budget=} and {budget_seconds=}, expected one of them: p is what a budget "
                f"is spent on. Leave one out."
            )
        self.matchings = matchings_of(base, costs=costs) if isinstance(base, nx.Graph) else as_matchings(base)
        self.seed = int(seed)
        self.is_periodic = periodic
        seconds = matching_costs(self.matchings, costs)
        if probabilities is None:
            limit = budget_limit(seconds, budget, budget_seconds, has_costs=costs is not None)
            plan = _plan(self.matchings, seconds, limit, joint=joint, periodic=periodic)
        else:
            p = as_probabilities(probabilities, len(self.matchings))
            plan = ActivationPlan(p, *mixing_weight(self.matchings, p))
        p, self.alpha, self.rho = plan
        self.probabilities = tuple(p.tolist())
        self.expected_cost, self.full_cost = float(p @ seconds), float(seconds.sum())
        self._thresholds = p
        self._rows = _rows(self.matchings, world_size(self.matchings))
        self._books = tuple(tuple(peer for peer, _ in row) for row in self._rows)
        self._last: tuple[int, list[bool]] | None = None
        super().__init__(world_size(self.matchings), peers_per_itr=max(map(len, self._rows)) or 1)

    @classmethod
    def from_plan(
        cls, path: str | PathLike[str], *, seed: int = 0, joint: bool = False, world_size: int | None = None
    ) -> Self:
        """The graph of a plan that `python -m gossip_modules.matcha --output plan.json` wrote.

        Its matchings, probabilities and rho are those of the plan. Ranks whose files differ are told when the model is
        wrapped.

        Args:
            path: of the JSON file.
            seed: of the coins, the same on all ranks.
            joint: take the probabilities that were chosen together with alpha.
            world_size: ranks that the plan must be for; None: any.

        Raises:
            ValueError: no such file, one that is no plan or a damaged one, or a plan for other ranks.
        """
        plan = read_plan(path)
        chosen = plan.get("joint") if joint else plan
        if chosen is None:
            raise ValueError(
                f"got joint=True for {path}, expected a plan that holds the joint optimum: plans of more than 64 ranks "
                f"do not. Leave joint out."
            )
        try:
            planned = float(chosen["rho"])
            graph = cls(plan["matchings"], probabilities=chosen["probabilities"], seed=seed)
        except (KeyError, TypeError, ValueError) as error:
            what = f"{error} is missing." if isinstance(error, KeyError) else error
            raise ValueError(f"got a damaged plan {path}: {what} {_WRITE_AGAIN}") from error
        if not abs(graph.rho - planned) <= _SAME_RHO:
            raise ValueError(
                f"got a damaged plan {path}: its rho is {planned:.6f}, expected {graph.rho:.6f}, which is that of its "
                f"matchings and probabilities. {_WRITE_AGAIN}"
            )
        if world_size is not None and graph.world_size != world_size:
            raise ValueError(
                f"got the plan {path} for {graph.world_size} ranks, expected one for {world_size}, which take part. "
                f"Start {graph.world_size}, or make a plan for {world_size}: python -m gossip_modules.matcha --help."
            )
        return graph

    def active(self, t: int) -> list[bool]:
        """Whether each matching is used in round `t`. The answer is kept for the next query: do not change it."""
        last = self._last
        if last is None or last[0] != t:
            self._segment(t)  # refuses t < 0
            num_coins = 1 if self.is_periodic else len(self.matchings)
            # Raw output of the bit generator: numpy promises that it never changes, unlike what Generator makes of it.
            raw = np.random.PCG64(np.random.SeedSequence(self.seed, spawn_key=(t,))).random_raw(num_coins)
            uniform = (raw >> np.uint64(11)) * 2.0**-53  # [0, 1), so p = 0 is never and p = 1 always
            last = self._last = (t, (uniform < self._thresholds).tolist())
        return last[1]

    def phone_book(self, rank: int) -> Sequence[int]:
        """The neighbours of `rank` in the base graph, ascending."""
        self._check_rank(rank)
        return self._books[rank]

    def out_peers(self, rank: int, t: int) -> tuple[int, ...]:
        self._check_rank(rank)
        active = self.active(t)
        return tuple(peer for peer, matching in self._rows[rank] if active[matching])

    def in_peers(self, rank: int, t: int) -> tuple[int, ...]:
        return self.out_peers(rank, t)

    @property
    def is_symmetric(self) -> bool:
        """True: a matched pair exchanges both ways."""
        return True

    @cached_property
    def is_regular(self) -> bool:
        """Whether in each round that can occur all ranks have the same degree."""
        if self.is_periodic and self.is_dynamic:
            return len({len(row) for row in self._rows}) == 1
        is_certain = [p == 1 for p in self.probabilities]
        degrees = {sum(is_certain[matching] for _, matching in row) for row in self._rows}
        random = [m for m, p in zip(self.matchings, self.probabilities, strict=True) if 0 < p < 1]
        return len(degrees) == 1 and all(2 * len(matching) == self.world_size for matching in random)

    def in_every_round(self, predicate: Callable[[int], bool]) -> bool:
        """Whether `predicate(0)` holds, for a static graph; else False: random rounds are too many to look at."""
        return not self.is_dynamic and predicate(0)

    def __repr__(self) -> str:
        """Complete, see `GraphManager`; alpha follows from what it shows."""
        digest = sha256(repr(self.matchings).encode()).hexdigest()
        periodic = ", periodic=True" if self.is_periodic else ""
        return (
            f"{type(self).__name__}({self.world_size}, matchings_sha256={digest}, "
            f"probabilities={self.probabilities}, seed={self.seed}{periodic})"
        )

    def _segment_period(self, num_peers: int) -> int:
        """1 when no coin decides anything, else 0: the rounds never repeat."""
        return int(all(p in (0, 1) for p in self.probabilities))


_WRITE_AGAIN = "Write it again with python -m gossip_modules.matcha --output."


def read_plan(path: str | PathLike[str]) -> dict[str, Any]:
    """What `python -m gossip_modules.matcha --output` wrote, as plain lists, numbers and strings.

    Raises:
        ValueError: no such file, or another one.
    """
    expected = "expected a plan in JSON, with matchings, probabilities and rho"
    try:
        plan = json.loads(Path(path).read_bytes())
    except OSError as error:
        raise ValueError(f"got no plan at {path} ({error.strerror}), {expected}. {_WRITE_AGAIN}") from error
    except ValueError as error:  # neither JSON nor text
        raise ValueError(f"got the file {path}, which is no JSON ({error}), {expected}. {_WRITE_AGAIN}") from error
    if not isinstance(plan, dict) or not {"matchings", "probabilities", "rho"} <= set(plan):
        raise ValueError(f"got the file {path}, {expected}. {_WRITE_AGAIN}")
    return plan


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


def _rows(matchings: Sequence[Matching], num_ranks: int) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Per rank the pairs (peer, index of the matching), ascending."""
    rows: list[list[tuple[int, int]]] = [[] for _ in range(num_ranks)]
    for index, matching in enumerate(matchings):
        for u, v in matching:
            rows[u].append((v, index))
            rows[v].append((u, index))
    return tuple(tuple(sorted(row)) for row in rows)
