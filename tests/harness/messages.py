"""The messages of the errors and warnings in the source of the library, with their fields."""

from __future__ import annotations

import ast
import builtins
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

_WARNING = "warning"  # the kind of a message for warnings.warn
_LONG = 36
_MANY = 12  # letters of a message that are not fields, at the least: "{why}: {error}" names nothing


@dataclass(frozen=True)
class Message:
    """A message in the source.

    Attributes:
        kind: the class of the error, or "warning".
        parts: the literal parts in order, None for each field.
        place: file:line.
    """

    kind: str
    parts: tuple[str | None, ...]
    place: str

    @functools.cached_property
    def _between(self) -> list[str]:
        """The texts before, between and after the fields."""
        found = [""]
        for part in self.parts:
            if part is None:
                found.append("")
            else:
                found[-1] += part
        return found

    def is_in(self, text: str) -> bool:
        """Whether a text has the message, with anything in the place of each field."""
        return _find(self._between, text, 0) >= 0

    def is_whole(self, text: str) -> bool:
        """Whether a text is the message, with anything in the place of each field."""
        first, *between = self._between
        if not between:
            return text == first
        end = _find(between[:-1], text, len(first)) if text.startswith(first) else -1
        return end >= 0 and text.endswith(between[-1]) and end + len(between[-1]) <= len(text)

    @property
    def words(self) -> str:
        """The message, with dots for its fields."""
        return "".join("..." if part is None else part for part in self.parts)


def error_classes(package: Path) -> set[str]:
    """The classes of errors and warnings in a package that have no underscore before their name."""
    found = {name for name, value in vars(builtins).items() if isinstance(value, type)}
    errors = {name for name in found if issubclass(getattr(builtins, name), BaseException)}
    own: set[str] = set()
    classes = [node for path in package.rglob("*.py") for node in ast.walk(_parsed(path)) if _is_class(node)]
    before = -1
    while len(own) != before:
        before = len(own)
        own |= {
            node.name
            for node in classes
            if isinstance(node, ast.ClassDef) and {ast.unparse(base) for base in node.bases} & (errors | own)
        }
    return {name for name in own if not name.startswith("_")}


def messages(package: Path, kinds: set[str]) -> Iterator[Message]:
    """The messages of errors of these classes, raised or returned, and of warnings, that say more than their fields."""
    for path in sorted(package.rglob("*.py")):
        tree = _parsed(path)
        for scope in ast.walk(tree):
            if not isinstance(scope, ast.FunctionDef):
                continue
            for node in ast.walk(scope):
                if not isinstance(node, ast.Call) or not node.args:
                    continue
                kind = {"warnings.warn": _WARNING, "self._raise_once": "RuntimeError"}.get(
                    name := ast.unparse(node.func), name
                )
                parts = _parts(node.args[0], scope)
                if (kind == _WARNING or kind in kinds) and len("".join(filter(None, parts))) >= _MANY:
                    yield Message(kind, tuple(parts), f"{path.name}:{node.lineno}")


@functools.cache
def _parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _find(parts: Sequence[str], text: str, position: int) -> int:
    """The end of the first place of the parts in a text, one after the other; -1: there is none."""
    for part in parts:
        if (start := text.find(part, position)) < 0:
            return -1
        position = start + len(part)
    return position


def texts(package: Path) -> Iterator[Message]:
    """All long texts in a package, as parts of messages."""
    for path in sorted(package.rglob("*.py")):
        for node in ast.walk(_parsed(path)):
            if isinstance(node, ast.JoinedStr):
                parts = [str(part.value) if isinstance(part, ast.Constant) else None for part in node.values]
                if len("".join(filter(None, parts))) >= _LONG:
                    yield Message("", tuple(parts), path.name)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value) >= _LONG:
                yield Message("", (node.value,), path.name)


def _is_class(node: ast.AST) -> bool:
    return isinstance(node, ast.ClassDef)


def _parts(node: ast.expr, scope: ast.FunctionDef) -> list[str | None]:
    """The literal parts of a text in order, None for each field."""
    if isinstance(node, ast.Constant):
        return [str(node.value)]
    if isinstance(node, ast.JoinedStr):
        return [str(part.value) if isinstance(part, ast.Constant) else None for part in node.values]
    if isinstance(node, ast.BinOp):
        return [*_parts(node.left, scope), *_parts(node.right, scope)]
    if isinstance(node, ast.Name):  # message = f"..." before
        named = [other for other in ast.walk(scope) if isinstance(other, ast.Assign) and other.lineno < node.lineno]
        for other in sorted(named, key=lambda other: -other.lineno):
            if isinstance(other.targets[0], ast.Name) and other.targets[0].id == node.id:
                return _parts(other.value, scope)
    return [None]
