"""IsoLoCo: DiLoCo whose mean drift has equal singular values in each matrix."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from ..compression.full_precision import full_precision
from ..devices import wide_dtype
from ..registry import Paper
from ..rounds import Memory, Vector, Vectors
from ..rounds.vector import tensors_of
from .diloco import DiLoCo


@dataclass(frozen=True)
class IsoLoCo(DiLoCo):
    """IsoLoCo: the singular values of each matrix of the mean drift become their mean.

    Every `sync_every` = H optimizer steps, with c = `lr` and b = `momentum`:

        D   <- 1/n  sum_j (phi - x_j)                    # exact average over all ranks
        D_W <- mean(S) U V^T, where D_W = U diag(S) V^T  # for each matrix W; vectors stay as they are
        m   <- b m + D
        phi <- phi - c (D + b m)
        x_i <- phi

    Singular values that are zero but for rounding stay zero, as their singular vectors are arbitrary.

    The more workers there are, the more the average of their drifts shrinks the directions in which they differ. Equal
    singular values restore these directions. With orthogonalize="step" the rule applies to D + b m in place of D.

    A matrix is a parameter of two dimensions. Each rank computes the singular value decompositions of the mean drift
    itself, in float64 where the device has it, so all ranks need the same hardware and versions for equal bits. On
    different hardware their anchors may differ by rounding.

    Horoi, Thérien, Wolf, Belilovsky, "Can Model Merging Improve Aggregation in DiLoCo?", 2026, arXiv 2607.03011.

    Args:
        sync_every: as for `DiLoCo`.
        lr: as for `DiLoCo`; the default is the best of the paper for 178 million parameters and 8 workers, as are the
            defaults of `sync_every` and `momentum`.
        momentum: as for `DiLoCo`.
        orthogonalize: "drift" applies the rule before the momentum, "step" after it.
        fragments: 1, or lists of names: equal runs would cut matrices.

    The other arguments are the arguments of `DiLoCo`.

    Raises:
        ValueError: an argument is out of its range; (when the model is wrapped) several processes hold one model in
            shards.

    Example:
        >>> model = GossipDataParallel(model, algorithm=IsoLoCo(sync_every=30))
    """

    sync_every: int = 30
    _: KW_ONLY
    lr: float = 1.8
    momentum: float = 0.8
    orthogonalize: Literal["drift", "step"] = "drift"

    summary: ClassVar[str] = "is DiLoCo with equal singular values in each matrix of the mean drift"
    paper: ClassVar[Paper | None] = Paper(
        "Horoi, Thérien, Wolf, Belilovsky", "Can Model Merging Improve Aggregation in DiLoCo?", "2026", "2607.03011"
    )
    takes_rows: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.orthogonalize not in ("drift", "step"):
            raise ValueError(f"IsoLoCo: got orthogonalize={self.orthogonalize!r}, expected 'drift' or 'step'")
        if isinstance(self.fragments, int) and self.fragments > 1:
            raise ValueError(
                f"IsoLoCo: got fragments={self.fragments}, whose equal runs cut matrices, expected 1 or a list of "
                "names for each fragment, as in [['embed', 'layers.0'], ['layers.1', 'head']]"
            )

    def check_shards(self, nprocs_per_node: int) -> None:
        """See `Algorithm`."""
        self.refuse_shards(nprocs_per_node, needs="whole matrices")

    def outer_step(self, v: Vectors, m: Memory, phi: Vector, drift: Vector) -> None:
        """See `DiLoCo`."""
        if self.orthogonalize == "drift":
            equalize_(v.x, drift)
            super().outer_step(v, m, phi, drift)
            return
        before = Vector([x.clone() for x in phi.parts])
        super().outer_step(v, m, phi, drift)
        equalize_(v.x, phi.sub_(before))  # the law of a step that is scaled by c is the same
        phi.add_(before)


def equalize_(x: Vector, drift: Vector) -> None:
    """Replace the singular values of each matrix by their mean.

    Values that are zero but for rounding stay zero: their singular vectors are arbitrary. A matrix with infinities or
    NaN, which has no singular values, stays as it is.

    Args:
        x: the model, whose layout has the matrices.
        drift: a vector like the model, mutated.
    """
    with full_precision(x.device):
        for matrix in matrices_of(x, drift):
            if not bool(matrix.isfinite().all()):
                continue
            u, s, vh = torch.linalg.svd(matrix.to(wide_dtype(matrix.device)), full_matrices=False)
            is_zero = s <= max(matrix.shape) * torch.finfo(s.dtype).eps * s[:1]
            matrix.copy_(s.mean() * u.masked_fill(is_zero, 0.0) @ vh)


def matrices_of(x: Vector, like: Vector) -> Iterator[Tensor]:
    """Yield a view of each matrix of the model x in a vector like x."""
    for spec, tensor in tensors_of(x, like):
        if len(spec.shape) == 2:
            yield tensor.view(spec.shape)
