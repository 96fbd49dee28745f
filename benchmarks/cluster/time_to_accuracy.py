"""Time to a fixed accuracy: steps of real training times seconds per step of the emulated cluster.

    .venv-cluster/bin/python -m benchmarks.cluster.time_to_accuracy --target 60 \
        --accuracy runs/accuracy/accuracy.csv runs/accuracy-stragglers/accuracy.csv \
        --cells runs/cluster/cluster.csv runs/stragglers/cluster.csv

The two are measured apart, with models of different sizes, and multiplied: the table says what a task that needs so
many steps would take on those links. What a method computes does not depend on the links; of asynchronous methods it
depends on the stragglers, so theirs count only in cells with the same chance of one.

Steps are the first at which the accuracy, between evaluations along a line, reaches the target: the median over
repeats, with the best of the learning rates that were tried.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import tyro

from benchmarks.cluster.methods import BOUND, METHODS
from benchmarks.cluster.table import medians

CELL = ["hosts", "rate_gbit", "num_parameters", "planned_ms", "straggle_chance", "slow_host", "slow_link_share"]
"""The columns of cluster.csv that make a column here."""
PEERS = ("hand", "ddp", "post-local", "decent", "torchft", "hivemind", "slowmo")
"""What the names of methods that are not ours begin with."""


@dataclass(frozen=True)
class Options:
    """What is joined."""

    accuracy: tuple[Path, ...]
    """Of `benchmarks.cluster.accuracy`."""
    cells: tuple[Path, ...]
    """cluster.csv files, of `benchmarks.cluster`."""
    target: float = 60.0
    """In per cent."""

    def main(self) -> None:
        """Print the table."""
        trained = pd.concat([pd.read_csv(path) for path in self.accuracy], ignore_index=True)
        timed = pd.concat([pd.read_csv(path) for path in self.cells], ignore_index=True)
        print(markdown(times(steps_to(trained, self.target), seconds_per_step(timed)), self.target))


def steps_to(trained: pd.DataFrame, target: float) -> pd.DataFrame:
    """How many steps every method takes.

    Args:
        trained: rows of accuracy.csv.
        target: accuracy in per cent.

    Returns:
        A row per method and straggle_chance: num_steps (inf: not reached), learning_rate (the best), best (the highest
        accuracy, with any), num_repeats.
    """
    trained = trained[trained["error"].isna()] if "error" in trained else trained
    key = ["method", "straggle_chance", "learning_rate", "repeat"]
    runs = [
        {**dict(zip(key, names)), "num_steps": _crossing(rows, target), "best": rows["accuracy"].max()}
        for names, rows in trained.groupby(key, sort=False)
    ]
    groups = pd.DataFrame(runs).groupby(key[:3], sort=False)
    rates = groups.agg(num_steps=("num_steps", "median"), best=("best", "max"), num_repeats=("repeat", "size"))
    rates = rates.reset_index().sort_values(["num_steps", "best"], ascending=[True, False], kind="stable")
    chosen = rates.groupby(key[:2], sort=False).first().reset_index()
    chosen["best"] = rates.groupby(key[:2], sort=False)["best"].max().to_numpy()
    return chosen


def _crossing(rows: pd.DataFrame, target: float) -> float:
    """The steps at which the accuracy first reaches the target; inf: it does not."""
    steps, accuracy = 0.0, 0.0
    for point in rows.sort_values("num_steps").itertuples():
        if point.accuracy >= target:
            share = (target - accuracy) / (point.accuracy - accuracy)
            return float(steps + share * (point.num_steps - steps))
        steps, accuracy = point.num_steps, point.accuracy
    return float("inf")


def seconds_per_step(timed: pd.DataFrame) -> pd.DataFrame:
    """A row per cell and method: seconds, of all ranks together (see fleet_step_ms of table.py).

    Args:
        timed: rows of cluster.csv, of one or more runs.
    """
    parts = []
    for cell, rows in timed.groupby(CELL, sort=False):
        table = medians(rows)
        parts.append(
            pd.DataFrame({"method": table["method"], "seconds": table["fleet_step_ms"] / 1e3}).assign(
                **dict(zip(CELL, cell))
            )
        )
    return pd.concat(parts, ignore_index=True)


def times(steps: pd.DataFrame, seconds: pd.DataFrame) -> pd.DataFrame:
    """Seconds to the target, a row per method, a column per cell beside those of `steps_to`; NaN: not both measured.

    Args:
        steps: of `steps_to`.
        seconds: of `seconds_per_step`.
    """
    even = steps[steps["straggle_chance"] == 0].set_index("method")
    table = even[["num_steps", "best", "learning_rate"]].copy()
    by_method = {key: rows.set_index("method")["num_steps"] for key, rows in steps.groupby("straggle_chance")}
    for cell, rows in seconds.groupby(CELL, sort=False):
        own = dict(zip(CELL, cell))
        counts = {
            method: by_method.get(own["straggle_chance"] if METHODS[method].is_asynchronous else 0.0, {}).get(method)
            for method in table.index
        }
        paces = rows.set_index("method")["seconds"]
        table[label(own)] = [
            counts[method] * paces[method] if counts[method] is not None and method in paces else float("nan")
            for method in table.index
        ]
    return table


def label(cell: dict[str, float]) -> str:
    """The head of a cell's column."""
    parts = [
        f"{cell['hosts']:.0f} hosts",
        f"{cell['num_parameters'] / 1e6:.3g} M parameters",
        f"{cell['rate_gbit']:g} Gbit/s" if cell["rate_gbit"] else "links not shaped",
        f"compute {cell['planned_ms']:g} ms",
    ]
    if cell["straggle_chance"]:
        parts.append(f"{cell['straggle_chance']:.0%} stragglers")
    if cell["slow_host"] > 1:
        parts.append(f"a host {cell['slow_host']:g} times slower")
    if cell["slow_link_share"]:
        parts.append(f"a link of {cell['slow_link_share']:.0%}")
    return ", ".join(parts)


def is_ours(method: str) -> bool:
    """Whether it is a wrapper of this library."""
    return method != BOUND and not method.startswith(PEERS)


def markdown(table: pd.DataFrame, target: float) -> str:
    """Methods by the steps they take, then the fastest of ours and of the others in every cell.

    Args:
        table: of `times`.
        target: in per cent.
    """
    cells = [name for name in table.columns if name not in ("num_steps", "best", "learning_rate")]
    lines = [
        f"| method | best accuracy % | learning rate | steps to {target:g} % | {' | '.join(cells)} |",
        "|---|" + "---:|" * (3 + len(cells)),
    ]
    for method, row in table.sort_values(["num_steps", "best"], ascending=[True, False]).iterrows():
        values = [_number(row["num_steps"], 0), *(_number(row[cell], 0) for cell in cells)]
        lines.append(
            f"| {METHODS[str(method)].title} | {row['best']:.1f} | {row['learning_rate']:g} | {' | '.join(values)} |"
        )
    for name, chosen in (("ours", [m for m in table.index if is_ours(m)]), ("others", _others(table.index))):
        best = [_fastest(table.loc[chosen, cell]) for cell in cells]
        lines.append(f"| fastest of {name} | | | | {' | '.join(best)} |")
    return "\n".join(lines)


def _others(methods: Sequence[str]) -> list[str]:
    return [method for method in methods if method != BOUND and not is_ours(method)]


def _fastest(seconds: pd.Series) -> str:
    finite = seconds[seconds < float("inf")]
    return f"{METHODS[str(finite.idxmin())].title} {finite.min():.0f}" if len(finite) else "none"


def _number(value: float, digits: int) -> str:
    if pd.isna(value):
        return ""
    return "never" if value == float("inf") else f"{value:.{digits}f}"


def main() -> None:
    """Run the command line."""
    tyro.cli(Options, description=__doc__).main()


if __name__ == "__main__":
    main()
