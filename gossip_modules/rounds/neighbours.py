"""Neighbours: the peers of a rank in a round, and its row of W(t)."""

from __future__ import annotations

from collections.abc import Iterable, Set
from typing import NamedTuple

from torch import Tensor

from ..mixing_manager.base import MixingManager, MixingWeights
from ..mixing_manager.period import knows_period
from ..transport.base import Transport, lost_peers

_MAX_PLANS = 4096  # that are kept: of graphs with a longer period each round is planned anew
_LEAST_WEIGHT = 1 / 4  # see [Note: weights that run dry]


class Plan(NamedTuple):
    """What one rank does in a round: whom it sends to, whom it hears, and its row of W(t), that for buffers apart."""

    out_peers: tuple[int, ...]
    in_peers: tuple[int, ...]
    weights: MixingWeights
    buffer_weights: MixingWeights


class Neighbours:
    """The peers of a rank and its row of W(t), round by round, as far as the peers are there.

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

    Args:
        mixing: the weights and their graph.
        transport: over the ranks.
        sends_shares: whether columns of W sum to one, and not rows: see [Note: lost peers].

    Attributes:
        t: the round.
        out_peers, in_peers, weights, buffer_weights: see `Plan`; of the last round that has begun.
        keeps_all: whether the rank sends zeros: see [Note: weights that run dry].
    """

    def __init__(self, mixing: MixingManager, transport: Transport, *, sends_shares: bool = False) -> None:
        self._mixing, self._transport, self._sends_shares = mixing, transport, sends_shares
        self._plans: dict[int, Plan] = {}
        self._period = mixing.period if mixing.period <= _MAX_PLANS and knows_period(mixing) else 0
        self.t, self.in_peers, self.out_peers = 0, tuple[int, ...](), tuple[int, ...]()
        self.weights = self.buffer_weights = MixingWeights(1.0, {})
        self.keeps_all = False

    def begin(self, t: int, weight: Tensor) -> None:
        """Round t; its plan is kept where it comes again. weight: the push-sum weight of the rank."""
        plan = self._plans.get(t % self._period) if self._period else None
        if plan is None:
            rank, graph, mixing = self._transport.rank, self._mixing.graph, self._mixing
            weights, buffer_weights = mixing.weights(rank, t), mixing.buffer_weights(rank, t)
            plan = Plan(graph.out_peers(rank, t), tuple(weights.inp), weights, buffer_weights)
            if self._period:
                self._plans[t % self._period] = plan
        self.t = t
        self.out_peers, self.in_peers, self.weights, self.buffer_weights = plan
        self.keeps_all = self._sends_shares and bool(lost_peers(self._transport)) and weight.item() < _LEAST_WEIGHT
        if self.keeps_all:
            self._take_back(self.out_peers)

    def leave_out(self, lost: Set[int]) -> list[int]:
        """[Note: lost peers] Go on without these peers; returns which of the in-peers are kept, by their order."""
        kept = [k for k, peer in enumerate(self.in_peers) if peer not in lost]
        if self._sends_shares and not self.keeps_all:
            self._take_back([peer for peer in self.out_peers if peer in lost])
        self.weights, self.buffer_weights = (self._without(lost, row) for row in (self.weights, self.buffer_weights))
        self.in_peers = tuple(self.in_peers[k] for k in kept)
        return kept

    def _without(self, lost: Set[int], row: MixingWeights) -> MixingWeights:
        lost_here = 0.0 if self._sends_shares else sum(w for peer, w in row.inp.items() if peer in lost)
        return MixingWeights(row.own + lost_here, {peer: w for peer, w in row.inp.items() if peer not in lost})

    def _take_back(self, peers: Iterable[int]) -> None:
        """The shares of these out-peers stay here."""
        rows = ((self.weights, self._mixing.weights), (self.buffer_weights, self._mixing.buffer_weights))
        self.weights, self.buffer_weights = (
            MixingWeights(row.own + sum(row_of(peer, self.t).inp[self._transport.rank] for peer in peers), row.inp)
            for row, row_of in rows
        )
