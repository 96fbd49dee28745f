"""EventLog: a list of events in a key-value store, the same for all workers; the store may go and come back empty."""

from __future__ import annotations

import contextlib
import json
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist

from ...transport.deadline import Deadline
from ...transport.stores import BoundedStore, EndableStore
from .. import limits
from ..liveness.address import connect_store, store_address

_HOLE_SECONDS = 2.0  # after which an entry that its writer has not written is left out
_RECONNECT_SECONDS = 1.0


class EventLog:
    """Events that workers append, which all read in one order.

    An entry is written once: who appends takes the next number, and writes the entry if nobody has declared it void
    meanwhile, as readers do where a writer has died between the two.

    [Note: base] The log does not grow for ever: every `limits.LOG_EVENTS` entries, some worker that has read them
    writes under "base" what they amount to, with the number of the entry that comes next, and deletes those that were
    already part of the base before. Who comes later, or finds that an entry is no more, begins with the base. A base is
    written before anything is deleted, so who puts an entry where one was deleted finds the base afterwards.

    [Note: store that came back] A store that was started again is empty. Who notices (its connection had ended, and the
    store has another epoch) puts there what the log amounted to, as a base before entry 0; all read on from there. The
    first one to write it wins, as all know the same.

    Args:
        store: a key-value store that the workers share; or "host:port", of one that `membership.serve` runs, or
            "file:path", of a file in which that has written its address.
        name: of the job, so that several may use one store.
        timeout: of a request.

    Attributes:
        ended: set when this worker has closed: waits in lent stores end.

    Raises:
        ConnectionError: the store does not answer within `timeout`.
        ValueError: an address of another form.
    """

    def __init__(self, store: dist.Store | str, *, name: str, timeout: timedelta) -> None:
        self.name, self.timeout, self._given = name, timeout, store
        self.ended = threading.Event()
        self._next = 0
        self._hole_since: float | None = None
        self._last_attempt = time.monotonic()
        self._epoch, self.num_lives = "", 0  # of the store: how many were met, of which only the last is
        self._has_base = False
        self._base = _Base()  # as last seen
        self._store: BoundedStore | None = None
        self._lock = threading.Lock()
        self._clients: list[dist.Store] = []  # see [Note: lent clients]
        self._must_rewind = False
        self._connect_first()

    @property
    def is_connected(self) -> bool:
        """Whether the last request was answered."""
        return self._store is not None

    @property
    def address(self) -> str:
        """Of the store."""
        given = self._given
        return store_address(given) if isinstance(given, str) else BoundedStore(given).address

    @contextlib.contextmanager
    def lent_store(
        self, prefix: str, *, limit: timedelta | None = None, is_void: Callable[[], bool] = lambda: False
    ) -> Iterator[dist.Store]:
        """A store for the addresses of one group that is made inside, by one thread; connects within `limit`.

        [Note: lent clients] A client of a TCPStore that waits lets no other thread ask, so each group that is made
        needs one of its own. They are kept: for each new client a server looks up the name of its host, which may take
        seconds, in which it answers nobody.
        """
        given = self._given
        if not isinstance(given, (str, dist.TCPStore)):
            yield self._endable(prefix, given, is_void)
            return
        epoch = self._epoch
        with self._lock:
            client = self._clients.pop() if self._clients else None
        if client is None:
            address = given if isinstance(given, str) else f"{given.host}:{given.port}"
            within = Deadline(self._within(limit))
            client = connect_store(address, self.timeout, was_lost=not self.is_connected, deadline=within)
        yield self._endable(prefix, client, is_void)
        with self._lock:  # one that has failed is not kept
            if epoch == self._epoch:
                self._clients.append(client)

    def _endable(self, prefix: str, store: dist.Store, is_void: Callable[[], bool]) -> dist.Store:
        own = dist.PrefixStore(self._key(prefix), store)
        return EndableStore(own, self.ended, timeout=self.timeout, is_void=is_void)

    def arrive(self, name: str) -> None:
        """Say that this worker is there.

        Raises:
            ConnectionError: the store cannot be reached now.
        """
        self._asked.set(self._key(f"arrived/{name}"), "1", what="meeting others")

    def has_arrived(self, name: str, *, limit: timedelta | None = None) -> bool:
        """Whether somebody has said so; within `limit` at most, where that is shorter. Raises as `arrive`."""
        timeout = self._within(limit)
        return self._asked.check(self._key(f"arrived/{name}"), what="meeting others", timeout=timeout)

    def _within(self, limit: timedelta | None) -> timedelta:
        return self.timeout if limit is None else min(limit, self.timeout)

    def append(self, event: Mapping[str, Any]) -> bool:
        """Append an event, within one timeout; False: the store cannot be reached now."""
        text, deadline, what = json.dumps(event), Deadline(self.timeout), "appending to the log"
        try:
            while True:
                index = self._asked.add(self._key("size"), 1, what=what, timeout=deadline.left_for_gloo) - 1
                is_there = self._set_once(f"entry/{index}", text, deadline) == text
                if is_there and not self._is_deleted(index, deadline):
                    return True
        except ConnectionError:
            self._store = None
            return False

    def read(self, restart: Callable[[str, int], None], apply: Callable[[Mapping[str, Any]], None]) -> bool:
        """Hand over what is new.

        Args:
            restart: called with what the first entries amount to, and how many; 0: the store has come back empty.
            apply: called with each new event.

        Returns:
            Whether the store has answered.
        """
        if self._store is None:
            if not self._reconnect():
                return False
            if self.is_anew:
                return True  # before anything is read, who knows what it amounted to restores it
        if self._must_rewind:
            self._next, self._has_base, self._hole_since, self._must_rewind = 0, False, None, False
        try:
            if self._next == 0 or not self._has_base:
                self._skip(restart)
            size = self._asked.add(self._key("size"), 0, what="reading the log")
            while self._next < size:
                text = self._asked.get(self._key(f"entry/{self._next}"), what="reading the log")
                if text is None:
                    if self._skip(restart):
                        continue
                    if not self._is_void():
                        break
                    if self._skip(restart):  # it was there, and deleted meanwhile
                        continue
                self._next += 1
                self._hole_since = None
                event = _parsed(text)
                if event is not None and not self._must_rewind:
                    apply(event)
        except ConnectionError:
            self._store = None
            return False
        return True

    def is_long(self) -> bool:
        """Whether it is time to `cut`."""
        return not self._must_rewind and self._next - self._base.next >= limits.LOG_EVENTS

    def cut(self, state: str) -> None:
        """Make `state` the base, which is what the entries that were read amount to; see [Note: base]."""
        with contextlib.suppress(RuntimeError):  # a store that deletes nothing
            try:
                text = self._asked.get(self._key("base"), what="reading the log")
                base = _base_of(text)
                if self._next - base.next < limits.LOG_EVENTS or (text is not None and not self._has_base):
                    return  # somebody else was first
                new = json.dumps({"next": self._next, "first": base.next, "state": state})
                old = "" if text is None else text.decode(errors="replace")
                if self._asked.compare_set(self._key("base"), old, new, what="cutting the log").decode() == new:
                    self._base, self._has_base = _base_of(new.encode()), True
                    for index in range(base.first, base.next):
                        self._asked.delete(self._key(f"entry/{index}"), what="cutting the log")
            except ConnectionError:
                self._store = None

    def forget(self, *keys: str) -> None:
        """Delete what nobody needs any more of what `arrive` and groups over `lent_store` have put there."""
        with contextlib.suppress(ConnectionError, RuntimeError):
            for key in keys:
                self._asked.delete(self._key(key), what="cleaning up")

    def rewind(self) -> None:
        """The next `read` begins at the beginning; from any thread. One that is under way hands over no more."""
        self._must_rewind = True

    def restore(self, snapshot: str) -> None:
        """Offer the state to a store that came back empty."""
        if self.is_anew:
            try:
                self._set_once("base", json.dumps({"next": 0, "first": 0, "state": snapshot}))
            except ConnectionError:
                self._store = None

    @property
    def is_anew(self) -> bool:
        """Whether the store has come back empty, and was not restored; there may be events of workers that come now."""
        return self._store is not None and self.num_lives > 1 and not self._has_base

    def _skip(self, restart: Callable[[str, int], None]) -> bool:
        """Begin with the base, if it is further than what was read, or the first one that is there; whether it was."""
        text = self._asked.get(self._key("base"), what="reading the log")
        base = _base_of(text)
        if base.state is None or (self._has_base and base.next <= self._next):
            return False
        self._has_base, self._next, self._hole_since, self._base = True, base.next, None, base
        restart(base.state, base.next)
        return True

    def _is_void(self) -> bool:
        """Whether the next entry, which is not there, never will be: see `EventLog`."""
        now = time.monotonic()
        self._hole_since = self._hole_since or now
        if now - self._hole_since < _HOLE_SECONDS:
            return False
        return self._set_once(f"entry/{self._next}", "{}") == "{}"

    def _is_deleted(self, index: int, deadline: Deadline) -> bool:
        """Whether an entry was void, and deleted, before its writer came to write it."""
        base = self._asked.get(self._key("base"), what="appending to the log", timeout=deadline.left_for_gloo)
        return index < _base_of(base).first

    def _set_once(self, key: str, value: str, deadline: Deadline | None = None) -> str:
        """What is under `key` afterwards: `value`, or what was there."""
        timeout = None if deadline is None else deadline.left_for_gloo
        return self._asked.compare_set(self._key(key), "", value, what="writing to the log", timeout=timeout).decode()

    def _key(self, key: str) -> str:
        return f"gossip/{self.name}/{key}"

    @property
    def _asked(self) -> BoundedStore:
        if self._store is None:
            raise ConnectionError(f"the store of the job at {self.address} cannot be reached")
        return self._store

    def _connect_first(self) -> None:
        """Once more, where the store ended meanwhile: another one may begin in time."""
        deadline = Deadline(self.timeout)
        while True:
            try:
                return self._connect(deadline)
            except ConnectionError:
                if deadline.is_over or not isinstance(self._given, str):
                    raise
            time.sleep(0.05)

    def _reconnect(self) -> bool:
        now = time.monotonic()
        if now - self._last_attempt < _RECONNECT_SECONDS:
            return False
        self._last_attempt = now
        try:
            self._connect(Deadline(self.timeout))
        except (ConnectionError, dist.DistError, RuntimeError):
            return False
        return True

    def _connect(self, deadline: Deadline) -> None:
        given = self._given
        if isinstance(given, str):
            given = connect_store(given, self.timeout, was_lost=self.num_lives > 0, deadline=deadline)
        store = BoundedStore(given, timeout=self.timeout)
        mine, left = secrets.token_hex(8), deadline.left_for_gloo
        epoch = store.compare_set(self._key("epoch"), "", mine, what="joining the job", timeout=left).decode()
        if epoch != self._epoch:
            self.num_lives, self._epoch = self.num_lives + 1, epoch
            self._next, self._has_base, self._hole_since = 0, False, None
            self._base = _Base()
            with self._lock:
                self._clients.clear()
        self._store = store


class _Base(NamedTuple):
    """See [Note: base]."""

    next: int = 0  # the entry that comes after it
    first: int = 0  # the first entry that is not deleted
    state: str | None = None


def _base_of(text: bytes | None) -> _Base:
    """What is under "base"; one before entry 0 without a state where that is none."""
    try:
        fields = json.loads(text or b"{}")
        return _Base(int(fields["next"]), int(fields["first"]), str(fields["state"]))
    except (ValueError, TypeError, KeyError, ArithmeticError, RecursionError):
        return _Base()


def _parsed(text: bytes | None) -> Mapping[str, Any] | None:
    """The event of an entry; None where it is none."""
    with contextlib.suppress(ValueError, RecursionError):
        event = json.loads(text or b"{}")
        return event if isinstance(event, dict) else None
    return None
