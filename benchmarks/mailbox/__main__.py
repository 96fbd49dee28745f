"""The mailbox on the wire: faults in network namespaces, requests, and a soak.

    sudo python -m benchmarks.mailbox --figure faults      # two kills, a join, and 60 s without the store
    sudo python -m benchmarks.mailbox --figure requests    # requests and bytes of each worker and round
    python -m benchmarks.mailbox --figure soak             # ten minutes, a random fault every three seconds
    python -m benchmarks.mailbox --figure folder           # kills while workers write files

Workers are processes that train a small network, each step with a sleep in place of computation. The store is the S3
server of moto in a process of its own; it carries out one request after the other, since moto does not keep the first
of two racing writes. For `faults` and `requests` each worker is in a network namespace with a cable to the server and
no other route; the packets of the server are dropped while it is away. In a soak workers are killed (SIGKILL), stopped
(SIGSTOP) and started, and the server stands still or refuses requests (503), for half a second to eight.

A row for each method is appended to benchmarks/results/mailbox_FIGURE.csv. Methods whose rows of this commit and these
options are there are left out, so a run may go on after it was interrupted. The exit code of a soak is 1 where
something that must hold did not; stderr says what.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tyro

from benchmarks.cluster.network.namespaces import or_exit
from benchmarks.mailbox import faults, folder, requests, soak
from benchmarks.mailbox.training import METHODS, WireTraining
from benchmarks.record import RESULTS, append_row, commit


@dataclass
class MailboxBenchmark:
    """What is measured."""

    figure: Literal["faults", "requests", "soak", "folder"] = "faults"
    methods: tuple[str, ...] = METHODS
    quick: bool = False
    """Short runs, which show that the benchmark works."""
    seconds: float = 600.0
    """Of a soak, with faults."""
    every: float = 3.0
    """Seconds between two faults of a soak."""
    outage: float = 60.0
    """Seconds for which the store is away."""
    num_workers: tuple[int, ...] = (4,)
    step_ms: float = 100.0
    sync_every: int = 20
    grace: float = 10.0
    poll: float = 1.0
    interval: float = 10.0
    save_every: int = 4
    num_rounds: int = 20
    """Of `requests`."""
    kills: int = 60
    """Of `folder`."""
    seed: int = 1
    folder: Path = RESULTS

    def __post_init__(self) -> None:
        if unknown := [method for method in self.methods if method not in METHODS]:
            raise ValueError(f"got methods {unknown}, expected some of {list(METHODS)}")
        if self.quick:
            self.seconds, self.outage, self.num_rounds, self.kills = 60.0, 4.0, 4, 5
            self.step_ms, self.grace, self.poll, self.interval = 20.0, 2.0, 0.25, 2.0

    def training(self, method: str, num_workers: int) -> WireTraining:
        """The task of the workers."""
        return WireTraining(
            method,
            num_workers,
            self.step_ms,
            self.seed,
            sync_every=self.sync_every,
            grace=self.grace,
            poll=self.poll,
            interval=self.interval,
            save_every=self.save_every,
        )

    def measure(self, training: WireTraining) -> dict[str, Any]:
        """One row."""
        if self.figure == "faults":
            return faults.measure(training, outage=self.outage)
        if self.figure == "requests":
            return requests.measure(training, num_rounds=self.num_rounds)
        if self.figure == "folder":
            return folder.measure(training, kills=self.kills, seed=self.seed)
        return soak.measure(training, seconds=self.seconds, every=self.every, seed=self.seed)

    @property
    def output(self) -> Path:
        """The file of the rows."""
        return self.folder / f"mailbox_{self.figure}.csv"

    def missing(self) -> Iterator[WireTraining]:
        """The tasks whose rows of this commit are not in the file."""
        text = self.output.read_text().splitlines() if self.output.exists() else []
        for num_workers in self.num_workers:
            for method in self.methods:
                key = f",{method},{num_workers},"
                if not any(key in line and commit() in line for line in text) or self.quick:
                    yield self.training(method, num_workers)


def main() -> int:
    """Rows appended as they come; the exit code."""
    options = tyro.cli(MailboxBenchmark, description=__doc__)
    wrong = []
    with or_exit():
        for training in options.missing():
            row = options.measure(training)
            print(row, flush=True)
            append_row(options.output, row, seed=options.seed)
            wrong += soak.broken(row) if options.figure == "soak" else []
    for text in wrong:
        print(f"error: {text}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
