"""NoLoCo: outer steps in random pairs, without any average over all ranks."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import ClassVar

from torch import Tensor

from ..checks import checked_seed
from ..graph_manager import RandomMatchingGraph
from ..mixing_manager.base import MixingManager
from ..mixing_manager.spectra import blocks, check_growth, identity_like
from ..registry import Paper
from ..rounds import Memory, Mix, Round, Vectors
from .outer_method import OuterMethod


@dataclass(frozen=True)
class NoLoCo(OuterMethod):
    """NoLoCo: H steps alone, then a momentum step along the mean drift of a random pair, with a pull between the two.

    Every `sync_every` = H optimizer steps, with a = `momentum`, b = `lr`, c = `pull`, and mean_G over rank i and the
    peer that this outer step draws for it:

        m_i   <- a m_i + b mean_G(x - phi) + c (mean_G(phi) - phi_i)
        phi_i <- phi_i + m_i
        x_i   <- phi_i

    Ranks send both means as one vector, b (x - phi) + c phi. Each rank has its own anchor. The pull gives the
    differences between anchors a momentum too. With c >= 2 (1 - a^2) they grow from outer step to outer step, so such
    rates raise an error. On a graph of your own the limit is different and may be lower. If differences grow on it, the
    rates raise an error for up to 128 ranks (1,024 if the graph is undirected and never changes).

    "NoLoCo: No-all-reduce Low Communication Training Method for Large Models", 2025, arXiv 2506.10911; the rates are
    taken from its code.

    Args:
        sync_every: H, the number of optimizer steps from one outer step to the next.
        lr: b, the outer learning rate.
        momentum: a, the outer momentum; 0 <= a < 1.
        pull: c, the strength of the pull between the anchors of a pair; None: equal to `lr`.
        seed: the seed of the random pairs of each outer step, equal on all ranks. The arguments `graph` and `mixing`
            of the wrapper replace the pairs.

    Raises:
        ValueError: a rate is out of range, c >= 2 (1 - a^2), or the seed is not an integer of at least 0; (when the
            model is wrapped) the differences between ranks would grow on the graph.

    Example:
        >>> model = GossipDataParallel(model, algorithm=NoLoCo(sync_every=50))
    """

    sync_every: int = 50
    _: KW_ONLY
    lr: float = 0.7
    momentum: float = 0.5
    pull: float | None = None
    seed: int = 0

    summary: ClassVar[str] = "takes outer steps in random pairs, which pull their anchors together"
    paper: ClassVar[Paper | None] = Paper(
        "Kolehmainen et al.",
        "NoLoCo: No-all-reduce Low Communication Training Method for Large Models",
        "2025",
        "2506.10911",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        checked_seed(self.seed)
        pull = self._pull
        self._check_rates(lr=self.lr, momentum=self.momentum, pull=pull)
        limit = 2 * (1 - self.momentum**2)
        if pull >= limit:
            raise ValueError(
                f"NoLoCo: got pull={pull:g} with momentum={self.momentum:g}, expected pull < 2 (1 - momentum^2) = "
                f"{limit:g}, since otherwise the differences between ranks grow from outer step to outer step; lower "
                "the momentum, or the pull, whose default is lr"
            )

    @property
    def _pull(self) -> float:
        return self.lr if self.pull is None else self.pull

    @property
    def needs_whole_rounds(self) -> bool:  # type: ignore[override]
        """See `Algorithm`; the momentum amplifies the pull, and a pull above 1 exceeds a whole round."""
        return self.momentum > 0 or self._pull > 1

    def default_graph(self, world_size: int) -> RandomMatchingGraph:
        """See `Algorithm`."""
        return RandomMatchingGraph(world_size, seed=self.seed)

    def check(self, mixing: MixingManager) -> None:
        """See `Algorithm` and `growth`; for random pairs `__post_init__` has checked the limit."""
        super().check(mixing)
        if isinstance(mixing.graph, RandomMatchingGraph):
            return
        rates = {"pull": self._pull, "momentum": self.momentum}
        if self.kept:
            rates |= {"lr": self.lr, "own_weight": self.kept}
        check_growth("NoLoCo", rates, mixing, self._law, step="outer step", remedy="a smaller pull")

    def _law(self, w: Tensor) -> Tensor:
        """The matrix of an outer step without drift on (phi, m, x), or on (phi, m) if x becomes phi."""
        a, b, c, kept, one = self.momentum, self.lr, self._pull, self.kept, identity_like(w)
        if not kept:
            pulled = c * (w - one)
            return blocks([[one + pulled, a * one], [pulled, a * one]])
        m = [(c - b) * w - c * one, a * one, b * w]
        phi = [m[0] + one, m[1], m[2]]
        x = [(1 - kept) * part for part in phi]
        return blocks([phi, m, [*x[:2], x[2] + kept * one]])

    def round(self, v: Vectors, m: Memory, k: int) -> Round:
        """See `Algorithm`."""
        phi, momentum = self.anchor(m), m.vector("momentum", average="reset")
        sent = m.scratch().sum_(v.x, phi, alpha=-1).mul_(self.lr).add_(phi, alpha=self._pull)  # b (x - phi) + c phi
        yield Mix(sent)
        momentum.mul_(self.momentum).add_(sent.sub_(phi, alpha=self._pull))
        phi.add_(momentum)
        self.arrive(v, phi)
