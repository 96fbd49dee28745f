"""The pictures of consensus and of accuracy against bytes, drawn from CSV files alone."""

from __future__ import annotations

import sys
from pathlib import Path

import pandas as pd
import pytest
from PIL import Image

from visualization import accuracy_bytes, consensus


def points(method: str, step_size: float, rate: float, *, steps: int = 6, diverged: bool = False) -> pd.DataFrame:
    """A run whose error is multiplied by `rate` in each step of 2 Mbit."""
    return pd.DataFrame(
        [
            {"method": method, "step_size": step_size, "step": step, "error": rate**step, "megabits": 2.0 * step}
            | {"diverged": diverged and step == steps - 1}
            for step in range(steps)
        ]
    )


def write(folder: Path) -> Path:
    table = pd.concat([points("a", 0.1, 0.5), points("a", 1.0, 0.05), points("b", 0.1, 3.0, diverged=True)])
    table.assign(data="random").to_csv(folder / "consensus.csv", index=False)
    return folder / "consensus.csv"


def test_best_runs_are_by_bits_to_the_smallest_error_that_is_reached() -> None:
    table = pd.concat([points("a", 0.1, 0.5), points("a", 1.0, 0.05), points("a", 2.0, 3.0), points("b", 0.1, 0.9)])
    best = consensus.best_runs(table)
    assert list(best) == ["a", "b"]
    assert set(best["a"]["step_size"]) == {1.0}
    nowhere = pd.concat([points("c", 0.1, 0.9), points("c", 0.2, 0.8), points("c", 0.3, float("nan"))])
    assert set(consensus.best_runs(nowhere)["c"]["step_size"]) == {0.2}


def test_consensus_is_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    csv = write(tmp_path)
    monkeypatch.setattr(sys, "argv", ["consensus", str(csv)])
    consensus.main()
    with Image.open(tmp_path / "consensus.png") as image:
        assert image.width >= 1000
        assert len(image.convert("RGB").getcolors(maxcolors=1 << 20) or []) > 50


def test_accuracy_is_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    csv = tmp_path / "accuracy_bytes.csv"
    pd.DataFrame(
        {
            "title": ["D-PSGD", "D-PSGD", "CHOCO"],
            "accuracy_percent": [60.0, 61.0, 58.0],
            "sent_megabytes": [90.0, 90.0, 3.0],
        }
    ).to_csv(csv, index=False)
    monkeypatch.setattr(sys, "argv", ["accuracy_bytes", str(csv), "--output", str(tmp_path / "a.png")])
    accuracy_bytes.main()
    with Image.open(tmp_path / "a.png") as image:
        assert image.width >= 1000


@pytest.mark.parametrize("module", [consensus, accuracy_bytes])
def test_another_csv_is_named(tmp_path: Path, module: object) -> None:
    draw = module.draw  # type: ignore[attr-defined]
    csv = tmp_path / "x.csv"
    csv.write_text("step,error\n1,2\n")
    with pytest.raises(ValueError, match=r"got .*x.csv without .*, expected the CSV of (train|benchmarks)/"):
        draw(csv, tmp_path / "x.png")
