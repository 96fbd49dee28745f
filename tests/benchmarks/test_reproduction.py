"""The page Reproduction: its counts are those of its rows, and thresholds are compared before rounding."""

from __future__ import annotations

import re

import pandas as pd
import pytest

from benchmarks import pages
from benchmarks.pages import reproduction
from benchmarks.pages.headline import IN_PART, NO, OTHER_SCALE, YES, by_effect, by_limit, by_ratio
from benchmarks.record import RESULTS

PAGE = (pages.DOCS / "reproduction.md").read_text(encoding="utf-8")
ROWS = [line.split(" | ") for line in PAGE.splitlines() if re.search(r"\.csv\]\(\w+\.md\) \|$", line)]


def test_the_first_sentence_counts_the_rows() -> None:
    verdicts = [row[4] for row in ROWS]
    counts = [len(verdicts), *(verdicts.count(each) for each in (YES, IN_PART, NO, OTHER_SCALE))]
    sentence = (
        r"\*\*Of (\d+) published results (\d+) were reproduced, (\d+) in part, (\d+) were not, "
        r"and (\d+) cannot be compared\.\*\*"
    )
    found = re.search(sentence, PAGE)
    assert found
    assert [int(number) for number in found.groups()] == counts
    assert counts[0] == sum(counts[1:]) == len(reproduction.headlines())


def test_a_row_leads_to_the_page_of_its_file() -> None:
    for each in reproduction.headlines():
        assert each.csvs[0] in pages.PAGES[each.page].files(), each
        assert all((RESULTS / csv).exists() for csv in each.csvs)
        assert f'??? note "benchmarks/results/{each.csvs[0]}, ' in PAGE


def test_effects_and_limits_are_compared_before_rounding() -> None:
    assert [by_effect(ours, 1.5) for ours in (1.2, 1.199, 0.001, 0.0, -1.0)] == [YES, IN_PART, IN_PART, NO, NO]
    assert [by_ratio(ours, 4.0) for ours in (4.0, 2.0, 0.99)] == [YES, IN_PART, NO]
    assert [by_limit(gap, 0.3, 1.2) for gap in (0.3, 0.3001, 1.2, 1.2001)] == [YES, IN_PART, IN_PART, NO]


def test_accuracies_are_means_at_the_best_rate_of_the_first_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    columns = ["method", "workers", "alpha", "seed", "learning_rate", "accuracy_percent"]
    rows = [
        *[("ar", 5, 0.0, seed, 0.1, 55.8) for seed in (1, 2, 3)],
        *[("base", 5, 0.0, seed, 0.1, value) for seed, value in ((1, 55.4), (2, 55.5), (3, 55.6))],
        ("base", 5, 0.0, 1, 0.3, 55.3),
        ("base", 5, 0.0, 2, 0.3, 99.0),
        ("base", 5, 1.0, 1, 0.1, 10.0),
    ]
    monkeypatch.setattr(reproduction, "rows_of", lambda csv: pd.DataFrame(rows, columns=columns))
    means = reproduction.accuracies("any.csv", alpha=0.0)
    assert means["base", 5] == 55.5
    assert by_limit(means["ar", 5] - means["base", 5], 0.3 + 1e-9, 1.2) == YES


def test_pairs_count_if_they_differ_by_a_point() -> None:
    published = {"a": 90.0, "b": 88.0, "c": 87.5}
    assert reproduction.pairs_in_order({"a": 60.0, "b": 58.9, "c": 59.5}, published) == (2, 1, 2)
    assert reproduction.pairs_in_order({"a": 60.0, "b": 61.0, "c": 59.5}, published) == (1, 0, 2)


def test_rows_have_the_figures_of_the_files() -> None:
    text = "\n".join(" | ".join(row) for row in ROWS)
    times = pd.read_csv(RESULTS / "loss_cells.csv").query("rate_gbit == 1.0 and straggle_chance == 0")
    medians = times.groupby("method")["fleet_step_ms"].median()
    assert f"and {medians['ddp'] / medians['sgp']:.2f} at 1 Gbit/s | 8 emulated hosts" in text
    assert "| 3.7 points below with 25 workers" in text  # 62.6 and 59.0, see uneven_workers.md
