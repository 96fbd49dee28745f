"""DecentLaM: momentum SGD whose gradient includes the round of gossip."""

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
class DecentLaM(UpdateRule):
    """DecentLaM: the gradient of momentum SGD is gt = (x - W (x - eta g)) / eta, the move of plain D-PSGD.

    A step on rank i with the learning rate eta and the momentum b of the user's `torch.optim.SGD`:

        gt_i = (x_i - sum_j W_ij (x_j - eta g_j)) / eta
        m_i  <- b m_i + gt_i
        x_i  <- x_i - eta m_i

    In D-PSGD with momentum the bias of uneven data grows with 1 / (1 - b)^2, since momentum is blind to the gossip;
    here momentum sees both, and the bias is that of D-PSGD without momentum.

    The user's optimizer takes the step x_i - eta (b m_i + g_i). The round takes the part of the momentum out again
    before it mixes, makes gt_i and m_i, and writes m_i into the optimizer's `momentum_buffer`. A parameter that has no
    gradient in a step gets one of zeros, since SGD would leave it where it is, with its momentum.

    W must be symmetric and must never change: on changing pairs the momentum of the gossip itself would make
    differences of ranks grow. Without graph and mixing, ranks form a ring with weights of one third.

    Yuan, Chen, Huang, Zhang, Pan, Xu, Yin, "DecentLaM: Decentralized Momentum SGD for Large-batch Deep Training", ICCV
    2021, arXiv 2104.11981, Algorithm 2.

    Raises:
        ValueError: (when the model is wrapped) weights that are not symmetric, or that change; (optimizer steps)
            another optimizer than one `torch.optim.SGD` with momentum, without nesterov and dampening, with one
            learning rate for all parameters.

    Example:
        >>> model = GossipDataParallel(model, rule=DecentLaM())
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    """

    vectors = ("last", "momentum")
    needs_sgd = True
    takes_nesterov = False
    needs_gradients = True
    needs_static_graph = True

    def default_mixing(self, world_size: int) -> MixingManager:
        """See `UpdateRule`."""
        return MetropolisHastingsMixing(undirected_ring(world_size))

    def round(self, v: Carried, mix: Callable[[], None], step: SGDStep | None) -> None:
        """See `UpdateRule`."""
        if step is None:
            for h, sent in v.each():
                sent.copy_(h)
            mix()
        else:
            b, eta = step.momentum, step.lr
            for h, sent, m in v.each("momentum"):
                torch.add(h, m, alpha=eta * b, out=sent)  # x - eta g
            mix()
            for _, mixed, last, m in v.each("last", "momentum"):
                m.mul_(b).add_(last, alpha=1 / eta).sub_(mixed, alpha=1 / eta)
                torch.sub(last, m, alpha=eta, out=mixed)
        for _, x, last in v.each("last"):
            last.copy_(x)
