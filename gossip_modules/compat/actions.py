"""The answers to an argument of another library."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias


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


@dataclass(frozen=True)
class Foreign:
    """The arguments that a function takes besides its own.

    Args:
        table: an action for each argument.
        leading, trailing: an argument of the table that may stand before, or after, the positional ones.
        in_order: arguments of the table that another library takes by position, after the positional arguments here.
    """

    table: ForeignArguments = field(default_factory=dict)
    leading: str = ""
    trailing: str = ""
    in_order: tuple[str, ...] = ()


@dataclass(frozen=True)
class Works:
    """An attribute of another library that works, with a warning, once for each object.

    Args:
        get: its value, for an object.
        remedy: the line to write instead, as a clause.
    """

    get: Callable[[Any], Any]
    remedy: str
