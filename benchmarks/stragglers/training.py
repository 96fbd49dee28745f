"""One training run among stragglers: the loop of a rank, and what its record says about speed and accuracy."""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from benchmarks.stragglers.methods import (
    BASELINE,
    BOUND,
    NUM_CLASSES,
    STRAGGLER_METHODS,
    RankContext,
    accuracy_percent,
    digits,
    learning_rate,
    make_optimizer,
    read,
    write,
)
from gossip_modules import AllReduceDataParallel
from gossip_modules.extend import GossipWrapper
from train.tasks.images.models import small_cnn

SETTINGS = {
    "undisturbed": "all ranks alike",
    "one-slow": "one rank {factor:g} times slower",
    "two-random": "two random ranks +{extra:.0f} ms at each step",
}
NUM_WARM_UP_STEPS = 5


@dataclass(frozen=True)
class StragglerRun:
    """A training run.

    Args:
        method: of STRAGGLER_METHODS.
        setting: of SETTINGS.
        seed: of the first model, the batches and the delays.
        num_ranks: processes.
        num_rounds: optimizer steps of the run, divided by num_ranks.
        step_seconds: sleep of each step, the emulated accelerator.
        slow_factor: in "one-slow" the last rank sleeps so many times longer.
        extra_seconds: in "two-random" two ranks sleep so much longer.
        mark_seconds: time between the models that are kept, to be evaluated after the run.
        batch_size: images per rank and step.
        peak_lr: highest learning rate.
    """

    method: str
    setting: str
    seed: int
    num_ranks: int = 8
    num_rounds: int = 200
    step_seconds: float = 0.05
    slow_factor: float = 5.0
    extra_seconds: float = 0.32
    mark_seconds: float = 0.25
    batch_size: int = 16
    peak_lr: float = 0.1

    def sleep_seconds(self, rank: int, step: int) -> float:
        """How long the emulated accelerator of `rank` takes for its own step `step`, a pure function."""
        if self.setting == "one-slow":
            return self.step_seconds * (self.slow_factor if rank == self.num_ranks - 1 else 1.0)
        if self.setting == "two-random":
            late = np.random.default_rng([self.seed, step]).choice(self.num_ranks, 2, replace=False)
            return self.step_seconds + self.extra_seconds * (rank in late)
        return self.step_seconds

    @property
    def fast_ranks(self) -> range:
        """Ranks whose speed is reported: all that are not slowed for good."""
        return range(self.num_ranks - (self.setting == "one-slow"))


def train(place: RankContext, run: StragglerRun) -> dict[str, Any]:
    """Train on one rank.

    Returns:
        stamps: time.monotonic() at the start and at the end of each step, float64 [own steps + 1]; marks: the trained
        tensors at the first step end after each mark_seconds, float32 [num_marks, d]; final: the average of all ranks'
        models, float32 [d]; wait_seconds and bytes_sent, NaN where the method does not say.
    """
    images, labels, _, _ = digits()
    torch.manual_seed(run.seed)
    model = small_cnn(1, NUM_CLASSES)
    _warm_up(model, images[: run.batch_size], labels[: run.batch_size])
    wrapped = STRAGGLER_METHODS[run.method].wrap(model, place)
    optimizer = make_optimizer(model, run.peak_lr)
    generator = torch.Generator().manual_seed(run.seed * 1000 + place.rank)
    pace = STRAGGLER_METHODS[run.method].pace(place, run.num_rounds)

    place.group.barrier().wait()
    start = time.monotonic()
    stamps, marks = [start], [read(model)]
    while not pace.is_over:
        optimizer.param_groups[0]["lr"] = learning_rate(pace.share, run.peak_lr)
        batch = torch.randint(len(labels), (run.batch_size,), generator=generator)
        loss = cross_entropy(wrapped(images[batch]), labels[batch])
        pace.gossiped(wrapped)
        time.sleep(run.sleep_seconds(place.rank, pace.num_own_steps))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        pace.stepped()
        stamps.append(time.monotonic())
        while stamps[-1] - start >= len(marks) * run.mark_seconds:
            marks.append(read(model))

    stats = {"wait_seconds": float("nan"), "bytes_sent": float("nan")}
    if isinstance(wrapped, GossipWrapper | AllReduceDataParallel):
        stats = {name: wrapped.comm_stats()[name] for name in stats}
        with wrapped.averaged():
            final = read(model)
        wrapped.close()
    else:
        final = read(model)
    return {"stamps": torch.tensor(stamps, dtype=torch.float64), "marks": torch.stack(marks), "final": final, **stats}


def _warm_up(model: nn.Module, images: Tensor, labels: Tensor) -> None:
    """The first backward of a process is slow; take it on a copy."""
    cross_entropy(copy.deepcopy(model)(images), labels).backward()


def rates(stamps: Sequence[Tensor]) -> list[float]:
    """Own steps per second of each rank while all ranks train, from the last rank's warm-up to the first rank's end.

    Args:
        stamps: of all ranks, see `train`.

    Returns:
        A rate per rank; NaN for a rank with less than two step ends in that time.
    """
    start = max(float(x[min(NUM_WARM_UP_STEPS, len(x) // 4)]) for x in stamps)
    end = min(float(x[-1]) for x in stamps)
    values = []
    for x in stamps:
        inside = x[(x >= start) & (x <= end)]
        values.append((len(inside) - 1) / float(inside[-1] - inside[0]) if len(inside) > 1 else float("nan"))
    return values


def curve(records: Sequence[dict[str, Any]], run: StragglerRun) -> list[tuple[float, float]]:
    """Seconds since the start and test accuracy, in percent, of the averaged model at each mark and at the end."""
    _, _, images, labels = digits()
    model = small_cnn(1, NUM_CLASSES)

    def accuracy(values: Tensor) -> float:
        write(model, values)
        return accuracy_percent(model, images, labels)

    points = []
    for mark in range(max(len(record["marks"]) for record in records)):
        # A rank that has ended keeps the model that it had.
        models = [record["marks"][min(mark, len(record["marks"]) - 1)] for record in records]
        points.append((mark * run.mark_seconds, accuracy(torch.stack(models).mean(0))))
    return [*points, (train_seconds(records), accuracy(records[0]["final"]))]


def train_seconds(records: Sequence[dict[str, Any]]) -> float:
    """From the first rank's start to the last rank's last step."""
    first = min(float(record["stamps"][0]) for record in records)
    return max(float(record["stamps"][-1]) for record in records) - first


def seconds_to(points: Sequence[tuple[float, float]], accuracy: float) -> float:
    """When the curve first reaches `accuracy`; NaN if it never does."""
    return next((seconds for seconds, value in points if value >= accuracy), float("nan"))


def row_of(
    run: StragglerRun, records: list[dict[str, Any]], curve: list[tuple[float, float]], *, target_percent: float
) -> dict[str, Any]:
    """A line of stragglers.csv: what a run says."""
    speeds = pd.Series(rates([record["stamps"] for record in records]))
    return {
        "setting": run.setting,
        "method": run.method,
        "title": STRAGGLER_METHODS[run.method].title,
        "seed": run.seed,
        "steps_per_second": speeds[list(run.fast_ranks)].mean(),
        "seconds_to_target": seconds_to(curve, target_percent),
        "accuracy_percent": curve[-1][1],
        "train_seconds": train_seconds(records),
        "num_steps": sum(len(record["stamps"]) - 1 for record in records),
        "wait_seconds": sum(record["wait_seconds"] for record in records) / len(records),
        "sent_megabytes": sum(record["bytes_sent"] for record in records) / len(records) / 1e6,
    }


def markdown(rows: pd.DataFrame, *, target_percent: float) -> str:
    """The table: means over seeds, a line per setting and method.

    Args:
        rows: of `row_of`.
        target_percent: accuracy of its column seconds_to_target.
    """
    means = rows.groupby(["setting", "method"]).mean(numeric_only=True)
    rates, accuracies = means["steps_per_second"], means["accuracy_percent"]
    lines = [
        "| setting | method | steps/s of fast ranks | of undisturbed | of no communication "
        f"| s to {target_percent:g} % | final accuracy, % | to {STRAGGLER_METHODS[BASELINE].title}, points "
        "| steps, all ranks | s |",
        "|---|---|" + "---:|" * 8,
    ]

    def share(rate: float, of: tuple[str, str]) -> str:
        return f"{100 * rate / rates[of]:.1f} %" if of in rates else ""

    for setting in (name for name in SETTINGS if name in set(rows["setting"])):
        for method in (name for name in STRAGGLER_METHODS if (setting, name) in means.index):
            mean, rate = means.loc[setting, method], rates[setting, method]
            kept, bound = share(rate, ("undisturbed", method)), share(rate, (setting, BOUND))
            gap = (
                f"{mean.accuracy_percent - accuracies[setting, BASELINE]:+.2f}" if (setting, BASELINE) in rates else ""
            )
            accuracy = f"{mean.seconds_to_target:.1f} | {mean.accuracy_percent:.2f} | {gap}"
            if method == BOUND:
                accuracy = " |  | "  # its models are not meant to agree
            lines.append(
                f"| {setting} | {STRAGGLER_METHODS[method].title} | {rate:.2f} | {kept} | {bound} | {accuracy} "
                f"| {mean.num_steps:.0f} | {mean.train_seconds:.1f} |"
            )
    return "\n".join(lines)
