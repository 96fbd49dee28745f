"""The study of translation: batches of one length, a model that masks what it may not see, and BLEU."""

from __future__ import annotations

import gzip
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from benchmarks.studies import translation
from benchmarks.studies.study import Trainings
from benchmarks.studies.translation import LONGEST, TRANSLATION, VOCABULARY, SmallTranslator, Translation
from train.tasks.byte_tokenizer import END, PAD, START
from train.tasks.translation.number_words import number_words


@pytest.fixture
def task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Translation:
    """Number words in place of Multi30k."""
    folder = tmp_path / "multi30k"
    folder.mkdir()
    corpus = number_words("de", "en", num_train=200)
    for prefix, text in zip(("train", "val", "test_2016_flickr"), corpus, strict=True):
        pairs = list(text)[: 200 if prefix == "train" else 20]
        for side in ("source", "target"):
            lines = "".join(f"{getattr(pair, side)}\n" for pair in pairs)
            with gzip.open(
                folder / f"{prefix}.{'en' if side == 'source' else 'de'}.gz", "wt", encoding="utf-8"
            ) as file:
                file.write(lines)
    monkeypatch.setenv("GOSSIP_DATA", str(tmp_path))
    return Translation()


def test_padding_of_the_source_and_later_tokens_of_the_target_change_no_score() -> None:
    torch.manual_seed(0)
    model = SmallTranslator()
    assert sum(p.numel() for p in model.parameters()) == 295_680
    source, target = torch.randint(END + 1, VOCABULARY, (2, 3, 9)).unbind()
    before = model(source, target)
    changed = target.clone()
    changed[:, 5] += 1
    after = model(F.pad(source, (0, 4), value=PAD), changed % VOCABULARY)
    torch.testing.assert_close(before[:, :5], after[:, :5])
    assert not torch.allclose(before[:, 5:], after[:, 5:])


def test_translations_are_the_likeliest_tokens_up_to_the_end() -> None:
    torch.manual_seed(1)
    model = SmallTranslator()
    source = torch.randint(END + 1, VOCABULARY, (4, 7))
    found = model.translate(source)
    assert found.shape[1] <= LONGEST
    with torch.no_grad():
        likeliest = model(source, F.pad(found, (1, 0), value=START))[:, :-1].argmax(-1)
    is_over = (found == END).cumsum(1) - (found == END).long() > 0
    assert torch.equal(found, likeliest.masked_fill(is_over, PAD))


def test_workers_of_a_step_draw_pairs_of_one_length_and_not_the_same_ones(task: Translation) -> None:
    batches = [task.batch(worker, 3, torch.Generator().manual_seed(worker)) for worker in range(4)]
    assert len({side.shape for batch in batches for side in batch}) == 1
    assert not torch.equal(batches[0][0], batches[1][0])
    assert len({task.batch(0, step, torch.Generator())[0].shape for step in range(40)}) > 1
    for source, target in batches:
        assert ((source == END).sum(1) == 1).all()
        assert ((target == END).sum(1) == 1).all()


def test_a_model_that_knows_the_references_has_100_bleu(task: Translation, monkeypatch: pytest.MonkeyPatch) -> None:
    model = task.model()
    rows = task.test.targets.padded(torch.arange(len(task.test)).numpy())
    monkeypatch.setattr(model, "translate", lambda source: rows)
    assert task.score(model)[1] == pytest.approx(0.0, abs=1e-4)
    monkeypatch.undo()
    assert task.score(task.model())[1] > 90.0


def test_the_study_trains_every_method(task: Translation, tmp_path: Path) -> None:
    study = replace(TRANSLATION["translation"], task=lambda: task, cells=((2, 2, 1),), rates=(0.004,), points=1)
    assert Trainings(study, tmp_path / "found.csv", minutes=10.0).run()
    text = (tmp_path / "found.csv").read_text()
    assert all(f",{name}," in text for name in translation.METHODS)


def test_without_the_data_an_error_names_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOSSIP_DATA", str(tmp_path))
    with pytest.raises(ValueError, match="multi30k, expected it; set GOSSIP_DATA"):
        Translation()
