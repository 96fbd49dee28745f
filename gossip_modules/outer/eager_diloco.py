"""Eager updates: DiLoCo whose averages may take H steps, since each rank goes on with its own part of the drift."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field

import torch
from torch import Tensor

from .anchor import Anchor
from .diloco import DiLoCo


@dataclass(frozen=True)
class EagerDiLoCo(DiLoCo):
    """DiLoCo with eager updates: the own part of the mean drift at once, that of the others one outer step later.

    Every `sync_every` = H optimizer steps, with c = `lr` and b = `momentum`, of rank i in outer step k:

        D_i   <- phi_i - x_i                                      # its mean over ranks travels for H steps
        G_i   <- D_i / n + mean_j D_j(k - 1) - D_i(k - 1) / n     # the own drift now, those of the others late
        m_i   <- b m_i + G_i
        phi_i <- phi_i - c (G_i + b m_i)
        x_i   <- phi_i

    Anchors differ between ranks by what is under way; each drift is counted once on each rank. With one rank this is
    `DiLoCo`. Beside DiLoCo it keeps one more vector, so four copies of the model.

    With a `compressor` q_i of `DiLoCo`, which is what the message of rank i means, is in the place of D_i in G_i: a
    rank applies of itself at once what the others get of it, and its e_i has the rest. So anchors still differ only by
    what is under way; with D_i at once and q_i at the others they would also differ by what was left out.

    Kale et al., "Eager Updates For Overlapped Communication and Computation in DiLoCo", 2025, arXiv 2502.12996.

    The arguments are those of `DiLoCo`, and `fragments`, see `OuterMethod`.

    Raises:
        ValueError: an argument out of its range.

    Example:
        >>> model = GossipDataParallel(model, outer=EagerDiLoCo(sync_every=50))
    """

    _: KW_ONLY
    delay: int = field(default=0, init=False, repr=False)
    own_weight: float | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()  # with delay=0, so that sync_every is checked
        object.__setattr__(self, "delay", self.sync_every)

    @property
    def is_eager(self) -> bool:
        """See `OuterMethod`."""
        return True

    def start(self, anchor: Anchor, x: Sequence[Tensor]) -> None:
        """See `OuterMethod`: the outer step of this rank, then its drift is what is sent."""
        late = anchor.memory("late")  # of the others, from the outer step before
        super().start(anchor, x)
        if self.compressor is not None:
            anchor.read_messages(self.compressor)
        for sent, others in zip(anchor.gradients, late, strict=True):
            others.add_(sent, alpha=1 / anchor.num_ranks)  # G, and the own part is kept in `sent`
        anchor.step(late)
        for sent, others in zip(anchor.gradients, late, strict=True):
            torch.mul(sent, -1 / anchor.num_ranks, out=others)

    def finish(self, anchor: Anchor) -> None:
        """See `OuterMethod`: the mean without the own part, for the next outer step."""
        for others, mean in zip(anchor.memory("late"), anchor.gradients, strict=True):
            others.add_(mean)
