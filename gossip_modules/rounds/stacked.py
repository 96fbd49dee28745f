"""Stacked: runs the rounds of all ranks in one process, on models that are the rows of one tensor."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias, cast

import torch
from torch import Tensor

from ..compression.compressor import Cast
from ..flat.vector import FlatVector
from ..mixing_manager.base import MixingManager
from ..schedule import Action
from .algorithm import Algorithm, next_request
from .memory import Memory
from .messages import Received
from .periodic import Periodic
from .requests import Average, Exchange, Gather, Inner, Mix, Request, Round, SGDStep, Share, Vectors
from .rows import EveryRow, RowMail, Rows, StackedMail, StackedMessage, StackedMixing, StackedReceived, arrived
from .vector import Snapshot, Vector

HEADER_BYTES = 8
"""The size of the header that is sent ahead of a message, see `Header`."""
Answered: TypeAlias = Rows | None
"""The communication that answered a request: the rows of W(t), or None for all ranks."""


class _Begun(NamedTuple):
    """A round that has yielded its first request, and the reply."""

    generator: Round
    v: Vectors
    reply: Any


class Stacked:
    """The models of n ranks as rows x_i of one tensor; rounds change them as n processes would.

    [Note: rows] `Mix(x)` computes W(t) x, and `Average(x)` the mean of the rows. A message holds the decoded values of
    all rows at once. The reply to `Share` has, for each column of in-peers, a column of weights [n, 1] and the messages
    of these peers. So a round is one generator over tensors [n, d]. An algorithm with `takes_rows = False` runs as n
    generators in step, one for each row.

    With overlap a round reads the models of one step, and its correction is added at the next step. The fragments of a
    `Periodic` algorithm are equal runs of columns, each with its own memory. A round with a delay ends `delay` steps
    after it began.

    Args:
        algorithm: the algorithm.
        mixing: W(t); None: the algorithm only averages over all ranks.
        num_ranks: n; None: the number of ranks of the graph.
        overlap: whether a round takes effect one step later.
        wire_dtype: torch.bfloat16 or torch.float16 rounds the vectors that are mixed, see [Note: narrow wire] of
            `PushPull`; None: no rounding.
        shape: the shape of the model as one tensor, for algorithms that use matrices; None: a vector.
        is_fragment: whether the rows are a fragment of the models.

    Raises:
        ValueError: the algorithm does not work with these weights or with overlap, or its fragments are names.

    Attributes:
        weights: the push-sum weights, float64 [n, 1]; None: all are one.
        memory: the memory of all ranks, if the algorithm `takes_rows`.
        t: the number of rounds with communication so far.
        sent_bytes: the payload that a rank has sent so far, mean over ranks, with the headers of messages.

    Example:
        >>> ring = RingGraph(3, peers_per_itr=2)
        >>> x = torch.tensor([[0.0], [0.0], [3.0]])
        >>> rows = Stacked(DPSGD(), MetropolisHastingsMixing(ring)).step(x, 0)
        >>> x.flatten().tolist()
        [1.0, 1.0, 1.0]
    """

    def __init__(
        self,
        algorithm: Algorithm,
        mixing: MixingManager | None,
        num_ranks: int | None = None,
        *,
        overlap: bool = False,
        wire_dtype: torch.dtype | None = None,
        shape: tuple[int, ...] | None = None,
        is_fragment: bool = False,
    ) -> None:
        self.algorithm = algorithm
        if mixing is not None:
            algorithm.check(mixing)
        if overlap and (algorithm.needs_current or algorithm.keeps_models):
            raise ValueError(f"got overlap=True with {algorithm}, expected overlap=False: it needs the current models")
        self.mixing = None if mixing is None else StackedMixing(mixing)
        self.num_ranks = num_ranks or (mixing.graph.world_size if mixing is not None else 1)
        self.overlap, self.shape = overlap, shape
        self._wire = None if wire_dtype is None else Cast(wire_dtype)
        is_weighted = self.mixing is not None and algorithm.takes_push_sum and not self.mixing.is_doubly_stochastic
        self.weights = torch.ones(self.num_ranks, 1, dtype=torch.float64, device="cpu") if is_weighted else None
        self.t, self.sent_bytes = 0, 0.0
        self.memory = Memory(repr(mixing))
        self._in_step = None if algorithm.takes_rows else InStep(self)
        self._answered: list[Answered] = []
        self._has_begun = False
        self._late: tuple[Tensor, Tensor | None] | None = None
        self._flights: list[tuple[int, int]] = []  # the steps at which rounds of fragments are due, and the fragments
        self._flight: _Begun | None = None

        self.fragments: list[Stacked] = []
        self.times = algorithm.parts[0] if isinstance(algorithm.parts[0], Periodic) else None
        if self.times is not None and (self.times.num_fragments > 1 or self.times.delay) and not is_fragment:
            if not isinstance(self.times.fragments, int):
                raise ValueError(f"got {algorithm}, expected fragments=2 or another number: rows have no named modules")
            others: dict[str, Any] = {"wire_dtype": wire_dtype, "shape": shape, "is_fragment": True}
            self.fragments = [Stacked(algorithm, mixing, num_ranks, **others) for _ in range(self.times.fragments)]

    @torch.no_grad()
    def step(self, x: Tensor, k: int, action: Action = Action.GOSSIP, *, sgd: SGDStep | None = None) -> list[Answered]:
        """Run the safe point after k optimizer steps of each rank.

        Args:
            x: the models, float32 or float64 [n, d], mutated.
            k: the number of optimizer steps so far.
            action: the action of the schedule.
            sgd: the step of SGD since the last round; None: there was none.

        Returns:
            The communication that answered each request of this step, in order; empty if there was none.
        """
        self._answered = []
        if not self._has_begun:
            self._begin(x)
        if self.fragments:
            self._step_fragments(x, k, sgd)
            return self._answered
        self._arrive(x)
        if action is Action.SKIP or (action is Action.GOSSIP and not self.algorithm.is_due(k)):
            return []
        weights = self.weights
        models = Snapshot([x.clone()]) if self.overlap else Vector([x])
        if action is Action.AVERAGE:
            self.average(models, is_model=True)
            for memory in self.memories:
                memory.forget_models(is_asked=False)
        else:
            self.run(models, k, sgd)
        self.t += 1
        if isinstance(models, Snapshot):
            change = None if self.weights is None or weights is None else self.weights - weights
            self._late, self.weights = (models.parts[0], change), weights
        return self._answered

    @torch.no_grad()
    def settle(self, x: Tensor) -> None:
        """End all rounds in flight, and apply them to the models x."""
        self._arrive(x)
        self._land_until(x, None)

    def estimates(self, x: Tensor) -> Tensor:
        """Return the models for forward and backward: x, or x / w with push-sum."""
        return x if self.weights is None else x / self.weights.to(x.dtype)

    @property
    def momentum(self) -> Tensor | None:
        """The momentum of SGD after the last round, [n, d]; None: the algorithm does not change it."""
        has_written = self.algorithm.needs_sgd and self.memory.num_rounds
        return self.memory.momentum.parts[0] if has_written else None

    @property
    def memories(self) -> Sequence[Memory]:
        """The memories of all ranks: one memory of stacked vectors, or one for each rank."""
        return [self.memory] if self._in_step is None else self._in_step.memories

    # A step.

    def _begin(self, x: Tensor) -> None:
        self._has_begun = True
        for fragment, part in zip(self.fragments, self._columns(x), strict=True):
            fragment._begin(part)
        if self._in_step is not None:
            self._in_step.begin(x)
        elif not self.fragments:
            self.algorithm.begin(self._vectors(Vector([x]), None), self.memory)

    def _arrive(self, x: Tensor) -> None:
        """Add the correction of the overlapped round that is in flight."""
        late, self._late = self._late, None
        if late is not None:
            x += late[0]
            if self.weights is not None and late[1] is not None:
                self.weights = self.weights + late[1]

    def _step_fragments(self, x: Tensor, k: int, sgd: SGDStep | None) -> None:
        algorithm, columns = self.times, self._columns(x)
        assert algorithm is not None, "fragments are settings of periodic algorithms"
        self._land_until(x, k)
        for p in algorithm.starting_at(k):
            fragment = self.fragments[p]
            fragment.t, fragment._answered, before = algorithm.number_of(p, k), self._answered, fragment.sent_bytes
            fragment.launch(Vector([columns[p]]), k, sgd)
            self.sent_bytes += fragment.sent_bytes - before
            if algorithm.delay:
                self._flights.append((k + algorithm.delay, p))
            else:
                fragment.land(Vector([columns[p]]))

    def _land_until(self, x: Tensor, k: int | None) -> None:
        """End the rounds of fragments that are due after k steps; None: all."""
        while self._flights and (k is None or self._flights[0][0] <= k):
            _, p = self._flights.pop(0)
            self.fragments[p].land(Vector([self._columns(x)[p]]))

    def _columns(self, x: Tensor) -> list[Tensor]:
        """Return views of the columns of each fragment."""
        stops = [x.shape[1] * p // max(len(self.fragments), 1) for p in range(len(self.fragments) + 1)]
        return [x[:, first:last] for first, last in itertools.pairwise(stops)]

    # A round.

    def run(self, x: Vector, k: int, sgd: SGDStep | None = None) -> None:
        """Run one round of all ranks.

        Args:
            x: the models, [n, d], mutated; a `Snapshot` becomes the correction.
            k: the number of optimizer steps so far.
            sgd: the step of SGD since the last round; None: there was none.
        """
        if self.algorithm.is_plain:
            self.mix(x, is_model=True)
        elif self._in_step is not None:
            self._in_step.run(x, k, sgd)
        else:
            self.launch(x, k, sgd)
            self.land(x)
        if self.algorithm.averages_at(k):
            for memory in self.memories:
                memory.forget_inner_models()
        if isinstance(x, Snapshot):
            x.begin_adding()  # if the round has written nothing, the correction is zero

    def launch(self, x: Vector, k: int, sgd: SGDStep | None) -> None:
        """Begin a round and answer its first request; arguments as for `run`."""
        v = self._vectors(x, sgd)
        if self.algorithm.follows_rate:
            self.memory.scale(None if sgd is None else sgd.lr)
        generator = self.algorithm.round(v, self.memory, k)
        self._flight = _Begun(generator, v, self._answer(next(generator), v))

    def land(self, x: Vector) -> None:
        """End the round that `launch` began, on the present models x."""
        assert self._flight is not None, "launch() comes first"
        (generator, v, reply), self._flight = self._flight, None
        v.x = x
        while (request := next_request(generator, reply)) is not None:
            reply = self._answer(request, v)
        self.memory.end_round()

    def _vectors(self, x: Vector, sgd: SGDStep | None) -> Vectors:
        self.memory.fit(x, who=self.algorithm)
        step = sgd if self.algorithm.needs_sgd and self.memory.num_rounds else None
        rate = sgd.lr if sgd is not None and self.algorithm.needs_inner_rate else None
        mail = StackedMail(self.mixing)
        return Vectors(x, mail, t=self.t, rank=-1, num_ranks=self.num_ranks, step=step, inner_rate=rate)

    def _answer(self, request: Request, v: Vectors) -> Any:
        if isinstance(request, Mix):
            self.mix(request.x, is_model=request.x is v.x)
            return None
        if isinstance(request, Average):
            self.average(request.x, is_model=request.x is v.x)
            return None
        if isinstance(request, Inner):
            reply = None
            while (asked := next_request(request.round, reply)) is not None:
                reply = self._answer(asked, v)
            return None
        assert isinstance(request, Share | Gather), f"got the request {request!r} of an algorithm that takes rows"
        message = cast(StackedMessage, request.message)
        if isinstance(request, Share):
            self.count_message(message.num_bytes)
            return StackedReceived(self.rows, message)
        self.count_gather(message.num_bytes)
        return EveryRow(message, self.num_ranks)

    @property
    def rows(self) -> Rows:
        """The rows of W(t) in this round."""
        assert self.mixing is not None, f"{self.algorithm} asks for peers, but there is no graph"
        return self.mixing.round(self.t)

    def mix(self, x: Vector, *, is_model: bool = False) -> None:
        """Answer `Mix`.

        Args:
            x: the vectors of all ranks, mutated.
            is_model: whether x is the model, so that the push-sum weights are mixed too.
        """
        rows, num_bytes = self.rows, 8 if self.weights is not None else 0
        is_snapshot = isinstance(x, Snapshot)
        for part in x.parts:
            sent = part if self._wire is None else self._wire.decompressed(part)
            num_bytes += part[0].nbytes if self._wire is None else self._wire.num_bytes(part.shape[1], part.dtype)
            mixed = rows.mix(sent)
            if is_snapshot or self._wire is not None:
                mixed.sub_(sent)
            if self._wire is not None and not is_snapshot:
                part.add_(mixed)
            else:
                part.copy_(mixed)
        _mark(x)
        if is_model and self.weights is not None:
            self.weights = rows.mix(self.weights)
        self._answered.append(rows)
        self.sent_bytes += rows.mean_out_degree * num_bytes

    def average(self, x: Vector, *, is_model: bool = False) -> None:
        """Answer `Average`.

        Args:
            x: the vectors of all ranks, mutated.
            is_model: whether x is the model, so that the push-sum weights are averaged too.
        """
        for part in x.parts:
            mean = part.mean(0)
            part.copy_(mean - part if isinstance(x, Snapshot) else mean.expand_as(part))
            self.sent_bytes += 2 * (self.num_ranks - 1) * part[0].nbytes // self.num_ranks
        _mark(x)
        if is_model and self.weights is not None:
            self.weights = self.weights.mean(0).expand_as(self.weights).clone()
        self._answered.append(None)

    def count_message(self, num_bytes: float) -> None:
        """Count a message of each rank to each of its peers, of so many bytes on average."""
        self._answered.append(self.rows)
        header = HEADER_BYTES if self.algorithm.checks_messages else 0
        self.sent_bytes += self.rows.mean_out_degree * (num_bytes + header)

    def count_gather(self, num_bytes: int) -> None:
        """Count a message of each rank to all other ranks, of so many bytes."""
        self._answered.append(None)
        self.sent_bytes += (self.num_ranks - 1) * num_bytes


def _mark(x: Vector) -> None:
    if isinstance(x, Snapshot):
        x.is_correction = True


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
                {j: arrived(sent[j].messages[i], own.code) for j, own in each.messages.items()}
                for i, each in enumerate(sent)
            ]
        messages = [cast(Share, request).message for request in requests]
        if isinstance(first, Gather):
            driver.count_gather(messages[0].buffer.raw.numel())
            return [Received([(1.0, arrived(m, own.code)) for m in messages], range(len(messages))) for own in messages]
        driver.count_message(messages[0].buffer.raw.numel())
        return [mail.row_of(messages, rank) for rank, mail in enumerate(self._mails)]
