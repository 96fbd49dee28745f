"""DistanceBound: refuses models that are not finite or that are too far from the own one."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch

from ...flat.nonfinite import is_finite
from ...flat.vector import SCRATCH_NUMEL, FlatVector
from .message import RefusedModelError

DEFAULT_MAX_DISTANCE = 1e6


class DistanceBound:
    """Refuses a model y that is not finite, or where rms(y - x) > max_distance * max(rms(x), 1) with the own model x.

    rms is the root mean square over all d elements. Parameters of honest workers are of the order of 1 throughout
    training, and so are their differences; 10^6 leaves room for statistics of inputs that were not normalised. Before
    the first publication, when the own model is not known, the bound is on rms(y), and at least DEFAULT_MAX_DISTANCE: a
    worker that starts from another's model may be far from it.

    One pass over both models is enough to accept a model; the reason of a refusal takes further passes. Belongs to the
    fetching thread; the training thread reads `is_own_finite` when a fetch is over.

    Args:
        max_distance: the bound, in units of max(rms(x), 1); > 0.
        own: makes a context with the model that this worker published last, which is not written inside the context.
    """

    def __init__(self, max_distance: float, own: Callable[[], AbstractContextManager[FlatVector | None]]) -> None:
        self.max_distance = max_distance
        self.is_own_finite = True
        self._own = own

    def check(self, y: FlatVector) -> None:
        """Check a peer's model, and the own one.

        Args:
            y: in host memory.

        Raises:
            RefusedModelError: y is not finite or too far away; says how far.
        """
        with self._own() as x:
            self.is_own_finite = True
            limit = self.max_distance if x is not None else max(self.max_distance, DEFAULT_MAX_DISTANCE)
            if math.isfinite(rms := _rms(y, x)) and rms <= limit:  # so x and y are finite
                return
            if not is_finite(y):
                raise RefusedModelError(
                    "got a model with infinite or NaN values, expected finite ones; the peer diverged"
                )
            if x is not None and not is_finite(x):
                self.is_own_finite = False
                return
            distance, scale = _rms(y, x, is_exact=True), 1.0 if x is None else max(_rms(x, is_exact=True), 1.0)
            if not distance <= limit * scale:
                raise RefusedModelError(
                    f"got a model at a root mean square distance of {distance:.3g} from ours, expected {limit:g} * "
                    f"{scale:.3g} at most; the peer has diverged or is broken, or a larger max_distance= is needed"
                )

    def check_own(self) -> None:
        """Check the own model alone, where no other has come."""
        with self._own() as x:
            self.is_own_finite = x is None or is_finite(x)


def _rms(y: FlatVector, x: FlatVector | None = None, *, is_exact: bool = False) -> float:
    """The root mean square of y - x, or of y: infinite where float32 overflows, unless it is exact (in float64)."""
    total = 0.0
    for k, segment in enumerate(y.segments):
        dtype = torch.float64 if is_exact or segment.dtype == torch.float64 else torch.float32
        for start in range(0, segment.numel(), SCRATCH_NUMEL):
            difference = segment[start : start + SCRATCH_NUMEL].to(dtype)
            if x is not None:
                difference = difference - x.segments[k][start : start + SCRATCH_NUMEL].to(dtype)
            total = math.hypot(total, torch.linalg.vector_norm(difference).item())
    return total / math.sqrt(max(sum(segment.numel() for segment in y.segments), 1))
