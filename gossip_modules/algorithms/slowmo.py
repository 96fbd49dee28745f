"""SlowMo: a slow momentum on the exact averages of local SGD or gossip."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import ClassVar, Literal

import torch
from torch.optim import Optimizer

from ..registry import Paper
from ..rounds import Average, Memory, Mix, Round, Times, Vectors
from .outer_method import OuterMethod


@dataclass(frozen=True)
class SlowMo(OuterMethod):
    """SlowMo: local SGD or gossip, and every H steps a slow momentum step from an exact average.

    Every `sync_every` = H optimizer steps, with a = `lr`, b = `momentum` and eta the learning rate of the inner
    optimizer:

        u   <- b u + 1/eta (phi - 1/n  sum_j x_j)     # exact average over all ranks
        phi <- phi - a eta u
        x_i <- phi

    With a constant eta the law does not depend on it, so you need `inner_lr` only if the rate changes. eta is the rate
    of the last of the H steps. Inner optimizers keep their state.

    Wang, Tantia, Ballas, Rabbat, "SlowMo: Improving Communication-Efficient Distributed SGD with Slow Momentum", ICLR
    2020, arXiv 1910.00643, Algorithm 1.

    Args:
        sync_every: H, the number of optimizer steps from one outer step to the next; 12 to 48 in the paper.
        lr: a, the slow learning rate.
        momentum: b, the slow momentum; 0.4 to 0.8 in the paper.
        gossip_every: the number of steps from one round of gossip to the next, between outer steps. The other arguments
            of the wrapper choose SGP or D-PSGD. 0: no gossip, ranks train alone (local SGD).
        inner_lr: eta, for inner learning rates that change. "optimizer" uses the rate of the first parameter group of
            the optimizer that steps the model. Or pass a function that returns the rate, such as
            `lambda: optimizer.param_groups[0]["lr"]`. The rate is read after each optimizer step, before a scheduler
            changes it, so eta is the rate of the last step before the outer step. With several optimizers it is the
            rate of the last one to step. None: eta is constant.

    Raises:
        ValueError: a rate, `gossip_every` or `inner_lr` is out of range; (outer steps) eta is not positive.

    Example:
        >>> model = GossipDataParallel(model, algorithm=SlowMo(sync_every=12, momentum=0.6, gossip_every=1))
    """

    sync_every: int = 12
    _: KW_ONLY
    lr: float = 1.0
    momentum: float = 0.5
    gossip_every: int = 0
    inner_lr: Callable[[], float] | Literal["optimizer"] | None = field(default=None, repr=False)

    summary: ClassVar[str] = "puts a slow momentum on the averages of local SGD or gossip"
    paper: ClassVar[Paper | None] = Paper(
        "Wang, Tantia, Ballas, Rabbat",
        "SlowMo: Improving Communication-Efficient Distributed SGD with Slow Momentum",
        "ICLR 2020",
        "1910.00643",
    )
    averages_exactly: ClassVar[bool] = True
    has_equal_memory: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_rates(lr=self.lr, momentum=self.momentum)
        if isinstance(self.gossip_every, bool) or not isinstance(self.gossip_every, int) or self.gossip_every < 0:
            raise ValueError(
                f"got gossip_every={self.gossip_every!r}, expected a whole number of steps, or 0 for no gossip between "
                "outer steps"
            )
        if self.gossip_every and (self.delay or self.num_fragments > 1):
            raise ValueError(
                f"{type(self).__name__}: got gossip_every={self.gossip_every} with delay={self.delay} and "
                f"fragments={self.fragments!r}, expected no gossip between outer steps that travel under training or "
                "in parts; pass gossip_every=0"
            )
        if not (self.inner_lr is None or self.inner_lr == "optimizer" or callable(self.inner_lr)):
            raise ValueError(
                f"got inner_lr={self.inner_lr!r}, expected 'optimizer', for the learning rate of the optimizer that "
                'steps the model, or a function that returns it, such as `lambda: optimizer.param_groups[0]["lr"]`; '
                "leave it out if the rate is constant"
            )

    def describe(self, dtypes: Sequence[torch.dtype]) -> str:
        """See `Algorithm`."""
        return f"{self}, inner_lr={'a function' if callable(self.inner_lr) else self.inner_lr}"

    @property
    def mixes(self) -> bool:
        """See `Algorithm`."""
        return self.gossip_every > 0

    @property
    def takes_push_sum(self) -> bool:  # type: ignore[override]
        """See `Algorithm`."""
        return self.mixes

    @property
    def needs_inner_rate(self) -> bool:  # type: ignore[override]
        """See `Algorithm`."""
        return self.inner_lr is not None

    def inner_rate(self, optimizer: Optimizer) -> float:
        """See `Algorithm`."""
        return float(self.inner_lr()) if callable(self.inner_lr) else super().inner_rate(optimizer)

    @property
    def times(self) -> tuple[Times, ...]:
        """See `Algorithm`: the outer steps, and the steps of gossip."""
        return (*super().times, *((Times(self.gossip_every, self.gossip_every),) if self.mixes else ()))

    def is_due(self, k: int) -> bool:
        """See `Algorithm`."""
        return super().is_due(k) or (self.mixes and k % self.gossip_every == 0)

    def round(self, v: Vectors, m: Memory, k: int) -> Round:
        """See `Algorithm`."""
        if not super().is_due(k):
            yield Mix(v.x)
            return
        phi, u, eta = self.anchor(m), m.vector("u"), self._eta(v.inner_rate)
        drift = m.scratch().sum_(phi, v.x, alpha=-1)
        yield Average(drift)
        u.mul_(self.momentum).add_(drift, alpha=1 / eta)
        phi.sub_(u, alpha=self.lr * eta)
        self.arrive(v, phi)

    def _eta(self, noted: float | None) -> float:
        """Return the recorded rate; without one (no torch optimizer has stepped), the result of the function now."""
        if noted is None:
            noted = float(self.inner_lr()) if callable(self.inner_lr) else 1.0
        if not noted > 0:
            raise ValueError(
                f"got {noted} as the inner learning rate of the last step, expected one above 0: SlowMo divides by it; "
                "start the warm-up above 0, or leave inner_lr out"
            )
        return noted
