"""A barrier over MPI with a timeout that names the ranks which did not come."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

from .library import load_mpi
from .work import GRACE, MpiWork

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm


def timed_barrier(comm: Intracomm, ranks: Sequence[int], *, names: Sequence[int], timeout: timedelta, tag: int) -> None:
    """Return when all of `ranks` have called this function.

    Every rank sends a byte to the first one. When all have come or the time is over, the first rank tells those that
    came which ranks are missing, so all of them raise the same error.

    Args:
        comm: a communicator that contains the ranks, and possibly others.
        ranks: the ranks of `comm` that take part, this one among them, in the same order everywhere.
        names: the global rank of each rank of `comm`, for error messages.
        timeout: how long the first rank waits for the others.
        tag: the tag of these messages; no other message on `comm` may use it.

    Raises:
        RuntimeError: ranks are missing; the message names them.
    """
    if comm.rank == ranks[0]:
        is_absent = _collect(comm, ranks, names, timeout, tag)
    else:
        is_absent = bytearray(len(ranks))
        _send(comm, bytearray(1), ranks[0], names, timeout, tag).wait()
        _receive(comm, is_absent, ranks[0], names, timeout + GRACE, tag).wait()
    if any(is_absent):
        missing = [names[rank] for rank, absent in zip(ranks, is_absent) if absent]
        raise RuntimeError(
            f"rank {names[comm.rank]}: ranks {missing} have not come within {timeout.total_seconds():g} s"
        )


def _collect(comm: Intracomm, ranks: Sequence[int], names: Sequence[int], timeout: timedelta, tag: int) -> bytearray:
    """On the first rank: wait for the others, then tell them who is missing. Returns a byte per rank, 1 = missing."""
    is_absent = bytearray(len(ranks))
    deadline = time.monotonic() + timeout.total_seconds()
    arrivals = [_receive(comm, bytearray(1), peer, names, timeout, tag) for peer in ranks[1:]]
    for i, arrival in enumerate(arrivals, start=1):
        try:
            arrival.wait(timedelta(seconds=max(deadline - time.monotonic(), 1e-3)))
        except RuntimeError:  # the caller names it, with all others that are missing
            is_absent[i] = 1
    for i, peer in enumerate(ranks):
        if not is_absent[i] and i:
            _send(comm, is_absent, peer, names, timeout, tag).wait()
    return is_absent


def _send(comm: Intracomm, data: bytearray, peer: int, names: Sequence[int], timeout: timedelta, tag: int) -> MpiWork:
    what = f"rank {names[comm.rank]}: barrier message to rank {names[peer]}"
    return MpiWork(comm.Isend([data, load_mpi().BYTE], peer, tag), what=what, timeout=timeout, buffers=[data])


def _receive(
    comm: Intracomm, data: bytearray, peer: int, names: Sequence[int], timeout: timedelta, tag: int
) -> MpiWork:
    what = f"rank {names[comm.rank]}: barrier message from rank {names[peer]}"
    request = comm.Irecv([data, load_mpi().BYTE], peer, tag)
    return MpiWork(request, what=what, timeout=timeout, buffers=[data], expected_bytes=len(data))
