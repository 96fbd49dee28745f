"""Time to a fixed accuracy: steps of real training times seconds per step of the emulated cluster.

    .venv-cluster/bin/python -m benchmarks.cluster.time_to_accuracy --target 55 \
        --accuracy runs/accuracy/accuracy.csv runs/accuracy-0.1/accuracy.csv \
        --cells runs/cluster/cluster.csv runs/stragglers/cluster.csv

The two are measured apart, with models of different sizes, and multiplied: the table says what a task that needs so
many steps would take on those links. What a lockstep method computes depends on neither links nor pace, so its steps
count in every cell with as many hosts; an asynchronous one's only in the cell that it was trained in.

Steps are the first at which the accuracy, between evaluations along a line, reaches the target: the median over
repeats, with the best of the learning rates that were tried. A repeat that failed never reaches it. Every step counts
for what timed steps take, though PowerSGD's first tenth sends whole gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import tyro

from benchmarks.cluster import accuracy
from benchmarks.cluster.methods import CLUSTER_METHODS, OTHERS, OURS
from benchmarks.cluster.table import COLUMNS, medians
from visualization.logs.tables import read_columns

DELAYS = ["spread", "straggle_chance", "slow_factor", "slow_host"]
CELL = ["hosts", "rate_gbit", "num_parameters", "planned_ms", *DELAYS, "slow_link_share"]
"""The columns of both CSVs that make a column here."""
RUN = ["method", *CELL, "learning_rate"]
"""The columns of accuracy.csv that repeats have in common."""


@dataclass(frozen=True)
class TimeToAccuracy:
    """What is joined."""

    accuracy: tuple[Path, ...]
    """Of `benchmarks.cluster.accuracy`."""
    cells: tuple[Path, ...]
    """cluster.csv files, of `benchmarks.cluster`."""
    target: float = 55.0
    """In per cent."""

    def __post_init__(self) -> None:
        if not 0 < self.target <= 100:
            raise ValueError(f"got target={self.target}, expected more than 0 and at most 100 per cent; see --help")

    def main(self) -> None:
        """Print the tables."""
        trained = _read(self.accuracy, accuracy.COLUMNS, source="benchmarks.cluster.accuracy")
        for column in ("hosts", "batch_size", "planned_steps"):
            if trained[column].nunique() > 1:
                values = ", ".join(f"{value:g}" for value in sorted(trained[column].unique()))
                raise ValueError(f"got trainings with {column} of {values}, expected one: see --accuracy")
        timed = _read(self.cells, COLUMNS, source="benchmarks.cluster")
        for rows, key, option in (
            (trained, [*RUN, "seed", "repeat", "num_steps"], "--accuracy"),
            (timed[timed["error"].isna()], ["method", *CELL, "repeat", "rank"], "--cells"),
        ):
            if (twice := rows.duplicated(key)).any():
                names = ", ".join(sorted(set(rows.loc[twice, "method"])))
                raise ValueError(f"got the same runs of {names} twice, expected each in one file; see {option}")
        seconds = seconds_per_step(timed)
        if seconds.empty:
            raise ValueError("got no trial with a time, expected one at least; see --cells, and its column error")
        print(markdown(times(steps_to(trained, self.target), seconds), self.target))
        print(f"\nMilliseconds per step, of all ranks together:\n\n{paces(seconds)}")


def _read(paths: Sequence[Path], columns: Sequence[str], *, source: str) -> pd.DataFrame:
    """The rows of all files, with the titles that methods have now.

    Raises:
        ValueError: a file has other columns, no rows, or methods that are not there.
    """
    parts = []
    for path in paths:
        rows = read_columns(path, columns, source=source)
        if unknown := set(rows["method"]) - set(CLUSTER_METHODS):
            raise ValueError(
                f"got {path} with the methods {', '.join(sorted(unknown))}, expected some of CLUSTER_METHODS"
            )
        rows["title"] = rows["method"].map(lambda name: CLUSTER_METHODS[name].title)
        rows.loc[rows["straggle_chance"] == 0, "slow_factor"] = 1.0  # without stragglers it says nothing
        parts.append(rows)
    return pd.concat(parts, ignore_index=True)


def steps_to(trained: pd.DataFrame, target: float) -> pd.DataFrame:
    """How many steps every method takes, trained as in a cell.

    Args:
        trained: rows of accuracy.csv.
        target: accuracy in per cent.

    Returns:
        A row per method and cell: num_steps (inf: not reached) and best (the highest accuracy, per cent), both with
        the learning_rate that takes the fewest steps.
    """
    runs = [
        {**dict(zip(RUN, names)), "num_steps": _crossing(rows, target), "best": rows["accuracy"].max()}
        for (*names, _, _), rows in trained.groupby([*RUN, "seed", "repeat"], sort=False)
    ]
    rates = pd.DataFrame(runs).groupby(RUN, sort=False)[["num_steps", "best"]].median().reset_index()
    rates = rates.sort_values(["num_steps", "best"], ascending=[True, False], kind="stable")
    return rates.drop_duplicates(["method", *CELL])


def _crossing(rows: pd.DataFrame, target: float) -> float:
    """The steps at which the accuracy first reaches the target; inf: it does not."""
    steps, last = 0.0, 0.0
    for point in rows.sort_values("num_steps").itertuples():
        if point.accuracy >= target:
            share = (target - last) / (point.accuracy - last)
            return float(steps + share * (point.num_steps - steps))
        steps, last = point.num_steps, point.accuracy
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
    """Seconds to the target: a row per method; a column per cell, NaN where it was not trained for it or not timed.

    Args:
        steps: of `steps_to`.
        seconds: of `seconds_per_step`.

    Returns:
        Beside the cells: num_steps, best and learning_rate of lockstep methods; NaN of the others.
    """
    is_asynchronous = steps["method"].map(lambda name: CLUSTER_METHODS[name].is_asynchronous)
    lockstep = steps[~is_asynchronous].drop_duplicates(["method", "hosts"])
    joined = pd.concat(
        [
            seconds.merge(lockstep[["method", "hosts", "num_steps"]], on=["method", "hosts"]),
            seconds.merge(steps.loc[is_asynchronous, ["method", *CELL, "num_steps"]], on=["method", *CELL]),
        ]
    )
    joined["cell"] = _labels(joined)
    joined["time"] = joined["num_steps"] * joined["seconds"]
    table = joined.pivot(index="method", columns="cell", values="time").reindex(columns=dict.fromkeys(_labels(seconds)))
    kept = lockstep.set_index("method")[["num_steps", "best", "learning_rate"]]
    return kept.join(table, how="outer")


def _labels(cells: pd.DataFrame) -> list[str]:
    return [label(dict(zip(CELL, cell))) for cell in cells[CELL].itertuples(index=False)]


def paces(seconds: pd.DataFrame) -> str:
    """Milliseconds per step, a row per method, a column per cell.

    Args:
        seconds: of `seconds_per_step`.
    """
    heads = _labels(seconds)
    table = seconds.assign(cell=heads).pivot(index="method", columns="cell", values="seconds")[
        list(dict.fromkeys(heads))
    ]
    lines = [f"| method | {' | '.join(table.columns)} |", "|---|" + "---:|" * len(table.columns)]
    lines += [
        f"| {CLUSTER_METHODS[str(method)].title} | {' | '.join(_number(1e3 * value) for value in row)} |"
        for method, row in table.sort_values(table.columns[0]).iterrows()
    ]
    return "\n".join(lines)


def label(cell: dict[str, float]) -> str:
    """The head of a cell's column."""
    parts = [
        f"{cell['hosts']:.0f} hosts",
        f"{cell['num_parameters'] / 1e6:.3g} M parameters",
        f"{cell['rate_gbit']:g} Gbit/s" if cell["rate_gbit"] else "links not shaped",
        f"compute {cell['planned_ms']:g} ms",
    ]
    if cell["spread"]:
        parts.append(f"spread {cell['spread']:g}")
    if cell["straggle_chance"]:
        parts.append(f"{100 * cell['straggle_chance']:g} % stragglers {cell['slow_factor']:g} times slower")
    if cell["slow_host"] > 1:
        parts.append(f"a host {cell['slow_host']:g} times slower")
    if cell["slow_link_share"]:
        parts.append(f"a link of {cell['slow_link_share']:.0%}")
    return ", ".join(parts)


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
        values = [_number(row["best"], digits=1), _number(row["learning_rate"], digits=2), _number(row["num_steps"])]
        values += [_number(row[cell]) for cell in cells]
        lines.append(f"| {CLUSTER_METHODS[str(method)].title} | {' | '.join(values)} |")
    for name, methods in (("ours", OURS), ("the others", OTHERS)):
        best = [_fastest(table.loc[table.index.isin(list(methods)), cell]) for cell in cells]
        lines.append(f"| fastest of {name} | | | | {' | '.join(best)} |")
    return "\n".join(lines)


def _fastest(seconds: pd.Series) -> str:
    finite = seconds[seconds < float("inf")]
    return f"{CLUSTER_METHODS[str(finite.idxmin())].title} {finite.min():.0f}" if len(finite) else "none"


def _number(value: float, *, digits: int = 0) -> str:
    if pd.isna(value):
        return ""
    return "never" if value == float("inf") else f"{value:.{digits}f}"


def main() -> None:
    """Run the command line."""
    tyro.cli(TimeToAccuracy, description=__doc__).main()


if __name__ == "__main__":
    main()
