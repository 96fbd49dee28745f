"""Pairwise averaging while workers are killed and come back: pauses of the others, contact, accuracy in the end."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from benchmarks.stragglers.methods import (
    NUM_CLASSES,
    accuracy_percent,
    digits,
    learning_rate,
    make_optimizer,
    read,
    write,
)
from benchmarks.stragglers.processes import Processes, free_addresses
from gossip_modules import PairwiseDataParallel
from train.tasks.images.models import small_cnn

START_SECONDS = 10.0
"""Time for all processes to begin."""
PATIENCE_SECONDS = 60.0
"""Time for them to end."""


@dataclass(frozen=True)
class Death:
    """A worker is killed, and started again, at these shares of the training."""

    name: str
    killed_at: float
    restarted_at: float


@dataclass(frozen=True)
class ElasticPlan:
    """What all workers of a run know.

    Args:
        peers: addresses by name.
        end: of the training, of time.monotonic(), which all processes of a machine share.
        seconds: that it lasts.
        step_seconds: sleep of each step, the emulated accelerator.
        seed: of the first model and the batches.
        batch_size: images per worker and step.
        peak_lr: highest learning rate.
    """

    peers: Mapping[str, str]
    end: float
    seconds: float
    step_seconds: float
    seed: int
    batch_size: int = 16
    peak_lr: float = 0.1


def train_until_the_end(name: str, life: int, plan: ElasticPlan) -> dict[str, Any]:
    """One life of a worker: train until the time is over, and serve until all have.

    Returns:
        born: when the wrapper was made; stamps: the start and the end of each step, float64 [own steps + 1];
        merged_with: the peer whose model the step before each of these times has merged, "" for none; final: the
        trained tensors.
    """
    images, labels, _, _ = digits()
    torch.manual_seed(plan.seed)
    model = small_cnn(1, NUM_CLASSES)
    born = time.monotonic()
    wrapped = PairwiseDataParallel(model, name=name, peers=plan.peers, seed=plan.seed)
    optimizer = make_optimizer(model, plan.peak_lr)
    generator = torch.Generator().manual_seed(1000 * plan.seed + 10 * list(plan.peers).index(name) + life)
    time.sleep(max(plan.end - plan.seconds - time.monotonic(), 0))  # nobody begins before the others can
    stamps, merged_with, num_rounds = [time.monotonic()], [""], 0.0
    while stamps[-1] < plan.end:
        share = 1 - (plan.end - stamps[-1]) / plan.seconds
        optimizer.param_groups[0]["lr"] = learning_rate(share, plan.peak_lr)
        batch = torch.randint(len(labels), (plan.batch_size,), generator=generator)
        loss = cross_entropy(wrapped(images[batch]), labels[batch])
        time.sleep(plan.step_seconds)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        stamps.append(time.monotonic())
        before, num_rounds = num_rounds, wrapped.comm_stats()["num_rounds"]
        merged_with.append(wrapped.last_peer or "" if num_rounds > before else "")
    final = read(model)
    wrapped.close()
    return {
        "born": born,
        "stamps": torch.tensor(stamps, dtype=torch.float64),
        "merged_with": merged_with,
        "final": final,
    }


def run(num_workers: int, deaths: Sequence[Death], *, seconds: float, step_seconds: float, seed: int) -> dict[str, Any]:
    """Train with all `deaths`; the results of all last lives, by name.

    Raises:
        RuntimeError: a worker ended by itself before the end.
    """
    names = [f"worker{rank}" for rank in range(num_workers)]
    peers = dict(zip(names, free_addresses(num_workers)))
    start = time.monotonic() + START_SECONDS
    plan = ElasticPlan(peers, start + seconds, seconds, step_seconds, seed)
    events = sorted(
        [(death.killed_at, "kill", death.name) for death in deaths]
        + [(death.restarted_at, "restart", death.name) for death in deaths]
    )
    with tempfile.TemporaryDirectory() as folder:
        processes = Processes(Path(folder))
        for name in names:
            processes.start(name, train_until_the_end, name, 0, plan)
        for share, what, name in events:
            time.sleep(max(start + share * seconds - time.monotonic(), 0))
            print(f"   at {share:.0%}: {what} {name}", flush=True)
            if what == "kill":
                processes.kill(name)
            else:
                processes.start(name, train_until_the_end, name, 1, plan)
        return processes.join(max(plan.end - time.monotonic(), 0) + PATIENCE_SECONDS)


def longest_pause(record: Mapping[str, Any]) -> float:
    """Seconds of a worker's longest step, the first one left out."""
    return float(record["stamps"][1:].diff().max())


def rounds_to_contact(name: str, born: float, others: Sequence[Mapping[str, Any]]) -> float:
    """Rounds that each of the others took until it had merged a worker's model; the most of any; inf if one never did.

    Args:
        name: of the worker that came back,
        born: and when.
        others: records of those that have lived through.
    """

    def rounds(record: Mapping[str, Any]) -> float:
        peers = [peer for at, peer in zip(record["stamps"].tolist(), record["merged_with"]) if at > born]
        return peers.index(name) + 1.0 if name in peers else float("inf")

    return max(rounds(record) for record in others)


def accuracies(records: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """Test accuracy of each worker's last model, in percent."""
    _, _, images, labels = digits()
    model = small_cnn(1, NUM_CLASSES)

    def accuracy(values: Tensor) -> float:
        write(model, values)
        return accuracy_percent(model, images, labels)

    return {name: accuracy(record["final"]) for name, record in records.items()}


def rows_of(seed: int, records: Mapping[str, Mapping[str, Any]], killed: set[str]) -> list[dict[str, Any]]:
    """Lines of elastic.csv, one per worker; rounds to contact only of those in `killed`."""
    survivors = [record for name, record in records.items() if name not in killed]
    percents = accuracies(records)
    return [
        {
            "seed": seed,
            "has_deaths": bool(killed),
            "worker": name,
            "is_restarted": name in killed,
            "accuracy_percent": percents[name],
            "longest_step_seconds": longest_pause(record),
            "rounds_to_contact": rounds_to_contact(name, record["born"], survivors) if name in killed else float("nan"),
        }
        for name, record in records.items()
    ]


def markdown(rows: pd.DataFrame) -> str:
    """The table, over seeds and workers of a kind: mean and least accuracy, longest step, latest contact.

    Args:
        rows: of `rows_of`.
    """
    kinds = {"undisturbed run": ~rows["has_deaths"]}
    kinds["survivors"] = rows["has_deaths"] & ~rows["is_restarted"]
    kinds["restarted"] = rows["is_restarted"]
    lines = [
        "| workers | accuracy, % | least | longest step, s | rounds until each survivor has merged it, at most |",
        "|---|---:|---:|---:|---:|",
    ]
    for kind, chosen in kinds.items():
        part = rows[chosen]
        contact = f"{part['rounds_to_contact'].max():.0f}" if kind == "restarted" else ""
        lines.append(
            f"| {kind} | {part['accuracy_percent'].mean():.2f} | {part['accuracy_percent'].min():.2f} "
            f"| {part['longest_step_seconds'].max():.3f} | {contact} |"
        )
    return "\n".join(lines)
