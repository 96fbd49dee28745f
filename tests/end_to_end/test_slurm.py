"""job_scripts/ on a real SLURM of four nodes: preemption, requeue, a node that fails, cancellation, leftovers."""

from __future__ import annotations

import os
import re
import shutil
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
LAUNCH = ROOT / "job_scripts" / "launch.sh"
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
