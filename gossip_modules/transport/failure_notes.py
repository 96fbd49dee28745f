"""FailureNotes: notes of failing ranks, so that the errors of others name the rank that failed first."""

from __future__ import annotations

import atexit
import contextlib
import sys
import time
import weakref
from collections.abc import Collection, Mapping
from typing import NamedTuple

import torch.distributed as dist

from .forks import forget_in_children
from .stores import Records, is_of_job, store_of

GONE, SILENT = "is gone", "does not answer"  # the states in which one rank sees another
_LOOK_SECONDS = 0.3  # for the notes of ranks whose connection is closed: they write before they end
_CENSUS_SECONDS = 0.5  # where no rank knows which one all wait for: for the notes of all that wait
_POLL_SECONDS = 0.02
_MAX_TEXT = 300
_JOIN = "with uneven batches train inside torch.distributed.algorithms.Join"
_END = f"has come to the end of its program, while others train: all ranks need equally many steps; {_JOIN}"
MAYBE_CLOSED = f"if it has closed its wrapper: {_JOIN}; if it has left out a batch: call gossip_step() in its place"
MAYBE_BEHIND = "if one of them has left out a batch before its backward: call gossip_step() there in place of the batch"


class Note(NamedTuple):
    """Why one rank failed.

    Attributes:
        rank: the failed rank.
        blamed: the ranks of its waits, and how it has seen them: GONE, SILENT, or "did not ...".
        what: its operation, or, if it is the cause, the reason: "failed: ...".
        is_cause: whether it blames no other rank.
    """

    rank: int
    blamed: Mapping[int, str]
    what: str
    is_cause: bool = False


class Cause(NamedTuple):
    """The ranks that failed first.

    Attributes:
        ranks: these; empty: not known.
        text: the same in words, or other facts about the failure; may be empty.
    """

    ranks: frozenset[int]
    text: str


class FailureNotes:
    """Notes in the key-value store: failing ranks write their reason, in plain text, before they raise.

    [Note: who failed first] When a rank raises, it ends, and its connections close. A rank in wait for it then sees a
    closed connection, as after a death. So each failing rank leaves a note with the ranks of its waits, and looks for
    their notes, for part of a second. A rank without a note, blamed by others, was first. More is not possible in a
    bounded time. If the store does not answer, errors name all ranks with closed connections.

    Args:
        records: the records of all ranks.
        rank: the global rank of this process.
    """

    def __init__(self, records: Records, rank: int) -> None:
        self._records, self._rank = records, rank
        self._notes: dict[int, Note] = {}
        self._is_written = False

    @classmethod
    def of(cls, group: dist.ProcessGroup, rank: int) -> FailureNotes | None:
        """The notes of the job if torch.distributed knows the group, else those in the group's own store, if any.

        Args:
            group: the group of the ranks.
            rank: the rank of this process, as errors call it.
        """
        world = dist.distributed_c10d._get_default_group() if is_of_job(group) else group
        store = store_of(world, "gossip_failures")
        if store is None:
            return None
        records = Records(store, skips_foreign=True)  # a note that is not known costs a fact, and no job
        notes = cls(records, rank)
        if is_of_job(group):
            with contextlib.suppress(ConnectionError, RuntimeError):  # the store is busy, gone, or cannot count
                records.skip()
            _of_job.add(notes)
        return notes

    def leave_for(self, error: BaseException) -> None:
        """`leave` for an error that nothing has caught, the cause itself unless this rank has blamed others before."""
        self.leave({}, reason_of(error), is_cause=True)

    def leave(self, blamed: Mapping[int, str], what: str, *, is_cause: bool = False) -> None:
        """Write the reason of this rank's failure, once: later errors follow from it. See `Note`."""
        if not self._is_written:
            self._is_written = True
            self._records.append([self._rank, list(blamed.items()), what[:_MAX_TEXT], is_cause])

    def explain(self, blamed: Mapping[int, str], *, members: Collection[int]) -> Cause:
        """The ranks that failed first, if this rank would blame these. Waits part of a second.

        Args:
            blamed: as of a `Note`; empty if no rank knows the late one.
            members: all ranks in question.
        """
        limit = time.monotonic() + (_LOOK_SECONDS if blamed else _CENSUS_SECONDS)
        expected = set(blamed) or set(members) - {self._rank}
        while True:
            try:
                for rank, seen, *rest in self._records.new():
                    self._notes[rank] = Note(rank, dict(seen), *rest)
            except (ConnectionError, RuntimeError) as error:  # the store does not answer, or cannot count
                return Cause(frozenset(), f"the rank that failed first is not known ({error})")
            if blamed:  # the ranks that the notes blame in turn as well
                expected |= {other for note in self._notes.values() for other in note.blamed}
            if expected <= {*self._notes, self._rank} or time.monotonic() > limit:
                break
            time.sleep(_POLL_SECONDS)
        notes = {rank: note for rank, note in self._notes.items() if rank != self._rank}
        return self._follow(blamed, notes) if blamed else self._census(notes, members)

    def _census(self, notes: Mapping[int, Note], members: Collection[int]) -> Cause:
        """The cause if this rank does not know the peer of its wait."""
        blamed = {rank: seen for note in notes.values() for rank, seen in note.blamed.items()}
        blamed |= {note.rank: GONE for note in notes.values() if note.is_cause}
        if blamed:
            return self._follow(blamed, notes)
        quiet = sorted(set(members) - notes.keys() - {self._rank})
        if not quiet or not notes:
            return Cause(frozenset(), "")
        return Cause(frozenset(quiet), f"{describe(dict.fromkeys(quiet, SILENT))}, the others wait in vain too")

    def _follow(self, blamed: Mapping[int, str], notes: Mapping[int, Note]) -> Cause:
        """The ranks without blame for others, at the ends of all chains of blame from this rank."""
        import networkx as nx  # which takes long to import

        graph = nx.DiGraph()
        for note in (Note(self._rank, blamed, ""), *notes.values()):
            graph.add_edges_from((note.rank, other, {"seen": seen}) for other, seen in note.blamed.items())
        graph = graph.subgraph({self._rank, *nx.descendants(graph, self._rank)})
        first = sorted(rank for rank in graph if graph.out_degree(rank) == 0)
        if graph.in_degree(self._rank) or not first:  # ranks have waited for each other
            witnesses = {*graph.predecessors(self._rank)}
            about = [note for rank, note in sorted(notes.items()) if rank in witnesses] or notes.values()
            told = [note for note in about if not {GONE, SILENT}.issuperset(note.blamed.values())]
            return Cause(frozenset(), "; ".join(map(_sentence, told or about)))
        parts = []
        for rank in first:
            others = sorted({*graph.predecessors(rank)} - {self._rank})
            if rank in notes and notes[rank].is_cause:
                parts.append(f"rank {rank} {notes[rank].what}")
            else:
                seen = blamed.get(rank) or graph.edges[others[0], rank]["seen"]
                parts.append(f"rank {rank} {seen}" + (f" (seen by {_ranks(others)})" if others else ""))
        return Cause(frozenset(first), "; ".join(parts))


def describe(blamed: Mapping[int, str]) -> str:
    """How one rank has seen others, in words."""
    parts = []
    for seen in dict.fromkeys(blamed.values()):
        ranks = sorted(rank for rank, what in blamed.items() if what == seen)
        plural = {GONE: "are gone", SILENT: "do not answer"}.get(seen, seen)
        parts.append(f"{_ranks(ranks)} {seen if len(ranks) == 1 else plural}")
    return ", ".join(parts)


def _sentence(note: Note) -> str:
    return f"rank {note.rank} gave up {note.what}" + (f" ({describe(note.blamed)})" if note.blamed else "")


def _ranks(ranks: Collection[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


_of_job: weakref.WeakSet[FailureNotes] = weakref.WeakSet()
forget_in_children(_of_job)


def reason_of(error: BaseException) -> str:
    """Return the end of a sentence about the rank that the error has ended."""
    if isinstance(error, KeyboardInterrupt):
        return "was interrupted (KeyboardInterrupt)"
    return f"failed: {type(error).__name__}: {error}"


@atexit.register
def _leave_last_note() -> None:
    """At exit: the last exception of the program is this rank's own failure, unless it has left a note before."""
    error = getattr(sys, "last_value", None)
    notes = next(iter(_of_job), None)
    if notes is not None:
        notes.leave({}, _END if error is None else reason_of(error), is_cause=True)
