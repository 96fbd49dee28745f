"""The simulation of second moments: one rank is AdamW, and the texts have the figures of the rows."""

from __future__ import annotations

import pandas as pd
import pytest

from benchmarks.record import RESULTS, ROOT
from benchmarks.second_moments import B1, simulate
from gossip_modules.optim.gossip_adamw import noise_share


@pytest.fixture(scope="module")
def rows() -> pd.DataFrame:
    return pd.read_csv(RESULTS / "second_moments.csv").set_index(["law", "ranks", "gradient", "rms"])


@pytest.mark.parametrize("kind", ["constant", "moving"])
def test_every_law_is_adamw_for_one_rank(kind: str) -> None:
    for row in simulate(1, kind, 0.1, elements=20, seed=3):
        assert (row["second_moment"], row["step"]) == (1.0, 1.0), row


def test_the_second_moment_of_a_constant_gradient_has_the_shares_of_noise(rows: pd.DataFrame) -> None:
    k = noise_share(400, B1, 0.95)
    for ranks in (2, 8, 19, 32, 64):
        all_reduce = 0.1**2 + 1 / ranks
        built, slower = (
            rows.loc[(law, ranks, "constant", 0.1), "second_moment"]
            for law in ("GossipAdamW", "slower average, b4 = 0.95")
        )
        # The means of 50,000 elements in steps of an average over 20 have a relative deviation below 0.002.
        assert built == pytest.approx((0.1**2 + max(1 / ranks, k)) / all_reduce, rel=0.01)
        assert slower == pytest.approx(1, rel=0.01)


def test_texts_have_the_figures_of_the_rows(rows: pd.DataFrame) -> None:
    files = ("decisions/vectors_and_rounds.md", "benchmarks/language.md")
    decisions, page = (" ".join((ROOT / "docs" / file).read_text(encoding="utf-8").split()) for file in files)
    built, *slower = ("GossipAdamW", "slower average, b4 = 0.95", "slower average, b4 = 0.99")
    steps = rows["step"].xs((64, "constant", 0.1), level=("ranks", "gradient", "rms"))
    late = rows.xs(("moving", 0.3), level=("gradient", "rms"))
    old, new = late.loc[(built, 64)], late.loc[(slower[0], 64)]
    assert f"become {steps[slower].max():.2f} of its steps in place of {steps[built]:.2f}" in decisions
    assert f"takes the steps from {steps[built]:.2f} to {steps[slower].max():.2f} of those of all-reduce" in page
    second = [f"{late.loc[(law, 8), 'second_moment']:.2f}" for law in (built, slower[0])]
    assert f"falls from {second[0]} to {second[1]}, with 64 ranks" in decisions
    assert f"from {old['second_moment']:.2f} to {new['second_moment']:.2f}; the steps grow" in decisions
    assert f"the steps grow from {old['step']:.2f} to {new['step']:.2f}" in decisions
    assert f"{new['second_moment']:.2f} with a gradient of 0.3, where steps are {new['step']:.2f} in place of" in page
    assert f"in place of {old['step']:.2f}" in page
    for law in slower:
        assert rows.loc[(law, 64, "constant", 0.1), "at_bound"] == pytest.approx(0.5, abs=0.03)  # "half"
