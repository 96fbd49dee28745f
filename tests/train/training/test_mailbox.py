"""ElasticRun over a mailbox: options, the data of each worker, results, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.train.training.test_elastic import SECONDS, Worker, until, world
from train.command_line import read_command_line
from train.job.errors import UsageError
from train.job.world import World
from train.tasks.images.config import Config

__all__ = ["world"]  # a fixture


def read(*arguments: str) -> Config:
    return read_command_line(Config, description=None, arguments=arguments)


def run(configs: Sequence[Config], world: World) -> list[Worker]:
    workers = [Worker(config, world) for config in configs]
    for worker in workers:
        worker.thread.start()
    until(workers, lambda: all(worker.exit_code is not None for worker in workers), "the end of the run")
    for worker in workers:
        worker.thread.join(SECONDS)
    return workers


def test_two_workers_of_the_script_train_on_data_of_their_own(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("visualization.curves.draw_run", lambda folder: None)  # it takes a second
    given = ("--membership", "memory://train", "--min-workers", "2", "--recipe", "diloco", "--epochs", "1")
    folders = [tmp_path / name for name in "ab"]
    workers = run([read(*given, "--grace", str(SECONDS), "--out-dir", str(folder)) for folder in folders], world)
    steps = workers[0].task.steps_per_epoch // 2
    read_by = {worker.training.membership.number: worker.task.read for worker in workers if worker.training}
    assert read_by == {0: [*range(steps)], 1: [*range(2 * steps, 3 * steps)]}
    for folder, worker in zip(folders, workers, strict=True):
        assert worker.training is not None
        number = worker.training.membership.number
        summary = json.loads((folder / "summary.json").read_text())
        assert (summary["workers"], summary["membership"][0]["members"]) == ([number], [0, 1])
        assert summary["averaged_test"]["accuracy_percent"] > 30
        assert sorted(path.name for path in folder.glob("*_000*")) == [
            f"membership_{number:04d}.jsonl",
            f"rank_{number:04d}.csv",
        ]


def test_a_membership_stands_for_elastic_and_its_store() -> None:
    config = read("--membership", "node0:29400", "--min-workers", "3")
    assert (config.elastic, config.store, config.is_by_mail) == (True, "node0:29400", False)
    assert read("--elastic", "--store", "file:///shared/run", "--quorum", "2").is_by_mail


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("--membership s3://b/run --resume auto", "got resume=auto over a mailbox, expected none of them"),
        ("--membership s3://b/run --checkpoint-every 1", "got checkpoint_every=1 over a mailbox"),
        ("--membership node0:29400 --quorum 2", "got quorum=2 without a mailbox, expected the address of one"),
        ("--grace 5", "got grace=5.0 without a mailbox"),
        ("--membership s3://b/run --store node0:29400", "got membership='s3://b/run' beside store='node0:29400'"),
        ("--membership s3://b/run --grace 0", "got grace=0.0, expected more than 0"),
    ],
)
def test_options_that_do_not_fit(arguments: str, expected: str) -> None:
    with pytest.raises(UsageError, match=expected):
        read(*arguments.split())


@pytest.mark.parametrize(
    ("recipe", "expected"),
    [
        ("sgp", r"got a message in every step over a mailbox"),
        ("adpsgd", r"got a message in every step over a mailbox"),
        ("wagma", r"got the mailbox memory://\w+ for a wrapper whose workers are connected"),
        ("ar", r"got the mailbox memory://\w+ for a wrapper whose workers are connected"),
        ("d2", r"got .* over a mailbox, expected a method of one message per round"),
    ],
)
def test_recipes_that_do_not_fit(world: World, tmp_path: Path, recipe: str, expected: str) -> None:
    worker = Worker(read("--membership", f"memory://{recipe}", "--recipe", recipe, "--out-dir", str(tmp_path)), world)
    worker.run()
    assert isinstance(worker.error, ValueError)
    with pytest.raises(ValueError, match=expected):
        raise worker.error
