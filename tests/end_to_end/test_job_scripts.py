"""Job scripts: what they run, against stand-ins for the commands of SLURM; on a real one, see test_slurm.py."""

import os
import re
import shlex
import signal
import subprocess
from pathlib import Path

import pytest

from tests.harness.pages import blocks
from train.command_line import read_command_line
from train.tasks.images.config import Config
from train.tasks.language_model.config import LanguageModelConfig
from train.tasks.translation.config import TranslationConfig

ROOT = Path(__file__).resolve().parents[2]
JOB_SCRIPTS = ROOT / "job_scripts"
LAUNCH = JOB_SCRIPTS / "launch.sh"
SLURM = {
    "SLURM_JOB_ID": "4321",
    "SLURM_JOB_NODELIST": "node[07-08]",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_JOB_NAME": "sgp",
}
SCONTROL = r"""#!/bin/sh
case "$1 $2" in
  "show hostnames") printf "node07\nnode08\n" ;;
  "--oneliner show") echo "NodeName=$4 Arch=x86_64 $NODE_ADDR NodeHostName=machine7 Port=6818" ;;
  *) echo "$*" >>log; exit "${REQUEUE_STATUS:-0}" ;;
esac
"""


def write_executable(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    path.chmod(0o755)


def environment(bin_dir: Path, **variables: str) -> dict[str, str]:
    """This process's environment without SLURM's variables, with stand-ins first on the path."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "SBATCH"))}
    return inherited | {"PATH": f"{bin_dir}:{os.environ['PATH']}"} | variables


@pytest.mark.parametrize("script", sorted(JOB_SCRIPTS.glob("*.sh")), ids=lambda script: script.name)
def test_scripts_parse_and_are_executable(script: Path) -> None:
    subprocess.run(["bash", "-n", str(script)], check=True)
    assert os.access(script, os.X_OK)


@pytest.fixture
def cluster(tmp_path: Path) -> Path:
    """The top of a repository, and stand-ins: srun runs FAKE_SRUN, scontrol notes a requeue in tmp_path/log."""
    write_executable(tmp_path / "bin" / "srun", '#!/bin/bash\neval "$FAKE_SRUN"\n')
    write_executable(tmp_path / "bin" / "scontrol", SCONTROL)
    write_executable(tmp_path / ".venv" / "bin" / "torchrun", "#!/bin/sh\n")
    for script in ("gossip_sgd.py", "translate.py", "language_model.py"):
        write_executable(tmp_path / "train" / script, "")
    return tmp_path


def launch(cluster: Path, *arguments: str, **variables: str) -> subprocess.Popen[str]:
    """Start launch.sh as the batch script of a job whose folder is `cluster`."""
    env = environment(cluster / "bin", **(SLURM | variables))
    return subprocess.Popen(
        [str(LAUNCH), *arguments], cwd=cluster, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def run_launch(cluster: Path, *arguments: str, **variables: str) -> tuple[int, str, str]:
    """Its status, output and errors."""
    process = launch(cluster, *arguments, **variables)
    out, err = process.communicate(timeout=20)
    return process.returncode, out, err


def test_launch_builds_one_torchrun_per_node(cluster: Path) -> None:
    variables = {"DRY_RUN": "1", "NPROC_PER_NODE": "8", "OUT_DIR": "out", "NODE_ADDR": "NodeAddr=10.0.0.7"}
    status, out, err = run_launch(cluster, "--recipe", "sgp", "--tag", "two words", **variables)
    assert status == 0, err
    words = shlex.split(out)
    on_node = words.index("-c") + 1
    assert [*words[:on_node], *words[on_node + 1 :]] == [
        *["srun", "--nodes=2", "--ntasks-per-node=1", "--wait=600", "bash", "-c"],
        *[".venv/bin/torchrun", "--nnodes=2", "--nproc-per-node=8"],
        *["--rdzv-backend=c10d", "--rdzv-endpoint=10.0.0.7:14321", "--rdzv-id=4321-0"],
        "--signals-to-handle=SIGTERM,SIGINT,SIGUSR1",
        *["train/gossip_sgd.py", "--out-dir", "out", "--resume", "auto", "--recipe", "sgp", "--tag", "two words"],
    ]


@pytest.mark.parametrize(("node", "is_host"), [(0, 1), (1, 0)])
def test_only_the_first_node_hosts_the_rendezvous(cluster: Path, node: int, is_host: int) -> None:
    write_executable(cluster / ".venv" / "bin" / "torchrun", '#!/bin/sh\nprintf "%s\\n" "$@"\n')
    run_step = 'while [[ $1 != bash ]]; do shift; done; "$@"'
    status, out, err = run_launch(cluster, "--tag", "two words", FAKE_SRUN=run_step, SLURM_NODEID=str(node))
    assert status == 0, err
    words = out.splitlines()
    assert words[:2] == [f"--rdzv-conf=is_host={is_host},read_timeout=300", "--nnodes=2"]
    assert words[-2:] == ["--tag", "two words"]


def test_launch_takes_its_defaults_from_the_allocation(cluster: Path) -> None:
    variables = {"DRY_RUN": "1", "SLURM_GPUS_ON_NODE": "4", "SLURM_RESTART_COUNT": "2"}
    _, out, err = run_launch(cluster, **variables)
    expected = {"--nproc-per-node=4", "--rdzv-id=4321-2", "runs/sgp", "--rdzv-endpoint=node07:14321"}
    assert expected <= set(shlex.split(out)), err


def test_launch_runs_another_script_from_another_environment(cluster: Path) -> None:
    (cluster / ".venv").rename(cluster / "elsewhere")
    _, out, err = run_launch(cluster, DRY_RUN="1", SCRIPT="train/translate.py", VENV="elsewhere")
    assert {"elsewhere/bin/torchrun", "train/translate.py"} <= set(shlex.split(out)), err


def test_launch_runs_in_a_container(cluster: Path) -> None:
    (cluster / ".venv" / "bin" / "torchrun").unlink()
    variables = {"CONTAINER": "nvcr.io#nvidia/pytorch:25.06-py3", "CONTAINER_MOUNTS": "/imagenet:/imagenet:ro"}
    status, out, err = run_launch(cluster, DRY_RUN="1", **variables)
    assert status == 0, err
    words = shlex.split(out)
    assert words[:7] == [
        *["srun", "--nodes=2", "--ntasks-per-node=1", "--wait=600"],
        "--container-image=nvcr.io#nvidia/pytorch:25.06-py3",
        f"--container-workdir={cluster}",
        f"--container-mounts={cluster}:{cluster},/imagenet:/imagenet:ro",
    ]
    assert words[words.index("-c") + 2] == "torchrun", "of the image"


def test_launch_hands_interface_and_cores_to_the_step(cluster: Path) -> None:
    show = "echo $GLOO_SOCKET_IFNAME $NCCL_SOCKET_IFNAME $SRUN_CPUS_PER_TASK"
    _, out, err = run_launch(cluster, FAKE_SRUN=show, NETWORK_INTERFACE="ib0", SLURM_CPUS_PER_TASK="32")
    assert out.split() == ["ib0", "ib0", "32"], err


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"SLURM_JOB_ID": ""}, "SLURM_JOB_ID: is not set: submit with sbatch"),
        ({"SCRIPT": "train/nothing.py"}, "got no train/nothing.py in .*submit from the top of the repository"),
        ({"VENV": "nowhere"}, "got no nowhere/bin/torchrun in .*make it with 'make venv', or name"),
    ],
)
def test_launch_names_missing_variables(cluster: Path, variables: dict[str, str], message: str) -> None:
    status, out, err = run_launch(cluster, FAKE_SRUN="echo started", **variables)
    assert status != 0
    assert re.search(message, err)
    assert out == ""


@pytest.mark.parametrize("status", [0, 3])
def test_launch_returns_the_status_of_training_and_does_not_requeue(cluster: Path, status: int) -> None:
    assert run_launch(cluster, FAKE_SRUN=f"exit {status}")[0] == status
    assert not (cluster / "log").exists()


# To a bash that is about to call `wait`, a signal comes too early and too late: its trap runs when the child has ended.
# In life the step ends by itself then, at the time limit; here it would not.
WAITS = "waits() { until read -r _ _ state _ </proc/$PPID/stat && [[ $state == S ]]; do sleep 0.01; done; }"
# A step that a signal ends, which it sends itself.
SIGNALLED = f"{WAITS}; trap 'exit 1' USR1; waits; kill -USR1 $PPID; while :; do sleep 0.01; done"


@pytest.mark.parametrize(
    ("status", "requeues"), [(1, ["requeue 4321"]), (0, [])], ids=["saved and left", "finished in time"]
)
def test_launch_hands_usr1_to_training_and_requeues(cluster: Path, status: int, requeues: list[str]) -> None:
    # The step answers the second signal only: an interrupted `wait` must not be taken for its end.
    listen = f'n=0; {WAITS}; trap "n=\\$((n + 1)); waits; echo got USR1" USR1; waits; echo started'
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
    write_executable(cluster / "bin" / "scontrol", SCONTROL.replace("printf", "kill -USR1 $PPID; printf"))
    status, out, err = run_launch(cluster, FAKE_SRUN="while :; do sleep 0.01; done")
    assert status == 0, err
    assert (cluster / "log").read_text(encoding="utf-8") == "requeue 4321\n", out


def test_launch_says_how_to_go_on_when_slurm_does_not_requeue(cluster: Path) -> None:
    status, _, err = run_launch(cluster, FAKE_SRUN=SIGNALLED, REQUEUE_STATUS="1", OUT_DIR="out")
    assert status == 1
    assert "SLURM did not requeue it; submit it again with OUT_DIR=out, it resumes from there" in err


@pytest.mark.parametrize(("num_restarts", "is_requeued"), [(2, True), (3, False)])
def test_launch_does_not_requeue_for_ever(cluster: Path, num_restarts: int, is_requeued: bool) -> None:
    variables = {"SLURM_RESTART_COUNT": str(num_restarts), "MAX_RESTARTS": "3"}
    status, _, err = run_launch(cluster, FAKE_SRUN=SIGNALLED, **variables)
    assert (cluster / "log").exists() == is_requeued
    assert (status == 0) == is_requeued
    assert ("after 3 restarts, not requeued: see MAX_RESTARTS" in err) != is_requeued


@pytest.mark.parametrize(
    ("training", "status", "requeues"),
    [("echo $*; exit 0", 0, []), ("echo $*; exit 3", 3, []), (f"echo $*; {SIGNALLED}", 0, ["requeue 4321"])],
    ids=["ends", "fails", "is told to stop"],
)
def test_the_script_of_the_guide_runs_torchrun_and_requeues(
    cluster: Path, training: str, status: int, requeues: list[str]
) -> None:
    out, err = run_two_nodes(cluster, training, expected_status=status)
    words = shlex.split(out)
    assert words[:4] == ["--wait=600", "bash", "-c", "exec"], err
    assert {"--rdzv-endpoint=node07:29500", "--rdzv-id=4321-0", "train.py"} <= set(words)
    log = cluster / "log"
    assert (log.read_text(encoding="utf-8").splitlines() if log.exists() else []) == requeues


def run_two_nodes(cluster: Path, step: str, *, expected_status: int, **variables: str) -> tuple[str, str]:
    """Run the script of the guide, whose srun runs `step`; return its output and its errors."""
    (script,) = (text for text in blocks(ROOT / "docs/guides/launchers.md", "bash") if text.startswith("#!"))
    write_executable(cluster / "two_nodes.sh", script)
    done = subprocess.run(
        ["./two_nodes.sh"],
        cwd=cluster,
        env=environment(cluster / "bin", **(SLURM | {"SLURM_CPUS_PER_TASK": "64", "FAKE_SRUN": step} | variables)),
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )
    assert done.returncode == expected_status, done.stderr
    return done.stdout, done.stderr


@pytest.mark.parametrize("node", ["0", "1"])
def test_the_commands_of_the_guide_meet_as_launch_does(cluster: Path, node: str) -> None:
    """On each node the same options of torchrun: who serves the rendezvous, signals, and a new id after a requeue."""
    for torchrun in (cluster / ".venv" / "bin" / "torchrun", cluster / "bin" / "torchrun"):
        write_executable(torchrun, '#!/bin/sh\nprintf "%s\\n" "$@"\n')
    on_node = 'while [[ $1 != bash ]]; do shift; done; "$@"'
    own = {"SLURM_NODEID": node, "SLURM_RESTART_COUNT": "2"}
    status, out, err = run_launch(cluster, FAKE_SRUN=on_node, NPROC_PER_NODE="8", MASTER_PORT="29500", **own)
    assert status == 0, err
    expected = out.splitlines()
    expected = expected[: expected.index("train/gossip_sgd.py")]
    assert f"--rdzv-conf=is_host={int(node == '0')},read_timeout=300" in expected
    out, _ = run_two_nodes(cluster, on_node, expected_status=0, **own)
    assert out.splitlines() == [*expected, "train.py"]

    (by_hand,) = (text for text in blocks(ROOT / "docs/guides/launchers.md", "bash") if text.startswith("srun "))
    done = subprocess.run(
        ["bash", "-c", by_hand],
        cwd=cluster,
        env=environment(cluster / "bin", **SLURM, SLURM_NNODES="2", FAKE_SRUN=on_node, **own),
        capture_output=True,
        text=True,
        timeout=20,
        check=True,
    )
    others = {"--nproc-per-node=8", "--rdzv-id=4321-2"}  # by hand: one process, and no requeue
    assert {*expected} - others <= {*done.stdout.splitlines()}


def submit(cluster: Path, script: str, *arguments: str, **variables: str) -> tuple[list[str], list[str]]:
    """What a submit script asks sbatch for: its options, and the arguments of launch.sh."""
    write_executable(cluster / "bin" / "sbatch", '#!/bin/sh\nprintf "%s\\n" "$SCRIPT" "$@"\n')
    done = subprocess.run(
        [str(JOB_SCRIPTS / script), *arguments],
        cwd=cluster,
        env=environment(cluster / "bin", **variables),
        capture_output=True,
        text=True,
        check=True,
    )
    words = done.stdout.splitlines()
    index = words.index("job_scripts/launch.sh")
    return words[:index], words[index + 1 :]


@pytest.mark.parametrize(
    "recipe", ["ar", "dpsgd", "sgp", "osgp", "matcha", "choco", "powergossip", "adpsgd", "wagma", "dpwa"]
)
def test_submit_scripts_pass_options_of_the_trainer(cluster: Path, recipe: str) -> None:
    variables = {"DATA_DIR": "/data/image net", "GPUS_PER_NODE": "4", "NUM_NODES": "16"}
    options, arguments = submit(cluster, f"submit_{recipe}.sh", "--seed", "7", **variables)
    assert options == ["train/gossip_sgd.py", f"--job-name=imagenet-{recipe}", "--nodes=16", "--gpus-per-node=4"]
    config = read_command_line(Config, description=None, arguments=arguments)
    assert (config.recipe, config.data_dir, config.seed) == (recipe, "/data/image net", 7)
    assert (config.model, config.images_per_node, config.milestones) == ("resnet50", 256, (30, 60, 80))
    has_nodes = recipe not in ("ar", "adpsgd", "wagma", "dpwa")
    assert config.nprocs_per_node == (4 if has_nodes else 1), "the others would warn that it has no effect"


@pytest.mark.parametrize(("model", "num_batches"), [("base", 1), ("big", 16)])
def test_submit_transformer_passes_options_of_the_trainer(cluster: Path, model: str, num_batches: int) -> None:
    variables = {"DATA_DIR": "/data/wmt 16", "MODEL": model}
    options, arguments = submit(cluster, "submit_transformer.sh", "sgp", "--seed", "7", **variables)
    name = f"--job-name=transformer-{model}-sgp"
    assert options == ["train/translate.py", name, "--nodes=8", "--gpus-per-node=1"]
    config = read_command_line(TranslationConfig, description=None, arguments=arguments)
    assert (config.recipe, config.data_dir, config.seed, config.model) == ("sgp", "/data/wmt 16", 7, model)
    assert (config.max_tokens, config.accumulation_steps, config.warmup_steps) == (3500, num_batches, 4000)
    assert (config.source, config.target, config.nprocs_per_node) == ("en", "de", 1)


@pytest.mark.parametrize("model", ["gpt2", "gpt2-medium", "gpt2-large"])
def test_submit_language_model_passes_options_of_the_trainer(cluster: Path, model: str) -> None:
    variables = {"DATA_DIR": "/data/some text", "MODEL": model}
    options, arguments = submit(cluster, "submit_language_model.sh", "sgp", "--seed", "7", **variables)
    assert options == ["train/language_model.py", f"--job-name={model}-sgp", "--nodes=8", "--gpus-per-node=1"]
    config = read_command_line(LanguageModelConfig, description=None, arguments=arguments)
    assert (config.recipe, config.data_dir, config.seed, config.model) == ("sgp", "/data/some text", 7, model)


@pytest.mark.parametrize(
    ("script", "arguments", "variables", "message"),
    [
        ("submit_sgp.sh", [], {}, "DATA_DIR: is not set: name the folder that holds train/ and val/"),
        ("submit_imagenet.sh", [], {"DATA_DIR": "/data"}, "is missing: name a recipe"),
        ("submit_language_model.sh", ["sgp"], {}, "DATA_DIR: is not set: name the folder that holds the text files"),
        (
            "submit_language_model.sh",
            ["sgp"],
            {"DATA_DIR": "/data", "MODEL": "gpt3"},
            "got MODEL=gpt3, expected gpt2, gpt2-medium or gpt2-large",
        ),
        ("submit_transformer.sh", ["sgp"], {}, "DATA_DIR: is not set: name the folder that holds the parallel text"),
        (
            "submit_transformer.sh",
            ["sgp"],
            {"DATA_DIR": "/data", "MODEL": "huge"},
            "got MODEL=huge, expected base or big",
        ),
    ],
)
def test_submit_scripts_name_missing_options(
    cluster: Path, script: str, arguments: list[str], variables: dict[str, str], message: str
) -> None:
    env = environment(cluster / "bin", **variables)
    if "DATA_DIR" not in variables:
        env.pop("DATA_DIR", None)
    command = [str(JOB_SCRIPTS / script), *arguments]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert message in done.stderr


def test_a_dry_run_prints_the_command_and_submits_nothing(cluster: Path) -> None:
    write_executable(cluster / "bin" / "sbatch", "#!/bin/sh\nexit 9\n")
    env = environment(cluster / "bin", DATA_DIR="/data/image net", DRY_RUN="1")
    command = [str(JOB_SCRIPTS / "submit_sgp.sh"), "--seed", "7"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    words = shlex.split(done.stdout)
    assert words[:4] == ["env", "SCRIPT=train/gossip_sgd.py", "sbatch", "--job-name=imagenet-sgp"]
    assert words[-4:] == ["--data-dir", "/data/image net", "--seed", "7"]
