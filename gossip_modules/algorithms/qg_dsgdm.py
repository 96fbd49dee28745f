"""QG-DSGDm: D-PSGD with a momentum from the moves of the mixed model."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Real
from typing import ClassVar

from torch import Tensor

from ..mixing_manager.base import MixingManager
from ..mixing_manager.spectra import blocks, check_growth, identity_like
from ..registry import Paper
from ..rounds import Algorithm, Memory, Mix, Round, SGDStep, Vectors

_USUAL_MOMENTUM = 0.9


@dataclass(frozen=True)
class QGDSGDm(Algorithm):
    """QG-DSGDm: momentum SGD whose momentum buffer is an average of the moves of the mixed models.

    A step of `torch.optim.SGD(momentum=b)` with learning rate eta on rank i, with the momentum mh_i, zero at first:

        m_i = b mh_i + g_i
        h_i = x_i - eta m_i                   # with nesterov=True, QG-DSGDm-N: h_i = x_i - eta (g_i + b m_i)

    and the round after it:

        x'_i = sum_j W_ij h_j
        mh_i <- mu mh_i + (1 - mu) (x_i - x'_i) / eta
        x_i  <- x'_i

    The user's optimizer takes the step; the round writes mh_i into its `momentum_buffer`. Local momentum amplifies the
    bias of the data of one rank. The move x - x' is averaged with peers, so it is closer to the mean move of all ranks.
    The bias of D-PSGD on uneven data becomes smaller, not zero.

    The momentum of the mixing may let differences between ranks grow: on directed rings of 8 and more ranks with
    mu = b = 0.9, and with a smaller mu on many changing graphs. Such weights raise an error for up to 128 ranks (1,024
    if the graph is undirected and never changes).

    Lin, Karimireddy, Stich, Jaggi, "Quasi-Global Momentum: Accelerating Decentralized Deep Learning on Heterogeneous
    Data", ICML 2021, arXiv 2102.04761, Algorithm 1.

    Args:
        mu: the share of the old momentum that stays, 0 <= mu < 1; None: the momentum b of the optimizer, as in the
            paper.

    Raises:
        ValueError: mu is out of range; (when the model is wrapped) the weights are not doubly stochastic, or
            differences between ranks would grow with b = 0.9; (the round after the first optimizer step, without a
            membership) differences would grow with the optimizer's b; (optimizer steps) the optimizer is not one
            `torch.optim.SGD` with momentum, without dampening, with one learning rate for all parameters.

    Example:
        >>> model = GossipDataParallel(model, algorithm=QGDSGDm())
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    """

    mu: float | None = None

    title: ClassVar[str] = "QG-DSGDm"
    summary: ClassVar[str] = "gossips, with a momentum from the moves of the mixed models"
    paper: ClassVar[Paper | None] = Paper(
        "Lin, Karimireddy, Stich, Jaggi",
        "Quasi-Global Momentum: Accelerating Decentralized Deep Learning on Heterogeneous Data",
        "ICML 2021",
        "2102.04761",
    )
    needs_current: ClassVar[bool] = True
    needs_whole_rounds: ClassVar[bool] = True
    needs_sgd: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.mu is None:
            return
        if isinstance(self.mu, bool) or not isinstance(self.mu, Real) or not 0 <= self.mu < 1:
            raise ValueError(
                f"QGDSGDm: got mu={self.mu!r}, expected 0 <= mu < 1, or None for the momentum of the optimizer"
            )

    def check(self, mixing: MixingManager) -> None:
        """See `Algorithm`; b is not known before the first step, so the check assumes 0.9."""
        super().check(mixing)
        self._check_growth(mixing, _USUAL_MOMENTUM, "the usual momentum")

    def check_step(self, mixing: MixingManager, step: SGDStep) -> None:
        """See `Algorithm`; checks the law without nesterov, under which differences grow faster."""
        self._check_growth(mixing, step.momentum, "a momentum")

    def _check_growth(self, mixing: MixingManager, b: float, name: str) -> None:
        """Raise ValueError if differences between ranks would grow; see `growth`. `name` describes b in the error."""
        mu = b if self.mu is None else self.mu

        def law(w: Tensor) -> Tensor:
            """Return the matrix of a round without gradients on (x, eta mh)."""
            one = identity_like(w)
            return blocks([[w, -b * w], [(1 - mu) * (one - w), mu * one + (1 - mu) * b * w]])

        check_growth("QGDSGDm", {"mu": mu, name: b}, mixing, law, step="round", remedy="a larger mu")

    def round(self, v: Vectors, m: Memory, k: int) -> Round:
        """See `Algorithm`."""
        last, mh = m.vector("last", start="x", average="reset"), m.momentum
        sent = m.scratch().set_(v.x)
        yield Mix(sent)  # x'
        if v.step is not None:
            mu = v.step.momentum if self.mu is None else self.mu
            mh.mul_(mu).add_(last.sub_(sent), alpha=(1 - mu) / v.step.lr)
        last.set_(sent)
        v.x.set_(sent)
