"""The studies of the number of outer steps: fine-tuning from one trained model, adapters, entries."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
import torch
from torch import nn

from benchmarks.studies import outer_steps, small_decoder
from benchmarks.studies.outer_steps import OUTER, Adapted, FineTuning
from benchmarks.studies.small_decoder import NUM_SYMBOLS
from benchmarks.studies.study import Trainings
from gossip_modules.lab import LabPlan


@pytest.fixture
def text(monkeypatch: pytest.MonkeyPatch) -> None:
    """A short text, and a short training on it."""
    symbols = torch.arange(20_000).remainder(NUM_SYMBOLS).to(torch.uint8)
    monkeypatch.setattr(small_decoder, "python_sources", lambda: symbols)
    monkeypatch.setattr(outer_steps, "language_reference", lambda: symbols.flip(0))
    monkeypatch.setattr(outer_steps, "TRAINED_STEPS", 2)
    outer_steps.trained_decoder.cache_clear()


@pytest.mark.usefixtures("text")
@pytest.mark.parametrize(("name", "num_trained"), [("outer_short", 20_480), ("outer_short_lora", 3_072)])
def test_all_methods_begin_with_the_trained_model_of_the_seed(name: str, num_trained: int, tmp_path: Path) -> None:
    study = OUTER[name]
    task = study.task()
    assert isinstance(task, FineTuning)
    assert sum(p.numel() for p in task.model().parameters() if p.requires_grad) == num_trained
    chosen = dict(list(study.methods(2).items())[:2])
    cells = ((2, 2, 1), (2, 2, 2))
    short = replace(study, cells=cells, rates=study.rates[:1], points=2, methods=lambda workers: chosen)
    path = tmp_path / "outer_short.csv"
    assert Trainings(short, path, 1.0).run()
    rows = pd.read_csv(path)
    curves = rows.groupby(["method", "seed"])["step"].apply(list)
    assert curves.index.tolist() == sorted((method, seed) for method in chosen for seed in (1, 2))
    assert all(steps == [0, 1, 2] for steps in curves)
    starts = rows[rows["step"] == 0].groupby("seed")["test"].nunique()
    assert starts.to_dict() == {1: 1, 2: 1}
    assert rows[rows["step"] == 0]["test"].nunique() == 2
    before = FineTuning(seed=2).model().state_dict()
    assert all(torch.equal(before[key], own) for key, own in outer_steps.trained_decoder(2).state_dict().items())


def test_an_adapter_begins_as_its_matrix_and_changes_it_by_a_low_rank() -> None:
    torch.manual_seed(0)
    layer, x = nn.Linear(6, 5, bias=False), torch.randn(3, 6)
    adapter = Adapted(layer, 2)
    torch.testing.assert_close(adapter(x), layer(x))
    nn.init.normal_(adapter.b)
    change = adapter(torch.eye(6)).T - layer.weight
    torch.testing.assert_close(change, 2 * adapter.b @ adapter.a)
    assert int(torch.linalg.matrix_rank(change)) == 2


def test_the_language_reference_is_text_that_the_sources_do_not_have() -> None:
    symbols = outer_steps.language_reference()
    assert len(symbols) > 200_000
    assert int(symbols.max()) < NUM_SYMBOLS
    sample = bytes(symbols[100_000:100_060].tolist())
    assert sample not in bytes(small_decoder.python_sources().tolist())


def test_long_training_has_the_steps_of_the_paper_and_tunes_over_20_outer_steps() -> None:
    for name in ("outer_long", "outer_long_further"):
        study = OUTER[name]
        assert {steps for _, steps, _ in study.cells} == {88_000}
        assert round(study.tuning * 88_000) == 20 * outer_steps.PERIOD
        assert {(n, seed) for n, _, seed in study.cells} >= {(n, seed) for n in (2, 4, 8) for seed in (1, 2, 3)}


def test_every_entry_is_a_plan_of_the_lab_and_all_have_other_names() -> None:
    seen = []
    for study in OUTER.values():
        for workers in {n for n, *_ in study.cells}:
            for name, method in study.methods(workers).items():
                assert LabPlan.of(method).resolved(workers)
                seen.append((name, workers, study.cells[0][1]))
    assert len(set(seen)) == len(seen)
