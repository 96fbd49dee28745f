"""Test accuracy of the averaged model against bytes really sent per worker: 8 workers in a ring, equal epochs.

    OMP_NUM_THREADS=1 .venv/bin/python -m benchmarks.accuracy_bytes --data-dir data/cifar10-jpeg
    OMP_NUM_THREADS=1 .venv/bin/python -m benchmarks.accuracy_bytes --data-dir "" --methods dpsgd choco-sign --seeds 1

Trains by train/gossip_sgd.py under torchrun, a run per method and seed, one after the other; a run that has its
summary.json is not made again, so the same command goes on where it was stopped. The images are a folder with
train/<class>/ and test/<class>/ (--data-dir, or GOSSIP_DATA), so many of each class and scaled to so few pixels that a
run takes a minute or two on two cores; where neither is given, or it is empty, scikit-learn's digits. Runs,
accuracy_bytes.csv, .md and .png go to a folder of --out-dir that is named after the data.

Bytes are what a worker sends in training. The one evaluation, at the end, sends exact averages as well, as many bytes
for all methods; they are a column of their own. AllReduce's are by calculation: 2 (n - 1) / n of the gradients a step.

Published for ResNet-20 on CIFAR-10 and 8 workers in a ring, by Vogels et al. (NeurIPS 2020, arXiv 2008.01425) and
Koloskova et al. (ICLR 2020, arXiv 1907.09356), and used as they are: learning rates, 0.1 times 11.3 for AllReduce,
D-PSGD, PowerGossip and CHOCO top-1 %, 16 for CHOCO with signs, 4.8 for DeepSqueeze, at 1,024 images per step, scaled
linearly to the batch here; the step sizes of CHOCO and DeepSqueeze; weight decay 1e-4, Nesterov momentum 0.9, decay by
10 at half and three quarters of the epochs. PowerGossip's step size follows from the spectrum of the ring.

Not published, but chosen here: the small CNN (--model resnet20 for theirs), few pixels and epochs (theirs: 32 and 300),
the batch, one epoch of warm-up, the third decay at 0.9 of the epochs, a factor for all learning rates (--lr-scale), and
that MATCHA, Moniqua and D-PSGD in bfloat16 take D-PSGD's learning rate. Moniqua's theta, 1, and step size, 1, are
defaults of train/tasks/images/config.py.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
import tyro

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run by path, Python looks beside this file only

from benchmarks.published_methods import BASELINE, OPTIONAL, PUBLISHED_METHODS
from benchmarks.small_images import shrink
from train.tasks.images.config import Config
from visualization.accuracy_bytes import draw

SCRIPT = Path(__file__).resolve().parents[1] / "train" / "gossip_sgd.py"
NOTE = " (1)"
ARCHIVE = "cifar10-jpeg.tar.gz"


@dataclass(frozen=True)
class Benchmark:
    """Which runs to make."""

    methods: tuple[str, ...] = tuple(name for name in PUBLISHED_METHODS if name not in OPTIONAL)
    """Rows of the table; also matcha-1.0 (D-PSGD's links with MATCHA's weights), moniqua-8 and dpsgd-bfloat16."""
    seeds: tuple[int, ...] = (1, 2, 3)
    """A run of each method for each."""
    data_dir: str = field(default_factory=lambda: os.environ.get("GOSSIP_DATA", ""))
    """Folder with train/<class>/ and test/<class>/; empty: digits."""
    model: str = "cnn"
    """cnn (small) or resnet20, which takes four times as long."""
    epochs: int = 0
    """Passes over the training set; 0: 8 of images, 24 of digits."""
    milestones: tuple[float, ...] = (0.5, 0.75, 0.9)
    """Shares of the epochs after which the learning rate is divided by 10, rounded to whole epochs, halves up."""
    lr_scale: float = 1.0
    """What all learning rates are multiplied by."""
    batch_size: int = 16
    """Images per worker and step."""
    image_size: int = 16
    """Side to which images are scaled, in pixels."""
    train_images_per_class: int = 2000
    """So many of a class are trained on; 0: all. All test images are used."""
    num_workers: int = 8
    """Workers in the ring."""
    out_dir: Path = Path("runs/accuracy_bytes")
    """Folder of everything this writes."""

    def __post_init__(self) -> None:
        unknown = [name for name in self.methods if name not in PUBLISHED_METHODS]
        if unknown or not self.methods or not self.seeds:
            raise ValueError(
                f"got methods={self.methods} and seeds={self.seeds}, expected some of "
                f"{', '.join(PUBLISHED_METHODS)} and a seed; see --help"
            )
        if not 0 < self.lr_scale < float("inf") or not all(0 < share <= 1 for share in self.milestones):
            raise ValueError(
                f"got lr_scale={self.lr_scale} and milestones={self.milestones}, expected a positive number and shares "
                "of the epochs, above 0 and at most 1; see --help"
            )
        root = Path(self.data_dir)
        if self.has_images and not ((root / "train").is_dir() and (root / "test").is_dir()):
            remedy = "name another folder, or pass --data-dir '' for digits"
            if (root / ARCHIVE).is_file():
                remedy = f"unpack it: mkdir data && tar -xzf {root / ARCHIVE} -C data, then --data-dir data"
            raise ValueError(
                f"got data_dir={self.data_dir!r} (of --data-dir or GOSSIP_DATA) without train/ and test/, expected a "
                f"folder with both; {remedy}"
            )

    @property
    def has_images(self) -> bool:
        """Whether the runs are on images rather than digits."""
        return bool(self.data_dir)

    @property
    def folder(self) -> Path:
        """Where runs and tables go: those of other data have another folder."""
        if not self.has_images:
            return self.out_dir / "digits"
        source = hashlib.sha256(str(Path(self.data_dir).resolve()).encode()).hexdigest()[:8]
        return self.out_dir / f"images_{self.image_size}px_{self.train_images_per_class or 'all'}_{source}"

    @property
    def images(self) -> Path:
        """Where the small images go."""
        return self.folder / "images"

    def config(self, method: str, seed: int) -> Config:
        """The configuration of a run."""
        data: dict[str, Any] = {"dataset": "digits"}
        if self.has_images:
            data = {"dataset": "imagefolder", "data_dir": str(self.images), "image_size": self.image_size}
        epochs = self.epochs or (8 if self.has_images else 24)
        options = PUBLISHED_METHODS[method].options
        return Config(
            **{**options, "lr": options["lr"] * self.lr_scale},
            **data,
            model=self.model,
            seed=seed,
            epochs=epochs,
            batch_size=self.batch_size,
            milestones=tuple(math.floor(share * epochs + 0.5) for share in self.milestones),
            weight_decay=1e-4,
            label_smoothing=0.0,
            validate_every=epochs,
            log_every=1_000_000,
            out_dir=str(self.folder / f"{method}_seed{seed}"),
        )


def arguments(config: Config) -> list[str]:
    """The command line of train/gossip_sgd.py that says `config`."""
    words: list[str] = []
    for name, default in asdict(Config()).items():
        value, option = getattr(config, name), name.replace("_", "-")
        if value == default:
            continue
        if isinstance(value, bool):
            words.append(f"--{option}" if value else f"--no-{option}")
        else:
            words += [f"--{option}", *map(str, value if isinstance(value, tuple) else (value,))]
    return words


def finished(config: Config, num_workers: int) -> dict[str, Any] | None:
    """The summary.json of a run that was made as `config` says, else None."""
    path = config.run_dir / "summary.json"
    if not path.is_file():
        return None
    summary: dict[str, Any] = json.loads(path.read_text())
    asked = json.loads(json.dumps(config.used_choices))
    made = {name: summary["config"].get(name) for name in asked}
    made["overwrite"] = asked["overwrite"]  # what became of the folder makes no other run
    return summary if (made, summary["world_size"]) == (asked, num_workers) else None


def run(config: Config, num_workers: int) -> dict[str, Any] | None:
    """Train, unless that was done before; the summary, or None for a run that ended without one, and said why."""
    if summary := finished(config, num_workers):
        return summary
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_workers)]
    subprocess.run([*command, str(SCRIPT), *arguments(config), "--overwrite"], check=False)
    return finished(config, num_workers)


def row_of(method: str, seed: int, summary: Mapping[str, Any]) -> dict[str, Any]:
    """A line of the CSV. The one evaluation of the run is at its end, and what it sends is no part of training."""
    ranks = pd.DataFrame(summary["ranks"])
    validation_megabytes = ranks["last_validation_bytes_sent"].mean() / 1e6
    return {
        "method": method,
        "title": PUBLISHED_METHODS[method].title,
        "seed": seed,
        "accuracy_percent": summary["averaged_test"]["accuracy_percent"],
        "own_accuracy_percent": ranks["own_test_accuracy_percent"].mean(),
        "sent_megabytes": ranks["bytes_sent"].mean() / 1e6 - validation_megabytes,
        "evaluation_megabytes": validation_megabytes,
        "consensus_distance": summary["consensus_distance"],
        "train_seconds": ranks["time_seconds"].mean(),
    }


def markdown(rows: pd.DataFrame) -> str:
    """The table: means over seeds; spread is the highest accuracy minus the lowest; a line per method, and notes.

    Differences to the baseline are between runs of equal seeds: their mean, the least and the largest.

    Args:
        rows: of `row_of`.
    """
    baseline = PUBLISHED_METHODS[BASELINE].title
    names = [name for name in PUBLISHED_METHODS if name in set(rows["method"])]
    accuracies = rows.pivot(index="seed", columns="method", values="accuracy_percent")
    means = rows.groupby("method").mean(numeric_only=True)
    lines = [
        f"| method | seeds | accuracy, % | spread | to {baseline}, points | range | sent per worker in training, MB "
        f"| times fewer than {baseline} | evaluation, MB | consensus distance | training, s |",
        "|---" + "|---:" * 10 + "|",
    ]
    for name in names:
        mean, accuracy = means.loc[name], accuracies[name].dropna()
        gap, extent, factor, mark = "", "", "", NOTE if name == "ar" else ""
        if BASELINE in names:
            factor = f"{means.loc[BASELINE].sent_megabytes / mean.sent_megabytes:.1f}"
            gaps = (accuracy - accuracies[BASELINE]).dropna()
            if len(gaps):
                gap, extent = f"{gaps.mean():+.2f}", f"{gaps.min():+.2f} to {gaps.max():+.2f}"
        lines.append(
            f"| {PUBLISHED_METHODS[name].title}{mark} | {len(accuracy)} | {mean.accuracy_percent:.2f} "
            f"| {accuracy.max() - accuracy.min():.2f} | {gap} | {extent} | {mean.sent_megabytes:.1f} | {factor} "
            f"| {mean.evaluation_megabytes:.1f} | {mean.consensus_distance:.3g} | {mean.train_seconds:.0f} |"
        )
    lines += ["", f"To {baseline}: mean and range of the differences between runs of the same seed."]
    if "ar" in names:
        lines += [
            "",
            f"{NOTE.strip()} By calculation: a ring all-reduce sends 2 (n - 1) / n of the gradients per step.",
        ]
    return "\n".join(lines)


def write(rows: Sequence[Mapping[str, Any]], folder: Path) -> str:
    """Write the CSV and the table; returns the table."""
    table = pd.DataFrame(rows)
    table.to_csv(folder / "accuracy_bytes.csv", index=False)
    text = markdown(table)
    (folder / "accuracy_bytes.md").write_text(text + "\n")
    return text


def main(benchmark: Benchmark) -> None:
    """Make the runs, seed by seed so that a table of all methods is there early, then print the table."""
    rows: list[dict[str, Any]] = []
    failed: list[str] = []
    folder = benchmark.folder
    folder.mkdir(parents=True, exist_ok=True)
    if benchmark.has_images:
        number, size = benchmark.train_images_per_class, benchmark.image_size
        shrink(Path(benchmark.data_dir), benchmark.images, size=size, train_images_per_class=number)
    for seed in dict.fromkeys(benchmark.seeds):
        for method in dict.fromkeys(benchmark.methods):
            config = benchmark.config(method, seed)
            print(f"== {PUBLISHED_METHODS[method].title}, seed {seed}: {config.model} on {config.dataset}", flush=True)
            summary = run(config, benchmark.num_workers)
            if summary is None:
                failed.append(str(config.run_dir))
                continue
            rows.append(row_of(method, seed, summary))
            write(rows, folder)
    if rows:
        text = write(rows, folder)
        draw(folder / "accuracy_bytes.csv", folder / "accuracy_bytes.png")
        print(f"\n{text}\n\nin {folder}")
    if failed:
        raise SystemExit(f"got no result from {', '.join(failed)}: see the errors above; start again to repeat them")


if __name__ == "__main__":
    main(tyro.cli(Benchmark, description=__doc__))
