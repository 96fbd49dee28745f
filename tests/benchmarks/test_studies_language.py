"""The studies of outer methods on a language model: the text, Muon for all workers at once, and the entries."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from benchmarks.studies import language, small_decoder
from benchmarks.studies.small_decoder import LENGTH, NUM_SYMBOLS, WIDTH, SmallDecoder, StackedMuon, Text, orthogonalized
from gossip_modules import MuonAdamW
from gossip_modules.lab import LabPlan


@pytest.fixture
def text(monkeypatch: pytest.MonkeyPatch) -> Text:
    symbols = torch.arange(20_000).remainder(NUM_SYMBOLS).to(torch.uint8)
    monkeypatch.setattr(small_decoder, "python_sources", lambda: symbols)
    return Text(3)


def test_a_batch_is_a_function_of_its_generator_and_the_targets_are_the_next_symbols(text: Text) -> None:
    inputs, targets = text.batch(0, 0, torch.Generator().manual_seed(5))
    again, _ = text.batch(1, 7, torch.Generator().manual_seed(5))
    assert inputs.shape == (3, LENGTH)
    assert torch.equal(inputs, again)
    assert torch.equal(targets, (inputs + 1) % NUM_SYMBOLS)


def test_splits_are_parts_of_the_text_that_no_worker_reads(text: Text) -> None:
    assert len(text.train) == 18_000
    assert [len(split[0]) for split in text.splits] == [256, 256]
    assert int(text.splits[0][0][0, 0]) == 18_000 % NUM_SYMBOLS
    assert int(text.splits[1][0][0, 0]) == 19_000 % NUM_SYMBOLS


def test_a_decoder_at_its_start_knows_nothing_and_sees_no_later_symbol(text: Text) -> None:
    torch.manual_seed(0)
    model = SmallDecoder()
    assert sum(p.numel() for p in model.parameters()) == 20_480
    assert text.score(model)[0] == pytest.approx(4.85, abs=0.3)  # log(128)
    symbols = torch.randint(NUM_SYMBOLS, (1, LENGTH), generator=torch.Generator().manual_seed(0))
    changed = symbols.clone()
    changed[0, 20] += 1
    before, after = model(symbols), model(changed % NUM_SYMBOLS)
    assert torch.equal(before[0, :20], after[0, :20])
    assert not torch.equal(before[0, 20:], after[0, 20:])


def test_muon_of_all_workers_steps_each_as_muon_of_one(text: Text) -> None:
    torch.manual_seed(1)
    models = [SmallDecoder(), SmallDecoder()]
    names = [name for name, _ in models[0].named_parameters()]
    rows = [nn.Parameter(torch.stack([dict(m.named_parameters())[name].detach() for m in models])) for name in names]
    starts = [row.detach().clone() for row in rows]
    stacked, singles = StackedMuon(rows, 0.01), [MuonAdamW(m, lr=0.01, adamw=()) for m in models]
    for step in range(3):
        for worker, (model, single) in enumerate(zip(models, singles, strict=True)):
            single.zero_grad()
            text.loss(model, text.batch(worker, step, torch.Generator().manual_seed(step + 9 * worker))).backward()
            single.step()
        for name, row in zip(names, rows, strict=True):
            gradients = [dict(m.named_parameters())[name].grad for m in models]
            row.grad = torch.stack([x for x in gradients if x is not None])
        stacked.step()
    for name, row, start in zip(names, rows, starts, strict=True):
        expected = torch.stack([dict(m.named_parameters())[name].detach() for m in models])
        change = (expected - start).norm()
        assert float((row.detach() - expected).norm() / change) < 0.05, name  # torch iterates in bfloat16


def test_orthogonalized_matrices_have_singular_values_near_one() -> None:
    matrices = torch.randn(3, 96, WIDTH, generator=torch.Generator().manual_seed(2))
    for each in (matrices, matrices.mT):
        values = torch.linalg.svdvals(orthogonalized(each))
        assert float(values.min()) > 0.6
        assert float(values.max()) < 1.3


def test_every_entry_is_a_plan_of_the_lab_and_all_have_other_names() -> None:
    seen = []
    for study in language.LANGUAGE.values():
        for workers in {n for n, *_ in study.cells}:
            for name, method in study.methods(workers).items():
                assert LabPlan.of(method).resolved(workers)
                seen.append((name, workers))
    assert len(set(seen)) == len(seen)
    outer = [study for name, study in language.LANGUAGE.items() if name.startswith("outer")]
    assert all(steps >= 3000 for study in outer for _, steps, _ in study.cells)
