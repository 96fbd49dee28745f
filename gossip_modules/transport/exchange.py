"""Exchange: one round on its way, piece by piece, and the error that says who waited for whom."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import NamedTuple, NoReturn, Protocol

import torch.distributed as dist
from torch import Tensor

from .staging import Staging

LATE = 0.95  # of the timeout: what has taken so long is an error of time
FAREWELLS = ("goodbye", "leaving")  # exchanges of ranks that end: it does not matter who is gone


class _Piece(NamedTuple):
    """The tensors of one index, to and from all peers: works by name and peer, and what is received with its twin."""

    works: list[tuple[str, tuple[int, ...], dist.Work]]
    inbox: list[tuple[Tensor, Tensor]]


class Link(Protocol):
    """What an exchange needs of the transport that posts it."""

    backend: str
    timeout: timedelta
    names: Sequence[int]

    def wire_tag(self, tag: int, num_bytes: int, *, total_bytes: int | None = None) -> int:
        """The backend's tag of a message, or of a piece of one."""

    rank: int

    @property
    def group(self) -> dist.ProcessGroup:
        """That its messages go to."""

    def fail(self, error: RuntimeError, what: str, seconds: float, *, peers: Sequence[int]) -> NoReturn:
        """Raise it as an error that names the peers, and who failed first."""


class Exchange:
    """One posted round; a `Pending` of the link.

    Args:
        link: whose messages these are.
        num_pieces: the most tensors that a peer gets or gives.
        tag: of the round.
        what: names it in errors.
    """

    def __init__(self, link: Link, num_pieces: int, *, tag: int, what: str) -> None:
        self.link, self.num_pieces, self.tag, self.what = link, num_pieces, tag, what
        self._pieces = deque(_Piece([], []) for _ in range(num_pieces))  # those that are still under way
        self._batch: list[dist.P2POp] = []
        self._start = time.monotonic()

    def receive(self, k: int, peer: int, x: Tensor, twin: Tensor, *, total_bytes: int) -> None:
        """Post a receive of piece k into the twin of x. total_bytes: of all pieces from this peer."""
        self._pieces[k].inbox.append((x, twin))
        self._post(k, peer, twin, total_bytes, is_send=False)

    def send(self, k: int, peer: int, x: Tensor, *, total_bytes: int) -> None:
        """Post a send of piece k. total_bytes: of all pieces to this peer."""
        self._post(k, peer, x, total_bytes, is_send=True)

    def begin(self) -> None:
        """All is posted: the time of the waits runs from now."""
        if self._batch:
            self._pieces[0].works.extend((self.what, (), work) for work in dist.batch_isend_irecv(self._batch))
        self._start = time.monotonic()

    def wait(self, timeout: timedelta | None = None) -> None:
        """See `Pending`."""
        while self._pieces:
            self._wait(timeout)

    def arrivals(self) -> Iterator[int]:
        """See `Pending`."""
        while self._pieces:
            self._wait(None)
            yield self.num_pieces - len(self._pieces) - 1

    def _wait(self, timeout: timedelta | None) -> None:
        """Until the first piece that is under way has come and gone."""
        piece = self._pieces[0]
        for what, peers, work in piece.works:
            elapsed = time.monotonic() - self._start
            left = max((timeout or self.link.timeout) - timedelta(seconds=elapsed), timedelta(milliseconds=1))
            try:
                wait_for(work, left, backend=self.link.backend)
            except RuntimeError as error:
                self._fail(error, what, time.monotonic() - self._start, peers=peers, timeout=timeout)
        Staging.copy_back(piece.inbox)
        self._pieces.popleft()

    def _post(self, k: int, peer: int, x: Tensor, total_bytes: int, *, is_send: bool) -> None:
        link = self.link
        name = link.names[peer]
        if link.backend == "nccl":
            self._batch.append(dist.P2POp(dist.isend if is_send else dist.irecv, x, name, link.group))
            return
        piece = f", piece {k + 1} of {self.num_pieces}" if self.num_pieces > 1 else ""
        action = f"{self.what}{piece}: {'send to' if is_send else 'receive from'} rank {name}"
        post = link.group.send if is_send else link.group.recv
        try:
            work = post([x], peer, link.wire_tag(self.tag, num_bytes_of(x), total_bytes=total_bytes))
        except RuntimeError as error:
            self._fail(error, action, 0.0, peers=(peer,))
        self._pieces[k].works.append((action, (peer,), work))

    def _fail(
        self,
        error: RuntimeError,
        what: str,
        seconds: float,
        *,
        peers: tuple[int, ...],
        timeout: timedelta | None = None,
    ) -> NoReturn:
        link = self.link
        if (
            timeout is not None or self.what in FAREWELLS
        ):  # who waits for less than a peer may take draws no conclusions
            fail(error, rank=link.names[link.rank], what=what, seconds=seconds, timeout=timeout or link.timeout)
        link.fail(error, what, seconds, peers=peers)


def num_bytes_of(x: Tensor) -> int:
    """How long x is on the wire."""
    return x.numel() * x.element_size()


def wait_for(work: dist.Work, timeout: timedelta, *, backend: str) -> None:
    """Return when the work is done, or on NCCL when the current stream is ordered after it."""
    if backend == "nccl":
        work.wait()  # the group's watchdog has the timeout
    else:
        work.wait(timeout)


def fail(error: RuntimeError, *, rank: int, what: str, seconds: float, timeout: timedelta, note: str = "") -> NoReturn:
    """Raise what the backend reported as an error that says who waited for whom, and for how long.

    Raises:
        TimeoutError: about `timeout` had passed.
        ConnectionError: sooner.
    """
    limit = timeout.total_seconds()
    message = f"rank {rank}: {what} failed after {seconds:.1f} s (timeout {limit:g} s){note}: {error}"
    raise (TimeoutError if seconds > LATE * limit else ConnectionError)(message) from error
