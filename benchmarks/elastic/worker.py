"""A worker that trains and prints a line for each step, as a process, and what a benchmark sees of it.

Processes are forks of a server that has imported everything: eight that import torch at once keep both cores busy for
half a minute.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import multiprocessing
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from benchmarks.cluster.network import namespaces
from benchmarks.elastic.methods import METHODS
from gossip_modules import Membership
from gossip_modules.membership.donor import transfer

PRELOAD = ("benchmarks.elastic.worker", "torch._dynamo", "pandas", "tyro")
"""Of the server of processes; torch loads torch._dynamo in the first step of an optimizer."""


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
    """A worker with a membership, until it is killed."""
    send = transfer.send

    def counted(group: Any, state: Any, **options: Any) -> int:
        start = time.time()
        num_bytes = send(group, state, **options)
        say(event="gave", num_bytes=num_bytes, start=start, at=time.time())
        return num_bytes

    transfer.send = counted  # what a donor gives, in bytes and seconds
    membership = Membership(job.address, min_workers=job.num_workers, min_deadline=job.min_deadline)
    model = METHODS[job.method](make_model(job.width, job.seed), membership=membership)
    optimizer = torch.optim.SGD(model.parameters(), lr=1 / job.width, momentum=0.9)
    membership.track(optimizer=optimizer)
    membership.on_change(lambda change: say(event="change", members=change.members, step=change.step, at=time.time()))
    say(event="ready", at=time.time())
    steps = itertools.count(membership.join())
    take_steps(job, model, optimizer, lambda: (next(steps), membership.rank))


def take_steps(
    job: ElasticJob, model: nn.Module, optimizer: torch.optim.Optimizer, place: Callable[[], tuple[int, int]]
) -> None:
    """Train, and say a line for each step, until the process is killed.

    Args:
        job: whose steps these are.
        model: what is called.
        optimizer: of the model.
        place: the number of the step that has been taken, and the rank of the worker in it.
    """
    x = torch.randn(16, 64)
    while True:
        start = time.perf_counter()
        optimizer.zero_grad()
        loss = model(x).pow(2).mean()
        loss.backward()
        optimizer.step()
        time.sleep(job.step_ms / 1000)
        seconds = time.perf_counter() - start
        step, rank = place()
        say(event="step", step=step, rank=rank, at=time.time(), ms=1000 * seconds)


class NetworkHost(NamedTuple):
    """Where a process lives: a network namespace, of `ip netns`, and its address in it."""

    namespace: str
    address: str


class WorkerProcess:
    """A process that trains, and what it has printed.

    Args:
        job: what it does.
        folder: for what it prints.
        name: of the worker, another one for each.
        body: the function that it calls.
        host: that it lives in; None: this machine.
    """

    def __init__(
        self,
        job: ElasticJob,
        folder: Path,
        name: str,
        body: Callable[[ElasticJob], None] = train,
        host: NetworkHost | None = None,
    ) -> None:
        self.path = folder / name
        self.path.touch()
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(list(PRELOAD))
        self.process = context.Process(target=_run, args=(body, job, str(self.path), host), name=name, daemon=True)
        self.process.start()

    def events(self, kind: str) -> list[dict[str, Any]]:
        """All of a kind that it has said."""
        lines = self.path.read_text().splitlines(keepends=True)
        return [event for line in lines if line.endswith("\n") and (event := json.loads(line))["event"] == kind]

    def last_step(self) -> int:
        """The number of the last step; -1 before the first."""
        with self.path.open("rb") as file:
            file.seek(max(0, self.path.stat().st_size - 4096))
            events = [json.loads(line) for line in file.read().splitlines(keepends=True)[1:] if line.endswith(b"\n")]
        return max((event["step"] for event in events if event["event"] == "step"), default=-1)

    def error(self) -> str:
        """The last line of what ended it."""
        return (Path(f"{self.path}.error").read_text().strip().splitlines() or ["it said nothing"])[-1]

    @property
    def has_failed(self) -> bool:
        """Whether it has ended."""
        return not self.process.is_alive()


def _run(body: Callable[[ElasticJob], None], job: ElasticJob, path: str, host: NetworkHost | None) -> None:
    with open(path, "w") as output, open(f"{path}.error", "w") as error:
        os.dup2(output.fileno(), 1)
        os.dup2(error.fileno(), 2)
    if host is not None:
        namespaces.enter(host.namespace, name=host.address)  # torchft tells others the name
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    try:
        body(job)
    finally:
        say(event="failed", at=time.time())


def _end_with_parent() -> None:
    """A thread: no worker trains on when the benchmark was killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


class StoreProcess:
    """A process that workers meet in; it may be killed, and started again at its address. `close()` it.

    Args:
        command: what python runs; None: the store of a membership. It takes `--port`, and prints a line of which the
            last word is the port.
        host: that it lives in; None: this machine.
    """

    def __init__(self, command: Sequence[str] | None = None, host: NetworkHost | None = None) -> None:
        place = () if host is None else ("ip", "netns", "exec", host.namespace)
        self._host = "127.0.0.1" if host is None else host.address
        command = command or ("-m", "gossip_modules.membership.serve", "--host", self._host)
        self._command = [*place, sys.executable, *command]
        self.port = 0
        self.start()

    @property
    def address(self) -> str:
        """host:port"""
        return f"{self._host}:{self.port}"

    def start(self) -> None:
        """Begin, empty; at the same port as before."""
        command = [*self._command, "--port", str(self.port)]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"got no line from {' '.join(command)}, expected its port; see its error")
        self.port = int(line.split()[-1])

    def kill(self) -> None:
        """SIGKILL. Idempotent."""
        assert self._process.stdout is not None
        self._process.kill()
        self._process.wait()
        self._process.stdout.close()

    close = kill


@contextlib.contextmanager
def killed_at_the_end() -> Iterator[list[WorkerProcess]]:
    """A list of workers, all of which end with the block."""
    workers: list[WorkerProcess] = []
    try:
        yield workers
    finally:
        for worker in workers:
            worker.process.kill()
            worker.process.join()


def until(workers: Sequence[WorkerProcess], step: int) -> None:
    """Wait until all of them have taken a step.

    Raises:
        RuntimeError: one has failed, or does not come so far in five minutes.
    """
    until_or_failed(workers, step)
    for worker in workers:
        if worker.has_failed:
            raise RuntimeError(f"got a worker that failed, expected its step {step}: {worker.error()}")


def until_or_failed(workers: Sequence[WorkerProcess], step: int) -> None:
    """Wait until each of them has taken a step, or has failed.

    Raises:
        RuntimeError: one hangs: it does not come so far in five minutes.
    """
    deadline = time.monotonic() + 300
    while any(worker.last_step() < step and not worker.has_failed for worker in workers):
        if time.monotonic() > deadline:
            raise RuntimeError(f"got steps {[w.last_step() for w in workers]}, expected {step}; a worker hangs")
        time.sleep(0.2)
