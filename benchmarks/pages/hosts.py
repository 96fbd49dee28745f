"""The page about hosts: the cost of an integration, and the accuracy with it."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.pages.base import Page

HOSTS: Mapping[str, Page] = {
    "hosts": Page(
        "Accelerate, Trainer, Lightning and Fabric beside a loop of our own",
        "hosts.csv",
        """\
Ranks on one machine train a perceptron of 2.2 M parameters on handwritten digits, with equal steps, batches, rates and
clipping in each host. CPU time is the median over the steps of rank 0, of the whole process, so it hardly depends on
other work of the machine; wall time does, and "load" is the number of processes that wanted a core on average.

*Over our own loop* is the ratio of CPU times to the loop of the same method, `GossipDataParallel` or a plain
`DistributedDataParallel`: the host and the integration together. *Integration alone* is this ratio without the
milliseconds that the host takes by itself, with its own DDP. Single ratios are up to 17 percent off, as ratios below 1
show: four ranks share two cores. The accuracy is the mean over seeds of the average of all ranks, on 360 images: a
point is 3.6 images.""",
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
    )
}
