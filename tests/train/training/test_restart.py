"""Jobs under torchrun whose workers die, or have nothing to begin with."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

from tests.train.runs import ENVIRONMENT, ROOT
from tests.train.test_gossip_sgd import SCRIPT, TORCHRUN

RESTARTING = [*TORCHRUN[:-1], "--max-restarts", "1", SCRIPT, "--epochs", "1000000", "--validate-every", "1000000"]


@pytest.mark.soak
@pytest.mark.e2e
@pytest.mark.timeout(180)  # two starts, on a machine that may be busy
@pytest.mark.parametrize("recipe", ["sgp", "adpsgd"])
def test_torchrun_starts_a_job_again_when_a_worker_was_killed(tmp_path: Path, recipe: str) -> None:
    options = ["--recipe", recipe, "--resume", "auto", "--checkpoint-every-steps", "40", "--timeout-seconds", "20"]
    command = [*RESTARTING, *options, "--out-dir", str(tmp_path)]
    environment = {**ENVIRONMENT, "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment, cwd=ROOT
    )
    assert process.stdout is not None
    starts = []
    try:
        for line in process.stdout:
            if found := re.search(r"from step (\d+)", line):
                starts.append(int(found[1]))
            if len(starts) == 1 and line.startswith("epoch   6 "):  # past step 80: an epoch has 22 steps
                children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
                os.kill(int(children[-1]), signal.SIGKILL)
            if len(starts) == 2 and line.startswith("epoch"):
                break
    finally:
        process.terminate()
        process.communicate()
    # It trains on from a checkpoint, and the counts and flags of the first attempt are not in its way.
    assert len(starts) == 2
    assert starts[0] == 0
    assert starts[1] >= 80
    assert starts[1] % 40 == 0


@pytest.mark.soak
@pytest.mark.e2e
@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--dataset", "imagefolder", "--data-dir", "nowhere"],
            r"rank 0: got 'nowhere' \(no such folder\), expec",
        ),
        (
            ["--recipe", "dpsgd", "--graph", "hypercube", "--nprocs-per-node", "3"],
            r"got nprocs_per_node=3 in a world of 2",
        ),
    ],
)
def test_an_error_of_the_user_is_one_line_of_rank_0(tmp_path: Path, options: list[str], message: str) -> None:
    command = [*TORCHRUN, *options, "--out-dir", str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, check=False, cwd=ROOT)
    assert done.returncode == 1  # torchrun's own
    assert len(re.findall(f"^error: {message}", done.stderr, flags=re.MULTILINE)) == 1, done.stderr
    assert len(re.findall(r"^error: ", done.stderr, flags=re.MULTILINE)) == 1
    assert not re.search(r'File ".*/train/', done.stderr)
    assert re.search(r"exitcode +: 2", done.stderr)
