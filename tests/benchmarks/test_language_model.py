"""The figures of a language model's default run, from what a run leaves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks import language_model
from train.compare import Comparison
from train.job.outputs import TOKENIZER
from train.tasks.byte_tokenizer import SMALLEST_VOCABULARY, ByteTokenizer


def test_a_row_has_what_the_run_says_and_what_frequencies_give(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.txt").write_text("abababab")
    (tmp_path / "valid.txt").write_text("aaaa")
    rank = {"num_steps": 7, "time_seconds": 2.0, "bytes_sent": 3e6}
    config = {"model": "own", "data_dir": str(tmp_path), "files": ["*.txt"], "validation_share": 0.5}

    taken: list[str] = []

    def train(recipe: str, comparison: Comparison) -> dict[str, Any]:
        taken.extend(comparison.options)
        (comparison.out_dir / recipe).mkdir()
        tokenizer = ByteTokenizer.learn([], vocabulary_size=SMALLEST_VOCABULARY)
        tokenizer.save(comparison.out_dir / recipe / TOKENIZER)
        return {
            "config": {**config, "num_validation_bytes": 0},
            "world_size": 2,
            "consensus_distance": 0.5,
            "averaged_test": {"nll": 2.0, "perplexity": 7.389, "bits_per_byte": 3.0},
            "ranks": [rank, {**rank, "bytes_sent": 5e6}],
        }

    monkeypatch.setattr(language_model, "train", train)
    row = language_model.measure("sgp --max-staleness 2", Comparison(("--seed", "3"), out_dir=tmp_path))
    assert taken == ["--seed", "3", "--max-staleness", "2"]
    assert (row["recipe"], row["options"]) == ("sgp", "--max-staleness 2")
    assert (row["ranks"], row["steps"], row["sent_megabytes"]) == (2, 7, 4.0)
    assert (row["bits_per_byte"], row["training_seconds"]) == (3.0, 2.0)
    # "a" is 4 + 1 of 8 letters, 2 ends and one more of each of 259 tokens: log2(269 / 5); an end is 3 of them.
    assert row["frequencies_bits_per_byte"] == pytest.approx((4 * 5.7496 + 6.4865) / 4, abs=1e-3)
