"""The study of four regions: each law by hand, the clock of the authors' simulator, and workers that train together."""

from __future__ import annotations

import itertools
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor, nn

from benchmarks.pages import region_study as page
from benchmarks.pages.headline import IN_PART, NO, YES
from benchmarks.studies import regions, small_decoder
from benchmarks.studies.regions import IN_REGION, MODEL_BYTES, STEP_SECONDS, WORKERS, RegionFleet
from benchmarks.studies.small_decoder import NUM_SYMBOLS, Text
from benchmarks.studies.study import Study, Trainings

BITS = 8 * MODEL_BYTES / 0.957  # over TCP


class Constant:
    """Workers with a drift of 1."""

    def __init__(self) -> None:
        self.start, self.crossed_bytes, self.counts = torch.zeros(1, dtype=torch.float64), 0.0, [0] * WORKERS

    def begin(self, worker: int, model: Tensor, num_steps: int) -> None:
        self.counts[worker] = num_steps

    def drift(self, worker: int) -> Tensor:
        return torch.ones(1, dtype=torch.float64)


def run(method: Any, num: int) -> tuple[Constant, list[float], list[float]]:
    """Return the workers, and the times and models of the first pushes."""
    fleet, found = Constant(), []
    for now, model in itertools.islice(method(fleet), num):
        found.append((now, float(model)))
    return fleet, [now for now, _ in found], [model for _, model in found]


def test_diloco_waits_for_the_slowest_worker_and_link() -> None:
    fleet, times, models = run(regions.diloco, 2)
    ring = 2 * 15 / 16 * BITS / 0.127e9
    assert times[0] == pytest.approx(32 * max(STEP_SECONDS) + ring, rel=1e-3)
    assert times[1] == pytest.approx(2 * times[0])
    assert models == pytest.approx([-0.7 * 1.9, -0.7 * 1.9 - 0.7 * (1 + 0.9 * 1.9)])  # Nesterov: 1, then 1.9
    _, paced, _ = run(lambda fleet: regions.diloco(fleet, is_paced=True), 1)
    assert paced[0] == pytest.approx(9 * STEP_SECONDS[0] + ring, rel=1e-3)  # its 9 steps are rounded up the most
    assert fleet.counts == [32] * WORKERS


def test_steps_are_in_proportion_to_speed() -> None:
    counts = regions.periods(32, is_paced=True)
    assert counts[:4] == [9, 32, 30, 13]  # 0.232, 0.907, 0.828 and 0.347 of 0.907, rounded up
    assert regions.periods(32, is_paced=False) == [32] * WORKERS


def test_workers_push_to_one_server_when_they_are_ready() -> None:
    _, times, models = run(regions.async_local_sgd, 33)
    assert times[0] == pytest.approx(32 * min(STEP_SECONDS) + 2 * BITS / 100e9, rel=1e-3)
    assert times == sorted(times)
    assert models[:31] == pytest.approx([-0.05 * push for push in range(1, 32)])
    assert models[31] == pytest.approx(-0.05 * 32 - 1.6 * 0.9)
    assert models[32] == pytest.approx(models[31] - 0.05)


def test_halos_pushes_and_merges_after_32_pushes_of_a_region() -> None:
    fleet, times, models = run(regions.halos, 400)
    moved = 32 * 0.2 + 3.2 * 0.9 * (1 + 1.9)  # of a region: momentum moves with each 16th push
    changes = [k for k in range(1, 400) if models[k] != models[k - 1]]
    assert models[: changes[0]] == [0.0] * changes[0]
    assert models[changes[0]] == pytest.approx(-0.15 * moved)
    first = -0.15 * moved
    assert models[changes[1]] == pytest.approx(first - 0.3 * (0.5 * moved + moved / 2))  # momentum with each second
    counts = regions.periods(8, is_paced=True)
    assert fleet.counts == counts
    seconds = np.array(counts) * STEP_SECONDS + 2 * BITS / 100e9
    pushes = sorted(t * k for t in seconds[:IN_REGION] for k in range(1, 40))  # of the first region, which is at home
    arrival = pushes[31] + BITS / 100e9
    assert times[changes[0] - 1] - 0.05 < arrival < times[changes[0]]  # and 2 ms of memory for each message


def test_a_region_mixes_the_global_model_into_its_own() -> None:
    _, _, own = run(lambda fleet: regions.halos(fleet, share=0.0, pushes=2), 60)
    _, _, mixed = run(lambda fleet: regions.halos(fleet, share=1.0, pushes=2), 60)
    same = [a == b for a, b in zip(own, mixed, strict=True)]
    assert same[:9] == [True] * 9  # before the first merge all pushes are alike
    assert not same[-1]


@pytest.fixture
def text(monkeypatch: pytest.MonkeyPatch) -> Text:
    symbols = torch.arange(20_000).remainder(NUM_SYMBOLS).to(torch.uint8)
    monkeypatch.setattr(small_decoder, "python_sources", lambda: symbols)
    return Text(2)


def test_workers_that_train_together_train_as_each_alone(text: Text) -> None:
    fleet = RegionFleet(text, 0.01, 100, 1)
    for worker, count in ((3, 2), (5, 3)):
        fleet.begin(worker, fleet.start, count)
    model = text.model()
    nn.utils.vector_to_parameters(fleet.start.clone(), model.parameters())
    optimizer, generator = text.optimizer(list(model.parameters()), 0.01), torch.Generator().manual_seed(1005)
    for k in range(3):
        optimizer.param_groups[0]["lr"] = 0.01 * (2 / WORKERS + k + 1) / 5  # 5 of 100 steps warm up
        optimizer.zero_grad()
        text.loss(model, text.batch(5, k, generator)).backward()
        optimizer.step()
    alone = fleet.start - nn.utils.parameters_to_vector(model.parameters()).detach()
    together = fleet.drift(5)
    assert float((together - alone).norm() / alone.norm()) < 1e-3
    assert fleet.num_done[5] == 3
    assert fleet.num_given == 5


@pytest.mark.usefixtures("text")
def test_a_study_has_the_curve_of_each_method(tmp_path: Path) -> None:
    names = {"DiLoCo": regions.diloco, "async local SGD": regions.async_local_sgd, "HALoS": regions.halos}
    short = {name: partial(method, period=2) for name, method in names.items()}
    study = Study(lambda: Text(2), lambda n: short, ((WORKERS, 4, 1),), (0.01,), points=2, train=regions.curve)
    path = tmp_path / "regions.csv"
    assert Trainings(study, path, 1.0).run()
    rows = pd.read_csv(path)
    assert rows.groupby("method")["step"].apply(list).to_dict() == {name: [2, 4] for name in short}
    assert np.isfinite(rows[["seconds", "validation", "test", "megabytes"]]).all(axis=None)
    assert rows["waiting"].between(0, 1).all()
    assert Trainings(study, path, -1.0).run()  # nothing is left


# The page.

ORDER = (page.HALOS, *page.OTHERS)


def rows_with(seconds: dict[str, float]) -> pd.DataFrame:
    """Rows of lines from 4 to 2 nats, which take so many seconds; a seed that not all methods have is left out."""
    shared = {"workers": 16, "rate": 0.1, "steps": 20, "is_tuning": False, "megabytes": 2.0, "waiting": 0.5}
    return pd.DataFrame(
        {**shared, "method": name, "seed": seed, "step": step, "seconds": seconds[name] * step / 20, "test": loss}
        for seed, names in ((1, ORDER), (2, ORDER[:1]))
        for name in names
        for step, loss in ((10, 3.0), (20, 2.0 if seed == 1 else 9.0))
    )


@pytest.mark.parametrize(
    ("seconds", "verdict"),
    [
        ((10.0, 21.0, 70.0, 75.0), YES),
        ((10.0, 21.0, 70.0, 74.0), YES),  # 0.8 of the logarithms suffices
        ((10.0, 12.0, 20.0, 74.0), IN_PART),
        ((10.0, 21.0, 76.0, 75.0), IN_PART),  # another order
        ((10.0, 9.0, 70.0, 75.0), NO),
    ],
)
def test_the_verdict_is_that_of_the_order_and_the_ratios(
    seconds: tuple[float, ...], verdict: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = rows_with(dict(zip(ORDER, seconds, strict=True)))
    monkeypatch.setattr(page, "rows_of", lambda csv: rows)
    assert page.region_ends(rows)["seconds"].tolist() == pytest.approx(list(seconds))
    assert page.halos_headline()[1] == verdict
    assert ("not the published order" not in page.region_said(rows)) == (list(seconds) == sorted(seconds))


def test_a_time_is_between_two_points() -> None:
    curve = page.curves(rows_with(dict.fromkeys(ORDER, 20.0)), page.HALOS).loc["HALoS"]
    assert page.reached(curve, 2.25) == pytest.approx(17.5)
    assert page.reached(curve, 3.5) == 10.0
    assert np.isnan(page.reached(curve, 1.0))
