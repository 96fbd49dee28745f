"""Set-up and job scripts: what they run, against stand-ins for python3, apt-get and SLURM."""

import os
import runpy
import shlex
import signal
import subprocess
from pathlib import Path

import pytest
import tyro

from train.config import Config

ROOT = Path(__file__).resolve().parent.parent
LAUNCH = ROOT / "job_scripts" / "launch.sh"
SCRIPTS = [ROOT / ".ci" / "run", *sorted((ROOT / "job_scripts").glob("*.sh"))]

SLURM = {
    "SLURM_JOB_ID": "4321",
    "SLURM_JOB_NODELIST": "node[07-08]",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_JOB_NAME": "sgp",
}

# Debian's python3: `venv` fails and leaves half an environment until python3-venv brings ensurepip.
FAKE_PYTHON = """#!/bin/sh
case "$*" in
  "-c "*) exit $PYTHON_IS_OLD ;;
  "--version") echo "Python 3.9.2" ;;
  "-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" && test -e ensurepip ;;
  "-m pip --version") test -e ensurepip ;;
  "-m pip install"*) echo "$*" >>log ;;
esac
"""
FAKE_APT_GET = """#!/bin/sh
echo "apt-get $*" >>log
case "$*" in install*python3-venv) touch ensurepip ;; esac
"""


def write_executable(path: Path, text: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text, encoding="utf-8")
    path.chmod(0o755)


def environment(bin_dir: Path, **variables: str) -> dict[str, str]:
    """This process's environment without SLURM's variables, with stand-ins first on the path."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "MAKE", "MFLAGS"))}
    return inherited | {"PATH": f"{bin_dir}:{os.environ['PATH']}"} | variables


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_scripts_parse_and_are_executable(script: Path) -> None:
    subprocess.run(["bash", "-n", str(script)], check=True)
    assert os.access(script, os.X_OK)


def test_every_requirement_is_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, object] = {}
    monkeypatch.setattr("setuptools.setup", options.update)
    runpy.run_path(str(ROOT / "setup.py"))
    install, extras = options["install_requires"], options["extras_require"]
    assert isinstance(install, list)
    assert isinstance(extras, dict)
    required = {
        requirement.split(">=")[0].lower()
        for requirement in [*install, *(r for extra in extras.values() for r in extra)]
    }
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = {line.split("==")[0].lower().replace("_", "-") for line in lines if not line.startswith("#")}
    assert {line for line in lines if not line.startswith("#") and "==" not in line} == set()
    assert required - pinned == set()
    assert {"torch==2.14.1", "torchvision==0.29.1"} <= set(lines)


@pytest.fixture
def make_venv(tmp_path: Path) -> tuple[Path, dict[str, str]]:
    """A folder with the Makefile and what it reads, and the stand-ins for a Debian without python3-venv."""
    bin_dir = tmp_path / "bin"
    for name in ("Makefile", "setup.py", "constraints.txt"):
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    write_executable(bin_dir / "python3", FAKE_PYTHON)
    write_executable(bin_dir / "apt-get", FAKE_APT_GET)
    write_executable(bin_dir / "id", "#!/bin/sh\necho 0\n")
    return tmp_path, environment(bin_dir, PYTHON_IS_OLD="0")


def run_make_venv(folder: Path, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = ["make", "venv", "PYTHON=python3", "VENV=.venv"]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)


def test_make_venv_installs_python3_venv_on_debian(make_venv: tuple[Path, dict[str, str]]) -> None:
    folder, env = make_venv
    result = run_make_venv(folder, env)
    assert result.returncode == 0, result.stderr
    assert (folder / "log").read_text(encoding="utf-8").splitlines() == [
        "apt-get update",
        "apt-get install --yes --no-install-recommends python3-venv",
        "-m pip install --constraint constraints.txt --editable .[train,test,dev]",
    ]
    (folder / "log").unlink()
    assert run_make_venv(folder, env).returncode == 0
    assert not (folder / "log").exists(), "nothing changed, so nothing is installed again"


def test_make_venv_installs_again_after_a_pin_changed(make_venv: tuple[Path, dict[str, str]]) -> None:
    folder, env = make_venv
    (folder / "ensurepip").touch()
    run_make_venv(folder, env)
    stamp = (folder / ".venv" / ".installed").stat().st_mtime
    os.utime(folder / "constraints.txt", (stamp + 1, stamp + 1))
    run_make_venv(folder, env)
    assert (folder / "log").read_text(encoding="utf-8").count("pip install") == 2
    assert "apt-get" not in (folder / "log").read_text(encoding="utf-8")


def test_make_venv_says_what_to_do_when_it_may_not_install(make_venv: tuple[Path, dict[str, str]]) -> None:
    folder, env = make_venv
    write_executable(folder / "bin" / "id", "#!/bin/sh\necho 1000\n")
    result = run_make_venv(folder, env)
    assert result.returncode != 0
    assert "sudo apt-get install python3-venv" in result.stderr
    assert not (folder / "log").exists()


def test_make_venv_refuses_an_old_python(make_venv: tuple[Path, dict[str, str]]) -> None:
    folder, env = make_venv
    result = run_make_venv(folder, env | {"PYTHON_IS_OLD": "1"})
    assert result.returncode != 0
    assert "got Python 3.9.2, expected Python >= 3.10" in result.stderr
    assert "make venv PYTHON=" in result.stderr


def test_make_clean_removes_no_environment_but_its_own(make_venv: tuple[Path, dict[str, str]]) -> None:
    folder, env = make_venv
    for name in (".venv", "elsewhere", "runs"):
        (folder / name).mkdir()
    for arguments in ([], [f"VENV={folder / 'elsewhere'}"]):
        variables = env | {"VENV": str(folder / "elsewhere")}
        subprocess.run(["make", "clean", *arguments], cwd=folder, env=variables, capture_output=True, check=True)
    assert not (folder / ".venv").exists()
    assert (folder / "elsewhere").exists()
    assert (folder / "runs").exists()


@pytest.mark.parametrize(
    ("broken", "accuracy", "last_line"),
    [
        ("", "97.00", "passed: check, test, train"),
        ("check", "98.61", "failed: check"),
        ("test", "98.61", "failed: test"),
        ("train", "98.61", "failed: train"),
        ("", "96.99", "failed: train"),
        ("", "nan", "failed: train"),
        ("venv", "98.61", "no environment"),
    ],
)
def test_ci_fails_when_a_stage_does(tmp_path: Path, broken: str, accuracy: str, last_line: str) -> None:
    repository = tmp_path / "repository"
    repository.mkdir()
    write_executable(repository / ".ci" / "run", SCRIPTS[0].read_text(encoding="utf-8"))
    (tmp_path / "shared" / "data").mkdir(parents=True)
    write_executable(
        tmp_path / "bin" / "make",
        f"""#!/bin/sh
case "$1" in
  venv) echo no environment ;;
  test) echo "data in $GOSSIP_DATA" ;;
  train) echo "averaged model: test accuracy {accuracy} %" ;;
esac
test "$1" != "{broken}"
""",
    )
    env = environment(tmp_path / "bin")
    env.pop("GOSSIP_DATA", None)
    command = [str(repository / ".ci" / "run")]
    result = subprocess.run(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    assert (result.returncode == 0) == last_line.startswith("passed")
    assert result.stdout.splitlines()[-1] == last_line
    assert (f"data in {tmp_path / 'shared' / 'data'}\n" in result.stdout) == (broken != "venv")


@pytest.fixture
def cluster(tmp_path: Path) -> Path:
    """Stand-ins for the commands of SLURM: srun runs FAKE_SRUN, scontrol notes a requeue in tmp_path/log."""
    write_executable(tmp_path / "bin" / "srun", '#!/bin/bash\neval "$FAKE_SRUN"\n')
    write_executable(
        tmp_path / "bin" / "scontrol",
        '#!/bin/sh\ncase "$1" in show) printf "node07\\nnode08\\n" ;; *) echo "$*" >>log ;; esac\n',
    )
    return tmp_path


def launch(cluster: Path, *arguments: str, **variables: str) -> subprocess.Popen[str]:
    """Start launch.sh as the batch script of a job whose folder is `cluster`."""
    env = environment(cluster / "bin", **(SLURM | {"SLURM_SUBMIT_DIR": str(cluster)} | variables))
    return subprocess.Popen(
        [str(LAUNCH), *arguments], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_launch_builds_one_torchrun_per_node(cluster: Path) -> None:
    process = launch(cluster, "--recipe", "sgp", "--tag", "two words", DRY_RUN="1", NPROC_PER_NODE="8", OUT_DIR="out")
    out, err = process.communicate()
    assert process.returncode == 0, err
    assert shlex.split(out) == [
        *["srun", "--nodes=2", "--ntasks-per-node=1", "--wait=600"],
        *[".venv/bin/torchrun", "--nnodes=2", "--nproc-per-node=8"],
        *["--rdzv-backend=c10d", "--rdzv-endpoint=node07:14321", "--rdzv-id=4321-0"],
        "--signals-to-handle=SIGTERM,SIGINT,SIGUSR1",
        *["train/gossip_sgd.py", "--out-dir", "out", "--resume", "auto", "--recipe", "sgp", "--tag", "two words"],
    ]


def test_launch_takes_its_defaults_from_the_allocation(cluster: Path) -> None:
    out, err = launch(cluster, DRY_RUN="1", SLURM_GPUS_ON_NODE="4", SLURM_RESTART_COUNT="2").communicate()
    words = shlex.split(out)
    assert {"--nproc-per-node=4", "--rdzv-id=4321-2", "runs/sgp"} <= set(words), err


def test_launch_hands_interface_and_cores_to_the_step(cluster: Path) -> None:
    show = "echo $GLOO_SOCKET_IFNAME $NCCL_SOCKET_IFNAME $SRUN_CPUS_PER_TASK"
    out, err = launch(cluster, FAKE_SRUN=show, NETWORK_INTERFACE="ib0", SLURM_CPUS_PER_TASK="32").communicate()
    assert out.split() == ["ib0", "ib0", "32"], err


def test_launch_outside_an_allocation_says_so(cluster: Path) -> None:
    process = launch(cluster, SLURM_JOB_ID="")
    _, err = process.communicate()
    assert process.returncode != 0
    assert "submit with sbatch" in err


@pytest.mark.parametrize("status", [0, 3])
def test_launch_returns_the_status_of_training_and_does_not_requeue(cluster: Path, status: int) -> None:
    process = launch(cluster, FAKE_SRUN=f"exit {status}")
    process.communicate()
    assert process.returncode == status
    assert not (cluster / "log").exists()


@pytest.mark.parametrize(
    ("status", "requeues"), [(1, ["requeue 4321"]), (0, [])], ids=["saved and left", "finished in time"]
)
def test_launch_hands_usr1_to_training_and_requeues(cluster: Path, status: int, requeues: list[str]) -> None:
    # The step answers the second signal only: an interrupted `wait` must not be taken for its end.
    listen = 'n=0; trap "n=\\$((n + 1)); echo got USR1" USR1; echo started'
    training = f"{listen}; while ((n < 2)); do sleep 0.01; done; exit {status}"
    process = launch(cluster, FAKE_SRUN=training)
    assert process.stdout is not None
    assert process.stdout.readline() == "started\n"
    for _ in range(2):
        process.send_signal(signal.SIGUSR1)
        assert process.stdout.readline() == "got USR1\n"
    process.communicate()
    assert process.returncode == 0
    log = cluster / "log"
    assert (log.read_text(encoding="utf-8").splitlines() if log.exists() else []) == requeues


def test_launch_requeues_on_a_usr1_that_comes_before_training(cluster: Path) -> None:
    # scontrol, which launch.sh asks for the hosts before it starts the step, signals it.
    write_executable(
        cluster / "bin" / "scontrol",
        '#!/bin/sh\ncase "$1" in show) kill -USR1 $PPID; echo node07 ;; *) echo "$*" >>log ;; esac\n',
    )
    process = launch(cluster, FAKE_SRUN="while :; do sleep 0.01; done")
    out, err = process.communicate(timeout=20)
    assert process.returncode == 0, err
    assert (cluster / "log").read_text(encoding="utf-8") == "requeue 4321\n", out


@pytest.mark.parametrize(
    "recipe", ["ar", "dpsgd", "sgp", "osgp", "matcha", "choco", "powergossip", "adpsgd", "wagma", "dpwa"]
)
def test_submit_scripts_ask_for_what_the_trainer_understands(cluster: Path, recipe: str) -> None:
    write_executable(cluster / "bin" / "sbatch", '#!/bin/sh\nprintf "%s\\n" "$@"\n')
    env = environment(cluster / "bin", DATA_DIR="/data/image net", GPUS_PER_NODE="4", NUM_NODES="16")
    command = [str(ROOT / "job_scripts" / f"submit_{recipe}.sh"), "--seed", "7"]
    words = subprocess.run(
        command, cwd=cluster, env=env, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    script = words.index("job_scripts/launch.sh")
    assert words[:script] == [f"--job-name=imagenet-{recipe}", "--nodes=16", "--gpus-per-node=4"]
    config = tyro.cli(Config, args=words[script + 1 :])
    assert (config.recipe, config.data_dir, config.seed) == (recipe, "/data/image net", 7)
    assert (config.model, config.milestones) == ("resnet50", (30, 60, 80))
    has_nodes = recipe not in ("ar", "adpsgd", "wagma", "dpwa")
    assert config.nprocs_per_node == (4 if has_nodes else 1), "the others would warn that it has no effect"
