"""A process outside reads the newest models of a run, writes nothing, and is told when the run ends."""

from __future__ import annotations

import doctest
import logging
import uuid
from pathlib import Path

import pytest
import torch

from gossip_modules.mailbox import follow, follower
from gossip_modules.mailbox.errors import MailboxError
from gossip_modules.mailbox.follower import NoRun
from gossip_modules.mailbox.job import MailJob, Settings
from gossip_modules.mailbox.medium import Medium, open_medium
from gossip_modules.mailbox.saved_models import SavedModel, SavedModels
from gossip_modules.membership.background_log import log
from tests.library.mailbox.clock import InstantClock
from tests.library.mailbox.runs import H, train


class SmallRun:
    """A run with one worker, whose objects are written by hand. Time passes in sleeps only."""

    def __init__(self, *, key: bytes = b"key of these tests") -> None:
        self.address, self.clock = f"memory://{uuid.uuid4().hex}", InstantClock()
        self.medium: Medium = open_medium(self.address, timeout=60.0, key=key, clock=self.clock)
        self.job = MailJob(self.medium, Settings.of_reader(poll=1.0, timeout=60.0))
        self.models = SavedModels(self.medium)

    def begin(self) -> None:
        self.job.claim({})
        self.job.beat()

    def save(self, number: int) -> None:
        saved = SavedModel(number, {"x": torch.tensor([float(number)])}, is_average=True, step=0, state={})
        assert self.models.create(number, self.models.pack(saved))

    def follow(self, **options: float) -> follower.Follower:
        return follow(self.address, key="key of these tests", clock=self.clock, **options)


def test_the_example_of_the_docstring_runs() -> None:
    assert doctest.testmod(follower).failed == 0


@pytest.mark.parametrize("scheme", ["memory", "file"])
def test_the_models_of_a_training_are_the_anchors_of_its_workers(scheme: str, tmp_path: Path) -> None:
    address = f"file://{tmp_path}/run" if scheme == "file" else f"memory://{uuid.uuid4().hex}"
    workers = train(address, 3 * H)
    before = workers[0].membership.medium.list()
    models = follow(address, key="key of these tests", poll=0.01)
    newest = models.newest()
    assert newest is not None
    (given,) = list(models)
    assert (given.round, given.is_average, newest.round) == (3, True, 3)
    assert list(given.state_dict) == ["x"]
    assert given.state_dict["x"].item() == newest.state_dict["x"].item() == workers[0].x[3 * H]
    assert workers[0].membership.medium.list() == before


def test_the_newest_model_is_given_once(caplog: pytest.LogCaptureFixture) -> None:
    run = SmallRun()
    run.begin()
    models = run.follow()
    given = []
    for numbers in ([0], [1, 2], [5]):
        for number in numbers:
            run.save(number)
        given.append(next(models).round)
    run.save(6)
    run.job.leave()
    with caplog.at_level(logging.WARNING, logger=log.name):
        given += [model.round for model in models]
        log.flush(5.0)
    assert given == [0, 2, 5, 6]
    assert f"{run.address}: all workers have left or are silent; round 6 was the last" in caplog.text


def test_a_run_whose_workers_are_silent_has_ended() -> None:
    run = SmallRun()
    run.begin()
    run.save(3)
    assert [model.round for model in run.follow(poll=2.0)] == [3]
    assert run.clock.now() >= 6.0


def test_a_worker_that_loads_its_model_is_waited_for() -> None:
    run = SmallRun()
    run.job.claim({})
    run.save(0)
    models = run.follow(timeout=20.0)
    assert next(models).round == 0
    with pytest.raises(MailboxError, match=f"{run.address}: no newer model than that of round 0 came within 20 s"):
        next(models)


def test_a_run_may_begin_later() -> None:
    run = SmallRun()
    models = run.follow(timeout=20.0)
    with pytest.raises(NoRun, match=f"there is no run at {run.address}; see whether the address is right"):
        models.newest()
    with pytest.raises(NoRun, match=f"there is no run at {run.address}"):
        next(models)
    assert run.clock.now() >= 20.0
    run.begin()
    assert models.newest() is None


def test_a_folder_without_a_run_stays_absent(tmp_path: Path) -> None:
    for folder in (tmp_path / "absent", tmp_path):
        with pytest.raises(NoRun):
            follow(f"file://{folder}", key="key of these tests").newest()
    assert list(tmp_path.iterdir()) == []


def test_another_key_is_an_error_at_once() -> None:
    run = SmallRun(key=b"another key of these tests")
    run.begin()
    with pytest.raises(MailboxError, match=f"of the run at {run.address} did not open; set GOSSIP_JOB"):
        next(run.follow())


def test_a_poll_of_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="got poll=0, expected seconds above 0"):
        follow("memory://a", poll=0)
