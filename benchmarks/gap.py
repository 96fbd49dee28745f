"""The gap between gossip and all-reduce at equal samples, and its causes: one change at a time, in the Lab.

    .venv/bin/python -m benchmarks.gap --task language --jobs 2 --output benchmarks/results/gap.csv
    .venv/bin/python -m benchmarks.gap --pack /path/to/cifar10 --data runs/cifar16.npz
    .venv/bin/python -m benchmarks.gap --task images --data runs/cifar16.npz --device cuda --jobs 12

language: a decoder of two layers on the bytes of the sources of Python's standard library, by AdamW, eight workers with
eight sequences of 64 bytes each. images: three convolutions on CIFAR-10 at 16 pixels, by SGD with momentum, 8 or 25
workers with 16 images each. `--pack` writes the npz file of them from train/ and test/ with a folder per class.

The learning rate rises in the first tenth of the steps and falls linearly to zero. Its highest value is tuned for each
change alike: the first seed trains with each of `--rates`, and on while the best is at an end; the other seeds take the
best rate. Models are compared on a validation split for that. All figures of the page are of a test split that no
choice has seen.

A run that has a row is not repeated: the same command goes on. `--minutes` bounds the time; no run begins after it.
"""

from __future__ import annotations

import argparse
import fcntl
import math
import multiprocessing
import sysconfig
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from benchmarks.record import append_row, command, rows_in
from gossip_modules import AccumAdam, DiLoCo, GossipAdamW, LocalSGD, QGDSGDm, SparseLoCo
from gossip_modules.lab import Compute, LabPlan, LabTask, Network, Setting
from gossip_modules.lab.comparison import LabTraining
from gossip_modules.schedule import Schedule

COLUMNS = (
    "task", "change", "workers", "batch", "steps", "rate", "run_seed", "validation", "test", "test_own", "distance",
    "curve", "by", "device", "seconds",
)  # fmt: skip
KEY = ("task", "change", "workers", "batch", "steps", "rate", "run_seed")
RATES = {"language": (0.001, 0.002, 0.004, 0.008, 0.016), "images": (0.025, 0.05, 0.1, 0.2)}
STEPS = {"language": 320, "images": 800}
NUM_POINTS = 16
"""Parts of a training, after each of which the averaged model is measured."""
LENGTH, TEXT_BYTES = 64, 4_500_000
HELD, NUM_TRAIN = (4000, 8000), 30_000  # images of the validation and the test split, and of the training split


class Probe(torch.optim.Optimizer):
    """AdamW with other moments, for all workers at once: to tell causes apart, and to try remedies.

    Args:
        params: parameters with a leading dimension of the workers.
        lr: the learning rate.
        first, second: whether the first and the second moments are those of the mean gradient of all workers, or each
            worker's own. No cluster has the mean gradient for free.
        every: the steps from one update of the second moments to the next.
    """

    is_elementwise = True

    def __init__(self, params: Any, lr: float, **settings: Any) -> None:
        usual = {"first": False, "second": False, "every": 1}
        super().__init__(params, {"lr": lr, **usual, **settings})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Step all workers."""
        for group in self.param_groups:
            for x in group["params"]:
                self._step(x, group)

    def _step(self, x: Tensor, group: dict[str, Any]) -> None:
        state, b1, b2, own = self.state[x], 0.9, 0.95, x.grad
        assert own is not None
        if not state:
            state.update({name: torch.zeros_like(x) for name in ("m", "v", "own")}, step=0, updates=0)
        mean = own.mean(0, keepdim=True).expand_as(x)
        first, second = (mean if group[name] else own for name in ("first", "second"))
        state["step"] += 1
        m = state["m"].lerp_(first, 1 - b1) / (1 - b1 ** state["step"])
        if (state["step"] - 1) % group["every"] == 0:
            state["updates"] += 1
            state["v"].mul_(b2).addcmul_(second, second, value=1 - b2)
        v = state["v"] / (1 - b2 ** state["updates"])
        state["own"].mul_(b2).addcmul_(own, own, value=1 - b2)
        if group["every"] > 1:  # the mean of n gradients has a square of at least 1/n of the mean square
            torch.maximum(v, state["own"] / (1 - b2 ** state["step"]) / len(x), out=v)
        x.mul_(1 - group["lr"] * 0.01).addcdiv_(m, v.sqrt_().add_(1e-8), value=-group["lr"])


class MixedMomentum(torch.optim.Optimizer):
    """SGD with momentum 0.9, which is mixed as SGP mixes models, for all workers at once.

    Args:
        params: parameters with a leading dimension of the workers.
        lr: the learning rate.
    """

    is_elementwise = True

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Step all workers."""
        for group in self.param_groups:
            for x in group["params"]:
                assert x.grad is not None
                state = self.state[x]
                if not state:
                    state.update(step=0, m=torch.zeros_like(x))
                shift = 2 ** (state["step"] % math.ceil(math.log2(len(x))))
                state["step"] += 1
                state["m"].lerp_(state["m"].roll(shift, 0), 0.5).mul_(0.9).add_(x.grad).add_(x, alpha=5e-4)
                x.add_(state["m"], alpha=-group["lr"])


def adamw(b2: float = 0.95) -> Callable[[Any, float], torch.optim.Optimizer]:
    """Return AdamW with this b2."""
    return lambda p, lr: torch.optim.AdamW(p, lr=lr, betas=(0.9, b2), weight_decay=0.01)


def accum(steps: int, betas: tuple[float, float] = (0.9, 0.95)) -> Callable[[Any, float], torch.optim.Optimizer]:
    """Return AccumAdam over so many steps."""
    return lambda p, lr: AccumAdam(p, lr=lr, betas=betas, weight_decay=0.01, accum_steps=steps)


def probe(**settings: Any) -> Callable[[Any, float], torch.optim.Optimizer]:
    """Return AdamW with other moments."""
    return lambda p, lr: Probe(p, lr, **settings)


def gossip_adamw(p: Any, lr: float) -> torch.optim.Optimizer:
    """Return GossipAdamW."""
    return GossipAdamW(p, lr=lr, num_ranks=8)


def sgd(p: Any, lr: float) -> torch.optim.Optimizer:
    """Return SGD with momentum."""
    return torch.optim.SGD(p, lr=lr, momentum=0.9, weight_decay=5e-4)


@dataclass(frozen=True)
class Variation:
    """One training: all-reduce or gossip, with at most one thing that is not usual.

    Args:
        method: a method for the Lab.
        optimizer: makes the optimizer, given parameters and rate.
        batch: sequences or images of a worker in a step.
        settings: further arguments of `LabPlan`.
        rounds: whether messages are rounded to bfloat16, of SGP with one peer, whose weights are 1/2.
    """

    method: Any
    optimizer: Callable[[Any, float], torch.optim.Optimizer]
    batch: int
    settings: tuple[tuple[str, Any], ...] = ()
    rounds: bool = False

    @property
    def plan(self) -> LabPlan:
        """The method with its settings."""
        return LabPlan.of(self.method, **dict(self.settings))


def language_changes() -> dict[str, Variation]:
    """Return the trainings of language by name."""
    usual = {
        "all-reduce": "ar",
        "parameters averaged in each step": LocalSGD(sync_every=1),
        "SGP": "sgp",
        "D-PSGD": "dpsgd",
        "local SGD, 4": LocalSGD(sync_every=4),
        "local SGD, 16": LocalSGD(sync_every=16),
    }
    changes = {name: Variation(method, adamw(), 8) for name, method in usual.items()}
    changes["Overlap SGP"] = Variation("sgp", adamw(), 8, (("overlap", True),))
    changes["SGP, 2 peers"] = Variation("sgp", adamw(), 8, (("peers_per_itr", 2),))
    changes["SGP, each 4th round exact"] = Variation("sgp", adamw(), 8, (("schedule", Schedule(average_every=4)),))
    for steps in (2, 4, 8, 16):
        changes[f"SGP, AccumAdam {steps}"] = Variation("sgp", accum(steps), 8)
    changes["Overlap SGP, AccumAdam 8"] = Variation("sgp", accum(8), 8, (("overlap", True),))
    changes["all-reduce, AccumAdam 8"] = Variation("ar", accum(8), 8)
    changes["parameters averaged in each step, AccumAdam 8"] = Variation(LocalSGD(sync_every=1), accum(8), 8)
    changes["SGP, AccumAdam 4, betas to the power of 4"] = Variation("sgp", accum(4, (0.656, 0.815)), 8)
    mean = probe(second=True)
    changes["SGP, second moments of the mean gradient"] = Variation("sgp", mean, 8)
    changes["SGP, first moments of the mean gradient"] = Variation("sgp", probe(first=True), 8)
    changes["SGP, both moments of the mean gradient"] = Variation("sgp", probe(first=True, second=True), 8)
    for every in (4, 8, 16):
        rare = probe(second=True, every=every)
        changes[f"SGP, second moments of the mean gradient of each {every}th step"] = Variation("sgp", rare, 8)
    for name, method, settings in (
        ("SGP", "sgp", ()),
        ("SGP, 2 peers", "sgp", (("peers_per_itr", 2),)),
        ("SGP, each 4th round exact", "sgp", (("schedule", Schedule(average_every=4)),)),
        ("Overlap SGP", "sgp", (("overlap", True),)),
        ("Overlap SGP, 2 peers", "sgp", (("overlap", True), ("peers_per_itr", 2))),
        ("D-PSGD", "dpsgd", ()),
        ("parameters averaged in each step", LocalSGD(sync_every=1), ()),
        ("local SGD, 4", LocalSGD(sync_every=4), ()),
        ("local SGD, 16", LocalSGD(sync_every=16), ()),
        ("SparseLoCo, 4", SparseLoCo(sync_every=4), ()),
        ("SparseLoCo, 16", SparseLoCo(sync_every=16), ()),
        ("DiLoCo, 16, outer momentum 0.5", DiLoCo(sync_every=16, momentum=0.5), ()),
    ):
        changes[f"{name}, GossipAdamW"] = Variation(method, gossip_adamw, 8, settings)
    changes["SGP, bfloat16 messages, GossipAdamW"] = Variation("sgp", gossip_adamw, 8, rounds=True)
    changes["SparseLoCo, 4"] = Variation(SparseLoCo(sync_every=4), adamw(), 8)
    changes["local SGD, 8"] = Variation(LocalSGD(sync_every=8), adamw(), 8)
    for name, method in (("all-reduce", "ar"), ("SGP", "sgp")):
        changes[f"{name}, b2 = 0.999"] = Variation(method, adamw(0.999), 8)
        for batch in (2, 32):
            changes[f"{name}, batches of {batch}"] = Variation(method, adamw(), batch)
    return changes


def image_changes() -> dict[str, Variation]:
    """Return the trainings of images by name."""
    changes = {
        name: Variation(method, sgd, 16)
        for name, method in {
            "all-reduce": "ar",
            "SGP": "sgp",
            "D-PSGD": "dpsgd",
            "local SGD, 4": LocalSGD(sync_every=4),
            "local SGD, 16": LocalSGD(sync_every=16),
            "QG-DSGDm": "qgdsgdm",
        }.items()
    }
    changes["Overlap SGP"] = Variation("sgp", sgd, 16, (("overlap", True),))
    for peers in (2, 4):
        changes[f"SGP, {peers} peers"] = Variation("sgp", sgd, 16, (("peers_per_itr", peers),))
    for period in (4, 8, 16):
        exact = ("schedule", Schedule(average_every=period))
        changes[f"SGP, each {period}th round exact"] = Variation("sgp", sgd, 16, (exact,))
    changes["SGP, momentum mixed too"] = Variation("sgp", MixedMomentum, 16)
    changes["Overlap SGP, momentum mixed too"] = Variation("sgp", MixedMomentum, 16, (("overlap", True),))
    changes["SGP, 2 peers, momentum mixed too"] = Variation("sgp", MixedMomentum, 16, (("peers_per_itr", 2),))
    changes["DecentLaM"] = Variation("decentlam", sgd, 16)
    changes["Overlap SGP, 2 peers"] = Variation("sgp", sgd, 16, (("overlap", True), ("peers_per_itr", 2)))
    changes["QG-DSGDm, one peer"] = Variation(QGDSGDm(), sgd, 16, (("graph", "bipartite-exponential"),))
    for name in ("all-reduce", "SGP"):
        changes[f"{name}, batches of 64"] = Variation(changes[name].method, sgd, 64)
    return changes


class ByteDecoder(nn.Module):
    """A decoder of two layers, width 64, with 120,000 parameters: scores of the next byte."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(256, 64), nn.Embedding(LENGTH, 64)
        layers = [
            nn.TransformerEncoderLayer(64, 4, 256, 0.0, "gelu", batch_first=True, norm_first=True) for _ in range(2)
        ]
        self.layers, self.norm = nn.ModuleList(layers), nn.LayerNorm(64)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(LENGTH))
        nn.init.normal_(self.words.weight, std=0.02)
        nn.init.normal_(self.places.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the scores [N, length, 256] of tokens [N, length]."""
        x = self.words(tokens) + self.places.weight
        for layer in self.layers:
            x = layer(x, self.mask)
        return F.linear(self.norm(x), self.words.weight)


class Convolutions(nn.Module):
    """Three convolutions and a linear layer, without normalisation, for images of 16 pixels."""

    def __init__(self) -> None:
        super().__init__()
        sizes = ((3, 32), (32, 64), (64, 64))
        convolutions = [nn.Conv2d(a, b, 3, padding=1) for a, b in sizes]
        parts = [part for c in convolutions for part in (c, nn.ReLU(), nn.MaxPool2d(2))]
        self.layers = nn.Sequential(*parts, nn.Flatten(), nn.Linear(256, 10))

    def forward(self, images: Tensor) -> Tensor:
        """Return the scores [N, 10] of images [N, 3, 16, 16]."""
        return self.layers(images)


class Splits:
    """What workers learn, and the two splits that models are measured on.

    Args:
        task: "language" or "images".
        path: the npz file of images.
        device: of the models.
    """

    def __init__(self, task: str, path: Path | None, device: str) -> None:
        self.task, self.device = task, device
        if task == "language":
            self.tokens = python_sources()
            num = len(self.tokens)
            self.train, *self.held = self.tokens.split([num - 2 * (num // 20), num // 20, num // 20])
            self.splits = [self._even(part) for part in self.held]
        else:
            with np.load(str(path)) as file:
                images = torch.from_numpy(file["images"]).float().div_(127.5).sub_(1)
                labels = torch.from_numpy(file["labels"]).long()
            self.images, self.labels, self.first = images, labels, sum(HELD)
            parts = zip(images.split([*HELD, len(images) - sum(HELD)]), labels.split([*HELD, len(labels) - sum(HELD)]))
            self.splits = [(x.to(device), y.to(device)) for x, y in parts][:2]

    def _even(self, part: Tensor) -> tuple[Tensor, Tensor]:
        starts = torch.linspace(0, len(part) - LENGTH - 1, 512).long()
        rows = part[starts[:, None] + torch.arange(LENGTH + 1)].long().to(self.device)
        return rows[:, :-1], rows[:, 1:]

    def batch(self, size: int) -> Callable[[int, int, torch.Generator], Any]:
        """Return the function that draws batches of this size."""

        def draw(worker: int, step: int, generator: torch.Generator) -> Any:
            if self.task == "language":
                starts = torch.randint(len(self.train) - LENGTH - 1, (size, 1), generator=generator)
                rows = self.train[starts + torch.arange(LENGTH + 1)].long()
                return rows[:, :-1], rows[:, 1:]
            chosen = torch.randint(self.first, len(self.images), (size,), generator=generator)
            return self.images[chosen], self.labels[chosen]

        return draw

    @staticmethod
    def loss(model: nn.Module, batch: Any) -> Tensor:
        """Return the mean cross-entropy."""
        return F.cross_entropy(model(batch[0]).flatten(0, -2), batch[1].flatten())

    @torch.no_grad()
    def score(self, model: nn.Module, split: int) -> float:
        """Return nats per byte, or the error in percent, on the validation split, 0, or the test split, 1."""
        inputs, targets = self.splits[split]
        if self.task == "language":
            return float(self.loss(model, (inputs, targets)))
        return 100 * float((model(inputs).argmax(-1) != targets).float().mean())


def python_sources() -> Tensor:
    """Return bytes of the standard library of this Python, files in an order that is fixed, uint8."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"), key=lambda path: path.name)
    order = np.random.default_rng(0).permutation(len(files))
    text = b"\0".join(files[i].read_bytes() for i in order)
    return torch.frombuffer(bytearray(text[:TEXT_BYTES]), dtype=torch.uint8)


def pack(source: Path, target: Path) -> None:
    """Write images of 16 pixels and labels: validation images and training images of train/, test images of test/."""
    resize, images, labels = v2.Resize((16, 16)), [], []
    for split, counts in (("train", (HELD[0], NUM_TRAIN)), ("test", (HELD[1],))):
        folder = ImageFolder(str(source / split))
        chosen = np.random.default_rng(0).permutation(len(folder))[: sum(counts)]
        pixels = np.stack([np.asarray(resize(folder[i][0])).transpose(2, 0, 1) for i in chosen])
        images.append(np.split(pixels, [counts[0]]))
        labels.append(np.split(np.array(folder.targets)[chosen], [counts[0]]))
    order = ((0, 0), (1, 0), (0, 1))  # validation, test, training
    target.parent.mkdir(parents=True, exist_ok=True)
    all_images, all_labels = (np.concatenate([part[i][j] for i, j in order]) for part in (images, labels))
    np.savez_compressed(target, images=all_images, labels=all_labels)


def round_messages(driver: Any) -> None:
    """Let a driver of SGP with one peer add the error that messages in bfloat16 have: half of it reaches the peer."""
    step = driver.step

    def rounded(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        own = x.clone()
        exchanges = step(x, *args, **kwargs)
        if not torch.equal(own, x):
            message = 2 * x - own
            x.add_(message.bfloat16().float() - message, alpha=0.5)
        return exchanges

    driver.step = rounded


def train(data: Splits, change: Variation, *, workers: int, steps: int, rate: float, seed: int) -> dict[str, Any]:
    """Train once; returns the figures of a row."""
    begin = time.perf_counter()
    model = {"language": ByteDecoder, "images": Convolutions}[data.task]
    warm = steps // 10
    task = LabTask(
        lambda: model().to(data.device),
        data.loss,
        data.batch(change.batch),
        lambda p: change.optimizer(p, rate),
        lambda optimizer: LambdaLR(optimizer, lambda k: min((k + 1) / warm, (steps - k) / (steps - warm))),
    )
    training = LabTraining(change.plan, Setting(workers, None, Compute(0.1), Network("1 Gbit/s"), seed), task)
    if change.rounds:
        round_messages(training.method.driver)
    models, curve = training.models, []
    for z in training.run(steps):
        if training.step % (steps // NUM_POINTS) == 0 and 0 < training.step < steps:
            curve.append(data.score(models.mean_model(z, training.workers), 1))
    z = training.settle()
    own = [data.score(models.mean_model(z[i : i + 1], training.workers[i : i + 1]), 1) for i in range(min(workers, 8))]
    mean = models.mean_model(z, training.workers)
    distance = float((z - z.mean(0)).square().sum(1).mean().sqrt() / z.mean(0).norm())
    return {
        "validation": round(data.score(mean, 0), 4),
        "test": round(data.score(mean, 1), 4),
        "test_own": round(sum(own) / len(own), 4),
        "distance": float(f"{distance:.3g}"),
        "curve": " ".join(f"{score:.3f}" for score in curve),  # of the test split
        "by": models.by,
        "device": torch.cuda.get_device_name() if data.device == "cuda" else "cpu",
        "seconds": round(time.perf_counter() - begin, 1),
    }


class Study:
    """The trainings of one task, resumable.

    Args:
        arguments: of the command line.
    """

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments, self.task, self.end = arguments, arguments.task, time.time() + 60 * arguments.minutes
        self.command = command()  # rows are written by other processes
        self.steps, self.rates = arguments.steps or STEPS[self.task], arguments.rates or RATES[self.task]

    @property
    def changes(self) -> dict[str, Variation]:
        """The trainings by name; made anew, as processes cannot send them to each other."""
        return language_changes() if self.task == "language" else image_changes()

    def jobs(self) -> Iterator[tuple[str, int]]:
        """Yield the changes to train, with their numbers of workers."""
        for workers in self.arguments.workers or ((8,) if self.task == "language" else (8, 25)):
            for name in self.changes:
                if not self.arguments.changes or name in self.arguments.changes:
                    yield name, workers

    def run(self, job: tuple[str, int]) -> None:
        """Tune the rate of a change, and train with all seeds."""
        torch.set_num_threads(1)
        name, workers = job
        data = Splits(self.task, self.arguments.data, self.arguments.device)
        first, *others = self.arguments.seeds
        found = {rate: self.once(data, name, workers, rate, first) for rate in self.rates}
        while not any(math.isnan(value) for value in found.values()):
            best, rates = min(found, key=found.__getitem__), sorted(found)
            is_inside = best not in (rates[0], rates[-1]) or self.arguments.fixed
            if is_inside or len(found) >= len(self.rates) + 3:
                for seed in others:
                    self.once(data, name, workers, best, seed)
                return
            more = best / 2 if best == rates[0] else 2 * best
            found[more] = self.once(data, name, workers, more, first)

    def once(self, data: Splits, name: str, workers: int, rate: float, seed: int) -> float:
        """Train once, if the file has no such row; returns the validation score, NaN if there is no time."""
        change, path = self.changes[name], self.arguments.output
        key = dict(zip(KEY, (self.task, name, workers, change.batch, self.steps, rate, seed), strict=True))
        with path.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            rows = rows_in(path, COLUMNS)
        for column, value in key.items():
            rows = rows[rows[column] == value]
        if len(rows):
            return float(rows.validation.iloc[0])
        if time.time() > self.end:
            return math.nan
        row = {
            "command": self.command,
            **key,
            **train(data, change, workers=workers, steps=self.steps, rate=rate, seed=seed),
        }
        with path.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            append_row(path, row, seed=seed)
        score = row["validation"]
        return score if math.isfinite(score) else math.inf


def main(argv: Sequence[str] | None = None) -> None:
    """Train what has no row yet, print the best of each change."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=("language", "images"), default="language")
    parser.add_argument("--changes", nargs="*", help="names; all by default")
    parser.add_argument("--data", type=Path, help="the npz file of images")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--workers", type=int, nargs="*")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--rates", type=float, nargs="*")
    parser.add_argument("--fixed", action="store_true", help="try no other rates than --rates")
    parser.add_argument("--seeds", type=int, nargs="*", default=(1, 2, 3))
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--minutes", type=float, default=math.inf)
    parser.add_argument("--output", type=Path, default=Path("runs/gap.csv"))
    parser.add_argument("--pack", type=Path, help="a folder of images; writes --data, and trains nothing")
    arguments = parser.parse_args(argv)
    if arguments.pack:
        pack(arguments.pack, arguments.data)
        return
    study = Study(arguments)
    study.arguments.output.parent.mkdir(parents=True, exist_ok=True)
    with multiprocessing.get_context("spawn").Pool(study.arguments.jobs) as pool:
        for _ in pool.imap_unordered(study.run, list(study.jobs()), chunksize=1):
            pass
    rows = rows_in(study.arguments.output, COLUMNS)
    print(pd.DataFrame(rows[rows.task == study.task].drop(columns=list(rows)[:7])).to_string(index=False))


if __name__ == "__main__":
    main()
