"""The outer optimizer: made by the method or by a function of the user, checked, and described for other ranks."""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..flat.vector import in_chunks
from .runs import Places, carry, runs
from .vector import Vector

MakeOptimizer: TypeAlias = Callable[[Sequence[Tensor]], Optimizer]
"""A function that makes an optimizer, such as `lambda parameters: torch.optim.Adam(parameters, lr=1e-3)`."""


class SGD(torch.optim.SGD):
    """`torch.optim.SGD` with Nesterov momentum, to the bit, without a temporary copy of the parameters in each step.

    torch's own step computes D + b m in new memory, and the first touch of new memory takes longer than all other work
    of the step. This step computes it in the memory of the gradient, in chunks that stay in cache. The class has the
    name of torch's, since checkpoints and the comparison of ranks contain the name.

    A step runs no hooks for the steps of all optimizers: they are for the optimizers of the user.

    Args:
        parameters: the parameters, with a gradient in each step; `step` overwrites the gradients.
        lr: the learning rate.
        momentum: b; 0: none.
    """

    def __init__(self, parameters: Sequence[Tensor], *, lr: float, momentum: float) -> None:
        super().__init__(parameters, lr=lr, momentum=momentum, nesterov=momentum > 0)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Take a step with the gradients of all parameters."""
        for group in self.param_groups:
            lr, momentum = group["lr"], group["momentum"]
            for x in group["params"]:
                momenta = []
                if momentum:
                    state = self.state[x]
                    if state.get("momentum_buffer") is None:
                        state["momentum_buffer"] = torch.zeros_like(x)
                    momenta = [state["momentum_buffer"]]
                for chunk, gradient, *parts in in_chunks(x, x.grad, *momenta):
                    for m in parts:
                        m.mul_(momentum).add_(gradient)
                        gradient.add_(m, alpha=momentum)
                    chunk.add_(gradient, alpha=-lr)

    step.hooked = True  # type: ignore[attr-defined]  # else torch adds the hooks of all optimizers to it


def settings_of(optimizer: Optimizer | None) -> list[dict[str, Any]]:
    """Return copies of the settings of each parameter group, without the parameters."""
    groups = [] if optimizer is None else optimizer.param_groups
    return [{name: copy.deepcopy(value) for name, value in group.items() if name != "params"} for group in groups]


def described_with(settings: str, make: MakeOptimizer, dtypes: Sequence[torch.dtype]) -> str:
    """Describe settings together with the optimizer that a function makes.

    Args:
        settings: the description of the other settings.
        make: the function; called with one element of each dtype.
        dtypes: the dtypes of the parameters.

    Raises:
        ValueError: the function does not make an optimizer of its argument.
    """
    if not dtypes:  # nothing is trained
        return settings
    made = made_optimizer(make, [torch.zeros(1, dtype=dtype, device="cpu") for dtype in dtypes])
    # On one line, and without the addresses of objects, which differ between ranks.
    return f"{settings}, {' '.join(re.sub(' at 0x[0-9a-f]+', '', repr(made)).split())}"


def are_same(one: object, other: object) -> bool:
    """Whether two settings are equal."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other)
    return type(one) is type(other) and one == other


def made_optimizer(make_optimizer: MakeOptimizer, parameters: Sequence[Tensor]) -> Optimizer:
    """Call the function and check the optimizer; raises ValueError if it cannot step these parameters."""
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


def works_by_element(make: MakeOptimizer) -> bool:
    """Whether a made optimizer steps each element of its vector as if it were alone.

    Optimizers with norms of the vector, such as LAMB or LARS, do not. The comparison takes three steps of a vector of
    three elements, and of each of its elements.
    """
    start = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64, device="cpu")
    gradients = torch.tensor([[0.3, -0.5, 0.1], [-1.0, 0.1, 4.0], [2.0, 0.7, -0.3]], dtype=torch.float64, device="cpu")

    def stepped(index: slice) -> Tensor:
        x = start[index].clone()
        optimizer = made_optimizer(make, [x])
        for gradient in gradients:
            x.grad = gradient[index].clone()
            optimizer.step()
        return x

    alone = torch.cat([stepped(slice(i, i + 1)) for i in range(start.numel())])
    return torch.allclose(stepped(slice(None)), alone, rtol=1e-6, atol=1e-9)


def step(optimizer: Optimizer | None, x: Vector, gradient: Vector) -> None:
    """x <- a step of the optimizer with this gradient.

    Args:
        optimizer: the optimizer of x; None: x has no elements.
        x: the vector, mutated.
        gradient: the gradient, with the shape of x; some optimizers overwrite it.
    """
    if optimizer is None:
        return
    for parameter, grad in zip(x.parts, gradient.parts, strict=True):
        parameter.grad = grad
    try:
        optimizer.step()
    finally:
        for parameter in x.parts:
            parameter.grad = None


class VectorOptimizer:
    """An optimizer of a vector of a memory.

    Args:
        make: the function that makes the optimizer from the parts of the vector.
        of: the vector.
    """

    def __init__(self, make: MakeOptimizer, of: Vector) -> None:
        self.make, self.of = make, of
        self.optimizer = made_optimizer(make, of.parts)
        self._made_with = settings_of(self.optimizer)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the optimizer, with its class and its first settings; shares memory."""
        return {"kind": type(self.optimizer).__name__, "made_with": self._made_with, **self.optimizer.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a copy of the state of an optimizer of the same class.

        Settings that the function sets, such as the rates, keep their present values. Settings that had changed before
        the state was saved are loaded, such as a rate under a scheduler or a count of steps.

        Raises:
            ValueError: the state belongs to an optimizer of another class.
        """
        kind = type(self.optimizer).__name__
        if state.get("kind", kind) != kind:
            raise ValueError(
                f"got the state of the outer optimizer {state['kind']}, expected the state of {kind}; wrap with the "
                "optimizer= of the saved model, or load the model alone: module.load_state_dict"
            )
        groups = self.optimizer.state_dict()["param_groups"]
        for group, theirs, made_with in zip(groups, state["param_groups"], state.get("made_with", []), strict=False):
            group |= {
                name: copy.deepcopy(value)
                for name, value in theirs.items()
                if name != "params" and not are_same(value, made_with.get(name))
            }
        self.optimizer.load_state_dict({"state": copy.deepcopy(state["state"]), "param_groups": groups})


def carried_state(
    states: Sequence[tuple[Places | None, Mapping[str, Any]]], places: Places | None, parts: Sequence[Tensor]
) -> Mapping[str, Any]:
    """Make the state of an optimizer from the states of optimizers whose vectors have other tensors.

    Values for each element follow their tensors, and are zero for new tensors. Other values, such as a count of steps,
    and the settings come from the first state.

    Args:
        states: for each optimizer the places of its tensors, None for the places of the new one; and its state.
        places: the places of the tensors of the new optimizer.
        parts: tensors like the parts of its vector.
    """
    first = states[0][1]
    if len(states) == 1 and states[0][0] in (None, places):
        return first
    moved: dict[int, dict[str, Any]] = {k: {} for k in range(len(parts))}
    stepped = [(theirs, state["state"]) for theirs, state in states if state["state"]]
    for name, value in next(iter(stepped[0][1].values())).items() if stepped else ():
        is_vector = isinstance(value, Tensor) and value.dim() > 0
        new = [torch.zeros_like(part) for part in parts] if is_vector else [copy.deepcopy(value) for _ in parts]
        if is_vector:
            old = [runs(theirs, [kept[k][name] for k in sorted(kept)]) for theirs, kept in stepped]
            carry([run for side in old for run in side], runs(places, new))
        for k, each in enumerate(new):
            moved[k][name] = each
    groups = [{**group, "params": list(moved)} for group in first["param_groups"][:1]]
    return {**first, "state": moved if stepped else {}, "param_groups": groups}
