"""The studies without training: rows are computed once, and agree with closed forms and published values."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from benchmarks.pages import computed_studies as pages
from benchmarks.studies import __main__ as studies
from benchmarks.studies import compression, consensus, goodput, graphs, lab, utilisation
from benchmarks.studies.computed import Cell, Computed
from gossip_modules import Choco, DiLoCo, SignNorm, StreamingDiLoCo
from gossip_modules.extend import FlatBuffer, PushPull
from gossip_modules.graph_manager import CompleteGraph
from gossip_modules.lab import Compute, Join, Kill, LabPlan, LabTask, Network, Setting
from gossip_modules.lab.comparison import LabTraining
from gossip_modules.mixing_manager import UniformMixing
from gossip_modules.mixing_manager.momentum_rates import MomentumRates
from gossip_modules.rounds.rounds import Rounds


def test_rows_are_computed_once_and_later_cells_see_earlier_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []

    def cells(rows: Callable[[], Any]) -> Iterator[Cell]:
        for name in ("a", "b"):
            yield {"name": name, "before": len(seen)}, partial(compute, name)

    def compute(name: str) -> dict[str, Any]:
        seen.append(name)
        return {"value": len(seen)}

    monkeypatch.setattr(studies, "COMPUTED", {"own": Computed(cells, ("name", "before", "value"))})
    path = tmp_path / "own.csv"
    assert studies.main(["own", "--output", str(path), "--minutes", "-1"]) == 3
    assert studies.main(["own", "--output", str(path)]) == 0
    seen.clear()
    monkeypatch.setattr(studies, "COMPUTED", {"own": Computed(cells, ("name", "before", "value"))})
    rows = pd.read_csv(path)
    assert rows["value"].tolist() == [1, 2]
    assert rows["before"].tolist() == [0, 1]
    assert studies.main(["own", "--output", str(path)]) == 0
    assert seen == ["b"]  # of another key, since nothing was computed before it


# Utilisation.


@pytest.mark.parametrize(("period", "mbit"), [(1, 50), (8, 1000)])
def test_the_utilisation_of_diloco_is_the_arithmetic_of_a_ring(period: int, mbit: int) -> None:
    n, compute = utilisation.WORKERS, period * utilisation.STEP_SECONDS
    ring = 2 * (n - 1) / n * 32 * utilisation.PARAMETERS / (0.957e6 * mbit)
    share = utilisation.utilisation(DiLoCo(sync_every=period), mbit, period)
    assert share == pytest.approx(compute / (compute + ring), rel=0.02)


def test_a_delay_hides_rounds_that_fit_into_it() -> None:
    late = StreamingDiLoCo(sync_every=8, fragments=4, delay=7, arrival="carry")
    assert utilisation.utilisation(late, 50_000, 8) > 0.97
    assert utilisation.utilisation(DiLoCo(sync_every=8), 50_000, 8) < 0.9


def test_a_delay_hides_nothing_more_than_the_compute() -> None:
    late = StreamingDiLoCo(sync_every=8, fragments=4, delay=7, arrival="carry")
    ring = 1.5 * 32 * utilisation.PARAMETERS / (0.957e6 * 100)
    assert utilisation.utilisation(late, 100, 8) == pytest.approx(8 * utilisation.STEP_SECONDS / ring, rel=0.02)


def test_cells_are_compared_with_a_fifth_before_rounding() -> None:
    rows = pd.DataFrame({"own": [1.2, 1.21, 0.8, 0.79, 5.0, math.nan]})
    rows = rows.assign(published_percent=[1.0, 1.0, 1.0, 1.0, math.nan, 1.0])
    assert pages.within_a_fifth(rows, "own") == (2, 4)


def test_measured_utilisation_is_a_local_step_over_a_step_of_the_method(monkeypatch: pytest.MonkeyPatch) -> None:
    late = "StreamingDiLoCo(8,fragments=4,delay=7,arrival='carry',compressor=QSGD(4,bucket_size=32,unbiased=True))"
    steps = {"local": 25.0, "DiLoCo(sync_every=8)": 100.0, late: 50.0, "ddp": 250.0}
    rows = [
        {"method": method, "rate_gbit": 0.0125, "planned_steps": 16, "repeat": repeat, "mean_step_ms": share * base}
        for method, base in steps.items()
        for repeat, factor in enumerate((1.0, 1.0, 3.0))
        for share in (0.9 * factor, 1.1 * factor)  # of two ranks
    ]
    monkeypatch.setattr(pages, "rows_of", lambda _: pd.DataFrame(rows).assign(error=math.nan))
    found = pages.measured_on_the_cluster().set_index(["method", "period", "mbit"])["measured_percent"].to_dict()
    assert found == {
        ("DiLoCo", 8, 200): pytest.approx(25.0),
        ("Streaming DiLoCo, carry, 4 bits", 8, 200): pytest.approx(50.0),
        ("all-reduce", 1, 200): pytest.approx(10.0),
    }


# Goodput.


def test_goodput_by_hand() -> None:
    pause = goodput.Pause(lambda n, between: 0.5 * n, 100.0)
    assert goodput.goodput(10, 1000.0, pause) == pytest.approx(0.9 / 1.05)
    assert goodput.goodput(10, 50.0, pause) == 0.0


def test_goodput_equals_a_training_in_the_lab_with_deaths_and_joins() -> None:
    task = LabTask(utilisation.Weights, utilisation.weighted_sum, lambda *_: torch.zeros(()), None)
    setting = Setting(4, None, Compute(0.1), Network("100 Gbit/s, 0 ms", memory_byte_s=1e15))
    events: list[Kill | Join] = [Kill(step=50, worker=3, seconds=0.75), Join(step=60, seconds=0.25)]
    training = LabTraining(LabPlan.of("sgp"), setting, task, events)
    for _ in training.run(100):
        pass
    pause = goodput.Pause(lambda n, between: 1.0, 0.0)
    assert 10 / training.seconds == pytest.approx(goodput.goodput(4, 4 * 10.0, pause), rel=1e-4)


def test_pauses_are_those_of_the_tables_and_go_on_along_their_last_line() -> None:
    sgp, torchft, ddp, often = goodput.pauses().values()
    hour = 3600.0
    scale = pd.read_csv(goodput.RESULTS / "elastic_scale.csv").query("method == 'SGP'")
    pause = (scale["slowest_after_kill_ms"] - scale["median_ms"]).to_numpy() / 1e3
    measured = [sgp.all_seconds(n, hour) for n in (8, 16, 32)]
    assert [b - a for a, b in itertools.pairwise(measured)] == pytest.approx(
        [b - a for a, b in itertools.pairwise(pause)]
    )
    assert measured[0] > pause[0]
    assert sgp.all_seconds(48, hour) - measured[2] == pytest.approx(measured[2] - measured[1])
    assert torchft.all_seconds(8, hour) > 4.8
    assert ddp.all_seconds(8, 1e9) == pytest.approx(15 + 300, rel=1e-3)  # rare failures: half of an interval is lost
    assert often.all_seconds(8, 1e9) == pytest.approx(15 + 15, rel=1e-3)


def test_a_job_that_fails_more_often_than_it_saves_hardly_goes_on() -> None:
    """Drawn failures, one every 112 s on average, with a checkpoint every 600 s."""
    draw, seconds, num_intervals = np.random.default_rng(0), 0.0, 200
    for _ in range(num_intervals):
        while (until := draw.exponential(112.5)) < 600:
            seconds += until + goodput.START_SECONDS
        seconds += 600
    pause = goodput.pauses()["DDP, a checkpoint every 600 s"]
    assert 600 * num_intervals / seconds == pytest.approx(goodput.goodput(32, 3600.0, pause), rel=0.2)


def test_rows_of_goodput_are_those_of_the_pauses_of_today() -> None:
    rows = pd.read_csv(goodput.RESULTS / "goodput.csv")
    found = [{**key, **compute()} for key, compute in goodput.cells(list)]
    own = rows[list(found[0])].sort_values(["failures", "system", "workers"], ignore_index=True)
    expected = pd.DataFrame(found).sort_values(["failures", "system", "workers"], ignore_index=True)
    pd.testing.assert_frame_equal(own, expected, check_dtype=False)


def test_a_sentence_has_whole_shares() -> None:
    rows = pd.DataFrame(
        {"workers": workers, "failures": failures, "system": system, "goodput": share}
        for workers, failures in ((32, "one an hour"), (1024, "Llama 3"))
        for system, share in (("a", 1.0), ("b", 0.9), ("c", 0.5), ("d", 0.25))
    )
    expected = (
        "keeps 100.00 %, torchft 90.00 %, and DDP 50.00 % with a checkpoint every ten minutes, 25.00 % with one every"
    )
    assert expected in pages.goodput_said(rows)


# Agreement.


def test_plain_gossip_agrees_after_seven_rounds() -> None:
    row = consensus.agreement(consensus.VARIANTS["plain"], 1.3084, 0)
    assert (row["rounds"], row["megabits"], row["diverged"]) == (7, 4.48, False)


def test_a_run_of_power_iterations_ends_after_its_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = [key for key, _ in consensus.power_cells(list)]
    assert len(keys) == len(consensus.FACTORS) * len(consensus.SEEDS)
    monkeypatch.setattr(consensus, "MOST_ROUNDS", 64)  # two rounds of 32 iterations
    row = next(compute for key, compute in consensus.power_cells(list) if key["iterations"] == 32)()
    assert math.isnan(row["rounds"])
    assert consensus.TARGET < row["last_error"] < 1


def test_the_step_size_with_the_fewest_rounds_is_chosen_with_the_first_seed() -> None:
    columns = ["method", "step_size", "run_seed", "rounds", "last_error"]
    rows = [("a", 0.1, 1, math.nan, 0.5), ("a", 0.2, 1, 90, 0.1), ("a", 0.4, 1, 80, 0.2), ("a", 0.1, 2, 1, 0.0)]
    assert consensus.best_step(pd.DataFrame(rows, columns=columns), "a") == 0.4
    assert consensus.best_step(pd.DataFrame(rows[:1], columns=columns), "a") == 0.1


def test_the_table_of_codes_has_the_step_size_of_all_seeds() -> None:
    columns = ["method", "step_size", "run_seed", "rounds", "megabits", "last_error", "diverged"]
    rows = [
        ("a", 0.1, 1, math.nan, math.nan, 0.5, True),
        ("a", 0.2, 1, 80, 4.0, 0.01, False),
        ("a", 0.2, 2, 90, 5.0, 0.01, False),
        ("b", 0.3, 1, 60, 2.0, 0.01, False),
    ]
    found = pages.code_table(pd.DataFrame(rows, columns=columns)).set_index("method")
    assert found.index.tolist() == ["b", "a"]
    assert found.loc["a", ["step_size", "seeds", "rounds", "megabits"]].tolist() == [0.2, 2, 85, 4.5]
    assert found["diverged"].tolist() == ["0 of 1", "1 of 2"]


def test_disagreement_on_a_cycle_is_that_of_the_law() -> None:
    rates = MomentumRates.of(consensus.cycle_rates(32))
    assert [rates.eta, rates.alpha] == pytest.approx([0.070418, 3.6648], rel=1e-4)
    for has_momentum in (False, True):
        law = consensus.law(8, has_momentum=has_momentum)
        for seconds in (4, 12):
            runs = [consensus.disagreement(8, seconds, has_momentum=has_momentum, seed=seed) for seed in range(40)]
            assert sum(runs) / len(runs) == pytest.approx(law[seconds], rel=0.25)


def test_the_law_without_momentum_falls_as_the_smallest_eigenvalue_says() -> None:
    """With lambda = 1 - cos(2 pi / n) squares fall at most as exp(-lambda t), and at least as its root."""
    law, slowest = consensus.law(8, has_momentum=False), 1 - math.cos(2 * math.pi / 8)
    assert math.exp(-slowest) < law[61] / law[60] < math.exp(-slowest / 2)
    plain, fast = (consensus.seconds_to_agree(8, has_momentum=has_momentum) for has_momentum in (False, True))
    assert fast < plain
    assert law[math.floor(plain)] > consensus.AGREED > law[math.ceil(plain)]


def test_rho_of_the_published_graphs() -> None:
    cells = {(key["graph"], key["budget"]): compute for key, compute in consensus.rho_cells(list)}
    assert len(cells) == 60
    for budget, rho in ((0.5, 0.6440), (0.1, 0.9368), (1.0, 0.6538)):
        row = cells[0, budget]()
        assert row["workers"] == 8
        assert row["rho"] == pytest.approx(rho, abs=2e-3)


# Graphs.


def test_base_graph_is_exact_and_a_ring_contracts_as_its_eigenvalue_says() -> None:
    exact = graphs.agreement("base, 1 peer", partial(graphs.GRAPHS["base, 1 peer"], 6))
    assert exact["contraction_per_round"] == 0.0
    ring = graphs.agreement("ring", partial(graphs.GRAPHS["ring, both neighbours"], 7))
    assert ring["contraction_per_round"] == pytest.approx((1 + 2 * math.cos(2 * math.pi / 7)) / 3, abs=1e-4)
    assert ring["messages"] == 2 * ring["rounds"]


def test_noise_and_drift_of_a_complete_graph_are_those_of_one_step() -> None:
    mixing = UniformMixing(CompleteGraph(4, peers_per_itr=3))
    noise, drift = graphs.disagreement(mixing)
    assert noise == pytest.approx(0.0, abs=1e-12)  # W(t) averages exactly, the noise of its own step too
    assert drift == pytest.approx(0.0, abs=1e-12)


def test_the_cost_of_a_graph_has_its_size_and_its_memory() -> None:
    small, large = (graphs.scaling(graphs.makers(n)["NetworkXGraph (cycle)"], 1) for n in (50, 500))
    assert (small["ranks"], large["ranks"]) == (50, 500)
    assert large["peak_bytes"] > 5 * small["peak_bytes"]
    assert graphs.power_of_two(1000) == 1024
    assert graphs.power_of_two(1_000_000) == 2**20


def test_a_plan_of_matcha_is_no_better_than_the_joint_optimum() -> None:
    row = graphs.planning(16, 0.5)
    assert row["links"] == 68
    assert row["joint_rho"] <= row["rho"] < 1


# Compression.


def test_a_ratio_is_the_time_saved_on_a_link_over_the_time_spent() -> None:
    row = compression.figures(250_000, 1_250_000, 3.0, 1.0)
    assert row["saved_ms"] == 8.0  # 8 Mbit at 1 Gbit/s
    assert [row[f"ratio_at_{gbit}_gbit"] for gbit in ("0.1", "1", "10")] == [20.0, 2.0, 0.2]


def test_a_method_between_a_rank_and_its_echo_sends_as_many_bytes_as_its_code(monkeypatch: pytest.MonkeyPatch) -> None:
    vector = FlatBuffer(torch.nn.Linear(64, 32, bias=False)).vector
    monkeypatch.setattr(compression, "resnet", lambda: vector)
    plain = compression.of_rounds(PushPull(wire_dtype=torch.bfloat16))
    assert 2 * plain["num_bytes"] == plain["plain_bytes"]
    signs = compression.of_rounds(Rounds(Choco(SignNorm(), step_size=0.4), PushPull()))
    assert signs["num_bytes"] < plain["plain_bytes"] / 10


# The Lab.


def test_both_ways_of_the_lab_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lab, "WORKERS", 2)
    monkeypatch.setattr(lab, "STEPS", 1)
    rows = [lab.cpu_time(by) for by in ("vmap", "loop")]
    assert [row["milliseconds"] > 0 for row in rows] == [True, True]
    assert rows[0]["parameters"] == 20_480


def test_a_prediction_has_the_columns_of_its_study(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lab, "SETTING", Setting(4, 1000, Compute(0.25), Network("1 Gbit/s")))
    key, _ = next(iter(lab.simulator_cells(list)))
    assert list({**key, **lab.predicted("sgp")}) == list(lab.LAB["simulator"].columns)
