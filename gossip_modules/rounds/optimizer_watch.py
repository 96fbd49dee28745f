"""OptimizerWatch: reads the steps of the user's optimizer for an algorithm, and writes its momentum back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Sequence

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from ..flat.buffer import FlatBuffer
from ..flat.selection import mixed_buffers
from ..flat.vector import FlatVector
from ..loop.hooks import StepListener, existing_optimizers, is_left_out
from ..state import State, branch, leaf, transient
from .algorithm import Algorithm
from .memory import Memory
from .rates import Rates, merged, rate_of
from .requests import SGDStep, Vectors


class OptimizerWatch(StepListener, State):
    """Watches the optimizers of one model, as far as an algorithm declares that it needs their steps.

    Args:
        algorithm: the algorithm, with `needs_sgd`, `follows_rate` and `needs_inner_rate`.
        buffer: the buffer with the parameters of the model.

    Raises:
        ValueError: see `check_momentum`.

    Attributes:
        inner_rate: the result of `Algorithm.inner_rate` after the last step; None: no torch optimizer has stepped. A
            round runs in the forward after the optimizer step. At that time a scheduler has already set the rate of the
            next step, so the rate is read directly after the step.
    """

    sees_inner_steps = True  # the inner optimizer has a learning rate and momentum of its own

    inner_rate: float | None = leaf(None)
    _momentum: SGDMomentum | None = branch(is_flat=True)
    _rates: StepRates | None = branch(name="step_rates")

    def __init__(self, algorithm: Algorithm, buffer: FlatBuffer) -> None:
        super().__init__(buffer)
        check_momentum(algorithm, buffer.module)
        self._algorithm = algorithm
        self._momentum = SGDMomentum(buffer, algorithm.parts[0]) if algorithm.needs_sgd else None
        self._rates = StepRates(buffer) if algorithm.follows_rate else None

    @property
    def step(self) -> SGDStep | None:
        """The step of SGD since the last round; None: there was none."""
        return None if self._momentum is None else self._momentum.step

    @torch.no_grad()
    def before_step(self, optimizer: Optimizer) -> None:
        """See `StepListener`."""
        if self._momentum is not None:
            self._momentum.before_step(optimizer)

    def after_step(self, optimizer: Optimizer) -> None:
        """See `StepListener`."""
        if self._momentum is not None:
            self._momentum.after_step(optimizer)
        if self._rates is not None:
            self._rates.count(optimizer)
        if self._algorithm.needs_inner_rate and not is_left_out(optimizer):
            self.inner_rate = self._algorithm.inner_rate(optimizer)

    def before_round(self, v: Vectors, memory: Memory) -> None:
        """Describe the steps since the last round, and scale the memory to their rates."""
        memory.scale(None if self._rates is None else self._rates.since_round())
        v.step, v.inner_rate = self.step if memory.num_rounds else None, self.inner_rate

    def after_round(self, memory: Memory) -> None:
        """Write the momentum of the algorithm into the optimizer, and wait for the next step."""
        if self._rates is not None:
            self._rates.end_round()
        if self._momentum is not None:
            self._momentum.step = None
            self._momentum.write(memory.momentum.parts)

    def write(self, memory: Memory) -> None:
        """Write the momentum of a memory into the optimizer, if there is one."""
        if self._momentum is not None:
            self._momentum.write(memory.parts_of("momentum"))


def check_momentum(algorithm: Algorithm, module: nn.Module) -> None:
    """Raise ValueError if rounds compute the momentum of the optimizer, and the module is to have it mixed, too."""
    if algorithm.needs_sgd and (found := mixed_buffers(module)):
        raise ValueError(
            f"got {algorithm} with a {type(found[0]).__name__}, expected none: its rounds compute the momentum of SGD "
            "for each rank; leave it out, or take another algorithm"
        )


class StepRates(State):
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

    rates: Rates | None = leaf(None)
    num_steps: int = leaf(0)
    # The rates of optimizers that are not known yet, and the number of their steps; None: they were loaded just now.
    _first: tuple[Rates | None, int] | None = leaf(None, is_saved=False, is_copied=False)
    _groups: MutableMapping[Optimizer, GroupRates] = leaf(WeakIdKeyDictionary(), is_saved=False, is_copied=False)
    _has_looked: bool = leaf(False, is_saved=False, is_copied=False)
    _parameters: list[Tensor] = transient([])  # the parameters of the buffer for which the groups were read

    def __init__(self, buffer: FlatBuffer) -> None:
        self._buffer = buffer

    @property
    def _loaded(self) -> tuple[Rates | None, int]:
        return (self.rates, self.num_steps) if self._first is None else self._first

    def collect(self) -> None:
        """See `State`: the rates since the last round, and the number of steps."""
        self._first = self._loaded
        num_steps = max((groups.num_steps for _, groups in self._known()), default=self._first[1])
        self.rates, self.num_steps = self._rates(), num_steps

    def since_round(self) -> Rates | None:
        """Return the rates since the last round; None: no optimizer with a learning rate is known."""
        if not self._has_looked:
            self._has_looked = True
            for found in existing_optimizers():
                self._groups_of(found)
        return self._rates()

    def _rates(self) -> Rates | None:
        if not (known := self._known()):
            return self._loaded[0]
        pairs = [pair for _, groups in known for pair in zip(groups.names, groups.rates, strict=True) if pair[0]]
        rates = {rate for _, rate in pairs}
        if len(rates) == 1:
            return rates.pop()
        return merged({name: rate for names, rate in pairs for name in names})

    def count(self, optimizer: Optimizer) -> None:
        """Include a step that the optimizer has taken: rates <- their mean over the steps."""
        groups = self._groups_of(optimizer)
        groups.count(optimizer)
        del self._groups[optimizer]
        self._groups[optimizer] = groups

    def end_round(self) -> None:
        """Restart: read the rates of the next step."""
        for optimizer, groups in self._known():
            groups.rates, groups.num_steps = list(_rates_of(optimizer)), 0
        self._first = self._rates(), 0

    def _known(self) -> list[tuple[Optimizer, GroupRates]]:
        """Return the optimizers of the model, in the order of their last steps."""
        if self._parameters is not self._buffer.parameters:  # other parameters are trained now
            self._groups.clear()
            self._parameters = self._buffer.parameters
        return [(optimizer, groups) for optimizer, groups in self._groups.items() if any(groups.names)]

    def _groups_of(self, optimizer: Optimizer) -> GroupRates:
        """Return the rates of an optimizer; visits all parameters if the optimizer is new or has new parameters."""
        self._known()
        groups = self._groups.get(optimizer)
        if groups is None or groups.sizes != _sizes(optimizer):
            names = set(self._buffer.vector.layout.names)
            named = self._buffer.module.named_parameters(remove_duplicate=False)
            ours = {id(parameter): name for name, parameter in named if name in names}
            self._groups[optimizer] = groups = GroupRates(optimizer, ours, *self._loaded)
        return groups


class GroupRates:
    """The rates of the parameter groups of one optimizer since the last round.

    Args:
        optimizer: the optimizer, with its present parameter groups.
        ours: the names of the parameters of the model, by id.
        rates: the rates since the last round so far, if they are known.
        num_steps: the number of steps with these rates.

    Attributes:
        sizes: the number of parameters in each group.
        names: for each group the names of parameters of the model.
        rates: the rate of each group.
    """

    def __init__(self, optimizer: Optimizer, ours: Mapping[int, str], rates: Rates | None, num_steps: int) -> None:
        self.sizes = _sizes(optimizer)
        self.names = [[ours[id(p)] for p in group["params"] if id(p) in ours] for group in optimizer.param_groups]
        known = [rate_of(rates, names[0]) if names else None for names in self.names]
        self.rates = [now if rate is None else rate for rate, now in zip(known, _rates_of(optimizer), strict=True)]
        self.num_steps = num_steps

    def count(self, optimizer: Optimizer) -> None:
        """Include a step that has ended: rates <- the mean over the steps. Equal rates stay exactly equal."""
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


def _step_of(saved: Sequence[float]) -> SGDStep:
    return SGDStep(*saved)


class SGDMomentum(State):
    """Makes the `momentum_buffer` of every parameter of a model a view of one vector.

    Before a step the buffers of the optimizer become views of the vector; after the step its rates are recorded. A step
    that changes nothing does not count: a step with a learning rate of 0, or a step that a GradScaler skips.

    Args:
        buffer: the buffer with the parameters of the model.
        algorithm: the algorithm that needs SGD.

    Raises:
        ValueError: (optimizer steps) see `check`.
        RuntimeError: (optimizer steps) a second step without a round in between.
    """

    # Since the last round.
    step: SGDStep | None = leaf(None, name="sgd_step", average="reset", join="zero", save=list, load=_step_of)
    _vector: FlatVector | None = transient(None)
    _places: list[tuple[Tensor, Tensor]] = transient([])  # each parameter and its view of the vector

    def __init__(self, buffer: FlatBuffer, algorithm: Algorithm) -> None:
        self.buffer, self.name = buffer, type(algorithm).__name__
        self.takes_nesterov, self.needs_gradients = algorithm.takes_nesterov, algorithm.needs_gradients
        self._next: Sequence[Tensor] = ()  # the last written momentum, by dtype; a new vector starts from it

    def write(self, momentum: Sequence[Tensor]) -> None:
        """The buffers of the optimizer <- `momentum`, now if they exist, else when they are made.

        Args:
            momentum: a flat tensor for each dtype.
        """
        self._next, vector = momentum, self._vector
        if vector is not None and vector.layout == self.buffer.vector.layout:
            mine = vector.where(is_buffer=False).segments
            if [x.numel() for x in mine] == [x.numel() for x in momentum]:
                for x, value in zip(mine, momentum, strict=True):
                    x.copy_(value)

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

    def before_step(self, optimizer: Optimizer) -> None:
        """See `StepListener`."""
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
        """See `StepListener`."""
        group = optimizer.param_groups[0]
        lr = 0.0 if is_left_out(optimizer) else float(group["lr"])
        self.step = SGDStep(lr, float(group["momentum"])) if lr else None
        if not lr:
            self.write(self._next)

    def _views(self) -> list[tuple[Tensor, Tensor]]:
        model, vector, parameters = self.buffer.vector, self._vector, self.buffer.parameters
        if vector is None or vector.layout != model.layout or vector.raw.device != model.raw.device:
            self._vector, self._places = model.like(), []
            self.write(self._next)
        if self._vector is not None and [id(parameter) for parameter, _ in self._places] != list(map(id, parameters)):
            self._places = list(zip(parameters, self.buffer.parameters_in(self._vector), strict=True))
        return self._places
