"""PowerGossip: each link averages a low-rank estimate of the difference between the models at its two ends."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import ClassVar

import numpy as np
from torch import Tensor

from ..checks import checked_seed
from ..flat.vector import add_
from ..mixing_manager import best_step_size
from ..mixing_manager.base import MixingManager
from ..registry import Paper
from ..rounds import Algorithm, Exchange, Memory, Round, Vectors, warn_of_little
from .link_factors import LinkFactors, LowRankChange, checksum
from .matrix_batches import MatrixBatches, full_precision, side_by_side


@dataclass(frozen=True)
class PowerGossip(Algorithm):
    """PowerGossip: power iteration over each link finds a rank-r estimate of the difference of its two models.

    One iteration on the link (i, j), i < j, for each matrix X of the model; Q is random at first, P and Q are kept:

        even iterations                                    odd iterations
        Q̂ = orthonormalize(Q)                              P̂ = orthonormalize(P)
        i sends X_i Q̂, j sends X_j Q̂                       i sends X_i^T P̂, j sends X_j^T P̂
        P = X_j Q̂ - X_i Q̂                                  Q = X_j^T P̂ - X_i^T P̂
        D̂ = P Q̂^T                                          D̂ = P̂ Q^T
        X_i = X_i + step_size W_ij D̂                       (the same)
        X_j = X_j - step_size W_ij D̂

    Neither end knows X_j - X_i, but each end can compute one of the two products whose difference is its product with a
    matrix. The factors are kept from round to round (warm start), so the estimate improves over the rounds. There is
    nothing to tune: the code is linear, so it needs no error feedback, no copy of a model, and no smaller step size
    than plain gossip. One end subtracts the D̂ that the other end adds, so the mean is kept.

    A matrix is a parameter of two or more dimensions: dim 0 by all others. All matrices of a link are sent in one
    message per iteration. Parameters of one dimension are sent exactly, with the first iteration of a round, or with
    `compress_vectors` as one nearly square matrix. A warning is given if they are more than half of the model. The
    graph may change as long as it is undirected, since each link counts its own iterations. A link keeps a few times
    rank * (rows + columns) elements per matrix. In a round with several iterations, later iterations use X with the
    estimates of earlier ones. The product of a sum is a sum of products, so X is written once, at the end.

    [Note: both ends are equal] P and Q are differences of the same two messages, so both ends compute equal bits on any
    hardware. The orthonormal factors are computed from them in float64 and never stored. Matrices are multiplied in
    full float32, without autocast and TF32, since the differences are small compared with the matrices. Every
    `check_every` iterations of a link its messages carry a checksum of both factors.

    Vogels, Karimireddy, Jaggi, "Practical Low-Rank Communication Compression in Decentralized Deep Learning", NeurIPS
    2020, arXiv 2008.01425, Algorithms 1 and 2.

    Args:
        rank: the rank r of the estimate; matrices with a shorter side have as many columns as that side.
        num_iterations: the number of power iterations in a round, each with one message per link.
        warm_start: whether an iteration starts from the last factors; False draws new ones, equal at both ends.
        step_size: the consensus step size. None takes 2 / (smallest positive + largest eigenvalue of I - W), the best
            one of plain gossip, on a static graph, and 1 on others. Parameters that are sent exactly use it too.
        compress_vectors: whether parameters of one dimension are compressed as well; at high compression they are most
            of the bytes.
        check_every: the number of iterations of a link from one checksum to the next; 0 never sends one.
        seed: the seed of the first factors, equal on all ranks.

    Raises:
        ValueError: an argument is out of range, the graph is directed or the weights are not symmetric.
        RuntimeError: in a round: the two ends of a link are out of step, or their factors differ.

    Example:
        >>> ring = RingGraph(8, peers_per_itr=2)
        >>> model = GossipDataParallel(model, graph=ring, push_sum=False, algorithm=PowerGossip())
    """

    _: KW_ONLY
    rank: int = 1
    num_iterations: int = 1
    warm_start: bool = True
    step_size: float | None = None
    compress_vectors: bool = False
    check_every: int = 100
    seed: int = 0

    summary: ClassVar[str] = "sends low-rank approximations of the differences between neighbours, by power iteration"
    paper: ClassVar[Paper | None] = Paper(
        "Vogels, Karimireddy, Jaggi",
        "Practical Low-Rank Communication Compression in Decentralized Deep Learning",
        "NeurIPS 2020",
        "2008.01425",
    )
    takes_wire_dtype: ClassVar[bool] = False
    is_skippable: ClassVar[bool] = False
    needs_symmetric_weights: ClassVar[bool] = True
    keeps_links: ClassVar[bool] = True
    takes_rows: ClassVar[bool] = False

    def __post_init__(self) -> None:
        for name, least in (("rank", 1), ("num_iterations", 1), ("check_every", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"PowerGossip: got {name}={value!r}, expected an integer of at least {least}")
        size = self.step_size
        if size is not None and not (isinstance(size, int | float | np.number) and 0 < float(size) < math.inf):
            raise ValueError(
                f"PowerGossip: got step_size={size!r}, expected a positive number; 1 mixes with unchanged "
                "weights, strong compression needs less"
            )
        checked_seed(self.seed)

    def round(self, v: Vectors, m: Memory, k: int) -> Round:
        """See `Algorithm`."""
        matrices = m.cached("matrices", lambda: self._matrices_of(v))
        factors = m.cached(
            "factors",
            lambda: LinkFactors(v.rank, matrices, v.x.device, seed=self.seed, warm_start=self.warm_start),
        )
        step_size = m.cached("step size", lambda: self.step_size_on(v.mixing))
        links = {j: dict(m.link(j, factors.zeros)) for j in v.peers}
        change = LowRankChange(matrices, v.x)
        vectors: list[tuple[float, Sequence[Tensor], Sequence[Tensor]]] = []  # weight, theirs, mine
        for iteration in range(self.num_iterations):
            exact = matrices.exact if iteration == 0 else []
            sizes = [matrices.sizes(side, has_exact=iteration == 0) for side in (0, 1)]
            messages = {j: v.message(sizes[link["iterations"] % 2], key=j) for j, link in links.items()}
            for message in messages.values():
                for field, run in zip(message.fields, exact, strict=False):
                    field.copy_(run.of(v.x.parts))
            checked = {j: link for j, link in links.items() if self._checks(link["iterations"])}
            with full_precision(v.x.device):
                bases = factors.bases(links)  # Q̂ of the links whose next factor is P, P̂ of the other links
                for base in bases:
                    outgoing = [messages[j].fields[len(exact) :] for j in base.peers]
                    for number, basis in enumerate(base.of):
                        product = change.times(number, base.side, side_by_side(basis))  # X_i Q̂, or X_i^T P̂
                        for fields, own in zip(outgoing, product.split(basis.shape[-1], dim=-1), strict=True):
                            fields[number].view_as(own).copy_(own)
            replies = yield Exchange(messages, {j: checksum(link) for j, link in checked.items()})
            links = {j: links[j] for j in replies}
            weights = {j: step_size * v.weight_of(j) for j in replies}
            for j, reply in replies.items():
                mine, theirs = messages[j].fields, reply.fields
                if exact:
                    vectors.append((weights[j], theirs, mine))
                high, low = (theirs, mine) if v.rank < j else (mine, theirs)
                factors.advance(links[j], high[len(exact) :], low[len(exact) :])
                weights[j] *= 1.0 if v.rank < j else -1.0
            change.add([base.among(links) for base in bases], links, weights)  # + or - step_size W_ij D̂
        v.x.begin_adding()
        for weight, others, owns in vectors:
            for run, other, own in zip(matrices.exact, others, owns, strict=False):
                add_(run.of(v.x.parts), other, alpha=weight)
                add_(run.of(v.x.parts), own, alpha=-weight)
        with full_precision(v.x.device):
            change.add_to(v.x)
        for j, link in links.items():
            m.link(j, factors.zeros).update(link)

    def step_size_on(self, mixing: MixingManager) -> float:
        """See `Algorithm`."""
        if self.step_size is not None:
            return float(self.step_size)
        return best_step_size(mixing) if mixing.period == 1 else 1.0

    def _checks(self, iteration: int) -> bool:
        return self.check_every > 0 and iteration % self.check_every == 0

    def _matrices_of(self, v: Vectors) -> MatrixBatches:
        matrices = MatrixBatches(v.x.layout, rank=self.rank, compress_vectors=self.compress_vectors)
        if v.rank == 0:  # all have the same layout
            warn_of_little(
                str(self),
                exact=matrices.num_exact_bytes,
                compressed=matrices.num_bytes,
                num_compressed_bytes=0,
                remedy="pass compress_vectors=True, or take wire_dtype=torch.bfloat16 and DPSGD()",
            )
        return matrices
