"""The sanitiser: engines pass, and races that are put into them are found, with their seed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.harness import injected_races
from tests.harness.injected_races import RACES, Race, lose_updates
from tests.harness.ranks import assert_no_gossip_threads
from tests.harness.ranks_at_work import LENGTH
from tests.harness.sanitizer import ASYNCHRONOUS, Finding, main, run_episode
from tests.harness.workloads import WORKLOADS

WHERE = (*ASYNCHRONOUS, Path(injected_races.__file__))
SECONDS = 90.0
"""After which a race counts as missed; most are found in the first, at a load of 20 one took more than 30."""
PATIENCE = {"deadlock": 6.0}
"""Where nobody can go on; 20 s elsewhere, as opening may take long on a busy machine."""


@pytest.mark.parametrize("engine", WORKLOADS)
def test_nothing_is_found(engine: str) -> None:
    board = run_episode(WORKLOADS[engine], 0, seconds=1.0, length=LENGTH)
    assert board.counts["train"] > 0
    assert board.counts["exchanges"] > 0
    assert board.counts["closing"] == board.world_size
    assert_no_gossip_threads()  # a finding may leave some behind


def test_delays_fall_into_files_that_exist() -> None:
    assert [path for path in ASYNCHRONOUS if not path.exists()] == []


EPISODES = sorted({(race.engine, race.seed, race.length) for race in RACES})


@pytest.mark.soak
@pytest.mark.parametrize(("engine", "seed", "length"), EPISODES)
def test_nothing_is_found_without_a_race(engine: str, seed: int, length: int) -> None:
    """In the same episodes."""
    board = run_episode(WORKLOADS[engine], seed, seconds=0.3, length=length, where=WHERE)
    assert board.counts["closing"] == board.world_size


@pytest.mark.soak
@pytest.mark.timeout(180)
@pytest.mark.parametrize("race", RACES, ids=[race.name for race in RACES])
def test_a_race_is_found(race: Race, monkeypatch: pytest.MonkeyPatch) -> None:
    race.inject(monkeypatch)
    patience = PATIENCE.get(race.name, 20.0)
    with pytest.raises(Finding) as finding:
        run_episode(
            WORKLOADS[race.engine], race.seed, seconds=SECONDS, patience=patience, length=race.length, where=WHERE
        )
    text = str(finding.value)
    assert text.startswith(f"seed {race.seed}: ")
    assert re.search(race.finding, text, re.DOTALL), text
    options = f"--engine {race.engine} --seed {race.seed} --seconds {SECONDS:g} --length {race.length}"
    assert f"again: python -m tests.harness.sanitizer {options}" in text


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--engine", "adpsgd", "--seconds", "0.2", "--seed", "7"]) == 0
    out = capsys.readouterr().out
    assert "adpsgd: seed 7 " in out
    assert "adpsgd: 1 episodes without a finding" in out


def test_the_command_prints_the_seed_of_a_finding(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lose_updates(monkeypatch)
    command = ["--engine", "adpsgd", "--seconds", "30", "--seed", "2", "--length", "4096"]
    assert main(command) == 1
    out = capsys.readouterr().out  # on a busy machine the race may show only in a later episode
    assert re.search(r"seed (\d+): AssertionError: got a sum of .*; again: .* --engine adpsgd --seed \1 ", out), out
