"""The doctor's choice for two regions: names of methods between nodes, and the section of the page."""

from __future__ import annotations

from typing import Any

import pandas as pd
import pytest

from benchmarks.cluster.methods import between_nodes, method_of
from benchmarks.pages.two_regions import medians, summary
from benchmarks.two_regions import TwoRegions


@pytest.mark.parametrize(
    ("text", "period"), [("sgp", 1), ("osgp", 1), ("LocalSGD(sync_every=7)", 7), ("DiLoCo(sync_every=5, delay=2)", 10)]
)
def test_a_method_between_nodes_keeps_its_period(text: str, period: int) -> None:
    assert method_of(between_nodes(text, 2)).period == period


def test_wrong_methods_between_nodes() -> None:
    with pytest.raises(ValueError, match=r"got the method 'nothing between nodes of 2'"):
        method_of(between_nodes("nothing", 2))


def test_hosts_are_in_two_regions() -> None:
    assert str(TwoRegions().regions) == "0-1,2-3"
    assert str(TwoRegions(hosts=6).regions) == "0-2,3-5"
    for hosts in (2, 5):
        with pytest.raises(ValueError, match=f"got --hosts {hosts}, expected an even number of at least 4"):
            TwoRegions(hosts=hosts)


def row(method: str, predicted: float, measured: float, **others: Any) -> dict[str, Any]:
    numbers = {"predicted_ms": predicted, "step_ms": measured, "steps_to_target": 100}
    seconds = {"predicted_s": predicted / 10, "seconds": measured / 10}
    sent = {"counted_bytes": 1000, "line_bytes": 1010, "load": 1.0}
    return {"inside_region": "a", "method": method, "is_chosen": False, **numbers, **seconds, **sent, **others}


def test_the_page_says_the_place_of_the_choice_and_the_predictions_within_bounds() -> None:
    rows = pd.DataFrame(
        [
            *(row("x", 100, step, is_chosen=True) for step in (90, 110, 400)),
            *(row("y", 100, 100, line_bytes=1050) for _ in range(3)),
            *(row("z", 100, 200) for _ in range(3)),
        ]
    )
    assert medians(rows)["method"].tolist() == ["y", "x", "z"]
    text = summary(rows)
    assert "**The doctor's choice, x with a inside, has place 2 of 3 by measured time.**" in text
    assert "Predictions of 2 methods are within 15 % of the measured step, from 0.50 to 1.00 times as long" in text
    assert "The line counted 1.0% to 5.0% more bytes" in text
