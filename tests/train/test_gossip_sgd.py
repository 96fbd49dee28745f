"""The main job end to end: results, bit-identical resumption, signals."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
import torch
import torch.distributed as dist
from PIL import Image
from safetensors.torch import load_file
from torch import nn

import gossip_modules as gm
from tests.harness.processes import run_processes
from tests.harness.scripts import script_outputs
from tests.train.runs import ENVIRONMENT, MEASURED, ROOT, differences, equal, leaves, make_run
from tests.train.training.test_checkpoint import Ranks
from train.job.preemption import EXIT_CODE, StopRequest
from train.job.stop import LockstepStop
from train.tasks.base import MicroBatch
from train.tasks.images.config import Config
from train.tasks.images.images import TensorImages
from train.tasks.images.models import MODELS
from train.tasks.images.task import ImageTask
from train.tasks.precision import Precision
from train.training.export import export_model
from train.training.meters import Meters
from train.training.step import train_step

SCRIPT = str(ROOT / "train" / "gossip_sgd.py")
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", SCRIPT]
LAST_LINE = r"averaged model: test accuracy \d+\.\d\d %"


def run_in_process(rank: int, world_size: int, config: Config) -> int:
    """Make and train a run of `config`."""
    with make_run(rank, world_size, config, ImageTask) as run:
        exit_code = run.train()
        run.finish()
    return exit_code


def train_twice(rank: int, recipe: str, folder: str, world_size: int) -> list[str]:
    """Train through; train again from a checkpoint in the middle of an epoch; which parts of the ends differ."""
    whole, resumed = Path(folder) / "whole", Path(folder) / "resumed"
    options: dict[str, Any] = {"recipe": recipe, "epochs": 2, "batch_size": 96, "milestones": (1,), "keep_last": 99}
    options |= {"checkpoint_every_steps": 5, "checkpoint_every": 2, "accumulation_steps": 2, "amp": "bfloat16"}
    assert run_in_process(rank, world_size, Config(out_dir=str(whole), **options)) == 0
    middle = Path("checkpoints") / "step_00000005"  # an epoch has 7 steps on two ranks, 4 on three
    if rank == 0:
        shutil.copytree(whole / middle, resumed / middle)
    dist.barrier()
    assert run_in_process(rank, world_size, Config(out_dir=str(resumed), resume="auto", **options)) == 0
    ends = [sorted(Path(run, "checkpoints").iterdir())[-1] / f"rank_{rank:04d}.pt" for run in (whole, resumed)]
    assert ends[0].parent.name == ends[1].parent.name
    return differences(*ends)


def world_of(ranks: Ranks, rank: int) -> Any:
    """A rank among threads, each on a machine of its own."""
    member = ranks[rank]
    return SimpleNamespace(
        rank=rank, local_rank=0, size=ranks.size, device=torch.device("cpu"), on_every_rank=member.on_every_rank
    )


def test_images_are_there_and_the_same_on_every_rank_or_on_none(tmp_path: Path) -> None:
    for folder, num_images in (("whole", 4), ("short", 3)):
        for split, index in itertools.product(("train", "val"), range(num_images)):
            path = tmp_path / folder / split / "cat" / f"{index}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (4, 4)).save(path)
    config = Config(dataset="imagefolder", batch_size=1)
    ranks = Ranks(2)

    def errors_of(folders: list[str]) -> list[Any]:
        return ranks.run(
            lambda member: ImageTask(
                replace(config, data_dir=str(tmp_path / folders[member.rank])), world_of(ranks, member.rank)
            )
        )

    assert [task.steps_per_epoch for task in errors_of(["whole", "whole"])] == [2, 2]
    for error in errors_of(["whole", "short"]):
        with pytest.raises(
            ValueError, match=r"got 3 images for training and 3 for tests on rank 1, expected 4 and 4 as"
        ):
            raise error
    for error in errors_of(["whole", "nowhere"]):
        with pytest.raises(ValueError, match=r"rank 1: got .*nowhere.* \(no such folder\), expected train/ and val/"):
            raise error


def test_dpwa_reports_the_mean_loss_of_a_step() -> None:
    reported: list[float] = []

    class Worker(gm.PairwiseDataParallel):
        def report_loss(self, loss: float) -> None:
            reported.append(loss)

    config = Config(algorithm="Dpwa(interpolation=LossInterpolation())", accumulation_steps=2)
    wrapper = Worker(torch.nn.Linear(3, 2), name="a", peers={"a": "tcp://127.0.0.1:*"})
    try:
        optimizer = torch.optim.SGD(wrapper.parameters(), lr=0.1)
        images, labels = torch.tensor([[1.0, 2.0, 3.0], [-5.0, 0.0, 7.0]]), torch.tensor([0, 1])
        expected = torch.nn.functional.cross_entropy(
            wrapper.module(images), labels, label_smoothing=config.label_smoothing
        )
        run = SimpleNamespace(
            config=config,
            task=ImageTask.__new__(ImageTask),
            state=SimpleNamespace(
                wrapper=wrapper,
                optimizer=optimizer,
                scaler=torch.amp.GradScaler(enabled=False),
                meters=Meters(torch.device("cpu")),
                device=torch.device("cpu"),
                step=0,
            ),
        )
        run.task.config, run.task.precision = config, Precision(torch.device("cpu"))
        run.task.prepare = lambda inputs: inputs
        parts = [MicroBatch((images[:1],), labels[:1], 1), MicroBatch((images[1:],), labels[1:], 1)]
        train_step(run.task, run.config, run.state, parts, learning_rate=0.1)
    finally:
        wrapper.close()
    assert reported == [pytest.approx(expected.item())]


def _in_soak(*runs: tuple[str, int]) -> list[Any]:
    """Runs that `make test` has no time for."""
    return [pytest.param(*run, marks=pytest.mark.soak) for run in runs]


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("recipe", "world_size"),
    [
        ("sgp", 3),
        *_in_soak(("ar", 3), ("dpsgd", 2), ("matcha", 3)),
        *_in_soak(("choco", 2), ("deepsqueeze", 2), ("moniqua", 2), ("powergossip", 3)),
    ],
)
def test_a_resumed_run_is_bit_identical_to_one_that_never_stopped(tmp_path: Path, recipe: str, world_size: int) -> None:
    outcomes = run_processes(world_size, train_twice, recipe, str(tmp_path), world_size)
    for outcome in outcomes:
        assert set(outcome.result) <= MEASURED


ASYNCHRONOUS: dict[str, dict[str, Any]] = {
    "adpsgd": {},
    "wagma": {"algorithm": "WAGMA(sync_period=3)"},
    "dpwa": {"algorithm": "Dpwa(interpolation=LossInterpolation(), divergence_threshold=0.6)"},
}


def states_of(checkpoint: Path, world_size: int) -> list[dict[str, Any]]:
    paths = [checkpoint / f"rank_{rank:04d}.pt" for rank in range(world_size)]
    return [torch.load(path, weights_only=True) for path in paths]


def train_on_from_the_middle(rank: int, recipe: str, folder: str, world_size: int) -> list[str]:
    """Train, and go on from a checkpoint in the middle of an epoch; which parts of a state did not come back."""
    options: dict[str, Any] = {"recipe": recipe, "epochs": 2, "batch_size": 96, "milestones": (1,), "keep_last": 99}
    options |= {"checkpoint_every_steps": 5, "accumulation_steps": 2, **ASYNCHRONOUS[recipe]}
    config = Config(out_dir=folder, **options)
    assert run_in_process(rank, world_size, config) == 0
    middle = Path(folder, "checkpoints", "step_00000005")  # an epoch has 7 steps on two ranks, 4 on three
    with make_run(rank, world_size, replace(config, resume=str(middle)), ImageTask) as run:
        assert run.position == 5
        saved, loaded = dict(leaves(states_of(middle, world_size)[rank])), dict(leaves(run.state.state_dict()))
        assert saved.keys() == loaded.keys()
        # The learning rate is set before every step, and messages were sent since the process started.
        kept = {name: x for name, x in saved.items() if not name.endswith(("/lr", "/bytes_sent"))}
        lost = [name for name, x in kept.items() if not equal(x, loaded[name])]
        assert run.train() == 0
        run.finish()
    return lost


@pytest.mark.e2e
@pytest.mark.parametrize(("recipe", "world_size"), _in_soak(("wagma", 3), ("adpsgd", 2), ("adpsgd", 3), ("dpwa", 2)))
def test_an_asynchronous_run_loses_nothing_when_it_is_resumed(tmp_path: Path, recipe: str, world_size: int) -> None:
    outcomes = run_processes(world_size, train_on_from_the_middle, recipe, str(tmp_path), world_size)
    assert [outcome.result for outcome in outcomes] == [[]] * world_size
    checkpoints = sorted((tmp_path / "checkpoints").glob("step_*"))
    end = {2: 14, 3: 8}[world_size]
    assert [int(path.name.removeprefix("step_")) for path in checkpoints] == [*range(5, end, 5), end]
    for checkpoint in checkpoints:
        steps = [state["step"] for state in states_of(checkpoint, world_size)]
        position = int(checkpoint.name.removeprefix("step_"))
        if recipe == "wagma":
            assert max(steps) <= position
        else:
            assert sum(steps) == position * world_size
    for rank in range(world_size):
        table = pd.read_csv(tmp_path / f"rank_{rank:04d}.csv")
        assert table["step"].tolist() == [end // 2, end]


def stop_one_rank(rank: int, recipe: str, folder: str, world_size: int) -> tuple[int, int]:
    """Rank 1 receives a signal after a few steps of its own; the exit code and the steps of each rank."""
    options: dict[str, Any] = {"recipe": recipe, "epochs": 10**6, "batch_size": 96, **ASYNCHRONOUS[recipe]}
    with make_run(rank, world_size, Config(out_dir=folder, validate_every=10**6, **options), ImageTask) as run:
        take_step = run.train_step

        def take_step_and_signal(batch: Sequence[MicroBatch], *, learning_rate: float) -> None:
            take_step(batch, learning_rate=learning_rate)
            if rank == 1 and run.state.step == 5:
                os.kill(os.getpid(), signal.SIGUSR1)

        run.train_step = take_step_and_signal  # type: ignore[method-assign]
        exit_code = run.train()
        run.finish()
        return exit_code, run.state.step


@pytest.mark.e2e
@pytest.mark.parametrize(
    "recipe", ["wagma", *(pytest.param(recipe, marks=pytest.mark.soak) for recipe in ("adpsgd", "dpwa"))]
)
def test_a_signal_to_one_rank_stops_an_asynchronous_run_with_one_checkpoint(tmp_path: Path, recipe: str) -> None:
    outcomes = run_processes(3, stop_one_rank, recipe, str(tmp_path), 3)
    assert [outcome.result[0] for outcome in outcomes] == [EXIT_CODE] * 3
    (checkpoint,) = tmp_path.glob("checkpoints/step_*")
    steps = [state["step"] for state in states_of(checkpoint, 3)]
    assert steps == [outcome.result[1] for outcome in outcomes]
    if recipe != "wagma":
        assert sum(steps) == 3 * int(checkpoint.name.removeprefix("step_"))


def stop_at_step_3_of_rank_1(rank: int, lag: int) -> list[bool]:
    request = StopRequest()
    stop = LockstepStop(request, dist.distributed_c10d._get_default_group(), lag=lag)
    answers = []
    for step in range(8):
        if rank == 1 and step == 3:
            os.kill(os.getpid(), signal.SIGUSR1)
        answers.append(stop.should_stop())
    stop.drain()
    request.close()
    return answers


@pytest.mark.e2e
@pytest.mark.parametrize("lag", [1, 3])
def test_a_signal_to_one_rank_stops_all_at_the_same_call(lag: int) -> None:
    for outcome in run_processes(3, stop_at_step_3_of_rank_1, lag):
        assert outcome.result == [step >= 3 + lag for step in range(8)]


@pytest.mark.e2e
def test_the_script_trains_reports_and_exports(tmp_path: Path) -> None:
    """Torchrun itself is in the soak tests, and in `make train`, which .ci/run runs."""
    options = ["--epochs", "2", "--out-dir", str(tmp_path), "--milestones", "1"]
    first, _ = script_outputs(Path(SCRIPT), 2, *options)
    last_line = first.splitlines()[-1]
    assert re.fullmatch(LAST_LINE, last_line)
    summary = json.loads((tmp_path / "summary.json").read_text())
    accuracy = summary["averaged_test"]["accuracy_percent"]
    # A validation takes two exact averages of the model, each of which sends it once from each of two ranks.
    model_bytes = 4 * sum(t.numel() for t in MODELS["cnn"](1, 10).state_dict().values() if t.is_floating_point())
    for rank_result in summary["ranks"]:
        assert rank_result["last_validation_bytes_sent"] == pytest.approx(2 * model_bytes, rel=0.01)
    assert f"{accuracy:.2f}" in last_line
    for rank in range(2):
        table = pd.read_csv(tmp_path / f"rank_{rank:04d}.csv")
        assert table["epoch"].tolist() == [1, 2]
        assert table["bytes_sent"].is_monotonic_increasing
        assert table["averaged_test_accuracy_percent"].iloc[-1] == pytest.approx(accuracy)
    assert (tmp_path / "curves.png").is_file()

    # The exported average, in plain PyTorch, is as good as the run said.
    model = MODELS["cnn"](1, 10)
    model.load_state_dict(load_file(tmp_path / "averaged_model.safetensors"))
    with torch.no_grad():
        metrics = ImageTask(Config(), world_of(Ranks(1), 0)).evaluate(model.eval())
    assert metrics["accuracy_percent"] == pytest.approx(accuracy)


def start_and_wait_for_first_epoch(command: list[str], stderr: int | None = None) -> subprocess.Popen[str]:
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True, env=ENVIRONMENT, cwd=ROOT)
    assert process.stdout is not None
    assert any(line.startswith("epoch") for line in process.stdout), "ended before the first epoch did"
    return process


@pytest.mark.soak
@pytest.mark.e2e
def test_sigusr1_checkpoints_and_exits_with_the_documented_code(tmp_path: Path) -> None:
    # No torchrun: a world of one.
    command = [sys.executable, SCRIPT, "--epochs", "1000", "--out-dir", str(tmp_path), "--log-every", "1000"]
    process = start_and_wait_for_first_epoch(command)
    process.send_signal(signal.SIGUSR1)
    output, _ = process.communicate()
    assert process.returncode == EXIT_CODE == 75
    assert "told to stop: checkpoint of step" in output
    assert len(list(tmp_path.glob("checkpoints/step_*/rank_0000.json"))) == 1


@pytest.mark.soak
@pytest.mark.e2e
def test_a_signal_to_torchrun_checkpoints_every_rank(tmp_path: Path) -> None:  # SIGUSR1: see test_slurm.py
    command = [*TORCHRUN, "--epochs", "1000", "--out-dir", str(tmp_path)]
    process = start_and_wait_for_first_epoch(command)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate()
    assert process.returncode == 1  # torchrun's own
    assert "told to stop: checkpoint of step" in output
    (checkpoint,) = tmp_path.glob("checkpoints/*")
    assert sorted(file.name for file in checkpoint.glob("*.json")) == ["rank_0000.json", "rank_0001.json"]


@pytest.mark.soak
@pytest.mark.e2e
def test_a_signal_to_one_worker_ends_all_with_the_documented_code(tmp_path: Path) -> None:
    # torchrun sends SIGTERM to the others as soon as the first has left, at whatever point of their own end they are.
    command = [*TORCHRUN[:-2], "3", SCRIPT, "--epochs", "1000", "--out-dir", str(tmp_path)]
    process = start_and_wait_for_first_epoch(command, stderr=subprocess.PIPE)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(children[-1]), signal.SIGUSR1)
    _, errors = process.communicate()
    assert re.findall(r"exitcode +: (-?\d+)", errors) == ["75"] * 3


def diverge_and_resume(rank: int, folder: str) -> list[str]:
    """Runs that must end, or go on, as said; the errors of those that must end."""
    world_size, root, errors = 2, Path(folder), []
    short: dict[str, Any] = {"batch_size": 256, "warmup_epochs": 0, "milestones": (), "log_every": 1}

    # Loss is NaN on all ranks after the first round: nothing is saved, everybody ends.
    try:
        run_in_process(rank, world_size, Config(out_dir=f"{root}/nan", lr=1e30, epochs=9, checkpoint_every=9, **short))
    except ValueError as error:
        errors.append(str(error))
    assert not list(root.glob("nan/checkpoints/*"))

    # The last step is saved though it is no multiple of checkpoint_every_steps.
    done = Config(out_dir=f"{root}/done", epochs=2, checkpoint_every_steps=3, **short)
    assert run_in_process(rank, world_size, done) == 0
    assert [path.name for path in sorted(root.glob("done/checkpoints/*"))] == ["step_00000003", "step_00000004"]

    # A finished run reports again, elsewhere too, where it clears what another run has left.
    (root / "elsewhere").mkdir(exist_ok=True)
    (root / "elsewhere" / f"rank_{rank:04d}.csv").write_text("of another run")
    (root / "elsewhere" / "summary.json").write_text("{}")
    dist.barrier()
    elsewhere = replace(done, out_dir=f"{root}/elsewhere", resume=f"{root}/done")
    try:
        run_in_process(rank, world_size, elsewhere)
    except ValueError as error:
        errors.append(str(error))
    elsewhere = replace(elsewhere, overwrite=True)
    assert run_in_process(rank, world_size, elsewhere) == 0
    assert not list(root.glob("elsewhere/*.csv"))

    # Another start in its folder is refused, and so are options that make another run.
    try:
        run_in_process(rank, world_size, done)
    except ValueError as error:
        errors.append(str(error))
    changes: tuple[dict[str, Any], ...] = ({"graph": "ring"}, {"peers_per_itr": "0:1"}, {"gossip_every": 2})
    for change in (*changes, {"amp": "bfloat16"}, {"wire_dtype": "bfloat16"}):
        try:
            run_in_process(rank, world_size, replace(done, resume="auto", **change))
        except ValueError as error:
            errors.append(str(error))
    return errors


@pytest.mark.e2e
def test_ends_of_a_run_and_actions_of_a_finished_one(tmp_path: Path) -> None:
    for outcome in run_processes(2, diverge_and_resume, str(tmp_path)):
        diverged, taken, again, *refused = outcome.result
        assert re.search(r"rank 0: got a loss of (nan|inf) by step .*training has diverged; lower --lr", diverged)
        assert "rank 1: got a loss of" in diverged
        assert re.search(
            r"got an --out-dir with an earlier run \(summary.json, rank_0000.csv, rank_0001.csv in .*elsewhere\) and "
            r"--resume .*done, expected a new folder; pass another --out-dir, or --overwrite",
            taken,
        )
        assert re.search(
            r"got an --out-dir with an earlier run \(checkpoints/step_00000004, .* and no --resume.*--resume auto",
            again,
        )
        for name, error in zip(("graph", "peers_per_itr", "gossip_every", "amp", "wire_dtype"), refused, strict=True):
            assert re.search(rf"got .*rank_0000.pt of a run with {name}=.*, expected .* as in this run", error)


def train_compiled(rank: int, folder: str) -> tuple[list[float], list[str]]:
    """The losses of a run with and of one without torch.compile, and the names in the exported model."""
    losses = []
    for backend in ("none", "eager"):
        config = Config(out_dir=f"{folder}/{backend}", compile=backend, epochs=1, batch_size=512, milestones=())
        assert run_in_process(rank, 1, config) == 0
        losses += pd.read_csv(f"{folder}/{backend}/rank_0000.csv")["loss"].tolist()
    return losses, sorted(load_file(f"{folder}/eager/averaged_model.safetensors"))


@pytest.mark.soak
@pytest.mark.e2e
def test_a_compiled_model_learns_the_same_under_the_same_names(tmp_path: Path) -> None:
    (outcome,) = run_processes(1, train_compiled, str(tmp_path))
    (plain, compiled), names = outcome.result
    assert compiled == pytest.approx(plain, rel=1e-5)
    assert names == sorted(MODELS["cnn"](1, 10).state_dict())


def test_export_of_views_of_one_storage_in_channels_last_loads_into_a_plain_model(tmp_path: Path) -> None:
    model = MODELS["cnn"](1, 10).to(memory_format=torch.channels_last)
    flat = torch.rand(sum(p.numel() for p in model.parameters()))
    begin = 0
    for p in model.parameters():
        p.data = flat.as_strided(p.shape, p.stride(), begin)
        begin += p.numel()
    export_model(model, tmp_path / "model.safetensors", metadata={"model": "cnn"})
    plain = MODELS["cnn"](1, 10)
    plain.load_state_dict(load_file(tmp_path / "model.safetensors"))
    for name, tensor in plain.state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name])
        assert tensor.is_contiguous()


def test_count_correct_counts_images() -> None:
    images = TensorImages(torch.eye(4)[:, :, None, None], torch.tensor([0, 1, 2, 0]).numpy(), num_classes=4)
    batches = [(images.images[:3], torch.tensor([0, 1, 2])), (images.images[3:], torch.tensor([0]))]
    task = ImageTask(Config(), world_of(Ranks(1), 0))
    assert task.count_correct(nn.Flatten(), batches).tolist() == [3, 4]
