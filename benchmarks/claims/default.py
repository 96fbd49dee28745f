"""Claims about loss and time of the methods that a page advises first, beside DDP."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd

from benchmarks.claims.base import Claim
from benchmarks.claims.tuned import best
from visualization.loss_against_time import LINES, NUM_STEPS

ROWS = (
    "DDP, AdamW",
    "DDP with fp16 hook, AdamW",
    "SGP, GossipAdamW",
    "Overlap SGP, GossipAdamW",
    "local SGD with period 4, GossipAdamW",
)
"""The labels of `LINES` that the table shows."""


def losses(gap: pd.DataFrame) -> pd.DataFrame:
    """Return the test losses of the language model after 320 steps at the tuned rate, by change."""
    return best(gap[(gap["task"] == "language") & (gap["steps"] == NUM_STEPS)]).set_index("change")


def times(cells: pd.DataFrame) -> pd.DataFrame:
    """Return the milliseconds of a step, the median over runs, by method and Gbit/s of the links."""
    cells = cells[cells["error"].isna()].astype({"fleet_step_ms": float})
    return cells.groupby(["method", "rate_gbit"])["fleet_step_ms"].median().unstack()


def result(gap: pd.DataFrame, cells: pd.DataFrame) -> str:
    """Return a table: the test loss of each method, and the seconds of its steps at each speed of the links."""
    ends, seconds = losses(gap), times(cells) * NUM_STEPS / 1e3
    rates = sorted(seconds, reverse=True)
    lines = [
        f"| method | test loss, three seeds | {' | '.join(f'{rate:g} Gbit/s' for rate in rates)} |",
        "|---|---|" + "---:|" * len(rates),
    ]
    for label in ROWS:
        change, method = LINES[label]
        own = ends.loc[change]
        assert own["seeds"] == 3
        loss = f"{own['mean']:.2f} ({own['lowest']:.2f} to {own['highest']:.2f})"
        name = label.replace(" with period 4", ", an average every 4 steps").replace("local", "Local")
        lines.append(f"| {name} | {loss} | {' | '.join(f'{seconds.loc[method, rate]:.0f} s' for rate in rates)} |")
    return "\n".join(lines)


def step(method: str, rate: float) -> Claim:
    """Return the claim about the milliseconds of a step."""
    where = f"method {method}, rate_gbit {rate:g}: the median of fleet_step_ms; one run, by SGD"
    return Claim(("default_cells.csv",), where, lambda cells: times(cells).loc[method, rate], "{:.0f} ms")


DEFAULT: Mapping[str, Claim] = {
    "result": Claim(
        ("gap.csv", "default_cells.csv"),
        "loss: task language, 320 steps, the mean, lowest and highest test of three seeds at the tuned rate; "
        "seconds: the median of fleet_step_ms times 320, at equal steps",
        result,
    ),
    **{
        f"{method}_{name}": step(method.replace("_", "-"), rate)
        for method in ("ddp", "ddp_fp16", "sgp", "osgp")
        for name, rate in (("1", 1.0),)
    },
}
