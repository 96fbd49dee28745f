"""How long a job takes to train on after one of its workers was killed, under torchrun --max-restarts.

    python -m benchmarks.restart --recipes sgp adpsgd --repeats 3

Four workers on this machine train on handwritten digits and checkpoint every 40 steps; one is killed (SIGKILL) behind
step 80. Rows go to benchmarks/results/restart.csv: seconds from the kill to the line that says from which step the run
goes on, and to the first epoch of new steps (22 of them).
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import tyro

from benchmarks.record import RESULTS, ROOT, provenance


@dataclass
class RestartBenchmark:
    """What is run."""

    recipes: tuple[str, ...] = ("sgp", "adpsgd")
    repeats: int = 3
    num_workers: int = 4
    seed: int = 1
    """Of training."""
    output: Path = RESULTS / "restart.csv"


def main() -> None:
    """One row for each recipe and repeat, appended as it comes."""
    options = tyro.cli(RestartBenchmark)
    for repeat in range(options.repeats):
        for recipe in options.recipes:
            to_resume, to_epoch = measure(recipe, options.num_workers, seed=options.seed)
            row = {
                **provenance(options.seed),
                "recipe": recipe,
                "num_workers": options.num_workers,
                "repeat": repeat,
                "seconds_to_resume": round(to_resume, 1),
                "seconds_to_new_epoch": round(to_epoch, 1),
            }
            print(row, flush=True)
            options.output.parent.mkdir(parents=True, exist_ok=True)
            pd.DataFrame([row]).to_csv(options.output, mode="a", header=not options.output.exists(), index=False)


def measure(recipe: str, num_workers: int, *, seed: int) -> tuple[float, float]:
    """Seconds from the kill to the resumption, and to the first epoch after it."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_workers)),
            *("--max-restarts", "1", "train/gossip_sgd.py", "--recipe", recipe, "--epochs", "1000000"),
            *("--validate-every", "1000000", "--resume", "auto", "--checkpoint-every-steps", "40", "--out-dir", folder),
            *("--seed", str(seed)),
        ]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment, cwd=ROOT
        )
        assert process.stdout is not None
        killed, resumed = 0.0, 0.0
        try:
            for line in process.stdout:
                if killed and re.search(r"from step \d+", line):
                    resumed = time.monotonic() - killed
                elif resumed and line.startswith("epoch"):
                    return resumed, time.monotonic() - killed
                elif not killed and line.startswith("epoch   6 "):  # an epoch has 22 steps
                    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
                    os.kill(int(children[-1]), signal.SIGKILL)
                    killed = time.monotonic()
        finally:
            process.terminate()
            process.communicate()
    raise RuntimeError(
        f"{recipe}: got no epoch after the kill, expected the job to start again; run it without this script"
    )


if __name__ == "__main__":
    main()
