"""The argument `algorithm` of a wrapper as a user gives it: an object, a class or a name."""

from __future__ import annotations

import dataclasses
import inspect
import warnings
from typing import Any

from ..compression.compressor import Compressor
from ..registry import METHODS, named
from ..rounds.algorithm import Algorithm, Over, combined
from ..rounds.push_pull import PushPull
from .foreign.user_line import levels_to_user

_LEGACY = (PushPull,)


def sorted_out(outer: Any, rule: Any, gossiper: Any, algorithm: Any) -> tuple[Any, Any, Algorithm | Over | None]:
    """Those arguments, with an algorithm in the place of its kind, while classes of each kind are left.

    Warns:
        DeprecationWarning: one of the older names is used; writes the line with the new one.
    """
    old = {
        name: value for name, value in (("outer", outer), ("rule", rule), ("gossiper", gossiper)) if value is not None
    }
    if old:
        parts = [*map(written, old.values()), *([] if algorithm is None else [written(as_algorithm(algorithm))])]
        new = parts.pop()
        while parts:
            new = f"{parts.pop()}.over({new})"
        given = " and ".join(f"{name}={written(value)}" for name, value in old.items())
        message = f"got {given}, which is now algorithm={new}; the old names will go"
        warnings.warn(message, DeprecationWarning, stacklevel=levels_to_user())
    made = (_made(x, x) if isinstance(x, type) and issubclass(x, Algorithm) else x for x in (outer, rule, gossiper))
    outer, rule, gossiper = made
    algorithm = as_algorithm(algorithm)
    if isinstance(algorithm, PushPull):
        gossiper, algorithm = algorithm, None
    algorithm, others = combined(outer, rule, gossiper, algorithm)
    outer, other, gossiper = others[:3]
    if other is not None:
        raise ValueError(f"got rule={other!r}, expected an Algorithm such as D2(), QGDSGDm() or GradientTracking()")
    return outer, gossiper, algorithm


def written(algorithm: Any) -> str:
    """An algorithm as in a line of Python, without the settings that are the defaults; "..." stands for a function."""
    if isinstance(algorithm, Over):
        return f"{written(algorithm.outer)}.over({written(algorithm.inner)})"
    if isinstance(algorithm, type):
        return f"{algorithm.__name__}()"
    if not isinstance(algorithm, Algorithm):
        return repr(algorithm)
    settings = [
        f"{field.name}={'...' if inspect.isroutine(value) else repr(value)}"
        for field in dataclasses.fields(algorithm)
        if field.init and (value := getattr(algorithm, field.name)) != field.default
    ]
    return f"{type(algorithm).__name__}({', '.join(settings)})"


def as_algorithm(algorithm: Any) -> Any:
    """The algorithm that is meant: itself, or an object of its class, or of the class with that name.

    Args:
        algorithm: an `Algorithm`, one over another, a class of it, a name such as "diloco", or None for plain gossip.

    Raises:
        ValueError: it is none of these, or a class that needs arguments; says which.
    """
    given = algorithm
    if isinstance(algorithm, str):
        method = named(algorithm)
        if not isinstance(method.make, type):
            raise ValueError(
                f"got algorithm={algorithm!r}, which is a wrapper with arguments, expected an algorithm that runs in "
                f"rounds; write {method.example}"
            )
        algorithm = method.make
    if isinstance(algorithm, type) and issubclass(algorithm, (Algorithm, *_LEGACY)):
        return _made(algorithm, given)
    if algorithm is None or isinstance(algorithm, (Algorithm, Over, *_LEGACY)):
        return algorithm
    if isinstance(algorithm, Compressor) or (isinstance(algorithm, type) and issubclass(algorithm, Compressor)):
        raise ValueError(
            f"got the compressor {algorithm!r} as algorithm, expected an algorithm that sends compressed messages; "
            "pass the compressor to one, as in Choco(TopK(0.01), step_size=0.04)"
        )
    raise ValueError(
        f"got algorithm={given!r}, expected an Algorithm such as DiLoCo() or Choco(TopK(0.01), step_size=0.04), its "
        f"class or its name, such as 'diloco'; the names are {', '.join(METHODS)}"
    )


def _made(kind: type[Any], given: Any) -> Any:
    """An object of the class with the defaults."""
    parameters = inspect.signature(kind).parameters.values()
    missing = [parameter.name for parameter in parameters if parameter.default is parameter.empty]
    if missing:
        examples = [method.example for method in METHODS.values() if method.make is kind and method.example]
        example = examples[0] if examples else f"algorithm={kind.__name__}({', '.join(f'{x}=...' for x in missing)})"
        shown = repr(given) if isinstance(given, str) else kind.__name__
        raise ValueError(
            f"got algorithm={shown}, expected {kind.__name__} with its arguments, as {' and '.join(missing)} "
            f"{'has' if len(missing) == 1 else 'have'} no default; write {example}"
        )
    return kind()
