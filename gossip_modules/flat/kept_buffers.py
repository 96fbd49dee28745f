"""The other buffers of an averaged model: values of rank 0, and singular vectors of its weights."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.nn.utils.spectral_norm import SpectralNorm

from .selection import Selection
from .sharded import local_of


class KeptBuffers:
    """The persistent buffers of a module without an average, while the module is the average of all ranks.

    See [Note: kinds of buffers] of `Selection`.

    Args:
        module: its buffers are copied now, so that `restore` can give them back.
        selection: the averaged and the local tensors.
    """

    def __init__(self, module: nn.Module, selection: Selection) -> None:
        self._module = module
        self._copied = selection.copied(module)
        tensors = {id(x): x for x in (*selection.kept(module).values(), *singular_vectors(module))}
        self._saved = [(x, x.detach().clone()) for x in tensors.values()]

    @torch.no_grad()
    def average_(
        self, sum_over_ranks: Callable[[Tensor], None], *, rank: int, world_size: int, device: torch.device
    ) -> None:
        """Set the buffers to their values in the averaged model, in place; collective. Average the weights first.

        Args:
            sum_over_ranks: x <- the sum of x over all ranks, in place.
            rank: this rank.
            world_size: the number of ranks.
            device: the device of the sums.

        Raises:
            ValueError: ranks have other buffers than rank 0; raised on all ranks, before anything is changed.
        """
        listing = [f"{name} {tuple(x.shape)} {x.dtype}" for name, x in self._copied.items()]
        digests = torch.zeros(world_size, dtype=torch.int64, device=device)
        digests[rank] = zlib.crc32("\n".join(listing).encode())
        sum_over_ranks(digests)
        if others := [k for k, digest in enumerate(digests.tolist()) if digest != digests[0].item()]:
            raise ValueError(
                f"got buffers on ranks {others} that have other names, shapes or dtypes than those of rank 0, expected "
                "the same on all ranks, as the averaged model has those of rank 0; name those that are of each rank "
                f"alone in ignore=[...]. Rank {rank} has {', '.join(listing) or 'none'}"
            )
        if self._copied:
            take_from_first(list(self._copied.values()), sum_over_ranks, rank=rank, device=device)
        refresh_spectral_norms(self._module)

    @torch.no_grad()
    def restore(self) -> None:
        """Set the buffers to their values before `average_`, in place."""
        for x, value in self._saved:
            x.copy_(value)


@torch.no_grad()
def take_from_first(
    tensors: Sequence[Tensor], sum_over_ranks: Callable[[Tensor], None], *, rank: int, device: torch.device
) -> None:
    """Set tensors to their values on rank 0, in place; collective. Names, shapes and dtypes are equal on all ranks.

    All other ranks give zeros to a sum: every transport has all_reduce, and int32 is exact in each.

    Args:
        tensors: on any device.
        sum_over_ranks, rank, device: see `KeptBuffers.average_`.
    """
    tensors = [local_of(x.detach()) for x in tensors]
    parts = [x.to(device).contiguous().view(-1).view(torch.uint8) for x in tensors]
    parts.append(torch.zeros(4 - sum(map(len, parts)) % 4, dtype=torch.uint8, device=device))  # a shard may be empty
    data = torch.cat(parts).view(torch.int32)
    if rank != 0:
        data.zero_()
    sum_over_ranks(data)
    start, raw = 0, data.view(torch.uint8)
    for x in tensors:
        stop = start + x.numel() * x.element_size()
        x.copy_(raw[start:stop].clone().view(x.dtype).view(x.shape))
        start = stop


_ITERATIONS, _MAX_BATCHES = 16, 64  # of the power method between two looks, and how many looks


@torch.no_grad()
def refresh_spectral_norms(module: nn.Module) -> None:
    """u and v of every `spectral_norm` in the module <- the first singular vectors of its weight; in place.

    A forward in training takes one step of the power method, and a forward in eval mode none. So after an average over
    ranks, u and v belong to another weight. This function runs the method until the norm of the weight stands still:
    its relative change in the last 16 steps is below 1e-6, or the resolution of the dtype.
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
    """Call `weight`, which takes steps and gives weight / norm, until its result stays the same."""
    size = float("inf")
    for _ in range(_MAX_BATCHES):
        x = weight()
        last, size = size, torch.linalg.vector_norm(x, dtype=torch.promote_types(x.dtype, torch.float32)).item()
        if not abs(last - size) > max(1e-6, torch.finfo(x.dtype).eps) * size:  # NaN ends it as well
            return


def _spectral_norms(module: nn.Module) -> Iterator[tuple[Any, tuple[Tensor, Tensor], Callable[[], Tensor]]]:
    """Yield each spectral norm, its u and v, and a function that takes its steps and returns its weight."""
    for owner in list(module.modules()):
        for hook in owner._forward_pre_hooks.values():
            if isinstance(hook, SpectralNorm):
                vectors = getattr(owner, f"{hook.name}_u"), getattr(owner, f"{hook.name}_v")
                yield hook, vectors, partial(_hooked, hook, owner)
        # The entry itself, as torch.nn.utils.parametrize has made it: the `__getattr__` of a module of the user may
        # answer any name, and a wrapper of the library answers names of its inner module.
        lists = vars(owner).get("_modules", {}).get("parametrizations")
        for name, parametrization in () if lists is None else lists.items():
            for part in parametrization:
                if isinstance(part, parametrizations._SpectralNorm) and hasattr(part, "n_power_iterations"):
                    yield part, (part._u, part._v), partial(_parametrized, part, owner, name)


def _hooked(hook: SpectralNorm, owner: nn.Module) -> Tensor:
    """Return the weight of `torch.nn.utils.spectral_norm`, after its steps of the power method."""
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
