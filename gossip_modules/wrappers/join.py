"""Uneven inputs: a rank that ran out of data goes on answering its peers until all have."""

from __future__ import annotations

import time
from abc import abstractmethod
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join, Joinable, JoinHook

from ..transport.connect import connect
from ..transport.exchange import fail
from ..transport.process_group import ProcessGroupTransport


class UnevenInputs(Joinable):
    """`with Join([wrapper]):` around a training loop whose ranks have different numbers of batches, as with DDP.

    Every rank tells the others at the start of each step that it is still there. A rank in the context's exit takes
    part in one round per step of the others, with parameters that no gradient moves any more.
    """

    _others: ProcessGroupTransport | None = None  # to name who fails; made in the first step inside `Join`

    @abstractmethod
    def flush(self) -> None:
        """Apply everything in flight."""

    @abstractmethod
    def _step_start(self) -> None:
        """What a training forward does about its peers at the start of a step."""

    @property
    @abstractmethod
    def _join_timeout(self) -> timedelta:
        """How long to wait for the other ranks."""

    def _check_join(self) -> None:
        """Raise ValueError where uneven inputs cannot work."""

    def _notify(self) -> None:
        """I have another batch; a no-op outside `Join`."""
        if not self._join_config.enable:
            return
        limit = self._join_timeout
        if self._others is None and dist.get_backend() == "gloo":
            self._others = connect(dist.group.WORLD, timeout=limit)
        start = time.monotonic()
        try:
            work = Join.notify_join_context(self)
            if work is not None:
                work.wait(limit)
        except RuntimeError as error:
            what = f"telling ranks 0 to {dist.get_world_size() - 1} of another batch (Join)"
            seconds = time.monotonic() - start
            if self._others is None:
                fail(error, rank=dist.get_rank(), what=what, seconds=seconds, timeout=limit)
            self._others.fail(error, what, seconds, timeout=limit)

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """See `torch.distributed.algorithms.Joinable`: shadows one round per training step of the others."""
        self._check_join()
        return _Shadow(self)

    @property
    @abstractmethod
    def join_device(self) -> torch.device:
        """See `Joinable`."""

    @property
    def join_process_group(self) -> Any:
        """See `Joinable`: the default group, since ours carries rounds, perhaps from another thread."""
        return dist.group.WORLD


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
