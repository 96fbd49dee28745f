"""Watch: who is still there, how long this rank waits for others, and whose fault it is when it waits in vain."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from enum import IntEnum
from typing import NoReturn

from ..engine.background import Background
from .control import Kind, Word, Words

_INTERVAL = 0.25  # seconds between two looks at the clock, and less where the timeout is short
_ASKING_FROM, _SILENT_AFTER, _GIVING_UP = 0.5, 0.2, 0.9  # parts of the timeout
_KNOWN_WITHIN = 1.0  # seconds until the word of who is at fault has come to a rank whose exchange failed
_PAUSE = 1.0  # seconds by which a look at the clock may be late
_GONE_AFTER = 0.5  # seconds until what a rank sent before its goodbye has come too


class Place(IntEnum):
    """Where the training thread of a rank is."""

    TRAINING = 0
    GROUP = 1
    GLOBAL = 2
    BEGINNING = 3
    SETTLING = 4

    @property
    def phrase(self) -> str:
        """For errors: what a rank that is there does."""
        return ("trains", "waits for its group", "waits for all ranks", "waits to begin", "settles")[self]


class Fault(IntEnum):
    """What the rank at fault did."""

    UNKNOWN = 0
    DIED = 1  # its connection closed without a goodbye
    SILENT = 2  # it answers no question
    ABSENT = 3  # it answers, but does not come
    CLOSED = 4  # it said goodbye, and others go on
    LEFT = 5  # its own code raised an error

    def sentence(self, rank: int) -> str:
        """For errors."""
        return (
            f"rank {rank} failed; its own error says why",
            f"rank {rank} died: its connection closed without a goodbye",
            f"rank {rank} does not answer: it is stopped or cut off",
            f"rank {rank} did not come; all ranks must take equal steps and call settle(), averaged(), close() alike",
            f"ranks [{rank}] have closed; call settle() on all ranks before close(), after equal steps on all of them",
            f"rank {rank} left after an error in its own code",
        )[self]


@dataclass
class Wait:
    """Something that a thread of this rank waits for.

    Attributes:
        what: for errors.
        start: `time.monotonic()`.
        partner: the rank that it waits for now, -1 where that is not known.
        has_deadline: `Watch` ends it; else its thread does.
    """

    what: str
    start: float
    partner: Callable[[], int]
    has_deadline: bool


class Watch:
    """Ends all waits of a rank when one of the ranks is at fault, with an error that names that rank.

    [Note: one cause] The first failure that a rank learns of is its failure: that a neighbour's connection closed, that
    nobody answers, or a neighbour's word of whose fault it is. It tells its neighbours whose fault it is, waits until
    they have heard, and hangs up, which ends the waits of its other threads. So the word of the cause comes before the
    closed connection of a rank that only passes it on. An exchange that fails waits a second for that word.

    [Note: deadlines] A wait that Gloo ends closes this rank's connections, and its neighbours would take it for dead.
    So `run`, the body of a thread, ends waits at nine tenths of the timeout. Before that it asks the neighbours where
    they are; their listening threads answer, whatever their training does. One that does not answer is stopped or cut
    off. One that waits itself says for whom.

    Args:
        words: of this rank.
        state: guards all attributes; notified when any changes.
        background: keeps the error for the training thread.
        timeout: for every wait.

    Attributes:
        version, place, peer: where training is, and the rank that it waits for, or -1.
        is_idle: nobody waits and nobody will, until `engage`: failures of others are put aside.
    """

    def __init__(self, words: Words, state: threading.Condition, background: Background, *, timeout: timedelta) -> None:
        self.words, self.state, self._background = words, state, background
        transport = words.transport
        self._names, self._rank = transport.names, transport.rank
        self.version, self.place, self.peer = 0, Place.TRAINING, -1
        self.is_idle, self.has_failed = True, False
        self.timeout = timeout.total_seconds()
        self.partner: Callable[[], int] = lambda: -1  # of the worker
        self._aside: tuple[BaseException, int, Fault] | None = None
        self._waits: dict[int, Wait] = {}  # by thread
        self._asked: dict[int, float] = {}  # neighbours who owe an answer: since when
        self.standings: dict[int, Word] = {}
        self._ended = threading.Event()
        self._looked, self._paused = time.monotonic(), 0.0  # when `run` saw the clock, and the last long gap

    def engage(self) -> None:
        """From here on failures of others are this rank's; raises the first one. By the training thread."""
        with self.state:
            self.is_idle = False
            aside, self._aside = self._aside, None
        if aside is not None:
            self.fail(*aside)
        self._background.raise_if_failed()

    @contextlib.contextmanager
    def waiting(self, what: str, partner: Callable[[], int], *, has_deadline: bool = True) -> Iterator[None]:
        """Inside, this thread waits. An error of the network that ends it becomes one that names who is at fault."""
        thread = threading.get_ident()
        outer = self._waits.get(thread)
        self._waits[thread] = Wait(what, time.monotonic(), partner, has_deadline)
        try:
            yield
        except (ConnectionError, TimeoutError) as error:
            self.explain(error)
        finally:
            del self._waits[thread]
            if outer is not None:
                self._waits[thread] = outer

    def explain(self, error: BaseException) -> NoReturn:
        """Raise the failure that `error` comes of; that is itself where nobody knows better within a second."""
        with self.state:
            self._background.raise_if_failed()
            self.state.wait_for(lambda: self.has_failed or self._aside is not None, _KNOWN_WITHIN)
        self.engage()
        self.fail(error)
        self._background.raise_if_failed()
        raise error

    def fail(self, error: BaseException, rank: int = -1, fault: Fault = Fault.UNKNOWN) -> None:
        """[Note: one cause]. rank: at fault, -1 where that is not known. Returns when `error` is there to be raised."""
        with self.state:
            is_first, self.has_failed = not self.has_failed, True
        if not is_first:
            self._background.wait_for_error(_KNOWN_WITHIN)
            return
        self.words.part(Word(Kind.FAILED, rank if rank >= 0 else self._rank, stage=fault))
        self.words.wait_until_parted(is_failed=True)
        self._background.fail(error)
        with self.state:
            self.state.notify_all()
        self.words.hang_up()

    def leave(self, error: BaseException) -> None:
        """This rank's own code has failed."""
        self.fail(error, self._rank, Fault.LEFT)

    def give_up(self, what: str, seconds: float, *, peer: int = -1) -> NoReturn:
        """Raise TimeoutError that names who did not come; `peer`: the rank that was waited for, -1 = unknown."""
        rank, fault, note = self._culprit(peer)
        reason = f": {fault.sentence(self._names[rank])}{note}" if rank >= 0 else ""
        me = self._names[self._rank]
        limit = f"(timeout {self.timeout:g} s)"
        self.fail(TimeoutError(f"rank {me}: {what} failed after {seconds:.1f} s {limit}{reason}"), rank, fault)
        self._background.raise_if_failed()
        raise AssertionError("fail() leaves an error")

    def check_present(self) -> None:
        """Raise ConnectionError if neighbours have closed: this rank is going on."""
        if self.words.gone:
            rank = min(self.words.gone)
            names = sorted(self._names[i] for i in self.words.gone)
            sentence = Fault.CLOSED.sentence(self._names[rank]).replace(f"[{self._names[rank]}]", str(names))
            me = self._names[self._rank]
            self.fail(ConnectionError(f"rank {me}: in round {self.version}, {sentence}"), rank, Fault.CLOSED)
            self._background.raise_if_failed()

    def hear(self, sender: int, word: Word) -> None:
        """A word of a neighbour that is about who is there. By a listening thread."""
        if word.kind is Kind.ASKING:
            with self.state:
                peer = self.peer if self.peer >= 0 else self.partner()
                standing = Word(Kind.STANDING, self.version, stage=self.place, oldest=peer)
            self.words.note(standing, sender)
        elif word.kind is Kind.STANDING:
            with self.state:
                self._asked.pop(sender, None)
                self.standings[sender] = word
                self.state.notify_all()
        elif word.kind is Kind.FAILED:
            rank, fault = word.version, Fault(word.stage)
            if rank == self._rank:
                self._fail_or_put_aside(self._stopped(), rank, Fault.SILENT)
                return
            me, by = self._names[self._rank], self._names[sender]
            told = "" if rank == sender else f" (as rank {by} says)"
            message = f"rank {me}: in round {self.version}, {fault.sentence(self._names[rank])}{told}"
            kind = TimeoutError if fault in (Fault.SILENT, Fault.ABSENT) else ConnectionError
            self._fail_or_put_aside(kind(message), rank, fault)

    def lose(self, peer: int, error: BaseException) -> None:
        """The connection of a neighbour closed without a goodbye. By its listening thread."""
        with self.state:
            if self.has_failed:  # by our own hanging up
                return
            self.words.gone.setdefault(peer, time.monotonic())
        if max(self._paused, time.monotonic() - self._looked) > self.timeout / 2:
            self._fail_or_put_aside(self._stopped(), self._rank, Fault.SILENT)
            return
        me = self._names[self._rank]
        message = f"rank {me}: in round {self.version}, {Fault.DIED.sentence(self._names[peer])}: {error}"
        self._fail_or_put_aside(ConnectionError(message), peer, Fault.DIED)

    def run(self) -> None:
        """[Note: deadlines]"""
        interval = min(_INTERVAL, self.timeout / 20)
        while not self._ended.wait(interval):
            now = time.monotonic()
            pause, self._looked = now - self._looked, now
            if pause > interval + _PAUSE:  # this rank was stopped itself: time did not run for it
                self._paused = pause
            for wait in list(self._waits.values()):
                if pause > interval + _PAUSE:
                    wait.start += pause
                if self.has_failed:
                    break
                seconds = now - wait.start
                if seconds > _ASKING_FROM * self.timeout:
                    self.ask()
                partner = wait.partner()
                gone_at = self.words.gone.get(partner) if partner >= 0 else min(self.words.gone.values(), default=None)
                is_left = gone_at is not None and now - max(gone_at, wait.start) > _GONE_AFTER
                with contextlib.suppress(ConnectionError, TimeoutError):  # kept for those who wait
                    if wait.has_deadline and is_left:
                        self.check_present()
                    if wait.has_deadline and seconds > self._limit(partner):
                        self.give_up(wait.what, seconds, peer=partner)

    def end(self) -> None:
        """Let `run` return."""
        self._ended.set()

    def ask(self) -> None:
        """Ask all neighbours who owe no answer where they are."""
        now = time.monotonic()
        with self.state:
            peers = [peer for peer in self.words.neighbours if peer not in self._asked and peer not in self.words.gone]
            self._asked.update(dict.fromkeys(peers, now))
        for peer in peers:
            self.words.note(Word(Kind.ASKING), peer)

    def is_silent(self, peer: int) -> bool:
        """Whether that neighbour has owed an answer for long."""
        asked = self._asked.get(peer)
        return asked is not None and time.monotonic() - asked > _SILENT_AFTER * self.timeout

    def _stopped(self) -> TimeoutError:
        pause = max(self._paused, time.monotonic() - self._looked)
        me = self._names[self._rank]
        return TimeoutError(
            f"rank {me}: in round {self.version}, the others have gone on without rank {me}, which they waited for in "
            f"vain (timeout {self.timeout:g} s); its threads did not run for {pause:.1f} s"
        )

    def _limit(self, partner: int) -> float:
        """Seconds that a wait may last: a little longer where others can say better than this rank who is late."""
        is_known = partner >= 0 or self.place is Place.GLOBAL or any(map(self.is_silent, self.words.neighbours))
        return _GIVING_UP * self.timeout if is_known else self.timeout + _GONE_AFTER

    def _culprit(self, peer: int) -> tuple[int, Fault, str]:
        """Who is at fault, by what, and what is known of it: of the neighbours' answers."""
        with self.state:
            silent = [i for i in self.words.neighbours if self.is_silent(i) and i not in self.words.gone]
            if silent:
                return (peer if peer in silent else silent[0]), Fault.SILENT, ""
            suspects = [peer] if peer >= 0 else []
            if peer < 0 and self.place is Place.GLOBAL:
                suspects = [i for i in self.words.neighbours if self._is_behind(i)]
            for suspect in suspects:
                standing = self.standings.get(suspect)
                if standing is None:
                    continue
                if standing.oldest not in (-1, self._rank):
                    return standing.oldest, Fault.ABSENT, f" (rank {self._names[suspect]} waits for it too)"
                return suspect, Fault.ABSENT, f"; it {Place(standing.stage).phrase}, in round {standing.version}"
            return (peer, Fault.ABSENT, "") if peer >= 0 else (-1, Fault.UNKNOWN, "")

    def _is_behind(self, peer: int) -> bool:
        standing = self.standings.get(peer)
        return standing is not None and not (standing.stage == Place.GLOBAL and standing.version >= self.version)

    def _fail_or_put_aside(self, error: BaseException, rank: int, fault: Fault) -> None:
        with self.state:
            if self.is_idle:
                self._aside = self._aside or (error, rank, fault)
                self.state.notify_all()
                return
        self.fail(error, rank, fault)
