"""The doctor: measured links and steps, the plan that follows from them, bad options, and a rank that is late."""

from __future__ import annotations

import json
import math
import sys
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from gossip_modules import doctor
from gossip_modules.doctor import Measurements, Workload
from gossip_modules.lab.clock import TCP_SHARE, Compute
from gossip_modules.lab.plan import Setting
from gossip_modules.lab.planner import code_gains
from gossip_modules.methods import METHODS
from gossip_modules.regions import Regions
from gossip_modules.transport.process_group import ProcessGroupTransport
from tests.harness.ranks import CPU, TIMEOUT, run_ranks
from tests.harness.scripts import _outputs

GIVEN = doctor.workload(None, 25_000, 0.01)


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measurements of milliseconds."""
    monkeypatch.setattr(doctor, "_EXCHANGE_SECONDS", 1e-4)
    monkeypatch.setattr(doctor, "_STEPS_SECONDS", 0.0)
    monkeypatch.setattr(doctor, "_PAUSE_SECONDS", 0.0)
    monkeypatch.delenv("RANK", raising=False)


def body(group: dist.ProcessGroup) -> Measurements:
    transport = ProcessGroupTransport(group, device=CPU, timeout=TIMEOUT)
    return doctor.measure(transport, GIVEN, host="b" if group.rank() == 2 else "a")


def test_all_ranks_hold_the_same_measurements_and_one_plans_with_them() -> None:
    first, *others = run_ranks(3, body)
    assert all(other == first for other in others)
    assert first.hosts == ("a", "a", "b")
    assert first.places == {"inside hosts": [(0, 1)], "between hosts": [(0, 2), (1, 2)]}
    assert set(first.round_trips) == set(first.rates) == {(0, 1), (0, 2), (1, 2)}
    assert min(*first.round_trips.values(), *first.rates.values(), first.memory_byte_s) > 0
    assert first.steps == ((0.01,) * 9,) * 3
    found = doctor.plan(first, GIVEN, ["sgp", "ar", "choco:exponential"], seconds=60)
    assert [prediction.plan.label for prediction in found.predictions] == ["sgp", "ar"]
    assert found.left_out[0].startswith("choco:exponential: got choco on")
    text = doctor.as_text(first, GIVEN, found)
    assert text.startswith("3 ranks on 2 hosts; model: 0.025 M parameters, float32, 0.1 MB on cpu\n")
    for line in ("inside hosts       1 ", "between hosts      2 ", "Choose ", "Left out: choco:exponential"):
        assert f"\n{line}" in text
    values = json.loads(doctor.as_json(first, GIVEN, found))
    assert [link["ranks"] for link in values["links"]] == [[0, 1], [0, 2], [1, 2]]
    assert {method["method"] for method in values["methods"]} == {"sgp", "ar"}
    assert values["best"] in ("sgp", "ar")


TRIPS = {(0, 1): 4e-4, (0, 2): 0.021, (0, 3): 0.022, (1, 2): 0.021, (1, 3): 0.023, (2, 3): 3e-4}
RATES = {pair: 1e9 if seconds < 0.001 else 9e7 for pair, seconds in TRIPS.items()}
SITES = Measurements(
    ("a", "b", "c", "d"), TRIPS, RATES, ((0.1,),) * 4, 1e10, borders={(0, 1): doctor.Border(1.9e8, 2.1e8, 2, 2e8)}
)


def test_hosts_are_grouped_into_regions_and_both_levels_are_planned() -> None:
    assert str(SITES.regions) == "0-1,2-3"
    assert SITES.places == {
        "between hosts": [(0, 1), (2, 3)],
        "between regions": [(0, 2), (0, 3), (1, 2), (1, 3)],
    }
    network = SITES.network()
    # A pair alone has the line; two at once share it.
    assert network.table()[0][2].rate_bit_s == network.table()[3][1].rate_bit_s == 1.9e8 / TCP_SHARE
    assert network.table()[0][1].rate_bit_s == 1e9 / TCP_SHARE
    assert (network.lines, network.line_bit_s) == ((0, 0, 1, 1), 2e8 / TCP_SHARE)
    assert network.average_start_s == 0
    # A ring sends 1.5 times 8e6 bits one after another over the line, and six messages wait for the latency.
    later = replace(SITES, average_bytes=1_000_000, average_seconds=1.0).network()
    seconds = 1.5 * 8e6 / 1.9e8 + 6 * 0.0115 + 3 * 3 * 250_000 / 1e10
    assert later.average_start_s == pytest.approx(1 - seconds, rel=0.01)
    found = doctor.plan(SITES, doctor.workload(None, 2_800_000, 0.1), ["ar", "sgp"], seconds=60)
    texts = {(level.inside, level.prediction.plan.label) for level in found.levels}
    assert {(doctor.SAME, "ar"), (doctor.SAME, "sgp"), ("gradients, all-reduce", "sgp")} < texts
    assert found.advice is not None
    assert found.advice.best is not None
    fastest = min(x.prediction.seconds for x in found.levels if x.prediction.has_reached and x.prediction.has_agreed)
    assert found.advice.best.seconds == fastest
    text = doctor.as_text(SITES, GIVEN, found)
    for line in (
        "between regions    4            21.5     0.09   0.09 Gbit/s, ranks 0 and 2",
        "regions (found, --regions declares others): ranks 0-1 | 2-3; round trips of 21 ms and more between them, "
        "of 0.4 ms at most inside",
        "regions 0 and 1: one pair alone has 0.19 Gbit/s, 2 pairs at once 0.2 in all: they share a line",
    ):
        assert f"\n{line}" in text
    assert "\ngradients, all-reduce  " in text
    assert "\nChoose " in text
    values = json.loads(doctor.as_json(SITES, GIVEN, found))
    assert values["regions"] == [[0, 1], [2, 3]]
    assert [level["between"] for level in values["levels"] if level["is_chosen"]] == [found.advice.best.plan.text]


def test_links_that_no_line_limits_have_their_own_rates() -> None:
    wide = replace(SITES, borders={(0, 1): doctor.Border(1.9e8, 3.7e8, 2, 3.6e8)})
    assert wide.network().line_bit_s == math.inf
    assert "in all: they do not hinder each other" in doctor.as_text(wide, GIVEN, doctor.Forecast())


def test_declared_regions_win() -> None:
    declared = replace(SITES, declared=Regions.of("0-2,3"))
    assert str(declared.regions) == "0-2,3"
    found = doctor.plan(declared, GIVEN, ["ar"], seconds=60)
    assert found.left_out == [
        "two levels: got regions 0-2,3, expected equally many consecutive ranks in each, such as 0-1,2-3; start the "
        "processes in this order, or train with a graph of your own"
    ]
    text = doctor.as_text(declared, GIVEN, found)
    assert "\nregions (declared): ranks 0-2 | 3; round trips of 0.3 ms and more between them" in text
    assert "\nChoose ar" in text


def test_the_line_between_declared_regions_is_measured() -> None:
    def measured(group: dist.ProcessGroup) -> Measurements:
        transport = ProcessGroupTransport(group, device=CPU, timeout=TIMEOUT)
        return doctor.measure(transport, GIVEN, host="a", declared=Regions.of("0,1-2"))

    first, *others = run_ranks(3, measured)
    assert all(other == first for other in others)
    ((pair, border),) = first.borders.items()
    assert (pair, border.num_pairs) == ((0, 1), 1)
    assert min(border.alone, border.together, first.average_seconds, first.average_bytes) > 0

    def refused(group: dist.ProcessGroup) -> None:
        transport = ProcessGroupTransport(group, device=CPU, timeout=TIMEOUT)
        with pytest.raises(ValueError, match="got --regions 0,1-2 of 3 ranks, expected the 2 ranks of this job"):
            doctor.measure(transport, GIVEN, host="a", declared=Regions.of("0,1-2"))

    run_ranks(2, refused)


def test_methods_that_find_no_time_are_named() -> None:
    measured = Measurements(("a", "a"), {(0, 1): 1e-4}, {(0, 1): 1e9}, ((0.01,), (0.01,)), 1e10)
    found = doctor.plan(measured, GIVEN, ["localsgd", "sgp", "ar"], seconds=0.0)
    assert len(found.predictions) == 1
    assert found.left_out == ["sgp, ar: no time was left; --seconds gives more"]


@pytest.mark.parametrize("factor", [0.98, 1.02])
def test_the_doctor_says_on_both_sides_of_the_limit_whether_codes_pay(factor: float) -> None:
    """The payload rate of the limit: the code closest to paying saves 8 b / rate seconds and takes its passes."""
    work = doctor.workload(None, 25_000, 0.01)

    def planned(rate: float) -> doctor.Forecast:
        measured = Measurements(("a", "b"), {(0, 1): 1e-4}, {(0, 1): rate}, ((0.01,), (0.01,)), 1e10)
        return doctor.plan(measured, work, ["ar"], seconds=60)

    network = Measurements(("a", "b"), {(0, 1): 1e-4}, {(0, 1): 1e9}, ((0.01,), (0.01,)), 1e10).network()
    (nearest, *others) = code_gains(Setting(2, 25_000, Compute(0.01), network))
    limit = nearest.break_even_bit_s
    assert all(other.break_even_bit_s <= limit for other in others)
    found = planned(factor * limit)
    assert found.advice is not None
    said = found.advice.sentences[-1]
    assert said.startswith("Codes pay on links" if factor < 1 else "No code and no deltas pay on these links: a model")
    assert f"below {limit / 1e9:.2g} Gbit/s" in said
    assert said in doctor.as_json(replace(SITES, declared=Regions.of("0-3")), work, found)


def test_the_passes_of_codes_are_those_of_the_clock() -> None:
    """By hand: of 4 MB at 1 Gbit/s and 10 GB/s, bfloat16 saves 2 MB and takes 1.5 + 2.5 - 3 passes."""
    network = Measurements(("a", "b"), {(0, 1): 0.0}, {(0, 1): 1e9}, ((1.0,), (1.0,)), 1e10).network()
    gains = {gain.name: gain for gain in code_gains(Setting(2, 1_000_000, Compute(1.0), network))}
    assert gains["bfloat16"].saved_seconds == pytest.approx(8 * 2e6 / 1e9)
    assert gains["bfloat16"].spent_seconds == pytest.approx(1.0 * 4e6 / 1e10)
    assert gains["bfloat16"].break_even_bit_s == pytest.approx(4e10)
    assert gains["deltas"].saved_bytes == 4e6  # the most that they can save
    assert gains["sign"].spent_seconds == pytest.approx((2.0 + 3.5 + 3.0 + 3.5 - 3.0) * 4e6 / 1e10)
    with pytest.raises(ValueError, match="got num_parameters=None, expected the number of float32 parameters"):
        code_gains(Setting(2, None, Compute(1.0), network))


def test_pairs_that_were_not_measured_have_the_median_of_their_kind() -> None:
    trips = {(0, 1): 0.002, (2, 3): 0.004, (0, 2): 0.1, (1, 3): 0.3}
    rates = {(0, 1): 1e9, (2, 3): 3e9, (0, 2): 1e7, (1, 3): 3e7}
    measured = Measurements(("a", "a", "b", "b"), trips, rates, ((0.1,), (0.2,), (0.1,), (0.1,)), 1e10)
    table = measured.network().table()
    assert table[0][1].rate_bit_s == table[1][0].rate_bit_s == 1e9 / TCP_SHARE
    assert table[2][3].latency_s == 0.002
    assert table[0][3] == table[3][0] == (2e7 / TCP_SHARE, 0.1)
    assert measured.compute().seconds == [0.1, 0.2, 0.1, 0.1]


def test_a_rank_that_does_not_come_is_named() -> None:
    def late(group: dist.ProcessGroup) -> str:
        transport = ProcessGroupTransport(group, device=CPU, timeout=timedelta(seconds=0.3))
        if group.rank() == 1:
            time.sleep(0.6)
            return ""
        with pytest.raises(TimeoutError) as caught:
            doctor.measure(transport, GIVEN, host="a")
        return str(caught.value)

    assert "rank 1 " in run_ranks(2, late)[0]


def test_models_of_different_sizes_are_refused_on_all_ranks() -> None:
    def uneven(group: dist.ProcessGroup) -> str:
        transport = ProcessGroupTransport(group, device=CPU, timeout=TIMEOUT)
        with pytest.raises(ValueError, match="expected one model on all ranks") as caught:
            doctor.measure(transport, GIVEN._replace(num_bytes=8 if group.rank() == 1 else 4), host="a")
        return str(caught.value)

    assert {said[:52] for said in run_ranks(3, uneven)} == {"got a model of 4 bytes on rank 0 and of 8 on rank 1,"}


def make() -> tuple[nn.Module, Any]:
    """A model and its step, as a user would write them."""
    model = nn.Linear(8, 8)
    return model, lambda: model(torch.ones(1, 8)).sum().backward()


def fails() -> tuple[nn.Module, Any]:
    """A model whose step does not fit to its batch."""
    model = nn.Linear(8, 8)
    return model, lambda: model(torch.ones(1, 7))


def no_step() -> nn.Module:
    return nn.Linear(2, 2)


def test_the_step_of_a_model_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(Path(__file__).parent), *sys.path])
    work = doctor.workload("test_doctor:make", None, None)
    assert (work.num_bytes, work.device) == (4 * 72, CPU)
    seconds = doctor._step_quantiles(work)
    assert len(seconds) == 9
    assert 0 < seconds[0] <= seconds[-1]
    assert seconds == sorted(seconds)
    assert doctor.workload("test_doctor:no_step", None, 0.5) == Workload(24, CPU, None, 0.5, "test_doctor:no_step")
    with pytest.raises(ValueError, match=r"which returns Linear, expected a function .*; or the model and --compute"):
        doctor.workload("test_doctor:no_step", None, None)


def test_an_error_of_the_users_function_has_its_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "path", [str(Path(__file__).parent), *sys.path])
    assert doctor.main(["--model", "test_doctor:fails"]) == 1
    said = capsys.readouterr().err
    assert "Traceback (most recent call last)" in said
    assert "return model, lambda: model(torch.ones(1, 7))" in said
    assert "error: got RuntimeError from the training step of test_doctor:fails (mat1 and mat2" in said
    monkeypatch.setattr(nn.Linear, "__init__", lambda self, *sizes: self.nonesuch)
    with pytest.raises(doctor.ModelError, match="got AttributeError from --model test_doctor:fails"):
        doctor.workload("test_doctor:fails", None, None)


def test_one_process_says_that_it_is_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main(["--parameters", "1e4"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("1 rank on 1 host; model: a stand-in for 0.01 M parameters")
    assert "One process has no links to measure" in said
    assert doctor.main(["--parameters", "1e4", "--compute", "0.1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step_s"] == [[0.1] * 9]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("", "got neither --model nor --parameters, expected one of them"),
        ("--model a:b --parameters 1", "got --model and --parameters, expected one of them"),
        ("--model mine", "got --model mine, expected a function module:name that returns"),
        ("--model no_such_module:f", r"got --model no_such_module:f \(No module named .*\), expected"),
        ("--model math:f", r"got --model math:f \(module 'math' has no attribute 'f'\), expected"),
        ("--model time:time", "which returns float, expected a function"),
        ("--parameters 0", "got --parameters 0, expected at least 1"),
        ("--parameters 1e6 --compute nan", "got --compute nan, expected the seconds of a training step, above 0"),
        ("--parameters 1e6 --timeout 0", "got --timeout=0.0, expected more than zero seconds"),
        ("--parameters 1e6 --methods adam", "got method='adam', expected"),
        ("--parametres 1", "unrecognized arguments: --parametres 1"),
    ],
)
def test_bad_options_are_one_line(arguments: str, expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main(arguments.split()) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    with pytest.raises(ValueError, match=f"^error: .*{expected}"):
        raise ValueError(said.err)


def test_rank_0_tells_bad_options_before_the_others_end(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    waits: list[float] = []
    monkeypatch.setattr(doctor.time, "sleep", waits.append)
    for rank, said in (("0", 1), ("1", 0)):
        monkeypatch.setenv("RANK", rank)
        assert doctor.main(["--parameters", "0"]) == 2
        assert capsys.readouterr().err.count("error: got --parameters 0") == said
    assert waits == [doctor._HEAD_START]


def test_of_all_methods_the_advised_ones_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = Measurements(("a", "a"), {(0, 1): 1e-4}, {(0, 1): 1e9}, ((0.01,), (0.01,)), 1e10)
    planned: list[str] = []

    def plan(found: Measurements, work: Workload, methods: list[str], *, seconds: float) -> doctor.Forecast:
        planned.extend(methods)
        return doctor.Forecast()

    for name, value in {
        "plan": plan,
        "measure": lambda *_, **__: measured,
        "connect": (connect := mock.Mock()),
    }.items():
        monkeypatch.setattr(doctor, name, value)
    monkeypatch.setattr(doctor, "dist", mock.Mock())
    monkeypatch.setenv("RANK", "0")
    assert doctor.main(["--parameters", "1e4", "--compute", "0.01", "--comm-device", "cpu"]) == 0
    assert connect.call_args.kwargs["comm_device"] == "cpu"
    assert planned[:6] == ["ar", "ar+float16", "osgp", "osgp+bfloat16", "osgp+int8", "localsgd"]
    assert sorted(planned) == sorted([*METHODS, "ar+float16", "osgp+bfloat16", "osgp+int8", "sgp+bfloat16"])


@pytest.mark.e2e
@pytest.mark.timeout(120)
def test_processes_measure_and_the_first_one_prints() -> None:
    options = ("--parameters", "1e4", "--compute", "0.01", "--methods", "localsgd", "--json")
    first, second = _outputs(2, ["gossip_modules.doctor", *options])
    assert second == ""
    assert json.loads(first)["world_size"] == 2
