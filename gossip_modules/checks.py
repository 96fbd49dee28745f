"""Checks of arguments that several packages share."""

from __future__ import annotations

import operator
from numbers import Real


def checked_integer(name: str, value: int, least: int, remedy: str) -> int:
    """`value` as a Python int; raises ValueError if it is not an integer of at least `least`.

    Args:
        name: the name of the argument, for the error.
        value: an int, or an object that stands for one, such as an integer of NumPy.
        least: the smallest allowed value.
        remedy: the end of the error, as a clause.
    """
    try:
        number = operator.index(value)
    except TypeError:
        number = least - 1
    if number < least or isinstance(value, bool):
        raise ValueError(f"got {name}={value!r}, expected an integer of at least {least}; {remedy}")
    return number


def checked_seed(seed: int) -> int:
    """The seed as an int; raises ValueError if it is not an integer of at least 0."""
    return checked_integer("seed", seed, 0, "pass the seed that all ranks share")


def is_number(value: object) -> bool:
    """Whether the value is a real number, perhaps NaN or an infinity; booleans are not."""
    return isinstance(value, Real) and not isinstance(value, bool)
