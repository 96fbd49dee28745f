"""WatchedTransport: collectives that somebody watches, so that a death elsewhere ends them at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from ..transport.process_group import ProcessGroupTransport

JoinIn: TypeAlias = Callable[[Callable[[], None], str], None]
"""Runs a blocking function in another thread, and raises when it knows that waiting is in vain; see `all_reduce`."""


class WatchedTransport(ProcessGroupTransport):
    """As the transport that it is made from, over the same group; an all-reduce runs in the thread of a watcher.

    A copy is watched by nobody: its wrapper has no threads.

    Args:
        transport: whose group, device and timeout it has; each counts the bytes that it sends itself.
        join_in: given what blocks and its name.
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
