"""Eager updates: DiLoCo whose averages may take H steps, since each rank applies its own part of the drift at once."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field
from typing import ClassVar

from ..registry import Paper
from ..rounds import Average, Gather, Memory, Round, RoundLost, Vectors, step
from .diloco import DiLoCo
from .rda import RDA
from .token_weights import WeightedBy


@dataclass(frozen=True)
class EagerDiLoCo(DiLoCo):
    """DiLoCo with eager updates: a rank applies its own part of the mean drift at once, the other parts one step later.

    Every `sync_every` = H optimizer steps, with c = `lr` and b = `momentum`, of rank i in outer step k:

        D_i   <- phi_i - x_i                                      # averaged over ranks during the next H steps
        G_i   <- D_i / n + mean_j D_j(k - 1) - D_i(k - 1) / n     # the own drift now, the other drifts late
        m_i   <- b m_i + G_i
        phi_i <- phi_i - c (G_i + b m_i)
        x_i   <- phi_i

    Anchors of ranks differ by the drifts in flight; each drift counts once on each rank. With one rank this is
    `DiLoCo`. It keeps one vector more than DiLoCo, which makes four copies of the model.

    With a `compressor`, the decompressed message q_i of `DiLoCo` replaces D_i in G_i. A rank then applies the same part
    of its drift as the other ranks, and keeps the rest in e_i. So anchors still differ only by the drifts in flight;
    with D_i on rank i and q_i on the other ranks they would also differ by e_i.

    Where a worker of a membership dies, the average under way may be lost. The next round of a rank then takes back its
    own part and adds D_i to its new drift, so no steps are lost and anchors do not stay apart. A worker that joins has
    the anchor and the late drifts of its donor.

    Kale et al., "Eager Updates For Overlapped Communication and Computation in DiLoCo", 2025, arXiv 2502.12996.

    The arguments are the arguments of `DiLoCo` without `delay`, `own_weight`, `arrival`, `weighted_by` and
    `merge`; for `fragments` see `Periodic`. No step is lost, as x becomes phi before the average begins.

    Raises:
        ValueError: an argument is out of its range.

    Example:
        >>> model = GossipDataParallel(model, algorithm=EagerDiLoCo(sync_every=50))
    """

    _: KW_ONLY
    delay: int | str = field(default=0, init=False, repr=False)
    own_weight: float | None = field(default=None, init=False, repr=False)
    arrival: str = field(default="blend", init=False, repr=False)
    collective: str = field(default="all_gather", init=False, repr=False)
    weighted_by: WeightedBy | None = field(default=None, init=False, repr=False)
    merge: RDA | None = field(default=None, init=False, repr=False)

    title: ClassVar[str] = "Eager DiLoCo"
    summary: ClassVar[str] = (
        "applies a rank's own part of the mean drift at once, and the other parts one outer step later"
    )
    paper: ClassVar[Paper | None] = Paper(
        "Kale et al.", "Eager Updates For Overlapped Communication and Computation in DiLoCo", "2025", "2502.12996"
    )

    def __post_init__(self) -> None:
        super().__post_init__()  # with delay=0, so that sync_every is checked
        object.__setattr__(self, "delay", self.sync_every)

    @property
    def kept(self) -> float:
        """See `Periodic`; x becomes phi at once. The weight applies to buffers only, whose average comes late."""
        return 0.5

    def round(self, v: Vectors, m: Memory, k: int) -> Round:
        """See `Algorithm`."""
        phi, late = self.anchor(m), m.vector("late")  # late: the drifts of the others, from the round before
        sent = m.scratch().sum_(phi, v.x, alpha=-1)
        message = None
        if self.compressor is None:
            if m.has("error"):  # the drift of a round that was lost
                sent.add_(m.vector("error", join="zero"))
                m.forget("error")
        else:
            error = m.vector("error", join="zero")
            message = v.encode(self.compressor, sent.add_(error, alpha=self.error_decay), rest=error)
            message.add_to(sent.zero_())
        m.check_vectors(of=self)  # before anything is written
        late.add_(sent, alpha=1 / v.num_ranks)  # G
        step(m.optimizer("outer", self.make_optimizer, phi), phi, late)
        late.set_(sent).mul_(-1 / v.num_ranks)
        v.x.set_(phi)
        try:
            if message is None:
                yield Average(sent)
            else:
                received = yield Gather(message)
                received.add_to(sent.zero_())
                sent.div_(v.num_ranks)
        except RoundLost:  # a failed average leaves partial sums in `sent`
            m.vector("error", join="zero").add_(late, alpha=-v.num_ranks)
            raise
        late.add_(sent)
