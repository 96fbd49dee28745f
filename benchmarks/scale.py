"""How the cost of one rank grows with the number of ranks: `python -m benchmarks.scale --sizes 16 64 256`.

All ranks are threads of one process over real Gloo groups whose ranks have few connections. A tiny model trains by SGP
on the exponential graph. The CPU time is that of the thread of a rank, the median over all ranks, so it hardly depends
on how busy the machine is. The start is wall time, as all ranks share the cores of this machine. Descriptors are those
of a rank, with the ends of all its connections.
"""

from __future__ import annotations

import argparse
import os
import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.record import RESULTS, append_row
from gossip_modules import GossipDataParallel, connect
from gossip_modules.testing.ranks import run_ranks
from gossip_modules.transport.process_group import ProcessGroupTransport

TIMEOUT = timedelta(seconds=120)


@dataclass
class Cost:
    """The needs of one rank: CPU time in ms, except where it says otherwise.

    Attributes:
        ranks: the number of ranks.
        descriptors: of a rank, with the ends of all its connections.
        barrier_ms: a named barrier.
        start_s: the seconds, wall time, in which all ranks have wrapped their first model.
        wrap_ms: GossipDataParallel with a check of agreement and a broadcast of the model.
        round_ms: forward, backward, step and a round of SGP.
        average_ms: an exact average of the model.
    """

    ranks: int
    descriptors: float = 0.0
    barrier_ms: float = 0.0
    start_s: float = 0.0
    wrap_ms: float = 0.0
    round_ms: float = 0.0
    average_ms: float = 0.0


def measure(n: int, repeats: int) -> Cost:
    """The cost of one of n ranks."""
    cost, together, before = Cost(n), threading.Barrier(n), len(os.listdir("/proc/self/fd"))
    seconds: dict[str, list[float]] = defaultdict(list)

    def timed(name: str, call: Callable[[], object]) -> None:
        together.wait()
        start = time.thread_time()
        for _ in range(repeats):
            call()
        seconds[name].append((time.thread_time() - start) / repeats)

    def body(group: dist.ProcessGroup) -> None:
        wrappers: list[GossipDataParallel] = []

        def wrap() -> None:
            wrappers.append(GossipDataParallel(nn.Linear(4, 4), push_sum=True, process_group=group, timeout=TIMEOUT))

        def step() -> None:
            wrappers[-1](torch.ones(1, 4)).sum().backward()

        transport: ProcessGroupTransport = connect(group, timeout=TIMEOUT)
        transport.barrier(what="the first barrier")
        timed("barrier_ms", lambda: transport.barrier(what="a barrier"))
        together.wait()
        start = time.monotonic()
        wrap()
        together.wait()
        if group.rank() == 0:
            cost.start_s = round(time.monotonic() - start, 2)
        timed("wrap_ms", wrap)
        for _ in range(3):
            step()
        timed("round_ms", step)
        wrappers[-1].average_()
        timed("average_ms", wrappers[-1].average_)
        if group.rank() == 0:
            cost.descriptors = round((len(os.listdir("/proc/self/fd")) - before) / n, 1)
        together.wait()
        for wrapper in wrappers:
            wrapper.close()

    run_ranks(n, body, timeout=TIMEOUT, peers=lambda rank: ())
    for name, values in seconds.items():
        setattr(cost, name, round(1e3 * statistics.median(values), 3))
    return cost


def main() -> None:
    """Measure, print, and append to benchmarks/results/scale.csv."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=[16, 64, 256])
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    for n in options.sizes:
        cost = measure(n, options.repeats)
        print(cost, flush=True)
        append_row(RESULTS / "scale.csv", asdict(cost), seed=0)


if __name__ == "__main__":
    main()
