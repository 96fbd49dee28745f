"""Claims about the time of a step where workers are late now and then."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd

from benchmarks.claims.base import Claim

TITLES = {"adpsgd": "AD-PSGD", "alone": "no communication", "ddp": "DDP", "osgp": "OSGP", "wagma": "WAGMA"}


def step_of(title: str) -> Claim:
    """Return the claim about the milliseconds of a step at 1 Gbit/s."""

    def query(cells: pd.DataFrame) -> float:
        own = cells[cells["error"].isna() & (cells["title"] == title) & (cells["rate_gbit"] == 1)]
        return float(own["fleet_step_ms"].astype(float).median())

    where = f"title {title}, rate_gbit 1: the median of fleet_step_ms"
    return Claim(("straggler_cells.csv",), where, query, "{:.0f} ms")


STRAGGLERS: Mapping[str, Claim] = {name: step_of(title) for name, title in TITLES.items()}
