"""Calls of graphs, mixings and gossipers as in Stochastic Gradient Push and MATCHA: they work, or say what to do.

The decorators of constructors cost a call of today a few comparisons.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

_P = ParamSpec("_P")
_R = TypeVar("_R")

GRAPH_ARGUMENTS: Mapping[str, str] = {
    "rank": "a graph answers for every rank, as in graph.out_peers(rank, t)",
    "local_rank": "a graph answers for every rank, as in graph.out_peers(rank, t)",
    "nprocs_per_node": "GossipDataParallel(nprocs_per_node=N) makes nodes; a graph is one of nodes then",
}
"""Arguments of the graphs of Stochastic Gradient Push that change nothing here, with the reason."""
MIXING_ARGUMENTS: Mapping[str, str] = {"device": "weights are numbers, on no device"}
"""The same of its mixings."""
MATCHA_ARGUMENTS: Mapping[str, str] = {
    "rank": GRAPH_ARGUMENTS["rank"],
    "size": "the graph has the number of ranks",
    "iterations": "rounds are drawn one by one, and have no end",
    "issubgraph": "matchings and graphs are told apart by their types",
}
"""Arguments of MATCHA's processors that change nothing here, with the reason."""
GOSSIPER_ARGUMENTS = frozenset({"msg", "graph", "mixing", "device", "logger", "rank", "world_size"})
"""Those of the gossipers of Stochastic Gradient Push."""
GOSSIPER_REMEDY = (
    "the message, the graph and the mixing are given when rounds begin: write gossiper.bind(mixing, connect()), then "
    "gossiper.average(tensor, num_rounds=...); or GossipDataParallel(module, graph=..., gossiper=...)"
)
"""What takes the place of their arguments."""


class OldAttribute:
    """An attribute or method of another system: reading it is an AttributeError that says what to write.

    `hasattr` is False for it, and a subclass may have an attribute of that name.

    Args:
        remedy: what to write, as a clause.
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


def old_arguments(
    unused: Mapping[str, str], *, leading: str = "", trailing: str = "", renamed: Mapping[str, str] | None = None
) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """A decorator of a constructor: arguments of another system are left out, or renamed, with a warning.

    Args:
        unused: arguments that change nothing, by name, with the reason.
        leading: one of them that may stand first, before the positional arguments of the constructor.
        trailing: one of them that may stand after these.
        renamed: old names with new ones.
    """
    new_names = renamed or {}

    def decorate(init: Callable[_P, _R]) -> Callable[_P, _R]:
        kinds = [p.kind for p in inspect.signature(init).parameters.values()]
        num_positional = kinds.count(inspect.Parameter.POSITIONAL_OR_KEYWORD)

        @functools.wraps(init)
        def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            given: list[Any] = list(args)
            if len(given) == num_positional + 1 and (leading or trailing):
                value = given.pop(1 if leading else -1)
                _warn(given[0], leading or trailing, value, unused[leading or trailing])
            if len(given) > num_positional:
                names = ", ".join(list(inspect.signature(init).parameters)[1:num_positional])
                raise TypeError(
                    f"{type(given[0]).__name__}() got {len(given) - 1} positional arguments, expected {names}; give "
                    "the others by name"
                )
            for old in [name for name in kwargs if name in unused]:
                _warn(given[0], old, kwargs.pop(old), unused[old])
            for old in [name for name in kwargs if name in new_names]:
                new = new_names[old]
                if new in kwargs:
                    raise TypeError(f"{type(given[0]).__name__}() got {old}= and {new}=, expected {new}= alone")
                kwargs[new] = kwargs.pop(old)
                text = f"got {old}={kwargs[new]!r} for {type(given[0]).__name__}, which is now {new}"
                warnings.warn(f"{text}; the old name will go", UserWarning, stacklevel=2)
            return init(*given, **kwargs)

        return call

    return decorate


def refused_arguments(names: frozenset[str], remedy: str) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """A decorator of a constructor of keyword arguments: positional ones, and those of `names`, raise TypeError.

    Args:
        names: arguments of another system.
        remedy: what to do instead, as a clause.
    """

    def decorate(init: Callable[_P, _R]) -> Callable[_P, _R]:
        @functools.wraps(init)
        def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            if len(args) > 1 or not names.isdisjoint(kwargs):
                name = type(args[0]).__name__
                got = [type(value).__name__ for value in args[1:]] + [key for key in kwargs if key in names]
                raise TypeError(f"{name}() got {', '.join(got)}, expected none of them: {remedy}")
            return init(*args, **kwargs)

        return call

    return decorate


def _warn(instance: object, name: str, value: object, why: str) -> None:
    text = f"got {name}={value!r} for {type(instance).__name__}, which changes nothing: {why}; leave it out"
    warnings.warn(text, UserWarning, stacklevel=3)


class BilatPushPull:
    """The gossiper of AD-PSGD in Stochastic Gradient Push; here its rounds are those of a wrapper.

    Raises:
        TypeError: (construction) always; says what to write.
    """

    def __init__(self, *args: object, **kwargs: object) -> None:
        raise TypeError(
            "got BilatPushPull, expected the wrapper of AD-PSGD, in which the exchanges of pairs run: write "
            "BilatGossipDataParallel(module)"
        )
