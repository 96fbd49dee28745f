"""Uneven inputs: a rank that ran out of data goes on answering its peers until all have.

Inside `Join` every rank tells the others at the start of each step that it is still there. A rank in the context's exit
takes part in one round per step of the others, with parameters that no gradient moves any more.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.algorithms.join import Join, Joinable, JoinHook

from ..transport.connect import connect
from ..transport.exchange import fail
from ..transport.process_group import ProcessGroupTransport


def notify_others(
    wrapper: Joinable, others: ProcessGroupTransport | None, limit: timedelta
) -> ProcessGroupTransport | None:
    """Tell the others that this rank has another batch.

    Args:
        wrapper: a wrapper inside `Join`.
        others: the result of the last call; None in the first one.
        limit: of every wait.

    Returns:
        A transport over all ranks, which finds out who fails; None without Gloo.

    Raises:
        RuntimeError: a rank has run out of data, where `Join` was told to throw then.
        TimeoutError, ConnectionError: a rank is late or gone; names it.
    """
    if others is None and dist.get_backend() == "gloo":
        others = connect(dist.group.WORLD, timeout=limit)
    start = time.monotonic()
    try:
        work = Join.notify_join_context(wrapper)
        if work is not None:
            work.wait(limit)
    except RuntimeError as error:
        *_, (frame, _) = traceback.walk_tb(error.__traceback__)
        if frame.f_code is Join.notify_join_context.__code__:  # which throws as it was told to
            raise
        what = f"telling ranks 0 to {dist.get_world_size() - 1} of another batch (Join)"
        seconds = time.monotonic() - start
        if others is None:
            fail(error, rank=dist.get_rank(), what=what, seconds=seconds, timeout=limit)
        others.fail(error, what, seconds, timeout=limit)
    return others


class Shadow(JoinHook):
    """A rank that ran out of data.

    Args:
        step: takes part in one step of the others.
        flush: applies everything in flight, when all ranks have run out of data.
    """

    def __init__(self, step: Callable[[], None], flush: Callable[[], None]) -> None:
        self._step, self._flush = step, flush

    def main_hook(self) -> None:
        """See `JoinHook`."""
        self._step()

    def post_hook(self, is_last_joiner: bool) -> None:
        """See `JoinHook`."""
        self._flush()
