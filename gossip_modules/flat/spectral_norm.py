"""The singular vectors of `spectral_norm`, made those of the weight that is there now."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.nn.utils.spectral_norm import SpectralNorm

_ITERATIONS, _MAX_BATCHES = 16, 64  # of the power method between two looks, and how many looks


@torch.no_grad()
def refresh_spectral_norms(module: nn.Module) -> None:
    """u and v of every `spectral_norm` in the module <- the first singular vectors of its weight; in place.

    A forward in training takes one step of the power method, and one in eval mode none: after a weight was replaced by
    an average over ranks, u and v are those of another one. Here the method is run until the norm of the weight stands
    still, so that the spectral norm is 1 as far as it converges; the relative change in the last 16 steps is below 1e-6
    (or what the dtype resolves).
    """
    for norm, weight in _spectral_norms(module):
        before, norm.n_power_iterations = norm.n_power_iterations, _ITERATIONS
        try:
            _converge(weight)
        finally:
            norm.n_power_iterations = before


def singular_vectors(module: nn.Module) -> list[Tensor]:
    """u and v of every `spectral_norm` in the module."""
    return [x for _, weight in _spectral_norms(module) for x in weight.vectors]


def _converge(weight: Callable[[], Tensor]) -> None:
    """Call `weight`, which takes steps and gives weight / norm, until that is the same."""
    size = float("inf")
    for _ in range(_MAX_BATCHES):
        x = weight()
        last, size = size, torch.linalg.vector_norm(x, dtype=torch.promote_types(x.dtype, torch.float32)).item()
        if not abs(last - size) > max(1e-6, torch.finfo(x.dtype).eps) * size:  # NaN ends it as well
            return


def _spectral_norms(module: nn.Module) -> Iterator[tuple[Any, _Hooked | _Parametrized]]:
    """Each one, and what takes its steps and gives its weight."""
    for owner in list(module.modules()):
        for hook in owner._forward_pre_hooks.values():
            if isinstance(hook, SpectralNorm):
                yield hook, _Hooked(hook, owner)
        lists = vars(owner).get("_modules", {}).get("parametrizations")
        for name, parametrization in () if lists is None else lists.items():
            for part in parametrization:
                if isinstance(part, parametrizations._SpectralNorm) and hasattr(part, "n_power_iterations"):
                    yield part, _Parametrized(part, owner, name)


class _Hooked:
    """The weight of `torch.nn.utils.spectral_norm`, which stays as it was computed last."""

    def __init__(self, hook: SpectralNorm, owner: nn.Module) -> None:
        self._hook, self._owner = hook, owner

    @property
    def vectors(self) -> tuple[Tensor, Tensor]:
        name = self._hook.name
        return getattr(self._owner, f"{name}_u"), getattr(self._owner, f"{name}_v")

    def __call__(self) -> Tensor:
        weight = self._hook.compute_weight(self._owner, do_power_iteration=True)
        setattr(self._owner, self._hook.name, weight)
        return weight


class _Parametrized:
    """The weight of `torch.nn.utils.parametrizations.spectral_norm`, perhaps one parametrization of several."""

    def __init__(self, norm: nn.Module, owner: nn.Module, name: str) -> None:
        self._norm, self._owner, self._name = norm, owner, name

    @property
    def vectors(self) -> tuple[Tensor, Tensor]:
        return self._norm._u, self._norm._v  # type: ignore[return-value]

    def __call__(self) -> Tensor:
        was_training, self._norm.training = self._norm.training, True
        try:
            weight: Tensor = getattr(self._owner, self._name)
        finally:
            self._norm.training = was_training
        return weight
