"""What every wrapper does when a rank is killed, stopped, fails or leaves: wrappers x faults, in real processes.

    make faults                                                             # all cells; resumes what is not complete
    python -m benchmarks.faults --wrappers sgp wagma --faults kill-odd stop-long --repeats 3
    python -m benchmarks.faults --output /tmp/faults.csv --timeout 2 --jobs 6

Each cell is a world of Gloo ranks on loopback around a tiny model, and a process of its own that serves the key-value
store. The step of the fault and the moment in it are drawn from the seed. --output gets a row per rank when its cell is
over, so nothing is lost by an interruption; the same command goes on from there. Beside it a .md file gets the table,
with a list of what deviates from what docs/guides/failures.md promises.
"""

from __future__ import annotations

import itertools
import sys
import tempfile
import time
from collections import deque
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib.metadata import version
from os import cpu_count
from pathlib import Path
from typing import Any

import tyro
from tqdm import tqdm

from benchmarks.record import commit, cpu_model

from .cell import Cell, Key
from .fault import FAULTS, STORE
from .fork_server import ForkServer
from .table import WRAPPERS, FaultTable, markdown

POLL_SECONDS = 0.01


@dataclass(frozen=True)
class Faults:
    """What is run: the product of wrappers, faults and repeats."""

    wrappers: tuple[str, ...] = tuple(WRAPPERS)
    """Columns of the table."""
    faults: tuple[str, ...] = tuple(FAULTS)
    """Rows of the table."""
    timeout: float = 10.0
    """Of wrappers and of the default group, in seconds."""
    world_size: int = 4
    """Ranks of each world."""
    repeats: int = 1
    """Of each cell; steps and moments differ."""
    seed: int = 0
    """Of the steps and moments of the faults."""
    jobs: int = 4
    """Worlds at once; they mostly wait."""
    output: Path = Path("benchmarks/results/faults.csv")
    """Appended to. The table goes beside it, as .md."""
    logs: Path | None = None
    """Where the output of all processes is kept; None: nowhere."""

    def __post_init__(self) -> None:
        for name, got, known in (("wrappers", self.wrappers, WRAPPERS), ("faults", self.faults, FAULTS)):
            if unknown := [each for each in got if each not in known]:
                raise ValueError(f"got {name} {unknown}, expected some of {list(known)}")
        if self.world_size < 4 or self.world_size % 2:
            raise ValueError(f"got world_size={self.world_size}, expected an even number of 4 or more: two are killed")
        if min(self.repeats, self.jobs) < 1 or not 1 <= self.timeout < 3600:
            raise ValueError(
                f"got timeout={self.timeout}, repeats={self.repeats}, jobs={self.jobs}, expected 1 s to 1 h, and at "
                "least 1 of the others"
            )

    @property
    def limit(self) -> float:
        """Seconds from a fault until who still runs is killed."""
        return 3 * self.timeout + 10

    def setting(self) -> dict[str, Any]:
        """The columns that all rows of this run share."""
        return {
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "commit": commit(),
            "torch": version("torch"),
            "machine": cpu_model(),
            "cores": cpu_count(),
            "command": " ".join(["python", *sys.orig_argv[1:]]),
            "seed": self.seed,
            "timeout_seconds": self.timeout,
            "world_size": self.world_size,
        }

    def main(self) -> None:
        """Run the cells that are not in the file yet, then write and print the table."""
        table, setting = FaultTable(self.output), self.setting()
        done = table.done(setting)
        keys = [Key(*each) for each in itertools.product(self.wrappers, self.faults, range(self.repeats))]
        # Faults side by side, so that not all that wait for long come last.
        waiting = deque(sorted((key for key in keys if key not in done), key=lambda key: (key.repeat, key.fault)))
        with tempfile.TemporaryDirectory(prefix="faults-") as folder, ForkServer() as server:
            logs = Path(folder) if self.logs is None else self.logs / time.strftime("%Y%m%d-%H%M%S")
            with tqdm(total=len(keys), initial=len(keys) - len(waiting), unit="cell", mininterval=2) as progress:
                running: list[Cell] = []
                while waiting or running:
                    while waiting and len(running) < self.jobs:
                        running.append(self._start(waiting.popleft(), server, logs))
                    for end in server.ends():
                        assert any(cell.note(end) for cell in running), f"{end} is of no world"
                    for cell in [cell for cell in running if cell.is_over]:
                        running.remove(cell)
                        table.append({**setting, **own, **cell_columns(cell)} for own in cell.rows())
                        progress.update()
                    for cell in running:
                        cell.poll()
                    names = ", ".join(f"{cell.key.wrapper} {cell.key.fault}" for cell in running)
                    progress.set_postfix_str(names, refresh=False)
                    time.sleep(POLL_SECONDS)
        text = markdown(table.frame())
        self.output.with_suffix(".md").write_text(text)
        print(text)

    def _start(self, key: Key, server: ForkServer, logs: Path) -> Cell:
        folder = logs / key.wrapper / f"{key.fault}-{key.repeat}"
        options: dict[str, Any] = {"world_size": self.world_size, "timeout": self.timeout, "seed": self.seed}
        return Cell(key, server, folder, **options, limit=self.limit)


def cell_columns(cell: Cell) -> dict[str, Any]:
    """The columns that say which cell."""
    victims = " ".join("store" if victim == STORE else f"{victim}" for victim in cell.fault.victims)
    return {**cell.key._asdict(), "victims": victims}


if __name__ == "__main__":
    tyro.cli(Faults, description=__doc__).main()
