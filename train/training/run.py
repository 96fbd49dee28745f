"""Run: a training run of any task by any recipe, from the model to the report."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path

import torch
from tqdm import tqdm

from gossip_modules.methods import METHODS, Context, wrap
from train.job.addresses import own_host
from train.job.listener import NOBODY, RunListener
from train.job.outputs import EXPORT, clear_outputs
from train.job.preemption import EXIT_CODE, StopRequest
from train.job.result import RunResult
from train.job.world import World
from train.methods.pace import make_pace
from train.run_config import RunConfig
from train.tasks.base import MicroBatch, Task
from train.tasks.images.models import fingerprint
from train.training.checkpoint import Checkpoints
from train.training.evaluate import Validation, validate
from train.training.export import export_model
from train.training.log import EpochRow, RunLog
from train.training.meters import Meters
from train.training.other_world import check_other_world, find_other_world, load_other_world, set_aside_other_worlds
from train.training.report import RankResult, write_report
from train.training.run_folder import CHECKPOINTS, require_own_folder
from train.training.state import TrainingState
from train.training.step import train_step


class Run:
    """One training run, from the model to the picture of its curves.

    Args:
        task: what is learnt.
        config: how, with everything resolved.
        world: by whom.
        stop: a request to stop early.
        listener: hears what is measured.
    """

    result: RunResult
    """What has come of the run; there when `train` has returned."""

    def __init__(
        self, task: Task, config: RunConfig, world: World, stop: StopRequest, *, listener: RunListener = NOBODY
    ) -> None:
        self.task, self.config, self.world, self.stop = task, config, world, stop
        self.folder = config.run_dir
        world.on_every_rank(lambda: self.folder.mkdir(parents=True, exist_ok=True))

        torch.manual_seed(config.seed)
        module = task.precision.prepare_module(task.make_model())
        # From here on ranks differ: dropout must not fall on the same units everywhere.
        torch.manual_seed(config.seed * world.size + world.rank)
        if config.compile != "none":
            module.compile(backend=config.compile)
        self.wrapper = wrap(config.algorithm or config.recipe, module, config, context_of(task, config, world))
        self.meters = Meters(world.device)
        self.state = TrainingState(
            self.wrapper, task.make_optimizer(module), task.precision.make_scaler(), self.meters, world.device
        )
        self.pace = make_pace(
            config.chosen, config, counter=self.state, wrapper=self.wrapper, request=stop, world=world
        )
        self.last_saved_step = -1
        self.checkpoints = Checkpoints(
            self.folder / CHECKPOINTS,
            world,
            {
                "world_size": world.size,
                "model_fingerprint": fingerprint(module),
                "steps_per_epoch": task.steps_per_epoch,
                **config.identity,
                **task.identity,
            },
            defaults=config.defaults,
            settings=config.settings,
            keep_last=config.keep_last,
        )
        self.resume()
        self.batches = task.train_stream(self.state.step)
        self.log = RunLog(self.folder, rank=world.rank, step=self.position, listener=listener)
        self.listener = listener

    @property
    def position(self) -> int:
        """Optimizer steps per rank that the run has taken; see [Note: Position] of `pace.py`."""
        return self.pace.position

    def train(self) -> int:
        """Train, report and return the exit code of the process."""
        config, world = self.config, self.world
        self.log.print(
            f"{METHODS[config.recipe].title}: {self.task.description}, {world.size} ranks, {world.device.type}, "
            f"{world.backend}, {self.task.steps_per_epoch} steps per epoch, from step {self.position}"
        )
        place = {"rank": world.rank, "world_size": world.size, "folder": str(self.folder)}
        self.listener.info({**place, "task": self.task.description, "config": config.used_choices})
        validation: Validation | None = None
        self.wrapper.train()
        for epoch in range(self.position // self.task.steps_per_epoch, config.epochs):
            if not self.train_epoch(epoch):
                self.log.print(f"told to stop: checkpoint of step {self.position} written; go on with --resume auto")
                self.result = self._result(EXIT_CODE, None)
                return EXIT_CODE
            is_last = epoch + 1 == config.epochs
            validation = self.validate() if is_last or (epoch + 1) % config.validate_every == 0 else None
            stats, last_rate = self.wrapper.comm_stats(), self.task.learning_rate(self.position - 1)
            self.log.choices(stats)
            row = EpochRow.of(epoch + 1, self.position, self.state.step, last_rate, self.meters, stats, validation)
            self.log.epoch(row)
            self.meters.start_epoch()
            is_due = config.checkpoint_every > 0 and (epoch + 1) % config.checkpoint_every == 0
            is_due |= config.checkpoint_every_steps > 0 and self.position % config.checkpoint_every_steps == 0
            if is_due or (is_last and config.checkpoint_every_steps + config.checkpoint_every > 0):
                self.save(self.task.selection(validation.averaged) if validation else None)
        validation = validation or self.validate()
        self.report(validation)
        self.result = self._result(0, validation)
        results = {"averaged_test": dict(validation.averaged), "consensus_distance": validation.consensus_distance}
        self.listener.info({"rank": world.rank, **results})
        return 0

    def train_epoch(self, epoch: int) -> bool:
        """Train to the end of `epoch`; False: told to stop before, with a checkpoint written."""
        num_steps, every = self.task.steps_per_epoch, self.config.checkpoint_every_steps
        first, end = epoch * num_steps, (epoch + 1) * num_steps
        with self.log.progress(epoch, first_step=self.position - first, num_steps=num_steps) as bar:
            while self.position < end:
                next_checkpoint = (self.position // every + 1) * every if every else end
                is_told_to_stop = self.train_until(min(next_checkpoint, end), bar)
                self.world.on_every_rank(lambda: self.meters.require_finite(self.position))
                if self.position < end:
                    self.save()
                    if is_told_to_stop:
                        return False
        return True

    def train_until(self, boundary: int, bar: tqdm[int]) -> bool:
        """Collective: train until the run is at `boundary` or all are told to stop; returns whether they are.

        Then all ranks have met between two steps: all that was learned is in their states, and nothing is half done.
        """
        start = time.perf_counter()
        meeting = self.pace.meet(is_told_to_stop=self.take_steps(boundary, bar))
        if meeting.is_told_to_stop:
            self.take_steps(meeting.position, bar, heeds_stop=False)  # where some ranks are already
        if self.world.device.type == "cuda":
            torch.cuda.synchronize()  # so that the seconds are those of the work and not of its queueing
        self.meters.train_seconds += time.perf_counter() - start
        return meeting.is_told_to_stop

    def take_steps(self, boundary: int, bar: tqdm[int], *, heeds_stop: bool = True) -> bool:
        """Take this rank's steps before `boundary`; returns whether it was told to stop before."""
        first = (boundary - 1) // self.task.steps_per_epoch * self.task.steps_per_epoch  # of the epoch
        while (position := self.pace.claim(boundary)) is not None:
            if heeds_stop and self.pace.should_stop():
                return True
            waiting = time.perf_counter()
            batch = next(self.batches)
            self.meters.data_seconds += time.perf_counter() - waiting
            self.train_step(batch, learning_rate=self.task.learning_rate(position))
            bar.update(self.position - first - bar.n)
            if self.state.step % self.config.log_every == 0:
                if not self.meters.is_finite:
                    self.stop.request()  # not alone: all ranks end where they meet
                rate, stats = self.task.learning_rate(position), self.wrapper.comm_stats()
                self.log.point(self.position, stats, loss=self.meters.loss, learning_rate=rate)
                bar.set_postfix(loss=f"{self.meters.loss:.3f}")
        return False

    def train_step(self, batch: Sequence[MicroBatch], *, learning_rate: float) -> None:
        """See `train_step`; afterwards collective, where moments of the optimizer are averaged."""
        config, state = self.config, self.state
        train_step(self.task, config, state, batch, learning_rate=learning_rate)
        if names := config.moment_periods.due(config.optimizer_class, state.step):
            self.wrapper.average_optimizer_state(state.optimizer, names=names)

    def validate(self) -> Validation:
        """Collective: metrics of this rank's model and of the averaged one."""
        return validate(self.wrapper, self.task)

    def save(self, score: float | None = None) -> None:
        """Collective: write a checkpoint of the current position, unless there is one."""
        if self.position == self.last_saved_step:
            return
        self.wrapper.settle()
        self.checkpoints.save(self.position, self.state.state_dict(), score=score)
        self.last_saved_step = self.position

    def resume(self) -> None:
        """Collective: go on from the checkpoint that --resume names, if any; clear away what another run left."""
        config, path = self.config, None
        require_own_folder(self.folder, self.world, resume=config.resume, overwrite=config.overwrite)
        if other := find_other_world(config.resume, self.checkpoints.folder, self.world, self.world.size):
            self.resume_from_other_world(other)
            return
        if paths := self.checkpoints.choose(config.resume, overwrite=config.overwrite):
            path, state = self.checkpoints.load(paths, keys=TrainingState.KEYS)
            self.world.on_every_rank(lambda: self.state.load_state_dict(state))
        if config.overwrite:
            self.checkpoints.clear()
        self.pace.meet(is_told_to_stop=False)
        if path is not None:
            self.checkpoints.set_aside_after(self.position)
        if path is None or path.parent.resolve() != self.checkpoints.folder.resolve():
            clear_outputs(self.folder, self.world)
        else:
            self.last_saved_step = self.position

    def resume_from_other_world(self, path: Path) -> None:
        """Collective: go on from the average of what another number of ranks has saved."""
        world, checkpoints = self.world, self.checkpoints

        def load() -> list[int]:
            check_other_world(self.config, path, world.size)
            steps_per_epoch = self.task.steps_per_epoch
            state = load_other_world(
                path,
                checkpoints.identity,
                defaults=checkpoints.defaults,
                keys=TrainingState.KEYS,
                steps_per_epoch=steps_per_epoch,
            )
            self.wrapper.flush()
            self.wrapper.module.load_state_dict(state["model"])
            self.state.load_optimizer(state)
            self.state.step, self.meters.train_seconds = state["step"], state["train_seconds"]
            return [state["num_ranks"], state["old_step"]]

        (num_ranks, step), *_ = world.on_every_rank(load)
        is_here = path.parent.resolve() == checkpoints.folder.resolve()
        world.on_every_rank(
            lambda: set_aside_other_worlds(checkpoints.folder, world.size) if is_here and world.rank == 0 else None
        )
        self.pace.meet(is_told_to_stop=False)
        if not is_here:
            clear_outputs(self.folder, world)
        if world.rank == 0:
            print(
                f"went on from {path}, saved at step {step} by {num_ranks} ranks, with {world.size}: from the average "
                f"of their models and optimizers, at step {self.position}",
                flush=True,
            )

    def report(self, validation: Validation) -> None:
        """Collective: export the averaged model; on rank 0 write and print the results."""
        result = RankResult.of(validation, self.state.step, self.meters, self.wrapper.comm_stats())
        results = [RankResult(**values) for values in self.world.gather(asdict(result))]
        with self.wrapper.averaged():
            if self.world.rank == 0:
                metadata = {**self.task.metadata, "recipe": self.config.recipe}
                export_model(self.wrapper.module, self.folder / EXPORT, metadata=metadata)
            self.task.finish(self.wrapper.module)
        if self.world.rank == 0:
            write_report(self.folder, self.config, self.task.score, validation, results)
            self.log.hyper_parameters(self.config.used_choices, validation.averaged)

    def _result(self, exit_code: int, validation: Validation | None) -> RunResult:
        return RunResult(
            exit_code,
            self.folder,
            self.world.rank,
            self.world.size,
            self.task.score,
            averaged_test={} if validation is None else dict(validation.averaged),
            own_test={} if validation is None else dict(validation.own),
            consensus_distance=math.nan if validation is None else validation.consensus_distance,
            epochs=self.log.rows,
        )

    def finish(self) -> None:
        """Collective, before `close`: leave no message on its way, and shut down together."""
        self.pace.drain()
        self.world.barrier()

    def close(self) -> None:
        """End threads, loader processes and files; idempotent."""
        self.log.close()
        self.wrapper.close()
        self.task.close()


def context_of(task: Task, config: RunConfig, world: World) -> Context:
    """What a method has to know of a run."""
    return Context(
        rank=world.rank,
        world_size=world.size,
        seed=config.seed,
        timeout=timedelta(seconds=config.timeout_seconds),
        # Gloo moves host memory only, so parameters on a GPU are staged.
        comm_device=torch.device("cpu") if config.comm_device == "cpu" or world.backend == "gloo" else None,
        steps_per_epoch=task.steps_per_epoch,
        example_inputs=task.example_inputs,
        on_every_rank=world.on_every_rank,
        own_host=lambda: own_host(world),
    )
