"""Norms and distances of models, and the bound on the distance of the model that a peer sends."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..checks import is_number
from .vector import FlatVector, in_chunks

_log = logging.getLogger("gossip_modules.robust")
_ROW = 4096  # elements whose squares are summed in float32
_SMALLEST = 1e-15  # norm; the squares of smaller entries may be zero in float32


def norm(tensors: Sequence[Tensor]) -> float:
    """Return the Euclidean norm over all tensors, real and of any shapes; waits for the device."""
    return math.hypot(*map(_norm, tensors))


def distance(xs: Sequence[Tensor], ys: Sequence[Tensor], *, scale: float = 1.0) -> float:
    """Return the Euclidean norm of scale xs - ys, in chunks that stay in cache; waits for the device.

    Args:
        xs, ys: tensors of the same shapes; differences are in float32, or in float64 if an x has it.
        scale: the factor of xs.
    """
    return math.hypot(
        *(
            _norm((_wide(a) if scale == 1 else _wide(a) * scale) - (b if b.element_size() > 1 else b.float()))
            for x, y in zip(xs, ys, strict=True)
            for a, b in in_chunks(x, y)
        )
    )


def check_bound(max_relative_distance: float | None) -> float | None:
    """Return the bound, or None for no bound; raise ValueError for a bound that is not positive."""
    if max_relative_distance is not None and not (is_number(max_relative_distance) and max_relative_distance > 0):
        raise ValueError(
            f"got max_relative_distance={max_relative_distance!r}, expected a positive number, in units of the norm of "
            "the own model, such as 0.5, or None to accept all models"
        )
    return max_relative_distance


@dataclass
class DistanceBound:
    """The bound |y - x| <= limit |x| on the model y of a peer, with Euclidean norms.

    It holds for all parameters together, and for all averaged buffers together unless the own ones are all zero. A
    model with infinities or NaN is never within it. The logger `gossip_modules.robust` gets a warning for the first
    message of a peer that is refused, and again after one that was accepted.

    Args:
        limit: the bound, in units of the norm of the own model x.
    """

    limit: float
    _refused: set[int] = field(default_factory=set)

    def accepts(self, y: FlatVector, x: FlatVector, *, own: float, scale: float = 1.0) -> bool:
        """Whether y is within the bound around x; waits for the device.

        Args:
            y, x: the model of a peer and the own one; not changed.
            own: the norm of the parameters of x.
            scale: the factor of the parameters of y.
        """
        is_near = distance(y.parameters, x.parameters, scale=scale) <= self.limit * own  # not if it is NaN
        return is_near and self.accepts_buffers(y.buffers, x.buffers)

    def accepts_buffers(self, ys: Sequence[Tensor], xs: Sequence[Tensor]) -> bool:
        """Whether the buffers of a peer are within the bound around the own ones."""
        far, own = distance(ys, xs), norm(xs)
        return far <= self.limit * own if own else math.isfinite(far)

    def note(self, *, rank: int, sender: int, what: str, is_accepted: bool) -> None:
        """Log the first refusal of a peer after its last accepted message.

        Args:
            rank, sender: the names of this rank and of the peer.
            what: "round 3" or the like.
            is_accepted: whether its message is accepted.
        """
        if is_accepted:
            self._refused.discard(sender)
        elif sender not in self._refused:
            self._refused.add(sender)
            _log.warning(
                "rank %s: the model of rank %s is left out here in %s, and then until it is near: its distance from "
                "the own one is above max_relative_distance=%g times the norm of the own one, or it is not finite",
                *(rank, sender, what, self.limit),
            )


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _norm(x: Tensor) -> float:
    """Return the Euclidean norm of x, of any shape. Only where squares leave float32, the slower float64 sums them."""
    x = _wide(x) if x.element_size() == 1 else x  # which torch does not do for float8
    whole, dtype = x.numel() - x.numel() % _ROW, torch.promote_types(x.dtype, torch.float32)
    flat = x.reshape(-1)
    rows, rest = flat[:whole].view(whole // _ROW, _ROW), flat[whole:]
    norms = [torch.linalg.vector_norm(part, dim=-1, dtype=dtype).view(-1) for part in (rows, rest)]
    found = float(torch.linalg.vector_norm(torch.cat(norms), dtype=torch.float64))
    if _SMALLEST < found < math.inf or not x.numel():
        return found
    largest = float(flat.abs().max())  # in a tenth of the time of the infinity norm
    has_no_sum = largest == 0 or not math.isfinite(largest)
    return largest if has_no_sum else float(torch.linalg.vector_norm(flat, dtype=torch.float64))
