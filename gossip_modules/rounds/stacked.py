"""Stacked: runs the rounds of all ranks in one process, on models that are the rows of one tensor."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..compression.compressor import Compressor
from ..flat.layout import FlatLayout, Segment, TensorSpec
from ..flat.vector import FlatVector
from ..mixing_manager.base import MixingManager
from ..schedule import Action, Schedule
from ..state import Restart
from .algorithm import Algorithm
from .coded_average import coded_average, sent_bytes
from .flights import Flight, Flights
from .memory import Memory
from .messages import SIZE_BYTES, Message
from .periodic import Periodic
from .requests import Average, Exchange, Gather, Inner, Mix, Request, Round, SGDStep, Share, Vectors, next_request
from .rows import RowMail, Rows, StackedMail, StackedMixing, arrived, column
from .vector import SentVector, Vector
from .wire import code_of, rounds_statistics

HEADER_BYTES = 8
"""The size of the header that is sent ahead of a message, see `Header`."""


class Answered(NamedTuple):
    """The communication that answered a request.

    Attributes:
        rows: the rows of W(t); None: all ranks.
        buffer_rows: the rows of W(t) for buffers; None: as `rows`.
        has_buffers: whether the buffers of the models travel along.
        wire: rounds the buffers that are sent by rows; None: no rounding.
        code: the code of an average over all ranks, for the buffers that take one; None: buffers are sent exactly.
        t: the number of the round with that code.
        share: the size of a message to all ranks as a share of the vector, if it differs from round to round.
        is_scheduled: whether it is an exact average of the schedule, of the whole models, in place of a round.
        is_awaited: whether training waits for it, whatever the delay of rounds.
    """

    rows: Rows | None
    buffer_rows: Rows | None = None
    has_buffers: bool = True
    wire: Compressor | None = None
    code: Compressor | None = None
    t: int = 0
    share: float | None = None
    is_scheduled: bool = False
    is_awaited: bool = False

    def mix_buffers(self, b: Tensor, kept: Tensor, *, takes_code: bool = False) -> tuple[Tensor, Tensor]:
        """Return buffers after this communication, and the weights of each rank for its own ones.

        Args:
            b: the buffers before it, [n, m].
            kept: the weights so far, [n, 1].
            takes_code: whether these buffers take a code: see [Note: Coded moments] of `CodedAverage`.
        """
        if not self.has_buffers:
            return b, kept
        if self.rows is None and self.code is not None and takes_code:
            average, rest = b.clone(), torch.empty_like(b)
            coded_average(average, rest, self.code, self.t, has_feedback=False)
            return average + rest, kept / len(b)
        if self.rows is None:
            return b.mean(0).expand_as(b), kept / len(b)
        rows = self.buffer_rows or self.rows
        is_rounded = self.wire is not None and (rounds_statistics(self.wire) or takes_code)
        sent = b if self.wire is None or not is_rounded or b.element_size() <= 2 else self.wire.decompressed(b)
        return rows.mix(b) if sent is b else b + rows.mix(sent).sub_(sent), kept * column(rows.own, b)


class LateBuffers(NamedTuple):
    """The arrival of buffers at the end of a round that runs under training.

    Attributes:
        num_steps: the number of steps from the beginning of a round to its end.
        kept: alpha, the weight of the own buffers: see [Note: Late arrival] of `Periodic`; None: their weight in the
            round, see [Note: late buffers] of `Overlap`.
        is_blended: whether b <- alpha b + (1 - alpha) mixed; else b <- mixed + alpha (b - sent).
    """

    num_steps: int
    kept: float | None = None
    is_blended: bool = False

    def split(self, mixed: Tensor, sent: Tensor, own_weight: Tensor) -> tuple[Tensor, Tensor]:
        """Return the factor of the own buffers at the end of the round, and the term to add.

        Args:
            mixed: the buffers after the communication of the round, [n, m].
            sent: the buffers before it, [n, m].
            own_weight: the weight of each rank for its own buffers in the round, [n, 1].
        """
        kept = own_weight if self.kept is None else torch.full_like(own_weight, self.kept)
        return kept, mixed * (1 - kept) if self.is_blended else mixed - kept * sent


class StackedRound(NamedTuple):
    """A round of all ranks that has yielded its first requests: its generators, their arguments, and the replies."""

    generators: list[Round]
    v: list[Vectors]
    replies: Sequence[Any]


class Stacked:
    """The models of n ranks as rows x_i of one tensor; rounds change them as n processes would.

    [Note: rows] `Mix(x)` computes W(t) x, and `Average(x)` the mean of the rows. A message holds the decoded values of
    all rows at once. The reply to `Share` has, for each column of in-peers, a column of weights [n, 1] and the messages
    of these peers. So a round is one generator over tensors [n, d]. An algorithm with `takes_rows = False` runs as n
    generators in step, one for each row.

    With overlap a round reads the models of one step, and its correction is added max_staleness + 1 steps later, or at
    the next round if that comes before. The fragments of a `Periodic` algorithm are equal runs of columns, each with
    its own memory. A round with a delay ends `delay` steps after it began.

    Args:
        algorithm: the algorithm.
        mixing: W(t); None: the algorithm only averages over all ranks.
        num_ranks: n; None: the number of ranks of the graph.
        overlap: whether a round takes effect at a later step, by default the next one.
        max_staleness: see `GossipDataParallel`; each round is late by so many steps.
        wire_dtype: torch.bfloat16, torch.float16 or torch.int8 rounds the vectors that are mixed, see
            [Note: narrow wire] of `PushPull`; None: no rounding.
        shapes: the shapes of the tensors of the model, for algorithms that use matrices; None: one vector.
        is_fragment: whether the rows are a fragment of the models.

    Raises:
        ValueError: the algorithm does not work with these weights or with overlap, or its settings have names.

    Attributes:
        weights: the push-sum weights, float64 [n, 1]; None: all are one.
        memories: the memory of all ranks, if the algorithm `takes_rows`; else the memory of each rank.
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
        max_staleness: int = 0,
        wire_dtype: torch.dtype | None = None,
        shapes: Sequence[tuple[int, ...]] | None = None,
        is_fragment: bool = False,
    ) -> None:
        self.algorithm = algorithm
        if mixing is not None:
            algorithm.check(mixing)
        algorithm.check_overlap(overlap, Schedule())
        self.mixing = None if mixing is None else StackedMixing(mixing)
        self.num_ranks = num_ranks or (mixing.graph.world_size if mixing is not None else 1)
        self.overlap, self._num_late = overlap, max_staleness + 1
        self._specs = () if shapes is None else tuple(TensorSpec(tuple(s), name=str(j)) for j, s in enumerate(shapes))
        self._wire = None if wire_dtype is None else code_of(wire_dtype)
        is_weighted = mixing is not None and algorithm.takes_push_sum and not mixing.is_doubly_stochastic
        self.weights = torch.ones(self.num_ranks, 1, dtype=torch.float64, device="cpu") if is_weighted else None
        self.t, self.sent_bytes = 0, 0.0
        self._mails: list[Any] = [RowMail(mixing, rank) for rank in range(self.num_ranks)]
        if algorithm.takes_rows:
            self._mails = [StackedMail(self.mixing, self.num_ranks)]
        self.memories = [Memory(repr(mixing)) for _ in self._mails]
        self._answered: list[Answered] = []
        self._has_sent_buffers = False  # with a message of the present round
        self._has_begun = False
        self._flights: Flights[Flight] = Flights()
        self._correction: tuple[Tensor, Tensor | None] | None = None  # of the overlapped round, for models and weights
        self._open: StackedRound | None = None

        self.fragments: list[Stacked] = []
        self.times = algorithm.parts[0] if isinstance(algorithm.parts[0], Periodic) else None
        if self.times is not None and self.times.delay == "auto":
            raise ValueError(f"got {algorithm}, expected a number of steps as delay: rows in one process send nothing")
        if self.times is not None and self.times.module_names:
            raise ValueError(
                f"got {algorithm}, expected fragments=2 or another number, and no names: rows have no named modules"
            )
        if self.times is not None and (self.times.num_fragments > 1 or self.times.delay) and not is_fragment:
            self.fragments = [
                Stacked(algorithm, mixing, num_ranks, wire_dtype=wire_dtype, shapes=run, is_fragment=True)
                for run in self._shapes_of_fragments(self.times.num_fragments)
            ]

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
        if k and self.algorithm.counts_tokens:
            for memory in (memory for part in (self, *self.fragments) for memory in part.memories):
                memory.count_tokens(1)  # ranks read batches of one size
        has_round = action is not Action.SKIP and (action is not Action.GOSSIP or self.algorithm.is_due(k))
        self._land_until(x, None if self.overlap and has_round else k)
        if self.fragments:
            self._step_fragments(x, k, action, sgd)
            return self._answered
        if not has_round:
            return []
        weights = self.weights
        models = SentVector([x.clone()]) if self.overlap else Vector([x])
        if action in (Action.AVERAGE, Action.WARM_UP):
            self._average_all(models, x, action)
        else:
            self.run(models, k, sgd)
        self.t += 1
        if self.overlap:
            change = None if self.weights is None or weights is None else self.weights - weights
            self._correction, self.weights = (models.parts[0], change), weights
            due = k + self._num_late
            self._flights.note(Flight(k, due, due))
        return self._answered

    @torch.no_grad()
    def settle(self, x: Tensor) -> None:
        """End all rounds in flight, and apply them to the models x."""
        self._land_until(x, None)

    def estimates(self, x: Tensor) -> Tensor:
        """Return the models for forward and backward: x, or x / w with push-sum."""
        return x if self.weights is None else x / self.weights.to(x)

    @property
    def momentum(self) -> Tensor | None:
        """The momentum of SGD after the last round, [n, d]; None: the algorithm does not change it."""
        memory = self.memories[0]
        return memory.momentum.parts[0] if self.algorithm.needs_sgd and memory.num_rounds else None

    @property
    def late_buffers(self) -> LateBuffers | None:
        """The arrival of the buffers of a round; None: they arrive in the step in which it begins."""
        if self.overlap:
            return LateBuffers(self._num_late)
        if len(self.fragments) != 1 or self.times is None or not self.times.delay:
            return None
        if self.times.keeps_sent:
            return LateBuffers(int(self.times.delay), 1.0)
        return LateBuffers(int(self.times.delay), self.times.kept, is_blended=True)

    # A step.

    def _begin(self, x: Tensor) -> None:
        self._has_begun = True
        for fragment, part in zip(self.fragments, self._columns(x), strict=True):
            fragment._begin(part)
        if not self.fragments:
            for v, memory in zip(self._vectors(Vector([x]), None), self.memories, strict=True):
                self.algorithm.begin(v, memory)

    def _land_until(self, x: Tensor, k: int | None) -> None:
        """End the rounds in flight that are due after k steps; None: all."""
        while (flight := self._flights.oldest) is not None and (k is None or flight.is_due(k)):
            self._flights.end(flight)
            if self.fragments:
                self.fragments[flight.fragment].land(Vector([self._columns(x)[flight.fragment]]))
            else:
                self._add_correction(x)

    def _add_correction(self, x: Tensor) -> None:
        assert self._correction is not None, "an overlapped round leaves its correction"
        (correction, change), self._correction = self._correction, None
        x += correction
        if self.weights is not None and change is not None:
            self.weights = self.weights + change

    def _average_all(self, models: Vector, x: Tensor, action: Action) -> None:
        """Average the models in place of a round, after which the algorithm may begin.

        Args:
            models: the models; a `SentVector` becomes the correction.
            x: the models themselves, [n, d].
            action: AVERAGE or WARM_UP.
        """
        self.average(models, is_model=True)
        self._answered[-1] = self._answered[-1]._replace(is_scheduled=True, is_awaited=not self.overlap)
        for memory in (memory for part in (self, *self.fragments) for memory in part.memories):
            memory.restart(Restart.ALL if action is Action.WARM_UP else Restart.AVERAGE)
        if action is Action.WARM_UP and not self.overlap:
            self._begin(x)

    def _step_fragments(self, x: Tensor, k: int, action: Action, sgd: SGDStep | None) -> None:
        algorithm, columns = self.times, self._columns(x)
        assert algorithm is not None, "fragments are settings of periodic algorithms"
        if action in (Action.AVERAGE, Action.WARM_UP):
            self._land_until(x, None)
            self._average_all(Vector([x]), x, action)
        if action is not Action.GOSSIP:
            return
        for p in algorithm.starting_at(k):
            fragment = self.fragments[p]
            fragment.t, fragment._answered, before = algorithm.number_of(p, k), self._answered, fragment.sent_bytes
            fragment.launch(Vector([columns[p]]), k, sgd, is_late=bool(algorithm.delay))
            self.sent_bytes += fragment.sent_bytes - before
            if algorithm.delay:
                due = k + int(algorithm.delay)
                self._flights.note(Flight(k, due, due, fragment=p))
                if algorithm.keeps_sent:
                    fragment.keep_sent()
            else:
                fragment.land(Vector([columns[p]]))

    def _columns(self, x: Tensor) -> list[Tensor]:
        """Return views of the columns of each fragment."""
        return [x[:, first:last] for first, last in _equal_runs(x.shape[1], len(self.fragments))]

    def _shapes_of_fragments(self, num_fragments: int) -> list[Sequence[tuple[int, ...]] | None]:
        """Return the shapes of the tensors of each fragment, and of the pieces of tensors that are cut."""
        if not self._specs:
            return [None] * num_fragments
        whole = Segment(torch.float64, 0, sum(spec.numel for spec in self._specs), self._specs)
        return [[spec.shape for spec in whole.cut(*run)] for run in _equal_runs(whole.numel, num_fragments)]

    # A round.

    def run(self, x: Vector, k: int, sgd: SGDStep | None = None) -> None:
        """Run one round of all ranks.

        Args:
            x: the models, [n, d], mutated; a `SentVector` becomes the correction.
            k: the number of optimizer steps so far.
            sgd: the step of SGD since the last round; None: there was none.
        """
        if self.algorithm.is_plain:
            self.mix(x, is_model=True)
        else:
            self.launch(x, k, sgd)
            self._run_to_end()
        if self.algorithm.averages_at(k):
            for memory in self.memories:
                memory.restart_inner()
        _mark(x)

    def launch(self, x: Vector, k: int, sgd: SGDStep | None, *, is_late: bool = False) -> None:
        """Begin a round and answer its first request.

        Args:
            x, k, sgd: see `run`.
            is_late: whether models change before `land`; what the first request does to them is then a correction.
        """
        v = self._vectors(x, sgd)
        if self.algorithm.follows_rate:
            for memory in self.memories:
                memory.scale(None if sgd is None else sgd.lr)
        generators = [self.algorithm.round(each, memory, k) for each, memory in zip(v, self.memories, strict=True)]
        requests = _next_requests(generators, [None] * len(v))
        if is_late:
            requests = [_let_go(request, each) for request, each in zip(requests, v)]
        self._open = StackedRound(generators, v, self._answer(requests, v))

    def keep_sent(self) -> None:
        """Let the round that `launch` began keep a copy of the models; see `Vectors.sent`."""
        assert self._open is not None, "launch() comes first"
        for v in self._open.v:
            if not isinstance(v.x, SentVector):  # else it is the correction, and no round reads the model
                v.sent = Vector([part.clone() for part in v.x.parts])

    def land(self, x: Vector) -> None:
        """End the round that `launch` began, on the present models x."""
        assert self._open is not None, "launch() comes first"
        for v, model in zip(self._open.v, self._models(x), strict=True):
            sent, v.x = v.x, model
            if isinstance(sent, SentVector):
                model.add_(sent)
        self._run_to_end()

    def _run_to_end(self) -> None:
        assert self._open is not None, "launch() comes first"
        opened, self._open = self._open, None
        self._go_on(*opened)
        for memory, v in zip(self.memories, opened.v, strict=True):
            memory.end_round()
            v.x.begin_adding()  # if the round has written nothing, the correction is zero

    def _go_on(self, generators: list[Round], v: list[Vectors], replies: Sequence[Any]) -> None:
        """Run rounds, or inner rounds, to their end."""
        while requests := _next_requests(generators, replies):
            replies = self._answer(requests, v)

    def _models(self, x: Vector) -> list[Vector]:
        """Return the vector of each generator: the models of all ranks, or the model of one rank."""
        if self.algorithm.takes_rows:
            return [x]
        rows = x.parts[0]
        layout = FlatLayout((Segment(rows.dtype, 0, rows.shape[1], self._specs),), rows[0].nbytes)
        return [type(x).of(FlatVector(layout, row.view(torch.uint8))) for row in rows]

    def _vectors(self, x: Vector, sgd: SGDStep | None) -> list[Vectors]:
        found, n, self._has_sent_buffers = [], self.num_ranks, False
        rate = sgd.lr if sgd is not None and self.algorithm.needs_inner_rate else None
        for model, memory, mail in zip(self._models(x), self.memories, self._mails, strict=True):
            memory.fit(model, who=self.algorithm)
            mail.begin_round(self.t, model.device)
            step = sgd if self.algorithm.needs_sgd and memory.num_rounds else None
            found.append(Vectors(model, mail, t=self.t, rank=mail.rank, num_ranks=n, step=step, inner_rate=rate))
        return found

    def _answer(self, requests: Sequence[Any], v: list[Vectors]) -> Sequence[Any]:
        """Return the replies to the requests of all generators, which are of one kind."""
        match requests[:1]:
            case [Average(code=Compressor())]:
                self._average_codes(requests)
                return [self._numbers_of(requests) if requests[0].numbers else None] * len(requests)
            case [Mix() | Average()]:
                self._answer_mix(requests, is_model=requests[0].x is v[0].x)
                if isinstance(requests[0], Average) and requests[0].numbers:
                    return [self._numbers_of(requests)] * len(requests)
            case [Inner()]:
                self._has_sent_buffers = False
                self._go_on([request.round for request in requests], v, [None] * len(requests))
            case [Share()]:
                messages = [request.message for request in requests]
                self.count_message(messages[0].num_bytes)
                return [mail.row_of(messages) for mail in self._mails]
            case [Gather()]:
                messages = [request.message for request in requests]
                self.count_gather(messages, sum(part.nbytes for part in v[0].x.parts))
                received = [mail.all_of(messages) for mail in self._mails]
                numbers = self._numbers_of(requests)
                for each in received:
                    each.numbers = numbers
                return received
            case [Exchange()]:
                sizes = [message.num_bytes for request in requests for message in request.messages.values()]
                self.count_message(sum(sizes) / max(len(sizes), 1))
                return [
                    {j: arrived(requests[j].messages[i], own.code) for j, own in request.messages.items()}
                    for i, request in enumerate(requests)
                ]
        return [None] * len(requests)

    def _numbers_of(self, requests: Sequence[Any]) -> Tensor:
        """Return the numbers of all ranks, which each rank sends to all others."""
        numbers = torch.tensor([request.numbers for request in requests], dtype=torch.float64, device="cpu")
        self.sent_bytes += (self.num_ranks - 1) * numbers[0].nbytes
        return numbers

    def _answer_mix(self, requests: Sequence[Any], *, is_model: bool) -> None:
        vectors: list[Vector] = [request.x for request in requests]
        x, is_stacked = vectors[0], self.algorithm.takes_rows
        if not is_stacked:
            x = type(x)([torch.stack([vector.parts[0] for vector in vectors])])
        (self.mix if isinstance(requests[0], Mix) else self.average)(x, is_model=is_model)
        if not is_stacked:
            for vector, row in zip(vectors, x.parts[0], strict=True):
                vector.parts[0].copy_(row)
                _mark(vector)

    def _average_codes(self, requests: Sequence[Any]) -> None:
        """Answer `Average` with a code."""
        vectors = [(request.x.parts, request.rest.parts) for request in requests]
        x, rest = vectors[0]
        if not self.algorithm.takes_rows:
            x, rest = ([torch.stack([parts[0] for parts in each])] for each in zip(*vectors, strict=True))
        code = requests[0].code
        for part, left in zip(x, rest, strict=True):
            coded_average(part, left, code, self.t)
            self.sent_bytes += sent_bytes(part.shape[1], part.dtype, self.num_ranks, code)
        if not self.algorithm.takes_rows:
            for (own, left), *rows in zip(vectors, x[0], rest[0], strict=True):
                own[0].copy_(rows[0])
                left[0].copy_(rows[1])
        self._answered.append(Answered(None, code=code, t=self.t))

    @property
    def rows(self) -> Rows:
        """The rows of W(t) in this round."""
        assert self.mixing is not None, f"{self.algorithm} asks for peers, but there is no graph"
        return self.mixing.round(self.t)

    @property
    def _buffer_rows(self) -> Rows | None:
        """The rows of W(t) for buffers in this round, if they are others."""
        return None if self.mixing is None else self.mixing.buffer_round(self.t)

    def mix(self, x: Vector, *, is_model: bool = False) -> None:
        """Answer `Mix`.

        Args:
            x: the vectors of all ranks, mutated.
            is_model: whether x is the model, so that the push-sum weights are mixed too.
        """
        rows, num_bytes = self.rows, 8 if self.weights is not None else 0
        is_snapshot = isinstance(x, SentVector)
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
        self._answered.append(Answered(rows, self._buffer_rows, wire=self._wire))
        self.sent_bytes += rows.mean_out_degree * num_bytes

    def average(self, x: Vector, *, is_model: bool = False) -> None:
        """Answer `Average`.

        Args:
            x: the vectors of all ranks, mutated.
            is_model: whether x is the model, so that the push-sum weights are averaged too.
        """
        for part in x.parts:
            mean = part.mean(0)
            part.copy_(mean - part if isinstance(x, SentVector) else mean.expand_as(part))
            self.sent_bytes += 2 * (self.num_ranks - 1) * part[0].nbytes // self.num_ranks
        _mark(x)
        if is_model and self.weights is not None:
            self.weights = self.weights.mean(0).expand_as(self.weights).clone()
        self._answered.append(Answered(None))

    def count_message(self, num_bytes: float) -> None:
        """Count a message of each rank to each of its peers, of so many bytes on average."""
        has_buffers = self.algorithm.mixes_buffers and not self._has_sent_buffers
        self._answered.append(Answered(self.rows, self._buffer_rows, has_buffers=has_buffers))
        self._has_sent_buffers = True
        header = HEADER_BYTES if self.algorithm.checks_messages else 0
        self.sent_bytes += self.rows.mean_out_degree * (num_bytes + header)

    def count_gather(self, messages: Sequence[Message], vector_bytes: int) -> None:
        """Count a message of each rank to all other ranks.

        Args:
            messages: the messages; the longest one counts for all, and trimmed ones have a number with their size.
            vector_bytes: the bytes of the vector of a rank.
        """
        num_bytes, is_trimmed = max(message.num_bytes for message in messages), messages[0].is_trimmed
        num_bytes += SIZE_BYTES * is_trimmed
        self._answered.append(Answered(None, share=num_bytes / vector_bytes if is_trimmed else None))
        self.sent_bytes += (self.num_ranks - 1) * num_bytes


def _equal_runs(num_elements: int, num_runs: int) -> list[tuple[int, int]]:
    """Return [first, last) of equal runs of elements."""
    stops = [num_elements * p // max(num_runs, 1) for p in range(num_runs + 1)]
    return list(itertools.pairwise(stops))


def _let_go(request: Request, v: Vectors) -> Request:
    """Let a request for the model itself work on a copy, which becomes the correction; see `Driver.depart`."""
    if isinstance(request, Mix | Average) and request.x is v.x:
        v.x = SentVector([part.clone() for part in v.x.parts])
        return replace(request, x=v.x)
    return request


def _mark(x: Vector) -> None:
    if isinstance(x, SentVector):
        x.is_correction = True


def _next_requests(generators: Sequence[Round], replies: Sequence[Any]) -> list[Request]:
    """Return the next request of each generator; empty: all have ended."""
    requests = [request for request in map(next_request, generators, replies) if request is not None]
    assert len({type(request) for request in requests}) <= 1, f"ranks ask for different things: {requests}"
    assert len(requests) in (0, len(generators)), "the rounds of some ranks end before those of others"
    return requests
