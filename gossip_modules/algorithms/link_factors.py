"""The factors of PowerGossip: two factors of every matrix for each link, and orthonormal bases of their columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from ..compression.orthonormal import orthonormalize
from ..rounds import Vector
from .matrix_batches import MatrixBatches, side_by_side

Link: TypeAlias = dict[str, Any]
"""The state of a link: "left", the factors P of all batches, "right", the factors Q, and "iterations", their number.

Each factor has the shape [num_matrices, rows or columns, rank]. Both ends of the link hold equal bits.
"""
SIDES = ("left", "right")


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
        device: of the factors.
        seed: of the first factors; the same on all ranks.
        warm_start: whether an iteration starts from the last factors; otherwise it draws new ones.
    """

    def __init__(
        self, rank: int, matrices: MatrixBatches, device: torch.device, *, seed: int, warm_start: bool
    ) -> None:
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
