"""Time to a fixed accuracy or loss on the emulated cluster: jobs, curves, and the join."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from benchmarks import pages
from benchmarks.cluster.curve_table import COLUMNS as CURVE_COLUMNS
from benchmarks.cluster.curve_table import curve
from benchmarks.cluster.curves import EVALUATE_EVERY, Curves
from benchmarks.cluster.job import Job
from benchmarks.cluster.methods import CLUSTER_METHODS, require_methods
from benchmarks.cluster.peers import PERIOD
from benchmarks.cluster.table import failed_row, frame, rows_of
from benchmarks.cluster.time_to_target import TimeToTarget, markdown, paces, seconds_per_step, steps_to, times
from benchmarks.cluster.trials import Trial
from benchmarks.cluster.workload.delays import Delays
from benchmarks.cluster.workload.image_task import ClusterImages
from benchmarks.cluster.workload.language_task import ClusterText
from benchmarks.cluster.workload.training import Training
from benchmarks.pages import time_to_loss as page
from tests.benchmarks.cluster.test_cluster import answer

# Jobs.


def test_jobs_survive_their_messages() -> None:
    shared: dict[str, Any] = {"method": "sgp", "number": 3, "num_steps": 5, "compute_seconds": 0.1}
    shared.update(delays=Delays(straggle_chance=0.5), limit_seconds=9.0)
    jobs: list[Job] = [
        Trial(**shared, num_parameters=1e6),
        Training(
            **shared,
            learning_rate=0.5,
            task="images",
            data="here",
            batch_size=2,
            num_parameters=0.0,
            evaluate_every=1,
            seed=4,
        ),
    ]
    for job in jobs:
        message = job.as_message()
        assert message["kind"] == type(job).__name__
        assert type(job).from_message(message) == job


@pytest.mark.parametrize("names", [(), ("ddp", "ddp"), ("ddp", "typo")])
def test_methods_are_there_and_named_once(names: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="expected some of local, sgp"):
        require_methods(names)


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        ({"hosts": 1}, "expected 2 to"),
        ({"steps": 0}, "expected steps and batch_size >= 1"),
        ({"seeds": (1, 1)}, "expected some of at least 0, each once"),
        ({"seeds": (2, 1)}, "each once, the lowest first"),
        ({"learning_rates": (0.1, -1.0)}, "expected some above 0, each once"),
        ({"learning_rates": (0.1, 0.1)}, "expected some above 0, each once"),
        ({"learning_rates": (0.3, 0.1)}, "the lowest first"),
        ({"parameters": 100.0}, "expected 0 or at least 26154"),
        ({"parameters": 1e5, "task": "language"}, "expected 0 or at least 120768"),
        ({"data": None}, "got no data, expected a folder of images"),
        ({"rate": 1e-6}, "options are in Gbit/s"),
        ({"straggle_chance": 0.1}, "compute=0, of which there is no multiple"),
        ({"straggle_chance": 2.0, "compute": 1.0}, "a straggle_chance from 0 to 1"),
    ],
)
def test_wrong_options(wrong: dict[str, Any], expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        Curves(**{"data": Path("data"), **wrong})


def test_evaluations_come_right_after_an_average() -> None:
    assert all(EVALUATE_EVERY % method.period == 0 for method in CLUSTER_METHODS.values())
    assert EVALUATE_EVERY % PERIOD == 0


# Curves and the join.


def test_the_curve_counts_all_ranks() -> None:
    ranks: list[dict[str, list[float]]] = [
        {
            "num_steps": [40, 80],
            "total": [10, 15],
            "num_items": [50, 50],
            "mean_loss": [2.0, 1.0],
            "mean_seconds": [0.1, 0.2],
        },
        {
            "num_steps": [44, 90],
            "total": [20, 48],
            "num_items": [100, 100],
            "mean_loss": [4.0, 3.0],
            "mean_seconds": [0.3, 0.2],
        },
    ]
    shared = [{"mean_loss": 3.0, "mean_step_ms": 200.0}, {"mean_loss": 2.0, "mean_step_ms": 200.0}]
    assert curve(ranks, ClusterImages.score) == [
        {"num_steps": 42.0, "score": 20.0, "worst_score": 20.0, **shared[0]},
        {"num_steps": 85.0, "score": 42.0, "worst_score": 30.0, **shared[1]},
    ]
    losses = curve(ranks, ClusterText.score)
    assert [point["score"] for point in losses] == pytest.approx([0.2, 0.42])
    assert [point["worst_score"] for point in losses] == pytest.approx([0.2, 0.48]), "the highest is the worst"


EVEN = {
    "hosts": 2,
    "rate_gbit": 1.0,
    "num_parameters": 1e6,
    "planned_ms": 20.0,
    "spread": 0.0,
    "straggle_chance": 0.0,
    "slow_factor": 10.0,
    "slow_host": 1.0,
    "slow_link_share": 0.0,
}
UNSHAPED = {**EVEN, "rate_gbit": 0.0, "num_parameters": 0.0, "planned_ms": 0.0}


def trained(
    method: str,
    *scores: float,
    rate: float = 0.1,
    seed: int = 1,
    cell: dict[str, float] = UNSHAPED,
    task: str = "images",
) -> pd.DataFrame:
    """An evaluation every 40 steps; none: it failed."""
    points = [{"num_steps": 40.0 * (k + 1), "score": value} for k, value in enumerate(scores)]
    own = {
        **cell,
        "method": method,
        "learning_rate": rate,
        "seed": seed,
        "task": task,
        "data": "sha256:0",
        "batch_size": 8,
        "planned_steps": 120,
    }
    failed = [{"num_steps": np.nan, "score": np.nan, "error": "no"}]
    return pd.DataFrame([{**point, **own} for point in points or failed], columns=list(CURVE_COLUMNS))


def test_steps_to_a_target() -> None:
    rows = pd.concat(
        [
            trained("ddp", 30, 50, 70),  # 60 after 100
            trained("ddp", 80, 65, 65, rate=0.05),  # the best before the end does not count
            trained("ddp", rate=0.3),  # failed
            trained("ddp", 30, 60, 70, seed=2),  # 80
            trained("ddp", seed=3),  # failed: never
            trained("sgp", 20, 30, 59),
            trained("sgp", 80, cell=EVEN),  # 30
            trained("choco"),
        ]
    )
    found = steps_to(rows, 60.0, ClusterImages.score).set_index(["method", "rate_gbit"])
    assert found.loc[("ddp", 0.0), ["num_steps", "fewest", "most", "learning_rate", "final", "num_seeds"]].tolist() == [
        *(100, 80, float("inf"), 0.1, 70, 3)
    ]
    assert found.loc[("sgp", 0.0), "num_steps"] == float("inf")
    assert found.loc[("sgp", 1.0), "num_steps"] == 30
    assert found.loc[("choco", 0.0), "num_steps"] == float("inf")


def test_the_learning_rate_is_that_of_the_lowest_seed() -> None:
    low, high = trained("ddp", 60), trained("ddp", 50, rate=0.3)
    other_low, other_high = trained("ddp", 70, seed=2), trained("ddp", 80, rate=0.3, seed=2)

    def rate(*rows: pd.DataFrame) -> float:
        found = steps_to(pd.concat(rows), 60.0, ClusterImages.score)
        return found["learning_rate"].item()

    assert rate(other_low, low, high) == 0.1
    assert rate(other_high, other_low, high, low) == 0.1, "whichever comes first"
    assert rate(trained("ddp", 60, rate=0.3), low) == 0.1, "the lower of equal ones"
    with pytest.raises(ValueError, match=r"got ddp with seed 2 at learning rates 0.3, expected .* of seed 1, 0.1,"):
        rate(other_high, low, high)
    with pytest.raises(ValueError, match=r"seed 2 at learning rates 0.1, 0.3, expected .* no more of them than its 1"):
        rate(low, other_low, other_high)


def test_steps_to_a_loss() -> None:
    rows = pd.concat(
        [
            trained("ddp", 4, 3, 2, task="language"),  # 2.5 after 100
            trained("ddp", 3, 2.9, 2.8, task="language", rate=0.01),
            trained("sgp", 4, 3, 2.6, task="language"),
        ]
    )
    found = steps_to(rows, 2.5, ClusterText.score).set_index("method")
    assert found.loc["ddp", ["num_steps", "learning_rate", "final"]].tolist() == [100, 0.1, 2]
    assert found.loc["sgp", "num_steps"] == float("inf")


def cluster_rows(method: str, *step_ms: float, cell: dict[str, float] = EVEN) -> list[dict[str, Any]]:
    return rows_of({**cell, "method": method, "repeat": 0}, [answer(value) for value in step_ms], rate=1e9)


def test_time_is_steps_times_seconds() -> None:
    slow = {**EVEN, "straggle_chance": 0.05}
    slower = {**slow, "slow_factor": 20.0}
    more = {**EVEN, "hosts": 4}
    steps = steps_to(
        pd.concat(
            [
                trained("ddp", 60),
                trained("adpsgd", 60),
                trained("adpsgd", 0, 60, cell=EVEN),
                trained("adpsgd", 0, 0, 60, cell=slow),
                trained("choco", 5),
            ]
        ),
        60.0,
        ClusterImages.score,
    )
    rows = cluster_rows("ddp", 500, 500) + cluster_rows("adpsgd", 100, 100) + cluster_rows("choco", 50, 50)
    rows += cluster_rows("ddp", 900, 900, cell=slow) + cluster_rows("adpsgd", 100, 300, cell=slow)
    rows += cluster_rows("ddp", 910, 910, cell=slower) + cluster_rows("adpsgd", 100, 300, cell=slower)
    rows += cluster_rows("ddp", 920, 920, cell=more) + cluster_rows("sgp", 70, 70, cell=more)
    seconds = seconds_per_step(frame(rows))
    table = times(steps, seconds)
    even = "2 hosts, 1 M parameters, 1 Gbit/s, compute 20 ms"
    straggling = f"{even}, 5 % stragglers 10 times slower"
    assert table.loc["ddp", even] == pytest.approx(40 * 0.5)
    assert table.loc["ddp", straggling] == pytest.approx(40 * 0.9), "what it computes does not depend on stragglers"
    assert table.loc["adpsgd", even] == pytest.approx(80 * 0.1), "trained there, not on other links"
    assert table.loc["adpsgd", straggling] == pytest.approx(120 * 0.15), "2 steps take 100 and 300: 0.15 s each"
    assert table.loc["choco", even] == float("inf")
    assert np.isnan(table.loc["choco", straggling])
    assert np.isnan(table.loc["adpsgd", f"{even}, 5 % stragglers 20 times slower"]), "not trained there"
    assert table[even.replace("2 hosts", "4 hosts")].isna().all(), "trained by 2"
    text = markdown(table, 60.0, ClusterImages.score)
    assert "| DDP | 60.00 | 0.1 | 1 | 40 | 40 | 20 | 36 |" in text
    assert "| AD-PSGD |  |  |  |  |  | 8 | 18 |" in text
    assert "| fastest of ours | | | | | | AD-PSGD 8 | AD-PSGD 18 |" in text
    assert "| fastest of the others | | | | | | DDP 20 | DDP 36 |" in text
    assert "| DDP | 500 | 900 | 910 | 920 |" in paces(seconds)


def test_a_table_of_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    curves_csv, cells_csv = tmp_path / "curves.csv", tmp_path / "cluster.csv"
    join = TimeToTarget(60.0, (curves_csv,), (cells_csv,))
    rows = pd.concat([trained("ddp", 60), trained("sgp", 30, 60)])
    rows.to_csv(curves_csv, index=False)
    frame(cluster_rows("ddp", 500) + cluster_rows("sgp", 100)).to_csv(cells_csv, index=False)
    join.main()
    assert "| fastest of ours | | | | | | SGP, one-peer exponential 8 |" in capsys.readouterr().out

    with pytest.raises(ValueError, match=r"curves.csv without .*, expected a CSV of benchmarks.cluster; write it"):
        TimeToTarget(60.0, (curves_csv,), (curves_csv,)).main()
    with pytest.raises(ValueError, match="got target=101, expected accuracy between 0 and 100 %"):
        replace(join, target=101).main()
    frame(cluster_rows("ddp", 500)).drop(columns="planned_steps").to_csv(cells_csv, index=False)
    with pytest.raises(ValueError, match=r"cluster.csv without planned_steps, expected a CSV of benchmarks.cluster"):
        join.main()
    lengths = [cluster_rows("ddp", 500, cell={**EVEN, "planned_steps": num}) for num in (12, 24)]
    frame(lengths[0] + lengths[1]).to_csv(cells_csv, index=False)
    with pytest.raises(ValueError, match="got trials of ddp with 12, 24 timed steps in a cell, expected one: see"):
        join.main()
    frame(cluster_rows("ddp", 500)).assign(method="gone").to_csv(cells_csv, index=False)
    with pytest.raises(ValueError, match="with the methods gone, expected some of CLUSTER_METHODS"):
        join.main()
    for column, value, expected in (("batch_size", 16, "8, 16"), ("task", "language", "images, language")):
        pd.concat([rows, rows.assign(**{column: value})]).to_csv(curves_csv, index=False)
        with pytest.raises(ValueError, match=f"got trainings with {column} of {expected}, expected one"):
            join.main()
    rows.to_csv(curves_csv, index=False)
    frame(cluster_rows("ddp", 500)).to_csv(cells_csv, index=False)
    with pytest.raises(ValueError, match=r"got the same runs of ddp, sgp twice, .*; see --curves"):
        replace(join, curves=(curves_csv,) * 2).main()
    with pytest.raises(ValueError, match=r"got the same runs of ddp twice, .*; see --cells"):
        replace(join, cells=(cells_csv,) * 2).main()
    frame([failed_row({**EVEN, "method": "ddp", "repeat": 0}, "no")]).to_csv(cells_csv, index=False)
    with pytest.raises(ValueError, match="got no trial with a time"):
        join.main()


# The page.


def test_the_page_has_the_times_to_each_target_and_what_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "TARGETS", (2.6, 2.4))
    made = {"command": "c", "commit": "abc", "date": "d", "torch": "2", "machine": "m", "cores": 2, "seed": 1}
    steps = pd.concat(
        [trained("ddp", 5, 3, 2, task="language"), trained("sgp", 5, 3, 2.5, task="language"), trained("slowmo")]
    )
    steps = steps.assign(task="language", **made)
    cells = frame(cluster_rows("ddp", 500) + cluster_rows("sgp", 100) + cluster_rows("local", 50)).assign(**made)
    text = page.figures(steps, cells)
    # 2.6 nats are 0.4 of 1 below 3 of ddp, and 0.4 of 0.5 of sgp; sgp never has 2.4.
    assert "| DDP | 2.00 | 0.1 | 1 | 96 | 96 | 48 |" in text
    assert "| SGP, one-peer exponential | 2.50 | 0.1 | 1 | 112 | 112 | 11 |" in text
    assert "| SGP, one-peer exponential | 2.50 | 0.1 | 1 | never | never | never |" in text
    assert "| fastest of ours | | | | | | none |" in text
    assert "Steps:\n\n    c\n\nd to d, commit abc, torch 2, m, 2 cores, seed 1." in text
    assert "- slowmo: `no`" in text


def test_a_page_is_made_when_both_of_its_files_are_there(tmp_path: Path) -> None:
    for name in ("loss_steps.csv", "loss_cells.csv"):
        assert "time_to_loss" not in pages.measured(pages.LISTED, tmp_path)
        (tmp_path / name).touch()
    assert "time_to_loss" in pages.measured(pages.LISTED, tmp_path)
