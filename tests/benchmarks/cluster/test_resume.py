"""The benchmarks of the emulated cluster go on where they were broken off."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pandas as pd
import pytest

from benchmarks.cluster import curves
from benchmarks.cluster.__main__ import Cluster
from benchmarks.cluster.curves import Curves
from benchmarks.cluster.network.links import LinkRates
from benchmarks.cluster.processes import TrialError
from benchmarks.cluster.trials import Trial
from benchmarks.cluster.workload.training import Training
from tests.benchmarks.cluster.test_cluster import answer


class Cells:
    """Stands in for the network and for its processes: every trial takes as long, or fails."""

    trials: ClassVar[list[tuple[str, float]]] = []

    def __init__(self, *arguments: Any) -> None:
        self.links = next((x for x in arguments if isinstance(x, LinkRates)), None)
        self.network = next((x for x in arguments if isinstance(x, Cells)), None)

    def __enter__(self) -> Cells:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing is there."""

    def has_neighbours(self) -> bool:
        return False

    def close(self) -> None:
        """Nothing is there."""

    def run(self, trial: Trial) -> list[dict[str, Any]]:
        assert self.network is not None
        assert self.network.links is not None
        self.trials.append((trial.method, self.network.links.rate))
        if trial.method == "hivemind":
            raise TrialError("rank 1: no luck")
        return [answer(50.0), answer(60.0)]


@pytest.fixture
def trials(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, float]]:
    """Those that ran, instead of on a network."""
    monkeypatch.setattr("benchmarks.cluster.__main__.EmulatedNetwork", Cells)
    monkeypatch.setattr("benchmarks.cluster.__main__.Fleet", Cells)
    monkeypatch.setattr("benchmarks.cluster.__main__.draw", lambda *_: [])
    monkeypatch.setattr(Cells, "trials", [])
    return Cells.trials


def test_trials_are_resumed(tmp_path: Path, trials: list[tuple[str, float]]) -> None:
    output = tmp_path / "results" / "cells.csv"
    shared: dict[str, Any] = {"hosts": (2,), "rates": (0.1, 1.0), "out": tmp_path / "out", "output": output}
    assert Cluster(methods=("ddp", "sgp"), repeats=2, minutes=1e-9, **shared).main() == 3
    assert trials == []
    assert Cluster(methods=("ddp", "sgp"), repeats=2, **shared).main() == 0
    assert len(trials) == 8
    rows = pd.read_csv(output)
    assert len(rows) == 16  # of two ranks
    assert rows[["commit", "machine", "command", "date", "seed"]].notna().all(axis=None)
    assert Cluster(methods=("ddp", "sgp"), repeats=2, **shared).main() == 0
    assert len(trials) == 8, "all are there"
    assert Cluster(methods=("ddp", "hivemind"), repeats=1, **shared).main() == 0
    assert trials[8:] == [("hivemind", 1e8), ("hivemind", 1e9)]
    assert pd.read_csv(output)["error"].dropna().tolist() == ["rank 1: no luck"] * 2
    assert Cluster(methods=("ddp", "hivemind"), repeats=1, straggle_chance=0.1, **shared).main() == 0
    assert len(trials) == 14, "with stragglers they are other trials"
    assert Cluster(methods=("ddp", "hivemind"), repeats=1, steps=24, **shared).main() == 0
    assert len(trials) == 18, "with other steps too"
    assert set(pd.read_csv(tmp_path / "out" / "cluster.csv")["planned_steps"]) == {24}
    assert set(pd.read_csv(output)["planned_steps"]) == {12, 24}


def test_the_table_is_of_all_pieces(
    tmp_path: Path,
    trials: list[tuple[str, float]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    clock = count(step=60)  # a minute from one look at it to the next
    monkeypatch.setattr("benchmarks.cluster.__main__.time", SimpleNamespace(monotonic=lambda: next(clock)))
    methods = ("ddp", "sgp", "hivemind")
    whole = Cluster(methods=methods, hosts=(2,), rates=(1.0, 0.1), repeats=1, out=tmp_path / "whole")
    assert whole.main() == 0
    table = (tmp_path / "whole" / "cluster.md").read_text()
    assert len(trials) == 6

    output = tmp_path / "cells.csv"
    output.touch()
    last = replace(whole, rates=(0.1,), methods=("sgp", "osgp"), out=tmp_path / "last", output=output)
    assert last.main() == 0, "of another matrix in part"
    pieces = replace(whole, out=tmp_path / "pieces", output=output)
    for num_done in (3, 5):
        assert replace(pieces, minutes=2.5).main() == 3
        rows = pd.read_csv(tmp_path / "pieces" / "cluster.csv")
        assert len(rows.groupby(["method", "rate_gbit"])) == num_done
        assert not (tmp_path / "pieces" / "cluster.md").exists()
    capsys.readouterr()
    assert pieces.main() == 0
    assert (tmp_path / "pieces" / "cluster.md").read_text() == table
    assert table in capsys.readouterr().out
    assert len(trials) == 13
    again = replace(pieces, out=tmp_path / "again")
    assert again.main() == 0
    assert (tmp_path / "again" / "cluster.md").read_text() == table
    assert len(trials) == 13


def test_a_file_with_other_columns_is_refused_before_any_trial(tmp_path: Path, trials: list[tuple[str, float]]) -> None:
    cluster = Cluster(methods=("ddp",), hosts=(2,), repeats=1, out=tmp_path / "out", output=tmp_path / "cells.csv")
    assert cluster.main() == 0
    pd.read_csv(tmp_path / "cells.csv").drop(columns="planned_steps").to_csv(tmp_path / "cells.csv", index=False)
    with pytest.raises(ValueError, match=r"cells.csv with missing columns \['planned_steps'\] and unknown"):
        replace(cluster, repeats=2).main()
    assert len(trials) == 1


class Learners:
    """Stands in for the network and for its processes; a training's score depends on its learning rate."""

    def __init__(self, *_: Any) -> None:
        self.jobs: list[Training] = []

    def __enter__(self) -> Learners:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing is there."""

    def close(self) -> None:
        """Nothing is there."""

    def run(self, training: Training) -> list[dict[str, list[float]]]:
        self.jobs.append(training)
        if training.method == "sgp" and training.learning_rate > 0.2:
            raise TrialError("diverged")
        wrong = abs(math.log(training.learning_rate / 0.1))
        points: dict[str, list[float]] = {"num_steps": [40, 80], "total": [9.0, 2.0 + wrong], "num_items": [1, 1]}
        return [{**points, "mean_loss": [3.0, 2.0], "mean_seconds": [0.1, 0.1]}] * 2


def test_trainings_are_resumed_and_other_seeds_take_the_best_rate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("train.txt", "valid.txt"):
        (tmp_path / "text").mkdir(exist_ok=True)
        (tmp_path / "text" / name).write_text("a line\n" * 100)
    learners = Learners()
    monkeypatch.setattr(curves, "EmulatedNetwork", Learners)
    monkeypatch.setattr(curves, "Fleet", lambda *_: learners)
    options = Curves(
        tmp_path / "text",
        task="language",
        methods=("ddp", "sgp"),
        learning_rates=(0.1, 0.3),
        hosts=2,
        steps=80,
        batch_size=2,
        seeds=(1, 2),
        minutes=1e-9,
        out=tmp_path / "out",
        output=tmp_path / "results.csv",
    )
    assert options.main() == 3  # the time is over
    assert options.main() == 3
    assert learners.jobs == []
    options = replace(options, minutes=0.0)
    assert options.main() == 0
    tried = [(job.seed, job.method, job.learning_rate) for job in learners.jobs]
    # 0.1 is the lowest that was tried, so 0.0333 comes too; it is worse.
    assert tried[:6] == [(1, method, rate) for method in ("ddp", "sgp") for rate in (0.1, 0.3, 0.0333)]
    assert tried[6:] == [(2, "ddp", 0.1), (2, "sgp", 0.1)]
    assert {job.num_steps for job in learners.jobs} == {80}
    rows = pd.read_csv(options.csv)
    assert rows["score"][rows["error"].isna()].tolist()[:4] == pytest.approx([9, 2, 9, 2 + math.log(3)])
    assert rows["error"].dropna().tolist() == ["diverged"]
    assert rows[["commit", "machine", "command", "date", "data"]].notna().all(axis=None)
    assert options.main() == 0
    assert len(learners.jobs) == 8
    assert replace(options, seeds=(1, 2, 3)).main() == 0
    assert [job.seed for job in learners.jobs[8:]] == [3, 3]
    with pytest.raises(ValueError, match=r"results.csv has ddp with seed 1, expected that too, as learning rates"):
        replace(options, seeds=(2, 3)).main()
    with pytest.raises(ValueError, match="test sequences of 64 bytes, expected at least 1998 and 2, for 2 hosts"):
        replace(options, batch_size=999).main()
