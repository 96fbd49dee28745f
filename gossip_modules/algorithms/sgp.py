"""SGP: models are pushed along any directed graph, with a weight that takes the bias of the pushes back."""

from __future__ import annotations

from ..mixing_manager.base import MixingManager
from ..rounds.push_pull import PushPull


class PushSum(PushPull):
    """Push-sum: x_i <- sum_j P_ij x_j and w_i <- sum_j P_ij w_j; the estimate of the mean is x_i / w_i.

    The columns of P must sum to one, so that the sums of x and of w over ranks are kept, on any directed graph. Step k
    of rank i in SGP, with the place of the code of each line:

        z_i = x_i / w_i                                # `Debias.to_estimate` (loop/debias.py); w_i = 1 at the start
        g_i = gradient of the loss at z_i              # forward and backward of the user
        x_i <- x_i - lr g_i                            # optimizer.step(), on x = w z: `Debias.enter_step`
        send P_ji x_i and P_ji w_i to out-peers j      # `PushPull.start` (rounds/push_pull.py)
        x_i <- P_ii x_i + sum over in-peers P_ij x_j   # `PushPull.finish`: `_decode`, then `combine_` (flat/vector.py)
        w_i <- P_ii w_i + sum over in-peers P_ij w_j   # the same row, in the same call

    The two sums run at the begin of the next forward (`LockstepEngine.round`, engine/lockstep.py), or under it
    (`Overlap`, engine/overlap.py: Overlap SGP). Ranks send x and w themselves, and the receiver multiplies by P_ij.

    If P(t) is doubly stochastic, w stays one. Then w is not sent, and no division takes place.

    Assran et al., "Stochastic Gradient Push for Distributed Deep Learning", ICML 2019, arXiv 1811.10792,
    Algorithm 1; Kempe et al., "Gossip-Based Computation of Aggregate Information", FOCS 2003.

    Example (under `torchrun --nproc-per-node 4`, see README):
        >>> mixer = PushSum()
        >>> mixer.bind(UniformMixing(NPeerDynamicDirectedExponentialGraph(4)), connect())
        >>> mean = mixer.average(torch.randn(10), num_rounds=2)  # exact: 4 is a power of two
    """

    sends_shares = True

    def check(self, mixing: MixingManager) -> None:
        """See `Mixer`."""
        if not mixing.is_column_stochastic:
            raise ValueError(
                f"got {mixing} whose columns do not sum to one, expected column-stochastic weights for push-sum; "
                "use push_sum=False for row-stochastic weights"
            )
        self.check_refusals(mixing)

    @property
    def is_weighted(self) -> bool:
        """See `Mixer`; True if W(t) is not doubly stochastic, or may lose rows and columns with ranks that die."""
        return self.transport.is_elastic or not self.mixing.is_doubly_stochastic
