"""Pages of finished studies whose figures took a script: these pages are files, which no command writes again."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.pages.base import Page

FINISHED: Mapping[str, Page] = {
    "uneven_data": Page(
        "Accuracy on uneven data",
        "uneven_data.csv",
        measures=("gossip_modules/algorithms", "gossip_modules/rounds"),
        question="Is it as accurate?",
        result="On uneven data RelaySGD ends 1.9 points below all-reduce, SGP 6.4 and "
        "D-PSGD on a ring 15.8 (alpha 0.1).",
    ),
    "uneven_workers": Page(
        "Accuracy with 3 to 25 workers",
        "uneven_workers.csv",
        measures=("gossip_modules/graph_manager", "gossip_modules/mixing_manager"),
        question="Is it as accurate?",
        result="With equal data and 25 workers, `BaseGraph` ends 3.4 points below all-reduce "
        "with one peer, 0.7 with four.",
    ),
}
"""Each page names the commit that has the script of its study, and the module that computed its figures."""
