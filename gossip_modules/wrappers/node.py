"""Several processes per node: gradients averaged inside the node, the vector gossiped in shards between nodes."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..flat.vector import FlatVector
from .setup import Links


class Node:
    """The g processes of one node, which together are one gossip rank.

    Gradients are averaged inside the node by DistributedDataParallel, so all its processes take equal steps. Then
    local rank l gossips shard l of the flat vector with local rank l of the peer node, and the shards are gathered
    inside the node: every network card of the node works. Equal to one process per node with g times the batch.

    Buffers are those of local rank 0, as in DistributedDataParallel.

    Args:
        module: already flat; DistributedDataParallel adds hooks to its parameters.
        links: as for `open_transport`.
        num_shards: g, the number of processes per node; consecutive ranks form a node.
        find_unused_parameters: as for DistributedDataParallel.
    """

    def __init__(self, module: nn.Module, links: Links, num_shards: int, *, find_unused_parameters: bool) -> None:
        first = dist.get_rank() // num_shards * num_shards
        self.local_rank = dist.get_rank() - first
        self.num_shards = num_shards
        self.find_unused_parameters = find_unused_parameters
        members = range(first, first + num_shards)
        self.transport = links.connect(next(module.parameters()).device, ranks=members)
        self.replica = self._replicate(module)

    def __deepcopy__(self, memo: dict[int, object]) -> Node:
        node = copy.copy(self)
        memo[id(self)] = node
        node.transport = copy.deepcopy(self.transport, memo)
        if not self.transport.is_closed:  # else nobody calls the replica any more
            node.replica = node._replicate(copy.deepcopy(self.replica.module, memo))
        return node

    @staticmethod
    def peers(num_shards: int) -> list[int] | None:
        """The global ranks with this process's local rank, one per node, whom its shard gossips with; None = all."""
        return None if num_shards == 1 else list(range(dist.get_rank() % num_shards, dist.get_world_size(), num_shards))

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

    def _replicate(self, module: nn.Module) -> DistributedDataParallel:
        return DistributedDataParallel(
            module,
            process_group=self.transport.group,
            find_unused_parameters=self.find_unused_parameters,
            gradient_as_bucket_view=True,
        )


def count_nodes(links: Links, nprocs_per_node: int, *, find_unused_parameters: bool) -> int:
    """How many gossip ranks a world has; raises ValueError when the options cannot work."""
    world_size = links.place[1]
    if nprocs_per_node < 1 or world_size % nprocs_per_node:
        raise ValueError(
            f"got nprocs_per_node={nprocs_per_node} in a world of {world_size}, expected a divisor of it; "
            "start equally many processes on every node"
        )
    if nprocs_per_node > 1 and links.process_group is not None:
        raise ValueError(
            f"got a process group and nprocs_per_node={nprocs_per_node}, expected one of them; "
            "groups inside and between nodes are made of the default group"
        )
    if find_unused_parameters and nprocs_per_node == 1:
        warnings.warn("find_unused_parameters has no effect with nprocs_per_node=1", stacklevel=4)
    return world_size // nprocs_per_node
