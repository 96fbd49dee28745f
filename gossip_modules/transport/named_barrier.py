"""A barrier for ranks that come to one operation: where some do not, it names them within one timeout."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TypeAlias

import torch
import torch.distributed as dist

from .deadline import Deadline
from .exchange import LATE

Wait: TypeAlias = Callable[[dist.Work, timedelta], object]
_NAME_BYTES = 64  # of the name of the operation


class NotAllCame(RuntimeError):
    """Some ranks have not come.

    Attributes:
        missing: these ranks of the group.
        closed: one of them whose connection is closed; None: the time was over.
    """

    def __init__(self, error: RuntimeError, missing: list[int], closed: int | None) -> None:
        super().__init__(str(error))
        self.missing, self.closed = missing, closed


class AnotherOperation(RuntimeError):
    """A rank has come to another operation than this one.

    Attributes:
        found: the name of the other operation, by rank of the group.
    """

    def __init__(self, found: dict[int, str]) -> None:
        super().__init__(f"expected the same operation on all ranks, got {found} on others")
        self.found = found


def meet(
    group: dist.ProcessGroup,
    what: str,
    *,
    timeout: timedelta,
    tag: int,
    wait: Wait = dist.Work.wait,
    ranks: Sequence[int] = (),
) -> None:
    """Return when all ranks of a group over Gloo or MPI have come to `what`.

    Every rank tells all others, so that each knows by itself which one has not come. Gloo cannot be asked whether a
    message has arrived, but its buffer can: it is not zero any more. One deadline holds for all waits; the first wait
    that passes it closes this rank's connections over Gloo, so peers cannot be asked afterwards.

    Args:
        group: this rank's; all its ranks call this in the same order.
        what: the operation that follows; equal on all ranks up to numbers in it.
        timeout: for all to come.
        tag: of the messages; no other message has it.
        wait: waits for one of them.
        ranks: the ranks of the group that take part; none: all.

    Raises:
        NotAllCame: with the ranks that have not.
        AnotherOperation: a rank has come to another operation.
    """
    deadline = Deadline(timeout)
    peers = [j for j in ranks or range(group.size()) if j != group.rank()]
    name = what.encode()[: _NAME_BYTES - 1].ljust(_NAME_BYTES, b"\0")
    mine = torch.frombuffer(bytearray(name[:-1] + b"\1"), dtype=torch.uint8)
    rows = {j: torch.zeros(_NAME_BYTES, dtype=torch.uint8, device="cpu") for j in peers}
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
        missing = [j for j in peers if not rows[j][-1]]
        is_late = deadline.left < (1 - LATE) * deadline.seconds  # others may give up a little before
        raise NotAllCame(error, missing, None if is_late else peer) from error
    names = {j: bytes(row.numpy())[:-1].rstrip(b"\0").decode(errors="ignore") for j, row in rows.items()}
    ours = name.rstrip(b"\0").decode(errors="ignore")
    found = {j: text for j, text in names.items() if text != ours and _without_numbers(text) != _without_numbers(ours)}
    if found:
        raise AnotherOperation(found)


def _without_numbers(name: str) -> str:
    """The name of an operation without numbers: ranks may have begun to count rounds elsewhere."""
    return re.sub(r"\d+", "", name)
