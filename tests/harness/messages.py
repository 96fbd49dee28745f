"""The messages of the errors and warnings in the source of the library, as patterns."""

from __future__ import annotations

import ast
import builtins
import functools
import re
from collections.abc import Iterator
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
    def pattern(self) -> re.Pattern[str]:
        """Whole messages match it; each field matches anything."""
        return re.compile("".join(".*" if part is None else re.escape(part) for part in self.parts), re.DOTALL)

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


def texts(package: Path) -> Iterator[re.Pattern[str]]:
    """All long texts in a package, as patterns of a part of a message."""
    for path in sorted(package.rglob("*.py")):
        for node in ast.walk(_parsed(path)):
            if isinstance(node, ast.JoinedStr):
                parts = [str(part.value) if isinstance(part, ast.Constant) else None for part in node.values]
                if len("".join(filter(None, parts))) >= _LONG:
                    yield Message("", tuple(parts), path.name).pattern
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value) >= _LONG:
                yield re.compile(re.escape(node.value))


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
