"""The time of a training step with this tree's library, beside that with an earlier commit's, in one run.

    OMP_NUM_THREADS=1 python -m benchmarks.before_after 5bfd590

Both sides train at once in processes of their own and take turns of a few steps, in an order that is drawn for each
cycle, so that both see the same noise. The side whose turn it is not waits for a line of standard input. A figure is
the median over cycles of the ratio within a cycle; the interval is that of the median, 95 %, by bootstrap.
"""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import tyro
from tqdm import tqdm

from benchmarks.record import RESULTS, ROOT, write_rows

RANK = Path(__file__).with_name("rank.py")
COMPARED_METHODS = ("ar", "dpsgd", "sgp", "osgp", "choco", "powergossip", "adpsgd", "wagma")
STEPS = {"resnet18": 2, "mlp": 40}


@dataclass
class Options:
    """Compare the time of a step with that of an earlier commit."""

    before: Annotated[str, tyro.conf.Positional]
    """the earlier commit"""
    methods: tuple[str, ...] = COMPARED_METHODS
    """which methods, by the names of the recipes"""
    models: tuple[str, ...] = ("mlp", "resnet18")
    """which models: "mlp" shows what surrounds a round, "resnet18" is mostly compute"""
    cycles: int = 40
    """turns of each side, for each method and model"""
    ranks: int = 4
    """the number of ranks on each side"""
    out: Path = RESULTS / "before_after.csv"
    """the CSV file to write"""


class Side:
    """The ranks that train with one version of the library."""

    def __init__(self, processes: list[subprocess.Popen[str]]) -> None:
        self._processes = processes

    def turn(self, method: str, steps: int) -> float:
        """Milliseconds per step of the slowest rank."""
        for process in self._processes:
            assert process.stdin is not None
            print(method, steps, file=process.stdin, flush=True)
        assert self._processes[0].stdout is not None
        line = self._processes[0].stdout.readline()
        if not line:
            raise RuntimeError(f"{method}: rank 0 ended; its error is above")
        return float(line)


@contextmanager
def side(tree: Path, model: str, num_ranks: int, store: Path) -> Iterator[Side]:
    """Ranks that import gossip_modules from `tree`."""
    environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, str(RANK), str(rank), str(num_ranks), str(store), model],
            env=environment,
            cwd=tree,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(num_ranks)
    ]
    try:
        yield Side(processes)
        for process in processes:
            process.communicate(timeout=60)
    finally:
        for process in processes:
            process.kill()


def extract(commit: str, folder: Path) -> None:
    """Write the library of a commit into a folder."""
    archive = subprocess.run(["git", "archive", commit, "gossip_modules"], cwd=ROOT, capture_output=True)
    if archive.returncode:
        error = archive.stderr.decode().strip()
        raise SystemExit(f"error: got {commit!r}, expected a commit of {ROOT} with gossip_modules: {error}")
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as tar:
        tar.extractall(folder, filter="data")


def interval(ratios: np.ndarray, generator: np.random.Generator) -> tuple[float, float]:
    """The interval of the median with 95 % confidence."""
    medians = np.median(generator.choice(ratios, (2000, len(ratios))), axis=1)
    low, high = np.quantile(medians, [0.025, 0.975])
    return float(low), float(high)


def compare(options: Options, model: str, before: Path, folder: Path) -> list[dict[str, object]]:
    """A row for each method."""
    generator = np.random.default_rng(0)
    times: dict[str, list[list[float]]] = {method: [] for method in options.methods}
    with ExitStack() as stack:
        sides = [
            stack.enter_context(side(tree, model, options.ranks, folder / f"{model}-{name}"))
            for name, tree in (("before", before), ("after", ROOT))
        ]
        for cycle in tqdm(range(options.cycles + 1), desc=model, disable=not sys.stderr.isatty()):
            for method in generator.permutation(list(options.methods)):
                pair = [0.0, 0.0]
                for i in generator.permutation(2):
                    pair[i] = sides[i].turn(str(method), STEPS[model])
                if cycle:  # the first one makes models and connections
                    times[str(method)].append(pair)
    rows: list[dict[str, object]] = []
    for method, pairs in times.items():
        milliseconds = np.array(pairs)
        ratios = milliseconds[:, 1] / milliseconds[:, 0]
        low, high = interval(ratios, generator)
        rows.append(
            {
                "before": options.before,
                "model": model,
                "method": method,
                "ranks": options.ranks,
                "cycles": options.cycles,
                "before_ms": round(float(np.median(milliseconds[:, 0])), 3),
                "after_ms": round(float(np.median(milliseconds[:, 1])), 3),
                "ratio": round(float(np.median(ratios)), 4),
                "ratio_low": round(low, 4),
                "ratio_high": round(high, 4),
            }
        )
        print(
            f"{model:9} {method:12} {rows[-1]['before_ms']:9} ms, then {rows[-1]['after_ms']:9} ms: "
            f"{rows[-1]['ratio']:.3f} ({low:.3f} to {high:.3f})",
            flush=True,
        )
    return rows


def main() -> None:
    """Run the comparison and write its CSV file."""
    options = tyro.cli(Options, description=__doc__)
    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        extract(options.before, folder / "tree")
        for model in options.models:
            rows += compare(options, model, folder / "tree", folder)
    write_rows(options.out, rows, seed=0)


if __name__ == "__main__":
    main()
