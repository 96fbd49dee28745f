"""The page about second moments of more ranks than GossipAdamW estimates."""

from __future__ import annotations

import pandas as pd

from benchmarks.pages.base import Page
from benchmarks.pages.markdown import table


def laws(rows: pd.DataFrame) -> str:
    """The second moment and the step of each law, a row for each number of ranks and a column for each gradient.

    Args:
        rows: of second_moments.csv.
    """
    pairs = [f"{row.second_moment:.2f} / {row.step:.2f}" for row in rows.itertuples()]
    cases = [f"{row.rms:g}, {row.gradient}" for row in rows.itertuples()]
    shown = rows.assign(pair=pairs, case=cases).pivot(index=["law", "ranks"], columns="case", values="pair")
    shown = shown.reindex(
        pd.MultiIndex.from_product([rows["law"].unique(), rows["ranks"].unique()], names=shown.index.names)
    )
    constant = rows[rows["gradient"] == "constant"].set_index(["law", "ranks"])
    shown = shown.assign(at_bound=constant["at_bound"]).reset_index()
    columns = {name: (name, "s") for name in dict.fromkeys(cases)}
    ends = {"at_bound": ("at the bound, constant", ".2f")}
    return table(shown, {"law": ("law", "s"), "ranks": ("ranks", "d"), **columns, **ends})


SECOND_MOMENTS = Page(
    "Second moments of many ranks",
    "second_moments.csv",
    """\
**With 64 ranks and a constant gradient of a tenth of the noise, a slower average takes the steps from 0.49 to 0.57 of
those of all-reduce.** Its second moment is right, but half of its steps end at the bound, since the first moment has
the noise of one rank. The second moment of a moving gradient is too low: 0.47 with a gradient of 0.3, where steps are
0.98 in place of 0.87. [Decisions](../decisions/vectors_and_rounds.md#optimizers) says what follows for
`GossipAdamW`.""",
    measures=("gossip_modules/optim",),
    render=laws,
    setup="""\
Cells have the second moment / the mean step along the gradient, each divided by that of AdamW under all-reduce with the
same gradients. Heads have the root mean square of the gradient; a moving gradient is an Ornstein-Uhlenbeck process with
a correlation over 30 steps. The last column is the share of steps at the bound of GossipAdamW. The noise of each rank
has the variance 1. Elements are float64, b1 = 0.9, b2 = 0.95, and figures are means of the steps 310, 320, ..., 400.

A slower average has the decay 0.98 in place of b1, and its square is averaged with b4 in place of b2; the step still
has m'. The last law leaves out the maximum of r, so that v' has a negative weight.""",
)
