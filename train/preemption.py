"""Preemption: SIGTERM and SIGUSR1 stop the run at the same iteration on every rank."""

from __future__ import annotations

import signal
from collections import deque
from types import FrameType

import torch
import torch.distributed as dist

EXIT_CODE = 75
"""EX_TEMPFAIL of sysexits.h: the run was told to stop, it has a checkpoint, start it again with --resume auto."""
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


def ignore_signals() -> None:
    """From here on no signal ends this process before it returns its exit code.

    At its very end Python puts default handlers back in place of ours, but not in place of an ignored signal, and
    torchrun sends SIGTERM to all others as soon as one process has left.
    """
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


class StopRequest:
    """should_stop() turns true at the same call on every rank, once any rank has received a signal or asked for it.

    Each call starts one all-reduce of one byte and reads the one started `lag` calls before, which has arrived behind
    a whole iteration of training: no iteration waits for the network, and all ranks read the same answer at the same
    call.

    Handlers stay in place until `close`, so that torchrun, which sends SIGTERM to the others as soon as one process has
    left, ends nobody who still writes a checkpoint.

    Args:
        group: a Gloo process group of all ranks.
        lag: calls that an answer may take, >= 1; what overlapped gossip lets ranks drift apart, it must not take away.
    """

    def __init__(self, group: dist.ProcessGroup, *, lag: int = 1) -> None:
        self._group = group
        self._lag = lag
        self._is_requested = False
        self._pending: deque[tuple[torch.Tensor, dist.Work]] = deque()
        self._previous_handlers = {number: signal.signal(number, self._on_signal) for number in SIGNALS}

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.request()

    def request(self) -> None:
        """What a signal does: ask all ranks to stop."""
        self._is_requested = True

    def should_stop(self) -> bool:
        """Collective, once per iteration: whether to write a checkpoint and leave now."""
        flag = torch.tensor([self._is_requested], dtype=torch.uint8)
        work = dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self._group, async_op=True)
        assert work is not None, "an asynchronous all-reduce returns its work"
        self._pending.append((flag, work))
        return len(self._pending) > self._lag and self._next_answer()

    def _next_answer(self) -> bool:
        flag, work = self._pending.popleft()
        work.wait()
        return bool(flag.item())

    def close(self) -> None:
        """Put the previous handlers back; idempotent."""
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)
        self._previous_handlers = {}

    def drain(self) -> None:
        """Collective: wait for the answers still on their way, so that the group can be used or destroyed."""
        while self._pending:
            self._next_answer()
