"""DelayedNesterov: an outer optimizer whose gradients arrive one worker at a time."""

from __future__ import annotations

from typing import Any

from .base import StepOptimizer, check_count, check_numbers


class DelayedNesterov(StepOptimizer):
    """Nesterov momentum that moves once for N gradients, while each gradient is applied at once.

    Where workers push their drifts to an anchor one by one, momentum in each step would amplify drifts that are stale.
    Arrival t = 0, 1, ... of a drift g, with e = `lr`, b = `momentum`, N = `num_delayed` and c = `spread`:

        d <- d + g
        if t + 1 is no multiple of N:   phi <- phi - e (c b m + g / N)
        else:                           m   <- b m + d / N
                                        phi <- phi - e ((1 - c N + c) b m + g / N)
                                        d   <- 0

    It is an optimizer of flat tensors, without a communication of its own. As the `optimizer` of `DiLoCo` it takes one
    arrival in each outer step. An outer step with one worker is an arrival of the paper: g is the drift of this worker
    from the anchor at which it started, all workers take the same step, and it starts again at the new anchor. An outer
    step with several workers is one arrival of their mean drift, so that momentum moves in every N-th outer step.

    Liu et al., "Asynchronous Local-SGD Training for Language Modeling", 2024, arXiv 2401.09135, Algorithm 3.

    Args:
        params: parameters, or groups of them.
        lr: e, the learning rate of N gradients together.
        momentum: b; 0 <= b < 1.
        num_delayed: N, the number of gradients from one move of the momentum to the next; the number of workers.
        spread: c, the share of the momentum that is applied in each step in between; 0 <= c <= 1 / N. 0 applies all of
            it with every N-th gradient.

    Raises:
        ValueError: a setting is out of range.

    Example:
        >>> import torch
        >>> anchor = [torch.zeros(3)]
        >>> optimizer = DelayedNesterov(anchor, num_delayed=2)
        >>> for drift in (torch.ones(3), torch.ones(3)):
        ...     anchor[0].grad = drift
        ...     optimizer.step()
        >>> anchor[0]
        tensor([-1.3300, -1.3300, -1.3300])

        As an outer optimizer:

        >>> from gossip_modules import DiLoCo
        >>> outer = DiLoCo(sync_every=50, optimizer=lambda parameters: DelayedNesterov(parameters, num_delayed=8))
    """

    moments = ("momentum", "delayed")

    def __init__(
        self, params: Any, lr: float = 0.7, *, momentum: float = 0.9, num_delayed: int = 1, spread: float = 0.0
    ) -> None:
        check_numbers("DelayedNesterov", lr=lr)
        if not 0 <= momentum < 1:
            raise ValueError(f"DelayedNesterov: got momentum={momentum!r}, expected 0 <= momentum < 1")
        remark = ", such as the number of workers; 1 is Nesterov momentum"
        check_count("DelayedNesterov", "num_delayed", num_delayed, remark)
        if not 0 <= spread <= 1 / num_delayed:
            raise ValueError(
                f"DelayedNesterov: got spread={spread!r} with num_delayed={num_delayed}, expected 0 <= spread <= "
                f"{1 / num_delayed:g}; 0 applies the momentum once for all delayed gradients"
            )
        super().__init__(params, {"lr": lr, "momentum": momentum, "num_delayed": num_delayed, "spread": spread})

    def update(self) -> None:
        """See `StepOptimizer`; one arrival."""
        for group in self.param_groups:
            e, b, n, c = (group[name] for name in ("lr", "momentum", "num_delayed", "spread"))
            for phi in group["params"]:
                if phi.grad is None:
                    continue
                state = self.advanced(phi, phi.grad)
                m, d, share = state["momentum"], state["delayed"].add_(phi.grad), c
                if state["step"] % n == 0:
                    m.mul_(b).add_(d, alpha=1 / n)
                    d.zero_()
                    share = 1 - c * n + c
                phi.add_(m, alpha=-e * share * b).add_(phi.grad, alpha=-e / n)
