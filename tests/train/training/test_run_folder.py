"""Whose the folder of a run is: an earlier run is refused, gone on from, or deleted, and nothing else with it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.train.training.test_checkpoint import IDENTITY, Member, Ranks, save_steps
from train.job.outputs import clear_outputs
from train.training.checkpoint import Checkpoints
from train.training.run_folder import CHECKPOINTS, require_own_folder

OUTPUTS = ("rank_0000.csv", "rank_0003.csv", "summary.json", "curves.png", "averaged_model.safetensors", "report.html")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Of a finished run of more ranks than two, in which somebody has put files too."""
    for name in (*OUTPUTS, "notes.txt", "tensorboard/events.out.tfevents.1", "tensorboard/notes.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    return tmp_path


def errors(folder: Path, resume: str = "", *, overwrite: bool = False) -> set[str]:
    """What all of two ranks say of `folder`."""
    return {
        str(error)
        for error in Ranks(2).run(lambda member: require_own_folder(folder, member, resume=resume, overwrite=overwrite))
    } - {"None"}


def test_a_new_folder_is_free(tmp_path: Path) -> None:
    for resume in ("", "auto", str(tmp_path / "other")):
        assert errors(tmp_path / "run", resume) == set()
    assert errors(tmp_path / "run", overwrite=True) == set()


def test_an_earlier_run_is_refused_unless_it_is_gone_on_from_or_deleted(folder: Path) -> None:
    for resume in ("", str(folder.parent / "other"), "auto"):  # auto: it has ended, and has no checkpoint
        (error,) = errors(folder, resume)
        told = f"--resume {resume}" if resume else "no --resume"
        assert re.search(rf"got an --out-dir with an earlier run \(summary.json, .* and more in .*\) and {told}", error)
        assert error.endswith("pass another --out-dir, or --overwrite to delete that run")
    assert errors(folder, overwrite=True) == set()

    save_steps(folder / CHECKPOINTS, 2, 40)
    (error,) = errors(folder)
    assert "checkpoints/step_00000040" in error
    assert "pass --resume auto to go on from there" in error
    for resume in ("auto", str(folder), str(folder / CHECKPOINTS / "step_00000040")):
        assert errors(folder, resume) == set()
        (error,) = errors(folder, resume, overwrite=True)
        assert re.match(rf"got --overwrite and --resume {resume} of the same folder .*, expected one of them", error)
    assert errors(folder, str(folder.parent / "other"), overwrite=True) == set()


def test_a_run_that_was_killed_before_its_first_checkpoint_starts_anew(folder: Path) -> None:
    for name in OUTPUTS[2:]:
        (folder / name).unlink()
    assert errors(folder, "auto") == set()
    assert len(errors(folder)) == 1


def test_restarted_workers_do_not_delete_the_files_of_earlier_ones(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    (error,) = errors(folder, overwrite=True)
    assert re.match(r"got --overwrite when torchrun --max-restarts has started .* expected --resume auto", error)


def test_overwriting_deletes_the_files_of_the_run_and_no_others(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_steps(folder / CHECKPOINTS, 3, 40, 80)
    save_steps(folder / CHECKPOINTS / "superseded", 2, 120)
    (folder / CHECKPOINTS / "step_00000080" / "notes.txt").touch()

    def clear(member: Member) -> None:
        Checkpoints(folder / CHECKPOINTS, member, IDENTITY).clear()
        clear_outputs(folder, member)

    assert Ranks(2).run(clear) == [None] * 2
    kept = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    assert kept == ["checkpoints/step_00000080/notes.txt", "notes.txt", "tensorboard/notes.txt"]
    said = capsys.readouterr().out
    assert re.search(r"cleared .*checkpoints of an earlier run: step_00000040, step_00000080, step_00000120", said)
    assert re.search(r"cleared .* of an earlier run: averaged_model.safetensors, .*rank_0003.csv, report.html", said)
