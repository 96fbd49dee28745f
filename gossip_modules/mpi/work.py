"""MpiWork: an MPI operation in flight. Waiting for it polls, so that every wait has a limit and moves bytes."""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from ..transport.deadline import Deadline
from ..transport.threads import CallThread
from .library import abort_at_exit, load_mpi

if TYPE_CHECKING:
    from mpi4py.MPI import Request, Status

_NUM_YIELDS = 50  # polls that only yield the core, before polls that sleep
_FIRST_SLEEP, _NUM_DOUBLINGS = 1e-5, 7  # seconds; up to 1.28 ms
_GRACE = 1.0  # seconds for an operation that should end at once
_held: set[MpiWork] = set()  # MPI may still access their memory, so they are kept alive even if nobody waits


class MpiWork(dist.Work):
    """A posted MPI operation, with the interface of `torch.distributed.Work`.

    [Note: polling] MPI moves bytes only inside its own calls, and MPI_Wait has no timeout. So a wait calls MPI_Test
    again and again with the interpreter's lock released. Between two calls it first yields the core, because a peer may
    need it, and later sleeps about a millisecond. DistributedDataParallel waits for futures without polling, so a
    thread of the group has to poll for it.

    Args:
        request: the request of MPI.
        what: the operation and its peer, for errors: "rank 0: receive of 8 bytes from rank 1 (tag 3)".
        timeout: the limit of a wait without a limit of its own.
        tensors: the result of the operation.
        buffers: the memory of the operation; kept alive, as are `tensors`, until MPI is done with it.
        finish: called once, in the first thread that finds the operation complete.
        expected_bytes: the number of bytes of a receive; it can be cancelled. None for other operations.
        completer: returns the thread that waits for the operation, for its future; None: there are no futures.
    """

    def __init__(
        self,
        request: Request,
        *,
        what: str,
        timeout: timedelta,
        tensors: Sequence[Tensor] = (),
        buffers: Sequence[object] = (),
        finish: Callable[[], None] | None = None,
        expected_bytes: int | None = None,
        completer: Callable[[], CallThread] | None = None,
    ) -> None:
        super().__init__()
        _held.add(self)
        self.what = what
        self._request, self._timeout = request, timeout
        self._tensors, self._buffers = list(tensors), buffers
        self._finish, self._expected_bytes, self._completer = finish, expected_bytes, completer
        self._status: Status = load_mpi().Status()
        self._lock = threading.Lock()
        self._is_done = False
        self._error: RuntimeError | None = None
        self._future: torch.futures.Future[list[Tensor]] | None = None

    def is_completed(self) -> bool:
        """Whether it has ended, successfully or not; never blocks."""
        with self._lock:
            if not self._is_done:
                self._is_done = self._test()
        return self._is_done

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Return True when the operation is complete and its tensors may be read and written again.

        Args:
            timeout: the limit; zero or less: the limit of the group.

        Raises:
            RuntimeError: the time is over, or MPI failed; the message names the peer. A receive is cancelled then. The
                memory of other operations stays in use by MPI until the process ends.
        """
        deadline = Deadline(timeout if timeout > timedelta(0) else self._timeout)
        if not _poll(self.is_completed, deadline):
            self.cancel(
                f"not complete after {deadline.seconds:g} s, the peer has not come, has died or is out of reach"
            )
        if self._error is not None:
            raise self._error
        return True

    def cancel(self, reason: str) -> None:
        """End the operation with an error for this reason, unless it is complete; idempotent."""
        with self._lock:
            if self._is_done or self._test():
                self._is_done = True
                return
            self._is_done = True
            self._error = RuntimeError(f"{self.what}: {reason}")
            if self._expected_bytes is None:  # only a receive can be cancelled in MPI
                return
            self._request.Cancel()
            if self.is_released(Deadline(_GRACE)) and not self._status.Is_cancelled():
                self._error = None  # the message came after all
                self._complete()

    @property
    def is_held(self) -> bool:
        """Whether MPI may still access its memory, possibly after a timeout."""
        return self in _held

    def is_released(self, deadline: Deadline) -> bool:
        """Whether MPI is done with the memory of the operation before the deadline, however it ended."""
        if not _poll(lambda: self._request.Test(self._status), deadline):
            return False
        _held.discard(self)
        return True

    def is_success(self) -> bool:
        """Whether it has ended successfully."""
        return self.is_completed() and self._error is None

    def exception(self) -> RuntimeError | None:
        """Return the error of a failed operation, as `wait` raises it."""
        return self._error

    def result(self) -> list[Tensor]:
        """Return the written tensors, after `wait`."""
        return self._tensors

    def source_rank(self) -> int:
        """Return the sender of the message; for a complete receive."""
        return int(self._status.Get_source())

    _source_rank = source_rank

    def synchronize(self) -> None:
        """As `wait`: an operation that is complete is complete on the host."""
        self.wait()

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        """A future of the tensors; a thread of the group waits for the operation from now on."""
        if self._future is None:
            assert self._completer is not None, "only collectives have futures"
            self._future = torch.futures.Future()
            self._completer().submit(self._settle)
        return self._future

    def _settle(self) -> None:
        """Wait, and set the future."""
        assert self._future is not None
        try:
            self.wait()
            self._future.set_result(self._tensors)
        except RuntimeError as error:
            self._future.set_exception(error)  # type: ignore[arg-type]

    def _test(self) -> bool:
        """Whether MPI is done with the operation; if so, finishes it."""
        try:
            if not self._request.Test(self._status):
                return False
        except RuntimeError as error:  # MPI's own exception
            self._error = RuntimeError(f"{self.what}: {error}")
            _held.discard(self)
            return True
        self._complete()
        return True

    def _complete(self) -> None:
        num_bytes = self._status.Get_count(load_mpi().BYTE) if self._expected_bytes is not None else None
        if num_bytes != self._expected_bytes:
            self._error = RuntimeError(
                f"{self.what}: got a message of {num_bytes} bytes, expected {self._expected_bytes}; the sender's "
                "tensor has another shape or dtype, or the tag is another message's"
            )
        elif self._finish is not None:
            self._finish()
        _held.discard(self)
        self._buffers = ()


def _poll(is_over: Callable[[], bool], deadline: Deadline) -> bool:
    """Wait until `is_over()`; whether it is before the deadline. See [Note: polling]."""
    num_polls = 0
    while not is_over():
        if deadline.is_over:
            return False
        pause(num_polls)
        num_polls += 1
    return True


def pause(num_polls: int) -> None:
    """Yield the core or sleep between two polls; see [Note: polling]."""
    doublings = min((num_polls - _NUM_YIELDS) // 4, _NUM_DOUBLINGS)
    time.sleep(0 if num_polls < _NUM_YIELDS else _FIRST_SLEEP * 2**doublings)


@atexit.register
def _release_all() -> None:
    """Cancel what can be cancelled before MPI_Finalize waits for it; see [Note: the end of a process] of `load_mpi`."""
    for work in tuple(_held):
        work.cancel("the process ends")
    deadline = Deadline(_GRACE)
    if not all(work.is_released(deadline) for work in tuple(_held)):
        abort_at_exit()
