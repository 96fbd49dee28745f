"""Stacked: runs the rounds of an algorithm for all ranks in one process, on models that are the rows of one tensor."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor

from ..compression.compressor import Cast, Code, Compressor, decompressed_rows
from ..flat.layout import align
from ..flat.vector import FlatVector
from ..gossiper.message import MessageBuffer
from ..mixing_manager.base import MixingManager, MixingWeights
from ..schedule import Action
from .algorithm import Algorithm, Over
from .memory import Memory
from .message import Message, Received
from .requests import Average, Exchange, Gather, Mix, Request, Share
from .rows import Rows, StackedMixing, column
from .vector import Vector
from .vectors import SGDStep, Vectors

HEADER_BYTES = 8
"""What is sent ahead of a message, see `Header`."""
Answered: TypeAlias = Rows | None
"""What a request was answered with: the rows of W(t), or None for an average over all ranks."""


class Stacked:
    """The models of n ranks as rows x_i of one tensor; rounds change them as n processes would.

    [Note: rows] `Mix(x)` is W(t) x, `Average(x)` the mean of the rows. A message is the values that its receivers add,
    for all rows at once. The reply to `Share` has for each column of in-peers a column of weights [n, 1] and the
    messages of these peers. So the round of an algorithm is one generator over tensors [n, d]. An algorithm that cannot
    work so (`takes_rows`) runs as n generators in step, one for each row.

    [Note: overlap] With overlap a round changes a copy s of the models, and s' - s is added at the next step.

    Args:
        algorithm: what a round does.
        mixing: W(t); None where the algorithm only averages over all ranks.
        num_ranks: n; None: that of the graph.
        overlap: whether a round takes effect one step later.
        wire_dtype: torch.bfloat16 or torch.float16 rounds models and other vectors that are mixed, see
            [Note: narrow wire] of `PushPull`; None: they are sent as they are.
        shape: of the one tensor that a model is, for algorithms that see matrices; None: a vector.

    Raises:
        ValueError: the algorithm is wrong with these weights; or it must not overlap.

    Attributes:
        weights: push-sum weights, float64 [n, 1]; None: all are one.
        memory: of all ranks, where the algorithm `takes_rows`.
        t: rounds with an exchange so far.
        sent_bytes: payload that a rank has sent so far, mean over ranks, headers of messages included.

    Example:
        >>> ring = RingGraph(3, peers_per_itr=2)
        >>> x = torch.tensor([[0.0], [0.0], [3.0]])
        >>> rows = Stacked(DPSGD(), MetropolisHastingsMixing(ring)).step(x, 0)
        >>> x.flatten().tolist()
        [1.0, 1.0, 1.0]
    """

    def __init__(
        self,
        algorithm: Algorithm | Over,
        mixing: MixingManager | None,
        num_ranks: int | None = None,
        *,
        overlap: bool = False,
        wire_dtype: torch.dtype | None = None,
        shape: tuple[int, ...] | None = None,
    ) -> None:
        own = algorithm.outer if isinstance(algorithm, Over) else algorithm
        self.algorithm: Algorithm = own
        self.inner: Stacked | None = None
        if isinstance(algorithm, Over):
            self.inner = Stacked(algorithm.inner, mixing, num_ranks, wire_dtype=wire_dtype, shape=shape)
        if mixing is not None:
            own.check(mixing)
        if overlap and (own.needs_current or own.keeps_models):
            raise ValueError(f"got overlap=True with {algorithm}, expected overlap=False")
        self.mixing = None if mixing is None else StackedMixing(mixing)
        self.num_ranks = num_ranks or (mixing.graph.world_size if mixing is not None else 1)
        self.overlap, self.shape = overlap, shape
        self._wire = None if wire_dtype is None else Cast(wire_dtype)
        is_weighted = self.mixing is not None and own.takes_push_sum and not self.mixing.is_doubly_stochastic
        self.weights = torch.ones(self.num_ranks, 1, dtype=torch.float64, device="cpu") if is_weighted else None
        self.t, self.sent_bytes = 0, 0.0
        self.memory = Memory()
        self._has_begun = False
        self._late: tuple[Tensor, Tensor | None] | None = None
        self._in_step: InStep | None = None if own.takes_rows else InStep(self)
        self._answered: list[Answered] = []

    @torch.no_grad()
    def step(self, x: Tensor, k: int, action: Action = Action.GOSSIP, *, sgd: SGDStep | None = None) -> list[Answered]:
        """The safe point after k optimizer steps of each rank: x changes as the schedule and the algorithm say.

        Args:
            x: the models, float32 or float64 [n, d], mutated.
            k: optimizer steps so far.
            action: of the schedule.
            sgd: the step of SGD since the last round; None: there was none.

        Returns:
            What the requests of this step were answered with, in their order; empty where ranks say nothing.
        """
        self._answered = []
        self._begin(x, k)
        self._arrive(x)
        if action is Action.SKIP or (action is Action.GOSSIP and not self.algorithm.is_due(k)):
            return []
        if not self.overlap:
            self._change(x, k, action, sgd)
            return self._answered
        s, weights = x.clone(), None if self.weights is None else self.weights.clone()
        self._change(s, k, action, sgd)
        if self.weights is not None and weights is not None:
            weights, self.weights = self.weights - weights, weights
        self._late = s.sub_(x), weights
        return self._answered

    def estimates(self, x: Tensor) -> Tensor:
        """The models that forward and backward see: x, or with push-sum x / w."""
        return x if self.weights is None else x / self.weights.to(x.dtype)

    @property
    def momentum(self) -> Tensor | None:
        """The momentum of SGD that the last round has made, [n, d]; None: the algorithm leaves it alone."""
        has_written = self.algorithm.needs_sgd and self.memory.num_rounds
        return self.memory.momentum.parts[0] if has_written else None

    @property
    def memories(self) -> Sequence[Memory]:
        """Of all ranks and algorithms."""
        own = [self.memory] if self._in_step is None else self._in_step.memories
        return own if self.inner is None else [*own, *self.inner.memories]

    # A step.

    def _begin(self, x: Tensor, k: int) -> None:
        if not self._has_begun:
            self._has_begun = True
            if self._in_step is not None:
                self._in_step.begin(x)
            else:
                self.algorithm.begin(self._vectors(Vector([x])), self.memory)

    def _arrive(self, x: Tensor) -> None:
        """Add what the round that was under way has changed."""
        late, self._late = self._late, None
        if late is not None:
            x += late[0]
            if self.weights is not None and late[1] is not None:
                self.weights += late[1]

    def _change(self, x: Tensor, k: int, action: Action, sgd: SGDStep | None) -> None:
        if action is Action.AVERAGE:
            self._average(x, is_model=True)
            for memory in self.memories:
                memory.forget_models(is_asked=False)
        else:
            self.run(Vector([x]), k, sgd)
        self.t += 1

    # A round.

    def run(self, x: Vector, k: int, sgd: SGDStep | None = None) -> None:
        """One round of all ranks. x: the models, [n, d], mutated."""
        if self.algorithm.is_plain:
            self.mix(x, is_model=True)
            return
        if self._in_step is not None:
            self._in_step.run(x, k)
            return
        v = self._vectors(x)
        if self.algorithm.follows_rate:
            self.memory.scale(None if sgd is None else sgd.lr)
        v.step = sgd if self.algorithm.needs_sgd and self.memory.num_rounds else None
        generator, reply = self.algorithm.round(v, self.memory, k), None
        while True:
            try:
                request = generator.send(reply)
            except StopIteration:
                break
            reply = self._answer(request, v)
        self.memory.end_round()

    def _vectors(self, x: Vector) -> Vectors:
        self.memory.fit(x, who=self.algorithm)
        return Vectors(x, StackedMail(), t=self.t, rank=-1, num_ranks=self.num_ranks)

    def _answer(self, request: Request, v: Vectors) -> Any:
        if isinstance(request, Mix):
            self.mix(request.x, is_model=request.x is v.x)
        elif isinstance(request, Average):
            for part in request.x.parts:
                self._average(part, is_model=request.x is v.x)
        elif isinstance(request, Share):
            message = cast(StackedMessage, request.message)
            self.count_message(message.num_bytes)
            return StackedReceived(self.rows, message)
        else:
            assert isinstance(request, Gather), f"got the request {request!r} of an algorithm that takes rows"
            self.count_gather(cast(StackedMessage, request.message).num_bytes)
            return [cast(StackedMessage, request.message).of(torch.tensor([j])) for j in range(self.num_ranks)]
        return None

    @property
    def rows(self) -> Rows:
        """W(t) of the present round."""
        assert self.mixing is not None, f"{self.algorithm} asks for peers, but there is no graph"
        return self.mixing.round(self.t)

    def mix(self, x: Vector, *, is_model: bool = False) -> None:
        """See `Mix`. is_model: whether push-sum weights are mixed along."""
        if self.inner is not None:
            self.inner.t, self.inner._answered = self.t, self._answered
            self.inner.run(x, 0)
            self.sent_bytes += self.inner.sent_bytes
            self.inner.sent_bytes = 0.0
            return
        rows, num_bytes = self.rows, 8 if self.weights is not None else 0
        for part in x.parts:
            if self._wire is None:
                part.copy_(rows.mix(part))
                num_bytes += part[0].nbytes
            else:
                sent = self._wire.decompressed(part)
                part.add_(rows.mix(sent).sub_(sent))
                num_bytes += self._wire.num_bytes(part[0].numel(), part.dtype)
        if is_model and self.weights is not None:
            self.weights = rows.mix(self.weights)
        self._answered.append(rows)
        self.sent_bytes += rows.mean_out_degree * num_bytes

    def count_message(self, num_bytes: float) -> None:
        """Each rank has sent a message of so many bytes, on average, to each of its peers."""
        self._answered.append(self.rows)
        header = HEADER_BYTES if self.algorithm.checks_messages else 0
        self.sent_bytes += self.rows.mean_out_degree * (num_bytes + header)

    def count_gather(self, num_bytes: int) -> None:
        """Each rank has sent a message of so many bytes to all others."""
        self._answered.append(None)
        self.sent_bytes += (self.num_ranks - 1) * num_bytes

    def _average(self, x: Tensor, *, is_model: bool) -> None:
        self._answered.append(None)
        self.sent_bytes += 2 * (self.num_ranks - 1) * x[0].nbytes // self.num_ranks
        x.copy_(x.mean(0).expand_as(x))
        if is_model and self.weights is not None:
            self.weights = self.weights.mean(0).expand_as(self.weights).clone()


class StackedMail:
    """Makes messages of all ranks; see `Mail`."""

    def room_for(self, code: Code, x: Vector, *, key: object = "own") -> StackedMessage:
        """See `Mail`."""
        return StackedMessage(code, ())

    @property
    def peers(self) -> Sequence[int]:
        """See `Mail`."""
        raise AssertionError("an algorithm that looks at the peers of a rank declares takes_rows = False")

    @property
    def mixing(self) -> MixingManager:
        """See `Mail`."""
        raise AssertionError("an algorithm that looks at the weights of a rank declares takes_rows = False")

    def room_for_fields(self, sizes: Sequence[tuple[torch.dtype, int]], *, key: object) -> Message:
        """See `Mail`."""
        raise AssertionError("an algorithm that fills its messages itself declares takes_rows = False")

    def weight_of(self, peer: int) -> float:
        """See `Mail`."""
        raise AssertionError("an algorithm that looks at the weights of a rank declares takes_rows = False")


class StackedMessage(Message):
    """The messages of all ranks, as the values that they mean: [n, d] for each part of a vector.

    Args:
        code: of the messages.
        values: what they mean.
    """

    def __init__(self, code: Code | None, values: Sequence[Tensor]) -> None:
        self.code, self.values = code, tuple(values)

    @property
    def num_bytes(self) -> int:
        """The size of the message of one rank."""
        assert self.code is not None, "messages of all ranks have a code"
        return sum(align(self.code.message_like(values[0]).numel(), 8) for values in self.values)

    def write(self, x: Vector, t: int) -> StackedMessage:
        """See `Message`."""
        self.values = tuple(_decompressed(self.code, part, t) for part in x.parts)
        return self

    def add_to(self, x: Vector, alpha: float | Tensor = 1.0) -> None:
        """See `Message`. alpha: a number, or one for each rank, [n, 1]."""
        for part, values in zip(x.parts, self.values, strict=True):
            if isinstance(alpha, Tensor):
                part.addcmul_(values, alpha.to(part.dtype))
            else:
                part.add_(values, alpha=alpha)

    def of(self, ranks: Tensor) -> StackedMessage:
        """Row i <- the message of rank ranks[i]; of one rank: its message for all."""
        return StackedMessage(self.code, [values.index_select(0, ranks) for values in self.values])


class StackedReceived(Received):
    """The messages of a round on all ranks, see [Note: rows].

    Args:
        rows: W(t).
        message: of all ranks.
    """

    def __init__(self, rows: Rows, message: StackedMessage) -> None:
        self._rows, self._message = rows, message

    def __iter__(self) -> Iterator[tuple[Any, Message]]:
        yield column(self._rows.own - 1), self._message
        for k in range(self._rows.peers.shape[1]):
            peers = torch.from_numpy(self._rows.peers[:, k].copy())
            yield column(self._rows.weights[:, k]), self._message.of(peers)

    def add_to(self, x: Vector, alpha: float = 1.0) -> None:
        """See `Received`."""
        for part, values in zip(x.parts, self._message.values, strict=True):
            part.add_(self._rows.mix(values).sub_(values), alpha=alpha)


def _decompressed(code: Code | None, x: Tensor, t: int) -> Tensor:
    assert code is not None, "messages of all ranks have a code"
    return code.decompressed(x, t=t) if isinstance(code, Compressor) else decompressed_rows(code, x, t)


class InStep:
    """The rounds of n ranks as n generators in step, each on its row; the driver answers all of them at once.

    Args:
        driver: answers.
    """

    def __init__(self, driver: Stacked) -> None:
        self._driver = driver
        self.memories = [Memory() for _ in range(driver.num_ranks)]
        mixing = None if driver.mixing is None else driver.mixing.mixing
        self._mails = [RowMail(mixing) for _ in range(driver.num_ranks)]

    def begin(self, x: Tensor) -> None:
        """See `Algorithm.begin`."""
        for v, memory in zip(self._vectors(x), self.memories, strict=True):
            self._driver.algorithm.begin(v, memory)

    def run(self, x: Vector, k: int) -> None:
        """One round of all ranks. x: the models, [n, d], mutated."""
        driver = self._driver
        ranks = self._vectors(x.parts[0])
        generators = [driver.algorithm.round(v, m, k) for v, m in zip(ranks, self.memories, strict=True)]
        replies: Sequence[Any] = [None] * len(generators)
        while True:
            requests = [r for r in map(_next_request, generators, replies) if r is not None]
            if not requests:
                break
            assert len({type(request) for request in requests}) == 1, f"ranks ask for different things: {requests}"
            assert len(requests) == len(generators), "the rounds of some ranks end before those of others"
            replies = self._answer(requests)
        for memory in self.memories:
            memory.end_round()

    def _vectors(self, x: Tensor) -> list[Vectors]:
        driver, found = self._driver, []
        for rank, (row, memory, mail) in enumerate(zip(x, self.memories, self._mails, strict=True)):
            model = Vector.of(FlatVector.over(row if driver.shape is None else row.view(driver.shape)))
            memory.fit(model, who=driver.algorithm)
            mail.weights = None if driver.mixing is None else driver.mixing.mixing.weights(rank, driver.t)
            found.append(Vectors(model, mail, t=driver.t, rank=rank, num_ranks=driver.num_ranks))
        return found

    def _answer(self, requests: Sequence[Request]) -> Sequence[Any]:
        driver, first, n = self._driver, requests[0], len(requests)
        if isinstance(first, Mix | Average):
            vectors = [cast(Mix, request).x for request in requests]
            models = Vector([torch.stack([vector.parts[0] for vector in vectors])])
            if isinstance(first, Mix):
                driver.mix(models)
            else:
                driver._average(models.parts[0], is_model=False)
            for vector, row in zip(vectors, models.parts[0], strict=True):
                vector.parts[0].copy_(row)
            return [None] * n
        if isinstance(first, Exchange):
            messages = [dict(cast(Exchange, request).messages) for request in requests]
            sizes = [message.buffer.raw.numel() for mine in messages for message in mine.values()]
            driver.count_message(sum(sizes) / max(len(sizes), 1))
            return [{j: _copy(messages[j][i], mine[j].code) for j in mine} for i, mine in enumerate(messages)]
        sent = [cast(Share, request).message for request in requests]
        num_bytes = sent[0].buffer.raw.numel()
        (driver.count_gather if isinstance(first, Gather) else driver.count_message)(num_bytes)
        if isinstance(first, Gather):
            return [[_copy(message, own.code) for message in sent] for own in sent]
        return [mail.received(own, sent) for mail, own in zip(self._mails, sent, strict=True)]


class RowMail:
    """The messages of one rank of `InStep`; see `Mail`."""

    weights: MixingWeights | None = None

    def __init__(self, mixing: MixingManager | None) -> None:
        self._mixing = mixing
        self._room: dict[object, MessageBuffer] = {}

    @property
    def peers(self) -> Sequence[int]:
        """See `Mail`."""
        return tuple(self._weights.inp)

    def weight_of(self, peer: int) -> float:
        """See `Mail`."""
        return self._weights.inp[peer]

    def room_for(self, code: Code, x: Vector, *, key: object = "own") -> Message:
        """See `Mail`."""
        message = self.room_for_fields([(torch.uint8, code.message_like(part).numel()) for part in x.parts], key=key)
        message.code = code
        return message

    def room_for_fields(self, sizes: Sequence[tuple[torch.dtype, int]], *, key: object) -> Message:
        """See `Mail`."""
        room = key, tuple(sizes)
        if room not in self._room:
            self._room[room] = MessageBuffer(sizes, torch.device("cpu"))
        return Message(None, self._room[room])

    def received(self, own: Message, sent: Sequence[Message]) -> Received:
        """The reply to `Share`."""
        weights: Mapping[int, float] = self._weights.inp
        row = [(weight, _copy(sent[j], own.code)) for j, weight in weights.items()]
        return Received([(self._weights.own - 1, own), *row])

    @property
    def mixing(self) -> MixingManager:
        """See `Mail`."""
        assert self._mixing is not None, "the algorithm asks for weights, but there is no graph"
        return self._mixing

    @property
    def _weights(self) -> MixingWeights:
        assert self.weights is not None, "the algorithm asks for peers, but there is no graph"
        return self.weights


def _next_request(generator: Any, reply: Any) -> Request | None:
    try:
        return cast(Request, generator.send(reply))
    except StopIteration:
        return None


def _copy(message: Message, code: Code | None) -> Message:
    """A message as it has arrived: its sender may write the next one into the same memory."""
    return Message(code, MessageBuffer(message.buffer.sizes, message.buffer.raw.clone()))
