"""The momentum of the user's torch.optim.SGD as one flat vector, which an algorithm writes between steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from ..flat.buffer import FlatBuffer
from ..flat.step_hooks import STEP_HOOKS, holds_any, is_left_out
from ..flat.vector import FlatVector
from .algorithm import Algorithm
from .requests import SGDStep


class SGDMomentum:
    """The `momentum_buffer` of every parameter of one model as views of one vector.

    Hooks on optimizer steps find the optimizer: before a step its buffers are made views of the vector, if they are
    not, and after it the rates are noted. A step that moves nothing counts as none: one with a learning rate of 0, or
    one that GradScaler leaves out.

    Args:
        buffer: has the parameters.
        algorithm: says which optimizers it takes.

    Raises:
        ValueError: (optimizer steps) see `check`.
        RuntimeError: (optimizer steps) a second step without a round between.
    """

    def __init__(self, buffer: FlatBuffer, algorithm: Algorithm) -> None:
        self.buffer, self.name = buffer, type(algorithm).__name__
        self.takes_nesterov, self.needs_gradients = algorithm.takes_nesterov, algorithm.needs_gradients
        self.step: SGDStep | None = None  # since the last round
        self._vector: FlatVector | None = None
        self._places: list[tuple[Tensor, Tensor]] = []  # each parameter and its view of the vector
        self._next: Sequence[Tensor] = ()  # what the vector is to start from, by dtype
        STEP_HOOKS.add(self)

    def write(self, momentum: Sequence[Tensor]) -> None:
        """The buffers of the optimizer <- `momentum`, a flat tensor for each dtype, now and where they come to be."""
        self._next = momentum
        if self._vector is not None and self._vector.layout == self.buffer.vector.layout:
            self._copy_next(self._vector)

    def check(self, optimizer: Optimizer) -> None:
        """Raise ValueError where the optimizer is none that the algorithm knows how to change."""
        extra = "" if self.takes_nesterov else ", without nesterov"
        expected = f"one torch.optim.SGD with momentum{extra}, without dampening and maximize, over all parameters"
        name = f"{self.name}: got {type(optimizer).__name__}"
        remedy = "its law is that of momentum SGD; change it, or take D2 or GradientTracking, which take any optimizer"
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
                    f"the momentum of {self.name} is made of how far the whole model moves; {remedy}"
                )
        group = optimizer.param_groups[0]
        if group["momentum"] <= 0 or group["dampening"] or group["maximize"]:
            options = {key: group[key] for key in ("momentum", "dampening", "maximize")}
            raise ValueError(f"{name} with {options}, expected {expected}; pass momentum=0.9")
        if group["nesterov"] and not self.takes_nesterov:
            raise ValueError(f"{name} with nesterov=True, expected {expected}; pass nesterov=False, or take QGDSGDm()")

    # See `Stepped`.

    order = 0

    def is_stepped_by(self, optimizer: Optimizer) -> bool:
        """See `Stepped`."""
        return holds_any(optimizer, self.buffer.parameters)

    @torch.no_grad()
    def before_step(self, optimizer: Optimizer) -> None:
        """See `Stepped`."""
        if self.step is not None:
            raise RuntimeError(
                f"{self.name}: got a second optimizer step after one training forward, expected a forward between "
                "them, where the round that makes the momentum runs; accumulate gradients under no_sync() instead"
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

    def close(self) -> None:
        """Let the optimizer step alone from now on."""
        STEP_HOOKS.discard(self)

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
        return {**self.__dict__, "_vector": None, "_places": []}  # a copy has an optimizer of its own

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        STEP_HOOKS.add(self)
