"""AccumAdam: Adam with the moments of gradients accumulated over several steps."""

from __future__ import annotations

from typing import Any

import torch

from .base import StepOptimizer, check_count, check_numbers


class AccumAdam(StepOptimizer):
    """AccumAdam: the moments of Adam follow the mean gradient of each `accum_steps` steps.

    Step t = 1, 2, ... with the gradient g, in the window k = ceil(t / s) of s = `accum_steps` steps:

        m' = b1 m + (1 - b1) g;   v' = b2 v + (1 - b2) g^2                     # for this step only
        x = (1 - lr weight_decay) x - lr (m' / (1 - b1^k)) / (sqrt(v' / (1 - b2^k)) + eps)
        a = a + g / s
        where t is a multiple of s:   m = b1 m + (1 - b1) a;   v = b2 v + (1 - b2) a^2;   a = 0

    With gossip a rank sees its own small batches only; the noise in their squares makes the second moments of Adam too
    large, and different among the ranks. The mean of s batches has 1/s of that noise. Both m' and v' have the gradient
    of the step, which is what bounds it: no step is longer than one of Adam can be. With s = 1 it is AdamW, and without
    weight decay Adam.

    From Decent-DP: Wang et al., "From Promise to Practice: Realizing High-performance Decentralized Training", ICLR
    2025, arXiv 2410.11998, Appendix C.

    Args:
        params: parameters, or groups of them.
        lr: the learning rate.
        betas: b1 and b2.
        eps: added to the root.
        weight_decay: decoupled, as in AdamW.
        accum_steps: s, at least 1.

    Raises:
        ValueError: a setting out of range; (steps) sparse gradients; (load_state_dict) the state of another optimizer,
            or of the AccumAdam of before, with another update.

    Example:
        >>> optimizer = AccumAdam(model.parameters(), lr=1e-3, accum_steps=4)
    """

    # Of complete windows the first and the second, and the mean gradient of the current one as far as it has come.
    moments = ("exp_avg", "exp_avg_sq", "accumulated")
    is_elementwise = True  # the Lab may step all workers by one of these

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
        check_count("AccumAdam", "accum_steps", accum_steps, "; 1 is AdamW")
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(
                f"AccumAdam: got betas={betas!r}, expected two numbers of at least 0 and below 1, such as (0.9, 0.999)"
            )
        check_numbers("AccumAdam", lr=lr, eps=eps, weight_decay=weight_decay)
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "accum_steps": accum_steps}
        super().__init__(params, defaults)

    def update(self) -> None:
        """See `StepOptimizer`."""
        for group in self.param_groups:
            for x in group["params"]:
                if x.grad is not None:
                    self._step(x, x.grad, group)

    def _step(self, x: torch.Tensor, g: torch.Tensor, group: dict[str, Any]) -> None:
        """The law, for one parameter."""
        state, (b1, b2), s = self.advanced(x, g), group["betas"], group["accum_steps"]
        t, m, v, a = state["step"], *(state[name] for name in self.moments)
        k = -(-t // s)
        root = v.mul(b2).addcmul_(g, g, value=1 - b2).div_(1 - b2**k).sqrt_().add_(group["eps"])
        x.mul_(1 - group["lr"] * group["weight_decay"])
        x.addcdiv_(m.lerp(g, 1 - b1), root, value=-group["lr"] / (1 - b1**k))
        a.add_(g, alpha=1 / s)
        if t % s == 0:
            m.lerp_(a, 1 - b1)
            v.mul_(b2).addcmul_(a, a, value=1 - b2)
            a.zero_()
