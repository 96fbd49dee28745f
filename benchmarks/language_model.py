"""What the default run of train/language_model.py takes and reaches, by several methods.

    python -m benchmarks.language_model                       # sgp, ar, powergossip; four ranks
    python -m benchmarks.language_model --recipes sgp choco --output benchmarks/results/language_model.csv

The text is that of Python's own standard library, so figures of two versions of Python are of two texts.
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np

from benchmarks.record import write_rows
from train.compare import Comparison, train
from train.job.outputs import TOKENIZER
from train.tasks.byte_tokenizer import ByteTokenizer
from train.tasks.language_model.packed_text import PackedText
from train.tasks.language_model.text_folder import TextFolder, beginning


def measure(recipe: str, comparison: Comparison) -> dict[str, Any]:
    """One run, from the start of torchrun to its end, as a row."""
    start, cpu_start = time.perf_counter(), _cpu_seconds()
    summary = train(recipe, comparison)
    seconds, cpu_seconds = time.perf_counter() - start, _cpu_seconds() - cpu_start
    ranks, averaged = summary["ranks"], summary["averaged_test"]
    return {
        "recipe": recipe,
        "model": summary["config"]["model"],
        "ranks": summary["world_size"],
        "python": platform.python_version(),
        "steps": ranks[0]["num_steps"],
        "seconds": round(seconds, 1),
        "cpu_seconds": round(cpu_seconds, 1),
        "training_seconds": round(mean(rank["time_seconds"] for rank in ranks), 1),
        "nll": round(averaged["nll"], 4),
        "perplexity": round(averaged["perplexity"], 2),
        "bits_per_byte": round(averaged["bits_per_byte"], 4),
        "frequencies_bits_per_byte": round(bits_by_frequencies(comparison.out_dir / recipe, summary), 4),
        "consensus_distance": round(summary["consensus_distance"], 4),
        "sent_megabytes": round(mean(rank["bytes_sent"] for rank in ranks) / 1e6, 1),
    }


def _cpu_seconds() -> float:
    """Of all processes that this one has started and waited for, and of theirs."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def bits_by_frequencies(folder: Path, summary: Mapping[str, Any]) -> float:
    """Bits per byte of the validation text for a model that knows how frequent each token is in training, no more.

    Args:
        folder: of a finished run.
        summary: of the same run.
    """
    config, tokenizer = summary["config"], ByteTokenizer.load(folder / TOKENIZER)
    files = TextFolder.find(config["data_dir"], patterns=config["files"], validation_share=config["validation_share"])
    counts = np.bincount(PackedText.of(beginning(files.train, 0), tokenizer).tokens, minlength=tokenizer.num_tokens)
    validation = PackedText.of(beginning(files.validation, config["num_validation_bytes"]), tokenizer)
    return validation.bits_of(counts) / validation.num_bytes


def main() -> int:
    """Measure what the command line names; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", nargs="+", default=["sgp", "ar", "powergossip"], help="methods to run")
    parser.add_argument("--ranks", type=int, default=4, help="ranks of every run")
    parser.add_argument("--seed", type=int, default=1, help="of every run")
    parser.add_argument("--runs", type=Path, default=Path("runs/language_model"), help="folder of the runs")
    parser.add_argument("--output", type=Path, help="CSV file to write")
    arguments = parser.parse_args()
    comparison = Comparison(
        options=("--seed", str(arguments.seed)),
        script="language_model",
        recipes=tuple(arguments.recipes),
        nproc_per_node=arguments.ranks,
        out_dir=arguments.runs,
        overwrite=True,
    )
    rows = []
    for recipe in comparison.recipes:
        rows.append(measure(recipe, comparison))
        print(json.dumps(rows[-1]), flush=True)
        if arguments.output:
            write_rows(arguments.output, rows, seed=arguments.seed)
    return 0


if __name__ == "__main__":
    sys.exit(main())
