"""The four questions that an algorithm may ask in a round; a driver answers."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from .message import Message
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


Request: TypeAlias = Mix | Average | Share | Exchange | Gather
Round: TypeAlias = Generator[Request, Any, None]


class RoundLost(Exception):
    """Thrown into a round whose average has failed, as a worker has died: x and memory stay as they were."""
