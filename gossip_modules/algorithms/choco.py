"""CHOCO-SGD: gossip of compressed differences between each model and a public copy; with a variant for memberships."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from functools import cache
from typing import Any, ClassVar

from torch import Tensor

from ..compression.compressor import Compressor, checked_compressor
from ..mixing_manager.base import MixingManager
from ..mixing_manager.spectra import checked_step_size
from ..registry import Paper
from ..rounds import Algorithm, Exchange, Memory, Round, Share, Vector, Vectors
from ..rounds.messages import Message


@dataclass(frozen=True)
class Choco(Algorithm):
    """CHOCO-SGD: each rank sends the compressed difference between its model x_i and a public copy x̂_i of it.

    A round on rank i with the neighbours j, after the local SGD step; x̂_i and drift_i are zero at first:

        q_i = C(x_i - x̂_i)
        send q_i to all neighbours, receive their q_j
        x̂_i = x̂_i + q_i
        drift_i = drift_i + sum_j W_ij (q_j - q_i)
        x_i = x_i + step_size drift_i

    The messages q alone determine a public copy, so all neighbours of a rank can follow it. As x̂ approaches x, the
    compressed differences shrink, and so does the error of compression: for any contraction C the ranks agree exactly
    in the limit. A rank does not store the copies of its neighbours, only drift_i = sum_j W_ij (x̂_j - x̂_i). So the
    memory is twice the size of the model for any degree, and a scratch tensor has the size of the model. The graph must
    not change, because drift_i is a sum over the same neighbours in all rounds.

    With a membership, whose neighbours change, both ends of a link keep its two public copies: see `LinkChoco`.

    The step size has to fit the compressor and the graph; training diverges if it is too large. On a ring of 8 about
    0.4 works for signs and 0.04 for the largest 1 % of the entries.

    Koloskova, Stich, Jaggi, "Decentralized Stochastic Optimization and Gossip Algorithms with Compressed
    Communication", ICML 2019, arXiv 1902.00340, Algorithm 2 in the memory-efficient form of its appendix.

    Args:
        compressor: the compressor C; a contraction.
        step_size: the consensus step size, gamma in the paper.

    Raises:
        ValueError: `compressor` is not a compressor, or `step_size` is not positive. When the model is wrapped: the
            weights are not symmetric, or they change.

    Example:
        >>> ring = RingGraph(8, peers_per_itr=2)
        >>> model = GossipDataParallel(model, graph=ring, push_sum=False, algorithm=Choco(SignNorm(), step_size=0.4))
    """

    compressor: Compressor
    _: KW_ONLY
    step_size: float

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
        received.add_to(drift, own=public)
        v.x.add_(drift, alpha=self.step_size)

    def for_membership(self) -> LinkChoco:
        """See `Algorithm`.

        Raises:
            ValueError: a subclass overrides the round.
        """
        if type(self).round is not Choco.round:
            raise ValueError(
                f"got a {type(self).__name__} with a membership, expected a Choco, since the base class has a variant "
                "for memberships; derive your variant from LinkChoco in gossip_modules.algorithms.choco"
            )
        return LinkChoco(self.compressor, step_size=self.step_size)


@dataclass(frozen=True)
class LinkChoco(Choco):
    """CHOCO-SGD with neighbours that join and leave: both ends of a link keep its two public copies.

    A round on rank i, for each neighbour j; x̂_ij is the public copy of x_i that j knows, zero when the link begins:

        q_ij = C(x_i - x̂_ij)
        send q_ij, receive q_ji
        x̂_ij = x̂_ij + q_ij
        x̂_ji = x̂_ji + q_ji
        x_i = x_i + step_size W_ij (x̂_ji - x̂_ij)

    If a neighbour dies, its public copies are dropped; a new link begins with zeros at both ends. One end of a link
    adds the difference that the other end subtracts, so the mean is kept. Links that began in the same round have equal
    x̂_ij, which the rank stores and compresses once. Without changes of neighbours the rounds equal the rounds of
    `Choco`, up to rounding.

    The memory has one vector for each neighbour, and one for each round in which present links began, mostly one round.
    A scratch tensor has the size of the model.

    Args:
        compressor, step_size: see `Choco`, whose `for_membership` makes this algorithm.
    """

    keeps_links: ClassVar[bool] = True
    takes_rows: ClassVar[bool] = False
    name = Choco.__name__  # one checkpoint for both

    def round(self, v: Vectors, m: Memory, k: int) -> Round:
        """See `Algorithm`."""
        scratch, zeros = m.scratch("difference"), cache(m.zeros)  # links that begin together share their x̂_ij
        links = {j: m.link(j, lambda: {"own": zeros(), "theirs": m.zeros()}) for j in v.peers}
        copies = public_copies(links)
        q: dict[int, Message] = {}
        for number, (public, peers) in enumerate(copies):
            q_ij = v.encode(self.compressor, scratch.sum_(v.x, public, alpha=-1), key=number)
            q |= dict.fromkeys(peers, q_ij)
        received = yield Exchange({j: q[j] for j in links})
        for public, peers in copies:
            if not received.keys().isdisjoint(peers):
                q[peers[0]].add_to(public)
        with v.x.adding() as x:
            for j, q_ji in received.items():
                own, theirs = Vector(links[j]["own"]), Vector(links[j]["theirs"])
                q_ji.add_to(theirs)
                x.add_(scratch.sum_(theirs, own, alpha=-1), alpha=self.step_size * v.weight_of(j))

    def for_membership(self) -> LinkChoco:
        """See `Algorithm`."""
        return self


def public_copies(links: Mapping[int, Mapping[str, Any]]) -> list[tuple[Vector, list[int]]]:
    """Return each public copy x̂_ij of this rank once, with the peers j that have it.

    Args:
        links: the states of the links, by peer. Links that began together have one list of tensors as "own".
    """
    copies: list[tuple[list[Tensor], list[int]]] = []
    for j, link in links.items():
        peers = next((peers for own, peers in copies if own is link["own"]), None)
        if peers is None:
            copies.append((link["own"], peers := []))
        peers.append(j)
    return [(Vector(own), peers) for own, peers in copies]
