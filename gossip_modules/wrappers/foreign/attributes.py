"""Attributes that a wrapper does not have, and users expect: an AttributeError says what takes their place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import nn


class ForeignAttributes:
    """A base of a wrapper, before nn.Module: the AttributeError of a missing attribute says what takes its place.

    `hasattr` is False for such an attribute. An attribute that only the wrapped module has is named as well.
    """

    _foreign_attributes: ClassVar[Mapping[str, str]] = {}
    """What takes the place of an attribute, as a clause, by its name; a subclass extends that of its base."""

    def __getattr__(self, name: str) -> Any:
        module = self.__dict__.get("_modules", _NONE).get("module")  # None before the constructor has set it
        if name == "module" and module is not None:  # in every forward
            return module
        try:
            return super().__getattr__(name)  # type: ignore[misc]
        except AttributeError as error:
            if (remedy := self._remedy(name, module)) is None:
                raise
            raise AttributeError(f"{error}: {remedy}", name=name, obj=self) from None

    def _remedy(self, name: str, module: nn.Module | None) -> str | None:
        if (remedy := type(self)._foreign_attributes.get(name)) is not None:
            return remedy
        if module is None or name.startswith("_") or not hasattr(module, name):
            return None
        return f"the module in it has; write model.module.{name}"


_NONE: Mapping[str, Any] = {}
