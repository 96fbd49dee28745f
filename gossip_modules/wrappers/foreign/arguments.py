"""Arguments of other libraries, given to a constructor of this one: a table says what becomes of each."""

from __future__ import annotations

import difflib
import functools
import inspect
import reprlib
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ParamSpec, TypeAlias, TypeVar

from .user_line import levels_to_user

_P = ParamSpec("_P")
_R = TypeVar("_R")


@dataclass(frozen=True)
class Ignored:
    """The argument changes nothing here: it is accepted, with a warning.

    Args:
        why: the reason, as a clause: "gradients are not averaged, so there are no buckets".
    """

    why: str


@dataclass(frozen=True)
class Refused:
    """The argument asks for something that the constructor does not do: a ValueError.

    Args:
        remedy: the reason and what to write instead, as clauses.
    """

    remedy: str


@dataclass(frozen=True)
class Replaced:
    """Other arguments of the constructor mean the same: they are given in its place, with a DeprecationWarning.

    Args:
        arguments: the new names, with values. None of them may be given as well.
    """

    arguments: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class NewName:
    """As `Replaced`, by one argument of the same value.

    Args:
        new: the new name.
    """

    new: str


Action: TypeAlias = Ignored | Refused | Replaced | NewName
ForeignArguments: TypeAlias = Mapping[str, "Action | Callable[[Any, Mapping[str, Any]], Action]"]
"""What becomes of an argument, by its name; or a function of its value and of all arguments by name, `module` too."""


def foreign_arguments(
    *tables: ForeignArguments, passed_on_to: Callable[..., Any] | None = None
) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """A decorator: the function understands, besides its own arguments, those of `tables`.

    An argument of the function itself is never looked up, and None says nothing, whatever the name. The signature that
    tools show stays that of the function.

    Args:
        tables: of several that have a name, the first one counts.
        passed_on_to: a function to which the keyword arguments are passed on: its arguments count as own ones.

    Raises:
        ValueError: (call) an argument that is `Refused`.
        TypeError: (call) an argument in no table, with the nearest name; a new name beside an old one; or too many
            positional arguments.

    Example:
        >>> @foreign_arguments({"bucket_size": Ignored("there are no buckets"), "wait": NewName("timeout")})
        ... def connect(module: nn.Module, *, timeout: float = 1.0) -> float:
        ...     return timeout
    """
    table = {name: action for actions in reversed(tables) for name, action in actions.items()}

    def decorate(function: Callable[_P, _R]) -> Callable[_P, _R]:
        own, positional = _names(function)
        if passed_on_to is not None:
            own |= _names(passed_on_to)[0]

        @functools.wraps(function)
        def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            if len(args) > len(positional) or not own.issuperset(kwargs):
                name = type(args[0]).__name__ if function.__name__ == "__init__" else function.__qualname__
                _check_positional(name, args, positional)
                _translate(name, own, table, kwargs, dict(zip(positional, args, strict=False)))
            return function(*args, **kwargs)

        return call

    return decorate


def _names(function: Callable[..., Any]) -> tuple[set[str], list[str]]:
    """The names of the arguments of a function, and those of the positional ones in order."""
    parameters = inspect.signature(function).parameters.values()
    positional = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    return {*positional, *(p.name for p in parameters if p.kind is p.KEYWORD_ONLY)}, positional


def _check_positional(name: str, args: tuple[Any, ...], positional: list[str]) -> None:
    """Raise TypeError where there are more than the function takes."""
    expected = [argument for argument in positional if argument not in ("self", "cls")]
    if len(args) > len(positional):
        num_given = len(args) - len(positional) + len(expected)
        raise TypeError(
            f"{name}() got {num_given} positional arguments, expected {len(expected)} ({', '.join(expected)}); give "
            f"the others by name, as in {name}({', '.join(expected)}, timeout=60)"
        )


def _translate(
    name: str, own: set[str], table: ForeignArguments, kwargs: dict[str, Any], positional: Mapping[str, Any]
) -> None:
    """Make the keyword arguments those of the function; in place."""
    given = {**positional, **kwargs}
    for argument in [argument for argument in kwargs if argument not in own]:
        if argument not in table:
            raise TypeError(_unknown(name, argument, own, table))
        value = kwargs.pop(argument)
        if value is None:
            continue
        action = table[argument]
        if callable(action):
            action = action(value, given)
        got = f"got {argument}={' '.join(_short.repr(value).split())}"
        if isinstance(action, Refused):
            raise ValueError(f"{got}, expected none: {action.remedy}")
        if isinstance(action, Ignored):
            message = f"{got} for {name}, which changes nothing: {action.why}; leave it out"
            warnings.warn(message, stacklevel=levels_to_user())
            continue
        new = {action.new: value} if isinstance(action, NewName) else dict(action.arguments)
        written = ", ".join(f"{key}={_short.repr(value)}" for key, value in new.items())
        if both := [key for key in new if key in kwargs]:
            raise TypeError(f"{got} and {both[0]}={_short.repr(kwargs[both[0]])}, expected the second alone")
        message = f"{got} for {name}, which is now {written}; the old name will go"
        warnings.warn(message, DeprecationWarning, stacklevel=levels_to_user())
        kwargs.update(new)


def _unknown(name: str, argument: str, own: set[str], table: ForeignArguments) -> str:
    names = sorted(own - {"self", "cls"})
    near = difflib.get_close_matches(argument.lower(), [*names, *table], n=1, cutoff=0.7)
    hint = f"did you mean '{near[0]}'?" if near else f"expected one of {', '.join(names)}"
    return f"{name}() got an unexpected keyword argument '{argument}'; {hint}"


_short = reprlib.Repr()
_short.maxstring = _short.maxother = 100
