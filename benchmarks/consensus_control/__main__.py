"""Consensus control: the accuracy of all-reduce for how many bytes? 16 ranks as threads, real messages.

    OMP_NUM_THREADS=1 nice -n 19 python -m benchmarks.consensus_control --images ~/.cache/gossip_modules/cifar10-16
    OMP_NUM_THREADS=1 python -m benchmarks.consensus_control --images "" --epochs 20 --seeds 1 --output digits.csv

Trains a small convolutional network (26,154 parameters, no normalisation) by SGD with Nesterov momentum at one learning
rate for all methods: 32 images per rank and step, one epoch of warm-up, then a linear decay to zero. Images are the
arrays that benchmarks/cluster/workload/images.py decodes to 16 pixels; without --images a folder of images in
GOSSIP_DATA, and without that scikit-learn's digits.

Methods: `allreduce` averages the models after every step, which with a linear optimizer like SGD is to average the
gradients; `exponential` gossips with one peer in every step, and its bytes are what others are compared with; `ring`
gossips with both neighbours in every step; `ring-control-T` does so under `ConsensusControl(target=T)`, and
`ring-every-H` in every H-th step. `average-every-H` averages the models exactly in every H-th step and does nothing
else, `average-control-T` as often as `ConsensusControl(target=T, average_every=1)` says, and `average-within-T` as
often as that with is_relative=False does, where T is a distance. `slowmo-B` averages the models exactly in every fourth
step and makes a slow momentum of B of that: no control, but another way to save bytes. Bytes are those that
`comm_stats()` counts in training, collectives included; the accuracy is that of the averaged model on all test images
after the last step.

Each row is written when its run has ended, and a run that has a row is not made again, so the same command goes on
where it was stopped.
"""

from __future__ import annotations

import argparse
import csv
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.cluster.workload.image_task import SIZE, SPLITS
from benchmarks.cluster.workload.images import decode
from benchmarks.consensus_control.training import KEY, METHODS, ControlTraining, run
from benchmarks.record import RESULTS, provenance


def digits(folder: Path) -> None:
    """Write scikit-learn's digits as the arrays that `SplitImages` reads, the last fifth of them to test on."""
    from sklearn.datasets import load_digits

    found = load_digits()
    large = np.kron(found.images, np.ones((SIZE // 8, SIZE // 8)))  # 0 to 16
    pixels = np.repeat((large * (255 / 16)).astype(np.uint8)[:, None], 3, axis=1)
    first = len(pixels) * 4 // 5
    folder.mkdir(parents=True, exist_ok=True)
    for split, part in zip(SPLITS, (slice(first), slice(first, None)), strict=True):
        np.save(folder / f"{split}.npy", pixels[part])
        np.save(folder / f"{split}-labels.npy", found.target[part].astype(np.int64))


def prepare(images: str, temporary: Path) -> tuple[Path, str]:
    """The folder of arrays, and what to call them. See above for where they come from."""
    if images:
        return Path(images).expanduser(), "cifar10-16px"
    if source := os.environ.get("GOSSIP_DATA", ""):
        decode(Path(source), temporary)
        return temporary, "cifar10-16px"
    digits(temporary)
    return temporary, "digits"


def missing(
    path: Path, setting: ControlTraining, methods: Sequence[str], seeds: Sequence[int]
) -> list[tuple[str, int]]:
    """The runs that have no row in the file yet, one seed of all methods after the other."""
    done = set()
    if path.exists():
        with path.open(newline="") as file:
            done = {tuple(row[name] for name in KEY) for row in csv.DictReader(file)}

    def key(method: str, seed: int) -> tuple[str, ...]:
        own = {"method": method, "seed": seed}
        return tuple(str(own.get(name, getattr(setting, name, ""))) for name in KEY)

    return [(method, seed) for seed in seeds for method in methods if key(method, seed) not in done]


def append(path: Path, row: dict[str, Any], *, seed: int) -> None:
    """Add a row, with the columns of PROVENANCE before its own."""
    whole = {**provenance(seed), **row}
    is_new = not path.exists()
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, list(whole), lineterminator="\n")
        if is_new:
            writer.writeheader()
        writer.writerow(whole)


def main() -> None:
    """Make the runs that are missing, and print their rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", default=list(METHODS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--images", default="", help="folder of arrays; empty: GOSSIP_DATA, or digits")
    parser.add_argument("--ranks", type=int, default=16)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--batch-size", type=int, default=32, help="images per rank and step")
    parser.add_argument("--output", type=Path, default=RESULTS / "consensus_control.csv")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        images, data = prepare(arguments.images, Path(temporary))
        shared = (arguments.ranks, arguments.epochs, arguments.lr, arguments.momentum, arguments.batch_size)
        setting = ControlTraining(images, data, *shared)
        for method, seed in missing(arguments.output, setting, arguments.methods, arguments.seeds):
            row = run(method, setting, seed)
            append(arguments.output, row, seed=seed)
            print(f"seed {seed}:", " | ".join(f"{name} {value}" for name, value in row.items()), flush=True)


if __name__ == "__main__":
    main()
