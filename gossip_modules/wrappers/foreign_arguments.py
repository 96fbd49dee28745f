"""The arguments and attributes of other wrappers, and what becomes of each: a table for each of them.

DistributedDataParallel, Stochastic Gradient Push, AD-PSGD in its repository, and WAGMA-SGD.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..old_calls import Action, ForeignArguments, Ignored, NewName, Refused

_NO_BUCKETS = Ignored("gradients are not averaged, so there are no buckets")
_UNUSED = Ignored("a step needs no gradient of any other rank, so parameters without one hold nobody up")


def _devices(value: Any, given: Mapping[str, Any]) -> Action:
    """`device_ids`, a list of one, and `output_device`: the device of the parameters goes without saying."""
    device = _device(given.get("module"))
    asked = list(value) if isinstance(value, list | tuple) else [value]
    if device is not None and device.type != "cpu" and len(asked) == 1 and _is(asked[0], device):
        return Ignored(f"a model computes on the device of its parameters, {device} here")
    return Refused(
        f"a model computes on the device of its parameters ({device or 'none yet'} here); call module.to(device) "
        "before wrapping, and leave it out"
    )


def _device(module: object) -> torch.device | None:
    if not isinstance(module, nn.Module):
        return None
    return next((parameter.device for parameter in module.parameters()), None)


def _is(asked: Any, device: torch.device) -> bool:
    """Whether an index, a name or a device is `device`."""
    try:
        found = torch.device(device.type, asked) if isinstance(asked, int) else torch.device(asked)
    except (RuntimeError, TypeError):
        return False
    return found.type == device.type and found.index in (None, device.index)


def _buffers(value: Any, given: Mapping[str, Any]) -> Action:
    """`broadcast_buffers` and its like."""
    if value:
        return Ignored("buffers are averaged with those of peers where gossip_buffers is True, the default")
    return Refused("gossip_buffers says whether ranks share buffers; write gossip_buffers=False")


DDP_ARGUMENTS: ForeignArguments = {
    "device_ids": _devices,
    "output_device": _devices,
    "dim": Ignored("a model computes on one device, so that no input is split"),
    "broadcast_buffers": _buffers,
    "forward_sync_buffers": _buffers,
    "bucket_cap_mb": _NO_BUCKETS,
    "bucket_cap_mb_list": _NO_BUCKETS,
    "gradient_as_bucket_view": _NO_BUCKETS,
    "batched_grad_copy": _NO_BUCKETS,
    "find_unused_parameters": _UNUSED,
    "skip_all_reduce_unused_params": _UNUSED,
    "static_graph": _UNUSED,
    "check_reduction": Ignored("it has no effect in DistributedDataParallel either"),
    "delay_all_reduce_named_params": _NO_BUCKETS,
    "param_to_hook_all_reduce": _NO_BUCKETS,
    "mixed_precision": Refused(
        "ranks exchange the parameters that the optimizer steps; put torch.autocast around the forward, and pass "
        "wire_dtype=torch.bfloat16 to GossipDataParallel for small messages"
    ),
    "device_mesh": Refused("ranks are those of a process group; pass process_group=mesh.get_group()"),
}
"""Those of DistributedDataParallel that a wrapper which averages models does not take itself."""

PAIRWISE_ARGUMENTS: ForeignArguments = {
    "process_group": Refused("workers find each other by address; pass peers={name: 'tcp://host:port', ...}"),
    "device_mesh": Refused("workers find each other by address; pass peers={name: 'tcp://host:port', ...}"),
    "init_sync": Refused(
        "a worker starts from the model of a live peer, or from its own; write init_from_peers=False for the latter, "
        "and torch.manual_seed(...) before building the model for equal ones"
    ),
}
"""Those that differ for a wrapper without a process group."""

_NO_REDUCER = "gradients are not averaged, so there are no buckets and no reducer"
_COUNTS = "model.comm_stats() counts rounds, bytes and waits"
_SHARED_BUFFERS = "the argument gossip_buffers says whether ranks share buffers"

DDP_ATTRIBUTES: Mapping[str, str] = {
    "register_comm_hook": f"{_NO_REDUCER}; for smaller messages pass wire_dtype=torch.bfloat16 or "
    "algorithm=PowerGossip() to GossipDataParallel",
    "_register_builtin_comm_hook": f"{_NO_REDUCER}; pass wire_dtype=torch.bfloat16 to GossipDataParallel",
    "_set_static_graph": f"{_NO_REDUCER}, which needs to know it; leave the call out",
    "reducer": f"{_NO_REDUCER}; {_COUNTS}",
    "logger": _COUNTS,
    "_get_ddp_logging_data": _COUNTS,
    **dict.fromkeys(("join", "join_hook"), "ranks need not have equally many batches; train, then call close()"),
    "will_sync_module_buffers": _SHARED_BUFFERS,
    "broadcast_buffers": _SHARED_BUFFERS,
    "require_forward_param_sync": _SHARED_BUFFERS,
    "find_unused_parameters": f"{_NO_REDUCER}; parameters without a gradient hold nobody up",
    "static_graph": f"{_NO_REDUCER}; the graph of a backward may be another one at each step",
    "gradient_as_bucket_view": _NO_REDUCER,
    "bucket_bytes_cap": _NO_REDUCER,
    "device_ids": "a model computes on the device of its parameters; read next(model.parameters()).device",
    "output_device": "a model computes on the device of its parameters; read next(model.parameters()).device",
    "device": "a model computes on the device of its parameters; read next(model.parameters()).device",
    "device_type": "a model computes on the device of its parameters; read next(model.parameters()).device.type",
    "process_group": "keep the group that you pass as process_group=; torch.distributed.group.WORLD has all ranks",
}
"""What takes the place of its attributes and methods, as clauses."""

_LEVELS = Ignored("there are no levels of messages to choose from")
_PLACE = "process_group, or torch.distributed, tells the rank and the number of ranks"
_OWN_OPTIMIZER = Refused(
    "your loop has the optimizer; pass it to torch.optim.SGD(model.parameters(), lr=..., momentum=...)"
)
_MEETING = Ignored("ranks meet by torch.distributed, which is initialised before")
_INTERFACE = Refused(
    "torch.distributed chooses the network interface; set the environment variable GLOO_SOCKET_IFNAME or "
    "NCCL_SOCKET_IFNAME"
)


def _rank(value: Any, given: Mapping[str, Any]) -> Action:
    """Leave it out: process_group, or torch.distributed, tells the rank."""
    return _same(value, given, dist.get_rank)


def _world_size(value: Any, given: Mapping[str, Any]) -> Action:
    """Leave it out: process_group, or torch.distributed, tells the number of ranks."""
    return _same(value, given, dist.get_world_size)


def _same(value: Any, given: Mapping[str, Any], ask: Callable[[], int]) -> Action:
    """The value that holds anyway changes nothing; another one would be another process."""
    group = given.get("process_group")
    if isinstance(group, dist.ProcessGroup):
        actual = group.rank() if ask is dist.get_rank else group.size()
    else:
        actual = ask() if dist.is_initialized() else value
    return Ignored(_PLACE) if value == actual else Refused(f"{_PLACE}, which is {actual} here; leave it out")


def _synch_freq(value: Any, given: Mapping[str, Any]) -> Action:
    """Write overlap=True, max_staleness=n; leave 0 out, which is the default."""
    if value == 0:
        return Ignored("it is the default: training waits for each overlapped round at the next forward")
    if given.get("overlap") is True:
        return NewName("max_staleness")
    return Refused(f"a round may be late only where it overlaps; pass overlap=True, max_staleness={value!r}")


def _distributed(value: Any, given: Mapping[str, Any]) -> Action:
    """Leave True out; call the module itself where you had False."""
    if value:
        return Ignored("a wrapper is always one of several ranks, or the only one")
    return Refused("one process trains without a wrapper; call the module itself")


def _num_peers(value: Any, given: Mapping[str, Any]) -> Action:
    """Leave it out: a rank exchanges its model with one peer at a time."""
    if value == 1:
        return Ignored("a rank exchanges its model with one peer at a time")
    return Refused("a rank exchanges its model with one peer at a time; leave it out")


def _comm_device(value: Any, given: Mapping[str, Any]) -> Action:
    """Leave it out: messages travel through the memory of the host."""
    if str(value) == "cpu":
        return Ignored("messages travel through the memory of the host")
    return Refused("messages travel through the memory of the host; leave it out")


SGP_ARGUMENTS: ForeignArguments = {
    "rank": _rank,
    "world_size": _world_size,
    "synch_freq": _synch_freq,
    "verbose": _LEVELS,
    "use_streams": Ignored("the library chooses the streams of a GPU"),
    "distributed": _distributed,
    "local_node_group": Refused("pass nprocs_per_node=N; the library makes the groups of a node"),
    "master_group": Refused("pass nprocs_per_node=N; the library makes the group of the nodes"),
}
"""Of GossipDataParallel and SimpleGossipDataParallel."""

AD_PSGD_ARGUMENTS: ForeignArguments = {
    "rank": _rank,
    "world_size": _world_size,
    "master_addr": _MEETING,
    "master_port": _MEETING,
    "backend": Ignored("exchanges run over a Gloo group, whatever the backend of torch.distributed"),
    "graph_class": NewName("graph"),
    "mixing_class": NewName("mixing"),
    "num_peers": _num_peers,
    "comm_device": _comm_device,
    "lr": _OWN_OPTIMIZER,
    "momentum": _OWN_OPTIMIZER,
    "weight_decay": _OWN_OPTIMIZER,
    "nesterov": _OWN_OPTIMIZER,
    "verbose": _LEVELS,
    "distributed": _distributed,
    "network_interface_type": _INTERFACE,
    "tcp_interface_name": _INTERFACE,
}
"""Of BilatGossipDataParallel."""

ALL_REDUCE_ARGUMENTS: ForeignArguments = {
    "rank": _rank,
    "world_size": _world_size,
    "comm_device": Ignored("gradients are averaged on the device of the parameters"),
    "verbose": _LEVELS,
    "distributed": _distributed,
}
"""Of AllReduceDataParallel, besides those of DistributedDataParallel."""

WAGMA_ARGUMENTS: ForeignArguments = {
    "groupsize": NewName("group_size"),
    "tau": NewName("sync_period"),
    "optimizer": Refused("the module is wrapped, not the optimizer; step an optimizer of model.parameters() as before"),
}
"""Of the optimizer wrapper of WAGMA-SGD, for GroupAverageDataParallel."""
