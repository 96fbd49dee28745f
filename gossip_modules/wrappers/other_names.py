"""The arguments and attributes of other wrappers, and what becomes of each: a table for each of them."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..old_calls import Action, ForeignArguments, Ignored, NewName, Refused, is_torch, levels_to_user

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

WAGMA_ARGUMENTS: ForeignArguments = {
    "groupsize": NewName("group_size"),
    "tau": NewName("sync_period"),
    "optimizer": Refused("the module is wrapped, not the optimizer; step an optimizer of model.parameters() as before"),
}
"""Of the optimizer wrapper of WAGMA-SGD, for GroupAverageDataParallel."""


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


class OldName:
    """A method or attribute of Stochastic Gradient Push that works here, with a warning, once for each wrapper.

    Args:
        get: its value, for a wrapper.
        remedy: the line to write instead, as a clause.
    """

    def __init__(self, get: Callable[[Any], Any], remedy: str) -> None:
        self._get, self.remedy = get, remedy

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, wrapper: Any, owner: type) -> Any:
        if wrapper is None:
            return self
        if not is_torch(sys._getframe(1)):  # torch.jit.trace reads all attributes
            _warn_once(wrapper, self._name, self.remedy)
        return self._get(wrapper)


def _warn_once(wrapper: Any, name: str, remedy: str) -> None:
    said = wrapper.__dict__.setdefault("_said_old_names", set())
    if name not in said:
        said.add(name)
        text = f"got {type(wrapper).__name__}.{name}, a name of Stochastic Gradient Push: {remedy}"
        warnings.warn(text, UserWarning, stacklevel=levels_to_user())


def _transfer_params(wrapper: Any) -> Callable[..., bool]:
    def transfer_params(mix: bool = True) -> bool:
        if getattr(wrapper, "rounds", "") == "manual":
            wrapper.gossip_step()
        return True

    return transfer_params


def _block(wrapper: Any) -> Callable[[], None]:
    transport = wrapper._local.averager.transport
    return lambda: transport.all_reduce(torch.zeros(1, device=transport.device), what="block()")


def _push_sum_weight(wrapper: Any) -> Tensor:
    """The push-sum weight, float64 [1], a copy; 1 for a wrapper without one."""
    buffer = getattr(wrapper._local, "buffer", None)
    return torch.ones(1, dtype=torch.float64, device="cpu") if buffer is None else buffer.vector.push_sum_weight.clone()


def _nothing(wrapper: Any) -> Callable[[], None]:
    return lambda: None


_ESTIMATE = "parameters hold the de-biased estimate wherever your code sees them"


class OldNames(nn.Module):
    """A base of a wrapper: names of other wrappers, which work with a warning, or whose error tells the remedy.

    `hasattr` is False for an attribute that is an error. An attribute that only the wrapped module has is named too.
    """

    _foreign_attributes: ClassVar[Mapping[str, str]] = {}
    """What takes the place of an attribute, as a clause, by its name; a subclass extends the table of its base."""

    transfer_params = OldName(
        _transfer_params,
        "rounds run by themselves, so leave it out; with rounds='manual' write model.gossip_step()",
    )
    sync_comms = OldName(lambda wrapper: wrapper.flush, "write model.flush()")
    block = OldName(_block, "write torch.distributed.barrier()")
    communicator_warmup = OldName(_nothing, "connections are made in the constructor; leave the call out")
    unbias = OldName(_nothing, f"{_ESTIMATE}; leave the call out")
    ps_numerator = OldName(_nothing, f"{_ESTIMATE}; leave the call out")
    is_ps_numerator = OldName(lambda wrapper: False, f"{_ESTIMATE}; it is always False")
    ps_weight = OldName(_push_sum_weight, 'read model.get_extra_state()["weight"]')

    def __getattr__(self, name: str) -> Any:
        module = self.__dict__.get("_modules", _NONE).get("module")  # None before the constructor has set it
        if name == "module" and module is not None:  # in every forward
            return module
        try:
            return super().__getattr__(name)
        except AttributeError as error:
            remedy = self._foreign_attributes.get(name)
            if remedy is None and module is not None and not name.startswith("_") and hasattr(module, name):
                remedy = f"the module in it has; write model.module.{name}"
            if remedy is None:
                raise
            raise AttributeError(f"{error}: {remedy}", name=name, obj=self) from None

    def state_dict(self, *args: Any, finish_gossip: object = None, **kwargs: Any) -> Any:
        """As `nn.Module.state_dict`; `finish_gossip` changes nothing, as corrections in flight are always applied."""
        if finish_gossip is not None:
            remedy = "write model.state_dict(), which always applies what is in flight"
            _warn_once(self, "state_dict(finish_gossip=...)", remedy)
        return super().state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """As `nn.Module.load_state_dict`.

        Raises:
            ValueError: it is the checkpoint of Stochastic Gradient Push, which has a state dict inside.
        """
        if {"state_dict", "ps_weight"} <= set(state_dict):
            raise ValueError(
                f"got a checkpoint of Stochastic Gradient Push to load into a {type(self).__name__}, expected its "
                'state dict; write model.load_state_dict(checkpoint["state_dict"]), with parameters divided by '
                'checkpoint["ps_weight"] where checkpoint["is_ps_numerator"] is true'
            )
        return super().load_state_dict(state_dict, *args, **kwargs)


_NONE: Mapping[str, Any] = {}
WORKING: Mapping[str, str] = {name: old.remedy for name, old in vars(OldNames).items() if isinstance(old, OldName)}
"""The names of Stochastic Gradient Push that work; each with the line to write, as a clause."""
