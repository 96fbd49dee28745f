"""CHOCO-SGD: gossip of compressed differences between each model and a public copy of it; also where peers may fail."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar

from ..compression.compressor import Compressor, checked_compressor
from ..mixing_manager.base import MixingManager
from ..mixing_manager.spectra import checked_step_size
from ..registry import Paper
from ..rounds import Algorithm, Exchange, Memory, Round, Share, Vector, Vectors


@dataclass(frozen=True)
class Choco(Algorithm):
    """CHOCO-SGD: each rank sends the compressed difference between its model x_i and a public copy x̂_i of it.

    A round on rank i with the neighbours j, after the local SGD step; x̂_i and drift_i are zero at first:

        q_i = C(x_i - x̂_i)
        send q_i to all neighbours, receive their q_j
        x̂_i = x̂_i + q_i
        drift_i = drift_i + sum_j W_ij (q_j - q_i)
        x_i = x_i + step_size drift_i

    All neighbours of a rank follow its public copy, since the q alone determine it. As the x̂ approach the x, the
    differences that are compressed shrink, and so does the error of compression: for any contraction C the ranks agree
    exactly in the limit. A rank does not store the copies of its neighbours, only drift_i = sum_j W_ij (x̂_j - x̂_i), so
    the memory takes twice as much as the model, whatever the degree, and a scratch tensor takes as much again. The
    graph must not change, because drift_i is a sum over the same neighbours in all rounds.

    With a membership, where neighbours come and go, both ends of a link keep its two public copies: see `LinkChoco`.

    The step size has to fit the compressor and the graph; training diverges if it is too large. On a ring of 8 about
    0.4 works for signs and 0.04 for the largest 1 % of the entries.

    Koloskova, Stich, Jaggi, "Decentralized Stochastic Optimization and Gossip Algorithms with Compressed
    Communication", ICML 2019, arXiv 1902.00340, Algorithm 2 in the memory-efficient form of its appendix.

    Args:
        compressor: the compressor C; a contraction.
        step_size: the consensus step size, gamma in the paper.

    Raises:
        ValueError: `compressor` is no compressor, or `step_size` is not positive. When the model is wrapped: weights
            that are not symmetric or that change.

    Example:
        >>> ring = RingGraph(8, peers_per_itr=2)
        >>> model = GossipDataParallel(model, graph=ring, push_sum=False, algorithm=Choco(SignNorm(), step_size=0.4))
    """

    compressor: Compressor
    _: KW_ONLY
    step_size: float

    short_name: ClassVar[str] = "choco"
    title: ClassVar[str] = "CHOCO-SGD"
    summary: ClassVar[str] = "sends compressed differences to a copy of each model that its neighbours can follow"
    paper: ClassVar[Paper | None] = Paper(
        "Koloskova, Stich, Jaggi",
        "Decentralized Stochastic Optimization and Gossip Algorithms with Compressed Communication",
        "ICML 2019",
        "1902.00340",
    )
    takes_wire_dtype: ClassVar[bool] = False
    is_skippable: ClassVar[bool] = False
    needs_static_graph: ClassVar[bool] = True

    def __post_init__(self) -> None:
        checked_compressor(self.compressor)
        object.__setattr__(self, "step_size", checked_step_size(self))

    def step_size_on(self, mixing: MixingManager) -> float:
        """See `Algorithm`."""
        return self.step_size

    def round(self, v: Vectors, m: Memory, k: int) -> Round:
        """See `Algorithm`."""
        public = m.vector("public", average="on_request", of_weights=True)
        drift = m.vector("drift", average="on_request", of_weights=True)
        q = v.encode(self.compressor, m.scratch("difference").sum_(v.x, public, alpha=-1))
        received = yield Share(q)
        q.add_to(public)
        received.add_to(drift)
        v.x.add_(drift, alpha=self.step_size)

    def for_membership(self) -> LinkChoco:
        """See `Algorithm`.

        Raises:
            ValueError: of a subclass with a round of its own.
        """
        if type(self).round is not Choco.round:
            raise ValueError(
                f"got a {type(self).__name__} with a membership, expected a Choco, whose rounds by link are known: "
                "derive from LinkChoco in gossip_modules.algorithms.choco the rounds where peers may fail"
            )
        return LinkChoco(self.compressor, step_size=self.step_size)


@dataclass(frozen=True)
class LinkChoco(Choco):
    """CHOCO-SGD where neighbours come and go: both ends of a link keep the two public copies that belong to it.

    A round on rank i, for each neighbour j; x̂_ij is the public copy of x_i that j knows, zero when the link begins:

        q_ij = C(x_i - x̂_ij)
        send q_ij, receive q_ji
        x̂_ij = x̂_ij + q_ij
        x̂_ji = x̂_ji + q_ji
        x_i = x_i + step_size W_ij (x̂_ji - x̂_ij)

    So a neighbour that dies takes its public copy with it, a new one begins with zeros at both ends, and one end adds
    the difference that the other subtracts: the mean is kept. Links that began in one round have equal x̂_ij, which is
    then kept and compressed once. While nobody comes or goes these are the rounds of `Choco`, to rounding.

    The memory takes as much as the model once for each neighbour, and once for each round in which links that there
    are began, mostly one; a scratch tensor takes as much again.

    Args:
        compressor, step_size: as for `Choco`, which gives this one to a wrapper with a membership.
    """

    keeps_links: ClassVar[bool] = True
    takes_rows: ClassVar[bool] = False
    name = Choco.__name__  # one checkpoint for both

    def round(self, v: Vectors, m: Memory, k: int) -> Round:
        """See `Algorithm`."""
        scratch = m.scratch("difference")
        begun: dict[str, Any] = {}  # the x̂ of links that begin in this round

        def begin() -> dict[str, Any]:
            return {"own": begun.setdefault("own", m.zeros()), "theirs": m.zeros()}

        links = {j: m.link(j, begin) for j in v.peers}
        own = {id(link["own"]): Vector(link["own"]) for link in links.values()}
        q = {
            key: v.encode(self.compressor, scratch.sum_(v.x, public, alpha=-1), key=number)
            for number, (key, public) in enumerate(own.items())
        }
        received = yield Exchange({j: q[id(link["own"])] for j, link in links.items()})
        for key in {id(links[j]["own"]): None for j in received}:
            q[key].add_to(own[key])
        with v.x.adding() as x:
            for j, q_j in received.items():
                public, theirs = own[id(links[j]["own"])], Vector(links[j]["theirs"])
                q_j.add_to(theirs)
                x.add_(scratch.sum_(theirs, public, alpha=-1), alpha=self.step_size * v.weight_of(j))

    def for_membership(self) -> LinkChoco:
        """See `Algorithm`."""
        return self
