"""Uneven inputs: a rank that ran out of data goes on answering its peers until all have."""

from __future__ import annotations

import time
import traceback
from abc import abstractmethod
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join, Joinable, JoinHook

from ..transport.base import is_elastic
from ..transport.connect import connect
from ..transport.exchange import fail
from ..transport.process_group import ProcessGroupTransport
from .node import Node


class UnevenInputs(Joinable):
    """`with Join([wrapper]):` around a training loop whose ranks have different numbers of batches, as with DDP.

    Every rank tells the others at the start of each step that it is still there. A rank in the context's exit takes
    part in one round per step of the others, with parameters that no gradient moves any more.
    """

    _transport: ProcessGroupTransport
    _node: Node | None
    _others: ProcessGroupTransport | None = None  # to name who fails; made in the first step inside `Join`

    @abstractmethod
    def flush(self) -> None:
        """Apply everything in flight."""

    @abstractmethod
    def _step_start(self) -> None:
        """What a training forward does about its peers at the start of a step."""

    def _notify(self) -> None:
        """Tell the others that this rank has another batch; outside `Join` nothing happens.

        Raises:
            RuntimeError: a rank has run out of data, where `Join` was told to throw then.
            TimeoutError, ConnectionError: a rank is late or gone; names it.
        """
        if not self._join_config.enable:
            return
        limit = self._transport.timeout
        if self._others is None and dist.get_backend() == "gloo":
            self._others = connect(dist.group.WORLD, timeout=limit)
        start = time.monotonic()
        try:
            work = Join.notify_join_context(self)
            if work is not None:
                work.wait(limit)
        except RuntimeError as error:
            if _is_of_join(error):
                raise
            what = f"telling ranks 0 to {dist.get_world_size() - 1} of another batch (Join)"
            seconds = time.monotonic() - start
            if self._others is None:
                fail(error, rank=dist.get_rank(), what=what, seconds=seconds, timeout=limit)
            self._others.fail(error, what, seconds, timeout=limit)

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """See `torch.distributed.algorithms.Joinable`: shadows one round per training step of the others."""
        if self._node is not None:
            raise ValueError(
                f"got nprocs_per_node={self._node.num_shards} inside Join, expected 1; "
                "give the processes of a node equally many batches"
            )
        if is_elastic(self._transport):
            raise ValueError(
                "got a wrapper with a membership inside Join, expected none: a worker that runs out of data leaves by "
                "close(), and the others go on"
            )
        if self._transport.world_size != dist.get_world_size():
            raise ValueError(
                f"got Join over a process group of {self._transport.world_size} of {dist.get_world_size()} ranks, "
                "expected all; Join counts the ranks of the default group"
            )
        return _Shadow(self)

    @property
    def join_device(self) -> torch.device:
        """See `Joinable`."""
        return self._transport.device

    @property
    def join_process_group(self) -> Any:
        """See `Joinable`: the default group, since ours carries rounds, perhaps from another thread."""
        return dist.group.WORLD


def _is_of_join(error: RuntimeError) -> bool:
    """Whether `Join` raised it, and none of its collectives."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return frame.f_code is Join.notify_join_context.__code__


class _Shadow(JoinHook):
    """A rank that ran out of data."""

    def __init__(self, wrapper: UnevenInputs) -> None:
        self.wrapper = wrapper

    def main_hook(self) -> None:
        """One step of the others."""
        self.wrapper._step_start()

    def post_hook(self, is_last_joiner: bool) -> None:
        """All are done."""
        self.wrapper.flush()
