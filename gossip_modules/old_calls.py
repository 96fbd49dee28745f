"""Arguments and attributes of other libraries: they work with a warning, or an error tells the remedy.

A table says for each argument whether it changes nothing, is refused, or has a new name; `foreign_arguments` makes a
function understand the arguments of tables.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import reprlib
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, ParamSpec, TypeAlias, TypeVar

import torch

_P = ParamSpec("_P")
_R = TypeVar("_R")
_TORCH = str(Path(torch.__file__).parent)
_OURS = (_TORCH, str(Path(__file__).parent))


def levels_to_user() -> int:
    """The `stacklevel` of the caller's warning that names the first line outside of torch and of this library."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_OURS):
        frame, level = frame.f_back, level + 1
    return level


def is_torch(frame: FrameType) -> bool:
    """Whether the frame is of a function of torch."""
    return frame.f_code.co_filename.startswith(_TORCH)


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
        remedy: the reason and the line to write instead, as clauses.
    """

    remedy: str


@dataclass(frozen=True)
class NewName:
    """Another argument has the same meaning: it is given in its place, with a DeprecationWarning.

    Args:
        new: the new name, which may not be given as well.
    """

    new: str


Action: TypeAlias = Ignored | Refused | NewName
ForeignArguments: TypeAlias = Mapping[str, "Action | Callable[[Any, Mapping[str, Any]], Action]"]
"""The action for an argument, by its name; or a function of its value and of all arguments by name, `module` too."""


def foreign_arguments(
    *tables: ForeignArguments,
    passed_on_to: Callable[..., Any] | None = None,
    leading: str = "",
    trailing: str = "",
    in_order: Sequence[str] = (),
) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """A decorator: the function understands the arguments of `tables` too.

    An argument of the function itself is never looked up, and None says nothing, whatever the name. Tools still show
    the signature of the function.

    Args:
        tables: the tables of options; the first one with a name counts.
        passed_on_to: a function to which the keyword arguments are passed on: its arguments count as own ones.
        leading, trailing: an argument of a table that may stand before, or after, the positional ones of a constructor.
        in_order: the arguments of a table that another library takes by position, after the positional arguments here.

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
        extra, place = leading or trailing, 1 if leading else len(positional)

        @functools.wraps(function)
        def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            given: tuple[Any, ...] = args
            if len(given) > len(positional) or not own.issuperset(kwargs):
                if extra and len(given) == len(positional) + 1:
                    given, kwargs[extra] = (*given[:place], *given[place + 1 :]), given[place]
                if in_order and len(given) <= len(positional) + len(in_order):
                    kwargs.update(zip(in_order, given[len(positional) :], strict=False))
                    given = given[: len(positional)]
                name = type(given[0]).__name__ if function.__name__ == "__init__" else function.__qualname__
                _check_positional(name, given, positional, own)
                _translate(name, own, table, kwargs, dict(zip(positional, given, strict=False)))
            return function(*given, **kwargs)

        return call

    return decorate


def _names(function: Callable[..., Any]) -> tuple[set[str], list[str]]:
    """The names of the arguments of a function, and of its positional ones in order."""
    parameters = inspect.signature(function).parameters.values()
    positional = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    return {*positional, *(p.name for p in parameters if p.kind is p.KEYWORD_ONLY)}, positional


def _check_positional(name: str, args: tuple[Any, ...], positional: list[str], own: set[str]) -> None:
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


class OldAttribute:
    """An attribute or method of another library: reading it is an AttributeError that tells the remedy.

    `hasattr` is False for it, and a subclass may have an attribute of that name.

    Args:
        remedy: the line to write, as a clause.
    """

    def __init__(self, remedy: str) -> None:
        self.remedy = remedy

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, instance: object, owner: type) -> Any:
        if instance is None:
            return self
        text = f"{type(instance).__name__!r} object has no attribute {self.name!r}: {self.remedy}"
        raise AttributeError(text, name=self.name, obj=instance)


_EVERY_RANK = Ignored("a graph answers for every rank, as in graph.out_peers(rank, t)")
GRAPH_ARGUMENTS: ForeignArguments = {
    "rank": _EVERY_RANK,
    "local_rank": _EVERY_RANK,
    "nprocs_per_node": Ignored("GossipDataParallel(nprocs_per_node=N) makes nodes; a graph is one of nodes then"),
}
"""The graphs of Stochastic Gradient Push."""
MIXING_ARGUMENTS: ForeignArguments = {"device": Ignored("weights are numbers, on no device")}
"""The mixings of Stochastic Gradient Push."""
MATCHA_ARGUMENTS: ForeignArguments = {
    "rank": _EVERY_RANK,
    "size": Ignored("the graph has the number of ranks"),
    "iterations": Ignored("rounds are drawn one by one, and have no end"),
    "issubgraph": Ignored("matchings and graphs are told apart by their types"),
    "commBudget": NewName("budget"),
}
"""The processors of MATCHA."""
GOSSIPER_ARGUMENTS: ForeignArguments = dict.fromkeys(
    ("msg", "graph", "device", "mixing", "logger", "rank", "world_size"),  # in the order of their constructors
    Refused(
        "the message and the graph are given when rounds begin; for a model write GossipDataParallel(module, "
        "graph=graph), for a tensor write gossiper.bind(UniformMixing(graph), connect()), then "
        "gossiper.average(message, num_rounds=1)"
    ),
)
"""The gossipers of Stochastic Gradient Push."""


REMOVED: Mapping[str, str] = {
    "AccumAdam": "take GossipAdamW(parameters, lr=1e-3, num_ranks=n), which has the second moments of all-reduce",
    "ConsensusControl": "take algorithm=SlowMo(4, momentum=0.4), whose models end nearer to all-reduce, or "
    "schedule=Schedule(average_every=8), which has exact averages at fixed steps",
}
"""The names of `gossip_modules` that are gone; each with what takes its place, as a clause."""


class BilatPushPull:
    """The gossiper of AD-PSGD in Stochastic Gradient Push; here its rounds belong to a wrapper.

    Raises:
        TypeError: (construction) always; tells the line to write.
    """

    def __init__(self, *args: object, **kwargs: object) -> None:
        raise TypeError(
            "got BilatPushPull, expected the wrapper of AD-PSGD, in which the exchanges of pairs run: write "
            "BilatGossipDataParallel(module)"
        )
