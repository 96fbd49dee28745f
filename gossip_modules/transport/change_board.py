"""ChangeBoard: where a rank says that it exchanges other tensors than before, so that ranks that do not learn of it."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
import time
import weakref
import zlib
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import NamedTuple

import torch.distributed as dist

from .bounded_store import BoundedStore
from .progress import job_store

_REQUEST = timedelta(seconds=0.4)
_LOOK_SECONDS = 0.5  # into a wait; then at twice as many, and so on
_TICK_SECONDS = 0.25
_PATIENCE_SECONDS, _POLL_SECONDS = 0.5, 0.02
REMEDY = (
    "freeze, unfreeze, add and replace the same layers on all ranks at the same step; a buffer whose size depends on "
    "the data of a rank stays local with register_buffer(..., persistent=False), or with gossip_buffers=False all do"
)


class _Place(NamedTuple):
    """What one rank has written on the board.

    Attributes:
        step: the training step of the change that it is about.
        is_change: whether the rank makes this change; else it has begun that step without it.
        tensors: of the rank, one text for each.
    """

    step: int
    is_change: bool
    tensors: list[str]


class ChangeBoard:
    """A board in the key-value store on which a rank says that it is about to exchange other tensors.

    [Note: changes that not all ranks make] Each rank alone notices that its layers were frozen, added or replaced. It
    writes its tensors on the board, and then all ranks compare theirs in a collective, before a message of the new
    tensors is sent. A rank that has not changed does not come to that collective: it waits for a message of this step.
    A thread looks at waits that last: where another rank has announced a change at a step that this rank has begun
    without one, this rank writes its own tensors on the board and closes its connections. So all waits end, and every
    rank that fails finds on the board whose tensors differ. Messages carry nothing for it, and rounds cost nothing.

    Args:
        store: of the ranks; nobody else has its keys.
        rank: of this process in the group.
        names: the global rank of each member.
        step: the training step that comes next: a rank inside a round of step k gives k + 1.
        tensors: of this rank, one text for each.
        end_waits: closes the connections of this rank; called by the thread that looks.
    """

    def __init__(
        self,
        store: BoundedStore,
        rank: int,
        names: Sequence[int],
        *,
        step: Callable[[], int],
        tensors: Callable[[], list[str]],
        end_waits: Callable[[], None],
    ) -> None:
        self._store, self._rank, self._names = store, rank, names
        self._step, self._tensors, self._end_waits = step, tensors, end_waits
        self._announced = _Place(-1, True, [])
        self._waits: dict[int, list[float]] = {}  # by thread: when a wait began, and when to look
        self._difference = ""
        _watched.add(self)

    @classmethod
    def of(
        cls,
        group: dist.ProcessGroup,
        name: str,
        names: Sequence[int],
        *,
        step: Callable[[], int],
        tensors: Callable[[], list[str]],
        end_waits: Callable[[], None],
    ) -> ChangeBoard | None:
        """The board of the ranks of a group; None where they have no store.

        Args:
            group: whose ranks exchange tensors.
            name: of their wrapper, the same on all of them.
            names, step, tensors, end_waits: see the constructor.
        """
        if dist.is_initialized() and group in dist.distributed_c10d._world.pg_map:
            store, name = job_store(), f"{group.group_name}/{name}"
        else:
            try:
                store = group.get_group_store()
            except (AttributeError, RuntimeError):  # an older torch, or a group without
                return None
            if store is None:
                return None
        bounded = BoundedStore(dist.PrefixStore(f"gossip_changes/{name}", store), timeout=_REQUEST)
        return cls(bounded, group.rank(), names, step=step, tensors=tensors, end_waits=end_waits)

    # The rank that changes.

    def announce(self, tensors: list[str]) -> None:
        """Say what this rank exchanges from this step on; before all ranks compare it."""
        self._announced = _Place(self._step(), True, tensors)
        self._write(self._announced)

    def _write(self, place: _Place) -> None:
        try:
            packed = base64.b85encode(zlib.compress(json.dumps(place).encode())).decode()
            self._store.set(str(self._rank), packed, what="announcing other tensors")
            self._store.add("count", 1, what="announcing other tensors")
        except (ConnectionError, RuntimeError):  # it is gone, or cannot count: errors tell less, and come late
            return

    # The rank that waits.

    def begin_wait(self) -> None:
        """The calling thread waits for a message from now on."""
        now = time.monotonic()
        self._waits[threading.get_ident()] = [now, now + _LOOK_SECONDS]

    def end_wait(self) -> None:
        """The calling thread waits no more."""
        self._waits.pop(threading.get_ident(), None)

    def look(self) -> None:
        """End the waits of this rank where another one has changed and this one has not; where a wait lasts."""
        now, is_late = time.monotonic(), False
        for wait in tuple(self._waits.values()):
            if now >= wait[1]:
                wait[1] = now + (now - wait[0])
                is_late = True
        if not is_late or self._difference:
            return
        if self._passed_by(self._read()) is not None:
            self._found(self._compare())

    def _found(self, difference: str) -> None:
        """This rank is about to raise: who waits for it learns it, even if it does not end."""
        self._difference = difference
        if difference:
            self._end_waits()

    def _passed_by(self, places: Mapping[int, _Place], *, is_there: bool = False) -> _Place | None:
        """The place of this rank where another one has changed at a step that this one has begun without a change.

        is_there: whether this one has begun that step, whatever it counts.
        """
        limit = self._step() + is_there
        steps = [p.step for p in places.values() if p.is_change and self._announced.step < p.step < limit]
        return _Place(max(steps), False, self._tensors()) if steps else None

    # Whoever fails.

    def raise_if_known(self) -> None:
        """Raise ValueError where it is known that the tensors of ranks differ; asks nobody."""
        if self._difference:
            raise ValueError(self._difference)

    def check(self, *, is_there: bool = False) -> None:
        """After a failure: raise ValueError where the tensors of ranks differ, naming them and the first tensor.

        is_there: whether another rank was met in another operation than this one, which may be what it compares.
        """
        deadline = time.monotonic() + (_PATIENCE_SECONDS if is_there and self._announced.step >= 0 else 0.0)
        while not self._difference:
            self._found(self._compare(is_there=is_there))
            if self._difference or time.monotonic() > deadline:
                break
            time.sleep(_POLL_SECONDS)  # others may be about to write
        self.raise_if_known()

    def _read(self) -> dict[int, _Place]:
        """What ranks have written, by rank."""
        places = {}
        try:
            if not self._store.add("count", 0, what="looking for other tensors"):
                return {}
            for rank in range(len(self._names)):
                packed = self._store.get(str(rank), what="looking for other tensors")
                if packed is not None:
                    places[rank] = _Place(*json.loads(zlib.decompress(base64.b85decode(packed))))
        except (ConnectionError, RuntimeError):
            return {}
        return places

    def _compare(self, *, is_there: bool = False) -> str:
        """Whose tensors differ and in what, in words, after telling the others; empty where none are known to."""
        places = self._read()
        if not places:
            return ""
        own = self._passed_by(places, is_there=is_there)
        if own is not None:
            self._write(own)
        places[self._rank] = own or self._announced
        # Of what others have said, what is about earlier changes is over, and later ones may be about to be made here.
        step = max((place.step for place in places.values() if not place.is_change), default=-1)
        step = max(step, self._announced.step)
        known = {rank: place.tensors for rank, place in sorted(places.items()) if place.step == step >= 0}
        first = next(iter(known), None)
        texts = [] if first is None else [
            f"rank {self._names[rank]} has {mine} where rank {self._names[first]} has {theirs}"
            for rank, tensors in known.items()
            for mine, theirs in [first_difference(tensors, known[first])]
            if mine != theirs
        ]  # fmt: skip
        if not texts:
            return ""
        return f"ranks do not exchange the same tensors any more: {'; '.join(texts)}; {REMEDY}"

    def close(self) -> None:
        """Look no more. Idempotent."""
        _watched.discard(self)


def first_difference(ours: Sequence[str], theirs: Sequence[str]) -> tuple[str, str]:
    """The first items that differ; "nothing more" where one list has ended; equal texts where none differ."""
    for mine, other in zip(ours, theirs, strict=False):
        if mine != other:
            return f"'{mine}'", f"'{other}'"
    if len(ours) == len(theirs):
        return "", ""
    rest = (ours if len(ours) > len(theirs) else theirs)[min(len(ours), len(theirs))]
    return (f"'{rest}'", "nothing more") if len(ours) > len(theirs) else ("nothing more", f"'{rest}'")


def digest_of(tensors: Sequence[str]) -> str:
    """A short text for a long list."""
    return hashlib.sha256("\n".join(tensors).encode()).hexdigest()


class _Watched:
    """The boards of this process, and the thread that looks at them, which lives while there are any."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._boards: weakref.WeakSet[ChangeBoard] = weakref.WeakSet()
        self._ended: threading.Event | None = None

    def add(self, board: ChangeBoard) -> None:
        with self._lock:
            self._boards.add(board)
            if self._ended is None:
                self._ended = threading.Event()
                threading.Thread(target=self._run, args=(self._ended,), name="looking-for-changes", daemon=True).start()

    def discard(self, board: ChangeBoard) -> None:
        with self._lock:
            self._boards.discard(board)
            self._end_if_idle()

    def _end_if_idle(self) -> bool:
        """Under the lock."""
        if self._ended is not None and not any(True for _ in self._boards):
            self._ended.set()
            self._ended = None
        return self._ended is None

    def _run(self, ended: threading.Event) -> None:
        while not ended.wait(_TICK_SECONDS):
            with self._lock:
                if ended.is_set() or self._end_if_idle():
                    return
                boards = list(self._boards)
            for board in boards:
                board.look()
            boards.clear()
            board = None  # type: ignore[assignment]  # a local would keep the last one


_watched = _Watched()
