"""The tables: each argument and attribute of other libraries and older versions, with its answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from .actions import Action, Foreign, ForeignArguments, Ignored, NewName, Refused, Works
from .working import block, nothing, push_sum_weight, transfer_params

_NO_BUCKETS = Ignored("gradients are not averaged, so there are no buckets")
_UNUSED = Ignored("a step needs no gradient of any other rank, so parameters without one hold nobody up")


def _devices(value: Any, given: Mapping[str, Any]) -> Action:
    """Leave it out: a model computes on the device of its parameters; call module.to(device) before wrapping."""
    device = _device(given.get("module"))
    asked = list(value) if isinstance(value, list | tuple) else [value]
    if device is not None and device.type != "cpu" and len(asked) == 1 and _is_same_device(asked[0], device):
        return Ignored(f"a model computes on the device of its parameters, {device} here")
    return Refused(
        f"a model computes on the device of its parameters ({device or 'none yet'} here); call module.to(device) "
        "before wrapping, and leave it out"
    )


def _device(module: object) -> torch.device | None:
    if not isinstance(module, nn.Module):
        return None
    return next((parameter.device for parameter in module.parameters()), None)


def _is_same_device(asked: Any, device: torch.device) -> bool:
    """Whether an index, a name or a device is `device`."""
    try:
        found = torch.device(device.type, asked) if isinstance(asked, int) else torch.device(asked)
    except (RuntimeError, TypeError):
        return False
    return found.type == device.type and found.index in (None, device.index)


def _buffers(value: Any, given: Mapping[str, Any]) -> Action:
    """Leave True out; write gossip_buffers=False where you had False."""
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
_NO_CURVE = Refused(
    "workers are encrypted by TLS and have certificates in place of CURVE keys; pass server_ssl= and client_ssl=, two "
    "ssl.SSLContext, to the constructor"
)
CURVE_ARGUMENTS: ForeignArguments = {"curve": _NO_CURVE, "public_key": _NO_CURVE}
"""Those of versions that had keys of CurveZMQ."""

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


def _own_optimizer(value: Any, given: Mapping[str, Any]) -> Action:
    """Pass it to torch.optim.SGD(model.parameters(), lr=..., momentum=...): your loop has the optimizer."""
    names = ("lr", "momentum", "weight_decay", "nesterov")
    settings = [f", {name}={given[name]!r}" for name in names if given.get(name) is not None]
    return Refused(f"your loop has the optimizer; write torch.optim.SGD(model.parameters(){''.join(settings)})")


def _comm_device(value: Any, given: Mapping[str, Any]) -> Action:
    """Leave it out: messages travel through the memory of the host."""
    if str(value) == "cpu":
        return Ignored("messages travel through the memory of the host")
    return Refused("messages travel through the memory of the host; leave it out")


SGP_ARGUMENTS: ForeignArguments = {
    "gossiper": NewName("algorithm"),
    "rank": _rank,
    "world_size": _world_size,
    "synch_freq": _synch_freq,
    "verbose": _LEVELS,
    "use_streams": Ignored("the library chooses the streams of a GPU"),
    "distributed": _distributed,
    "local_node_group": Refused("pass nprocs_per_node=N; the library makes the groups of a node"),
    "master_group": Refused("pass nprocs_per_node=N; the library makes the group of the nodes"),
}
"""Of GossipDataParallel and SimpleGossipDataParallel, and of version 0.1."""

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
    "lr": _own_optimizer,
    "momentum": _own_optimizer,
    "weight_decay": _own_optimizer,
    "nesterov": _own_optimizer,
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
_GOSSIP_ARGUMENTS: ForeignArguments = {
    "gossip_buffers": Refused("buffers are those of rank 0; write broadcast_buffers=False where each rank has its own"),
}
"""Of the other wrappers, for AllReduceDataParallel."""

WAGMA_ARGUMENTS: ForeignArguments = {
    "groupsize": Refused("write GroupAverageDataParallel(module, group_size=1), with your number"),
    "tau": Refused("write GroupAverageDataParallel(module, sync_period=10), with your number"),
    "optimizer": Refused("the module is wrapped, not the optimizer; step an optimizer of model.parameters() as before"),
}
"""Of the optimizer wrapper of WAGMA-SGD, for GroupAverageDataParallel."""

STATE_ARGUMENTS: ForeignArguments = {
    "finish_gossip": Ignored("rounds in flight are saved as they are; call flush() first to apply them"),
}
"""Of `state_dict` of Stochastic Gradient Push."""

MISSING: Mapping[str, str] = {
    "update_gossiper": "a graph has a schedule of its peers by round; pass "
    "graph=lambda n: NPeerDynamicDirectedExponentialGraph(n, peers_per_itr={0: 2, 3000: 1})",
    "update_lr": "your loop has the optimizer; set its learning rate, as a scheduler of torch.optim does",
    "enable_gossip": "write model.train(); the first training forward of each step starts a round",
    "disable_gossip": "write model.eval(), or `with model.no_sync():` around forwards that start no round",
    "gossip_enable": "write model.eval() and model.train()",
    "gossip_params": "read model.module.parameters(); ranks exchange a vector that they are views of",
    "gossip_ps_weight": 'read model.get_extra_state()["weight"]',
    "gossiping": "write model.flush(), after which nothing is in flight",
    "scatter": "a process has one device; start one process for each",
    "gather": "a process has one device; start one process for each",
    "parallel_apply": "a process has one device; start one process for each",
}
"""Attributes without a counterpart of the same meaning; by name, with what to do, as a clause."""

_EVERY_RANK = Ignored("a graph answers for every rank, as in graph.out_peers(rank, t)")
GRAPH_ARGUMENTS: ForeignArguments = {
    "rank": _EVERY_RANK,
    "local_rank": _EVERY_RANK,
    "nprocs_per_node": Ignored("GossipDataParallel(nprocs_per_node=N) makes nodes; a graph is one of nodes then"),
}
"""The graphs of Stochastic Gradient Push."""
MIXING_ARGUMENTS: ForeignArguments = {"device": Ignored("weights are numbers, on no device")}
"""The mixings of Stochastic Gradient Push."""
MATCHA_ARGUMENTS: ForeignArguments = {
    "rank": _EVERY_RANK,
    "size": Ignored("the graph has the number of ranks"),
    "iterations": Ignored("rounds are drawn one by one, and have no end"),
    "issubgraph": Ignored("matchings and graphs are told apart by their types"),
    "commBudget": NewName("budget"),
}
"""The processors of MATCHA."""
GOSSIPER_ARGUMENTS: ForeignArguments = dict.fromkeys(
    ("msg", "graph", "device", "mixing", "logger", "rank", "world_size"),  # in the order of their constructors
    Refused(
        "the message and the graph are given when rounds begin; for a model write GossipDataParallel(module, "
        "graph=graph), for a tensor write gossiper.bind(UniformMixing(graph), connect()), then "
        "gossiper.average(message, num_rounds=1)"
    ),
)
"""The gossipers of Stochastic Gradient Push."""

ENGINE_ARGUMENTS: ForeignArguments = {"gossiper": NewName("mixer")}
"""Those of the engines of older versions."""

ARGUMENTS: dict[str, Foreign] = {
    "AllReduceDataParallel.__init__": Foreign({**ALL_REDUCE_ARGUMENTS, **_GOSSIP_ARGUMENTS}),
    "BilatGossipDataParallel.__init__": Foreign({**AD_PSGD_ARGUMENTS, **DDP_ARGUMENTS}),
    "ElasticAllReduce.__init__": Foreign({**DDP_ARGUMENTS, **ALL_REDUCE_ARGUMENTS, **_GOSSIP_ARGUMENTS}),
    "GossipDataParallel.__init__": Foreign({**SGP_ARGUMENTS, **DDP_ARGUMENTS}),
    "GroupAverageDataParallel.__init__": Foreign({**WAGMA_ARGUMENTS, **DDP_ARGUMENTS}),
    "LockstepEngine.__init__": Foreign(ENGINE_ARGUMENTS),
    "MatchaGraph.__init__": Foreign(
        MATCHA_ARGUMENTS, in_order=("commBudget", "rank", "size", "iterations", "issubgraph")
    ),
    "OldModuleNames.state_dict": Foreign(STATE_ARGUMENTS),
    "OverlapEngine.__init__": Foreign(ENGINE_ARGUMENTS),
    "PairwiseAverager.__init__": Foreign(CURVE_ARGUMENTS),
    "PairwiseConfig.__init__": Foreign(CURVE_ARGUMENTS),
    "PairwiseDataParallel.__init__": Foreign({**DDP_ARGUMENTS, **CURVE_ARGUMENTS, **PAIRWISE_ARGUMENTS}),
    "PairwiseWorker.add_peer": Foreign(CURVE_ARGUMENTS),
    "PushPull.__init__": Foreign(GOSSIPER_ARGUMENTS, in_order=tuple(GOSSIPER_ARGUMENTS)),
    "ShiftGraph.__init__": Foreign(GRAPH_ARGUMENTS, leading="rank"),
    "SyncEngine.__init__": Foreign(ENGINE_ARGUMENTS),
    "UniformMixing.__init__": Foreign(MIXING_ARGUMENTS, trailing="device"),
}
"""The arguments that a function takes besides its own, by the name of the function with its class."""

_ESTIMATE = "parameters hold the de-biased estimate wherever your code sees them"
WORKING: Mapping[str, Works] = {
    "transfer_params": Works(
        transfer_params,
        "rounds run by themselves, so leave it out; with rounds='manual' write model.gossip_step()",
    ),
    "sync_comms": Works(lambda wrapper: wrapper.flush, "write model.flush()"),
    "block": Works(block, "write torch.distributed.barrier()"),
    "communicator_warmup": Works(nothing, "connections are made in the constructor; leave the call out"),
    "unbias": Works(nothing, f"{_ESTIMATE}; leave the call out"),
    "ps_numerator": Works(nothing, f"{_ESTIMATE}; leave the call out"),
    "is_ps_numerator": Works(lambda wrapper: False, f"{_ESTIMATE}; it is always False"),
    "ps_weight": Works(push_sum_weight, 'read model.get_extra_state()["weight"]'),
}
"""Attributes of Stochastic Gradient Push that work."""
_PEERS = "write graph.out_peers(rank, t) and graph.in_peers(rank, t), for round t"
_ROUNDS = "write `while model.round < num_rounds:` for the loop, with one number on all ranks"
ATTRIBUTES: dict[str, Mapping[str, str | Works]] = {
    "AllReduceDataParallel": WORKING,
    "GossipDataParallel": {"join": "write `with torch.distributed.algorithms.Join([model]):` around the loop"},
    "GossipWrapper": {**DDP_ATTRIBUTES, **MISSING, **WORKING},
    "GraphManager": {
        "get_peers": _PEERS,
        "get_edges": _PEERS,
        "peers_per_itr": "write graph.num_peers(t); a schedule is an argument, as in peers_per_itr={0: 2, 90: 1}",
        "is_regular_graph": "read graph.is_regular",
        "is_bipartite_graph": "read graph.is_bipartite",
        "is_dynamic_graph": "read graph.is_dynamic",
    },
    "GroupAverageDataParallel": dict.fromkeys(("join", "join_hook"), _ROUNDS),
    "MixingManager": {
        "get_mixing_weights": "write mixing.weights(rank, t), for round t",
        "is_regular": "read mixing.graph.is_regular",
    },
}
"""The attributes that a class does not have, by its name: an object of it answers with the value or the remedy."""
