"""Recipes side by side: what is refused before the first run, and what ends the comparison."""

from __future__ import annotations

import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from train.compare import Comparison, main
from train.job.errors import UsageError


@pytest.mark.parametrize("recipes", [("ar", "nope"), (), ("ar", "ar")])
def test_recipes_are_known_and_once(recipes: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match=r"got recipes=.*, expected some of ar, dpsgd, .*, each once; see --help"):
        Comparison(recipes=recipes)
    with pytest.raises(ValueError, match=r"got nproc_per_node=0, expected 1 or more"):
        Comparison(nproc_per_node=0)


def test_earlier_runs_are_refused_before_the_first_new_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []

    def run(command: list[str], **_: Any) -> SimpleNamespace:
        commands.append(command)
        return SimpleNamespace(returncode=2)

    monkeypatch.setattr(subprocess, "run", run)
    (tmp_path / "sgp").mkdir()
    (tmp_path / "sgp" / "rank_0000.csv").touch()
    with pytest.raises(UsageError, match=r"got an --out-dir with earlier runs \(\S+/sgp\), .*or --overwrite to delete"):
        main(Comparison(recipes=("ar", "sgp"), out_dir=tmp_path))
    assert commands == []
    for changes in ({"overwrite": True}, {"options": ("--resume", "auto")}):
        with pytest.raises(UsageError, match=r"got exit code 2 from the run of ar, expected 0: see above"):
            main(Comparison(recipes=("ar", "sgp"), out_dir=tmp_path, **changes))
    assert ["--overwrite" in command for command in commands] == [True, False]
