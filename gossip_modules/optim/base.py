"""StepOptimizer: the parts that the optimizers of this package share."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer


class StepOptimizer(Optimizer):
    """An optimizer whose step is `update`, after the closure, if there is one.

    Attributes:
        moments: the names of the tensors in the state of a parameter, zero at first.
    """

    moments: ClassVar[tuple[str, ...]] = ()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """See `torch.optim.Optimizer`."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.update()
        return loss

    @abstractmethod
    def update(self) -> None:
        """Step all parameters by their gradients."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """See `torch.optim.Optimizer`.

        Raises:
            ValueError: the state has other moments.
        """
        expected = {"step", *self.moments} if self.moments else set()
        for state in state_dict["state"].values():
            if not expected <= state.keys():
                raise ValueError(
                    f"{type(self).__name__}: got a state of {', '.join(map(str, state))}, expected step, "
                    f"{', '.join(self.moments)}: another optimizer, or another version of it, has this state; leave it "
                    "out, and the moments begin anew"
                )
        super().load_state_dict(state_dict)

    def advanced(self, x: Tensor, gradient: Tensor) -> dict[str, Any]:
        """Count a step of a parameter, and return its state; `state["step"]` is the number of the step, from 1.

        Args:
            x: the parameter.
            gradient: its gradient.

        Raises:
            ValueError: the gradient is sparse.
        """
        if gradient.is_sparse:
            raise ValueError(
                f"{type(self).__name__}: got a sparse gradient, expected a dense one; pass sparse=False to nn.Embedding"
            )
        state = self.state[x]
        if not state:
            state.update(step=0, **{name: torch.zeros_like(x) for name in self.moments})
        state["step"] += 1
        return state


def check_numbers(optimizer: str, **values: float) -> None:
    """Raise ValueError where a number is below 0, infinite or NaN."""
    for name, value in values.items():
        if not 0 <= value < math.inf:
            raise ValueError(f"{optimizer}: got {name}={value!r}, expected a number of at least 0")


def check_count(optimizer: str, name: str, value: object, remark: str) -> None:
    """Raise ValueError where a value is no whole number of at least 1."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{optimizer}: got {name}={value!r}, expected a whole number of at least 1{remark}")
