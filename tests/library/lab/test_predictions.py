"""Predictions, advice, bad input and the command."""

from __future__ import annotations

import doctest
import importlib
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import gossip_modules as gm
from gossip_modules.lab import (
    Compute,
    Consensus,
    Digits,
    LabPlan,
    Network,
    Problem,
    advise,
    best,
    simulate,
)
from gossip_modules.lab.__main__ import main
from gossip_modules.lab.clock import LinkSpec
from gossip_modules.lab.planner import as_table
from gossip_modules.methods import METHODS
from gossip_modules.schedule import Schedule
from tests.harness.scripts import module_output
from tests.library.lab.simulations import CLUSTER, EVEN, LINKS, MODEL_BYTES, UNEVEN, digits, prediction, workers

# Predictions.


def test_messages_of_16_bits_are_compared_and_named() -> None:
    """At 0.1 Gbit/s the bytes bound a step, so half of them take little more than half of the time."""
    setting = replace(CLUSTER, network=Network("100 Mbit/s"))
    found = {name: simulate(name, setting, digits(), max_steps=40) for name in ("ar", "ar+float16", "sgp+bfloat16")}
    assert 0.5 < found["ar+float16"].step_seconds / found["ar"].step_seconds < 0.55
    assert found["ar+float16"].rank_bytes == pytest.approx(found["ar"].rank_bytes / 2, rel=0.01)
    assert "\nsgp+bfloat16 " in as_table(list(found.values()))
    assert found["sgp+bfloat16"].name == "sgp in bfloat16 on npeer-exponential"
    at_equal = [replace(p, error=0.0, seconds=k + 1.0, disagreement=0.0) for k, p in enumerate(found.values())]
    for first, end in ((1, "register DistributedDataParallel's hook of 16 bits"), (2, "--wire-dtype bfloat16 ")):
        text = " ".join(advise([replace(at_equal[first], seconds=0.5), at_equal[0]], setting).sentences)
        assert f"Choose {at_equal[first].name}: 0.5 s" in text
        assert end in text
    with pytest.raises(ValueError, match=r"got wire_dtype=torch.int8 of ar in the Lab, expected torch.bfloat16"):
        simulate("ar+int8", setting, digits())
    with pytest.raises(ValueError, match=r"got wire_dtype=torch.float16 of wagma in the Lab, expected None"):
        simulate("wagma+float16", setting, digits())


@pytest.mark.parametrize("name", METHODS)
def test_every_method_runs_in_every_world(name: str) -> None:
    worlds: list[tuple[int, Problem]] = [(1, digits()), (2, Consensus()), (7, digits())]
    for n, problem in worlds:
        prediction = simulate(name, replace(CLUSTER, world_size=n), problem, max_steps=6)
        assert math.isfinite(prediction.error)
        assert prediction.seconds >= 0
        assert 0 <= prediction.waiting_share <= 1
        if n == 1:
            assert prediction.rank_bytes == prediction.waiting_share == prediction.disagreement == 0


def test_consensus_by_all_reduce_is_one_average() -> None:
    prediction = simulate("ar", CLUSTER, Consensus(), target=1e-9)
    assert prediction.num_steps == 1
    assert prediction.seconds == prediction.step_seconds == LINKS.on(workers(8)).all_reduce_seconds(MODEL_BYTES)


def test_predictions_are_a_function_of_the_seed() -> None:
    setting = replace(CLUSTER, compute=UNEVEN)
    problems = Digits(seed=1), Digits(seed=1)
    for name in ("dpwa", "adpsgd", "wagma", "matcha", "powergossip"):
        once, again = (simulate(name, setting, problem, max_steps=12) for problem in problems)
        assert once == again
    other = simulate("dpwa", replace(setting, compute=replace(UNEVEN, seed=4)), problems[0], max_steps=12)
    assert other != simulate("dpwa", setting, problems[0], max_steps=12)


def test_bytes_are_those_of_the_messages() -> None:
    size = 4 * 11_175_000
    rounds = {"sgp": 4 * size, "dpsgd:ring": 8 * size, "ar": 3 * 2 * 7 / 8 * size}
    for name, expected in rounds.items():
        assert simulate(name, CLUSTER, digits(), target=1e-9, max_steps=3).rank_bytes == pytest.approx(expected)
    coded = simulate("choco:ring:sign", CLUSTER, digits(), target=1e-9, max_steps=1)
    assert coded.rank_bytes == 2 * 2 * gm.SignNorm().num_bytes(11_175_000, torch.float32)


def test_the_best_reaches_the_target_and_agrees() -> None:
    predictions = [
        prediction("sgp", error=0.39, seconds=9.0),
        prediction("dpwa", error=0.39, seconds=1.0, disagreement=0.5),
        prediction("choco", error=0.41, seconds=2.0),
        prediction("ar", error=0.4, seconds=18.0),
        prediction("moniqua", error=math.nan, seconds=1.0),
    ]
    advice = advise(predictions, CLUSTER)
    assert advice.best is best(predictions) is predictions[0]
    assert advice.sentences[0].startswith("Choose sgp: 9.0 s to the target, 2.00 times faster than ar")
    assert "the wire bounds it" in advice.sentences[1] or "copies, codes" in advice.sentences[1]
    assert advice.sentences[2].startswith("Not weighed: dpwa: the target was reached, but workers' models differ")


def test_rare_averages_are_advised_where_links_bound_every_step() -> None:
    rare = prediction("localsgd", error=0.3, seconds=2.0)
    for share, expected in ((0.6, "osgp"), (0.9, "localsgd")):
        steady = replace(prediction("osgp", error=0.3, seconds=9.0), waiting_share=share)
        advice = advise([steady, rare], CLUSTER)
        assert advice.best is not None
        assert advice.best.plan.method.name == expected
        (sentence,) = [sentence for sentence in advice.sentences if "averages rarely" in sentence]
        assert sentence.endswith(f"more than 75% of its step, here {share:.0%}.")
        than = "slower than localsgd" if expected == "osgp" else "faster than osgp"
        assert f"4.50 times {than}" in advice.sentences[0]
    slower = advise([steady, replace(rare, seconds=10.0)], CLUSTER)
    assert slower.best is steady
    assert not any("averages rarely" in sentence for sentence in slower.sentences)


def test_advice_goes_to_methods_without_rates_of_their_own() -> None:
    outer, steady = prediction("diloco", error=0.3, seconds=2.0), prediction("sgp", error=0.3, seconds=9.0)
    rare = prediction("localsgd", error=0.3, seconds=4.0)
    late = replace(steady, waiting_share=0.9)
    for found, expected in (
        ([outer, steady, rare], steady),
        ([outer, late, rare], rare),
        ([outer, late], outer),
        ([outer, rare], rare),
        ([outer], outer),
    ):
        advice = advise(found, CLUSTER)
        assert advice.best is expected
        speed = "" if expected is outer else "is faster here (2.0 s) and "
        said = [text for text in advice.sentences if "rates of its own" in text]
        assert [text.startswith(f"diloco {speed}has rates of its own (lr, momentum)") for text in said] == [True]


def test_rounds_are_rare_by_the_schedule_too() -> None:
    often = replace(prediction("osgp", error=0.3, seconds=9.0), waiting_share=0.6)
    plan = LabPlan.of("sgp", schedule=Schedule(gossip_every=5))
    rare = replace(prediction("sgp", error=0.3, seconds=2.0), plan=plan)
    for steady in (often, replace(prediction("wagma", error=0.3, seconds=9.0), waiting_share=0.6)):
        advice = advise([rare, steady], CLUSTER)
        assert advice.best is steady
        assert any("averages rarely" in sentence for sentence in advice.sentences)


def test_advice_names_methods_that_were_simulated_by_another_optimizer() -> None:
    found = [prediction(name, error=0.3, seconds=2.0) for name in ("muloco", "diloco")]
    (sentence,) = (text for text in advise(found, CLUSTER).sentences if "MuonAdamW" in text)
    assert sentence.startswith("muloco: simulated with SGD in place of MuonAdamW")
    table = as_table(found).splitlines()
    assert [line.endswith("by SGD, not MuonAdamW") for line in table[1:]] == [True, False]


def test_advice_names_a_change_where_nothing_works() -> None:
    far = [prediction("sgp", error=0.5, seconds=9.0), prediction("moniqua", error=math.nan, seconds=1.0)]
    advice = advise(far, CLUSTER)
    assert advice.best is None
    assert advice.sentences[0].startswith("No method reaches the target of 0.4: the nearest is sgp with 0.5 after 10")
    assert "--max-steps" in advice.sentences[1]
    apart = advise([prediction("dpwa", error=0.3, seconds=9.0, disagreement=0.5)], CLUSTER)
    assert apart.best is None
    assert apart.sentences[0].startswith("No method reaches the target with workers that agree: dpwa gets there")


def test_advice_on_methods_that_diverge_is_a_lower_step_size() -> None:
    advice = advise([prediction("choco", error=math.inf, seconds=9.0, disagreement=math.nan)], CLUSTER)
    assert advice.best is None
    assert "step_size" in advice.sentences[1]
    assert "--max-steps" not in advice.sentences[1]


def test_advice_blames_no_wire_that_compute_hides() -> None:
    # 44.7 MB take 0.12 s at 3 Gbit/s, less than any step.
    slow = replace(CLUSTER, compute=replace(EVEN, straggle_share=0.02), network=Network("3 Gbit/s"))
    chosen = simulate("osgp", slow, digits(), target=0.5)
    assert chosen.is_overlapped
    assert LINKS.on(workers(8)).wire_seconds(44.7e6) / 3 > chosen.waiting_share * chosen.step_seconds / 2, (
        "enough to be suspected"
    )
    assert "waiting for slow workers" in advise([chosen], slow).sentences[1]
    assert "the wire bounds it" in advise([simulate("osgp", CLUSTER, digits(), target=0.5)], CLUSTER).sentences[1]
    assert not simulate("sgp", slow, digits(), max_steps=1).is_overlapped


def test_advice_counts_the_compute_of_stragglers() -> None:
    slow = replace(CLUSTER, compute=replace(EVEN, straggle_share=1.0, straggle_factor=3.0))
    # 3 x 0.15 s, and 0.01 s around it.
    assert "Its step has 0.460 s of compute" in advise([prediction("sgp", error=0.3, seconds=9.0)], slow).sentences[1]


def test_advice_names_the_bound_of_a_step() -> None:
    fast = replace(CLUSTER, network=Network("100 Tbit/s, 0 s", memory_byte_s=1e13))
    chosen = simulate("sgp", fast, digits(), target=0.5)
    assert "compute bounds it" in advise([chosen], fast).sentences[1]
    assert "the only one" in advise([chosen], fast).sentences[0]
    wire = advise([simulate("sgp", CLUSTER, digits(), target=0.5)], CLUSTER)
    assert "the wire bounds it: faster links or fewer bits" in wire.sentences[1]
    rare = advise([prediction("localsgd", error=0.39, seconds=0.02)], CLUSTER)
    assert "the wire bounds it: faster links or more steps between its rounds would help" in rare.sentences[1]
    uneven = replace(fast, compute=UNEVEN)
    assert "waiting for slow workers" in advise([simulate("sgp", uneven, digits(), target=0.5)], uneven).sentences[1]


# What cannot be.


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("--world-size 0", "got world_size=0, expected a whole number of at least 1"),
        ("--world-size 5000", "got world_size=5000, expected at most 4096"),
        ("--world-size 2.5", "argument --world-size: invalid whole value: '2.5'"),
        ("--world-size 4 --network fast", r"got the link 'fast' \(.*\), expected such as '10 Gbit/s, 0.1 ms'"),
        ("--world-size 4 --compute 0", "got seconds=0.0, expected a positive number; its unit is in its name"),
        ("--world-size 4 --compute Compute(1,straggle_share=1.5)", "got straggle_share=1.5, expected a share from 0"),
        ("--world-size 4 --compute Comput(1)", "with the unknown name 'Comput', expected .*; did you mean 'Compute'"),
        ("--world-size 4 --methods sgp:star", "got graph='star' of sgp, expected exponential, .*; e.g. dpsgd:ring"),
        ("--world-size 4 --methods adam", "got method='adam', expected <method>.*localsgd.*; e.g. sgp"),
        ("--world-size 4 --methods sgp sgp:npeer-exponential", "got methods sgp and sgp:npeer-exponential, which are"),
        ("--world-size 4 --methods sgp:ring:sign", "got code='sign' of sgp, expected no code for it"),
        ("--world-size 4 --methods dpwa:ring", "got graph='ring' of dpwa, expected no graph for it"),
        ("--world-size 4 --methods choco:ring:zip", "got code='zip' of choco, expected sign, topk"),
        ("--world-size 6 --methods dpsgd:hypercube", "got world_size=6, expected a power of two"),
        (
            "--world-size 6 --methods choco:bipartite-exponential",
            "expected an undirected graph that never changes; take",
        ),
        ("--world-size 6 --methods moniqua:exponential", "got moniqua on .*, expected an undirected graph; take"),
        (
            "--world-size 6 --methods adpsgd:ring",
            "got adpsgd on .*, expected a bipartite graph with one peer per round",
        ),
        ("--world-size 600 --methods matcha", "got matcha with 600 workers, expected at most 512"),
        ("--world-size 4 --methods sgp --peers 4", "got peers_per_itr=4, expected 1 to 3"),
        ("--world-size 4 --problem maze()", "with the unknown name 'maze', expected one of Consensus, Digits"),
        ("", "required: --world-size"),
    ],
)
def test_bad_input_is_one_line(arguments: str, expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    code: Any = None
    try:
        code = main(arguments.split())
    except SystemExit as error:
        code = error.code
    said = capsys.readouterr()
    assert code == 2
    assert said.out == ""
    assert said.err.startswith("error: ")
    assert said.err.count("\n") == 1
    with pytest.raises(ValueError, match=expected):  # a regex
        raise ValueError(said.err)


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: Compute(seconds=0.0), "got seconds=0.0, expected a positive number; its unit is in its name"),
        (lambda: Compute(seconds=math.nan), "got seconds=nan, expected a positive number"),
        (lambda: Compute(seconds=[0.1, -1.0]), "got seconds=-1.0, expected a positive number"),
        (lambda: Compute(seconds=1, step_spread=-1), "got step_spread=-1, expected a number of at least 0"),
        (lambda: Compute(seconds=1, straggle_share=2), "got straggle_share=2, expected a share from 0 to 1"),
        (lambda: Network("-1 Gbit/s"), "got rate_bit_s=-1000000000.0, expected a positive number"),
        (lambda: Network("1 Gbit/s", slow_factor=0.5), "got slow_factor=0.5, expected a number of at least 1"),
        (lambda: Network(LinkSpec(1e9, math.inf)), "got latency_s=inf, expected"),
        (lambda: Network("1 Gbit/s", shares=(1, 2)), r"with shares=\(1, 2\), expected a matrix of 2 x 2"),
        (lambda: replace(CLUSTER, world_size=0), "got world_size=0, expected a whole number of at least 1"),
        (lambda: replace(CLUSTER, num_parameters=-5), "got num_parameters=-5, expected a whole number"),
        (lambda: Digits(learning_rate=math.nan), "got learning_rate=nan, expected a positive number"),
        (lambda: Digits(label_skew=-1), "got label_skew=-1, expected a share"),
        (lambda: Digits(batch_size=0), "got batch_size=0, expected at least 1"),
        (lambda: simulate("sgp", CLUSTER, digits(), target=math.nan), "got target=nan and max_steps=320, expected"),
        (lambda: simulate("sgp", CLUSTER, digits(), max_steps=0), "and max_steps=0, expected"),
    ],
)
def test_numbers_out_of_range_are_named(make: Callable[[], Any], expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        make()


def test_the_command_prints_a_table_and_advice(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = "--problem Consensus() --target 1e-6 --world-size 8 --methods sgp osgp choco:ring:topk"
    assert main(arguments.split()) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "8 workers, 25 M parameters; distance from the mean to 1e-06"
    assert " ".join(lines[2].split()) == "method graph steps s per step s to target MB per rank waiting disagreement"
    assert lines[3].startswith(("sgp", "osgp"))
    assert "choco:topk" in lines[5]
    assert "not reached" in lines[5]
    assert lines[7].startswith("Choose ")


def test_of_all_methods_those_that_do_not_fit_are_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--world-size", "8", "--peers", "2", "--max-steps", "4"]) == 0
    said = capsys.readouterr().out
    assert "Left out: got adpsgd on DynamicBipartiteExponentialGraph(8, peers_per_itr=2), expected a bipartite" in said
    assert "Left out: got choco on HypercubeGraph" in said
    assert "sgp " in said


@pytest.mark.e2e
@pytest.mark.timeout(120)
def test_the_command_runs_without_warning() -> None:
    output = module_output("gossip_modules.lab", "--world-size", "12", "--max-steps", "4")
    assert "No method reaches the target" in output


@pytest.mark.parametrize("name", ["", ".clock", ".tasks", ".plan"])
def test_examples_run(name: str) -> None:
    module = importlib.import_module(f"gossip_modules.lab{name}")
    assert doctest.testmod(module).failed == 0
