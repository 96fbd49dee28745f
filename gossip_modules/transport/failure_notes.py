"""FailureNotes: what a rank that fails tells the others, so that their errors name the rank that failed first."""

from __future__ import annotations

import atexit
import json
import sys
import time
import weakref
from collections.abc import Collection, Mapping
from datetime import timedelta
from typing import NamedTuple

import torch.distributed as dist

from .bounded_store import BoundedStore
from .progress import job_store

GONE, SILENT = "is gone", "does not answer"  # what a rank has seen of another
_LOOK_SECONDS = 0.3  # for the notes of ranks whose connection is closed: they write before they end
_CENSUS_SECONDS = 0.5  # where nobody knows whom all wait for: for the notes of all who wait
_POLL_SECONDS = 0.02
_REQUEST = timedelta(seconds=0.4)
_MAX_TEXT = 300
_END = (
    "has come to the end of its program, while others train: all ranks need equally many steps; with uneven batches "
    "train inside torch.distributed.algorithms.Join"
)


class Note(NamedTuple):
    """Why one rank failed.

    Attributes:
        rank: who wrote it.
        blamed: for whom it has waited, and what it has seen of them: GONE, SILENT, or what they did not do.
        what: it was doing, or, of a rank that blames nobody, the error of its own.
        is_own: whether that is an error of its own.
        is_end: whether no error, but the end of its program is what the others meet.
    """

    rank: int
    blamed: Mapping[int, str]
    what: str
    is_own: bool = False
    is_end: bool = False


class Cause(NamedTuple):
    """Who failed first.

    Attributes:
        ranks: those; empty: not known.
        text: the same in words, or what is known instead; may be empty.
    """

    ranks: frozenset[int]
    text: str


class FailureNotes:
    """A board in the key-value store on which ranks that fail say why, in plain text, before they raise.

    [Note: who failed first] A rank that raises ends, and its connections close. Who waits for it then sees a closed
    connection, as if it had died. So each leaves a note of whom it has waited for, and who fails looks for the notes
    of those whom it would blame, for part of a second: who has left no note, and is blamed by others, was first.
    Everything here is the best that can be done in a bounded time: without a store that answers, errors name all
    ranks whose connections are closed.

    Args:
        store: of all ranks that may fail.
        rank: the global rank of this process.
        num_known: notes that were there before, which do not matter.
    """

    def __init__(self, store: BoundedStore, rank: int, *, num_known: int = 0) -> None:
        self._store = store
        self._rank = rank
        self._num_known = num_known
        self._notes: dict[int, Note] = {}
        self._is_written = False

    @classmethod
    def of(cls, group: dist.ProcessGroup, rank: int) -> FailureNotes | None:
        """The notes of the job if torch.distributed knows the group, else those of the group's own store, if any.

        Args:
            group: whose members may fail.
            rank: of this process, as errors call it.
        """
        if dist.is_initialized() and group in dist.distributed_c10d._world.pg_map:
            store = BoundedStore(dist.PrefixStore("gossip_failures", job_store()), timeout=_REQUEST)
            try:
                num_known = store.add("count", 0, what="counting failures")
            except (ConnectionError, RuntimeError):  # it is busy, gone, or cannot count: errors tell less
                return None
            notes = cls(store, rank, num_known=num_known)
            _of_job.add(notes)
            return notes
        try:
            own = group.get_group_store()
        except (AttributeError, RuntimeError):  # an older torch, or a group without
            return None
        if own is None:  # of a backend that was made without one
            return None
        return cls(BoundedStore(dist.PrefixStore("gossip_failures", own), timeout=_REQUEST), rank)

    def leave(self, blamed: Mapping[int, str], what: str, *, is_own: bool = False, is_end: bool = False) -> None:
        """Say why this rank fails, once: what follows from it tells nobody anything."""
        if self._is_written:
            return
        self._is_written = True
        text = json.dumps(
            [self._rank, {str(rank): seen for rank, seen in blamed.items()}, what[:_MAX_TEXT], is_own, is_end]
        )
        try:
            number = self._store.add("count", 1, what="counting a failure")
            self._store.set(str(number), text, what="leaving a note of a failure")
        except (ConnectionError, RuntimeError):  # the best that can be done, see [Note: who failed first]
            return

    def explain(self, blamed: Mapping[int, str], *, members: Collection[int]) -> Cause:
        """Who failed first, when this rank would blame those.

        Waits part of a second.

        Args:
            blamed: as of a `Note`; empty where nobody knows whom all wait for.
            members: all ranks that could be to blame.
        """
        start = time.monotonic()
        limit = start + (_LOOK_SECONDS if blamed else _CENSUS_SECONDS)
        expected = set(blamed) or set(members) - {self._rank}
        while True:
            try:
                self._read()
            except ConnectionError as error:
                return Cause(frozenset(), f"who failed first is not known ({error})")
            if expected <= self._notes.keys() or time.monotonic() > limit:
                break
            time.sleep(_POLL_SECONDS)
        return self._describe(blamed, members)

    def _read(self) -> None:
        """Take in the notes that are new; of one that is counted but not there yet at another time."""
        count = self._store.add("count", 0, what="looking for notes of failures")
        for number in range(self._num_known + 1, count + 1):
            text = self._store.get(str(number), what="reading a note of a failure")
            if text is None:
                return
            rank, blamed, *rest = json.loads(text)
            self._notes[rank] = Note(rank, {int(other): seen for other, seen in blamed.items()}, *rest)
            self._num_known = number

    def _describe(self, blamed: Mapping[int, str], members: Collection[int]) -> Cause:
        notes = {rank: note for rank, note in self._notes.items() if rank != self._rank}
        if not blamed:
            blamed = {rank: seen for note in notes.values() for rank, seen in note.blamed.items()}
            blamed |= {note.rank: GONE for note in notes.values() if note.is_own or note.is_end}
        if not blamed:
            quiet = sorted(set(members) - notes.keys() - {self._rank})
            if not quiet or not notes:
                return Cause(frozenset(), "")
            return Cause(frozenset(quiet), f"{_ranks(quiet)} {_verb(quiet, SILENT)}, the others wait in vain too")
        first, witnesses = self._follow(blamed, notes)
        if self._rank in first or not first:  # ranks have waited for each other
            about = [notes[rank] for rank in sorted(witnesses.get(self._rank, ())) if rank in notes] or notes.values()
            told = [note for note in about if any(seen not in (GONE, SILENT) for seen in note.blamed.values())]
            return Cause(frozenset(), "; ".join(map(_sentence, told or about)))
        parts = []
        for rank, seen in sorted(first.items()):
            others = sorted(witnesses[rank] - {self._rank})
            if rank in notes and notes[rank].is_own:
                parts.append(f"rank {rank} failed: {notes[rank].what}")
            elif rank in notes and notes[rank].is_end:
                parts.append(f"rank {rank} {notes[rank].what}")
            else:
                parts.append(f"rank {rank} {seen}" + (f" (seen by {_ranks(others)})" if others else ""))
        return Cause(frozenset(first), "; ".join(parts))

    def _follow(
        self, blamed: Mapping[int, str], notes: Mapping[int, Note]
    ) -> tuple[dict[int, str], dict[int, set[int]]]:
        """From those who are blamed to those who blame nobody; and by whom each is blamed."""
        first: dict[int, str] = {}
        witnesses: dict[int, set[int]] = {}
        todo = [(self._rank, rank, seen) for rank, seen in blamed.items()]
        visited: set[int] = set()
        while todo:
            witness, rank, seen = todo.pop(0)
            witnesses.setdefault(rank, set()).add(witness)
            if rank in visited:
                continue
            visited.add(rank)
            note = notes.get(rank)
            if rank == self._rank or note is None or note.is_own or not note.blamed:
                first[rank] = seen
            else:
                todo += [(rank, other, what) for other, what in note.blamed.items()]
        return first, witnesses


def describe(blamed: Mapping[int, str]) -> str:
    """What one rank has seen of others, in words."""
    parts = []
    for seen in dict.fromkeys(blamed.values()):
        ranks = sorted(rank for rank, what in blamed.items() if what == seen)
        parts.append(f"{_ranks(ranks)} {_verb(ranks, seen)}")
    return ", ".join(parts)


def _sentence(note: Note) -> str:
    return f"rank {note.rank} gave up {note.what}" + (f" ({describe(note.blamed)})" if note.blamed else "")


def _ranks(ranks: Collection[int]) -> str:
    numbers = ", ".join(map(str, ranks))
    return f"rank {numbers}" if len(ranks) == 1 else f"ranks {numbers}"


def _verb(ranks: Collection[int], seen: str) -> str:
    return seen if len(ranks) == 1 else {GONE: "are gone", SILENT: "do not answer"}.get(seen, seen)


_of_job: weakref.WeakSet[FailureNotes] = weakref.WeakSet()


def _leave_last_words() -> None:
    """At exit: an exception that ends the program is this rank's own failure, unless it was a peer's."""
    error = getattr(sys, "last_value", None)
    if isinstance(error, KeyboardInterrupt):
        return
    for notes in tuple(_of_job):
        if error is None:
            notes.leave({}, _END, is_end=True)
        else:
            notes.leave({}, f"{type(error).__name__}: {error}", is_own=True)
        return


atexit.register(_leave_last_words)
