"""Parameters sharded over processes (DTensors): the memory of the shard in this process."""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn


def is_sharded(x: object) -> bool:
    """Whether it is a DTensor, without the import of that class, which takes a second."""
    return hasattr(x, "placements") and hasattr(x, "_local_tensor")


def is_cut(x: Any) -> bool:
    """Whether processes hold different elements of it."""
    return is_sharded(x) and not all(placement.is_replicate() for placement in x.placements)


def num_parts(x: Any) -> int:
    """Return the number of parts into which processes have cut a tensor; 1 for a whole one."""
    if not is_sharded(x):
        return 1
    sizes = zip(x.device_mesh.shape, x.placements, strict=True)
    return math.prod(size for size, placement in sizes if not placement.is_replicate())


def local_of(x: Any) -> Tensor:
    """Return the elements of a tensor in this process; shares memory."""
    local: Tensor = x._local_tensor if is_sharded(x) else x
    return local


def gathered(x: Any) -> Tensor:
    """Return all elements of a tensor; collective over the processes with its shards."""
    whole: Tensor = x.full_tensor() if is_sharded(x) else x
    return whole


class Shard:
    """The shard of a parameter in this process. Its memory can be moved into another vector.

    [Note: memory of a shard] A DTensor computes with its local tensor. A module of `fully_shard` gathers parameters
    from a flat tensor instead. The flat tensor contains the local tensor, and rows of padding if the shard is smaller
    than others. Both are pointed into the vector, with the padding, so that the optimizer, `fully_shard` and
    gossip work on the same memory, and vectors of all shards are equally long. Gathered parameters ignore the padding.

    torch has no public name for the flat tensor: `_sharded_param_data` is there in torch 2.7 to 2.15.

    Args:
        parameter: a DTensor, the parameter of the module.
        manager: the object of `fully_shard` for this parameter; None: another tool has sharded it.
    """

    def __init__(self, parameter: Any, manager: Any) -> None:
        self.parameter, self.manager = parameter, manager

    @property
    def memory(self) -> Tensor:
        """The local elements, with their padding; shares memory."""
        if self.manager is None:
            return local_of(self.parameter)
        flat: Tensor = self.manager._sharded_param_data
        return flat.view(self.manager.padded_sharded_param_size)

    def move(self, memory: Tensor) -> None:
        """Point the parameter to `memory`, with the shape and the values of `memory`."""
        if self.manager is not None:
            self.manager._sharded_param_data = memory.view(-1)
        self.parameter._local_tensor = self._without_padding(memory)

    def is_at(self, parameter: object, address: int) -> bool:
        """Whether this is the parameter, and its elements are at this address."""
        local = local_of(self.parameter)
        is_there = parameter is self.parameter and self.memory.data_ptr() == address
        return is_there and (local.data_ptr() == address or not local.numel())

    @property
    def gradient_source(self) -> Tensor:
        """The tensor with the whole accumulated gradient; autograd makes the gradient of the shard of it."""
        source: Tensor = getattr(self.manager, "_unsharded_param", self.parameter)
        return source

    def like(self, memory: Tensor) -> Tensor:
        """Return a DTensor of the parameter's placements over `memory`, a place in another vector."""
        from torch.distributed.tensor import DTensor

        p, local = self.parameter, self._without_padding(memory)
        options: dict[str, Any] = {"run_check": False, "shape": p.shape, "stride": p.stride()}
        return DTensor.from_local(local, p.device_mesh, p.placements, **options)

    def _without_padding(self, memory: Tensor) -> Tensor:
        local = local_of(self.parameter)
        if self.manager is not None:
            dim = self.manager.fsdp_placement.dim
            memory = memory.narrow(dim, 0, local.size(dim) if local.numel() else 0)
        return memory.view(local.shape)

    def describe(self) -> str:
        """Return place, mesh and placements as text: ranks exchange shards of one place only."""
        mesh = self.parameter.device_mesh
        place = mesh.get_coordinate()
        return f" shard {tuple(place)} of {tuple(mesh.shape)} by {tuple(map(str, self.parameter.placements))}"


def with_shards(state: Any, of: Any) -> Any:
    """Return the state of an optimizer with DTensors for sharded parameters; another state unchanged.

    Args:
        state: a state dict with the elements of this process.
        of: the object that will load it.
    """
    parameters = [parameter for group in getattr(of, "param_groups", ()) for parameter in group["params"]]
    if not any(map(is_sharded, parameters)):
        return state

    def like(k: int, x: Any) -> Any:
        p = parameters[k]
        is_shard = is_sharded(p) and isinstance(x, Tensor) and x.shape == local_of(p).shape
        return Shard(p, None).like(x) if is_shard else x

    each = {k: {name: like(int(k), x) for name, x in entries.items()} for k, entries in state["state"].items()}
    return {**state, "state": each}


class Shards:
    """The sharded parameters of a module.

    Args:
        module: it may have none.
    """

    def __init__(self, module: nn.Module) -> None:
        self._modules = list(_managed(module))

    def reshard(self) -> None:
        """Let modules of `fully_shard` have their shards as parameters, and gather them again before they compute."""
        for module in self._modules:
            module.reshard()

    def gather_once(self) -> None:
        """Gather the parameters, and free them, so that `Shard.gradient_source` is there; collective."""
        for module in self._modules:
            module.unshard()
            module.reshard()

    def of(self, module: nn.Module) -> dict[int, Shard]:
        """The shards of the parameters and buffers of the module, by the id of the tensor; also replicated DTensors.

        The gathered parameters get the `requires_grad` of the sharded ones, because `fully_shard` makes them once.
        """
        managers = {id(manager.sharded_param): manager for part in self._modules for manager in _managers(part)}
        for manager in managers.values():
            if hasattr(manager, "_unsharded_param"):
                manager._unsharded_param.requires_grad_(manager.sharded_param.requires_grad)
        tensors = (*module.parameters(), *module.buffers())
        return {id(x): Shard(x, managers.get(id(x))) for x in tensors if is_sharded(x)}


def _managed(module: nn.Module) -> Iterator[Any]:
    """Yield the submodules of `fully_shard`; none if torch.distributed.fsdp was never imported."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    kind = getattr(fsdp, "FSDPModule", None)
    return (part for part in module.modules() if kind is not None and isinstance(part, kind))


def _managers(module: Any) -> Iterator[Any]:
    """Yield the objects of `fully_shard` for the parameters of one of its modules."""
    for group in _groups(module):
        yield from group.fsdp_params


def _groups(module: Any) -> list[Any]:
    """Return the groups of parameters gathered together."""
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)  # in torch 2.7 there is one, or none
    return [group for group in ([state._fsdp_param_group] if groups is None else groups) if group is not None]


def meshes_of(module: nn.Module) -> list[Any]:
    """The device meshes over which parameters of a module are sharded, each once."""
    found: list[Any] = []
    for parameter in module.parameters():
        if is_sharded(parameter) and parameter.device_mesh not in found:  # type: ignore[attr-defined]
            found.append(parameter.device_mesh)  # type: ignore[attr-defined]
    return found


def is_gathered(module: nn.Module) -> bool:
    """Whether `fully_shard` was called with the module or with a part of it."""
    return any(True for _ in _managed(module))


@contextlib.contextmanager
def without_reduction(module: nn.Module) -> Iterator[None]:
    """Inside, backward accumulates gradients without a reduction over the processes of `fully_shard`."""
    groups = [group for part in _managed(module) for group in _groups(part)]
    before = [(group.reduce_grads, group.all_reduce_grads) for group in groups]
    for group in groups:
        group.reduce_grads = group.all_reduce_grads = False
    try:
        yield
    finally:
        for group, values in zip(groups, before, strict=True):
            group.reduce_grads, group.all_reduce_grads = values


def is_managed(module: nn.Module) -> bool:
    """Whether `fully_shard` was called with this module itself."""
    return module in _managed(module)


def reduces_gradients(module: nn.Module) -> bool:
    """Whether `fully_shard` leaves gradients on the parameters; see its `set_requires_all_reduce`."""
    groups = [group for part in _managed(module) for group in _groups(part)]
    return all(group.all_reduce_grads or not getattr(group, "_is_hsdp", False) for group in groups)
