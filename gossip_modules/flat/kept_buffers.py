"""The buffers of an averaged model that are no averages: those of rank 0, and those that follow from its weights."""

from __future__ import annotations

import zlib
from collections.abc import Callable

import torch
from torch import Tensor, nn

from .selection import Selection
from .spectral_norm import refresh_spectral_norms, singular_vectors


class KeptBuffers:
    """The persistent buffers of a module that do not travel, while the module is the average of all ranks.

    See [Note: kinds of buffers] of `Selection`.

    Args:
        module: whose buffers are copied now, so that `restore` can give them back.
        selection: what travels, and what always stays local.
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
        """The buffers <- those of the averaged model, in place; collective. Its weights are there already.

        Args:
            sum_over_ranks: x <- the sum of x over all ranks, in place.
            rank: this rank.
            world_size: the number of ranks.
            device: of what is summed.

        Raises:
            ValueError: ranks have other buffers than rank 0; on all ranks, before anything is changed.
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
            # A sum in which all other ranks have zeros: every transport has all_reduce, and int32 is exact in each.
            data = self._as_bytes(device)
            if rank != 0:
                data.zero_()
            sum_over_ranks(data)
            self._take_bytes(data)
        refresh_spectral_norms(self._module)

    @torch.no_grad()
    def restore(self) -> None:
        """The buffers <- what they were before `average_`, in place."""
        for x, value in self._saved:
            x.copy_(value)

    def _as_bytes(self, device: torch.device) -> Tensor:
        """All that is copied, one after the other, int32 [bytes / 4, rounded up]."""
        parts = [x.detach().to(device).contiguous().view(-1).view(torch.uint8) for x in self._copied.values()]
        parts.append(torch.zeros(-sum(map(len, parts)) % 4, dtype=torch.uint8, device=device))
        return torch.cat(parts).view(torch.int32)

    def _take_bytes(self, data: Tensor) -> None:
        start, raw = 0, data.view(torch.uint8)
        for x in self._copied.values():
            stop = start + x.numel() * x.element_size()
            x.copy_(raw[start:stop].clone().view(x.dtype).view(x.shape))
            start = stop
