"""Optimizers that keep other weights than the parameters, as libraries of optimizers have them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

LEARNING_RATE = 0.05
Make = Callable[[Iterable[nn.Parameter]], Any]


class _Optimizer(torch.optim.Optimizer):
    def __init__(self, parameters: Iterable[Tensor], lr: float = LEARNING_RATE) -> None:
        super().__init__(parameters, {"lr": lr})
        self.num_steps = 0

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        self.num_steps += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.update(parameter, self.state[parameter], group["lr"])

    def update(self, parameter: Tensor, state: dict[str, Any], lr: float) -> None:
        raise NotImplementedError


class MasterSGD(_Optimizer):
    """Steps a float32 copy of each parameter, and writes it over the parameter."""

    def update(self, parameter: Tensor, state: dict[str, Any], lr: float) -> None:
        state.setdefault("master", parameter.detach().float().clone())
        assert parameter.grad is not None
        parameter.copy_(state["master"].add_(parameter.grad.float(), alpha=-lr))

    def copies(self) -> list[Tensor]:
        return [self.state[parameter]["master"] for parameter in self.param_groups[0]["params"]]

    def load_copies(self, copies: list[Tensor]) -> None:
        for parameter, master in zip(self.param_groups[0]["params"], copies, strict=True):
            self.state[parameter]["master"] = master


class ScheduleFreeSGD(_Optimizer):
    """Parameters are between z, which is stepped, and the average of z."""

    def update(self, parameter: Tensor, state: dict[str, Any], lr: float) -> None:
        share, z = 1 / self.num_steps, state.setdefault("z", parameter.detach().clone())
        assert parameter.grad is not None
        parameter.lerp_(z, share).add_(parameter.grad, alpha=lr * (0.9 * (1 - share) - 1))
        z.add_(parameter.grad, alpha=-lr)


class Lookahead(_Optimizer):
    """Slow weights that take half of what every third step has come to."""

    def update(self, parameter: Tensor, state: dict[str, Any], lr: float) -> None:
        slow = state.setdefault("slow", parameter.detach().clone())
        assert parameter.grad is not None
        parameter.add_(parameter.grad, alpha=-lr)
        if self.num_steps % 3 == 0:
            parameter.copy_(slow.lerp_(parameter, 0.5))


class Momentum(_Optimizer):
    """Heavy-ball momentum, with a counter and with state that stays zero."""

    def update(self, parameter: Tensor, state: dict[str, Any], lr: float) -> None:
        assert parameter.grad is not None
        state["steps"] = state.get("steps", torch.zeros(())) + 1
        state.setdefault("unused", torch.zeros_like(parameter))
        momentum = state.setdefault("momentum", torch.zeros_like(parameter)).mul_(0.5).add_(parameter.grad)
        parameter.add_(momentum, alpha=-lr)


class SteppedMasters:
    """float32 masters in the groups of an optimizer in place of the parameters, each for itself or as one vector."""

    def __init__(self, parameters: Iterable[Tensor], *, is_flat: bool = False) -> None:
        self.parameters = list(parameters)
        self.masters = [parameter.detach().float().clone() for parameter in self.parameters]
        self.is_flat = is_flat
        self.stepped = [torch.cat([x.flatten() for x in self.masters])] if is_flat else self.masters
        self.optimizer = torch.optim.SGD([x.requires_grad_() for x in self.stepped], lr=LEARNING_RATE)

    def copies(self) -> list[Tensor]:
        return [x.detach() for x in self.stepped]

    @torch.no_grad()
    def load_copies(self, copies: list[Tensor]) -> None:
        for own, master in zip(self.stepped, copies, strict=True):
            own.copy_(master)

    def zero_grad(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    @torch.no_grad()
    def step(self) -> None:
        gradients = [x.grad.float() for x in self.parameters if x.grad is not None]
        if self.is_flat:
            self.stepped[0].grad = torch.cat([gradient.flatten() for gradient in gradients])
        else:
            for master, gradient in zip(self.stepped, gradients, strict=True):
                master.grad = gradient
        self.optimizer.step()
        parts = self.stepped[0].split([x.numel() for x in self.parameters]) if self.is_flat else self.stepped
        for parameter, part in zip(self.parameters, parts, strict=True):
            parameter.data.copy_(part.view(parameter.shape))


class PartialMasterSGD(MasterSGD):
    """Masters of vectors in the state, beside matrices that are stepped themselves and have other state."""

    def update(self, parameter: Tensor, state: dict[str, Any], lr: float) -> None:
        if parameter.dim() == 1:
            super().update(parameter, state, lr)
            return
        assert parameter.grad is not None
        state["momentum"] = parameter.grad.clone()
        parameter.add_(parameter.grad, alpha=-lr)


class MastersIn:
    """float32 masters in `param_groups`, in one of the forms of mixed-precision tools.

    Args:
        parameters: the parameters.
        form: "partial": vectors are stepped themselves; "each": an optimizer for each parameter; "two": one for
            matrices and one for vectors; "groups": a flat master for each of two groups; "padded": one flat master
            with zeros between the two groups and at its end.
    """

    def __init__(self, parameters: Iterable[Tensor], *, form: str) -> None:
        self.parameters = list(parameters)
        self.flats: list[Tensor] = []
        self.masters: list[tuple[Tensor, Tensor]] = []
        matrices = [x for x in self.parameters if x.dim() > 1]
        vectors = [x for x in self.parameters if x.dim() == 1]
        if form in ("groups", "padded"):
            parts = [[matrices], [vectors]] if form == "groups" else [[matrices, vectors]]
            flats = [self._flat(part, num_zeros=5 * (form == "padded")) for part in parts]
            stepped: list[Any] = [[{"params": [flat]} for flat in flats]]
        else:
            self.masters = [(x, self._new(x)) for x in self.parameters if form != "partial" or x.dim() > 1]
            own = [master for _, master in self.masters]
            stepped = {
                "partial": [[*own, *vectors]],
                "each": [[master] for master in own],
                "two": [[x for x in own if x.dim() > 1], [x for x in own if x.dim() == 1]],
            }[form]
        self.optimizers = [torch.optim.SGD(group, lr=LEARNING_RATE) for group in stepped]

    @staticmethod
    def _new(x: Tensor) -> Tensor:
        return x.detach().float().clone().requires_grad_()

    def _flat(self, groups: list[list[Tensor]], *, num_zeros: int) -> Tensor:
        pieces: list[Tensor] = []
        for group in groups:
            pieces += [*(x.detach().float().flatten() for x in group), torch.zeros(num_zeros)]
        flat = torch.cat(pieces).requires_grad_()
        at = 0
        for group in groups:
            for x in group:
                self.masters.append((x, flat.detach()[at : at + x.numel()].view(x.shape)))
                at += x.numel()
            at += num_zeros
        self.flats.append(flat)
        return flat

    def zero_grad(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    @torch.no_grad()
    def step(self) -> None:
        for flat in self.flats:
            flat.grad = torch.zeros_like(flat)
        for parameter, master in self.masters:
            assert parameter.grad is not None
            for flat in self.flats:
                if flat.untyped_storage().data_ptr() == master.untyped_storage().data_ptr():
                    at = master.storage_offset()
                    flat.grad[at : at + master.numel()] = parameter.grad.float().flatten()  # type: ignore[index]
            if not self.flats:
                master.grad = parameter.grad.float()
        for optimizer in self.optimizers:
            optimizer.step()
        for parameter, master in self.masters:
            parameter.data.copy_(master)
