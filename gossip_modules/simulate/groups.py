"""WAGMA-SGD of n ranks: averages in changing groups, which whoever is first starts."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ..graph_manager.butterfly_groups import ButterflyGroups
from ..rounds.rows import Array, Flags, Indices
from .delays import ComputeModel, MessageCost, Network
from .gossip import OwnPace


class GroupMethod(OwnPace):
    """WAGMA-SGD as `WaitAvoidingEngine` has it, one round per forward.

    A round begins when the first rank that takes part in it in person has come and the round before is done. Who
    has come by then waits for the average of its group. Of the others it takes what they published last; when they
    come they merge the newest average, x <- (n average + x) / (n + 1), and take part in the next round that begins.
    Every `sync_period`-th round is an average over all, to which each rank goes at its next safe point.

    Args:
        compute: how long steps take.
        network: the links.
        message: a model.
        groups: who averages with whom.
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
        self._average: Tensor | None = None
        self._published: Tensor | None = None
        self._labels: dict[int, Indices] = {}
        self._num_phases = groups.group_size.bit_length() - 1 + (2 if n & (n - 1) else 0)
        self.round = 0

    def forward(self, x: Tensor) -> None:
        """See `SimulatedMethod`: one round."""
        if self._published is None:
            self._published = x.clone()
        if self.num_ranks == 1:
            stepping, starts = np.ones(1, dtype=bool), self._arrivals.copy()
        elif self.sync_period and (self.round + 1) % self.sync_period == 0:
            stepping, starts = self._average_globally(x)
        else:
            stepping, starts = self._average_in_groups(x)
        self._waited[stepping] += starts[stepping] - self._arrivals[stepping]
        self._starts[stepping] = starts[stepping]
        seconds = self.compute.step_seconds(self.round, num_ranks=self.num_ranks)
        self._arrivals[stepping] = self._starts[stepping] + seconds[stepping]
        self.is_stepping = torch.from_numpy(stepping)
        self.round += 1

    def _average_globally(self, x: Tensor) -> tuple[Flags, Array]:
        n, size = self.num_ranks, self.message.num_bytes
        done = max(self._arrivals.max(), self._done.max()) + self.network.all_reduce_seconds(size)
        x[:] = x.mean(0)
        self._published = x.clone()
        self._average, self._done = None, np.full(n, done)
        self._is_late[:] = False
        self.sent_bytes += 2 * (n - 1) / n * size
        return np.ones(n, dtype=bool), self._done.copy()

    def _average_in_groups(self, x: Tensor) -> tuple[Flags, Array]:
        """[Note: wait-avoiding average] of `WaitAvoidingEngine`; which ranks step, and when."""
        assert self._published is not None
        activation = np.ceil(np.log2(self.num_ranks)) * self.network.links.latency_s
        begin = max(self._arrivals[~self._is_late].min(), self._done.max()) + activation
        starts = self._arrivals.copy()
        merging = self._is_late & (self._arrivals <= begin)
        if merging.any():
            self._merge(x, merging)
            starts[merging] = np.maximum(starts[merging], self._done[merging])
        on_time = ~self._is_late & (self._arrivals <= begin)
        own = torch.from_numpy(np.flatnonzero(on_time))
        self._published[own] = x[own]
        labels = self._groups_of(self.round)
        self._average = _mean_by_group(self._published, labels)
        slowest = np.zeros(labels.max() + 1)
        np.maximum.at(slowest, labels, self.network.slowness)
        wire = self.network.links.wire_seconds(self.message.num_bytes) * slowest[labels]
        phase = wire + self.network.links.latency_s + self.message.decode_seconds
        self._done = begin + self._num_phases * phase
        x[own] = self._average[own]
        starts[on_time] = self._done[on_time]
        self._is_late = ~on_time & ~merging
        self.sent_bytes += self._num_phases * self.message.num_bytes
        return on_time | merging, starts

    def _merge(self, x: Tensor, merging: Flags) -> None:
        """What late ranks do about the round before, and tell those to come."""
        assert self._average is not None, "nobody is late after a global average"
        assert self._published is not None
        late = torch.from_numpy(np.flatnonzero(merging))
        self._published[late] = x[late]
        labels = self._groups_of(self.round - 1)
        sizes = torch.from_numpy(np.bincount(labels)[labels[merging]]).to(x.dtype)[:, None]
        x[late] = (sizes * self._average[late] + x[late]) / (sizes + 1)

    def _groups_of(self, t: int) -> Indices:
        """The number of the group that each rank is in: int64 [n]. Only the last two rounds are kept."""
        if t not in self._labels:
            labels = np.full(self.num_ranks, -1, dtype=np.int64)
            for rank in range(self.num_ranks):
                if labels[rank] < 0:
                    labels[list(self.groups.members(rank, t))] = rank
            self._labels = {k: v for k, v in self._labels.items() if k == t - 1}
            self._labels[t] = np.unique(labels, return_inverse=True)[1]
        return self._labels[t]


def _mean_by_group(x: Tensor, labels: Indices) -> Tensor:
    """For each rank the mean of its group: [n, d]."""
    groups = torch.from_numpy(labels)
    sizes = torch.from_numpy(np.bincount(labels)).to(x.dtype)[:, None]
    return (x.new_zeros(len(sizes), x.shape[1]).index_add_(0, groups, x) / sizes)[groups]
