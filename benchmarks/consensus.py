"""How many steps and bits ranks need to agree, by method: the consensus experiment, summed up as a row per method.

    OMP_NUM_THREADS=1 .venv/bin/python -m benchmarks.consensus
    .venv/bin/python -m benchmarks.consensus --steps 1500 --output benchmarks/results/consensus.csv

Runs train/consensus.py, whose docstring has the setting, and takes of each method the run with its best step size.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pandas as pd

from benchmarks.record import ROOT, write_rows
from visualization.consensus import THRESHOLDS, best_runs

CONSENSUS_METHODS = ("plain", "bfloat16", "power-r1-i1", "power-r1-i2")


def rows_of(points: pd.DataFrame) -> list[dict[str, Any]]:
    """A row per method: its step size, and steps and megabits to each of THRESHOLDS; None: not reached.

    Args:
        points: of consensus.csv.
    """
    rows = []
    for method, run in best_runs(points).items():
        row: dict[str, Any] = {"method": method, "step_size": round(float(run["step_size"].iloc[0]), 4)}
        for threshold in THRESHOLDS:
            below = run[run["error"] <= threshold]
            first = below.iloc[0] if len(below) else None
            row[f"steps_to_{threshold:g}"] = None if first is None else int(first["step"])
            row[f"megabits_to_{threshold:g}"] = None if first is None else round(float(first["megabits"]), 3)
        rows.append(row)
    return rows


def main() -> None:
    """Run the experiment, print the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", default=CONSENSUS_METHODS, help="as of train/consensus.py")
    parser.add_argument("--steps", type=int, default=1500, help="rounds of each run")
    parser.add_argument("--output", type=Path, help="a CSV file to write")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        options = ["--methods", *arguments.methods, "--steps", str(arguments.steps), "--out-dir", f"{folder}/run"]
        subprocess.run([sys.executable, str(ROOT / "train" / "consensus.py"), *options], check=True)
        rows = rows_of(pd.read_csv(Path(folder) / "run" / "consensus.csv"))
    print(pd.DataFrame(rows).to_string(index=False))
    if arguments.output:
        write_rows(arguments.output, rows, seed=0)


if __name__ == "__main__":
    main()
