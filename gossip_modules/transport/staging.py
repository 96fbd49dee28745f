"""Staging: twins, in memory that can go on the wire, of tensors that cannot."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

MAX_STAGED = 64  # twins kept, and more where a round has more; else addresses change from call to call


class Staging:
    """Twins of tensors of another device: pinned memory for a GPU's, kept from round to round.

    Args:
        device: where messages live on the wire; a tensor there is its own twin.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._twins: dict[tuple[int, torch.dtype, torch.Size], Tensor] = {}
        self._max_twins = MAX_STAGED
        self._source: torch.device | None = None

    def expect(self, num_tensors: int) -> None:
        """A round of so many tensors begins: a few such rounds' twins are kept."""
        self._max_twins = max(self._max_twins, 4 * num_tensors)

    def twin(self, x: Tensor, *, fill: bool = False, keep: bool = False) -> Tensor:
        """`x` itself where it can go on the wire, else its twin: filled if asked, kept for the next round."""
        if x.device.type == self.device.type:
            return x
        self._source = x.device
        key = (x.data_ptr(), x.dtype, x.shape)
        twin = self._twins.get(key)
        if twin is None:
            twin = torch.empty(x.shape, dtype=x.dtype, device=self.device, pin_memory=x.is_cuda)
            if keep:
                if len(self._twins) >= self._max_twins:
                    self._twins.clear()
                self._twins[key] = twin
        return twin.copy_(x, non_blocking=True) if fill else twin

    def settle(self) -> None:
        """Return when what was copied between twins and tensors since the last call is there."""
        if self._source is not None and self._source.type == "cuda":
            # Copies into twins must land before a send reads them, copies out of them before a receive overwrites them.
            torch.cuda.current_stream(self._source).synchronize()
        self._source = None

    @staticmethod
    def copy_back(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Each tensor <- its twin."""
        for x, twin in pairs:
            if x is not twin:
                x.copy_(twin, non_blocking=True)
