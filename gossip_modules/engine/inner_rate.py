"""InnerRate: the learning rate of the last step that the user's optimizer has taken, for outer steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.optim import Optimizer

from ..flat.buffer import FlatBuffer
from ..flat.step_hooks import STEP_HOOKS, KnownOptimizers, is_left_out
from ..outer.method import OuterMethod


class InnerRate:
    """What an outer method asks for when an optimizer of the model has stepped, before a scheduler changes it.

    An outer step runs at the forward after the steps that it is about, when the scheduler has set the rate of the next
    one already. With a method that asks for nothing this does nothing.

    Args:
        outer: says what it needs: see `OuterMethod.inner_rate`.
        buffer: has the parameters of the model; None: nobody knows them.

    Attributes:
        rate: that of the last step; None: nobody has asked, or no optimizer of torch's has stepped.
    """

    def __init__(self, outer: OuterMethod, buffer: FlatBuffer | None) -> None:
        self._outer, self._buffer = outer, buffer
        self._known = KnownOptimizers()
        self.rate: float | None = None
        self._is_open = buffer is not None and outer.needs_inner_rate
        self._listen()

    def _listen(self) -> None:
        if self._is_open:
            STEP_HOOKS.add(self)

    # See `Stepped`.

    order = 0

    def is_stepped_by(self, optimizer: Optimizer) -> bool:
        """See `Stepped`."""
        return self._buffer is not None and self._known(optimizer, self._buffer.parameters)

    def before_step(self, optimizer: Optimizer) -> None:
        """See `Stepped`."""

    def after_step(self, optimizer: Optimizer) -> None:
        """See `Stepped`."""
        if not is_left_out(optimizer):
            self.rate = self._outer.inner_rate(optimizer)

    # State.

    def state_dict(self) -> dict[str, Any]:
        """The rate, where there is one."""
        return {} if self.rate is None else {"inner_rate": self.rate}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict()` gave."""
        self.rate = state.get("inner_rate")

    def close(self) -> None:
        """Listen no more; idempotent."""
        self._is_open = False
        STEP_HOOKS.discard(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._listen()
