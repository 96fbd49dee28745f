"""Compute, Network and StepClock: how long computing and sending take for n workers, and when each step starts."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from ..rounds.rows import Array, Flags, Indices, Rows
from ..rounds.stacked import Answered

TCP_SHARE = 0.957
"""The share of the line rate that TCP/IP headers leave, for Ethernet frames of 1,500 bytes."""
_WORKERS, _STEPS, _LINKS = range(3)  # the purposes of draws
_UNITS = {"bit/s": 1.0, "kbit/s": 1e3, "Mbit/s": 1e6, "Gbit/s": 1e9, "Tbit/s": 1e12, "us": 1e-6, "ms": 1e-3, "s": 1.0}
FORWARD_SHARE = 1 / 3
"""The share of the forward pass in the time of forward and backward pass."""
FIRST_BUCKET_BYTES, BUCKET_BYTES = 1 << 20, 25 << 20
"""The sizes of gradient buckets of DistributedDataParallel. The first one is small, so that the wire starts early."""


@dataclass(frozen=True)
class Compute:
    """Seconds of one training step of a worker, without communication.

    A step takes overhead_seconds + seconds * (speed of the worker) * (luck of the step). The forward pass takes a third
    of `seconds`, and the backward pass the rest. Both factors are log-normal with median 1. The times are a pure
    function of (seed, step), so all methods meet the same delays.

    Args:
        seconds: forward and backward pass of a worker of median speed, above 0. A list of measured durations is drawn
            from at random.
        overhead_seconds: the time of loading, the optimizer and the like, before the forward pass.
        rank_spread: the standard deviation of the logarithm of a worker's speed, which is constant.
        step_spread: the standard deviation of the logarithm of the luck of each step.
        straggle_share: the probability that a step straggles, 0 to 1.
        straggle_factor: the factor by which such a step takes longer, at least 1.
        slow_rank_factor: the factor by which all steps of worker 0 take longer, at least 1.
        speeds: the relative speeds of workers 0, 1, and so on, each above 0; after the last one it begins anew. A
            worker of speed 4 takes a quarter of the time. Empty: all are 1.
        seed: the seed of all draws.

    Raises:
        ValueError: a number is out of range.

    >>> Compute(seconds=0.25, straggle_share=0.5, straggle_factor=10).step_seconds(0, np.arange(4)).tolist()
    [2.5, 2.5, 0.25, 2.5]
    """

    seconds: float | Sequence[float]
    overhead_seconds: float = 0.0
    rank_spread: float = 0.0
    step_spread: float = 0.0
    straggle_share: float = 0.0
    straggle_factor: float = 10.0
    slow_rank_factor: float = 1.0
    speeds: Sequence[float] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        for speed in self.speeds:
            check("speeds", self.speeds, 0 < speed < math.inf, "positive numbers; 2 takes half of the time")
        for seconds in np.atleast_1d(self.seconds).tolist() or [0.0]:
            check("seconds", seconds, 0 < seconds < math.inf, "a positive number; its unit is in its name")
        least = {"overhead_seconds": 0, "rank_spread": 0, "step_spread": 0, "straggle_factor": 1, "slow_rank_factor": 1}
        check_numbers(self, least)
        check_share("straggle_share", self.straggle_share)

    @property
    def is_uneven(self) -> bool:
        """Whether steps of equal work take unequal times."""
        spreads = self.rank_spread or self.step_spread or self.straggle_share
        lists = np.unique(self.seconds).size, np.unique(self.speeds).size
        return bool(spreads) or self.slow_rank_factor > 1 or max(lists) > 1

    def median_seconds(self, workers: Indices) -> Array:
        """Return the duration of the median step of each worker, in seconds: float64 [n].

        Args:
            workers: the numbers of the workers, int64 [n].
        """
        return self.overhead_seconds + float(np.median(self.seconds)) * self._speeds(workers)

    def compute_seconds(self, step: int, workers: Indices) -> Array:
        """Return the duration of forward and backward pass of each worker in a step, in seconds: float64 [n].

        Args:
            step: the number of the step.
            workers: the numbers of the workers, int64 [n].
        """
        draw, most = _generator(self.seed, _STEPS, step), int(workers.max()) + 1
        factors = np.exp(self.step_spread * draw.standard_normal(most))
        factors[draw.random(most) < self.straggle_share] *= self.straggle_factor
        seconds = draw.choice(np.atleast_1d(self.seconds), most)
        return (seconds * factors)[workers] * self._speeds(workers)

    def step_seconds(self, step: int, workers: Indices) -> Array:
        """Return the duration of the whole step of each worker, in seconds: float64 [n].

        Args:
            step: the number of the step.
            workers: the numbers of the workers, int64 [n].
        """
        return self.overhead_seconds + self.compute_seconds(step, workers)

    def _speeds(self, workers: Indices) -> Array:
        draw = _generator(self.seed, _WORKERS, 0).standard_normal(int(workers.max()) + 1)
        own = np.resize(self.speeds or 1.0, len(draw))[workers]
        return np.exp(self.rank_spread * draw)[workers] * np.where(workers == 0, self.slow_rank_factor, 1.0) / own


class LinkSpec(NamedTuple):
    """A link between two workers: the line rate and the latency of a message; `TCP_SHARE` of the rate carries data.

    >>> LinkSpec.of("100 Mbit/s, 80 ms")
    LinkSpec(rate_bit_s=100000000.0, latency_s=0.08)
    """

    rate_bit_s: float
    latency_s: float = 1e-4

    @classmethod
    def of(cls, text: str | LinkSpec) -> LinkSpec:
        """Return the link that a text describes: its rate, and after a comma its latency.

        Raises:
            ValueError: the text describes no link, or a number is out of range.
        """
        if isinstance(text, str):
            try:
                parts = [part.split() for part in text.split(",")]
                return cls.of(cls(*(float(number) * _UNITS[unit] for number, unit in parts)))
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"got the link {text!r} ({error}), expected such as '10 Gbit/s, 0.1 ms'") from error
        check("rate_bit_s", text.rate_bit_s, 0 < text.rate_bit_s < math.inf, "a positive number")
        check("latency_s", text.latency_s, 0 <= text.latency_s < math.inf, "a number of at least 0")
        return text


@dataclass(frozen=True)
class Network:
    """The links of workers: a worker has one full-duplex link to a switch that never congests.

    Args:
        link: a text such as "1 Gbit/s, 0.1 ms", or a `LinkSpec`. Or a matrix of them: entry (i, j) is the link between
            workers of the groups i and j. With n groups, each pair of n workers has a link of its own.
        shares: the relative size of each group. Workers are in the order of their groups.
        slow_share: the share of workers with a slow link, 0 to 1; at least one worker if above 0.
        slow_factor: the factor by which such a link is slower, at least 1.
        memory_byte_s: bytes of a model that a worker reads or writes per second when it copies and mixes, above 0. A
            message takes three such passes, a code and an outer step more; overlap takes two more, for which training
            waits. The default is of a process with a core of its own. Divide it by the number of processes that share
            a core. On a GPU it is hundreds of times more.
        message_byte_s: bytes of messages that the processor of a worker sends per second, while it receives as many.
            This time is not hidden under computation. The default of infinity is of workers whose computation leaves
            processors free, as on a GPU. Where processors compute all the time, take 1.5e9 for a core of its own
            (benchmarks/results/clock_cells.csv), divided by the number of processes that share a core.
        seed: the seed of the choice of slow links.
        lines: the number of the region of each group. The workers of a region share one line to all other regions, in
            each direction; (): there are no such lines.
        line_bit_s: the rate of these lines; data take the share `TCP_SHARE` of it.
        average_start_s: the time of an average of an algorithm beside its messages: the ranks meet, and TCP begins
            slowly after a pause.

    Raises:
        ValueError: a number is out of range, or a text describes no link.

    >>> round(Network("1 Gbit/s").on(np.arange(2)).wire_seconds(44.7e6), 4)  # 11.2 M parameters in float32
    0.3737
    """

    link: str | LinkSpec | Sequence[Sequence[str | LinkSpec]]
    shares: tuple[int, ...] = (1,)
    slow_share: float = 0.0
    slow_factor: float = 10.0
    memory_byte_s: float = 9e9
    message_byte_s: float = math.inf
    seed: int = 0
    lines: tuple[int, ...] = ()
    line_bit_s: float = math.inf
    average_start_s: float = 0.0

    def __post_init__(self) -> None:
        check_share("slow_share", self.slow_share)
        check_numbers(self, {"slow_factor": 1, "memory_byte_s": 1, "average_start_s": 0})
        check("line_bit_s", self.line_bit_s, self.line_bit_s > 0, "a positive number, or infinity")
        is_fitting = len(self.lines) in (0, len(self.shares))
        check("lines", self.lines, is_fitting, f"the number of the region of each of the {len(self.shares)} groups")
        check("message_byte_s", self.message_byte_s, self.message_byte_s >= 1, "a number of at least 1, or infinity")
        table, size = self.table(), len(self.shares)
        if {len(table), *map(len, table)} != {size} or min(self.shares) < 1:
            raise ValueError(f"got link={self.link} with shares={self.shares}, expected a matrix of {size} x {size}")

    @classmethod
    def regions(
        cls, sizes: Mapping[str, int], *, inside: str | LinkSpec, between: str | LinkSpec, **others: float
    ) -> Network:
        """Return the network of regions with equal links inside, and slower ones between them.

        Args:
            sizes: the relative number of workers of each region.
            inside: the link between workers of one region.
            between: the link between workers of two regions.
            others: further arguments of `Network`.
        """
        rows = [[inside if one == other else between for other in sizes] for one in sizes]
        return cls(rows, tuple(sizes.values()), **others)  # type: ignore[arg-type]

    def table(self) -> list[list[LinkSpec]]:
        """Return the matrix of links."""
        one = self.link
        rows = [[one]] if isinstance(one, str | LinkSpec) else one
        return [[LinkSpec.of(link) for link in row] for row in rows]

    def on(self, workers: Indices) -> WorkerLinks:
        """Return the links of these workers, given by their numbers from the beginning of training."""
        return WorkerLinks(self, workers)


class MessageCost(NamedTuple):
    """The cost of a message from a worker to one peer.

    num_bytes: the size on the wire.
    encode_seconds: the time before it is sent, once for all peers.
    decode_seconds: the time after it has arrived, for each sender.
    """

    num_bytes: float
    encode_seconds: float = 0.0
    decode_seconds: float = 0.0


class WorkerLinks:
    """The links of n workers, and the time of messages on them.

    Args:
        network: the description of the links.
        workers: the numbers of the workers, int64 [n].
    """

    def __init__(self, network: Network, workers: Indices) -> None:
        self.network, self.workers, self.num_ranks = network, workers, len(workers)
        most = int(workers.max()) + 1
        stops = np.cumsum(network.shares) / sum(network.shares)
        group = np.searchsorted(stops, (workers + 0.5) / most)
        rates, latencies = np.moveaxis(np.array(network.table()), -1, 0)
        self._bit_seconds, self._latency = 1 / (rates * TCP_SHARE), latencies
        self._group = group
        self._region = np.array(network.lines or [0] * len(network.shares))[group]
        self._line_bit_seconds = 1 / (network.line_bit_s * TCP_SHARE)
        num_slow = math.ceil(network.slow_share * most)
        is_slow = _generator(network.seed, _LINKS, 0).permutation(most)[:num_slow]
        self.slowness = np.where(np.isin(workers, is_slow), network.slow_factor, 1.0)
        ring = np.arange(self.num_ranks), np.roll(np.arange(self.num_ranks), -1)
        self.latency_s = float(self._latency[group[ring[0]], group[ring[1]]].max())
        leaving = self._region[ring[0]][self._region[ring[0]] != self._region[ring[1]]]
        self.num_crossing_ring = len(leaving)
        crowd = max(np.bincount(leaving), default=0)  # neighbours on the ring that share a line
        self._slowest = max(
            float(self._bit_seconds[group[ring[0]], group[ring[1]]].max()), float(crowd * self._line_bit_seconds)
        )

    def memory_seconds(self, num_bytes: float) -> float:
        """Return the time of one pass over so many bytes of memory."""
        return num_bytes / self.network.memory_byte_s

    def processor_seconds(self, num_bytes: float) -> float:
        """Return the time in which a processor sends so many bytes of messages and receives as many."""
        return num_bytes / self.network.message_byte_s

    def wire_seconds(self, num_bytes: float) -> float:
        """Return the time for which so many bytes keep a full link between two neighbours busy, without latency."""
        return 8 * num_bytes * self._slowest

    def plain_message(self, num_bytes: float) -> MessageCost:
        """Return the cost of a model; mixing takes three passes: read the message, read and write the own model."""
        return MessageCost(num_bytes, decode_seconds=3 * self.memory_seconds(num_bytes))

    def exchange_seconds(self, rows: Rows, message: MessageCost) -> Array:
        """Return the time from when a worker and its in-peers have encoded until it has mixed: float64 [n].

        A link carries all messages of its worker; outgoing and incoming messages do not slow each other. A worker waits
        for the slowest of its incoming messages and of the outgoing messages of its in-peers.
        """
        pairs = self._group[:, None], self._group[rows.peers]
        wire = np.where(rows.is_peer, 8 * message.num_bytes * self._bit_seconds[pairs], 0.0)
        incoming, outgoing = wire.sum(1), np.bincount(rows.peers.flat, wire.flat, self.num_ranks)
        sent = np.where(rows.is_peer, (self.slowness * outgoing)[rows.peers], 0.0).max(axis=1, initial=0.0)
        latency = np.where(rows.is_peer, self._latency[pairs], 0.0).max(axis=1, initial=0.0)
        processor = self.processor_seconds(message.num_bytes) * rows.in_degrees
        wire = np.maximum(np.maximum(sent, self.slowness * incoming), self._line_seconds(rows, message.num_bytes))
        return np.maximum(wire, processor) + message.decode_seconds * rows.in_degrees + latency

    def part(self, workers: Sequence[int]) -> Network:
        """Return the network of some workers of one region; their links have the rates of whole, not of slow, ones."""
        rows = [[self.spec(u, v) for v in workers] for u in workers]
        return replace(self.network, link=rows, shares=(1,) * len(rows), lines=(), line_bit_s=math.inf, slow_share=0.0)

    def spec(self, u: int, v: int) -> LinkSpec:
        """Return the link between two workers."""
        return self.network.table()[self._group[u]][self._group[v]]

    def num_crossing(self, rows: Rows) -> int:
        """Return the number of messages of a round to other regions."""
        return int(self._crosses(rows).sum())

    def _crosses(self, rows: Rows) -> Flags:
        return rows.is_peer & (self._region[:, None] != self._region[rows.peers])

    def _line_seconds(self, rows: Rows, num_bytes: float) -> Array:
        """The time for which the lines of regions carry the messages of a worker and all others: float64 [n]."""
        own, other, crosses = self._region[:, None], self._region[rows.peers], self._crosses(rows)
        seconds = 8 * num_bytes * self._line_bit_seconds
        num_regions = int(self._region.max()) + 1
        incoming = np.bincount(self._region, crosses.sum(1), num_regions)
        outgoing = np.bincount(other[crosses], minlength=num_regions)
        return np.where(crosses, seconds * np.maximum(incoming[own], outgoing[other]), 0.0).max(axis=1, initial=0.0)

    def pair_seconds(self, ranks: Indices, peers: Indices, message: MessageCost) -> Array:
        """Return the time of one message from each of `peers` to each of `ranks`, with nothing else on their links."""
        slowness, pairs = (
            np.maximum(self.slowness[ranks], self.slowness[peers]),
            (self._group[ranks], self._group[peers]),
        )
        crosses = self._region[ranks] != self._region[peers]
        bit_seconds = np.maximum(self._bit_seconds[pairs], np.where(crosses, self._line_bit_seconds, 0.0))
        wire = 8 * message.num_bytes * bit_seconds * slowness
        wire = np.maximum(wire, self.processor_seconds(message.num_bytes))
        return wire + self._latency[pairs] + message.decode_seconds

    def all_reduce_seconds(self, num_bytes: float) -> float:
        """Return the time of a ring all-reduce: 2 (n - 1) messages of 1 / n of the bytes, one after another.

        A worker adds a message of the first half, in three passes, while the next one is on the wire.
        """
        part = num_bytes / self.num_ranks
        return self.gather_seconds(part, add_seconds=3 * self.memory_seconds(part)) + self.gather_seconds(part)

    def gather_seconds(self, num_bytes: float, *, add_seconds: float = 0.0) -> float:
        """Return the time in which every worker gets so many bytes of each other one along a ring.

        Args:
            num_bytes: the size of a message.
            add_seconds: the time in which a processor adds up a message.
        """
        wire = self.wire_seconds(num_bytes) * float(self.slowness.max())
        processor = self.processor_seconds(num_bytes) + add_seconds
        return (self.num_ranks - 1) * (max(wire, processor) + self.latency_s)


Exchanges: TypeAlias = Sequence[Answered]
"""The communication of a step, one after another: rounds of gossip by the rows of W(t), and exact averages."""


class StepClock:
    """The time at which each worker starts its step k, if training waits for rounds.

    Step k is the round or average that its forward begins with, if there is one, and the compute after it. A worker
    starts when it and its in-peers have come and the exchange is done:
    start_i(k + 1) = max over i and its in-peers of their arrival, + exchange.

    Args:
        compute: the duration of steps.
        links: the workers and their links.
        message: the message from a worker to a peer in one phase of a round, with the buffers that are mixed.
        buffer_bytes: the size of these buffers, which travel once in a round.
        model_bytes: the size of the vector that exact averages and copies are of; None: the size of the message.
        average: an average over all workers: the bytes that each sends, and its time; None: the all-reduce of a model.
        scheduled: an exact average of the schedule; None: as `average`.

    Attributes:
        starts: the time at which each worker has started its present step: float64 [n], in seconds.
        waited_seconds: the time for which each worker has waited so far: float64 [n].
        sent_bytes: the bytes that a worker has sent so far, mean over workers.
        line_bytes: the bytes that all workers have sent to other regions so far, see `Network.lines`.
        k: the number of the next step, `first_k` of the first one.
        is_stepping: bool [n], the workers that compute the present step; None: all.
    """

    begins_with_round = True
    is_overlapped = False
    is_stepping: Flags | None = None

    def __init__(
        self,
        compute: Compute,
        links: WorkerLinks,
        message: MessageCost,
        *,
        buffer_bytes: float = 0.0,
        model_bytes: float | None = None,
        average: MessageCost | None = None,
        scheduled: MessageCost | None = None,
    ) -> None:
        self.compute, self.links, self.message = compute, links, message
        n, size = links.num_ranks, message.num_bytes if model_bytes is None else model_bytes
        self.model_bytes, self.buffer_bytes = size, buffer_bytes
        self.average = average or MessageCost(2 * (n - 1) / n * size, links.all_reduce_seconds(size))
        self.scheduled = scheduled or self.average
        self.starts, self.waited_seconds = np.zeros(n), np.zeros(n)
        self.sent_bytes = self.line_bytes = 0.0
        self.k = self.first_k = 0

    def advance(self, exchanges: Exchanges) -> None:
        """Go on to the next step, which begins with these exchanges."""
        arrivals = self.arrivals() if self.k > self.first_k else self.starts
        starts = self._start_times(arrivals, exchanges if len(arrivals) > 1 else ())
        self.waited_seconds += starts - arrivals
        self.starts[:] = starts
        self.k += 1

    def start_at(self, seconds: float, k: int) -> None:
        """Begin at this time and step, in place of a clock for other workers."""
        self.starts[:] = seconds
        self.k = self.first_k = k

    def arrivals(self) -> Array:
        """Return the time at which each worker has computed the step that it has started."""
        return self.starts + self.compute.step_seconds(self.k - 1, self.links.workers)

    def _start_times(self, arrivals: Array, exchanges: Exchanges) -> Array:
        """Return the time at which each worker may start, having come at `arrivals`."""
        return self._exchanged(arrivals, exchanges)

    def _exchanged(self, since: Array, exchanges: Exchanges) -> Array:
        """Return the time at which each worker has the result of all exchanges, if it takes part since then."""
        for answered in exchanges:
            rows = answered.rows
            if rows is None:
                average = self.scheduled if answered.is_scheduled else self._average(answered.share)
                since = np.full(len(since), since.max() + average.encode_seconds)
                self._count(average)
            else:
                num_bytes = self.message.num_bytes - (0.0 if answered.has_buffers else self.buffer_bytes)
                message = self.message._replace(num_bytes=num_bytes)
                begun = rows.latest(since + message.encode_seconds)
                since = begun + self.links.exchange_seconds(rows, message)
                self.sent_bytes += rows.mean_out_degree * num_bytes
                self.line_bytes += self.links.num_crossing(rows) * num_bytes
        return since

    def _count(self, average: MessageCost) -> None:
        """Count the bytes of an average along a ring."""
        self.sent_bytes += average.num_bytes
        self.line_bytes += self.links.num_crossing_ring * average.num_bytes

    def _average(self, share: float | None) -> MessageCost:
        """The cost of an average of a round.

        Args:
            share: messages of such a share of the vector go from all to all, in place of an all-reduce of it; None: as
                `average` says.
        """
        if share is None:
            return self.average
        num_bytes, whole = share * self.model_bytes + self.buffer_bytes, self.model_bytes + self.buffer_bytes
        seconds = self.average.encode_seconds - self.links.all_reduce_seconds(whole)
        others = self.links.num_ranks - 1
        return MessageCost(others * num_bytes, seconds + self.links.gather_seconds(num_bytes))


class OverlapClock(StepClock):
    """Rounds under the compute: start_i(k + 1) = max(arrival_i, when the round that began `delay` steps ago is done).

    Rounds of fragments that overlap each other share the link: one begins when the one before is done.

    Args:
        delay: the steps from the begin of a round until training waits for it, at least 1.
        copy_seconds: the time for which training waits in a step with a round; None: the snapshot and the correction,
            a pass over the model each.
        is_alone: whether a round ends at the latest when the next one begins.
    """

    is_overlapped = True

    def __init__(
        self,
        *cluster: Any,
        delay: int = 1,
        copy_seconds: float | None = None,
        is_alone: bool = False,
        **sizes: Any,
    ) -> None:
        super().__init__(*cluster, **sizes)
        self.delay, self.is_alone = delay, is_alone
        self.copy_seconds = 2 * self.links.memory_seconds(self.model_bytes) if copy_seconds is None else copy_seconds
        self._flights: deque[tuple[int, Array]] = deque()  # the step at which a round is due, and when it is done

    def _start_times(self, arrivals: Array, exchanges: Exchanges) -> Array:
        starts = arrivals
        is_awaited = bool(exchanges) and exchanges[0].is_awaited
        lands_all = is_awaited or (self.is_alone and bool(exchanges))
        begin = self._flights[-1][1] if self._flights else starts
        while self._flights and (lands_all or self._flights[0][0] <= self.k):
            starts = np.maximum(starts, self._flights.popleft()[1])
        if is_awaited:
            return self._exchanged(starts, exchanges)
        if exchanges:
            starts, sent_bytes = starts + self.copy_seconds, self.sent_bytes
            done = self._exchanged(np.maximum(starts, begin), exchanges)
            self._flights.append((self.k + self.delay, done))
            starts = starts + self.links.processor_seconds(self.sent_bytes - sent_bytes)
        return starts


class BucketClock(StepClock):
    """DistributedDataParallel: gradients come evenly over the backward pass, under which full buckets are all-reduced.

    A bucket begins when all workers have it and the one before is done. Nothing hides the last one. A forward averages
    the gradient of the step before it, so the first forward has none. Buckets have the sizes of the gradients; on the
    wire they are smaller where the message is, and take their shares of its encoding and decoding.
    """

    begins_with_round = False

    def _start_times(self, arrivals: Array, exchanges: Exchanges) -> Array:
        if self.k == self.first_k or not exchanges:
            return arrivals
        compute, size = self.compute.compute_seconds(self.k - 1, self.links.workers), self.model_bytes
        message, done, reduced = self.message, 0.0, 0.0
        coding = (message.encode_seconds + message.decode_seconds) / size  # of a byte
        for bucket in bucket_bytes(size):
            reduced += bucket
            left = (1 - reduced / size) * (1 - FORWARD_SHARE) * compute  # of the backward pass
            reduction = self.links.all_reduce_seconds(bucket * message.num_bytes / size)
            done = max(done, float((arrivals - left).max())) + reduction + bucket * coding
        self._count(self.average)
        return np.full(len(arrivals), done)


def bucket_bytes(num_bytes: float) -> list[float]:
    """Return the sizes of the buckets into which DistributedDataParallel cuts so many bytes of gradients.

    >>> bucket_bytes(30 << 20)
    [1048576, 26214400, 4194304]
    """
    sizes = [min(FIRST_BUCKET_BYTES, num_bytes)]
    while (rest := num_bytes - sum(sizes)) > 0:
        sizes.append(min(BUCKET_BYTES, rest))
    return sizes


def check(name: str, value: object, is_good: bool, expected: str) -> None:
    """Raise a ValueError that names the value unless it is good."""
    if not is_good:
        raise ValueError(f"got {name}={value}, expected {expected}")


def check_share(name: str, value: float) -> None:
    """Raise a ValueError unless the value is from 0 to 1."""
    check(name, value, 0 <= value <= 1, "a share from 0 to 1; give 0.1 for one in ten")


def check_numbers(owner: object, least: Mapping[str, float]) -> None:
    """Raise a ValueError unless these attributes are finite numbers of at least so much."""
    for name, smallest in least.items():
        value = getattr(owner, name)
        check(name, value, smallest <= value < math.inf, f"a number of at least {smallest}")


def _generator(seed: int, purpose: int, step: int) -> np.random.Generator:
    return np.random.default_rng((seed, purpose, step))
