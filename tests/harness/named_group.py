"""NamedGroup: a process group whose backend has any name."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from gossip_modules.transport.gloo import gloo_backend


class NamedGroup(dist.ProcessGroup):
    """A Gloo group for the devices of NCCL and the CPU, under another name."""

    def __init__(self, name: str, store: dist.Store, rank: int, world_size: int, timeout: timedelta) -> None:
        super().__init__(rank, world_size)  # type: ignore[call-arg]
        self.called = name
        self.gloo: Any = gloo_backend(store, rank, world_size, timeout)
        self.timeouts: list[timedelta | None] = []  # of the waits

    def name(self) -> str:
        return self.called

    getBackendName = name

    def _get_backend(self, device: torch.device) -> NamedGroup:  # type: ignore[override]
        return self

    @property
    def group_name(self) -> str:  # type: ignore[override]
        return self.registered_as

    def _set_group_name(self, name: str) -> None:
        self.registered_as = name

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Any:
        return Patient(self, self.gloo.send(tensors, peer, tag))

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Any:
        return Patient(self, self.gloo.recv(tensors, peer, tag))

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> Any:  # type: ignore[override]
        return Patient(self, self.gloo.allreduce(tensors, opts or dist.AllreduceOptions()))

    def barrier(self, opts: Any = None) -> Any:
        return self.gloo.barrier(opts or dist.BarrierOptions())


class Patient:
    """A work that notes how it is waited for."""

    def __init__(self, group: NamedGroup, work: dist.Work) -> None:
        self.group, self.work = group, work

    def wait(self, timeout: timedelta | None = None) -> bool:
        self.group.timeouts.append(timeout)
        return self.work.wait()
