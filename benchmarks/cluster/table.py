"""The rows of a run, and the table of their medians."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pandas as pd

from benchmarks.cluster.methods import BOUND, method_of
from benchmarks.cluster.network.links import LINE_SHARE
from benchmarks.record import matching

MAX_ERROR = 160
"""Letters of an error in the table."""
PARTS = ("compute_ms", "encode_ms", "wire_ms", "mix_ms", "wait_ms", "rest_ms")
COLUMNS = (
    *("hosts", "rate_gbit", "method", "title", "repeat", "rank", "step_ms", "mean_step_ms", "fleet_step_ms", *PARTS),
    *("is_hidden", "bytes_per_step", "link_share", "line_share", "cpu_ms", "rss_mb", "memory_mb", "construct_s"),
    *(
        "first_round_s",
        "num_parameters",
        "optimizer",
        "planned_ms",
        "planned_steps",
        "spread",
        "straggle_chance",
        "slow_factor",
        "slow_host",
        "slow_link_share",
        "congestion_control",
    ),
    *("seed", "error"),
)
"""Of the CSV.

step_ms: of the slowest rank, its median over steps; mean_step_ms: a rank's mean; fleet_step_ms: ranks over the sum of
their steps per second. planned_steps: timed ones that were asked for, before they are rounded up to a method's period.
rss_mb: peak resident memory; memory_mb: what the trial added to it. link_share: of the shaped rate, over all of the
step; line_share: while a round is on the wire."""


def rows_of(key: dict[str, Any], answers: Sequence[dict[str, Any]], *, rate: float) -> list[dict[str, Any]]:
    """A row per rank of a trial.

    Args:
        key: the columns that say which trial it was.
        answers: of the ranks, in their order, as `trials.measure` gives them.
        rate: of the links, in bit/s; 0: not shaped.
    """
    per_second = sum(1e3 / answer["mean_step_ms"] for answer in answers)
    shared = {
        "step_ms": max(statistics.median(answer["step_ms"]) for answer in answers),
        "fleet_step_ms": 1e3 * len(answers) / per_second,
    }
    rows = []
    for rank, answer in enumerate(answers):
        bits = 8e3 * answer["bytes_per_step"]  # times ms per s
        own = {
            "link_share": bits / answer["mean_step_ms"] / rate if rate else None,
            "line_share": bits / answer["wire_ms"] / rate if rate and answer["wire_ms"] else None,
        }
        rows.append({**key, **answer, **own, **shared, "rank": rank, "title": method_of(key["method"]).title})
    return rows


def failed_row(key: dict[str, Any], error: str) -> dict[str, Any]:
    """The row of a trial without a result."""
    return {**key, "title": method_of(key["method"]).title, "error": error}


def rows_of_trial(rows: pd.DataFrame, key: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Those of one trial, with the title that its method has now.

    Args:
        rows: of the CSV.
        key: the columns that say which trial it is.
    """
    return matching(rows, key).assign(title=method_of(key["method"]).title).to_dict("records")


def frame(rows: Iterable[dict[str, Any]]) -> pd.DataFrame:
    """All rows, with the columns of the CSV."""
    return pd.DataFrame(list(rows), columns=list(COLUMNS))


def medians(rows: pd.DataFrame) -> pd.DataFrame:
    """A row per cell and method that has results: medians over repeats of the mean over ranks.

    Beside the columns of the CSV: low_ms, high_ms (range of step_ms over repeats), extra_cpu_ms (beyond a local step's
    in the same cell; NaN without one) and num_repeats.
    """
    done = rows[rows["error"].isna()]
    numbers = [
        *("step_ms", "mean_step_ms", "fleet_step_ms", *PARTS, "bytes_per_step"),
        *("link_share", "line_share", "cpu_ms", "rss_mb", "memory_mb", "construct_s", "first_round_s"),
    ]
    key = ["hosts", "rate_gbit", "method", "title"]
    done = done.astype(dict.fromkeys(numbers, float))
    per_repeat = done.groupby([*key, "repeat", "is_hidden"], sort=False)[numbers].mean().reset_index()
    groups = per_repeat.groupby([*key, "is_hidden"], sort=False)
    table = groups[numbers].median()
    table["low_ms"], table["high_ms"] = groups["step_ms"].min(), groups["step_ms"].max()
    table["num_repeats"] = groups.size()
    table = table.reset_index()
    local = table[table["method"] == BOUND].set_index(["hosts", "rate_gbit"])["cpu_ms"]
    bound = [local.get(cell, float("nan")) for cell in zip(table["hosts"], table["rate_gbit"])]
    table["extra_cpu_ms"] = table["cpu_ms"] - bound
    return table


def markdown(rows: pd.DataFrame) -> str:
    """A table per cell, methods from the fastest to the slowest, then those without a result and why."""
    parts = []
    table = medians(rows)
    for (hosts, rate), cell in rows.groupby(["hosts", "rate_gbit"], sort=False):
        lines = [
            f"### {hosts} hosts, {f'{rate:g} Gbit/s' if rate else 'links not shaped'}\n",
            "| method | ms per step | repeats | mean | of all ranks | compute | encode | wire | mix | wait | rest "
            "| MB sent | line share | CPU ms beyond local | peak MB | construction s | first round s |",
            "|---|" + "---:|" * 16,
        ]
        own = table[(table["hosts"] == hosts) & (table["rate_gbit"] == rate)].sort_values("step_ms")
        lines += [_line(row) for row in own.to_dict("records")]
        failed = cell[cell["error"].notna()].drop_duplicates(["method", "error"])
        lines += [f"| {row.title} | {_shortened(row.error)} |" + " |" * 15 for row in failed.itertuples()]
        parts.append("\n".join(lines))
    return "\n\n".join([*parts, LEGEND])


LEGEND = f"""\
Medians over repeats. ms per step: the slowest rank's median over steps; repeats: its range; mean: a rank's mean, which
counts rare long steps and averages that are not in every step; of all ranks: their number over the steps that all took
per second, which is what asynchronous methods are for. compute is what is waited, and the optimizer; encode, wire and
mix in brackets run beside it. rest of a peer: all but compute, the optimizer too where that communicates. MB and line
share are of the bytes that the host's interface counted; {LINE_SHARE} is what TCP/IP leaves. wire is from the posting
of a message to its arrival, so a late peer lowers the line share, and what is added meanwhile is in it. peak MB: beyond
what the process had before."""


def _line(row: dict[Any, Any]) -> str:
    split = [_number(row[name], brackets=row["is_hidden"] and name[:-3] in ("encode", "wire", "mix")) for name in PARTS]
    cells = [
        row["title"],
        f"{row['step_ms']:.0f}",
        f"{row['low_ms']:.0f}-{row['high_ms']:.0f}",
        *(_number(row[name]) for name in ("mean_step_ms", "fleet_step_ms")),
        *split,
        f"{row['bytes_per_step'] / 1e6:.1f}",
        _number(row["line_share"], digits=3),
        *(_number(row[name]) for name in ("extra_cpu_ms", "memory_mb")),
        *(_number(row[name], digits=2) for name in ("construct_s", "first_round_s")),
    ]
    return f"| {' | '.join(cells)} |"


def _shortened(error: str) -> str:
    """So that a table stays one; the CSV has all of it."""
    return (error if len(error) <= MAX_ERROR else f"{error[: MAX_ERROR - 3]}...").replace("|", "/")


def _number(value: float, *, digits: int = 0, brackets: bool = False) -> str:
    if pd.isna(value):
        return ""
    return f"({value:.{digits}f})" if brackets else f"{value:.{digits}f}"
