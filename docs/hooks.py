"""Hooks of mkdocs (see mkdocs.yml): a navigation that lists what folders have, and no page that needs a network."""

from __future__ import annotations

import re
from collections.abc import Collection, MutableMapping
from pathlib import Path
from typing import Any

# What a browser would fetch by itself; links that a reader may follow are none of these.
FETCHED = re.compile(r"""<(?:script|img|iframe|source)\b[^>]*\bsrc=["']?https?://|<link\b[^>]*\bhref=["']?https?://""")


def on_config(config: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Replaces each "folder/*" of a section by the pages of that folder that the navigation does not name.

    index.md comes first, the others by name. A section without pages is left out.
    """
    docs = Path(config["docs_dir"])
    sections = [next(iter(entry.items())) for entry in config["nav"]]
    named = {page for _, pages in sections for page in ([pages] if isinstance(pages, str) else pages)}
    nav: list[Any] = []
    for title, pages in sections:
        if isinstance(pages, str):
            nav.append({title: pages})
        elif found := [name for page in pages for name in _expand(docs, page, named)]:
            nav.append({title: found})
    config["nav"] = nav
    return config


def _expand(docs: Path, page: str, named: Collection[str]) -> list[str]:
    if not page.endswith("*"):
        return [page]
    paths = sorted((docs / page).parent.glob("*.md"), key=lambda path: (path.stem != "index", path.stem))
    return [name for name in (path.relative_to(docs).as_posix() for path in paths) if name not in named]


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """Refuses a page that a browser without a network could not show whole."""
    if found := FETCHED.search(output):
        raise ValueError(f"{page.file.src_uri}: got {found.group()}, expected files of the site only")
    return output
