"""Gossiper: a round with the peers of a graph, for which an algorithm writes `encode` and `decode`."""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from itertools import chain
from typing import NamedTuple, TypeAlias, cast

import torch
from torch import Tensor

from ..flat.vector import FlatVector
from ..graph_manager.base import GraphManager
from ..mixing_manager.base import MixingManager, MixingWeights
from ..mixing_manager.period import knows_period
from ..transport.base import ElasticPending, Pending, Transport, is_elastic, lost_peers
from .mixer import Mixer
from .pipelined import PeersLost, chunkwise, cut, difference_, is_chunkwise, mix_

Messages: TypeAlias = Mapping[int, Sequence[Tensor]]  # by rank
_MAX_PLANS = 4096  # that are kept: of graphs with a longer period each round is planned anew
_LEAST_WEIGHT = 1 / 4  # see [Note: weights that run dry]


class Plan(NamedTuple):
    """What one rank does in a round: whom it sends to, whom it hears, and its row of W(t), that for buffers apart."""

    out_peers: tuple[int, ...]
    in_peers: tuple[int, ...]
    weights: MixingWeights
    buffer_weights: MixingWeights


class Gossiper(Mixer):
    """A mixer that talks to its peers of round t only; an algorithm writes `encode` and `decode`.

    A round is one exchange, or `num_phases` of them, each encoded when the one before it is decoded:

        start(s, t):   sends, recvs = encode(s, ...)     # this round's messages
                       pending = transport.exchange(sends, recvs)
        finish(s):     pending.wait()
                       decode(s, weights)                # s <- s + (W(t) - I) s

    [Note: whole messages] `decode` gets whole messages, and `encode` may read all of s. A class whose messages are the
    vectors themselves may have them sent and mixed in chunks: it names their size in `cut_bytes`, marks its methods
    with `chunkwise`, and leaves what arrives in `received`. A subclass that overrides a marked method without the mark
    gets whole messages again.

    [Note: lost peers] On an elastic transport a peer may fail in a round, or have failed before. The round goes on
    without it: what would have travelled over that link stays with who has it. Where rows sum to one (D-PSGD) the rank
    gives the weight of the lost message to its own vector, W_ii += W_ij; as a symmetric W has the same change at both
    ends, the mean of those who live is kept. In push-sum, where columns sum to one, a rank takes back the share that it
    would have sent, P_ii += P_ji, of x and of w, so that their sums are kept. Nothing is lost but what the dead rank
    held.

    [Note: weights that run dry] A directed graph with holes may lead to a few ranks only, and then the weights of the
    others halve in every round until a new graph is there. The optimizer steps on x = z w, so a step of their z would
    double in every round. A rank that has lost peers and whose weight is less than `_LEAST_WEIGHT` keeps it: it sends
    zeros, and takes back the shares of all its out-peers. Sums are kept as before.

    Raises (in `start`, `finish` and `difference`):
        TimeoutError, ConnectionError: naming the peer and the round.
    """

    num_phases: int = 1
    sends_shares: bool = False  # columns of W sum to one, and not rows: see [Note: lost peers]
    phase: int = 0  # of the round that runs, for `encode` and `decode`
    received: Sequence[FlatVector] = ()  # where messages are vectors: those of the in-peers, in their order
    _in_peers: tuple[int, ...] = ()  # of the last round that was started
    _pending: Pending | None = None
    _is_elastic: bool = False  # the transport

    def bind(self, mixing: MixingManager, transport: Transport) -> None:
        """See `Mixer`."""
        super().bind(mixing, transport)
        self._plans: dict[int, Plan] = {}
        self._period = mixing.period if mixing.period <= _MAX_PLANS and knows_period(mixing) else 0
        self._sends_weight = self.is_weighted
        self._is_elastic = is_elastic(transport)
        # 0: messages go whole. A function of what all ranks agree on, so all cut alike.
        self._cut_bytes = self.cut_bytes if transport.device.type == "cpu" and is_chunkwise(self) else 0

    @property
    def cut_bytes(self) -> int:
        """Vectors that are longer are sent in chunks of at most so many bytes; 0: all are sent whole."""
        return 0

    @property
    def own_buffer_weight(self) -> float:
        """See `Mixer`."""
        return self._buffer_weights.own

    @property
    def sources(self) -> Sequence[int]:
        """See `Mixer`."""
        return self._in_peers

    def default_graph(self, world_size: int) -> GraphManager | None:
        """The graph where the user names none; None: the wrapper's own default."""
        return None

    @abstractmethod
    def encode(self, s: FlatVector, out_peers: Sequence[int], in_peers: Sequence[int]) -> tuple[Messages, Messages]:
        """The tensors that each out-peer gets, and the tensors that the message of each in-peer fills."""

    @abstractmethod
    def decode(self, s: FlatVector, weights: MixingWeights) -> None:
        """s <- s + (W - I) s, with the messages in the tensors that `encode` gave."""

    def decode_difference(self, s: FlatVector, weights: MixingWeights) -> float:
        """s <- c with alpha * c = (W - I) s; returns alpha. Override it when `decode` reads s."""
        s.raw.zero_()
        s.push_sum_weight.zero_()
        self.decode(s, weights)
        return 1.0

    @chunkwise
    def start(self, s: FlatVector, t: int) -> None:
        """See `Mixer`."""
        self._begin(s, t)
        self._post(s, phase=0)

    @chunkwise
    def finish(self, s: FlatVector) -> None:
        """See `Mixer`. If a round in chunks breaks off, s is as before, to rounding."""
        # What keeps nothing of itself could not be put back.
        if self._is_cut(s) and self._mixes_chunks() and self._weights.own != 0:
            with contextlib.suppress(PeersLost):  # then s is as before, and whole messages are mixed
                mix_(s, self.received, self._weights, self._arrivals(s), num_bytes=self._cut_bytes)
                return
        self._wait()
        self.decode(s, self._weights)
        for phase in range(1, self.num_phases):
            self._post(s, phase)
            self._wait()
            self.decode(s, self._weights)

    @chunkwise
    def difference(self, s: FlatVector) -> float:
        """See `Mixer`. Costs a copy of s where a round has several phases."""
        if self.num_phases > 1:
            return super().difference(s)
        if self._is_cut(s) and self._mixes_chunks():
            with contextlib.suppress(PeersLost):
                return difference_(s, self.received, self._weights, self._arrivals(s), num_bytes=self._cut_bytes)
        self._wait()
        return self.decode_difference(s, self._weights)

    def for_membership(self) -> Gossiper:
        """The gossiper that runs this algorithm where peers fail, come and go; itself where it can.

        Raises:
            ValueError: the algorithm cannot do without a peer in a round.
        """
        if not self.is_elastic:
            raise ValueError(
                f"got {self} with a membership, expected a gossiper whose rounds go on without peers that fail, which "
                "says so by is_elastic = True; pass gossiper=None, or one of this library's"
            )
        return self

    def _begin(self, s: FlatVector, t: int) -> None:
        """The plan of round t, which is kept where it comes again."""
        assert self._pending is None, "a round is in flight: finish() it before the next start()"
        plan = self._plans.get(t % self._period) if self._period else None
        if plan is None:
            rank, graph = self.transport.rank, self.mixing.graph
            weights, buffer_weights = self.mixing.weights(rank, t), self.mixing.buffer_weights(rank, t)
            plan = Plan(graph.out_peers(rank, t), tuple(weights.inp), weights, buffer_weights)
            if self._period:
                self._plans[t % self._period] = plan
        self._t = t
        self._out_peers, self._in_peers, self._weights, self._buffer_weights = plan
        self._keeps_all = False
        if self._is_elastic and self.sends_shares and lost_peers(self.transport):
            self._keeps_all = s.push_sum_weight.item() < _LEAST_WEIGHT
            if self._keeps_all:
                self._take_back(self._out_peers)

    def _take_back(self, peers: Iterable[int]) -> None:
        """The shares of these out-peers stay here."""
        rows = ((self._weights, self.mixing.weights), (self._buffer_weights, self.mixing.buffer_weights))
        self._weights, self._buffer_weights = (
            MixingWeights(row.own + sum(row_of(peer, self._t).inp[self.transport.rank] for peer in peers), row.inp)
            for row, row_of in rows
        )

    def _encode(self, s: FlatVector) -> tuple[Messages, Messages]:
        sends, recvs = self.encode(s, self._out_peers, self._in_peers)
        if self._keeps_all:  # [Note: weights that run dry]
            sends = {peer: tuple(map(torch.zeros_like, message)) for peer, message in sends.items()}
        return sends, recvs

    def _post(self, s: FlatVector, phase: int) -> None:
        self.phase = phase
        sends, recvs = self._encode(s)
        if self._is_cut(s):
            sends, recvs = (cut(side, s.layout, num_bytes=self._cut_bytes) for side in (sends, recvs))
        self._pending = self.transport.exchange(sends, recvs, tag=self._t)

    def _wait(self) -> None:
        assert self._pending is not None, "no round is in flight: start() comes first"
        pending, self._pending = self._pending, None
        pending.wait()
        if self._is_elastic and (lost := cast("ElasticPending", pending).lost):
            self._leave_out(lost)

    def _leave_out(self, lost: Set[int]) -> None:
        """[Note: lost peers] Of this round: its weights, its sources, and where messages are vectors, these."""
        kept = [k for k, peer in enumerate(self._in_peers) if peer not in lost]
        if self.sends_shares and not self._keeps_all:
            self._take_back([peer for peer in self._out_peers if peer in lost])
        rows = []
        for row in (self._weights, self._buffer_weights):
            lost_here = 0.0 if self.sends_shares else sum(w for peer, w in row.inp.items() if peer in lost)
            rows.append(
                MixingWeights(row.own + lost_here, {peer: w for peer, w in row.inp.items() if peer not in lost})
            )
        self._weights, self._buffer_weights = rows
        self._in_peers = tuple(self._in_peers[k] for k in kept)
        if self.received:
            self.received = [self.received[k] for k in kept]

    # In chunks.

    def chunks(self, s: FlatVector) -> Sequence[FlatVector]:
        """See `Mixer`."""
        return s.chunks(self._cut_bytes) if self._is_cut(s) else (s,)

    def _is_cut(self, s: FlatVector) -> bool:
        return 0 < self._cut_bytes < s.layout.num_bytes

    @chunkwise
    def start_filling(self, s: FlatVector, t: int, fill: Callable[[int], None]) -> None:
        """See `Mixer`."""
        if not self._is_cut(s):
            super().start_filling(s, t, fill)
            return
        self._begin(s, t)
        self.phase = 0
        sends, recvs = self._encode(s)
        if not (sends or recvs):  # nothing travels that could be filled on its way
            for k in range(len(self.chunks(s))):
                fill(k)
        sends, recvs = (cut(side, s.layout, num_bytes=self._cut_bytes) for side in (sends, recvs))
        self._pending = self.transport.exchange(sends, recvs, tag=self._t, fill=fill)

    def _mixes_chunks(self) -> bool:
        """Whether chunks are mixed as they arrive. Buffers with weights of their own wait for the whole."""
        # Without a round in flight the error is raised where whole messages are waited for.
        return self._pending is not None and self._buffer_weights == self._weights

    def _arrivals(self, s: FlatVector) -> Iterable[int]:
        """The chunks that may be mixed, one after the other."""
        pending = self._pending
        assert pending is not None, "`_mixes_chunks` has looked"
        is_alone = not (self._out_peers or self._in_peers)  # then nothing is sent that could arrive
        if is_alone or not self._is_elastic:
            self._pending = None
            return range(len(self.chunks(s))) if is_alone else pending.arrivals()
        return self._arrivals_while_all_live(cast("ElasticPending", pending))

    def _arrivals_while_all_live(self, pending: ElasticPending) -> Iterator[int]:
        """As `Pending.arrivals`; raises PeersLost, and leaves the round in flight, where a peer fails."""
        for k in chain(pending.arrivals(), (None,)):
            if pending.lost:
                raise PeersLost
            if k is not None:
                yield k
        self._pending = None
