"""The picture of a comparison in the Lab."""

from __future__ import annotations

from pathlib import Path

import pytest

from gossip_modules.lab.comparison import COLUMNS, Result
from visualization.compare import draw


def row(method: str, workers: int, seed: int, step: int) -> dict[str, object]:
    numbers = {
        "step": step,
        "seconds": step / 10,
        "megabytes": 2 * step,
        "loss": 1 / (1 + step) if step else float("nan"),
    }
    cell = {"method": method, "plan": method, "workers": workers, "seed": seed, "steps": 4}
    return {**dict.fromkeys(COLUMNS, 0.0), **cell, **numbers, "by": "vmap"}


def test_a_row_of_panels_for_each_number_of_workers(tmp_path: Path) -> None:
    rows = [row(name, n, seed, k) for name in ("SGP", "mine") for n in (4, 8) for seed in (1, 2) for k in (0, 2, 4)]
    Result(rows).to_csv(tmp_path / "mine.csv")
    path = draw(tmp_path / "mine.csv", tmp_path / "mine.svg")
    assert path.read_text(encoding="utf-8").count('<g id="axes_') == 6


def test_another_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="loss"):
        draw(tmp_path / "other.csv", tmp_path / "other.png")
