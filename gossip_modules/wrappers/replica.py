"""Replicas that are sharded over processes: each process gossips its shards with the same place in other replicas."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn

from ..flat.sharded import Shards, local_of, meshes_of, num_parts, without_reduction
from ..flat.vector import FlatVector
from ..membership.links import Vote
from ..membership.membership import Membership
from ..membership.node import PATIENCE
from ..membership.replica import ReplicaProcesses
from ..transport.agreement import check_agreement, find_difference
from ..transport.connect import CPU, connect
from ..transport.deadline import Deadline
from ..transport.process_group import ProcessGroupTransport
from .arguments import Links
from .node import Node


class ShardedReplica(Node):
    """The processes that hold one replica of a model in shards, by `fully_shard` (FSDP2) or a plan of DTensors.

    Each process gossips the shards that it has with the processes of the same place in other replicas. All replicas
    have the same mesh, so these shards are equal in shape. What a round does to elements it does to all elements of the
    replica; the processes of a replica also agree whether a model is finite.

    A code sees the vector of its process, so the processes of a replica would round a tensor that all of them hold (a
    norm under tensor parallelism) in different ways. After a round of an algorithm they take the values of the first
    process. Buffers have its values too, as in DistributedDataParallel.

    Args:
        module: sharded.
        control: the transport over the processes of this replica, for messages in CPU memory.
    """

    is_whole = is_sharded = True
    equal_ranks = ()

    def __init__(self, module: nn.Module, control: ProcessGroupTransport) -> None:
        self.trained_module: Any = module
        self.transport = self.control = control
        # By the name of each parameter, the number of processes that hold the same elements of it.
        self._num_holders = {name: control.world_size // num_parts(x) for name, x in module.named_parameters()}
        self.local_rank, self.num_shards = control.rank, 1

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """See `Node`."""
        return without_reduction(self.trained_module)

    def shard(self, vector: FlatVector) -> FlatVector:
        """See `Node`: the vector itself."""
        return vector

    def gather(self, vector: FlatVector) -> None:
        """See `Node`: the parameters that all processes of the replica hold <- their values in the first one."""
        if self.has_codes:
            every = self.control.world_size
            self._share(x for name, x in _named_places(vector) if self._num_holders.get(name) == every)

    def share_buffers(self, buffers: Sequence[Tensor]) -> None:
        """See `Node`."""
        self._share(buffers)

    def _share(self, tensors: Iterable[Tensor]) -> None:
        for x in map(local_of, tensors):
            if x.numel():
                on_cpu = x.detach().to("cpu", copy=True)
                self.control.broadcast(on_cpu, source=0, what="sharing a tensor in the replica")
                x.copy_(on_cpu)

    def num_holders(self, name: str) -> int:
        """See `Node`."""
        return self._num_holders.get(name, 1)

    def count_once(self, vector: FlatVector) -> None:
        """See `Node`: each of the k processes with the same elements has them over the root of k."""
        for name, x in _named_places(vector):
            if (num_holders := self.num_holders(name)) > 1:
                x.mul_(num_holders**-0.5)


def _named_places(vector: FlatVector) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and the place of each tensor in the vector; shares memory."""
    for segment, layout in zip(vector.segments, vector.layout.segments, strict=True):
        for first, spec in layout.places():
            yield spec.name, segment[first : first + spec.numel]


class MemberReplica(ShardedReplica):
    """A sharded replica that is one worker of a `Membership`.

    Args:
        module: as for `ShardedReplica`.
        processes: the processes of the replica.
    """

    def __init__(self, module: nn.Module, processes: ReplicaProcesses) -> None:
        super().__init__(module, processes.control)
        self.processes = processes

    def close(self) -> None:
        """See `Node`."""
        self.processes.close()


def find_difference_in_replica(
    module: nn.Module, description: Mapping[str, str], *, device: torch.device, timeout: timedelta, found: str
) -> str:
    """Return the disagreement about options of this replica, or `found`; "" if all agree.

    The processes of a replica call it together. Each has compared its options with the processes of the same place in
    other replicas before. So all processes of all replicas learn of a difference before any process makes a group.

    Args:
        module: sharded.
        description: the options, by name.
        device: the device of the module.
        timeout: the timeout of each message.
        found: the disagreement with other replicas, in words.
    """
    for group in max(meshes_of(module), key=lambda mesh: mesh.size()).get_all_groups():
        transport = connect(group, module_device=device, timeout=timeout)
        try:
            found = find_difference(transport, description, found=found)
        finally:
            transport.close()
    return found


def make_replica(module: nn.Module, links: Links) -> ShardedReplica:
    """The replica of this process; the processes of the replica call it together.

    Raises:
        ValueError: parameters are sharded over several meshes, and no mesh has all processes.
        RuntimeError, TimeoutError, ConnectionError: see `connect`.
    """
    (control,) = _connect(module, links)
    return ShardedReplica(module, control)


def meet_replica(
    module: nn.Module, links: Links, membership: Membership, *, description: Mapping[str, str]
) -> MemberReplica:
    """The replica of this process, as one worker; the processes of the replica call it together.

    Args:
        module: sharded.
        links: inside the replica; the limit of its waits is `PATIENCE` times the timeout of the membership, from when
            its processes are connected.
        membership: the membership of this process.
        description: the facts that the processes must agree on, by name.

    Raises:
        ValueError: see `make_replica`; or the processes do not agree, or the membership has a wrapper.
        RuntimeError, TimeoutError, ConnectionError: see `connect`.
    """
    membership.check_free()
    links = replace(links, timeout=PATIENCE * membership.timeout)
    control, *votes = _connect(module, links, count=3, deadline=Deadline(membership.timeout))
    try:
        check_agreement(control, {**description, **membership.describe()})
    except BaseException:
        for transport in (control, *votes):
            transport.close()
        raise
    processes = membership.node = ReplicaProcesses(membership, control, Vote(*votes))
    return MemberReplica(module, processes)


def _connect(
    module: nn.Module, links: Links, *, count: int = 1, deadline: Deadline | None = None
) -> list[ProcessGroupTransport]:
    """So many transports over the processes of the replica, for messages in CPU memory; see `make_replica`.

    deadline: the deadline of all waits here; None: the timeout of `links` for each transport.
    """
    meshes = [frozenset(mesh.mesh.flatten().tolist()) for mesh in meshes_of(module)]
    ranks = max(meshes, key=len)
    if others := [sorted(mesh) for mesh in meshes if not mesh <= ranks]:
        raise ValueError(
            f"got parameters that are sharded over ranks {sorted(ranks)} and others over ranks {others[0]}, expected "
            "one mesh with all processes of a replica; shard all parts of the model over dimensions of one mesh"
        )
    inside = replace(links, process_group=None, comm_device="cpu", backend="gloo")
    transports = [inside.connect(CPU, ranks=sorted(ranks), deadline=deadline) for _ in range(count)]
    Shards(module).gather_once()
    return transports
