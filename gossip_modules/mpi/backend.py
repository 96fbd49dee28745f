"""MPI for PyTorch wheels without MPI support: the backend, and starting torch.distributed under mpirun."""

from __future__ import annotations

import socket
import zlib
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ..transport.barrier import NotMet, meet
from ..transport.deadline import Deadline
from ..transport.process_group import DEFAULT_TIMEOUT
from .group import BACKEND, MpiProcessGroup
from .library import load_mpi
from .work import MpiWork

_ADDRESS_BYTES = 1024


def register_mpi_backend() -> None:
    """Register the backend "mpi4py" with torch.distributed, also as "mpi" if torch was built without MPI; idempotent.

    Older versions of torch refuse the name "mpi" without looking for a registered backend, and no version gives a
    default group of that name a key-value store. So start with `init_mpi_process_group()`; after that
    `dist.new_group(backend="mpi4py")` makes more groups.
    """
    names = [BACKEND] if dist.is_mpi_available() else [BACKEND, "mpi"]
    for name in names:
        dist.Backend.register_backend(name, _make_group, extended_api=True, devices=["cpu", "cuda"])


def init_mpi_process_group(*, timeout: timedelta = DEFAULT_TIMEOUT, host: str | None = None) -> None:
    """`dist.init_process_group` over MPI; call it on all ranks. mpirun gives the ranks, so no address is needed.

    Example:
        # mpirun -np 4 python train.py
        init_mpi_process_group()
        model = GossipDataParallel(model)

    Args:
        timeout: the limit of every wait.
        host: the name or address of rank 0 for other ranks, for its key-value store; None: its host name.

    Raises:
        ImportError: mpi4py or an MPI library is missing.
        RuntimeError: MPI cannot be called from several threads, or rank 0 did not answer in time.
    """
    register_mpi_backend()
    world = load_mpi().COMM_WORLD
    store = mpi_store(timeout=timeout, host=host)
    dist.init_process_group(BACKEND, store=store, rank=world.rank, world_size=world.size, timeout=timeout)


def mpi_store(*, timeout: timedelta = DEFAULT_TIMEOUT, host: str | None = None) -> dist.TCPStore:
    """Make a key-value store on rank 0; MPI sends its address to the other ranks. Collective over all ranks of MPI.

    Args:
        timeout: the limit of waiting for the address, and of requests to the store.
        host: the name or address of rank 0 for other ranks; None: its host name.

    Raises:
        RuntimeError: rank 0 did not answer in time.
    """
    mpi = load_mpi()
    world = mpi.COMM_WORLD
    server = None
    here = socket.gethostname()
    address = bytearray(_ADDRESS_BYTES)
    if world.rank == 0:
        server = dist.TCPStore("localhost", 0, world.size, is_master=True, timeout=timeout, wait_for_workers=False)
        text = f"{server.port} {here} {host or here}".encode()
        address[: len(text)] = text
    what = f"rank {world.rank}: broadcast of the store's address from rank 0"
    MpiWork(world.Ibcast([address, mpi.BYTE], root=0), what=what, timeout=timeout, buffers=[address]).wait()
    if server is not None:
        return server
    port, its_host, its_address = address.rstrip(b"\0").decode().split()
    # A machine may be unable to resolve its own host name.
    return dist.TCPStore("localhost" if its_host == here else its_address, int(port), world.size, timeout=timeout)


def _make_group(opts: Any, _: object) -> MpiProcessGroup:
    """Make a new group; torch.distributed calls this on its members, `opts` are its DistributedBackendOptions."""
    mpi = load_mpi()
    world = mpi.COMM_WORLD
    ranks = list(opts.global_ranks_in_group)
    if not ranks:  # the default group
        if opts.group_size not in (-1, world.size) or opts.group_rank not in (-1, world.rank):
            raise ValueError(
                f"got rank {opts.group_rank} of {opts.group_size}, which is rank {world.rank} of {world.size} to MPI, "
                "expected the ranks of MPI; start with the mpirun of the MPI library that mpi4py was built for"
            )
        ranks = list(range(world.size))
    # Making a communicator has no timeout, so wait for all ranks first. The tag keeps groups apart that are made at
    # the same time.
    tag = zlib.crc32(str(opts.group_id).encode()) % int(world.Get_attr(mpi.TAG_UB))
    everyone = MpiProcessGroup(world, names=range(world.size), timeout=opts.timeout)
    try:
        meet(everyone, "making a process group", deadline=Deadline(opts.timeout), tag=tag, ranks=ranks)
    except NotMet as error:
        raise RuntimeError(
            f"rank {world.rank}: ranks {error.missing} have not come within {opts.timeout.total_seconds():g} s"
        ) from error
    comm = world.Create_group(world.group.Incl(ranks), tag)
    return MpiProcessGroup(comm, names=ranks, timeout=opts.timeout)
