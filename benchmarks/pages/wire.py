"""The page of steps over the wire: emulated links at 1 and 10 Gbit/s, with chunks of 4 and 16 MB, and with BBR."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd

from benchmarks.pages.base import Page
from benchmarks.pages.markdown import grid

SMALL_CHUNKS = frozenset({"cd375ce3c6", "f0c2d1a5fc"})
"""Commits that sent chunks of 4 MB."""


def wire(rows: pd.DataFrame) -> str:
    """Milliseconds of a step on the slowest rank, the median over repeats, by method and links.

    Args:
        rows: of wire.csv.
    """
    first = rows[rows["rank"] == 0]
    settings = zip(first["rate_gbit"], first["congestion_control"], first["commit"], strict=True)
    links = [
        f"{rate:g} Gbit/s" + (", BBR" if control == "bbr" else "") + (", 4 MB" if commit in SMALL_CHUNKS else ", 16 MB")
        for rate, control, commit in settings
    ]
    shown = first.assign(links=links).sort_values(["rate_gbit", "links"], ascending=[False, True])
    return grid(shown, ("title", "method"), "links", "step_ms", ".0f", how="median")


WIRE: Mapping[str, Page] = {
    "wire": Page(
        "Step time over the wire",
        "wire.csv",
        """\
**At 1 Gbit/s Overlap SGP takes 443 ms per step, a loop by hand 463 and Decent-DP 459; WAGMA takes 589 and SGP 596.**
At 10 Gbit/s chunks of 16 MB in place of 4 take Overlap SGP from 238 to 222 ms, but SGP from 291 to 296; the loop by
hand takes 210 and 208. Where TCP uses BBR, Overlap SGP takes 386 ms, the loop by hand 399 and Decent-DP 375; a message
takes 369.""",
        render=wire,
        setup="""\
Four [emulated hosts](index.md#emulated-hosts) train 11.2 million parameters, 45 MB, with 150 ms of computation. A
message takes 375 ms at 1 Gbit/s and 37 ms at 10 Gbit/s. The column with BBR has 1.1 million parameters, 40 ms of
computation and 60 steps. Figures are medians over the steps of the slowest rank and three repeats. The head of
a column has the size of chunks of plain gossip; those of WAGMA have 8 MB where it says 16. At 10 Gbit/s both sizes
took turns on a quiet machine. Otherwise the hosts shared their two cores with work of lower priority.""",
        question="Is it as fast?",
        result="At 1 Gbit/s Overlap SGP takes 443 ms per step, Decent-DP 459; WAGMA 589 and SGP 596.",
        measures=("gossip_modules/engine", "gossip_modules/rounds", "gossip_modules/transport", "gossip_modules/wagma"),
    ),
}
