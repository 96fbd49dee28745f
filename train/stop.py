"""How the request of one rank to stop reaches all: in lockstep by an all-reduce, otherwise through the job's store."""

from __future__ import annotations

from collections import deque

import torch
import torch.distributed as dist

from train.preemption import StopRequest


class LockstepStop:
    """should_stop() turns true at the same call on every rank, once any rank was asked to stop.

    Each call starts one all-reduce of one byte and reads the one started `lag` calls before, which has arrived behind
    a whole iteration of training: no iteration waits for the network, and all ranks read the same answer at the same
    call.

    Args:
        request: of this rank.
        group: a Gloo process group of all ranks.
        lag: calls that an answer may take, >= 1; what overlapped gossip lets ranks drift apart, it must not take away.
    """

    def __init__(self, request: StopRequest, group: dist.ProcessGroup, *, lag: int = 1) -> None:
        self._request = request
        self._group = group
        self._lag = lag
        self._pending: deque[tuple[torch.Tensor, dist.Work]] = deque()

    def should_stop(self) -> bool:
        """Collective, once per iteration: whether to write a checkpoint and leave now."""
        flag = torch.tensor([self._request.is_made], dtype=torch.uint8)
        work = dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self._group, async_op=True)
        assert work is not None, "an asynchronous all-reduce returns its work"
        self._pending.append((flag, work))
        return len(self._pending) > self._lag and self._next_answer()

    def _next_answer(self) -> bool:
        flag, work = self._pending.popleft()
        work.wait()
        return bool(flag.item())

    def drain(self) -> None:
        """Collective: wait for the answers still on their way, so that the group can be used or destroyed."""
        while self._pending:
            self._next_answer()


class StoreStop:
    """should_stop() turns true for every rank that asks later than one that was told to stop; nobody waits.

    Args:
        request: of this rank.
        store: of this run; all its ranks have the same.
    """

    _KEY = "stop"

    def __init__(self, request: StopRequest, store: dist.Store) -> None:
        self._request = request
        self._store = store

    def should_stop(self) -> bool:
        """Whether to stop training now; costs one request to the store."""
        if self._request.is_made:
            self._store.set(self._KEY, "")
            return True
        return self._store.check([self._KEY])
