"""What the simulator predicts for the cluster of docs/choosing.md: a row per method, the fastest first.

    OMP_NUM_THREADS=1 .venv/bin/python -m benchmarks.simulator
    .venv/bin/python -m benchmarks.simulator --output benchmarks/results/simulator.csv

The numbers are those of `python -m gossip_modules.lab --world-size 1024 --network "1 Gbit/s" --parameters 25e6
--compute 0.25`, which prints the advice as well, and two rows of D-PSGD under `ConsensusControl`.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from benchmarks.record import write_rows
from gossip_modules import ConsensusControl
from gossip_modules.lab import Compute, Digits, LabPlan, Network, Prediction, Setting, simulate
from gossip_modules.methods import METHODS

SETTING = Setting(1024, 25_000_000, Compute(seconds=0.25), Network("1 Gbit/s"))
CONTROLS = (ConsensusControl(2.0), ConsensusControl(2.0, average_every=1))
"""The schedules of two further rows, of D-PSGD."""


def rows_of(predictions: Sequence[Prediction]) -> list[dict[str, Any]]:
    """A row per prediction, the fastest first; without seconds, and last, those that did not reach the target."""
    ordered = sorted(predictions, key=lambda p: (not p.has_reached, p.seconds))
    return [
        {
            "method": p.name,
            "steps": round(p.num_steps),
            "step_seconds": round(p.step_seconds, 3),
            "seconds": round(p.seconds, 1) if p.has_reached else None,
            "rank_megabytes": round(p.rank_bytes / 1e6),
            "waiting_percent": round(100 * p.waiting_share),
            "disagreement": round(p.disagreement, 3),
            "agreed": "yes" if p.has_agreed else "no",
        }
        for p in ordered
    ]


def main() -> None:
    """Simulate every method that knows so many workers, print the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", help="as of python -m gossip_modules.lab (default: all)")
    parser.add_argument("--output", type=Path, help="a CSV file to write")
    arguments = parser.parse_args()
    predictions = []
    for method in arguments.methods or METHODS:
        try:
            predictions.append(simulate(method, SETTING, Digits(seed=0)))
        except ValueError as error:
            if arguments.methods:
                raise
            print(f"left out: {error}")
    if not arguments.methods:
        predictions += [
            simulate(LabPlan.of("dpsgd", schedule=control), SETTING, Digits(seed=0)) for control in CONTROLS
        ]
    rows = rows_of(predictions)
    print(pd.DataFrame(rows).to_string(index=False))
    if arguments.output:
        write_rows(arguments.output, rows, seed=0)


if __name__ == "__main__":
    main()
