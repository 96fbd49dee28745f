"""Hooks of mkdocs (see mkdocs.yml): the menu lists what folders have, formulas are MathML, no page needs a network, and
the addresses of former pages lead to others."""

from __future__ import annotations

import html
import re
import sys
from collections.abc import Iterator, MutableMapping
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from docs.moved import write_moved  # noqa: E402
from docs.tutorial import with_whole_files  # noqa: E402

# What a browser would fetch by itself; links that a reader may follow are none of these.
FETCHED = re.compile(r"""<(?:script|img|iframe|source)\b[^>]*\bsrc=["']?https?://|<link\b[^>]*\bhref=["']?https?://""")
# As pymdownx.arithmatex writes them, in a line or in a block.
FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', flags=re.DOTALL)
TABLE = re.compile(r"<table>.*?</table>", flags=re.DOTALL)
CODE = re.compile(r"(?<=<code>)[^<]+(?=</code>)")
# Where a long name may go on in the next line: after a mark, or before a capital letter.
BREAK = re.compile(r"(?<=[a-z0-9][_.,=(/])(?=[A-Za-z_\"'])|(?<=[a-z]{3})(?=[A-Z][a-z]{2})")


def on_config(config: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Fills in the menu, and the repository and the version, which setup.py and version.py have.

    In the menu "folder/name*" stands for the pages with such a name that no line has yet: lines without a star come
    first, then those with one, from top to bottom. index.md comes first, the others by name. A section without pages is
    left out.
    """
    taken = {page for page in _leaves(config["nav"]) if "*" not in page}
    config["nav"] = _filled(config["nav"], Path(config["docs_dir"]), taken)
    config["repo_url"] = _constant("setup.py", "REPOSITORY")
    config["repo_name"] = config["repo_url"].rpartition("/")[2]
    config["extra"]["release"] = _constant("gossip_modules/version.py", "__version__")
    return config


def _constant(file: str, name: str) -> str:
    """Read, not imported: torch may not be there."""
    found = re.findall(rf'^{name} = "(.+)"$', (ROOT / file).read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert len(found) == 1, f"{file}: expected one line {name} = ..."
    return str(found[0])


def _leaves(nav: Any) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
    else:
        for item in nav.values() if isinstance(nav, dict) else nav:
            yield from _leaves(item)


def _filled(entries: list[Any], docs: Path, taken: set[str]) -> list[Any]:
    filled: list[Any] = []
    for entry in entries:
        if isinstance(entry, dict):
            title, content = next(iter(entry.items()))
            content = content if isinstance(content, str) else _filled(content, docs, taken)
            filled += [{title: content}] if content else []
        else:
            filled += _pages(docs, entry, taken) if "*" in entry else [entry]
    return filled


def _pages(docs: Path, pattern: str, taken: set[str]) -> list[str]:
    paths = sorted(docs.glob(f"{pattern}.md"), key=lambda path: (path.stem != "index", path.stem))
    pages = [page for page in (path.relative_to(docs).as_posix() for path in paths) if page not in taken]
    taken.update(pages)
    return pages


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Adds the whole scripts to the tutorial, below the diffs."""
    return with_whole_files(markdown) if page.file.src_uri == "learn/tutorial.md" else markdown


def on_page_content(content: str, page: Any, **_: Any) -> str:
    """Writes formulas as MathML, which needs no script; the search leaves folded figures out."""

    def as_mathml(found: re.Match[str]) -> str:
        formula = html.unescape(found[2]).strip()
        mathml = convert(formula, display="block" if found[1] == "div" else "inline")
        if re.search(r"\\|&(?!#?\w+;)", mathml):  # commands that latex2mathml does not know stay as they are
            raise ValueError(f"{page.file.src_uri}: got {formula}, expected a formula that latex2mathml can set")
        return mathml

    if page.file.src_uri.startswith("benchmarks/"):
        content = content.replace("<details", "<details data-search-exclude")
    return FORMULA.sub(as_mathml, content)


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """Refuses a page that a browser without a network could not show whole; lets code in tables break.

    The breaks come after the index of the search is made: words stay whole there.
    """
    if found := FETCHED.search(output):
        raise ValueError(f"{page.file.src_uri}: got {found.group()}, expected files of the site only")
    return TABLE.sub(lambda table: CODE.sub(lambda code: BREAK.sub("<wbr>", code[0]), table[0]), output)


def on_post_build(config: MutableMapping[str, Any], **_: Any) -> None:
    """Writes a page for each former address, which leads to the new one."""
    write_moved(Path(config["site_dir"]))
