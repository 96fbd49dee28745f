"""Names that attributes and arguments of the public classes had: they work, and warn."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

_P = ParamSpec("_P")
_R = TypeVar("_R")


class Renamed:
    """A former name of the attribute or method `new` of a class; deprecated.

    Example:
        >>> class Vector:
        ...     push_sum_weight = 1.0
        ...     weight = Renamed("push_sum_weight")
    """

    def __init__(self, new: str) -> None:
        self.new = new

    def __set_name__(self, owner: type, name: str) -> None:
        self.old = f"{owner.__name__}.{name}"

    def __get__(self, instance: object, owner: type) -> Any:
        if instance is None:
            return self
        _warn(self.old, self.new)
        return getattr(instance, self.new)

    def __set__(self, instance: object, value: Any) -> None:
        _warn(self.old, self.new)
        setattr(instance, self.new, value)


def renamed_argument(old: str, new: str) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """A decorator: the keyword argument `new` of a function may also be given as `old`; deprecated."""

    def decorate(function: Callable[_P, _R]) -> Callable[_P, _R]:
        @functools.wraps(function)
        def wrapper(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            if old in kwargs:
                if new in kwargs:
                    raise TypeError(f"{function.__qualname__}() got {old}= and {new}=, expected {new}= alone")
                _warn(f"{function.__qualname__}({old}=)", f"{new}=")
                kwargs[new] = kwargs.pop(old)
            return function(*args, **kwargs)

        return wrapper

    return decorate


def _warn(old: str, new: str) -> None:
    warnings.warn(f"{old} is now {new}; the old name will go", DeprecationWarning, stacklevel=3)
