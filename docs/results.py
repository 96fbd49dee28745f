"""The measured results in README.md and on the first page of docs/: `python docs/results.py` writes them anew.

They come from default_cells.csv, gap.csv and elastic.csv in benchmarks/results/.
"""

from __future__ import annotations

import re
import sys
import textwrap
from pathlib import Path

import pandas as pd

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.pages.gap import best  # noqa: E402
from benchmarks.record import DTYPES, RESULTS  # noqa: E402
from visualization.loss_against_time import LINES, NUM_STEPS  # noqa: E402

PAGES = (ROOT / "README.md", ROOT / "docs" / "index.md")
ROWS = (
    "DDP, AdamW",
    "DDP with fp16 hook, AdamW",
    "SGP, GossipAdamW",
    "Overlap SGP, GossipAdamW",
    "local SGD with period 4, GossipAdamW",
)
"""The labels of `LINES` that the table shows."""


def result() -> str:
    """A table: the test loss of each method, and the seconds of its steps at each speed of the links."""
    gap = pd.read_csv(RESULTS / "gap.csv", dtype=DTYPES)
    losses = best(gap[(gap["task"] == "language") & (gap["steps"] == NUM_STEPS)]).set_index("change")
    cells = pd.read_csv(RESULTS / "default_cells.csv", dtype=DTYPES)
    cells = cells[cells["error"].isna()].astype({"fleet_step_ms": float})
    times = cells.groupby(["method", "rate_gbit"])["fleet_step_ms"].median().unstack() * NUM_STEPS / 1e3
    rates = sorted(times, reverse=True)
    lines = [
        f"| method | test loss, three seeds | {' | '.join(f'{rate:g} Gbit/s' for rate in rates)} |",
        "|---|---|" + "---:|" * len(rates),
    ]
    for label in ROWS:
        change, method = LINES[label]
        own = losses.loc[change]
        assert own["seeds"] == 3
        loss = f"{own['mean']:.2f} ({own['lowest']:.2f} to {own['highest']:.2f})"
        name = label.replace(" with period 4", ", an average every 4 steps").replace("local", "Local")
        lines.append(f"| {name} | {loss} | {' | '.join(f'{times.loc[method, rate]:.0f} s' for rate in rates)} |")
    return "\n".join(lines)


def elastic() -> str:
    """One sentence about workers that are killed, and the others."""
    rows = pd.read_csv(RESULTS / "elastic.csv")
    own = rows[rows["method"] == "SGP"]
    killed, failed = sorted(own["killed"].unique()), own["survivors_that_failed"].sum()
    assert list(killed) == [1, 2, 3]
    assert set(own["num_workers"]) == {8}
    return textwrap.fill(
        f"In {len(own)} runs of eight workers that train by SGP, one to three workers were killed at once. "
        f"{'No' if failed == 0 else int(failed)} other worker failed. The slowest step after a kill took "
        f"{own['slowest_after_kill_ms'].max():.0f} ms, where the median step takes {own['median_ms'].median():.0f} ms.",
        width=118,
    )


TEXTS = {"result": result, "elastic": elastic}


def rendered(text: str) -> str:
    """The page with the texts of today between its markers."""
    for name, make in TEXTS.items():
        text = re.sub(
            rf"(<!-- {name}: begin -->\n).*?(?=<!-- {name}: end -->)",
            lambda found: f"{found[1]}{make()}\n",  # noqa: B023
            text,
            flags=re.DOTALL,
        )
    return text


def main() -> None:
    """Write the pages."""
    for page in PAGES:
        page.write_text(rendered(page.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
