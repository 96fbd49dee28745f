"""How the cost of one rank grows with the number of ranks: `python -m benchmarks.scale --sizes 16 64 256`.

Ranks are threads of one process, or of `--processes` processes, over real Gloo groups whose ranks have few connections.
A tiny model trains by SGP on the exponential graph. The CPU time is that of the thread of a rank, the median over all
ranks, so it hardly depends on how busy the machine is. The start is wall time, and the CPU time of all threads by the
number of ranks, as all ranks share the cores of this machine. Descriptors are those of a rank, with the ends of all its
connections. To measure the library of an earlier commit, call this file with the path of that library first:
`PYTHONPATH=TREE:. python benchmarks/scale.py --library NAME`.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import resource
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.record import RESULTS, append_row
from gossip_modules import GossipDataParallel, connect
from gossip_modules.testing.ranks import thread_group
from gossip_modules.transport.process_group import ProcessGroupTransport

TIMEOUT = timedelta(seconds=120)
Seconds = dict[str, list[float]]


@dataclass
class Cost:
    """The needs of one rank: CPU time in ms, except where it says otherwise.

    Attributes:
        library: the measured version of the library.
        ranks: the number of ranks.
        processes: the number of processes of these ranks.
        descriptors: of a rank, with the ends of all its connections.
        barrier_ms: a named barrier.
        group_s: the seconds, wall time, in which all ranks have made their group and its connections.
        start_s: the seconds, wall time, in which all ranks have wrapped their first model.
        start_user_ms, start_system_ms: the CPU time of a rank in this time, in all its threads.
        wrap_ms: GossipDataParallel with a check of agreement and a broadcast of the model.
        round_ms: forward, backward, step and a round of SGP.
        average_ms: an exact average of the model.
    """

    library: str
    ranks: int
    processes: int
    descriptors: float | None = None
    barrier_ms: float | None = None
    group_s: float | None = None
    start_s: float | None = None
    start_user_ms: float | None = None
    start_system_ms: float | None = None
    wrap_ms: float | None = None
    round_ms: float | None = None
    average_ms: float | None = None


def run_rank(rank: int, n: int, store: dist.Store, *, together: Any, first: bool, repeats: int) -> Seconds:
    """The measurements of one rank; those of its process too where it is the first rank there."""
    seconds: Seconds = defaultdict(list)

    def timed(name: str, call: Callable[[], object]) -> None:
        together.wait()
        start = time.thread_time()
        for _ in range(repeats):
            call()
        seconds[name].append((time.thread_time() - start) / repeats)

    def at_once(name: str, call: Callable[[], object]) -> None:
        together.wait()
        before = resource.getrusage(resource.RUSAGE_SELF)
        start = time.monotonic()
        call()
        seconds[f"{name}_start"].append(start)
        seconds[f"{name}_end"].append(time.monotonic())
        together.wait()
        if first:
            after = resource.getrusage(resource.RUSAGE_SELF)
            seconds[f"{name}_user"].append(after.ru_utime - before.ru_utime)
            seconds[f"{name}_system"].append(after.ru_stime - before.ru_stime)

    groups: list[dist.ProcessGroup] = []
    wrappers: list[GossipDataParallel] = []

    def wrap() -> None:
        wrappers.append(GossipDataParallel(nn.Linear(4, 4), push_sum=True, process_group=groups[0], timeout=TIMEOUT))

    def step() -> None:
        wrappers[-1](torch.ones(1, 4)).sum().backward()

    before = len(os.listdir("/proc/self/fd")) if first else 0
    at_once("group", lambda: groups.append(thread_group(store, rank, n, TIMEOUT, peers=())))
    transport: ProcessGroupTransport = connect(groups[0], timeout=TIMEOUT)
    transport.barrier(what="the first barrier")
    if repeats:
        timed("barrier_ms", lambda: transport.barrier(what="a barrier"))
    at_once("start", wrap)
    if repeats:
        timed("wrap_ms", wrap)
        for _ in range(3):
            step()
        timed("round_ms", step)
        wrappers[-1].average_()
        timed("average_ms", wrappers[-1].average_)
    if first:
        seconds["descriptors"].append(len(os.listdir("/proc/self/fd")) - before)
    together.wait()
    for wrapper in wrappers:
        wrapper.close()
    together.wait()
    return seconds


def run_process(ranks: range, n: int, port: int, *, together: Any, results: Any, repeats: int) -> None:
    """Run these ranks as threads, and put what they have measured into `results`."""
    memory = dist.HashStore() if len(ranks) == n else None

    def run(rank: int) -> Seconds:
        # A client of its own for each rank, since one that waits for a key answers nobody else.
        store = memory or dist.TCPStore("127.0.0.1", port, is_master=False, timeout=TIMEOUT)
        return run_rank(rank, n, store, together=together, first=rank == ranks[0], repeats=repeats)

    with ThreadPoolExecutor(len(ranks), thread_name_prefix="rank") as pool:
        futures = [pool.submit(run, rank) for rank in ranks]
    results.put([future.result() for future in futures])


def measure(n: int, num_processes: int, repeats: int, *, library: str = "this") -> Cost:
    """The cost of one of n ranks in so many processes."""
    context, size = multiprocessing.get_context("fork"), n // num_processes
    server = context.Process(target=_serve, args=(port := context.Value("i", 0), end := context.Event()))
    server.start()
    while not port.value:
        time.sleep(0.01)
    results: Any = context.Queue()
    options = {"together": context.Barrier(n, timeout=TIMEOUT.total_seconds()), "results": results, "repeats": repeats}
    processes = [
        context.Process(target=run_process, args=(range(k, k + size), n, port.value), kwargs=options)
        for k in range(0, n, size)
    ]
    for process in processes:
        process.start()
    seconds: Seconds = defaultdict(list)
    for _ in processes:
        for of_rank in results.get(timeout=2 * TIMEOUT.total_seconds()):
            for name, values in of_rank.items():
                seconds[name] += values
    for process in processes:
        process.join()
    end.set()
    server.join()
    cost = Cost(library, n, num_processes)
    cost.descriptors = round(sum(seconds["descriptors"]) / n, 1)
    for name in ("group", "start"):
        setattr(cost, f"{name}_s", round(max(seconds[f"{name}_end"]) - min(seconds[f"{name}_start"]), 3))
    cost.start_user_ms = round(1e3 * sum(seconds["start_user"]) / n, 2)
    cost.start_system_ms = round(1e3 * sum(seconds["start_system"]) / n, 2)
    for name in {"barrier_ms", "wrap_ms", "round_ms", "average_ms"}.intersection(seconds):
        setattr(cost, name, round(1e3 * statistics.median(seconds[name]), 3))
    return cost


def _serve(port: Any, end: Any) -> None:
    """Serve a store of all ranks until the end; apart, so that no process is forked with its threads."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=TIMEOUT)
    port.value = store.port
    end.wait()


def main() -> None:
    """Measure, print, and append to the CSV file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=[16, 64, 256])
    parser.add_argument("--processes", type=int, nargs="+", default=[1], help="each divides all the sizes")
    parser.add_argument("--repeats", type=int, default=3, help="0: measure the start only")
    parser.add_argument("--library", default="this", help="the name of the measured library, for the record")
    parser.add_argument("--output", type=Path, default=RESULTS / "scale.csv")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for n in options.sizes:
        for num_processes in options.processes:
            cost = measure(n, num_processes, options.repeats, library=options.library)
            print(cost, flush=True)
            append_row(options.output, asdict(cost), seed=0)


if __name__ == "__main__":
    main()
