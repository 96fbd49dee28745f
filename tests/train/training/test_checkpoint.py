"""Checkpoints: written whole or not at all, loaded by all ranks or by none."""

from __future__ import annotations

import json
import os
import re
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from train.job.files import sha256, write_atomically
from train.job.world import agree
from train.run_config import RunConfig
from train.tasks.images.config import Config
from train.tasks.images.models import fingerprint
from train.tasks.language_model.config import LanguageModelConfig
from train.tasks.translation.config import TranslationConfig
from train.training.checkpoint import Checkpoints
from train.training.rank_files import RankFiles

IDENTITY = {"world_size": 1, "recipe": "sgp", "model_fingerprint": "abc"}


class Ranks:
    """Ranks as threads that can gather."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._values: list[Any] = [None] * size
        self._barrier = threading.Barrier(size, timeout=10)

    def __getitem__(self, rank: int) -> Member:
        return Member(self, rank)

    def gather(self, rank: int, value: Any) -> list[Any]:
        self._values[rank] = value
        self._barrier.wait()
        values = list(self._values)
        self._barrier.wait()
        return values

    def run(self, body: Any) -> list[Any]:
        """body(member) on every rank; results or exceptions."""
        with ThreadPoolExecutor(self.size) as pool:
            futures = [pool.submit(body, self[rank]) for rank in range(self.size)]
            return [future.exception() or future.result() for future in futures]


class Member:
    """One of the ranks: what Checkpoints asks of a World."""

    def __init__(self, ranks: Ranks, rank: int) -> None:
        self.ranks = ranks
        self.rank = rank

    def gather(self, value: Any) -> list[Any]:
        return self.ranks.gather(self.rank, value)

    def on_every_rank(self, function: Any) -> list[Any]:
        return agree(self.gather, function)


@pytest.fixture
def checkpoints(tmp_path: Path) -> Checkpoints:
    return Checkpoints(tmp_path / "checkpoints", Ranks(1)[0], IDENTITY, keep_last=2)


def steps(folder: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step_")) for path in folder.iterdir())


def test_a_state_comes_back_as_it_was(checkpoints: Checkpoints) -> None:
    assert checkpoints.candidates() == []
    state = {"step": 7, "x": torch.rand(3, dtype=torch.float64), "nested": [{"a": 1.5}, ("b", None)]}
    path = checkpoints.save(7, state)
    assert checkpoints.candidates() == [path]
    found, loaded = checkpoints.load([path])
    assert found == path
    assert torch.equal(loaded.pop("x"), state.pop("x"))  # type: ignore[arg-type]
    assert loaded == state
    assert sorted(file.name for file in path.iterdir()) == ["rank_0000.json", "rank_0000.pt"]


def test_the_manifest_names_its_run(checkpoints: Checkpoints) -> None:
    path = checkpoints.save(7, {"x": 1}, score=98.5)
    manifest = json.loads((path / "rank_0000.json").read_text())
    assert IDENTITY.items() <= manifest.items()
    assert (manifest["step"], manifest["score"]) == (7, 98.5)
    assert manifest["num_bytes"] == (path / "rank_0000.pt").stat().st_size


def test_the_newest_and_the_best_are_kept(checkpoints: Checkpoints) -> None:
    for step, accuracy in ((1, 90.0), (2, 99.0), (3, None), (4, 95.0), (5, 99.0), (6, 97.0), (7, None)):
        checkpoints.save(step, {"x": step}, score=accuracy)
        kept = {4: [2, 3, 4], 5: [4, 5], 6: [5, 6], 7: [5, 6, 7]}
        if step in kept:
            assert steps(checkpoints.folder) == kept[step]


@pytest.mark.parametrize(
    ("recipe", "change"),
    [
        ("choco", {"algorithm": "Choco(TopK(0.01), step_size=0.0375)"}),
        ("choco", {"algorithm": "Choco(SignNorm(), step_size=0.3)"}),
        ("moniqua", {"algorithm": "Moniqua(theta=2.0)"}),
        ("powergossip", {"algorithm": "PowerGossip(rank=2)"}),
        ("matcha", {"algorithm": "MATCHA(budget=0.3)"}),
    ],
)
def test_a_run_with_another_method_is_refused(tmp_path: Path, recipe: str, change: dict[str, Any]) -> None:
    config = Config(recipe=recipe)
    path = Checkpoints(tmp_path, Ranks(1)[0], config.identity).save(3, {"x": 1})
    unused = replace(config, peers_per_itr="3")  # of other recipes
    assert Checkpoints(tmp_path, Ranks(1)[0], unused.identity).load([path]) == (path, {"x": 1})
    value = replace(config, **change).identity["algorithm"]
    expected = rf"of a run with algorithm='', expected {re.escape(repr(value))} as in this run"
    with pytest.raises(ValueError, match=expected):
        Checkpoints(tmp_path, Ranks(1)[0], replace(config, **change).identity).load([path])


class Bomb:
    """Raises when it is unpickled."""

    def __reduce__(self) -> Any:
        return (pytest.fail, ("ran code out of a checkpoint",))


def damage(path: Path, how: str) -> None:
    file = path / "rank_0000.pt"
    content = bytearray(file.read_bytes())
    if how == "truncated":
        file.write_bytes(content[: len(content) // 2])
    elif how == "foreign":
        file.write_bytes(b"x" * len(content))
    elif how == "flipped":
        place = content.index(torch.arange(100.0).numpy().tobytes()) + 200
        content[place] ^= 255
        file.write_bytes(content)
    elif how == "no manifest":
        file.with_suffix(".json").unlink()
    elif how == "bad manifest":
        file.with_suffix(".json").write_text("{")
    elif how in ("pickle", "other keys"):
        torch.save({"x": Bomb()} if how == "pickle" else {"y": 1}, file)
        manifest = json.loads(file.with_suffix(".json").read_text())
        manifest |= {"num_bytes": file.stat().st_size, "sha256": sha256(file)}
        file.with_suffix(".json").write_text(json.dumps(manifest))
    else:
        file.unlink()


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("pickle", r"rank 0: got .*rank_0000.pt with more than tensors and plain values \(UnpicklingError\)"),
        ("other keys", r"rank 0: got .*rank_0000.pt without x, expected a checkpoint of this script"),
        ("no manifest", r"rank 0: got .*step_00000002 without rank_0000.json"),
        ("bad manifest", r"rank 0: got .*rank_0000.json damaged \(.*\), expected a manifest"),
        ("truncated", r"rank 0: got .*rank_0000.pt of \d+ bytes, expected \d+: truncated"),
        ("foreign", r"rank 0: got .*rank_0000.pt with other bytes than were written"),
        ("flipped", r"rank 0: got .*rank_0000.pt with other bytes than were written"),
        ("missing", r"rank 0: got .*step_00000002 without rank_0000.pt"),
    ],
)
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_offered(
    checkpoints: Checkpoints, how: str, message: str
) -> None:
    first = checkpoints.save(1, {"x": torch.arange(100.0)})
    second = checkpoints.save(2, {"x": torch.arange(100.0)})
    damage(second, how)
    with pytest.raises(ValueError, match=rf"{message}.*resume from the one before: --resume .*step_00000001"):
        checkpoints.load([second], keys={"x"})
    assert torch.equal(checkpoints.load([first])[1]["x"], torch.arange(100.0))
    damage(first, "truncated")
    with pytest.raises(ValueError, match=r"truncated; there is no earlier one: start afresh"):
        checkpoints.load([first])


@pytest.mark.parametrize(("name", "value"), [("world_size", 4), ("recipe", "ar"), ("model_fingerprint", "def")])
def test_a_checkpoint_of_another_run_is_refused(checkpoints: Checkpoints, name: str, value: object) -> None:
    path = checkpoints.save(1, {"x": 1})
    other = Checkpoints(checkpoints.folder, Ranks(1)[0], {**IDENTITY, name: value})
    with pytest.raises(
        ValueError, match=rf"of a run with {name}={IDENTITY[name]!r}, expected {value!r} as in this run"
    ):
        other.load([path])


def test_choice_of_the_checkpoint_to_resume_from(checkpoints: Checkpoints, tmp_path: Path) -> None:
    assert checkpoints.choose("auto") == []
    assert checkpoints.choose("") == []
    path = checkpoints.save(1, {"x": 5})
    assert checkpoints.choose("auto") == [path]
    assert checkpoints.choose(str(path)) == [path]
    with pytest.raises(
        ValueError, match=r"checkpoints of an earlier run .*and no --resume.*pass --resume auto.* or --overwrite"
    ):
        checkpoints.choose("")
    other = Checkpoints(tmp_path / "elsewhere" / "checkpoints", Ranks(1)[0], IDENTITY)
    assert other.choose(str(tmp_path)) == [path]
    assert other.load([path])[1]["x"] == 5
    for name in ("nowhere", "step_latest"):
        with pytest.raises(ValueError, match=rf"got no checkpoint in .*{name}.*expected step_00000040"):
            other.choose(str(tmp_path / name))
    other.save(1, {"x": 6})
    with pytest.raises(ValueError, match=r"checkpoints of an earlier run .*and --resume .*pass --resume auto"):
        other.choose(str(tmp_path))


def test_other_names_are_no_checkpoints(checkpoints: Checkpoints) -> None:
    (checkpoints.folder / "step_latest").mkdir(parents=True)
    assert checkpoints.choose("auto") == []
    path = checkpoints.save(1, {"x": 5})
    assert checkpoints.choose("auto") == [path]


def test_a_run_that_goes_on_from_an_earlier_step_sets_the_later_ones_aside(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoints = Checkpoints(tmp_path, Ranks(1)[0], IDENTITY, keep_last=3)
    first = checkpoints.save(10, {"x": 10})
    checkpoints.save(20, {"x": 20}, score=99.0)
    checkpoints.save(30, {"x": 30})
    damage(checkpoints.folder / "step_00000030", "truncated")
    checkpoints.load([first])
    checkpoints.set_aside_after(10)
    assert "moved step_00000020, step_00000030 to" in capsys.readouterr().out
    assert checkpoints.candidates() == [first]
    later = checkpoints.save(15, {"x": 15})
    assert checkpoints.candidates() == [later, first]
    assert sorted(path.name for path in (checkpoints.folder / "superseded").iterdir()) == [
        "step_00000020",
        "step_00000030",
    ]


def test_the_checkpoint_just_written_outlives_later_steps(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, Ranks(1)[0], IDENTITY, keep_last=1)
    checkpoints.save(20, {"x": 20})
    assert checkpoints.save(10, {"x": 10}).is_dir()


def test_the_next_save_removes_files_of_a_killed_job(checkpoints: Checkpoints) -> None:
    half = checkpoints.folder / "step_00000001"
    half.mkdir(parents=True)
    (half / ".rank_0000.pt.77.tmp").write_text("half")
    (half / "rank_0000.pt").write_text("whole, without manifest")
    assert checkpoints.choose("auto") == []
    path = checkpoints.save(2, {"x": 1})
    (path / ".rank_0000.json.77.tmp").write_text("half")
    checkpoints.save(3, {"x": 1})
    assert steps(checkpoints.folder) == [2, 3]
    assert sorted(file.name for file in path.iterdir()) == ["rank_0000.json", "rank_0000.pt"]


def test_a_checkpoint_that_some_ranks_lack_stops_a_run_or_is_named_when_skipped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def save(member: Member, step: int) -> None:
        Checkpoints(tmp_path, member, IDENTITY | {"world_size": 2}).save(step, {"x": 1})

    def choose(member: Member) -> list[Path]:
        return Checkpoints(tmp_path, member, IDENTITY).choose("auto")

    Ranks(2).run(lambda member: save(member, 1))
    for error in Ranks(3).run(choose):
        assert isinstance(error, ValueError)
        assert "got no checkpoint in" in str(error)
        assert "step_00000001, saved by 2 ranks, not complete on rank 2: " in str(error)
    Ranks(2).run(lambda member: save(member, 2))
    (tmp_path / "step_00000002" / "rank_0000.json").write_text("{")
    identity = IDENTITY | {"world_size": 2}
    loaded = Ranks(2).run(lambda member: Checkpoints(tmp_path, member, identity).load(choose(member)))
    assert loaded == [(tmp_path / "step_00000001", {"x": 1})] * 2
    assert re.search(r"passed over step_00000002: rank 0: got .* damaged", capsys.readouterr().out)


def test_other_settings_are_named_in_a_warning(tmp_path: Path) -> None:
    path = Checkpoints(tmp_path, Ranks(1)[0], IDENTITY, settings={"lr": 0.1, "milestones": [1]}).save(1, {"x": 1})
    Checkpoints(tmp_path, Ranks(1)[0], IDENTITY, settings={"lr": 0.1, "milestones": [1]}).load([path])
    with pytest.warns(UserWarning, match=r"other settings \(lr=0.1 before, 0.2 now\)"):
        Checkpoints(tmp_path, Ranks(1)[0], IDENTITY, settings={"lr": 0.2, "milestones": [1]}).load([path])


def test_any_exception_on_one_rank_stops_all() -> None:
    def body(member: Member) -> Any:
        values = {"x": 1} if member.rank else {}
        return member.on_every_rank(lambda: values["x"])

    for error in Ranks(2).run(body):
        assert isinstance(error, ValueError)
        assert str(error) == "rank 0: KeyError: 'x'"


def test_only_checkpoints_that_are_complete_on_every_rank_count(tmp_path: Path) -> None:
    ranks = Ranks(2)

    def save_both(member: Member) -> None:
        checkpoints = Checkpoints(tmp_path, member, IDENTITY)
        for step in (1, 2):
            checkpoints.save(step, {"rank": member.rank})

    assert ranks.run(save_both) == [None, None]
    (tmp_path / "step_00000002" / "rank_0001.json").unlink()
    found = ranks.run(lambda member: Checkpoints(tmp_path, member, IDENTITY).candidates())
    first = tmp_path / "step_00000001"
    assert found == [[tmp_path / "step_00000002", first]] * 2
    states = ranks.run(lambda member: Checkpoints(tmp_path, member, IDENTITY).load([first]))
    assert states == [(first, {"rank": 0}), (first, {"rank": 1})]


def test_a_file_damaged_on_one_rank_stops_all(tmp_path: Path) -> None:
    ranks = Ranks(2)
    paths = ranks.run(lambda member: Checkpoints(tmp_path, member, IDENTITY).save(3, {"x": 1}))
    damage(paths[0], "truncated")
    errors = ranks.run(lambda member: Checkpoints(tmp_path, member, IDENTITY).load(paths[:1]))
    assert [type(error) for error in errors] == [ValueError, ValueError]
    assert all(str(error).startswith("rank 0: got") and "rank 1" not in str(error) for error in errors)


def save_steps(folder: Path, world_size: int, *steps: int) -> list[Path]:
    """Checkpoints of `world_size` ranks, as all see them."""

    def save(member: Member) -> list[Path]:
        checkpoints = Checkpoints(folder, member, IDENTITY, keep_last=len(steps))
        return [checkpoints.save(step, {"x": [step, member.rank]}) for step in steps]

    return Ranks(world_size).run(save)[0]


def resume(folder: Path, world_size: int, told: str = "auto") -> list[Any]:
    """What each rank goes on from, or the error."""

    def load(member: Member) -> tuple[Path, dict[str, Any]]:
        checkpoints = Checkpoints(folder, member, IDENTITY)
        return checkpoints.load(checkpoints.choose(told))

    return Ranks(world_size).run(load)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("truncated", r"passed over step_00000002: rank 0: got .*rank_0000.pt of \d+ bytes, expected \d+: truncated\n"),
        ("foreign", r"passed over step_00000002: rank 0: got .*rank_0000.pt with other bytes than were written"),
        ("missing", r"passed over step_00000002: rank 0: got .*step_00000002 without rank_0000.pt"),
        ("no manifest", r"passed over step_00000002: rank 0: got .* without rank_0000.json"),
        ("bad manifest", r"passed over step_00000002: rank 0: got .*rank_0000.json damaged"),
    ],
)
def test_auto_takes_the_newest_checkpoint_that_is_whole_on_all_ranks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], how: str, message: str
) -> None:
    first, second, third = save_steps(tmp_path, 2, 1, 2, 3)
    damage(second, how)
    (third / "rank_0001.pt").unlink()
    assert resume(tmp_path, 2) == [(first, {"x": [1, 0]}), (first, {"x": [1, 1]})]
    said = capsys.readouterr().out
    assert re.search(message, said)
    assert re.search(r"passed over step_00000003: rank 1: got .* without rank_0001.pt", said)
    # Named, a damaged one is refused.
    for error in resume(tmp_path, 2, str(third)):
        with pytest.raises(
            ValueError, match=r"rank 1: got .* without rank_0001.pt.*; resume from the one before: --re"
        ):
            raise error


def test_auto_refuses_a_folder_of_damaged_checkpoints(tmp_path: Path) -> None:
    first, second = save_steps(tmp_path, 2, 1, 2)
    damage(first, "truncated")
    (second / "rank_0001.pt").write_text("")
    for error in resume(tmp_path, 2):
        assert re.fullmatch(
            r"got no checkpoint in \S+ that is whole on all ranks of this run, expected one; bring the files back, or "
            r"start afresh in another --out-dir, or here with --overwrite:\n"
            r"  step_00000002: rank 1: got .*: truncated\n  step_00000001: rank 0: got .*: truncated",
            str(error),
        )


def test_files_of_another_rank_or_step_are_no_checkpoint(tmp_path: Path) -> None:
    first, second = save_steps(tmp_path, 2, 40, 80)
    for name in ("pt", "json"):
        shutil.copy(first / f"rank_0001.{name}", second)
    for error in resume(tmp_path, 2, str(second)):
        with pytest.raises(
            ValueError, match=r"rank 1: got .*rank_0001.json of step 40, expected that of step 80: copied"
        ):
            raise error
    assert [found for found, _ in resume(tmp_path, 2)] == [first] * 2
    for name in ("pt", "json"):
        shutil.copy(first / f"rank_0000.{name}", first / f"rank_0001.{name}")
    for error in resume(tmp_path, 2, str(first)):
        with pytest.raises(
            ValueError, match=r"rank 1: got .*rank_0001.json of rank 0, expected that of rank 1: copied"
        ):
            raise error


def test_a_manifest_of_before_it_named_its_rank_still_counts(checkpoints: Checkpoints) -> None:
    path = checkpoints.save(1, {"x": 5})
    manifest = json.loads((path / "rank_0000.json").read_text())
    del manifest["rank"]
    (path / "rank_0000.json").write_text(json.dumps(manifest))
    assert checkpoints.load([path]) == (path, {"x": 5})


@pytest.mark.parametrize(
    ("config", "options"),
    [
        (Config(recipe="sgp"), {"schedule": "Schedule(average_until=10)"}),
        (Config(recipe="noloco"), {"algorithm": "NoLoCo(sync_every=10, pull=0.4)"}),
        (Config(recipe="localsgd"), {"first_moment_period": 4, "second_moment_period": 8}),
        (LanguageModelConfig(), {"optimizer": "sgd", "dirichlet_alpha": 0.1}),
        (TranslationConfig(), {"optimizer": "sgd"}),
    ],
    ids=["schedules", "algorithms", "moments", "language model", "translation"],
)
def test_a_checkpoint_of_before_there_was_an_option_counts_where_it_has_its_default(
    tmp_path: Path, config: RunConfig, options: dict[str, Any]
) -> None:
    before = {name: value for name, value in config.identity.items() if name not in options}
    path = Checkpoints(tmp_path, Ranks(1)[0], before).save(3, {"x": 1})
    make = partial(Checkpoints, tmp_path, Ranks(1)[0], defaults=config.defaults)
    assert make(config.identity).load([path]) == (path, {"x": 1})
    for name, value in options.items():
        message = f"of a run with {name}={getattr(config, name)!r}, expected {value!r} as in this run"
        with pytest.raises(ValueError, match=re.escape(message)):
            make({**config.identity, name: value}).load([path])


def test_a_folder_that_another_rank_removes_meanwhile_is_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "step_00000001"
    scandir = os.scandir

    def scandir_of_removed(path: Any) -> Any:
        if not isinstance(path, int) and Path(path) == folder:
            (folder / ".rank_0000.pt.7.tmp").unlink()
            folder.rmdir()
        return scandir(path)

    monkeypatch.setattr(os, "scandir", scandir_of_removed)
    files = RankFiles(folder, 0)
    for remove in (files.remove_temporaries, files.remove):
        folder.mkdir()
        (folder / ".rank_0000.pt.7.tmp").touch()
        remove()


def test_ranks_rotate_checkpoints_in_one_folder(tmp_path: Path) -> None:
    def save(member: Member) -> list[Path]:
        checkpoints = Checkpoints(tmp_path, member, IDENTITY, keep_last=1)
        return [checkpoints.save(step, {"x": step}) for step in range(40)]

    assert all(isinstance(saved, list) for saved in Ranks(4).run(save))
    assert steps(tmp_path) == [39]


def test_a_file_that_cannot_be_removed_is_a_warning(checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    def remove(files: RankFiles) -> None:
        raise PermissionError(f"{files.folder.name} is kept")

    monkeypatch.setattr(RankFiles, "remove", remove)
    checkpoints.save(1, {"x": 1})
    checkpoints.save(2, {"x": 1})
    with pytest.warns(UserWarning, match=r"got .*step_00000001 that cannot be removed \(step_00000001 is kept\)"):
        path = checkpoints.save(3, {"x": 1})
    assert checkpoints.load([path]) == (path, {"x": 1})


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_atomically(path, lambda temporary: temporary.write_text("old"))

    def fail(temporary: Path) -> None:
        temporary.write_text("half")
        raise RuntimeError("disk full")

    with pytest.raises(OSError, match=r"got .*/file, expected a file that can be written \(disk full\)"):
        write_atomically(path, fail)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_fingerprint_sees_names_shapes_and_dtypes_but_no_values() -> None:
    assert fingerprint(nn.Linear(2, 3)) == fingerprint(nn.Linear(2, 3))
    others = [nn.Linear(3, 2), nn.Linear(2, 3).double(), nn.Linear(2, 3, bias=False), nn.Sequential(nn.Linear(2, 3))]
    assert len({fingerprint(model) for model in [nn.Linear(2, 3), *others]}) == 5
