"""SlowMo: slow momentum over the exact averages of local SGD or of gossip."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from .method import OuterMethod


@dataclass(frozen=True)
class SlowMo(OuterMethod):
    """SlowMo: local SGD or gossip, and every H steps an exact average that a slow momentum is made of.

    Every `sync_every` = H optimizer steps, with a = `lr`, b = `momentum` and eta the learning rate of the inner
    optimizer:

        u   <- b u + 1/eta (phi - 1/n  sum_j x_j)     # exact average over all ranks
        phi <- phi - a eta u
        x_i <- phi

    With a constant eta the law does not depend on it, so eta is asked for only where it changes. Inner optimizers keep
    their state.

    Wang, Tantia, Ballas, Rabbat, "SlowMo: Improving Communication-Efficient Distributed SGD with Slow Momentum", ICLR
    2020, arXiv 1910.00643, Algorithm 1.

    Args:
        sync_every: H, the number of optimizer steps from one outer step to the next; 12 to 48 in the paper.
        lr: a, the slow learning rate.
        momentum: b, the slow momentum; 0.4 to 0.8 in the paper.
        gossip_every: the number of steps from one round of gossip to the next, between outer steps, as the wrapper's
            other arguments say (SGP or D-PSGD); 0: none, ranks train alone (local SGD).
        inner_lr: a function that returns eta, for inner learning rates that change, such as
            `lambda: optimizer.param_groups[0]["lr"]`; None: eta is constant.

    Raises:
        ValueError: a rate or `gossip_every` out of range; (outer steps) `inner_lr()` is not positive.

    Example:
        >>> model = GossipDataParallel(model, outer=SlowMo(sync_every=12, momentum=0.6, gossip_every=1))
    """

    sync_every: int = 12
    _: KW_ONLY
    lr: float = 1.0
    momentum: float = 0.5
    gossip_every: int = 0
    inner_lr: Callable[[], float] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_rates(lr=self.lr, momentum=self.momentum)
        if isinstance(self.gossip_every, bool) or not isinstance(self.gossip_every, int) or self.gossip_every < 0:
            raise ValueError(
                f"got gossip_every={self.gossip_every!r}, expected a whole number of steps, or 0 for no gossip between "
                "outer steps"
            )

    def make_optimizer(self, parameters: Sequence[Tensor]) -> Optimizer:
        """See `OuterMethod`."""
        return SlowMomentum(parameters, lr=self.lr, momentum=self.momentum, inner_lr=self.inner_lr)


class SlowMomentum(Optimizer):
    """u <- b u + D / eta;  phi <- phi - a eta u, where D is the gradient.

    Args:
        params: phi.
        lr: a.
        momentum: b.
        inner_lr: a function that returns eta; None: 1.
    """

    def __init__(self, params: Any, *, lr: float, momentum: float, inner_lr: Callable[[], float] | None = None) -> None:
        self.inner_lr = inner_lr
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """See `torch.optim.Optimizer`; without a closure."""
        eta = 1.0 if self.inner_lr is None else self.inner_lr()
        if not eta > 0:
            raise ValueError(
                f"got {eta} of inner_lr(), expected the learning rate of the inner optimizer, above 0: SlowMo divides "
                "by it; start the warm-up above 0, or leave inner_lr out"
            )
        for group in self.param_groups:
            for phi in group["params"]:
                if phi.grad is None:
                    continue
                state = self.state[phi]
                if not state:
                    state["u"] = torch.zeros_like(phi)
                u = state["u"].mul_(group["momentum"]).add_(phi.grad, alpha=1 / eta)
                phi.add_(u, alpha=-group["lr"] * eta)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "inner_lr": self.inner_lr}
