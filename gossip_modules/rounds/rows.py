"""Rows: W(t) of all n ranks as index arrays, with the in-peers of each rank in round t and their weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, lru_cache
from typing import Any, NamedTuple, TypeAlias, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..compression.compressor import Code, Compressor
from ..flat.layout import align
from ..graph_manager import MirroredGraph, ShiftGraph
from ..graph_manager.random_graphs import ActivatedGraph
from ..mixing_manager import LaplacianMixing
from ..mixing_manager.base import MetropolisHastingsMixing, MixingManager, MixingWeights, UniformMixing
from .messages import Message, MessageBuffer, Received
from .requests import Mail, Sizes
from .vector import Vector

Indices: TypeAlias = npt.NDArray[np.int64]
Array: TypeAlias = npt.NDArray[np.float64]
Flags: TypeAlias = npt.NDArray[np.bool_]

_MAX_ROUNDS = 1024  # rounds that are kept


class Rows(NamedTuple):
    """W(t) by rows: x_i <- own[i] x_i + sum_k weights[i, k] x_{peers[i, k]}.

    Attributes:
        own: float64 [n], the weight of each rank for its own model.
        peers: int64 [n, p], the in-peers of each rank, padded with the rank itself.
        weights: float64 [n, p], the weights of the in-peers; 0 for padding.
        is_peer: bool [n, p]; False for padding.
        in_degrees, out_degrees: int64 [n], the numbers of in-peers and out-peers.
    """

    own: Array
    peers: Indices
    weights: Array
    is_peer: Flags
    in_degrees: Indices
    out_degrees: Indices

    @classmethod
    def of(cls, own: Array, peers: Indices, weights: Array) -> Rows:
        """Make rows, and compute the degrees from the peers."""
        n = len(own)
        is_peer = peers != np.arange(n)[:, None]
        out_degrees = np.bincount(peers[is_peer], minlength=n)
        return cls(own, peers, weights, is_peer, is_peer.sum(1), out_degrees)

    def mix(self, x: Tensor) -> Tensor:
        """Return W(t) x for x [n] or [n, d], in the dtype of x; x does not change."""
        result = x * column(self.own, x)
        for k in range(self.peers.shape[1]):
            peers = torch.from_numpy(self.peers[:, k]).to(x.device)
            result.addcmul_(x.index_select(0, peers), column(self.weights[:, k], x))
        return result

    @property
    def mean_out_degree(self) -> float:
        """The mean over ranks of the number of messages that a rank sends."""
        return float(self.out_degrees.mean())

    def latest(self, seconds: Array) -> Array:
        """Return the maximum over each rank and its in-peers: float64 [n] from [n]."""
        return np.maximum(seconds, seconds[self.peers].max(axis=1, initial=-np.inf))


def column(weights: Array, like: Tensor | None = None) -> Tensor:
    """Return weights as a column, float64 [n, 1], or with dtype, device and dimensions of a tensor [n, ...]."""
    numbers = torch.from_numpy(np.ascontiguousarray(weights))
    return numbers[:, None] if like is None else numbers.to(like).view(-1, *[1] * (like.dim() - 1))


class StackedMixing:
    """The rounds of a mixing manager for all ranks at once; equal to its `weights`, as tests check.

    It never stores n x n numbers. On a `ShiftGraph` a round is an addition of vectors, on an `ActivatedGraph` a
    selection of stored matchings. Other graphs are evaluated rank by rank, once for each distinct round. The last
    rounds are kept.

    Args:
        mixing: the weights with their graph.

    >>> from gossip_modules.graph_manager import RingGraph
    >>> round = StackedMixing(UniformMixing(RingGraph(4))).round(0)
    >>> round.peers[:, 0].tolist(), round.weights[0].tolist()
    ([3, 0, 1, 2], [0.5])
    """

    def __init__(self, mixing: MixingManager) -> None:
        self.mixing, self.graph = mixing, mixing.graph
        self._ranks = np.arange(self.graph.world_size, dtype=np.int64)
        self._made = lru_cache(_MAX_ROUNDS)(self._make)
        self._made_of_buffers = lru_cache(_MAX_ROUNDS)(lambda t: self._by_rank(mixing.buffer_weights, t))
        self._has_buffer_weights = type(mixing).buffer_weights is not MixingManager.buffer_weights

    def round(self, t: int) -> Rows:
        """Return the rows of W(t)."""
        return self._made(self._canonical(t))

    def buffer_round(self, t: int) -> Rows | None:
        """Return the rows of `buffer_weights`; None: they are equal to the rows of W(t)."""
        return self._made_of_buffers(self._canonical(t)) if self._has_buffer_weights else None

    def _canonical(self, t: int) -> int:
        return t % self.mixing.period if self.mixing.period else self.graph.canonical_round(t)

    def _make(self, t: int) -> Rows:
        if isinstance(self.graph, ActivatedGraph) and isinstance(self.mixing, LaplacianMixing):
            return self._activated_round(self.graph, self.mixing.alpha, t)
        if isinstance(self.graph, ShiftGraph) and isinstance(self.mixing, UniformMixing | MetropolisHastingsMixing):
            peers = shifted_peers(self.graph, t)
            weight = 1 / (1 + peers.shape[1])
            return Rows.of(np.full(len(peers), 1 - weight * peers.shape[1]), peers, np.full(peers.shape, weight))
        return self._by_rank(self.mixing.weights, t)

    def _by_rank(self, weights_of: Callable[[int, int], MixingWeights], t: int) -> Rows:
        rows = [weights_of(rank, t) for rank in range(self.graph.world_size)]
        most = max(len(row.inp) for row in rows)
        peers, weights = np.repeat(self._ranks[:, None], most, axis=1), np.zeros((len(rows), most))
        for rank, row in enumerate(rows):
            peers[rank, : len(row.inp)] = list(row.inp)
            weights[rank, : len(row.inp)] = list(row.inp.values())
        return Rows.of(np.array([row.own for row in rows]), peers, weights)

    def _activated_round(self, graph: ActivatedGraph, alpha: float, t: int) -> Rows:
        peers = self._partners[:, graph.active(t)]
        weights = np.where(peers == self._ranks[:, None], 0.0, alpha)
        return Rows.of(1 - weights.sum(1), peers, weights)

    @cached_property
    def _partners(self) -> Indices:
        """The partner of each rank in each matching, or the rank itself: int64 [n, matchings]."""
        assert isinstance(self.graph, ActivatedGraph), "no other graph has matchings"
        partners = np.repeat(self._ranks[:, None], len(self.graph.matchings), axis=1)
        for index, matching in enumerate(self.graph.matchings):
            u, v = np.array(matching, dtype=np.int64).reshape(-1, 2).T
            partners[u, index], partners[v, index] = v, u
        return partners


def shifted_peers(graph: ShiftGraph, t: int) -> Indices:
    """Return the in-peers of all ranks, int64 [n, p]: the in-peers of rank 0, added to each rank.

    On a `MirroredGraph`, odd ranks subtract instead. `graph.add` and `graph.negate` must accept arrays; the graphs of
    this library do.
    """
    ranks = np.arange(graph.world_size, dtype=np.int64)
    group: Any = graph  # its operations are typed for single ranks, and also work on arrays of ranks
    columns = []
    for peer in graph.in_peers(0, t):
        column = group.add(ranks, peer)
        if isinstance(graph, MirroredGraph):
            column = np.where(ranks % 2, group.add(ranks, group.negate(peer)), column)
        columns.append(column)
    return np.stack(columns, axis=1) if columns else np.empty((len(ranks), 0), dtype=np.int64)


class StackedMessage(Message):
    """The messages of all ranks as decoded values, [n, d] for each part of a vector.

    Args:
        code: the code of the messages.
        values: the decoded values.
    """

    def __init__(self, code: Code, values: Sequence[Tensor]) -> None:
        self.code: Code = code
        self.values = tuple(values)

    @property
    def num_bytes(self) -> int:
        """The size of the message of one rank."""
        return sum(align(self.code.message_like(values[0]).numel(), 8) for values in self.values)

    def write(self, x: Vector, t: int, rest: Vector | None = None) -> StackedMessage:
        """See `Message`."""
        self.values = tuple(cast("Compressor", self.code).decompressed(part, t=t) for part in x.parts)
        if rest is not None:
            for left, part, values in zip(rest.parts, x.parts, self.values, strict=True):
                torch.sub(part, values, out=left)
        return self

    def add_to(self, x: Vector, alpha: float | Tensor = 1.0, also: Vector | None = None) -> None:
        """See `Message`. alpha may also be a column with a number for each rank, [n, 1]."""
        if also is not None:
            self.add_to(also)
        for part, values in zip(x.parts, self.values, strict=True):
            if isinstance(alpha, Tensor):
                part.addcmul_(values, alpha.to(part))
            else:
                part.add_(values, alpha=alpha)

    def of(self, ranks: Tensor) -> StackedMessage:
        """Return a message whose row i is the message of rank ranks[i]; a single rank gives one row for all."""
        return StackedMessage(self.code, [values.index_select(0, ranks.to(values.device)) for values in self.values])


class StackedReceived(Received):
    """The messages of a round on all ranks, see [Note: rows] of `Stacked`.

    Args:
        message: the messages of all ranks.
        row: pairs of a weight, or a column with a weight for each rank, and the ranks whose messages have it; None: the
            own message of each rank.
    """

    def __init__(self, message: StackedMessage, row: Sequence[tuple[Any, Tensor | None]]) -> None:
        super().__init__((), begins_with_own=bool(row) and row[0][1] is None)
        self._message, self._pairs = message, row

    def __iter__(self) -> Iterator[tuple[Any, Message]]:
        for weight, ranks in self._pairs:
            yield weight, self._message if ranks is None else self._message.of(ranks)

    def __len__(self) -> int:
        return len(self._pairs)


class StackedMail(Mail):
    """Makes the stacked messages of all ranks.

    Args:
        stacked: W(t); None: there is no graph.
        num_ranks: the number of ranks.
    """

    rank = -1  # no rank of its own

    def __init__(self, stacked: StackedMixing | None, num_ranks: int) -> None:
        self.mixing = None if stacked is None else stacked.mixing
        self._stacked, self._num_ranks = stacked, num_ranks

    def begin_round(self, t: int, device: torch.device) -> None:
        """Begin round t of models on a device."""
        self._t = t

    def room_for(self, code: Code, x: Vector, *, key: object = "own") -> StackedMessage:
        """See `Mail`."""
        return StackedMessage(code, ())

    def row_of(self, messages: Sequence[Message]) -> Received:
        """Return the reply to `Share`; the only message contains the messages of all ranks."""
        assert self._stacked is not None, "the algorithm asks for peers, but there is no graph"
        rows = self._stacked.round(self._t)
        pairs = [(column(rows.weights[:, k]), torch.from_numpy(rows.peers[:, k])) for k in range(rows.peers.shape[1])]
        return StackedReceived(cast("StackedMessage", messages[0]), [(column(rows.own - 1), None), *pairs])

    def all_of(self, messages: Sequence[Message]) -> Received:
        """Return the reply to `Gather`; the only message contains the messages of all ranks."""
        everyone = torch.arange(self._num_ranks, device="cpu").split(1)
        return StackedReceived(cast("StackedMessage", messages[0]), [(1.0, rank) for rank in everyone])


class RowMail(Mail):
    """Makes the messages of one of the stacked ranks.

    Args:
        mixing: the weights of all ranks; None: there is no graph.
        rank: the rank.
    """

    def __init__(self, mixing: MixingManager | None, rank: int) -> None:
        self.mixing, self.rank = mixing, rank
        self._room: dict[object, MessageBuffer] = {}

    def begin_round(self, t: int, device: torch.device) -> None:
        """Begin round t of models on a device."""
        self._device = device
        self._weights = MixingWeights(1.0, {}) if self.mixing is None else self.mixing.weights(self.rank, t)

    def find_peers(self) -> Sequence[int]:
        """See `Mail`."""
        return tuple(self._weights.inp)

    def weight_of(self, peer: int) -> float:
        """See `Mail`."""
        return self._weights.inp[peer]

    def room_for_fields(self, sizes: Sizes, *, key: object) -> Message:
        """See `Mail`."""
        place = (key, *sizes)
        if place not in self._room:
            self._room[place] = MessageBuffer(sizes, self._device)
        return Message(None, self._room[place])

    def row_of(self, messages: Sequence[Message]) -> Received:
        """Return the reply to `Share`, given the messages of all ranks."""
        own, inp = messages[self.rank], self._weights.inp
        row = [(weight, arrived(messages[j], own.code)) for j, weight in inp.items()]
        return Received([(self._weights.own - 1, own), *row], [self.rank, *inp])

    def all_of(self, messages: Sequence[Message]) -> Received:
        """Return the reply to `Gather`, given the messages of all ranks."""
        own = messages[self.rank]
        everyone = [(1.0, arrived(message, own.code)) for message in messages]
        return Received(everyone, range(len(messages)), begins_with_own=False)


def arrived(message: Message, code: Code | None) -> Message:
    """Copy a message, as its sender may write the next one into the same memory."""
    return Message(code, MessageBuffer(message.buffer.sizes, message.buffer.raw.clone()))
