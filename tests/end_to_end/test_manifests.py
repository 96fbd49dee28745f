"""Manifests of other launchers than SLURM: their fields fit together, and their commands are commands of ours."""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import yaml
from torch.distributed.run import config_from_args, parse_args

from tests.harness.pages import ROOT
from train.command_line import read_command_line
from train.tasks.images.config import Config

JOB_SCRIPTS = ROOT / "job_scripts"
# What others than our code read: NCCL, Python, PyTorch and its OpenMP.
OTHERS = {"NCCL_SOCKET_IFNAME", "OMP_NUM_THREADS", "PYTHONUNBUFFERED", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"}
CODE = "".join(
    path.read_text("utf-8") for folder in ("gossip_modules", "train") for path in (ROOT / folder).rglob("*.py")
)


def documents(name: str) -> dict[tuple[str, str], Any]:
    """The objects of a manifest by kind and name."""
    found = yaml.safe_load_all((JOB_SCRIPTS / name).read_text(encoding="utf-8"))
    return {(document["kind"], document["metadata"]["name"]): document for document in found}


def check_environment(names: set[str], command: str) -> None:
    """Each variable is read by the command, by our code, or by a library that OTHERS names."""
    assert {name for name in names - OTHERS if f"${name}" not in command and f'"{name}"' not in CODE} == set()


def expanded(command: list[str], folder: Path, **variables: str) -> list[str]:
    """The arguments that a shell command gives to torchrun."""
    (folder / "torchrun").write_text('#!/bin/sh\nprintf "%s\\0" "$@"\n', encoding="utf-8")
    (folder / "torchrun").chmod(0o755)
    env = {"PATH": f"{folder}:{os.environ['PATH']}", **variables}
    output = subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout
    return output.split("\0")[:-1]


def check_torchrun(arguments: list[str]) -> tuple[Any, Config]:
    """The launch that torchrun reads out of its arguments, and the configuration of the training script."""
    args = parse_args(arguments)
    launch, _, _ = config_from_args(args)
    assert args.module
    assert (ROOT / args.training_script.replace(".", "/")).with_suffix(".py").is_file()
    return launch, read_command_line(Config, description=None, arguments=args.training_script_args)


def environment_of(container: dict[str, Any]) -> dict[str, str]:
    return {entry["name"]: entry["value"] for entry in container["env"]}


def check_volumes(pod: dict[str, Any], config: Config) -> None:
    """Mounts have volumes, and the run is written to one that outlives the pod."""
    (container,) = pod["containers"]
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in container["volumeMounts"]}
    assert "persistentVolumeClaim" in mounts["/" + config.out_dir.strip("/").split("/")[0]]
    assert mounts["/dev/shm"]["emptyDir"]["medium"] == "Memory"


# Kubernetes.


@pytest.mark.parametrize("index", [0, 3])
def test_pods_of_an_indexed_job_meet_in_the_first_one(index: int, tmp_path: Path) -> None:
    found = documents("kubernetes.yaml")
    job, service = found["Job", "gossip"]["spec"], found["Service", "gossip"]["spec"]
    pod = job["template"]["spec"]
    (container,) = pod["containers"]
    environment = environment_of(container)
    check_environment(set(environment), container["args"][0])
    command = [*container["command"], *container["args"]]
    launch, config = check_torchrun(expanded(command, tmp_path, JOB_COMPLETION_INDEX=str(index), **environment))
    assert launch.rdzv_backend == "c10d"
    assert launch.rdzv_configs["is_host"] == str(int(index == 0))
    assert launch.min_nodes == launch.max_nodes == job["completions"] == job["parallelism"]
    assert launch.nproc_per_node == container["resources"]["limits"]["nvidia.com/gpu"]
    host, port = launch.rdzv_endpoint.split(":")
    assert host == f"gossip-0.{pod['subdomain']}"
    assert int(port) == service["ports"][0]["port"] == container["ports"][0]["containerPort"]
    assert service["clusterIP"] == "None"
    assert service["selector"] == {"job-name": "gossip"}  # the label that the controller of jobs sets
    assert job["completionMode"] == "Indexed"
    assert pod["restartPolicy"] == "Never", "podFailurePolicy wants it"
    assert pod["terminationGracePeriodSeconds"] > int(environment["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"])
    assert config.resume == "auto"
    assert config.checkpoint_every == 1
    check_volumes(pod, config)


def test_elastic_workers_find_the_store_behind_its_service() -> None:
    found = documents("kubernetes_elastic.yaml")
    deployment, service = found["Deployment", "gossip-store"]["spec"], found["Service", "gossip-store"]["spec"]
    job, policy = found["Job", "gossip-elastic"]["spec"], found["NetworkPolicy", "gossip-store"]["spec"]
    (store,) = deployment["template"]["spec"]["containers"]
    (worker,) = job["template"]["spec"]["containers"]
    check_environment(set(environment_of(worker)), "")
    config = read_command_line(Config, description=None, arguments=worker["args"])
    port = service["ports"][0]["port"]
    assert config.elastic
    assert config.store == f"gossip-store:{port}"
    assert store["args"] == ["--host", "0.0.0.0", "--port", str(port)]
    assert store["ports"][0]["containerPort"] == policy["ingress"][0]["ports"][0]["port"] == port
    labels = deployment["template"]["metadata"]["labels"]
    assert (
        labels == service["selector"] == deployment["selector"]["matchLabels"] == policy["podSelector"]["matchLabels"]
    )
    admitted = policy["ingress"][0]["from"][0]["podSelector"]["matchLabels"]
    assert admitted == job["template"]["metadata"]["labels"]
    assert deployment["replicas"] == 1
    assert deployment["strategy"]["type"] == "Recreate"
    assert config.min_workers <= job["parallelism"]
    check_volumes(job["template"]["spec"], config)


# SkyPilot.


@pytest.mark.parametrize("rank", [0, 1])
def test_nodes_of_skypilot_meet_on_the_first_one(rank: int, tmp_path: Path) -> None:
    task = yaml.safe_load((JOB_SCRIPTS / "skypilot.yaml").read_text(encoding="utf-8"))
    check_environment(set(task["envs"]), task["run"])
    variables = {
        "SKYPILOT_NODE_IPS": "10.0.0.7\n10.0.0.8",
        "SKYPILOT_NUM_NODES": str(task["num_nodes"]),
        "SKYPILOT_NODE_RANK": str(rank),
        "SKYPILOT_NUM_GPUS_PER_NODE": task["resources"]["accelerators"].partition(":")[2],
        "SKYPILOT_TASK_ID": "sky-2026-gossip-1",
    }
    assert set(re.findall(r"SKYPILOT_\w+", task["run"])) == set(variables)
    launch, config = check_torchrun(expanded(["bash", "-c", task["run"]], tmp_path, **variables, **task["envs"]))
    assert launch.rdzv_endpoint == "10.0.0.7:29400"
    assert launch.rdzv_configs["is_host"] == str(int(rank == 0))
    assert (launch.min_nodes, launch.nproc_per_node) == (task["num_nodes"], 8)
    assert launch.run_id == "sky-2026-gossip-1"
    assert config.out_dir.startswith("/runs/")
    assert "/runs" in task["file_mounts"]
    assert "'.[test]'" in task["setup"]


def test_workers_of_skypilot_meet_in_a_bucket() -> None:
    task = yaml.safe_load((JOB_SCRIPTS / "skypilot_mailbox.yaml").read_text(encoding="utf-8"))
    names = {*task["envs"], *task["secrets"]}
    read_by_the_store = {"AWS_REGION", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"}  # by obstore
    check_environment(names - read_by_the_store, task["run"])
    command = f"printf '%s\\0' {task['run'].removeprefix('exec ')}"
    output = subprocess.run(["bash", "-c", command], env=task["envs"], capture_output=True, text=True, check=True)
    restart, python, flag, module, *arguments = output.stdout.split("\0")[:-1]
    assert (ROOT / restart).is_file()
    assert (python, flag, module) == ("python", "-m", "train.gossip_sgd")
    config = read_command_line(Config, description=None, arguments=arguments)
    assert (config.is_by_mail, config.store, config.min_workers) == (True, task["envs"]["RUN"], 2)
    assert (task["num_nodes"], task["resources"]["use_spot"]) == (1, True)
    assert "'.[test]'" in task["setup"], "which has obstore"


# Ray Train.


def test_the_loop_of_ray_train(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """One worker, against a stub of the names that the script takes from Ray."""
    reports: list[tuple[dict[str, float], list[str]]] = []

    class Trainer:
        def __init__(self, train: Any, **options: Any) -> None:
            assert options["torch_config"].backend == "gloo"
            assert options["scaling_config"] == SimpleNamespace(num_workers=3, use_gpu=False)
            self.train, self.config = train, {**options["train_loop_config"], "steps": 60}

        def fit(self) -> Any:
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            try:
                self.train(self.config)
            finally:
                dist.destroy_process_group()
            return SimpleNamespace(metrics=reports[-1][0], checkpoint="checkpoint")

    def files_in(folder: str) -> list[str]:
        return [path.name for path in Path(folder).iterdir()]

    ray, train, of_torch = (ModuleType(name) for name in ("ray", "ray.train", "ray.train.torch"))
    vars(ray).update(train=train)
    vars(train).update(
        get_context=lambda: SimpleNamespace(get_world_rank=lambda: 0),
        report=lambda metrics, *, checkpoint: reports.append((metrics, checkpoint)),
        Checkpoint=SimpleNamespace(from_directory=files_in),
        ScalingConfig=SimpleNamespace,
        torch=of_torch,
    )
    vars(of_torch).update(TorchConfig=SimpleNamespace, TorchTrainer=Trainer, get_device=lambda: torch.device("cpu"))
    for module in (ray, train, of_torch):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(sys, "argv", ["ray_train.py", "--workers", "3"])
    torch.manual_seed(0)
    runpy.run_path(str(JOB_SCRIPTS / "ray_train.py"), run_name="__main__")
    ((metrics, files),) = reports
    assert metrics["accuracy"] > 0.8
    assert files == ["averaged_model.pt"]
    assert re.fullmatch(r"accuracy \d\d\.\d%, checkpoint\n", capsys.readouterr().out)


# The image.


def test_the_image_has_the_needs_of_its_command() -> None:
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    lines = [line.split(maxsplit=1) for line in text.splitlines() if line and not line.startswith("#")]
    assert [word for word, _ in lines] == ["ARG", "FROM", "WORKDIR", "COPY", "RUN", "ENV", "CMD"]
    instructions = dict(lines)
    assert instructions["FROM"] == "${BASE}"
    major, minor = map(int, re.findall(r"^BASE=pytorch/pytorch:(\d+)\.(\d+)\.", instructions["ARG"])[0])
    assert (major, minor) >= (2, 7)
    program, *arguments = json.loads(instructions["CMD"])
    assert program == "torchrun"
    _, config = check_torchrun(arguments)
    assert config.recipe == "sgp"
    needed = {"setup.py", "pyproject.toml", "README.md", "gossip_modules", "train", "visualization", "constraints.txt"}
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").split()
    assert needed.isdisjoint(ignored)


# The commands at work.


def run_pod(command: list[str], folder: Path, **variables: str) -> subprocess.Popen[str]:
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    env |= {"OMP_NUM_THREADS": "1", **variables}
    out = subprocess.PIPE
    return subprocess.Popen(command, cwd=folder, env=env, stdout=out, stderr=subprocess.STDOUT, text=True)


@pytest.mark.soak
@pytest.mark.e2e
@pytest.mark.timeout(200)
def test_two_pods_train(tmp_path: Path) -> None:
    """With the address of this machine, one process in each pod, and one epoch."""
    (container,) = documents("kubernetes.yaml")["Job", "gossip"]["spec"]["template"]["spec"]["containers"]
    command = container["args"][0].replace("gossip-0.gossip", "127.0.0.1").replace("/runs/", f"{tmp_path}/")
    environment = {**environment_of(container), "NNODES": "2", "NPROC_PER_NODE": "1"}
    environment |= dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), "lo")
    pods = [
        run_pod(["sh", "-c", f"{command} --epochs 1"], tmp_path, **environment, JOB_COMPLETION_INDEX=str(index))
        for index in (1, 0)
    ]
    with ExitStack() as stack:
        for pod in pods:
            stack.callback(pod.kill)
        outputs = [pod.communicate(timeout=150)[0] for pod in pods]
    assert [pod.returncode for pod in pods] == [0, 0], outputs
    assert re.search(r"^averaged model: test accuracy [\d.]+ %$", "".join(outputs), re.M)


@pytest.mark.soak
@pytest.mark.e2e
@pytest.mark.timeout(200)
def test_a_store_and_a_worker_of_the_elastic_manifest(tmp_path: Path) -> None:
    found = documents("kubernetes_elastic.yaml")
    (store,) = found["Deployment", "gossip-store"]["spec"]["template"]["spec"]["containers"]
    (worker,) = found["Job", "gossip-elastic"]["spec"]["template"]["spec"]["containers"]
    address = tmp_path / "store"
    served = run_pod([*store["command"], *store["args"], "--port", "0", "--address-file", str(address)], tmp_path)
    with ExitStack() as stack:
        stack.callback(served.communicate)
        stack.callback(served.terminate)
        changes = {"--store": f"file:{address}", "--min-workers": "1", "--out-dir": str(tmp_path / "run")}
        pairs = [argument.partition("=")[::2] for argument in worker["args"]]
        arguments = [f"{name}={changes.get(name, value)}" if value else name for name, value in pairs]
        trained = run_pod([*worker["command"], *arguments, "--epochs=1"], tmp_path)
        stack.callback(trained.kill)
        output = trained.communicate(timeout=150)[0]
    assert trained.returncode == 0, output
    assert re.search(r"^averaged model: test accuracy [\d.]+ %$", output, re.M)
