"""Key-value stores: requests with a timeout, records of all ranks, and their progress."""

from __future__ import annotations

import contextlib
import hmac
import json
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent import futures
from concurrent.futures import Future
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch.distributed as dist

from .job_key import CODE_BYTES, VARIABLE, code_of, key_of
from .threads import CallThread

T = TypeVar("T")
_NOTHING = "\0"  # stands under no key; as the expected value it changes nothing
_REQUEST = timedelta(seconds=0.4)  # of ranks that fail, which must end in time
_SIGNED = b"gossip-signed "  # begins a value with a code
_MAX_FOREIGN = 100  # values of strangers that one look passes over, so that many do not keep a rank busy


class ForeignValueError(ConnectionError):
    """A value in a key-value store has no code, or none of this key at this place."""


class BoundedStore:
    """The requests of this process to one store, each with a limit of time; errors name the request.

    [Note: store requests] If the process of a TCPStore is stopped or cut off, its client waits for ever, whatever its
    timeout. So a daemon thread sends the requests to a TCPStore, one after the other, and the caller waits for that
    thread. After its limit a request stays with the thread, and is carried out if the store answers again. Until then a
    later request fails once the earlier one has been under way for the later one's timeout. Stores without a server, in
    memory or in a file, are asked directly.

    [Note: signed values] torch's TCPStore knows no passwords, so a stranger can write there. With a key each value has
    a code of its place and of itself in front, and another value is an error where it is read. Numbers that `add`
    changes have none, as the store itself adds. A stranger who can read can put an old value of the same place back.
    In a membership, names of places therefore have numbers that do not come again, such as the id of a worker or the
    number of a generation, and `SharedRoster` counts its values. In groups of torchrun, names come again after a
    restart: `Records` have the nonces of their readers. A stranger can also delete values.

    Args:
        store: a store of any kind.
        timeout: the limit of each request without its own; None: the store's own.
        key: see [Note: signed values]; None: values have no codes.
        place: the name of the keys in `store`, for codes.

    Attributes:
        address: the address of the store, for error messages.
        port: the port of the server of a TCPStore; None: another store.
        is_signed: whether values have codes.
    """

    def __init__(
        self, store: dist.Store, *, timeout: timedelta | None = None, key: bytes | None = None, place: str = ""
    ) -> None:
        self._store, self._secret, self._place = store, key, place
        self.is_signed = key is not None
        self._timeout: timedelta = store.timeout if timeout is None else timeout  # type: ignore[attr-defined]
        base = store
        while isinstance(base, dist.PrefixStore):
            base = base.underlying_store
        self._base = base  # alive, so that all that ask it share a thread
        self.address = _address_of(base)
        self.port: int | None = base.port if isinstance(base, dist.TCPStore) else None
        self._client = None if isinstance(base, (dist.HashStore, dist.FileStore)) else _client_of(base)

    def add(self, key: str, amount: int, *, what: str, timeout: timedelta | None = None) -> int:
        """Add `amount` to the number under `key`, 0 before the first time; the sum.

        Args:
            key: the key of the number.
            amount: may be 0.
            what: is done, for errors: "adding 1 to the progress of the job".
            timeout: None: as in the constructor.

        Raises:
            ConnectionError: the store has failed, or has not answered in time.
        """
        return self._ask(lambda: self._store.add(key, amount), what, timeout)

    def set(self, key: str, value: str | bytes, *, what: str, timeout: timedelta | None = None) -> None:
        """Put `value` under `key`. See `add`."""
        signed = self._signed(key, value)
        self._ask(lambda: self._store.set(key, signed), what, timeout)  # type: ignore[arg-type]

    def get(self, key: str, *, what: str, timeout: timedelta | None = None) -> bytes | None:
        """What is under `key`; None: nothing. Waits for the answer, never for the key. See `add`.

        Raises:
            ForeignValueError: [Note: signed values].
        """
        value = self._ask(partial(self._read, key), what, timeout)
        return None if value is None else self._opened(key, value)

    def get_all(self, keys: Sequence[str], *, what: str, timeout: timedelta | None = None) -> list[bytes] | None:
        """The values under all keys; None: one is not there. Waits for the answer, never for a key. See `get`."""
        values = self._ask(partial(self._get_all, list(keys)), what, timeout)
        return None if values is None else [self._opened(*pair) for pair in zip(keys, values, strict=True)]

    def _get_all(self, keys: list[str]) -> list[bytes] | None:
        if not self._store.check(keys):
            return None
        values = [value for key in keys if (value := self._read(key)) is not None]  # a key may have gone since
        return values if len(values) == len(keys) else None

    def _read(self, key: str) -> bytes | None:
        """The value of `key`, in one request, without waiting for the key."""
        value = self._store.compare_set(key, _NOTHING, _NOTHING)
        return None if value == _NOTHING.encode() else value

    def tell(self, key: str, value: str) -> None:
        """Put `value` under `key`, if the store answers, without waiting for it."""
        request = partial(self._store.set, key, self._signed(key, value))  # type: ignore[arg-type]
        if self._client is not None:
            self._client.tell(request)
            return
        with contextlib.suppress(RuntimeError):
            request()

    def compare_set(self, key: str, expected: str, value: str, *, what: str, timeout: timedelta | None = None) -> bytes:
        """Put `value` under `key` if `expected` is there ("": nothing); returns the value afterwards. See `get`."""
        texts = [self._signed(key, text).decode() if text else "" for text in (expected, value)]
        found = self._ask(lambda: self._store.compare_set(key, *texts), what, timeout)
        return self._opened(key, found) if found else found  # no value is there, or one of a stranger, to be replaced

    def delete(self, key: str, *, what: str, timeout: timedelta | None = None) -> None:
        """Take `key` away, if it is there. See `add`."""
        self._ask(lambda: self._store.delete_key(key), what, timeout)

    def keys(self, *, what: str, timeout: timedelta | None = None) -> list[str]:
        """All keys. See `add`."""
        return self._ask(self._store.list_keys, what, timeout)

    def check(self, key: str, *, what: str, timeout: timedelta | None = None) -> bool:
        """Whether there is anything under `key`. See `add`."""
        return self._ask(lambda: self._store.check([key]), what, timeout)

    def _signed(self, key: str, value: str | bytes) -> bytes:
        content = value.encode() if isinstance(value, str) else value
        if self._secret is None:
            return content
        code = code_of(self._secret, "store", self._place, key, content=content)
        return b"".join([_SIGNED, code.hex().encode(), b" ", content])

    def _opened(self, key: str, value: bytes) -> bytes:
        if self._secret is None and not value.startswith(_SIGNED):
            return value
        code, _, content = value[len(_SIGNED) :].partition(b" ")
        is_signed = value.startswith(_SIGNED) and len(code) == 2 * CODE_BYTES
        if self._secret is not None and is_signed:
            own = code_of(self._secret, "store", self._place, key, content=content)
            if hmac.compare_digest(code, own.hex().encode()):
                return content
        place = f"{self._place}/{key}" if self._place else key
        has = "is signed, and this process has no key" if self._secret is None else "is not signed with this job's key"
        raise ForeignValueError(
            f"the value of {place!r} in the key-value store at {self.address} {has}: it is not used; set {VARIABLE} to "
            "the same secret on all workers; if it is, a stranger has written it: let a firewall or a tunnel keep "
            "strangers from the store, and start the store again"
        )

    def _ask(self, request: Callable[[], T], what: str, timeout: timedelta | None) -> T:
        seconds = (timeout or self._timeout).total_seconds()
        try:
            return request() if self._client is None else self._client.ask(request, seconds)
        except (dist.DistError, _NoAnswer) as error:
            raise ConnectionError(
                f"{what}: its key-value store did not answer ({self.address}: {error}); the process that serves it, "
                "torchrun's agent on the first host or rank 0, has ended, is stopped or is out of reach"
            ) from error


class _NoAnswer(Exception):
    """The limit of time has passed."""


class _Client:
    """Asks one store in a thread of its own. See [Note: store requests]."""

    def __init__(self) -> None:
        self._thread = CallThread("store-requests")
        self._late: tuple[Future[Any], float] | None = None  # the first request that was given up; when it was made

    def tell(self, request: Callable[[], None]) -> None:
        """Make a request, unless an earlier one is without an answer."""
        if self._late is None:
            self._thread.submit(request)

    def ask(self, request: Callable[[], T], seconds: float) -> T:
        """The result of a request, or _NoAnswer after so many seconds."""
        start = time.monotonic()
        if (late := self._late) is not None:
            earlier, asked = late
            if futures.wait([earlier], max(asked + seconds - start, 0.0)).not_done:
                raise _NoAnswer(f"no answer to an earlier request for {time.monotonic() - asked:.1f} s")
            self._late = None
        future = self._thread.submit(request)
        if futures.wait([future], max(start + seconds - time.monotonic(), 0.0)).not_done:
            self._late = self._late or (future, start)
            raise _NoAnswer(f"no answer within {seconds:g} s")
        try:
            return future.result()
        finally:
            del future  # its error holds this frame


_clients: weakref.WeakKeyDictionary[dist.Store, _Client] = weakref.WeakKeyDictionary()  # one thread per store
_clients_lock = threading.Lock()


def _client_of(store: dist.Store) -> _Client:
    with _clients_lock:
        client = _clients.get(store)
        if client is None:
            client = _clients[store] = _Client()
        return client


def _address_of(store: dist.Store) -> str:
    if isinstance(store, dist.TCPStore):
        return f"{store.host}:{store.port}"
    if isinstance(store, dist.FileStore):
        return str(store.path)  # type: ignore[attr-defined]
    return type(store).__name__


def job_store() -> dist.Store:
    """Return the key-value store of the default process group, where the ranks of the job have met.

    Raises:
        RuntimeError: torch.distributed is not initialised.
    """
    if not dist.is_initialized():
        raise RuntimeError(
            "torch.distributed is not initialised, expected the store of its default process group; call "
            "torch.distributed.init_process_group() before, or pass a store"
        )
    return dist.distributed_c10d._get_default_store()


class Progress:
    """A counter of the steps of all ranks of a job together.

    Where ranks train at their own pace no rank's step count tells how far the job is. Epochs, the learning rate and
    the end of training then follow the sum, so that fast ranks do more of the work. AD-PSGD: Lian et al., ICML 2018,
    arXiv 1710.06952, counts its iterations k over all workers.

    Adding is atomic and never waits for another rank, only for the store, and no longer than `timeout`: one request and
    its answer, some 60 µs on one machine. To take exactly n steps together, let each rank claim a step before it takes
    it: see the example.

    Args:
        store: reached by all ranks; None: the store of the default process group, under a prefix of its own.
        name: the name of the counter; ranks with the same name and store share it.
        timeout: the timeout of each request; None: the store's own, as given to `init_process_group`.

    Raises:
        RuntimeError: no store, and torch.distributed is not initialised.

    Example:
        >>> progress = Progress(dist.HashStore())
        >>> while progress.add(1) <= 3:
        ...     print("a step")
        a step
        a step
        a step
    """

    def __init__(
        self, store: dist.Store | None = None, *, name: str = "steps", timeout: timedelta | None = None
    ) -> None:
        prefixed = dist.PrefixStore("gossip_progress", job_store() if store is None else store)
        self._store = BoundedStore(prefixed, timeout=timeout)
        self._name = name

    @property
    def total(self) -> int:
        """The sum of what all ranks have added so far.

        Raises:
            ConnectionError: the store does not answer, or not in time.
        """
        return self.add(0)

    def add(self, n: int) -> int:
        """Count `n` more steps and return the total with them. No two calls return the same total if every call adds 1
        or more.

        Raises:
            ConnectionError: the store does not answer, or not in time.
        """
        return self._store.add(self._name, n, what=f"adding {n} to the progress {self._name!r} of the job")

    def restore(self, total: int) -> None:
        """Make `total` the count, as after a resumption.

        Not collective, and not to be mixed with `add`: one rank calls it while no other counts, between two barriers.

        Args:
            total: 0 or more.

        Raises:
            ConnectionError: the store does not answer, or not in time.
        """
        if total < 0:
            raise ValueError(f"got total={total}, expected a count of 0 or more; 0 starts anew")
        what = f"restoring {total} as the progress {self._name!r} of the job"
        self._store.set(self._name, str(total), what=what)


class Records:
    """A list of JSON values in a key-value store. All ranks append to it, and each reads the new values.

    [Note: nonces of readers] A stranger who has read a signed record, such as the note of a failure, can put it back at
    its place after a restart, in the next generation, or in the next run with this key. So where records are signed,
    each reader first appends a random nonce to another list, and each record has the nonces of all readers. A reader
    ignores a record without its own one. A reader that comes after a record gets it when the writer looks for new
    records itself: it then appends its last one again. A stranger can make a writer miss a nonce, by many counts
    without one, and delete records: then ranks fail without these facts.

    Args:
        store: the store of the ranks; no other code uses its keys.
        skips_foreign: whether the value of a stranger is passed over; else it is an error. Give True where all ranks
            have shown each other that they have the key.
    """

    def __init__(self, store: BoundedStore, *, skips_foreign: bool = False) -> None:
        self._store, self._skips_foreign = store, skips_foreign
        self._num_read = 0
        self._lock = threading.RLock()
        self._nonce, self._nonces = secrets.token_hex(8), dict[int, str]()  # of all readers, by number
        self._last: tuple[Any, int] | None = None  # the last record of this rank, and the number of nonces it has
        if store.is_signed:
            with contextlib.suppress(ConnectionError, RuntimeError):  # as in `append`
                number = store.add("nonces", 1, what="counting a reader")
                store.set(f"nonce/{number}", self._nonce, what="leaving the nonce of a reader")

    def append(self, record: Any) -> None:
        """Append a JSON value, if the store answers: without it errors tell less, and come late."""
        with self._lock, contextlib.suppress(ConnectionError, RuntimeError):  # the store is gone, or cannot count
            if self._store.is_signed:
                with contextlib.suppress(ConnectionError, RuntimeError):  # a busy store: for the readers that are known
                    self._look_for_readers()
                self._last = record, len(self._nonces)
            number = self._store.add("count", 1, what="counting a record")
            text = json.dumps([[*self._nonces.values()], record] if self._store.is_signed else record)
            self._store.set(str(number), text, what="leaving a record")

    def skip(self) -> None:
        """Ignore the values so far. Raises as `new`."""
        self._num_read = self._store.add("count", 0, what="counting records")

    def new(self) -> list[Any]:
        """The values appended since the last call.

        Raises:
            ConnectionError, RuntimeError: the store does not answer, or cannot count.
            ForeignValueError: a value is a stranger's, unless those are passed over.
        """
        records, num_foreign = [], 0
        with self._lock:
            self._append_for_late_readers()
            count = self._store.add("count", 0, what="looking for records")
            while self._num_read < count and num_foreign < _MAX_FOREIGN:
                try:
                    text = self._store.get(str(self._num_read + 1), what="reading a record")
                except ForeignValueError:
                    if not self._skips_foreign:
                        raise
                    self._num_read += 1
                    num_foreign += 1
                    continue
                if text is None:  # it is counted and not there yet
                    break
                record = json.loads(text)
                self._num_read += 1
                if self._store.is_signed:
                    nonces, record = record
                    if self._nonce not in nonces:
                        continue
                records.append(record)
        return records

    def _append_for_late_readers(self) -> None:
        """See [Note: nonces of readers]."""
        if self._last is None:
            return
        record, num_nonces = self._last
        self._look_for_readers()
        if len(self._nonces) > num_nonces:
            self.append(record)

    def _look_for_readers(self) -> None:
        """Read the nonces that have come; missing and foreign ones are passed over, and looked for again next time."""
        count = self._store.add("nonces", 0, what="looking for readers")
        num_missing = 0
        for number in range(1, count + 1):
            if number in self._nonces:
                continue
            if num_missing == _MAX_FOREIGN:
                break
            try:
                nonce = self._store.get(f"nonce/{number}", what="reading the nonce of a reader")
            except ForeignValueError:
                nonce = None
            if nonce is None:  # its reader has died, or was not answered in time; or a stranger has counted
                num_missing += 1
            else:
                self._nonces[number] = nonce.decode()


def is_of_job(group: dist.ProcessGroup) -> bool:
    """Whether torch.distributed knows the group, so that it has the store of the job."""
    return dist.is_initialized() and group in dist.distributed_c10d._world.pg_map


def store_of(group: dist.ProcessGroup, prefix: str, *, key: bytes | None = None) -> BoundedStore | None:
    """The keys under a prefix in the store of a process group, with short requests; None: it has no store.

    Under MPI torch puts a `Store` without operations in its place.

    Args:
        group: of any kind.
        prefix: the begin of all keys.
        key: the key of the job; None: the variable GOSSIP_JOB_KEY, if it is set.
    """
    try:
        store = dist.distributed_c10d._world.pg_map[group][1] if is_of_job(group) else group.get_group_store()
    except (AttributeError, RuntimeError):  # an older torch, or a group without
        return None
    base = store
    while isinstance(base, dist.PrefixStore):
        base = base.underlying_store
    if base is None or type(base) is dist.Store:
        return None
    name = dist.distributed_c10d._world.pg_names[group] if is_of_job(group) else ""
    prefixed = dist.PrefixStore(prefix, store)
    return BoundedStore(prefixed, timeout=_REQUEST, key=key_of(key), place=f"{name}/{prefix}")
