"""Translation end to end: a step by every recipe, bit-identical resumption, the script, and its model at work."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from tqdm import tqdm

from gossip_modules.methods import METHODS
from tests.harness.processes import run_processes
from tests.harness.scripts import module_output
from tests.train.runs import MEASURED, make_run, train_twice
from train.tasks.translation.config import TranslationConfig
from train.tasks.translation.number_words import number_words
from train.tasks.translation.task import TranslationTask
from train.translate_text import TrainedTranslator, translate_lines

SMALL: dict[str, Any] = {"vocabulary_size": 360, "max_tokens": 128, "num_validation": 8, "num_test": 4}
SMALL |= {"max_length": 48, "beam_size": 1, "dropout": 0.1, "accumulation_steps": 2}


@pytest.fixture
def corpus(tmp_path: Path) -> str:
    """A folder of number words: quicker to read than to make, on each rank for each run."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    for prefix, text in number_words("en", "de", num_train=100)._asdict().items():
        name = {"validation": "val"}.get(prefix, prefix)
        for side, language in enumerate(("en", "de")):
            (folder / f"{name}.{language}").write_text("".join(f"{pair[side]}\n" for pair in text))
    return str(folder)


def train_by_every_recipe(rank: int, folder: str, corpus: str, world_size: int) -> list[str]:
    """Two steps by each recipe; those that did not move the embeddings, or moved the positions."""
    failed = []
    for recipe, method in METHODS.items():
        optimizer = "sgd" if method.needs_sgd else "adam"
        config = TranslationConfig(
            recipe=recipe, optimizer=optimizer, data_dir=corpus, out_dir=f"{folder}/{recipe}", **SMALL
        )
        with make_run(rank, world_size, config, TranslationTask) as run:
            translator: Any = run.wrapper.module
            network = translator.network
            embeddings, positions = network.lm_head.weight, network.model.encoder.embed_positions.weight
            before = embeddings.detach().clone(), positions.detach().clone()
            run.wrapper.train()
            run.train_until(2, tqdm(disable=True))
            run.wrapper.settle()
            has_moved = not torch.equal(embeddings, before[0]) and embeddings is network.model.shared.weight
            if not (has_moved and torch.equal(positions, before[1]) and run.meters.is_finite and run.position == 2):
                failed.append(recipe)
            run.finish()
    return failed


@pytest.mark.soak
@pytest.mark.e2e
def test_every_recipe_trains_a_transformer(tmp_path: Path, corpus: str) -> None:
    for outcome in run_processes(2, train_by_every_recipe, str(tmp_path), corpus, 2, timeout=55):
        assert outcome.result == []


@pytest.mark.soak
@pytest.mark.e2e
def test_a_resumed_run_is_bit_identical_to_one_that_never_stopped(tmp_path: Path, corpus: str) -> None:
    config = TranslationConfig(data_dir=corpus, **SMALL)
    for outcome in run_processes(2, train_twice, str(tmp_path), 2, config, TranslationTask):
        assert set(outcome.result) <= MEASURED


@pytest.mark.e2e
def test_the_script_trains_and_its_model_translates(tmp_path: Path) -> None:
    options = {**SMALL, "epochs": 1, "num_numbers": 100}
    arguments = [text for name, value in options.items() for text in (f"--{name.replace('_', '-')}", str(value))]
    last = module_output("train.translate", "--out-dir", str(tmp_path), *arguments).splitlines()[-1]
    assert re.fullmatch(
        r"averaged model: test validation nll \d.*, nll \d.*, bleu .*, chrf .*, exact match \d+\.\d\d %", last
    )
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["score"] == "exact_match_percent"
    assert summary["averaged_test"].keys() == {"validation_nll", "nll", "bleu", "chrf", "exact_match_percent"}
    table = pd.read_csv(tmp_path / "rank_0000.csv")
    assert {"own_test_nll", "own_test_token_accuracy_percent", "averaged_test_bleu"} <= set(table.columns)

    translator = TrainedTranslator.load(tmp_path)
    task_translations = (tmp_path / "translations.de").read_text().splitlines()
    assert len(task_translations) == SMALL["num_test"]
    sentences = ["two hundred and forty thousand, nine hundred and twenty-one", "", "seven"]
    found = list(translate_lines((f"{sentence}\n" for sentence in sentences), translator))
    assert (len(found), found[1]) == (3, "")
    assert found[0] == translator([sentences[0]])[0], "company changes nothing"
    with pytest.raises(ValueError, match=r"got beam_size=-2, expected 0 or more"):
        TrainedTranslator.load(tmp_path, beam_size=-2)
    with pytest.raises(
        ValueError, match=r"got .*averaged_model\.safetensors: .*, expected the model of a finished run"
    ):
        TrainedTranslator.load(tmp_path / "tensorboard")
