"""Logs are read whole; of those that are missing, cut off or mixed up the file and line are named, the rest is kept."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest
import torch

from tests.harness.finished_runs import rank_table, write_run
from train.tasks.images.config import Config
from train.training.evaluate import Validation
from train.training.log import EpochRow, RunLog
from train.training.meters import Meters
from train.training.report import RankResult, write_report
from visualization.logs.runs import COLUMNS, find_runs, read_run, read_runs
from visualization.logs.tables import read_columns, read_numbers


def test_a_run_is_all_its_ranks(tmp_path: Path) -> None:
    run, problems = read_run(write_run(tmp_path / "run", num_ranks=3))
    assert problems == []
    assert run is not None
    assert len(run.table) == 12
    assert sorted(run.table["rank"].unique()) == [0, 1, 2]
    assert (run.name, run.recipe, run.world_size) == ("run", "sgp", 3)
    expected = rank_table(1)
    read = run.table[run.table["rank"] == 1].reset_index()[list(expected)]
    pd.testing.assert_frame_equal(read, expected.astype(float))


def test_files_of_a_training_are_read(tmp_path: Path) -> None:
    logs = [RunLog(tmp_path, rank=rank) for rank in (1, 2)]
    validation = Validation({"nll": 1.5}, {"nll": 1.0, "bleu": 30.0}, consensus_distance=0.5, bytes_sent=8.0)
    stats = dict.fromkeys(("wait_seconds", "bytes_sent", "num_rounds", "mean_staleness", "max_staleness"), 1.0)
    results = []
    for log in logs:
        meters = Meters(torch.device("cpu"))
        for epoch, found in enumerate((None, validation), start=1):
            meters.update(torch.tensor(2.0), torch.tensor(1), num_items=4)
            meters.train_seconds += 1 / 3
            log.epoch(EpochRow.of(epoch, 10 * epoch, 10 * epoch, 0.1, meters, stats, found))
        results.append(RankResult.of(validation, 20, meters, stats))
    for old, new in ((1, 0), (2, 1)):  # rank 0 would take the seconds that TensorBoard takes
        (tmp_path / f"rank_{old:04d}.csv").rename(tmp_path / f"rank_{new:04d}.csv")
    write_report(tmp_path, Config(recipe="adpsgd", overlap=True), "bleu", validation, results)
    run, problems = read_run(tmp_path)
    assert problems == []
    assert run is not None
    assert set(COLUMNS) <= set(run.table)
    assert run.table["averaged_test_bleu"].dropna().tolist() == [30.0, 30.0]
    assert (run.recipe, run.summary["averaged_test"]["nll"], run.world_size) == ("adpsgd", 1.0, 2)
    assert "graph" in run.config
    assert "overlap" not in run.config
    assert run.summary["unused"] == {"overlap": True}
    made = run.summary["made"]
    assert set(made) == {"date", "command", "python", "torch", "machine"}
    assert made["torch"] == torch.__version__
    assert made["command"] == shlex.join(["python", *sys.orig_argv[1:]])


def test_runs_are_found_at_any_depth_and_have_names_of_their_own(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / name) for name in ("a/sgp", "b/sgp", "b/ar")]
    (tmp_path / "empty").mkdir()
    found, problems = find_runs([tmp_path / "a" / "sgp", tmp_path / "b", tmp_path / "empty"])
    assert found == {"a/sgp": folders[0], "ar": folders[2], "b/sgp": folders[1]}
    (problem,) = problems
    assert re.match(r".*empty: got no rank_\*\.csv in or below it, expected the --out-dir", str(problem))


def edit(name: str, change: Callable[[str], str]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        path = folder / name
        path.write_text(change(path.read_text(encoding="utf-8")), encoding="utf-8")

    return apply


def swap_tables(first: str, second: str) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        texts = (folder / first).read_bytes(), (folder / second).read_bytes()
        (folder / first).write_bytes(texts[1])
        (folder / second).write_bytes(texts[0])

    return apply


def copy_table(old: str, new: str) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        (folder / new).write_bytes((folder / old).read_bytes())

    return apply


def without(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def replace_by_link(name: str) -> Callable[[Path], None]:
    """A link to a file that is not there."""

    def apply(folder: Path) -> None:
        (folder / name).unlink()
        (folder / name).symlink_to("elsewhere.csv")

    return apply


RANK_1 = "rank_0001.csv"


@pytest.mark.parametrize(
    ("breakage", "message", "num_rows"),
    [
        pytest.param(
            edit(RANK_1, lambda text: text[:-5]),
            r"rank_0001\.csv:5: got a line without its end, expected a whole row; the file was cut",
            {0: 4, 1: 3},
            id="cut in a line",
        ),
        pytest.param(
            edit(RANK_1, lambda text: "\n".join(text.splitlines()[:3]) + "\n3,30\n"),
            r"rank_0001\.csv:4: got 2 cells, expected the 9 of the header; rows from here on",
            {0: 4, 1: 2},
            id="few cells",
        ),
        pytest.param(
            edit(RANK_1, lambda text: text.replace("0.5", "half", 1)),
            r"rank_0001\.csv:3: got loss='half', expected a number; the row is left out",
            {0: 4, 1: 3},
            id="no number",
        ),
        pytest.param(
            edit(RANK_1, lambda text: text.replace("consensus_distance", "distance")),
            r"rank_0001\.csv:1: got no column consensus_distance; drawn without",
            {0: 4, 1: 4},
            id="no column",
        ),
        pytest.param(
            edit(RANK_1, lambda text: text.replace("loss", "step", 1)),
            r"rank_0001\.csv:1: got a column step more often than expected, once; the file is left out",
            {0: 4},
            id="a column twice",
        ),
        pytest.param(
            edit(RANK_1, lambda text: text.replace("epoch", "age")),
            r"rank_0001\.csv:1: got no column epoch, expected the table of a rank; the file is left out",
            {0: 4},
            id="no epochs",
        ),
        pytest.param(edit(RANK_1, lambda _: ""), r"rank_0001\.csv: got an empty file", {0: 4}, id="empty"),
        pytest.param(
            edit(RANK_1, lambda text: text.splitlines()[0] + "\n"),
            r"rank_0001\.csv:1: got a header and no rows, expected a row per epoch",
            {0: 4},
            id="header only",
        ),
        pytest.param(
            lambda folder: (folder / RANK_1).write_bytes((folder / RANK_1).read_bytes()[:-20] + b"\xff\n"),
            r"rank_0001\.csv:5: got bytes that are no text \(UTF-8\); rows from here on",
            {0: 4, 1: 3},
            id="no text",
        ),
        pytest.param(
            edit(RANK_1, lambda text: text.replace("0.5", '0"5', 1).replace("0.1,", '"0.1"x,', 1)),
            r"rank_0001\.csv:2: got no CSV \(.*\); rows from here on",
            {0: 4},
            id="no CSV",
        ),
        pytest.param(
            edit(RANK_1, lambda text: text.replace("\n3,", "\n,", 1)),
            r"rank_0001\.csv:4: got no epoch, expected a number; rows from here on",
            {0: 4, 1: 2},
            id="no epoch",
        ),
        pytest.param(
            edit(RANK_1, lambda text: text + "\n".join(text.splitlines()[1:]) + "\n"),
            r"rank_0001\.csv:6: got epoch 1 after 4; got step 10 after 40; got time_seconds 3 after 9, expected",
            {0: 4, 1: 4},
            id="two runs in a file",
        ),
        pytest.param(
            swap_tables("rank_0000.csv", RANK_1),
            r"summary\.json: got a run of 2 ranks that none of the 2 tables here ends like",
            {0: 4, 1: 4},
            id="summary of another run",
        ),
        pytest.param(
            edit(RANK_1, lambda text: text.replace("9.0", "9.5")),
            r"rank_0001\.csv:5: got 9\.5 s of training in the last row, expected the 9 s of summary\.json: a table of",
            {0: 4},
            id="rank of another run",
        ),
        pytest.param(
            copy_table(RANK_1, "rank_0007.csv"),
            r"rank_0007\.csv: got rank 7 in a run of 2, expected a lower one: a file of another run",
            {0: 4, 1: 4},
            id="rank beyond the world",
        ),
        pytest.param(
            copy_table(RANK_1, "rank_one.csv"), r"rank_one\.csv: got no rank in its name", {0: 4, 1: 4}, id="no rank"
        ),
        pytest.param(
            copy_table("rank_0000.csv", "rank_1.csv"),
            r"rank_1\.csv: got no rank in its name, expected rank_0000\.csv",
            {0: 4, 1: 4},
            id="a rank twice",
        ),
        pytest.param(
            replace_by_link(RANK_1),
            r"rank_0001\.csv: got No such file or directory, expected a file to read; it is left out",
            {0: 4},
            id="a link to nowhere",
        ),
        pytest.param(
            without(RANK_1),
            r"run: got no rank_0001\.csv, expected tables of 2 ranks; copy them here from other machines",
            {0: 4},
            id="no table",
        ),
        pytest.param(
            without("summary.json"), r"summary\.json: got no such file, expected one", {0: 4, 1: 4}, id="no summary"
        ),
        pytest.param(
            edit("summary.json", lambda text: text[:30]),
            r"summary\.json:1: got no JSON",
            {0: 4, 1: 4},
            id="half a summary",
        ),
        pytest.param(
            edit("summary.json", lambda _: "[]"), r"summary\.json:1: got a list, expected", {0: 4, 1: 4}, id="a list"
        ),
        pytest.param(
            edit("summary.json", lambda text: text.replace("averaged_test", "average")),
            r"summary\.json: got it without averaged_test: dict; left out",
            {0: 4, 1: 4},
            id="summary without results",
        ),
        pytest.param(
            edit("summary.json", lambda text: text.replace('"sgp"', "true")),
            r"summary\.json: got it without config\.recipe: str; left out",
            {0: 4, 1: 4},
            id="no recipe",
        ),
        pytest.param(
            edit("summary.json", lambda text: text.replace('"time_seconds": 9.0', '"time_seconds": "9"')),
            r"summary\.json: got it without ranks: list of dict with time_seconds; left out",
            {0: 4, 1: 4},
            id="no seconds",
        ),
    ],
)
def test_broken_files_are_named_and_the_rest_is_kept(
    tmp_path: Path, breakage: Callable[[Path], object], message: str, num_rows: dict[int, int]
) -> None:
    folder = write_run(tmp_path / "run")
    breakage(folder)
    run, problems = read_run(folder)
    (problem,) = map(str, problems)
    assert re.search(message, problem)
    assert run is not None
    assert run.table.groupby("rank").size().to_dict() == num_rows


def test_a_run_in_the_working_directory_has_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(write_run(tmp_path / "mine"))
    run, problems = read_run(Path())
    assert problems == []
    assert run is not None
    assert run.name == "mine"


def test_a_table_whose_epochs_end_at_other_steps_is_another_run_s(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", num_ranks=3)
    rank_table(1, steps_per_epoch=20).to_csv(folder / RANK_1, index=False)
    run, problems = read_run(folder)
    (problem,) = map(str, problems)
    assert re.search(r"rank_0001\.csv:2: got step 20 at the end of epoch 1, expected the 10 of other ranks", problem)
    assert run is not None
    assert sorted(run.table["rank"].unique()) == [0, 2]


def test_tables_of_which_no_two_belong_together_are_no_run(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    for rank, epoch in ((0, 2), (1, 3)):  # each has an epoch that ends later than that of the other
        rows = rank_table(rank)
        rows.loc[rows["epoch"] == epoch, "step"] += 1
        rows.to_csv(folder / f"rank_{rank:04d}.csv", index=False)
    run, problems = read_run(folder)
    assert run is None
    assert [re.search(r"another run|no row", str(problem))[0] for problem in problems] == [  # type: ignore[index]
        "another run",
        "another run",
        "no row",
    ]


def test_a_run_that_goes_on_needs_no_summary(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    (folder / "summary.json").write_text("{", encoding="utf-8")
    run, problems = read_run(folder, name="mine", has_ended=False)
    assert problems == []
    assert run is not None
    assert (run.name, run.recipe, run.world_size, run.config) == ("mine", None, 2, {})


def test_a_folder_without_a_row_is_no_run(tmp_path: Path) -> None:
    (tmp_path / "summary.json").write_text(json.dumps({}), encoding="utf-8")
    runs, problems = read_runs([tmp_path])
    assert runs == []
    assert [str(problem).split(": ")[1] for problem in problems] == [
        "got it without config",
        "got no row of any rank, expected rank_*.csv of a run",
    ]


def test_lines_are_counted_from_the_header(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text("a,b\n1,\n\n2,nan\n3,x\n", encoding="utf-8")
    table = read_numbers(path)
    assert table.rows["line"].tolist() == [2, 4]
    assert table.rows["a"].tolist() == [1, 2]
    assert table.rows["b"].isna().all()
    assert list(map(str, table.problems)) == [f"{path}:5: got b='x', expected a number; the row is left out"]


def test_another_table_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text("step,error\n1,2\n", encoding="utf-8")
    assert len(read_columns(path, ("step",), source="here")) == 1
    with pytest.raises(ValueError, match=r"got .*x.csv without loss, expected a CSV of here"):
        read_columns(path, ("step", "loss"), source="here")
    path.write_text("step,error\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"got .*x.csv without rows"):
        read_columns(path, ("step",), source="here")
