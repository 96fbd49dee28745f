"""Barriers with errors that name missing ranks: every rank tells all others, or in log2 n messages per rank."""

from __future__ import annotations

import contextlib
import re
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import timedelta
from typing import TypeAlias

import torch
import torch.distributed as dist

from .deadline import Deadline
from .exchange import LATE
from .stores import BoundedStore

Wait: TypeAlias = Callable[[dist.Work, timedelta], object]
_NAME_BYTES = 64  # of the name of an operation, in a message
_SIZE_BYTES = 8  # of the number of bytes of its tensor, after the name


class NotMet(RuntimeError):
    """Ranks have not come to one operation.

    Attributes:
        peer: the rank of the missing message; None: ranks have come to different operations.
        is_late: whether the time is over; else the connection to the peer is closed.
        missing: the missing ranks of the group, as far as this rank knows.
        found: the names of other operations, or the sizes of other tensors, by rank of the group.
    """

    def __init__(
        self,
        message: str,
        *,
        peer: int | None = None,
        is_late: bool = False,
        missing: Sequence[int] = (),
        found: Mapping[int, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.peer, self.is_late, self.missing, self.found = peer, is_late, missing, found or {}


class Attendance:
    """The number of the last barrier of each rank, in a key-value store.

    [Note: barriers in log2 n messages] In step k of a dissemination barrier a rank sends to the rank 2^k above it and
    waits for the rank 2^k below it. After a wait in vain a rank does not know whether its peer is late or waits too.
    Over Gloo the timeout of a wait leaves no connection for a question. So each rank writes its arrival into the store,
    without waiting for the answer. Before a rank gives up, it reads the missing ranks, and closes its connections. So
    ranks in wait for it give up as well and name the same ranks. If the store does not answer, the error names the peer
    of the failed wait.

    Args:
        store: the store of the ranks; no other code uses its keys.
        rank: the rank of this process in the group.
    """

    def __init__(self, store: BoundedStore, rank: int) -> None:
        self._store, self._rank = store, rank
        self._number = 0

    def come(self) -> None:
        """Write the arrival of this rank at the next barrier."""
        self._number += 1
        self._store.tell(str(self._rank), str(self._number))

    def absent(self, ranks: Collection[int]) -> list[int]:
        """Return the ranks among these still missing from the barrier of this rank.

        Raises:
            ConnectionError: the store does not answer.
        """
        return [j for j in ranks if int(self._store.get(str(j), what="reading who has come") or 0) < self._number]


def meet(
    group: dist.ProcessGroup,
    what: str,
    *,
    deadline: Deadline,
    tag: int,
    num_bytes: int = 0,
    wait: Wait = dist.Work.wait,
    ranks: Sequence[int] = (),
) -> None:
    """Return when all ranks of a group over Gloo or MPI have come to `what`.

    Every rank tells all others, so each rank knows the missing ranks by itself. Gloo cannot be asked whether a message
    has arrived, but its buffer can: it is not zero any more. One deadline holds for all waits. Over Gloo the first late
    wait closes this rank's connections, so peers cannot be asked afterwards.

    [Note: sizes meet first] Gloo ends the process, in a thread of its own, if ranks come to one collective with tensors
    of different sizes. So ranks compare the sizes here, where a difference is an error.

    Args:
        group: this rank's; all its ranks call this in the same order.
        what: the next operation; equal on all ranks up to numbers in it.
        deadline: for all to come.
        tag: the tag of the messages; no other message has it.
        num_bytes: the size of the tensor of this rank in the operation; equal on all ranks.
        wait: waits for one of them.
        ranks: the participating ranks of the group; none: all.

    Raises:
        NotMet: ranks have not come, or have come to another operation, or with tensors of other sizes.
    """
    peers = [j for j in ranks or range(group.size()) if j != group.rank()]
    ours, size = what.encode()[:_NAME_BYTES], num_bytes.to_bytes(_SIZE_BYTES, "little")
    mine = torch.frombuffer(bytearray(ours.ljust(_NAME_BYTES, b"\0") + size + b"\1"), dtype=torch.uint8)
    rows = {j: torch.zeros_like(mine) for j in peers}
    works: list[tuple[int, dist.Work]] = []
    peer = -1
    try:
        for peer in peers:
            works.append((peer, group.recv([rows[peer]], peer, tag)))
        for peer in peers:
            works.append((peer, group.send([mine], peer, tag)))
        for peer, work in works:  # noqa: B007 (names the peer whose wait failed)
            wait(work, deadline.left_for_gloo)
    except RuntimeError as error:
        # Where a connection has closed before the time is over, other ranks may still be on their way.
        is_late = _is_late(deadline)
        missing = [j for j in (peers if is_late else [peer]) if not rows[j][-1]]
        raise NotMet(str(error), peer=peer, is_late=is_late, missing=missing) from error
    found = {}
    for j, row in rows.items():
        text, own = bytes(row.numpy()), _operation(ours)
        name, theirs = text[:_NAME_BYTES].rstrip(b"\0"), text[_NAME_BYTES:-1]
        if _operation(name) != own:
            found[j] = repr(name.decode(errors="ignore"))
        elif theirs != size:
            found[j] = f"the same with {int.from_bytes(theirs, 'little')} bytes where this rank has {num_bytes}"
    if found:
        raise NotMet("ranks are in another operation", found=found)


def meet_in_turns(
    group: dist.ProcessGroup,
    what: str,
    *,
    deadline: Deadline,
    tag: int,
    num_bytes: int = 0,
    wait: Wait,
    attendance: Attendance | None,
    peers: Sequence[int],
) -> None:
    """As `meet`, with log2 n messages per rank: see [Note: barriers in log2 n messages].

    If ranks are at different operations, all of them learn it, and then tell their operation to all others.

    Args:
        group, what, deadline, num_bytes, wait: see `meet`.
        tag: the tag of the messages; `tag + 1` is free too.
        attendance: the barriers' record of this group; None: the error knows the peer of the failed wait only.
        peers: the connected ranks.

    Raises:
        NotMet: see `meet`.
    """
    if attendance is not None:
        attendance.come()
    rank, n = group.rank(), group.size()
    code = zlib.crc32(_operation(what.encode()[:_NAME_BYTES]) + num_bytes.to_bytes(_SIZE_BYTES, "little"))
    least_and_most = torch.tensor([code, -code], device="cpu")  # the least of each, over all ranks heard of
    distances = [1 << k for k in range((n - 1).bit_length())]
    sends: list[tuple[int, dist.Work]] = []
    peer = -1
    try:
        receives = []
        for distance in distances:
            peer = (rank - distance) % n
            inbox = torch.empty_like(least_and_most)
            receives.append((peer, inbox, group.recv([inbox], peer, tag)))
        for distance, (peer, inbox, receive) in zip(distances, receives, strict=True):  # noqa: B007
            above = (rank + distance) % n
            sends.append((above, group.send([least_and_most], above, tag)))
            wait(receive, deadline.left_for_gloo)
            least_and_most = torch.minimum(least_and_most, inbox)
        for peer, send in sends:  # noqa: B007 (names the peer whose wait failed)
            wait(send, deadline.left_for_gloo)
    except RuntimeError as error:
        missing: list[int] = []
        with contextlib.suppress(ConnectionError):
            missing = [] if attendance is None else attendance.absent([j for j in range(n) if j != rank])
        raise NotMet(str(error), peer=peer, is_late=_is_late(deadline), missing=missing) from error
    if least_and_most.sum():
        meet(group, what, deadline=deadline, tag=tag + 1, num_bytes=num_bytes, wait=wait, ranks=peers)
        raise NotMet("ranks are in other operations")


def _is_late(deadline: Deadline) -> bool:
    """Whether a wait has failed since the time is over; others may give up a little before."""
    return deadline.left < (1 - LATE) * deadline.seconds


def _operation(name: bytes) -> bytes:
    """The name of an operation without numbers: ranks may have begun to count rounds elsewhere."""
    return re.sub(rb"\d+", b"", name)
