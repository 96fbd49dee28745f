"""Language models end to end: a step by every recipe, bit-identical resumption, the script, and what it refuses."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from safetensors.torch import load_file
from tqdm import tqdm

from gossip_modules.methods import METHODS
from tests.harness.processes import run_processes
from tests.train.runs import ENVIRONMENT, MEASURED, ROOT, make_run, train_twice
from train.job.outputs import EXPORT, TOKENIZER
from train.tasks.byte_tokenizer import ByteTokenizer
from train.tasks.language_model.config import LanguageModelConfig
from train.tasks.language_model.models import make_language_model
from train.tasks.language_model.task import LanguageModelTask

SMALL: dict[str, Any] = {"vocabulary_size": 270, "sequence_length": 16, "batch_size": 2, "accumulation_steps": 2}
SMALL |= {"steps_per_epoch": 3, "dropout": 0.1}


@pytest.fixture
def text(tmp_path: Path) -> str:
    """A folder of text."""
    folder = tmp_path / "text"
    folder.mkdir()
    lines = [f"the number {i} follows {i - 1}\n" for i in range(300)]
    (folder / "train.txt").write_text("".join(lines[:250]))
    (folder / "valid.txt").write_text("".join(lines[250:]))
    return str(folder)


def train_by_every_recipe(rank: int, folder: str, text: str, world_size: int) -> list[str]:
    """Two steps of both kinds of models by each recipe; those that did not move the embeddings."""
    failed = []
    for recipe, method in METHODS.items():
        optimizer = "sgd" if method.needs_sgd else "adamw"
        for model in ("gpt-tiny", "lstm-tiny"):
            out_dir = f"{folder}/{recipe}_{model}"
            config = LanguageModelConfig(
                recipe=recipe, optimizer=optimizer, model=model, data_dir=text, out_dir=out_dir, **SMALL
            )
            with make_run(rank, world_size, config, LanguageModelTask) as run:
                embeddings = next(run.wrapper.module.parameters())
                before = embeddings.detach().clone()
                run.wrapper.train()
                run.train_until(2, tqdm(disable=True))
                run.wrapper.settle()
                if torch.equal(embeddings, before) or not run.meters.is_finite or run.position != 2:
                    failed.append(f"{recipe} {model}")
                run.finish()
    return failed


@pytest.mark.soak
@pytest.mark.e2e
@pytest.mark.timeout(180)
def test_every_recipe_trains_a_language_model(tmp_path: Path, text: str) -> None:
    for outcome in run_processes(2, train_by_every_recipe, str(tmp_path), text, 2, timeout=150):
        assert (outcome.result, outcome.error) == ([], "")


@pytest.mark.soak
@pytest.mark.e2e
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"model": "lstm-tiny"},
        {"optimizer": "sgd", "recipe": "qgdsgdm"},
        {"model": "lstm-tiny", "algorithm": "LocalSGD(sync_every=2)", "first_moment_period": 3},
    ],
)
def test_a_resumed_run_is_bit_identical_to_one_that_never_stopped(
    tmp_path: Path, text: str, options: dict[str, Any]
) -> None:
    config = LanguageModelConfig(data_dir=text, **options, **SMALL)
    for outcome in run_processes(2, train_twice, str(tmp_path), 2, config, LanguageModelTask):
        assert set(outcome.result) <= MEASURED


@pytest.mark.e2e
def test_a_resumed_run_goes_on_with_the_same_uneven_shares(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / "text" / folder).mkdir(parents=True)
        for number in range(8):
            lines = [f"{folder} {number}: the number {i} follows {i - 1}\n" for i in range(30)]
            (tmp_path / "text" / folder / f"{number}.txt").write_text("".join(lines))
    options: dict[str, Any] = {"data_dir": str(tmp_path / "text"), "validation_share": 0.2, "dirichlet_alpha": 0.1}
    config = LanguageModelConfig(model="lstm-tiny", **options, **SMALL)
    for outcome in run_processes(2, train_twice, str(tmp_path), 2, config, LanguageModelTask):
        assert set(outcome.result) <= MEASURED


def which_moments_are_equal(rank: int, folder: str, text: str, world_size: int) -> list[list[bool]]:
    """After each of three steps: whether the first, and the second, moments of all ranks are the same."""
    periods: dict[str, Any] = {"first_moment_period": 2, "second_moment_period": 3}
    options: dict[str, Any] = {
        "model": "lstm-tiny",
        "algorithm": "LocalSGD(sync_every=99)",
        "out_dir": folder,
        **periods,
    }
    found = []
    with make_run(rank, world_size, LanguageModelConfig(data_dir=text, **options, **SMALL), LanguageModelTask) as run:
        run.wrapper.train()
        for position in (1, 2, 3):
            run.train_until(position, tqdm(disable=True))
            state = run.state.optimizer.state[next(run.wrapper.module.parameters())]
            sums = run.world.gather([float(state[name].double().sum()) for name in ("exp_avg", "exp_avg_sq")])
            found.append([values[0] == values[1] for values in zip(*sums, strict=True)])
        run.finish()
    return found


@pytest.mark.e2e
def test_moments_are_averaged_each_at_its_own_period(tmp_path: Path, text: str) -> None:
    for outcome in run_processes(2, which_moments_are_equal, str(tmp_path / "run"), text, 2):
        assert (outcome.result, outcome.error) == ([[False, False], [True, False], [False, True]], "")


def start(out_dir: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The script, in a world of one."""
    options = [part for name, value in SMALL.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    command = [sys.executable, "-m", "train.language_model", "--out-dir", str(out_dir), *options, *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, check=False, cwd=ROOT)


@pytest.mark.soak
@pytest.mark.e2e
def test_the_script_trains_and_leaves_a_model_that_loads(tmp_path: Path, text: str) -> None:
    out_dir = tmp_path / "run"
    done = start(out_dir, "--data-dir", text, "--epochs", "2", "--amp", "bfloat16", "--clip-norm", "0.5")
    assert done.returncode == 0, done.stderr
    last = done.stdout.splitlines()[-1]
    assert re.fullmatch(r"averaged model: test nll \d.*, perplexity \d.*, bits per byte \d+\.\d\d", last)
    summary = json.loads((out_dir / "summary.json").read_text())
    assert summary["score"] == "bits_per_byte"
    assert summary["averaged_test"].keys() == {"nll", "perplexity", "bits_per_byte"}
    assert (out_dir / "curves.png").is_file()
    table = pd.read_csv(out_dir / "rank_0000.csv")
    assert table["averaged_test_bits_per_byte"].notna().all()
    num_tokens = ByteTokenizer.load(out_dir / TOKENIZER).num_tokens
    model = make_language_model("gpt-tiny", num_tokens=num_tokens, max_length=16, dropout=0.0)
    model.load_state_dict(load_file(out_dir / EXPORT))


@pytest.mark.soak
@pytest.mark.e2e
def test_an_error_of_the_user_is_one_line_and_exit_code_2(tmp_path: Path, text: str) -> None:
    (tmp_path / "empty").mkdir()
    (Path(text) / "train.png").write_bytes(b"\x89PNG\0")
    for options, message in (
        (["--data-dir", str(tmp_path / "empty")], r"rank 0: got no file in .*, expected text files; .*"),
        (["--data-dir", text], r"rank 0: got byte 0x89 at 0 of .*train\.png, expected UTF-8 text; .*"),
        (
            ["--data-dir", text, "--files", "*.txt", "--dirichlet-alpha", "0.1"],
            r"rank 0: got dirichlet_alpha=0\.1 and 1 training files, none of them in a folder, expected .*",
        ),
        (["--data-dir", text, "--files", "*.txt", "--sequence-length", "9999"], r"rank 0: got \d+ tokens of .*"),
    ):
        done = start(tmp_path / "run", *options)
        assert done.returncode == 2, done.stderr
        assert re.fullmatch(f"error: {message}\n", done.stderr), done.stderr
