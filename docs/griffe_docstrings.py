"""Docstrings as Markdown: examples become code blocks, and public names in backticks become links to their entries."""

from __future__ import annotations

import re
from typing import Any

import griffe

EXAMPLE = re.compile(r"^Example:$", flags=re.MULTILINE)
DOCTEST = re.compile(r"^( *)>>> .*\n?(?:\1\S.*\n?)*", flags=re.MULTILINE)
NAME = re.compile(r"(?<![\[`])`([A-Za-z]\w+)(\(\))?`(?!`)")


class Docstrings(griffe.Extension):
    """Rewrites every docstring of the package once it is loaded."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        public = {str(name) for name in pkg.exports or ()}
        self._rewrite(pkg, public)

    def _rewrite(self, item: griffe.Object, public: set[str]) -> None:
        if item.docstring:
            item.docstring.value = as_markdown(item.docstring.value, public, item.name)
        for member in item.members.values():
            if isinstance(member, griffe.Object):
                self._rewrite(member, public)


def as_markdown(docstring: str, public: set[str], own_name: str) -> str:
    """The docstring with its examples as griffe expects them, and with links to other public names."""
    text, *examples = EXAMPLE.split(docstring, maxsplit=1)
    text = DOCTEST.sub(lambda found: f"{found[1]}```pycon\n{found[0].rstrip()}\n{found[1]}```\n", text)

    def link(found: re.Match[str]) -> str:
        name = found[1]
        return f"[{found[0]}][gossip_modules.{name}]" if name in public and name != own_name else found[0]

    return "Examples:".join([NAME.sub(link, text), *examples])
