"""AD-PSGD, dpwa and WAGMA-SGD of n workers: each worker takes its steps at its own pace."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from ..graph_manager.butterfly_groups import ButterflyGroups
from ..mixing_manager.momentum_rates import MomentumRates
from ..rounds.requests import SGDStep
from ..rounds.rows import Array, Flags, Indices, StackedMixing, column
from ..schedule import Action
from .clock import Compute, Exchanges, MessageCost, StepClock, WorkerLinks


class OwnPace(StepClock):
    """A method whose workers do not all step together: a clock that is its own driver.

    Args:
        compute, links: see `StepClock`.
        message: a model.

    Attributes:
        arrived: the time at which each worker has computed, or will have computed, its present step: float64 [n].
        published: the models that peers see, [n, d].
    """

    momentum, late_buffers = None, None

    def __init__(self, compute: Compute, links: WorkerLinks, message: MessageCost) -> None:
        super().__init__(compute, links, message)
        self.line_bytes = math.nan  # not counted
        self.num_ranks, self.arrived = links.num_ranks, self.starts.copy()
        self.published = torch.empty(0, device="cpu")

    def step(self, x: Tensor, k: int, action: Action, *, sgd: SGDStep | None = None) -> Exchanges:
        """Run the safe points of one tick or one round on the models x [n, d]; see `Stacked`."""
        if self.k == self.first_k:
            self.published, self.arrived = x.clone(), self.starts.copy()
        stepping, starts = self._turn(x)
        self.waited_seconds[stepping] += (starts - self.arrived)[stepping]
        self.starts[stepping] = starts[stepping]
        seconds = self.compute.step_seconds(self.k, self.links.workers)
        self.arrived[stepping] = (starts + seconds)[stepping]
        self.is_stepping = stepping
        return ()

    def estimates(self, x: Tensor) -> Tensor:
        """See `Stacked`."""
        return x

    def settle(self, x: Tensor) -> None:
        """See `Stacked`: messages in flight are dropped."""

    def advance(self, exchanges: Exchanges) -> None:
        """See `StepClock`."""
        self.k += 1

    def arrivals(self) -> Array:
        """See `StepClock`."""
        return self.arrived

    @abstractmethod
    def _turn(self, x: Tensor) -> tuple[Flags, Array]:
        """Return which workers begin a step, and when, if they do; their models take in the messages of peers."""


class Asynchronous(OwnPace):
    """A method whose workers never wait, while models travel.

    Time advances in ticks of the fastest worker's median step. In a tick every worker whose last step has ended takes
    one more. The time at which it really ended is kept, so a tick rounds the order of events, not their durations.

    Args:
        compute, links, message: see `OwnPace`.
    """

    is_overlapped = True

    def __init__(self, compute: Compute, links: WorkerLinks, message: MessageCost) -> None:
        super().__init__(compute, links, message)
        n = self.num_ranks
        self.tick_seconds = float(compute.median_seconds(links.workers).min())
        self._began = 0.0
        # Training waits only for a copy of the own model and the addition of what came: a pass each.
        self._pass_seconds = 2 * links.memory_seconds(message.num_bytes) if n > 1 else 0.0
        self._partners = np.zeros(n, dtype=np.int64)
        self._ends = np.full(n, np.inf)  # of the exchange that a worker has asked for; inf: there is none
        self._received = torch.empty(0, device="cpu")  # by each worker in the exchange that it has asked for

    def _turn(self, x: Tensor) -> tuple[Flags, Array]:
        if self.k == self.first_k:
            self._received, self._began = torch.zeros_like(x), float(self.arrived[0])
        now = (self._began + (self.k - self.first_k) * self.tick_seconds) * (1 + 1e-12)
        stepping = self.arrived <= now
        if self.num_ranks > 1:
            self._communicate(x, np.flatnonzero(stepping), now)
        return stepping, self.arrived + self._pass_seconds

    @abstractmethod
    def _communicate(self, x: Tensor, ranks: Indices, now: float) -> None:
        """Run the safe points of `ranks` at their `arrivals`, in one tick."""


class Bilateral(Asynchronous):
    """AD-PSGD as `BilateralEngine` has it: active workers ask, one exchange at a time, passive workers answer in turn.

    Both ends of an exchange get half the difference of the models that they had published when it began; x takes it in
    at the next safe point after its end. So the sum over workers is kept, with `in_flight`.

    Args:
        mixing: weights over a bipartite graph with one peer per round.
        compute, links, message: see `OwnPace`.
        rates: the rates of the momentum of A2CiD2; None: no momentum.
    """

    def __init__(
        self,
        mixing: StackedMixing,
        compute: Compute,
        links: WorkerLinks,
        message: MessageCost,
        *,
        rates: MomentumRates | None = None,
    ) -> None:
        super().__init__(compute, links, message)
        self.mixing, n = mixing, self.num_ranks
        self._is_active = np.array([not mixing.graph.is_passive(rank) for rank in range(n)])
        self._rounds = np.zeros(n, dtype=np.int64)  # of each active worker
        self._free_at = np.zeros(n)  # the time at which a passive worker has answered all that have asked
        self._rates, self._num_ended = rates, np.zeros(n, dtype=np.int64)  # exchanges since the last safe point
        self._difference = torch.zeros((), device="cpu")  # of the second models of A2CiD2 to x
        self._pending = torch.zeros((), device="cpu")  # changes by exchanges that have ended, for the next safe point

    def _communicate(self, x: Tensor, ranks: Indices, now: float) -> None:
        if self.k == self.first_k:
            self._pending, self._difference = torch.zeros_like(x), torch.zeros_like(x)
        done = np.flatnonzero(self._ends <= now)
        self._add_changes(self._pending, done)
        self._ends[done] = np.inf
        if self._rates is not None:
            np.add.at(self._num_ended, done, 1)
            np.add.at(self._num_ended, self._partners[done], 1)
            self._add_momentum(self._rates, ranks[self._num_ended[ranks] > 0])
        x[ranks] += self._pending[ranks]
        self._pending[ranks] = 0.0
        self.published[ranks] = x[ranks]
        asking = ranks[self._is_active[ranks] & np.isinf(self._ends[ranks])]
        asking = asking[np.argsort(self.arrived[asking], kind="stable")]
        peers, weights = asking.copy(), np.zeros(len(asking))
        for t in np.unique(self._rounds[asking]).tolist():  # each worker is in a round of its own
            rows, chosen = self.mixing.round(t), self._rounds[asking] == t
            peers[chosen], weights[chosen] = rows.peers[asking[chosen], 0], rows.weights[asking[chosen], 0]
        self._rounds[asking] += 1
        self._ask(asking, peers, weights)

    def _add_momentum(self, rates: MomentumRates, ranks: Indices) -> None:
        """Add the momentum of these workers to their pending changes."""
        times = np.array(rates.interval)[ranks] * self._num_ended[ranks]
        changes, differences = self._pending[ranks], self._difference[ranks]
        moved, kept, gain = rates.coefficients(column(np.exp(-2 * rates.eta * times), changes))
        changes += moved * differences
        self._pending[ranks], self._difference[ranks] = changes, kept * differences + gain * changes
        self._num_ended[ranks] = 0

    def _ask(self, asking: Indices, peers: Indices, weights: Array) -> None:
        """Begin exchanges; those with one passive worker one after another, in the order of asking."""
        seconds = self.links.pair_seconds(asking, peers, self.message) + self.message.encode_seconds
        left = np.flatnonzero(peers != asking)
        self.sent_bytes += 2 * len(left) * self.message.num_bytes / self.num_ranks
        self._partners[asking] = peers
        while len(left):
            _, firsts = np.unique(peers[left], return_index=True)
            turn, left = left[firsts], np.delete(left, firsts)
            ranks, others = asking[turn], peers[turn]
            differences = self.published[others] - self.published[ranks]
            self._received[ranks] = differences * column(weights[turn], differences)
            self._add_changes(self.published, ranks)
            self._ends[ranks] = np.maximum(self.arrived[ranks], self._free_at[others]) + seconds[turn]
            self._free_at[others] = self._ends[ranks]

    def _add_changes(self, total: Tensor, ranks: Indices) -> None:
        """Add the changes by the exchanges of these active workers to both of their ends."""
        changes = self._received[ranks]
        total.index_add_(0, torch.from_numpy(ranks), changes)
        total.index_add_(0, torch.from_numpy(self._partners[ranks]), changes, alpha=-1.0)

    @property
    def in_flight(self) -> Tensor:
        """The changes by exchanges that x has not taken in yet: [n, d]."""
        total = self._pending.clone()
        self._add_changes(total, np.flatnonzero(np.isfinite(self._ends)))
        return total


class Pull(Asynchronous):
    """dpwa as `PairwiseEngine` has it: fetch the model of a random peer, x <- x + factor (x_peer - x) when it is there.

    Args:
        compute, links, message: see `OwnPace`.
        factor: the factor f of a merge, from the clocks of the own model and of the peer's, in publications; a merge
            interpolates the clock as the model.
        probability: of asking for a model in a step, from 0 to 1.
        seed: the seed of the choice of peers.
    """

    def __init__(
        self,
        compute: Compute,
        links: WorkerLinks,
        message: MessageCost,
        *,
        factor: Callable[[float, float], float] = lambda own, peer: 0.5,
        probability: float = 1.0,
        seed: int = 0,
    ) -> None:
        super().__init__(compute, links, message)
        self.factor, self.probability, self._generator = factor, probability, np.random.default_rng(seed)
        # Of the models of workers, of those that peers see, and of those that workers fetch.
        self._clocks, self._published_clocks, self._received_clocks = np.zeros((3, self.num_ranks))

    def _communicate(self, x: Tensor, ranks: Indices, now: float) -> None:
        done = ranks[self._ends[ranks] <= self.arrived[ranks]]
        clocks, received = self._clocks[done], self._received_clocks[done]
        factors = np.array([self.factor(own, peer) for own, peer in zip(clocks, received, strict=True)])
        x[done] = x[done].lerp(self._received[done], column(factors, x))
        self._clocks[done] = factors * received + (1 - factors) * clocks
        self._ends[done] = np.inf
        self._clocks[ranks] += 1
        self.published[ranks], self._published_clocks[ranks] = x[ranks], self._clocks[ranks]
        asking = ranks[np.isinf(self._ends[ranks])]
        if self.probability < 1:
            asking = asking[self._generator.random(len(asking)) < self.probability]
        peers = self._generator.integers(self.num_ranks - 1, size=len(asking))
        peers += peers >= asking  # any other worker
        self._received[asking], self._received_clocks[asking] = self.published[peers], self._published_clocks[peers]
        self._partners[asking], self._ends[asking] = peers, 0.0
        # Fetches from one worker share its link.
        under_way = self._partners[np.isfinite(self._ends)]
        num_fetches = np.bincount(under_way, minlength=self.num_ranks)[peers]
        wire = self.links.pair_seconds(asking, peers, MessageCost(self.message.num_bytes)) * num_fetches
        self._ends[asking] = self.arrived[asking] + wire + self.message.decode_seconds
        self.sent_bytes += len(asking) * self.message.num_bytes / self.num_ranks


class Groups(OwnPace):
    """WAGMA-SGD as `WaitAvoidingEngine` has it, one round per forward.

    A round begins when the first worker has come and the round before is done. Workers that have come by then wait for
    the average of their group. The others contribute the model that they published last. A worker that comes later, but
    before the next round can begin, takes its step as the others do: it merges the average of this round,
    x <- (n average + x) / (n + 1), and goes on. In the next round it is on time if it has caught up by then. So workers
    skip a step only where they are late by a whole round. Every `sync_period`-th round is an average over all, to which
    each worker goes at its next safe point.

    Two things are simpler than in the engine: a worker that has skipped a round counts it at once and not at the next
    global average, and it goes on by itself before a global average that its next step would make late.

    Args:
        compute, links, message: see `OwnPace`.
        groups: the members of each group.
        sync_period: rounds from one global average to the next; 0: never.
    """

    def __init__(
        self,
        compute: Compute,
        links: WorkerLinks,
        message: MessageCost,
        groups: ButterflyGroups,
        *,
        sync_period: int = 10,
    ) -> None:
        super().__init__(compute, links, message)
        self.groups, self.sync_period, n = groups, sync_period, self.num_ranks
        self._done = np.zeros(n)  # the time at which the round before was done
        self._num_phases = groups.group_size.bit_length() - 1 + (2 if n & (n - 1) else 0)

    def _turn(self, x: Tensor) -> tuple[Flags, Array]:
        if self.sync_period and (self.k + 1) % self.sync_period == 0:
            n, size = self.num_ranks, self.message.num_bytes
            self._done[:] = max(self.arrived.max(), self._done.max()) + self.links.all_reduce_seconds(size)
            x[:] = x.mean(0)
            self.published = x.clone()
            self.sent_bytes += 2 * (n - 1) / n * size
            return np.ones(n, dtype=bool), self._done.copy()
        return self._average_in_groups(x)

    def _average_in_groups(self, x: Tensor) -> tuple[Flags, Array]:
        """Run a round as [Note: wait-avoiding average] of `WaitAvoidingEngine` describes."""
        activation = np.ceil(np.log2(self.num_ranks)) * self.links.latency_s
        begin = max(self.arrived.min(), self._done.max()) + activation
        on_time = self.arrived <= begin
        self.published[on_time] = x[on_time]
        labels = self._labels()
        counts = np.bincount(labels)[labels].astype(np.float64)
        groups, sizes = torch.from_numpy(labels), column(counts, x)
        average = torch.zeros_like(self.published).index_add_(0, groups, self.published)[groups] / sizes
        slowest = np.zeros(labels.max() + 1)
        np.maximum.at(slowest, labels, self.links.slowness)
        size = self.message.num_bytes
        phase = np.maximum(self.links.wire_seconds(size) * slowest[labels], self.links.processor_seconds(size))
        self._done = begin + self._num_phases * (phase + self.links.latency_s + self.message.decode_seconds)
        starts = np.maximum(self.arrived, self._done)
        merging = self._late_workers(on_time, starts)
        self.published[merging] = x[merging]
        x[on_time] = average[on_time]
        x[merging] = (sizes * average + x)[merging] / (sizes + 1)[merging]
        self.sent_bytes += self._num_phases * size
        return on_time | merging, starts

    def _late_workers(self, on_time: Flags, starts: Array) -> Flags:
        """Return which of the other workers come before the next round can begin."""
        comes, ends = np.zeros_like(on_time), starts + self.compute.step_seconds(self.k, self.links.workers)
        first_end = max(ends[on_time].min(), self._done.max())
        for rank in np.flatnonzero(~on_time)[np.argsort(self.arrived[~on_time], kind="stable")]:
            if self.arrived[rank] > first_end:
                break
            comes[rank], first_end = True, max(min(first_end, ends[rank]), self._done.max())
        return comes

    def _labels(self) -> Indices:
        """Return the number of the group of each worker: int64 [n]."""
        labels = np.full(self.num_ranks, -1, dtype=np.int64)
        for rank in range(self.num_ranks):
            if labels[rank] < 0:
                labels[list(self.groups.members(rank, self.k))] = rank
        return np.unique(labels, return_inverse=True)[1]
