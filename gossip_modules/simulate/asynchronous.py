"""AD-PSGD and dpwa of n ranks: each steps at its own pace, and models travel meanwhile.

Time advances in ticks of what the fastest rank's median step takes. In a tick every rank whose last step has ended
takes one more; when it really ended is kept, so that a tick rounds the order of events, not their durations.
"""

from __future__ import annotations

from abc import abstractmethod

import numpy as np
import torch
from torch import Tensor

from ..rounds.rows import Array, Indices, StackedMixing
from .delays import ComputeModel, MessageCost, Network
from .gossip import OwnPace


class AsynchronousMethod(OwnPace):
    """Ranks at their own pace: the clock and the ticks.

    Args:
        compute: how long steps take.
        network: the links.
        message: a model.
    """

    def __init__(self, compute: ComputeModel, network: Network, message: MessageCost) -> None:
        super().__init__(compute, network, message)
        self.is_overlapped = True
        self.tick_seconds = compute.overhead_seconds + compute.seconds * float(
            compute.rank_factors(self.num_ranks).min()
        )
        # To write the own model down and to add what came: a pass each, the only part of it that training waits for.
        self._pass_seconds = 2 * network.links.memory_seconds(message.num_bytes) if self.num_ranks > 1 else 0.0
        self.tick = 0

    def forward(self, x: Tensor) -> None:
        """See `SimulatedMethod`: one tick."""
        now = self.tick * self.tick_seconds
        ranks = np.flatnonzero(self._arrivals <= now * (1 + 1e-12))
        if self.num_ranks > 1:
            self._communicate(x, ranks, now)
        self._starts[ranks] = self._arrivals[ranks] + self._pass_seconds
        self._waited[ranks] += self._pass_seconds
        seconds = self.compute.step_seconds(self.tick, num_ranks=self.num_ranks)
        self._arrivals[ranks] = self._starts[ranks] + seconds[ranks]
        self.is_stepping = torch.zeros(self.num_ranks, dtype=torch.bool, device="cpu")
        self.is_stepping[torch.from_numpy(ranks)] = True
        self.tick += 1

    @abstractmethod
    def _communicate(self, x: Tensor, ranks: Indices, now: float) -> None:
        """The safe points of `ranks` at their `_arrivals`, in one tick."""


class BilateralMethod(AsynchronousMethod):
    """AD-PSGD as `BilateralEngine` has it: active ranks ask, one exchange at a time, passive ranks answer in turn.

    Both ends of an exchange get half the difference of what they had published when it began; x takes it in at the
    next safe point after its end. So the sum over ranks is kept, with `in_flight`.

    Args:
        mixing: weights over a bipartite graph with one peer per round.
        compute, network, message: see `AsynchronousMethod`.
    """

    def __init__(self, mixing: StackedMixing, compute: ComputeModel, network: Network, message: MessageCost) -> None:
        super().__init__(compute, network, message)
        self.mixing = mixing
        n = self.num_ranks
        self._is_active = np.array([not mixing.graph.is_passive(rank) for rank in range(n)])
        self._rounds = np.zeros(n, dtype=np.int64)  # of each active rank
        self._partners = np.zeros(n, dtype=np.int64)
        self._ends = np.full(n, np.inf)  # of the exchange that an active rank is in
        self._is_busy = np.zeros(n, dtype=bool)
        self._free_at = np.zeros(n)  # when a passive rank has answered all that have asked
        self._published: Tensor | None = None
        self._pending: Tensor | None = None
        self._changes: Tensor | None = None  # of active ranks, of exchanges under way

    def _communicate(self, x: Tensor, ranks: Indices, now: float) -> None:
        if self._published is None or self._pending is None or self._changes is None:
            self._published, self._pending, self._changes = x.clone(), torch.zeros_like(x), torch.zeros_like(x)
        done = np.flatnonzero(self._is_busy & (self._ends <= now * (1 + 1e-12)))
        active, passive = torch.from_numpy(done), torch.from_numpy(self._partners[done])
        changes = self._changes.index_select(0, active)
        self._pending.index_add_(0, active, changes).index_add_(0, passive, changes, alpha=-1.0)
        self._is_busy[done] = False
        own = torch.from_numpy(ranks)
        x.index_add_(0, own, self._pending.index_select(0, own))
        self._pending.index_fill_(0, own, 0.0)
        self._published.index_copy_(0, own, x.index_select(0, own))
        asking = ranks[self._is_active[ranks] & ~self._is_busy[ranks]]
        asking = asking[np.argsort(self._arrivals[asking], kind="stable")]
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
        assert self._published is not None
        assert self._changes is not None
        seconds = self.network.pair_seconds(asking, peers, self.message) + self.message.encode_seconds
        left = np.flatnonzero(peers != asking)
        self.sent_bytes += 2 * len(left) * self.message.num_bytes / self.num_ranks
        while len(left):
            _, firsts = np.unique(peers[left], return_index=True)
            turn = left[firsts]
            left = np.delete(left, firsts)
            ranks, others = asking[turn], peers[turn]
            active, passive = torch.from_numpy(ranks), torch.from_numpy(others)
            factors = torch.from_numpy(weights[turn]).to(self._published.dtype)[:, None]
            asker = self._published.index_select(0, active)
            changes = self._published.index_select(0, passive).sub_(asker).mul_(factors)
            self._published.index_add_(0, active, changes).index_add_(0, passive, changes, alpha=-1.0)
            self._changes.index_copy_(0, active, changes)
            self._ends[ranks] = np.maximum(self._arrivals[ranks], self._free_at[others]) + seconds[turn]
            self._free_at[others] = self._ends[ranks]
            self._is_busy[ranks], self._partners[ranks] = True, others

    @property
    def in_flight(self) -> Tensor:
        """What exchanges have changed and x has not taken in yet: [n, d]."""
        assert self._published is not None, "before the first forward nothing is under way"
        assert self._pending is not None
        assert self._changes is not None
        busy = np.flatnonzero(self._is_busy)
        active, passive = torch.from_numpy(busy), torch.from_numpy(self._partners[busy])
        total = self._pending.index_add(0, active, self._changes[active])
        return total.index_add_(0, passive, self._changes[active], alpha=-1.0)


class PullMethod(AsynchronousMethod):
    """dpwa as `PairwiseEngine` has it: fetch the model of a random peer, x <- x + factor (x_peer - x) when it is there.

    Args:
        compute, network, message: see `AsynchronousMethod`.
        factor: of the interpolation.
        seed: of the choice of peers.
    """

    def __init__(
        self, compute: ComputeModel, network: Network, message: MessageCost, *, factor: float = 0.5, seed: int = 0
    ) -> None:
        super().__init__(compute, network, message)
        self.factor = factor
        self._generator = np.random.default_rng(seed)
        self._ends = np.full(self.num_ranks, np.inf)
        self._is_fetching = np.zeros(self.num_ranks, dtype=bool)
        self._peers = np.zeros(self.num_ranks, dtype=np.int64)
        self._published: Tensor | None = None
        self._fetched: Tensor | None = None

    def _communicate(self, x: Tensor, ranks: Indices, now: float) -> None:
        if self._published is None or self._fetched is None:
            self._published, self._fetched = x.clone(), torch.zeros_like(x)
        done = ranks[self._is_fetching[ranks] & (self._ends[ranks] <= self._arrivals[ranks])]
        merging = torch.from_numpy(done)
        mine, theirs = (y.index_select(0, merging) for y in (x, self._fetched))
        x.index_copy_(0, merging, mine.lerp_(theirs, self.factor))
        self._is_fetching[done] = False
        own = torch.from_numpy(ranks)
        self._published.index_copy_(0, own, x.index_select(0, own))
        asking = ranks[~self._is_fetching[ranks]]
        peers = self._generator.integers(self.num_ranks - 1, size=len(asking))
        peers += peers >= asking  # anyone but oneself
        theirs = self._published.index_select(0, torch.from_numpy(peers))
        self._fetched.index_copy_(0, torch.from_numpy(asking), theirs)
        self._is_fetching[asking], self._peers[asking] = True, peers
        # Fetches from one worker share its link.
        num_fetches = np.bincount(self._peers[self._is_fetching], minlength=self.num_ranks)[peers]
        wire = self.network.pair_seconds(asking, peers, MessageCost(self.message.num_bytes)) * num_fetches
        self._ends[asking] = self._arrivals[asking] + wire + self.message.decode_seconds
        self.sent_bytes += len(asking) * self.message.num_bytes / self.num_ranks
