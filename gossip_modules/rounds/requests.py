"""The four questions that an algorithm may ask in a round; a driver answers."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch

from ..mixing_manager.base import MixingManager
from .memory import Memory
from .messages import Code, Message
from .vector import Vector


@dataclass(frozen=True, slots=True)
class Mix:
    """x <- W(t) x, in place. Buffers of the model are mixed along. Mixing the model itself is the end of a round."""

    x: Vector


@dataclass(frozen=True, slots=True)
class Average:
    """x <- its mean over all ranks, in place. Buffers of the model are averaged along."""

    x: Vector


@dataclass(frozen=True, slots=True)
class Share:
    """The message goes to all peers. The reply is a `Received`: the messages by the row of W(t) - I."""

    message: Message


@dataclass(frozen=True, slots=True)
class Exchange:
    """Each peer of the round gets a message of its own. The reply has the messages of the peers, by rank.

    A peer that fails has none there. checksums: by peer, a number that both ends of a link must have in common.
    """

    messages: Mapping[int, Message]
    checksums: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Gather:
    """The message goes to all ranks. The reply is a `Received`: the messages of all, weighted by 1, in order."""

    message: Message


@dataclass(frozen=True, slots=True)
class Inner:
    """A round of another algorithm about x, in the place of `Mix(x)`: the driver runs it to its end. See `Over`."""

    x: Vector
    round: Round


Request: TypeAlias = Mix | Average | Share | Exchange | Gather | Inner
Round: TypeAlias = Generator[Request, Any, None]


class RoundLost(Exception):
    """Thrown into a round whose average has failed, as a worker has died: x and memory stay as they were."""


class Mail(Protocol):
    """The part of a driver that makes messages; see `Vectors` for what each member is."""

    @property
    def peers(self) -> Sequence[int]: ...

    @property
    def mixing(self) -> MixingManager: ...

    def room_for_fields(self, sizes: Sequence[tuple[torch.dtype, int]], *, key: object) -> Message: ...

    def room_for(self, code: Code, x: Vector, *, key: object = "own") -> Message: ...

    def weight_of(self, peer: int) -> float: ...


class SGDStep(NamedTuple):
    """The rates of a step of `torch.optim.SGD`, for an algorithm that `needs_sgd`.

    Attributes:
        lr: the learning rate.
        momentum: as in SGD, 0 where it has none.

    Example:
        >>> SGDStep(lr=0.1, momentum=0.9).momentum
        0.9
    """

    lr: float
    momentum: float


class Vectors:
    """The model of a rank and the facts of a round, for the algorithm; a driver makes it.

    Attributes:
        x: the model; after the last answer the result is written to it.
        t: the number of the round among those with an exchange: W(t) is the matrix of this round.
        rank: of this rank among those that mix.
        num_ranks: the number of ranks that mix.
        step: the step of the user's SGD since the last round, where the algorithm `needs_sgd`; None: there was none.
        inner_rate: the learning rate of the last step of the user's optimizer, where the algorithm asks for it.
    """

    def __init__(
        self,
        x: Vector,
        mail: Mail,
        t: int,
        rank: int,
        num_ranks: int,
        *,
        step: SGDStep | None = None,
        inner_rate: float | None = None,
    ) -> None:
        self.x, self._mail, self.t, self.rank, self.num_ranks = x, mail, t, rank, num_ranks
        self.step, self.inner_rate = step, inner_rate

    def about(self, x: Vector, m: Memory) -> Vectors:
        """The same round, of another vector, with a memory of its own."""
        step = self.step if m.num_rounds else None
        return Vectors(x, self._mail, self.t, self.rank, self.num_ranks, step=step, inner_rate=self.inner_rate)

    def encode(self, code: Code, x: Vector, *, key: object = "own") -> Message:
        """C(x) as a message. key: messages of other keys may be under way at the same time."""
        return self._mail.room_for(code, x, key=key).write(x, self.t)

    def message(self, sizes: Sequence[tuple[torch.dtype, int]], *, key: object) -> Message:
        """A message of fields that the algorithm fills.

        Args:
            sizes: the dtype and the number of elements of each field; those of the peer's message are the same.
            key: messages of other keys may be under way at the same time.
        """
        return self._mail.room_for_fields(sizes, key=key)

    @property
    def mixing(self) -> MixingManager:
        """The graph and its weights, of all rounds and ranks."""
        return self._mail.mixing

    @property
    def peers(self) -> Sequence[int]:
        """The peers of this round that are there, for `Exchange`."""
        return self._mail.peers

    def weight_of(self, peer: int) -> float:
        """W_ij(t), the weight that this rank gives to what a peer sends."""
        return self._mail.weight_of(peer)
