"""MailDriver: runs the rounds of an algorithm on one vector, and answers its requests by objects of a medium."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from ..compression.compressor import Compressor
from ..flat.layout import FlatLayout
from ..flat.vector import FlatVector, add_
from ..mixing_manager.base import MixingManager
from ..rounds.algorithm import Algorithm
from ..rounds.driver import Driver
from ..rounds.memory import COUNTED, Memory
from ..rounds.messages import Message, MessageBuffer, Received
from ..rounds.mixer import Mixer
from ..rounds.requests import Average, Gather, Mix, Reply, Request, RoundLost, Share, Vectors, next_request
from ..rounds.vector import Vector
from ..state import is_of_one_worker, leaf
from ..transport.base import Transport
from ..transport.change_board import digest_of
from ..worlds.world import ALONE, ModelWorld
from .background import BackgroundCall
from .errors import RoundGone
from .job import MailJob, check_layout
from .rounds import Close, Missed, Outcome, Sent, Stream

_LATE = "missed rounds"  # the vector of the memory with the rounds that a late drift has missed
_KINDS = {Average: "average", Gather: "average", Mix: "mix", Share: "mix"}
_EXTRA = 1 << 16  # bytes of a message beside its tensors


def largest_message(layout: FlatLayout) -> int:
    """Return the largest size in bytes of a message: twice the bytes of the vector, and a bit for each entry."""
    return 2 * layout.num_bytes + sum(-(-segment.numel // 8) for segment in layout.segments) + _EXTRA


class Written(Mixer):
    """A mixer that writes the result of a round which the medium has already."""

    def __init__(self) -> None:
        self.write: Callable[[FlatVector], None] | None = None

    def start(self, s: FlatVector, t: int) -> None:
        """See `Mixer`: the message was sent before."""

    def finish(self, s: FlatVector) -> None:
        """See `Mixer`."""
        assert self.write is not None, "the driver has the outcome of the round"
        self.write(s)


class Notes(Protocol):
    """Is told of a round that has ended."""

    def __call__(self, kind: str, close: Close, *, counts: bool) -> None: ...


class MailDriver(Driver):
    """Runs the rounds of an algorithm on one vector, with the messages of a `Stream`.

    A round begins as everywhere: the algorithm runs to its first request. The payload of the request is the message of
    this worker, and the close of the round is the reply:

        Average(x)   x <- the mean over the workers of the close
        Gather(q)    the messages of the workers of the close, in order
        Mix(x)       x <- sum_j W_ij x_j, with the graph for as many workers as the close has
        Share(q)     the messages of the in-peers of this graph, with the weights of W - I

    So both ends of an edge leave out the same workers, and symmetric weights keep the mean over the close.

    [Note: Late drifts] A round whose close lacks this worker throws `RoundLost` into the algorithm: the model and the
    memory stay. The worker trains on, and its drift is measured from the anchor at which it began. At its next round it
    applies the rounds that it has missed to its memory: it runs each of them with the mean of the close as the reply,
    so its anchor and its outer momentum become equal to the others' ones. The sum of these changes of the anchor is the
    vector "missed rounds". The round then begins with the sum of x and this vector, whose distance to the new anchor is
    the distance of x to the old one. When a close has the worker, the vector becomes zero.

    [Note: In flight] A worker waits at most `grace` seconds for a close, and then trains on with the round in flight.
    The round ends at the first step at which its close is there, and the steps since then are kept:
    x <- phi + (x - s), with s the model that was sent. The next round waits until this one has ended. A method with a
    delay ends its rounds as everywhere, by its `arrival`, also where a close comes after the delay. Missed rounds are
    read in a thread too. If the medium does not answer in time, the worker trains on without a new round.

    Args:
        algorithm, plain: see `Driver`.

    Attributes:
        notes: told of the end of each round.
        next: for each kind of round, the number of the first one that this memory does not contain.
        task: the message and the outcome of the round in flight; None: no round is in flight.
        is_behind: whether rounds were missed between the last two messages.
    """

    next: dict[str, int] = leaf({})
    _chain: str = leaf("")  # the digest of the last close in this memory: see [Note: One chain] of `Stream`
    _sent_as: list[int] = leaf([], join="zero")  # this worker and the number of its round in flight

    def __init__(self, algorithm: Algorithm, plain: Mixer) -> None:
        super().__init__(algorithm, plain)
        self.name = "0"
        self.task: BackgroundCall[Outcome] | None = None
        self.notes: Notes | None = None
        self._written = Written()
        self._layout: FlatLayout | None = None
        self._outcome: Outcome | None = None
        self._unshifted: FlatVector | None = None
        self._before: Mapping[str, Any] | None = None  # the memory before the round in flight
        self._reading: tuple[tuple[str, int], BackgroundCall[Missed]] | None = None  # of a kind, the round of a number
        self.is_behind = False
        self._num_missed = 0  # since the last message
        self._posted_at, self._looked = 0, -math.inf  # the step of the last message, the time of the last read ahead

    def join_run(self, job: MailJob, name: str, choose: Callable[[int], MixingManager]) -> None:
        """Answer requests by the objects of a run.

        Args:
            job: this worker in the run.
            name: the name of the fragment.
            choose: the weights for a number of workers.
        """
        self.job, self.name, self._choose = job, name, choose

    def bind(self, mixing: MixingManager, transport: Transport, world: ModelWorld = ALONE) -> None:
        """See `Driver`."""
        super().bind(mixing, transport, world)
        self.stamps.is_needed, self.stamps.is_agreed, self.stamps.has_tried = False, True, True

    def begin(self, x: FlatVector, k: int, *, is_due: bool) -> bool:
        """See `Driver`.

        Raises:
            ValueError: other tensors are trained than at the start of the run.
        """
        check_layout(self.algorithm, self._layout or x.layout, x.layout)
        settings, is_first, has_joined = self.job.settings, self._layout is None, self._has_joined
        self._layout = x.layout
        has_changed = super().begin(x, k, is_due=is_due)
        if has_joined and self.algorithm.has_equal_memory:
            seconds = 2 * settings.timeout if is_first else settings.grace  # a worker in training goes on with it
            self.start_at_anchor(x, k, until=self.job.clock.now() + seconds)
            has_changed = True
        return has_changed

    # A round.

    def _stream(self, kind: str, layout: FlatLayout) -> Stream:
        return Stream(self.job, f"{self.name}-{kind}", max_bytes=largest_message(layout))

    def post(self, x: FlatVector, k: int, *, until: float) -> None:
        """Begin a round, and send its message in a thread; nothing if the missed rounds are not there in time.

        Args:
            x: the model; mutated if this worker was late.
            k: the number of optimizer steps so far.
            until: see `catch_up`.
        """
        kind = "average" if self.algorithm.averages_at(k) else "mix"
        stream = self._stream(kind, x.layout)
        self._posted_at = k
        if not self.catch_up(x, k, kind, until=until):
            self.is_behind = True
            return
        self.is_behind, self._num_missed = self._num_missed > 0, 0
        self._unshifted = self._shift(x)
        number = self.next.get(kind, 0)
        # Some methods write their vectors before they mix, and a worker may learn later that its round has left it out.
        self._before = None if self.algorithm.averages_exactly else copy.deepcopy(self.memory.state_dict())
        self.begin_round(Vector.of(x), number, k)
        opened = self.open_round
        if opened is None or opened.request is None:
            raise ValueError(
                f"got a round of {self.algorithm} without a request, expected one message in each round over a mailbox"
            )
        request = opened.request
        header = {"layout": digest_of([str(x.layout)]), "numbers": list(getattr(request, "numbers", ())), "step": k}
        header |= {"has_mean": isinstance(request, Average), "previous": self._chain if self._replays(kind) else ""}
        send = stream.post(number, header, self._payload(request))
        wanted = self._wanted(request, number)
        self._sent_as = [self.job.number, number]
        self.task = BackgroundCall(self.job.clock, lambda: send(wanted), name=f"mailbox-{stream.name}")

    def _payload(self, request: Request) -> Sequence[Tensor]:
        """The tensors of the message for a request; the buffers of the model are in it."""
        match request:
            case Average(code=Compressor()):
                raise ValueError(
                    f"got an Average with a code of {self.algorithm} over a mailbox, expected one without: a round has "
                    "one message of each worker, and a mean in two phases would need two; yield Gather in its place"
                )
            case Average(x) | Mix(x):
                for b, own in zip(x.buffers, self._buffers, strict=False):
                    b.copy_(own)
                return [s for s in x.whole.segments if s.numel()]
            case Gather(message) | Share(message):
                message.fill_others(self._buffers)
                return [message.buffer.raw[: message.num_bytes]]
        raise ValueError(
            f"got the request {type(request).__name__} of {self.algorithm} over a mailbox, expected Average, Gather, "
            "Mix or Share; take an algorithm without links between pairs"
        )

    def _wanted(self, request: Request, number: int) -> Callable[[Close], Collection[int] | None]:
        own = self.job.number

        def wanted(close: Close) -> Collection[int] | None:
            if close.has_mean:
                return None
            if isinstance(request, Gather) or own not in close.members:
                return close.members
            rank, mixing = close.members.index(own), self._choose(len(close.members))
            return {close.members[j] for j in (rank, *mixing.graph.in_peers(rank, number))}

        return wanted

    @property
    def begun_at(self) -> int | None:
        """The number of optimizer steps before the round in flight; None: no round is in flight."""
        return None if self.task is None or self.open_round is None else self.open_round.k

    @property
    def is_ready(self) -> bool:
        """Whether the outcome of the round in flight is there."""
        return self.task is not None and self.task.is_done

    def wait(self, until: float) -> bool:
        """Wait for the outcome of the round in flight, until a time of the clock; returns whether it is there."""
        assert self.task is not None, "a round is in flight"
        return self.task.wait(max(until - self.job.clock.now(), 0.0))

    def detach(self, x: FlatVector, *, keeps_sent: bool) -> None:
        """Let training go on with the round in flight.

        Args:
            x: the model; mutated if this worker was late.
            keeps_sent: see `Driver.depart`.
        """
        self._let_go(x, keeps_sent=keeps_sent)
        if self._unshifted is not None:
            x.copy_(self._unshifted)
            if self.open_round is not None and self.open_round.v.sent is not None:
                self.open_round.v.sent = Vector.of(self._unshifted)
            self._unshifted = None

    def land(self, x: FlatVector, *, kept: float, is_now: bool) -> None:
        """End the round in flight, whose outcome is there.

        Args:
            x: the model, mutated.
            kept: see `Driver.arrive`.
            is_now: whether x is still the model that was sent.
        """
        assert self.task is not None, "a round is in flight"
        assert self.open_round is not None, "a round is in flight"
        task, self.task = self.task, None
        try:
            outcome = self._outcome = task.result()
        except BaseException:
            self.close_round()
            raise
        opened, counts = self.open_round, outcome.counts
        try:
            assert opened.request is not None, "the round has a request"
            kind = _KINDS[type(opened.request)]
            opened.reply = self.answer(opened.request) if counts else RoundLost
            if is_now:
                self.go_on(opened.reply)
                self._run_to_end()
                self._end_round(Vector.of(x), 0.0)
            else:
                self.arrive(x, kept=kept)
        finally:
            self._outcome = None
        self._sent_as = []
        if counts:
            self.next[kind] = outcome.close.number + 1
            if self._replays(kind):
                self._chain = outcome.close.digest
            self.memory.forget(_LATE)
            self._unshifted = None
        elif self._unshifted is not None:
            x.copy_(self._unshifted)
            self._unshifted = None
        if not counts and self._before is not None:
            self.memory.overwrite(self._before)
        self._before = None
        if self.notes is not None:
            self.notes(kind, outcome.close, counts=counts)

    # Replies.

    def _reply_to(self, request: Request, v: Vectors) -> Reply:
        """See `Driver`: the outcome is there."""
        outcome, own = self._outcome, self.job.number
        if outcome is None:
            raise ValueError(
                f"got a second request in a round of {self.algorithm}, expected one: a round over a mailbox has one "
                "message; take an outer method, such as DiLoCo or NoLoCo"
            )
        members = outcome.close.members
        v.num_ranks = len(members)
        v.rank = members.index(own) if own in members else 0
        self.own_buffer_weight = 1 / v.num_ranks
        match request:
            case Average(x):
                self._written.write = lambda s: _copy_to(s, outcome.mean)
                self._mix(x, v, self._written)
                self._set_weight(v)
                return None if outcome.mean is None else _numbers(outcome.mean.header["numbers"])
            case Gather(message):
                rows = [outcome.messages[j] for j in members]
                self._average_buffers(message, rows)
                received = Received([(1.0, _message(message, sent)) for sent in rows], members, begins_with_own=False)
                received.numbers = _numbers([sent.header.get("numbers", ()) for sent in rows])
                return received
            case Mix(x):
                self._written.write = lambda s: self._combine(s, v)
                self._mix(x, v, self._written)
            case Share(message):
                row = self._row(v)
                messages = {j: _message(message, outcome.messages[members[j]]) for j in row}
                self._mix_buffers(messages, v)
                pairs = [(weight - (j == v.rank), messages[j]) for j, weight in row.items()]
                return Received(pairs, [members[j] for j in row])
        return None

    def _row(self, v: Vectors, *, of_buffers: bool = False) -> dict[int, float]:
        """The weights of the own message and of its in-peers, by position in the close; of parameters or of buffers."""
        mixing = self._choose(v.num_ranks)
        weights = (mixing.buffer_weights if of_buffers else mixing.weights)(v.rank, v.t)
        return {v.rank: weights.own, **weights.inp}

    def _combine(self, s: FlatVector, v: Vectors) -> None:
        """s <- sum_j W_ij s_j, by the messages of the outcome."""
        assert self._outcome is not None, "the round has ended"
        members, row, of_buffers = self._outcome.close.members, self._row(v), self._row(v, of_buffers=True)
        others = {j: s.like() for j in row if j != v.rank}
        for j, other in others.items():
            _copy_to(other, self._outcome.messages[members[j]])
        if row == of_buffers:
            s.combine_(row[v.rank], list(others.values()), [row[j] for j in others])
            return
        for is_buffer, weights in ((False, row), (True, of_buffers)):
            half, *halves = (x.where(is_buffer=is_buffer) for x in (s, *others.values()))
            half.combine_segments_(weights[v.rank], halves, [weights[j] for j in others])

    def _mix_buffers(self, messages: Mapping[int, Message], v: Vectors) -> None:
        """b <- b + sum_j W_ij (b_j - b), by the messages of the workers at these positions in the close."""
        weights = self._row(v, of_buffers=True)
        for j in (j for j in messages if j != v.rank):
            for b, own, other in zip(self._buffers, messages[v.rank].others, messages[j].others, strict=True):
                add_(b, other, alpha=weights[j])
                add_(b, own, alpha=-weights[j])

    def _average_buffers(self, message: Message, rows: Sequence[Sent]) -> None:
        for k, own in enumerate(self._buffers):
            fields = [_message(message, sent).others[k] for sent in rows]
            total = torch.zeros_like(own, dtype=torch.float64 if own.dtype == torch.float64 else torch.float32)
            for field in fields:
                total.add_(field)
            own.copy_(total.div_(len(rows)))

    # Missed rounds.

    def catch_up(self, x: FlatVector, k: int, kind: str, *, until: float) -> bool:
        """Apply the rounds that this worker has missed to its memory: see [Note: Late drifts].

        Args:
            x: the model; not changed.
            k: the number of optimizer steps so far.
            kind: the kind of the rounds.
            until: the time of the clock at which training goes on, though the medium has not answered.

        Returns:
            Whether the memory contains all closed rounds. If not, a later call goes on.
        """
        stream = self._stream(kind, x.layout)
        while True:
            number = self.next.get(kind, 0)
            if self._reading is None or self._reading[0] != (kind, number):
                read = partial(stream.missed, number, previous=self._chain if self._replays(kind) else None)
                self._reading = (kind, number), BackgroundCall(self.job.clock, read, name="mailbox-missed")
            if not self._reading[1].wait(max(until - self.job.clock.now(), 0.0)):
                return False
            (_, call), self._reading = self._reading, None
            missed = call.result()
            self.next[kind] = missed.next
            if missed.outcome is None:
                self._sent_as = []
                return True
            self._replay(x, k, missed.outcome)
            self._chain = missed.outcome.close.digest
            self._num_missed += 1
            if self._sent_as and self._sent_as[1] == number and self._sent_as[0] in missed.outcome.close.members:
                self._drop_drift(x)  # a checkpoint was saved while this round was in flight

    def _replays(self, kind: str) -> bool:
        """Whether a worker that has missed rounds of this kind applies them, so that all have one anchor."""
        return kind == "average" and self.algorithm.has_equal_memory

    def read_ahead(self, x: FlatVector) -> None:
        """Apply missed rounds as they end, without a wait, if this worker was behind at its last message.

        A slow worker misses several rounds in each of its periods. If it read them at its next message only, they would
        not be there in time, and its steps would never count.

        Args:
            x: the model; not changed.
        """
        now = self.job.clock.now()
        if self.is_behind and self.task is None and now >= self._looked + self.job.settings.poll:
            self._looked = now
            self.catch_up(x, self._posted_at, "average", until=now)

    def _replay(self, x: FlatVector, k: int, outcome: Outcome) -> None:
        memory, algorithm, close = self.memory, self.algorithm, outcome.close
        model = Vector.of(x.clone())
        v = self._vectors(model, close.number)
        kept = {
            name: [part.clone() for part in entry.vector.parts]
            for name, entry in memory.entries.items()
            if is_of_one_worker(entry.policies)
        }
        numbers, own_buffers = dict(memory.numbers), self._buffers
        algorithm.recover(v, memory)
        v.sent = Vector.of(x.clone())  # so that the round also decides about late steps
        before = [part.clone() for part in model.parts]
        self._buffers = [b.clone() for b in model.buffers]
        generator = algorithm.round(v, memory, k)
        request = next_request(generator, None)
        assert request is not None, "a round that averages has a request"
        self._outcome = outcome
        try:
            next_request(generator, self._reply_to(request, v))
        finally:
            self._outcome, self._buffers = None, own_buffers
        memory.end_round()
        for name, parts in kept.items():
            memory.entries[name].vector.set_(Vector(parts))
        algorithm.recover(v, memory)  # which drops the counts of tokens, and they belong to the late drift
        memory.numbers |= {name: numbers.get(name, 0) for name in COUNTED if name in memory.numbers}
        late = self._late(memory)
        for change, after, part in zip(late.parts, model.parts, before, strict=True):
            change.add_(after).sub_(part)

    def _drop_drift(self, x: FlatVector) -> None:
        """Let the next drift be zero: late <- the anchor - x."""
        anchor = x.clone()
        self._recover(anchor)
        self._late(self.memory).sum_(Vector.of(anchor), Vector.of(x), alpha=-1.0)

    def _late(self, memory: Memory) -> Vector:
        late = memory.vector(_LATE, join="zero")
        memory.missing = [name for name in memory.missing if name != _LATE]  # no version of an algorithm has it
        return late

    def _shift(self, x: FlatVector) -> FlatVector | None:
        """x <- x + late; returns a copy of x from before. None: this worker was not late."""
        self.memory.fit(Vector.of(x))
        if not self.memory.has(_LATE):
            return None
        before = x.clone()
        Vector.of(x).add_(self._late(self.memory))
        return before

    def start_at_anchor(self, x: FlatVector, k: int, *, until: float) -> None:
        """x <- the newest anchor, after the missed rounds that are there in time; for a worker that has just joined."""
        self.memory.fit(Vector.of(x))
        with suppress(RoundGone):  # `post` meets it too, and takes a newer model when the run has one
            self.catch_up(x, k, "average", until=until)
        self.memory.forget(_LATE)
        self._recover(x)

    def recover(self, x: FlatVector) -> None:
        """x <- the anchor in the memory; the counts of tokens go on."""
        self.memory.fit(Vector.of(x))
        numbers = dict(self.memory.numbers)
        self._recover(x)
        self.memory.numbers = numbers


def _copy_to(s: FlatVector, sent: Sent | None) -> None:
    """s <- the tensors of a message."""
    assert sent is not None, "the round has the message"
    for segment, tensor in zip((s for s in s.segments if s.numel()), sent.tensors, strict=True):
        segment.copy_(tensor)


def _numbers(rows: Sequence[Sequence[float]]) -> Tensor | None:
    """The numbers of the workers, float64 [n, k]; None: they have sent none."""
    return torch.tensor(rows, dtype=torch.float64, device="cpu") if rows and rows[0] else None


def _message(like: Message, sent: Sent) -> Message:
    """The message of a worker, with the fields and the code of the own one."""
    (raw,) = sent.tensors
    return like.reply_in(MessageBuffer(like.buffer.sizes, raw.to(like.buffer.raw.device)))
