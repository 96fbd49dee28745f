"""InStep: runs the rounds of n ranks in one process as n generators in step, for algorithms that look at peers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from ..compression.compressor import Code
from ..flat.vector import FlatVector
from ..mixing_manager.base import MixingManager, MixingWeights
from .algorithm import next_request
from .memory import Memory
from .messages import Message, MessageBuffer, Received
from .requests import Average, Exchange, Gather, Inner, Mix, Request, Round, SGDStep, Share, Vectors
from .vector import Snapshot, Vector

if TYPE_CHECKING:
    from .stacked import Stacked


class InStep:
    """The rounds of n ranks as n generators, each on its own row; the driver answers all of them at once.

    Args:
        driver: the driver that answers requests.
    """

    def __init__(self, driver: Stacked) -> None:
        self._driver = driver
        mixing = None if driver.mixing is None else driver.mixing.mixing
        self.memories = [Memory(repr(mixing)) for _ in range(driver.num_ranks)]
        self._mails = [RowMail(mixing) for _ in range(driver.num_ranks)]

    def begin(self, x: Tensor) -> None:
        """See `Algorithm.begin`."""
        for v, memory in zip(self._vectors(Vector([x]), None), self.memories, strict=True):
            self._driver.algorithm.begin(v, memory)

    def run(self, x: Vector, k: int, sgd: SGDStep | None) -> None:
        """Run one round of all ranks.

        Args:
            x: the models, [n, d], mutated; a `Snapshot` becomes the correction.
            k: the optimizer steps before the round.
            sgd: the step of SGD since the last round; None: there was none.
        """
        algorithm, ranks = self._driver.algorithm, self._vectors(x, sgd)
        self._run([algorithm.round(v, memory, k) for v, memory in zip(ranks, self.memories, strict=True)])
        for memory in self.memories:
            memory.end_round()
        if isinstance(x, Snapshot):
            for v in ranks:
                v.x.begin_adding()
            x.is_correction = True

    def _run(self, rounds: Sequence[Round]) -> None:
        """Run the rounds of all ranks to their end."""
        replies: Sequence[Any] = [None] * len(rounds)
        while requests := [r for r in map(next_request, rounds, replies) if r is not None]:
            assert len({type(request) for request in requests}) == 1, f"ranks ask for different things: {requests}"
            assert len(requests) == len(rounds), "the rounds of some ranks end before those of others"
            replies = self._answer(requests)

    def _vectors(self, x: Vector, sgd: SGDStep | None) -> list[Vectors]:
        driver, found = self._driver, []
        for rank, (row, memory, mail) in enumerate(zip(x.parts[0], self.memories, self._mails, strict=True)):
            model = type(x).of(FlatVector.over(row if driver.shape is None else row.view(driver.shape)))
            memory.fit(model, who=driver.algorithm)
            mail.begin_round(rank, driver.t)
            step = sgd if driver.algorithm.needs_sgd and memory.num_rounds else None
            found.append(Vectors(model, mail, t=driver.t, rank=rank, num_ranks=driver.num_ranks, step=step))
        return found

    def _answer(self, requests: Sequence[Request]) -> Sequence[Any]:
        driver, first = self._driver, requests[0]
        if isinstance(first, Mix | Average):
            vectors = [cast(Mix, request).x for request in requests]
            models = type(first.x)([torch.stack([vector.parts[0] for vector in vectors])])
            (driver.mix if isinstance(first, Mix) else driver.average)(models)
            for vector, row in zip(vectors, models.parts[0], strict=True):
                vector.parts[0].copy_(row)
                if isinstance(vector, Snapshot):
                    vector.is_correction = True
            return [None] * len(requests)
        if isinstance(first, Inner):
            self._run([cast(Inner, request).round for request in requests])
            return [None] * len(requests)
        if isinstance(first, Exchange):
            sent = [cast(Exchange, request) for request in requests]
            sizes = [message.buffer.raw.numel() for each in sent for message in each.messages.values()]
            driver.count_message(sum(sizes) / max(len(sizes), 1))
            return [
                {j: _copy(sent[j].messages[i], own.code) for j, own in each.messages.items()}
                for i, each in enumerate(sent)
            ]
        messages = [cast(Share, request).message for request in requests]
        if isinstance(first, Gather):
            driver.count_gather(messages[0].buffer.raw.numel())
            return [Received([(1.0, _copy(m, own.code)) for m in messages], range(len(messages))) for own in messages]
        driver.count_message(messages[0].buffer.raw.numel())
        return [mail.row_of(messages, rank) for rank, mail in enumerate(self._mails)]


class RowMail:
    """The messages of one rank; see `Mail`.

    Args:
        mixing: the weights of all ranks; None: there is no graph.
    """

    def __init__(self, mixing: MixingManager | None) -> None:
        self._mixing = mixing
        self._weights: MixingWeights | None = None
        self._room: dict[object, MessageBuffer] = {}

    def begin_round(self, rank: int, t: int) -> None:
        """Begin round t of the rank."""
        self._weights = None if self._mixing is None else self._mixing.weights(rank, t)

    @property
    def mixing(self) -> MixingManager:
        """See `Mail`."""
        assert self._mixing is not None, "the algorithm asks for peers, but there is no graph"
        return self._mixing

    @property
    def weights(self) -> MixingWeights:
        """The row of W(t)."""
        assert self._weights is not None, "the algorithm asks for peers, but there is no graph"
        return self._weights

    @property
    def peers(self) -> Sequence[int]:
        """See `Mail`."""
        return tuple(self.weights.inp)

    def weight_of(self, peer: int) -> float:
        """See `Mail`."""
        return self.weights.inp[peer]

    def room_for(self, code: Code, x: Vector, *, key: object = "own") -> Message:
        """See `Mail`."""
        message = self.room_for_fields([(torch.uint8, code.message_like(part).numel()) for part in x.parts], key=key)
        message.code = code
        return message

    def room_for_fields(self, sizes: Sequence[tuple[torch.dtype, int]], *, key: object) -> Message:
        """See `Mail`."""
        place = (key, *sizes)
        if place not in self._room:
            self._room[place] = MessageBuffer(sizes, torch.device("cpu"))
        return Message(None, self._room[place])

    def row_of(self, messages: Sequence[Message], rank: int) -> Received:
        """Return the reply to `Share`.

        Args:
            messages: the messages of all ranks.
            rank: the rank that gets the reply.
        """
        own = messages[rank]
        row = [(weight, _copy(messages[j], own.code)) for j, weight in self.weights.inp.items()]
        return Received([(self.weights.own - 1, own), *row], [rank, *self.weights.inp])


def _copy(message: Message, code: Code | None) -> Message:
    """Copy a message, as its sender may write the next one into the same memory."""
    return Message(code, MessageBuffer(message.buffer.sizes, message.buffer.raw.clone()))
