"""The part of the page Goodput with the trainings over a mailbox, in lockstep and data parallel in the Lab."""

from __future__ import annotations

import numpy as np
import pandas as pd

from benchmarks.mail_goodput import BY_SPEED, SPEEDS, WITH_MOMENTUM
from benchmarks.pages.base import Page
from benchmarks.pages.markdown import table

WAITS, GRADIENTS = "data parallel that waits", "data parallel"


def goodputs(rows: pd.DataFrame) -> pd.DataFrame:
    """Return a row for each system, means over seeds: shares and losses in percent.

    capacity_percent: the steps that count without deaths, beside those of workers that never wait.
    goodput_percent: the steps that count with deaths, beside those without.
    loss: with deaths, at the end.
    gap_percent: this loss less the loss without deaths after equally many steps, relative.
    """
    ends = rows[rows["at"] == rows["seconds"]]
    found = []
    for row in ends[ends["deaths"]].itertuples():
        system = GRADIENTS if row.system == WAITS else row.system
        curve = rows[~rows["deaths"] & (rows["system"] == system) & (rows["seed"] == row.seed)].sort_values("at")
        end = curve.iloc[-1]
        equal = float(np.interp(row.counted, curve["counted"], curve["loss"]))
        found.append(
            {
                "system": row.system,
                "capacity_percent": 100 * end["counted"] / (sum(SPEEDS) * row.seconds),
                "goodput_percent": 100 * row.counted / end["counted"],
                "counted": row.counted,
                "loss": row.loss,
                "gap_percent": 100 * (row.loss / equal - 1),
            }
        )
    return pd.DataFrame(found).groupby("system", sort=False).mean().reset_index()


def said(rows: pd.DataFrame) -> str:
    """Return the result in words."""
    own = goodputs(rows).set_index("system")
    texts = {name: f"{row.goodput_percent:.1f} % (loss {row.gap_percent:+.1f} %)" for name, row in own.iterrows()}
    return (
        f"**DiLoCo over a mailbox keeps {texts[BY_SPEED]} of its steps where a worker of eight dies every 50 steps, "
        f"lockstep keeps {texts['lockstep']}, and data parallel that waits for the worker {texts[WAITS]}.** Losses are "
        "beside the run without deaths after equally many steps."
    )


def shown(rows: pd.DataFrame) -> str:
    """Write the systems as a table, and the losses with an outer momentum."""
    columns = {
        "system": ("system", "s"),
        "capacity_percent": ("of the steps without any wait, nobody dying, %", ".1f"),
        "goodput_percent": ("goodput, %", ".1f"),
        "counted": ("steps that count", ",.0f"),
        "loss": ("loss", ".3f"),
        "gap_percent": ("loss at equal steps, difference in %", "+.2f"),
    }
    ends = rows[(rows["at"] == rows["seconds"]) & ~rows["deaths"]]
    seeds = ends[ends["system"] == WITH_MOMENTUM]["seed"]
    own = ends[ends["seed"].isin(seeds)].groupby("system")["loss"].mean()
    momentum = (
        f"Nobody dying, the loss ends at {own['mailbox']:.2f} with one period for all and no outer momentum, and at "
        f"{own[WITH_MOMENTUM]:.2f} with momentum 0.9: the drifts of slow workers are from old anchors. "
        f"With periods by speed and momentum 0.9 it ends at {own[BY_SPEED]:.2f}."
    )
    return f"{table(goodputs(rows), columns)}\n\n{momentum}"


MAIL_GOODPUT = Page(
    "A death every 50 steps, and speeds of 1 : 4",
    "mail_goodput.csv",
    measures=("gossip_modules/mailbox", "gossip_modules/lab"),
    render=lambda rows: f"{said(rows)}\n\n{shown(rows)}",
    setup="""\
Eight workers of speeds 1 to 4, evenly spread, train [a small decoder](outer_language.md#setup) by AdamW in the
[Lab](../guides/lab.md#workers-that-share-a-store): the code of real training over a mailbox, in virtual time. A step
of the slowest takes a second. Every 20 s, 50 steps of a worker of mean speed, one dies; 10 s later a new process of its
speed comes. A step counts if it is in an average. DiLoCo has H = 20 for a worker of mean speed. "Periods by speed":
`sync_every` in proportion to speed, `weighted_by="num_steps"`, quorum 6, grace 1 s. "mailbox": one period for all, no
outer momentum, quorum 4, grace 0.1 s. In lockstep a death and a newcomer cost a pause
of 1 s each; data parallel averages gradients in each step with the same pauses. "That waits" stops until the worker is
back, and goes on from a checkpoint of its last whole step, which takes no time. Links have 10 Gbit/s and 20 ms, and
messages the size of 25 M parameters. Means over the seeds.""",
)
"""The part."""
