"""WatchedTransport: collectives that end at once when any rank has died."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from ..transport.process_group import ProcessGroupTransport

JoinIn: TypeAlias = Callable[[Callable[[], None], str], None]
"""Runs a blocking function, given its name, in another thread; raises once a rank has failed. See `join_in`."""


class WatchedTransport(ProcessGroupTransport):
    """A transport over the group of another one whose all-reduces run in a thread of the engine.

    That thread blocks in the collective while the training thread waits for its result or for a failure, whichever
    comes first. A copy is a plain `ProcessGroupTransport`: its wrapper has no threads.

    Args:
        transport: the transport whose group, device and timeout this one has; each counts the bytes that it sends.
        join_in: runs the collective, as `BilateralEngine.join_in`.
    """

    def __init__(self, transport: ProcessGroupTransport, join_in: JoinIn) -> None:
        super().__init__(
            transport.group,
            device=transport.device,
            timeout=transport.timeout,
            names=transport.names,
            notes=transport.notes,
        )
        self._join_in = join_in

    def all_reduce(self, x: Tensor, *, what: str) -> None:
        """See `Transport`."""
        stream = torch.cuda.current_stream(x.device) if x.is_cuda else None

        def run() -> None:
            with torch.cuda.stream(stream):  # a stream belongs to a thread; None changes nothing
                super(WatchedTransport, self).all_reduce(x, what=what)

        self._join_in(run, what)
