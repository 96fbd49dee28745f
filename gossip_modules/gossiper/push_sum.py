"""PushSum: gossip averaging on directed graphs, the algorithm of SGP."""

from __future__ import annotations

from ..mixing_manager.base import MixingManager
from ..transport.base import is_elastic
from .push_pull import PushPull


class PushSum(PushPull):
    """Push-sum: x_i <- sum_j P_ij x_j and w_i <- sum_j P_ij w_j; the estimate of the mean is x_i / w_i.

    Columns of P must sum to one, so that the total of x and of w is kept, on any directed graph. A round:

        send (x_i, w_i) to the out-peers                  # `PushPull.encode`; w only where P is not doubly stochastic
        x_i <- P_ii x_i + sum over in-peers j of P_ij x_j     # `PushPull.decode`, which mixes w_i by the same row
        w_i <- P_ii w_i + sum over in-peers j of P_ij w_j
        z_i = x_i / w_i                                   # `Debias`: what the module computes with

    Where P(t) is doubly stochastic w stays one: then it does not travel and nothing is ever divided by it.

    Assran et al., "Stochastic Gradient Push for Distributed Deep Learning", ICML 2019, arXiv 1811.10792,
    Algorithm 1; Kempe et al., "Gossip-Based Computation of Aggregate Information", FOCS 2003.

    Example (under `torchrun --nproc-per-node 4`, see README):
        >>> gossiper = PushSum()
        >>> gossiper.bind(UniformMixing(NPeerDynamicDirectedExponentialGraph(4)), connect())
        >>> mean = gossiper.average(torch.randn(10), num_rounds=2)  # exact: 4 is a power of two
    """

    sends_shares = True

    def check(self, mixing: MixingManager) -> None:
        """See `Mixer`."""
        if not mixing.is_column_stochastic:
            raise ValueError(
                f"got {mixing} whose columns do not sum to one, expected column-stochastic weights for push-sum; "
                "use push_sum=False for row-stochastic weights"
            )

    @property
    def is_weighted(self) -> bool:
        """See `Mixer`: only where W(t) is not doubly stochastic, or loses rows and columns with ranks that die."""
        return is_elastic(self.transport) or not self.mixing.is_doubly_stochastic
