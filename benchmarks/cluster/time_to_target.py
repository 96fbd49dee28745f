"""Time to a fixed accuracy, or to a fixed loss: steps of real training times seconds per step of the emulated cluster.

    .venv-cluster/bin/python -m benchmarks.cluster.time_to_target --target 55 --curves runs/curves/images.csv \
        --cells runs/cluster/cluster.csv runs/slow/cluster.csv
    .venv-cluster/bin/python -m benchmarks.cluster.time_to_target --target 2.0 \
        --curves benchmarks/results/loss_steps.csv --cells benchmarks/results/loss_cells.csv

The two are measured apart, with models of different sizes, and multiplied: the table says what a task that needs so
many steps would take on those links. What a lockstep method computes depends on neither links nor pace, so its steps
count in every cell with as many hosts; an asynchronous one's only in the cell that it was trained in.

Steps are the first at which the score, between evaluations along a line, reaches the target: the median over seeds, at
the learning rate that is best at the end with the lowest seed. A training that failed never reaches it. Every step
counts for what timed steps take, though PowerSGD's first tenth sends whole gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import tyro

from benchmarks.cluster import curve_table
from benchmarks.cluster.curve_table import tuned_rate
from benchmarks.cluster.methods import CLUSTER_METHODS, OTHERS, OURS
from benchmarks.cluster.table import COLUMNS, medians
from benchmarks.cluster.workload.task import Score
from benchmarks.cluster.workload.tasks import TASKS
from visualization.logs.tables import read_columns

DELAYS = ["spread", "straggle_chance", "slow_factor", "slow_host"]
CELL = ["hosts", "rate_gbit", "num_parameters", "planned_ms", *DELAYS, "slow_link_share"]
"""The columns of both CSVs that make a column here."""
RUN = ["method", *CELL]
"""The columns of curves that learning rates and seeds have in common."""
_KEPT = ["num_steps", "fewest", "most", "final", "learning_rate", "num_seeds"]
"""The columns of a table before its cells."""


@dataclass(frozen=True)
class TimeToTarget:
    """What is joined."""

    target: float
    """Accuracy in per cent, or loss in nats per byte."""
    curves: tuple[Path, ...]
    """CSV files of `benchmarks.cluster.curves`, of one task."""
    cells: tuple[Path, ...]
    """cluster.csv files, of `benchmarks.cluster`."""

    def main(self) -> None:
        """Print the tables."""
        trained = _read(self.curves, curve_table.COLUMNS, source="benchmarks.cluster.curves")
        timed = _read(self.cells, COLUMNS, source="benchmarks.cluster")
        print(tables(trained, timed, self.target))


def tables(trained: pd.DataFrame, timed: pd.DataFrame, target: float) -> str:
    """The time to the target and the time of a step, in Markdown.

    Args:
        trained: rows of `benchmarks.cluster.curves`.
        timed: rows of `benchmarks.cluster`.
        target: of the score of the task.

    Raises:
        ValueError: rows of several tasks, of several numbers of timed steps in a cell, or twice the same; learning
            rates of which none is the tuned one; no row with a time; or a target that is none.
    """
    for column in ("task", "data", "hosts", "batch_size", "planned_steps"):
        if trained[column].nunique() > 1:
            values = ", ".join(f"{value}" for value in sorted(trained[column].unique()))
            raise ValueError(f"got trainings with {column} of {values}, expected one: see --curves")
    score = TASKS[trained["task"].iloc[0]].score
    score.check_target(target)
    trained, timed = _known(trained), _known(timed)
    for names, rows in timed[timed["error"].isna()].groupby(["method", *CELL]):
        if rows["planned_steps"].nunique() > 1:
            values = ", ".join(f"{value}" for value in sorted(rows["planned_steps"].unique()))
            raise ValueError(f"got trials of {names[0]} with {values} timed steps in a cell, expected one: see --cells")
    for rows, key, option in (
        (trained, [*RUN, "learning_rate", "seed", "num_steps"], "--curves"),
        (timed[timed["error"].isna()], ["method", *CELL, "repeat", "rank"], "--cells"),
    ):
        if (twice := rows.duplicated(key)).any():
            names = ", ".join(sorted(set(rows.loc[twice, "method"])))
            raise ValueError(f"got the same runs of {names} twice, expected each in one file; see {option}")
    seconds = seconds_per_step(timed)
    if seconds.empty:
        raise ValueError("got no trial with a time, expected one at least; see --cells, and its column error")
    times_to_it = markdown(times(steps_to(trained, target, score), seconds), target, score)
    return f"{times_to_it}\n\nMilliseconds per step, of all ranks together:\n\n{paces(seconds)}"


def _read(paths: Sequence[Path], columns: Sequence[str], *, source: str) -> pd.DataFrame:
    """The rows of all files.

    Raises:
        ValueError: a file has other columns, or no rows.
    """
    return pd.concat([read_columns(path, columns, source=source) for path in paths], ignore_index=True)


def _known(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows, with the titles that methods have now.

    Raises:
        ValueError: there are methods that are not there.
    """
    if unknown := set(rows["method"]) - set(CLUSTER_METHODS):
        raise ValueError(
            f"got rows with the methods {', '.join(sorted(unknown))}, expected some of CLUSTER_METHODS; remove them"
        )
    rows = rows.assign(title=rows["method"].map(lambda name: CLUSTER_METHODS[name].title))
    rows.loc[rows["straggle_chance"] == 0, "slow_factor"] = 1.0  # without stragglers it says nothing
    return rows


def steps_to(trained: pd.DataFrame, target: float, score: Score) -> pd.DataFrame:
    """How many steps the target takes.

    Args:
        trained: rows of `benchmarks.cluster.curves`, of one task.
        target: of its score.
        score: of the task.

    Returns:
        A row per method and cell, at the learning rate that is best at the end with the lowest seed: num_steps (inf:
        not reached) and final (the score at the end), medians over seeds; fewest and most (of the steps of a seed);
        learning_rate; num_seeds.

    Raises:
        ValueError: the rows do not say which learning rate was tuned; see `tuned_rate`.
    """
    found = []
    for names, rows in trained.groupby(RUN, sort=False):
        rate = tuned_rate(rows, score)
        seeds = [own for _, own in rows[rows["learning_rate"] == rate].groupby("seed", sort=False)]
        steps = pd.Series([_crossing(own, target, score) for own in seeds])
        finals = pd.Series([own.sort_values("num_steps")["score"].iloc[-1] for own in seeds])
        values = (steps.median(), steps.min(), steps.max(), finals.median(), rate, len(seeds))
        found.append({**dict(zip(RUN, names, strict=True)), **dict(zip(_KEPT, values, strict=True))})
    return pd.DataFrame(found)


def _crossing(rows: pd.DataFrame, target: float, score: Score) -> float:
    """The steps at which the score first reaches the target; inf: it does not."""
    steps, last = 0.0, score.of_a_guess
    for point in rows.sort_values("num_steps").itertuples():
        if score.goodness(point.score) >= score.goodness(target):
            share = (target - last) / (point.score - last)
            return float(steps + share * (point.num_steps - steps))
        steps, last = point.num_steps, point.score
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
        Beside the cells: the columns of `steps_to` of lockstep methods; NaN of the others.
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
    return lockstep.set_index("method")[_KEPT].join(table, how="outer")


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


def markdown(table: pd.DataFrame, target: float, score: Score) -> str:
    """Methods by the steps they take, then the fastest of ours and of the others in every cell.

    Args:
        table: of `times`.
        target: of the score.
        score: of the task.
    """
    cells = [name for name in table.columns if name not in _KEPT]
    lines = [
        f"| method | {score.name} at the end, {score.unit} | learning rate | seeds | steps to {target:g} | fewest-most "
        f"| {' | '.join(cells)} |",
        "|---|" + "---:|" * (5 + len(cells)),
    ]
    order = table.assign(goodness=table["final"].map(score.goodness))
    for method, row in order.sort_values(["num_steps", "goodness"], ascending=[True, False]).iterrows():
        values = [
            *(_number(row["final"], digits=2), "" if pd.isna(row["learning_rate"]) else f"{row['learning_rate']:g}"),
            *(_number(row[name]) for name in ("num_seeds", "num_steps")),
            "-".join(dict.fromkeys(_number(row[name]) for name in ("fewest", "most"))),
            *(_number(row[cell]) for cell in cells),
        ]
        lines.append(f"| {CLUSTER_METHODS[str(method)].title} | {' | '.join(values)} |")
    for name, methods in (("ours", OURS), ("the others", OTHERS)):
        best = [_fastest(table.loc[table.index.isin(list(methods)), cell]) for cell in cells]
        lines.append(f"| fastest of {name} | | | | | | {' | '.join(best)} |")
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
    tyro.cli(TimeToTarget, description=__doc__).main()


if __name__ == "__main__":
    main()
