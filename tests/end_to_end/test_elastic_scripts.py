"""launch_elastic.sh and restart.sh, against stand-ins for the commands of SLURM; on a real one, see test_slurm.py."""

from __future__ import annotations

import re
import shlex
import signal
import subprocess
from pathlib import Path

import pytest

from tests.end_to_end.test_job_scripts import JOB_SCRIPTS, SCONTROL, SLURM, WAITS, environment, write_executable
from train.command_line import read_command_line
from train.tasks.images.config import Config

RESTART, LAUNCH = JOB_SCRIPTS / "restart.sh", JOB_SCRIPTS / "launch_elastic.sh"
ELEMENT = {"SLURM_JOB_NUM_NODES": "1", "SLURM_ARRAY_JOB_ID": "4000", "SLURM_ARRAY_TASK_COUNT": "3"} | {
    "SLURM_ARRAY_TASK_MIN": "0",
    "SLURMD_NODENAME": "node07",
}
COUNT = "n=$(cat runs 2>/dev/null || echo 0); echo $((n + 1)) >runs"
"""A line of bash: n is the number of runs before this one."""


@pytest.fixture
def cluster(tmp_path: Path) -> Path:
    """The top of a repository, and stand-ins: srun runs FAKE_SRUN, python FAKE_PYTHON; a requeue is noted in log."""
    write_executable(tmp_path / "bin" / "srun", '#!/bin/bash\neval "$FAKE_SRUN"\n')
    write_executable(tmp_path / "bin" / "squeue", '#!/bin/bash\neval "$FAKE_SQUEUE"\n')
    write_executable(tmp_path / "bin" / "scontrol", SCONTROL)
    write_executable(tmp_path / ".venv" / "bin" / "python", '#!/bin/bash\neval "$FAKE_PYTHON"\n')
    write_executable(tmp_path / "train" / "gossip_sgd.py", "")
    write_executable(tmp_path / "job_scripts" / "restart.sh", RESTART.read_text(encoding="utf-8"))
    return tmp_path


def start(cluster: Path, *command: str, **variables: str) -> subprocess.Popen[str]:
    env = environment(cluster / "bin", **({"MAX_PAUSE": "0", "RETRY_SECONDS": "0"} | variables))
    return subprocess.Popen(command, cwd=cluster, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Its status, output and errors."""
    out, err = process.communicate(timeout=30)
    return process.returncode, out, err


def restart(cluster: Path, command: str, **variables: str) -> tuple[int, str, str]:
    """restart.sh with a line of bash."""
    return finish(start(cluster, str(RESTART), "bash", "-c", command, **variables))


def launch(cluster: Path, *arguments: str, element: str = "0", **variables: str) -> subprocess.Popen[str]:
    """Start launch_elastic.sh as an element of an array of three."""
    own = SLURM | ELEMENT | {"SLURM_ARRAY_TASK_ID": element}
    return start(cluster, str(LAUNCH), *arguments, **(own | {"FAKE_PYTHON": "exec sleep 60"} | variables))


@pytest.mark.parametrize("status", [0, 2])
def test_a_command_that_succeeds_or_is_called_wrongly_is_not_run_again(cluster: Path, status: int) -> None:
    assert restart(cluster, f"echo ran; exit {status}") == (status, "ran\n", "")


def test_a_command_that_fails_is_run_again_until_it_succeeds(cluster: Path) -> None:
    status, out, err = restart(cluster, f"{COUNT}; echo run $n; exit $((n < 2 ? 9 : 0))")
    assert (status, out) == (0, "run 0\nrun 1\nrun 2\n")
    assert err.count("restart.sh: status 9, again in 0 s: bash -c") == 2


def test_a_command_that_fails_in_a_row_is_given_up(cluster: Path) -> None:
    status, out, err = restart(cluster, "echo ran; exit 9", MAX_FAILURES="3")
    assert (status, out) == (9, "ran\n" * 3)
    assert "restart.sh: status 9, 3 failures in a row: given up: bash -c" in err


def test_pauses_double_up_to_the_longest(cluster: Path) -> None:
    write_executable(cluster / "bin" / "sleep", '#!/bin/sh\necho "$1" >>slept\n')
    assert restart(cluster, "exit 9", MAX_FAILURES="7", MAX_PAUSE="10")[0] == 9
    assert (cluster / "slept").read_text(encoding="utf-8").split() == ["1", "2", "4", "8", "10", "10"]


def test_a_command_that_ran_for_long_begins_a_new_row(cluster: Path) -> None:
    variables = {"MAX_FAILURES": "2", "STEADY_SECONDS": "0"}
    assert restart(cluster, f"{COUNT}; exit $((n < 4 ? 9 : 0))", **variables)[0] == 0


def test_a_command_that_cannot_begin_yet_is_run_again_and_not_counted(cluster: Path) -> None:
    status, _, err = restart(cluster, f"{COUNT}; exit $((n < 4 ? 75 : 0))", MAX_FAILURES="2")
    assert status == 0
    assert err.count("status 75, again in 0 s") == 4


@pytest.mark.parametrize("sent", [signal.SIGUSR1, signal.SIGTERM])
def test_a_signal_is_handed_on_and_ends_it(cluster: Path, sent: signal.Signals) -> None:
    name = sent.name.removeprefix("SIG")
    command = f"{WAITS}; trap 'echo got {name}; exit 75' {name}; waits; echo up; while :; do sleep 0.01; done"
    process = start(cluster, str(RESTART), "bash", "-c", command)
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    process.send_signal(sent)
    assert finish(process) == (75, f"got {name}\n", "")


def test_a_signal_ends_a_pause(cluster: Path) -> None:
    # The pause, which is the command sleep, ends only by the signal.
    pause = f"#!/bin/bash\n{WAITS}; waits; echo pausing; exec /bin/sleep 60\n"
    write_executable(cluster / "bin" / "sleep", pause.replace("do sleep", "do /bin/sleep"))
    process = start(cluster, str(RESTART), "bash", "-c", "exit 9")
    assert process.stdout is not None
    assert process.stdout.readline() == "pausing\n"
    process.terminate()
    assert finish(process)[0] == 9


def test_a_process_that_does_not_end_after_a_signal_is_killed(cluster: Path) -> None:
    command = f"{WAITS}; trap '' TERM; waits; echo up; while :; do sleep 0.01; done"
    process = start(cluster, str(RESTART), "bash", "-c", command, GRACE_SECONDS="0")
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    process.terminate()
    assert finish(process)[0] == 128 + signal.SIGKILL


def test_restart_without_a_command_is_an_error(cluster: Path) -> None:
    status, _, err = finish(start(cluster, str(RESTART)))
    assert (status, "got no command, expected one to run" in err) == (2, True)


def test_the_first_element_serves_and_all_start_workers(cluster: Path) -> None:
    variables = {"DRY_RUN": "1", "NPROC_PER_NODE": "4", "SLURM_CPUS_PER_TASK": "16", "OUT_DIR": "out"}
    variables["NODE_ADDR"] = "NodeAddr=10.0.0.7"
    status, out, err = finish(launch(cluster, "--recipe", "sgp", "--tag", "two words", **variables))
    assert status == 0, err
    server, workers = (shlex.split(line) for line in out.splitlines())
    assert server == [
        *["job_scripts/restart.sh", ".venv/bin/python", "-m", "gossip_modules.membership.serve"],
        *["--port", "0", "--host", "10.0.0.7", "--address-file", "out/store", "&"],
    ]
    assert workers == [
        *["srun", "--nodes=1", "--ntasks=4", "--ntasks-per-node=4", "--cpus-per-task=4"],
        *["--kill-on-bad-exit=0", "--wait=0"],
        *["job_scripts/restart.sh", ".venv/bin/python", "train/gossip_sgd.py", "--elastic"],
        *["--store", "file:out/store", "--min-workers", "12", "--out-dir", "out", "--resume", "auto"],
        *["--recipe", "sgp", "--tag", "two words"],
    ]
    config = read_command_line(Config, description=None, arguments=workers[10:-2])
    assert (config.elastic, config.min_workers, config.store, config.resume) == (True, 12, "file:out/store", "auto")


@pytest.mark.parametrize(("element", "variables"), [("1", {}), ("0", {"STORE": "file:other/store"})])
def test_others_serve_nothing(cluster: Path, element: str, variables: dict[str, str]) -> None:
    _, out, err = finish(launch(cluster, element=element, DRY_RUN="1", **variables))
    assert "membership.serve" not in out, err
    assert shlex.split(out)[shlex.split(out).index("--store") + 1] == variables.get("STORE", "file:runs/sgp/store")


def test_elements_that_share_a_folder_meet_in_it(cluster: Path) -> None:
    variables = {"STORE": "file:///shared/run1", "OUT_DIR": "out", "DRY_RUN": "1"}
    _, out, err = finish(launch(cluster, "--algorithm", "DiLoCo(sync_every=100)", **variables))
    assert "membership.serve" not in out, err
    words = shlex.split(out)
    config = read_command_line(Config, description=None, arguments=words[words.index("train/gossip_sgd.py") + 1 :])
    assert (config.is_by_mail, config.store, config.min_workers) == (True, "file:///shared/run1", 3)


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"SLURM_JOB_ID": ""}, "SLURM_JOB_ID: is not set: submit with sbatch"),
        ({"SCRIPT": "train/nothing.py"}, "got no train/nothing.py in .*submit from the top of the repository"),
        ({"VENV": "nowhere"}, "got no nowhere/bin/python in .*make it with 'make venv', or name"),
        ({"SLURM_JOB_NUM_NODES": "4"}, "got 4 nodes, expected 1 .*submit with --nodes=1 --array=0-3"),
    ],
)
def test_launch_names_missing_variables(cluster: Path, variables: dict[str, str], message: str) -> None:
    status, out, err = finish(launch(cluster, FAKE_SRUN="echo started", **variables))
    assert status != 0
    assert re.search(message, err)
    assert out == ""


def test_a_store_that_dies_is_started_again_and_ends_with_the_workers(cluster: Path) -> None:
    """The step of the workers ends when the store has been killed, and started again."""
    until = "until grep -q {} runs 2>/dev/null; do sleep 0.01; done"
    kill = 'kill -9 "$(cat pid)"'
    training = f"{until.format(1)}; until [[ -s pid ]]; do sleep 0.01; done; {kill}; {until.format(2)}"
    serving = f"{COUNT}; echo $$ >pid; exec sleep 60"
    status, _, err = finish(launch(cluster, FAKE_SRUN=training, FAKE_PYTHON=serving))
    assert status == 0, err
    assert "status 137, again in 0 s: .venv/bin/python -m gossip_modules.membership.serve" in err


def test_an_element_that_is_told_to_stop_is_requeued_alone(cluster: Path) -> None:
    training = f"{WAITS}; trap 'exit 75' USR1; waits; echo up; while :; do sleep 0.01; done"
    process = launch(cluster, element="1", FAKE_SRUN=training)
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    process.send_signal(signal.SIGUSR1)
    status, out, err = finish(process)
    assert (status, out) == (0, "job 4000_1: stopped on USR1, requeueing\n"), err
    assert (cluster / "log").read_text(encoding="utf-8") == "requeue 4000_1\n"


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"MAX_RESTARTS": "3", "SLURM_RESTART_COUNT": "3"}, "after 3 restarts, not requeued: see MAX_RESTARTS"),
        ({"REQUEUE_STATUS": "1"}, "SLURM did not requeue it; submit it again with OUT_DIR=runs/sgp"),
    ],
)
def test_an_element_that_is_not_requeued_says_why(cluster: Path, variables: dict[str, str], message: str) -> None:
    training = f"{WAITS}; trap 'exit 75' USR1; waits; kill -USR1 $PPID; while :; do sleep 0.01; done"
    status, _, err = finish(launch(cluster, element="1", FAKE_SRUN=training, **variables))
    assert status == 75
    assert message in err


@pytest.mark.parametrize("status", [0, 3])
def test_launch_returns_the_status_of_the_workers_and_does_not_requeue(cluster: Path, status: int) -> None:
    assert finish(launch(cluster, element="1", FAKE_SRUN=f"exit {status}"))[0] == status
    assert not (cluster / "log").exists()


def test_the_store_outlives_the_workers_of_its_node_that_have_given_up(cluster: Path) -> None:
    write_executable(cluster / "bin" / "sleep", "#!/bin/sh\nexec /bin/sleep 0\n")
    others = f"{COUNT}; echo 4000_0; ((n >= 3)) || echo 4000_1"
    serving = "while :; do read -t 0.05 <> <(:) || :; done"
    status, _, err = finish(launch(cluster, FAKE_SRUN="exit 3", FAKE_SQUEUE=others, FAKE_PYTHON=serving))
    assert status == 3
    assert "its workers have given up (status 3); it serves the membership until the others end" in err
    assert (cluster / "runs").read_text(encoding="utf-8") == "4\n"
