"""The first advice of README, the pages and the planner, and the figures behind it."""

from __future__ import annotations

import re

import pandas as pd
import pytest

from benchmarks.pages.gap import best
from benchmarks.record import RESULTS, ROOT
from gossip_modules.lab import Compute, Digits, LabPlan, Network, Setting
from gossip_modules.lab.planner import Advice, advise, simulate

FIRST = re.compile(r"`(GossipDataParallel\(model[^`]*\))`")
ADAM = "SGP, GossipAdamW"


@pytest.fixture(scope="module")
def language() -> pd.DataFrame:
    rows = pd.read_csv(RESULTS / "gap.csv")
    return best(rows[(rows["task"] == "language") & (rows["steps"] == 320)]).set_index("change")


def text(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def test_all_pages_begin_with_sgp_and_gossip_adamw() -> None:
    table = text("README.md").partition("<!-- methods: begin -->")[2]
    assert table.splitlines()[3].startswith("| **start here** | SGP")
    assert FIRST.search(table)[1] == "GossipDataParallel(model)"  # type: ignore[index]
    assert FIRST.search(text("docs/choosing.md"))[1] == 'GossipDataParallel(model, overlap="auto")'  # type: ignore[index]
    for page in ("README.md", "docs/choosing.md", "docs/guides/default.md"):
        assert 'overlap="auto"' in text(page)
        assert "GossipAdamW" in text(page)


def test_the_first_advice_for_adam_reaches_the_loss_of_all_reduce_within_its_seeds(language: pd.DataFrame) -> None:
    reduced = language.loc["all-reduce"]
    assert reduced["seeds"] == language.loc[ADAM, "seeds"] == 3
    assert language.loc[ADAM, "mean"] <= reduced["highest"]
    assert language.loc["SGP", "lowest"] > reduced["highest"]  # by AdamW it does not


def test_the_figures_of_the_page_are_measured(language: pd.DataFrame) -> None:
    changes = {
        "all-reduce": ("mean", "lowest", "highest"),
        **dict.fromkeys((ADAM, "SGP, 2 peers, GossipAdamW", "SGP"), ("mean",)),
        **dict.fromkeys((f"local SGD, {period}, GossipAdamW" for period in (4, 16)), ("mean",)),
    }
    figures = {f"{language.loc[change, name]:.3f}" for change, names in changes.items() for name in names}
    page = text("docs/guides/default.md").partition("## Why this")[2]
    late = language.loc["Overlap SGP, GossipAdamW", "mean"] - language.loc[ADAM, "mean"]
    assert figures | {f"{late:.3f}"} == set(re.findall(r"\b\d\.\d{3}\b", page))


def advice(rate: str) -> Advice:
    setting = Setting(8, 2_800_000, Compute(0.04), Network(rate))
    plans = [LabPlan.of(name) for name in ("ar", "sgp", "osgp", "localsgd")]
    return advise([simulate(plan, setting, Digits()) for plan in plans], setting)


@pytest.mark.parametrize(("rate", "name"), [("1 Gbit/s", "osgp"), ("100 Mbit/s", "localsgd")])
def test_the_planner_advises_as_the_first_rows_of_the_readme(rate: str, name: str) -> None:
    """The second row is for links on which one message per step is too much."""
    best = advice(rate).best
    assert best is not None
    assert best.plan.method.name == name
    first, second = text("README.md").partition("<!-- methods: begin -->")[2].splitlines()[3:5]
    assert 'overlap="auto"' in first
    assert "LocalSGD(" in second


def test_where_links_cost_nothing_the_planner_names_all_reduce() -> None:
    best = advice("100 Gbit/s").best
    assert best is not None
    assert best.plan.method.name == "ar"
