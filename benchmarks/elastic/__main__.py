"""How long training stands still when workers are killed: the slowest step of those who live, beside the median.

    python -m benchmarks.elastic --kills 1 2 3

Eight workers on this machine train a small network, each a process of its own, with the store in another one. When all
have taken 100 steps some are killed (SIGKILL) at once, the first among them; one is started again 100 steps later. Rows
go to benchmarks/results/elastic.csv: over the workers that live, the median of their steps, the slowest step after the
kill and before the restart, the slowest after the restart, and for the worker that came how many rounds the others had
begun between the moment when it was ready to join and its first.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import torch
import tyro
from torch import nn

from benchmarks.record import RESULTS, provenance
from gossip_modules import Choco, GossipDataParallel, Membership, PowerGossip, RingGraph, SignNorm

METHODS: dict[str, dict[str, Any]] = {
    "SGP": {},
    "Overlap SGP": {"overlap": True},
    "D-PSGD, ring": {"push_sum": False, "graph": lambda n: RingGraph(n, peers_per_itr=min(2, n - 1))},
    "PowerGossip": {"gossiper": PowerGossip()},
    "CHOCO": {"gossiper": Choco(SignNorm(), step_size=0.4)},
}


@dataclass
class ElasticBenchmark:
    """What is run."""

    methods: tuple[str, ...] = tuple(METHODS)
    kills: tuple[int, ...] = (1, 2, 3)
    num_workers: int = 8
    step_ms: float = 50.0
    """Of computation, which is slept: eight workers share the cores of one machine."""
    seed: int = 1
    output: Path = RESULTS / "elastic.csv"


def train(method: str, address: str, num_workers: int, step_ms: float, seed: int) -> None:
    """One worker: prints a line for each step, until it is killed."""
    torch.manual_seed(seed)
    membership = Membership(address, min_workers=num_workers, min_deadline=5.0)
    module = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 8))
    model = GossipDataParallel(module, membership=membership, **METHODS[method])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    membership.track(optimizer=optimizer)
    say(event="ready", at=time.time())
    step = membership.join()
    say(event="begins", step=step, at=time.time(), size=membership.world_size)
    x = torch.randn(16, 64)
    while True:
        start = time.perf_counter()
        loss = model(x).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        time.sleep(step_ms / 1000)
        say(
            event="step", step=step, at=time.time(), ms=1000 * (time.perf_counter() - start), size=membership.world_size
        )
        step += 1


def say(**values: Any) -> None:
    """One line of JSON."""
    print(json.dumps(values), flush=True)


class BenchmarkedWorker:
    """A process that trains, and what it has printed."""

    def __init__(self, method: str, address: str, options: ElasticBenchmark, folder: Path, name: str) -> None:
        arguments = [method, address, str(options.num_workers), str(options.step_ms), str(options.seed)]
        self.path = folder / name
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        with self.path.open("w") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.elastic", "worker", *arguments],
                stdout=file,
                stderr=subprocess.DEVNULL,
                env=environment,
            )

    def events(self) -> Iterator[dict[str, Any]]:
        """All that it has said."""
        for line in self.path.read_text().splitlines(keepends=True):
            if line.endswith("\n"):
                yield json.loads(line)

    def last_step(self) -> int:
        """The number of the last step; -1 before the first."""
        return max((event["step"] for event in self.events() if event["event"] == "step"), default=-1)


def until(workers: list[BenchmarkedWorker], step: int) -> None:
    """Wait until all of them have taken a step."""
    deadline = time.monotonic() + 120
    while min(worker.last_step() for worker in workers) < step:
        if time.monotonic() > deadline or any(worker.process.poll() is not None for worker in workers):
            raise RuntimeError(
                f"got steps {[w.last_step() for w in workers]}, expected {step}; a worker hangs or failed"
            )
        time.sleep(0.2)


def measure(method: str, kills: int, options: ElasticBenchmark, folder: Path) -> dict[str, Any]:
    """One row."""
    server = subprocess.Popen(
        [sys.executable, "-m", "gossip_modules.membership.serve", "--port", "0"], stdout=subprocess.PIPE, text=True
    )
    assert server.stdout is not None
    address = f"127.0.0.1:{server.stdout.readline().split()[-1]}"
    names = [f"{method.replace(' ', '_')}_{kills}_{i}" for i in range(options.num_workers + 1)]
    workers = [BenchmarkedWorker(method, address, options, folder, name) for name in names[:-1]]
    try:
        until(workers, 100)
        killed_at = time.time()
        for worker in workers[:kills]:
            worker.process.send_signal(signal.SIGKILL)
        alive = workers[kills:]
        last = max(worker.last_step() for worker in alive)
        until(alive, last + 100)
        started_at = time.time()
        newcomer = BenchmarkedWorker(method, address, options, folder, names[-1])
        until([newcomer], last + 101)
        until([newcomer, *alive], newcomer.last_step() + 50)
        steps = [event for worker in alive for event in worker.events() if event["event"] == "step"]
        ready, begins = (
            next(event for event in newcomer.events() if event["event"] == kind) for kind in ("ready", "begins")
        )
        waited = sum(
            ready["at"] < event["at"] < begins["at"] for event in alive[0].events() if event["event"] == "step"
        )
        return {
            "method": method,
            "num_workers": options.num_workers,
            "killed": kills,
            "median_ms": round(statistics.median(e["ms"] for e in steps if e["at"] < killed_at), 1),
            "slowest_before_ms": round(max(e["ms"] for e in steps if e["step"] > 10 and e["at"] < killed_at), 1),
            "slowest_after_kill_ms": round(max(e["ms"] for e in steps if killed_at < e["at"] < started_at), 1),
            "slowest_after_join_ms": round(max(e["ms"] for e in steps if e["at"] > ready["at"]), 1),
            "rounds_until_joined": waited,
            "survivors_that_failed": sum(worker.process.poll() is not None for worker in alive),
        }
    finally:
        server.kill()
        for worker in workers:
            worker.process.kill()
        if "newcomer" in locals():
            newcomer.process.kill()


def main() -> None:
    """One row for each method and number of kills, appended as it comes."""
    if sys.argv[1:2] == ["worker"]:
        method, address, num_workers, step_ms, seed = sys.argv[2:]
        train(method, address, int(num_workers), float(step_ms), int(seed))
        return
    options = tyro.cli(ElasticBenchmark)
    for method in options.methods:
        for kills in options.kills:
            with tempfile.TemporaryDirectory() as folder:
                row = {**provenance(options.seed), **measure(method, kills, options, Path(folder))}
            print(row, flush=True)
            options.output.parent.mkdir(parents=True, exist_ok=True)
            pd.DataFrame([row]).to_csv(options.output, mode="a", header=not options.output.exists(), index=False)


if __name__ == "__main__":
    main()
