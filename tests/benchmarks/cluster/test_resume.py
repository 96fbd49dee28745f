"""The benchmarks of the emulated cluster go on where they were broken off."""

from __future__ import annotations

from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pandas as pd
import pytest

from benchmarks.cluster.__main__ import Cluster
from benchmarks.cluster.network.links import LinkRates
from benchmarks.cluster.processes import TrialError
from benchmarks.cluster.trials import Trial
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
        if trial.method == "torchft-local":
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
    assert Cluster(methods=("ddp", "torchft-local"), repeats=1, **shared).main() == 0
    assert trials[8:] == [("torchft-local", 1e8), ("torchft-local", 1e9)]
    assert pd.read_csv(output)["error"].dropna().tolist() == ["rank 1: no luck"] * 2
    assert Cluster(methods=("ddp", "torchft-local"), repeats=1, straggle_chance=0.1, **shared).main() == 0
    assert len(trials) == 14, "with stragglers they are other trials"
    assert Cluster(methods=("ddp", "torchft-local"), repeats=1, steps=24, **shared).main() == 0
    assert len(trials) == 18, "with other steps too"
    assert set(pd.read_csv(tmp_path / "out" / "cluster.csv")["planned_steps"]) == {24}
    assert set(pd.read_csv(output)["planned_steps"]) == {12, 24}
    assert Cluster(methods=("ddp", "sgp"), repeats=1, adam=True, **shared).main() == 0
    assert len(trials) == 22, "by AdamW too"
    rows = pd.read_csv(output)
    by_adam = rows[rows["optimizer"] != "SGD"]
    assert set(zip(by_adam["method"], by_adam["optimizer"])) == {("ddp", "AdamW"), ("sgp", "GossipAdamW")}


def test_the_table_is_of_all_pieces(
    tmp_path: Path,
    trials: list[tuple[str, float]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    clock = count(step=60)  # a minute from one look at it to the next
    monkeypatch.setattr("benchmarks.cluster.__main__.time", SimpleNamespace(monotonic=lambda: next(clock)))
    methods = ("ddp", "sgp", "torchft-local")
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
