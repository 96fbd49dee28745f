"""GASLoC: DiLoCo by gossip, which mixes the momentum along with the parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from ..graph_manager import RingGraph
from ..graph_manager.named_graphs import undirected_ring
from ..mixing_manager.base import MixingManager
from ..mixing_manager.spectra import blocks, check_growth, identity_like
from ..registry import Paper
from ..rounds import MakeOptimizer, Memory, Mix, Round, Vector, Vectors, described_with, step
from .outer_method import OuterMethod


@dataclass(frozen=True)
class GASLoC(OuterMethod):
    """GASLoC: each rank trains alone for H steps and takes an outer step alone, then one round of gossip mixes it.

    Every `sync_every` = H optimizer steps, with c = `lr`, g = `momentum`, alpha = `step_size`, W(t) the weights of the
    wrapper's graph and L = I - W(t):

        y_i   <- phi_i + c (x_i - phi_i)
        e_i   <- y_i + g (y_i - y'_i)                        # y': y of the outer step before; at first phi
        phi_i <- e_i + alpha (sum_j W_ij(t) e_j - e_i)       # (I - alpha L) e
        x_i   <- phi_i

    The round mixes the whole extrapolation e with its momentum, so ranks do not disagree for ever. With alpha = 1 on a
    complete graph this is `DiLoCo` with the same rates. On an undirected graph that never changes, differences between
    ranks vanish if all eigenvalues of I - alpha L are above -1 / (1 + 2 g); with alpha = 1/2 none is below 0. On
    directed and on changing graphs the momentum may let differences grow with any alpha. With the default rates this
    happens on pairs at exponential distances of 10 ranks and on `BaseGraph(11)`. Such weights raise an error for up to
    128 ranks (1,024 if the graph never changes). The default graph is a ring.

    Cagnasso, Belilovsky, Oyallon, "Unifying Local Communications and Local Updates for LLM Pretraining", 2026, arXiv
    2606.11081. The law follows secondary sources; some of them add the momentum unmixed.

    Args:
        sync_every: H, the number of optimizer steps from one outer step to the next.
        lr: c, the outer learning rate.
        momentum: g, the outer momentum; 0 <= g < 1.
        step_size: alpha, how far a round goes; 0 < alpha <= 1.
        optimizer: another outer optimizer, in place of lr and momentum, as for `DiLoCo`. It steps the anchor of each
            rank with the drift of this rank as gradient, e_i <- step(phi_i, phi_i - x_i), and the round mixes e. Its
            state, such as a momentum, stays on its rank. Weights are then not checked for growing differences. If
            x <- phi (no delay, no own_weight), a drift contains no differences between anchors, so rounds cannot make
            them grow.

    Raises:
        ValueError: a rate is out of range, or there are rates beside an optimizer; (when the model is wrapped)
            differences between ranks would grow with these weights, or the inner algorithm compresses while there is a
            momentum.

    Example:
        >>> model = GossipDataParallel(model, algorithm=GASLoC(sync_every=50), graph=RingGraph(8, peers_per_itr=2))
    """

    sync_every: int = 30
    _: KW_ONLY
    lr: float = 0.7
    momentum: float = 0.9
    step_size: float = 0.5
    optimizer: MakeOptimizer | None = field(default=None, repr=False)

    summary: ClassVar[str] = "takes outer steps alone, and gossips their result along with the momentum"
    paper: ClassVar[Paper | None] = Paper(
        "Cagnasso, Belilovsky, Oyallon",
        "Unifying Local Communications and Local Updates for LLM Pretraining",
        "2026",
        "2606.11081",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_rates(lr=self.lr, momentum=self.momentum, step_size=self.step_size)
        if self.step_size > 1:
            raise ValueError(f"GASLoC: got step_size={self.step_size!r}, expected at most 1, a whole round of gossip")

        self._check_optimizer(self.optimizer)

    @property
    def needs_whole_rounds(self) -> bool:  # type: ignore[override]
        """See `Algorithm`; y - y' contains the change by the last round."""
        return self.optimizer is None and self.momentum > 0

    def default_graph(self, world_size: int) -> RingGraph:
        """See `Algorithm`; differences vanish on a ring with both neighbours for any number of ranks."""
        return undirected_ring(world_size)

    def check(self, mixing: MixingManager) -> None:
        """See `Algorithm` and `growth`. With an optimizer of the user the law is not known and not checked."""
        super().check(mixing)
        if self.optimizer is not None:
            return
        rates = {"step_size": self.step_size, "momentum": self.momentum}
        if self.kept:
            rates |= {"lr": self.lr, "own_weight": self.kept}
        check_growth("GASLoC", rates, mixing, self._law, step="outer step", remedy="a smaller momentum")

    def _law(self, w: Tensor) -> Tensor:
        """The matrix of an outer step without drift on (phi, y, x), or on (phi, y) if x becomes phi."""
        c, g, kept, one = self.lr, self.momentum, self.kept, identity_like(w)
        a = (1 - self.step_size) * one + self.step_size * w
        if not kept:
            return blocks([[(1 + g) * a, -g * a], [one, 0 * one]])
        phi = [(1 + g) * (1 - c) * a, -g * a, (1 + g) * c * a]
        x = [(1 - kept) * part for part in phi]
        return blocks([phi, [(1 - c) * one, 0 * one, c * one], [*x[:2], x[2] + kept * one]])

    def describe(self, dtypes: Sequence[torch.dtype]) -> str:
        """See `Algorithm`; includes the outer optimizer with its settings."""
        return str(self) if self.optimizer is None else described_with(str(self), self.optimizer, dtypes)

    def begin(self, v: Vectors, m: Memory) -> None:
        """See `Algorithm`."""
        super().begin(v, m)
        if self.optimizer is None:
            self._before(m)

    def _before(self, m: Memory) -> Vector:
        """Return y', which is y of the round before."""
        return m.vector("y", start="x", average="reset")

    def round(self, v: Vectors, m: Memory, k: int) -> Round:
        """See `Algorithm`. phi becomes e before e is mixed, which saves two copies of the model."""
        phi = self.anchor(m)
        sent = m.scratch().sum_(phi, v.x, alpha=-1)
        if self.optimizer is not None:
            step(m.optimizer("outer", self.optimizer, phi), phi, sent)
        else:
            before = self._before(m)
            phi.sub_(sent, alpha=self.lr)  # y
            change = sent.sum_(phi, before, alpha=-1)
            before.set_(phi)
            phi.add_(change, alpha=self.momentum)  # e
        sent.set_(phi)
        yield Mix(sent)
        phi.lerp_(sent, self.step_size)
        self.arrive(v, phi)
