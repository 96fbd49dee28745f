"""The sanitiser: engines pass, and faults that are planted in them are found, with their seed."""

from __future__ import annotations

from pathlib import Path

import pytest

from gossip_modules.bilateral import BilateralAverage
from gossip_modules.flat_vector import FlatVector
from gossip_modules.mailbox import Mailbox
from tests.ranks import assert_no_gossip_threads
from tests.sanitizer import ASYNCHRONOUS, Finding, main, run_episode
from tests.workloads import WORKLOADS

HERE = Path(__file__)
PATIENCE = 10.0
ADPSGD = WORKLOADS["adpsgd"]


@pytest.mark.parametrize("engine", WORKLOADS)
def test_nothing_is_found(engine: str) -> None:
    board = run_episode(WORKLOADS[engine], 0, seconds=1.0)
    assert board.counts["train"] > 0
    assert board.counts["exchanges"] > 0
    assert board.counts["closing"] == board.world_size
    assert_no_gossip_threads()  # a finding may leave some behind


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--engine", "adpsgd", "--seconds", "0.2", "--seed", "7"]) == 0
    out = capsys.readouterr().out
    assert "adpsgd: seed 7 " in out
    assert "adpsgd: 1 episodes without a finding" in out


def found(seed: int, *, patience: float = 1.0) -> str:
    """What an episode of AD-PSGD with delays in this file too comes to."""
    with pytest.raises(Finding) as finding:
        run_episode(ADPSGD, seed, seconds=20.0, patience=patience, where=(*ASYNCHRONOUS, HERE))
    text = str(finding.value)
    assert text.startswith(f"seed {seed}: ")
    assert f"again: python -m tests.sanitizer --engine adpsgd --seed {seed} --seconds 20" in text
    return text


def overwrite(mailbox: Mailbox, x: FlatVector) -> bool:
    """The steps that training has taken since it published y are lost."""
    if not mailbox.has_mail:
        return False
    mailbox._has_mail = False
    x.raw.copy_(mailbox._public.raw)
    return True


def test_a_lost_update_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Mailbox, "collect", overwrite)
    assert "AssertionError: got a sum of" in found(2)


def test_the_command_prints_the_seed_of_a_finding(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Mailbox, "collect", overwrite)
    assert main(["--engine", "adpsgd", "--seconds", "30", "--seed", "2", "--patience", "1"]) == 1
    assert "seed 2: AssertionError: got a sum of" in capsys.readouterr().out


def test_a_torn_snapshot_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copied in halves without the lock; the seed is one that holds both listener and asker up in between."""

    def snapshot(mailbox: Mailbox, out: FlatVector) -> None:
        half = len(out.raw) // 2
        out.raw[:half].copy_(mailbox._public.raw[:half])
        out.raw[half:].copy_(mailbox._public.raw[half:])

    monkeypatch.setattr(Mailbox, "snapshot", snapshot)
    assert "AssertionError: a torn model: entries from" in found(1149)


def test_a_deadlock_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Training waits for the listener with the lock in hand that the listener needs."""
    wait_until_served = BilateralAverage.wait_until_served

    def wait_with_the_lock(bilateral: BilateralAverage) -> None:
        with bilateral.mailbox.lock:
            wait_until_served(bilateral)

    monkeypatch.setattr(BilateralAverage, "wait_until_served", wait_with_the_lock)
    text = found(2, patience=4.0)  # longer than opening takes on a busy machine
    assert "no progress of rank 0" in text
    assert "wait_with_the_lock" in text  # in the stacks
    assert "--- gossip-0" in text
