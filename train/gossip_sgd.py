r"""Train an image classifier by gossip: AllReduce SGD, D-PSGD, SGP, Overlap SGP; with less to say: MATCHA, CHOCO-SGD,
DeepSqueeze, Moniqua, PowerGossip; or never waiting for the slowest: AD-PSGD, WAGMA-SGD, dpwa.

    torchrun --standalone --nproc-per-node 4 train/gossip_sgd.py --recipe sgp       # handwritten digits, seconds
    torchrun --standalone --nproc-per-node 4 train/gossip_sgd.py --recipe osgp --max-staleness 1
    torchrun --standalone --nproc-per-node 8 train/gossip_sgd.py --recipe matcha --graph matcha0 --budget 0.5
    torchrun --standalone --nproc-per-node 4 train/gossip_sgd.py --recipe choco --compressor topk
    torchrun --standalone --nproc-per-node 4 train/gossip_sgd.py --recipe powergossip --power-iterations 2
    torchrun --standalone --nproc-per-node 4 train/gossip_sgd.py --recipe adpsgd
    torchrun --standalone --nproc-per-node 4 train/gossip_sgd.py --recipe wagma --group-size 2 --sync-period 10
    torchrun --standalone --nproc-per-node 4 train/gossip_sgd.py --recipe dpwa --interpolation loss
    python train/gossip_sgd.py                                                      # a world of one
    python -m train.gossip_sgd --help

    # CIFAR-10 as a folder of images
    torchrun --standalone --nproc-per-node 4 train/gossip_sgd.py --dataset imagefolder --data-dir data/cifar10 \
        --model resnet20 --epochs 60 --milestones 30 45 --lr 0.2 --weight-decay 5e-4 --checkpoint-every 5
    # ImageNet, on every machine; see job_scripts/
    torchrun --nnodes 4 --nproc-per-node 8 ... train/gossip_sgd.py --dataset imagefolder --data-dir /data/imagenet \
        --model resnet50 --epochs 90 --milestones 30 60 80 --lr 0.1 --warmup-epochs 5 --batch-size 32 --num-workers 8 \
        --amp bfloat16 --nprocs-per-node 8 --peers-per-itr 0:2,30:1 --checkpoint-every 1 --resume auto

Everything goes to --out-dir: one CSV per rank, tensorboard/, checkpoints/, and at the end summary.json, curves.png and
averaged_model.safetensors (train/export.py says how to load it). The last line on standard output is
`averaged model: test accuracy NN.NN %`.

SIGTERM or SIGUSR1 to any training process: at the next iteration all ranks write a checkpoint and leave with code 75;
start the same command again with --resume auto. torchrun itself returns 1 then, whatever their code, and lists it, 75,
for every process. It passes a SIGTERM of its own on to them and allows them 30 seconds
(TORCH_ELASTIC_SHUTDOWN_TIMEOUT). SIGUSR1 kills it and leaves them behind without it, unless it was started with
`torchrun --signals-to-handle SIGTERM,SIGINT,SIGUSR1`, as job_scripts/launch.sh does: then it passes that on as well. A
resumed run of a synchronous recipe (without --overlap, not osgp, adpsgd, wagma or dpwa) is bit-identical to one that
never stopped; otherwise what is in flight is waited for before a checkpoint, and nothing is lost.

With adpsgd and dpwa ranks share the steps of the run, fast ones taking more; with wagma slow ranks skip rounds. So
"step" in what follows counts the steps per rank of the whole run, and all ranks meet at the end of each epoch and for
each checkpoint, nowhere else.
"""

from __future__ import annotations

import os
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
import tyro
from torch import Tensor
from tqdm import tqdm

# Run by path, Python looks for modules beside this file; they are one level up, where gossip_modules is as well.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import gossip_modules as gm
from train.checkpoint import Checkpoints
from train.config import Config
from train.data import load_data
from train.evaluate import Validation, validate
from train.export import export_model
from train.log import EpochRow, RunLog
from train.meters import Meters
from train.models import MODELS, fingerprint
from train.optim import LearningRate, set_learning_rate, sgd
from train.outputs import EXPORT, clear_outputs
from train.precision import Precision
from train.preemption import EXIT_CODE, StopRequest, ignore_signals
from train.recipes import RECIPES
from train.report import RankResult, write_report
from train.state import TrainingState
from train.world import World, start_world


class Run:
    """One training run, from the model to the picture of its curves."""

    def __init__(self, config: Config, world: World, stop: StopRequest) -> None:
        self.config, self.world, self.stop = config, world, stop
        self.folder = config.run_dir
        self.folder.mkdir(parents=True, exist_ok=True)

        if config.download and world.local_rank != 0:
            world.barrier()  # one process per machine downloads, the others read what it left
        self.data = load_data(config, rank=world.rank, world_size=world.size)
        if config.download and world.local_rank == 0:
            world.barrier()

        torch.manual_seed(config.seed)
        module = MODELS[config.model](self.data.train.num_channels, self.data.train.num_classes)
        self.precision = Precision(world.device, config.amp, config.channels_last)
        module = self.precision.prepare_module(module)
        # From here on ranks differ: dropout must not fall on the same units everywhere.
        torch.manual_seed(config.seed * world.size + world.rank)
        self.wrapper = RECIPES[config.recipe].wrap(module, config, world, self.data)
        self.meters = Meters(world.device)
        self.state = TrainingState(
            self.wrapper,
            sgd(module, momentum=config.momentum, nesterov=config.nesterov, weight_decay=config.weight_decay),
            self.precision.make_scaler(),
            self.meters,
            world.device,
        )
        self.pace = RECIPES[config.recipe].make_pace(self.state, config, world, stop)
        self.learning_rate = LearningRate(
            config.lr,
            global_batch=config.batch_size * world.size,
            steps_per_epoch=self.data.steps_per_epoch,
            warmup_epochs=config.warmup_epochs,
            milestones=config.milestones,
            factor=config.milestone_factor,
        )
        self.last_saved_step = -1
        self.checkpoints = Checkpoints(
            self.folder / "checkpoints",
            world,
            {
                "world_size": world.size,
                "model_fingerprint": fingerprint(module),
                "steps_per_epoch": self.data.steps_per_epoch,
                **config.identity,
            },
            settings=config.settings,
            keep_last=config.keep_last,
        )
        self.resume()
        self.batches = iter(self.data.train_stream(self.state.step))
        self.log = RunLog(self.folder, rank=world.rank, step=self.position)

    @property
    def position(self) -> int:
        """Optimizer steps per rank that the run has taken; see [Note: Position]."""
        return self.pace.position

    def train(self) -> int:
        """Train, report and return the exit code of the process."""
        config, world = self.config, self.world
        self.log.print(
            f"{RECIPES[config.recipe].title}: {config.model} on {config.dataset}, {world.size} ranks, "
            f"{world.device.type}, {world.backend}, {self.data.steps_per_epoch} steps per epoch, "
            f"from step {self.position}"
        )
        validation: Validation | None = None
        self.wrapper.train()
        for epoch in range(self.position // self.data.steps_per_epoch, config.epochs):
            if not self.train_epoch(epoch):
                self.log.print(f"told to stop: checkpoint of step {self.position} written; go on with --resume auto")
                return EXIT_CODE
            is_last = epoch + 1 == config.epochs
            validation = self.validate() if is_last or (epoch + 1) % config.validate_every == 0 else None
            stats, last_rate = self.wrapper.comm_stats(), self.learning_rate(self.position - 1)
            row = EpochRow.of(epoch + 1, self.position, self.state.step, last_rate, self.meters, stats, validation)
            self.log.epoch(row)
            self.meters.start_epoch()
            is_due = config.checkpoint_every > 0 and (epoch + 1) % config.checkpoint_every == 0
            is_due |= config.checkpoint_every_steps > 0 and self.position % config.checkpoint_every_steps == 0
            if is_due or (is_last and config.checkpoint_every_steps + config.checkpoint_every > 0):
                self.save(validation.averaged_accuracy_percent if validation else None)
        self.report(validation or self.validate())
        return 0

    def train_epoch(self, epoch: int) -> bool:
        """Train to the end of `epoch`; False: told to stop before, with a checkpoint written."""
        num_steps, every = self.data.steps_per_epoch, self.config.checkpoint_every_steps
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
        first = (boundary - 1) // self.data.steps_per_epoch * self.data.steps_per_epoch  # of the epoch
        while (position := self.pace.claim(boundary)) is not None:
            if heeds_stop and self.pace.should_stop():
                return True
            waiting = time.perf_counter()
            images, labels = next(self.batches)
            self.meters.data_seconds += time.perf_counter() - waiting
            self.train_step(images, labels, learning_rate=self.learning_rate(position))
            bar.update(self.position - first - bar.n)
            if self.state.step % self.config.log_every == 0:
                if not self.meters.is_finite:
                    self.stop.request()  # not alone: all ranks end where they meet
                self.log.point(self.position, loss=self.meters.loss, learning_rate=self.learning_rate(position))
                bar.set_postfix(loss=f"{self.meters.loss:.3f}")
        return False

    def train_step(self, images: Tensor, labels: Tensor, *, learning_rate: float) -> None:
        """One optimizer step on a batch; only the last micro-batch gossips, or reduces gradients."""
        num_parts = self.config.accumulation_steps
        losses: list[Tensor] = []
        set_learning_rate(self.state.optimizer, learning_rate)
        images, labels = self.precision.prepare(images), self.precision.prepare(labels)
        for index, (x, y) in enumerate(zip(images.chunk(num_parts), labels.chunk(num_parts), strict=True)):
            with nullcontext() if index == num_parts - 1 else self.wrapper.no_sync():
                with self.precision.autocast():
                    outputs = self.wrapper(x)
                    loss = F.cross_entropy(outputs, y, label_smoothing=self.config.label_smoothing)
                self.state.scaler.scale(loss / num_parts).backward()
            self.meters.update(outputs, y, loss)
            losses.append(loss.detach())
        if self.config.weighs_losses and isinstance(self.wrapper, gm.PairwiseDataParallel):
            self.wrapper.report_loss(torch.stack(losses).mean().item())
        self.state.scaler.step(self.state.optimizer)
        self.state.scaler.update()
        self.state.optimizer.zero_grad(set_to_none=True)
        self.state.step += 1

    def validate(self) -> Validation:
        """Collective: accuracy of this rank's model and of the averaged one."""
        return validate(self.wrapper, self.data, self.precision, control=self.world.control)

    def save(self, test_accuracy_percent: float | None = None) -> None:
        """Collective: write a checkpoint of the current position, unless there is one."""
        if self.position == self.last_saved_step:
            return
        self.wrapper.settle()
        self.checkpoints.save(self.position, self.state.state_dict(), test_accuracy_percent=test_accuracy_percent)
        self.last_saved_step = self.position

    def resume(self) -> None:
        """Collective: go on from the checkpoint that --resume names, if any; clear away what another run left."""
        path = self.checkpoints.choose(self.config.resume)
        if path is not None:
            state = self.checkpoints.load(path, keys=TrainingState.KEYS)
            self.world.on_every_rank(lambda: self.state.load_state_dict(state))
        self.pace.meet(is_told_to_stop=False)
        if path is not None:
            self.checkpoints.set_aside_after(self.position)
        if path is None or path.parent.resolve() != self.checkpoints.folder.resolve():
            clear_outputs(self.folder, self.world)
        else:
            self.last_saved_step = self.position

    def report(self, validation: Validation) -> None:
        """Collective: export the averaged model; on rank 0 write and print the results."""
        result = RankResult.of(validation, self.state.step, self.meters, self.wrapper.comm_stats())
        results = self.world.gather(result)
        with self.wrapper.averaged():
            if self.world.rank == 0:
                export_model(
                    self.wrapper.module,
                    self.folder / EXPORT,
                    metadata={"model": self.config.model, "dataset": self.config.dataset, "recipe": self.config.recipe},
                )
        if self.world.rank == 0:
            write_report(self.folder, self.config, validation, results)

    def finish(self) -> None:
        """Collective, before `close`: leave no message on its way, and come to say goodbye together."""
        self.pace.drain()
        self.world.barrier()

    def close(self) -> None:
        """End threads and files; idempotent."""
        self.log.close()
        self.wrapper.close()


def main(config: Config) -> int:
    """Run `config` in this process, one rank of a torchrun job or alone, and return its exit code."""
    torch.set_num_threads(config.num_threads)
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA starts
        torch.use_deterministic_algorithms(True)
    world = start_world(config)
    try:
        # Never closed: the handlers are to outlive this function, see StopRequest.
        run = Run(config, world, StopRequest())
        try:
            exit_code = run.train()
            run.finish()
            return exit_code
        finally:
            run.close()
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    exit_code = main(tyro.cli(Config, description=__doc__))
    ignore_signals()
    sys.exit(exit_code)
