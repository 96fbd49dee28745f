"""The requests that the round of an algorithm may yield to its driver, and the arguments of a round."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from ..compression.compressor import Compressor
from ..mixing_manager.base import MixingManager
from .messages import Code, Message, Received
from .vector import Vector


@dataclass(frozen=True, slots=True)
class Mix:
    """x <- W(t) x, in place. The buffers of the model are mixed too. The reply is None.

    `Mix(v.x)` is the last request of a round.

    Args:
        x: `v.x`, or a vector of `m.scratch`.
    """

    x: Vector


@dataclass(frozen=True, slots=True)
class Average:
    """x <- its mean over all ranks, in place. The buffers of the model are averaged too.

    The reply is the `numbers` of all ranks, float64 [n, k] in host memory; None without numbers.

    With a code C, ranks send C of runs of x in place of x, and the mean of the codes: see
    [Note: Coded averages] of `CodedAverage`. x is then equal on all ranks, and the mean of x + rest over the ranks is
    the mean of x before.

    Args:
        x: `v.x`, or a vector of `m.scratch`; with a code only the latter.
        numbers: k numbers of this rank, for all ranks.
        code: C, a compressor, equal on all ranks; None: x is sent exactly.
        rest: with a code, another vector of `m.scratch`; written: the part of x that the sent codes leave out.

    Raises:
        RoundLost: at the `yield`, if a worker died and the average failed.
    """

    x: Vector
    numbers: Sequence[float] = ()
    code: Compressor | None = None
    rest: Vector | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.code, Compressor | None) or (self.code is None) != (self.rest is None):
            raise ValueError(
                f"got Average with code={self.code!r} and {'no' if self.rest is None else 'a'} rest, expected a "
                "Compressor and a vector of m.scratch, or neither; the rest is the part that the sent codes leave out"
            )


@dataclass(frozen=True, slots=True)
class Share:
    """Send a message to all peers. The reply is a `Received` with the messages, weighted by the row of W(t) - I.

    Args:
        message: the message, from `Vectors.encode`. Do not change it before the reply.
    """

    message: Message


@dataclass(frozen=True, slots=True)
class Exchange:
    """Send each peer of the round its own message. The reply is a dict with the messages of the peers, by rank.

    The reply has no entry for a failed peer.

    Args:
        messages: the message for each peer, by rank, from `Vectors.encode` or `Vectors.message`. Do not change them
            before the reply.
        checksums: by peer, a number that must be equal at both ends of the link.
    """

    messages: Mapping[int, Message]
    checksums: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Gather:
    """Send a message to all ranks. The reply is a `Received` with the messages of all ranks in order, weighted by 1.

    Args:
        message: the message, from `Vectors.encode`. Do not change it before the reply.
        numbers: k numbers of this rank, for all ranks; `Received.numbers` has them.

    Raises:
        RoundLost: at the `yield`, if a worker died and the messages of all ranks could not be collected.
    """

    message: Message
    numbers: Sequence[float] = ()


@dataclass(frozen=True, slots=True)
class Inner:
    """Run a round of the inner algorithm on x to its end, in the place of `Mix(x)`. See `Over`."""

    x: Vector
    round: Round


Request: TypeAlias = Mix | Average | Share | Exchange | Gather | Inner
Sizes: TypeAlias = Sequence[tuple[torch.dtype, int]]
"""The dtype and the number of elements of each field of a message."""
Round: TypeAlias = Generator[Request, Any, None]


class RoundLost(Exception):
    """Thrown into a round at its `Average` or `Gather` if a worker died: x and memory stay unchanged.

    A round that has written vectors before its request catches the exception, restores them, and raises it again.
    """


Reply: TypeAlias = Received | dict[int, Message] | Tensor | type[RoundLost] | None
"""The reply to a request; `RoundLost`: it is thrown into the round."""


class Mail:
    """The part of a driver that makes messages; `Vectors` documents the members."""

    mixing: MixingManager | None = None

    def find_peers(self) -> Sequence[int]:
        raise NotImplementedError("an algorithm that looks at the peers of a rank declares takes_rows = False")

    def weight_of(self, peer: int) -> float:
        raise NotImplementedError("an algorithm that looks at the peers of a rank declares takes_rows = False")

    def room_for_fields(self, sizes: Sizes, *, key: object) -> Message:
        raise NotImplementedError("an algorithm that fills messages itself declares takes_rows = False")

    def sizes_of(self, code: Code, x: Vector) -> Sizes:
        """Return the sizes of the fields of a message for vectors like x."""
        wide_parts = [part if part.element_size() >= 4 else part.float() for part in x.parts]
        return [(torch.uint8, code.message_like(part).numel() if part.numel() else 0) for part in wide_parts]

    def room_for(self, code: Code, x: Vector, *, key: object = "own") -> Message:
        """Return a message for vectors like x. The next message with the same key reuses its memory."""
        message = self.room_for_fields(self.sizes_of(code, x), key=key)
        message.code = code
        return message


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


@dataclass(slots=True, eq=False)
class Vectors:
    """The model of a rank and the description of a round; a driver passes it to `Algorithm.round`.

    Attributes:
        x: the model. The round writes its result to it after the last reply.
        mail: makes the messages.
        t: the number of the round; W(t) is its matrix. Only rounds with communication count.
        rank: this rank.
        num_ranks: the number of ranks that mix.
        step: the step of the user's SGD since the last round, if the algorithm `needs_sgd`; None: there was no step.
        inner_rate: the learning rate of the last step of the user's optimizer, if the algorithm `needs_inner_rate`.
        sent: the model with which the round began, if it runs under training and the algorithm `keeps_sent`.
        sum_over_shards: x <- its sum over the processes that hold the model together, in place; it changes nothing if
            one process holds the model. x is float64 in host memory. An algorithm whose next action depends on the
            values of the model, such as on a norm, adds them up by this function, so that all shards of the model have
            one decision. Call it on the training thread only: before the first request, or if there is `sent`.
    """

    x: Vector
    mail: Mail
    t: int
    rank: int
    num_ranks: int
    step: SGDStep | None = None
    inner_rate: float | None = None
    sent: Vector | None = None
    sum_over_shards: Callable[[Tensor], object] = id

    def about(self, x: Vector) -> Vectors:
        """Return the description of the same round for another vector x, without the step of SGD."""
        return replace(self, x=x, step=None)

    def encode(self, code: Code, x: Vector, *, key: object = "own", rest: Vector | None = None) -> Message:
        """Return C(x) as a message.

        Args:
            code: the code or compressor C; with a `rest` a compressor.
            x: the vector; with a `rest` of float32 at least.
            rest: becomes x - C(x), in less time than by `add_to`; x itself, or another vector with the dtypes of x.
            key: a name for the memory of the message. Messages with different keys may be in flight together.
        """
        return self.mail.room_for(code, x, key=key).write(x, self.t, rest)

    def message(self, sizes: Sizes, *, key: object) -> Message:
        """Return a message whose fields the algorithm fills.

        Args:
            sizes: the dtype and the number of elements of each field, equal to the sizes of the peer's message.
            key: a name for the memory of the message. Messages with different keys may be in flight together.
        """
        return self.mail.room_for_fields(sizes, key=key)

    @property
    def mixing(self) -> MixingManager:
        """The weights of all rounds and ranks, with their graph."""
        assert self.mail.mixing is not None, "the algorithm asks for weights, but there is no graph"
        return self.mail.mixing

    @property
    def peers(self) -> Sequence[int]:
        """The live peers of this round, for `Exchange`; see `MessageRounds.find_peers`."""
        return self.mail.find_peers()

    def weight_of(self, peer: int) -> float:
        """Return W_ij(t), the weight that this rank gives to the message of a peer."""
        return self.mail.weight_of(peer)


@dataclass
class OpenRound:
    """A round that has begun.

    Attributes:
        v: the argument of `Algorithm.round`.
        k: the number of optimizer steps before the round.
        averages: whether the round averages exactly over all ranks.
        generator: the round.
        numbers: the numbers of the memory when the round began.
        request: the request to answer next; None: the round has ended.
        reply: the reply to the first request of a round that has departed.
    """

    v: Vectors
    k: int
    averages: bool
    generator: Round
    numbers: Mapping[str, float] = field(default_factory=dict)
    request: Request | None = None
    reply: Reply = None


def next_request(generator: Round, reply: Reply) -> Request | None:
    """Send a reply into a round, or throw `RoundLost`, and return its next request; None: the round has ended."""
    try:
        return generator.throw(RoundLost()) if reply is RoundLost else generator.send(reply)
    except StopIteration:
        return None
