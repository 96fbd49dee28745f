"""A worker that trains and prints a line for each step, as a process, and what a benchmark sees of it."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gossip_modules import (
    BilatGossipDataParallel,
    Choco,
    GossipDataParallel,
    GroupAverageDataParallel,
    Membership,
    PowerGossip,
    RingGraph,
    SignNorm,
)
from gossip_modules.membership import transfer
from gossip_modules.wrappers.base import GossipWrapper

METHODS: dict[str, dict[str, Any]] = {
    "SGP": {},
    "Overlap SGP": {"overlap": True},
    "D-PSGD, ring": {"push_sum": False, "graph": lambda n: RingGraph(n, peers_per_itr=min(2, n - 1))},
    "PowerGossip": {"gossiper": PowerGossip()},
    "CHOCO": {"gossiper": Choco(SignNorm(), step_size=0.4)},
    "WAGMA": {},
    "AD-PSGD": {},
}
"""What the wrapper gets beside the model and the membership."""
WRAPPERS: dict[str, Callable[..., GossipWrapper]] = {
    "WAGMA": GroupAverageDataParallel,
    "AD-PSGD": BilatGossipDataParallel,
}
"""Of methods that are none of GossipDataParallel's."""


@dataclass(frozen=True)
class ElasticJob:
    """What all workers of a run do.

    Attributes:
        method: a name in METHODS.
        address: of the store.
        num_workers: of the first generation.
        step_ms: of computation, which is slept: the workers share the cores of one machine.
        seed: of the model and the data.
        width: of the hidden layer.
        min_deadline: see `Membership`.
    """

    method: str
    address: str
    num_workers: int
    step_ms: float
    seed: int
    width: int = 128
    min_deadline: float = 5.0


def make_model(width: int, seed: int) -> nn.Module:
    """A network with one hidden layer."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 8))


def say(**values: Any) -> None:
    """One line of JSON."""
    print(json.dumps(values), flush=True)


def train(job: ElasticJob) -> None:
    """Until it is killed."""
    send = transfer.send

    def counted(group: Any, state: Any, **options: Any) -> int:
        start = time.time()
        num_bytes = send(group, state, **options)
        say(event="gave", num_bytes=num_bytes, start=start, at=time.time())
        return num_bytes

    transfer.send = counted  # what a donor gives, in bytes and seconds
    membership = Membership(job.address, min_workers=job.num_workers, min_deadline=job.min_deadline)
    wrap = WRAPPERS.get(job.method, GossipDataParallel)
    model = wrap(make_model(job.width, job.seed), membership=membership, **METHODS[job.method])
    optimizer = torch.optim.SGD(model.parameters(), lr=1 / job.width, momentum=0.9)
    membership.track(optimizer=optimizer)
    membership.on_change(lambda change: say(event="change", members=change.members, step=change.step, at=time.time()))
    say(event="ready", at=time.time())
    step = membership.join()
    say(event="begins", step=step, at=time.time(), number=membership.number)
    x = torch.randn(16, 64)
    while True:
        start = time.perf_counter()
        is_serving = any(thread.name == "gossip-donor" for thread in threading.enumerate())
        loss = model(x).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        time.sleep(job.step_ms / 1000)
        is_serving = is_serving or any(thread.name == "gossip-donor" for thread in threading.enumerate())
        seconds = time.perf_counter() - start
        say(event="step", step=step, at=time.time(), ms=1000 * seconds, is_serving=is_serving)
        step += 1


class WorkerProcess:
    """A process that trains, and what it has printed."""

    def __init__(self, job: ElasticJob, folder: Path, name: str) -> None:
        self.path = folder / name
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        with self.path.open("w") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.elastic", "worker", json.dumps(asdict(job))],
                stdout=file,
                stderr=subprocess.DEVNULL,
                env=environment,
            )

    def events(self, kind: str) -> list[dict[str, Any]]:
        """All of a kind that it has said."""
        lines = self.path.read_text().splitlines(keepends=True)
        return [event for line in lines if line.endswith("\n") and (event := json.loads(line))["event"] == kind]

    def last_step(self) -> int:
        """The number of the last step; -1 before the first."""
        return max((event["step"] for event in self.events("step")), default=-1)

    @property
    def has_failed(self) -> bool:
        """Whether it has ended."""
        return self.process.poll() is not None


@contextlib.contextmanager
def store() -> Iterator[str]:
    """The address of a store in a process of its own."""
    command = [sys.executable, "-m", "gossip_modules.membership.serve", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            yield f"127.0.0.1:{server.stdout.readline().split()[-1]}"
        finally:
            server.kill()


@contextlib.contextmanager
def killed_at_the_end() -> Iterator[list[WorkerProcess]]:
    """A list of workers, all of which end with the block."""
    workers: list[WorkerProcess] = []
    try:
        yield workers
    finally:
        for worker in workers:
            worker.process.kill()
            worker.process.wait()


def until(workers: list[WorkerProcess], step: int) -> None:
    """Wait until all of them have taken a step."""
    deadline = time.monotonic() + 300
    while min(worker.last_step() for worker in workers) < step:
        if time.monotonic() > deadline or any(worker.has_failed for worker in workers):
            raise RuntimeError(
                f"got steps {[w.last_step() for w in workers]}, expected {step}; a worker hangs or failed"
            )
        time.sleep(0.2)
