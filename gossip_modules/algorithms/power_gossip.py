"""PowerGossip: each link averages a low-rank estimate of the difference between the models at its two ends."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from itertools import groupby
from typing import Any, ClassVar, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from ..checks import checked_seed
from ..compression.full_precision import full_precision
from ..compression.orthonormal import orthonormalize
from ..devices import wide_dtype
from ..flat.layout import FlatLayout, Segment, TensorSpec
from ..flat.vector import add_
from ..mixing_manager import best_step_size
from ..mixing_manager.base import MixingManager
from ..registry import Paper
from ..rounds import Algorithm, Exchange, Memory, Round, Vector, Vectors, warn_of_little, wide

Link: TypeAlias = dict[str, Any]
"""The state of a link: "left", the factors P of all batches, "right", the factors Q, and "iterations", their number.

Each factor has the shape [num_matrices, rows or columns, rank]. Both ends of the link hold equal bits.
"""
SIDES = ("left", "right")


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
    `compress_vectors` as one nearly square matrix. Where they are all of the model they are such a matrix by default; a
    warning is given if they are more than half of it, and are sent exactly. The graph may change as long as it is
    undirected, since each link counts its own iterations. A link keeps a few times rank * (rows + columns) elements per
    matrix. In a round with several iterations, later iterations use X with the estimates of earlier ones. The product
    of a sum is a sum of products, so X is written once, at the end.

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
            of the bytes. None: only if the model has no other parameters.
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
    compress_vectors: bool | None = None
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


# The factors of a link.


class Bases(NamedTuple):
    """Orthonormal bases of the links whose iteration computes the same factor.

    Attributes:
        side: the factor that is computed, 0 for P and 1 for Q; the bases belong to the other factor.
        peers: the ranks at the other ends of the links.
        of: the bases for each batch, [links, num_matrices, rows or columns, rank].
    """

    side: int
    peers: list[int]
    of: list[Tensor]

    def among(self, links: Mapping[int, Link]) -> Bases:
        """The bases of these links only."""
        if all(peer in links for peer in self.peers):
            return self
        kept = [k for k, peer in enumerate(self.peers) if peer in links]
        return Bases(self.side, [self.peers[k] for k in kept], [basis[kept] for basis in self.of])


class LinkFactors:
    """Makes the factors of a rank's links, and bases of their columns.

    The first factors of a link are drawn from a generator that is seeded with its two ranks.

    Args:
        rank: this rank.
        matrices: the matrices of the model.
        device: the device of the factors.
        seed: the seed of the first factors; the same on all ranks.
        warm_start: whether an iteration starts from the last factors; otherwise it draws new ones.

    Raises:
        ValueError: the device has no float64.
    """

    def __init__(
        self, rank: int, matrices: MatrixBatches, device: torch.device, *, seed: int, warm_start: bool
    ) -> None:
        if wide_dtype(device) is not torch.float64:
            raise ValueError(
                f"got a model on {device.type}, which has no float64, expected a device with float64, in which "
                "PowerGossip computes its factors; choose Choco(SignNorm(), step_size=0.45)"
            )
        self._rank, self._matrices, self._device = rank, matrices, device
        self._seed, self._warm_start = seed, warm_start
        self._first: dict[tuple[int, int], list[Tensor]] = {}  # by peer and side

    def zeros(self) -> Link:
        """The factors of a link before its first iteration."""
        pairs = list(zip(self._matrices.batches, self._matrices.dtypes, strict=True))
        left, right = (
            [torch.zeros(batch.factor_shape(side), dtype=dtype, device=self._device) for batch, dtype in pairs]
            for side in (0, 1)
        )
        return {"left": left, "right": right, "iterations": 0}

    def bases(self, links: Mapping[int, Link]) -> list[Bases]:
        """Bases of Q for the links whose next iteration computes P, and bases of P for the other links."""
        sides = ([peer for peer, link in links.items() if link["iterations"] % 2 == side] for side in (0, 1))
        return [
            Bases(side, peers, self._orthonormalized(1 - side, {peer: links[peer] for peer in peers}))
            for side, peers in enumerate(sides)
            if peers
        ]

    def advance(self, link: Link, high: Sequence[Tensor], low: Sequence[Tensor]) -> None:
        """P <- X_j Q̂ - X_i Q̂, or Q <- X_j^T P̂ - X_i^T P̂, for the link of i < j.

        Args:
            link: the state of the link, mutated.
            high: the products of j for each batch.
            low: the products of i for each batch.
        """
        side = link["iterations"] % 2
        pairs = zip(high, low, self._matrices.batches, strict=True)
        link[SIDES[side]] = [torch.sub(a, b).view(batch.factor_shape(side)) for a, b, batch in pairs]
        link["iterations"] += 1

    def _orthonormalized(self, side: int, links: Mapping[int, Link]) -> list[Tensor]:
        """Return an orthonormal basis of the columns of the links' factors on this side, for each batch.

        Factors are zero before the first iteration; `orthonormalize` replaces zeros by the first draws.
        """
        if self._warm_start:
            columns = [link[SIDES[side]] for link in links.values()]
        else:
            columns = [self._draw(peer, side, 1 + link["iterations"]) for peer, link in links.items()]
        first = [self._first_of(peer, side) for peer in links]
        return [
            orthonormalize(torch.stack(factors).double(), torch.stack(fallbacks)).to(dtype)
            for factors, fallbacks, dtype in zip(
                zip(*columns, strict=True), zip(*first, strict=True), self._matrices.dtypes, strict=True
            )
        ]

    def _first_of(self, peer: int, side: int) -> list[Tensor]:
        if (peer, side) not in self._first:
            self._first[peer, side] = self._draw(peer, side, 0)
        return self._first[peer, side]

    def _draw(self, peer: int, side: int, iteration: int) -> list[Tensor]:
        """Draw standard normal factors, float64: a pure function of the seed, the link and its iteration."""
        draws = []
        for number, batch in enumerate(self._matrices.batches):
            key = (self._seed, min(self._rank, peer), max(self._rank, peer), iteration, number, side)
            seed = int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0] >> np.uint64(1))
            generator = torch.Generator().manual_seed(seed)
            draw = torch.randn(batch.factor_shape(side), generator=generator, dtype=torch.float64, device="cpu")
            draws.append(draw.to(self._device))
        return draws


def checksum(link: Link) -> int:
    """Return a checksum of all factors of a link, modulo 2**32."""
    factors: Sequence[Tensor] = [factor for pair in zip(link["left"], link["right"], strict=True) for factor in pair]
    total = torch.zeros((), dtype=torch.int64, device=factors[0].device if factors else "cpu")
    for factor in factors:
        words = factor.reshape(-1).view(torch.int32).long()
        total = total * 31 + (words * torch.arange(1, 2 * words.numel(), 2, device=words.device)).sum()
    return int(total) % (1 << 32)


class LowRankChange:
    """The change of the matrices of a model by a round: a sum of products left right^T for each batch.

    Args:
        matrices: the matrices of the model.
        x: the model; not changed until `add_to`.
    """

    def __init__(self, matrices: MatrixBatches, x: Vector) -> None:
        self._matrices = matrices
        parts = [part if part.element_size() >= 4 else part.float() for part in x.parts]
        self._X = [batch.of(parts) for batch in matrices.batches]
        self._terms: list[list[tuple[Tensor, Tensor]]] = [[] for _ in matrices.batches]

    def times(self, number: int, side: int, basis: Tensor) -> Tensor:
        """Return (X + change) times the basis on side 0, or its transpose times the basis on side 1."""
        X = self._X[number]
        product = (X.mT if side else X) @ basis
        for term in self._terms[number]:
            left, right = reversed(term) if side else term
            product = product.baddbmm_(left, right.mT @ basis)
        return product

    def add(self, bases: Sequence[Bases], links: Mapping[int, Link], weights: Mapping[int, float]) -> None:
        """change <- change + sum_j weight_j D̂_j, with D̂ = P Q̂^T or P̂ Q^T."""
        for side, peers, found in bases:
            for number, basis in enumerate(found) if peers else ():
                steps = torch.stack([links[j][SIDES[side]][number] * weights[j] for j in peers])
                left, right = (basis, steps) if side else (steps, basis)
                self._terms[number].append((side_by_side(left), side_by_side(right)))

    def add_to(self, x: Vector) -> None:
        """x <- x + the change; x is the model, or a correction that is added to the model."""
        with x.adding() as total:
            for batch, terms in zip(self._matrices.batches, self._terms, strict=True):
                for left, right in terms:
                    batch.of(total.parts).baddbmm_(left, right.mT)


# The matrices of a model in few batches, so that a product over all of them takes few operations.


class Batch(NamedTuple):
    """Neighbouring matrices with equal shapes: elements of a vector from `first` on as [num_matrices, rows, columns].

    Attributes:
        part: the index of the part of the vector that holds the matrices.
        first: the element of the part at which the first matrix begins.
        num_matrices, rows, columns: the shape of the batch.
        rank: the number of columns of the factors.
    """

    part: int
    first: int
    num_matrices: int
    rows: int
    columns: int
    rank: int

    def of(self, parts: Sequence[Tensor]) -> Tensor:
        """The matrices, [num_matrices, rows, columns]; shares memory with the part."""
        numel = self.num_matrices * self.rows * self.columns
        return parts[self.part][self.first : self.first + numel].view(self.num_matrices, self.rows, self.columns)

    def factor_shape(self, side: int) -> tuple[int, int, int]:
        """Return the shape of a factor: side 0 is the left factor, P = X Q; side 1 is the right factor, Q = X^T P."""
        return self.num_matrices, self.columns if side else self.rows, self.rank


class Exact(NamedTuple):
    """Neighbouring vectors that are sent uncompressed: elements [first, last) of a part."""

    part: int
    first: int
    last: int

    def of(self, parts: Sequence[Tensor]) -> Tensor:
        """The elements; shares memory with the part."""
        return parts[self.part][self.first : self.last]


class MatrixBatches:
    """The parameters of a model as batches of matrices, and the vectors that are sent exactly.

    Args:
        layout: the shapes of the parameters.
        rank: the number of columns of the factors, at most; a matrix with a shorter side has fewer.
        compress_vectors: whether neighbouring vectors form one nearly square matrix; otherwise they are sent exactly.
            None: whether there are only vectors.

    Attributes:
        batches: the matrices; neighbours with equal shapes form one batch.
        exact: the vectors that are sent exactly.
        dtypes: the dtype of the factors of each batch, float32 at least.
        exact_sizes: the dtype and the number of elements of each of `exact`.
        num_bytes, num_exact_bytes: the bytes of the matrices, and of the vectors that are sent exactly.
    """

    def __init__(self, layout: FlatLayout, *, rank: int, compress_vectors: bool | None) -> None:
        if compress_vectors is None:
            compress_vectors = not any(s.is_matrix for segment in layout.segments for _, s in segment.places())
        self.batches: list[Batch] = []
        self.exact: list[Exact] = []
        for part, segment in enumerate(layout.segments):
            for found in _runs(part, segment, rank=rank, compress_vectors=compress_vectors):
                if isinstance(found, Batch):
                    self.batches.append(found)
                else:
                    self.exact.append(found)
        dtypes = [segment.dtype for segment in layout.segments]
        self.dtypes = [wide(dtypes[batch.part]) for batch in self.batches]
        self.exact_sizes = [(dtypes[run.part], run.last - run.first) for run in self.exact]
        self.num_bytes = sum(b.num_matrices * b.rows * b.columns * dtypes[b.part].itemsize for b in self.batches)
        self.num_exact_bytes = sum(numel * dtype.itemsize for dtype, numel in self.exact_sizes)

    def sizes(self, side: int, *, has_exact: bool) -> list[tuple[torch.dtype, int]]:
        """Return the dtype and the number of elements of each field of a message.

        Args:
            side: the side of the factors that the message makes.
            has_exact: whether the message begins with the vectors that are sent exactly.
        """
        pairs = zip(self.dtypes, self.batches, strict=True)
        return [*(self.exact_sizes if has_exact else []), *((d, math.prod(b.factor_shape(side))) for d, b in pairs)]


def _runs(part: int, segment: Segment, *, rank: int, compress_vectors: bool) -> Iterator[Batch | Exact]:
    """Yield neighbouring matrices with equal shapes as a batch, and neighbouring vectors as a matrix or exactly."""

    def batch(num_matrices: int, rows: int, columns: int) -> Batch:
        return Batch(part, first, num_matrices, rows, columns, min(rank, rows, columns))

    def kind(spec: TensorSpec) -> object:
        if spec.is_matrix:
            return spec.shape[0], math.prod(spec.shape[1:])
        return "vectors" if compress_vectors and spec.numel > 1 else "exact"

    first = 0
    for shape, group in groupby((spec for _, spec in segment.places() if spec.numel), key=kind):
        members = list(group)
        numel = sum(spec.numel for spec in members)
        if isinstance(shape, tuple):
            yield batch(len(members), *shape)
        elif shape == "exact":
            yield Exact(part, first, first + numel)
        else:
            rows = math.isqrt(numel)
            yield batch(1, rows, numel // rows)
            if rest := numel % rows:
                first += numel - rest
                numel = rest
                yield batch(1, 1, rest)
        first += numel


def side_by_side(factors: Tensor) -> Tensor:
    """Reshape [links, num_matrices, d, rank] to [num_matrices, d, links * rank], for one product over all links."""
    return factors.permute(1, 2, 0, 3).flatten(2)
