"""The straggler benchmark: its delays, its counting of steps, its tables and its picture."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
import torch.distributed as dist
import tyro
from matplotlib.figure import Figure
from PIL import Image

from benchmarks.stragglers import elastic, pauses, training
from benchmarks.stragglers.__main__ import Command, Elastic, PausesCommand, Train, main
from benchmarks.stragglers.methods import SYNC_PERIOD, RankContext, learning_rate
from benchmarks.stragglers.pauses import Pauses
from benchmarks.stragglers.processes import run_group
from benchmarks.stragglers.training import StragglerRun, markdown, rates, row_of, seconds_to, train
from gossip_modules import Progress
from tests.harness.ranks import run_ranks, thread_group
from visualization.stragglers import draw, kept_percent

ROW = {"seed": 1, "num_steps": 1600, "wait_seconds": 0.0, "sent_megabytes": 1.0, "train_seconds": 12.0}


def rows_of(*values: tuple[str, str, str, float, float]) -> pd.DataFrame:
    names = ("setting", "method", "title", "steps_per_second", "accuracy_percent")
    return pd.DataFrame([{**dict(zip(names, each)), **ROW, "seconds_to_target": 3.0} for each in values])


ROWS = (
    ("undisturbed", "ar", "AllReduce", 10.0, 98.0),
    ("undisturbed", "adpsgd", "AD-PSGD", 18.0, 98.5),
    ("one-slow", "none", "no communication", 20.0, 90.0),
    ("one-slow", "ar", "AllReduce", 3.0, 98.0),
    ("one-slow", "adpsgd", "AD-PSGD", 17.1, 97.25),
)


def test_one_rank_is_slow() -> None:
    run = StragglerRun("ar", "one-slow", seed=1)
    assert {run.sleep_seconds(rank, step) for rank in range(7) for step in range(5)} == {0.05}
    assert {run.sleep_seconds(7, step) for step in range(5)} == {0.25}
    assert list(run.fast_ranks) == list(range(7))


def test_two_ranks_are_late_in_each_step_and_all_know_which() -> None:
    run = StragglerRun("ar", "two-random", seed=1)
    counts = [0] * 8
    for step in range(400):
        late = [rank for rank in range(8) if run.sleep_seconds(rank, step) == pytest.approx(0.37)]
        assert len(late) == 2
        for rank in late:
            counts[rank] += 1
    # Binomial with n = 400, p = 1/4: the standard deviation is 8.7.
    assert all(60 < count < 140 for count in counts)
    assert list(run.fast_ranks) == list(range(8))


def test_learning_rates_rise_and_fall() -> None:
    values = [learning_rate(share / 100, 0.1) for share in range(105)]
    assert values[0] == pytest.approx(0.005)
    assert values == sorted(values[:6]) + sorted(values[6:], reverse=True)
    assert max(values) == pytest.approx(0.1, rel=0.01)
    assert values[-1] == 0.0


def test_rates_are_those_while_all_train() -> None:
    # Rank 0 takes 10 steps a second, but stalls for a second when it begins, and when rank 1 has ended.
    own = [0.0, *(1 + 0.1 * k for k in range(200)), 25.0, 25.1]
    slow = [0.5 * k for k in range(41)]
    assert rates([torch.tensor(own).double(), torch.tensor(slow).double()]) == pytest.approx([10.0, 2.0])


def test_seconds_to_an_accuracy() -> None:
    points = [(0.0, 10.0), (1.0, 97.0), (2.0, 96.0), (3.0, 98.0)]
    assert seconds_to(points, 97.0) == 1.0
    assert seconds_to(points, 97.5) == 3.0
    assert math.isnan(seconds_to(points, 99.0))


def train_in_threads(run: StragglerRun) -> list[dict[str, Any]]:
    store = dist.HashStore()
    alive = []  # a group that goes closes its connections, which others may still use

    def body(group: dist.ProcessGroup) -> dict[str, Any]:
        own = thread_group(dist.PrefixStore("wrapper", store), group.rank(), group.size())
        alive.append(own)
        return train(RankContext(group.rank(), group, Progress(store), wrapper_group=own), run)

    return run_ranks(run.num_ranks, body)


@pytest.mark.parametrize("method", ["sgp", "adpsgd", "wagma"])
def test_all_methods_take_equally_many_steps(method: str) -> None:
    run = StragglerRun(method, "one-slow", seed=1, num_ranks=4, num_rounds=15, step_seconds=0.002, mark_seconds=1.0)
    records = train_in_threads(run)
    steps = [len(record["stamps"]) - 1 for record in records]
    if method == "sgp":
        assert steps == [15] * 4
    elif method == "adpsgd":  # all see the end after their current step
        assert 60 <= sum(steps) < 64
    else:  # up to a period more, since ranks part at a global average
        assert 60 <= sum(steps) <= 60 + 4 * SYNC_PERIOD
    for record in records:
        torch.testing.assert_close(record["final"], records[0]["final"])
        assert record["marks"].shape[1:] == record["final"].shape
    row = row_of(run, records, training.curve(records, run), target_percent=0.0)
    assert row["num_steps"] == sum(steps)
    assert row["seconds_to_target"] == 0.0


def test_the_table_compares_within_method_and_within_setting() -> None:
    lines = markdown(rows_of(*ROWS), target_percent=98).splitlines()
    assert len({line.count("|") for line in lines}) == 1, "as many cells in each line"
    assert lines[2] == "| undisturbed | AllReduce | 10.00 | 100.0 % |  | 3.0 | 98.00 | +0.00 | 1600 | 12.0 |"
    assert lines[4] == "| one-slow | no communication | 20.00 |  | 100.0 % |  |  |  | 1600 | 12.0 |"
    assert lines[6] == "| one-slow | AD-PSGD | 17.10 | 95.0 % | 85.5 % | 3.0 | 97.25 | -0.75 | 1600 | 12.0 |"


def test_the_picture_is_drawn_from_the_files(tmp_path: Path) -> None:
    rows = rows_of(*ROWS)
    kept = kept_percent(rows)
    assert list(kept.columns) == ["one-slow"]
    assert kept["one-slow"].to_dict() == pytest.approx({"AllReduce": 30.0, "AD-PSGD": 95.0})
    rows.to_csv(tmp_path / "stragglers.csv")
    points = [{**row, "seconds": x} for row in rows.to_dict("records") for x in (0.0, 1.0)]
    pd.DataFrame(points).to_csv(tmp_path / "curves.csv")
    draw(tmp_path / "stragglers.csv", tmp_path / "curves.csv", tmp_path / "a.png")
    with Image.open(tmp_path / "a.png") as image:
        assert image.width > 1.5 * image.height
    with pytest.raises(ValueError, match=r"got .*stragglers.csv without seconds, expected a CSV of benchmarks/strag"):
        draw(tmp_path / "stragglers.csv", tmp_path / "stragglers.csv", tmp_path / "b.png")


def test_the_picture_names_methods_that_were_not_run_undisturbed_and_shows_low_curves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = rows_of(*ROWS)
    rows = rows[(rows["setting"] != "undisturbed") | (rows["title"] != "AD-PSGD")]
    rows.to_csv(tmp_path / "stragglers.csv")
    points = pd.DataFrame([{**row, "seconds": x} for row in rows.to_dict("records") for x in (0.0, 1.0)])
    points["accuracy_percent"] = 43.0
    points.to_csv(tmp_path / "curves.csv")
    figures: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: figures.append(figure))
    draw(tmp_path / "stragglers.csv", tmp_path / "curves.csv", tmp_path / "a.png")
    named = [text.get_text() for text in figures[0].legends[0].get_texts()]
    assert sorted(named) == sorted({*kept_percent(rows).index, *points[points["method"] != "none"]["title"]})
    assert "AD-PSGD" in named
    assert figures[0].axes[0].get_ylim() == (30.0, 100.0)


def test_turns_end_at_a_global_average() -> None:
    Pauses(("none",), 1, 20, 1, 0.0, 0.0)
    for num_steps in (0, 15):
        with pytest.raises(ValueError, match=f"got num_steps={num_steps}, expected a multiple of 10"):
            Pauses(("none",), 1, num_steps, 1, 0.0, 0.0)


def test_pauses_are_compared_within_a_cycle() -> None:
    # The machine is twice as slow in the second cycle; one rank is ahead of the other.
    times = [{"none": [30.0, 60.0], "adpsgd": [33.0, 66.0]}, {"none": [50.0, 100.0], "adpsgd": [55.0, 110.0]}]
    assert "| AD-PSGD | 66.0 | 33.0-99.0 | 1.10 | <= 1.15 |" in pauses.markdown(times)


def test_rounds_until_a_worker_is_contacted() -> None:
    stamps = torch.arange(0, 10, 0.5, dtype=torch.float64)
    others = ["back", *["x"] * 7, "back", "x", "back", *["x"] * 9]  # before it died, and from 4.0 on
    first = {"stamps": stamps, "merged_with": others}
    assert elastic.rounds_to_contact("back", 2.2, [first]) == 4  # at 2.5, 3.0, 3.5 and 4.0
    second = {"stamps": stamps, "merged_with": ["x"] * 10 + ["back"] * 10}
    assert elastic.rounds_to_contact("back", 2.2, [first, second]) == 6  # of the one that was later
    never = {**first, "merged_with": ["x"] * 20}
    assert elastic.rounds_to_contact("back", 2.2, [first, never]) == math.inf
    assert elastic.longest_pause({"stamps": torch.tensor([0.0, 9.0, 9.5, 10.25])}) == 0.75


def test_the_elastic_table_tells_workers_apart() -> None:
    row = {"seed": 1, "rounds_to_contact": float("nan"), "longest_step_seconds": 0.1, "accuracy_percent": 98.0}
    rows = [
        {**row, "has_deaths": False, "is_restarted": False},
        {**row, "has_deaths": True, "is_restarted": False, "longest_step_seconds": 0.25},
        {**row, "has_deaths": True, "is_restarted": True, "rounds_to_contact": 4.0, "accuracy_percent": 97.0},
        {**row, "has_deaths": True, "is_restarted": True, "rounds_to_contact": 7.0},
    ]
    assert elastic.markdown(pd.DataFrame(rows)).splitlines()[2:] == [
        "| undisturbed run | 98.00 | 98.00 | 0.100 |  |",
        "| survivors | 98.00 | 98.00 | 0.250 |  |",
        "| restarted | 97.50 | 97.00 | 0.100 | 7 |",
    ]


def test_the_command_line_has_three_parts() -> None:
    commands = {"train": Train, "pauses": PausesCommand, "elastic": Elastic}
    for name, kind in commands.items():
        assert isinstance(tyro.cli(Command, args=[name, "--out-dir", "elsewhere"]), kind)
    for options in ({"methods": ("magic",)}, {"settings": ("storm",)}, {"num_ranks": 1}):
        with pytest.raises(ValueError, match=r"got methods=.*, expected some of none, ar, .* undisturbed, .*; see --h"):
            Train(**options)
    with pytest.raises(ValueError, match=r"got methods=\('ar',\), expected none and some of none, ar, "):
        PausesCommand(methods=("ar",))


def fail_on_one(place: RankContext) -> int:
    if place.rank == 1:
        raise ValueError("the worker's own mistake")
    place.group.barrier().wait()
    return place.rank


@pytest.mark.e2e
def test_a_rank_that_fails_is_named() -> None:
    with pytest.raises(RuntimeError, match=r"got exit code 1 of rank [01], expected 0; see its error"):
        run_group(2, fail_on_one, timeout=40)


@pytest.mark.soak
@pytest.mark.e2e
def test_the_command_makes_everything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(Train(methods=("ar", "dpwa"), settings=("undisturbed",), num_ranks=2, quick=True, out_dir=tmp_path))
    assert "| undisturbed | dpwa | " in capsys.readouterr().out
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"stragglers.csv", "curves.csv", "stragglers.md", "stragglers.png"}
    assert pd.read_csv(tmp_path / "stragglers.csv")["accuracy_percent"].between(0, 100).all()
