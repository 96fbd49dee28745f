"""Pictures of rows on pages: `visualization.papers` draws them."""

from __future__ import annotations

from collections.abc import Iterable

from benchmarks.record import RESULTS
from visualization.papers import PICTURES


def pictures(names: Iterable[str] = PICTURES, *, csv: str = "") -> list[str]:
    """Return pictures in Markdown, for a page of docs/benchmarks/.

    Args:
        names: names in `PICTURES`; those without rows are left out.
        csv: if given, only pictures of this file.
    """
    return [
        f"![{PICTURES[name].title}](../assets/{name}.svg){{ .diagram }}"
        for name in names
        if csv in ("", PICTURES[name].csv) and (RESULTS / PICTURES[name].csv).exists()
    ]
