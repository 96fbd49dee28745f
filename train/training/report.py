"""The report of a finished run: summary.json, curves.png, a table, and the last line."""

from __future__ import annotations

import json
import os
import platform
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from train.job.files import write_atomically
from train.job.outputs import SUMMARY, csv_path
from train.run_config import RunConfig
from train.training.evaluate import Validation, in_words, title_of
from train.training.meters import Meters


@dataclass(frozen=True)
class RankResult:
    """What one rank has to say at the end."""

    own_test: Mapping[str, float]
    """Metrics of the model of this rank."""
    num_steps: int
    """Optimizer steps that it took."""
    time_seconds: float
    """Spent in training, resumptions included."""
    wait_seconds: float
    """Waiting for peers since this process started; NaN: not known."""
    bytes_sent: float
    """Since the start of the run."""
    last_validation_bytes_sent: float
    """Of these, for the last validation."""

    @property
    def columns(self) -> dict[str, float]:
        """By name, metrics as own_test_<metric>."""
        values = asdict(self)
        return {f"own_test_{metric}": value for metric, value in values.pop("own_test").items()} | values

    @classmethod
    def of(cls, validation: Validation, num_steps: int, meters: Meters, stats: Mapping[str, float]) -> RankResult:
        """Out of the last validation, the steps taken, the meters, and the wrapper's `comm_stats()`."""
        return cls(
            own_test=validation.own,
            num_steps=num_steps,
            time_seconds=meters.train_seconds,
            wait_seconds=stats["wait_seconds"],
            bytes_sent=meters.bytes_sent_before + stats["bytes_sent"],
            last_validation_bytes_sent=validation.bytes_sent,
        )


def write_report(
    folder: Path,
    config: RunConfig,
    score: str,
    validation: Validation,
    results: Sequence[RankResult],
    *,
    changes: Sequence[Mapping[str, Any]] = (),
    numbers: Sequence[int] | None = None,
    model: str = "averaged model",
) -> None:
    """Write summary.json and curves.png into `folder` and print the table and the last line; for rank 0.

    Args:
        folder: the folder of the run, with the finished CSV of every rank.
        config: the configuration of the run.
        score: the metric that tells good from bad.
        validation: the last one.
        results: the results of all ranks, in their order.
        changes: the changes of the set of workers, if workers come and go.
        numbers: of the ranks, in the names of their tables; None: 0, 1, ...; where they come and go, the "workers".
        model: what `validation` calls averaged.
    """
    numbers = range(len(results)) if numbers is None else numbers
    summary = {
        "score": score,
        "averaged_test": dict(validation.averaged),
        "consensus_distance": validation.consensus_distance,
        "world_size": len(results),
        "ranks": [result.columns for result in results],
        "config": config.used_choices,
        "changed": [name for name, value in config.used_choices.items() if value != getattr(type(config), name)],
        "unused": config.unused_choices,
        **({"membership": list(changes), "workers": list(numbers)} if changes else {}),
        "made": {
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "command": shlex.join(["python", *sys.orig_argv[1:]]),  # not where the interpreter of this machine is
            "python": platform.python_version(),
            "torch": torch.__version__,
            "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        },
    }
    text = json.dumps(summary, indent=1) + "\n"
    write_atomically(folder / SUMMARY, lambda temporary: temporary.write_text(text))
    # Imported here: only one rank pays the second that matplotlib takes.
    from visualization.curves import draw_run

    if any(csv_path(folder, number).is_file() for number in numbers):
        draw_run(folder)
    else:
        print("no curves: the checkpoint that was resumed had all epochs behind it, none was trained here")
    rows = [
        {
            "rank": str(number),
            **{f"own test {title_of(metric)}": f"{value:.2f}" for metric, value in result.own_test.items()},
            "steps": str(result.num_steps),
            "training [s]": f"{result.time_seconds:.1f}",
            "waiting for peers [s]": f"{result.wait_seconds:.1f}",
            "sent [MB]": f"{result.bytes_sent / 1e6:.1f}",
        }
        for number, result in zip(numbers, results, strict=True)
    ]
    print(f"\n{table(rows)}\n\nconsensus distance {validation.consensus_distance:.3g}; results in {folder}")
    print(f"{model}: test {in_words(validation.averaged)}", flush=True)


def table(rows: Sequence[Mapping[str, str]]) -> str:
    """Rows of text as a plain table with a header."""
    return pd.DataFrame(rows).to_string(index=False)
