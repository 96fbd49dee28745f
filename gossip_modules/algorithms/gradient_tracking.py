"""Gradient tracking: each rank steps along an estimate of the mean step of all ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..graph_manager.named_graphs import undirected_ring
from ..mixing_manager.base import MetropolisHastingsMixing, MixingManager
from ..registry import Paper
from ..rounds import Algorithm, Memory, Mix, Round, Vectors


@dataclass(frozen=True)
class GradientTracking(Algorithm):
    """Gradient tracking: x <- W (x - y), where y follows the mean over ranks of the steps u: y <- W (y + u - u').

    In a round on rank i, where u_i is the step of its optimizer, and u'_i the step before:

        y_i <- sum_j W_ij (y_j + u_j - u'_j)     # the first y_i is u_i
        x_i <- sum_j W_ij (x_j - y_j)            # x: before the step of the optimizer

    The mean of y equals the mean of u at all times, and W makes the y equal. So all ranks take equal steps, and at a
    fixed point the mean step is zero: with exact gradients that is the optimum of the mean of all losses. A round sends
    two messages to each peer, one after the other, since x can be mixed only after y is known.

    In the notation of the paper u = eta g, and y here is eta times y there. The vector y - u' in the memory is in units
    of the learning rate. When the rate changes, on all ranks alike, the vector is scaled by the ratio of the new rate
    to the old rate before the round: see [Note: Units of the learning rate] of `RateUnits`. u is the step of any
    optimizer. With an optimizer that scales gradients, such as Adam, the mean of the scaled gradients is zero in the
    limit. The graph may be directed and may change, if its weights are doubly stochastic; the default is a ring with
    weights of one third.

    Di Lorenzo, Scutari, "NEXT: In-Network Nonconvex Optimization", IEEE Transactions on Signal and Information
    Processing over Networks 2016, arXiv 1602.00591; Xu, Zhu, Soh, Xie, "Augmented Distributed Gradient Methods for
    Multi-Agent Optimization Under Uncoordinated Constant Stepsizes", CDC 2015, which also mixes both vectors after
    their changes.

    Raises:
        ValueError: (when the model is wrapped) the weights are not doubly stochastic.

    Example:
        >>> model = GossipDataParallel(model, algorithm=GradientTracking())
    """

    title: ClassVar[str] = "Gradient tracking"
    summary: ClassVar[str] = "steps along an estimate of the mean step of all ranks, which is gossiped too"
    paper: ClassVar[Paper | None] = Paper(
        "Di Lorenzo, Scutari",
        "NEXT: In-Network Nonconvex Optimization",
        "IEEE Transactions on Signal and Information Processing over Networks 2016",
        "1602.00591",
    )
    needs_current: ClassVar[bool] = True
    is_skippable: ClassVar[bool] = False  # the sum of the y over ranks equals the sum of the u
    follows_rate: ClassVar[bool] = True

    def check_inner(self, inner: Algorithm) -> None:
        """See `Algorithm`."""
        if not inner.parts[0].is_plain:
            raise ValueError(
                f"got {self}.over({inner}), expected plain gossip: the outer algorithm mixes two vectors in a round, "
                "and the inner one keeps the state of one vector; take D2 or ExactDiffusion"
            )

    def default_mixing(self, world_size: int) -> MixingManager:
        """See `Algorithm`."""
        return MetropolisHastingsMixing(undirected_ring(world_size))

    def round(self, v: Vectors, m: Memory, k: int) -> Round:
        """See `Algorithm`."""
        last = m.vector("last", start="x", average="reset", generation="reset")  # x after the last round
        z = m.vector("z", average="reset", generation="reset", in_units_of_rate=True)  # y - u
        sent = m.scratch()
        if m.num_rounds == 0:  # no optimizer has stepped
            yield Mix(sent.set_(v.x))
        else:
            y = m.scratch("y").sum_(z, last).sub_(v.x)  # y' - u' + u
            if m.num_rounds > 1:
                yield Mix(y)
            yield Mix(sent.sum_(last, y, alpha=-1))
            z.sum_(y, last, alpha=-1).add_(v.x)  # y - u
        last.set_(sent)
        v.x.set_(sent)
