"""Speed and accuracy where some ranks are slow, pause or die, on real processes of one machine.

    OMP_NUM_THREADS=1 .venv/bin/python -m benchmarks.stragglers train    # 8 ranks, three settings; 13 minutes
    OMP_NUM_THREADS=1 .venv/bin/python -m benchmarks.stragglers pauses   # 4 ranks that pause at random; 4 minutes
    OMP_NUM_THREADS=1 .venv/bin/python -m benchmarks.stragglers elastic  # dpwa, two workers are killed; 2 minutes

A machine with fewer cores than ranks would only measure its cores. So a step is a small computation, forward and
backward of a CNN of 28 thousand parameters on digits (some 3 ms), and a sleep of --step-seconds between the two, an
emulated accelerator. Delays lengthen the sleep; communication is real and never counted as a part of it.

`train`: all methods get the same number of optimizer steps, summed over ranks, and the same learning rates as a
function of the share of them that is done. So final accuracies are at equal work, and the seconds to a fixed accuracy
show what waiting costs. In AllReduce, SGP and OSGP each rank takes its part of the steps. In AD-PSGD and dpwa a common
counter ends the run, so that fast ranks do more; in WAGMA it is looked at within each global average, where all ranks
are at the same round. Models are kept in memory at fixed times, and averaged and evaluated after the run. The rate of
a rank is its own steps per second while all train, from the last rank's fifth step to the first rank's end. The slow
rank is not among the ranks of the rate; where two random ranks are late in each step, all are.

`pauses`: see benchmarks/stragglers/pauses.py. `elastic`: workers end by the clock; of two that are killed one comes
back after the other, so that nobody finds it who has only just begun himself.

CSV files, tables and the picture go to --out-dir.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import tyro

from benchmarks.stragglers import elastic, pauses, training
from benchmarks.stragglers.elastic import Death
from benchmarks.stragglers.methods import BOUND, STRAGGLER_METHODS
from benchmarks.stragglers.pauses import DECENT, HAS_DECENT, Pauses
from benchmarks.stragglers.processes import run_group
from benchmarks.stragglers.training import SETTINGS, StragglerRun
from visualization.stragglers import draw

OUT_DIR = Path("runs/stragglers")


@dataclass(frozen=True)
class Train:
    """Eight ranks: undisturbed, with one slow rank, and with two random ones late in each step."""

    methods: tuple[str, ...] = tuple(STRAGGLER_METHODS)
    """Rows of the table."""
    settings: tuple[str, ...] = tuple(SETTINGS)
    """Parts of the table; rates that are kept need "undisturbed"."""
    seeds: tuple[int, ...] = (1,)
    """A run of each method in each setting for each."""
    num_ranks: int = 8
    """Processes."""
    num_rounds: int = 200
    """Optimizer steps of a run, divided by num_ranks."""
    step_seconds: float = 0.05
    """Sleep of each step."""
    target_percent: float = 98.0
    """Accuracy of the averaged model to which seconds are counted."""
    quick: bool = False
    """A few steps, to see that it runs; the figures say nothing."""
    out_dir: Path = OUT_DIR
    """Folder of everything this writes."""

    def __post_init__(self) -> None:
        unknown = [name for name in self.methods if name not in STRAGGLER_METHODS]
        unknown += [name for name in self.settings if name not in SETTINGS]
        if unknown or not self.methods or not self.settings or not self.seeds or self.num_ranks < 2:
            raise ValueError(
                f"got methods={self.methods}, settings={self.settings}, seeds={self.seeds} and num_ranks="
                f"{self.num_ranks}, expected some of {', '.join(STRAGGLER_METHODS)}, some of {', '.join(SETTINGS)}, "
                "a seed and 2 ranks or more; see --help"
            )

    def run(self, method: str, setting: str, seed: int) -> StragglerRun:
        """One of the runs."""
        run = StragglerRun(method, setting, seed, self.num_ranks, self.num_rounds, self.step_seconds)
        return replace(run, num_rounds=20, step_seconds=0.01, extra_seconds=0.05) if self.quick else run

    def main(self) -> None:
        """Make the runs, those to be compared one after the other; print the table, draw the picture."""
        self.out_dir.mkdir(parents=True, exist_ok=True)
        rows: list[dict[str, Any]] = []
        points: list[dict[str, Any]] = []
        failed: list[str] = []
        for seed in self.seeds:
            for method in self.methods:
                for setting in self.settings:
                    run = self.run(method, setting, seed)
                    print(f"== {STRAGGLER_METHODS[method].title}, {setting}, seed {seed}", flush=True)
                    try:
                        records = run_group(
                            run.num_ranks,
                            training.train,
                            run,
                            timeout=60 + 2 * run.num_rounds * (run.step_seconds * run.slow_factor + run.extra_seconds),
                        )
                    except RuntimeError as error:
                        failed.append(f"{method}, {setting}, seed {seed}: {error}")
                        continue
                    curve = training.curve(records, run)
                    row = training.row_of(run, records, curve, target_percent=self.target_percent)
                    rows.append(row)
                    print(
                        f"   {row['steps_per_second']:.2f} steps/s of fast ranks, {row['train_seconds']:.1f} s, "
                        f"{row['accuracy_percent']:.2f} %",
                        flush=True,
                    )
                    key = {name: row[name] for name in ("setting", "method", "title", "seed")}
                    points += [{**key, "seconds": x, "accuracy_percent": y} for x, y in curve]
                    pd.DataFrame(rows).to_csv(self.out_dir / "stragglers.csv", index=False)
                    pd.DataFrame(points).to_csv(self.out_dir / "curves.csv", index=False)
        if rows:
            text = training.markdown(pd.DataFrame(rows), target_percent=self.target_percent)
            (self.out_dir / "stragglers.md").write_text(text + "\n")
            picture = draw(
                self.out_dir / "stragglers.csv", self.out_dir / "curves.csv", self.out_dir / "stragglers.png"
            )
            print(f"\n{text}\n\n{picture}")
        if failed:
            raise SystemExit("got no result from " + "; ".join(failed))


@dataclass(frozen=True)
class PausesCommand:
    """Four ranks with a million parameters that pause 100 ms with probability 1/4 before each step."""

    methods: tuple[str, ...] = (*STRAGGLER_METHODS, *([DECENT] if HAS_DECENT else []))
    """Rows of the table; decent-dp too where its package is installed."""
    num_ranks: int = 4
    """Processes."""
    num_cycles: int = 12
    """Turns of each method."""
    num_steps: int = 40
    """Steps of a turn, for each rank; a multiple of WAGMA's period, 10."""
    batch_size: int = 64
    """Rows per rank and step."""
    pause_seconds: float = 0.1
    """How long a rank sleeps,"""
    probability: float = 0.25
    """and how often."""
    out_dir: Path = OUT_DIR
    """Folder of everything this writes."""

    def __post_init__(self) -> None:
        known = (*STRAGGLER_METHODS, DECENT)
        if BOUND not in self.methods or any(name not in known for name in self.methods):
            raise ValueError(f"got methods={self.methods}, expected {BOUND} and some of {', '.join(known)}; see --help")

    def main(self) -> None:
        """Measure, print the table."""
        self.out_dir.mkdir(parents=True, exist_ok=True)
        plan = Pauses(
            self.methods, self.num_cycles, self.num_steps, self.batch_size, self.pause_seconds, self.probability
        )
        turns = (self.num_cycles + 1) * len(self.methods) * self.num_steps
        print(f"== {self.num_ranks} ranks, {turns} steps each", flush=True)
        limit = 60 + 2 * turns * (self.pause_seconds + 0.1)
        times = run_group(self.num_ranks, pauses.measure, plan, timeout=limit)
        lines = [
            {"rank": rank, "method": method, "cycle": cycle, "ms_per_step": value}
            for rank, own in enumerate(times)
            for method, values in own.items()
            for cycle, value in enumerate(values)
        ]
        pd.DataFrame(lines).to_csv(self.out_dir / "pauses.csv", index=False)
        text = pauses.markdown(times)
        (self.out_dir / "pauses.md").write_text(text + "\n")
        print(f"\n{text}\n\nin {self.out_dir}")


@dataclass(frozen=True)
class Elastic:
    """dpwa: two of the workers are killed (SIGKILL) and started again while the others train on."""

    num_workers: int = 4
    """Processes."""
    seconds: float = 20.0
    """Of training, the same with and without deaths."""
    step_seconds: float = 0.05
    """Sleep of each step."""
    seeds: tuple[int, ...] = (1, 2, 3)
    """A run with and one without deaths for each."""
    out_dir: Path = OUT_DIR
    """Folder of everything this writes."""

    def main(self) -> None:
        """Train, print the table."""
        self.out_dir.mkdir(parents=True, exist_ok=True)
        deaths = (Death("worker1", 0.3, 0.45), Death("worker3", 0.35, 0.6))
        rows: list[dict[str, Any]] = []
        for seed in self.seeds:
            for now in ((), deaths):
                print(f"== seed {seed}, {len(now)} deaths", flush=True)
                records = elastic.run(
                    self.num_workers, now, seconds=self.seconds, step_seconds=self.step_seconds, seed=seed
                )
                rows += elastic.rows_of(seed, records, {death.name for death in now})
                pd.DataFrame(rows).to_csv(self.out_dir / "elastic.csv", index=False)
        text = elastic.markdown(pd.DataFrame(rows))
        (self.out_dir / "elastic.md").write_text(text + "\n")
        print(f"\n{text}\n\nin {self.out_dir}")


Command = (
    Annotated[Train, tyro.conf.subcommand("train")]
    | Annotated[PausesCommand, tyro.conf.subcommand("pauses")]
    | Annotated[Elastic, tyro.conf.subcommand("elastic")]
)


def main(command: Train | PausesCommand | Elastic) -> None:
    """Run a subcommand."""
    command.main()


if __name__ == "__main__":
    main(tyro.cli(Command, description=__doc__))
