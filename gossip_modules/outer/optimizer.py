"""The outer optimizer: made by the method or by a function of the user's, checked, and described for other ranks."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.optim import Optimizer

MakeOptimizer: TypeAlias = Callable[[Sequence[Tensor]], Optimizer]
"""Makes an optimizer of parameters, such as `lambda parameters: torch.optim.Adam(parameters, lr=1e-3)`."""


def settings_of(optimizer: Optimizer | None) -> list[dict[str, Any]]:
    """Of each group of parameters, all but these; copies."""
    groups = [] if optimizer is None else optimizer.param_groups
    return [{name: copy.deepcopy(value) for name, value in group.items() if name != "params"} for group in groups]


def described(optimizer: Optimizer) -> str:
    """Its type, and what it is made with, as ranks compare it."""
    groups = [{name: _readable(value) for name, value in group.items()} for group in settings_of(optimizer)]
    return f"{type(optimizer).__name__} with {groups}"


def are_same(one: object, other: object) -> bool:
    """Whether two settings are equal."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other)
    return type(one) is type(other) and one == other


def made_optimizer(make_optimizer: MakeOptimizer, parameters: Sequence[Tensor]) -> Optimizer:
    """The outer optimizer; raises ValueError where there is none that can step these parameters."""
    example = "such as `lambda parameters: torch.optim.Adam(parameters, lr=0.3)`"
    try:
        optimizer: object = make_optimizer(parameters)
    except Exception as error:
        raise ValueError(
            f"got {type(error).__name__} from the function that makes the outer optimizer: {error}; expected an "
            "optimizer of the anchor, which is flat: one tensor of one dimension for each dtype of the model; pass one "
            f"that works element by element, {example}, and leave those that need matrices, such as Muon, to the model"
        ) from error
    if not isinstance(optimizer, Optimizer):
        raise ValueError(
            f"got {optimizer!r} from the function that makes the outer optimizer, expected a torch.optim.Optimizer; "
            f"pass a function of parameters that returns one, {example}"
        )
    name = type(optimizer).__name__
    held = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
    if sorted(held) != sorted(map(id, parameters)):
        raise ValueError(
            f"got a {name} over other parameters as outer optimizer, expected one over those that the function is "
            f"given: the anchor, not the model; pass on its argument, {example}"
        )
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ValueError(
            f"got {name} as outer optimizer, whose step needs a closure, expected one that steps on a gradient alone: "
            f"an outer step has no loss; take another one, {example}"
        )
    return optimizer


def _readable(value: object) -> object:
    """A setting that is the same text on all ranks: a function, or another object, is its type."""
    if isinstance(value, Tensor):
        return value.tolist() if value.numel() == 1 else f"a tensor {tuple(value.shape)}"
    if isinstance(value, list | tuple):
        return [_readable(one) for one in value]
    return value if value is None or isinstance(value, str | Real) else type(value).__name__
