"""A job of workers that train, each a process, and what they have written; a benchmark kills, stops and starts them."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.cluster.network import namespaces
from benchmarks.cluster.network.links import EmulatedNetwork
from benchmarks.elastic import torchft_worker
from benchmarks.elastic.training import LAST, Training
from gossip_modules.testing.process_backend import Host, ProcessBackend

if TYPE_CHECKING:
    from typing_extensions import Self

STEPS_SECONDS = 300.0
"""For workers to come to a step; then they hang."""


class Job:
    """Workers by their rank, in the order of their start. Use it in a `with`: all processes end with the block.

    Args:
        training: of each worker; its folder is replaced by a temporary one.
        network: of whose hosts each worker gets one; None: all workers are processes of this machine.
    """

    def __init__(self, training: Training, network: EmulatedNetwork | None = None) -> None:
        self._exit = contextlib.ExitStack()
        self.folder = Path(self._exit.enter_context(tempfile.TemporaryDirectory()))
        self.training = replace(training, folder=str(self.folder))
        self.backend = self.make_backend(network)
        self._exit.callback(self.backend.close)
        self.num_started = 0

    def make_backend(self, network: Any) -> ProcessBackend:
        """The processes of the workers and of the store."""
        kind = _LighthouseBackend if self.training.method == torchft_worker.NAME else _HostBackend
        return kind(self.training, network)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._exit.close()

    def start(self, count: int = 1) -> list[int]:
        """Start so many workers; their ranks."""
        ranks = list(range(self.num_started, self.num_started + count))
        self.num_started += count
        for rank in ranks:
            self.backend.start(rank, [])
        return ranks

    def end_at(self, step: int) -> None:
        """Training ends before this step."""
        part = self.folder / f"{LAST}.part"
        part.write_text(str(step))
        part.replace(self.folder / LAST)  # so that no worker reads an empty file

    def lines(self, rank: int, event: str = "step") -> list[dict[str, Any]]:
        """The events of a kind that a worker has written; a last line that is not whole is of one that was killed."""
        path = self.folder / f"{rank}.jsonl"
        text = path.read_text() if path.exists() else ""
        lines = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
        return [line for line in lines if line["event"] == event]

    def last_step(self, rank: int) -> int:
        """The number of the last step of a worker; -1 before the first."""
        return max((line["step"] for line in self.lines(rank)), default=-1)

    def until(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Let time pass until the condition holds; returns whether it does."""
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                return False
            self.turn()
        return True

    def until_step(self, ranks: Iterable[int], step: int) -> None:
        """Wait until each of these workers has taken a step, or has failed.

        Raises:
            RuntimeError: one hangs.
        """
        waiting = set(ranks)

        def has_come() -> bool:
            waiting.intersection_update(self.backend.running)
            waiting.difference_update([rank for rank in waiting if self.last_step(rank) >= step])
            return not waiting

        if not self.until(has_come, STEPS_SECONDS):
            steps = {rank: self.last_step(rank) for rank in waiting}
            raise RuntimeError(f"got workers at {steps}, expected step {step} in {STEPS_SECONDS:g} s; they hang")

    def turn(self) -> None:
        """Let a little time pass; a worker that fails is printed."""
        failed = set(self.backend.errors)
        self.backend.wait(0.05)
        for rank in set(self.backend.errors) - failed:
            print(f"worker {rank}: {self.backend.errors[rank]}", file=sys.stderr, flush=True)
        time.sleep(0.05)


@dataclass(frozen=True)
class NamespaceHost(Host):
    """A host of the emulated cluster."""

    namespace: str = ""

    def enter(self, connection: Connection) -> None:
        """See `Host`."""
        namespaces.enter(self.namespace, name=self.address)  # torchft tells others the name


class _HostBackend(ProcessBackend):
    """Workers on the hosts of a network, if there is one; the store is on the first, and who is late has that too."""

    def __init__(self, body: Training, network: EmulatedNetwork | None) -> None:
        self._network = network
        super().__init__(body)

    def _host(self, rank: int | None) -> Host:
        if self._network is None:
            return Host()
        place = rank or 0
        place = place if place < len(self._network.hosts) else 0
        return NamespaceHost(self._network.address(place), self._network.hosts[place])


class _LighthouseBackend(_HostBackend):
    """With torchft's lighthouse in the place of the store."""

    _lighthouse: subprocess.Popen[str] | None = None

    def start_store(self) -> None:
        """See `Backend`."""
        host = self._host(None)
        place = ("ip", "netns", "exec", host.namespace) if isinstance(host, NamespaceHost) else ()
        command = [*place, sys.executable, "-m", "benchmarks.elastic.torchft_worker", "--port", str(self._port)]
        self._lighthouse = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._lighthouse.stdout is not None
        self._port = int(self._lighthouse.stdout.readline().split()[-1])
        self.store = f"{host.address}:{self._port}"

    def kill_store(self) -> None:
        """See `Backend`."""
        if self._lighthouse is not None:
            self._lighthouse.kill()
            self._lighthouse.communicate()
            self._lighthouse = None
