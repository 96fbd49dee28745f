"""AccumAdam: Adam with the moments of gradients that are accumulated over several steps."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

_MOMENTS = ("exp_avg", "exp_avg_sq", "accumulated")
"""Of complete windows the first and the second, and the mean gradient of the current one as far as it has come."""


class AccumAdam(Optimizer):
    """AccumAdam: the moments of Adam follow the mean gradient of each `accum_steps` steps.

    Step t = 1, 2, ... with the gradient g, in the window k = ceil(t / s) of s = `accum_steps` steps:

        m' = b1 m + (1 - b1) g;   v' = b2 v + (1 - b2) g^2                     # for this step only
        x = (1 - lr weight_decay) x - lr (m' / (1 - b1^k)) / (sqrt(v' / (1 - b2^k)) + eps)
        a = a + g / s
        where t is a multiple of s:   m = b1 m + (1 - b1) a;   v = b2 v + (1 - b2) a^2;   a = 0

    A rank that gossips sees the small batches of its own only; the noise in their squares makes the second moments of
    Adam too large, and different among the ranks. The mean of s batches has 1/s of that noise. Both m' and v' have
    the gradient of the step, which is what bounds it: no step is longer than one of Adam can be. With s = 1 it is
    AdamW, and without weight decay Adam.

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
            or of the AccumAdam of before, which had another law.

    Example:
        >>> optimizer = AccumAdam(model.parameters(), lr=1e-3, accum_steps=4)
    """

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

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """See `torch.optim.Optimizer`."""
        for state in state_dict["state"].values():
            if not {"step", *_MOMENTS} <= state.keys():
                raise ValueError(
                    f"AccumAdam: got a state of {', '.join(map(str, state))}, expected step, {', '.join(_MOMENTS)}: it "
                    "is that of another optimizer, or of an AccumAdam whose first moments followed every step, not "
                    "windows of them; leave it out, and the moments begin anew"
                )
        super().load_state_dict(state_dict)

    def _step(self, x: torch.Tensor, g: torch.Tensor, group: dict[str, Any]) -> None:
        """The law, for one parameter."""
        if g.is_sparse:
            raise ValueError(
                "AccumAdam: got a sparse gradient, expected a dense one; pass sparse=False to nn.Embedding"
            )
        state, (b1, b2), s = self.state[x], group["betas"], group["accum_steps"]
        if not state:
            state["step"] = 0
            state.update({name: torch.zeros_like(x) for name in _MOMENTS})
        state["step"] += 1
        t, m, v, a = state["step"], *(state[name] for name in _MOMENTS)
        k = -(-t // s)
        root = v.mul(b2).addcmul_(g, g, value=1 - b2).div_(1 - b2**k).sqrt_().add_(group["eps"])
        x.mul_(1 - group["lr"] * group["weight_decay"])
        x.addcdiv_(m.lerp(g, 1 - b1), root, value=-group["lr"] / (1 - b1**k))
        a.add_(g, alpha=1 / s)
        if t % s == 0:
            m.lerp_(a, 1 - b1)
            v.mul_(b2).addcmul_(a, a, value=1 - b2)
            a.zero_()
