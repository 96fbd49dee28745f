"""semi_sync: gossip for a loop that calls the parts of a model by itself, as a context around it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from ..loop.hooks import holds_any
from ..wrappers.gossip import GossipDataParallel


@contextlib.contextmanager
def semi_sync(
    model_parts: nn.Module | Sequence[nn.Module],
    optimizer: Optimizer,
    *,
    mesh: DeviceMesh | None = None,
    **options: Any,
) -> Iterator[GossipDataParallel]:
    """Inside, each step of the optimizer ends with a gossip round over the parts; collective on entry.

    It has the shape of torchft's `LocalSGD` and `DiLoCo`, and so of torchtitan's `maybe_semi_sync_training`: the loop
    inside calls the parts, or a pipeline schedule over them, and knows of no wrapper. A rank that leaves out a step of
    the optimizer alone calls `gossip_step()` of the wrapper in its place, else the others wait for it.

    Args:
        model_parts: the model, or its stages in this process, on their device; may be sharded by `fully_shard` or a
            plan of DTensors over other dimensions of the mesh.
        optimizer: holds their parameters; an optimizer of optimizers, such as torchtitan's container, counts as one.
        mesh: a mesh of one dimension, over the replicas, such as mesh["replicate"]; None: all ranks.
        options: the arguments of `GossipDataParallel`, such as `algorithm="diloco"`.

    Yields:
        The wrapper: for `averaged()`, `averaged_state_dict()`, `state_dict()` and `comm_stats()`. Several parts have
        the names of an `nn.ModuleList`, "0.weight". On exit it is closed; each rank keeps its own model.

    Raises:
        ValueError: the optimizer holds no parameter of the parts; or see `GossipDataParallel`.

    Example:
        >>> with semi_sync(model_parts, optimizer, algorithm="diloco") as gossip:
        ...     for batch in loader:
        ...         loss_of(model_parts, batch).backward()
        ...         optimizer.step()
        ...         optimizer.zero_grad()
        ...     state = gossip.averaged_state_dict()
    """
    module = model_parts if isinstance(model_parts, nn.Module) else nn.ModuleList(model_parts)
    if not isinstance(optimizer, Optimizer) or not holds_any(optimizer, module.parameters()):
        raise ValueError(
            f"got {type(optimizer).__name__} as the optimizer of semi_sync(), expected a torch.optim.Optimizer over "
            "parameters of the model parts, whose steps end with the rounds; make it from these parts"
        )
    wrapper = GossipDataParallel(module, rounds="manual", device_mesh=mesh, **options)
    handle = optimizer.register_step_post_hook(lambda *_: wrapper.gossip_step())
    try:
        yield wrapper
    finally:
        handle.remove()
        wrapper.close()
