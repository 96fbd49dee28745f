"""The page Reproduction: each published result once, by rules, with rows, commands and pictures."""

from __future__ import annotations

import re
from dataclasses import replace

import pandas as pd
import pytest

from benchmarks import pages
from benchmarks.pages import founding, published
from benchmarks.pages.headline import (
    IN_PART,
    NO,
    OTHER_SCALE,
    YES,
    Headline,
    by_effect,
    by_level,
    by_limit,
    by_order,
    by_ratio,
    of_all_scales,
    order_found,
    worst,
)
from benchmarks.record import RESULTS, ROOT, rows_of
from visualization.papers import PICTURES

PAGE = (pages.DOCS / "reproduction.md").read_text(encoding="utf-8")
TABLES = PAGE[: PAGE.index("## What was not reproduced")]
ROWS = [line.strip("| ").split(" | ") for line in TABLES.splitlines() if "; [rows](" in line]
VERDICTS = (YES, IN_PART, NO, OTHER_SCALE)


def test_the_first_sentence_counts_the_rows() -> None:
    verdicts = [row[-1] for row in ROWS]
    counted = r"(\d+) were reproduced, (\d+) in part, (\d+) were not, and (\d+) (?:is|are) not comparable"
    found = re.search(rf"\*\*Of (\d+) published results {counted}", PAGE)
    assert found
    counts = [int(number) for number in found.groups()]
    assert counts == [len(verdicts), *(verdicts.count(each) for each in VERDICTS)]
    assert counts[0] == sum(counts[1:]) == len(published.results())


def test_each_published_result_stands_once() -> None:
    stated = [row[0] for row in ROWS]
    assert len(stated) == len(set(stated))
    headings = re.findall(r"^## (.*)$", TABLES, re.MULTILINE)
    assert len(headings) == len(set(headings))
    assert sum(len(own) for own in published.results().values()) == TABLES.count("; [rows](")


def test_each_paper_has_one_section() -> None:
    papers = [paper for section in published.SECTIONS for paper in section.papers]
    assert len(papers) == len(set(papers))
    assert {each.paper for each in published.headlines()} <= set(papers)


def test_a_row_leads_to_the_page_of_its_file() -> None:
    for each in published.headlines():
        assert each.csvs[0] in pages.EVERY[each.page].files(), each
        assert all((RESULTS / csv).exists() for csv in each.csvs)
        assert f'??? note "benchmarks/results/{each.csvs[0]}, ' in PAGE


def test_verdicts_are_those_of_the_rules() -> None:
    for row in published.measured():
        assert row.verdict in VERDICTS
        for each, text, verdict in row.ours:
            assert text, each
            assert verdict in VERDICTS, each
            assert (verdict == OTHER_SCALE) != each.is_comparable or each.measure()[1] == OTHER_SCALE, each


def test_pictures_of_papers_are_there() -> None:
    shown = re.findall(r"!\[(.*)\]\(\.\./assets/(\w+)\.svg\)\{ \.diagram \}", PAGE)
    assert shown
    assert len({name for _, name in shown}) == len(shown)
    for title, name in shown:
        assert PICTURES[name].title == title
        assert (ROOT / "docs" / "assets" / f"{name}.svg").is_file()
    drawn = {name for section in published.SECTIONS for name in section.pictures}
    assert drawn == set(PICTURES) - {"goodput", "agreement_of_graphs"}  # pages of their own show these
    assert {name for _, name in shown} == {name for name in drawn if (RESULTS / PICTURES[name].csv).exists()}


# The rules.


def test_effects_and_limits_are_compared_before_rounding() -> None:
    assert [by_effect(ours, 1.5) for ours in (1.2, 1.199, 0.001, 0.0, -1.0)] == [YES, IN_PART, IN_PART, NO, NO]
    assert [by_ratio(ours, 4.0) for ours in (4.0, 2.0, 0.99)] == [YES, IN_PART, NO]
    assert [by_limit(gap, 0.3, 1.2) for gap in (0.3, 0.3001, 1.2, 1.2001)] == [YES, IN_PART, IN_PART, NO]
    assert [by_level(gap) for gap in (-2.0, 0.5, 0.51, 1.0, 1.01)] == [YES, YES, IN_PART, IN_PART, NO]
    assert [worst(YES, each) for each in (YES, IN_PART, NO)] == [YES, IN_PART, NO]
    assert [order_found(count, 4) for count in (4, 3, 2)] == [YES, IN_PART, NO]


@pytest.mark.parametrize(
    ("extent", "is_comparable"),
    [
        ({}, True),
        ({"workers": (8, 64)}, True),
        ({"workers": (6, 64)}, False),
        ({"rounds": (6, 176)}, False),
        ({"rounds": (18, 176)}, True),
        ({"rounds": (100, 14_000)}, True),
        ({"rounds": (100, 14_000), "workers": (1, 32)}, False),
    ],
)
def test_what_a_tenth_of_the_published_extent_lacks_is_not_comparable(
    extent: dict[str, tuple[float, float]], is_comparable: bool
) -> None:
    own = Headline("a", "b", "c", (), "d", lambda: ("text", YES), extent)
    assert own.is_comparable == is_comparable
    assert own.found() == ("text", YES if is_comparable else OTHER_SCALE)
    assert replace(own, extent={}).found() == ("text", YES)


def test_measurements_that_do_not_agree_reproduce_in_part() -> None:
    for verdicts, found in {
        (YES, YES): YES,
        (YES, IN_PART): IN_PART,
        (YES, NO): IN_PART,
        (NO, NO): NO,
        (NO, OTHER_SCALE): NO,
        (OTHER_SCALE, OTHER_SCALE): OTHER_SCALE,
    }.items():
        assert of_all_scales(verdicts) == found


def test_pairs_count_if_they_differ_by_a_point() -> None:
    theirs = {"a": 90.0, "b": 88.0, "c": 87.5}
    assert by_order({"a": 60.0, "b": 58.9, "c": 59.5}, theirs) == (2, 1, 2)
    assert by_order({"a": 60.0, "b": 61.0, "c": 59.5}, theirs) == (1, 0, 2)


def test_gossip_is_to_be_ahead_with_few_workers_and_all_reduce_with_many() -> None:
    def verdict(**times: dict[int, float]) -> str:
        return founding.who_is_ahead(pd.DataFrame(times).rename(columns={"reduce": "all-reduce"}))

    nan = float("nan")
    assert verdict(dpwa={8: 1.0, 32: 2.0, 100: 9.0}, reduce={8: 2.0, 32: 3.0, 100: 4.0}) == YES
    assert verdict(dpwa={8: 1.0, 32: 2.0, 100: nan}, reduce={8: 2.0, 32: 3.0, 100: 4.0}) == YES
    assert verdict(dpwa={8: 1.0, 32: 5.0, 100: 9.0}, reduce={8: 2.0, 32: 3.0, 100: 4.0}) == IN_PART
    assert verdict(dpwa={64: 9.0}, reduce={64: 4.0}) == IN_PART
    assert verdict(dpwa={8: 3.0, 100: 1.0}, reduce={8: 2.0, 100: 4.0}) == NO


def test_rows_have_the_figures_of_the_files() -> None:
    times = pd.read_csv(RESULTS / "loss_cells.csv").query("rate_gbit == 1.0 and straggle_chance == 0")
    medians = times.groupby("method")["fleet_step_ms"].median()
    assert f"and {medians['ddp'] / medians['sgp']:.2f} at 1 Gbit/s (8 emulated hosts" in PAGE
    late = rows_of("worker_numbers.csv").query("not is_tuning and step == steps and workers == 32")
    test = late.groupby("method")["test"].mean()
    assert f"{test['SGP'] - test['all-reduce']:.1f} with 32 workers (CIFAR-10" in PAGE
