"""Checkpoints of all ranks of a run, one file per rank, as one state for any number of ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from .wrappers.state import KEY, without_place

__all__ = ["average_checkpoints"]


def average_checkpoints(checkpoints: Iterable[Mapping[str, Any]], *, model: str = "model") -> dict[str, Any]:
    """Average the checkpoints of all ranks of a run, so that any number of ranks can go on from them.

    With push-sum the models are averaged as numerators, sum_i w_i z_i / sum_i w_i, the limit of gossip. In all other
    entries, such as the state of an optimizer, tensors are averaged without weights. Integers, and all that is no
    tensor, are of the first checkpoint.

    Args:
        checkpoints: the checkpoints of all ranks, from `torch.load`; the average holds one of them at a time.
        model: the key of the wrapper's state dict, with its metadata.

    Returns:
        The same keys. The model has the names of the module without a wrapper, and averages in float64 or complex128:
        load it into `wrapper.module` on all ranks, then call `wrapper.set_extra_state(None)`.

    Raises:
        ValueError: there is no checkpoint, or two of them have other keys.

    Example:
        >>> files = (torch.load(f"rank_{i}.pt", weights_only=True) for i in range(4))
        >>> state = average_checkpoints(files)
        >>> wrapper.module.load_state_dict(state["model"])
        >>> wrapper.set_extra_state(None)
        >>> optimizer.load_state_dict(state["optimizer"])
    """
    models = others = None
    weights, count, first = 0.0, 0, None
    for checkpoint in checkpoints:
        named, rest = without_place(checkpoint[model]), {key: x for key, x in checkpoint.items() if key != model}
        weight, first = _weight_of(checkpoint[model]), rest if first is None else first
        models, others = _add(models, named, weight), _add(others, rest, 1.0)
        weights, count = weights + weight, count + 1
    if models is None:
        raise ValueError("got no checkpoint, expected one for each rank of the run")
    average: dict[str, Any] = _divided(others, count, like=first)
    return {**average, model: _divided(models, weights)}


def _weight_of(state: Any) -> float:
    """The push-sum weight in the state dict of a wrapper."""
    gossip = getattr(state, "_metadata", {}).get("", {}).get(KEY) or {}
    return float(gossip.get("weight", 1.0))


def _add(total: Any, value: Any, weight: float) -> Any:
    """The tree `total` plus `weight` times the tree `value`; None: there is no total yet."""
    if isinstance(value, Mapping):
        if total is not None and total.keys() != value.keys():
            raise ValueError(
                f"got checkpoints of which one has {list(total)} and another one {list(value)}, expected the same on "
                "all ranks; average those of one run and one step"
            )
        return {key: _add(total and total[key], item, weight) for key, item in value.items()}
    if total is not None and _shape(total) != _shape(value):
        raise ValueError(
            f"got checkpoints of which one has {_shape(total)} where another one has {_shape(value)}, expected the "
            "same on all ranks; average those of one run and one step"
        )
    if isinstance(value, list | tuple):
        return [_add(total and total[k], item, weight) for k, item in enumerate(value)]
    if not _is_averaged(value):
        return value if total is None else total
    scaled = weight * value.to(torch.complex128 if value.is_complex() else torch.float64)
    return scaled if total is None else total.add_(scaled)


def _shape(value: Any) -> object:
    """The facts in which a value must be alike in all checkpoints."""
    if isinstance(value, list | tuple):
        return f"{len(value)} entries"
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


def _divided(total: Any, count: float, *, like: Any = None) -> Any:
    """The tree over `count`, with the types and dtypes of the tree `like`, if there is one."""
    if isinstance(total, dict):
        return {key: _divided(item, count, like=like and like[key]) for key, item in total.items()}
    if isinstance(total, list):
        items = (_divided(item, count, like=like and like[k]) for k, item in enumerate(total))
        return list(items) if like is None else type(like)(items)
    if not _is_averaged(total):
        return total
    return total / count if like is None else (total / count).to(like.dtype)


def _is_averaged(value: Any) -> bool:
    """Whether it is a tensor, and no count or the like."""
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())
