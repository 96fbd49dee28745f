"""What several tests of this folder share."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn

from gossip_modules import (
    BilatGossipDataParallel,
)
from gossip_modules.ad_psgd.engine import BilateralEngine
from tests.harness import progress

PATIENCE = 10.0


X = torch.ones(2, 3)


def wrap(module: nn.Module, group: dist.ProcessGroup, **options: Any) -> BilatGossipDataParallel:
    """The wrapper on a group of the tests; every rank keeps its own start."""
    return BilatGossipDataParallel(module, process_group=group, **{"init_sync": False, **options})


def engine_of(wrapper: BilatGossipDataParallel) -> BilateralEngine:
    """Its engine."""
    return cast(BilateralEngine, progress.engine_of(wrapper))


def is_active(wrapper: BilatGossipDataParallel) -> bool:
    """Whether this rank asks."""
    return engine_of(wrapper).is_active


class Meeting:
    """All ranks go on until the last of those with a task has done it."""

    def __init__(self, num_ranks: int) -> None:
        self._barrier = threading.Barrier(num_ranks)
        self._left = num_ranks
        self._lock = threading.Lock()
        self._deadline = time.monotonic() + 4 * PATIENCE
        self._computing = threading.Event()

    def wait(self) -> None:
        """For all ranks."""
        self._barrier.wait(PATIENCE)

    def run(self, step: Callable[[], object], is_done: Callable[[], bool]) -> None:
        """`step()` until `is_done()` on this rank and on all others."""
        has_told = False
        while self._left:
            assert time.monotonic() < self._deadline, "no progress"
            step()
            self._computing.wait(5e-4)  # lets go of the interpreter, as kernels do
            if not has_told and is_done():
                has_told = True
                with self._lock:
                    self._left -= 1


def one_exchange_double(wrapper: BilatGossipDataParallel, meeting: Meeting) -> None:
    """As `one_exchange`, for a model in float64."""
    if not is_active(wrapper):
        wrapper(X.double())
    meeting.wait()
    if is_active(wrapper):
        wrapper(X.double())
    wrapper.settle()


class Gate:
    """Holds a passive rank just before it sends y."""

    def __init__(self, wrapper: BilatGossipDataParallel) -> None:
        self.entered, self.opened = threading.Event(), threading.Event()
        bilateral = engine_of(wrapper)._bilateral
        self._exchange = bilateral._exchange
        bilateral._exchange = self._wait  # type: ignore[assignment]

    def _wait(self, *exchange: Any) -> None:
        self.entered.set()
        assert self.opened.wait(PATIENCE), "nobody opened the gate"
        self._exchange(*exchange)
