"""PushPull and PushSum: plain gossip averaging, and its form for directed graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from ..compression.compressor import Cast
from ..flat.layout import PIECE_BYTES, check_piece_bytes
from ..flat.vector import FlatVector
from ..mixing_manager.base import MixingManager, MixingWeights
from .gossiper import Gossiper, Messages


class PushPull(Gossiper):
    """x_i <- sum_j W_ij x_j: plain gossip averaging, as in D-PSGD.

    Rows of W must sum to one, so that agreement is kept; where columns do too (doubly stochastic W), so is the mean.

    [Note: narrow wire] With `wire_dtype` the numbers that travel are rounded, s' = round(s), and the law is applied to
    what was sent: x <- x + (W - I) s'. Every rank gives away exactly what its peers add, so the mean is kept to the
    rounding of x, not of the wire, and no rank drifts. Ranks agree up to the resolution of the wire.

    A message longer than `piece_bytes` goes in pieces ([Note: pieces]), of which each is mixed while the next one is on
    its way, with the bits of the whole. A narrow wire sends whole messages, and a GPU's own wire too.

    Args:
        wire_dtype: torch.bfloat16 or torch.float16, for segments that are wider; None sends what is there. Costs one
            narrow copy of the model. float16 saturates at 65,504.
        piece_bytes: of a piece at most, a multiple of 256; the same on all ranks.

    Lian et al., "Can Decentralized Algorithms Outperform Centralized Algorithms?", NeurIPS 2017, arXiv 1705.09056,
    Algorithm 1.

    Example (under `torchrun --nproc-per-node 4`, see README):
        >>> gossiper = PushPull()
        >>> gossiper.bind(UniformMixing(RingGraph(4, peers_per_itr=2)), connect())
        >>> mean = gossiper.average(torch.randn(10), num_rounds=50)
    """

    is_piecewise = True

    def __init__(self, *, wire_dtype: torch.dtype | None = None, piece_bytes: int = PIECE_BYTES) -> None:
        if wire_dtype not in (None, torch.bfloat16, torch.float16):
            raise ValueError(
                f"got wire_dtype={wire_dtype}, expected None, torch.bfloat16 or torch.float16; None sends what is there"
            )
        check_piece_bytes(piece_bytes)
        self.wire_dtype = wire_dtype
        self.piece_bytes = piece_bytes
        self._inbox: list[FlatVector] = []
        self._sent: FlatVector | None = None

    def check(self, mixing: MixingManager) -> None:
        """See `Mixer`."""
        if not mixing.is_row_stochastic:
            raise ValueError(
                f"got {mixing} whose rows do not sum to one, expected row-stochastic weights for push-pull gossip; "
                "use push_sum=True, or MetropolisHastingsMixing on an undirected graph"
            )

    def encode(self, s: FlatVector, out_peers: Sequence[int], in_peers: Sequence[int]) -> tuple[Messages, Messages]:
        """See `Gossiper`. The message is the vector itself, so nothing is copied; or a narrow copy of it."""
        sent = s if self.wire_dtype is None else self._narrow(s)
        if self._inbox and (self._inbox[0].layout != sent.layout or self._inbox[0].raw.device != sent.raw.device):
            self._inbox.clear()
        while len(self._inbox) < len(in_peers):
            self._inbox.append(sent.like())
        recvs = {j: self._tensors(v) for j, v in zip(in_peers, self._inbox, strict=False)}
        return dict.fromkeys(out_peers, self._tensors(sent)), recvs

    def decode(self, s: FlatVector, weights: MixingWeights) -> None:
        """See `Gossiper`, and [Note: narrow wire]."""
        messages = self._messages(weights)
        if self._buffer_weights == weights:
            self._mix(s, self._sent, messages, weights)
        else:
            for is_buffer, row in ((False, weights), (True, self._buffer_weights)):
                sent = None if self._sent is None else self._sent.where(is_buffer=is_buffer)
                self._mix(s.where(is_buffer=is_buffer), sent, [m.where(is_buffer=is_buffer) for m in messages], row)

    def decode_difference(self, s: FlatVector, weights: MixingWeights) -> float:
        """See `Gossiper`. Costs one pass more where buffers have weights of their own, since no factor is common."""
        if self._sent is not None:
            return super().decode_difference(s, weights)
        messages = self._messages(weights)
        if self._buffer_weights == weights:
            return s.difference_(weights.own - 1, messages, list(weights.inp.values()))
        for is_buffer, row in ((False, weights), (True, self._buffer_weights)):
            half, *halves = (v.where(is_buffer=is_buffer) for v in (s, *messages))
            half.combine_segments_(row.own - 1, halves, list(row.inp.values()))
        s.weight.zero_()
        return 1.0

    # In pieces.

    def pieces(self, s: FlatVector) -> Sequence[FlatVector]:
        """See `Mixer`. A function of the layout and of what all ranks agree on, so all cut alike."""
        if self.is_piecewise and self.wire_dtype is None and self.transport.device.type == "cpu":
            return s.pieces(self.piece_bytes)
        return (s,)

    def start_filling(self, s: FlatVector, t: int, fill: Callable[[int], None]) -> None:
        """See `Mixer`."""
        if len(self.pieces(s)) == 1:
            super().start_filling(s, t, fill)
            return
        self._begin(t)
        sends, recvs = self.encode(s, self._out_peers, tuple(self._weights.inp))
        if not (sends or recvs):  # nothing travels that could be filled on its way
            for k in range(len(self.pieces(s))):
                fill(k)
        self._pending = self.transport.exchange(sends, recvs, tag=t, fill=fill)

    def finish(self, s: FlatVector) -> None:
        """See `Mixer`. If the round breaks off s is as before, to rounding: pieces that were mixed are unmixed."""
        if not self._mixes_pieces(s) or self._weights.own == 0:  # what keeps nothing of itself cannot be unmixed
            super().finish(s)
            return
        own, messages, weights = self._weights.own, self._messages(self._weights), list(self._weights.inp.values())
        mixed: list[tuple[FlatVector, list[FlatVector]]] = []
        try:
            for piece, parts in self._arriving(s, messages):
                piece.combine_segments_(own, parts, weights)
                mixed.append((piece, parts))
        except BaseException:  # also Control-C: who catches it must not find s torn, or pieces without their weight
            for piece, parts in mixed:
                piece.combine_segments_(1 / own, parts, [-weight / own for weight in weights])
            raise
        s.combine_weight_(own, messages, weights)

    def difference(self, s: FlatVector) -> float:
        """See `Mixer`."""
        if not self._mixes_pieces(s):
            return super().difference(s)
        own, messages, weights = self._weights.own, self._messages(self._weights), list(self._weights.inp.values())
        alpha = s.factor(weights)
        for piece, parts in self._arriving(s, messages):
            piece.difference_segments_(own - 1, parts, weights, alpha=alpha)
        s.difference_weight_(own - 1, messages, weights, alpha=alpha)
        return 1.0 if alpha is None else alpha

    def _mixes_pieces(self, s: FlatVector) -> bool:
        """Whether pieces are mixed as they arrive. Buffers with weights of their own wait for the whole."""
        if self._pending is None:  # an error, which is raised where whole messages are waited for
            return False
        return len(self.pieces(s)) > 1 and self._buffer_weights == self._weights

    def _arriving(self, s: FlatVector, messages: Sequence[FlatVector]) -> Iterator[tuple[FlatVector, list[FlatVector]]]:
        """Each piece of s with those of the messages, when they are there; the weights are, at the end."""
        pieces, parts = self.pieces(s), [self.pieces(message) for message in messages]
        pending = self._take_pending()
        is_alone = not (self._out_peers or messages)  # then nothing is sent that could arrive
        for k in range(len(pieces)) if is_alone else pending.arrivals():
            if k < len(pieces):
                yield pieces[k], [part[k] for part in parts]

    # Whole.

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
                s.weight.add_(message.weight, alpha=weight)

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
        self._sent.weight.copy_(s.weight)
        return self._sent

    def _messages(self, weights: MixingWeights) -> list[FlatVector]:
        return self._inbox[: len(weights.inp)]

    def _tensors(self, v: FlatVector) -> Sequence[Tensor]:
        return tuple(piece.raw for piece in self.pieces(v))

    def __repr__(self) -> str:
        wire = [] if self.wire_dtype is None else [f"wire_dtype={self.wire_dtype}"]
        pieces = [] if self.piece_bytes == PIECE_BYTES else [f"piece_bytes={self.piece_bytes}"]
        return f"{type(self).__name__}({', '.join(wire + pieces)})"


class PushSum(PushPull):
    """Push-sum: x_i <- sum_j P_ij x_j and w_i <- sum_j P_ij w_j; the estimate of the mean is x_i / w_i.

    Columns of P must sum to one, so that the total of x and of w is kept, on any directed graph. Where P(t) is doubly
    stochastic w stays one: then it does not travel and nothing is ever divided by it.

    Assran et al., "Stochastic Gradient Push for Distributed Deep Learning", ICML 2019, arXiv 1811.10792,
    Algorithm 1; Kempe et al., "Gossip-Based Computation of Aggregate Information", FOCS 2003.

    Example (under `torchrun --nproc-per-node 4`, see README):
        >>> gossiper = PushSum()
        >>> gossiper.bind(UniformMixing(NPeerDynamicDirectedExponentialGraph(4)), connect())
        >>> mean = gossiper.average(torch.randn(10), num_rounds=2)  # exact: 4 is a power of two
    """

    def check(self, mixing: MixingManager) -> None:
        """See `Mixer`."""
        if not mixing.is_column_stochastic:
            raise ValueError(
                f"got {mixing} whose columns do not sum to one, expected column-stochastic weights for push-sum; "
                "use push_sum=False for row-stochastic weights"
            )

    @property
    def is_weighted(self) -> bool:
        """See `Mixer`: only where W(t) is not doubly stochastic."""
        return not self.mixing.is_doubly_stochastic

    def _tensors(self, v: FlatVector) -> Sequence[Tensor]:
        tensors = super()._tensors(v)
        return (*tensors, v.weight) if self.is_weighted else tensors
