"""Stream: the rounds of one fragment of a model. Each worker writes a message, and one create decides who counts."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ..membership.background_log import log
from .errors import MailboxError, RoundGone
from .job import MAX_HEADER, MailJob
from .sealed import pack, unpack

_LIST_EVERY = 2  # polls; see [Note: Looks] of `Stream`
_GROWTH = 1.5  # of the pauses between two looks
_CLOSE = re.compile(r"round/[^/]+/(\d{10})/close")


@dataclass(frozen=True)
class Close:
    """The decision of a round: the workers whose messages count.

    Attributes:
        number: the number of the round.
        members: the numbers of the workers, ascending.
        digests: the SHA-256 of the message of each, hexadecimal.
        by: the number of the worker that decided.
        has_mean: whether that worker writes the mean of the messages.
        previous: the digest of the close before; see [Note: One chain] of `Stream`.
        digest: the digest of this close.
        steps: the number of optimizer steps of each worker, for readers outside.
    """

    number: int
    members: tuple[int, ...]
    digests: tuple[str, ...]
    by: int
    has_mean: bool
    previous: str
    digest: str
    steps: tuple[int, ...]

    @classmethod
    def read(cls, number: int, data: bytes) -> Close:
        """Return the decision that an object has."""
        header, _ = unpack(data, max_bytes=MAX_HEADER)
        pairs = [(int(member), str(digest)) for member, digest in header["members"]]
        members, digests = zip(*sorted(pairs), strict=True)
        digest, steps = hashlib.sha256(data).hexdigest(), tuple(map(int, header["steps"]))
        by, has_mean, previous = int(header["by"]), bool(header["has_mean"]), str(header["previous"])
        return cls(number, members, digests, by, has_mean, previous, digest, steps)


@dataclass(frozen=True)
class Sent:
    """A message: its header, its tensors and its SHA-256."""

    header: Mapping[str, Any]
    tensors: Sequence[Tensor]
    digest: str

    @classmethod
    def read(cls, data: bytes, max_bytes: int) -> Sent:
        """Return the message that an object has."""
        header, tensors = unpack(data, max_bytes=max_bytes)
        return cls(header, tensors, hashlib.sha256(data).hexdigest())


@dataclass
class Outcome:
    """The end of a round: its close, and as much of the messages as this worker asked for.

    Attributes:
        close: the decision.
        mean: the mean of the messages and the numbers of their senders; None: it was not asked for.
        messages: the messages by worker, as many as were asked for.
        counts: whether the close has the message of this worker.
    """

    close: Close
    mean: Sent | None = None
    messages: dict[int, Sent] = field(default_factory=dict)
    counts: bool = False


@dataclass
class Missed:
    """The end of a round that a worker has perhaps missed.

    Attributes:
        outcome: the outcome of the round, if it was asked for; None: the round is open.
        next: the number of the next round.
    """

    outcome: Outcome | None
    next: int


Wanted = Callable[[Close], Collection[int] | None]
"""The workers whose messages a worker needs after a close; None: the mean of all."""


class Stream:
    """The rounds of one kind, for one fragment of a model.

    [Note: The close] Round r of a stream has these objects, each of them written once:

        round/<stream>/<r>/<worker>      the message of a worker
        round/<stream>/<r>/reader        the worker that reads all messages
        round/<stream>/<r>/close         the workers that count, with the digests of their messages
        round/<stream>/<r>/mean          the mean of their messages, where the algorithm averages

    A worker closes the round if all live workers have written, or if `quorum` of them have and `grace` seconds have
    passed since it saw that. The first create wins, and everybody reads the same close. All that follows is a function
    of the objects, computed in the order of the numbers of the workers, so all workers have the same bits. A message
    that is not in the close is late: see [Note: Late drifts] of `MailDriver`.

    [Note: One chain] Where workers share an anchor, each message and each close has the digest of the close before. A
    worker counts messages with the digest that it knows itself, and a close with another one is of another history:
    the worker then goes on from the newest model. So a close that somebody deletes, and a late worker decides again,
    takes that worker to another history and not the others.

    [Note: Looks] A look at a round that is open costs a request. At its first look a worker lists the messages, so the
    worker that writes last closes the round at once, after it has listed the workers. The others read the close until
    it is there, with pauses that grow from poll/16 to poll: a read costs a tenth of a list. They list the messages and
    the workers every second poll, so they close the round themselves where that worker has died.

    Each worker would download all messages in order to close. So the worker that finds all messages right after its own
    closes at once, or after the grace, and the others one after the other, each `patience` seconds later, in an order
    that turns with r. Several workers may find all messages at the same time. With more than two workers the first
    create of "reader" decides the worker that reads the messages. The others wait for the close, and take over one
    after the other if it does not come for as long as so many uploads take.

    Args:
        job: the worker and its settings.
        name: the name of the stream.
        max_bytes: the largest size of a message.
    """

    def __init__(self, job: MailJob, name: str, *, max_bytes: int) -> None:
        self.job, self.name, self.max_bytes = job, name, max_bytes

    def path(self, number: int, leaf: str = "") -> str:
        """The path of an object of a round."""
        return f"round/{self.name}/{number:010d}/{leaf}"

    def close_of(self, number: int) -> Close | None:
        """The close of a round; None: it is open."""
        data = self.job.medium.get(self.path(number, "close"), max_bytes=MAX_HEADER)
        if data is None:
            return None
        self.job.closed[self.name] = max(self.job.closed.get(self.name, 0), number)
        return Close.read(number, data)

    def missed(self, number: int, *, previous: str | None) -> Missed:
        """The outcome of a round, and the number of the next one.

        Args:
            number: the number of the round.
            previous: the digest of the close before; None: without outcomes, up to the first open round.

        Raises:
            RoundGone: see `outcome` and `check_chain`.
        """
        close = self.close_of(number)
        if close is None:
            return Missed(None, number)
        if previous is None:
            return Missed(None, self.first_open())
        self.check_chain(close, previous)
        return Missed(self.outcome(close, lambda close: None if close.has_mean else close.members), number + 1)

    def check_chain(self, close: Close, previous: str) -> None:
        """Raise RoundGone if a close follows another one than the close with this digest; see [Note: One chain]."""
        if close.previous != previous:
            raise RoundGone(
                f"{self.job.medium.address}: round {close.number} of {self.name} goes on from another close than the "
                "last one of this worker, expected one history: an object of the run was deleted or replaced; keep "
                "others from writing to the run"
            )

    def first_open(self) -> int:
        """The number of the first round after the last close that opens, by one list of all rounds."""
        found = map(_CLOSE.fullmatch, self.job.medium.list(f"round/{self.name}"))
        closes = sorted((int(each[1]) for each in found if each), reverse=True)
        return next((number + 1 for number in closes if self.close_of(number) is not None), 0)

    def post(self, number: int, header: Mapping[str, Any], tensors: Sequence[Tensor]) -> Callable[[Wanted], Outcome]:
        """Copy a message; returns a function that sends it, waits for the close, and returns the outcome.

        The function may run in another thread, while training changes the tensors.

        Args:
            number: the number of the round.
            header: values of the message for JSON.
            tensors: its tensors.
        """
        data = pack({**header, "by": self.job.number}, tensors)
        return lambda wanted: self._run(number, data, wanted)

    def _run(self, number: int, data: bytes, wanted: Wanted) -> Outcome:
        job, clock = self.job, self.job.clock
        start = clock.now()
        is_there = job.medium.create(self.path(number, f"{job.number:06d}"), data)
        job.note_write()
        patience, pause = max(job.settings.poll / 4, clock.now() - start), job.settings.poll / 16
        watch = CloseRule(job.settings.quorum, job.settings.grace)
        own = {job.number: Sent.read(data, self.max_bytes)}
        written, live, listed, close = {job.number}, {job.number}, -math.inf, None
        is_reader, takes_over, warns_at = None, math.inf, math.inf
        while True:
            is_first_look, must_list = listed < 0, clock.now() - listed >= _LIST_EVERY * job.settings.poll
            if must_list:  # see [Note: Looks]
                leaves = {path.rsplit("/", 1)[1] for path in job.medium.list(self.path(number))}
                written, listed = {int(leaf) for leaf in leaves if leaf.isdigit()}, clock.now()
                live = job.live(max_age=math.inf if is_first_look else job.settings.poll)
                job.heard(*written)
            if (not must_list or "close" in leaves) and (close := self.close_of(number)) is not None:
                break
            if is_first_look:  # the last writer of the quorum is the first to close, also after the grace
                is_last = len(written) >= job.settings.quorum
            turn = sorted(written | {job.number})
            order = (turn.index(job.number) - number) % len(turn)
            position = 0 if is_last else order
            may_close = is_there and watch.may_close(clock.now(), written, live, delay=position * patience)
            if may_close and is_first_look:
                live = job.live()
                may_close = watch.may_close(clock.now(), written, live, delay=0.0)
            if may_close and is_reader is None:
                is_reader = len(turn) <= 2 or job.medium.create(self.path(number, "reader"), pack({"by": job.number}))
                takes_over = clock.now() + (1 + order) * len(turn) * patience
            if may_close and (is_reader or clock.now() >= takes_over):
                close = self._decide(number, written, own, quorum=min(job.settings.quorum, len(live)))
                if close is not None:
                    break
                warns_at = min(warns_at, clock.now() + job.settings.grace)
            if warns_at <= clock.now():  # some stores show an object some time after it is there
                log.warning(
                    "%s: round %d of %s cannot be closed: its close does not open, or fewer than %d messages do; "
                    "delete such objects, and keep others from writing to the run",
                    *(job.medium.address, number, self.name, min(job.settings.quorum, len(live))),
                )
                warns_at = math.nan  # once
            if not is_there and clock.now() - start > 2 * job.settings.grace:
                raise RoundGone(
                    f"{job.medium.address}: another message of worker {job.number} is in round {number} of "
                    f"{self.name}, which nobody closes, expected the one of now: an object of the run was deleted, or "
                    "this worker has gone back to an earlier state"
                )
            job.beat(is_needed=False)
            job.pause(pause)
            pause = min(pause * _GROWTH, job.settings.poll)
        self.check_chain(close, str(own[job.number].header["previous"]))
        job.heard(*close.members)
        job.last_round = clock.now() - start
        if dict(zip(close.members, close.digests, strict=True)).get(job.number) != own[job.number].digest:
            return Outcome(close)
        return replace(self.outcome(close, wanted, known=own), counts=True)

    def _decide(self, number: int, written: Iterable[int], known: dict[int, Sent], *, quorum: int) -> Close | None:
        """Close a round with the messages that are valid; None: they are too few.

        Args:
            number: the round.
            written: the workers that have written.
            known: messages that this worker has; others of its layout and its history are added.
            quorum: the least number of messages.
        """
        job, own = self.job, known[self.job.number].header
        for worker in sorted(set(written) - known.keys()):
            sent = self._message(number, worker)
            if sent is not None and all(sent.header.get(name) == own[name] for name in ("layout", "previous")):
                known[worker] = sent
        members = [[worker, known[worker].digest] for worker in sorted(known)]
        if len(members) < quorum:
            return None
        steps = [known[worker].header.get("step", 0) for worker in sorted(known)]
        header = {"members": members, "by": job.number, "steps": steps}
        header |= {name: own[name] for name in ("has_mean", "previous")}
        job.medium.create(self.path(number, "close"), pack(header))
        return self.close_of(number)

    def _message(self, number: int, worker: int) -> Sent | None:
        path = self.path(number, f"{worker:06d}")
        data = self.job.medium.get(path, max_bytes=self.max_bytes)
        return None if data is None else Sent.read(data, self.max_bytes)

    # After the close.

    def outcome(self, close: Close, wanted: Wanted, *, known: Mapping[int, Sent] | None = None) -> Outcome:
        """Read the messages or the mean that a worker needs of a closed round.

        Args:
            close: its close.
            wanted: the workers whose messages are needed.
            known: messages that this worker has already, by worker.

        Raises:
            RoundGone: a message of the close is gone.
            MailboxError: an audit found another mean.
        """
        workers = wanted(close)
        if workers is not None:
            return Outcome(close, messages=self._messages(close, workers, known or {}))
        return Outcome(close, mean=self._mean(close, known or {}))

    def _await_message(self, number: int, worker: int) -> Sent | None:
        """The message of a worker that another one has read; None: it has not been readable for a while."""
        job = self.job
        end = job.clock.now() + job.settings.grace / 2
        while (sent := self._message(number, worker)) is None and job.clock.now() < end:
            job.pause(job.settings.poll / 4)
        return sent

    def _messages(self, close: Close, workers: Collection[int], known: Mapping[int, Sent]) -> dict[int, Sent]:
        found = {}
        for worker, digest in zip(close.members, close.digests, strict=True):
            if worker in workers:
                sent = known.get(worker) or self._await_message(close.number, worker)
                if sent is None or sent.digest != digest:
                    raise RoundGone(
                        f"{self.job.medium.address}: the message of worker {worker} in round {close.number} is gone or "
                        "has changed after the close, expected it to stay; keep others from writing to the run"
                    )
                found[worker] = sent
        return found

    def _mean(self, close: Close, known: Mapping[int, Sent]) -> Sent:
        """The mean of the messages, as the worker that closed the round writes it, or as this one computes it."""
        job, path = self.job, self.path(close.number, "mean")
        is_own = close.by == job.number
        if not is_own and (data := self._written_mean(path, close)) is not None:
            mean = Sent.read(data, self.max_bytes)
            if self._audits(close.number):
                self._check(mean, mean_of(self._messages(close, close.members, known)), close)
            return mean
        header, tensors = mean_of(self._messages(close, close.members, known))
        data = pack(header, tensors)
        job.medium.create(path, data)
        return Sent.read(data, self.max_bytes)

    def _written_mean(self, path: str, close: Close) -> bytes | None:
        """The object with the mean; None: the worker that closed the round has not written it for a while."""
        job = self.job
        start, pause = job.clock.now(), job.settings.poll / 16
        patience = job.settings.grace / 2
        while (data := job.medium.get(path, max_bytes=self.max_bytes)) is None:
            max_age = _LIST_EVERY * job.settings.poll
            if job.clock.now() - start > patience or close.by not in job.live(max_age=max_age):
                return None
            job.pause(pause)
            pause = min(pause * _GROWTH, job.settings.poll)
        return data

    def _audits(self, number: int) -> bool:
        text = f"{self.name}/{number}/{self.job.number}".encode()
        return int.from_bytes(hashlib.sha256(text).digest()[:4], "big") < self.job.settings.audit * 2**32

    def _check(self, mean: Sent, expected: tuple[Mapping[str, Any], Sequence[Tensor]], close: Close) -> None:
        header, tensors = expected
        is_equal = mean.header == header and len(mean.tensors) == len(tensors)
        if not (is_equal and all(map(torch.equal, mean.tensors, tensors))):
            raise MailboxError(
                f"{self.job.medium.address}: worker {close.by} wrote another mean of round {close.number} than its "
                "messages have, expected equal bits; leave that worker out, and begin again from an earlier model"
            )


class CloseRule:
    """When a worker may close a round.

    Args:
        quorum, grace: see `Settings`.
    """

    def __init__(self, quorum: int, grace: float) -> None:
        self._quorum, self._grace = quorum, grace
        self._has_all: float | None = None
        self._has_quorum: float | None = None

    def may_close(self, now: float, written: set[int], live: set[int], *, delay: float) -> bool:
        """Whether to close the round now.

        Args:
            now: the time.
            written: the workers with a message in the round.
            live: the live workers.
            delay: seconds for which this worker lets others close first.
        """
        self._has_all = (now if self._has_all is None else self._has_all) if live <= written else None
        if len(written) >= self._quorum and self._has_quorum is None:
            self._has_quorum = now
        has_all = self._has_all is not None and now >= self._has_all + delay
        return has_all or (self._has_quorum is not None and now >= self._has_quorum + self._grace + delay)


def mean_of(messages: Mapping[int, Sent]) -> tuple[dict[str, Any], list[Tensor]]:
    """The header and the tensors of the mean of messages, summed in the order of the workers.

    Tensors narrower than float32 are summed in float32. The header has the numbers of all workers.
    """
    sent = [messages[worker] for worker in sorted(messages)]
    means = []
    for parts in zip(*(each.tensors for each in sent), strict=True):
        total = parts[0].float() if parts[0].element_size() < 4 else parts[0].clone()
        for part in parts[1:]:
            total.add_(part)
        means.append(total.div_(len(sent)).to(parts[0].dtype))
    return {"numbers": [list(each.header.get("numbers", ())) for each in sent]}, means
