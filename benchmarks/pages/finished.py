"""Pages of finished studies whose figures took a script: these pages are files, which no command writes again."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.pages.base import Page

FINISHED: Mapping[str, Page] = {
    "consensus_control": Page("Consensus control on a ring of 16", "consensus_control.csv"),
    "uneven_data": Page("Accuracy on uneven data", "uneven_data.csv"),
    "uneven_workers": Page("Accuracy with numbers of workers that are no powers of two", "uneven_workers.csv"),
    "time_to_loss": Page(
        "Seconds to a fixed validation loss, on an emulated cluster", "loss_steps.csv", also=("loss_cells.csv",)
    ),
}
"""Each page names the commit that has the script of its study, and the module that computed its figures."""
