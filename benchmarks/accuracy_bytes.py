"""Test accuracy of the averaged model against bytes really sent per worker: 8 workers in a ring, equal epochs.

    OMP_NUM_THREADS=1 .venv/bin/python benchmarks/accuracy_bytes.py --data-dir data/cifar10-jpeg
    OMP_NUM_THREADS=1 .venv/bin/python benchmarks/accuracy_bytes.py --methods dpsgd choco-sign --seeds 1   # digits

Trains by train/gossip_sgd.py under torchrun, a run per method and seed, one after the other; a run that has its
summary.json is not made again, so the same command goes on where it was stopped. The images are a folder with
train/<class>/ and test/<class>/ (--data-dir, or GOSSIP_DATA) for ResNet-20, so many of each class and scaled to so few
pixels that a run takes a minute or two on two cores; without a folder, scikit-learn's digits for a small CNN. Writes
accuracy_bytes.csv, .md and .png next to the runs. Bytes are all that a worker sent, the exact averages of the last
evaluation included: 3.8 MB of ResNet-20.

Nothing was tuned here. Learning rates and step sizes are those that Vogels et al. (NeurIPS 2020, arXiv 2008.01425) and
Koloskova et al. (ICLR 2020, arXiv 1907.09356) published for ResNet-20 on CIFAR-10 and 8 workers in a ring: 0.1 times
11.3 for AllReduce, D-PSGD, PowerGossip and CHOCO top-1 %, 16 for CHOCO with signs, 4.8 for DeepSqueeze, at 1,024
images per step, scaled linearly to the batch here; decay by 10 at half and three quarters of the epochs, weight decay
1e-4, Nesterov momentum 0.9. Their 300 epochs are cut to a few. MATCHA, Moniqua with 8 bits and D-PSGD in bfloat16 take
D-PSGD's learning rate.
"""

from __future__ import annotations

import json
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

from benchmarks.small_images import shrink
from train.config import Config
from visualization.accuracy_bytes import draw

SCRIPT = Path(__file__).resolve().parents[1] / "train" / "gossip_sgd.py"
BASELINE = "dpsgd"
LR = 0.1 / 4  # the published base, for 256 images per step instead of 1,024


@dataclass(frozen=True)
class Method:
    """A row of the table: its name there, and how its runs differ from others."""

    title: str
    options: Mapping[str, Any]


METHODS: Mapping[str, Method] = {
    "ar": Method("AllReduce", {"recipe": "ar", "lr": 11.3 * LR}),
    "dpsgd": Method("D-PSGD", {"recipe": "dpsgd", "lr": 11.3 * LR, "graph": "ring", "peers_per_itr": "2"}),
    "matcha-0.5": Method("MATCHA, budget 0.5", {"recipe": "matcha", "lr": 11.3 * LR, "graph": "ring", "budget": 0.5}),
    "matcha-0.1": Method("MATCHA, budget 0.1", {"recipe": "matcha", "lr": 11.3 * LR, "graph": "ring", "budget": 0.1}),
    "choco-sign": Method("CHOCO, signs", {"recipe": "choco", "lr": 16 * LR, "compressor": "sign"}),
    "choco-topk": Method("CHOCO, top 1 %", {"recipe": "choco", "lr": 11.3 * LR, "compressor": "topk"}),
    "deepsqueeze-sign": Method("DeepSqueeze, signs", {"recipe": "deepsqueeze", "lr": 4.8 * LR, "compressor": "sign"}),
    "powergossip-1": Method("PowerGossip, 1 iteration", {"recipe": "powergossip", "lr": 11.3 * LR}),
    "powergossip-2": Method(
        "PowerGossip, 2 iterations", {"recipe": "powergossip", "lr": 11.3 * LR, "power_iterations": 2}
    ),
    "moniqua-8": Method("Moniqua, 8 bits", {"recipe": "moniqua", "lr": 11.3 * LR}),
    "dpsgd-bfloat16": Method(
        "D-PSGD, bfloat16 wire",
        {"recipe": "dpsgd", "lr": 11.3 * LR, "graph": "ring", "peers_per_itr": "2", "wire_dtype": "bfloat16"},
    ),
}
OPTIONAL = ("moniqua-8", "dpsgd-bfloat16")


@dataclass(frozen=True)
class Benchmark:
    """Which runs to make."""

    methods: tuple[str, ...] = tuple(name for name in METHODS if name not in OPTIONAL)
    """Rows of the table; also moniqua-8 and dpsgd-bfloat16."""
    seeds: tuple[int, ...] = (1, 2, 3)
    """A run of each method for each."""
    data_dir: str = field(default_factory=lambda: os.environ.get("GOSSIP_DATA", ""))
    """Folder with train/<class>/ and test/<class>/; without these, digits."""
    epochs: int = 0
    """Passes over the training set; 0: 5 of images, 24 of digits."""
    batch_size: int = 16
    """Images per worker and step."""
    image_size: int = 16
    """Side to which images are scaled, in pixels."""
    train_images_per_class: int = 2000
    """So many of a class are trained on; 0: all. All test images are used."""
    num_workers: int = 8
    """Workers in the ring."""
    out_dir: Path = Path("runs/accuracy_bytes")
    """Folder of the runs."""

    def __post_init__(self) -> None:
        unknown = [name for name in self.methods if name not in METHODS]
        if unknown or not self.methods or not self.seeds:
            raise ValueError(
                f"got methods={self.methods} and seeds={self.seeds}, expected some of {', '.join(METHODS)} and a seed; "
                "see --help"
            )

    @property
    def has_images(self) -> bool:
        """Whether the runs are on images rather than digits."""
        return bool(self.data_dir) and (Path(self.data_dir) / "train").is_dir()

    @property
    def images(self) -> Path:
        """Where the small images go."""
        return self.out_dir / "images"

    def config(self, method: str, seed: int) -> Config:
        """The configuration of a run."""
        data: dict[str, Any] = {"dataset": "digits", "model": "cnn"}
        if self.has_images:
            data = {"dataset": "imagefolder", "data_dir": str(self.images), "image_size": self.image_size}
            data["model"] = "resnet20"
        epochs = self.epochs or (5 if self.has_images else 24)
        return Config(
            **METHODS[method].options,
            **data,
            seed=seed,
            epochs=epochs,
            batch_size=self.batch_size,
            milestones=(-(-epochs // 2), -(-3 * epochs // 4)),
            weight_decay=1e-4,
            label_smoothing=0.0,
            validate_every=epochs,
            log_every=1_000_000,
            out_dir=str(self.out_dir / f"{method}_seed{seed}"),
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
    asked = json.loads(json.dumps(asdict(config)))
    return summary if (summary["config"], summary["world_size"]) == (asked, num_workers) else None


def run(config: Config, num_workers: int) -> dict[str, Any] | None:
    """Train, unless that was done before; the summary, or None for a run that ended without one, and said why."""
    if summary := finished(config, num_workers):
        return summary
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_workers)]
    subprocess.run([*command, str(SCRIPT), *arguments(config)], check=False)
    return finished(config, num_workers)


def row_of(method: str, seed: int, summary: Mapping[str, Any]) -> dict[str, Any]:
    """A line of the CSV."""
    ranks = pd.DataFrame(summary["ranks"])
    return {
        "method": method,
        "title": METHODS[method].title,
        "seed": seed,
        "accuracy_percent": summary["averaged_test_accuracy_percent"],
        "own_accuracy_percent": ranks["own_test_accuracy_percent"].mean(),
        "sent_megabytes": ranks["bytes_sent"].mean() / 1e6,
        "consensus_distance": summary["consensus_distance"],
        "train_seconds": ranks["time_seconds"].mean(),
    }


def markdown(rows: pd.DataFrame) -> str:
    """The table: means over seeds, and for the accuracy the spread, highest minus lowest; a line per method.

    Args:
        rows: of `row_of`.
    """
    names = [name for name in METHODS if name in set(rows["method"])]
    means = rows.groupby("method").mean(numeric_only=True)
    accuracies = rows.groupby("method")["accuracy_percent"]
    spreads = accuracies.max() - accuracies.min()
    lines = [
        f"| method | seeds | accuracy, % | spread | to {METHODS[BASELINE].title}, points | sent per worker, MB "
        f"| times fewer than {METHODS[BASELINE].title} | consensus distance | training, s |",
        "|---" + "|---:" * 8 + "|",
    ]
    has_baseline = BASELINE in names
    for name in names:
        mean = means.loc[name]
        gap = f"{mean.accuracy_percent - means.loc[BASELINE].accuracy_percent:+.2f}" if has_baseline else ""
        factor = f"{means.loc[BASELINE].sent_megabytes / mean.sent_megabytes:.1f}" if has_baseline else ""
        lines.append(
            f"| {METHODS[name].title} | {accuracies.count()[name]} | {mean.accuracy_percent:.2f} | {spreads[name]:.2f} "
            f"| {gap} | {mean.sent_megabytes:.1f} | {factor} | {mean.consensus_distance:.3g} "
            f"| {mean.train_seconds:.0f} |"
        )
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
    benchmark.out_dir.mkdir(parents=True, exist_ok=True)
    if benchmark.has_images:
        number, size = benchmark.train_images_per_class, benchmark.image_size
        shrink(Path(benchmark.data_dir), benchmark.images, size=size, train_images_per_class=number)
    for seed in benchmark.seeds:
        for method in benchmark.methods:
            config = benchmark.config(method, seed)
            print(f"== {METHODS[method].title}, seed {seed}: {config.model} on {config.dataset}", flush=True)
            summary = run(config, benchmark.num_workers)
            if summary is None:
                failed.append(str(config.run_dir))
                continue
            rows.append(row_of(method, seed, summary))
            write(rows, benchmark.out_dir)
    if rows:
        text = write(rows, benchmark.out_dir)
        draw(benchmark.out_dir / "accuracy_bytes.csv", benchmark.out_dir / "accuracy_bytes.png")
        print(f"\n{text}\n\nin {benchmark.out_dir}")
    if failed:
        raise SystemExit(f"got no result from {', '.join(failed)}: see the errors above; start again to repeat them")


if __name__ == "__main__":
    main(tyro.cli(Benchmark, description=__doc__))
