"""Frozen parameters, which no round sends: whether a loop has written other values to them on each rank."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from ..flat.selection import Selection
from .state import fingerprint

_BITS = 24  # of a digest: its square times the number of ranks is below 2**63


def frozen_parameters(module: nn.Module, selection: Selection, exchanged: Sequence[Tensor]) -> dict[str, Tensor]:
    """The parameters of a module that are neither trained, nor exchanged, nor ignored, each once, by name."""
    left = {*map(id, exchanged), *selection.ignored_ids(module)}
    return {name: x for name, x in module.named_parameters() if not (x.requires_grad or id(x) in left)}


def find_differing(
    frozen: Mapping[str, Tensor], sum_over_ranks: Callable[[Tensor], None], *, world_size: int
) -> tuple[list[str], bool]:
    """The names of the parameters that are not equal on all ranks, by up to 1,024 elements of each; collective.

    Returns also whether all ranks have parameters of the same names, shapes and dtypes; else the names are all names.

    Costs one sum of six numbers if all are equal. The result is the same on all ranks. See [Note: agreement in one sum]
    of `agreement.py`.

    Args:
        frozen: the parameters of this rank, by name.
        sum_over_ranks: x <- the sum of x over all ranks, in place; int64.
        world_size: the number of ranks.
    """

    def are_equal(digests: Sequence[int]) -> list[bool]:
        h = torch.tensor(digests, dtype=torch.int64, device="cpu")
        sums = torch.cat([h, h * h])
        sum_over_ranks(sums)
        first, second = sums.split(len(h))
        return [bool(equal) for equal in world_size * second == first * first]

    names = zlib.crc32("\n".join(f"{name} {tuple(x.shape)} {x.dtype}" for name, x in frozen.items()).encode())
    content = fingerprint(frozen, has_shards=True)
    has_equal_names, *has_equal_parts = are_equal([_cut(names), _cut(content), _cut(content >> _BITS)])
    if not has_equal_names:
        return list(frozen), False
    if all(has_equal_parts):
        return [], True
    equal = are_equal([_cut(fingerprint({name: x}, has_shards=True)) for name, x in frozen.items()])
    return [name for name, is_equal in zip(frozen, equal, strict=True) if not is_equal], True


def _cut(digest: int) -> int:
    return digest & (1 << _BITS) - 1
