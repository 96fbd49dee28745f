"""What PowerGossip keeps for each link: the two factors of every matrix, and how many iterations the link has done."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..compression.orthonormal import orthonormalize
from .compressed import State
from .matrix_batches import Batch


class LinkFactors:
    """The left factor P and the right factor Q of every batch of matrices, for each link of a rank.

    Both ends of a link hold equal bits: factors are differences of the same two messages, and the first ones are drawn
    from a generator that is seeded with the two ranks of the link.

    Args:
        rank: this rank.
        peers: the ranks at the other ends of the links, ascending.
        batches: the batches of matrices.
        like: for each batch a tensor of its dtype and device.
        seed: the seed of the first factors; the same on all ranks.
        warm_start: whether an iteration starts from the last factors; otherwise it draws new ones.

    Attributes:
        iterations: the number of iterations that each link has done, by peer.
        tensors: for each batch {"left": P, "right": Q}, each [links, num_matrices, rows or columns, rank].
    """

    def __init__(
        self,
        rank: int,
        peers: Sequence[int],
        batches: Sequence[Batch],
        like: Sequence[Tensor],
        *,
        seed: int,
        warm_start: bool,
    ) -> None:
        self._rank, self._peers, self._batches = rank, list(peers), batches
        self._seed, self._warm_start = seed, warm_start
        self.iterations = dict.fromkeys(self._peers, 0)
        self.tensors: list[State] = []
        self._fallbacks: list[tuple[Tensor, Tensor]] = []
        num_links = len(self._peers)
        for number, (batch, x) in enumerate(zip(batches, like, strict=True)):
            left, right = (x.new_zeros(num_links, *batch.factor_shape(side)) for side in (0, 1))
            self.tensors.append({"left": left, "right": right})
            first_left, first_right = (self._draw(number, side, [0] * num_links).to(x.device) for side in (0, 1))
            self._fallbacks.append((first_left, first_right))

    def by_side(self, peers: Iterable[int]) -> Iterator[tuple[int, list[int]]]:
        """The links to these peers, by the factor that their next iteration computes: (0, for P), (1, for Q)."""
        peers = list(peers)
        for side in (0, 1):
            links = [self._peers.index(peer) for peer in peers if self.iterations[peer] % 2 == side]
            if links:
                yield side, links

    def of(self, number: int, side: int, link: int) -> Tensor:
        """The factor of a batch on a side of a link, [num_matrices, rows or columns, rank]; shares memory."""
        return self.tensors[number]["right" if side else "left"][link]

    def orthonormalized(self, side: int, links: list[int]) -> list[Tensor]:
        """For each batch an orthonormal basis of the columns of these links' factors on that side.

        Factors are zero before the first iteration; `orthonormalize` replaces what is zero by the first draws.
        """
        bases = []
        for number, state in enumerate(self.tensors):
            factor = state["right" if side else "left"]
            if self._warm_start:
                columns = factor[links].double()
            else:
                iterations = [1 + iteration for iteration in self.iterations.values()]
                columns = self._draw(number, side, iterations)[links].to(factor.device)
            bases.append(orthonormalize(columns, self._fallbacks[number][side][links]).to(factor.dtype))
        return bases

    def checksum(self, peer: int) -> int:
        """A checksum of all factors of a link, modulo 2**32."""
        link = self._peers.index(peer)
        device = self.tensors[0]["left"].device if self.tensors else torch.device("cpu")
        total = torch.zeros((), dtype=torch.int64, device=device)
        for state in self.tensors:
            for factor in state.values():
                words = factor[link].reshape(-1).view(torch.int32).long()
                total = total * 31 + (words * torch.arange(1, 2 * words.numel(), 2, device=words.device)).sum()
        return int(total) % (1 << 32)

    def forget(self, peer: int) -> None:
        """As before the first iteration of a link."""
        link = self._peers.index(peer)
        self.iterations[peer] = 0
        for state in self.tensors:
            for factor in state.values():
                factor[link].zero_()

    def renumbered(self, rank: int, peers: Sequence[int], kept: Mapping[int, int]) -> LinkFactors:
        """The factors of a rank that has another number and other peers.

        Args:
            rank, peers: see above.
            kept: the links that stay: the new rank of each peer, by its old one.
        """
        like = [state["left"] for state in self.tensors]
        new = LinkFactors(rank, peers, self._batches, like, seed=self._seed, warm_start=self._warm_start)
        for link, old in enumerate(self._peers):
            if old in kept:
                new.iterations[kept[old]] = self.iterations[old]
                for own, theirs in zip(new.tensors, self.tensors, strict=True):
                    for side, factor in own.items():
                        factor[new._peers.index(kept[old])] = theirs[side][link]
        return new

    def state(self) -> dict[str, Any]:
        """Everything that is kept, for a checkpoint; shares memory."""
        return {"links": self._peers, "iterations": list(self.iterations.values()), "factors": self.tensors}

    def _draw(self, number: int, side: int, iterations: Sequence[int]) -> Tensor:
        """Standard normal factors [links, ...], float64 on the CPU, a pure function of (seed, link, its iteration)."""
        draws = torch.empty(
            len(self._peers), *self._batches[number].factor_shape(side), dtype=torch.float64, device="cpu"
        )
        for link, peer, iteration in zip(draws, self._peers, iterations, strict=True):
            key = (self._seed, min(self._rank, peer), max(self._rank, peer), iteration, number, side)
            seed = int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0] >> np.uint64(1))
            torch.randn(
                link.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64, out=link, device="cpu"
            )
        return draws
