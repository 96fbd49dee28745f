"""OptimizerWatch: what an algorithm learns of the steps of the user's optimizer, and what it writes back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.optim import Optimizer

from ..flat.buffer import FlatBuffer
from ..flat.step_hooks import STEP_HOOKS, holds_any, is_left_out
from .algorithm import Algorithm
from .memory import Memory
from .requests import SGDStep
from .sgd_momentum import SGDMomentum
from .step_rates import StepRates


class OptimizerWatch:
    """Watches the optimizer of one model, as far as an algorithm asks for it.

    Args:
        algorithm: says what it needs.
        buffer: has the parameters of the model.
    """

    def __init__(self, algorithm: Algorithm, buffer: FlatBuffer) -> None:
        steppers = [k for k, part in enumerate(algorithm.parts) if part.needs_sgd]
        self._depth = steppers[0] if steppers else 0  # of the memory that has the momentum
        self._momentum = SGDMomentum(buffer, algorithm.parts[self._depth]) if steppers else None
        self._rates = StepRates(buffer) if algorithm.follows_rate else None
        self._inner = InnerRate(algorithm, buffer) if algorithm.needs_inner_rate else None

    @property
    def inner_rate(self) -> float | None:
        """See `InnerRate`."""
        return None if self._inner is None else self._inner.rate

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
            self._momentum.write(self.memory_of(memory).momentum.parts)

    def memory_of(self, memory: Memory) -> Memory:
        """The memory that has the momentum: of the algorithm that needs SGD, which another one may be over."""
        for _ in range(self._depth):
            memory = memory.inner
        return memory

    def forget(self, memory: Memory) -> None:
        """There was no step since the last round. Where the memory has no momentum, the optimizer keeps its own."""
        if self._momentum is not None:
            self._momentum.step = None
            self._momentum.write(self.memory_of(memory).parts_of("momentum"))

    def state_dict(self, *, joins: bool = False) -> dict[str, Any]:
        """The step and the rates since the last round. joins: for a worker that joins, which has taken no step."""
        step = None if joins or self.step is None else list(self.step)
        rates = None if self._rates is None else self._rates.state_dict()
        return {"sgd_step": step, "step_rates": rates, "inner_rate": self.inner_rate}

    def load_state_dict(self, state: Mapping[str, Any], memory: Memory) -> None:
        """Take back what `state_dict()` gave; nothing = start anew. memory: see `forget`."""
        if self._rates is not None:
            self._rates.load_state_dict(state.get("step_rates") or {})
        if self._inner is not None:
            self._inner.rate = state.get("inner_rate")
        self.forget(memory)
        if self._momentum is not None and (step := state.get("sgd_step")) is not None:
            self._momentum.step = SGDStep(*step)

    def close(self) -> None:
        """Watch no longer; idempotent."""
        for listener in (self._momentum, self._rates, self._inner):
            if listener is not None:
                listener.close()


class InnerRate:
    """What an algorithm asks for when an optimizer of the model has stepped, before a scheduler changes it.

    A round runs at the forward after the steps that it is about, when the scheduler has set the rate of the next one
    already.

    Args:
        algorithm: see `Algorithm.inner_rate`.
        buffer: has the parameters of the model.

    Attributes:
        rate: that of the last step; None: no optimizer of torch's has stepped.
    """

    order = 0

    def __init__(self, algorithm: Algorithm, buffer: FlatBuffer) -> None:
        self._algorithm, self._buffer = algorithm, buffer
        self.rate: float | None = None
        STEP_HOOKS.add(self)

    def is_stepped_by(self, optimizer: Optimizer) -> bool:
        """See `Stepped`."""
        return holds_any(optimizer, self._buffer.parameters)

    def before_step(self, optimizer: Optimizer) -> None:
        """See `Stepped`."""

    def after_step(self, optimizer: Optimizer) -> None:
        """See `Stepped`."""
        if not is_left_out(optimizer):
            self.rate = self._algorithm.inner_rate(optimizer)

    def close(self) -> None:
        """Look at no more steps; idempotent."""
        STEP_HOOKS.discard(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        STEP_HOOKS.add(self)
