"""The time of a training step beside hand-written loops, DistributedDataParallel and Decent-DP, in one run.

    OMP_NUM_THREADS=1 python -m benchmarks.step_time                            # 4 Gloo ranks on the CPU
    OMP_NUM_THREADS=1 python -m benchmarks.step_time --before 5bfd590 --methods sgp hand-sgp

All methods train models of their own and take turns of a few steps, in an order that is drawn for each cycle, so that
all see the same noise. `--before` adds a second side, processes that train with the library of an earlier commit; the
side that has no turn waits for a line of standard input. Each method has a standard (`STANDARDS`): the hand-written
loop of the same algorithm, or DistributedDataParallel. A ratio is the median over cycles of the ratio within a cycle.
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

import numpy as np
import tyro
from tqdm import tqdm

from benchmarks.contenders import CONTENDERS, STANDARDS
from benchmarks.record import RESULTS, ROOT, write_rows

RANK = Path(__file__).with_name("step_rank.py")
STEPS = {"resnet18": 2, "resnet18-16": 1, "mlp": 40, "tensors": 4, "wide": 4}
"""The steps of a turn, by model."""


@dataclass
class Options:
    """Compare the time of a training step by several methods."""

    before: str = ""
    """an earlier commit, to compare with its library too"""
    methods: tuple[str, ...] = tuple(CONTENDERS)[:12]
    """which methods, by the names in `CONTENDERS`"""
    models: tuple[str, ...] = ("mlp", "tensors", "resnet18")
    """which models: "mlp" has 25,000 parameters, "tensors" 1,000 small tensors, "resnet18" 11 M parameters and two
    images, "resnet18-16" 16 images, "wide" 9.4 M parameters in four layers"""
    cycles: int = 30
    """turns of each method"""
    ranks: int = 4
    """the number of ranks on each side"""
    load: str = "idle"
    """the load of the machine beside this run, for the record"""
    out: Path = RESULTS / "step_time.csv"
    """the CSV file to write"""


class Side:
    """The ranks that train with one version of the library."""

    def __init__(self, processes: list[subprocess.Popen[str]]) -> None:
        self._processes = processes

    def turn(self, method: str, steps: int) -> tuple[float, float]:
        """Milliseconds per step: wall time of the slowest rank, and CPU time of a rank."""
        for process in self._processes:
            assert process.stdin is not None
            print(method, steps, file=process.stdin, flush=True)
        assert self._processes[0].stdout is not None
        line = self._processes[0].stdout.readline()
        if not line:
            raise RuntimeError(f"{method}: rank 0 ended; its error is above")
        wall, cpu = map(float, line.split())
        return wall, cpu


@contextmanager
def side(tree: Path, model: str, num_ranks: int, store: Path) -> Iterator[Side]:
    """Ranks that import gossip_modules from `tree`."""
    environment = {**os.environ, "PYTHONPATH": f"{tree}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, str(RANK), str(rank), str(num_ranks), str(store), model],
            env=environment,
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


def compare(options: Options, model: str, trees: dict[str, Path], folder: Path) -> list[dict[str, object]]:
    """A row for each method on each side: the names of `trees` are the versions of the library."""
    generator = np.random.default_rng(0)
    turns = [(version, method) for version in trees for method in options.methods]
    times: dict[tuple[str, str], list[tuple[float, float]]] = {turn: [] for turn in turns}
    with ExitStack() as stack:
        sides = {
            version: stack.enter_context(side(tree, model, options.ranks, folder / f"{model}-{version}"))
            for version, tree in trees.items()
        }
        for cycle in tqdm(range(options.cycles + 1), desc=model, disable=not sys.stderr.isatty()):
            for k in generator.permutation(len(turns)):
                version, method = turns[k]
                figures = sides[version].turn(method, STEPS[model])
                if cycle:  # the first one makes models and connections
                    times[version, method].append(figures)
    rows: list[dict[str, object]] = []
    for (version, method), measured in times.items():
        standard = STANDARDS.get(method, "local")
        own, base = np.array(measured), np.array(times.get((version, standard), measured))
        ratio, cpu_ratio = (own / base).T
        low, high = interval(ratio, generator)
        cpu_low, cpu_high = interval(cpu_ratio, generator)
        wall, cpu = np.median(own, axis=0)
        row = {"load": options.load, "model": model, "ranks": options.ranks, "cycles": options.cycles}
        row |= {"library": version, "method": method, "standard": standard if (version, standard) in times else ""}
        numbers = {"wall_ms": wall, "ratio": np.median(ratio), "ratio_low": low, "ratio_high": high, "cpu_ms": cpu}
        numbers |= {"cpu_ratio": np.median(cpu_ratio), "cpu_ratio_low": cpu_low, "cpu_ratio_high": cpu_high}
        numbers |= {"cpu_over_ms": np.median(own[:, 1] - base[:, 1])}
        rows.append(row | {name: round(float(value), 4) for name, value in numbers.items()})
        print(
            f"{model:9} {version:8} {method:12} wall {wall:9.3f} ms, {np.median(ratio):6.3f} x {standard:12} "
            f"cpu {cpu:9.3f} ms, {np.median(cpu_ratio):6.3f} x ({cpu_low:.3f} to {cpu_high:.3f})",
            flush=True,
        )
    return rows


def main() -> None:
    """Run the comparison and write its CSV file."""
    options = tyro.cli(Options, description=__doc__)
    if unknown := [name for name in options.methods if name not in CONTENDERS]:
        raise SystemExit(f"error: got methods {unknown}, expected some of {', '.join(CONTENDERS)}")
    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        trees = {"this": ROOT}
        if options.before:
            extract(options.before, folder / "tree")
            trees = {options.before: folder / "tree", **trees}
        for model in options.models:
            rows += compare(options, model, trees, folder)
    write_rows(options.out, rows, seed=0)


if __name__ == "__main__":
    main()
