"""Pictures are drawn from CSV files alone."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image

from visualization.curves import draw, draw_run, main, read_run, zoom


def write_run(folder: Path, *, num_ranks: int = 2, distance: float = 0.1) -> Path:
    folder.mkdir()
    for rank in range(num_ranks):
        epochs = range(1, 5)
        pd.DataFrame(
            {
                "epoch": epochs,
                "time_seconds": [2.0 * epoch + rank for epoch in epochs],
                "loss": [1.0 / epoch for epoch in epochs],
                "own_test_accuracy_percent": [90.0, None, 98.0, 100.0],
                "averaged_test_accuracy_percent": [91.0, None, 99.0, 100.0],
                "consensus_distance": [distance, None, distance / 2, distance / 4],
            }
        ).to_csv(folder / f"rank_{rank:04d}.csv", index=False)
    return folder


def test_read_run_joins_the_ranks(tmp_path: Path) -> None:
    table = read_run(write_run(tmp_path / "run", num_ranks=3))
    assert len(table) == 12
    assert sorted(table["rank"].unique()) == [0, 1, 2]


def test_curves_of_one_run(tmp_path: Path, figures: list[Figure]) -> None:
    path = draw_run(write_run(tmp_path / "run"))
    assert path == tmp_path / "run" / "curves.png"
    with Image.open(path) as image:
        assert image.width >= 1000
    errors, errors_over_time, losses, distances = figures[0].axes
    validated = [1, 3, 4]
    drawn: dict[Axes, list[Any]] = {
        errors: [(validated, [9, 1, 0]), (validated, [10, 2, 0])],  # averaged, own
        errors_over_time: [([2.5, 6.5, 8.5], [9, 1, 0]), ([2.5, 6.5, 8.5], [10, 2, 0])],  # seconds: mean over ranks
        losses: [([1, 2, 3, 4], [1, 1 / 2, 1 / 3, 1 / 4])],
        distances: [(validated, [0.1, 0.05, 0.025])],
    }
    for axis, lines in drawn.items():
        for line, (xs, ys) in zip(axis.get_lines(), lines, strict=True):
            np.testing.assert_allclose(np.asarray(line.get_xydata()), np.column_stack([xs, ys]))


def test_runs_side_by_side_with_one_that_has_no_distance(tmp_path: Path, figures: list[Figure]) -> None:
    runs = {name: write_run(tmp_path / name, distance=d) for name, d in (("ar", 0.0), ("sgp", 0.1))}
    assert draw(runs, tmp_path / "both.png").is_file()
    labels = [line.get_label() for line in figures[0].axes[3].get_lines()]
    assert labels == ["ar: 0 throughout", "sgp"]


def test_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    folders = [str(write_run(tmp_path / name)) for name in ("a", "b")]
    monkeypatch.setattr(sys, "argv", ["curves", *folders, "--output", str(tmp_path / "c.png")])
    main()
    assert capsys.readouterr().out.strip() == str(tmp_path / "c.png")


def test_a_folder_without_csv_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"got .* without rank_\*\.csv, expected the --out-dir of a run"):
        draw_run(tmp_path)


def test_zoom_shows_what_it_is_told_and_says_what_it_hides() -> None:
    axis = Figure().subplots()
    axis.plot([1, 2, 3], [9.0, 1.2, 1.0])
    assert zoom(axis, pd.Series([1.2, 1.0]))
    low, high = axis.get_ylim()
    assert 0.9 < low < 1.0
    assert 1.2 < high < 1.3
    assert not zoom(axis, pd.Series([1.0, 9.0]))
    assert not zoom(axis, pd.Series([1.0]))
