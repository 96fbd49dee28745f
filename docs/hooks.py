"""Hooks of mkdocs (see mkdocs.yml): a navigation that lists what folders have, and no page that needs a network."""

from __future__ import annotations

import re
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

# What a browser would fetch by itself; links that a reader may follow are none of these.
FETCHED = re.compile(r"""<(?:script|img|iframe|source)\b[^>]*\bsrc=["']?https?://|<link\b[^>]*\bhref=["']?https?://""")


def on_config(config: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Replaces each navigation entry "folder/*" by the pages of that folder; a folder without pages has no entry."""
    docs = Path(config["docs_dir"])
    nav: list[Any] = []
    for entry in config["nav"]:
        if isinstance(entry, dict):
            ((title, pattern),) = entry.items()
            pages = sorted((docs / pattern).parent.glob("*.md"), key=lambda page: (page.stem != "index", page.stem))
            if pages:
                nav.append({title: [page.relative_to(docs).as_posix() for page in pages]})
        else:
            nav.append(entry)
    config["nav"] = nav
    return config


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """Refuses a page that a browser without a network could not show whole."""
    if found := FETCHED.search(output):
        raise ValueError(f"{page.file.src_uri}: got {found.group()}, expected files of the site only")
    return output
