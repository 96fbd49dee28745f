"""The options of a run for --help: the fields of one flat configuration, under a heading for each group."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import field, fields, make_dataclass
from functools import cache, partial
from itertools import pairwise
from textwrap import dedent
from typing import Annotated, Any, TypeVar, get_type_hints

import tyro

from gossip_modules.methods import METHODS, WRAPPER_OPTIONS
from train.run_config import RunConfig
from visualization.command import read_arguments

ConfigType = TypeVar("ConfigType", bound=RunConfig)


def read_groups(
    default: ConfigType, *, description: str | None, arguments: Sequence[str], shown: Mapping[str, str]
) -> ConfigType:
    """Read the arguments of a command into a configuration.

    Args:
        default: the values of options that are not given.
        description: the description for --help.
        arguments: the arguments of the command.
        shown: the help texts of options read before, by name and value: "preset NAME".

    Raises:
        ValueError: the value of an option is out of bounds, or does not fit another option.
        SystemExit: an unknown option, or --help.
    """
    groups = groups_of(type(default))
    types, texts = get_type_hints(type(default), include_extras=True), help_texts(type(default))
    sections: list[tuple[str, Any, Any]] = []
    for heading, names in groups.items():
        users = users_of(names)
        options = [
            (
                name,
                Annotated[types[name], tyro.conf.arg(help=texts.get(name, "") + _exceptions(name, users))],
                field(default_factory=partial(getattr, default, name)),
            )
            for name in names
        ]
        if not sections:
            options += [_shown(usage, text) for usage, text in shown.items()]
        section: Any = make_dataclass("Section", options)
        told = tyro.conf.arg(name=heading, help=f"With --recipe {', '.join(users)}." if users else "")
        sections.append((f"section_{len(sections)}", Annotated[section, told], field(default_factory=section)))
    kind: type[Any] = make_dataclass("Sections", sections)
    read = read_arguments(kind, description=description, arguments=arguments)
    values = {name: value for section in vars(read).values() for name, value in vars(section).items()}
    return type(default)(**{option.name: values[option.name] for option in fields(default)})


def groups_of(config_type: type[RunConfig]) -> dict[str, tuple[str, ...]]:
    """Return the names of all options by the heading of their group."""
    groups = {**config_type.GROUPS, "gossip": WRAPPER_OPTIONS}
    known = {name for names in groups.values() for name in names}
    rest = tuple(option.name for option in fields(config_type) if option.name not in known)
    return {**config_type.GROUPS, **({"task": rest} if rest else {}), "gossip": WRAPPER_OPTIONS}


def users_of(names: Sequence[str]) -> list[str]:
    """Return the names of the methods with one of these options."""
    return [name for name, method in METHODS.items() if not method.options.isdisjoint(names)]


@cache
def help_texts(config_type: type[RunConfig]) -> dict[str, str]:
    """Return the string below each field of the class and its base classes."""
    texts: dict[str, str] = {}
    for base in reversed(config_type.__mro__[:-1]):
        try:
            source = inspect.getsource(base)
        except (OSError, TypeError):  # not from a file, but typed at a prompt or run by exec
            continue
        (definition,) = ast.parse(dedent(source)).body
        assert isinstance(definition, ast.ClassDef)
        for option, text in pairwise(definition.body):
            match option, text:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(words))):
                    texts[name] = " ".join(words.split())
    return texts


def _exceptions(name: str, group: Sequence[str]) -> str:
    """Return a sentence about the methods of an option, if it is not for all methods of its group."""
    users = users_of([name])
    without = [method for method in group if method not in users]
    if not without:
        return ""
    return f" Not with {', '.join(without)}." if len(without) < len(users) else f" Only with {', '.join(users)}."


def _shown(usage: str, text: str) -> tuple[str, Any, Any]:
    """Return an option for --help that is no field of the configuration."""
    name, metavar = usage.split()
    option = tyro.conf.arg(name=name, metavar=metavar, help=text, help_behavior_hint="")
    return f"{name}_", Annotated[str, option], field(default="")
