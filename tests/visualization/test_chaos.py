"""The picture of a soak."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure
from PIL import Image

from visualization import chaos


def write(path: Path) -> Path:
    rows = {
        "method": ["SGP"] * 4 + ["MATCHA"],
        "at_seconds": [2.0, 4.0, 6.0, 8.0, 2.0],
        "kind": ["kill", "stop", "join", "store", "kill"],
        "lasts_seconds": [0.0, 5.0, 0.0, 2.0, 0.0],
        "live": [7, 7, 8, 8, 6],
        "members": [8, 7, 6, 7, 7],
        "slowest_ms": [80.0, 2100.0, 0.0, 70.0, 75.0],
    }
    pd.DataFrame(rows).to_csv(path, index=False)
    return path


def test_members_and_slowest_steps_are_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, figures: list[Figure]
) -> None:
    runs = {"method": ["SGP"], "num_workers": [8], "seed": [1], "median_ms": [60.0]}
    pd.DataFrame(runs).to_csv(tmp_path / "chaos.csv", index=False)
    faults, table = str(write(tmp_path / "faults.csv")), str(tmp_path / "chaos.csv")
    monkeypatch.setattr(sys, "argv", ["chaos", faults, "--runs", table])
    chaos.main()
    with Image.open(tmp_path / "faults.png") as image:
        assert image.width >= 800
    above, below = figures[0].axes
    (members,), (live,) = above.get_lines(), above.collections
    assert np.asarray(live.get_paths()[0].vertices)[:, 1].max() == 8
    np.testing.assert_array_equal(members.get_ydata(), [8, 7, 6, 7])
    points = {str(own.get_label()): np.asarray(own.get_xydata()).tolist() for own in below.get_lines()}
    lines = {label: xy[0][1] for label, xy in points.items() if len(xy) == 2}
    assert lines == {"deadline of a silent worker, 2 s": 2000.0, "median of all steps, 60 ms": 60.0}
    faults_drawn = {label: xy for label, xy in points.items() if label not in lines}
    assert faults_drawn == {
        "killed: 80 ms in the median": [[2.0, 80.0]],
        "stopped: 2100 ms in the median": [[4.0, 2100.0]],
        "store killed: 70 ms in the median": [[8.0, 70.0]],
    }
    assert above.get_title() == "SGP on digits: 8 workers, seed 1,\n4 faults in 8 s"


def test_a_method_that_was_not_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"got no faults of WAGMA in .*, expected one of SGP, MATCHA"):
        chaos.draw(write(tmp_path / "faults.csv"), tmp_path / "a.png", method="WAGMA")
    pd.DataFrame({"method": ["SGP"], "num_workers": [8], "seed": [1], "median_ms": [60.0]}).to_csv(
        tmp_path / "chaos.csv", index=False
    )
    with pytest.raises(ValueError, match=r"got no run of MATCHA in .*chaos\.csv, expected the table of the runs"):
        chaos.draw(tmp_path / "faults.csv", tmp_path / "a.png", method="MATCHA", runs=tmp_path / "chaos.csv")
