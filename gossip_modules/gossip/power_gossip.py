"""PowerGossip: each link averages a low-rank estimate of the difference of its two ends."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..compression.compressor import checked_seed
from ..compression.orthonormal import orthonormalize
from ..flat.layout import Part
from ..flat.vector import FlatVector
from ..mixing_manager.base import MixingManager, MixingWeights
from ..mixing_manager.step_size import best_step_size
from .compressed import CompressedGossiper, Memory, copy_memory
from .matrix_batches import Batch, batches_of, full_precision, side_by_side
from .message import Envelope


class PowerGossip(CompressedGossiper):
    """For each link (i, j): D̂ ~ X_i - X_j of rank r;  X_i <- X_i - step_size W_ij D̂,  X_j <- X_j + step_size W_ij D̂.

    A matrix X_i - X_j is known to neither end, but its product with a vector is the difference of two products that
    each end can compute, so power iteration works over the link, one half per message: with A the orthonormal right
    factor, P = (X_i - X_j) A and D̂ = P A^T; in the next iteration A is the orthonormal P, Q = (X_i - X_j)^T A and
    D̂ = A Q^T. The factors are kept (warm start), so that iterations go on from round to round. There is nothing to
    tune: the code is linear, so it needs no error feedback, no copy of a model and no step size below plain gossip's;
    and D̂ is taken from one end and given to the other, so the mean is kept.

    Matrices are parameters of two or more dimensions, dim 0 by the rest; all of a link's go in one message per
    iteration, after its header. Parameters of one dimension travel exactly, with the first iteration of a round, or
    with `compress_vectors` as one nearly square matrix; where they are more than half of the model, a warning says so.
    The graph may change as long as it stays undirected: each link counts its own iterations. Memory per link is a few
    times rank * (rows + columns) of each matrix.

    [Note: both ends are equal] P and Q are differences of the same two messages, so they are bit-equal at both ends
    on any hardware; the orthonormal factors are computed from them in float64 and never stored. Matrices are
    multiplied in full float32, whatever autocast and TF32 say, since the differences are small beside the
    matrices. Every `check_every` iterations of a link its messages carry a checksum of both factors.

    Vogels, Karimireddy, Jaggi, "Practical Low-Rank Communication Compression in Decentralized Deep Learning", NeurIPS
    2020, arXiv 2008.01425, Algorithms 1 and 2.

    Args:
        rank: r, capped by the shape of each matrix.
        num_iterations: power iterations, hence messages per link, in a round.
        warm_start: go on from the last factors; False draws new ones, the same at both ends.
        step_size: None = 2 / (least positive + largest eigenvalue of I - W), the best one of plain gossip, on a static
            graph, and 1 on others. Parameters that travel exactly are mixed with it too.
        compress_vectors: whether parameters of one dimension go in code as well; they dominate at high compression.
        check_every: iterations of a link from one checksum to the next; 0 = never.
        seed: of the first factors; the same on all ranks.

    Raises:
        ValueError: an argument out of range, a directed graph or weights that are not symmetric.
        RuntimeError: (rounds) the two ends of a link are out of step, or their factors differ.

    Example:
        >>> ring = RingGraph(8, peers_per_itr=2)
        >>> model = GossipDataParallel(model, graph=ring, push_sum=False, gossiper=PowerGossip())
    """

    def __init__(
        self,
        *,
        rank: int = 1,
        num_iterations: int = 1,
        warm_start: bool = True,
        step_size: float | None = None,
        compress_vectors: bool = False,
        check_every: int = 100,
        seed: int = 0,
    ) -> None:
        super().__init__(step_size=1.0 if step_size is None else step_size)
        for name, value, least in (
            ("rank", rank, 1),
            ("num_iterations", num_iterations, 1),
            ("check_every", check_every, 0),
        ):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"PowerGossip: got {name}={value!r}, expected an integer of at least {least}")
        self.rank, self.num_iterations, self.warm_start = rank, num_iterations, warm_start
        self.compress_vectors, self.check_every, self.seed = compress_vectors, check_every, checked_seed(seed)
        self.num_phases = num_iterations
        self._options = (
            f"rank={rank}, num_iterations={num_iterations}, warm_start={warm_start}, step_size={step_size}, "
            f"compress_vectors={compress_vectors}, check_every={check_every}, seed={seed}"
        )
        self._is_tuned = step_size is not None

    def bind(self, mixing: MixingManager, transport: Any) -> None:
        """See `Mixer`."""
        super().bind(mixing, transport)
        self._peers = sorted(mixing.graph.phone_book(transport.rank))
        if not self._is_tuned and mixing.period == 1:
            self.step_size = best_step_size(mixing)

    def is_coded(self, part: Part) -> bool:
        """See `CompressedGossiper`."""
        return part.is_matrix or (self.compress_vectors and not part.is_buffer and part.numel > 1)

    remedy_for_exact = "pass compress_vectors=True (--compress-vectors), or wire_dtype=torch.bfloat16 and no gossiper"

    @property
    def exact_step_size(self) -> float:
        """See `CompressedGossiper`."""
        return self.step_size

    # Memory: for each batch the left and the right factor of every link, [links, count, rows or columns, rank].

    def make_memory(self, coded: Sequence[Tensor]) -> None:
        """See `CompressedGossiper`. Factors are zero before the first iteration, which `orthonormalize` replaces."""
        self._batches = [
            batch for k, section in enumerate(self._coded) for batch in batches_of(k, section.parts, rank=self.rank)
        ]
        self._iterations = dict.fromkeys(self._peers, 0)
        num_links = len(self._peers)
        self._factors: list[Memory] = []
        self._fallbacks: list[tuple[Tensor, Tensor]] = []
        for number, batch in enumerate(self._batches):
            like = coded[batch.section]
            zeros = [like.new_zeros(num_links, *batch.factor_shape(side)) for side in (0, 1)]
            self._factors.append({"left": zeros[0], "right": zeros[1]})
            draws = [self._draw(number, side, batch, [0] * num_links).to(like.device) for side in (0, 1)]
            self._fallbacks.append((draws[0], draws[1]))
        self._boxes: dict[tuple[int, int, bool], tuple[Envelope, Envelope]] = {}

    def memory(self) -> dict[str, Any]:
        """See `CompressedGossiper`."""
        return {"links": self._peers, "iterations": list(self._iterations.values()), "factors": self._factors}

    def set_memory(self, memory: Mapping[str, Any]) -> None:
        """See `CompressedGossiper`."""
        if list(memory["links"]) != self._peers:
            raise ValueError(
                f"{self}: got state of links to {memory['links']}, expected {self._peers}; load the checkpoint of this "
                "rank, made on the same graph"
            )
        copy_memory(self, self._factors, memory["factors"])
        self._iterations = dict(zip(self._peers, memory["iterations"], strict=True))

    def _draw(self, number: int, side: int, batch: Batch, iterations: Sequence[int]) -> Tensor:
        """Standard normal factors [links, ...], float64 on the CPU, a pure function of (seed, link, its iteration)."""
        draws = torch.empty(len(self._peers), *batch.factor_shape(side), dtype=torch.float64)
        me = self.transport.rank
        for link, peer, iteration in zip(draws, self._peers, iterations, strict=True):
            key = (self.seed, min(me, peer), max(me, peer), iteration, number, side)
            seed = int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0] >> np.uint64(1))
            torch.randn(link.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64, out=link)
        return draws

    # A round.

    def write(self, s: FlatVector) -> None:
        """See `CompressedGossiper`. One power iteration of every link: its message holds this rank's products."""
        if self.phase == 0:
            for outgoing, _ in self._letters.values():
                self.copy_exact(s, outgoing)
        coded = self.coded(s)
        self._bases: dict[int, list[Tensor]] = {}
        with full_precision(s.raw.device):
            for side, links in self._groups():
                self._bases[side] = self._orthonormal(1 - side, links)
                for number, (batch, basis) in enumerate(zip(self._batches, self._bases[side], strict=True)):
                    matrices = batch.of(coded)
                    products = (matrices.mT if side else matrices) @ side_by_side(basis)
                    for link, product in zip(links, products.split(batch.rank, dim=-1), strict=True):
                        self._piece(self._letters[self._peers[link]][0], number).view_as(product).copy_(product)

    def read(self, s: FlatVector, weights: MixingWeights) -> None:
        """See `CompressedGossiper`."""
        if self.phase == 0:
            self.add_exact(s, weights)
        targets = self.targets(s)
        with full_precision(s.raw.device):
            for side, links in self._groups():
                for number, (batch, basis) in enumerate(zip(self._batches, self._bases[side], strict=True)):
                    steps = torch.stack([self._step_of(link, number, side, batch, weights) for link in links])
                    left, right = (basis, steps) if side else (steps, basis)
                    batch.of(targets).baddbmm_(side_by_side(left), side_by_side(right).mT)
        self.apply_targets(s, targets)
        for peer in self._letters:
            self._iterations[peer] += 1

    def _step_of(self, link: int, number: int, side: int, batch: Batch, weights: MixingWeights) -> Tensor:
        """Take in the new factor of a link; returns what this end multiplies it by, [count, rows or columns, rank]."""
        peer = self._peers[link]
        factor = self._factors[number]["right" if side else "left"][link]
        mine, theirs = (self._piece(letter, number).view_as(factor) for letter in self._letters[peer])
        is_low = self.transport.rank < peer
        torch.sub(*((theirs, mine) if is_low else (mine, theirs)), out=factor)  # [Note: both ends are equal]
        return factor * ((1.0 if is_low else -1.0) * self.step_size * weights.inp[peer])

    def _groups(self) -> Iterator[tuple[int, list[int]]]:
        """The links of this round, by the side of the factor that their iteration computes."""
        for side in (0, 1):
            links = [self._peers.index(peer) for peer in self._letters if self._iterations[peer] % 2 == side]
            if links:
                yield side, links

    def _orthonormal(self, side: int, links: list[int]) -> list[Tensor]:
        """For each batch, an orthonormal basis of the columns of these links' factors on that side."""
        bases = []
        for number, batch in enumerate(self._batches):
            factor = self._factors[number]["right" if side else "left"]
            fallback = self._fallbacks[number][side]
            if self.warm_start:
                columns = factor[links].double()
            else:
                iterations = [1 + iteration for iteration in self._iterations.values()]
                columns = self._draw(number, side, batch, iterations)[links].to(factor.device)
            bases.append(orthonormalize(columns, fallback[links]).to(factor.dtype))
        return bases

    def letters_of(self, peer: int) -> tuple[Envelope, Envelope]:
        """See `CompressedGossiper`; kept for the next phase of the same kind."""
        side, has_exact = self._iterations[peer] % 2, self.phase == 0
        if (peer, side, has_exact) not in self._boxes:
            sizes = [(f["left"].dtype, prod(b.factor_shape(side))) for b, f in zip(self._batches, self._factors)]
            sizes = [*(self.exact_sizes if has_exact else []), *sizes]
            self._boxes[peer, side, has_exact] = Envelope(sizes, self._device), Envelope(sizes, self._device)
        return self._boxes[peer, side, has_exact]

    def _piece(self, envelope: Envelope, number: int) -> Tensor:
        """What an envelope holds of batch `number`."""
        return envelope.pieces[len(envelope.pieces) - len(self._batches) + number]

    def number_of(self, peer: int) -> int:
        """See `CompressedGossiper`."""
        return self._iterations[peer]

    def checksum_of(self, peer: int) -> int:
        """See `CompressedGossiper`: of both factors, in the iterations that are checked."""
        if self.check_every == 0 or self._iterations[peer] % self.check_every:
            return 0
        link = self._peers.index(peer)
        total = torch.zeros((), dtype=torch.int64, device=self._device)
        for factors in self._factors:
            for factor in factors.values():
                words = factor[link].reshape(-1).view(torch.int32).long()
                total = total * 31 + (words * torch.arange(1, 2 * words.numel(), 2, device=words.device)).sum()
        return int(total) % (1 << 32)

    def __repr__(self) -> str:
        return f"PowerGossip({self._options})"
