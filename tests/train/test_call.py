"""Training from Python: `train.run(...)` and PowerGossip's `train.config`, `train.main()`."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

import train
from tests.harness.ranks import solo_group
from train.call import TASKS, as_config
from train.job.errors import UsageError
from train.job.preemption import SIGNALS, StopRequest
from train.tasks.images.config import Config
from train.tasks.language_model.config import LanguageModelConfig

ROOT = Path(__file__).resolve().parents[2]
SMALL: dict[str, Any] = {"epochs": 1, "batch_size": 128, "log_every": 4, "dataset": "digits"}


@pytest.fixture(autouse=True)
def _module_as_it_was() -> Iterator[None]:
    yield
    train.config.clear()
    train.output_dir, train.log_metric, train.log_info = "", None, None


def test_a_run_returns_its_result_and_is_heard(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    metrics: list[tuple[str, dict[str, Any], dict[str, Any]]] = []
    infos: list[dict[str, Any]] = []
    num_threads = torch.get_num_threads()
    result = train.run(
        {"recipe": "dpsgd", "overlap": "auto", "out_dir": str(tmp_path), "num_threads": num_threads + 1, **SMALL},
        log_metric=lambda name, values, tags: metrics.append((name, dict(values), dict(tags))),
        log_info=lambda values: infos.append(dict(values)),
    )
    assert result.is_complete
    assert (result.exit_code, result.rank, result.world_size, result.folder) == (0, 0, 1, tmp_path)
    assert result.score == "accuracy_percent"
    assert result.averaged_test["accuracy_percent"] == pytest.approx(result.own_test["accuracy_percent"])
    assert result.consensus_distance == 0.0
    assert [row["epoch"] for row in result.epochs] == [1]
    assert load_file(result.model_path)
    assert [name for name, *_ in metrics] == ["train", "train", "epoch"]
    assert [values["step"] for _, values, _ in metrics] == [4, 8, 11]
    assert metrics[0][1].keys() == {"step", "loss", "learning_rate"}
    assert metrics[-1][1]["averaged_test_accuracy_percent"] == result.averaged_test["accuracy_percent"]
    assert {tuple(tags.items()) for *_, tags in metrics} == {(("rank", 0),)}
    assert infos[0]["config"]["recipe"] == "dpsgd"
    assert infos[-1]["averaged_test"] == result.averaged_test
    assert torch.get_num_threads() == num_threads
    assert not dist.is_initialized()
    printed = capsys.readouterr().out
    assert "averaged model: test accuracy" in printed
    assert "chosen by all ranks: overlap = 0, max_staleness = 0, step_seconds = " in printed


def test_main_of_powergossip(tmp_path: Path) -> None:
    seen: list[str] = []
    train.config["n_workers"] = 1
    train.config["rank"] = 0
    train.config["optimizer"] = "power-gossip"
    train.config["optimizer_num_iterations"] = 2
    train.config["num_epochs"] = 1
    train.config["batch_size"] = 256
    train.output_dir = str(tmp_path / "here")
    train.log_metric = lambda name, values, tags: seen.append(name)
    train.log_info = lambda values: seen.append("info")
    with pytest.warns(
        UserWarning,
        match=r"optimizer='power-gossip' is now recipe='powergossip'; .*algorithm='PowerGossip\(num_iterations=2\)'",
    ):
        result = train.main()
    assert result.folder == tmp_path / "here"
    assert (tmp_path / "here" / "summary.json").is_file()
    assert seen == ["info", "epoch", "info"]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"recip": "sgp"}, r"^got 'recip', which is no option of this task, expected one; did you mean 'recipe'\?$"),
        ({"qqq": 1}, r"^got 'qqq', .*; the options are accumulation_steps, algorithm, amp"),
        ({"all_reduce": True}, r"^got 'all_reduce', an option of another system, .*; write --recipe ar$"),
        ({"alpha": 1}, r"^got 'alpha', an option of another system, .*--dirichlet-alpha for uneven data"),
        ({"task": "audio"}, r"^got task='audio', expected one of images, translation, language_model"),
        ({"preset": "none"}, r"^got preset='none', expected one of imagenet-resnet50; leave it out$"),
        ({"lr": "0.1"}, r"^got lr='0.1', expected a value of type float; the default is 0.4$"),
        ({"epochs": True}, r"^got epochs=True, expected a value of type int"),
        ({"epochs": 0}, r"^got epochs=0, expected more than 0"),
        ({"elastic": True}, r"^got elastic=True for train.run, expected False"),
        ("sgp", r"^got 'sgp' to train, expected a configuration of a task, or options by name"),
    ],
)
def test_calls_that_cannot_run(config: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        train.run(config)
    assert "\n" not in str(caught.value)
    assert not dist.is_initialized()


def test_main_refuses_the_options_of_another_launch() -> None:
    train.config["n_workers"] = 4
    with pytest.raises(UsageError, match=r"^got n_workers=4 in rank 0 of 1 processes, expected 1; start torchrun"):
        train.main()
    train.config.clear()
    train.config["learning_rate"] = 0.1
    with pytest.raises(UsageError, match=r"^got learning_rate=0.1, .*: set lr, which is for a global batch of 256"):
        train.main()
    train.config.clear()
    train.config["task"] = "Speech"
    with pytest.raises(UsageError, match=r"^got task='Speech': pass Cifar or LSTM, or a task of this project: images"):
        train.main()


def test_options_become_a_configuration() -> None:
    config = as_config({"milestones": [3, 4], "lr": 1, "recipe": "ar"})
    assert config == Config(milestones=(3, 4), lr=1.0, recipe="ar")
    assert as_config(config) is config
    assert as_config({"preset": "imagenet-resnet50", "epochs": 2}) == Config(
        **{**Config.PRESETS["imagenet-resnet50"], "epochs": 2}
    )
    assert isinstance(as_config({"task": "language_model"}), LanguageModelConfig)
    for task in TASKS:
        assert as_config({"task": task}).epochs > 0


def test_a_process_group_of_the_caller_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    group = solo_group()
    monkeypatch.setattr(dist, "is_initialized", lambda: group is not None)
    with pytest.raises(UsageError, match=r"got torch.distributed initialised already.*destroy_process_group\(\)"):
        train.run({})


def test_a_thread_handles_no_signals() -> None:
    made: list[StopRequest] = []
    thread = threading.Thread(target=lambda: made.append(StopRequest(())))
    thread.start()
    thread.join()
    made[0].request()
    assert made[0].is_made
    made[0].close()
    assert len(SIGNALS) == 2


@pytest.mark.e2e
@pytest.mark.timeout(150)
@pytest.mark.soak
def test_under_torchrun(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        f"import train\nresult = train.run({{'out_dir': {str(tmp_path / 'run')!r}, **{SMALL!r}}})\n"
        "print(f'\\nrank {result.rank} of {result.world_size}: {result.is_complete}')\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    environment = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=140, check=True, env=environment)
    assert {"rank 0 of 2: True", "rank 1 of 2: True"} <= set(done.stdout.splitlines())
