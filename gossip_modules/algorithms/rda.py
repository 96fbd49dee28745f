"""RDA: the mean direction of drifts with their mean length, for each tensor."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..devices import wide_dtype
from ..rounds import Average, Round, Vector
from ..rounds.vector import tensors_of
from .token_weights import total_weight


@dataclass(frozen=True)
class RDA:
    """Radial-directional averaging: the lengths and the directions of drifts are averaged apart, for each tensor.

    With D_j the drift of a tensor on rank j and w_j the weight of the rank, 1 unless `DiLoCo.weighted_by` says more:

        r <- sum_j w_j |D_j| / sum_j w_j    # the mean length
        u <- sum_j w_j D_j / |D_j|          # the mean direction, whose length does not matter
        D <- r u / |u|

    The mean of drifts is shorter than the drifts, the more so the less they agree. This merge keeps their length, and a
    rank with a long drift does not outweigh the directions of the others. Drifts whose length is zero have no
    direction, and count in the mean length only. D is zero if u is.

    Ranks average the directions in place of the drifts, and send one number for each tensor beside them. The length
    of u is computed on each rank, so all ranks need the same hardware and versions for equal bits. On different
    hardware their anchors may differ by rounding.

    A tensor is a parameter of the model, of any shape. If equal runs of a model are its fragments (`fragments` is a
    number), the pieces of a tensor that they cut count as tensors. A row of an embedding is trained only where its
    token occurs, so embeddings are better left out. Vectors, such as biases, are merged as all others unless you leave
    them out too.

    Douillard, Rush, Donchev et al., "Decoupled DiLoCo for Resilient Distributed Pre-training", 2026, arXiv 2604.21428.

    Args:
        without: names of modules or parameters whose drifts have the plain mean, such as the embedding.

    Example:
        >>> DiLoCo(sync_every=50, merge=RDA(without=["embed"])).merge
        RDA(without=['embed'])
    """

    without: Sequence[str] = ()

    def __post_init__(self) -> None:
        is_list = isinstance(self.without, Sequence) and not isinstance(self.without, str)
        if not (is_list and all(isinstance(name, str) for name in self.without)):
            raise ValueError(
                f"RDA: got without={self.without!r}, expected a list of names of modules or parameters, as in ['embed']"
            )

    def average(self, drift: Vector, weight: float | None) -> Round:
        """drift <- the merged drift of all ranks.

        Args:
            drift: the drift of this rank, a vector of `m.scratch`; written.
            weight: the weight of this rank; None: all ranks have equal weights.
        """
        lengths = self._scale(drift, None)
        if weight is not None:
            drift.mul_(weight)
        numbers = yield Average(drift, (1.0 if weight is None else weight, *lengths))
        total = total_weight(numbers)
        drift.mul_(len(numbers) / total)
        self._scale(drift, (numbers[:, :1] * numbers[:, 1:]).sum(0).div(total).tolist())

    def _scale(self, drift: Vector, lengths: Iterable[float] | None) -> list[float]:
        """Scale each tensor to its length, or to length one with None; returns the former lengths."""
        tensors = [x for spec, x in tensors_of(drift, drift) if not self._leaves_out(spec.name)]
        found = _lengths(tensors)
        for x, new, length in zip(tensors, lengths or [1.0] * len(tensors), found, strict=True):
            if length:
                x.div_(length).mul_(new)
            else:
                x.zero_()
        return found

    def _leaves_out(self, name: str) -> bool:
        return any(f"{name}.".startswith(f"{other}.") for other in self.without)


def _lengths(tensors: Sequence[Tensor]) -> list[float]:
    """The Euclidean norm of each tensor; 0 where it is too small to divide by. Waits for the device, once."""
    if not tensors:
        return []
    norms = torch.stack([torch.linalg.vector_norm(x, dtype=wide_dtype(x.device)) for x in tensors])
    smallest = [torch.finfo(x.dtype).tiny for x in tensors]
    return [norm if norm >= tiny else 0.0 for norm, tiny in zip(norms.tolist(), smallest, strict=True)]
