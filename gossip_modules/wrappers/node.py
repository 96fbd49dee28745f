"""Several processes per node: gradients averaged inside the node, the vector gossiped in shards between nodes."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..engine.following import FollowingEngine
from ..engine.lockstep import LockstepEngine
from ..flat.selection import Selection
from ..flat.vector import FlatVector
from ..membership.membership import Membership
from ..membership.node import PATIENCE, NodeCollectives, NodeProcesses
from ..rounds.mixer import GlobalAverage
from ..transport.agreement import check_agreement
from ..transport.connect import CPU
from ..transport.exchange import STREAM_ORDERED
from ..transport.process_group import ProcessGroupTransport
from ..warn import levels_to_user
from .arguments import Links


class Node:
    """The g processes of one node, which together are one gossip rank.

    Gradients are averaged inside the node by DistributedDataParallel, so all its processes take equal steps. Then
    local rank l gossips shard l of the flat vector with local rank l of the peer node, and the shards are gathered
    inside the node: every network card of the node works. Equal to one process per node with g times the batch.

    Buffers have the values of local rank 0, as in DistributedDataParallel. If a process dies during a backward, the
    other processes of the node get the error of torch, at the latest after the timeout of the group.

    Args:
        module: already flat; DistributedDataParallel adds hooks to its parameters.
        transport: over the processes of the node.
        control: the same for messages that no process waits a GPU for; may be `transport`.
        selection: the tensors that each process keeps for itself.
        find_unused_parameters: as for DistributedDataParallel.

    Attributes:
        trained_module: the module of a training forward, a DistributedDataParallel of `module`.
    """

    is_whole = False  # whether one process gossips the whole vector of the model that it holds
    is_sharded = False  # whether each process holds other parameters
    has_codes = False  # whether rounds may round the elements of a tensor by their neighbours in the vector
    is_eager = False  # whether a round may be applied as soon as it has come

    def __init__(
        self,
        module: nn.Module,
        transport: ProcessGroupTransport,
        control: ProcessGroupTransport,
        *,
        selection: Selection,
        find_unused_parameters: bool,
    ) -> None:
        self.transport, self.control = transport, control
        self.local_rank, self.num_shards = transport.rank, transport.world_size
        self._selection = selection
        self._find_unused_parameters = find_unused_parameters
        self.trained_module = self._make_ddp(module)

    def __deepcopy__(self, memo: dict[int, object]) -> Node:
        node = copy.copy(self)
        memo[id(self)] = node
        node.transport, node.control = copy.deepcopy((self.transport, self.control), memo)
        if not self.transport.is_closed:  # else its forwards are the forwards of the module
            node.trained_module = node._make_ddp(copy.deepcopy(self.trained_module.module, memo))
        return node

    def _make_ddp(self, module: nn.Module) -> DistributedDataParallel:
        if self.transport.backend == "gloo":
            self.transport.barrier(what="making a node")  # names an absent process, which torch's own errors do not
        with self._selection.ignored_by_ddp(module):
            return DistributedDataParallel(
                module,
                process_group=self.transport.group,
                find_unused_parameters=self._find_unused_parameters,
                gradient_as_bucket_view=True,
            )

    @staticmethod
    def peers(num_shards: int) -> list[int] | None:
        """The global ranks with this process's local rank, one per node, which exchange this shard; None = all."""
        return None if num_shards == 1 else list(range(dist.get_rank() % num_shards, dist.get_world_size(), num_shards))

    @property
    def num_bytes_sent(self) -> int:
        """The payload that this process has sent inside the node, but for gradients."""
        return sum(connection.num_bytes_sent for connection in {self.transport, self.control})

    def engine_of(self, engine: LockstepEngine) -> LockstepEngine:
        """The engine of this process, made of one for a rank without a node."""
        return engine

    def averager(self, engine: LockstepEngine) -> GlobalAverage:
        """The average over all nodes, for this process."""
        return engine.averager

    def run(self, act: Callable[[], bool]) -> bool:
        """`act`, which runs rounds on `shard`; whether that was written."""
        return act()

    def shard(self, vector: FlatVector) -> FlatVector:
        """The shard of the vector that this process gossips; shares memory."""
        return vector.shard(self.local_rank, self.num_shards)

    def gather(self, vector: FlatVector) -> None:
        """vector <- every local rank's shard of it, in place."""
        self.transport.all_gather(vector.raw, self.shard(vector).raw.clone(), what="gathering shards in the node")

    def share_buffers(self, buffers: Sequence[Tensor]) -> None:
        """Every process of the node takes the buffers of local rank 0, in place."""
        for x in buffers:
            if x.numel():
                self.transport.broadcast(x, source=0, what="sharing buffers in the node")

    @property
    def equal_ranks(self) -> Sequence[int]:
        """The global ranks of the processes that hold the same model as this one, where torch knows them."""
        return dist.get_process_group_ranks(self.transport.group) if dist.is_initialized() else ()

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Inside, backward accumulates gradients that are not averaged over the processes."""
        return self.trained_module.no_sync()

    def num_holders(self, name: str) -> int:
        """Return the number of processes with the same elements of a tensor.

        Args:
            name: the name of the tensor in the module.
        """
        return 1

    def count_once(self, vector: FlatVector) -> None:
        """Scale the vector, in place, so that a sum over shards of squares counts each element of the model once."""

    def close(self) -> None:
        """Give back the groups inside the node."""
        self.transport.close()
        self.control.close()


class MemberNode(Node):
    """A node that is one worker of a `Membership`: its first process gossips the whole vector for all of them.

    Args:
        module: as for `Node`.
        processes: the processes of the node.
        options: as for `Node`.
    """

    is_whole = is_eager = True
    _engine: LockstepEngine
    _follower: FollowingEngine | None = None

    def __init__(self, module: nn.Module, processes: NodeProcesses, **options: Any) -> None:
        self.processes = processes
        super().__init__(module, processes.data, processes.control, **options)

    def engine_of(self, engine: LockstepEngine) -> LockstepEngine:
        """See `Node`: the first process runs the rounds of all."""
        self._engine = engine
        if not self.processes.leads:
            self._engine = self._follower = FollowingEngine(engine)
        return self._engine

    def averager(self, engine: LockstepEngine) -> GlobalAverage:
        """See `Node`."""
        collectives: Any = NodeCollectives(self.processes)  # all that an average needs of a transport
        return GlobalAverage(collectives, sums_weights=engine.mixer.is_weighted)

    def run(self, act: Callable[[], bool]) -> bool:
        """See `Node` and `NodeProcesses.run`."""
        follow = _keep if self._follower is None else self._follower.follow
        return self.processes.run(act, self._engine.progress, follow)

    def shard(self, vector: FlatVector) -> FlatVector:
        """See `Node`: the vector itself."""
        return vector

    def gather(self, vector: FlatVector) -> None:
        """vector and weight <- their values in the first process, in place; not at a safe point."""
        if self.processes.is_apart:
            return
        tensors = [vector.raw, *self._engine.shared(vector)]
        if self._engine.mixer.is_weighted:
            tensors.append(vector.push_sum_weight)
        for x in tensors:
            self.transport.broadcast(x, source=0, what="sharing the model in the node")
        if not self.processes.leads:
            self._engine.take_shared(vector)


def _keep(counters: Sequence[float]) -> None:
    """The first process has its own counters."""


def make_node(module: nn.Module, links: Links, num_shards: int, **options: Any) -> Node:
    """The node of this process: consecutive ranks form one; collective.

    Args:
        module, options: as for `Node`.
        links: as for `GossipWrapper._open`.
        num_shards: g, the number of processes per node.
    """
    first = dist.get_rank() // num_shards * num_shards
    transport, control = _connect(links, next(module.parameters()).device, range(first, first + num_shards))
    return Node(module, transport, control, **options)


def _connect(
    links: Links, device: torch.device, members: Sequence[int] | None = None
) -> tuple[ProcessGroupTransport, ProcessGroupTransport]:
    """The transport of a node for tensors on the device, and the one for messages in CPU memory."""
    transport = links.connect(device, ranks=members)
    if transport.backend not in STREAM_ORDERED:
        return transport, transport
    return transport, replace(links, comm_device="cpu", backend="gloo").connect(CPU, ranks=members)


def meet_node(
    membership: Membership, links: Links, nprocs_per_node: int, *, description: Mapping[str, str], device: torch.device
) -> NodeProcesses:
    """The processes of this node; all of them call it.

    Args:
        membership: the membership of this process.
        links: inside the node; the limit of its waits is `PATIENCE` times the timeout of the membership.
        nprocs_per_node: how many there are.
        description: the facts that they must agree on, by name.
        device: the device of the model.

    Raises:
        ValueError: there is another number of processes, they do not agree, or the membership has a wrapper.
        RuntimeError: torch.distributed is not initialised.
        TimeoutError, ConnectionError: one of them is late or gone; names it.
    """
    membership.check_free()
    if links.place[1] != nprocs_per_node:
        raise ValueError(
            f"got nprocs_per_node={nprocs_per_node} and a membership in a world of {links.place[1]} processes, "
            "expected a world of one node; start each node by `torchrun --standalone --nproc-per-node "
            f"{nprocs_per_node}`, or pass the group of the node's processes as process_group"
        )
    data, control = _connect(replace(links, timeout=PATIENCE * membership.timeout), device)
    try:
        check_agreement(control, {**description, **membership.describe()})
    except BaseException:
        data.close()
        control.close()
        raise
    processes = membership.node = NodeProcesses(membership, control, data)
    return processes


def count_nodes(links: Links, nprocs_per_node: int) -> int:
    """How many gossip ranks a world has; raises ValueError when the options cannot work."""
    world_size = links.place[1]
    if world_size % nprocs_per_node:
        raise ValueError(
            f"got nprocs_per_node={nprocs_per_node} in a world of {world_size}, expected a divisor of it; "
            "start equally many processes on every node"
        )
    if nprocs_per_node > 1 and links.process_group is not None:
        raise ValueError(
            f"got a process group and nprocs_per_node={nprocs_per_node}, expected one of them; "
            "groups inside and between nodes are made of the default group"
        )
    return world_size // nprocs_per_node


def check_node_size(nprocs_per_node: int, *, find_unused_parameters: bool) -> None:
    """Raise ValueError where a node has no process; warn of an option that has no effect."""
    if nprocs_per_node < 1:
        raise ValueError(f"got nprocs_per_node={nprocs_per_node}, expected 1 or more; pass that of torchrun")
    if find_unused_parameters and nprocs_per_node == 1:
        warnings.warn(
            "find_unused_parameters has no effect with nprocs_per_node=1; leave it out", stacklevel=levels_to_user()
        )
