"""StepRates: the learning rates of the optimizer steps since the last round."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

from torch import Tensor
from torch.optim import Optimizer

from ..flat.buffer import FlatBuffer
from ..flat.step_hooks import STEP_HOOKS, existing_optimizers

Rates: TypeAlias = float | Mapping[str, float]
"""One learning rate of all parameters, or those of some of them, by name."""


class StepRates:
    """The learning rates that the optimizers of a model have stepped with since the last round.

    [Note: Rates of ranks] All ranks must scale what they carry by the same factor in the same round, since its sum over
    ranks would change otherwise. A GradScaler may leave a step out on one rank alone. So the rates of the next step are
    read after each round, before the forward, and hold where no step follows; the optimizers are looked for at the
    first round, before their first step. Of several steps the mean is taken, which one step less does not change.

    Reading costs a look at each group of parameters. A learning rate that is a tensor is read as a number.

    Args:
        buffer: has the parameters.
    """

    def __init__(self, buffer: FlatBuffer) -> None:
        self._buffer = buffer
        self._steppers: weakref.WeakKeyDictionary[Optimizer, _Stepper] = weakref.WeakKeyDictionary()
        self._parameters: list[Tensor] = []  # those of the buffer that the steppers know
        self._loaded: tuple[Rates | None, int] = (None, 0)  # of optimizers that are not known yet
        self._merged: tuple[tuple[Any, ...], Rates | None] = ((), None)
        self._has_looked = False
        self._num_counted = 0
        STEP_HOOKS.add(self)

    def since_round(self) -> Rates | None:
        """The rates since the last round; None: no optimizer is known, or none that has rates."""
        if not self._has_looked:
            self._look()
        return self._rates()

    def end_round(self) -> None:
        """Begin anew: the rates are those of the next step."""
        for optimizer, stepper in self._known():
            stepper.expect(optimizer)
        self._loaded = (self._rates(), 0)

    def _look(self) -> None:
        """Find the optimizers that exist already, once."""
        self._has_looked = True
        for found in existing_optimizers():
            self.is_stepped_by(found)

    def _rates(self) -> Rates | None:
        known = self._known()
        if not known:
            return self._loaded[0]
        key = tuple((id(stepper), *stepper.rates) for _, stepper in known)
        if self._merged[0] != key:
            pairs = (
                (names, rate) for _, stepper in known for names, rate in zip(stepper.names, stepper.rates, strict=True)
            )
            self._merged = key, merged({name: rate for names, rate in pairs for name in names})
        return self._merged[1]

    def _known(self) -> list[tuple[Optimizer, _Stepper]]:
        """The optimizers of the model; of two that have one parameter, the one that has stepped last is the last."""
        if self._parameters is not self._buffer.parameters:  # others are trained now
            self._steppers.clear()
            self._parameters = self._buffer.parameters
        ours = [(optimizer, stepper) for optimizer, stepper in self._steppers.items() if stepper.has_any]
        return ours if len(ours) < 2 else sorted(ours, key=lambda pair: pair[1].last)

    # See `Stepped`.

    order = 0

    def is_stepped_by(self, optimizer: Optimizer) -> bool:
        """See `Stepped`; walks over the parameters where the optimizer is new, or has new ones."""
        self._known()
        stepper = self._steppers.get(optimizer)
        if stepper is None or not stepper.is_current(optimizer):
            names = set(self._buffer.vector.layout.names)
            named = self._buffer.module.named_parameters(remove_duplicate=False)
            ours = {id(parameter): name for name, parameter in named if name in names}
            self._steppers[optimizer] = stepper = _Stepper(optimizer, ours, *self._loaded)
        return stepper.has_any

    def before_step(self, optimizer: Optimizer) -> None:
        """See `Stepped`."""

    def after_step(self, optimizer: Optimizer) -> None:
        """See `Stepped`."""
        self._num_counted += 1
        if optimizer not in self._steppers:  # a state was loaded since it was known
            self.is_stepped_by(optimizer)
        self._steppers[optimizer].count(optimizer, self._num_counted)

    # State.

    def state_dict(self) -> dict[str, Any]:
        """The rates since the last round, and the number of steps."""
        num_steps = max((stepper.num_steps for _, stepper in self._known()), default=self._loaded[1])
        return {"rates": self._rates(), "num_steps": num_steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict()` gave."""
        self._loaded = state.get("rates"), state.get("num_steps", 0)
        self._steppers.clear()
        self._has_looked = False

    def close(self) -> None:
        """Look at no more steps; idempotent."""
        STEP_HOOKS.discard(self)

    def __getstate__(self) -> dict[str, Any]:
        state = {**self.__dict__, "_loaded": tuple(self.state_dict().values()), "_merged": ((), None)}
        del state["_steppers"], state["_parameters"]  # a copy has optimizers of its own
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _steppers=weakref.WeakKeyDictionary(), _parameters=[], _has_looked=False)
        STEP_HOOKS.add(self)


class _Stepper:
    """The rates of one optimizer since the last round.

    Args:
        optimizer: looked at as it is now.
        ours: the names of the parameters that count, by id.
        rates: those since the last round so far, where they are known.
        num_steps: the steps that it has taken with them.
    """

    def __init__(self, optimizer: Optimizer, ours: Mapping[int, str], rates: Rates | None, num_steps: int) -> None:
        self._sizes = _sizes(optimizer)
        self.names = [[ours[id(p)] for p in group["params"] if id(p) in ours] for group in optimizer.param_groups]
        self.has_any = any(self.names)
        self.last = 0
        self.expect(optimizer)
        self.num_steps = num_steps
        for k, names in enumerate(self.names):
            if names and (rate := rate_of(rates, names[0])) is not None:
                self.rates[k] = rate

    def is_current(self, optimizer: Optimizer) -> bool:
        """Whether the optimizer has the parameters that it had."""
        return self._sizes == _sizes(optimizer)

    def expect(self, optimizer: Optimizer) -> None:
        """Begin anew: the rates are those of the next step."""
        self.rates, self.num_steps = list(_rates_of(optimizer)), 0

    def count(self, optimizer: Optimizer, number: int) -> None:
        """The optimizer has stepped: rates <- their mean over the steps, which leaves equal ones as they are."""
        self.last = number
        self.num_steps += 1
        for k, now in enumerate(_rates_of(optimizer)):
            mean = self.rates[k]
            if mean is None or now is None or self.num_steps == 1:
                self.rates[k] = now
            elif now != mean:
                self.rates[k] = mean + (now - mean) / self.num_steps


def rate_of(rates: Rates | None, name: str) -> float | None:
    """The rate of the parameter of that name, where it is known."""
    return rates.get(name) if isinstance(rates, Mapping) else rates


def merged(rates: Mapping[str, float | None]) -> Rates | None:
    """The rates that are known: one number where all parameters have one; None where there are none."""
    known = {name: rate for name, rate in rates.items() if rate is not None}
    values = set(known.values())
    if len(known) == len(rates) and len(values) == 1:
        return values.pop()
    return known or None


def _sizes(optimizer: Optimizer) -> list[int]:
    return [len(group["params"]) for group in optimizer.param_groups]


def _rates_of(optimizer: Optimizer) -> Iterator[float | None]:
    for group in optimizer.param_groups:
        rate = group.get("lr")
        if isinstance(rate, Tensor):
            rate = rate.item() if rate.numel() == 1 else None
        yield float(rate) if isinstance(rate, (int, float)) else None
