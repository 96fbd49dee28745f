"""How long 8, 16 and 32 hosts take to begin, to go on without one that was killed, and to take one in.

Each worker is a host of the emulated cluster, a network namespace behind a switch; see `EmulatedNetwork`.
"""

from __future__ import annotations

import contextlib
import statistics
from pathlib import Path
from typing import Any

from benchmarks.cluster.network.links import EmulatedNetwork, LinkRates
from benchmarks.elastic.kills import Killing, killing, start_store
from benchmarks.elastic.worker import ElasticJob, NetworkHost

RATE = 1e9
"""Of each link, in bit/s."""
_NUM_STEPS = 40


def measure(method: str, num_workers: int, folder: Path, *, step_ms: float, seed: int) -> dict[str, Any]:
    """One row: the first rank is killed, and started again."""
    with EmulatedNetwork(num_workers, LinkRates(RATE)) as network:
        hosts = [NetworkHost(name, network.address(rank)) for rank, name in enumerate(network.hosts)]
        with contextlib.closing(start_store(method, hosts[0])) as store:
            job = ElasticJob(method, store.address, num_workers, step_ms, seed)
            with killing(job, 1, store, folder, hosts=hosts, num_steps=_NUM_STEPS) as run:
                row = {"method": method, "num_workers": num_workers, "rate_gbit": RATE / 1e9, "slept_ms": step_ms}
                return {**row, **figures(run)}


def figures(run: Killing) -> dict[str, Any]:
    """From what workers have said; times are those of the last of them."""
    steps = [event for worker in run.alive for event in worker.events("step")]
    after = [event["ms"] for event in steps if run.killed_at < event["at"] < run.started_at]
    ready = max(event["at"] for worker in run.workers for event in worker.events("ready"))
    first = max(worker.events("step")[0]["at"] for worker in run.workers)
    joined = run.newcomer.events("step")
    return {
        "seconds_to_begin": round(first - ready, 2),
        "median_ms": round(statistics.median(event["ms"] for event in steps if event["at"] < run.killed_at), 1),
        "seconds_to_form": _seconds_to_form(run),
        "slowest_after_kill_ms": round(max(after, default=float("nan")), 1),
        "seconds_to_join": round(joined[0]["at"] - run.newcomer.events("ready")[0]["at"], 2) if joined else None,
        "survivors_that_failed": sum(worker.has_failed for worker in run.alive),
    }


def _seconds_to_form(run: Killing) -> float | None:
    """From the kill until the last worker begins the next generation; None: the method names no generations."""
    changes = [
        [event["at"] for event in worker.events("change") if run.killed_at < event["at"] < run.started_at]
        for worker in run.alive
    ]
    if not all(changes):
        return None
    return round(max(times[-1] for times in changes) - run.killed_at, 2)
