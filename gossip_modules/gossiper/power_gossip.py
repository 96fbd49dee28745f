"""PowerGossip: each link averages a low-rank estimate of the difference between the models at its two ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from math import prod
from typing import Any

import torch
from torch import Tensor

from ..compression.compressor import checked_seed
from ..flat.layout import TensorSpec
from ..flat.vector import FlatVector
from ..mixing_manager.base import MixingManager, MixingWeights
from ..mixing_manager.step_size import best_step_size
from .compressed import CompressedGossiper, copy_state
from .link_factors import LinkFactors
from .matrix_batches import Batch, batches_of, full_precision, side_by_side
from .message import MessageBuffer


class PowerGossip(CompressedGossiper):
    """PowerGossip: power iteration over each link finds a rank-r estimate of the difference of its two models.

    One iteration on the link (i, j), i < j, for each matrix X of the model; Q is random at first, P and Q are kept:

        even iterations                                    odd iterations
        Q̂ = orthonormalize(Q)                              P̂ = orthonormalize(P)
        i sends X_i Q̂, j sends X_j Q̂                       i sends X_i^T P̂, j sends X_j^T P̂      write_messages
        P = X_j Q̂ - X_i Q̂                                  Q = X_j^T P̂ - X_i^T P̂                 apply_messages
        D̂ = P Q̂^T                                          D̂ = P̂ Q^T
        X_i = X_i + step_size W_ij D̂                       (the same)
        X_j = X_j - step_size W_ij D̂

    Neither end knows X_j - X_i, but its product with a matrix is the difference of two products that each end can
    compute. The factors are kept from round to round (warm start), so the estimate improves over the rounds. There is
    nothing to tune: the code is linear, so it needs no error feedback, no copy of a model, and no smaller step size
    than plain gossip. One end subtracts the D̂ that the other adds, so the mean is kept.

    A matrix is a parameter of two or more dimensions: dim 0 by all others. All matrices of a link are sent in one
    message per iteration. Parameters of one dimension are sent exactly, with the first iteration of a round, or with
    `compress_vectors` as one nearly square matrix; a warning tells where they are more than half of the model. The
    graph may change as long as it is undirected, since each link counts its own iterations. The state of a link takes a
    few times rank * (rows + columns) elements per matrix; it is in `link_factors.py`.

    [Note: both ends are equal] P and Q are differences of the same two messages, so both ends compute equal bits on any
    hardware. The orthonormal factors are computed from them in float64 and never stored. Matrices are multiplied in
    full float32, whatever autocast and TF32 say, since the differences are small compared with the matrices. Every
    `check_every` iterations of a link its messages carry a checksum of both factors.

    Vogels, Karimireddy, Jaggi, "Practical Low-Rank Communication Compression in Decentralized Deep Learning", NeurIPS
    2020, arXiv 2008.01425, Algorithms 1 and 2.

    Args:
        rank: the rank r of the estimate; matrices with a shorter side have as many columns as that side.
        num_iterations: the number of power iterations in a round, each with one message per link.
        warm_start: whether an iteration starts from the last factors; False draws new ones, the same at both ends.
        step_size: the consensus step size. None takes 2 / (smallest positive + largest eigenvalue of I - W), the best
            one of plain gossip, on a static graph, and 1 on others. Parameters that are sent exactly use it too.
        compress_vectors: whether parameters of one dimension are compressed as well; at high compression they are most
            of the bytes.
        check_every: the number of iterations of a link from one checksum to the next; 0 never sends one.
        seed: the seed of the first factors; the same on all ranks.

    Raises:
        ValueError: an argument is out of range, the graph is directed or the weights are not symmetric.
        RuntimeError: in a round: the two ends of a link are out of step, or their factors differ.

    Example:
        >>> ring = RingGraph(8, peers_per_itr=2)
        >>> model = GossipDataParallel(model, graph=ring, push_sum=False, gossiper=PowerGossip())
    """

    is_elastic = True
    has_links = True
    remedy_for_exact = "pass compress_vectors=True (--compress-vectors), or wire_dtype=torch.bfloat16 and no gossiper"

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
        self._has_own_step_size = step_size is not None

    # An iteration. Side 0 computes the left factor P, side 1 the right factor Q; links may be on different sides.

    def write_messages(self, s: FlatVector) -> None:
        """The message to j <- X_i Q̂, or X_i^T P̂, for all matrices."""
        if self.phase == 0:
            for outgoing, _ in self._buffers.values():
                self.copy_exact(s, outgoing)
        values = self.values_to_compress(s)
        self._bases: dict[int, list[Tensor]] = {}  # Q̂ of the links on side 0, P̂ of those on side 1, for each batch
        with full_precision(s.raw.device):
            for side, links in self._factors.by_side(self._buffers):
                self._bases[side] = self._factors.orthonormalized(1 - side, links)
                for number, (batch, basis) in enumerate(zip(self._batches, self._bases[side], strict=True)):
                    X = batch.of(values)
                    products = (X.mT if side else X) @ side_by_side(basis)
                    for link, product in zip(links, products.split(batch.rank, dim=-1), strict=True):
                        outgoing, _ = self._buffers[self._peers[link]]
                        self._product(outgoing, number).view_as(product).copy_(product)

    def apply_messages(self, s: FlatVector, weights: MixingWeights) -> None:
        """X_i <- X_i +- step_size sum_j W_ij D̂ with D̂ = P Q̂^T, or P̂ Q^T, of the link (i, j); + for i < j."""
        if self.phase == 0:
            self.add_exact(s, weights)
        targets = self.targets(s)
        with full_precision(s.raw.device):
            for side, links in self._factors.by_side(self._buffers):
                for number, (batch, basis) in enumerate(zip(self._batches, self._bases[side], strict=True)):
                    steps = torch.stack([self._scaled_factor(link, number, side, weights) for link in links])
                    left, right = (basis, steps) if side else (steps, basis)
                    batch.of(targets).baddbmm_(side_by_side(left), side_by_side(right).mT)
        self.add_targets(s, targets)
        for peer in self._buffers:
            self._factors.iterations[peer] += 1

    def _scaled_factor(self, link: int, number: int, side: int, weights: MixingWeights) -> Tensor:
        """P <- X_j Q̂ - X_i Q̂, or Q <- X_j^T P̂ - X_i^T P̂, with i < j; returns it times +- step_size W_ij."""
        peer = self._peers[link]
        factor = self._factors.of(number, side, link)
        mine, theirs = (self._product(message, number).view_as(factor) for message in self._buffers[peer])
        is_low = self.transport.rank < peer
        torch.sub(*((theirs, mine) if is_low else (mine, theirs)), out=factor)  # see [Note: both ends are equal]
        return factor * ((1.0 if is_low else -1.0) * self.step_size * weights.inp[peer])

    def _product(self, message: MessageBuffer, number: int) -> Tensor:
        """The product that a message holds for the batch of that number."""
        return message.fields[len(message.fields) - len(self._batches) + number]

    # What `CompressedGossiper` asks for.

    def bind(self, mixing: MixingManager, transport: Any) -> None:
        """See `Mixer`."""
        super().bind(mixing, transport)
        self._peers = sorted(mixing.graph.phone_book(transport.rank))
        if not self._has_own_step_size:
            self.step_size = best_step_size(mixing) if mixing.period == 1 else 1.0

    def is_compressed(self, spec: TensorSpec) -> bool:
        """See `CompressedGossiper`."""
        return spec.is_matrix or (self.compress_vectors and not spec.is_buffer and spec.numel > 1)

    @property
    def exact_step_size(self) -> float:
        """See `CompressedGossiper`."""
        return self.step_size

    def allocate_state(self, values: Sequence[Tensor]) -> None:
        """See `CompressedGossiper`."""
        self._batches: list[Batch] = [
            batch for k, run in enumerate(self._compressed_runs) for batch in batches_of(k, run.specs, rank=self.rank)
        ]
        self._factors = LinkFactors(
            self.transport.rank,
            self._peers,
            self._batches,
            [values[batch.run] for batch in self._batches],
            seed=self.seed,
            warm_start=self.warm_start,
        )
        self._message_buffers: dict[tuple[int, int, bool], tuple[MessageBuffer, MessageBuffer]] = {}

    def state(self) -> dict[str, Any]:
        """See `CompressedGossiper`."""
        return self._factors.state()

    def load_state(self, state: Mapping[str, Any]) -> None:
        """See `CompressedGossiper`."""
        if list(state["links"]) != self._peers:
            raise ValueError(
                f"{self}: got state of links to {state['links']}, expected {self._peers}; load the checkpoint of this "
                "rank, made on the same graph"
            )
        copy_state(self, self._factors.tensors, state["factors"])
        self._factors.iterations = dict(zip(self._peers, state["iterations"], strict=True))

    def buffers_for(self, peer: int) -> tuple[MessageBuffer, MessageBuffer]:
        """See `CompressedGossiper`; kept for the next phase with the same contents."""
        side, has_exact = self._factors.iterations[peer] % 2, self.phase == 0
        key = peer, side, has_exact
        if key not in self._message_buffers:
            pairs = zip(self._batches, self._factors.tensors, strict=True)
            sizes = [(state["left"].dtype, prod(batch.factor_shape(side))) for batch, state in pairs]
            sizes = [*(self.exact_sizes if has_exact else []), *sizes]
            self._message_buffers[key] = MessageBuffer(sizes, self._device), MessageBuffer(sizes, self._device)
        return self._message_buffers[key]

    def message_number(self, peer: int) -> int:
        """See `LinkedGossiper`."""
        return self._factors.iterations[peer]

    def link_age(self, peer: int) -> int:
        """See `LinkedGossiper`."""
        return self._factors.iterations[peer]

    def forget_link(self, peer: int) -> None:
        """See `LinkedGossiper`: the factors are drawn anew."""
        self._factors.forget(peer)

    def _leave_out(self, lost: Set[int]) -> None:
        """See `LinkedGossiper`: bases are those of the links that are left."""
        for side, links in self._factors.by_side(self._buffers):
            left = [k for k, link in enumerate(links) if self._peers[link] not in lost]
            self._bases[side] = [basis[left] for basis in self._bases[side]]
        super()._leave_out(lost)

    def renumber_links(self, ranks: Mapping[int, int]) -> None:
        """See `LinkedGossiper`."""
        self._factors = self._factors.renumbered(self.transport.rank, self._peers, ranks)
        self._message_buffers = {}

    def state_checksum(self, peer: int) -> int:
        """See `LinkedGossiper`: a checksum of both factors, in the iterations that are checked."""
        if self.check_every == 0 or self._factors.iterations[peer] % self.check_every:
            return 0
        return self._factors.checksum(peer)

    def __repr__(self) -> str:
        return f"PowerGossip({self._options})"
