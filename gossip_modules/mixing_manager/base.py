"""The mixing matrices W(t): x_i <- sum_j W[i, j] x_j.

W[i, j] is the weight of rank i for the message of rank j. The receiver applies it, so messages are sent as they are and
a rank needs its own row only. If columns sum to one, the sum over all ranks does not change (push-sum needs this); if
rows do, equal ranks keep their value (D-PSGD needs both).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from ..graph_manager import WeightedGraph
from ..graph_manager.base import GraphManager
from ..old_names import OldNames, takes_old_arguments

_ROUNDING = 1e-12  # tolerance for sums and products of weights in float64
_PACKAGE = __name__.partition(".")[0]


class MixingWeights(NamedTuple):
    """Row `rank` of W(t): x_rank <- own x_rank + sum_j inp[j] x_j."""

    own: float
    inp: Mapping[int, float]


class MixingManager(OldNames, ABC):
    """The mixing matrices W(t) on the edges of a graph.

    A new mixing manager has to write `weights` only. If it is known whether rows or columns sum to one, override the
    `is_*_stochastic` properties: here they check all ranks in all distinct rounds, and are False for schedules too long
    to check (see `GraphManager.in_every_round`). With a `period` of its own, mixers keep the weights of each round
    of it; otherwise they ask again in every round.

    Args:
        graph: the graph; W(t) is zero where it has no edge, except on the diagonal.
    """

    def __init__(self, graph: GraphManager) -> None:
        self.graph = graph

    @abstractmethod
    def weights(self, rank: int, t: int) -> MixingWeights:
        """Row `rank` of W(t). The keys of `inp` are exactly `graph.in_peers(rank, t)`, even if a weight is 0."""

    def buffer_weights(self, rank: int, t: int) -> MixingWeights:
        """Return row `rank` of round `t` for buffers such as variances: as `weights`, but never below 0."""
        return self.weights(rank, t)

    def matrix(self, t: int) -> Tensor:
        """W(t), float64 [n, n]: for tests, analysis and plots."""
        matrix = torch.zeros(self.graph.world_size, self.graph.world_size, dtype=torch.float64, device="cpu")
        for place, weight in self._entries(t).items():
            matrix[place] = weight
        return matrix

    @property
    def period(self) -> int:
        """The number of rounds until W(t) repeats; 0: never."""
        return self.graph.period

    @cached_property
    def is_row_stochastic(self) -> bool:
        """Whether in every round each row sums to one: equal ranks keep their value."""
        return self.graph.in_every_round(lambda t: self._sums_to_one(t, axis=0))

    @cached_property
    def is_column_stochastic(self) -> bool:
        """Whether in every round each column sums to one: the sum over all ranks does not change."""
        return self.graph.in_every_round(lambda t: self._sums_to_one(t, axis=1))

    @property
    def is_doubly_stochastic(self) -> bool:
        """Whether in every round rows and columns sum to one: the push-sum weight stays 1 and is not sent."""
        return self.is_column_stochastic and self.is_row_stochastic

    @cached_property
    def is_symmetric(self) -> bool:
        """Whether in every round W[i, j] = W[j, i]: one end of a link gains as much as the other loses."""
        return self.graph.in_every_round(self._is_symmetric_round)

    def spectral_gap(self, *, num_rounds: int | None = None) -> float:
        """1 - rho(P - J)^(1/T), the speed of consensus: P = W(T-1) ... W(0), J = 1 1^T / n, rho the spectral radius.

        The error of averaging shrinks by the factor `1 - gap` per round in the long run, if the T rounds are
        repeated. The gap is 1.0 if T rounds give the exact average, 0.0 if they leave ranks unconnected, and below 0 if
        the error grows (possible with negative weights). Subtracting J turns the eigenvalue 1 of P into 0 and leaves
        the others as they are, so rho(P - J) is the second largest modulus of the eigenvalues of P, also when W is only
        row-stochastic or only column-stochastic. For one symmetric W the gap is the usual 1 - |lambda_2|. Costs
        O(T n^3).

        Args:
            num_rounds: the number of rounds T; by default the period.

        Raises:
            ValueError: num_rounds is not given and W(t) has no period.
        """
        total = self.period if num_rounds is None else num_rounds
        if total < 1:
            raise ValueError(
                f"spectral_gap: got num_rounds={num_rounds} and a schedule of period {self.period}, expected at least "
                f"one round. Give num_rounds: the horizon of interest, e.g. num_rounds=1000."
            )
        # The product of the W(t) - J differs from P - J by u 1^T or 1 u^T with sum(u) = 0, so its eigenvalues are the
        # same. For large T, the small ones of P would be lost in the rounding of its eigenvalue 1.
        return 1.0 - radius_per_round(lambda t: self.matrix(t) - 1 / self.graph.world_size, range(total))

    def __repr__(self) -> str:
        """Complete: with the same repr, two mixings have the same weights on all ranks in all rounds."""
        return f"{type(self).__name__}({self.graph!r})"

    def _entries(self, t: int) -> dict[tuple[int, int], float]:
        """W[i, j] by (i, j), on the diagonal and on the edges."""
        rows = (self.weights(rank, t) for rank in range(self.graph.world_size))
        return {(i, j): weight for i, (own, inp) in enumerate(rows) for j, weight in {i: own, **inp}.items()}

    def _sums_to_one(self, t: int, *, axis: int) -> bool:
        """Whether each row (axis 0) or each column (axis 1) of W(t) sums to one."""
        sums = [0.0] * self.graph.world_size
        for place, weight in self._entries(t).items():
            sums[place[axis]] += weight
        return all(abs(total - 1) < _ROUNDING * len(sums) for total in sums)

    def _is_symmetric_round(self, t: int) -> bool:
        entries = self._entries(t)
        return all(abs(weight - entries.get((j, i), 0.0)) < _ROUNDING for (i, j), weight in entries.items())


class UniformMixing(MixingManager):
    """W[i, j] = 1 / (1 + out-degree of j): each rank gives equal shares to its out-peers and to itself.

    Column-stochastic on every graph, as push-sum needs it; doubly stochastic on regular graphs. From Assran, Loizou,
    Ballas, Rabbat, "Stochastic Gradient Push for Distributed Deep Learning", ICML 2019, arXiv:1811.10792.

    Args:
        graph: the graph.

    Raises:
        ValueError: the graph has weights of its own.

    >>> from gossip_modules.graph_manager import RingGraph
    >>> UniformMixing(RingGraph(4)).weights(rank=0, t=0)
    MixingWeights(own=0.5, inp={3: 0.5})
    """

    is_column_stochastic = True

    @takes_old_arguments()
    def __init__(self, graph: GraphManager) -> None:
        refuse_weighted(graph, type(self).__name__)
        super().__init__(graph)

    def weights(self, rank: int, t: int) -> MixingWeights:
        graph = self.graph
        inp = {j: 1 / (1 + graph.out_degree(j, t)) for j in graph.in_peers(rank, t)}
        return MixingWeights(own=1 / (1 + graph.out_degree(rank, t)), inp=inp)

    @cached_property
    def is_row_stochastic(self) -> bool:
        """See `MixingManager`."""
        return self.graph.is_regular or super().is_row_stochastic

    @cached_property
    def is_symmetric(self) -> bool:
        """See `MixingManager`."""
        return self.graph.is_symmetric and (self.graph.is_regular or super().is_symmetric)


class DoublyStochasticMixing(MixingManager):
    """The base of weights with rows and columns that sum to one by construction, so nothing is checked."""

    is_row_stochastic = True
    is_column_stochastic = True


class SymmetricMixing(DoublyStochasticMixing):
    """The base of symmetric weights with rows that sum to one by construction, so no weights are checked.

    Args:
        graph: a graph that is symmetric in every round.

    Raises:
        ValueError: the graph is not symmetric, or has weights of its own.
    """

    is_symmetric = True

    def __init__(self, graph: GraphManager) -> None:
        refuse_weighted(graph, type(self).__name__)
        super().__init__(graph)
        if not graph.is_symmetric:
            raise ValueError(
                f"{type(self).__name__}: got {graph!r}, expected a graph whose peers answer each other in every round. "
                f"Take UniformMixing with push-sum, or a symmetric graph: MatchaGraph, bipartite, hypercube, or a ring "
                f"with peers_per_itr=2."
            )


class MetropolisHastingsMixing(SymmetricMixing):
    """W[i, j] = 1 / (1 + max(degree of i, degree of j)), W[i, i] the rest: doubly stochastic on undirected graphs.

    From Xiao, Boyd, Kim, "Distributed average consensus with least-mean-square deviation", Journal of Parallel and
    Distributed Computing, 2007, the Metropolis weights.

    Args:
        graph: a graph that is symmetric in every round.

    Raises:
        ValueError: the graph is not symmetric, or has weights of its own.

    >>> import networkx as nx
    >>> from gossip_modules.graph_manager import NetworkXGraph
    >>> MetropolisHastingsMixing(NetworkXGraph(nx.star_graph(3))).weights(rank=1, t=0)
    MixingWeights(own=0.75, inp={0: 0.25})
    """

    def weights(self, rank: int, t: int) -> MixingWeights:
        graph = self.graph
        degree = graph.out_degree(rank, t)
        inp = {j: 1 / (1 + max(degree, graph.out_degree(j, t))) for j in graph.in_peers(rank, t)}
        return MixingWeights(own=1 - math.fsum(inp.values()), inp=inp)


class RelaxedMixing(MixingManager):
    """I + gamma (W - I): each rank goes gamma times as far towards its peers.

    Args:
        mixing: W.
        step_size: gamma.

    >>> from gossip_modules.graph_manager import RingGraph
    >>> RelaxedMixing(UniformMixing(RingGraph(2)), 0.5).weights(0, 0)
    MixingWeights(own=0.75, inp={1: 0.25})
    """

    def __init__(self, mixing: MixingManager, step_size: float) -> None:
        super().__init__(mixing.graph)
        self.mixing, self.step_size = mixing, step_size

    def weights(self, rank: int, t: int) -> MixingWeights:
        own, inp = self.mixing.weights(rank, t)
        return MixingWeights(1 - self.step_size * (1 - own), {j: self.step_size * w for j, w in inp.items()})

    @property
    def period(self) -> int:
        return self.mixing.period

    @cached_property
    def is_row_stochastic(self) -> bool:
        return self.mixing.is_row_stochastic

    @cached_property
    def is_column_stochastic(self) -> bool:
        return self.mixing.is_column_stochastic

    @cached_property
    def is_symmetric(self) -> bool:
        return self.mixing.is_symmetric

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.mixing!r}, step_size={self.step_size:.6g})"


def refuse_weighted(graph: GraphManager, mixing: str) -> None:
    """Raise ValueError if the graph has weights of its own, because `mixing` would replace them."""
    if isinstance(graph, WeightedGraph):
        raise ValueError(
            f"{mixing}: got {graph!r}, which has weights of its own and averages with them only, expected another "
            f"graph. Take GraphMixing, or leave mixing out."
        )


def radius_per_round(factor: Callable[[int], Tensor], rounds: range) -> float:
    """rho(F(T-1) ... F(1) F(0)) ^ (1/T), rho the spectral radius, for the T >= 1 rounds.

    The scale of the product is kept in a separate number, against overflow and underflow.

    Args:
        factor: F(t), float64 [m, m].
        rounds: the rounds.
    """
    product, log_scale = None, 0.0
    for t in rounds:
        product = factor(t) if product is None else factor(t) @ product
        scale = float(torch.linalg.matrix_norm(product))
        if scale < _ROUNDING:
            return 0.0
        log_scale += math.log(scale)
        product = product / scale
    radius = float(torch.linalg.eigvals(product).abs().max())
    return 0.0 if radius < _ROUNDING else math.exp((log_scale + math.log(radius)) / len(rounds))


def knows_period(mixing: MixingManager) -> bool:
    """Whether `mixing.period` holds for its weights and its graph's peers.

    A user's class may make them depend on t without overriding `period`: then the inherited period does not hold.
    """
    return _says_period(mixing, "weights", "buffer_weights") and _says_period(mixing.graph, "out_peers", "in_peers")


def _says_period(schedule: object, *names: str) -> bool:
    """Whether no class outside this library overrides one of the methods, or one overrides `period` as well."""
    own = [vars(cls) for cls in type(schedule).__mro__ if cls.__module__.partition(".")[0] != _PACKAGE]
    is_overridden = any(name in attributes for attributes in own for name in names)
    return not is_overridden or any("period" in attributes for attributes in own)
