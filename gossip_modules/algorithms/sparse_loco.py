"""SparseLoCo: ranks send a few large entries of their drifts, and keep the other entries for the next outer step."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field
from typing import ClassVar

from ..compression import ChunkTopK, TwoBit
from ..compression.compressor import Compressor
from ..registry import Paper
from ..rounds import Memory, Round, Vectors
from .error_feedback import compressed_average
from .outer_method import OuterMethod


@dataclass(frozen=True)
class SparseLoCo(OuterMethod):
    """SparseLoCo: DiLoCo with error feedback in place of momentum, so that a few entries in two bits are enough.

    Every `sync_every` = H optimizer steps, with a = `lr`, b = `decay` and C = `compressor`, on rank i of n; e_i is zero
    at first:

        e_i <- b e_i + (phi - x_i)
        q_i <- C(e_i)                     # the largest entries of each chunk, in two bits
        e_i <- e_i - q_i                  # the rest is sent later
        D   <- 1/n  sum_j q_j             # every rank gets the messages of all
        phi <- phi - a D
        x_i <- phi

    All ranks keep equal anchors phi. The unsent rest e decays by b in each outer step, and acts as a momentum of its
    rank. The user's own optimizer takes the inner steps and keeps its state. This is
    `DiLoCo(lr=a, momentum=0, compressor=C, error_decay=b)`; use `DiLoCo` to combine messages with another outer
    optimizer.

    Sarfi, Therien, Lidin, Belilovsky, "Communication Efficient LLM Pre-training with SparseLoCo", 2025, arXiv
    2508.15706, Algorithm 1.

    Args:
        sync_every: H, the number of optimizer steps from one outer step to the next.
        lr: a, the learning rate of the outer step.
        decay: b, the share of the unsent rest e that is kept for the next outer step; 0 <= b <= 1.
        compressor: C, a contraction, equal on all ranks. The default `ChunkTopK(64, values=TwoBit())` sends 64 of 4096
            entries in 11.3 bits each.

    Raises:
        ValueError: an argument is out of its range.

    Example:
        >>> model = GossipDataParallel(model, algorithm=SparseLoCo(sync_every=30))
    """

    sync_every: int = 30
    _: KW_ONLY
    lr: float = 1.0
    decay: float = 0.95
    compressor: Compressor = field(default_factory=lambda: ChunkTopK(64, values=TwoBit()))

    summary: ClassVar[str] = (
        "sends the few largest entries of drifts in two bits, and keeps the others for the next outer step"
    )
    paper: ClassVar[Paper | None] = Paper(
        "Sarfi, Therien, Lidin, Belilovsky",
        "Communication Efficient LLM Pre-training with SparseLoCo",
        "2025",
        "2508.15706",
    )
    averages_exactly: ClassVar[bool] = True
    has_equal_memory: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_rates(lr=self.lr, momentum=0.0)
        self._check_error_feedback(self.compressor, decay=self.decay)

    def round(self, v: Vectors, m: Memory, k: int) -> Round:
        """See `Algorithm`."""
        phi = self.anchor(m)
        drift = m.scratch().sum_(phi, v.x, alpha=-1)
        yield from compressed_average(v, m, drift, self.compressor, self.decay)
        phi.sub_(drift, alpha=self.lr)
        self.arrive(v, phi)
