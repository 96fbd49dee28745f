"""The ranks' processes, one in each host: started, given trials, killed when one of them fails or hangs."""

from __future__ import annotations

import json
import multiprocessing
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from benchmarks.cluster import rank as rank_module
from benchmarks.cluster.methods import method_of
from benchmarks.cluster.network import namespaces
from benchmarks.cluster.network.links import EmulatedNetwork
from benchmarks.cluster.trials import Trial

START_SECONDS = 300.0
"""For all ranks to be ready: the first ones wait for the imports of the server that they are forks of."""
PRELOAD = (
    *("benchmarks.cluster.rank", "torch.nn.parallel", "torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook"),
    *("torch.distributed.algorithms.model_averaging.averagers", "torch.distributed.optim"),
)


class TrialError(Exception):
    """Why a trial has no result, in one line."""


class TrialProcesses:
    """A process per rank, for trials one after another. `close()` it.

    They are forks of a server that has imported what they need: 32 imports of torch would take minutes of two cores.

    Args:
        body: called in each process with its end of a connection, and that rank's arguments; it answers each message
            that it gets by one, and sends one when it is ready. Messages are JSON.
        arguments: of each rank, plain values.
        folder: for what they print.
        hosts: namespaces that are theirs alone: what they have started is killed with them.
    """

    def __init__(
        self,
        body: Callable[..., None],
        arguments: Sequence[tuple[Any, ...]],
        folder: Path,
        *,
        hosts: Sequence[str] = (),
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(list(PRELOAD))
        self._logs = [folder / f"rank{rank}.log" for rank in range(len(arguments))]
        self._hosts = hosts
        self._processes: list[ForkServerProcess] = []
        self._connections: list[Connection] = []
        try:
            for log, own in zip(self._logs, arguments, strict=True):
                log.write_text("")
                connection, theirs = context.Pipe()
                self._connections.append(connection)
                # No daemon: those may not have children, and peers do.
                process = context.Process(target=_main, args=(str(log), body, theirs, own))
                process.start()
                self._processes.append(process)
                theirs.close()
            self.answers(START_SECONDS)
        except BaseException:
            self.close()
            raise

    @classmethod
    def in_hosts(cls, network: EmulatedNetwork, folder: Path) -> TrialProcesses:
        """Ranks that run trials, one in each host.

        Raises:
            TrialError: they are not ready in time.
        """
        ranks = range(len(network.hosts))
        addresses = [network.address(rank) for rank in ranks]
        controls = [network.control_address(rank) for rank in ranks]
        arguments = [(network.hosts[rank], rank, addresses, controls) for rank in ranks]
        return cls(rank_module.serve, arguments, folder, hosts=network.hosts)

    def run(self, message: dict[str, Any], limit_seconds: float) -> list[dict[str, Any]]:
        """The answers to a message that all get, in the order of ranks.

        Raises:
            TrialError: see `answers`. The processes are of no use then: close them.
        """
        for rank, connection in enumerate(self._connections):
            try:
                connection.send_bytes(json.dumps(message).encode())
            except (BrokenPipeError, ConnectionResetError):
                raise TrialError(self._end_of(rank)) from None
        return self.answers(limit_seconds)

    def answers(self, limit_seconds: float) -> list[dict[str, Any]]:
        """The next message of each, in the order of ranks.

        Raises:
            TrialError: one of them has ended, did not answer in time, or answered with an error or no JSON.
        """
        deadline = time.monotonic() + limit_seconds
        answers: dict[int, dict[str, Any]] = {}
        while waiting := [rank for rank in range(len(self._connections)) if rank not in answers]:
            ready = wait([self._connections[rank] for rank in waiting], max(deadline - time.monotonic(), 0.0))
            if not ready:
                raise TrialError(f"no answer of ranks {waiting} in {limit_seconds:g} s")
            for rank in waiting:
                if self._connections[rank] in ready:
                    answers[rank] = self._answer_of(rank)
        return [answers[rank] for rank in range(len(self._connections))]

    def _answer_of(self, rank: int) -> dict[str, Any]:
        try:
            data = self._connections[rank].recv_bytes()
        except (EOFError, ConnectionResetError):
            raise TrialError(self._end_of(rank)) from None
        try:
            answer = json.loads(data)
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise TrialError(f"rank {rank} answered {data[:60]!r}, expected JSON")
        if "error" in answer:
            raise TrialError(f"rank {rank}: {answer['error']}")
        return answer

    def _end_of(self, rank: int) -> str:
        self._processes[rank].join(5.0)
        lines = [line for line in self._logs[rank].read_text(errors="replace").splitlines() if line.strip()]
        said = f": {lines[-1].strip()}" if lines else ""
        return f"rank {rank} ended with exit code {self._processes[rank].exitcode}{said}"

    def close(self) -> None:
        """Kill all and wait for their end. Idempotent."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
            process.close()
        namespaces.clear(self._hosts)
        for connection in self._connections:
            connection.close()
        self._processes, self._connections = [], []


class Fleet:
    """Processes in the hosts of a network, renewed where a trial needs or leaves them so. `close()` it.

    Args:
        network: whose hosts they live in.
        folder: for what they print.
    """

    def __init__(self, network: EmulatedNetwork, folder: Path) -> None:
        self._network = network
        self._folder = folder
        self._processes: TrialProcesses | None = None

    def run(self, trial: Trial) -> list[dict[str, Any]]:
        """The answers of the ranks, in their order.

        Raises:
            TrialError: there is no result.
        """
        is_alone = method_of(trial.method).is_alone
        if is_alone:
            self.close()
        try:
            self._processes = self._processes or TrialProcesses.in_hosts(self._network, self._folder)
            # A rank's own waits end first, and say for whom they were.
            answers = self._processes.run(trial.as_message(), 1.2 * trial.limit_seconds)
        except TrialError:
            self.close()
            raise
        if is_alone:
            self.close()
        return answers

    def close(self) -> None:
        """Kill the processes. Idempotent."""
        if self._processes is not None:
            self._processes.close()
        self._processes = None


def _main(log: str, body: Callable[..., None], connection: Connection, arguments: tuple[Any, ...]) -> None:
    rank_module.print_to(Path(log))
    body(connection, *arguments)
