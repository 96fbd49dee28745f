"""The constructor arguments of Stochastic Gradient Push and WAGMA-SGD, and what becomes of each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from ..foreign.arguments import Action, ForeignArguments, Ignored, NewName, Refused, Replaced

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


def _same(value: Any, given: Mapping[str, Any], ask: Any) -> Action:
    """The value that holds anyway changes nothing; another one would be another process."""
    group = given.get("process_group")
    if isinstance(group, dist.ProcessGroup):
        actual = group.rank() if ask is dist.get_rank else group.size()
    else:
        actual = ask() if dist.is_initialized() else value
    if value == actual:
        return Ignored(_PLACE)
    return Refused(f"{_PLACE}, which is {actual} here; leave it out")


def _synch_freq(value: Any, given: Mapping[str, Any]) -> Action:
    """Write overlap=True, max_staleness=n; leave 0 out, which is the default."""
    if value == 0:
        return Ignored("it is the default: training waits for each overlapped round at the next forward")
    if given.get("overlap") is True:
        return Replaced({"max_staleness": value})
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
