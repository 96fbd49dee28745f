"""PushPull: plain gossip averaging, the round of D-PSGD; `PushSum` (algorithms/sgp.py) makes it the round of SGP."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from itertools import chain
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from ..flat.distance import DistanceBound, check_bound, norm
from ..flat.layout import CHUNK_BYTES, check_chunk_bytes
from ..flat.vector import FlatVector
from ..mixing_manager.base import MixingManager, MixingWeights, knows_period
from ..old_names import takes_old_arguments
from ..schedule import Schedule
from ..state import transient
from ..transport.base import Pending, Transport
from ..transport.exchange import Messages
from ..worlds.world import ALONE, ModelWorld
from .deltas import Deltas
from .mixer import Mixer
from .wire import Wire, wire_of

_MAX_PREPARED = 64  # sets of peers


def _nothing() -> None:
    return None


class PushPull(Mixer):
    """x_i <- sum_j W_ij x_j: plain gossip averaging, as in D-PSGD.

    The rows of W must sum to one, so that equal models stay equal. If the columns sum to one too (doubly stochastic W),
    the mean of the models is kept.

    [Note: narrow wire] With `wire_dtype` the sent numbers are rounded, s' = round(s), and rounds apply the rounded
    numbers: x <- x + (W - I) s'. Every rank gives away exactly the numbers that its peers add. So the mean is kept up
    to the rounding of x, not of the wire, and no rank drifts. Ranks agree up to the resolution of the wire.

    [Note: eight bits] With torch.int8 the messages are codes of `Absmax`: an entry is one of 255 even levels up to the
    largest magnitude of its block of 64 entries. A message has 17/16 bytes per entry. Parameters of 16 bits are rounded
    too, and running statistics are sent as they are: a variance may be a small part of the largest one in its block.
    The moments of a `MixedMomentum` are rounded. If an entry is infinite or NaN, so is its block at the receiver.

    A message longer than `chunk_bytes` is sent in chunks ([Note: chunks] of `FlatLayout`). Each chunk is mixed while
    the next one is in transfer; the result has the same bits as with whole messages. Messages with a narrow wire, and
    messages between GPUs, are sent whole.

    [Note: refused messages] With `max_relative_distance` a rank takes its own model in place of the model y of a peer
    with |y - x| > max_relative_distance |x|: it adds the weight of the message to its own weight, W_ii += W_ij. In
    push-sum x and y are the estimates, and a weight outside of [1 / 4n, n] refuses the message too. Rows of W still sum
    to one, so the models of honest ranks stay a weighted mean of the models that they accept; columns do not, so the
    mean over all ranks moves. Averaged buffers have the same bound, by their own norm. Messages are sent whole.

    Args:
        wire_dtype: torch.bfloat16 or torch.float16, for wider segments, or torch.int8, see [Note: eight bits]; None:
            models are sent unrounded. Takes one narrow copy of the model, and with torch.int8 for a while also a copy
            in float32 of the parameters of 16 bits. float16 saturates at 65,504.
        deltas: whether a link carries the changes of the rounded numbers since its last message, for equal results
            with fewer bytes. Needs a `wire_dtype` of 16 bits; takes a narrow copy for each peer, see [Note: deltas] of
            `Deltas`.
        chunk_bytes: the largest size of a chunk, a multiple of 256; equal on all ranks.
        max_relative_distance: the largest distance of a peer's model from the own one, in units of the norm of the own
            one; > 0. Takes one more pass over each message, and a model in memory for codes of torch.int8. None: all
            models are mixed. See [Note: refused messages].

    Lian et al., "Can Decentralized Algorithms Outperform Centralized Algorithms?", NeurIPS 2017, arXiv 1705.09056,
    Algorithm 1.

    Example (under `torchrun --nproc-per-node 4`, see README):
        >>> mixer = PushPull()
        >>> mixer.bind(UniformMixing(RingGraph(4, peers_per_itr=2)), connect())
        >>> mean = mixer.average(torch.randn(10), num_rounds=50)
    """

    sends_shares: bool = False  # whether columns of W sum to one instead of rows: [Note: lost peers] of `Neighbours`
    _prepared: dict[Peers, Prepared] = transient({})
    _prepared_of: Callable[[], FlatVector | None] = transient(_nothing)  # the vector that they send, while it lives
    _prepared_weight: Tensor | None = transient(None)  # which they send too
    _received: Sequence[FlatVector] = ()  # the messages of the in-peers, in the order of the in-peers

    @takes_old_arguments()
    def __init__(
        self,
        *,
        wire_dtype: torch.dtype | None = None,
        deltas: bool = False,
        chunk_bytes: int = CHUNK_BYTES,
        max_relative_distance: float | None = None,
    ) -> None:
        self._wire = wire_of(wire_dtype)
        if deltas and (wire_dtype is None or wire_dtype.itemsize != 2):
            later = "" if wire_dtype else ', or "auto", which is chosen later'
            raise ValueError(
                f"got deltas=True without a dtype of 16 bits (wire_dtype={wire_dtype}{later}), expected one: nearly "
                "all float32 numbers, and nearly all codes, change in every step; pass wire_dtype=torch.bfloat16"
            )
        check_chunk_bytes(chunk_bytes)
        self.wire_dtype, self.deltas = wire_dtype, deltas
        self.chunk_bytes = chunk_bytes
        limit = check_bound(max_relative_distance)
        self.bound = None if limit is None else DistanceBound(limit)
        self._inbox: dict[int, FlatVector] = {}  # by the index of the in-peer in its round, with deltas by its rank
        self._sent: FlatVector | None = None
        self._pending: Pending | None = None

    def bind(self, mixing: MixingManager, transport: Transport, world: ModelWorld = ALONE) -> None:
        """See `Mixer`."""
        super().bind(mixing, transport)
        self._row = Neighbours(mixing, transport, sends_shares=self.sends_shares)
        self._sends_weight = self.is_weighted
        self._network = Deltas(transport, name=str(self)) if self.deltas else transport
        self._inbox = {}
        self._cut()

    def narrow(self, wire_dtype: torch.dtype) -> None:
        """Round messages to `wire_dtype` from the next round on. Call it on all ranks, without a round in flight."""
        self.wire_dtype, self._wire = wire_dtype, wire_of(wire_dtype)
        self._inbox = {}
        self._cut()

    def _cut(self) -> None:
        """Choose the size of chunks; 0: messages are sent whole. It is equal on all ranks, as its inputs are."""
        is_cut = self.wire_dtype is None and self.bound is None and self.transport.device.type == "cpu"
        self._cut_bytes = self.chunk_bytes if is_cut else 0
        self._forget_messages()

    def _forget_messages(self) -> None:
        self._prepared, self._prepared_of, self._prepared_weight = {}, _nothing, None

    def check(self, mixing: MixingManager) -> None:
        """See `Mixer`."""
        if not mixing.is_row_stochastic:
            raise ValueError(
                f"got {mixing} whose rows do not sum to one, expected row-stochastic weights for push-pull gossip; "
                "use push_sum=True, or MetropolisHastingsMixing on an undirected graph"
            )
        self.check_refusals(mixing)

    def check_options(
        self,
        schedule: Schedule,
        *,
        overlap: bool | str = False,
        nprocs_per_node: int = 1,
        is_sharded: bool = False,
        has_membership: bool = False,
    ) -> None:
        """See `Mixer`."""
        if self.deltas and is_sharded and has_membership:
            raise ValueError(
                "got deltas=True with a membership and a module that is sharded over processes, expected one of them: "
                "these processes vote on lost peers once a round, and a message with many changes has two exchanges; "
                "leave deltas out"
            )
        if self.bound is None:
            return
        given = f"max_relative_distance={self.bound.limit}"
        if schedule.average_every or schedule.average_until:
            raise ValueError(
                f"got {given} with {schedule}, expected a schedule without exact averages: a sum over all ranks has no "
                "sender, so no rank can refuse a model in it; leave one of them out"
            )
        if nprocs_per_node != 1 or is_sharded:
            shards = "fully_shard" if is_sharded else f"nprocs_per_node={nprocs_per_node}"
            remedy = "" if has_membership else ", or pass a membership, whose nodes gossip with one process"
            raise ValueError(
                f"got {given} for a model that several processes hold in shards ({shards}), expected a whole model in "
                f"each: the bound is on the norm over all parameters; leave it out{remedy}"
            )

    def check_refusals(self, mixing: MixingManager) -> None:
        """Raise ValueError where weights in place of refused messages would grow from round to round.

        Args:
            mixing: the weights of the graph.
        """
        if self.bound is not None and not mixing.is_row_stochastic:
            raise ValueError(
                f"got max_relative_distance={self.bound.limit} with {mixing} whose rows do not sum to one, expected "
                "row-stochastic weights: a rank puts its own model in the place of a refused one, and weights would "
                "grow; take a graph where each rank has as many in-peers as out-peers, or leave the bound out"
            )

    @property
    def own_buffer_weight(self) -> float:
        """See `Mixer`."""
        return self._row.buffer_weights.own

    @property
    def sources(self) -> Sequence[int]:
        """See `Mixer`."""
        return self._row.in_peers

    @property
    def received(self) -> Sequence[FlatVector]:
        """See `Mixer`; decoded."""
        return [self._values_of(message) for message in self._received]

    def start(self, s: FlatVector, t: int) -> None:
        """See `Mixer`."""
        self._post(s, t)

    def start_filling(self, s: FlatVector, t: int, fill: Callable[[int], None]) -> None:
        """See `Mixer`."""
        if self._is_cut(s):
            self._post(s, t, fill)
        else:
            super().start_filling(s, t, fill)

    def finish(self, s: FlatVector) -> None:
        """See `Mixer`. If a round in chunks fails, s is as before, up to rounding."""
        self._decode(s, is_difference=False)

    def difference(self, s: FlatVector) -> float:
        """See `Mixer`."""
        return self._decode(s, is_difference=True)

    def _post(self, s: FlatVector, t: int, fill: Callable[[int], None] | None = None) -> None:
        """Post round t; for `fill` see `Mixer.start_filling`."""
        assert self._pending is None, "a round is in flight: finish() it before the next start()"
        row = self._row
        row.begin(t, s.push_sum_weight)
        self._layout, self._sent = s.layout, None if self._wire is None else self._wire.message_of(s)
        sends, recvs, self._received = self._prepare(s if self._sent is None else self._sent)
        if row.keeps_all:  # [Note: weights that run dry]
            sends = Messages({peer: tuple(map(torch.zeros_like, message)) for peer, message in sends.items()})
        if fill is not None and not (sends or recvs):  # no exchange would call `fill`
            for k in range(len(self.chunks(s))):
                fill(k)
        if fill is None:
            self._pending = self._network.exchange(sends, recvs, tag=t)
        else:  # in chunks, so without deltas
            self._pending = self.transport.exchange(sends, recvs, tag=t, fill=fill)

    def _prepare(self, sent: FlatVector) -> Prepared:
        """Return the messages of this round; made once for each set of peers, as long as the same vector is sent.

        The message is the vector itself, so nothing is copied and it may be filled later.
        """
        prepared = self._prepared
        if self._prepared_of() is not sent or self._prepared_weight is not sent.push_sum_weight:
            prepared = self._prepared = {}
            self._prepared_of = weakref.ref(sent, lambda _: prepared.clear())
            self._prepared_weight = sent.push_sum_weight
        peers = out_peers, in_peers = self._row.out_peers, self._row.in_peers
        if (found := prepared.get(peers)) is not None:
            return found
        if len(prepared) == _MAX_PREPARED:
            prepared.clear()
        if any(v.layout != sent.layout or v.raw.device != sent.raw.device for v in self._inbox.values()):
            self._inbox.clear()
        for key in (keys := in_peers if self.deltas else range(len(in_peers))):
            if key not in self._inbox:
                self._inbox[key] = sent.like()
        received = tuple(map(self._inbox.__getitem__, keys))
        message, *inbox = [self._pieces(v, is_one=sent.message is not None) for v in (sent, *received)]
        sends, recvs = dict.fromkeys(out_peers, message), dict(zip(in_peers, inbox, strict=True))
        found = prepared[peers] = Prepared(Messages(sends), Messages(recvs), received)
        return found

    def _pieces(self, v: FlatVector, *, is_one: bool) -> Sequence[Tensor]:
        """The chunks of a vector as they are sent; is_one: the push-sum weight is behind the last one, else alone."""
        pieces = [chunk.raw for chunk in self.chunks(v)]
        if self._sends_weight and is_one and v.message is not None:
            pieces[-1] = v.message[v.layout.num_bytes - len(pieces[-1]) :]
        elif self._sends_weight:
            pieces.append(v.push_sum_weight)
        return pieces

    def _decode(self, s: FlatVector, *, is_difference: bool) -> float:
        """x_i <- W_ii x_i + sum_j W_ij x_j; buffers may have other weights. See also [Note: narrow wire].

        Args:
            s: the vector, mutated.
            is_difference: compute s <- c with alpha c = (W - I) s.

        Returns:
            alpha. If buffers have other weights there is no common factor, and alpha is 1.
        """
        if (alpha := self._mix_arriving(s, is_difference=is_difference)) is not None:
            return alpha
        self._wait()
        if self.bound is not None:
            self._refuse_far(self.bound, s)
        weights, buffer_weights = rows = self._row.weights, self._row.buffer_weights
        if self._wire is not None and self._sent is not None:
            if is_difference:  # s is not read below
                s.raw.zero_()
                s.push_sum_weight.zero_()
            own, buffer_own = ([row.own - 1, *row.inp.values()] for row in rows)
            self._add_all(s, self._wire, [self._sent, *self._received], own, buffer_own)
            return 1.0
        if weights == buffer_weights and is_difference:
            return s.difference_(weights.own - 1, self._received, list(weights.inp.values()))
        if weights == buffer_weights:
            s.combine_(weights.own, self._received, list(weights.inp.values()))
            return 1.0
        for is_buffer, row in ((False, weights), (True, buffer_weights)):
            half, *halves = (v.where(is_buffer=is_buffer) for v in (s, *self._received))
            half.combine_(row.own - is_difference, halves, list(row.inp.values()))
        if is_difference:
            s.push_sum_weight.zero_()
        return 1.0

    def leave_out_late(self, s: FlatVector, alpha: float) -> None:
        """See `Mixer` and [Note: lost peers]."""
        if not self.transport.lost:
            return
        row, messages = self._row, self._received
        before, in_peers = (row.weights, row.buffer_weights), row.in_peers
        kept = row.leave_out(self.transport.lost)
        self._received = [messages[k] for k in kept]
        now = row.weights, row.buffer_weights
        if self._wire is not None and self._sent is not None:
            changes = [_change(was, is_now, in_peers, alpha) for was, is_now in zip(before, now, strict=True)]
            self._add_all(s, self._wire, [self._sent, *messages], *changes)
        elif before[0] == before[1]:
            self._restate(s, messages, in_peers, before[0], now[0], alpha)
        else:
            for is_buffer, was, is_now in zip((False, True), before, now, strict=True):
                half, *halves = (v.where(is_buffer=is_buffer) for v in (s, *messages))
                self._restate(half, halves, in_peers, was, is_now, alpha)

    def _restate(
        self,
        s: FlatVector,
        messages: Sequence[FlatVector],
        peers: Sequence[int],
        before: MixingWeights,
        now: MixingWeights,
        alpha: float,
    ) -> None:
        """Turn the correction s of one row of W into the correction of another row, for the same messages.

        The vector of this rank is gone: alpha s has it times W_ii - 1.
        """
        old, new = ([row.inp.get(peer, 0.0) for peer in peers] for row in (before, now))
        scale = 1.0 if before.own == 1 else (now.own - 1) / (before.own - 1)
        s.combine_(scale, messages, [(b - scale * a) / alpha for a, b in zip(old, new, strict=True)])

    def _add_all(
        self,
        s: FlatVector,
        wire: Wire,
        messages: Sequence[FlatVector],
        weights: Sequence[float],
        buffer_weights: Sequence[float],
    ) -> None:
        """s <- s + sum_j weights[j] messages[j], with its weight if weights are sent."""
        wire.add_all_(s, messages, weights, buffer_weights)
        if self.is_weighted:
            for message, weight in zip(messages, weights, strict=True):
                s.push_sum_weight.add_(message.push_sum_weight, alpha=weight)

    def _values_of(self, message: FlatVector) -> FlatVector:
        """Return the vector of a message."""
        return message if self._wire is None else self._wire.values_of(message, self._layout)

    def _wait(self) -> None:
        assert self._pending is not None, "no round is in flight: start() comes first"
        pending, self._pending = self._pending, None
        pending.wait()
        if lost := pending.lost:
            kept = self._row.leave_out(lost)
            self._received = [self._received[k] for k in kept] if self._received else ()

    def _refuse_far(self, bound: DistanceBound, s: FlatVector) -> None:
        """Leave out the messages that are too far from s: see [Note: refused messages]."""
        row, transport, own, refused = self._row, self.transport, norm(s.parameters), set[int]()
        if not math.isfinite(own):  # no message is near it, and all would be blamed
            return
        for peer, message in zip(row.in_peers, self._received, strict=True):
            is_accepted = self._accepts(bound, self._values_of(message), s, own)
            rank, sender = transport.names[transport.rank], transport.names[peer]
            bound.note(rank=rank, sender=sender, what=f"round {row.t}", is_accepted=is_accepted)
            if not is_accepted:
                refused.add(peer)
        if refused:
            transport.traffic.refused(refused)
            kept = row.refuse(refused)
            self._received = [self._received[k] for k in kept]

    def _accepts(self, bound: DistanceBound, y: FlatVector, s: FlatVector, own: float) -> bool:
        if not self._sends_weight:
            return bound.accepts(y, s, own=own)
        weight, num_ranks = y.push_sum_weight.item(), self.transport.world_size
        if weight == 0 and not norm(y.segments):  # [Note: weights that run dry]
            return True
        is_weight = LEAST_WEIGHT / num_ranks <= weight <= num_ranks
        return is_weight and bound.accepts(y, s, own=own, scale=s.push_sum_weight.item() / weight)

    # In chunks.

    def chunks(self, s: FlatVector) -> Sequence[FlatVector]:
        """See `Mixer`."""
        return s.chunks(self._cut_bytes) if self._is_cut(s) else (s,)

    def _is_cut(self, s: FlatVector) -> bool:
        return 0 < self._cut_bytes < s.layout.num_bytes

    def _mix_arriving(self, s: FlatVector, *, is_difference: bool) -> float | None:
        """Mix chunks as they arrive, the push-sum weight last; chunks in transfer are not touched.

        If the round fails, s is as before, up to rounding: mixed chunks are undone.

        Returns:
            alpha, see `_decode`; None if whole messages are needed.
        """
        row, own = self._row.weights, self._row.weights.own - is_difference
        # Buffers with other weights need the whole message. A row with a zero factor for s could not be undone.
        # Without a round in flight, `_wait` raises the error.
        if self._row.buffer_weights != row or own == 0 or self._pending is None or not self._is_cut(s):
            return None
        coefficients, chunks, messages = list(row.inp.values()), self.chunks(s), list(map(self.chunks, self._received))
        alpha = s.factor(coefficients) if is_difference else None
        mixed: list[tuple[FlatVector, list[FlatVector]]] = []
        try:
            for k in self._arrivals():
                if k < len(chunks):  # the weight comes after the last chunk
                    chunk, others = chunks[k], [message[k] for message in messages]
                    chunk.combine_segments_(own, others, coefficients, alpha=alpha)
                    mixed.append((chunk, others))
        except BaseException as error:  # also Control-C: s must not stay half mixed, or mixed without its weight
            for chunk, others in mixed:
                chunk.combine_segments_((alpha or 1.0) / own, others, [-weight / own for weight in coefficients])
            if isinstance(error, PeersLost):
                return None
            raise
        s.combine_weight_(own, self._received, coefficients, alpha=alpha)
        return 1.0 if alpha is None else alpha

    def _arrivals(self) -> Iterator[int]:
        """Yield the chunks in the order in which they may be mixed.

        Raises:
            PeersLost: a peer has failed; the round is still in flight, and goes on with whole messages.
        """
        pending, self._pending = self._pending, None
        assert pending is not None, "`_mix_arriving` has looked"
        for k in chain(pending.arrivals(), (None,)):
            if pending.lost:
                self._pending = pending
                raise PeersLost
            if k is not None:
                yield k

    def __repr__(self) -> str:
        wire = [] if self.wire_dtype is None else [f"wire_dtype={self.wire_dtype}"]
        wire += ["deltas=True"] if self.deltas else []
        chunks = [] if self.chunk_bytes == CHUNK_BYTES else [f"chunk_bytes={self.chunk_bytes}"]
        chunks += [] if self.bound is None else [f"max_relative_distance={self.bound.limit}"]
        return f"{type(self).__name__}({', '.join(wire + chunks)})"


_MAX_PLANS = 4096  # the number of plans to keep; graphs with a longer period plan each round again
LEAST_WEIGHT = 1 / 4  # see [Note: weights that run dry]


Peers: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]
"""The out-peers and the in-peers of a round."""


class Prepared(NamedTuple):
    """The messages of a round, and the vectors in whose memory the messages of the in-peers arrive."""

    sends: Messages
    recvs: Messages
    received: tuple[FlatVector, ...]


class Plan(NamedTuple):
    """The part of one rank in a round: its out-peers, its in-peers, and its rows of W(t) for parameters and buffers."""

    out_peers: tuple[int, ...]
    in_peers: tuple[int, ...]
    weights: MixingWeights
    buffer_weights: MixingWeights


def _change(before: MixingWeights, now: MixingWeights, peers: Sequence[int], alpha: float) -> list[float]:
    """The changes of the own weight and of the weights of these peers, over alpha."""
    changes = [now.own - before.own, *(now.inp.get(peer, 0.0) - before.inp.get(peer, 0.0) for peer in peers)]
    return [change / alpha for change in changes]


class Neighbours:
    """The live peers of a rank and its row of W(t), round by round.

    [Note: lost peers] On an elastic transport a peer may fail during a round or before it. The round goes on without
    this peer, and each rank keeps the values that it would have sent over the link. If rows sum to one (D-PSGD), the
    rank adds the weight of the lost message to its own weight, W_ii += W_ij. A symmetric W changes equally at both
    ends, so the mean over the live ranks is kept. In push-sum columns sum to one. A rank then takes back the share that
    it would have sent, P_ii += P_ji, of x and of w, so that their sums are kept. Only the values of the dead rank are
    lost. A rank may also learn of the failure between a round under training and its own application of that round.
    The peer has not applied the round either, except if it was a step ahead, so the rank leaves the peer out alike.

    [Note: weights that run dry] A directed graph with failed ranks may lead to a few ranks only. Until there is a new
    graph, the weights of the other ranks then halve in every round. The optimizer steps x = z w, so its step of their z
    would double in every round. So a rank that has lost peers and whose weight is less than `LEAST_WEIGHT` keeps its
    weight: it sends zeros, and takes back the shares of all its out-peers. Sums are kept as before.

    Args:
        mixing: the weights and their graph.
        transport: the transport over the ranks.
        sends_shares: whether columns of W sum to one instead of rows: see [Note: lost peers].

    Attributes:
        t: the round.
        out_peers, in_peers, weights, buffer_weights: the `Plan` of the last round that has begun, without lost peers.
        keeps_all: whether the rank sends zeros: see [Note: weights that run dry].
        left_out: the peers that this round goes on without.
    """

    def __init__(self, mixing: MixingManager, transport: Transport, *, sends_shares: bool = False) -> None:
        self._mixing, self._transport, self._sends_shares = mixing, transport, sends_shares
        self._plans: dict[int, Plan] = {}
        self._period = mixing.period if mixing.period <= _MAX_PLANS and knows_period(mixing) else 0
        self.t, self.in_peers, self.out_peers = 0, tuple[int, ...](), tuple[int, ...]()
        self.weights = self.buffer_weights = MixingWeights(1.0, {})
        self.keeps_all, self.left_out = False, frozenset[int]()

    def begin(self, t: int, weight: Tensor) -> None:
        """Begin round t; plans of periodic graphs are kept for later rounds.

        Args:
            t: the number of the round.
            weight: the push-sum weight of the rank.
        """
        plan = self._plans.get(t % self._period) if self._period else None
        if plan is None:
            rank, graph, mixing = self._transport.rank, self._mixing.graph, self._mixing
            weights, buffer_weights = mixing.weights(rank, t), mixing.buffer_weights(rank, t)
            plan = Plan(tuple(graph.out_peers(rank, t)), tuple(weights.inp), weights, buffer_weights)
            if self._period:
                self._plans[t % self._period] = plan
        self.t, self.left_out = t, frozenset()
        self.out_peers, self.in_peers, self.weights, self.buffer_weights = plan
        self.keeps_all = self._sends_shares and bool(self._transport.lost) and weight.item() < LEAST_WEIGHT
        if self.keeps_all:
            self._take_back(self.out_peers)

    def leave_out(self, lost: Set[int]) -> list[int]:
        """Go on without these peers: see [Note: lost peers]. Returns the indices of the in-peers that remain."""
        lost, self.left_out = lost - self.left_out, self.left_out | lost
        kept = [k for k, peer in enumerate(self.in_peers) if peer not in lost]
        if self._sends_shares and not self.keeps_all:
            self._take_back([peer for peer in self.out_peers if peer in lost])
        self.weights, self.buffer_weights = (
            self._without(lost, row, is_replaced=not self._sends_shares) for row in (self.weights, self.buffer_weights)
        )
        self.in_peers = tuple(self.in_peers[k] for k in kept)
        return kept

    def refuse(self, peers: Set[int]) -> list[int]:
        """Take the own model in place of the messages of these peers. Returns the indices of the other in-peers."""
        kept = [k for k, peer in enumerate(self.in_peers) if peer not in peers]
        self.weights, self.buffer_weights = (
            self._without(peers, row, is_replaced=True) for row in (self.weights, self.buffer_weights)
        )
        self.in_peers = tuple(self.in_peers[k] for k in kept)
        return kept

    def _without(self, lost: Set[int], row: MixingWeights, *, is_replaced: bool) -> MixingWeights:
        lost_here = sum(w for peer, w in row.inp.items() if peer in lost) if is_replaced else 0.0
        return MixingWeights(row.own + lost_here, {peer: w for peer, w in row.inp.items() if peer not in lost})

    def _take_back(self, peers: Iterable[int]) -> None:
        """Keep the shares of these out-peers on this rank."""
        rows = ((self.weights, self._mixing.weights), (self.buffer_weights, self._mixing.buffer_weights))
        self.weights, self.buffer_weights = (
            MixingWeights(row.own + sum(row_of(peer, self.t).inp[self._transport.rank] for peer in peers), row.inp)
            for row, row_of in rows
        )


class PeersLost(Exception):
    """A peer failed while chunks were mixed. The mixed chunks are undone, and the round goes on without the peer."""
