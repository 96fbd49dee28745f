"""The section about links that lose packets: running sums in datagrams beside SGP over TCP."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd

from benchmarks.lossy_links import CUT_OFF
from benchmarks.pages.base import Page
from benchmarks.pages.markdown import table


def medians(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the medians over repeats by method and links, with the ratio to the lossless links of the same repeat."""
    key = ["method", "line"]
    calm = rows[rows["line"] == "lossless"].set_index(["method", "repeat"])["mean_ms"]
    shown = rows.assign(
        ratio=[
            ms / calm[method, repeat]
            for method, repeat, ms in zip(rows["method"], rows["repeat"], rows["mean_ms"], strict=True)
        ],
        lost=1 - rows["datagrams_received"] / rows["datagrams_sent"].where(rows["datagrams_sent"] > 0),
    )
    numbers = ["median_ms", "mean_ms", "slowest_ms", "ratio", "mean_error", "spread", "later_error", "lost"]
    found = shown.groupby(key)[numbers].median().reset_index()
    found.loc[found["line"] == CUT_OFF, "mean_error"] = float("nan")  # of the mean of other ranks
    return found.sort_values(key, ascending=[False, True], kind="stable")


def summary(rows: pd.DataFrame) -> str:
    """Write the result in words, and a table of methods and links."""
    found = medians(rows).set_index(["method", "line"])
    sums, cut, sgp = found.loc["running sums", "lossy"], found.loc["running sums", CUT_OFF], found.loc["SGP", "lossy"]
    said = (
        f"**With {rows['loss'].max():.0%} of packets lost, a step with running sums takes {sums['ratio']:.2f} times as "
        f"long as without losses, and a step of SGP over TCP {sgp['ratio']:.1f} times.** After {_steps(rows)} steps "
        f"the mean of the models was off by {sums['mean_error']:.1g}, and each model by {sums['later_error']:.1g} when "
        "the shares on their way had come. With one host cut off a step of the others takes "
        f"{cut['ratio']:.2f} times as long. Figures are medians of {rows['repeat'].nunique()} repeats."
    )
    columns = {
        "method": ("method", "s"),
        "line": ("links", "s"),
        "median_ms": ("ms per step, median", ".1f"),
        "mean_ms": ("mean of the slowest rank", ".1f"),
        "ratio": ("ratio to lossless", ".2f"),
        "lost": ("datagrams lost", ".1%"),
        "mean_error": ("mean off by", ".1e"),
        "spread": ("models apart by", ".1e"),
        "later_error": ("off by, 20 rounds later", ".1e"),
    }
    return f"{said}\n\n{table(found.reset_index(), columns)}"


def _steps(rows: pd.DataFrame) -> int:
    return int(rows.loc[rows["method"] == "running sums", "num_steps"].max())


LOSSY_LINKS: Mapping[str, Page] = {
    "lossy_links": Page(
        "Links that lose packets",
        "lossy_links.csv",
        "[`RunningSums`](../methods/sgp.md#losses) sends datagrams, SGP uses TCP.",
        {
            "method": ("method", "s"),
            "line": ("links", "s"),
            "repeat": ("repeat", "d"),
            "num_steps": ("steps", "d"),
            "median_ms": ("ms per step, median", ".1f"),
            "mean_ms": ("mean of the slowest rank", ".1f"),
            "slowest_ms": ("slowest step", ".0f"),
            "datagrams_sent": ("datagrams sent", ",d"),
            "datagrams_received": ("received", ",d"),
            "load": ("load", ".1f"),
        },
        summary=summary,
        setup="""\
Four ranks in network namespaces behind a router have 25,000 float32 parameters and the default graph. A step waits
100 ms, then has a round, without gradients: the mean of the models must stay. A model is off by the largest difference
of an element to the mean of the first models. Lossy links lose a fifth of the packets of both protocols, and delay each
by 50 ms in the mean. Afterwards 20 rounds lose nothing. SGP has six steps on lossy links. The ratio is of means of the
slowest rank in one repeat. Other work of low priority ran on the two cores.""",
        measures=("gossip_modules/algorithms", "gossip_modules/transport", "gossip_modules/rounds"),
        question="Is it as fast?",
        result="Running sums and SGP, where a fifth of all packets is lost.",
    ),
}
