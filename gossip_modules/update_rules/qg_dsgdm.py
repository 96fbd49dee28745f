"""QG-DSGDm: D-PSGD whose momentum is made of how the mixed model moves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real

from ..mixing_manager.base import MixingManager
from .carried import Carried
from .rule import UpdateRule, is_static, lowest_eigenvalue
from .sgd_momentum import SGDStep


@dataclass(frozen=True)
class QGDSGDm(UpdateRule):
    """QG-DSGDm: momentum SGD whose momentum buffer is an average of how far the models of all ranks have moved.

    A step of `torch.optim.SGD(momentum=b)` with learning rate eta on rank i, whose momentum is mh_i, zero at first:

        m_i = b mh_i + g_i
        h_i = x_i - eta m_i                   # with nesterov=True, QG-DSGDm-N: h_i = x_i - eta (g_i + b m_i)

    and the round after it:

        x'_i = sum_j W_ij h_j
        mh_i <- mu mh_i + (1 - mu) (x_i - x'_i) / eta
        x_i  <- x'_i

    The user's optimizer takes the step; the round writes mh_i into its `momentum_buffer`. Local momentum amplifies what
    is peculiar to the data of one rank; the move x - x' has been averaged with peers, and is closer to that of all.
    The bias of D-PSGD on uneven data becomes smaller, not zero.

    Lin, Karimireddy, Stich, Jaggi, "Quasi-Global Momentum: Accelerating Decentralized Deep Learning on Heterogeneous
    Data", ICML 2021, arXiv 2102.04761, Algorithm 1.

    Args:
        mu: the share of the old momentum that stays, 0 <= mu < 1; None: the momentum b of the optimizer, as in the
            paper.

    Raises:
        ValueError: mu out of range; (when the model is wrapped) weights that are not doubly stochastic, or have an
            eigenvalue with which differences of ranks would grow; (optimizer steps) another optimizer than one
            `torch.optim.SGD` with momentum, without dampening, with one learning rate for all parameters.

    Example:
        >>> model = GossipDataParallel(model, rule=QGDSGDm())
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    """

    vectors = ("last", "momentum")
    needs_sgd = True

    mu: float | None = None

    def __post_init__(self) -> None:
        if self.mu is None:
            return
        if isinstance(self.mu, bool) or not isinstance(self.mu, Real) or not 0 <= self.mu < 1:
            raise ValueError(
                f"QGDSGDm: got mu={self.mu!r}, expected 0 <= mu < 1, or None for the momentum of the optimizer"
            )

    def check(self, mixing: MixingManager) -> None:
        """See `UpdateRule`.

        A rank's distance from the mean, in the direction of an eigenvalue w, dies out for w above
        -(1 + mu) / (1 + mu + 2 (1 - mu) b). With mu = b this is never above -0.744; for other mu it is taken at b = 1.
        """
        super().check(mixing)
        limit = -0.744 if self.mu is None else -(1 + self.mu) / (3 - self.mu)
        lowest = lowest_eigenvalue(mixing) if is_static(mixing.graph) and mixing.is_symmetric else None
        if lowest is not None and lowest < limit - 1e-9:
            raise ValueError(
                f"QGDSGDm: got {mixing} with an eigenvalue of {lowest:.4g}, expected none below {limit:.4g}: the "
                "differences between ranks might grow; use weights that keep more at the rank itself, such as those of "
                "MetropolisHastingsMixing"
            )

    def round(self, v: Carried, mix: Callable[[], None], step: SGDStep | None) -> None:
        """See `UpdateRule`."""
        for h, sent in v.each():
            sent.copy_(h)
        mix()
        if step is not None:
            mu = step.momentum if self.mu is None else self.mu
            for _, x, last, mh in v.each("last", "momentum"):
                last.sub_(x)  # x - x'
                mh.mul_(mu).add_(last, alpha=(1 - mu) / step.lr)
        for _, x, last in v.each("last"):
            last.copy_(x)
