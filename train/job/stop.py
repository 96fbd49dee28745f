"""How the request of one rank to stop reaches all: in lockstep by an all-reduce, otherwise through the job's store."""

from __future__ import annotations

import time
from collections import deque
from typing import NoReturn

import torch
import torch.distributed as dist

import gossip_modules as gm
from train.job.preemption import StopRequest
from train.job.world import connect_control


class LockstepStop:
    """should_stop() turns true at the same call on every rank, once any rank was asked to stop.

    Each call starts one all-reduce of one byte and reads the one started `lag` calls before, which has arrived behind
    a whole iteration of training: no iteration waits for the network, and all ranks read the same answer at the same
    call.

    Args:
        request: this rank's request to stop.
        group: a Gloo process group of all ranks.
        lag: calls that an answer may take, >= 1; what overlapped gossip lets ranks drift apart, it must not take away.

    Raises:
        TimeoutError, ConnectionError: (should_stop, drain) a rank is late or gone; names it.
    """

    def __init__(self, request: StopRequest, group: dist.ProcessGroup, *, lag: int = 1) -> None:
        self._request = request
        self._transport = None if group is None else connect_control(group)
        self._group = group
        self._lag = lag
        self._pending: deque[tuple[torch.Tensor, dist.Work, float]] = deque()

    def should_stop(self) -> bool:
        """Collective, once per iteration: whether to write a checkpoint and leave now."""
        flag = torch.tensor([self._request.is_made], dtype=torch.uint8, device="cpu")
        start = time.monotonic()
        try:
            work = dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self._group, async_op=True)
        except RuntimeError as error:
            self._fail(error, start)
        assert work is not None, "an asynchronous all-reduce returns its work"
        self._pending.append((flag, work, start))
        return len(self._pending) > self._lag and self._next_answer()

    def _next_answer(self) -> bool:
        flag, work, start = self._pending.popleft()
        try:
            work.wait()  # ends by the timeout of the group
        except RuntimeError as error:
            self._fail(error, start)
        return bool(flag.item())

    def _fail(self, error: RuntimeError, start: float) -> NoReturn:
        assert self._transport is not None, "there is no all-reduce without a group"
        what = f"asking whether to stop among ranks {list(self._transport.names)}"
        self._transport.fail(error, what, time.monotonic() - start)

    def drain(self) -> None:
        """Collective: wait for the answers still on their way, so that the group can be used or destroyed."""
        while self._pending:
            self._next_answer()


class StoreStop:
    """should_stop() turns true for every rank that asks later than one that was told to stop; nobody waits.

    Args:
        request: this rank's request to stop.
        store: the store of this run; all its ranks have the same.

    Raises:
        ConnectionError: (should_stop) the store does not answer in its own timeout.
    """

    def __init__(self, request: StopRequest, store: dist.Store) -> None:
        self._request = request
        self._requests = gm.Progress(store, name="requests to stop")

    def should_stop(self) -> bool:
        """Whether to stop training now; costs one request to the store."""
        return self._requests.add(int(self._request.is_made)) > 0
