"""The studies of the number of outer steps: fine-tuning from one trained model, adapters, entries."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
import torch
from torch import nn

from benchmarks.claims.outer import short_ends
from benchmarks.pages import outer_studies as page
from benchmarks.pages.headline import IN_PART, NO, YES
from benchmarks.studies import outer_steps, small_decoder
from benchmarks.studies.outer_steps import OUTER, Adapted, FineTuning
from benchmarks.studies.small_decoder import NUM_SYMBOLS
from benchmarks.studies.study import Trainings
from gossip_modules.lab import LabPlan


@pytest.fixture
def text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A short text, and a short training on it."""
    symbols = torch.arange(20_000).remainder(NUM_SYMBOLS).to(torch.uint8)
    monkeypatch.setattr(small_decoder, "python_sources", lambda: symbols)
    monkeypatch.setattr(outer_steps, "language_reference", lambda: symbols.flip(0))
    monkeypatch.setattr(outer_steps, "TRAINED_STEPS", 2)
    monkeypatch.setattr(outer_steps, "TRAINED", tmp_path)
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
    before = outer_steps.trained_decoder(2).state_dict()
    outer_steps.trained_decoder.cache_clear()  # as in another process
    after = FineTuning(seed=2).model().state_dict()
    assert all(torch.equal(own, after[key]) for key, own in before.items())


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


# The pages.


def short_rows(losses: dict[tuple[str, float, int], float]) -> pd.DataFrame:
    """Rows of two workers by method, rate and seed, with a step before the first one."""
    shared = {"workers": 2, "steps": 256, "is_tuning": False, "megabytes": 2.0}
    return pd.DataFrame(
        {**shared, "method": method, "rate": rate, "seed": seed, "step": step, "validation": loss, "test": 2 * loss}
        for (method, rate, seed), end in losses.items()
        for step, loss in ((0, 5.0), (256, end))
    )


def test_methods_are_compared_at_their_own_best_rates_and_at_the_rate_of_all_reduce() -> None:
    losses = {
        **{
            ("all-reduce", rate, seed): 2.0 * seed * worse
            for seed in (1, 2)
            for rate, worse in ((0.1, 1.0), (0.2, 1.1))
        },
        **{("DiLoCo", rate, seed): 2.0 * seed * worse for seed in (1, 2) for rate, worse in ((0.1, 1.2), (0.2, 1.05))},
        **{(f"{name}, LoRA", 0.3, 1): loss for name, loss in (("all-reduce", 4.0), ("DiLoCo", 3.0))},
    }
    found = short_ends(short_rows(losses)).set_index(["trained", "method"]).sort_index(ascending=False)
    assert found["rate"].to_dict() == {
        ("all parameters", "all-reduce"): 0.1,
        ("all parameters", "DiLoCo"): 0.2,
        ("LoRA", "all-reduce"): 0.3,
        ("LoRA", "DiLoCo"): 0.3,
    }
    assert found.loc[("all parameters", "DiLoCo"), ["own", "equal", "loss"]].tolist() == pytest.approx([5.0, 20.0, 6.3])
    assert found.loc[("LoRA", "DiLoCo"), ["own", "equal"]].tolist() == pytest.approx([-25.0, -25.0])
    assert found["seeds"].tolist() == [2, 2, 1, 1]


@pytest.mark.parametrize(
    ("diloco", "averages", "verdict"),
    [(9.9, 0.6, YES), (8.1, 0.6, YES), (5.0, 1.2, IN_PART), (9.9, 1.3, IN_PART), (0.5, 0.6, NO)],
)
def test_the_short_runs_of_yeto(diloco: float, averages: float, verdict: str, monkeypatch: pytest.MonkeyPatch) -> None:
    losses = {("all-reduce", 0.1, 1): 2.0, ("DiLoCo", 0.1, 1): 2.0 + diloco / 50}
    losses["plain averages", 0.1, 1] = 2.0 + averages / 50
    monkeypatch.setattr(page, "rows_of", lambda csv: short_rows(losses))
    text, found = page.short_headline()
    assert found == verdict
    assert text == f"all parameters: DiLoCo {diloco:+.1f} %, averages {averages:+.1f} %; seeds: 1"


@pytest.mark.parametrize(
    ("diloco", "alone", "verdict"), [(2.0, 3.0, YES), (2.5, 3.0, IN_PART), (3.5, 3.0, NO), (2.5, None, NO)]
)
def test_the_claim_of_diloco(diloco: float, alone: float | None, verdict: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ends = {("all-reduce", 4): 2.0, ("DiLoCo", 4): diloco, ("local SGD", 4): 2.1, ("all-reduce", 8): 1.0}
    ends.update({} if alone is None else {("one worker alone", 1): alone})
    shared = {"rate": 0.1, "steps": 88_000, "step": 88_000, "is_tuning": False, "seed": 1}
    rows = pd.DataFrame(
        {**shared, "method": method, "workers": n, "test": loss, "megabytes": 100.0 if method == "all-reduce" else 0.2}
        for (method, n), loss in ends.items()
    )
    monkeypatch.setattr(page, "rows_of", lambda csv: rows)
    text, found = page.long_headline()
    assert found == verdict
    assert text.startswith(f"{diloco - 2:+.3f} nats per byte with 500 times fewer bytes, H = 500, 4 workers, seeds: 1")
    assert page.long_said(rows).startswith("**With 4 workers and 176 outer steps DiLoCo ends")
