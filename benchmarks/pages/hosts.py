"""The page about hosts: the cost of an integration, and the accuracy with it."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd

from benchmarks.pages.base import Page
from benchmarks.pages.markdown import grid


def integration(rows: pd.DataFrame) -> str:
    """The ratio of CPU times with an integration to a loop of one's own, by host and method."""
    shown = rows[rows["of_integration"].notna()]
    return grid(shown, ("host", "host"), "method", "of_integration", ".3f")


HOSTS: Mapping[str, Page] = {
    "hosts": Page(
        "Accelerate, Trainer, Lightning and Fabric",
        "hosts.csv",
        """\
**In all four hosts a step takes 0.83 to 1.06 times the CPU time of a loop of your own,** without the milliseconds that
the host takes for itself. Single ratios are up to 17 percent off, as ratios below 1 show: four ranks share two cores.
The accuracy of a method is the same in each host, 94.0 to 95.3 %.""",
        {
            "host": ("host", "s"),
            "method": ("method", "s"),
            "steps": ("steps", "d"),
            "cpu_ms": ("CPU time of a step, ms", ".1f"),
            "wall_ms": ("wall time, ms", ".1f"),
            "over_own_loop": ("over our own loop", ".3f"),
            "of_integration": ("integration alone", ".3f"),
            "accuracy": ("accuracy", ".1%"),
            "load": ("load", ".1f"),
        },
        measures=("gossip_modules/integrations", "gossip_modules/wrappers"),
        summary=integration,
        setup="""\
Ranks on one machine train a perceptron of 2.2 M parameters on handwritten digits, with equal steps, batches, rates and
clipping in each host. CPU time is the median over the steps of rank 0, of the whole process. "Over our own loop" is the
ratio to the loop of the same method, host and integration together. "Load" is the average number of processes that
wanted a core. The accuracy is the mean over seeds, on 360 images.""",
        question="Is it as fast?",
        result="An integration takes 0.83 to 1.06 times the CPU time of a loop of your own, at equal accuracy.",
    )
}
