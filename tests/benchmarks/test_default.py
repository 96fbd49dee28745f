"""The first advice of README, the pages and the planner, and the figures behind it."""

from __future__ import annotations

import ast
import re

import pandas as pd
import pytest

from benchmarks.claims.registry import plain
from benchmarks.pages.gap import best
from benchmarks.record import DTYPES, RESULTS, ROOT
from gossip_modules.lab import Compute, Digits, LabPlan, Network, Setting, planner
from gossip_modules.lab.planner import advise, simulate
from gossip_modules.methods import METHODS
from tests.harness.recorded import Recorded

FIRST = re.compile(r"`(GossipDataParallel\(model[^`]*\))`")
ADAM = "SGP, GossipAdamW"


@pytest.fixture(scope="module")
def language() -> pd.DataFrame:
    rows = pd.read_csv(RESULTS / "gap.csv")
    return best(rows[(rows["task"] == "language") & (rows["steps"] == 320)]).set_index("change")


def text(path: str) -> str:
    return plain((ROOT / path).read_text(encoding="utf-8"))


def test_all_pages_begin_with_sgp_and_gossip_adamw() -> None:
    table = text("README.md").partition("<!-- methods: begin -->")[2]
    assert table.splitlines()[3].startswith("| **start here** | SGP")
    for first in (table, text("docs/choosing.md")):
        assert FIRST.search(first)[1] == 'GossipDataParallel(model, overlap="auto")'  # type: ignore[index]
    for page in ("README.md", "docs/choosing.md", "docs/guides/default.md"):
        assert 'overlap="auto"' in text(page)
        assert "GossipAdamW" in text(page)


def test_the_first_advice_for_adam_reaches_the_loss_of_all_reduce_within_its_seeds(language: pd.DataFrame) -> None:
    reduced = language.loc["all-reduce"]
    assert reduced["seeds"] == language.loc[ADAM, "seeds"] == 3
    assert language.loc[ADAM, "mean"] <= reduced["highest"]
    assert language.loc["SGP", "lowest"] > reduced["highest"]  # by AdamW it does not


@pytest.mark.timeout(300)
def test_of_all_methods_the_planner_advises_as_the_rows_of_the_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Methods that need more than 112 steps on the small problem are slower than those that are advised."""
    first, second = text("README.md").partition("<!-- methods: begin -->")[2].splitlines()[3:5]
    third = text("docs/choosing.md").partition("AllReduce is a small part")[2].splitlines()[0]
    assert 'overlap="auto"' in first
    assert "LocalSGD(sync_every=10)" in second
    assert "`AllReduceDataParallel(model)`" in third
    problem = Digits()
    for rate, name in {"100 Mbit/s": "localsgd", "1 Gbit/s": "osgp", "10 Gbit/s": "ar"}.items():
        setting = Setting(8, 2_800_000, Compute(0.04), Network(rate))
        with monkeypatch.context() as patch:
            patch.setattr(planner, "LabTraining", Recorded)
            found = [simulate(LabPlan.of(method), setting, problem, max_steps=112) for method in METHODS]
        advice = advise(found, setting)
        assert advice.best is not None
        assert advice.best.plan.method.name == name, rate
        assert advice.best == simulate(LabPlan.of(name), setting, problem, max_steps=112)
        assert not advice.best.plan.method.rates
        steps = {p.plan.method.name: p for p in found}
        assert steps["osgp"].step_seconds < steps["sgp"].step_seconds < steps["ar"].step_seconds
        faster = {p.plan.method.name for p in found if p.has_reached and p.seconds < advice.best.seconds}
        assert "diloco" in faster
        assert any("is faster here" in sentence and "records.md" in sentence for sentence in advice.sentences)
    ahead = steps["osgp"].seconds / steps["ar"].seconds - 1  # at 10 Gbit/s
    said = " ".join(text("docs/guides/default.md").split())
    counts = f"Overlap SGP takes {steps['osgp'].num_steps:.0f} steps and AllReduce {steps['ar'].num_steps:.0f}"
    assert counts in said
    assert f"they advise AllReduce, {100 * ahead:.0f} % before Overlap SGP" in said


def test_local_sgd_is_first_where_links_are_slow() -> None:
    """On `slow`, links of 0.1 Gbit/s: before DiLoCo and SGP, and by more than the seeds differ."""
    log = pd.read_csv(RESULTS / "records.csv", dtype=DTYPES)
    slow = log[log["track"] == "slow"].drop_duplicates("submission", keep="last").set_index("submission")
    local = slow.loc["local_sgd"]
    others = slow.drop("local_sgd")["seconds_low"].dropna()
    assert {"diloco", "sgp", "overlap_sgp", "all_reduce"} <= set(others.index)
    assert local["seconds_high"] < others.min()
    diloco = slow.loc["diloco"]
    assert ast.literal_eval(local["setting"])["sync_every"] == ast.literal_eval(diloco["setting"])["sync_every"] == 30
    said = f"Local SGD reached the target after {local['seconds']:.0f} s and DiLoCo after {diloco['seconds']:.0f} s"
    assert said in text("docs/guides/default.md")


def test_overlap_sgp_is_first_where_links_are_faster(language: pd.DataFrame) -> None:
    """Beside DDP and SGP by time, and beside local SGD by loss at equal samples."""
    cells = pd.read_csv(RESULTS / "default_cells.csv", dtype=DTYPES)
    for rate in (1.0, 10.0):
        steps = cells[cells["rate_gbit"] == rate].groupby("method")["fleet_step_ms"].median()
        assert steps[["osgp", "sgp", "decent-exp", "ddp", "ddp-fp16"]].idxmin() == "osgp"
    overlap, local = (language.loc[f"{name}, GossipAdamW"] for name in ("Overlap SGP", "local SGD, 4"))
    assert overlap["highest"] < local["lowest"]
    share, gap = steps["osgp"] / steps["ddp"], overlap["mean"] - language.loc["all-reduce", "mean"]
    said = f"At 10 Gbit/s Overlap SGP takes {share:.2f} of the time of DDP and ends {gap:.2f} nats above it"
    assert said in " ".join(text("docs/guides/default.md").split())
