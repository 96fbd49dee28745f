"""SlowMo: slow momentum over the exact averages of local SGD or of gossip."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from .anchor import Anchor
from .method import OuterMethod


@dataclass(frozen=True)
class SlowMo(OuterMethod):
    """SlowMo: local SGD or gossip, and every H steps an exact average that a slow momentum is made of.

    Every `sync_every` = H optimizer steps, with a = `lr`, b = `momentum` and eta the learning rate of the inner
    optimizer:

        u   <- b u + 1/eta (phi - 1/n  sum_j x_j)     # exact average over all ranks
        phi <- phi - a eta u
        x_i <- phi

    With a constant eta the law does not depend on it, so eta is asked for only where it changes. It is that of the last
    of the H steps. Inner optimizers keep their state.

    Wang, Tantia, Ballas, Rabbat, "SlowMo: Improving Communication-Efficient Distributed SGD with Slow Momentum", ICLR
    2020, arXiv 1910.00643, Algorithm 1.

    Args:
        sync_every: H, the number of optimizer steps from one outer step to the next; 12 to 48 in the paper.
        lr: a, the slow learning rate.
        momentum: b, the slow momentum; 0.4 to 0.8 in the paper.
        gossip_every: the number of steps from one round of gossip to the next, between outer steps, as the wrapper's
            other arguments say (SGP or D-PSGD); 0: none, ranks train alone (local SGD).
        inner_lr: eta, for inner learning rates that change: "optimizer" is that of the first group of the optimizer
            that steps the model; or a function that returns it, such as `lambda: optimizer.param_groups[0]["lr"]`. Both
            are read when the optimizer has stepped, before a scheduler changes the rate, so that eta is that of the
            last step before the outer one; of several optimizers, of the one that steps last. None: eta is constant.

    Raises:
        ValueError: a rate, `gossip_every` or `inner_lr` out of range; (outer steps) eta is not positive.

    Example:
        >>> model = GossipDataParallel(model, outer=SlowMo(sync_every=12, momentum=0.6, gossip_every=1))
    """

    sync_every: int = 12
    _: KW_ONLY
    lr: float = 1.0
    momentum: float = 0.5
    gossip_every: int = 0
    inner_lr: Callable[[], float] | Literal["optimizer"] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_rates(lr=self.lr, momentum=self.momentum)
        if isinstance(self.gossip_every, bool) or not isinstance(self.gossip_every, int) or self.gossip_every < 0:
            raise ValueError(
                f"got gossip_every={self.gossip_every!r}, expected a whole number of steps, or 0 for no gossip between "
                "outer steps"
            )

        if not (self.inner_lr is None or self.inner_lr == "optimizer" or callable(self.inner_lr)):
            raise ValueError(
                f"got inner_lr={self.inner_lr!r}, expected 'optimizer', for the learning rate of the optimizer that "
                'steps the model, or a function that returns it, such as `lambda: optimizer.param_groups[0]["lr"]`; '
                "leave it out where that is constant"
            )

    def describe(self, dtypes: Sequence[torch.dtype]) -> str:
        """See `OuterMethod`."""
        inner_lr = "a function" if callable(self.inner_lr) else self.inner_lr
        return f"{super().describe(dtypes)}, inner_lr={inner_lr}"

    @property
    def needs_inner_rate(self) -> bool:
        """See `OuterMethod`."""
        return self.inner_lr is not None

    def inner_rate(self, optimizer: Optimizer) -> float:
        """See `OuterMethod`."""
        return float(self.inner_lr()) if callable(self.inner_lr) else super().inner_rate(optimizer)

    def make_optimizer(self, parameters: Sequence[Tensor]) -> Optimizer:
        """See `OuterMethod`."""
        return SlowMomentum(parameters, lr=self.lr, momentum=self.momentum)

    def start(self, anchor: Anchor, x: Sequence[Tensor]) -> None:
        """See `OuterMethod`; notes eta of the steps that have led to x."""
        super().start(anchor, x)
        if isinstance(anchor.optimizer, SlowMomentum):
            anchor.optimizer.eta = self._eta(anchor.inner_rate)

    def _eta(self, noted: float | None) -> float:
        """The rate that was noted; else what the function says now, as with an optimizer that is none of torch's."""
        if noted is None:
            noted = float(self.inner_lr()) if callable(self.inner_lr) else 1.0
        if not noted > 0:
            raise ValueError(
                f"got {noted} as the inner learning rate of the last step, expected one above 0: SlowMo divides by it; "
                "start the warm-up above 0, or leave inner_lr out"
            )
        return noted


class SlowMomentum(Optimizer):
    """u <- b u + D / eta;  phi <- phi - a eta u, where D is the gradient.

    Args:
        params: phi.
        lr: a.
        momentum: b.

    Attributes:
        eta: written before a step.
    """

    def __init__(self, params: Any, *, lr: float, momentum: float) -> None:
        self.eta = 1.0
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """See `torch.optim.Optimizer`; without a closure."""
        for group in self.param_groups:
            for phi in group["params"]:
                if phi.grad is None:
                    continue
                state = self.state[phi]
                if not state:
                    state["u"] = torch.zeros_like(phi)
                u = state["u"].mul_(group["momentum"]).add_(phi.grad, alpha=1 / self.eta)
                phi.add_(u, alpha=-group["lr"] * self.eta)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "eta": self.eta}
