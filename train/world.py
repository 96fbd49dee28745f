"""World: this process among the others: its rank, its device, and what all ranks agree on."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist

from gossip_modules import job_store

if TYPE_CHECKING:
    from train.config import Config


@dataclass(frozen=True)
class World:
    """What torchrun said about this process, and a Gloo group and a store for small agreements on the CPU."""

    rank: int
    size: int
    local_rank: int
    device: torch.device
    backend: str
    control: dist.ProcessGroup
    store: dist.Store
    """Keys of this run, the same on every rank."""

    def gather(self, value: Any) -> list[Any]:
        """Collective: the value of every rank, in the order of ranks; plain Python objects only."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.control)
        return values

    def barrier(self) -> None:
        """Collective: return when every rank is here."""
        dist.barrier(group=self.control)

    def on_every_rank(self, function: Callable[[], Any]) -> list[Any]:
        """Collective: see `agree`."""
        return agree(self.gather, function)


class Agreement(Protocol):
    """The part of a World that needs no process group."""

    @property
    def rank(self) -> int: ...

    def gather(self, value: Any) -> list[Any]: ...

    def on_every_rank(self, function: Callable[[], Any]) -> list[Any]: ...


def agree(gather: Callable[[Any], list[Any]], function: Callable[[], Any]) -> list[Any]:
    """Collective: call `function` and gather the results; if it raises anywhere, raise everywhere.

    So no rank goes on towards a collective that a failed one will never reach.

    Raises:
        ValueError: naming the ranks and what went wrong there.
    """
    result, problem, cause = None, "", None
    try:
        result = function()
    except Exception as error:  # noqa: BLE001 - raised below, on every rank
        cause = error
        problem = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
    answers = gather((result, problem))
    problems = [f"rank {rank}: {problem}" for rank, (_, problem) in enumerate(answers) if problem]
    if problems:
        raise ValueError("; ".join(problems)) from cause
    return [result for result, _ in answers]


def start_world(config: Config) -> World:
    """Join the process group that torchrun's environment variables describe; without them, be a world of one.

    Raises:
        ValueError: NCCL asked for where it cannot work.
    """
    rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    local_rank, local_size = int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    num_gpus = torch.cuda.device_count()
    backend = config.backend if config.backend != "auto" else ("nccl" if num_gpus >= local_size else "gloo")
    if backend == "nccl" and num_gpus < local_size:
        raise ValueError(
            f"got backend=nccl with {num_gpus} GPUs for {local_size} processes on this machine, expected one GPU for "
            "each; use --backend gloo"
        )
    device = torch.device("cuda", local_rank % num_gpus) if num_gpus else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    timeout = timedelta(seconds=config.timeout_seconds)
    if "RANK" in os.environ:
        dist.init_process_group(backend, timeout=timeout)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    control = dist.new_group(backend="gloo", timeout=timeout)
    assert isinstance(control, dist.ProcessGroup), "every rank is a member of the control group"
    return World(rank, size, local_rank, device, backend, control, dist.PrefixStore("train", job_store()))
