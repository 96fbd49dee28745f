"""What a rank knows of its place in the cluster, and the counters that it reads there."""

from __future__ import annotations

import ctypes
import gc
import resource
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.cluster.network.links import DATA
from gossip_modules import GossipAdamW

OPTIMIZERS: Mapping[str, Callable[[list[nn.Parameter], int], torch.optim.Optimizer]] = {
    "SGD": lambda parameters, _: torch.optim.SGD(parameters, lr=1e-3, momentum=0.9, fused=True),
    "AdamW": lambda parameters, _: torch.optim.AdamW(parameters, lr=1e-3, betas=(0.9, 0.95)),
    "GossipAdamW": lambda parameters, n: GossipAdamW(parameters, lr=1e-3, betas=(0.9, 0.95), num_ranks=n),
}
"""The optimizer of all methods, or of those with mean gradients and of the others, from parameters and ranks."""


@dataclass(frozen=True)
class Place:
    """A rank among the others.

    Args:
        rank: this one.
        addresses: of all ranks on the shaped network, in their order.
        control_addresses: of all ranks on the network that is not shaped.
        store: that all share; over the network that is not shaped.
        number: of the trial, so that no port is used twice.
        timeout: for every wait.
        optimizer: of the method, a name of OPTIMIZERS.
    """

    rank: int
    addresses: Sequence[str]
    control_addresses: Sequence[str]
    store: dist.Store
    number: int
    timeout: timedelta
    optimizer: str = "SGD"

    @property
    def world_size(self) -> int:
        """How many ranks there are."""
        return len(self.addresses)

    def make_optimizer(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        """The optimizer of a rank's parameters."""
        return OPTIMIZERS[self.optimizer](parameters, self.world_size)

    @property
    def port(self) -> int:
        """Free for this trial on every host: a host is alone with its ports, and connections get none below 32768."""
        return 10_000 + self.number % 15_000

    def join(self) -> None:
        """Begin: a process group of all ranks; collective."""
        dist.init_process_group(
            "gloo", store=self.store, rank=self.rank, world_size=self.world_size, timeout=self.timeout
        )
        self.meet("construction")

    def leave(self, close: Callable[[], None]) -> None:
        """End, after what closes the method; collective."""
        self.meet("closing")  # asynchronous methods answer their peers until then
        close()
        self.meet("end")  # nobody's connections close while others still use them
        if dist.is_initialized():
            dist.destroy_process_group()

    def meet(self, what: str) -> None:
        """Wait for all ranks, by the store: not a byte on the shaped network.

        Args:
            what: the name of the meeting, once in a trial.

        Raises:
            torch.distributed.DistStoreError: they did not come in time; names the meeting.
        """
        if self.store.add(what, 1) == self.world_size:
            self.store.set(f"{what}, all", "")
        self.store.wait([f"{what}, all"], self.timeout)


@dataclass(frozen=True)
class Counters:
    """Of this process, at one moment.

    Args:
        cpu_seconds: of all its threads, in user and kernel mode.
        bytes_sent: by the host on its shaped link, headers included.
    """

    cpu_seconds: float
    bytes_sent: int

    @classmethod
    def now(cls) -> Counters:
        """Read them."""
        usage = resource.getrusage(resource.RUSAGE_SELF)
        return cls(usage.ru_utime + usage.ru_stime, bytes_sent(Path("/proc/self/net/dev").read_text()))


def bytes_sent(table: str) -> int:
    """By the shaped interface, of the text of /proc/net/dev; it has the interfaces of the reader's own namespace."""
    for line in table.splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == DATA:
            return int(numbers.split()[8])
    raise ValueError(
        f"got no interface {DATA} in /proc/net/dev, expected the link of a host; start ranks by `ip netns`"
    )


def forget_peak_memory() -> int:
    """The peak counts from now on; returns the bytes of resident memory, after free memory was given back."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # or memory of an earlier trial would hide what this one takes
    Path("/proc/self/clear_refs").write_text("5")
    return _memory_bytes("VmRSS")


def peak_memory_bytes() -> int:
    """The highest resident memory of this process since `forget_peak_memory()`."""
    return _memory_bytes("VmHWM")


def _memory_bytes(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return 1024 * int(line.split()[1])
    raise ValueError(f"got no {name} in /proc/self/status, expected Linux")
