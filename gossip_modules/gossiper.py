"""What is said in a round: PushPull and PushSum gossip, and the exact global average."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor

from .compressor import Cast
from .flat_vector import FlatVector
from .mixing_manager import MixingManager, MixingWeights
from .transport import Pending, Transport

_T = TypeVar("_T", Tensor, FlatVector)
Messages: TypeAlias = Mapping[int, Sequence[Tensor]]  # by rank


class Mixer(ABC):
    """One way of mixing vectors over the ranks: s <- W(t) s, in two halves so that work fits between them.

    `start(s, t)` posts round t. Then either `finish(s)` or `difference(s)` waits and decodes. `s` belongs to the
    mixer from start to then: it must be neither changed nor freed.
    """

    needs_symmetric_weights: bool = False  # so the wrapper's default is an undirected ring

    def bind(self, mixing: MixingManager, transport: Transport) -> None:
        """Say whom to talk to. Called once, by the wrapper or by the user.

        Raises:
            ValueError: `mixing` does not suit this algorithm.
        """
        self.check(mixing)
        if mixing.graph.world_size != transport.world_size:
            raise ValueError(
                f"got a graph of {mixing.graph.world_size} ranks, expected {transport.world_size}, the size of the "
                "process group; build the graph with that world size"
            )
        self.mixing = mixing
        self.transport = transport

    def check(self, mixing: MixingManager) -> None:
        """Raise ValueError when the algorithm is wrong with these weights."""

    @property
    def is_weighted(self) -> bool:
        """Whether the push-sum weight leaves one, so that the estimate is x / w."""
        return False

    @abstractmethod
    def start(self, s: FlatVector, t: int) -> None:
        """Post round t without waiting. s: the vector that is mixed, with its push-sum weight."""

    @abstractmethod
    def finish(self, s: FlatVector) -> None:
        """Wait, then s <- W(t) s. In place; the fast way when nothing changed meanwhile.

        Raises:
            TimeoutError, ConnectionError: naming the peer and the round.
        """

    def difference(self, s: FlatVector) -> float:
        """Wait, then s <- c with alpha * c = (W(t) - I) s; returns alpha. In place; unless overridden by way of a copy.

        This is the correction of the law x <- x + (W - I) s, for x that has moved on since s was taken. Raises as
        `finish()`.
        """
        before = s.clone()
        self.finish(s)
        s.add_(before, alpha=-1.0)
        return 1.0

    def mix(self, x: _T, t: int) -> _T:
        """x <- W(t) x: one whole round on any contiguous tensor, or on a vector that keeps its push-sum weight."""
        s = x if isinstance(x, FlatVector) else FlatVector.over(x)
        self.start(s, t)
        self.finish(s)
        return x

    def average(self, x: Tensor, *, num_rounds: int) -> Tensor:
        """Distributed averaging: the estimate of mean_i x_i after rounds 0, 1, ..., num_rounds - 1.

        Args:
            x: this rank's value, any shape, floating point or complex; not changed.
            num_rounds: how many rounds; the error falls with `mixing.spectral_gap()`.

        Returns:
            A tensor like x, de-biased by the push-sum weight.
        """
        result = x.detach().clone(memory_format=torch.contiguous_format)
        s = FlatVector.over(result)
        for t in range(num_rounds):
            self.mix(s, t)
        s.divide_by_weight_()
        return result

    def state_dict(self) -> dict[str, Any]:
        """What the algorithm remembers from round to round; tensors and plain values only."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict()` gave."""
        if state:
            raise ValueError(f"got state {sorted(state)} of another algorithm, expected none for {self}")

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


class Gossiper(Mixer):
    """A mixer that talks to its peers of round t only; an algorithm writes `encode` and `decode`.

    A round is one exchange, or `num_phases` of them, each encoded when the one before it is decoded.

    Raises (in `start`, `finish` and `difference`):
        TimeoutError, ConnectionError: naming the peer and the round.
    """

    num_phases: int = 1
    phase: int = 0  # of the round that runs, for `encode` and `decode`
    _pending: Pending | None = None

    @abstractmethod
    def encode(self, s: FlatVector, out_peers: Sequence[int], in_peers: Sequence[int]) -> tuple[Messages, Messages]:
        """The tensors that each out-peer gets, and the tensors that the message of each in-peer fills."""

    @abstractmethod
    def decode(self, s: FlatVector, weights: MixingWeights) -> None:
        """s <- s + (W - I) s, with the messages in the tensors that `encode` gave."""

    def decode_difference(self, s: FlatVector, weights: MixingWeights) -> float:
        """s <- c with alpha * c = (W - I) s; returns alpha. Override it when `decode` reads s."""
        s.raw.zero_()
        s.weight.zero_()
        self.decode(s, weights)
        return 1.0

    def start(self, s: FlatVector, t: int) -> None:
        """See `Mixer`."""
        assert self._pending is None, "a round is in flight: finish() it before the next start()"
        rank = self.transport.rank
        self._t, self._weights = t, self.mixing.weights(rank, t)
        self._buffer_weights = self.mixing.buffer_weights(rank, t)
        self._out_peers = self.mixing.graph.out_peers(rank, t)
        self._post(s, phase=0)

    def finish(self, s: FlatVector) -> None:
        """See `Mixer`."""
        self._wait()
        self.decode(s, self._weights)
        for phase in range(1, self.num_phases):
            self._post(s, phase)
            self._wait()
            self.decode(s, self._weights)

    def difference(self, s: FlatVector) -> float:
        """See `Mixer`. Costs a copy of s where a round has several phases."""
        if self.num_phases == 1:
            self._wait()
            return self.decode_difference(s, self._weights)
        return super().difference(s)

    def _post(self, s: FlatVector, phase: int) -> None:
        self.phase = phase
        sends, recvs = self.encode(s, self._out_peers, tuple(self._weights.inp))
        self._pending = self.transport.exchange(sends, recvs, tag=self._t)

    def _wait(self) -> None:
        assert self._pending is not None, "no round is in flight: start() comes first"
        pending, self._pending = self._pending, None
        pending.wait()


class PushPull(Gossiper):
    """x_i <- sum_j W_ij x_j: plain gossip averaging, as in D-PSGD.

    Rows of W must sum to one, so that agreement is kept; where columns do too (doubly stochastic W), so is the mean.

    [Note: narrow wire] With `wire_dtype` the numbers that travel are rounded, s' = round(s), and the law is applied to
    what was sent: x <- x + (W - I) s'. Every rank gives away exactly what its peers add, so the mean is kept to the
    rounding of x, not of the wire, and no rank drifts. Ranks agree up to the resolution of the wire.

    Args:
        wire_dtype: torch.bfloat16 or torch.float16, for segments that are wider; None sends what is there. Costs one
            narrow copy of the model. float16 saturates at 65,504.

    Lian et al., "Can Decentralized Algorithms Outperform Centralized Algorithms?", NeurIPS 2017, arXiv 1705.09056,
    Algorithm 1.

    Example (under `torchrun --nproc-per-node 4`, see README):
        >>> gossiper = PushPull()
        >>> gossiper.bind(UniformMixing(RingGraph(4, peers_per_itr=2)), connect())
        >>> mean = gossiper.average(torch.randn(10), num_rounds=50)
    """

    def __init__(self, *, wire_dtype: torch.dtype | None = None) -> None:
        if wire_dtype not in (None, torch.bfloat16, torch.float16):
            raise ValueError(
                f"got wire_dtype={wire_dtype}, expected None, torch.bfloat16 or torch.float16; None sends what is there"
            )
        self.wire_dtype = wire_dtype
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
        recvs = {j: self._pieces(v) for j, v in zip(in_peers, self._inbox, strict=False)}
        return dict.fromkeys(out_peers, self._pieces(sent)), recvs

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
        """See `Gossiper`. Costs a copy of s where buffers have weights of their own."""
        if self._sent is not None:
            return super().decode_difference(s, weights)
        if self._buffer_weights == weights:
            return s.difference_(weights.own - 1, self._messages(weights), list(weights.inp.values()))
        before = s.clone()
        self.decode(s, weights)
        s.add_(before, alpha=-1.0)
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

    def _pieces(self, v: FlatVector) -> Sequence[Tensor]:
        return (v.raw,)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({'' if self.wire_dtype is None else f'wire_dtype={self.wire_dtype}'})"


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

    def _pieces(self, v: FlatVector) -> Sequence[Tensor]:
        return (v.raw, v.weight) if self.is_weighted else (v.raw,)


class GlobalAverage(Mixer):
    """x_i <- mean_j x_j exactly, by all-reduce: W = J. The weight becomes one, since weights sum to the world size."""

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self._round = 0

    def start(self, s: FlatVector, t: int) -> None:
        """See `Mixer`. The all-reduce itself blocks, in `finish` or `difference`."""
        self._round = t

    def finish(self, s: FlatVector) -> None:
        """See `Mixer`."""
        for x in s.segments:
            # A sum of many narrow numbers loses digits, so it is taken in float32.
            total = x.float() if x.element_size() < 4 else x
            self.transport.all_reduce(total, what=f"global average in round {self._round}")
            x.copy_(total.div_(self.transport.world_size))
        s.weight.fill_(1.0)
