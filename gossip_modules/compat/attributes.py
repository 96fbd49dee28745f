"""Attributes and checkpoints of other libraries: they work with a warning, or an error tells the remedy."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

from ..warn import levels_to_user
from .actions import Works
from .tables import ATTRIBUTES


def attribute(owner: object, name: str, error: AttributeError) -> Any:
    """Return the value of an attribute that an object does not have.

    An attribute that only the module in a wrapper has is named too.

    Args:
        owner: the object.
        name: the name of the attribute.
        error: that it has none.

    Raises:
        AttributeError: it works in no way; the error has the remedy, where there is one.
    """
    tables = (ATTRIBUTES.get(kind.__name__, {}) for kind in type(owner).__mro__)
    found = next((table[name] for table in tables if name in table), None)
    if isinstance(found, Works):
        _warn_once(owner, name, found.remedy)
        return found.get(owner)
    module = vars(owner).get("_modules", {}).get("module")
    if found is None and module is not None and not name.startswith("_") and hasattr(module, name):
        found = f"the module in it has; write model.module.{name}"
    if found is None:
        try:
            raise error
        finally:
            del error  # it holds this frame, and so the owner, which is to go without a garbage collection
    raise AttributeError(f"{error}: {found}", name=name, obj=owner) from None


def check_state_dict(wrapper: object, state_dict: Mapping[str, Any]) -> None:
    """Raise ValueError for the checkpoint of Stochastic Gradient Push, which has a state dict inside."""
    if {"state_dict", "ps_weight"} <= set(state_dict):
        raise ValueError(
            f"got a checkpoint of Stochastic Gradient Push to load into a {type(wrapper).__name__}, expected its "
            'state dict; write model.load_state_dict(checkpoint["state_dict"]), with parameters divided by '
            'checkpoint["ps_weight"] where checkpoint["is_ps_numerator"] is true'
        )


_said: WeakKeyDictionary[Any, set[str]] = WeakKeyDictionary()


def _warn_once(owner: object, name: str, remedy: str) -> None:
    said = _said.setdefault(owner, set())
    if name not in said:
        said.add(name)
        text = f"got {type(owner).__name__}.{name}, a name of Stochastic Gradient Push: {remedy}"
        warnings.warn(text, stacklevel=levels_to_user())
