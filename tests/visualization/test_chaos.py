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
    monkeypatch.setattr(sys, "argv", ["chaos", str(write(tmp_path / "faults.csv"))])
    chaos.main()
    with Image.open(tmp_path / "faults.png") as image:
        assert image.width >= 1000
    above, below = figures[0].axes
    live, members = above.get_lines()
    np.testing.assert_array_equal(live.get_ydata(), [7, 7, 8, 8])
    np.testing.assert_array_equal(members.get_ydata(), [8, 7, 6, 7])
    points = {str(own.get_label()): np.asarray(own.get_xydata()).tolist() for own in below.get_lines()}
    assert points == {"killed": [[2.0, 80.0]], "stopped": [[4.0, 2100.0]], "store killed": [[8.0, 70.0]]}
    assert above.get_title() == "SGP: 4 faults in 8 s"


def test_a_method_that_was_not_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"got no faults of WAGMA in .*, expected one of SGP, MATCHA"):
        chaos.draw(write(tmp_path / "faults.csv"), tmp_path / "a.png", method="WAGMA")
