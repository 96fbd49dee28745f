"""ElasticRun: a training run whose workers may die, come back and be added, while the others train on.

[Note: Turns] Workers deal out one stream of batches among themselves. In step s of a generation with n workers, worker
r reads the batch of number `turns + (s - start) n + r`, see `Membership.turn`: so whoever comes or goes, no number is
read twice, and an epoch is so many numbers. Only the batches of a worker that has died or left, from its last step to
the end of its generation, are read by nobody. Epochs, validations and the end are functions of the number too, hence
the same on all workers, also on one that has just come.

Where workers leave out steps (WAGMA) or take them at their own pace (AD-PSGD), each reads its share of the stream at
that pace, from the position of the run when the generation begins; see `ElasticPace`. Over a mailbox each reads all
items in an order of its own: see `MailedSteps`.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch

import gossip_modules as gm
from gossip_modules.membership.view import Change
from gossip_modules.methods import METHODS, wrap
from train.job.errors import UsageError, usage_errors
from train.job.files import remove_file
from train.job.outputs import SUMMARY, clear_outputs, tables_of
from train.job.preemption import EXIT_CODE, StopRequest
from train.job.world import World
from train.run_config import RunConfig
from train.tasks.base import MicroBatch, Task
from train.tasks.images.models import fingerprint
from train.training.checkpoint import START_AFRESH, Checkpoints
from train.training.elastic.history import History
from train.training.elastic.membership_log import MembershipLog
from train.training.elastic.pace import elastic_pace
from train.training.elastic.report import report
from train.training.elastic.validation import validate
from train.training.evaluate import Validation
from train.training.log import EpochRow, RunLog
from train.training.meters import Meters
from train.training.other_world import check_other_world, find_other_world, load_other_world
from train.training.run import context_of
from train.training.run_folder import CHECKPOINTS
from train.training.state import TrainingState
from train.training.step import train_step


class ElasticRun:
    """The part of one worker in a training run, from its coming to its end.

    Args:
        task: what is learnt, in a world of one.
        config: how, with everything resolved.
        world: the world of this worker alone.
        stop: a request to leave.

    Raises:
        ValueError: the job refuses this worker, or its folder has another run.
    """

    def __init__(self, task: Task, config: RunConfig, world: World, stop: StopRequest) -> None:
        self.task, self.config, self.world, self.stop = task, config, world, stop
        self.folder, self.founders = config.run_dir, config.min_workers
        self.end = config.epochs * task.steps_per_epoch  # a position, see `ElasticPace`
        self.folder.mkdir(parents=True, exist_ok=True)
        torch.manual_seed(config.seed)
        module = task.precision.prepare_module(task.make_model())
        if config.compile != "none":
            module.compile(backend=config.compile)
        self.membership = membership_of(config, task)
        self.checkpoints = Checkpoints(
            self.folder / CHECKPOINTS,
            world,
            {
                "world_size": 1,
                "model_fingerprint": fingerprint(module),
                "steps_per_epoch": task.steps_per_epoch,
                **config.identity,
                **task.identity,
            },
            defaults=config.defaults,
            settings=config.settings,
            keep_last=config.keep_last,
        )
        self.history, self.meters = History(), Meters(world.device)
        self.pace = elastic_pace(config, self.membership, self.history, end=self.end)
        self.membership_log = MembershipLog(self.folder, self.membership.stats)
        optimizer = task.make_optimizer(module)
        saved = self._saved()
        if saved is not None:  # before it is wrapped: the first worker's model is that of all then
            prefix = "module."  # that of the tensors
            states = saved["wrapper"].items()
            module.load_state_dict({name[len(prefix) :]: x for name, x in states if name.startswith(prefix)})
        context = context_of(task, config, world)
        context = replace(
            context,
            steps_per_epoch=max(task.steps_per_epoch // self.founders, 1),
            membership=self.membership,
            comm_device=None if config.is_by_mail else context.comm_device,  # objects are of host memory anyway
        )
        self.membership.on_change(self._changed)
        self.wrapper = wrap(config.algorithm or config.recipe, module, config, context)
        self.state = TrainingState(self.wrapper, optimizer, task.precision.make_scaler(), self.meters, world.device)
        if saved is not None:
            self.state.load_optimizer(saved)
        self.membership.track(optimizer=optimizer, scaler=self.state.scaler, history=self.history, pace=self.pace)
        self.is_founder = self.membership.generation > 0
        self.stream: Iterator[Sequence[MicroBatch]] | None = None
        self.log: RunLog | None = None

    def _saved(self) -> dict[str, Any] | None:
        """The state of the newest checkpoint that the run is to go on from, if any."""
        config = self.config
        if (self.folder / SUMMARY).exists() and not config.overwrite:
            raise UsageError(
                f"got an --out-dir with a finished run ({self.folder / SUMMARY}), expected a new folder; {START_AFRESH}"
            )
        if not config.resume:
            return None
        if other := find_other_world(config.resume, self.checkpoints.folder, self.world, 1):
            check_other_world(config, other, 1)
            state = load_other_world(
                other,
                self.checkpoints.identity,
                defaults=self.checkpoints.defaults,
                keys=TrainingState.KEYS,
                steps_per_epoch=self.task.steps_per_epoch,
            )
            self.history.first_turn = state["step"]
            return {**state, "wrapper": state["model"]}
        paths = self.checkpoints.choose(config.resume, overwrite=config.overwrite)
        if not paths:
            return None
        _, state = self.checkpoints.load(paths, keys=TrainingState.KEYS)
        self.history.first_turn = int(state["step"])
        return state

    def _begin(self) -> None:
        """Come to the job; at its start clear away what another run has left."""
        config = self.config
        if self.is_founder and not config.resume and not config.overwrite and self.checkpoints.candidates():
            raise UsageError(
                f"got an --out-dir with checkpoints of an earlier run ({self.checkpoints.folder}) and no --resume, "
                f"expected --resume auto to go on from there; or {START_AFRESH}"
            )
        if self.is_founder and self.membership.rank == 0:
            if config.overwrite:
                self.checkpoints.clear()
            if not self.history.first_turn:
                clear_outputs(self.folder, self.world)
        self.membership.join()
        number = self.membership.number
        if self.pace.is_by_mail:
            self._begin_by_mail(number)
        # From here on workers differ: dropout must not fall on the same units everywhere.
        torch.manual_seed(config.seed * 10_000 + number)
        self.log = RunLog(self.folder, rank=number, step=self.history.first_turn // self.founders)
        self.membership_log.open(number)

    def _begin_by_mail(self, number: int) -> None:
        """Delete what another run has left under the number of this worker, and note the first workers."""
        if self.config.overwrite:
            clear_outputs(self.folder, self.world)
        for path in tables_of(self.folder, number):
            remove_file(path)
        members = self.membership
        self._changed(Change(members.generation, members.join(), members.rank, members.members, (), {}))

    def _changed(self, change: Change) -> None:
        """A generation begins: its workers deal out the batches anew."""
        self.stream = None if not self.pace.is_by_mail else self.stream
        self.history.changes.append(
            {
                "unix_seconds": round(time.time(), 3),
                "generation": change.generation,
                "step": change.step,
                "batch": self.pace.position(change.step),
                "members": list(change.members),
                "joined": list(change.joined),
                "left": {str(number): why for number, why in change.left.items()},
                "time_seconds": round(self.meters.train_seconds, 3),
            }
        )
        self.membership_log.generation(self.history.changes[-1])

    def train(self) -> int:
        """Train until the run ends or this worker is told to leave; returns the exit code of the process."""
        config, task, members = self.config, self.task, self.membership
        self._begin()
        assert self.log is not None
        if self.pace.position(members.join()) >= self.end:
            print(f"worker {members.number}: the run has ended: nothing is left to do", flush=True)
            return 0
        print(
            f"{METHODS[config.recipe].title}: {task.description}, worker {members.number}, one of "
            f"{members.world_size}, {self.world.device.type}, {task.steps_per_epoch} batches per epoch, from batch "
            f"{self.pace.position(members.join())}",
            flush=True,
        )
        self.wrapper.train()
        validation: Validation | None = None
        for step in members.steps(sys.maxsize):
            first = self.pace.position(step)
            self._take_step(first)
            last = self.pace.position(members.join())
            validation, is_last = None, last >= self.end
            before, epoch = (min(turn // task.steps_per_epoch, config.epochs) for turn in (first, last))
            if is_last or epoch > before:  # by more than one where others have taken many steps
                self._require_finite(last)
            if is_last:
                validation = self._validate(is_last=True) if self.pace.may_meet else None
            elif epoch // config.validate_every > before // config.validate_every:
                validation = self._validate(is_last=False)
            is_over = is_last and (validation is not None or self.pace.gives_up())
            if is_over or (epoch > before and not is_last):
                self._end_epoch(epoch, validation)
            if self._is_checkpoint_due(first, last) or (is_over and self._saves):
                self._save(last, validation)
            if is_over:
                break
            if self.stop.is_made:
                self._save(last, None)
                print(f"worker {members.number}: told to stop, and leaves the run after batch {last}", flush=True)
                return EXIT_CODE
        report(self, validation)
        return 0

    @property
    def has_begun(self) -> bool:
        """Whether this worker takes part in training."""
        return self.log is not None

    @property
    def changes(self) -> list[dict[str, Any]]:
        """The generations so far, for the report."""
        return self.history.changes

    @property
    def _saves(self) -> bool:
        return bool(self.config.checkpoint_every or self.config.checkpoint_every_steps)

    def _is_checkpoint_due(self, first: int, last: int) -> bool:
        """Whether a checkpoint is due after the step that has read the batches from `first` to before `last`."""
        config, per_epoch = self.config, self.task.steps_per_epoch
        periods = (config.checkpoint_every * per_epoch, config.checkpoint_every_steps * self.founders)
        return any(period and last // period > first // period for period in periods)

    def _take_step(self, first: int) -> None:
        members, log, config = self.membership, self.log, self.config
        assert log is not None
        start = time.perf_counter()
        if self.stream is None:
            self.task.close()  # loader processes that read for the generation before
            self.stream = self.pace.stream(self.task, first)
            log.lead(members.is_by_mail or members.rank == 0, step=first // self.founders)
        batch = next(self.stream)
        self.meters.data_seconds += time.perf_counter() - start
        rate = self.task.learning_rate(first // self.founders)
        if config.scale_lr:
            rate *= members.world_size / self.founders
        train_step(self.task, config, self.state, batch, learning_rate=rate)
        seconds = time.perf_counter() - start
        self.meters.train_seconds += seconds
        self.pace.count_step()
        self.membership_log.step(seconds)
        if self.state.step % config.log_every == 0:
            stats = self.wrapper.comm_stats()
            log.point(first // self.founders, stats, loss=self.meters.loss, learning_rate=rate)

    def _end_epoch(self, epoch: int, validation: Validation | None) -> None:
        """Note it by the step at which it ends, which is the same for all workers, whatever each has seen of others."""
        assert self.log is not None
        step = epoch * self.task.steps_per_epoch // self.founders
        rate, stats = self.task.learning_rate(step - 1), self.wrapper.comm_stats()
        self.log.epoch(EpochRow.of(epoch, step, self.state.step, rate, self.meters, stats, validation))
        self.meters.start_epoch()

    def _require_finite(self, turn: int) -> None:
        """Raise UsageError where training has diverged."""
        with usage_errors():
            self.meters.require_finite(turn // self.founders)

    def _validate(self, *, is_last: bool) -> Validation | None:
        """See `validate`; at the end of an epoch all are here only where they come to it together."""
        with_average = self.pace.meets or (is_last and not self.pace.is_by_mail)
        return validate(self.wrapper, self.task, self.membership, with_average=with_average)

    def _save(self, turn: int, validation: Validation | None) -> None:
        """On the first worker, write a checkpoint of its model; raises UsageError where training has diverged.

        The workers of a mailbox save models there by themselves.
        """
        if self.membership.rank == 0 and not self.pace.is_by_mail:
            self._require_finite(turn)
            state = {**self.state.state_dict(), "step": turn}
            score = self.task.selection(validation.averaged) if validation and validation.averaged else None
            self.checkpoints.save(turn, state, score=score)

    def close(self) -> None:
        """Leave the job, and end threads, loader processes and files; idempotent."""
        if self.log is not None:
            self.log.close()
            self.membership_log.close()
        self.pace.close()
        self.wrapper.close()
        self.task.close()


def membership_of(config: RunConfig, task: Task) -> gm.Membership:
    """The membership of a run: its workers meet in a store with connections, or over a mailbox."""
    described = {**config.identity, **task.identity, "epochs": config.epochs}
    timeout = timedelta(seconds=config.timeout_seconds)
    if config.is_by_mail:
        described["min_workers"] = config.min_workers  # the number of steps of a worker depends on it
        options: dict[str, Any] = {"quorum": config.quorum or None, "grace": config.grace}
    else:
        options = {"max_workers": config.max_workers, "min_deadline": max(config.min_deadline, 0.1)}
        options["name"] = str(config.run_dir)
    given = {"min_workers": config.min_workers, "timeout": timeout, **options}
    return gm.Membership(config.store, description={"run": json.dumps(described)}, **given)
