"""Streaming DiLoCo: DiLoCo by fragments, whose drifts are averaged under the next steps of training."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import ClassVar

from ..registry import Paper
from ..rounds import Fragments
from .diloco import DiLoCo


@dataclass(frozen=True)
class StreamingDiLoCo(DiLoCo):
    """Streaming DiLoCo: each fragment of the model has its own outer steps, whose averages run under training.

    Fragment p of P, with H = `sync_every`, tau = `delay`, alpha = `own_weight`, c = `lr` and b = `momentum`, at the
    steps k with k = p H / P modulo H:

        D     <- 1/n  sum_j (phi - x_j(k))           # of this fragment; averaged during tau steps
        m     <- b m + D                             # at step k + tau
        phi   <- phi - c (D + b m)
        x_i   <- alpha x_i + (1 - alpha) phi         # x_i at step k + tau, after further training

    For P <= H, a step sends at most 1 / P of the model, every H / P steps. Training does not wait if the average takes
    less than tau steps. For P > H, several fragments have rounds in one step, one after the other. All ranks keep equal
    phi and m. P = 1, tau = 0 and alpha = 0 are `DiLoCo`. The paper also rounds messages to 4 bits. Use a `compressor`
    of `DiLoCo` for this; the rest of a fragment is then part of its next message.

    Douillard et al., "Streaming DiLoCo with overlapping communication: Towards a Distributed Free Lunch", 2025, arXiv
    2501.18512, Algorithm 2.

    `lr`, `momentum`, `optimizer`, `compressor` and `error_decay` mean the same as in `DiLoCo`.

    Args:
        sync_every: H, the steps from one outer step of a fragment to its next; 100 in the paper.
        fragments: P, or the names of modules; see `Periodic`.
        delay: tau; 1 to 10 in the paper; "auto" is measured, see `Periodic`.
        own_weight: alpha; 1/2 in the paper.

    Raises:
        ValueError: an argument is out of its range.

    Example:
        >>> model = GossipDataParallel(model, algorithm=StreamingDiLoCo(sync_every=100, fragments=4, delay=5))

        With codes of 4 bits and a scale for each 32 of them:

        >>> code = QSGD(bits=4, bucket_size=32, unbiased=True)
        >>> model = GossipDataParallel(model, algorithm=StreamingDiLoCo(fragments=4, delay=5, compressor=code))
    """

    sync_every: int = 100
    _: KW_ONLY
    fragments: Fragments = 4
    delay: int | str = 1

    title: ClassVar[str] = "Streaming DiLoCo"
    summary: ClassVar[str] = (
        "takes the outer steps of parts of the model at different times, under the next steps of training"
    )
    paper: ClassVar[Paper | None] = Paper(
        "Douillard et al.",
        "Streaming DiLoCo with overlapping communication: Towards a Distributed Free Lunch",
        "2025",
        "2501.18512",
    )
