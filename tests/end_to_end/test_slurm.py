"""job_scripts/ on a real SLURM: preemption, requeue, a node that fails, elastic workers, cancellation, leftovers."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pandas as pd
import pytest
import torch
from safetensors.torch import load_file

from tests.end_to_end.slurm.cluster import Cluster
from tests.harness.processes import run_processes
from tests.harness.training import gloo_world, train
from train.command_line import read_command_line
from train.tasks.images.config import Config

ROOT = Path(__file__).resolve().parents[2]
LAUNCH, LAUNCH_ELASTIC = (ROOT / "job_scripts" / name for name in ("launch.sh", "launch_elastic.sh"))
START = r"from step (\d+)"
MEASURED = ["time_seconds", "data_seconds", "wait_seconds"]
"""Columns that two runs of the same numbers differ in."""
SINCE_START = ["num_rounds", "mean_staleness_forwards", "max_staleness_forwards"]
"""Columns that a process counts from its own start."""

obstacle = Cluster.obstacle()
needs_slurm = pytest.mark.skipif(bool(obstacle), reason=obstacle)


@pytest.fixture
def folder() -> Iterator[Path]:
    """Of a cluster, which is to remove it; not tmp_path, as it holds a socket, whose path must be short."""
    with tempfile.TemporaryDirectory(prefix="slurm-") as parent:
        yield Path(parent, "cluster")
        assert os.listdir(parent) == []


@pytest.fixture
def cluster(folder: Path) -> Iterator[Cluster]:
    """Four nodes."""
    with Cluster(folder) as cluster:
        yield cluster
    assert cluster.daemon_pids() + cluster.task_pids() == []


class Job:
    """A training run of two nodes that was submitted through launch.sh.

    Args:
        cluster: to submit it to.
        folder: of the run, to be made.
        arguments: of train/gossip_sgd.py.
    """

    def __init__(self, cluster: Cluster, folder: Path, *arguments: str) -> None:
        self.cluster, self.folder = cluster, folder
        self._output = folder.with_suffix(".out")
        self.number = cluster.run(
            *["sbatch", "--parsable", "--nodes=2", "--cpus-per-task=4", "--time=10", f"--chdir={ROOT}"],
            *[f"--job-name={folder.name}", f"--output={self._output}"],
            f"--export=ALL,OUT_DIR={folder},VENV={sys.prefix}",
            *[str(LAUNCH), *arguments],
        )

    def wait_until(self, is_true: Callable[[], bool], what: str, *, timeout: float = 90.0) -> None:
        """Poll until `is_true()`; fail with the output of the job when that fails before, or takes too long."""

        def is_true_or_failed() -> bool:
            if is_true():
                return True
            state = self.state()["JobState"]
            assert state not in ("FAILED", "TIMEOUT", "NODE_FAIL"), f"{state} before {what}: {self.output}"
            return False

        try:
            self.cluster.wait_until(is_true_or_failed, what, timeout=timeout)
        except TimeoutError as error:
            raise AssertionError(f"{error}\n-- output of the job\n{self.output}") from None

    @property
    def output(self) -> str:
        return self._output.read_text(encoding="utf-8") if self._output.exists() else ""

    @property
    def checkpoints(self) -> list[int]:
        """Steps of the complete ones."""
        found = [path for path in self.folder.glob("checkpoints/step_*") if len([*path.glob("*.json")]) == 2]
        return sorted(int(path.name.removeprefix("step_")) for path in found)

    @property
    def starts(self) -> list[int]:
        """The step that each run of the job has started from."""
        return [int(step) for step in re.findall(START, self.output)]

    def pids(self) -> list[int]:
        """Its processes, on any node."""
        return self.cluster.task_pids(f"SLURM_JOB_ID={self.number}")

    def state(self) -> dict[str, str]:
        """What `scontrol show job` says of it."""
        return dict(re.findall(r"(\S+?)=(\S*)", self.cluster.run("scontrol", "--oneliner", "show", "job", self.number)))


def train_without_slurm(rank: int, arguments: list[str]) -> None:
    """What the command line asks for, as one of two processes."""
    train(read_command_line(Config, description=None, arguments=arguments), gloo_world())


@needs_slurm
@pytest.mark.soak
@pytest.mark.e2e
@pytest.mark.timeout(300)
def test_a_job_is_preempted_requeued_and_resumed_outlives_a_node_and_is_cancelled(
    cluster: Cluster, tmp_path: Path
) -> None:
    options = ["--recipe", "sgp", "--batch-size", "8", "--milestones", "4"]
    whole = [*options, "--epochs", "6"]
    preempted = Job(cluster, tmp_path / "preempted", *whole)
    endless = Job(cluster, tmp_path / "endless", *options, "--epochs", "100000", "--checkpoint-every-steps", "40")

    # Preempted: all ranks write one checkpoint in the middle of an epoch, and the job asks to be run again.
    preempted.wait_until(lambda: "epoch   1 " in preempted.output, "the first epoch")
    assert preempted.checkpoints == []
    cluster.run("scancel", "--batch", "--signal=USR1", preempted.number)
    preempted.wait_until(lambda: "requeueing" in preempted.output, "the end of the signalled run")
    (stopped_at,) = preempted.checkpoints
    assert f"told to stop: checkpoint of step {stopped_at} written" in preempted.output

    # A node loses its power: its peers fail at once, SLURM notices some seconds later.
    endless.wait_until(lambda: bool(endless.checkpoints), "a checkpoint")
    assert endless.state()["NumNodes"] == "2"
    lost_node = cluster.run("scontrol", "show", "hostnames", endless.state()["NodeList"]).split()[-1]
    cluster.kill_node(lost_node)

    # Meanwhile the same training without an interruption, and without SLURM.
    reference = tmp_path / "reference"
    run_processes(2, train_without_slurm, ["--out-dir", str(reference), *whole], timeout=120)

    # The preempted job goes on where it was, to the same end.
    preempted.wait_until(lambda: preempted.state()["JobState"] == "COMPLETED", "the preempted job to end")
    assert preempted.starts == [0, stopped_at]
    for rank in range(2):
        tables = [pd.read_csv(folder / f"rank_{rank:04d}.csv") for folder in (reference, preempted.folder)]
        steps_per_epoch = tables[0]["step"].iloc[0]
        assert tables[0]["step"].tolist() == [epoch * steps_per_epoch for epoch in range(1, 7)]
        assert steps_per_epoch <= stopped_at < 6 * steps_per_epoch
        first, second = (table.drop(columns=[*MEASURED, *SINCE_START]) for table in tables)
        pd.testing.assert_frame_equal(first, second, check_exact=True)
    models = [load_file(folder / "averaged_model.safetensors") for folder in (reference, preempted.folder)]
    assert models[0].keys() == models[1].keys()
    assert all(torch.equal(tensor, models[1][name]) for name, tensor in models[0].items())

    # The job that lost a node goes on from a checkpoint, on others.
    endless.wait_until(lambda: len(endless.starts) == 2, "the job to go on without its node")
    resumed_from = endless.starts[1]
    assert resumed_from >= 40
    assert resumed_from % 40 == 0
    assert lost_node not in cluster.run("scontrol", "show", "hostnames", endless.state()["NodeList"]).split()
    endless.wait_until(lambda: max(endless.checkpoints, default=0) > resumed_from, "a checkpoint after it")

    cluster.start_node(lost_node)
    cluster.wait_for_nodes("idle", nodes=[lost_node], timeout=60)

    # Cancelled: it ends for good, and leaves nobody behind.
    assert endless.pids()
    cluster.run("scancel", endless.number)
    endless.wait_until(lambda: not endless.pids(), "the end of the cancelled job's processes")
    cluster.wait_for_nodes("idle", timeout=60)
    assert endless.state()["JobState"] == "CANCELLED"
    assert (preempted.state()["Restarts"], endless.state()["Restarts"]) == ("1", "1")


class ElasticArray:
    """An elastic run without an end, of an array of three elements, which takes all cores of three nodes.

    Args:
        cluster: to submit it to.
        folder: of the run, to be made.
    """

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.cluster, self.folder = cluster, folder
        self.number = cluster.run(
            *["sbatch", "--parsable", "--array=0-2", "--cpus-per-task=4", "--time=10", f"--chdir={ROOT}"],
            f"--output={folder.with_suffix('.%a')}",
            f"--export=ALL,OUT_DIR={folder},VENV={sys.prefix},MAX_PAUSE=1,RETRY_SECONDS=1",
            *[str(LAUNCH_ELASTIC), "--recipe", "sgp", "--batch-size", "8", "--epochs", "100000"],
            *["--validate-every", "100000", "--min-deadline", "60"],
        )

    def output(self, element: int) -> str:
        path = self.folder.with_suffix(f".{element}")
        return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""

    def workers(self, element: int) -> list[int]:
        """The numbers of the workers that an element has started, in their order."""
        return [int(number) for number in re.findall(r"worker (\d+), one of \d+, .*from batch", self.output(element))]

    def has_trained(self, number: int) -> bool:
        """Whether a worker has come to the end of an epoch."""
        path = self.folder / f"rank_{number:04d}.csv"
        return path.exists() and len(path.read_text(encoding="utf-8").splitlines()) > 1

    def pid_of_worker(self, element: int) -> int:
        def is_worker(pid: int) -> bool:
            words = Path("/proc", str(pid), "cmdline").read_bytes().split(b"\0")
            return words[1:2] == [b"train/gossip_sgd.py"]

        found = self.cluster.task_pids(f"SLURM_JOB_ID={self.job_of(element)}")
        (pid,) = [pid for pid in found if is_worker(pid)]
        return pid

    def job_of(self, element: int) -> str:
        return self._ask(element, "%A")

    def node_of(self, element: int) -> str:
        """Empty: it waits for one."""
        return self._ask(element, "%N")

    def _ask(self, element: int, what: str) -> str:
        return self.cluster.run("squeue", "--noheader", f"--jobs={self.number}_{element}", f"--format={what}")

    def wait_until(self, is_true: Callable[[], bool], what: str) -> None:
        """Poll until `is_true()`; fail with what the elements have printed."""
        try:
            self.cluster.wait_until(is_true, what, timeout=90.0)
        except TimeoutError as error:
            outputs = "\n".join(f"-- element {element}\n{self.output(element)}" for element in range(3))
            raise AssertionError(f"{error}\n{outputs}") from None


@needs_slurm
@pytest.mark.soak
@pytest.mark.e2e
@pytest.mark.timeout(400)
def test_an_elastic_run_outlives_a_worker_a_node_and_its_store(folder: Path, tmp_path: Path) -> None:
    with Cluster(folder, num_nodes=3) as cluster:
        run = ElasticArray(cluster, tmp_path / "run")
        run.wait_until(lambda: sorted(n for e in range(3) for n in run.workers(e)) == [0, 1, 2], "all to begin")
        run.wait_until(lambda: all(map(run.has_trained, range(3))), "an epoch of each")
        store = (run.folder / "store").read_text(encoding="utf-8")

        # A worker is killed, and another one loses its node, which SLURM takes away some seconds later: the third one
        # trains on, and the first of the two comes back.
        node = run.node_of(2)
        cluster.kill_node(node)
        os.kill(run.pid_of_worker(1), signal.SIGKILL)
        run.wait_until(lambda: len(run.workers(1)) == 2, "the worker that was killed")
        assert "restart.sh: status 137, again in 1 s" in run.output(1)
        assert run.workers(1)[1] >= 3
        run.wait_until(lambda: run.has_trained(run.workers(1)[1]), "an epoch of it")
        run.wait_until(lambda: run.node_of(2) == "", "SLURM to take the node away, and to queue its element again")
        assert len(run.workers(2)) == 1, "there is no other node"

        # The node is given back, and an element that has to make room leaves the run, with the store.
        cluster.start_node(node)
        cluster.run("scancel", "--batch", "--signal=USR1", f"{run.number}_0")
        run.wait_until(lambda: "requeueing" in run.output(0), "the first element to leave")
        assert f"job {run.number}_0: stopped on USR1, requeueing" in run.output(0)
        assert "told to stop, and leaves the run after batch" in run.output(0)

        # Both come back, to a store at another address, and train with the one that has stayed.
        run.wait_until(lambda: len(run.workers(0)) == len(run.workers(2)) == 2, "both to come back")
        last = [run.workers(element)[-1] for element in range(3)]
        assert len({0, 1, 2, *last}) == 6
        run.wait_until(lambda: all(map(run.has_trained, last)), "an epoch of all")
        assert (run.folder / "store").read_text(encoding="utf-8") != store
        assert run.workers(1)[1:] == last[1:2], "it has not been started again"

        cluster.run("scancel", run.number)
        run.wait_until(lambda: not cluster.task_pids(), "the end of all processes")
    assert cluster.daemon_pids() + cluster.task_pids() == []


@needs_slurm
def test_a_start_that_fails_says_why_and_leaves_nothing_behind(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = tmp_path / "slurm.conf"
    template.write_text("StateSaveLocation={folder}/state\n", encoding="utf-8")
    monkeypatch.setattr("tests.end_to_end.slurm.cluster.CONFIGURATION", template)
    cluster = Cluster(folder, num_nodes=1)
    with pytest.raises(TimeoutError, match=r"(?s)waited 1 s for nodes that are idle.*slurmctld.*ClusterName needs"):
        cluster.start(timeout=1)
    assert not folder.exists()
    assert cluster.daemon_pids() == []
    cluster.stop()


@needs_slurm
def test_a_folder_of_something_else_is_not_taken(tmp_path: Path) -> None:
    with pytest.raises(FileExistsError, match="expected a folder that does not exist"):
        Cluster(tmp_path).start()


def test_another_slurm_is_neither_stopped_nor_removed(tmp_path: Path) -> None:
    (tmp_path / "slurm.conf").write_text("ClusterName=production\n", encoding="utf-8")
    program = shutil.copy(shutil.which("sleep") or "", tmp_path / "slurmctld")
    with subprocess.Popen([program, "60"], cwd=tmp_path) as daemon:
        try:
            Cluster(tmp_path).stop()
            assert daemon.poll() is None
            assert (tmp_path / "slurm.conf").exists()
        finally:
            daemon.kill()
