"""OptimizerWatch: reads the steps of the user's optimizer for an algorithm, and writes its momentum back."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from ..flat.buffer import FlatBuffer
from ..flat.step_hooks import Stepped, existing_optimizers, holds_any, is_left_out
from ..flat.vector import FlatVector
from .algorithm import Algorithm
from .memory import Memory
from .rates import Rates, merged, rate_of
from .requests import SGDStep


class OptimizerWatch:
    """Watches the optimizers of one model, as far as an algorithm declares that it needs their steps.

    Args:
        algorithm: the algorithm, with `needs_sgd`, `follows_rate` and `needs_inner_rate`.
        buffer: the buffer with the parameters of the model.
    """

    def __init__(self, algorithm: Algorithm, buffer: FlatBuffer) -> None:
        self._momentum = SGDMomentum(buffer, algorithm.parts[0]) if algorithm.needs_sgd else None
        self._rates = StepRates(buffer) if algorithm.follows_rate else None
        self._inner = InnerRate(algorithm, buffer) if algorithm.needs_inner_rate else None

    @property
    def inner_rate(self) -> float | None:
        """See `InnerRate`."""
        return None if self._inner is None else self._inner.rate

    @property
    def step(self) -> SGDStep | None:
        """The step of SGD since the last round; None: there was none."""
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

    def forget(self, memory: Memory) -> None:
        """Forget the last step, and write the momentum of the memory into the optimizer, if there is one."""
        if self._momentum is not None:
            self._momentum.step = None
            self._momentum.write(memory.parts_of("momentum"))

    def state_dict(self, *, joins: bool = False) -> dict[str, Any]:
        """Return the step and the rates since the last round.

        Args:
            joins: whether the state is for a joining worker, which has taken no step.
        """
        step = None if joins or self.step is None else list(self.step)
        rates = None if self._rates is None else self._rates.state_dict()
        return {"sgd_step": step, "step_rates": rates, "inner_rate": self.inner_rate}

    def load_state_dict(self, state: Mapping[str, Any], memory: Memory) -> None:
        """Load a state of `state_dict()`; an empty state resets.

        Args:
            state: the state.
            memory: the memory of the outermost algorithm.
        """
        if self._rates is not None:
            self._rates.load_state_dict(state.get("step_rates") or {})
        if self._inner is not None:
            self._inner.rate = state.get("inner_rate")
        self.forget(memory)
        if self._momentum is not None and (step := state.get("sgd_step")) is not None:
            self._momentum.step = SGDStep(*step)

    def close(self) -> None:
        """Stop watching; idempotent."""
        for listener in (self._momentum, self._rates, self._inner):
            if listener is not None:
                listener.close()


class InnerRate(Stepped):
    """Reads `Algorithm.inner_rate` after each step of an optimizer of the model.

    A round runs in the forward after the optimizer step. At that time a scheduler has already set the rate of the next
    step, so the rate is read directly after the step.

    Args:
        algorithm: the algorithm whose `inner_rate` is called.
        buffer: the buffer with the parameters of the model.

    Attributes:
        rate: the rate of the last step; None: no torch optimizer has stepped.
    """

    def __init__(self, algorithm: Algorithm, buffer: FlatBuffer) -> None:
        self._algorithm, self._buffer = algorithm, buffer
        self.rate: float | None = None
        super().__init__()

    def is_stepped_by(self, optimizer: Optimizer) -> bool:
        """See `Stepped`."""
        return holds_any(optimizer, self._buffer.parameters)

    def after_step(self, optimizer: Optimizer) -> None:
        """See `Stepped`."""
        if not is_left_out(optimizer):
            self.rate = self._algorithm.inner_rate(optimizer)


class StepRates(Stepped):
    """The learning rates of the optimizer steps since the last round.

    [Note: Rates of ranks] All ranks must scale their vectors by the same factor in the same round, since the sum of the
    vectors over ranks would change otherwise. A GradScaler may skip a step on one rank alone. So the rates of the next
    step are read after each round, before the forward, and hold if no step follows. Existing optimizers are found at
    the first round, before their first step. After several steps the rates are their mean, which stays equal if one of
    several equal steps is skipped.

    Reading looks at each parameter group. A learning rate that is a tensor is read as a number.

    Args:
        buffer: the buffer with the parameters of the model.
    """

    def __init__(self, buffer: FlatBuffer) -> None:
        self._buffer = buffer
        self._steppers: weakref.WeakKeyDictionary[Optimizer, _Stepper] = weakref.WeakKeyDictionary()
        self._parameters: list[Tensor] = []  # the parameters of the buffer for which the steppers were made
        self._loaded: tuple[Rates | None, int] = (None, 0)  # the loaded rates, for optimizers that are not known yet
        self._merged: tuple[tuple[Any, ...], Rates | None] = ((), None)
        self._has_looked = False
        self._num_counted = 0
        super().__init__()

    def since_round(self) -> Rates | None:
        """Return the rates since the last round; None: no optimizer with a learning rate is known."""
        if not self._has_looked:
            self._look()
        return self._rates()

    def end_round(self) -> None:
        """Restart: read the rates of the next step."""
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
        """Return the optimizers of the model, in the order of their last steps."""
        if self._parameters is not self._buffer.parameters:  # other parameters are trained now
            self._steppers.clear()
            self._parameters = self._buffer.parameters
        ours = [(optimizer, stepper) for optimizer, stepper in self._steppers.items() if stepper.has_any]
        return ours if len(ours) < 2 else sorted(ours, key=lambda pair: pair[1].last)

    # See `Stepped`.

    def is_stepped_by(self, optimizer: Optimizer) -> bool:
        """See `Stepped`; visits all parameters if the optimizer is new or has new parameters."""
        self._known()
        stepper = self._steppers.get(optimizer)
        if stepper is None or not stepper.is_current(optimizer):
            names = set(self._buffer.vector.layout.names)
            named = self._buffer.module.named_parameters(remove_duplicate=False)
            ours = {id(parameter): name for name, parameter in named if name in names}
            self._steppers[optimizer] = stepper = _Stepper(optimizer, ours, *self._loaded)
        return stepper.has_any

    def after_step(self, optimizer: Optimizer) -> None:
        """See `Stepped`."""
        self._num_counted += 1
        if optimizer not in self._steppers:  # a state was loaded since the last step
            self.is_stepped_by(optimizer)
        self._steppers[optimizer].count(optimizer, self._num_counted)

    # State.

    def state_dict(self) -> dict[str, Any]:
        """Return the rates since the last round, and the number of steps."""
        num_steps = max((stepper.num_steps for _, stepper in self._known()), default=self._loaded[1])
        return {"rates": self._rates(), "num_steps": num_steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state of `state_dict()`."""
        self._loaded = state.get("rates"), state.get("num_steps", 0)
        self._steppers.clear()
        self._has_looked = False

    def __getstate__(self) -> dict[str, Any]:
        state = {**self.__dict__, "_loaded": tuple(self.state_dict().values()), "_merged": ((), None)}
        # A copy belongs to other optimizers.
        return {**state, "_steppers": weakref.WeakKeyDictionary(), "_parameters": [], "_has_looked": False}


class _Stepper:
    """The rates of one optimizer since the last round.

    Args:
        optimizer: the optimizer, with its present parameter groups.
        ours: the names of the parameters of the model, by id.
        rates: the rates since the last round so far, if they are known.
        num_steps: the number of steps with these rates.
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
        """Whether the parameter groups have their old sizes."""
        return self._sizes == _sizes(optimizer)

    def expect(self, optimizer: Optimizer) -> None:
        """Restart: read the rates of the next step."""
        self.rates, self.num_steps = list(_rates_of(optimizer)), 0

    def count(self, optimizer: Optimizer, number: int) -> None:
        """Count a step of the optimizer: rates <- their mean over the steps. Equal rates stay exactly equal.

        Args:
            optimizer: the optimizer, after its step.
            number: the number of the step among the steps of all optimizers.
        """
        self.last = number
        self.num_steps += 1
        for k, now in enumerate(_rates_of(optimizer)):
            mean = self.rates[k]
            if mean is None or now is None or self.num_steps == 1:
                self.rates[k] = now
            elif now != mean:
                self.rates[k] = mean + (now - mean) / self.num_steps


def _sizes(optimizer: Optimizer) -> list[int]:
    return [len(group["params"]) for group in optimizer.param_groups]


def _rates_of(optimizer: Optimizer) -> Iterator[float | None]:
    for group in optimizer.param_groups:
        rate = group.get("lr")
        if isinstance(rate, Tensor):
            rate = rate.item() if rate.numel() == 1 else None
        yield float(rate) if isinstance(rate, (int, float)) else None


class SGDMomentum(Stepped):
    """Makes the `momentum_buffer` of every parameter of a model a view of one vector.

    Hooks on optimizer steps find the optimizer. Before a step they make its buffers views of the vector; after the step
    they record the rates. A step that changes nothing does not count: a step with a learning rate of 0, or a step that
    a GradScaler skips.

    Args:
        buffer: the buffer with the parameters of the model.
        algorithm: the algorithm that needs SGD.

    Raises:
        ValueError: (optimizer steps) see `check`.
        RuntimeError: (optimizer steps) a second step without a round in between.
    """

    def __init__(self, buffer: FlatBuffer, algorithm: Algorithm) -> None:
        self.buffer, self.name = buffer, type(algorithm).__name__
        self.takes_nesterov, self.needs_gradients = algorithm.takes_nesterov, algorithm.needs_gradients
        self.step: SGDStep | None = None  # since the last round
        self._vector: FlatVector | None = None
        self._places: list[tuple[Tensor, Tensor]] = []  # each parameter and its view of the vector
        self._next: Sequence[Tensor] = ()  # the last written momentum, by dtype; a new vector starts from it
        super().__init__()

    def write(self, momentum: Sequence[Tensor]) -> None:
        """The buffers of the optimizer <- `momentum`, now if they exist, else when they are made.

        Args:
            momentum: a flat tensor for each dtype.
        """
        self._next = momentum
        if self._vector is not None and self._vector.layout == self.buffer.vector.layout:
            self._copy_next(self._vector)

    def check(self, optimizer: Optimizer) -> None:
        """Raise ValueError if the algorithm does not support the optimizer or its settings."""
        extra = "" if self.takes_nesterov else ", without nesterov"
        expected = f"one torch.optim.SGD with momentum{extra}, without dampening and maximize, over all parameters"
        name = f"{self.name}: got {type(optimizer).__name__}"
        remedy = (
            "its law is momentum SGD; change the optimizer, or take D2 or GradientTracking, which take any optimizer"
        )
        if not isinstance(optimizer, SGD):
            raise ValueError(f"{name} that steps the model, expected {expected}; {remedy}")
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        if not {id(parameter) for parameter in self.buffer.parameters} <= held:
            raise ValueError(f"{name} over some of the trained parameters, expected {expected}; {remedy}")
        for name_of_rate in ("lr", "momentum"):
            rates = {float(group[name_of_rate]) for group in optimizer.param_groups}
            if len(rates) > 1:
                raise ValueError(
                    f"{name} with {name_of_rate} of {sorted(rates)} in its groups of parameters, expected one for all: "
                    f"the momentum of {self.name} is computed from the move of the whole model; {remedy}"
                )
        group = optimizer.param_groups[0]
        if group["momentum"] <= 0 or group["dampening"] or group["maximize"]:
            options = {key: group[key] for key in ("momentum", "dampening", "maximize")}
            raise ValueError(f"{name} with {options}, expected {expected}; pass momentum=0.9")
        if group["nesterov"] and not self.takes_nesterov:
            raise ValueError(f"{name} with nesterov=True, expected {expected}; pass nesterov=False, or take QGDSGDm()")

    # See `Stepped`.

    def is_stepped_by(self, optimizer: Optimizer) -> bool:
        """See `Stepped`."""
        return holds_any(optimizer, self.buffer.parameters)

    @torch.no_grad()
    def before_step(self, optimizer: Optimizer) -> None:
        """See `Stepped`."""
        if self.step is not None:
            raise RuntimeError(
                f"{self.name}: got a second optimizer step after one training forward, expected a forward between "
                "them, whose round computes the momentum; accumulate gradients under no_sync() instead"
            )
        self.check(optimizer)
        for parameter, view in self._views():
            if self.needs_gradients and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            state = optimizer.state[parameter]
            if state.get("momentum_buffer") is not view:
                state["momentum_buffer"] = view

    def after_step(self, optimizer: Optimizer) -> None:
        """See `Stepped`."""
        group = optimizer.param_groups[0]
        lr = 0.0 if is_left_out(optimizer) else float(group["lr"])
        self.step = SGDStep(lr, float(group["momentum"])) if lr else None
        if not lr:
            self.write(self._next)

    def _views(self) -> list[tuple[Tensor, Tensor]]:
        vector = self._vector
        if vector is None or vector.layout != self.buffer.vector.layout or vector.raw.device != self._device:
            self._vector = vector = self.buffer.vector.like()
            self._places = []
            self._copy_next(vector)
        parameters = self.buffer.parameters
        if [id(parameter) for parameter, _ in self._places] != [id(parameter) for parameter in parameters]:
            self._places = list(zip(parameters, self.buffer.parameters_in(vector), strict=True))
        return self._places

    @property
    def _device(self) -> torch.device:
        return self.buffer.vector.raw.device

    def _copy_next(self, vector: FlatVector) -> None:
        segments = vector.where(is_buffer=False).segments
        if [x.numel() for x in segments] == [x.numel() for x in self._next]:
            for mine, momentum in zip(segments, self._next, strict=True):
                mine.copy_(momentum)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_vector": None, "_places": []}  # a copy belongs to another optimizer
