"""Recipes wrap a model as their method says."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gossip_modules as gm
from gossip_modules.extras import place_of
from gossip_modules.matcha.__main__ import main as write_plan
from gossip_modules.methods import METHODS, Context, wrap
from gossip_modules.methods.graphs import base_graph, make_graph
from tests.train.training.test_checkpoint import Ranks
from train.job.addresses import own_host
from train.job.preemption import StopRequest
from train.methods.pace import make_pace
from train.tasks.images.config import Config
from train.training.run import context_of

WRAP = "gossip_modules.methods.wrapping"
UNDIRECTED = ("matcha", "choco", "deepsqueeze", "moniqua", "powergossip")
"""Recipes for undirected graphs only."""


@pytest.fixture
def wrapped(monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """What a recipe says to GossipDataParallel, given the size of the world and options."""

    def wrap_in(size: int, **options: Any) -> dict[str, Any]:
        monkeypatch.setattr(f"{WRAP}.GossipDataParallel", lambda module, **arguments: arguments)
        config = Config(**options)
        context = Context(world_size=size, seed=config.seed, steps_per_epoch=10)
        wrapper = wrap(config.algorithm or config.recipe, nn.Linear(2, 2), config, context)
        assert isinstance(wrapper, dict)
        return wrapper

    return wrap_in


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"recipe": "choco"}, r"Choco\(.*SignNorm\(2048\), step_size=0\.45\)"),
        ({"algorithm": "Choco(RandomK(0.01), step_size=0.01)", "seed": 4}, r"Choco\(.*RandomK\(0\.01, seed=4"),
        ({"algorithm": "Choco(QSGD(4, seed=7), step_size=0.34)", "seed": 4}, r"Choco\(.*QSGD\(bits=4.*seed=7"),
        ({"algorithm": "Choco(Cast(float16), step_size=1.0)"}, r"Choco\(.*Cast\(torch\.float16\), step_size=1\.0\)"),
        ({"recipe": "moniqua"}, r"Moniqua\(theta=1\.0, bits=8, step_size=1\.0, seed=1\)"),
        ({"algorithm": "DiLoCo(sync_every=7, lr=0.4)"}, r"DiLoCo\(sync_every=7, .*lr=0\.4, momentum=0\.9"),
        ({"recipe": "noloco", "seed": 3}, r"NoLoCo\(sync_every=10.*seed=3"),
        ({"recipe": "sparseloco"}, r"SparseLoCo\(sync_every=10.*ChunkTopK\(41, 4096, values=TwoBit\(256\)\)"),
        ({"recipe": "d2"}, r"D2\(\)"),
    ],
)
def test_the_algorithm_reaches_the_wrapper(
    wrapped: Callable[..., dict[str, Any]], options: dict[str, Any], said: str
) -> None:
    arguments = wrapped(8, **options)
    assert re.match(said, repr(arguments["algorithm"]))
    assert "graph" not in arguments  # the wrapper has a default


@pytest.mark.parametrize(
    ("graph", "expected"),
    [
        ("torus", gm.graph_manager.TorusGraph(8, peers_per_itr=3)),
        ("bipartite-exponential", gm.graph_manager.DynamicBipartiteExponentialGraph(8)),
        ("matcha0", gm.graph_manager.NetworkXGraph(gm.graph_manager.select_graph(0))),
        ("RingGraph(peers_per_itr=1)", gm.RingGraph(8)),
        ("BaseGraph()", gm.graph_manager.BaseGraph(8)),
    ],
)
def test_a_graph_is_a_name_or_a_text(
    wrapped: Callable[..., dict[str, Any]], graph: str, expected: gm.graph_manager.GraphManager
) -> None:
    assert repr(wrapped(8, recipe="choco", graph=graph)["graph"](8)) == repr(expected)


def test_plain_gossip_has_one_peer_on_the_graph_of_a_name(wrapped: Callable[..., dict[str, Any]]) -> None:
    assert repr(wrapped(8, recipe="sgp", graph="ring")["graph"](8)) == repr(gm.RingGraph(8))
    two = wrapped(8, recipe="sgp", graph="ring", peers_per_itr="2")["graph"](8)
    assert repr(two) == repr(gm.RingGraph(8, peers_per_itr=2))
    with pytest.raises(
        ValueError, match=r"got graph='chain', expected one of auto, .* for a recipe that chooses peers_"
    ):
        wrapped(6, recipe="dpsgd", graph="chain")["graph"](6)


@pytest.mark.parametrize(
    ("graph", "message"),
    [
        ("RingGraf(peers_per_itr=1)", "the unknown name 'RingGraf', expected one of .*; did you mean 'RingGraph'"),
        ("RingGraph(8)", r"too many positional arguments\), expected RingGraph\(\*, peers_per_itr=1\) with"),
        ("RingGraph(peers=2)", "has the argument 'peers', expected some of .*; did you mean 'peers_per_itr'"),
        ("rig", "got graph='rig', expected one of auto, .*; did you mean 'ring'"),
    ],
)
def test_a_graph_that_is_none_is_named(graph: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Config(graph=graph)


@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        ("DiLoC()", r"with the unknown name 'DiLoC', expected one of AllReduce, .*; did you mean 'diloco'"),
        ("DiLoCo(sync_evry=3)", r"has the argument 'sync_evry', expected some of DiLoCo\(sync_every=30.*'sync_every'"),
        (
            "Choco(SignNorm())",
            r"missing a required argument: 'step_size'\), expected Choco\(compressor, \*, step_size\)",
        ),
        ("__import__('os').system('ls')", "in which __import__\\('os'\\).system is no known name"),
        ("DiLoCo(lr=(lambda: 1)())", "in which .*lambda: 1.* is no known name"),
        ("DiLoCo(lr=1 + 1)", r"in which 1 \+ 1 is neither a literal nor a call of a known name"),
        ("[DiLoCo() for _ in 'ab']", "in which .* is no call of a name"),
        ("DiLoCo(**{'lr': 1})", "has no names of arguments after"),
        ("DiLoCo(", "which is no expression of Python"),
        ("SignNorm()", r"expected an algorithm; pass SignNorm\(2048\) to one"),
        ("SGP().over(Choco(SignNorm(), step_size=0.4))", r"in which SGP\(\) is no algorithm, so that it is over"),
        ("D2().over(TopK(0.1))", r"got TopK\(0.1\) as the inner algorithm of D2\(\), expected an algorithm whose"),
        (
            "D2().over(1)",
            r"got 1 as the inner algorithm of D2\(\), expected an algorithm whose rounds mix; pass .*, such as PowerGo",
        ),
        ("DiLoCo(sync_every=10, sync_every=3)", "has an argument twice"),
        ("f(" * 600 + ")" * 600, r"unknown name|no expression of Python"),
        ("x" * 3000, "got algorithm of 3000 characters, expected at most 2000"),
        ("DiLoCo(sync_every=0)", "DiLoCo: got sync_every=0, expected a whole number of at least 1"),
        ("Dpwa(fetch_probability='often')", "got|expected"),
    ],
)
def test_an_algorithm_that_is_none_is_named(algorithm: str, message: str) -> None:
    if algorithm.startswith("Dpwa"):
        with pytest.raises((ValueError, TypeError)):
            wrap(algorithm, nn.Linear(2, 2), Config(), Context())
        return
    with pytest.raises(ValueError, match=message):
        Config(algorithm=algorithm)


def test_a_recipe_is_the_short_name_of_an_algorithm() -> None:
    for name, method in METHODS.items():
        assert replace(Config(nesterov=False), recipe=name) == Config(algorithm=method.text, nesterov=False)
    config = Config(algorithm="DiLoCo(sync_every=50)")
    assert (config.recipe, str(config.run_dir)) == ("diloco", "runs/digits_diloco")
    assert config.identity == Config(algorithm="DiLoCo(50,lr=0.7)").identity
    assert config.identity != Config(algorithm="DiLoCo(sync_every=51)").identity
    assert Config(recipe="diloco", algorithm="diloco") == Config(recipe="diloco")
    with pytest.raises(ValueError, match=r"got recipe='choco' beside algorithm='DiLoCo\(\)', expected one of them"):
        Config(recipe="choco", algorithm="DiLoCo()")


@pytest.mark.parametrize(
    ("algorithm", "text"),
    [
        ("SlowMo(sync_every=10)", "SlowMo(sync_every=10)"),
        ("Sparta(0.01, seed=0)", "Sparta(ratio=0.01)"),
        ("DiLoCo(10, anchor_device='cpu')", "DiLoCo(sync_every=10, anchor_device='cpu')"),
    ],
)
def test_an_algorithm_with_one_setting_of_its_own_is_not_the_recipe(algorithm: str, text: str) -> None:
    config = Config(algorithm=algorithm)
    assert config.chosen.made != replace(config, algorithm="").chosen.made
    assert config.identity["algorithm"] == text


@pytest.mark.parametrize(
    ("name", "degree"), [("auto", 2), ("ring", 2), ("torus", 3), ("hypercube", 3), ("complete", 7)]
)
def test_base_graphs_have_all_neighbours(name: str, degree: int) -> None:
    base = base_graph(name, num_nodes=8)
    assert list(base.nodes) == list(range(8))
    assert {base.degree(node) for node in base} == {degree}


def test_base_graphs_that_do_not_fit_are_named() -> None:
    with pytest.raises(ValueError, match=r"got graph='matcha1' for 8 ranks, expected the 16 ranks that it has"):
        base_graph("matcha1", num_nodes=8)
    with pytest.raises(ValueError, match=r"got graph='exponential', expected one of auto, ring, .*undirected graph"):
        base_graph("exponential", num_nodes=8)
    with pytest.raises(ValueError, match=r"got graph='matcha0', expected one of .*MATCHA\(budget=1.0\)"):
        make_graph("matcha0", num_nodes=8, peers_per_itr=1, push_sum=False)
    for index in range(6):
        graph = gm.graph_manager.select_graph(index)
        assert set(base_graph(f"matcha{index}", num_nodes=len(graph)).edges) == set(graph.edges)


def test_matcha_plans_on_the_base_graph(wrapped: Callable[..., dict[str, Any]]) -> None:
    graph = wrapped(8, algorithm="MATCHA(budget=0.3)", graph="matcha0", seed=5)["graph"](8)
    assert isinstance(graph, gm.MatchaGraph)
    assert graph.seed == 5
    assert sum(graph.probabilities) <= 0.3 * len(graph.matchings) + 1e-6


@pytest.mark.parametrize("index", range(6))
def test_matcha_trains_by_the_plan_that_is_printed(
    wrapped: Callable[..., dict[str, Any]], index: int, tmp_path: Path
) -> None:
    path = tmp_path / "plan.json"
    write_plan(["--graph", str(index), "--budget", "0.5", "--num-budgets", "0", "--output", str(path)])
    rho = json.loads(path.read_text(encoding="utf-8"))["rho"]
    size = len(gm.graph_manager.select_graph(index))
    named = wrapped(size, recipe="matcha", graph=f"matcha{index}", seed=5)["graph"](size)
    planned = wrapped(size, algorithm=f"MATCHA(plan={str(path)!r})", seed=5)["graph"]
    assert repr(planned(size)) == repr(named)
    assert planned(size).rho == rho
    with pytest.raises(ValueError, match=rf"got the plan .* for {size} ranks, expected one for the 4"):
        planned(4)


def test_a_plan_is_part_of_the_identity_of_a_run(tmp_path: Path) -> None:
    """By what it says: the file may move, but a run goes on with the same plan only."""
    paths = [tmp_path / name for name in ("first.json", "second.json", "other.json")]
    for path, budget in zip(paths, ("0.5", "0.5", "0.6"), strict=True):
        write_plan(["--graph", "5", "--budget", budget, "--num-budgets", "0", "--output", str(path)])
    texts = [Config(algorithm=f"MATCHA(plan={str(path)!r})").identity["algorithm"] for path in paths]
    assert texts[0] == texts[1] != texts[2]


def test_options_without_effect_are_named_and_have_none(wrapped: Callable[..., dict[str, Any]]) -> None:
    with pytest.warns(
        UserWarning, match="^got peers_per_itr, wire_dtype, without effect with CHOCO-SGD; leave it out$"
    ):
        arguments = wrapped(4, recipe="choco", wire_dtype="bfloat16", peers_per_itr="3")
    assert arguments["wire_dtype"] is None
    with pytest.warns(UserWarning, match="^got graph, gossip_every, without effect with DiLoCo; leave it out$"):
        assert "graph" not in wrapped(4, recipe="diloco", graph="ring", gossip_every=2)
    assert wrapped(4, recipe="osgp", max_staleness=2)["max_staleness"] == 2
    assert wrapped(4, recipe="osgp")["overlap"]
    for recipe in ("dpsgd", "sgp", *UNDIRECTED):
        assert wrapped(4, recipe=recipe, overlap=True, max_staleness=1)["overlap"]
    for recipe in ("dpsgd", "sgp", "osgp", "matcha"):
        assert wrapped(4, recipe=recipe, wire_dtype="bfloat16")["wire_dtype"] is torch.bfloat16


def said_to(monkeypatch: pytest.MonkeyPatch, wrapper: str, **options: Any) -> dict[str, Any]:
    """What a recipe says to that wrapper on rank 1 of 4."""
    monkeypatch.setattr(f"gossip_modules.{place_of(wrapper).replace(':', '.')}", lambda module, **arguments: arguments)
    config = Config(**options)
    world = SimpleNamespace(rank=1, size=4, backend="gloo", on_every_rank=None)
    task = SimpleNamespace(steps_per_epoch=10, example_inputs=None)
    context = context_of(task, config, world)  # type: ignore[arg-type]
    arguments = wrap(config.algorithm or config.recipe, nn.Linear(2, 2), config, context)
    assert isinstance(arguments, dict)
    return arguments


def test_adpsgd_takes_the_graph_that_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    wrapper = "BilatGossipDataParallel"
    arguments = said_to(monkeypatch, wrapper, recipe="adpsgd", timeout_seconds=7)
    assert arguments == {"graph": None, "schedule": 1, "timeout": timedelta(seconds=7), "membership": None}
    arguments = said_to(monkeypatch, wrapper, recipe="adpsgd", graph="bipartite-linear")
    assert repr(arguments["graph"](4)) == repr(gm.graph_manager.DynamicBipartiteLinearGraph(4))


def test_wagma_takes_its_knobs(monkeypatch: pytest.MonkeyPatch) -> None:
    wrapper = "GroupAverageDataParallel"
    common = {"timeout": timedelta(seconds=300), "membership": None}
    arguments = said_to(monkeypatch, wrapper, recipe="wagma")
    assert arguments == {"group_size": None, "sync_period": 10, "wait_avoiding": True, "overlap": False, **common}
    arguments = said_to(monkeypatch, wrapper, algorithm="WAGMA(group_size=4, sync_period=0, wait_avoiding=False)")
    assert arguments == {"group_size": 4, "sync_period": 0, "wait_avoiding": False, "overlap": False, **common}


@pytest.mark.parametrize(
    ("options", "interpolation"),
    [
        ("", gm.dpwa.ConstantInterpolation(0.5)),
        ("interpolation=ConstantInterpolation(0.2), ", gm.dpwa.ConstantInterpolation(0.2)),
        ("interpolation=ClockInterpolation(), ", gm.dpwa.ClockInterpolation()),
        ("interpolation=LossInterpolation(), ", gm.dpwa.LossInterpolation()),
    ],
)
def test_workers_of_dpwa_learn_the_addresses_of_all_others(
    monkeypatch: pytest.MonkeyPatch, options: str, interpolation: gm.dpwa.Interpolation
) -> None:
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)

    class Worker:
        def __init__(self, module: nn.Module, *, peers: dict[str, str], **arguments: Any) -> None:
            ((self.name, self.address),) = peers.items()
            assert self.address == "tcp://127.0.0.1:*"
            self.address = f"tcp://127.0.0.1:{self.name[-1]}"
            self.arguments, self.peers = arguments, dict[str, str]()

        def add_peer(self, name: str, address: str) -> None:
            self.peers[name] = address

    monkeypatch.setattr("gossip_modules.dpwa.wrapper.PairwiseDataParallel", Worker)
    text = f"Dpwa({options}divergence_threshold=0.3, fetch_probability=0.9)"

    def wrap_on(member: Any) -> Any:
        on_every_rank, host = member.on_every_rank, partial(own_host, member)
        context = Context(rank=member.rank, world_size=3, on_every_rank=on_every_rank, own_host=host)
        return wrap(text, nn.Linear(2, 2), Config(), context)

    workers = Ranks(3).run(wrap_on)
    names = [f"rank_{rank:04d}" for rank in range(3)]
    for name, worker in zip(names, workers, strict=True):
        assert worker.peers == {other: f"tcp://127.0.0.1:{other[-1]}" for other in names if other != name}
        assert worker.arguments.get("interpolation", gm.dpwa.ConstantInterpolation(0.5)) == interpolation
        assert (worker.arguments["divergence_threshold"], worker.arguments["fetch_probability"]) == (0.3, 0.9)


def test_ways_of_taking_steps() -> None:
    def pace_of(**options: Any) -> str:
        config = Config(**options)
        wrapper = gm.GroupAverageDataParallel.__new__(gm.GroupAverageDataParallel)
        world: Any = SimpleNamespace(size=1, rank=0, control=None, store=dist.HashStore())
        counter, request = SimpleNamespace(step=0), StopRequest.__new__(StopRequest)
        pace = make_pace(config.chosen, config, counter=counter, wrapper=wrapper, request=request, world=world)
        return type(pace).__name__

    for recipe in set(METHODS) - {"adpsgd", "a2cid2", "wagma", "dpwa"}:
        assert pace_of(recipe=recipe, nesterov=False) == "Lockstep"
    assert pace_of(recipe="adpsgd") == pace_of(recipe="a2cid2") == pace_of(recipe="dpwa") == "SharedSteps"
    assert pace_of(recipe="wagma") == "SharedRounds"
    # Where ranks wait for each other in person none may stop alone.
    assert pace_of(algorithm="WAGMA(wait_avoiding=False)") == "Lockstep"
    assert pace_of(algorithm="WAGMA(group_size=1)") == "Lockstep"


def test_dpwa_weighs_losses_where_its_arguments_say_so() -> None:
    texts = ("Dpwa()", "Dpwa(interpolation=LossInterpolation())", "Dpwa(divergence_threshold=0.1)", "SGP()")
    assert [Config(algorithm=text).weighs_losses for text in texts] == [False, True, True, False]


def test_a_schedule_is_a_text(wrapped: Callable[..., dict[str, Any]]) -> None:
    for recipe in ("dpsgd", "sgp", "osgp"):
        found = wrapped(4, recipe=recipe, schedule="Schedule(average_every=8)")["schedule"]
        assert found == gm.Schedule(average_every=8)
    assert wrapped(4, gossip_every=2, average_every=8)["schedule"] == gm.Schedule(2, 8)
    with pytest.raises(
        ValueError, match=r"got schedule=.* with gossip_every=2 and average_every=0, expected the schedu"
    ):
        Config(schedule="Schedule(average_every=8)", gossip_every=2)
    with pytest.raises(ValueError, match="the unknown name 'Scedule', expected one of Schedule; did you mean"):
        Config(schedule="Scedule(average_every=8)")
    with pytest.raises(ValueError, match=r"expected a Schedule: ConsensusControl is gone; take algorithm=SlowMo\("):
        Config(schedule="ConsensusControl(target=2.0)")
