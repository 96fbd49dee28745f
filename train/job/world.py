"""World: this process among the others: its rank, its device, and what all ranks agree on."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F

from gossip_modules import connect, job_store
from gossip_modules.extend import ProcessGroupTransport
from gossip_modules.mpi import init_mpi_process_group, mpi_store
from train.job.attempt import attempt_store
from train.job.errors import UsageError
from train.job.rank_environment import RankEnvironment, rank_environment, rendezvous_address


@dataclass(frozen=True)
class World:
    """What the launcher said about this process, and a group and a store for small agreements on the CPU."""

    rank: int
    size: int
    local_rank: int
    device: torch.device
    backend: str
    control: dist.ProcessGroup
    store: dist.Store
    """Keys of this run, the same on every rank."""
    local_size: int = 1
    """Ranks on this machine."""

    def gather(self, value: Any) -> list[Any]:
        """Collective: the value of every rank, in the order of ranks.

        It travels as JSON, since nothing from the network is unpickled: a tuple arrives as a list.
        """
        return gather_json(self._transport, value)

    def barrier(self) -> None:
        """Collective: return when every rank is here.

        Raises:
            TimeoutError, ConnectionError: a rank is late or gone; names it. So do all that are collective.
        """
        self._transport.barrier(what="waiting for all ranks")

    @functools.cached_property
    def _transport(self) -> ProcessGroupTransport:
        return connect_control(self.control)

    def __post_init__(self) -> None:
        if self.control is not None:  # in some tests there is no group
            _ = self._transport  # from now on it knows what fails

    def on_every_rank(self, function: Callable[[], Any]) -> list[Any]:
        """Collective: see `agree`."""
        return agree(self.gather, function)


class Gathering(Protocol):
    """What gathers tensors of all ranks."""

    world_size: int

    def all_gather(self, out: torch.Tensor, x: torch.Tensor, *, what: str) -> None: ...


def gather_json(transport: Gathering, value: Any) -> list[Any]:
    """Collective: the value of every rank, in the order of ranks, see `World.gather`."""
    what = "gathering values of all ranks"
    text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    sizes = torch.zeros(transport.world_size, dtype=torch.int64, device="cpu")
    transport.all_gather(sizes, torch.tensor([len(text)], device="cpu"), what=what)
    longest = int(sizes.max())
    texts = torch.zeros(transport.world_size * longest, dtype=torch.uint8, device="cpu")
    padded = F.pad(text, (0, longest - len(text)))
    transport.all_gather(texts, padded, what=what)
    rows = zip(texts.view(transport.world_size, longest), sizes.tolist(), strict=True)
    return [json.loads(text[:size].numpy().tobytes()) for text, size in rows]


def connect_control(group: dist.ProcessGroup) -> ProcessGroupTransport:
    """A transport over a group of the scripts' own, with its timeout: for errors that name who is late or gone."""
    options = getattr(group._get_backend(torch.device("cpu")), "options", None)
    timeout = getattr(group, "_timeout", None) if options is None else options._timeout
    return connect(group) if timeout is None else connect(group, timeout=timeout)


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
        UsageError: naming the ranks and what went wrong there, that is what a user or a file system did.
        ValueError: the same, where anything else went wrong.
    """
    result, problem, cause = None, "", None
    try:
        result = function()
    except Exception as error:  # noqa: BLE001 - raised below, on every rank
        cause = error
        problem = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
    is_usage = isinstance(cause, ValueError | OSError | ImportError | None)
    answers = gather((result, problem, is_usage))
    problems = [f"rank {rank}: {problem}" for rank, (_, problem, _) in enumerate(answers) if problem]
    if problems:
        kind = UsageError if all(is_usage for *_, is_usage in answers) else ValueError
        raise kind("; ".join(problems)) from cause
    return [result for result, *_ in answers]


def start_world(backend: str, timeout: timedelta) -> World:
    """Join the processes that torchrun, mpirun or srun has started with this one; without them, be a world of one.

    Args:
        backend: gloo, nccl, mpi; auto: nccl where every rank has a GPU of its own, else gloo.
        timeout: the longest wait for another rank.

    Raises:
        ImportError: backend mpi without mpi4py or an MPI library.
        ValueError: NCCL asked for where it cannot work, or a launcher that does not fit the backend or itself.
    """
    place = rank_environment(os.environ)
    num_gpus = torch.cuda.device_count()
    if backend == "auto":
        backend = "nccl" if num_gpus >= place.local_size else "gloo"
    if backend == "nccl" and num_gpus < place.local_size:
        raise ValueError(
            f"got backend=nccl with {num_gpus} GPUs for {place.local_size} processes on this machine, expected one GPU "
            "for each; use --backend gloo"
        )
    device = torch.device("cuda", place.local_rank % num_gpus) if num_gpus else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    _join(place, backend, timeout)
    control = dist.new_group(backend=dist.get_backend() if backend == "mpi" else "gloo", timeout=timeout)
    assert isinstance(control, dist.ProcessGroup), "every rank is a member of the control group"
    rank, size, store = dist.get_rank(), dist.get_world_size(), dist.PrefixStore("train", job_store())
    return World(rank, size, place.local_rank, device, backend, control, store, place.local_size)


def worker_world(timeout: timedelta) -> World:
    """A world of one for a worker that comes and goes: those beside it belong to another world, if to any.

    Args:
        timeout: the longest wait, in what needs no other.

    Raises:
        ValueError: torchrun or mpirun has started several processes, all of which would end with the first that dies.
    """
    place = rank_environment(os.environ)
    if place.launcher in ("torchrun", "mpirun", "manual") and place.size > 1:
        raise ValueError(
            f"got --elastic in one of {place.size} processes of {place.launcher}, expected a launcher for each, as all "
            "processes of one end with the first that dies; start torchrun --standalone --nproc-per-node 1, or plain "
            "python, once for each worker"
        )
    num_gpus = torch.cuda.device_count()
    device = torch.device("cuda", place.local_rank % num_gpus) if num_gpus else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    control = dist.group.WORLD
    assert control is not None
    return World(0, 1, place.local_rank, device, "gloo", control, dist.PrefixStore("train", job_store()))


def _join(place: RankEnvironment, backend: str, timeout: timedelta) -> None:
    """Initialise torch.distributed as the launcher wants it."""
    if backend == "mpi":
        if place.launcher in ("torchrun", "manual"):
            raise ValueError(
                f"got backend=mpi in a process that has RANK={place.rank} from elsewhere, expected MPI's launcher; "
                f"mpirun -np {place.size} python -m train.gossip_sgd --backend mpi"
            )
        init_mpi_process_group(timeout=timeout, host=os.environ.get("MASTER_ADDR"))
        if place.launcher != "none" and (place.rank, place.size) != (dist.get_rank(), dist.get_world_size()):
            raise ValueError(
                f"got rank {place.rank} of {place.size} from {place.launcher}, which is rank {dist.get_rank()} of "
                f"{dist.get_world_size()} to mpi4py, expected the launcher of the MPI library that mpi4py was built for"
            )
    elif place.launcher == "torchrun":
        store, rank, size = next(dist.rendezvous("env://", timeout=timeout))
        store.set_timeout(timeout)
        store = attempt_store(store, rank, size, timeout=timeout)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
    elif place.launcher == "manual":
        dist.init_process_group(backend, timeout=timeout)
    else:
        store = _make_store(place, timeout)
        dist.init_process_group(backend, store=store, rank=place.rank, world_size=place.size, timeout=timeout)


def _make_store(place: RankEnvironment, timeout: timedelta) -> dist.Store:
    """The key-value store of ranks for whom no launcher has made one."""
    if place.size == 1:
        return dist.HashStore()
    address = rendezvous_address(os.environ)
    if address is None:
        return mpi_store(timeout=timeout)
    return dist.TCPStore(*address, place.size, is_master=place.rank == 0, timeout=timeout)
