"""The singular vectors of `spectral_norm`, computed anew from the weight that is there now."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
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
    an average over ranks, u and v belong to another one. Here the method is run until the norm of the weight stands
    still, so that the spectral norm is 1 as far as it converges; the relative change in the last 16 steps is below 1e-6
    (or what the dtype resolves).
    """
    for norm, _, weight in _spectral_norms(module):
        before, norm.n_power_iterations = norm.n_power_iterations, _ITERATIONS
        try:
            _converge(weight)
        finally:
            norm.n_power_iterations = before


def singular_vectors(module: nn.Module) -> list[Tensor]:
    """u and v of every `spectral_norm` in the module."""
    return [x for _, vectors, _ in _spectral_norms(module) for x in vectors]


def _converge(weight: Callable[[], Tensor]) -> None:
    """Call `weight`, which takes steps and gives weight / norm, until that is the same."""
    size = float("inf")
    for _ in range(_MAX_BATCHES):
        x = weight()
        last, size = size, torch.linalg.vector_norm(x, dtype=torch.promote_types(x.dtype, torch.float32)).item()
        if not abs(last - size) > max(1e-6, torch.finfo(x.dtype).eps) * size:  # NaN ends it as well
            return


def _spectral_norms(module: nn.Module) -> Iterator[tuple[Any, tuple[Tensor, Tensor], Callable[[], Tensor]]]:
    """Each one, its u and v, and a function that takes its steps and gives its weight."""
    for owner in list(module.modules()):
        for hook in owner._forward_pre_hooks.values():
            if isinstance(hook, SpectralNorm):
                vectors = getattr(owner, f"{hook.name}_u"), getattr(owner, f"{hook.name}_v")
                yield hook, vectors, partial(_hooked, hook, owner)
        lists = vars(owner).get("_modules", {}).get("parametrizations")
        for name, parametrization in () if lists is None else lists.items():
            for part in parametrization:
                if isinstance(part, parametrizations._SpectralNorm) and hasattr(part, "n_power_iterations"):
                    yield part, (part._u, part._v), partial(_parametrized, part, owner, name)


def _hooked(hook: SpectralNorm, owner: nn.Module) -> Tensor:
    """The weight of `torch.nn.utils.spectral_norm`, which stays as it was computed last."""
    weight = hook.compute_weight(owner, do_power_iteration=True)
    setattr(owner, hook.name, weight)
    return weight


def _parametrized(norm: nn.Module, owner: nn.Module, name: str) -> Tensor:
    """The weight of `torch.nn.utils.parametrizations.spectral_norm`, perhaps one parametrization of several."""
    was_training, norm.training = norm.training, True
    try:
        weight: Tensor = getattr(owner, name)
    finally:
        norm.training = was_training
    return weight
