"""The rule of seconds to an equal loss, and its picture, by hand-made curves and cells."""

from __future__ import annotations

import math
import re

import pandas as pd
import pytest

from benchmarks.claims.equal_loss import (
    COMPARED,
    LINES,
    STEPS,
    chosen,
    curves,
    ends,
    equal_loss,
    first_step,
    own_length,
    target,
)
from tests.harness.pictures import collisions, text_boxes
from visualization.diagrams import WIDTH
from visualization.seconds_to_loss import draw

DDP, LATE = LINES["DDP"].curve, LINES["Overlap SGP, bfloat16"].curve
LOCAL = LINES["Local SGD, H = 10"].curve


SHORT = 300


def curve(
    method: str, losses: dict[int, float], seed: int = 1, *, steps: int = STEPS, rate: float = 0.5, tunes: bool = False
) -> list[dict[str, object]]:
    """Rows of a training with 8 workers."""
    key = {"method": method, "workers": 8, "rate": rate, "steps": steps, "seed": seed, "is_tuning": tunes}
    return [{**key, "step": step, "validation": loss, "test": loss + 1} for step, loss in losses.items()]


@pytest.fixture
def language() -> pd.DataFrame:
    """One of the compared methods is cut off with seed 2, so that seed 2 does not count."""
    rows = []
    for method in COMPARED:
        # A tenth of the steps costs DDP 2.0, so to end 1.0 later it takes steps / 10 ** 0.5; the others / 10 ** 0.25.
        middle, last, short = {DDP: (2.5, 1.0, 3.0), LATE: (3.0, 2.0, 4.0)}.get(method, (2.0, 1.25, 4.25))
        rows += curve(method, {1000: 4.0, 2000: middle, STEPS: last})
        rows += curve(method, {STEPS: last}, tunes=True) + curve(method, {STEPS: 8.0}, rate=0.25, tunes=True)
        rows += curve(method, {1000: 1.0, STEPS: 8.0}, rate=0.25)  # no rate that the tuning chose
        rows += curve(method, {SHORT: short}, steps=SHORT, tunes=True)
        rows += curve(method, {SHORT: 9.0}, steps=SHORT, rate=1.0, tunes=True)
        rows += curve(method, {1000: 9.0, 2000: 9.0, **({} if method == LATE else {STEPS: 9.0})}, seed=2)
    rows += curve(LOCAL, {1000: 4.0, 2000: 3.0, STEPS: 2.1}) + curve(LOCAL, {STEPS: 2.1}, tunes=True)
    # A training of its own length with the loss of the line changes nothing.
    rows += curve(DDP, {1000: 2.5, 1500: 1 + 2 * math.log10(2)}, steps=1500)
    return pd.DataFrame(rows)


@pytest.fixture
def cells() -> pd.DataFrame:
    """Three repeats of all methods at two rates, two ranks each, slowed by four. DDP is faster with its fp16 hook."""
    times = {"ddp": 100.0, "ddp-fp16": 50.0, "ddp-bf16": 60.0, "sgp": 40.0, "osgp-bf16": 20.0, "auto": 30.0}
    rows = []
    for rate, slower in ((1.0, 1.0), (10.0, 0.5)):
        for line in LINES.values():
            ms = slower * times.get(line.cell, 45.0)
            for repeat, factor in enumerate((1.0, 0.9, 5.0)):  # the median is the first one
                row = {
                    "hosts": 8,
                    "cores": 2,
                    "rate_gbit": rate / 4,
                    "method": line.cell,
                    "title": line.cell,
                    "repeat": repeat,
                }
                row |= {"optimizer": "x", "fleet_step_ms": 4 * factor * ms, "num_parameters": 100.0, "error": None}
                row |= {"is_hidden": rate == 1, "bytes_per_step": 210.0 if rate == 1 else 420.0}
                rows += [{**row, "rank": 0}, {**row, "rank": 1}]
        failed = {"method": "adpsgd", "repeat": 4, "error": "no luck"}
        rows.append({"hosts": 8, "cores": 2, "rate_gbit": rate / 4, **failed})
    return pd.DataFrame(rows)


def test_the_first_step_at_a_loss() -> None:
    falling = pd.Series({100: 3.0, 200: 2.0, 300: 1.0, 400: 1.5})
    assert first_step(falling, 2.25) == pytest.approx(175)  # a quarter before 200, as from 3 to 2
    assert first_step(falling, 2.0) == 200
    assert first_step(falling, 1.4) == pytest.approx(260)  # for the first time, not after 400
    assert first_step(falling, 3.5) == 100
    assert math.isnan(first_step(falling, 0.9))


def test_the_steps_of_a_training_that_ends_at_a_loss() -> None:
    """From 300 steps to 1,200 the loss falls by 1.0, half of it in the first doubling; from 1,200 to 3,000 by 0.5."""
    ends = pd.Series({300: 3.0, 1200: 2.0, 3000: 1.5})
    assert own_length(ends, 3.0) == pytest.approx(300)
    assert own_length(ends, 2.5) == pytest.approx(600)
    assert own_length(ends, 1.75) == pytest.approx(math.sqrt(1200 * 3000))
    assert own_length(ends, 1.5) == pytest.approx(3000)
    assert math.isnan(own_length(ends, 1.49))
    assert math.isnan(own_length(ends, 3.5))  # the shortest one ends below it


def test_seconds_to_the_loss_that_all_compared_methods_reach(language: pd.DataFrame, cells: pd.DataFrame) -> None:
    assert target(language) == 2.0
    assert list(ends(language).loc[DDP]) == [2.0, 2.0, 2.0, 1.0, 0.5]
    found = equal_loss(language, cells).set_index(["label", "rate"])
    # SGP ends 0.25 above DDP, and is first at the loss: in the middle its curve is lower.
    assert found.loc[("DDP", 1.0), ["first", "steps"]].tolist() == pytest.approx([2000 + 1000 / 3, 3000 / 10**0.5])
    assert found.loc[("SGP", 1.0), ["first", "steps"]].tolist() == pytest.approx([2000, 3000 / 10**0.25])
    assert found.loc[("DDP", 1.0), ["seconds", "share"]].tolist() == pytest.approx([300 / 10**0.5, 2])
    assert found.loc[("DDP, fp16 hook", 1.0), "share"] == 1
    assert found.loc[("SGP", 1.0), "share"] == pytest.approx(10**0.25 * 40 / 50)
    late = found.loc[("Overlap SGP, bfloat16", 10.0), ["steps", "seconds", "share"]]
    assert late.tolist() == pytest.approx([3000, 30, 10**0.5 * 20 / 50])
    assert found.loc["Local SGD, H = 10"][["first", "steps", "seconds", "share"]].isna().all(axis=None)
    assert "D-PSGD, ring" not in found.index.unique("label"), "it was not trained"


def test_the_row_auto_has_the_loss_of_its_choice(language: pd.DataFrame, cells: pd.DataFrame) -> None:
    assert [chosen(cells, rate) for rate in (1.0, 10.0)] == ["Overlap SGP, bfloat16", "SGP"]
    found = equal_loss(language, cells).set_index(["label", "rate"])["seconds"]
    assert [found["SGP, auto", rate] for rate in (1.0, 10.0)] == pytest.approx([90, 45 / 10**0.25])


def test_curves_are_means_over_the_seeds_of_all_compared_methods(language: pd.DataFrame) -> None:
    assert curves(language).loc[STEPS, DDP] == 1.0
    whole = pd.concat([language, pd.DataFrame(curve(LATE, {STEPS: 3.0}, seed=2))])
    assert curves(whole).loc[STEPS, DDP] == 5.0
    assert target(whole) == 5.125  # SGP: the mean of 1.25 and 9


def test_bars_of_seconds(language: pd.DataFrame, cells: pd.DataFrame) -> None:
    labels = [label for label in LINES if "mixed" not in label]  # the page has shorter ones
    table = equal_loss(language, cells)
    table = table[table["label"].isin(labels)]
    svg = draw(table, labels, "title").svg()
    found = [box.letters for box in text_boxes(svg)]
    slow, fast = (found[found.index(f"links of {rate} Gbit/s") :] for rate in (1, 10))
    assert slow[1:3] == ["DDP", "95 s"]
    assert fast[fast.index("Local SGD, H = 10") + 1] == "not reached"
    without = draw(table[(table["label"] != "DDP") | (table["rate"] == 10)], labels, "title").svg()
    found = [box.letters for box in text_boxes(without)]
    assert found[found.index("DDP") + 1] == "not measured"
    widths = [float(width) for width in re.findall(r'<rect [^>]*width="([\d.]+)"', svg)]
    for _, own in table.groupby("rate"):
        seconds = own.set_index("label")["seconds"].reindex(labels).dropna()
        drawn, widths = widths[: len(seconds)], widths[len(seconds) :]
        assert drawn == pytest.approx(list(max(drawn) * seconds / seconds.max()), abs=0.1)
    assert not widths
    assert collisions(svg) == []
    assert max(box.right for box in text_boxes(svg)) <= WIDTH
    assert min(box.left for box in text_boxes(svg)) >= 0
