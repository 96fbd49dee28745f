"""GASLoC: DiLoCo by gossip, where the momentum is mixed along with the parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from .anchor import Anchor
from .method import OuterMethod


@dataclass(frozen=True)
class GASLoC(OuterMethod):
    """GASLoC: H steps alone, an outer step of each rank by itself, and one round of gossip of the result.

    Every `sync_every` = H optimizer steps, with c = `lr`, g = `momentum` and W(t) the weights of the wrapper's graph,
    which in the paper are I - alpha L:

        y_i   <- phi_i + c (x_i - phi_i)
        phi_i <- sum_j W_ij(t) (y_j + g (y_j - y'_j))     # y': y of the outer step before; at first phi
        x_i   <- phi_i

    The extrapolation is mixed too, not added after the round: so ranks do not disagree for ever, and on a complete
    graph this is `DiLoCo` with the same rates.

    "GASLoC", 2026, arXiv 2606.11081; the law is given here as secondary sources have it.

    Args:
        sync_every: H, the number of optimizer steps from one outer step to the next.
        lr: c, the outer learning rate.
        momentum: g, the outer momentum; 0 <= g < 1.

    Raises:
        ValueError: a rate out of range.

    Example:
        >>> model = GossipDataParallel(model, outer=GASLoC(sync_every=50), graph=RingGraph(8, peers_per_itr=2))
    """

    sync_every: int = 30
    _: KW_ONLY
    lr: float = 0.7
    momentum: float = 0.9

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_rates(lr=self.lr, momentum=self.momentum)

    @property
    def averages_exactly(self) -> bool:
        """See `OuterMethod`."""
        return False

    def make_optimizer(self, parameters: Sequence[Tensor]) -> Optimizer:
        """See `OuterMethod`."""
        return Extrapolation(parameters, lr=self.lr, momentum=self.momentum)

    def start(self, anchor: Anchor, x: Sequence[Tensor]) -> None:
        """See `OuterMethod`: the outer step of this rank comes first, and its result is mixed."""
        anchor.take_drift(x)
        anchor.step()
        for sent, phi in zip(anchor.gradients, anchor.parameters, strict=True):
            sent.copy_(phi)

    def finish(self, anchor: Anchor) -> None:
        """See `OuterMethod`."""
        for phi, mixed in zip(anchor.parameters, anchor.gradients, strict=True):
            phi.copy_(mixed)


class Extrapolation(Optimizer):
    """y <- phi - c D;  phi <- y + g (y - y'), where D is the gradient and y' the y of the step before, at first phi.

    Args:
        params: phi.
        lr: c.
        momentum: g.
    """

    def __init__(self, params: Any, *, lr: float, momentum: float) -> None:
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
                    state["y"] = phi.clone()
                y = phi.add_(phi.grad, alpha=-group["lr"])
                change = y - state["y"]
                state["y"].copy_(y)
                phi.add_(change, alpha=group["momentum"])
