"""What a gossip wrapper cannot be combined with: other tools that keep, shard or average the same parameters."""

from __future__ import annotations

import gc
import sys
import threading
import traceback
import weakref
from collections.abc import Collection, Iterator, Mapping

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..flat.aliases import has_memory, instances_of
from ..flat.sharded import is_managed, meshes_of, reduces_gradients
from ..loop.hooks import holds_any
from .averaging import AveragingMixin

_REMEDY = "one wrapper keeps the models of all ranks together: remove the other one, and wrap the plain module once"
_CLOSE_REMEDY = "go on with that one, or close() it before"
_MESH_EXAMPLE = (
    "mesh = init_device_mesh(device, (replicas, shards), mesh_dim_names=('replicate', 'shard')); fully_shard(model, "
    "mesh=mesh['shard']); then wrap with device_mesh=mesh['replicate']"
)
_FSDP_REMEDY = (
    "shard the plain module by fully_shard(module, mesh=mesh['shard']) (FSDP2) before you wrap it, and pass "
    "device_mesh=mesh['replicate'], the dimension over which replicas gossip"
)
# Tools that wrap models by themselves, by the package whose code runs where that is noticed, and the remedy for each.
_HOSTS = {
    "transformers.trainer": "the Trainer of Transformers wraps models by itself: write class GossipTrainer("
    "GossipTrainerMixin, Trainer) with gossip = dict(...), of gossip_modules.integrations.transformers",
    "lightning.pytorch": "Lightning wraps models by itself: pass Trainer(strategy=GossipStrategy(gossip=dict(...))), "
    "of gossip_modules.integrations.lightning",
    "lightning.fabric": "Fabric wraps models by itself: pass Fabric(strategy=GossipFabricStrategy(gossip=dict(...))), "
    "of gossip_modules.integrations.lightning",
    "accelerate": "prepare() of Accelerate wraps models by itself: make a GossipAccelerator(..., gossip=dict(...)), of "
    "gossip_modules.integrations.accelerate",
}
_live: weakref.WeakSet[AveragingMixin] = weakref.WeakSet()
_lock = threading.RLock()  # around changes of _live and walks over it, in which wrappers may be collected


def claim(wrapper: AveragingMixin, *, is_copy: bool = False) -> None:
    """Note that the wrapper keeps its parameters from now on, until `release` or until it is collected.

    Modules in it whose `gossip()` was closed are plain ones from now on.

    Args:
        wrapper: the wrapper, at the end of its construction.
        is_copy: whether it is a copy of another wrapper; its module may not be complete yet.
    """
    for part in () if is_copy else wrapper.module.modules():
        if isinstance(vars(part).get("_gossip"), AveragingMixin):
            part._remove_gossip()  # type: ignore[operator]
    with _lock:
        _live.add(wrapper)


def release(wrapper: AveragingMixin) -> None:
    """Note that the wrapper is closed; idempotent."""
    with _lock:
        _live.discard(wrapper)


def check_inside(module: nn.Module, *, wrapper: str) -> None:
    """Refuse a module that another tool keeps equal, averages or shards already; when it is wrapped.

    Args:
        module: about to be wrapped.
        wrapper: the name of the class that is about to do so.

    Raises:
        ValueError: naming the submodule and the tool; or the parameter that another wrapper keeps; or that this is
            no module.
    """
    if not isinstance(module, nn.Module):
        raise ValueError(
            f"got {module!r} to wrap in {wrapper}, expected a torch.nn.Module; build the model first and pass it, not "
            "its class or its parameters"
        )
    for name, part in module.named_modules():
        for other, remedy in _tools_of(part, root=module):
            what = f"in which '{name}' is {other}" if name else f"that is {other}"
            raise ValueError(f"got a module {what}, to wrap in {wrapper}, expected a plain module; {remedy}")
    _check_is_free(module, wrapper=wrapper)


def check_outside(module: nn.Module, *, was_sharded: bool) -> None:
    """Refuse other tools that were put around or over a wrapper after it was made.

    Args:
        module: the wrapper.
        was_sharded: whether its module was sharded over processes when it was wrapped.

    Raises:
        RuntimeError: naming the tool.
    """
    name = type(module).__name__
    around = DistributedDataParallel._active_ddp_module
    if around is not None and any(part is module.module for part in around.modules()):
        raise RuntimeError(
            f"got a {name} inside a {type(around).__name__}, which averages its gradients over all ranks as well; "
            f"expected no other wrapper around it; {_host_remedy(around) or _REMEDY}; for tools that wrap models by "
            "themselves there are classes in gossip_modules.integrations"
        )
    for part in module.modules():
        for other, remedy in _tools_of(part, with_wrappers=False):
            raise RuntimeError(f"got a {name} to which a tool was applied that makes it {other}; {remedy}")
    # Both kinds of FSDP set it in the modules that they manage.
    is_marked = any(getattr(part, "_is_fsdp_managed_module", False) for part in module.modules())
    if is_managed(module) or (is_marked and not was_sharded):
        raise RuntimeError(
            f"got a {name} to which fully_shard or FullyShardedDataParallel was applied after it was made; "
            f"{_FSDP_REMEDY}"
        )


def check_sharding(module: nn.Module, process_group: dist.ProcessGroup | None, *, has_membership: bool = False) -> bool:
    """Whether the module is sharded over processes; these processes do not gossip with each other.

    Args:
        module: a module, sharded or not.
        process_group: the group in which replicas gossip.
        has_membership: whether replicas gossip over the links of a membership.

    Raises:
        ValueError: the module is sharded, and `process_group` is no dimension of its own.
    """
    meshes = meshes_of(module)
    if not meshes:
        return False
    if process_group is None and not has_membership:
        raise ValueError(
            "got a module that is sharded over processes (fully_shard, or a plan of DTensors) and no device_mesh, "
            f"expected the dimension of the mesh over which its replicas gossip: {_MESH_EXAMPLE}"
        )
    gossiping = set() if process_group is None else set(dist.get_process_group_ranks(process_group)) - {dist.get_rank()}
    for mesh in meshes:
        ranks = mesh.mesh.flatten().tolist()
        if both := sorted(gossiping.intersection(ranks)):
            raise ValueError(
                f"got a module that is sharded or replicated over ranks {sorted(ranks)}, of which {both} are to gossip "
                f"with this rank, expected a mesh of the shards of one replica alone: {_MESH_EXAMPLE}"
            )
    if not reduces_gradients(module):
        raise ValueError(
            "got a module of fully_shard over a mesh of two dimensions with set_requires_all_reduce(False), with which "
            "torch leaves no gradients on the parameters; expected a mesh of the shards alone, with replicas that "
            f"gossip: {_MESH_EXAMPLE}"
        )
    return True


def check_whole(module: nn.Module, *, what: str) -> None:
    """Raise ValueError where the module is sharded over processes, which `what`, in words, cannot have."""
    if meshes_of(module):
        raise ValueError(
            f"got a module that is sharded over processes (fully_shard, or a plan of DTensors) with {what}, expected a "
            "whole model in each process; gossip between sharded replicas by GossipDataParallel(module, "
            "device_mesh=...), or with a membership"
        )


def check_optimizers(module: nn.Module, parameter: Tensor, *, equal_ranks: Collection[int] = ()) -> None:
    """Refuse an optimizer that steps each parameter on one rank and sends it to others, whose models differ.

    Args:
        module: the wrapper.
        parameter: one that it gossips.
        equal_ranks: the global ranks of the processes of a node, which hold one model.

    Raises:
        RuntimeError: naming the optimizer.
    """
    module_of_zero = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    kind = getattr(module_of_zero, "ZeroRedundancyOptimizer", None)  # missing while another thread imports it
    optimizers = [] if kind is None else instances_of(kind)
    for optimizer in optimizers:
        if not holds_any(optimizer, [parameter]):
            continue
        ranks = dist.get_process_group_ranks(optimizer.process_group)
        if not set(ranks) <= set(equal_ranks):
            raise RuntimeError(
                f"got a ZeroRedundancyOptimizer over the parameters of a {type(module).__name__} on ranks {ranks}: it "
                "steps each parameter on one rank and sends it to the others, which overwrites their models; expected "
                "an optimizer of each rank's own, or, with nprocs_per_node, of the processes of one node. Use the "
                "optimizer inside it directly, e.g. torch.optim.AdamW(model.parameters()), or pass it process_group= "
                "of this node"
            )


def _check_is_free(module: nn.Module, *, wrapper: str) -> None:
    """Refuse parameters that another wrapper keeps: both would point them into vectors of their own, in turn."""
    trained = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
    names = {id(parameter): name for name, parameter in trained.items()}
    # The parameters of a twin, which are others in the same memory.
    names |= {parameter.data_ptr(): name for name, parameter in trained.items() if has_memory(parameter)}
    if _taken(names) is None:
        return
    gc.collect()  # a wrapper that nobody has any more may wait for it: gossip() and its module refer to each other
    if (taken := _taken(names)) is not None:
        raise ValueError(
            f"got a module whose parameter '{taken[0]}' is in a {taken[1]} already, to wrap in {wrapper}, expected a "
            f"module that no other wrapper has; {_CLOSE_REMEDY}"
        )


def _taken(names: Mapping[int, str]) -> tuple[str, str] | None:
    """The name of the first parameter that a wrapper keeps, and the class of that wrapper.

    Args:
        names: the names of parameters, by id and by the address of their elements.
    """
    # Until the function has returned, and so holds no wrapper any more: a thread that drops one meanwhile must not find
    # it still there when its own turn comes.
    with _lock:
        return _first_taken(names)


def _first_taken(names: Mapping[int, str]) -> tuple[str, str] | None:
    for other in _live:
        for parameter in other._local.trained:
            for key in (id(parameter), parameter.data_ptr() if has_memory(parameter) else 0):
                if key in names:
                    return names[key], type(other).__name__
    return None


def _host_remedy(*modules: nn.Module) -> str:
    """The remedy where one of `_HOSTS` has made these modules, or is running; "" for none."""
    names = {str(frame.f_globals.get("__name__")) for frame, _ in traceback.walk_stack(None)}
    names |= {type(module).__module__ for module in modules}
    if any(hasattr(module, "_is_accelerate_prepared") for module in modules):
        names.add("accelerate")
    for host, remedy in _HOSTS.items():
        if any(f"{name}.".startswith(f"{host}.") for name in names):
            return f"{remedy}, and give it the plain model"
    return ""


def _tools_of(
    module: nn.Module, *, with_wrappers: bool = True, root: nn.Module | None = None
) -> Iterator[tuple[str, str]]:
    """What else keeps the module's parameters, in words, and what to do about it; root: the module that it is in."""
    if with_wrappers and isinstance(module, DistributedDataParallel | AveragingMixin):
        remedy = _host_remedy(module, root or module) or f"{_REMEDY}; its .module is the plain one"
        yield f"a {type(module).__name__}", remedy
    if with_wrappers and vars(module).get("_gossip") in _live:
        yield f"a {type(module).__name__}, which gossip() made", _CLOSE_REMEDY
    # A script that uses one of these has imported it. While another thread imports it, the names are missing.
    kind = getattr(sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", None)
    if kind is not None and isinstance(module, kind):
        yield "sharded over processes by FullyShardedDataParallel (FSDP1)", _FSDP_REMEDY
    registry = getattr(sys.modules.get("torch.distributed._composable.contract"), "_get_registry", None)
    if registry is not None and "replicate" in (registry(module) or ()):
        yield "replicated by replicate(), which averages gradients over all ranks", _REMEDY
