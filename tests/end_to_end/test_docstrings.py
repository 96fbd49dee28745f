"""The docstrings of public classes and functions name every argument."""

from __future__ import annotations

import functools
import inspect
import re
import sys
from collections.abc import Iterator
from typing import Any

from tests.end_to_end.test_docs import PUBLIC, entries_of_the_reference, found

TORCHS = re.compile(r"(?:See|As) (?:`(?:torch|nn)\.|DistributedDataParallel)")
PASSED_ON = {"args", "kwargs", "_"}  # to a function of torch
FIELD = re.compile(r"^    (\w+): .*\n    \"\"\"", flags=re.MULTILINE)  # with a docstring of its own


def public_objects() -> dict[str, Any]:
    """The entries of the API reference and all exported names; integrations need their hosts."""
    objects = {name: found(name) for name in entries_of_the_reference() if ".integrations." not in name}
    objects |= {f"{module.__name__}.{name}": getattr(module, name) for module in PUBLIC for name in module.__all__}
    return {name: value for name, value in objects.items() if inspect.isclass(value) or inspect.isfunction(value)}


def library_classes() -> dict[str, type]:
    """Classes of the library by name, exported or not: docstrings refer to them."""
    return {
        name: value
        for key, module in list(sys.modules.items())
        if key.startswith("gossip_modules")
        for name, value in vars(module).items()
        if inspect.isclass(value) and value.__module__ == key
    }


def parameters(function: Any) -> list[str]:
    return [name for name in inspect.signature(function).parameters if name not in {"self", "cls", "_cls", *PASSED_ON}]


def text_of(function: Any, name: str, bases: tuple[type, ...], classes: dict[str, type]) -> str:
    """The docstring of a method, with those of the methods that it refers to, or inherits from if it has none."""
    own = function.__doc__
    if own is None:
        bases = tuple(base for base in bases if getattr(vars(base).get(name), "__doc__", None))
        return text_of(vars(bases[0])[name], name, bases[1:], classes) if bases else ""
    text = own
    for kind, method in re.findall(r"\b(?:See|As|as of|as for|arguments of) `(\w+)(?:\.(\w+))?`", own):
        owner = classes.get(kind, next((base for base in bases if base.__name__ == kind), None))
        target = getattr(owner, method or name, None) or next((getattr(b, kind, None) for b in bases), None)
        text += "\n" + (inspect.getdoc(target) or "") + "\n" + (inspect.getdoc(owner) or "" if owner else "")
    return text


@functools.cache
def fields_of(kind: type) -> list[str]:
    """The fields of a class with docstrings of their own; Python parses the whole file for the source of a class."""
    return FIELD.findall(inspect.getsource(kind))


def missing(names: list[str], text: str) -> list[str]:
    return [name for name in names if not re.search(rf"\b{re.escape(name)}\b", text)]


def undescribed() -> Iterator[str]:
    """Each function, method or class with arguments that its docstring does not name."""
    classes, seen = library_classes(), set()
    for dotted, value in public_objects().items():
        if inspect.isfunction(value):
            if names := missing(parameters(value), inspect.getdoc(value) or ""):
                yield f"{dotted}: {', '.join(names)}"
            continue
        own = [kind for kind in value.__mro__ if kind.__module__.startswith("gossip_modules")]
        text = "\n".join((kind.__doc__ or "") + (vars(kind).get("__init__", kind).__doc__ or "") for kind in own)
        text += " ".join(name for kind in own for name in fields_of(kind))
        make = value.__new__ if issubclass(value, tuple) else value.__init__
        if inspect.isfunction(make) and (names := missing(parameters(make), text)):
            yield f"{dotted}: {', '.join(names)}"
        for k, kind in enumerate(own):
            for name, member in vars(kind).items():
                function = getattr(member, "__func__", member)
                if name.startswith("_") or not inspect.isfunction(function) or id(function) in seen:
                    continue
                seen.add(id(function))
                doc = text_of(function, name, tuple(own[k + 1 :]), classes)
                if (names := missing(parameters(function), doc)) and not TORCHS.search(doc):
                    yield f"{kind.__module__}.{kind.__qualname__}.{name}: {', '.join(names)}"


def test_docstrings_name_every_argument() -> None:
    """A method may refer to another one, as by "See `Base`."; fields of a dataclass may have texts of their own."""
    assert sorted(set(undescribed())) == []
