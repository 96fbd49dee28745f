"""Gradient tracking: each rank steps along an estimate of the mean step of all ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..graph_manager.named_graphs import undirected_ring
from ..mixing_manager.base import MetropolisHastingsMixing, MixingManager
from .carried import Carried
from .rule import UpdateRule
from .sgd_momentum import SGDStep


@dataclass(frozen=True)
class GradientTracking(UpdateRule):
    """Gradient tracking: x <- W (x - y), where y follows the mean over ranks of the steps u: y <- W (y + u - u').

    In a round on rank i, where u_i is the step that its optimizer has taken, and u'_i the one before:

        y_i <- sum_j W_ij (y_j + u_j - u'_j)     # the first y_i is u_i
        x_i <- sum_j W_ij (x_j - y_j)            # x: before the step of the optimizer

    The mean of the y is the mean of the u at all times, and W makes them equal. So all ranks move alike, and where the
    models stand still the mean step is zero: with exact gradients that is the optimum of the mean of all losses. A
    round takes two messages to each peer, one after the other: the step cannot be taken back before y is known.

    In the paper's notation u = eta g and y is eta times its y. What is carried, y - u', is in units of the learning
    rate: where the rate changes, on all ranks alike, it is scaled by the ratio of the new one to the old one before the
    round, so that the two are the same. See [Note: Units of the learning rate]. u is the step of any optimizer; with
    one that scales gradients, such as Adam, the limit is where the mean of the scaled gradients is zero. The graph may
    be directed and may change, if its weights are doubly stochastic; the default is a ring with weights of one third.

    Di Lorenzo, Scutari, "NEXT: In-Network Nonconvex Optimization", IEEE Transactions on Signal and Information
    Processing over Networks 2016, arXiv 1602.00591; Xu, Zhu, Soh, Xie, "Augmented Distributed Gradient Methods for
    Multi-Agent Optimization Under Uncoordinated Constant Stepsizes", CDC 2015, where both vectors are mixed after they
    were changed, as here.

    Raises:
        ValueError: (when the model is wrapped) weights that are not doubly stochastic.

    Example:
        >>> model = GossipDataParallel(model, rule=GradientTracking())
    """

    vectors = ("last", "z")  # x after the last round; y - u
    scales_with_rate = ("z",)
    keeps_sums = True  # that of the y is that of the u

    def default_mixing(self, world_size: int) -> MixingManager:
        """See `UpdateRule`."""
        return MetropolisHastingsMixing(undirected_ring(world_size))

    def round(self, v: Carried, mix: Callable[[], None], step: SGDStep | None) -> None:
        """See `UpdateRule`."""
        if v.num_rounds == 0:  # no optimizer has stepped
            for h, sent, last in v.each("last"):
                sent.copy_(h)
                last.copy_(h)
            mix()
        else:
            for h, y, last, z in v.each("last", "z"):
                torch.add(z, last, out=y).sub_(h)  # y' - u' + u
            if v.num_rounds > 1:
                mix()
            for h, y, last, z in v.each("last", "z"):
                torch.sub(last, y, out=last)  # x - y, which is sent
                torch.sub(h, last, out=z)  # y - u
                y.copy_(last)
            mix()
        for _, x, last in v.each("last"):
            last.copy_(x)
