"""The code of docs/guides/lab.md and of the simulator's page runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.mark.parametrize("page", ["guides/lab.md", "choosing.md"])
def test_the_page_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text, namespace = (DOCS / page).read_text(encoding="utf-8"), {"__name__": "page"}
    for block in re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        exec(compile(block, page, "exec", dont_inherit=True), namespace)
    if "inactive" in namespace:
        check_activation(namespace)


def check_activation(page: dict[str, Any]) -> None:
    """The durations are the gaps between active iterations of a chain, and of a countdown; who waits takes longer."""
    draw, is_active, countdown = np.random.default_rng(1), True, 0
    actives: tuple[list[int], list[int]] = ([], [])
    for k in range(20_000):
        is_active = draw.random() >= 0.2 if is_active else draw.random() < 0.5
        if is_active:
            actives[0].append(k)
        countdown -= 1
        if countdown < 0:
            actives[1].append(k)
            countdown = int(draw.poisson(1.0))
    for durations, active in zip((page["markov"], page["poisson"]), actives, strict=True):
        lengths, gaps = np.rint(durations / page["iteration"]).astype(int), np.diff(active)
        for num in (1, 2, 3):
            assert abs((lengths == num).mean() - (gaps == num).mean()) < 0.04, num
    seconds = {row["method"]: row["seconds"] for row in page["inactive"].last}
    median = float(np.median(page["poisson"]))
    assert seconds["AD-PSGD"] == pytest.approx(200 * median, rel=0.1), "200 ticks"
    assert seconds["D-PSGD"] > 1.3 * seconds["AD-PSGD"]
