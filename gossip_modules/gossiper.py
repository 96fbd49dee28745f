"""What is said in a round: PushPull and PushSum gossip, and the exact global average."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor

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

    @abstractmethod
    def difference(self, s: FlatVector) -> float:
        """Wait, then s <- c with alpha * c = (W(t) - I) s; returns alpha. In place.

        This is the correction of the law x <- x + (W - I) s, for x that has moved on since s was taken. Raises as
        `finish()`.
        """

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

    Raises (in `start`, `finish` and `difference`):
        TimeoutError, ConnectionError: naming the peer and the round.
    """

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
        rank, graph = self.transport.rank, self.mixing.graph
        self._weights = self.mixing.weights(rank, t)
        sends, recvs = self.encode(s, graph.out_peers(rank, t), tuple(self._weights.inp))
        self._pending = self.transport.exchange(sends, recvs, tag=t)

    def finish(self, s: FlatVector) -> None:
        """See `Mixer`."""
        self._wait()
        self.decode(s, self._weights)

    def difference(self, s: FlatVector) -> float:
        """See `Mixer`."""
        self._wait()
        return self.decode_difference(s, self._weights)

    def _wait(self) -> None:
        assert self._pending is not None, "no round is in flight: start() comes first"
        pending, self._pending = self._pending, None
        pending.wait()


class PushPull(Gossiper):
    """x_i <- sum_j W_ij x_j: plain gossip averaging, as in D-PSGD.

    Rows of W must sum to one, so that agreement is kept; where columns do too (doubly stochastic W), so is the mean.

    Lian et al., "Can Decentralized Algorithms Outperform Centralized Algorithms?", NeurIPS 2017, arXiv 1705.09056,
    Algorithm 1.

    Example (under `torchrun --nproc-per-node 4`, see README):
        >>> gossiper = PushPull()
        >>> gossiper.bind(UniformMixing(RingGraph(4, peers_per_itr=2)), connect())
        >>> mean = gossiper.average(torch.randn(10), num_rounds=50)
    """

    def __init__(self) -> None:
        self._inbox: list[FlatVector] = []

    def check(self, mixing: MixingManager) -> None:
        """See `Mixer`."""
        if not mixing.is_row_stochastic:
            raise ValueError(
                f"got {mixing} whose rows do not sum to one, expected row-stochastic weights for push-pull gossip; "
                "use push_sum=True, or MetropolisHastingsMixing on an undirected graph"
            )

    def encode(self, s: FlatVector, out_peers: Sequence[int], in_peers: Sequence[int]) -> tuple[Messages, Messages]:
        """See `Gossiper`. The message is the vector itself: nothing is copied."""
        if self._inbox and (self._inbox[0].layout != s.layout or self._inbox[0].raw.device != s.raw.device):
            self._inbox.clear()
        while len(self._inbox) < len(in_peers):
            self._inbox.append(s.like())
        recvs = {j: self._pieces(v) for j, v in zip(in_peers, self._inbox, strict=False)}
        return dict.fromkeys(out_peers, self._pieces(s)), recvs

    def decode(self, s: FlatVector, weights: MixingWeights) -> None:
        """See `Gossiper`."""
        s.combine_(weights.own, *self._messages(weights))

    def decode_difference(self, s: FlatVector, weights: MixingWeights) -> float:
        """See `Gossiper`."""
        return s.difference_(weights.own - 1, *self._messages(weights))

    def _messages(self, weights: MixingWeights) -> tuple[list[FlatVector], list[float]]:
        return self._inbox[: len(weights.inp)], list(weights.inp.values())

    def _pieces(self, v: FlatVector) -> Sequence[Tensor]:
        return (v.raw,)


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

    def difference(self, s: FlatVector) -> float:
        """See `Mixer`."""
        before = s.clone()
        self.finish(s)
        s.add_(before, alpha=-1.0)
        return 1.0
