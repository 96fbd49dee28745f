"""The picture of consensus, drawn from a CSV file alone."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure
from PIL import Image

from visualization import consensus


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


def test_consensus_is_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, figures: list[Figure]) -> None:
    csv = write(tmp_path)
    monkeypatch.setattr(sys, "argv", ["consensus", str(csv)])
    consensus.main()
    with Image.open(tmp_path / "consensus.png") as image:
        assert image.width >= 1000
    (figure,) = figures
    steps = np.arange(1, 6)  # a logarithm has no place for step 0
    for axis, xs in zip(figure.axes, (steps, 2.0 * steps), strict=True):
        good, bad = axis.get_lines()[:2]
        assert (good.get_label(), bad.get_label()) == ("a, step size 1", "b, step size 0.1 (diverges)")
        for line, rate in ((good, 0.05), (bad, 3.0)):
            np.testing.assert_allclose(np.asarray(line.get_xydata()), np.column_stack([xs, rate**steps]))
            assert line.get_markevery() == 1, "every logged point is seen"
        assert [np.asarray(line.get_xydata())[0, 1] for line in axis.get_lines()[2:]] == list(consensus.THRESHOLDS)
        assert (axis.get_xscale(), axis.get_yscale()) == ("log", "log")


def test_runs_without_a_point_after_the_start_are_named(tmp_path: Path, figures: list[Figure]) -> None:
    start = {"step_size": 1.0, "step": 0, "megabits": 0.0, "diverged": False}
    refused = {**start, "method": "b", "step": 1, "error": float("nan"), "megabits": 2.0, "diverged": True}
    rows = [{**start, "method": "a", "error": 0.0}, {**start, "method": "b", "error": 1.0}, refused]
    pd.DataFrame(rows).to_csv(tmp_path / "consensus.csv", index=False)
    consensus.draw(tmp_path / "consensus.csv", tmp_path / "consensus.png")
    lines = figures[0].axes[0].get_lines()[:2]
    assert [line.get_label() for line in lines] == ["a, step size 1", "b, step size 1 (diverges)"]
    assert [np.asarray(line.get_xydata()).shape for line in lines] == [(0, 2), (0, 2)]


def test_another_csv_is_named(tmp_path: Path) -> None:
    csv = tmp_path / "x.csv"
    csv.write_text("step,error\n1,2\n")
    with pytest.raises(ValueError, match=r"got .*x.csv without .*, expected a CSV of train/"):
        consensus.draw(csv, tmp_path / "x.png")
