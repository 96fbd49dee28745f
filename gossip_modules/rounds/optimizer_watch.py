"""OptimizerWatch: what an algorithm learns of the steps of the user's optimizer, and what it writes back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from ..flat.buffer import FlatBuffer
from .algorithm import Algorithm
from .memory import Memory
from .sgd_momentum import SGDMomentum
from .step_rates import StepRates
from .vectors import SGDStep


class OptimizerWatch:
    """Watches the optimizer of one model, as far as an algorithm asks for it.

    Args:
        algorithm: says what it needs.
        buffer: has the parameters of the model.
    """

    def __init__(self, algorithm: Algorithm, buffer: FlatBuffer) -> None:
        self._momentum = SGDMomentum(buffer, algorithm) if algorithm.needs_sgd else None
        self._rates = StepRates(buffer) if algorithm.follows_rate else None

    @property
    def step(self) -> SGDStep | None:
        """The step of SGD since the last round."""
        return None if self._momentum is None else self._momentum.step

    def before_round(self, memory: Memory) -> None:
        """Scale the memory to the rates of the steps since the last round."""
        memory.scale(None if self._rates is None else self._rates.since_round())

    def after_round(self, memory: Memory) -> None:
        """Write the momentum of the algorithm into the optimizer, and wait for the next step."""
        if self._rates is not None:
            self._rates.end_round()
        if self._momentum is not None:
            self._momentum.step = None
            self._momentum.write(memory.momentum.parts)

    def forget(self, momentum: Sequence[Tensor] = ()) -> None:
        """There was no step since the last round. momentum: of the algorithm; empty: the optimizer keeps its own."""
        if self._momentum is not None:
            self._momentum.step = None
            self._momentum.write(momentum)

    def state_dict(self, *, joins: bool = False) -> dict[str, Any]:
        """The step and the rates since the last round. joins: for a worker that joins, which has taken no step."""
        step = None if joins or self.step is None else list(self.step)
        return {"sgd_step": step, "step_rates": None if self._rates is None else self._rates.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any], momentum: Sequence[Tensor] = ()) -> None:
        """Take back what `state_dict()` gave; nothing = start anew. momentum: see `forget`."""
        if self._rates is not None:
            self._rates.load_state_dict(state.get("step_rates") or {})
        self.forget(momentum)
        if self._momentum is not None and (step := state.get("sgd_step")) is not None:
            self._momentum.step = SGDStep(*step)

    def close(self) -> None:
        """Watch no longer; idempotent."""
        for listener in (self._momentum, self._rates):
            if listener is not None:
                listener.close()
