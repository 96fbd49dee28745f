"""MuLoCo: DiLoCo whose inner steps are steps of Muon."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import ClassVar

from ..registry import Paper
from .diloco import DiLoCo


@dataclass(frozen=True)
class MuLoCo(DiLoCo):
    """MuLoCo: the outer step of DiLoCo, with a smaller momentum, over inner steps of Muon.

    Every `sync_every` = H optimizer steps, with c = `lr` and b = `momentum`:

        x_i <- MuonAdamW(x_i, g_i(x_i))   # H times: Muon on hidden matrices, AdamW on all else
        D   <- 1/n  sum_j (phi - x_j)     # exact average over all ranks
        m   <- b m + D
        phi <- phi - c (D + b m)
        x_i <- phi

    The outer step is the step of `DiLoCo` with other defaults. The inner steps are your optimizer's: `MuonAdamW` steps
    the matrices of a model by `torch.optim.Muon` and all else by AdamW, in one object. Drifts of Muon have a smaller
    spread of singular values than drifts of AdamW, so they agree better between ranks and are compressed with less
    loss. Codes of 4 bits, and of 2 bits with error feedback, were lossless in the paper.

    Thérien, Huang, Defazio, Rish, Belilovsky, "MuLoCo: Muon is a practical inner optimizer for DiLoCo", 2025, arXiv
    2505.23725.

    All arguments are the arguments of `DiLoCo`. With one worker, lr=0.7 and momentum=0.6 are the best of the paper.

    Raises:
        ValueError: an argument is out of its range.

    Example:
        >>> model = GossipDataParallel(model, algorithm=MuLoCo())
        >>> optimizer = MuonAdamW(model, lr=1e-3)
    """

    sync_every: int = 30
    _: KW_ONLY
    lr: float = 0.7
    momentum: float = 0.6

    inner_optimizer: ClassVar[str] = "MuonAdamW"
    summary: ClassVar[str] = "is DiLoCo over steps of Muon, whose drifts agree better"
    paper: ClassVar[Paper | None] = Paper(
        "Thérien, Huang, Defazio, Rish, Belilovsky",
        "MuLoCo: Muon is a practical inner optimizer for DiLoCo",
        "2025",
        "2505.23725",
    )
