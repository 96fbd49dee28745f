"""AccumAdam: Adam whose second moments are those of gradients accumulated over several steps."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer


class AccumAdam(Optimizer):
    """AccumAdam: the second moment of Adam follows the mean gradient of `accum_steps` steps, not that of each step.

    Step t = 1, 2, ... with the gradient g, and k the number of windows of s = `accum_steps` steps that are complete:

        m = b1 m + (1 - b1) g
        a = a + g / s
        where t is a multiple of s:   v = b2 v + (1 - b2) a^2;  a = 0
        x = (1 - lr weight_decay) x - lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^k)) + eps)

    In the steps before the first window is complete, v / (1 - b2^k) is the square of the mean of the gradients so far.
    A rank that gossips sees the small batches of its own only; the noise in their squares makes the second moments of
    Adam too large, and those of the ranks different. The mean of s batches has 1/s of that noise. With s = 1 it is
    AdamW, and without weight decay Adam.

    Second moments from accumulated gradients are those of Decent-DP: Wang et al., "From Promise to Practice: Realizing
    High-performance Decentralized Training", ICLR 2025, arXiv 2410.11998. The treatment of the first window and the
    decoupled weight decay are ours.

    Args:
        params: parameters, or groups of them.
        lr: the learning rate.
        betas: b1 and b2.
        eps: added to the root.
        weight_decay: decoupled, as in AdamW.
        accum_steps: s, at least 1.

    Raises:
        ValueError: a setting out of range; (steps) sparse gradients.

    Example:
        >>> optimizer = AccumAdam(model.parameters(), lr=1e-3, accum_steps=4)
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        accum_steps: int = 4,
    ) -> None:
        if isinstance(accum_steps, bool) or not isinstance(accum_steps, int) or accum_steps < 1:
            raise ValueError(
                f"got accum_steps={accum_steps!r}, expected a whole number of steps, at least 1; 1 is AdamW"
            )
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(
                f"got betas={betas!r}, expected two numbers of at least 0 and below 1, such as (0.9, 0.999)"
            )
        for name, value in (("lr", lr), ("eps", eps), ("weight_decay", weight_decay)):
            if not 0 <= value < math.inf:
                raise ValueError(f"got {name}={value!r}, expected a number of at least 0")
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "accum_steps": accum_steps}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """See `torch.optim.Optimizer`."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for x in group["params"]:
                if x.grad is not None:
                    self._step(x, x.grad, group)
        return loss

    def _step(self, x: torch.Tensor, g: torch.Tensor, group: dict[str, Any]) -> None:
        """The law, for one parameter."""
        if g.is_sparse:
            raise ValueError(
                "AccumAdam: got a sparse gradient, expected a dense one; pass sparse=False to nn.Embedding"
            )
        state, (b1, b2), s = self.state[x], group["betas"], group["accum_steps"]
        if not state:
            state["step"] = 0
            state.update({name: torch.zeros_like(x) for name in ("m", "accumulated", "v")})
        state["step"] += 1
        t, m, a, v = state["step"], state["m"], state["accumulated"], state["v"]
        m.lerp_(g, 1 - b1)
        a.add_(g, alpha=1 / s)
        if t % s == 0:
            v.mul_(b2).addcmul_(a, a, value=1 - b2)
            a.zero_()
        windows = t // s
        root = (v / (1 - b2**windows)).sqrt_() if windows else (a * (s / t)).abs_()
        x.mul_(1 - group["lr"] * group["weight_decay"])
        x.addcdiv_(m, root.add_(group["eps"]), value=-group["lr"] / (1 - b1**t))
