"""Arguments of other libraries: each changes nothing, is refused with a remedy, or has a new name."""

from __future__ import annotations

import difflib
import reprlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..warn import levels_to_user
from .actions import Foreign, ForeignArguments, Ignored, Refused
from .tables import ARGUMENTS


def translated(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    own: set[str],
    positional: Sequence[str],
) -> tuple[Sequence[Any], dict[str, Any]]:
    """Return the arguments of a call as arguments that the function has.

    None says nothing, whatever the name.

    Args:
        function: its `__qualname__` is a key of `ARGUMENTS`, or nothing is translated.
        args, kwargs: the arguments of the call.
        own: the names of the arguments of the function.
        positional: those that may be given by position, in order.

    Raises:
        ValueError: an argument that is `Refused`.
        TypeError: an argument in no table, with the nearest name; a new name beside an old one; or too many
            positional arguments.
    """
    foreign, named = ARGUMENTS.get(function.__qualname__, _NOTHING), dict(kwargs)
    extra, place = foreign.leading or foreign.trailing, 1 if foreign.leading else len(positional)
    if extra and len(args) == len(positional) + 1:
        args, named[extra] = (*args[:place], *args[place + 1 :]), args[place]
    if foreign.in_order and len(positional) < len(args) <= len(positional) + len(foreign.in_order):
        named.update(zip(foreign.in_order, args[len(positional) :], strict=False))
        args = args[: len(positional)]
    name = function.__qualname__
    if positional and positional[0] == "self":
        name = type(args[0]).__name__ + ("" if function.__name__ == "__init__" else f".{function.__name__}")
    _check_positional(name, args, positional, own)
    _translate(name, own, foreign.table, named, dict(zip(positional, args, strict=False)))
    return args, named


def _check_positional(name: str, args: Sequence[Any], positional: Sequence[str], own: set[str]) -> None:
    """Raise TypeError where there are more than the function takes, with a call that it takes."""
    if len(args) > len(positional):
        expected = [argument for argument in positional if argument not in ("self", "cls")]
        num_given = len(args) - len(positional) + len(expected)
        call, others = f"{name}({', '.join(expected)})", sorted(own - set(positional))
        by_name = f", and give the others by name: {', '.join(others)}" if others else ", which takes no others"
        raise TypeError(
            f"{name}() got {num_given} positional arguments, expected {len(expected)}; write {call}{by_name}"
        )


def _translate(
    name: str, own: set[str], table: ForeignArguments, kwargs: dict[str, Any], positional: Mapping[str, Any]
) -> None:
    """Let the keyword arguments be arguments of the function; in place."""
    given = {**positional, **kwargs}
    for argument in [argument for argument in kwargs if argument not in own]:
        if argument not in table:
            names = sorted(own - {"self", "cls"})
            near = difflib.get_close_matches(argument.lower(), [*names, *table], n=1, cutoff=0.7)
            hint = f"did you mean '{near[0]}'?" if near else f"expected one of {', '.join(names)}"
            raise TypeError(f"{name}() got an unexpected keyword argument '{argument}'; {hint}")
        value, action = kwargs.pop(argument), table[argument]
        if value is None:
            continue
        if callable(action):
            action = action(value, given)
        got = f"got {argument}={' '.join(_short.repr(value).split())}"
        if isinstance(action, Refused):
            raise ValueError(f"{got}, expected none: {action.remedy}")
        if isinstance(action, Ignored):
            message = f"{got} for {name}, which changes nothing: {action.why}; leave it out"
            warnings.warn(message, stacklevel=levels_to_user())
            continue
        if action.new in kwargs:
            raise TypeError(f"{got} and {action.new}={_short.repr(kwargs[action.new])}, expected the second alone")
        kwargs[action.new] = value
        message = f"{got} for {name}, which is now {action.new}={_short.repr(value)}; the old name will go"
        warnings.warn(message, DeprecationWarning, stacklevel=levels_to_user())


_short = reprlib.Repr()
_short.maxstring = _short.maxother = 100
_NOTHING = Foreign()
