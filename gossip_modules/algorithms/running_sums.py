"""Push-sum over links that lose messages: ranks send running sums in datagrams, and no rank waits for a message."""

from __future__ import annotations

import math
import warnings
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..checks import checked_integer
from ..flat.vector import FlatVector
from ..mixing_manager.base import MixingManager
from ..rounds.link_sums import ANSWER, COUNT_BITS, LAST_NUMBER, SUMS, Inbox, Integers, SentSums, Silence, Weights
from ..rounds.mixer import Mixer
from ..schedule import Schedule
from ..state import Restart, transient
from ..transport.base import Transport
from ..transport.datagrams import MAX_BYTES, Datagram, Datagrams
from ..transport.exchange import PointToPoint
from ..transport.job_key import WITHOUT_KEY, key_of
from ..warn import levels_to_user
from ..worlds.world import ALONE, ModelWorld
from .sgp import PushSum

ONE = 1 << 40
"""The weight one, as an integer."""
LEAST_WEIGHT = ONE >> 4
"""A chunk with a smaller weight gives no shares: see [Note: fixed point]."""
_GROUP_NUMEL = 1 << 16  # elements that are mixed at a time, so that they stay in the cache
_LEAST_BYTES = 128
_STRIDE = 0x9E3779B1  # a prime, which is far from multiples of usual numbers of chunks
_RANGE = 1024.0  # of values, by default
_HALF_RANGE = float(1 << 30)  # quanta; half of what an int32 holds, as restarted weights may add up to more than n


class ChunkRows(NamedTuple):
    """Elements of one segment that fill rows of [num_chunks, size]: all of its whole chunks, or the end of it.

    Attributes:
        segment: the number of the segment.
        start: the first element.
        rows: the rows.
        width: the number of elements in each row.
    """

    segment: int
    start: int
    rows: range
    width: int

    def groups(self, segments: Sequence[Tensor]) -> Iterator[tuple[Tensor, slice]]:
        """Yield the elements of a few rows at a time, as a matrix in the memory of the segment, and these rows."""
        step = max(_GROUP_NUMEL // self.width, 1)
        for first in range(0, len(self.rows), step):
            num_rows = min(step, len(self.rows) - first)
            start = self.start + first * self.width
            part = segments[self.segment][start : start + num_rows * self.width].view(num_rows, self.width)
            yield part, slice(self.rows.start + first, self.rows.start + first + num_rows)


class Chunks:
    """The chunks of a vector, and the law of a round for them: `give` and `take`.

    Args:
        numels: the number of elements of each segment. Each segment begins with a new chunk.
        size: the number of elements of a chunk.
        quantum: see `RunningSums`.

    Attributes:
        numels: see the arguments.
        blocks: the blocks of all segments.
        widths: the number of elements of each chunk.
        weights: the weights of the chunks, int64, ONE for one.
    """

    def __init__(self, numels: Sequence[int], size: int, quantum: float) -> None:
        self.blocks: list[ChunkRows] = []
        self.widths: list[int] = []
        self._quantum, self.numels = quantum, list(numels)
        for k, numel in enumerate(numels):
            num_whole, rest = divmod(numel, size)
            for start, num_rows, width in ((0, num_whole, size), (num_whole * size, 1, rest)):
                if num_rows and width:
                    row = len(self.widths)
                    self.blocks.append(ChunkRows(k, start, range(row, row + num_rows), width))
                    self.widths += [width] * num_rows
        self.weights: Weights = np.full(len(self.widths), ONE, np.int64)

    def __len__(self) -> int:
        return len(self.widths)

    def give(self, segments: Sequence[Tensor], sums: SentSums, share: Weights) -> None:
        """Add a share of this rank to the sums of an out-peer: sigma <- sigma + share, x <- x - share.

        Args:
            segments: the estimates z, in CPU memory; mutated by less than a quantum over w, since the share is rounded.
            sums: the sums; mutated.
            share: the weight of the share of each chunk, 0 for none.
        """
        sums.w += share
        self.weights -= share
        if not share.any():
            return
        to_quanta = torch.from_numpy(share / (ONE * self._quantum))
        back = torch.from_numpy(ONE * self._quantum / self.weights)
        sigma = torch.from_numpy(sums.x)
        for block in self.blocks:
            for z, rows in block.groups(segments):
                wide = _wide(z.dtype)
                exact = z.to(wide) * to_quanta[rows, None].to(wide)
                rounded = exact.round()
                sigma[rows, : block.width] += rounded.int()
                # x = w z loses the rounded share, and w the exact one, so the rest of the rounding stays in z.
                exact.sub_(rounded).mul_(back[rows, None].to(wide))
                _add(z, exact)

    def take(self, segments: Sequence[Tensor], x: Integers, w: Weights) -> None:
        """Add the new shares of in-peers: x <- x + new, w <- w + new, and z = x / w.

        Args:
            segments: the estimates z, in CPU memory; mutated.
            x: the sum of the new shares, int32 [num_chunks, size].
            w: the sum of their weights, int64 [num_chunks].
        """
        self.weights += w
        if not w.any():
            return
        part = torch.from_numpy(w / self.weights)
        scale = torch.from_numpy(ONE * self._quantum / self.weights)
        new = torch.from_numpy(x)
        for block in self.blocks:
            for z, rows in block.groups(segments):
                wide = _wide(z.dtype)
                change = new[rows, : block.width].to(wide).mul_(scale[rows, None].to(wide))
                change.sub_(z.to(wide) * part[rows, None].to(wide))
                _add(z, change)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype is torch.float64 else torch.float32


def _add(z: Tensor, change: Tensor) -> None:
    if z.dtype is change.dtype:
        z.add_(change)
    else:
        z.copy_(change.add_(z))


class RunningSums(Mixer):
    """Push-sum with running sums in datagrams, for links that lose messages; no rank waits, and nothing is resent.

    TCP resends what a link has lost, and holds back all that comes after it: on a link with 20 % loss a step of SGP
    waits for seconds. Here a message has the sum of all shares for the peer so far, in place of the last share. So each
    message that arrives makes up for all lost ones before it. Round t of rank i, for its out-peers j and in-peers h:

        v       = P_ji(t) w_i                               # `Chunks.give`
        sigma_j <- sigma_j + (v z_i, v),  w_i <- w_i - v    # sums of all shares for j so far
        send sigma_j to j, in datagrams of one chunk each   # a lost one is not sent again
        for each sigma of h that has come since the last round:      # `ReceivedSums.news`, `Chunks.take`
            x_i, w_i <- x_i + (sigma - rho_h)_x, w_i + (sigma - rho_h)_w;   rho_h <- sigma
        z_i     = x_i / w_i                                 # the module has z all the time; x_i = w_i z_i

    A share is in the model of its sender, in the model of its receiver, or on its way. So the sums of x and of w over
    models and links are constant, up to the steps of optimizers, and each z approaches the mean. Each chunk of the
    model is a push-sum of its own, with a weight of its own, so that chunks may be lost one by one. Buffers have the
    weights of parameters. The optimizer steps on z, so it moves the sum of x by w_i times its step; weights on their
    way take no steps.

    [Note: fixed point] Sums of floating-point numbers lose digits as they grow. So sigma is an integer, in quanta:
    int32 for x, which wraps around, and int64 for w. The weights on a link are at most n together, so the difference of
    two sums is below n max|z|, and it is exact if that is below 2^31 quanta. The sender keeps the rest of its rounding,
    which moves z by less than `quantum` / w, so no sum loses it. A chunk with a weight below 1/16 gives no share, so
    that this stays small.

    [Note: peers that do not answer] A rank answers with the last number that it has heard, in one short datagram for
    each in-peer and round. A peer with `max_unanswered` numbers without an answer gets no new share; the last sums are
    sent again, which may come. So a dead peer takes a few shares of its in-peers along, and no more: the mean of the
    others moves by these shares, training goes on, and nothing raises. If a peer has not answered for the timeout of
    the wrapper, all ranks begin with weight one again, as their weights have become small, and the peer gets no share
    before it answers. If nothing has come from an in-peer for the timeout, a warning names it, once until it is heard
    again. Time counts in rounds with the peer only, ten of them at least: see `Silence`.

    Not with `overlap`, `wire_dtype`, `deltas`, exact averages in the schedule, a membership, `nprocs_per_node` or
    shards. Models on a GPU are mixed in CPU memory. `averaged()`, `consensus_distance()` and the comparison of models
    at the start are collectives of the process group, which wait; so they need all ranks. `averaged()` is the mean of
    z, without the weights. States have neither weights nor sums: a loaded model begins with weight one, and the shares
    on their way to it are dropped. The wrapper does not look for parameters that another tool makes equal after each
    step, as ranks compare them through the store, which waits.

    The messages have the codes of the key in GOSSIP_JOB_KEY, if it is set; each has the number of its link in this
    session. Others are counted and left out. `comm_stats()` has datagrams_sent, datagrams_unsent (refused by this
    machine), datagrams_received, datagrams_lost (missing numbers), datagrams_late (older than another one, or twice)
    and datagrams_refused.

    Args:
        quantum: the unit of sums, a power of two; n max|z| must stay below 2^30 quanta, and z moves by less than a
            quantum over w in each round. None: the smallest one with which values between -1024 and 1024 fit, which
            is 2^-19 with 2 ranks, 2^-14 (6e-5) with 64, and 2^-10 (1e-3) with 1024. Where values are small, a smaller
            one is finer.
        datagram_bytes: the bytes of a datagram, codes included, headers of UDP and IP not. A longer one than the link
            takes is sent in fragments, and lost with any of them. The default fits a tunnel over Ethernet; about 60,000
            is faster where nothing is lost, as on one machine.
        max_unanswered: see [Note: peers that do not answer].
        host: the IPv4 address of this machine for the other ranks; None: of the first interface in GLOO_SOCKET_IFNAME,
            or else of the interface to MASTER_ADDR.

    Raises:
        ValueError: an argument is out of range; or, in a round, a value of the model is.
        FloatingPointError: in a round, a value of the model is not finite, also with `on_nonfinite="spread"`.
        RuntimeError: in a round, the wrapper is a copy by `copy.deepcopy`, which has no socket.

    Hadjicostis, Vaidya, Dominguez-Garcia, "Robust Distributed Average Consensus via Exchange of Running Sums", IEEE
    Transactions on Automatic Control 2016, Algorithm 1; Kempe et al., "Gossip-Based Computation of Aggregate
    Information", FOCS 2003; Assran et al., "Stochastic Gradient Push for Distributed Deep Learning", ICML 2019, arXiv
    1811.10792.

    Example:
        >>> model = GossipDataParallel(model, algorithm=RunningSums())
    """

    keeps_models = True  # sums of shares, from round to round
    is_skippable = False
    never_waits = True
    _datagrams: Datagrams | None = transient(None)
    _inbox: Inbox | None = transient(None)
    _chunks: Chunks | None = transient(None)
    _sent: dict[int, SentSums] = transient({})
    _host: FlatVector | None = transient(None)  # a copy of a model on another device
    _in_peers: Sequence[int] = transient(())
    _silence: dict[int, Silence] = transient({})  # of in-peers
    _silent: set[int] = transient(set())  # in-peers that a warning has named, and that are silent since
    _given_up: set[int] = transient(set())  # out-peers that have not answered for the timeout
    _begins: bool = transient(True)  # whether an epoch begins with the next round

    def __init__(
        self,
        *,
        quantum: float | None = None,
        datagram_bytes: int = 1392,
        max_unanswered: int = 2,
        host: str | None = None,
    ) -> None:
        if quantum is not None and not (
            isinstance(quantum, float) and 0 < quantum <= 1 and math.frexp(quantum)[0] == 0.5
        ):
            raise ValueError(
                f"got quantum={quantum!r}, expected a power of two of at most 1, or None; pass 2.0**-20, for example"
            )
        datagram_bytes = checked_integer("datagram_bytes", datagram_bytes, _LEAST_BYTES, "pass 1392 for Ethernet")
        if datagram_bytes > MAX_BYTES:
            raise ValueError(
                f"got datagram_bytes={datagram_bytes}, expected at most {MAX_BYTES}, the longest datagram of UDP; pass "
                "1392 for Ethernet"
            )
        remedy = "a peer with so many sums to answer gets no new share; pass 2, for example"
        self.max_unanswered = checked_integer("max_unanswered", max_unanswered, 1, remedy)
        self.quantum, self.datagram_bytes, self.host = quantum, datagram_bytes, host

    def bind(self, mixing: MixingManager, transport: Transport, world: ModelWorld = ALONE) -> None:
        """See `Mixer`. Opens a socket, and exchanges the addresses with all ranks."""
        super().bind(mixing, transport)
        self.close()
        self._chunks, self._sent, self._begins, self._host = None, {}, True, None
        self._silent, self._given_up, self._silence = set(), set(), {}
        if transport.world_size == 1:
            return
        n = transport.world_size
        self._unit = 2.0 ** math.ceil(math.log2(_RANGE * n / _HALF_RANGE)) if self.quantum is None else self.quantum
        key = key_of()
        self._datagrams, self._inbox = (
            Datagrams(transport, key=key, host=self.host),
            Inbox(2 * transport.world_size * ONE),
        )
        self._size = (self.datagram_bytes - Datagrams.overhead(key)) // 4
        weakref.finalize(self, self._datagrams.close)
        host, _ = self._datagrams.address
        if key is None and not host.startswith("127."):
            warnings.warn(f"got datagrams at {host} and no key: {WITHOUT_KEY}", stacklevel=levels_to_user())

    def check(self, mixing: MixingManager) -> None:
        """See `Mixer`: a rank keeps the rest of its weight, so columns sum to one."""
        PushSum().check(mixing)

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
        if has_membership:
            raise ValueError(
                f"got {self} with a membership, expected another algorithm: its sums belong to links of ranks that "
                "stay as they are; leave membership out, as no rank waits for a dead one, or leave algorithm out, for "
                "SGP"
            )
        if is_sharded:
            raise ValueError(
                f"got a module that is sharded over processes with {self}, expected a whole one on each rank, which "
                "has weights of its own; leave fully_shard out, or leave algorithm out, for SGP"
            )
        for name, value, default, why in (
            ("overlap", overlap, False, "no round waits, so training hides nothing"),
            ("nprocs_per_node", nprocs_per_node, 1, "each rank has a whole model, with weights of its own"),
            ("average_every", schedule.average_every, 0, "an exact average waits for all ranks"),
            ("average_until", schedule.average_until, 0, "an exact average waits for all ranks"),
        ):
            if value != default:
                place = " in the schedule" if name.startswith("average") else ""
                raise ValueError(
                    f"got {name}={value!r}{place} with {self}, expected {default}: {why}; leave it out, or leave "
                    "algorithm out, for SGP"
                )

    @property
    def sources(self) -> Sequence[int]:
        """See `Mixer`."""
        return self._in_peers

    @property
    def weights(self) -> Tensor:
        """The push-sum weight of each chunk, float64, a copy; empty before the first round."""
        weights = np.zeros(0, np.int64) if self._chunks is None else self._chunks.weights
        return torch.from_numpy(weights / ONE)

    def start(self, s: FlatVector, t: int) -> None:
        """See `Mixer`. Gives the shares of this round, and sends the sums.

        Raises:
            ValueError: a value of the model is out of the range of the sums; nothing is sent then.
            FloatingPointError: a value of the model is not finite; nothing is sent then.
            RuntimeError: this is a copy, which has no socket; or the thread of the socket has ended by an error.
        """
        datagrams, inbox = self._datagrams, self._inbox
        if self.transport.world_size == 1:
            return
        rank, mixing = self.transport.rank, self.mixing
        if datagrams is None or inbox is None:
            raise RuntimeError(
                f"rank {self._name(rank)}: got a round of a copy of a wrapper with {self}, expected one of the wrapper "
                "itself, as a copy has no socket; wrap copy.deepcopy(model.module) on all ranks, with a new "
                f"{type(self).__name__}"
            )
        if datagrams.error is not None:
            raise RuntimeError(
                f"rank {self._name(rank)}: the thread of datagrams has ended by an error"
            ) from datagrams.error
        z = self._on_host(s).segments
        self._check_range(z)
        chunks = self._begin_epoch([len(segment) for segment in z], inbox)
        if not len(chunks):
            return
        own, self._in_peers = mixing.weights(rank, t).own, tuple(mixing.graph.in_peers(rank, t))
        if own <= 0:
            raise ValueError(
                f"got {mixing}, by which rank {self._name(rank)} keeps {own:g} of its weight in round {t}, expected "
                "more than 0: the shares may be lost; use UniformMixing"
            )
        numbers, num_received = inbox.heard()
        num_sent = {peer: datagrams.send(peer, Datagram(ANSWER, self._stamp(n))) for peer, n in numbers.items()}
        before = chunks.weights.copy()
        for peer in mixing.graph.out_peers(rank, t):
            sums = self._sent.get(peer) or self._sent.setdefault(peer, self._new_sums(len(chunks)))
            share = np.rint(before * mixing.weights(peer, t).inp[rank]).astype(np.int64)
            share[before < LEAST_WEIGHT] = 0
            if not self._answers(peer, sums, inbox):
                share.fill(0)
            chunks.give(z, sums, share)
            num_sent[peer] = num_sent.get(peer, 0) + self._send(datagrams, peer, sums, chunks)
        if isinstance(self.transport, PointToPoint):
            self.transport.num_round_bytes += sum(num_sent.values())
        self.transport.traffic.arrived(num_received, dict.fromkeys(num_received, 0.0), sent=num_sent)
        self._warn_of_silence(num_received)

    def finish(self, s: FlatVector) -> None:
        """See `Mixer`. Adds the shares that have come by now, and does not wait for others."""
        if self._inbox is not None and self._chunks is not None and (new := self._inbox.take()) is not None:
            try:
                self._chunks.take((s if self._host is None else self._host).segments, *new)
            finally:
                self._inbox.end_take()
        if self._host is not None:
            s.raw.copy_(self._host.raw)

    def _on_host(self, s: FlatVector) -> FlatVector:
        """s, or a copy of it in CPU memory, which `finish` copies back."""
        if s.raw.device.type == "cpu":
            self._host = None  # of a model that was on another device before
            return s
        if self._host is None or self._host.layout != s.layout:
            self._host = FlatVector.zeros(s.layout, torch.device("cpu"))
        self._host.raw.copy_(s.raw)
        return self._host

    def _check_range(self, segments: Sequence[Tensor]) -> None:
        """Raise an error where a sum of shares would not fit into an int32, or a value is not finite."""
        limit = _HALF_RANGE * self._unit / self.transport.world_size
        for z in segments:
            if not z.numel():
                continue
            least, most = (float(x) for x in z.aminmax())
            if not (math.isfinite(least) and math.isfinite(most)):
                raise FloatingPointError(
                    f"rank {self._name(self.transport.rank)}: got a model with values that are not finite, expected "
                    f"finite ones for {self}, whose sums are integers; go on from a checkpoint"
                )
            if max(-least, most) >= limit:
                raise ValueError(
                    f"rank {self._name(self.transport.rank)}: got a model with values from {least:g} to {most:g}, "
                    f"expected values between {-limit:g} and {limit:g} for {self} among {self.transport.world_size} "
                    f"ranks; pass a larger quantum, such as quantum=2.0**{math.frexp(self._unit)[1] + 3}, or "
                    "gossip_buffers=False if it is a buffer"
                )

    def _begin_epoch(self, numels: Sequence[int], inbox: Inbox) -> Chunks:
        """The chunks; begins an epoch, see [Note: epochs] of `Inbox`, if one is due or the model has other tensors."""
        chunks, datagrams = self._chunks, self._datagrams
        is_first, is_new = chunks is None, chunks is None or chunks.numels != list(numels)
        if chunks is None or is_new or self._begins or inbox.newest > inbox.epoch:
            chunks = self._chunks = Chunks(numels, self._size, self._unit)
            epoch = max(inbox.newest, inbox.epoch + (self._begins or is_new) * (not is_first))
            # A peer that is late now gets shares when it answers in the new epoch, so a dead one ends one epoch only.
            self._given_up |= {peer for peer, sums in self._sent.items() if self._is_late(peer, sums, inbox)}
            self._sent, self._begins = {}, False
            inbox.begin(epoch, chunks.widths, self._size)
            if is_first and datagrams is not None:
                datagrams.listen(inbox.handle)
        return chunks

    def _answers(self, peer: int, sums: SentSums, inbox: Inbox) -> bool:
        """Whether an out-peer has answered lately: see [Note: peers that do not answer]."""
        if (answered := inbox.answered(peer)) > sums.answered:
            sums.answered = answered
            self._given_up.discard(peer)
            sums.silence.begin()
        elif answered == sums.number:  # none waits for an answer
            sums.silence.begin()
        has_timed_out = sums.silence.has_ended_patience()
        if peer in self._given_up:
            return False
        is_late = self._is_late(peer, sums, inbox)
        if is_late and has_timed_out:
            self._given_up.add(peer)
            self._begins = True
        return not is_late

    def _new_sums(self, num_chunks: int) -> SentSums:
        return SentSums(num_chunks, self._size, self.transport.timeout.total_seconds())

    def _is_late(self, peer: int, sums: SentSums, inbox: Inbox) -> bool:
        return sums.number - inbox.answered(peer) >= self.max_unanswered

    def _send(self, datagrams: Datagrams, peer: int, sums: SentSums, chunks: Chunks) -> int:
        """Send all sums, and return the bytes. A full queue drops the last ones, so each round begins elsewhere."""
        sums.number += 1
        self._begins = self._begins or sums.number == LAST_NUMBER
        assert self._inbox is not None, "`bind` has made it"
        self._inbox.sends(peer, sums.number)
        stamp, weights = self._stamp(sums.number), sums.w.tolist()
        row_bytes, body = 4 * self._size, sums.x.data.cast("B")
        first, num_bytes = sums.number * _STRIDE % len(chunks), 0
        for c in (*range(first, len(chunks)), *range(first)):
            piece = body[c * row_bytes : c * row_bytes + 4 * chunks.widths[c]]
            num_bytes += datagrams.send(peer, Datagram(SUMS, stamp, c, weights[c], piece))
        return num_bytes

    def _stamp(self, number: int) -> int:
        assert self._inbox is not None, "`bind` has made it"
        return self._inbox.epoch << COUNT_BITS | number

    def _warn_of_silence(self, heard: Mapping[int, int]) -> None:
        """Warn of in-peers that have been silent for the timeout; heard: those with sums since the last round."""
        limit = self.transport.timeout.total_seconds()
        for peer in heard:
            self._silence.setdefault(peer, Silence(limit)).begin()
            self._silent.discard(peer)
        for peer in self._in_peers:
            silence = self._silence.setdefault(peer, Silence(limit))
            if silence.has_ended_patience() and peer not in self._silent:
                self._silent.add(peer)
                warnings.warn(
                    f"rank {self._name(self.transport.rank)}: no datagram of rank {self._name(peer)} has come for "
                    f"{silence.seconds:.0f} s: it is dead or slow, the link loses all, or a firewall stops UDP; "
                    "training goes on without its model",
                    stacklevel=levels_to_user(),
                )

    def _name(self, rank: int) -> int:
        return self.transport.names[rank]

    def restarted(self, event: Restart) -> None:
        """See `State`: a new epoch begins, see [Note: epochs] of `Inbox`."""
        self._begins = True

    def stats(self) -> dict[str, float]:
        """See `Mixer`."""
        if self._datagrams is None or self._inbox is None:
            return {}
        counts, inbox = self._datagrams.counts, self._inbox
        return {
            "datagrams_sent": counts.sent,
            "datagrams_unsent": counts.unsent,
            "datagrams_received": counts.received,
            **inbox.stats(),
            "datagrams_refused": counts.refused + inbox.num_refused,
            "datagram_bytes_received": counts.bytes_received,
        }

    def close(self) -> None:
        """See `Mixer`: close the socket."""
        if self._datagrams is not None:
            self._datagrams.close()

    def __repr__(self) -> str:
        settings = (("quantum", None), ("datagram_bytes", 1392), ("max_unanswered", 2))
        given = [f"{name}={getattr(self, name)}" for name, default in settings if getattr(self, name) != default]
        return f"{type(self).__name__}({', '.join(given)})"
