"""From a process group, given or made, to a transport: the backend, the wire device and the ranks."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from .deadline import Deadline
from .exchange import STREAM_ORDERED, fail
from .failure_notes import GONE, FailureNotes
from .gloo import close_ports_of, keep_from_children
from .process_group import DEFAULT_TIMEOUT, ProcessGroupTransport, backend_of
from .stores import is_of_job

CPU = torch.device("cpu")


def connect(
    process_group: dist.ProcessGroup | None = None,
    *,
    ranks: Sequence[int] | None = None,
    module_device: torch.device = CPU,
    comm_device: torch.device | str | None = None,
    backend: str | None = None,
    timeout: timedelta = DEFAULT_TIMEOUT,
    deadline: Deadline | None = None,
) -> ProcessGroupTransport:
    """A transport over `process_group`, used as it is, or over a new group of our own when that is None.

    Args:
        process_group: carries nothing but our messages from now on; None makes a new group (collective over `ranks`).
        ranks: global ranks of the new group, this one among them; None = all.
        module_device: where the tensors live.
        comm_device: where messages live; None = `module_device` if the group has NCCL or XCCL for it, else the CPU.
        backend: the backend of the group, if only one will do: listeners need "gloo". None: as the default group.
        timeout: for every operation.
        deadline: for making the group; None: the timeout from now on.

    Raises:
        RuntimeError: torch.distributed is not initialised.
        ValueError: `comm_device` is neither the CPU nor `module_device`, or `process_group` has another backend.
    """
    base = group_or_world(process_group)
    wire = _wire_device(base, module_device, comm_device)
    found = _backend(base, wire)
    if backend is not None and process_group is not None and found != backend:
        raise ValueError(
            f"got a process group whose backend for {wire} tensors is {found}, expected {backend}: these ranks answer "
            f"each other at any time; pass dist.new_group(backend='{backend}'), or None"
        )
    if wire.type != "cpu" and (backend or found) == "gloo":
        raise ValueError(
            f"got comm_device='{wire.type}' over Gloo, which sends from CPU memory only, expected 'cpu' or None"
        )
    if process_group is not None:
        keep_from_children()
        return _over(process_group, wire, ranks=ranks, timeout=timeout)
    name = backend or found or "gloo"
    name = _nccl_name(base, wire) if name == found == "nccl" else name
    deadline = deadline or Deadline(timeout)
    group = _new_group(ranks, backend=name, timeout=timeout, deadline=deadline)
    transport = _over(group, wire, ranks=ranks, timeout=timeout)
    transport.own_group()
    # On a fresh NCCL group the first batch of sends needs all ranks, which a round need not have. A rank that closes a
    # fresh Gloo group at once would break connections that other ranks still make.
    with transport.within(deadline):
        transport.all_reduce(torch.zeros(1, device=wire), what="the first message of a new group")
    transport.forget_bytes()
    if transport.backend == "gloo":
        close_ports_of(group)
    return transport


def _nccl_name(world: dist.ProcessGroup, device: torch.device) -> str:
    """The name of the NCCL of the default group: `dist.new_group` makes another like it by that name only.

    A backend made as "nccl-legacy" is called "nccl", a name that makes another one.
    """
    by_device = dict(pair.split(":") for pair in dist.get_backend_config(world).split(","))
    return by_device[device.type]


def _wire_device(
    group: dist.ProcessGroup, module_device: torch.device, comm_device: torch.device | str | None
) -> torch.device:
    """Where messages live; see `connect`."""
    if comm_device is None:
        return module_device if _backend(group, module_device) in STREAM_ORDERED else CPU
    wire = torch.device(comm_device)
    if wire.type not in ("cpu", module_device.type):
        raise ValueError(f"got comm_device={wire}, expected 'cpu' or the module's device {module_device}")
    return wire if wire.type == "cpu" else module_device


def _over(
    group: dist.ProcessGroup, wire: torch.device, *, ranks: Sequence[int] | None, timeout: timedelta
) -> ProcessGroupTransport:
    """A transport over an existing group; ranks: the global ranks of its members, None where torch knows them."""
    if _backend(group, wire) is None:
        raise ValueError(
            f"got a process group without a backend for {wire} tensors, expected one; for CPU tensors beside NCCL call "
            "init_process_group('cpu:gloo,cuda:nccl'), or pass a Gloo group"
        )
    if ranks is None and is_of_job(group):  # see `thread_group`
        ranks = dist.get_process_group_ranks(group)
    names = range(group.size()) if ranks is None else ranks
    notes = FailureNotes.of(group, names[group.rank()])
    return ProcessGroupTransport(group, device=wire, timeout=timeout, names=names, notes=notes)


def group_or_world(process_group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """`process_group`, or the default group where that is None.

    Raises:
        RuntimeError: torch.distributed is not initialised.
    """
    group = dist.group.WORLD if process_group is None else process_group
    if group is None:
        raise RuntimeError(
            "torch.distributed is not initialised, expected a process group; start with torchrun and call "
            "torch.distributed.init_process_group() before wrapping the module"
        )
    return group


def _new_group(
    ranks: Sequence[int] | None, *, backend: str, timeout: timedelta, deadline: Deadline
) -> dist.ProcessGroup:
    """A new group of these ranks, all of them if None; errors name missing ranks, if the default group can."""
    world, rank, size = group_or_world(None), dist.get_rank(), dist.get_world_size()
    members = list(range(size)) if ranks is None else list(ranks)
    subset = members if len(members) < size else None
    what = f"making a process group of ranks {members}"
    setup = _over(world, CPU, ranks=None, timeout=timeout) if _backend(world, CPU) == "gloo" else None
    start = time.monotonic()
    try:
        if setup is not None and subset is None:
            with setup.within(deadline):
                setup.barrier(what="making a process group")
        start = time.monotonic()
        group = dist.new_group(subset, timeout=timeout, backend=backend, use_local_synchronization=subset is not None)
    except RuntimeError as error:
        seconds = time.monotonic() - start
        if setup is None:
            fail(error, rank=rank, what=what, seconds=seconds, timeout=timeout)
        # The wait was for the store, so the connections of the default group still show which ranks are there.
        closed = {peer: GONE for peer in setup.closed_peers() if peer in members}
        setup.fail(error, what, seconds, timeout=timeout, blamed=closed)
    finally:
        if setup is not None:
            setup.close()
    assert isinstance(group, dist.ProcessGroup), "this rank is a member"
    return group


def _backend(group: dist.ProcessGroup, device: torch.device) -> str | None:
    try:
        return backend_of(group, device)
    except RuntimeError:  # this group was made without a backend for that device
        return None
