"""The training scripts with --elastic, as processes: one is killed, one comes, and the run ends as it should."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pandas as pd
import pytest

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 300.0
pytestmark = [pytest.mark.e2e, pytest.mark.soak, pytest.mark.timeout(900)]
# A process that has imported everything waits for a line before it becomes a worker: it joins while others train.
PRELOADED = """
import runpy, sys
import sklearn.datasets, torch._dynamo, torch.utils.tensorboard
import train.run.elastic.worker, train.tasks.images.task, visualization.curves
input()
runpy.run_module(sys.argv.pop(1), run_name="__main__")
"""


class Process:
    """A process and what it has printed so far."""

    def __init__(self, *command: str, environment: dict[str, str] | None = None) -> None:
        self.lines: list[str] = []
        self._process = subprocess.Popen(
            [sys.executable, *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **(environment or {})},
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        self.lines.extend(self._process.stdout)

    @property
    def output(self) -> str:
        return "".join(self.lines)

    def go(self) -> None:
        """Let a preloaded one become a worker."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    def until(self, pattern: str, *, others: tuple[Process, ...] = ()) -> str:
        """Wait for a line; returns what was found."""
        deadline = time.monotonic() + SECONDS
        while not (found := re.search(pattern, self.output)):
            assert self._process.poll() is None or re.search(pattern, self.output), self.output
            assert time.monotonic() < deadline, f"no {pattern!r} in {self.output}{[o.output for o in others]}"
            time.sleep(0.02)
        return found[0]

    def kill(self) -> None:
        """SIGKILL; nothing where it has ended."""
        self._process.kill()
        self.wait()

    def wait(self) -> int:
        code = self._process.wait(SECONDS)
        self._reader.join(SECONDS)
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
        return code


@pytest.fixture
def start() -> Iterator[Callable[..., Process]]:
    processes: list[Process] = []

    def start(*command: str) -> Process:
        processes.append(Process(*command))
        return processes[-1]

    yield start
    for process in processes:
        process.kill()


def store_of(start: Callable[..., Process]) -> str:
    port = (
        start("-m", "gossip_modules.membership.serve", "--host", "127.0.0.1", "--port", "0")
        .until(r"port \d+")
        .split()[-1]
    )
    return f"127.0.0.1:{port}"


@pytest.mark.parametrize("recipe", ["osgp", "choco", "diloco", "wagma", "adpsgd"])
def test_a_run_loses_a_worker_gets_another_and_ends_well(
    recipe: str, tmp_path: Path, start: Callable[..., Process]
) -> None:
    options = ["--recipe", recipe, "--elastic", "--min-workers", "3", "--store", store_of(start), "--epochs", "24"]
    options += ["--out-dir", str(tmp_path / "run"), "--min-deadline", "60", "--validate-every", "8"]
    workers = [start("-c", PRELOADED, "train.gossip_sgd", *options) for _ in range(4)]
    for worker in workers[:3]:
        worker.go()
    by_number = {int(w.until(r"worker \d, one of 3").split()[1].rstrip(",")): w for w in workers[:3]}
    first, victim = by_number[0], by_number[1]
    first.until("epoch   2 ")
    victim.kill()
    first.until(r"with 2 workers .* worker 1 left \(its connection closed\)")
    newcomer = workers[3]
    newcomer.go()
    from_batch = int(newcomer.until(r"worker 3, one of 3, .*from batch \d+").split()[-1])
    alive = (first, by_number[2], newcomer)
    assert [worker.wait() for worker in alive] == [0, 0, 0]
    assert from_batch > 2 * 44
    accuracy = float(first.until(r"averaged model: test accuracy [\d.]+").split()[-1])
    assert accuracy > 95

    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    changes = summary["membership"]
    assert [len(change["members"]) for change in changes][:1] == [3]
    assert {number for change in changes for number in change["left"]} == {"1"}
    assert [change["joined"] for change in changes if change["joined"]][-1] == [3]
    assert summary["world_size"] == 3
    tables = {path.name: pd.read_csv(path) for path in (tmp_path / "run").glob("rank_*.csv")}
    assert {"rank_0000.csv", "rank_0002.csv", "rank_0003.csv"} <= tables.keys()
    epochs = tables["rank_0000.csv"]["epoch"].tolist()
    if recipe in ("wagma", "adpsgd"):  # in a step, others may have taken all those of an epoch
        assert epochs == sorted(set(epochs))
        assert epochs[-1] == 24
    else:
        assert epochs == list(range(1, 25))
    assert tables["rank_0003.csv"]["own_steps"].iloc[-1] < tables["rank_0000.csv"]["own_steps"].iloc[-1]

    # A worker of the job that is started again finds it done.
    again = start("-m", "train.gossip_sgd", *options, "--resume", "auto")
    assert again.wait() == 0
    assert "nothing is left to do" in again.output


@pytest.mark.parametrize("script", ["translate", "language_model"])
def test_the_other_scripts_take_it_too(script: str, tmp_path: Path, start: Callable[..., Process]) -> None:
    options = ["--elastic", "--min-workers", "2", "--store", store_of(start), "--out-dir", str(tmp_path / "run")]
    options += ["--epochs", "2", "--min-deadline", "60"]
    options += ["--num-numbers", "600"] if script == "translate" else ["--steps-per-epoch", "30"]
    workers = [start("-m", f"train.{script}", *options) for _ in range(2)]
    assert [worker.wait() for worker in workers] == [0, 0], [worker.output for worker in workers]
    assert sum("averaged model: test" in worker.output for worker in workers) == 1
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["world_size"] == 2


def test_a_worker_that_is_told_to_stop_leaves_and_all_of_them_can_go_on_later(
    tmp_path: Path, start: Callable[..., Process]
) -> None:
    options = ["--elastic", "--min-workers", "2", "--out-dir", str(tmp_path / "run"), "--min-deadline", "60"]
    options += ["--resume", "auto"]
    store = ["--store", store_of(start)]
    workers = [start("-m", "train.gossip_sgd", *options, *store, "--epochs", "2000") for _ in range(2)]
    by_number = {int(w.until(r"worker \d, one of 2").split()[1].rstrip(",")): w for w in workers}
    by_number[0].until("epoch   1 ")
    by_number[0]._process.terminate()
    assert by_number[0].wait() == 75
    stopped_at = int(by_number[0].until(r"leaves the run after batch \d+").split()[-1])
    by_number[1].until(r"epoch +\d+ ", others=(by_number[0],))  # it is the first one now, and alone
    by_number[1].kill()
    assert (tmp_path / "run" / "checkpoints" / f"step_{stopped_at:08d}" / "rank_0000.pt").is_file()
    epochs = stopped_at // 44 + 2
    store = ["--store", store_of(start)]
    workers = [start("-m", "train.gossip_sgd", *options, *store, "--epochs", str(epochs)) for _ in range(2)]
    assert [worker.wait() for worker in workers] == [0, 0], [worker.output for worker in workers]
    assert any(f"from batch {stopped_at}\n" in worker.output for worker in workers)
