"""The dicts in which a module of torch keeps its parameters, buffers and children.

Its public methods yield copies of the entries, and each tensor once. Tensors that a training loop has swapped, tied or
removed are found only in the dicts themselves. They belong to the module: do not change them.
"""

from __future__ import annotations

from torch import Tensor, nn


def parameters_of(owner: nn.Module) -> dict[str, nn.Parameter | None]:
    """The parameters of this module without its children, by attribute; the dict of the module itself."""
    return owner._parameters


def buffers_of(owner: nn.Module) -> dict[str, Tensor | None]:
    """The buffers of this module without its children, by attribute; the dict of the module itself."""
    return owner._buffers


def children_of(owner: nn.Module) -> dict[str, nn.Module | None]:
    """The children of this module, by attribute; the dict of the module itself."""
    return owner._modules


def is_persistent(owner: nn.Module, attribute: str) -> bool:
    """Whether `state_dict()` saves this buffer of the module."""
    return attribute not in owner._non_persistent_buffers_set
