"""The rates of the continuous momentum of A2CiD2, computed from the graph."""

from __future__ import annotations

import math
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from ..graph_manager.base import GraphManager

_Remaining = TypeVar("_Remaining", float, Tensor)


class MomentumRates(NamedTuple):
    """The rates of the momentum on a graph.

    Attributes:
        eta: the rate of the approach of a rank's two models.
        alpha: the factor of the second model's move in an exchange; the first one moves by 1/2.
        interval: the mean time between two exchanges of each rank.
    """

    eta: float
    alpha: float
    interval: tuple[float, ...]

    @classmethod
    def on(cls, graph: GraphManager) -> MomentumRates:
        """Return the rates on a bipartite graph; active ranks start one exchange in each unit of time.

        With the rate lambda_ij of exchanges of ranks i and j, and L = sum lambda_ij (e_i - e_j) (e_i - e_j)^T:

            chi1 = 1 / (the smallest positive eigenvalue of L)
            chi2 = the largest effective resistance (e_i - e_j)^T L^+ (e_i - e_j) of a link, halved
            eta = 1 / (2 sqrt(chi1 chi2)),  alpha = sqrt(chi1 / chi2) / 2
        """
        n = graph.world_size
        rates = torch.zeros(n, n, dtype=torch.float64, device="cpu")
        for i in range(n):
            peers = [] if graph.is_passive(i) else list(graph.phone_book(i))
            for j in peers:
                rates[i, j] += 1 / len(peers)
        return cls.of(rates + rates.T)

    @classmethod
    def of(cls, rates: Tensor) -> MomentumRates:
        """Return the rates for the rates of exchanges, float64 [n, n], symmetric; see `on`."""
        each = rates.sum(1)
        laplacian = torch.diag(each) - rates
        interval = tuple(float(1 / rate) if rate else math.inf for rate in each)
        if len(rates) < 2:
            return cls(0.0, 0.5, interval)
        slowest = float(torch.linalg.eigvalsh(laplacian)[1])
        inverse = torch.linalg.pinv(laplacian, hermitian=True)
        resistance = inverse.diagonal()[:, None] + inverse.diagonal() - 2 * inverse
        chi1, chi2 = 1 / slowest, float(resistance[rates > 0].max()) / 2
        return cls(1 / (2 * math.sqrt(chi1 * chi2)), math.sqrt(chi1 / chi2) / 2, interval)

    def coefficients(self, remaining: _Remaining) -> tuple[_Remaining, _Remaining, float]:
        """Return m, k and g of an exchange, with d the second model minus the first and c the correction of the first:

            c <- c + m d
            d <- k d + g c                                     # with the new c: exp(-2 eta dt) d + g times the old c

        Args:
            remaining: exp(-2 eta dt), dt the time since the last exchange.
        """
        moved, gain = (1 - remaining) / 2, 2 * self.alpha - 1
        return moved, remaining - gain * moved, gain

    def remaining(self, rank: int, num_exchanges: int) -> float:
        """Return exp(-2 eta dt) for the average time of so many exchanges of a rank."""
        return math.exp(-2 * self.eta * self.interval[rank] * num_exchanges)
