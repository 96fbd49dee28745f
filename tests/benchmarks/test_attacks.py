"""The study of workers that send wrong models: their messages, their own models, and the scores of the others."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from benchmarks.claims.attacks import attack_ends, by_rules, unharmed, worst_case
from benchmarks.pages.attack_study import PLANNED
from benchmarks.studies import attacks
from benchmarks.studies.attacks import ATTACK_STUDIES, ATTACKS, CASES, CLIPPED, D_PSGD, GRAPHS, NUM_WORKERS, TRIMMED
from benchmarks.studies.study import Trainings
from gossip_modules.lab import LabTask, Setting
from gossip_modules.lab.models import Models
from gossip_modules.mixing_manager import MetropolisHastingsMixing

STUDY = ATTACK_STUDIES["attacks"]


def test_z_is_the_one_of_the_formula() -> None:
    """Of 50 workers 24 attack: they need 2 of 26 honest ones, and 24 of 26 standard normal numbers are below 1.43."""
    assert attacks.alie_z(50, 24) == pytest.approx(1.4261, abs=1e-4)
    assert attacks.alie_z(8, 1) < 0 == attacks.alie_z(8, 2)


def test_attackers_send_the_model_of_their_attack() -> None:
    x, draw = torch.tensor([[1.0], [3.0], [7.0], [5.0]]), torch.Generator().manual_seed(0)
    sent = {name: attack(x, (2,), draw) for name, attack in ATTACKS.items()}
    assert sent["-5 x"].tolist() == [[-35.0]]
    assert sent["NaN"].isnan().all()
    noise = ATTACKS["noise"](torch.full((4, 10_000), 7.0), (2,), draw) - 7.0
    assert float(noise.mean()) == pytest.approx(0.0, abs=0.5)
    assert float(noise.std()) == pytest.approx(10.0, rel=0.05)
    std = math.sqrt(8 / 3)  # of 1, 3 and 5
    assert float(sent["ALIE, z = 1.5"]) == pytest.approx(3 - 1.5 * std)
    assert float(sent["ALIE"]) == pytest.approx(3 - attacks.alie_z(4, 1) * std)


@pytest.mark.parametrize("graph", GRAPHS)
def test_honest_workers_mix_the_lie_and_attackers_the_truth(graph: str) -> None:
    task = STUDY.task()
    own = LabTask(task.model, task.loss, task.batch, lambda parameters: task.optimizer(parameters, 0.1))
    models = Models(own, NUM_WORKERS)
    case = CASES["ring, 2 apart, -5 x: D-PSGD" if graph == "ring" else "exponential, 2, -5 x: D-PSGD"]
    setting = Setting(NUM_WORKERS, None, STUDY.compute, STUDY.network)
    driver = case.plan(lambda share: math.inf).make(setting, models).driver
    x = torch.randn(models.x.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    w, lied = MetropolisHastingsMixing(GRAPHS[graph]).matrix(0).double(), x.clone()
    lied[[3, 7]] *= -5
    expected = w @ lied
    expected[[3, 7]] = (w @ x)[[3, 7]]
    assert isinstance(driver, attacks.Attacked)
    driver.step(x, 0)
    torch.testing.assert_close(x, expected, rtol=0, atol=1e-12)


def test_a_quick_study_has_the_worst_honest_worker(tmp_path: Path) -> None:
    names = [f"exponential, 2, -5 x: {rule}" for rule in (D_PSGD, CLIPPED, TRIMMED)]
    assert Trainings(STUDY.only(names).quick(), tmp_path / "rows.csv", 1.0).run()
    rows = pd.read_csv(tmp_path / "rows.csv").set_index("method")
    last = rows[rows["step"] == rows["steps"]]
    assert list(last.index) == names
    assert (last["worst_test"] >= last["test"] - 5).all()
    assert last.loc[names[0], "test"] > last.loc[names[2], "test"] + 5
    radius = float(last.loc[names[1], "plan"].partition("radius=")[2].partition(")")[0])
    assert radius == pytest.approx(attacks.distance_on("exponential", 8), rel=0.05)


def test_the_study_has_all_cases_and_the_page_counts_them() -> None:
    assert len(CASES) == 4 * (1 + 3 * 5 + 1 + 2 * 5)
    assert len(STUDY.cells) * len(CASES) == PLANNED
    assert attacks.honest_of((3, 5)) == [0, 1, 2, 4, 6, 7]


def test_gaps_are_below_d_psgd_without_attackers_on_the_same_graph() -> None:
    def error(name: str, seed: int) -> float:
        case = CASES[name]
        if case.attack == attacks.NONE:
            return 8.0 + seed
        return 8.0 + seed + (40.0 if case.rule == D_PSGD else 0.5 if case.attack != "noise" else 2.0)

    rows = pd.DataFrame(
        {
            "method": name, "seed": seed, "workers": 8, "step": 300, "steps": 300, "is_tuning": False,
            "test": error(name, seed), "worst_test": error(name, seed) + 0.25,
            "plan": "ClippedGossip(radius=0.1) x" if "Clipped" in name else "dpsgd",
        }
        for name in CASES
        for seed in (1, 2, 3)
    )  # fmt: skip
    found = attack_ends(rows)
    assert len(found) == len(CASES)
    assert set(found["seeds"]) == {3}
    assert unharmed(found, CLIPPED, "ring") == (12, 15)
    assert unharmed(found, D_PSGD, "exponential") == (0, 10)
    worst = worst_case(found, TRIMMED, "ring")
    assert (worst["attack"], worst["worst_gap"]) == ("noise", 2.0)
    assert found.loc[found["rule"] == CLIPPED, "radius"].unique().tolist() == [0.1]
    np.testing.assert_allclose(found.loc[found["attack"] == attacks.NONE, "worst"], 100 - 10.25)
    text = by_rules(rows, [CLIPPED])
    assert "| ring | 0.1 | 1 | 89.2 (49.8) |" in text
    assert "In 12 of 15 attacks it stays within a point" in " ".join(text.split())
