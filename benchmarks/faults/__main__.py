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

import gc
import importlib
import itertools
import json
import shutil
import tempfile
from collections import deque
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import tyro

from benchmarks.record import append_rows, provenance, rows_in

from .cell import Cell, Key
from .fault import FAULTS
from .processes import Processes
from .table import COLUMNS, WRAPPERS, done, markdown


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

    def main(self) -> None:
        """Run the cells that are not in the file yet, then write and print the table."""
        shared = {"timeout_seconds": self.timeout, "world_size": self.world_size}
        complete = done(rows_in(self.output, COLUMNS), {**provenance(self.seed), **shared})
        keys = [Key(*each) for each in itertools.product(self.wrappers, self.faults, range(self.repeats))]
        # Faults side by side, so that not all that wait for long come last.
        waiting = deque(sorted((key for key in keys if key not in complete), key=lambda key: (key.repeat, key.fault)))
        importlib.import_module("torch._dynamo")  # torch loads it in the first step of an optimizer
        gc.freeze()  # what is imported is nobody's garbage: collecting at exit would copy all of it, in each process
        folder = Path(tempfile.mkdtemp(prefix="faults-")) if self.logs is None else self.logs
        cells = Processes(folder)
        while waiting or cells.running:
            while waiting and len(cells.running) < self.jobs:
                key = waiting.popleft()
                cells.start("-".join(map(str, key)), partial(self._run_cell, key, folder))
            for name in cells.reap(is_waiting=True):
                path = folder / f"{name}.json"
                if not path.exists():
                    raise RuntimeError(f"got no rows of {name}, expected them; see {folder / name}.log")
                rows = json.loads(path.read_text())
                append_rows(self.output, [{**shared, **row} for row in rows], seed=self.seed)
                print(f"{name}: done, {len(waiting) + len(cells.running)} to come", flush=True)
        if self.logs is None:
            shutil.rmtree(folder)
        text = markdown(rows_in(self.output, COLUMNS))
        self.output.with_suffix(".md").write_text(text)
        print(text)

    def _run_cell(self, key: Key, folder: Path) -> None:
        """The process of a cell: it writes its rows as JSON."""
        name = "-".join(map(str, key))
        cell = Cell(key, folder / name, world_size=self.world_size, timeout=self.timeout, seed=self.seed)
        rows = [{column: row.get(column) for column in COLUMNS[2:]} for row in cell.run()]
        (folder / f"{name}.json").write_text(json.dumps(rows))


if __name__ == "__main__":
    tyro.cli(Faults, description=__doc__).main()
