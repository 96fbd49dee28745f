"""ElasticRun: workers, here threads, that die and join in the middle of an epoch; what is read, and what is refused."""

from __future__ import annotations

import itertools
import json
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from gossip_modules.membership.serve import serve
from gossip_modules.methods import METHODS
from tests.harness.ranks import at_the_end
from tests.library.membership.test_membership import die
from train.job.errors import UsageError
from train.job.world import World
from train.tasks.base import MicroBatch
from train.tasks.images.config import Config
from train.tasks.images.task import ImageTask
from train.tasks.language_model.config import LanguageModelConfig
from train.training.elastic import validation
from train.training.elastic.run import ElasticRun
from train.training.elastic.shared_count import SharedCount
from train.training.elastic.worker import run_elastic
from train.training.evaluate import Validation
from visualization.logs.membership import read_membership
from visualization.logs.runs import read_run

SECONDS = 60.0
EPOCHS = 2


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    """Of one, shared by the workers of a test, as each process has one of its own."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    control = dist.group.WORLD
    assert control is not None
    yield World(0, 1, 0, torch.device("cpu"), "gloo", control, dist.HashStore())
    dist.destroy_process_group()


class RecordingTask(ImageTask):
    """Notes which batches are read; a worker that is told to die does so instead of reading one."""

    def __init__(self, config: Config, world: World) -> None:
        super().__init__(config, world)
        self.read: list[int] = []
        self.before_reading: Callable[[int], None] = lambda number: None

    def dealt_stream(self, first: int, stride: int) -> Iterator[Sequence[MicroBatch]]:
        """See `Task`."""
        for number, batch in zip(itertools.count(first, stride), super().dealt_stream(first, stride)):
            self.before_reading(number)
            self.read.append(number)
            yield batch


class Killed(Exception):
    """The end of a process."""


class Worker:
    """A worker as a thread."""

    def __init__(self, config: Config, world: World) -> None:
        self.config, self.world = config, world
        self.task = RecordingTask(config, world)
        self.training: ElasticRun | None = None
        self.error: BaseException | None = None
        self.exit_code: int | None = None
        self.stop = SimpleNamespace(is_made=False)
        self.thread = threading.Thread(target=self.run, daemon=True)
        at_the_end(self.abandon)

    def run(self) -> None:
        try:
            self.training = ElasticRun(self.task, self.config, self.world, self.stop)  # type: ignore[arg-type]
            try:
                self.exit_code = self.training.train()
            finally:
                self.training.close()
        except BaseException as error:  # noqa: BLE001 (raised in the thread of the test)
            self.error = error

    def abandon(self) -> None:
        """Where the test has failed: it does not train on."""
        if self.thread.is_alive():
            self.stop.is_made = True
            if self.training is not None:
                die(self.training.membership)
            self.thread.join(5.0)

    def die(self, number: int) -> None:
        """As kill -9: connections close, and nobody is told."""
        assert self.training is not None
        die(self.training.membership)
        raise Killed


def until(workers: Sequence[Worker], condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        for worker in workers:
            if worker.error is not None and not isinstance(worker.error, Killed):
                raise worker.error
        assert time.monotonic() < deadline, what
        time.sleep(0.005)


@pytest.fixture(scope="module")
def store() -> dist.TCPStore:
    return serve(0)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory, store: dist.TCPStore) -> Config:
    return Config(
        elastic=True,
        min_workers=3,
        store=f"127.0.0.1:{store.port}",
        out_dir=str(tmp_path_factory.mktemp("elastic") / "run"),
        epochs=EPOCHS,
        validate_every=EPOCHS,
        checkpoint_every_steps=15,
        batch_size=64,
        min_deadline=20.0,
        timeout_seconds=SECONDS,
        milestones=(),
    )


def test_a_worker_dies_another_joins_and_each_batch_is_read_once(
    config: Config, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("visualization.curves.draw_run", lambda folder: None)  # it takes a second
    founders = [Worker(config, world) for _ in range(3)]
    joiner = Worker(config, world)
    workers = [*founders, joiner]
    may_go_on, has_joined = threading.Event(), threading.Event()

    def wait_for_the_others(number: int) -> None:
        """From the second epoch on: nothing here depends on who is faster."""
        if number // steps_per_epoch == 1 and not may_go_on.is_set():
            assert may_go_on.wait(SECONDS)
        if may_go_on.is_set():
            has_joined.wait(0.5)  # it takes some steps of the others to join

    steps_per_epoch = founders[0].task.steps_per_epoch
    victim = founders[2]

    def end_in_the_first_epoch(number: int) -> None:
        if number > steps_per_epoch // 3:
            victim.die(number)

    victim.task.before_reading = end_in_the_first_epoch
    founders[0].task.before_reading = wait_for_the_others
    joiner.task.before_reading = lambda number: has_joined.set()
    for worker in founders:
        worker.thread.start()
    until(workers, lambda: isinstance(victim.error, Killed), "the end of the victim")
    joiner.thread.start()
    until(workers, lambda: joiner.training is not None, "the joiner at the door")
    may_go_on.set()
    alive = [*founders[:2], joiner]
    until(workers, lambda: all(worker.exit_code is not None for worker in alive), "the end of the run")
    for worker in workers:
        worker.thread.join(SECONDS)
    assert [worker.exit_code for worker in alive] == [0, 0, 0]

    # What was read: each number once, but those of the dead worker up to the end of its generation.
    summary = json.loads((config.run_dir / "summary.json").read_text())
    generations = summary["membership"]
    by_worker = [number for worker in workers for number in worker.task.read]
    read = Counter(number for number in by_worker)
    assert max(read.values()) == 1
    first = next(i for i, change in enumerate(generations) if change["left"])
    lost = range(max(victim.task.read) + 3, generations[first]["batch"], 3)
    assert sorted({*range(EPOCHS * steps_per_epoch)} - read.keys()) == list(lost)
    assert len(generations[first]["left"]) == 1
    assert generations[0]["members"] == sorted(generations[0]["members"])
    assert any(change["joined"] for change in generations[1:])
    assert joiner.task.read, "the joiner took no part"
    assert summary["averaged_test"]["accuracy_percent"] > 30
    assert summary["world_size"] == 3

    # What the workers have noted is the same, also of the one that died; steps stop with it.
    logged, problems = read_membership(config.run_dir)
    assert problems == []
    assert logged is not None
    assert [list(one.members) for one in logged.generations] == [change["members"] for change in generations]
    left = logged.generations[first].left
    assert {str(number): why for number, why in left.items()} == generations[first]["left"]
    num_read = {f"{w.training.membership.number:04d}": len(w.task.read) for w in workers if w.training is not None}
    assert logged.steps.groupby("worker")["num_steps"].sum().to_dict() == num_read
    assert (logged.steps["slowest_seconds"] >= logged.steps["median_seconds"]).all()
    assert logged.steps["live"].between(1, 3).all()

    # It is over: the folder is not taken for another run, and a worker that is started again has nothing to do.
    with pytest.raises(UsageError, match=r"got an --out-dir with a finished run .*; start afresh in another --out-dir"):
        ElasticRun(founders[0].task, config, world, victim.stop)  # type: ignore[arg-type]
    assert run_elastic(replace(config, resume="auto"), RecordingTask) == 0


def test_a_worker_without_the_others_at_the_end_trains_on_into_the_next_generation(
    config: Config, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first average fails, as where a worker joins just then; another generation begins when one comes."""
    monkeypatch.setattr("visualization.curves.draw_run", lambda folder: None)
    tried: list[int] = []

    def validate(*arguments: Any, with_average: bool) -> Validation | None:
        if with_average:
            tried.append(arguments[2].generation)
        return None if len(tried) == 1 else validation.validate(*arguments, with_average=with_average)

    monkeypatch.setattr("train.training.elastic.run.validate", validate)
    config = replace(config, recipe="adpsgd", min_workers=1, epochs=1, checkpoint_every_steps=0)
    config = replace(config, out_dir=str(tmp_path / "run"))
    first, late = Worker(config, world), Worker(config, world)
    workers = [first, late]
    first.thread.start()
    until(workers, lambda: bool(tried), "the end of the epoch")
    late.thread.start()
    until(workers, lambda: None not in (first.exit_code, late.exit_code), "the end of the run")
    assert (first.exit_code, late.exit_code) == (0, 0)
    assert tried[1] > tried[0]
    assert not late.task.read  # nothing was left to do
    summary = json.loads((config.run_dir / "summary.json").read_text())
    assert summary["averaged_test"]["accuracy_percent"] > 30
    assert summary["ranks"][0]["num_steps"] > first.task.steps_per_epoch
    run, problems = read_run(config.run_dir)
    assert run is not None, problems
    assert run.summary, problems  # its seconds are those of the last row


def test_a_model_that_has_diverged_is_not_saved(config: Config, world: World, tmp_path: Path) -> None:
    """Nor at a checkpoint in the middle of an epoch, from which --resume auto would go on."""
    diverging = replace(config, out_dir=str(tmp_path), min_workers=1, lr=1e30, checkpoint_every_steps=5)
    diverging = replace(diverging, algorithm="NoLoCo(sync_every=100)")  # no round that would notice it before
    worker = Worker(diverging, world)
    worker.run()
    assert isinstance(worker.error, UsageError)
    assert re.match(r"got a loss of (nan|inf) by step 5, expected a number", str(worker.error))
    assert not list(tmp_path.glob("checkpoints/step_*"))


def test_an_epoch_ends_at_one_step_for_workers_that_have_seen_others_come_so_far_at_other_moments(
    config: Config, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tables whose epochs end at different steps are taken for those of different runs."""
    monkeypatch.setattr("visualization.curves.draw_run", lambda folder: None)
    add = SharedCount.add
    monkeypatch.setattr(SharedCount, "add", lambda self, n: add(self, 3 * n))  # the others take two steps meanwhile
    own = replace(config, out_dir=str(tmp_path), min_workers=1, recipe="adpsgd", checkpoint_every_steps=0)
    worker = Worker(own, world)
    worker.run()
    assert (worker.error, worker.exit_code) == (None, 0)
    run, problems = read_run(tmp_path)
    assert problems == []
    assert run is not None
    steps_per_epoch = worker.task.steps_per_epoch
    assert steps_per_epoch % 3
    assert run.table["step"].tolist() == [steps_per_epoch, 2 * steps_per_epoch]


def test_the_numbers_of_a_stream_are_those_of_its_parts(world: World) -> None:
    """Workers that deal out one stream read what one worker would, images and their augmentation."""
    data = ImageTask(Config(batch_size=64), world).data
    whole = list(itertools.islice(data.train_keys(0), 60))
    for first, stride in ((0, 3), (5, 1), (2, 7), (21, 22), (1, 50)):
        dealt = list(itertools.islice(data.train_keys(first, stride), len(range(first, 60, stride))))
        for number, key in zip(range(first, 60, stride), dealt, strict=True):
            assert np.array_equal(key.indices, whole[number].indices)
            assert key.seed == whole[number].seed


def test_a_task_of_ones_own_deals_out_its_stream() -> None:
    stream = SimpleNamespace(train_stream=lambda first: itertools.count(first))
    dealt = ImageTask.__mro__[1].dealt_stream(stream, 4, 3)  # type: ignore[attr-defined]
    assert list(itertools.islice(dealt, 4)) == [4, 7, 10, 13]


@pytest.mark.parametrize("recipe", ["ar", "dpwa", "sparseloco", "relaysgd", "sgp", "noloco", "d2", "wagma", "adpsgd"])
def test_recipes_that_need_fixed_ranks_are_refused_with_the_reason(recipe: str) -> None:
    if why := METHODS[recipe].needs_fixed_ranks:
        with pytest.raises(ValueError, match=rf"got --elastic with --recipe {recipe}, expected .*: {re.escape(why)}"):
            Config(recipe=recipe, elastic=True)
    else:
        Config(recipe=recipe, elastic=True)


@pytest.mark.parametrize(
    ("config_type", "options", "message"),
    [
        (Config, {"nprocs_per_node": 2}, "the scripts start each process as a worker, here with nprocs_"),
        (Config, {"min_workers": 3, "max_workers": 2}, "got max_workers=2 and min_workers=3, expected no fewer"),
        (Config, {"backend": "mpi"}, "got --elastic with --backend mpi, expected gloo"),
        (Config, {"dirichlet_alpha": 0.1}, r"got dirichlet_alpha=0.1 with --elastic, expected 0"),
        (LanguageModelConfig, {"dirichlet_alpha": 0.1}, r"got dirichlet_alpha=0.1 with --elastic, expected 0"),
    ],
)
def test_options_that_do_not_fit(config_type: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config_type(elastic=True, **options)
