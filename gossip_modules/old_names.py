"""The seam to `gossip_modules.compat`, which answers arguments and names that are not of this library.

Only a call or a name that would be an error comes here. Without the package `compat` it is Python's own error.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from torch import nn

from .extras import MissingExtra, load

_P = ParamSpec("_P")
_R = TypeVar("_R")


def takes_old_arguments(
    *, passed_on_to: Callable[..., Any] | None = None
) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """A decorator: the function also takes the arguments of `compat.tables.ARGUMENTS` under its name.

    An argument of the function itself is never looked up. Tools still show the signature of the function.

    Args:
        passed_on_to: a function to which the keyword arguments are passed on: its arguments count as own ones.

    Example:
        >>> class RingGraph:
        ...     @takes_old_arguments()
        ...     def __init__(self, world_size: int) -> None: ...
    """

    def decorate(function: Callable[_P, _R]) -> Callable[_P, _R]:
        own, positional = _names(function)
        if passed_on_to is not None:
            own |= _names(passed_on_to)[0]
        parameters = inspect.signature(function).parameters.values()
        takes_all = any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters)

        @functools.wraps(function)
        def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            is_known = own.issuperset(kwargs) and (takes_all or len(args) <= len(positional))
            if is_known or (translated := _compat("arguments:translated")) is None:
                return function(*args, **kwargs)
            given, named = translated(function, args, kwargs, own=own, positional=positional)
            result: _R = function(*given, **named)
            return result

        return call

    return decorate


def _names(function: Callable[..., Any]) -> tuple[set[str], list[str]]:
    """The names of the arguments of a function, and of its positional ones in order."""
    parameters = inspect.signature(function).parameters.values()
    positional = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    return {*positional, *(p.name for p in parameters if p.kind is p.KEYWORD_ONLY)}, positional


def _compat(place: str) -> Callable[..., Any] | None:
    """The function of `compat` at this place; None: the package is not installed."""
    try:
        found: Callable[..., Any] = load(f"compat.{place}")
    except MissingExtra as error:
        if error.extra != "compat":
            raise
        return None
    return found


def _answer(owner: object, name: str, error: AttributeError) -> Any:
    """The value of an attribute that `owner` does not have; raises an AttributeError if it has none either."""
    try:
        if name.startswith("__") or (attribute := _compat("attributes:attribute")) is None:
            raise error
        return attribute(owner, name, error)
    finally:
        del error  # it holds this frame, and so the owner, which is to go without a garbage collection


def remedy_of_removed(name: str) -> str:
    """The replacement of a name that this library had, as a clause; "": it has it, or never had it."""
    remedy = _compat("moved:remedy_of_removed")
    return "" if remedy is None else str(remedy(name))


def module_attribute(module: str, name: str) -> Any:
    """The value of a name that a module of this library does not have.

    Raises:
        AttributeError: it has none in `compat.moved.MOVED` either.
        ImportError: it was in a version before.
    """
    error = AttributeError(f"module {module!r} has no attribute {name!r}", name=name)
    if name.startswith("__") or (found := _compat("moved:module_attribute")) is None:
        raise error
    return found(module, name, error)


class OldNames:
    """A base of graphs and weights: a missing attribute is looked up in `compat.tables.ATTRIBUTES`."""

    if not TYPE_CHECKING:  # a type checker knows the names of the class alone

        def __getattr__(self, name: str) -> Any:
            if hasattr(type(self), name):  # a property that raised AttributeError: once more, for its own error
                return object.__getattribute__(self, name)
            text = f"{type(self).__name__!r} object has no attribute {name!r}"
            return _answer(self, name, AttributeError(text, name=name, obj=self))


class OldModuleNames(nn.Module):
    """A base of wrappers that are modules: old attributes, old arguments of `state_dict` and old checkpoints."""

    def __getattr__(self, name: str) -> Any:
        module = self.__dict__.get("_modules", _NONE).get("module")  # None before the constructor has set it
        if name == "module" and module is not None:  # in every forward
            return module
        try:
            return super().__getattr__(name)
        except AttributeError as error:
            return _answer(self, name, error.with_traceback(None))

    @takes_old_arguments(passed_on_to=nn.Module.state_dict)
    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """See `nn.Module.state_dict`."""
        return super().state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """As `nn.Module.load_state_dict`.

        Raises:
            ValueError: it is the checkpoint of another library, which has a state dict inside.
        """
        if (check := _compat("attributes:check_state_dict")) is not None:
            check(self, state_dict)
        return super().load_state_dict(state_dict, *args, **kwargs)


_NONE: Mapping[str, Any] = {}
