"""NamedBarrier: all ranks come to one operation, or each that came learns who did not, within one timeout."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import TypeAlias

import torch
import torch.distributed as dist

from .exchange import LATE

Wait: TypeAlias = Callable[[dist.Work, timedelta], object]
_NAME_BYTES = 64  # of the name of the operation


class NotAllCame(RuntimeError):
    """Not all ranks have come.

    Attributes:
        missing: ranks of the group that have not.
        closed: one of them whose connection is closed; None: the time was over.
    """

    def __init__(self, error: RuntimeError, missing: list[int], closed: int | None) -> None:
        super().__init__(str(error))
        self.missing, self.closed = missing, closed


class AnotherOperation(RuntimeError):
    """A rank has come to another operation than this one.

    Attributes:
        found: what each rank of the group that came to another one calls it.
    """

    def __init__(self, found: dict[int, str]) -> None:
        super().__init__(f"expected the same operation on all ranks, got {found} on others")
        self.found = found


def meet(group: dist.ProcessGroup, what: str, *, timeout: timedelta, tag: int, wait: Wait = dist.Work.wait) -> None:
    """Return when every rank of a Gloo group has come to `what`.

    Every rank says it to all others, so that each knows by itself who has not come. Gloo cannot be asked whether a
    message has arrived, but the message can: its place is not zero any more. One deadline holds for all waits; the
    first one that passes it closes this rank's connections, so nothing can be asked of peers afterwards.

    Args:
        group: this rank's; all its ranks call this in the same order.
        what: they are about to do; equal on all ranks up to numbers in it.
        timeout: for all to come.
        tag: of the messages; nothing else has it.
        wait: waits for one of them.

    Raises:
        NotAllCame: with the ranks that did not.
        AnotherOperation: somebody has come to another operation.
    """
    seconds = timeout.total_seconds()
    deadline = time.monotonic() + seconds
    rank, n = group.rank(), group.size()
    peers = [j for j in range(n) if j != rank]
    mine = _message(what)
    names = torch.zeros(n, _NAME_BYTES, dtype=torch.uint8, device="cpu")
    rows = list(names.unbind())
    works: list[tuple[int, dist.Work]] = []
    peer = -1
    try:
        for peer in peers:
            works.append((peer, group.recv([rows[peer]], peer, tag)))
        for peer in peers:
            works.append((peer, group.send([mine], peer, tag)))
        for peer, work in works:  # noqa: B007 (says whose wait failed)
            wait(work, timedelta(seconds=max(deadline - time.monotonic(), 1e-3)))
    except RuntimeError as error:
        missing = [j for j in peers if not names[j, -1]]
        is_late = deadline - time.monotonic() < (1 - LATE) * seconds  # others may give up a little before
        raise NotAllCame(error, missing, None if is_late else peer) from error
    if len({*map(bytes, (row.numpy() for row in rows[:rank] + rows[rank + 1 :])), bytes(mine.numpy())}) > 1:
        _compare(what, ((j, bytes(rows[j].numpy())) for j in peers))


def _message(what: str) -> torch.Tensor:
    """The name of an operation; the last byte says: it is here."""
    name = what.encode()[: _NAME_BYTES - 1].ljust(_NAME_BYTES, b"\0")
    return torch.frombuffer(bytearray(name[:-1] + b"\1"), dtype=torch.uint8)


def _compare(what: str, names: Iterable[tuple[int, bytes]]) -> None:
    """Raise AnotherOperation where names differ in more than numbers: rounds may be counted from elsewhere."""
    ours = re.sub(r"\d+", "", what.encode()[: _NAME_BYTES - 1].decode(errors="ignore"))
    texts = {j: name[:-1].rstrip(b"\0").decode(errors="ignore") for j, name in names}
    found = {j: text for j, text in texts.items() if re.sub(r"\d+", "", text) != ours}
    if found:
        raise AnotherOperation(found)
