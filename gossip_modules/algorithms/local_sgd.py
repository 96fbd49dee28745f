"""Local SGD: ranks train alone for H steps, then they average their models."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field
from typing import ClassVar

from ..registry import Paper
from ..rounds import Average, Memory, Periodic, Round, Vectors


@dataclass(frozen=True)
class LocalSGD(Periodic):
    """Local SGD: every H optimizer steps x_i <- 1/n sum_j x_j, the exact average over all ranks.

    Stich, "Local SGD Converges Fast and Communicates Little", ICLR 2019, arXiv 1805.09767, Algorithm 1.

    Args:
        sync_every: H, the number of optimizer steps from one average to the next. With a `delay` the difference to the
            average is added to x, so the steps of the delay are kept; `own_weight` is for buffers only.

    Raises:
        ValueError: an argument is out of its range.

    Example:
        >>> model = GossipDataParallel(model, algorithm=LocalSGD(sync_every=16))
    """

    sync_every: int = 16
    _: KW_ONLY
    arrival: str = field(default="blend", init=False, repr=False)

    title: ClassVar[str] = "Local SGD"
    summary: ClassVar[str] = "trains alone, and averages parameters over all ranks every few steps"
    paper: ClassVar[Paper | None] = Paper(
        "Stich", "Local SGD Converges Fast and Communicates Little", "ICLR 2019", "1805.09767"
    )
    averages_exactly: ClassVar[bool] = True

    def round(self, v: Vectors, m: Memory, k: int) -> Round:
        """See `Algorithm`."""
        yield Average(v.x)
