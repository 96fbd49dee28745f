"""ChangeBoard: where a rank says that it exchanges other tensors than before, so that all ranks learn of it."""

from __future__ import annotations

import hashlib
import itertools
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from .stores import ForeignValueError, Records

_LOOK_SECONDS = 0.5  # into a wait; then at twice as many, and so on
_TICK_SECONDS = 0.25
_PATIENCE_SECONDS, _POLL_SECONDS = 0.5, 0.02
REMEDY = (
    "freeze, unfreeze, add and replace the same layers on all ranks at the same step; a buffer whose size depends on "
    "the data of a rank stays local with register_buffer(..., persistent=False), or with gossip_buffers=False all do"
)


class _Place(NamedTuple):
    """The newest entry of one rank.

    Attributes:
        step: the training step of the change.
        is_change: whether the rank makes this change; else it has begun that step without it.
        tensors: the tensors of the rank, one text for each.
    """

    step: int
    is_change: bool
    tensors: list[str]


class ChangeBoard:
    """The places in the key-value store where a rank announces an exchange of other tensors.

    [Note: changes that not all ranks make] Each rank alone notices that its layers were frozen, added or replaced. It
    records its tensors, and then all ranks compare theirs in a collective, before a message of the new tensors is sent.
    A rank without a change does not come to that collective: it waits for a message of this step. A thread looks at
    long waits. If another rank has announced a change at a step, and this rank has begun the step without a change,
    this rank records its own tensors and closes its connections. So all waits end, and every failing rank reads the
    differing ranks in the records. Messages carry nothing for it, and rounds cost nothing.

    Args:
        records: the records of the ranks.
        rank: the rank of this process in the group.
        names: the global rank of each member.
        step: the next training step: a rank inside a round of step k gives k + 1.
        tensors: the tensors of this rank, one text for each.
        end_waits: a bound method that closes the connections of this rank; called by the watching thread.
        waiting: the threads of this rank in wait for messages, each with its start (`time.monotonic()`).
    """

    def __init__(
        self,
        records: Records,
        rank: int,
        names: Sequence[int],
        *,
        step: Callable[[], int],
        tensors: Callable[[], list[str]],
        end_waits: Callable[[], None],
        waiting: Mapping[int, float],
    ) -> None:
        self._records, self._rank, self._names = records, rank, names
        self._step, self._tensors = step, tensors
        self._end_waits = weakref.WeakMethod(end_waits)  # of the transport, which has the board
        self._announced = _Place(-1, True, [])
        self._places: dict[int, _Place] = {}
        self._waiting = waiting
        self._looks: dict[tuple[int, float], float] = {}  # when to look into a wait again
        self._difference = ""
        self._closed = threading.Event()
        arguments = weakref.ref(self), self._closed
        threading.Thread(target=_watch, args=arguments, name="looking-for-changes", daemon=True).start()

    # The rank that changes.

    def announce(self, tensors: list[str]) -> None:
        """Record the tensors of this rank from this step on, before all ranks compare them."""
        self._announced = _Place(self._step(), True, tensors)
        self._records.append([self._rank, *self._announced])

    # The rank that waits.

    def look(self) -> None:
        """End the waits of this rank where another one has changed and this one has not; where a wait lasts."""
        now = time.monotonic()
        looks = {wait: self._looks.get(wait, wait[1] + _LOOK_SECONDS) for wait in dict(self._waiting).items()}
        late = [wait for wait, at in looks.items() if now >= at]
        self._looks = looks | {wait: now + (now - wait[1]) for wait in late}
        if late and not self._difference and self._passed_by(self._read()) is not None:
            self._compare()

    # A rank that fails.

    def raise_if_known(self) -> None:
        """Raise ValueError where it is known that the tensors or the keys of ranks differ; sends no request."""
        if self._difference:
            raise ValueError(self._difference)

    def check(self, *, is_there: bool = False) -> None:
        """After a failure: raise ValueError where tensors or keys of ranks differ, naming ranks and the first tensor.

        is_there: whether another rank was met in another operation than this one, which may be the comparison.
        """
        deadline = time.monotonic() + (_PATIENCE_SECONDS if is_there and self._announced.step >= 0 else 0.0)
        while not self._difference:
            self._compare(is_there=is_there)
            if self._difference or time.monotonic() > deadline:
                break
            time.sleep(_POLL_SECONDS)  # others may be about to write
        self.raise_if_known()

    def _read(self) -> dict[int, _Place]:
        """The places of all ranks, as far as the store answers."""
        try:
            self._places |= {rank: _Place(*place) for rank, *place in self._records.new()}
        except ForeignValueError as error:  # some ranks have the key of the job, and others do not
            self._end(str(error))
            return {}
        except (ConnectionError, RuntimeError):
            return {}
        return dict(self._places)

    def _passed_by(self, places: Mapping[int, _Place], *, is_there: bool = False) -> _Place | None:
        """The place of this rank where another one has changed at a step that this one has begun without a change.

        is_there: whether this one has begun that step, whatever it counts.
        """
        limit = self._step() + is_there
        steps = [p.step for p in places.values() if p.is_change and self._announced.step < p.step < limit]
        return _Place(max(steps), False, self._tensors()) if steps else None

    def _compare(self, *, is_there: bool = False) -> None:
        """Find ranks with other tensors; the others learn of them, even if this rank does not end."""
        places = self._read()
        if not places:
            return
        own = self._passed_by(places, is_there=is_there)
        if own is not None:
            self._records.append([self._rank, *own])
        places[self._rank] = own or self._announced
        # Earlier changes of other ranks are over, and this rank may be about to make the later ones.
        step = max(self._announced.step, *(place.step for place in places.values() if not place.is_change), -1)
        known = {rank: place.tensors for rank, place in sorted(places.items()) if place.step == step}
        first = next(iter(known))
        texts = []
        for rank, tensors in known.items():
            ours, theirs = first_difference(tensors, known[first])
            if ours != theirs:
                texts.append(f"rank {self._names[rank]} has {ours} where rank {self._names[first]} has {theirs}")
        if texts:
            self._end(f"ranks do not exchange the same tensors any more: {'; '.join(texts)}; {REMEDY}")

    def _end(self, difference: str) -> None:
        """End the waits of this rank; `check` and `raise_if_known` raise an error with this text."""
        self._difference = difference
        end_waits = self._end_waits()
        if end_waits is not None:
            end_waits()

    def close(self) -> None:
        """End the thread. Idempotent."""
        self._closed.set()


def first_difference(ours: Sequence[str], theirs: Sequence[str]) -> tuple[str, str]:
    """The first differing items; "nothing more" at the end of one list; equal texts for equal lists."""
    for pair in itertools.zip_longest(ours, theirs):
        if pair[0] != pair[1]:
            mine, other = ("nothing more" if text is None else f"'{text}'" for text in pair)
            return mine, other
    return "", ""


def digest_of(tensors: Sequence[str]) -> str:
    """A short text for a long list."""
    return hashlib.sha256("\n".join(tensors).encode()).hexdigest()


def _watch(reference: weakref.ref[ChangeBoard], closed: threading.Event) -> None:
    """Look at the waits of a board until it is closed or collected."""
    while not closed.wait(_TICK_SECONDS):
        board = reference()
        if board is None:
            return
        board.look()
        del board
