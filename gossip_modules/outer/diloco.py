"""DiLoCo: the average drift of all ranks is the gradient of an outer optimizer, SGD with Nesterov momentum."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field

import torch
from torch import Tensor
from torch.optim import Optimizer

from .anchor import MakeOptimizer
from .method import OuterMethod


@dataclass(frozen=True)
class DiLoCo(OuterMethod):
    """DiLoCo: H steps alone, then a step of SGD with Nesterov momentum with the mean drift of all ranks as gradient.

    Every `sync_every` = H optimizer steps, with c = `lr` and b = `momentum`:

        D   <- 1/n  sum_j (phi - x_j)     # exact average over all ranks
        m   <- b m + D
        phi <- phi - c (D + b m)          # torch.optim.SGD(nesterov=True), to the bit
        x_i <- phi

    All ranks keep the same phi and m. The user's own optimizer takes the inner steps and keeps its state, as in the
    paper, where it is AdamW. With lr=1 and momentum=0 this is local SGD; with one worker it is SNOO (Kallusky et al.,
    2025, arXiv 2510.15830).

    Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models", 2023, arXiv 2311.08105,
    Algorithm 1.

    Args:
        sync_every: H, the number of optimizer steps from one outer step to the next; 30 to 500 in the paper.
        lr: c, the learning rate of the outer optimizer.
        momentum: b, its momentum; 0 <= b < 1.
        optimizer: another outer optimizer, in place of lr and momentum: a function of parameters, such as
            `lambda parameters: torch.optim.Adam(parameters, lr=0.3)`. It gets flat tensors, one for each dtype, so it
            must work element by element, without a closure; the same on all ranks. A checkpoint restores its state,
            such as momentum, and keeps the rates that it is made with.

    Raises:
        ValueError: a rate out of range, or rates beside an optimizer; (first training forward) `optimizer` fails,
            makes none of the parameters that it is given, or one whose step needs a closure.

    Example:
        >>> model = GossipDataParallel(model, outer=DiLoCo(sync_every=50, lr=0.7, momentum=0.9))
    """

    sync_every: int = 30
    _: KW_ONLY
    lr: float = 0.7
    momentum: float = 0.9
    optimizer: MakeOptimizer | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_rates(lr=self.lr, momentum=self.momentum)
        if self.optimizer is not None and not callable(self.optimizer):
            raise ValueError(
                f"{type(self).__name__}: got optimizer={self.optimizer!r}, expected a function of parameters, such as "
                "`lambda parameters: torch.optim.Adam(parameters, lr=0.3)`; the anchor that it steps is made later"
            )
        if self.optimizer is not None and (self.lr, self.momentum) != (DiLoCo.lr, DiLoCo.momentum):
            raise ValueError(
                f"got lr={self.lr} and momentum={self.momentum} beside an optimizer, expected one or the other; give "
                "the rates to the optimizer"
            )

    def make_optimizer(self, parameters: Sequence[Tensor]) -> Optimizer:
        """See `OuterMethod`."""
        if self.optimizer is not None:
            return self.optimizer(parameters)
        return torch.optim.SGD(parameters, lr=self.lr, momentum=self.momentum, nesterov=self.momentum > 0)
