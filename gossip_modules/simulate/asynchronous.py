"""AD-PSGD, dpwa and WAGMA-SGD of n ranks: each rank takes its steps at its own pace."""

from __future__ import annotations

from abc import abstractmethod

import numpy as np
import torch
from torch import Tensor

from ..graph_manager.butterfly_groups import ButterflyGroups
from ..rounds.rows import Array, Flags, Indices, StackedMixing, column
from .delays import ComputeModel, MessageCost, Network
from .gossip import SimulatedMethod


class OwnPace(SimulatedMethod):
    """A method whose ranks do not all step together, so that it keeps the time of each itself.

    Args:
        compute: how long steps take.
        network: the links.
        message: a model.

    Attributes:
        arrivals: when each rank has computed, or will have computed, the step that it is at: float64 [n].
        published: the models that peers see, [n, d].
        turn: the number of forwards so far.
    """

    def __init__(self, compute: ComputeModel, network: Network, message: MessageCost) -> None:
        super().__init__(network.num_ranks)
        self.compute, self.network, self.message = compute, network, message
        self.arrivals = np.zeros(self.num_ranks)
        self.published = torch.empty(0, device="cpu")
        self.turn = 0

    def forward(self, x: Tensor) -> None:
        """See `SimulatedMethod`: one tick, or one round."""
        if self.turn == 0:
            self._begin(x)
        stepping, starts = self._meet(x)
        self.waited_seconds[stepping] += (starts - self.arrivals)[stepping]
        self.starts[stepping] = starts[stepping]
        seconds = self.compute.step_seconds(self.turn, num_ranks=self.num_ranks)
        self.arrivals[stepping] = (starts + seconds)[stepping]
        self.is_stepping = torch.from_numpy(stepping)
        self.turn += 1

    def _begin(self, x: Tensor) -> None:
        """Before the first forward."""
        self.published = x.clone()

    @abstractmethod
    def _meet(self, x: Tensor) -> tuple[Flags, Array]:
        """Which ranks begin a step, and when, if they do; their models take in what peers have said."""


class AsynchronousMethod(OwnPace):
    """Ranks that never wait, while models travel.

    Time advances in ticks of what the fastest rank's median step takes. In a tick every rank whose last step has ended
    takes one more; when it really ended is kept, so that a tick rounds the order of events, not their durations.

    Args:
        compute, network, message: see `OwnPace`.
    """

    def __init__(self, compute: ComputeModel, network: Network, message: MessageCost) -> None:
        super().__init__(compute, network, message)
        self.is_overlapped = True
        self.tick_seconds = compute.overhead_seconds + compute.seconds * float(
            compute.rank_factors(self.num_ranks).min()
        )
        # To write the own model down and to add what came: a pass each, the only part of it that training waits for.
        self._pass_seconds = 2 * network.links.memory_seconds(message.num_bytes) if self.num_ranks > 1 else 0.0
        self._partners = np.zeros(self.num_ranks, dtype=np.int64)
        self._ends = np.full(self.num_ranks, np.inf)  # of the exchange that a rank has asked for; inf: it is in none
        self._received = torch.empty(0, device="cpu")  # by each rank in the exchange that it has asked for

    def _begin(self, x: Tensor) -> None:
        super()._begin(x)
        self._received = torch.zeros_like(x)

    def _meet(self, x: Tensor) -> tuple[Flags, Array]:
        now = self.turn * self.tick_seconds * (1 + 1e-12)
        stepping = self.arrivals <= now
        if self.num_ranks > 1:
            self._communicate(x, np.flatnonzero(stepping), now)
        return stepping, self.arrivals + self._pass_seconds

    @abstractmethod
    def _communicate(self, x: Tensor, ranks: Indices, now: float) -> None:
        """The safe points of `ranks` at their `arrivals`, in one tick."""


class BilateralMethod(AsynchronousMethod):
    """AD-PSGD as `BilateralEngine` has it: active ranks ask, one exchange at a time, passive ranks answer in turn.

    Both ends of an exchange get half the difference of the models that they had published when it began; x takes it in
    at the next safe point after its end. So the sum over ranks is kept, with `in_flight`.

    Args:
        mixing: weights over a bipartite graph with one peer per round.
        compute, network, message: see `OwnPace`.
    """

    def __init__(self, mixing: StackedMixing, compute: ComputeModel, network: Network, message: MessageCost) -> None:
        super().__init__(compute, network, message)
        self.mixing = mixing
        self._is_active = np.array([not mixing.graph.is_passive(rank) for rank in range(self.num_ranks)])
        self._rounds = np.zeros(self.num_ranks, dtype=np.int64)  # of each active rank
        self._free_at = np.zeros(self.num_ranks)  # when a passive rank has answered all that have asked
        self._pending = torch.empty(0, device="cpu")  # what exchanges that have ended change at the next safe point

    def _begin(self, x: Tensor) -> None:
        super()._begin(x)
        self._pending = torch.zeros_like(x)

    def _communicate(self, x: Tensor, ranks: Indices, now: float) -> None:
        done = np.flatnonzero(self._ends <= now)
        self._add_changes(self._pending, done)
        self._ends[done] = np.inf
        x[ranks] += self._pending[ranks]
        self._pending[ranks] = 0.0
        self.published[ranks] = x[ranks]
        asking = ranks[self._is_active[ranks] & np.isinf(self._ends[ranks])]
        asking = asking[np.argsort(self.arrivals[asking], kind="stable")]
        self._ask(asking, *self._next_peers(asking))

    def _next_peers(self, asking: Indices) -> tuple[Indices, Array]:
        """The peer of each rank in its own next round that has one, and the weight of its model."""
        peers, weights = asking.copy(), np.zeros(len(asking))
        for t in np.unique(self._rounds[asking]).tolist():
            round_ = self.mixing.round(t)
            chosen = self._rounds[asking] == t
            peers[chosen], weights[chosen] = round_.peers[asking[chosen], 0], round_.weights[asking[chosen], 0]
        self._rounds[asking] += 1
        return peers, weights

    def _ask(self, asking: Indices, peers: Indices, weights: Array) -> None:
        """Begin exchanges; those with one passive rank one after another, in the order of asking."""
        seconds = self.network.pair_seconds(asking, peers, self.message) + self.message.encode_seconds
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
            self._ends[ranks] = np.maximum(self.arrivals[ranks], self._free_at[others]) + seconds[turn]
            self._free_at[others] = self._ends[ranks]

    def _add_changes(self, total: Tensor, ranks: Indices) -> None:
        """What the exchanges of these active ranks change at both of their ends."""
        changes = self._received[ranks]
        total.index_add_(0, torch.from_numpy(ranks), changes)
        total.index_add_(0, torch.from_numpy(self._partners[ranks]), changes, alpha=-1.0)

    @property
    def in_flight(self) -> Tensor:
        """What exchanges have changed and x has not taken in yet: [n, d]."""
        total = self._pending.clone()
        self._add_changes(total, np.flatnonzero(np.isfinite(self._ends)))
        return total


class PullMethod(AsynchronousMethod):
    """dpwa as `PairwiseEngine` has it: fetch the model of a random peer, x <- x + factor (x_peer - x) when it is there.

    Args:
        compute, network, message: see `OwnPace`.
        factor: of the interpolation.
        seed: of the choice of peers.
    """

    def __init__(
        self, compute: ComputeModel, network: Network, message: MessageCost, *, factor: float = 0.5, seed: int = 0
    ) -> None:
        super().__init__(compute, network, message)
        self.factor, self._generator = factor, np.random.default_rng(seed)

    def _communicate(self, x: Tensor, ranks: Indices, now: float) -> None:
        done = ranks[self._ends[ranks] <= self.arrivals[ranks]]
        x[done] = x[done].lerp(self._received[done], self.factor)
        self._ends[done] = np.inf
        self.published[ranks] = x[ranks]
        asking = ranks[np.isinf(self._ends[ranks])]
        peers = self._generator.integers(self.num_ranks - 1, size=len(asking))
        peers += peers >= asking  # anyone but oneself
        self._received[asking] = self.published[peers]
        self._partners[asking], self._ends[asking] = peers, 0.0
        # Fetches from one worker share its link.
        under_way = self._partners[np.isfinite(self._ends)]
        num_fetches = np.bincount(under_way, minlength=self.num_ranks)[peers]
        wire = self.network.pair_seconds(asking, peers, MessageCost(self.message.num_bytes)) * num_fetches
        self._ends[asking] = self.arrivals[asking] + wire + self.message.decode_seconds
        self.sent_bytes += len(asking) * self.message.num_bytes / self.num_ranks


class GroupMethod(OwnPace):
    """WAGMA-SGD as `WaitAvoidingEngine` has it, one round per forward.

    A round begins when the first rank that takes part in it in person has come and the round before is done. Ranks that
    have come by then wait for the average of their group. The others contribute the model that they published last.
    When they come they merge the newest average, x <- (n average + x) / (n + 1), and take part in the next round that
    begins. Every `sync_period`-th round is an average over all, to which each rank goes at its next safe point.

    Args:
        compute, network, message: see `OwnPace`.
        groups: the members of each group.
        sync_period: rounds from one global average to the next; 0 = never.
    """

    def __init__(
        self,
        compute: ComputeModel,
        network: Network,
        message: MessageCost,
        groups: ButterflyGroups,
        *,
        sync_period: int = 10,
    ) -> None:
        super().__init__(compute, network, message)
        self.groups, self.sync_period = groups, sync_period
        n = self.num_ranks
        self._is_late = np.zeros(n, dtype=bool)  # not yet come to the round before
        self._done = np.zeros(n)  # when that was done
        self._average = torch.empty(0, device="cpu")  # of each rank's group in the round before
        self._sizes = np.ones(n)  # of these groups
        self._num_phases = groups.group_size.bit_length() - 1 + (2 if n & (n - 1) else 0)

    def _meet(self, x: Tensor) -> tuple[Flags, Array]:
        if self.sync_period and (self.turn + 1) % self.sync_period == 0:
            return self._average_globally(x)
        return self._average_in_groups(x)

    def _average_globally(self, x: Tensor) -> tuple[Flags, Array]:
        n, size = self.num_ranks, self.message.num_bytes
        self._done[:] = max(self.arrivals.max(), self._done.max()) + self.network.all_reduce_seconds(size)
        x[:] = x.mean(0)
        self.published = x.clone()
        self._is_late[:] = False
        self.sent_bytes += 2 * (n - 1) / n * size
        return np.ones(n, dtype=bool), self._done.copy()

    def _average_in_groups(self, x: Tensor) -> tuple[Flags, Array]:
        """[Note: wait-avoiding average] of `WaitAvoidingEngine`."""
        activation = np.ceil(np.log2(self.num_ranks)) * self.network.links.latency_s
        begin = max(self.arrivals[~self._is_late].min(), self._done.max()) + activation
        has_come = self.arrivals <= begin
        merging, on_time = self._is_late & has_come, ~self._is_late & has_come
        starts = np.where(merging, np.maximum(self.arrivals, self._done), self.arrivals)
        self.published[has_come] = x[has_come]
        if merging.any():
            sizes = column(self._sizes[merging], x)
            x[merging] = (sizes * self._average[merging] + x[merging]) / (sizes + 1)
        labels = self._labels()
        self._sizes = np.bincount(labels)[labels].astype(np.float64)
        self._average = self._mean_by_group(labels)
        slowest = np.zeros(labels.max() + 1)
        np.maximum.at(slowest, labels, self.network.slowness)
        wire = self.network.links.wire_seconds(self.message.num_bytes) * slowest[labels]
        phase = wire + self.network.links.latency_s + self.message.decode_seconds
        self._done = begin + self._num_phases * phase
        x[on_time] = self._average[on_time]
        self._is_late = ~has_come
        self.sent_bytes += self._num_phases * self.message.num_bytes
        return has_come, np.where(on_time, self._done, starts)

    def _labels(self) -> Indices:
        """The number of the group that each rank is in: int64 [n]."""
        labels = np.full(self.num_ranks, -1, dtype=np.int64)
        for rank in range(self.num_ranks):
            if labels[rank] < 0:
                labels[list(self.groups.members(rank, self.turn))] = rank
        return np.unique(labels, return_inverse=True)[1]

    def _mean_by_group(self, labels: Indices) -> Tensor:
        """For each rank the mean of what its group has published: [n, d]."""
        groups = torch.from_numpy(labels)
        total = torch.zeros_like(self.published).index_add_(0, groups, self.published)
        return total[groups] / column(self._sizes, self.published)
