"""MailJob: the workers of a run that share a medium, their signs of life, and the settings of rounds."""

from __future__ import annotations

import math
import re
import secrets
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ..checks import is_number
from ..flat.layout import FlatLayout
from ..membership.arguments import is_whole
from ..membership.background_log import log
from ..membership.view import differences
from ..transport.job_key import VARIABLE
from .clock import Clock
from .errors import MailboxError
from .medium import Medium
from .sealed import JOB, pack, unpack

FORMAT = 1
MAX_HEADER = 1 << 20  # bytes of an object without tensors
_PLACE = re.compile(r"worker/(\d{6,})/(claim|beat|left)")
_SILENT = 3  # periods without a sign of life after which a worker is silent


def check_layout(method: object, before: FlatLayout, now: FlatLayout) -> None:
    """Raise ValueError if other tensors are trained than in the rounds before.

    Args:
        method: the method, for the error.
        before: the layout of the rounds before.
        now: the present layout.
    """
    if now != before:
        raise ValueError(
            f"{method}: got other trained tensors than before, expected the same tensors in all rounds of a run over a "
            "mailbox, since its workers change them at different times; freeze and unfreeze layers before the model is "
            "wrapped, or begin a new run at another address"
        )


@dataclass(frozen=True)
class Settings:
    """The settings of the rounds of a run.

    Args:
        quorum: the number of messages with which a round may close while live workers are missing.
        grace: seconds that a round waits for live workers after the quorum is in, and that a worker waits for a close.
        poll: the most seconds between two looks at the medium.
        interval: seconds between two signs of life of a worker that writes nothing else.
        timeout: seconds after which an outage of the medium, or a wait for the first workers, is an error.
        audit: the share of rounds in which a worker recomputes the mean that another one has written.
        save_every: rounds from one saved model to the next.
    """

    quorum: int
    grace: float
    poll: float
    interval: float
    timeout: float
    audit: float
    save_every: int

    @classmethod
    def of_reader(cls, *, poll: float, timeout: float) -> Settings:
        """The settings of a process outside the run, which reads only."""
        return cls(quorum=1, grace=poll, poll=poll, interval=poll, timeout=timeout, audit=0.0, save_every=1)

    def check(self, min_workers: object) -> None:
        """Raise ValueError if a setting is out of its range."""
        whole: dict[str, Any] = {"min_workers": min_workers, "quorum": self.quorum, "save_every": self.save_every}
        for name, count in whole.items():
            if not is_whole(count) or count < 1:
                raise ValueError(f"got {name}={count!r}, expected a whole number of at least 1")
        for name in ("grace", "poll", "interval", "timeout"):
            seconds = getattr(self, name)
            if not is_number(seconds) or not 0 < seconds < math.inf:
                raise ValueError(f"got {name}={seconds!r}, expected seconds above 0")
        if not is_number(self.audit) or not 0 <= self.audit <= 1:
            raise ValueError(f"got audit={self.audit!r}, expected a share of rounds between 0 and 1")


@dataclass
class Sign:
    """The last sign of life of another worker.

    Attributes:
        tag: of its object.
        heard: its time here.
        period: seconds from one of its beats to the next.
        read: the tag of the object that had this period; "": none was read.
    """

    tag: str
    heard: float
    period: float
    read: str = ""

    def is_silent(self, now: float) -> bool:
        """Whether the worker is silent at this time, by its known period."""
        return now - self.heard > _SILENT * self.period


class MailJob:
    """One worker in a run: its number, the live workers, and the medium.

    [Note: Signs of life] Each worker overwrites one object, its beat, at least every `interval` seconds, or as often as
    it has rounds. A worker is silent after three of its periods without a new beat, by the clock of the reader alone:
    clocks of two machines are never compared. A message counts as a beat. A worker looks for beats in each round, and
    after each of its own beats. Time in which the medium did not answer does not count, so an outage makes no worker
    silent.

    The objects of a run, below its address:

        job                               the settings that all workers must share; by the first worker
        worker/<number>/claim             the number belongs to one start of a worker
        worker/<number>/beat, left        a count that grows; the worker has ended
        round/<stream>/<round>/...        see `Stream`
        mail/<to>/<from>/<n>              see `Letters`
        model/<round>                     see `SavedModels`

    Args:
        medium: keeps the objects.
        settings: the settings of rounds.

    Attributes:
        number: the number of this worker, which no other start of a worker has; -1 before `claim`.
        last_round: seconds from one close to the next, as this worker saw the last two.
        closed: the number of the last closed round that this worker knows, by stream.
    """

    def __init__(self, medium: Medium, settings: Settings) -> None:
        self.medium, self.settings = medium, settings
        self.number = -1
        self.last_round = 0.0
        self.closed: dict[str, int] = {}
        self._signs: dict[int, Sign] = {}
        self._left: set[int] = set()
        self._listed = -1.0  # when the workers were listed last
        self._count = 0
        self._wrote = -math.inf
        self._beating: object | None = None  # the turn of the thread that writes signs of life
        self._has_stopped = False
        self._lock = threading.Lock()  # of the signs of life, which rounds of several fragments read

    @property
    def clock(self) -> Clock:
        """The clock of all waits."""
        return self.medium.clock

    # This worker.

    def claim(self, description: Mapping[str, str]) -> bool:
        """Take a number, and compare the settings of this worker with the settings of the run.

        Args:
            description: the settings to be equal on all workers, by name.

        Returns:
            Whether this worker is the first one of the run.

        Raises:
            ValueError: the run has other settings; names both sides.
            MailboxError: this worker may not write there, the store lets a second writer replace an object, or the run
                has another key.
        """
        self.medium.check()
        own = {"format": str(FORMAT), **description}
        nonce = secrets.token_hex(16)  # two first workers differ, so that one of them is told
        is_first = self.medium.create(JOB, pack({"description": own, "run": nonce}))
        if is_first:
            self.medium.seal = self.medium.seal.of_run(nonce)
        elif found := differences(self._run_there()["description"], own):
            raise ValueError(
                f"the run at {self.medium.address} refused this worker, which differs from it: {found}; start it "
                "with the model and the options of the run, or give another address to a new run"
            )
        number = max(self._numbers(), default=-1) + 1
        while not self.medium.create(f"worker/{number:06d}/claim", pack({"nonce": nonce})):
            number += 1
        self.number = number
        return is_first

    def _run_there(self) -> dict[str, Any]:
        """The object `job` of another worker, which may become readable some time after it is there.

        Raises:
            MailboxError: it does not open.
        """
        clock, num_refused = self.clock, self.medium.counts.refused
        end = clock.now() + self.settings.grace
        while (header := read_run(self.medium)) is None:
            if self.medium.counts.refused > num_refused or clock.now() > end:
                raise MailboxError(
                    f"the run at {self.medium.address} has an object {JOB!r} that does not open with the key of this "
                    f"worker, expected the key of the run; set {VARIABLE} to it on all workers, or give another "
                    "address to a new run"
                )
            clock.sleep(self.settings.poll / 16)
        return header

    def header(self, path: str, *, deadline: float | None = None) -> dict[str, Any]:
        """The header of a small object; empty if the object is absent or refused.

        Args:
            path: see `Medium.get`.
            deadline: see `Medium.create`.
        """
        data = self.medium.get(path, max_bytes=MAX_HEADER, deadline=deadline)
        return {} if data is None else unpack(data, max_bytes=MAX_HEADER)[0]

    def _numbers(self) -> set[int]:
        return {number for number, _ in places_of(self.medium.list("worker/"))}

    @property
    def period(self) -> float:
        """Seconds between two beats of this worker."""
        return max(self.settings.interval, self.last_round)

    def beat(self, *, is_needed: bool = True) -> bool:
        """Write a sign of life; returns whether one was written.

        Args:
            is_needed: False: write nothing if this worker has written a sign within its period.
        """
        is_due = is_needed or self.clock.now() - self._wrote >= self.period
        if is_due:
            self._count += 1
            self.medium.put(f"worker/{self.number:06d}/beat", pack({"count": self._count, "period": self.period}))
            self._wrote = self.clock.now()
        return is_due

    def beat_soon(self) -> None:
        """Let a thread write signs of life, and look for signs of the others, while training computes."""
        if self._beating is None:
            self._beating = turn = object()
            self.clock.start(lambda: self._keep_beating(turn), "mailbox-beats")

    def rest(self) -> None:
        """End the thread of `beat_soon`, until that is called again."""
        self._beating = None

    def _keep_beating(self, turn: object) -> None:
        while self._beating is turn and not self._has_stopped:
            try:
                if self.beat(is_needed=False):
                    self.live()
            except MailboxError as error:  # rounds raise it too, where the user sees it
                log.warning("worker %d: no sign of life: %s", self.number, error)
            self.clock.sleep(self.settings.poll)

    def stop(self) -> None:
        """End the signs of life, and all waits of this worker."""
        self._has_stopped = True

    def pause(self, seconds: float) -> None:
        """Wait for so many seconds between two looks at the medium.

        Raises:
            MailboxError: this worker has ended meanwhile.
        """
        if self._has_stopped:
            raise MailboxError(
                f"{self.medium.address}: worker {self.number} has ended, and so has its wait for a round"
            )
        self.clock.sleep(seconds)

    def note_write(self) -> None:
        """A message of this worker is a sign of life too."""
        self._wrote = self.clock.now()

    def leave(self, *, deadline: float | None = None) -> None:
        """Let no round wait for this worker any more; idempotent. Deadline: see `Medium.create`."""
        if self.number not in self._left:
            self.medium.create(f"worker/{self.number:06d}/left", pack({}), deadline=deadline)
            self._left.add(self.number)

    # The workers.

    def heard(self, *numbers: int) -> None:
        """Messages of other workers have come."""
        with self._lock:
            for sign in [self._signs[number] for number in numbers if number in self._signs]:
                sign.heard = self.clock.now()

    def live(self, *, max_age: float = 0.0, deadline: float | None = None) -> set[int]:
        """The numbers of the live workers, this one included; see [Note: Signs of life].

        Args:
            max_age: the medium is not asked if it was asked so many seconds ago, or less.
            deadline: see `Medium.create`.
        """
        if self._listed < 0 or self.clock.now() - self._listed > max_age:
            self._look(deadline)
        with self._lock:
            live = {number for number, sign in self._signs.items() if not sign.is_silent(self._listed)}
            return {self.number, *live} - self._left

    def _look(self, deadline: float | None) -> None:
        """Read the signs of life. A period is read at the first beat of a worker, and before it counts as silent."""
        objects, now = self.medium.list("worker/", deadline=deadline), self.clock.now()
        places = places_of(objects)
        beats = {number: objects[path].tag for number, path in places if path.endswith("/beat")}
        beats.pop(self.number, None)
        ends = [(number, path) for number, path in places if path.endswith("/left") and number not in self._left]
        left = {number for number, path in ends if self._opens(path, deadline)}
        with self._lock:
            self._left |= left
            self._read_signs(beats, now)
            new = [number for number, sign in self._signs.items() if sign.read != sign.tag]
            unknown = [number for number in new if not self._signs[number].read or self._signs[number].is_silent(now)]
        for number in unknown:  # without the lock, since a request may take long
            header = self.header(f"worker/{number:06d}/beat", deadline=deadline)
            with self._lock:
                if (sign := self._signs.get(number)) is not None and header:
                    sign.period, sign.read = max(float(header["period"]), self.settings.interval), beats[number]
                elif sign is not None and not sign.read:  # a stranger has written it, or it is not readable yet
                    del self._signs[number]

    def _opens(self, path: str, deadline: float | None) -> bool:
        return self.medium.get(path, max_bytes=MAX_HEADER, deadline=deadline) is not None

    def _read_signs(self, beats: Mapping[int, str], now: float) -> None:
        gap, self._listed = now - self._listed if self._listed >= 0 else 0.0, now
        longest = self.period + 2 * self.settings.poll  # between two looks, while the medium answers
        for number, tag in beats.items():
            sign = self._signs.setdefault(number, Sign("", now, self.settings.interval))
            if sign.tag != tag:
                sign.tag, sign.heard = tag, now
            elif gap > max(longest, sign.period):  # nobody was heard meanwhile
                sign.heard += gap

    def has_ended(self) -> bool:
        """Whether all workers of the run have left or are silent; for a process outside, which has no number."""
        return self.live() == {self.number} and self._signs.keys() | self._left == self._numbers()

    @property
    def deadline(self) -> float:
        """The seconds after which the slowest of the others is silent; 0 without others. See [Note: Signs of life]."""
        with self._lock:
            return _SILENT * max((sign.period for sign in self._signs.values()), default=0.0)

    def wait_for(self, num_workers: int) -> None:
        """Wait until so many workers live.

        Args:
            num_workers: their number, with this one.

        Raises:
            MailboxError: too few came within `timeout`.
        """
        start = self.clock.now()
        while len(live := self.live()) < num_workers:
            if self.clock.now() - start > self.settings.timeout:
                raise MailboxError(
                    f"{self.medium.address}: {len(live)} of {num_workers} workers came within "
                    f"{self.settings.timeout:g} s: {sorted(live)}; start the others, or pass a smaller min_workers"
                )
            self.beat(is_needed=False)
            self.pause(self.settings.poll)


def read_run(medium: Medium) -> dict[str, Any] | None:
    """Read the object `job`, and open only objects of its run from then on: see [Note: One run] of `Seal`.

    Args:
        medium: changed.

    Returns:
        Its header; None: there is no run, or the object does not open.
    """
    data = medium.get(JOB, max_bytes=MAX_HEADER)
    if data is None:
        return None
    header, _ = unpack(data, max_bytes=MAX_HEADER)
    medium.seal = medium.seal.of_run(str(header["run"]))
    return header


def places_of(paths: Iterable[str]) -> list[tuple[int, str]]:
    """The objects of workers among the paths below worker/, with the numbers of their workers."""
    return [(int(found[1]), path) for path in paths if (found := _PLACE.fullmatch(path))]
