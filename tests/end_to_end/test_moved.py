"""Former addresses of the documentation lead to pages that exist."""

from __future__ import annotations

import re
from pathlib import Path

from markdown.extensions.toc import slugify  # type: ignore[import-untyped]

from docs.moved import MOVED, write_moved

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_former_pages_lead_to_pages_that_exist(tmp_path: Path) -> None:
    write_moved(tmp_path)
    written = {path.relative_to(tmp_path).with_suffix("").as_posix(): path for path in tmp_path.rglob("*.html")}
    assert written.keys() == MOVED.keys()
    for former, path in written.items():
        assert not (DOCS / f"{former}.md").exists(), former
        addresses = set(re.findall(r'(?:href="|url=)([^"]+)"', path.read_text(encoding="utf-8")))
        assert len(addresses) == 1, former
        address, _, section = addresses.pop().partition("#")
        page = ((DOCS / former).parent / address).with_suffix(".md")
        assert page.is_file(), former
        text = page.read_text(encoding="utf-8")
        titles = re.findall(r"^#+ (.*?)(?: \{ #([\w-]+) \})?$", text, flags=re.MULTILINE)
        assert section in ("", *(anchor or slugify(title.replace("`", ""), "-") for title, anchor in titles)), former
