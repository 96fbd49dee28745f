"""DecentLaM: momentum SGD whose gradient includes the round of gossip."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..registry import Paper
from ..rounds import Algorithm, Memory, Mix, Round, Vectors


@dataclass(frozen=True)
class DecentLaM(Algorithm):
    """DecentLaM: the gradient of momentum SGD is gt = (x - W (x - eta g)) / eta, the move of plain D-PSGD.

    A step on rank i with the learning rate eta and the momentum b of the user's `torch.optim.SGD`:

        gt_i = (x_i - sum_j W_ij (x_j - eta g_j)) / eta
        m_i  <- b m_i + gt_i
        x_i  <- x_i - eta m_i

    In D-PSGD with momentum the bias of uneven data grows with 1 / (1 - b)^2, since the momentum does not include the
    gossip. Here the momentum includes both, and the bias is as large as in D-PSGD without momentum.

    The user's optimizer takes the step x_i - eta (b m_i + g_i). The round removes the part of the momentum before it
    mixes, computes gt_i and m_i, and writes m_i into the `momentum_buffer` of the optimizer. A parameter without a
    gradient gets a gradient of zeros, since SGD would skip it and its momentum.

    W must be symmetric and must never change: on changing pairs the momentum of the gossip would make differences
    between ranks grow. The default is a ring with weights of one third.

    Yuan, Chen, Huang, Zhang, Pan, Xu, Yin, "DecentLaM: Decentralized Momentum SGD for Large-batch Deep Training", ICCV
    2021, arXiv 2104.11981, Algorithm 2.

    Raises:
        ValueError: (when the model is wrapped) the weights are not symmetric, or they change; (optimizer steps) the
            optimizer is not one `torch.optim.SGD` with momentum, without nesterov and dampening, with one learning rate
            for all parameters.

    Example:
        >>> model = GossipDataParallel(model, algorithm=DecentLaM())
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    """

    summary: ClassVar[str] = "gossips, with momentum that sees the gossip as part of the gradient"
    paper: ClassVar[Paper | None] = Paper(
        "Yuan, Chen, Huang, Zhang, Pan, Xu, Yin",
        "DecentLaM: Decentralized Momentum SGD for Large-batch Deep Training",
        "ICCV 2021",
        "2104.11981",
    )
    needs_current: ClassVar[bool] = True
    needs_whole_rounds: ClassVar[bool] = True
    needs_sgd: ClassVar[bool] = True
    takes_nesterov: ClassVar[bool] = False
    needs_gradients: ClassVar[bool] = True
    needs_static_graph: ClassVar[bool] = True

    def round(self, v: Vectors, m: Memory, k: int) -> Round:
        """See `Algorithm`."""
        last, momentum = m.vector("last", start="x", average="reset"), m.momentum
        sent = m.scratch()
        if v.step is None:
            yield Mix(sent.set_(v.x))
        else:
            b, eta = v.step.momentum, v.step.lr
            yield Mix(sent.sum_(v.x, momentum, alpha=eta * b))  # x - eta g
            momentum.mul_(b).add_(last, alpha=1 / eta).sub_(sent, alpha=1 / eta)  # b m + gt
            sent.sum_(last, momentum, alpha=-eta)
        last.set_(sent)
        v.x.set_(sent)
