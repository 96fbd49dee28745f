"""SharedRoster: the roster of a job in a key-value store. The store may restart empty."""

from __future__ import annotations

import contextlib
import itertools
import math
import random
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta

import torch.distributed as dist

from ..transport.deadline import Deadline
from ..transport.job_key import key_of
from ..transport.stores import BoundedStore, ForeignValueError
from . import limits
from .address import connect_store, store_address
from .background_log import log
from .roster import Event, OtherFormatError, Roster
from .view import GARBAGE

_RECONNECT_SECONDS = 1.0
_FRESH_SECONDS = 1.0  # after which the roster is read again, even where its version is the same
_LEAVE_SECONDS = 1.0  # for a last update to reach a store that did not answer before
_OTHER_SECONDS = 60.0  # see [Note: other formats]
_FOREIGN_SECONDS = 2.0  # that a newcomer waits for the members to write their roster over a stranger's
_BRANCH_BITS = 62
_BACK_OFF_SECONDS = 0.002  # times the number of attempts to write the roster


class SharedRoster:
    """The roster of a job, as one value in a key-value store.

    [Note: compare and set] To add events, a worker applies them to its known roster, and writes the result if the store
    still has the known roster. Otherwise another worker was first: the worker applies its events to the new roster, and
    tries again. So all events have one order, and the store never holds more than one roster. Writers increase a
    version number, and readers poll it. A writer may die before the increase, so readers also look once a second.

    [Note: store that came back] A restarted store is empty, and has another epoch. The next update of each worker
    restores its known roster before all other events. The first update restores the job. The same happens if another
    program has overwritten the roster, or a newcomer has founded another job: see [Note: one history] of `Roster`.

    [Note: other formats] Workers of two releases cannot share a roster. A worker that finds one of another format tells
    so in one line, and writes nothing. A newcomer ends with this error. A member trains on. It restores its roster once
    nobody has written the other one for a minute, as nobody could join its job else.

    [Note: strangers in the store] With the key of a job all values are signed: see [Note: signed values] of
    `BoundedStore`. In front of the roster there is then a count of its writes, so that an old one is known. A member
    that finds a foreign or an old roster logs it, and restores its own. A newcomer, which does not know the count,
    waits for this, and ends with an error if it does not come.

    Args:
        store: the key-value store of the workers; or "host:port", the address of `membership.serve`, or "file:path", a
            file with this address.
        name: the name of the job; several jobs may use one store.
        timeout: the limit of all requests of one update together.
        on_partition: see `Membership`.
        key: of the job; None: the variable GOSSIP_JOB_KEY, if it is set.

    Attributes:
        given: the argument `store`.
        worker: the id of the worker; -1: it has none yet.
        roster: as last read or written; it is not changed but replaced.
        key: the key of the job; None: it has none.
        other_format: the error about a roster of another format, or of strangers, in the store; empty: it has none.
        num_epochs: the number of epochs of the store that this worker has met.
        ended: set when this worker has closed: exchanges end.

    Raises:
        ConnectionError: the store does not answer within `timeout`, or has values of strangers.
        ValueError: an address, or a key, of another form; (`check_format`) a roster of another format.
    """

    def __init__(
        self,
        store: dist.Store | str,
        *,
        name: str,
        timeout: timedelta,
        on_partition: str = "majority",
        key: str | bytes | None = None,
    ) -> None:
        self.name, self.timeout, self.given, self._on_partition = name, timeout, store, on_partition
        self.key = key_of(key)
        self.ended = threading.Event()
        self.worker = -1
        self.roster = Roster(on_partition)
        self._text = ""  # of `roster`, in the store
        self._count = 0  # of writes, where rosters are signed
        self._version, self._read_at = -1, 0.0
        self._must_restore = False
        self.other_format, self._is_foreign = "", False
        self._other: tuple[str, float] = "", 0.0  # the text of another format, and when it was first read
        self._last_attempt = time.monotonic()
        self._epoch, self.num_epochs = "", 0
        self._last_foreign, self._next_told = "", 0.0  # the last error of a connection; see `_tell_stranger`
        self._store: BoundedStore | None = None
        self._client: dist.Store
        self._updating = threading.Lock()
        self._connect_first()

    @property
    def is_connected(self) -> bool:
        """Whether the last request was answered."""
        return self._store is not None

    @property
    def address(self) -> str:
        """The address of the store."""
        given = self.given
        return store_address(given) if isinstance(given, str) else BoundedStore(given).address

    def update(self, events: Sequence[Event] = (), *, is_last: bool = False) -> bool:
        """Apply events to the roster in the store, and read it; False: the store cannot be reached now.

        Args:
            events: to be applied.
            is_last: whether this worker leaves, so that it waits only shortly for a store that is away.
        """
        is_short = is_last and not self.is_connected
        deadline = Deadline(min(self.timeout, timedelta(seconds=_LEAVE_SECONDS)) if is_short else self.timeout)
        if not self._updating.acquire(timeout=deadline.left):
            return False
        try:
            if self._store is None and not self._reconnect(deadline):
                return False
            self._update(self._store, events, deadline)  # type: ignore[arg-type]
        except (OtherFormatError, ForeignValueError):  # nothing was written, and the events are for later
            return False
        except ConnectionError:
            self._store = None
            return False
        finally:
            self._updating.release()
        return True

    def _update(self, store: BoundedStore, events: Sequence[Event], deadline: Deadline) -> None:
        if events or self._must_restore or not self._read(store, deadline):
            self._write(store, events, deadline)
        self.other_format, self._is_foreign, self._other = "", False, ("", 0.0)

    def _read(self, store: BoundedStore, deadline: Deadline) -> bool:
        """Take over the roster in the store; returns False if this worker must restore its known roster."""
        version = store.add(self._key("version"), 0, what="reading the roster", timeout=deadline.left_for_gloo)
        if version == self._version and time.monotonic() - self._read_at < _FRESH_SECONDS:
            return True
        try:
            value = store.get(self._key("roster"), what="reading the roster", timeout=deadline.left_for_gloo)
        except ForeignValueError as error:
            self._tell_foreign(error)
            return False
        text = (value or b"").decode(errors="replace")
        if text != self._text:
            roster = self._parsed(text)
            if not roster.goes_on_from(self.roster, self.worker):
                return False
            self._count = max(self._count, self._parted(text)[0])
            self.roster, self._text = roster, text
        self._version, self._read_at = version, time.monotonic()
        return True

    def _write(self, store: BoundedStore, events: Sequence[Event], deadline: Deadline) -> None:
        """See [Note: compare and set]."""
        text, branch = "" if self._must_restore else self._text, secrets.randbits(_BRANCH_BITS)
        for num_attempts in itertools.count(1):
            roster = self._parsed(text)
            roster.restore(self.roster, self.worker, branch)
            for event in events:
                event(roster)
            new, limit, is_text = self._counted(roster, text), deadline.left_for_gloo, True
            before = text
            try:
                was = store.compare_set(self._key("roster"), text, new, what="writing the roster", timeout=limit)
                text = was.decode(errors="replace")
                is_text = text.encode() == was
            except ForeignValueError as error:
                self._tell_foreign(error)
                is_text = False
            if text == new and is_text:
                break
            if deadline.is_over:
                raise ConnectionError(f"other workers write the roster of job {self.name!r} again and again")
            if not is_text:  # the store cannot compare it
                store.delete(self._key("roster"), what="writing the roster", timeout=deadline.left_for_gloo)
                text = ""
            time.sleep(random.uniform(0.0, _BACK_OFF_SECONDS * num_attempts))
        if new != before:
            store.add(self._key("version"), 1, what="writing the roster", timeout=deadline.left_for_gloo)
        self._count = self._parted(new)[0]
        self.roster, self._text, self._must_restore = roster, new, False

    def check_format(self) -> None:
        """Raise ValueError if the store has a roster of another format, or a stranger's."""
        deadline = Deadline(timedelta(seconds=_FOREIGN_SECONDS))
        while not self.update() and self.other_format:
            if deadline.is_over or not self._is_foreign:
                raise ValueError(self.other_format)
            time.sleep(limits.POLL)

    def _counted(self, roster: Roster, before: str) -> str:
        """The text of a roster that follows another text."""
        if self.key is None:
            return roster.dumps()
        (count, same), text = self._parted(before), roster.dumps()
        return before if text == same else f"{max(self._count, count) + 1} {text}"

    def _parted(self, text: str) -> tuple[int, str]:
        """The count of a text, 0 without a key, and the rest; see [Note: strangers in the store]."""
        if self.key is None or not text:
            return 0, text
        count, _, rest = text.partition(" ")
        return int(count), rest  # it is signed

    def _tell_foreign(self, error: ForeignValueError) -> None:
        """Say it; raises the error if this worker is no member, which could restore the roster."""
        self.other_format, self._is_foreign = f"job {self.name!r}: {error}", True
        if not self.roster.is_member(self.worker):
            raise error
        self._tell_stranger(str(error))

    def _tell_stranger(self, what: str) -> None:
        """At most once in a minute."""
        now = time.monotonic()
        if now >= self._next_told:
            self._next_told = now + _OTHER_SECONDS
            log.error("job %s: %s; this worker restores its own roster", self.name, what)

    def _parsed(self, text: str) -> Roster:
        """The roster of a text; an empty roster if the text cannot be read.

        Raises:
            OtherFormatError: [Note: other formats].
        """
        count, text = self._parted(text)
        if 0 < count < self._count and self.roster.is_member(self.worker):
            self._tell_stranger("a stranger has put an old roster back into the store")
            return Roster(self._on_partition)
        try:
            return Roster.loads(text) if text else Roster(self._on_partition)
        except OtherFormatError as error:
            if not self._may_replace(text):
                self._tell_other_format(error)
                raise
        except GARBAGE as error:
            log.warning("job %s: the store has no roster of a job (%r): ignored", self.name, error)
        return Roster(self._on_partition)

    def _may_replace(self, text: str) -> bool:
        """Whether a text of another format is as old as [Note: other formats] says."""
        before, since = self._other
        if text != before:
            self._other = text, time.monotonic()
            return False
        return time.monotonic() - since > _OTHER_SECONDS and self.roster.is_member(self.worker)

    def _tell_other_format(self, error: OtherFormatError) -> None:
        if self.other_format:
            return
        self.other_format = (
            f"job {self.name!r} at {self.address}: {error}, as another release of gossip_modules writes it; start all "
            "workers with one release, or give this job another name="
        )
        if self.roster.is_member(self.worker):
            log.warning("%s; this worker trains on, but no other worker can join it", self.other_format)

    def gather(
        self,
        name: str,
        worker: int,
        value: str,
        workers: Sequence[int],
        *,
        is_void: Callable[[], bool],
        on_late: Callable[[list[int]], None] = lambda missing: None,
        patience: float = math.inf,
    ) -> list[str]:
        """Give a value to other workers, and return the values of all, in the order of `workers`; waits for them.

        Args:
            name: the name of this exchange; all workers give the same.
            worker: the id of this one.
            value: the value of this worker.
            workers: the ids of all participants.
            is_void: whether nobody is to wait any more; asked again and again.
            on_late: called once, after `patience` seconds, with the missing workers.
            patience: in seconds.

        Raises:
            ConnectionError: the store cannot be reached now.
            RuntimeError: nobody is to wait any more. No other worker gets the value, unless one has got it already.
        """
        own = f"{name}/{worker}"
        self.post(name, worker, value)
        try:
            return self.values(name, workers, is_void=is_void, on_late=on_late, patience=patience)
        except RuntimeError:
            self.forget([own])
            raise

    def values(
        self,
        name: str,
        workers: Sequence[int],
        *,
        is_void: Callable[[], bool],
        on_late: Callable[[list[int]], None] = lambda missing: None,
        patience: float = math.inf,
    ) -> list[str]:
        """Wait for the values that other workers have posted, and return them; see `gather`."""
        start, is_told = time.monotonic(), False
        has_come: set[int] = set()  # half-way: where the exchange ends, workers take their values back
        look = start + patience / 2
        keys = [self._key(f"{name}/{other}") for other in workers]
        while (found := self._asked.get_all(keys, what="meeting others")) is None:
            if is_void() or self.ended.wait(limits.BUSY_POLL):
                raise RuntimeError(f"the exchange {name} was ended before all had come")
            if not is_told and time.monotonic() > look:
                missing = self.missing(name, [other for other in workers if other not in has_come])
                has_come |= {*workers} - {*missing}
                is_told, look = look >= start + patience, start + patience
                if is_told:
                    on_late(missing)
        return [text.decode() for text in found]

    def post(self, name: str, worker: int, value: str) -> None:
        """Give a value to the workers that look for it by `first_of`. Raises ConnectionError as `gather`."""
        self._asked.set(self._key(f"{name}/{worker}"), value, what="meeting others")

    def first_of(self, name: str, workers: Sequence[int]) -> int | None:
        """Return the first of these workers that has posted a value; None: no value is there, or the store is away."""
        with contextlib.suppress(ConnectionError, RuntimeError):
            missing = self.missing(name, workers)
            return next((worker for worker in workers if worker not in missing), None)
        return None

    def missing(self, name: str, workers: Iterable[int]) -> list[int]:
        """The workers missing from an exchange."""
        return [w for w in workers if not self._asked.check(self._key(f"{name}/{w}"), what="meeting others")]

    def prefixed(self, prefix: str) -> dist.Store:
        """The store, for keys under a prefix."""
        return dist.PrefixStore(self._key(prefix), self._client)

    def forget(self, keys: Sequence[str]) -> None:
        """Delete the keys of finished exchanges, "name/worker"."""
        with contextlib.suppress(ConnectionError, RuntimeError):
            for key in keys:
                self._asked.delete(self._key(key), what="cleaning up")

    def _key(self, key: str) -> str:
        return f"gossip/{self.name}/{key}"

    @property
    def _asked(self) -> BoundedStore:
        if self._store is None:
            raise ConnectionError(f"the store of the job at {self.address} cannot be reached")
        return self._store

    def _connect_first(self) -> None:
        """Try again where the store ends meanwhile: another one may begin in time."""
        deadline = Deadline(self.timeout)
        while True:
            try:
                return self._connect(deadline)
            except ConnectionError as error:
                if deadline.is_over or not isinstance(self.given, str) or isinstance(error, ForeignValueError):
                    raise
            time.sleep(0.05)

    def _reconnect(self, deadline: Deadline) -> bool:
        now = time.monotonic()
        if now - self._last_attempt < _RECONNECT_SECONDS:
            return False
        self._last_attempt = now
        try:
            self._connect(deadline)
        except (ConnectionError, dist.DistError, RuntimeError) as error:
            if isinstance(error, ForeignValueError) and str(error) != self._last_foreign:
                self._last_foreign = str(error)
                log.error("job %s: %s; this worker trains on, but no other worker can join it", self.name, error)
            return False
        self._last_foreign = ""
        return True

    def _connect(self, deadline: Deadline) -> None:
        given = self.given
        if isinstance(given, str):
            given = connect_store(given, self.timeout, was_lost=self.num_epochs > 0, deadline=deadline)
        store = BoundedStore(given, timeout=self.timeout, key=self.key)
        mine, left = secrets.token_hex(8), deadline.left_for_gloo
        epoch = store.compare_set(self._key("epoch"), "", mine, what="joining the job", timeout=left).decode()
        if epoch != self._epoch:
            self._must_restore = self.roster.view is not None
            self.num_epochs, self._epoch = self.num_epochs + 1, epoch
            self._text, self._version, self._count = "", -1, 0
        self._store, self._client = store, given
