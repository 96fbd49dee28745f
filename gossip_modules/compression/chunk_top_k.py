"""ChunkTopK: the largest entries of each chunk of a vector, whose values may be compressed once more."""

from __future__ import annotations

import torch
from torch import Tensor

from ..checks import checked_integer
from .bit_packing import indices_size, pack_indices, unpack_indices
from .compressor import Compressor, wide
from .sparsifier import add_at

_ENTRIES_AT_ONCE = 1 << 20


class ChunkTopK(Compressor):
    """C(x) = Q of the k entries that are largest in magnitude in each chunk of x, and zero elsewhere.

    A chunk is `chunk_size` neighbouring entries of the vector, so that every layer is heard, whatever the scale of the
    others; `TopK` compares the entries of all layers with each other. A last chunk of r entries keeps
    max(1, floor(k r / chunk_size)) of them. Without `values`, Q is the identity, and
    ||x - C(x)||^2 <= (1 - k / chunk_size) ||x||^2 in each whole chunk. NaN counts as the largest value. The message
    holds Q of the kept values, in their order in x, and their packed indices: 9.0 bits each with the defaults
    (`bit_packing.pack_indices`).

    Sarfi, Therien, Lidin, Belilovsky, "Communication Efficient LLM Pre-training with SparseLoCo", 2025, arXiv
    2508.15706.

    Args:
        k: the number of entries that are kept of a chunk, 1 to `chunk_size`.
        chunk_size: the number of entries of a chunk.
        values: Q, the compressor of the kept values, such as `TwoBit()` or `Cast(torch.bfloat16)`; None: they travel
            as they are, in x's dtype.

    Raises:
        ValueError: a number out of range, or `values` is no compressor.

    Example:
        >>> x, y = torch.randn(10_000), torch.zeros(10_000)
        >>> top = ChunkTopK(64, values=TwoBit())
        >>> message = top.message_like(x)  # 156 values of 2 bits and their indices: 224 bytes
        >>> top.compress(x, message)
        >>> top.add_decompressed(message, y)
    """

    def __init__(self, k: int = 64, chunk_size: int = 4096, *, values: Compressor | None = None) -> None:
        self.chunk_size = checked_integer("chunk_size", chunk_size, 1, "4096 is usual")
        self.k = checked_integer("k", k, 1, "it is the number of entries that are kept of a chunk")
        if self.k > self.chunk_size:
            raise ValueError(f"got k={k}, expected at most chunk_size={chunk_size}; k are kept of each chunk")
        if values is not None and not isinstance(values, Compressor):
            raise ValueError(f"got values={values!r}, expected a Compressor or None; pass e.g. TwoBit()")
        self.values = values

    def num_bytes(self, d: int, dtype: torch.dtype) -> int:
        """See `Compressor`."""
        num_kept = self._num_kept(d)
        return self._start_of_indices(num_kept, dtype) + indices_size(num_kept, d) if d else 0

    def _encode(self, x: Tensor, message: Tensor, t: int) -> None:
        d, num_kept = x.numel(), self._num_kept(x.numel())
        stop, start = self._num_value_bytes(num_kept, x.dtype), self._start_of_indices(num_kept, x.dtype)
        indices = self._indices_of_largest(x)
        values = x.index_select(0, indices)
        if self.values is None:
            message[:stop].copy_(values.view(torch.uint8))
        else:
            self.values.compress(values, message[:stop], t=t)
        message[stop:start].zero_()
        pack_indices(indices, d, message[start:])

    def _add(self, message: Tensor, target: Tensor, dtype: torch.dtype, alpha: float) -> None:
        d, num_kept = target.numel(), self._num_kept(target.numel())
        stop, start = self._num_value_bytes(num_kept, dtype), self._start_of_indices(num_kept, dtype)
        if self.values is None:
            values = message[:stop].view(dtype)
        else:
            values = message.new_zeros(num_kept, dtype=wide(target))
            self.values.add_decompressed(message[:stop], values)
        add_at(unpack_indices(message[start:], num_kept, d), values, target, alpha)

    def _num_kept(self, d: int) -> int:
        num_chunks, rest = divmod(d, self.chunk_size)
        return num_chunks * self.k + (max(1, self.k * rest // self.chunk_size) if rest else 0)

    def _num_value_bytes(self, num_kept: int, dtype: torch.dtype) -> int:
        return num_kept * dtype.itemsize if self.values is None else self.values.num_bytes(num_kept, dtype)

    def _start_of_indices(self, num_kept: int, dtype: torch.dtype) -> int:
        return -(-self._num_value_bytes(num_kept, dtype) // 2) * 2

    def _indices_of_largest(self, x: Tensor) -> Tensor:
        """The indices of the kept entries, ascending: int64 [num_kept]."""
        step = max(1, _ENTRIES_AT_ONCE // self.chunk_size) * self.chunk_size
        whole = x.numel() // self.chunk_size * self.chunk_size
        found = []
        for start in range(0, whole, step):
            rows = x[start : min(start + step, whole)].view(-1, self.chunk_size)
            found.append(_largest_of_rows(rows, self.k, start))
        if whole < x.numel():
            found.append(_largest_of_rows(x[None, whole:], self._num_kept(x.numel() - whole), whole))
        return torch.cat(found)

    def __repr__(self) -> str:
        return f"ChunkTopK({self.k}, {self.chunk_size}, values={self.values})"


def _largest_of_rows(rows: Tensor, k: int, start: int) -> Tensor:
    """The ascending indices of the k largest magnitudes of each row, where rows begin at index `start` of a vector."""
    columns = rows.abs().topk(k, dim=1, sorted=False).indices.sort(dim=1).values
    firsts = torch.arange(start, start + rows.numel(), rows.shape[1], device=rows.device)
    return (columns + firsts[:, None]).flatten()
