"""PushPull: plain gossip averaging, x_i <- sum_j W_ij x_j, the algorithm of D-PSGD."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..compression.compressor import Cast
from ..flat.layout import CHUNK_BYTES, check_chunk_bytes
from ..flat.renamed import Renamed, renamed_argument
from ..flat.vector import FlatVector
from ..mixing_manager.base import MixingManager, MixingWeights
from ..old_calls import GOSSIPER_ARGUMENTS, GOSSIPER_REMEDY, refused_arguments
from .gossiper import Gossiper, Messages
from .pipelined import chunkwise


class PushPull(Gossiper):
    """x_i <- sum_j W_ij x_j: plain gossip averaging, as in D-PSGD.

    Rows of W must sum to one, so that agreement is kept; where columns do too (doubly stochastic W), so is the mean.

    [Note: narrow wire] With `wire_dtype` the numbers that travel are rounded, s' = round(s), and the law is applied to
    what was sent: x <- x + (W - I) s'. Every rank gives away exactly what its peers add, so the mean is kept to the
    rounding of x, not of the wire, and no rank drifts. Ranks agree up to the resolution of the wire.

    A message longer than `chunk_bytes` goes in chunks ([Note: chunks]), of which each is mixed while the next one is on
    its way, with the bits of the whole. A narrow wire sends whole messages, and a GPU's own wire too.

    Args:
        wire_dtype: torch.bfloat16 or torch.float16, for segments that are wider; None sends what is there. Costs one
            narrow copy of the model. float16 saturates at 65,504.
        chunk_bytes: of a chunk at most, a multiple of 256; the same on all ranks.

    Lian et al., "Can Decentralized Algorithms Outperform Centralized Algorithms?", NeurIPS 2017, arXiv 1705.09056,
    Algorithm 1.

    Example (under `torchrun --nproc-per-node 4`, see README):
        >>> gossiper = PushPull()
        >>> gossiper.bind(UniformMixing(RingGraph(4, peers_per_itr=2)), connect())
        >>> mean = gossiper.average(torch.randn(10), num_rounds=50)
    """

    is_whole = True

    is_elastic = True
    piece_bytes = Renamed("chunk_bytes")

    @refused_arguments(GOSSIPER_ARGUMENTS, GOSSIPER_REMEDY)
    @renamed_argument("piece_bytes", "chunk_bytes")
    def __init__(self, *, wire_dtype: torch.dtype | None = None, chunk_bytes: int = CHUNK_BYTES) -> None:
        if wire_dtype not in (None, torch.bfloat16, torch.float16):
            raise ValueError(
                f"got wire_dtype={wire_dtype}, expected None, torch.bfloat16 or torch.float16; None sends what is there"
            )
        check_chunk_bytes(chunk_bytes)
        self.wire_dtype = wire_dtype
        self.chunk_bytes = chunk_bytes
        self._inbox: list[FlatVector] = []
        self._sent: FlatVector | None = None

    def check(self, mixing: MixingManager) -> None:
        """See `Mixer`."""
        if not mixing.is_row_stochastic:
            raise ValueError(
                f"got {mixing} whose rows do not sum to one, expected row-stochastic weights for push-pull gossip; "
                "use push_sum=True, or MetropolisHastingsMixing on an undirected graph"
            )

    @property
    def cut_bytes(self) -> int:
        """See `Gossiper`."""
        return self.chunk_bytes if self.wire_dtype is None else 0

    @chunkwise
    def encode(self, s: FlatVector, out_peers: Sequence[int], in_peers: Sequence[int]) -> tuple[Messages, Messages]:
        """See `Gossiper`. The message is the vector itself, so nothing is copied; or a narrow copy of it."""
        sent = s if self.wire_dtype is None else self._narrow(s)
        if self._inbox and (self._inbox[0].layout != sent.layout or self._inbox[0].raw.device != sent.raw.device):
            self._inbox.clear()
        while len(self._inbox) < len(in_peers):
            self._inbox.append(sent.like())
        self.received = self._inbox[: len(in_peers)]
        message, *inbox = [
            (v.raw, v.push_sum_weight) if self._sends_weight else (v.raw,) for v in (sent, *self.received)
        ]
        return dict.fromkeys(out_peers, message), dict(zip(in_peers, inbox, strict=True))

    @chunkwise
    def decode(self, s: FlatVector, weights: MixingWeights) -> None:
        """x_i <- W_ii x_i + sum_j W_ij x_j; buffers may have weights of their own. See also [Note: narrow wire]."""
        has_one_row = self._buffer_weights == weights
        if has_one_row and self._sent is None:
            s.combine_(weights.own, self.received, list(weights.inp.values()))
            return
        if has_one_row:
            self._mix(s, self._sent, self.received, weights)
            return
        for is_buffer, row in ((False, weights), (True, self._buffer_weights)):
            sent = None if self._sent is None else self._sent.where(is_buffer=is_buffer)
            self._mix(s.where(is_buffer=is_buffer), sent, [m.where(is_buffer=is_buffer) for m in self.received], row)

    @chunkwise
    def decode_difference(self, s: FlatVector, weights: MixingWeights) -> float:
        """See `Gossiper`. Costs one pass more where buffers have weights of their own, since no factor is common."""
        if self._sent is not None:
            return super().decode_difference(s, weights)
        if self._buffer_weights == weights:
            return s.difference_(weights.own - 1, self.received, list(weights.inp.values()))
        for is_buffer, row in ((False, weights), (True, self._buffer_weights)):
            half, *halves = (v.where(is_buffer=is_buffer) for v in (s, *self.received))
            half.combine_segments_(row.own - 1, halves, list(row.inp.values()))
        s.push_sum_weight.zero_()
        return 1.0

    def _mix(
        self, s: FlatVector, sent: FlatVector | None, messages: Sequence[FlatVector], weights: MixingWeights
    ) -> None:
        """s <- s + (W - I) s, with what was sent in the place of s if it was rounded."""
        coefficients = list(weights.inp.values())
        if sent is None:
            s.combine_(weights.own, messages, coefficients)
            return
        for message, weight in ((sent, weights.own - 1), *zip(messages, coefficients, strict=True)):
            s.add_segments_(message, alpha=weight)
            if self.is_weighted:
                s.push_sum_weight.add_(message.push_sum_weight, alpha=weight)

    def _narrow(self, s: FlatVector) -> FlatVector:
        """A copy of s in the dtype of the wire; numbers beyond its range become its largest."""
        assert self.wire_dtype is not None
        cast = Cast(self.wire_dtype)
        layout = s.layout.with_dtypes(lambda dtype: cast.dtype if dtype.itemsize > 2 else dtype)
        if self._sent is None or self._sent.layout != layout or self._sent.raw.device != s.raw.device:
            self._sent = FlatVector.zeros(layout, s.raw.device)
        for message, x in zip(self._sent.segments, s.segments, strict=True):
            if x.element_size() > 2:
                cast.compress(x, message.view(torch.uint8))
            else:
                message.copy_(x)
        self._sent.push_sum_weight.copy_(s.push_sum_weight)
        return self._sent

    def __repr__(self) -> str:
        wire = [] if self.wire_dtype is None else [f"wire_dtype={self.wire_dtype}"]
        chunks = [] if self.chunk_bytes == CHUNK_BYTES else [f"chunk_bytes={self.chunk_bytes}"]
        return f"{type(self).__name__}({', '.join(wire + chunks)})"
