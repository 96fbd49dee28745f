"""Copies of the model in the checkpoint of a host, such as an EMA of a callback: the file has their averages.

[Note: Copies of the model] A callback may put models into the checkpoint of a host: in place of the model, beside it,
or in the state of the callback. Each rank has other ones. They are found by their tensors, not by the class of the
callback: a dict with the names and shapes of the trained parameters, perhaps behind a prefix, or a list with the
shapes in the order of the parameters.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from ..flat.vector import FlatVector
from ..transport.agreement import broadcast_state
from ..wrappers.averaging import calling_as
from ..wrappers.base import GossipWrapper

Path: TypeAlias = tuple[Any, ...]
"""The keys from the root of a tree to a copy."""


class Copy(NamedTuple):
    """A dict or a list with a tensor for each trained parameter.

    Attributes:
        place: the dict or list.
        names: the names in the module by the keys of its tensors in the dict, or by their numbers in the list.
    """

    place: Any
    names: dict[Any, str]

    @property
    def tensors(self) -> dict[Any, Tensor]:
        """The tensors of the copy, by their keys."""
        return {key: self.place[key] for key in self.names}

    def __str__(self) -> str:
        return "; ".join(f"{self.names[key]} {tuple(x.shape)} {x.dtype}" for key, x in self.tensors.items())


class ModelCopies:
    """The copies of the model of a wrapper.

    Args:
        wrapper: not closed.
    """

    def __init__(self, wrapper: GossipWrapper) -> None:
        local, module = wrapper._local, wrapper.module
        self._wrapper, self._local = wrapper, local
        named, trained = list(module.named_parameters()), set(map(id, local.trained))
        self._parameters = {name: p.shape for name, p in named if id(p) in trained}
        self._lists = (list(self._parameters.items()), [(name, p.shape) for name, p in named])
        means = {*self._parameters, *local.selection.averaged(module)}
        self._of_first = {name for name, _ in (*named, *module.named_buffers()) if name not in means}

    def averaged(self, tree: Mapping[str, Any], own: Mapping[str, Any], *, model: str = "") -> dict[str, Any]:
        """A tree that has the average over the ranks in place of each copy; collective, and the result is for rank 0.

        Call it where nothing is in flight. Tensors without a mean, such as frozen ones, are taken from rank 0.

        Args:
            tree: the tree of this rank; not changed.
            own: the state dict of this rank's own model. `averaged_state_dict()` takes the place of its tensors.
            model: the key of an entry that is a model whatever the names in it are; "" = none.
        """
        copies = dict(self._find(tree, ()))
        if isinstance(found := tree.get(model), Mapping):
            names = {key: key for key, x in found.items() if isinstance(x, Tensor)}
            copies.setdefault((model,), Copy(found, names))
        own_names = {id(x): name for name, x in own.items()}
        result, exact = dict(tree), dict[str, Any]()
        with calling_as("saving a checkpoint"), torch.no_grad():
            for path, is_own in self._common(copies, own_names).items():
                if is_own:
                    exact = exact or self._wrapper.averaged_state_dict(rank0_only=False)
                    means = {key: exact[own_names[id(x)]] for key, x in copies[path].tensors.items()}
                else:
                    means = self._mean(copies[path])
                result = _replaced(result, path, means)
        return result

    def _find(self, tree: Any, path: Path) -> Iterator[tuple[Path, Copy]]:
        if names := self._names(tree):
            yield path, Copy(tree, names)
        elif isinstance(tree, Mapping | list | tuple):
            for key, value in tree.items() if isinstance(tree, Mapping) else enumerate(tree):
                yield from self._find(value, (*path, key))

    def _names(self, tree: Any) -> dict[Any, str]:
        """The names of a copy; {} for another tree."""
        if isinstance(tree, list | tuple):
            shapes = [x.shape if isinstance(x, Tensor) else None for x in tree]
            of = next((named for named in self._lists if [shape for _, shape in named] == shapes), [])
            return {k: name for k, (name, _) in enumerate(of)}
        if not isinstance(tree, Mapping):
            return {}
        first = next(iter(self._parameters))
        prefixes = [key.removesuffix(first) for key in tree if isinstance(key, str) and key.endswith(first)]
        for prefix in prefixes:
            if all(_shape(tree.get(prefix + name)) == shape for name, shape in self._parameters.items()):
                tensors = (key for key, x in tree.items() if isinstance(x, Tensor) and key.startswith(prefix))
                return {key: key.removeprefix(prefix) for key in tensors}
        return {}

    def _common(self, copies: Mapping[Path, Copy], own: Collection[int]) -> dict[Path, bool]:
        """The paths of the copies that all ranks have, and whether they are their own models on all ranks."""
        transport = self._local.averager.transport
        mine = {repr(path): path for path in copies}
        listed = {name: str(copies[path]) for name, path in mine.items()}
        listed = broadcast_state(transport, listed, source=0, what="the copies of the model in a checkpoint")
        counts = torch.zeros(2 * len(listed), dtype=torch.int64, device=self._local.trained[0].device)
        for k, (name, text) in enumerate(listed.items()):
            if name in mine and str(found := copies[mine[name]]) == text:
                counts[2 * k] = 1
                counts[2 * k + 1] = all(id(x) in own for x in found.tensors.values())
        self._local.sum_over_ranks(counts)
        rows = dict(zip(listed, counts.view(-1, 2).tolist(), strict=True))
        if others := [name for name, (count, _) in rows.items() if count < transport.world_size]:
            warnings.warn(
                f"got a checkpoint with copies of the model at {', '.join(others)} that not all ranks have, or not "
                "with the same names, expected one on each rank: the file has the copy of rank 0, which is no average",
                stacklevel=2,
            )
        n = transport.world_size
        return {mine[name]: num_own == n for name, (count, num_own) in rows.items() if count == n}

    def _mean(self, found: Copy) -> dict[Any, Tensor]:
        """The means of the tensors of a copy, in CPU memory, by their keys; collective."""
        is_mean = {key: name not in self._of_first and _is_real(found.place[key]) for key, name in found.names.items()}
        means = {key: x.detach().to("cpu", copy=True) for key, x in found.tensors.items()}
        if tensors := [x for key, x in means.items() if is_mean[key]]:
            vector = FlatVector.pack(tensors, device=self._local.trained[0].device)
            self._local.averager.mix(vector, 0)
            vector.unpack_to(tensors)
        return means


def _shape(x: Any) -> torch.Size | None:
    return x.shape if isinstance(x, Tensor) else None


def _is_real(x: Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()


def _replaced(tree: Any, path: Path, values: Mapping[Any, Any]) -> Any:
    """The tree with these values in the dict or list at the path; the rest is shared."""
    if path:
        values = {path[0]: _replaced(tree[path[0]], path[1:], values)}
    if isinstance(tree, tuple):
        return tuple(values.get(k, x) for k, x in enumerate(tree))
    changed = copy.copy(tree)
    for key, value in values.items():
        changed[key] = value
    return changed
