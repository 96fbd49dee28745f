"""Vectors: what a round has of its rank, besides its memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch

from ..mixing_manager.base import MixingManager
from .message import Code, Message
from .vector import Vector


class Mail(Protocol):
    """The part of a driver that makes messages."""

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
        *,
        t: int,
        rank: int,
        num_ranks: int,
        step: SGDStep | None = None,
        inner_rate: float | None = None,
    ) -> None:
        self.x, self._mail, self.t, self.rank, self.num_ranks = x, mail, t, rank, num_ranks
        self.step, self.inner_rate = step, inner_rate

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
