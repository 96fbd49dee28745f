"""The argument `algorithm` of a wrapper as a user gives it: an object, a class or a name."""

from __future__ import annotations

import dataclasses
import inspect
import warnings
from typing import Any, TypeAlias

from ..compression.compressor import Compressor
from ..old_calls import levels_to_user
from ..registry import METHODS, named
from ..rounds.algorithm import Algorithm, Over
from ..rounds.push_pull import PushPull

Chosen: TypeAlias = Algorithm | PushPull | None
AlgorithmLike: TypeAlias = Chosen | type[Algorithm | PushPull] | str


def as_algorithm(algorithm: AlgorithmLike) -> Chosen:
    """The algorithm that is meant: the object itself, or one of the class, or of the class with that name.

    Args:
        algorithm: an `Algorithm`, one over another, a class of it, a name such as "diloco", or None for plain gossip.

    Raises:
        ValueError: the argument is something else, or a class that needs arguments; says which.
    """
    made: Any = algorithm
    if isinstance(algorithm, str):
        method = named(algorithm)
        made = method.make
        if not issubclass(made, Algorithm):
            raise ValueError(
                f"got algorithm={algorithm!r}, which is a wrapper with arguments, expected an algorithm that runs in "
                f"rounds; write {method.example}"
            )
    if isinstance(made, type) and issubclass(made, Algorithm | PushPull):
        made = _with_defaults(made, algorithm)
    if made is None or isinstance(made, Algorithm | PushPull):
        return made
    if isinstance(made, Compressor) or (isinstance(made, type) and issubclass(made, Compressor)):
        raise ValueError(
            f"got the compressor {algorithm!r} as algorithm, expected an algorithm that sends compressed messages; "
            "pass the compressor to one, as in Choco(TopK(0.01), step_size=0.04)"
        )
    raise ValueError(
        f"got algorithm={algorithm!r}, expected an Algorithm such as DiLoCo() or Choco(TopK(0.01), step_size=0.04), "
        f"its class or its name, such as 'diloco'; the names are {', '.join(METHODS)}"
    )


def renamed(algorithm: AlgorithmLike, *, outer: AlgorithmLike, rule: AlgorithmLike, gossiper: AlgorithmLike) -> Chosen:
    """The algorithm that the arguments of a wrapper name, where older names of `algorithm` may stand beside it.

    Args:
        algorithm: see `as_algorithm`; over that of `gossiper`.
        outer, rule, gossiper: the older arguments; None where they were left out.

    Warns:
        DeprecationWarning: an older name is used; the message writes the new line.
    """
    arguments = {"outer": outer, "rule": rule, "algorithm": algorithm, "gossiper": gossiper}
    given: dict[str, Any] = {name: as_algorithm(value) for name, value in arguments.items() if value is not None}
    if given.keys() <= {"algorithm"}:
        return given.get("algorithm")
    *above, whole = given.values()
    for part in (part for parts in reversed(above) for part in reversed(parts.parts)):
        whole = part.over(whole)
    old = " and ".join(f"{name}={written(value)}" for name, value in given.items() if name != "algorithm")
    message = f"got {old}, which is now algorithm={written(whole)}; the old names will go"
    warnings.warn(message, DeprecationWarning, stacklevel=levels_to_user())
    return whole


def written(algorithm: Any) -> str:
    """A dataclass as in a line of Python, without the settings that are the defaults; "..." stands for a function."""
    if isinstance(algorithm, Over):
        return f"{written(algorithm.outer)}.over({written(algorithm.inner)})"
    if not dataclasses.is_dataclass(algorithm):
        return repr(algorithm)
    settings = [
        f"{field.name}={'...' if inspect.isroutine(value) else repr(value)}"
        for field in dataclasses.fields(algorithm)
        if field.init and (value := getattr(algorithm, field.name)) != field.default
    ]
    return f"{type(algorithm).__name__}({', '.join(settings)})"


def _with_defaults(kind: type[Any], given: object) -> Any:
    """An object of the class, whose arguments all have defaults."""
    parameters = inspect.signature(kind).parameters.values()
    if missing := [parameter.name for parameter in parameters if parameter.default is parameter.empty]:
        examples = [method.example for method in METHODS.values() if method.make is kind and method.example]
        examples.append(f"algorithm={kind.__name__}({', '.join(f'{x}=...' for x in missing)})")
        shown = repr(given) if isinstance(given, str) else kind.__name__
        raise ValueError(
            f"got algorithm={shown}, expected {kind.__name__} with its arguments, as {' and '.join(missing)} "
            f"{'has' if len(missing) == 1 else 'have'} no default; write {examples[0]}"
        )
    return kind()
