"""What the default run of train/language_model.py takes and reaches, by several methods.

    python -m benchmarks.language_model                       # sgp, ar, powergossip; four ranks
    python -m benchmarks.language_model --recipes sgp choco --output benchmarks/results/language_model.csv
    python -m benchmarks.language_model --recipes diloco "diloco --algorithm 'DiLoCo(sync_every=50)'" --seeds 1 2 3

What follows the name of a method are options of its runs. A row is appended as soon as its run has ended.

The text is that of Python's own standard library, so figures of two versions of Python are of two texts.
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import resource
import shlex
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np

from benchmarks.record import append_row
from train.compare import Comparison, train
from train.job.outputs import TOKENIZER
from train.tasks.byte_tokenizer import ByteTokenizer
from train.tasks.language_model.packed_text import PackedText
from train.tasks.language_model.text_folder import TextFolder, beginning


def measure(recipe: str, comparison: Comparison) -> dict[str, Any]:
    """One run, from the start of torchrun to its end, as a row.

    Args:
        recipe: the name of a method, and options of the script.
        comparison: its own options come before those.
    """
    name, *options = shlex.split(recipe)
    start, cpu_start = time.perf_counter(), _cpu_seconds()
    summary = train(name, replace(comparison, options=(*comparison.options, *options)))
    seconds, cpu_seconds = time.perf_counter() - start, _cpu_seconds() - cpu_start
    ranks, averaged = summary["ranks"], summary["averaged_test"]
    return {
        "recipe": name,
        "options": shlex.join(options),
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
        "frequencies_bits_per_byte": round(bits_by_frequencies(comparison.out_dir / name, summary), 4),
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
    parser.add_argument("--seeds", type=int, nargs="+", default=[1], help="of the runs of every method")
    parser.add_argument("--runs", type=Path, default=Path("runs/language_model"), help="folder of the runs")
    parser.add_argument("--output", type=Path, help="CSV file to append to")
    arguments = parser.parse_args()
    for seed, recipe in itertools.product(arguments.seeds, arguments.recipes):
        comparison = Comparison(
            options=("--seed", str(seed)),
            script="language_model",
            recipes=tuple(shlex.split(recipe)[:1]),
            nproc_per_node=arguments.ranks,
            out_dir=arguments.runs,
            overwrite=True,
        )
        row = measure(recipe, comparison)
        print(json.dumps(row), flush=True)
        if arguments.output:
            append_row(arguments.output, row, seed=seed)
    return 0


if __name__ == "__main__":
    sys.exit(main())
