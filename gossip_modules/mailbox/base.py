"""A store of objects by path: sealed, with bounded reads and retries."""

from __future__ import annotations

import math
import random
import re
import threading
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from ..membership.background_log import log
from .clock import Clock
from .errors import MailboxError, Permanent, Transient, Unavailable
from .sealed import Seal

T = TypeVar("T")
_PATH = re.compile(r"[\w=+-][\w=+.-]*(/[\w=+-][\w=+.-]*)*", re.ASCII)
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 5.0  # seconds between two tries


@dataclass
class MediumCounts:
    """The requests of a worker to its store.

    Attributes:
        writes, reads, lists, deletes: the numbers of calls with an answer. A list has more requests where the store has
            pages, and a `create` that finds an object may have a second one, to look at it.
        bytes_written, bytes_read: the sizes of their objects, with seals.
        retries: the number of tries that failed and were followed by another one.
        refused: the number of reads of objects that were forged, altered, truncated, moved or too large.
    """

    writes: int = 0
    reads: int = 0
    lists: int = 0
    deletes: int = 0
    bytes_written: int = 0
    bytes_read: int = 0
    retries: int = 0
    refused: int = 0


class Listed(NamedTuple):
    """An object of a list.

    tag: a text that changes when the object changes.
    num_bytes: its size, with the seal.
    time: when it was written, in seconds by the clock of the store; NaN: the store does not say.
    """

    tag: str
    num_bytes: int
    time: float = math.nan


class Medium(ABC):
    """A store of objects by path, for many workers. Any thread may call any method.

    A path has parts of letters, digits and "_=+-."; no part begins with a dot, and "/" stands between two parts.
    Objects are sealed with their paths: see `Seal`.

    [Note: retries] Subclasses implement single tries: `_create`, `_put`, `_get`, `_list` and `_delete`. A try raises
    `Transient`, `Permanent` where no other one can succeed, or one of `errors`. The public methods repeat a try until
    the deadline, with pauses that grow from 0.1 to 5 seconds. An outage is logged once, when two tries in a row have
    failed, and again at its end; single failures are counted in `counts.retries`. The answer to a try may be lost after
    the store has carried it out, so a second try of `create` reads an object that is there and compares.

    Args:
        address: the address of the store, for errors.
        timeout: the limit of each call in seconds, unless it has a deadline of its own.
        clock: the time.
        seal: the seal of all objects.
        seed: the seed of the jitter of pauses, another one in each worker; None: one of the operating system.

    Attributes:
        counts: the requests so far.
        errors: the exceptions of tries that `_failure` translates.
    """

    errors: tuple[type[Exception], ...] = ()

    def __init__(self, address: str, *, timeout: float, clock: Clock, seal: Seal, seed: int | None = None) -> None:
        self.address, self.timeout, self.clock, self.seal = address, timeout, clock, seal
        self.counts = MediumCounts()
        self._random = random.Random(seed)
        self._lock = threading.Lock()  # of counts, jitter and the outage
        self._failing_since: float | None = None
        self._is_closed = False

    def create(self, path: str, data: bytes, *, deadline: float | None = None) -> bool:
        """Write an object once. Returns whether it is there; False: another one is.

        If two workers create equal objects at once and an answer is lost, both may get True.

        Args:
            path: the path of the object.
            data: its content.
            deadline: the time of the clock after which no further try begins; None: `timeout` from now.

        Raises:
            MailboxError: the store refuses the request.
            Unavailable: the store has not answered before the deadline; the object may be there nevertheless.
        """
        sealed = self.seal.seal(_checked(path), data)

        def attempt(is_retry: bool) -> bool:
            if self._create(path, sealed):
                return True
            found = self._get(path, len(sealed)) if is_retry else b""
            if found is None:
                raise Transient("an object is there, and it cannot be read yet")
            return found == sealed

        return self._repeat("create", path, attempt, deadline, writes=1, bytes_written=len(sealed))

    def put(self, path: str, data: bytes, *, deadline: float | None = None) -> None:
        """Write an object, in the place of an earlier one. Arguments and errors: see `create`."""
        sealed = self.seal.seal(_checked(path), data)
        self._repeat(
            "put", path, lambda is_retry: self._put(path, sealed), deadline, writes=1, bytes_written=len(sealed)
        )

    def get(self, path: str, *, max_bytes: int, deadline: float | None = None) -> bytes | None:
        """Read an object. Errors: see `create`.

        Args:
            path: the path of the object.
            max_bytes: the limit of its size; it is checked before the object is read.
            deadline: see `create`.

        Returns:
            the content; None: the object is absent, or refused, which is counted.
        """

        size = max_bytes + Seal.num_bytes
        data = self._repeat("get", _checked(path), lambda is_retry: self._get(path, size), deadline, reads=1)
        if data is None:
            return None
        content = self.seal.open(path, data)
        self._count(bytes_read=len(data), refused=int(content is None))
        return content

    def list(self, prefix: str = "", *, deadline: float | None = None) -> dict[str, Listed]:
        """The objects below a path of whole parts ("": all), by path.

        Objects whose paths `create` would refuse are left out. Errors: see `create`.
        """

        folder = _checked(prefix.rstrip("/")) if prefix else ""
        found = self._repeat("list", folder, lambda is_retry: self._list(folder), deadline, lists=1)
        return {path: entry for path, entry in found.items() if _PATH.fullmatch(path)}

    def delete(self, paths: Iterable[str], *, deadline: float | None = None) -> None:
        """Delete objects; absent ones are ignored. Errors: see `create`."""
        checked = [_checked(path) for path in paths]
        if checked:
            self._repeat("delete", ", ".join(checked[:3]), lambda is_retry: self._delete(checked), deadline, deletes=1)

    def check(self) -> None:
        """Raise MailboxError unless this worker may create and delete objects, and the store keeps the first of two.

        Some stores with the protocol of S3 ignore the header by which an object is written once.
        """
        path = f"check/{uuid.uuid4().hex}"
        is_first_there, is_second_there = self.create(path, b"first"), self.create(path, b"second")
        self.delete([path])
        if not is_first_there or is_second_there:
            raise MailboxError(
                f"{self.address} lets a second writer replace an object (create {path!r}), expected a store that keeps "
                "the first one; update it to a version with conditional writes (If-None-Match), or use another store"
            )

    @property
    def is_away(self) -> bool:
        """Whether two tries in a row have failed, and no request was answered since; see [Note: retries]."""
        return self._failing_since is not None

    def close(self) -> None:
        """Let calls under way end after their present try. Idempotent."""
        self._is_closed = True

    @abstractmethod
    def _create(self, path: str, data: bytes) -> bool:
        """Write an object unless there is one; returns whether it was written."""

    @abstractmethod
    def _put(self, path: str, data: bytes) -> None:
        """Write an object."""

    @abstractmethod
    def _get(self, path: str, max_bytes: int) -> bytes | memoryview | None:
        """Read an object; None: it is absent. One of more bytes is not read: b"", which no seal opens."""

    @abstractmethod
    def _list(self, prefix: str) -> dict[str, Listed]:
        """The objects below a path."""

    @abstractmethod
    def _delete(self, paths: Iterable[str]) -> None:
        """Delete objects that are there."""

    def _failure(self, error: Exception) -> Transient:
        """The error of a try for one of `errors`."""
        return Transient(error)

    def _repeat(self, verb: str, path: str, attempt: Callable[[bool], T], deadline: float | None, **counts: int) -> T:
        """Return the result of the first try that succeeds, and count it; see [Note: retries]."""
        errors: tuple[type[Exception], ...] = (Transient, *self.errors)
        start, num_tries = self.clock.now(), 0
        limit = start + self.timeout if deadline is None else deadline
        while True:
            num_tries += 1
            try:
                result = attempt(num_tries > 1)
            except errors as error:
                failure = error if isinstance(error, Transient) else self._failure(error)
                now, is_permanent = self.clock.now(), isinstance(failure, Permanent)
                text = (
                    f"{verb} {path!r} in {self.address} failed after {now - start:.1f} s, "
                    f"{num_tries} {'try' if num_tries == 1 else 'tries'}: {failure}"
                )
                if is_permanent or now >= limit or self._is_closed:
                    raise (MailboxError if is_permanent else Unavailable)(f"{text}; {failure.remedy}") from error
                pause = self._note_failure(text, now, num_tries)
            else:
                self._note_answer()
                self._count(**counts)
                return result
            self.clock.sleep(min(pause, limit - now))

    def _note_failure(self, text: str, now: float, num_tries: int) -> float:
        """Count a failed try, and log an outage; returns the pause before the next try, in seconds."""
        with self._lock:
            self.counts.retries += 1
            is_outage = num_tries > 1 and self._failing_since is None
            if is_outage:
                self._failing_since = now
            jitter = self._random.uniform(0.5, 1.0)
        if is_outage:
            log.warning("%s; it is tried again until its deadline", text)
        return float(jitter * min(_FIRST_PAUSE * 2.0 ** min(num_tries - 1, 10), _LONGEST_PAUSE))

    def _note_answer(self) -> None:
        with self._lock:
            since, self._failing_since = self._failing_since, None
        if since is not None:
            log.warning("%s answers again, after %.1f s without", self.address, self.clock.now() - since)

    def _count(self, **counts: int) -> None:
        with self._lock:
            for name, count in counts.items():
                setattr(self.counts, name, getattr(self.counts, name) + count)


def _checked(path: str) -> str:
    if not _PATH.fullmatch(path):
        raise ValueError(
            f"got the path {path!r}, expected parts of letters, digits and _=+-. with / between them, none of which "
            "begins with a dot"
        )
    return path
