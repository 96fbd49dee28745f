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
from torch import Tensor, nn

import gossip_modules as gm
from gossip_modules.matcha.__main__ import main as write_plan
from gossip_modules.methods import METHOD_OPTIONS, METHODS, Context, MethodOptions, used_options, wrap
from gossip_modules.methods.graphs import base_graph, make_graph, make_static_graph, make_undirected_graph
from tests.harness.ranks import CPU, TIMEOUT, run_ranks
from tests.train.training.test_checkpoint import Ranks
from train.job.addresses import own_host
from train.job.preemption import StopRequest
from train.methods.pace import make_pace
from train.tasks.images.config import Config
from train.training.run import context_of

WRAP = "gossip_modules.methods.wrapping"
UNDIRECTED: dict[str, dict[str, Any]] = {
    "matcha": {"budget": 1.0},
    "choco": {},
    "deepsqueeze": {},
    "moniqua": {"theta": 20.0},
    "powergossip": {},
}
"""Recipes for undirected graphs only, with what mixes a few normal numbers."""
"""Recipes for undirected graphs only, with what mixes a few normal numbers."""


@pytest.fixture
def wrapped(monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """What a recipe says to GossipDataParallel, given the size of the world and options."""

    def wrap_in(size: int, **options: Any) -> dict[str, Any]:
        monkeypatch.setattr(f"{WRAP}.GossipDataParallel", lambda module, **arguments: arguments)
        config = Config(**options)
        context = Context(world_size=size, seed=config.seed, steps_per_epoch=10)
        wrapper = wrap(config.recipe, nn.Linear(2, 2), config, context)
        assert isinstance(wrapper, dict)
        return wrapper

    return wrap_in


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize(
    ("recipe", "options"), [*UNDIRECTED.items(), ("matcha", {"budget": 0.5}), ("matcha", {"graph": "complete"})]
)
def test_a_recipe_brings_a_world_of_any_size_together(
    wrapped: Callable[..., dict[str, Any]], recipe: str, options: dict[str, Any], size: int
) -> None:
    arguments = [wrapped(size, recipe=recipe, seed=3, **options) for _ in range(size)]
    start = torch.randn(size, 12, 10, generator=torch.Generator().manual_seed(0))

    def body(group: dist.ProcessGroup) -> Tensor:
        own = arguments[group.rank()]
        gossiper = own.get("gossiper") or gm.PushPull(wire_dtype=own["wire_dtype"])
        mixing = own.get("mixing") or gm.MetropolisHastingsMixing(own["graph"])
        gossiper.bind(mixing, gm.ProcessGroupTransport(group, device=CPU, timeout=TIMEOUT))
        x = start[group.rank()].clone()
        for t in range(20):
            gossiper.mix(x, t)
        return x

    ends = torch.stack(run_ranks(size, body))
    assert torch.allclose(ends.mean(0), start.mean(0), atol=1e-5)
    if size > 1:
        assert (ends - ends.mean(0)).norm() < 0.99 * (start - start.mean(0)).norm()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"recipe": "choco"}, r"Choco\(SignNorm\(2048\), step_size=0\.45\)"),
        ({"recipe": "choco", "compressor": "topk"}, r"Choco\(TopK\(0\.01\), step_size=0\.0375\)"),
        (
            {"recipe": "choco", "compressor": "randomk", "seed": 4},
            r"Choco\(RandomK\(0\.01, seed=4.*\), step_size=0\.01\)",
        ),
        ({"recipe": "choco", "compressor": "qsgd"}, r"Choco\(QSGD\(bits=8.*step_size=0\.34\)"),
        ({"recipe": "choco", "compressor": "qsgd", "compression_bits": 4}, r"Choco\(QSGD\(bits=4.*step_size=0\.34\)"),
        (
            {"recipe": "choco", "compressor": "qsgd", "compression_bits": 2, "step_size": 0.1},
            r"Choco\(QSGD\(bits=2.*step_size=0\.1\)",
        ),
        (
            {"recipe": "moniqua", "compression_bits": 4, "step_size": 0.2},
            r"Moniqua\(theta=1\.0, bits=4, step_size=0\.2, seed=1\)",
        ),
        ({"recipe": "choco", "compressor": "float16"}, r"Choco\(Cast\(torch\.float16\), step_size=1\.0\)"),
        (
            {"recipe": "choco", "compressor": "topk", "compression_ratio": 0.1, "step_size": 0.3},
            r"Choco\(TopK\(0\.1\), step_size=0\.3\)",
        ),
        ({"recipe": "deepsqueeze"}, r"DeepSqueeze\(SignNorm\(2048\), step_size=0\.01\)"),
        ({"recipe": "moniqua", "theta": 0.5}, r"Moniqua\(theta=0\.5, bits=8, step_size=1\.0, seed=1\)"),
        (
            {"recipe": "powergossip", "power_rank": 2, "power_iterations": 3, "warm_start": False},
            r"PowerGossip\(rank=2, num_iterations=3, warm_start=False, step_size=None, compress_vectors=False",
        ),
    ],
)
def test_options_reach_the_gossiper(wrapped: Callable[..., dict[str, Any]], options: dict[str, Any], said: str) -> None:
    arguments = wrapped(8, **options)
    assert re.match(said, repr(arguments["gossiper"]))
    assert repr(arguments["graph"]) == repr(gm.RingGraph(8, peers_per_itr=2))


def test_a_step_size_that_nobody_published_has_to_be_given(wrapped: Callable[..., dict[str, Any]]) -> None:
    cases: tuple[tuple[dict[str, Any], str], ...] = (
        (
            {"recipe": "choco", "compressor": "topk", "compression_ratio": 0.1},
            r"with compressor=topk and compression_ratio=0.1 and no step_size, expected one: known are those of sign, "
            r"topk at a ratio of 0.01, randomk at a ratio of 0.01, qsgd at 4 bits, qsgd at 8 bits, bfloat16, float16; ",
        ),
        (
            {"recipe": "choco", "compressor": "qsgd", "compression_bits": 2},
            "compressor=qsgd and compression_bits=2 and no step",
        ),
        (
            {"recipe": "deepsqueeze", "compressor": "qsgd"},
            "compression_bits=8 and no step_size, .* of sign; pass --step",
        ),
        (
            {"recipe": "deepsqueeze", "compressor": "float16"},
            "got deepsqueeze with compressor=float16 and no step",
        ),
        (
            {"recipe": "moniqua", "compression_bits": 4},
            "got moniqua with compression_bits=4 and no step_size, .*",
        ),
        ({"recipe": "moniqua", "compression_bits": 2}, "known are those of moniqua at 8 bits; pass --step-size"),
    )
    for options, message in cases:
        with pytest.raises(ValueError, match=message):
            wrapped(4, **options)


@pytest.mark.parametrize(
    ("name", "degree"), [("auto", 2), ("ring", 2), ("torus", 3), ("hypercube", 3), ("complete", 7)]
)
def test_static_graphs_have_all_neighbours_in_every_round(name: str, degree: int) -> None:
    graph = make_static_graph(name, num_nodes=8)
    assert graph.is_symmetric
    assert not graph.is_dynamic
    assert len(graph.out_peers(0, 5)) == degree
    base = base_graph(name, num_nodes=8)
    assert list(base.nodes) == list(range(8))
    assert {frozenset(edge) for edge in base.edges} == {
        frozenset((i, j)) for i in range(8) for j in graph.out_peers(i, 0)
    }


def test_static_graphs_that_do_not_fit_are_named() -> None:
    with pytest.raises(ValueError, match=r"got graph='matcha1' for 8 nodes, expected the 16 nodes that it has"):
        make_static_graph("matcha1", num_nodes=8)
    with pytest.raises(ValueError, match=r"got graph='exponential', expected one of auto, ring, .*undirected graph"):
        make_static_graph("exponential", num_nodes=8)
    with pytest.raises(ValueError, match=r"got graph='matcha0', expected one of .*--recipe matcha --budget 1"):
        make_graph("matcha0", num_nodes=8, peers_per_itr=1, push_sum=False)
    for index in range(6):
        graph = gm.select_graph(index)
        assert set(base_graph(f"matcha{index}", num_nodes=len(graph)).edges) == set(graph.edges)


def test_matcha_plans_on_the_base_graph(wrapped: Callable[..., dict[str, Any]]) -> None:
    mixing = wrapped(8, recipe="matcha", graph="matcha0", budget=0.3, seed=5)["mixing"]
    assert isinstance(mixing, gm.LaplacianMixing)
    assert isinstance(mixing.graph, gm.MatchaGraph)
    assert mixing.graph.seed == 5
    assert sum(mixing.graph.probabilities) <= 0.3 * len(mixing.graph.matchings) + 1e-6


@pytest.mark.parametrize("index", range(6))
def test_matcha_trains_by_the_plan_that_is_printed(
    wrapped: Callable[..., dict[str, Any]], index: int, tmp_path: Path
) -> None:
    path = tmp_path / "plan.json"
    write_plan(["--graph", str(index), "--budget", "0.5", "--num-budgets", "0", "--output", str(path)])
    rho = json.loads(path.read_text(encoding="utf-8"))["rho"]
    size = len(gm.select_graph(index))
    named = wrapped(size, recipe="matcha", graph=f"matcha{index}", seed=5)["mixing"]
    planned = wrapped(size, recipe="matcha", plan=str(path), seed=5)["mixing"]
    assert repr(planned) == repr(named)
    assert planned.graph.rho == rho
    with pytest.raises(ValueError, match=rf"got the plan .* for {size} ranks, expected one for 4"):
        wrapped(4, recipe="matcha", plan=str(path))


def test_a_plan_is_part_of_what_a_run_is(wrapped: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    """By what it says: the file may move, but a run goes on with the same plan only."""
    paths = [tmp_path / name for name in ("first.json", "second.json", "other.json")]
    for path, budget in zip(paths, ("0.5", "0.5", "0.6"), strict=True):
        write_plan(["--graph", "5", "--budget", budget, "--num-budgets", "0", "--output", str(path)])
    first, second, other = (Config(recipe="matcha", plan=str(path)).identity["plan"] for path in paths)
    assert first == second != other
    assert Config(recipe="sgp", plan=str(paths[0])).identity["plan"] == Config().identity["plan"] == ""
    with pytest.warns(UserWarning, match="^graph, budget: without effect with --recipe matcha$"):
        wrapped(8, recipe="matcha", plan=str(paths[0]), graph="torus", budget=0.3)
    with pytest.warns(UserWarning, match="^plan: without effect with --recipe sgp$"):
        wrapped(8, recipe="sgp", plan=str(paths[0]))


def test_options_without_effect_are_named_and_have_none(wrapped: Callable[..., dict[str, Any]]) -> None:
    with pytest.warns(UserWarning, match="^peers_per_itr, max_staleness, budget: without effect with --recipe choco$"):
        arguments = wrapped(4, recipe="choco", max_staleness=2, budget=0.1, peers_per_itr="3")
    assert arguments["max_staleness"] == 0
    with pytest.warns(UserWarning, match="^compression_ratio: without effect"):
        wrapped(4, recipe="choco", compression_ratio=0.5)
    with pytest.warns(UserWarning, match="^overlap, max_staleness, step_size: without effect with --recipe sgp$"):
        assert not wrapped(4, recipe="sgp", overlap=True, max_staleness=1, step_size=0.5)["overlap"]
    assert wrapped(4, recipe="osgp", max_staleness=2)["max_staleness"] == 2
    for recipe in ("dpsgd", *UNDIRECTED):
        assert wrapped(4, recipe=recipe, overlap=True, max_staleness=1)["overlap"]
    for recipe in ("dpsgd", "sgp", "osgp", "matcha"):
        assert wrapped(4, recipe=recipe, wire_dtype="bfloat16")["wire_dtype"] is torch.bfloat16


def said_to(monkeypatch: pytest.MonkeyPatch, wrapper: str, **options: Any) -> dict[str, Any]:
    """What a recipe says to that wrapper on rank 1 of 4."""
    monkeypatch.setattr(f"{WRAP}.{wrapper}", lambda module, **arguments: arguments)
    config = Config(**options)
    world = SimpleNamespace(rank=1, size=4, backend="gloo", on_every_rank=None)
    task = SimpleNamespace(steps_per_epoch=10, example_inputs=None)
    context = context_of(task, config, world)  # type: ignore[arg-type]
    arguments = wrap(config.recipe, nn.Linear(2, 2), config, context)
    assert isinstance(arguments, dict)
    return arguments


def test_adpsgd_takes_the_graph_that_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    wrapper = "BilatGossipDataParallel"
    arguments = said_to(monkeypatch, wrapper, recipe="adpsgd", timeout_seconds=7)
    assert arguments == {"graph": None, "timeout": timedelta(seconds=7), "membership": None}
    arguments = said_to(monkeypatch, wrapper, recipe="adpsgd", graph="bipartite-linear")
    assert repr(arguments["graph"]) == repr(gm.DynamicBipartiteLinearGraph(4))


def test_wagma_takes_its_knobs(monkeypatch: pytest.MonkeyPatch) -> None:
    wrapper = "GroupAverageDataParallel"
    common = {"timeout": timedelta(seconds=300), "membership": None}
    arguments = said_to(monkeypatch, wrapper, recipe="wagma")
    assert arguments == {"group_size": None, "sync_period": 10, "wait_avoiding": True, "overlap": False, **common}
    arguments = said_to(monkeypatch, wrapper, recipe="wagma", group_size=4, sync_period=0, wait_avoiding=False)
    assert arguments == {"group_size": 4, "sync_period": 0, "wait_avoiding": False, "overlap": False, **common}


@pytest.mark.parametrize(
    ("options", "interpolation"),
    [
        ({}, gm.ConstantInterpolation(0.5)),
        ({"interpolation_value": 0.2}, gm.ConstantInterpolation(0.2)),
        ({"interpolation": "clock"}, gm.ClockInterpolation()),
        ({"interpolation": "loss"}, gm.LossInterpolation()),
    ],
)
def test_workers_of_dpwa_learn_the_addresses_of_all_others(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], interpolation: gm.Interpolation
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

    monkeypatch.setattr(f"{WRAP}.PairwiseDataParallel", Worker)
    config = Config(recipe="dpwa", divergence_threshold=0.3, fetch_probability=0.9, **options)

    def wrap_on(member: Any) -> Any:
        on_every_rank, host = member.on_every_rank, partial(own_host, member)
        context = Context(rank=member.rank, world_size=3, on_every_rank=on_every_rank, own_host=host)
        return wrap("dpwa", nn.Linear(2, 2), config, context)

    workers = Ranks(3).run(wrap_on)
    names = [f"rank_{rank:04d}" for rank in range(3)]
    for name, worker in zip(names, workers, strict=True):
        assert worker.peers == {other: f"tcp://127.0.0.1:{other[-1]}" for other in names if other != name}
        assert worker.arguments["interpolation"] == interpolation
        assert (worker.arguments["divergence_threshold"], worker.arguments["fetch_probability"]) == (0.3, 0.9)


def test_who_takes_its_steps_how() -> None:
    def pace_of(**options: Any) -> str:
        config = Config(**options)
        wrapper = gm.GroupAverageDataParallel.__new__(gm.GroupAverageDataParallel)
        world: Any = SimpleNamespace(size=1, rank=0, control=None, store=dist.HashStore())
        counter, request = SimpleNamespace(step=0), StopRequest.__new__(StopRequest)
        pace = make_pace(config.recipe, config, counter=counter, wrapper=wrapper, request=request, world=world)
        return type(pace).__name__

    for recipe in set(METHODS) - {"adpsgd", "wagma", "dpwa"}:
        assert pace_of(recipe=recipe, nesterov=False) == "Lockstep"
    assert pace_of(recipe="adpsgd") == pace_of(recipe="dpwa") == "SharedSteps"
    assert pace_of(recipe="wagma") == "SharedRounds"
    # Where ranks wait for each other in person none may stop alone.
    assert pace_of(recipe="wagma", wait_avoiding=False) == pace_of(recipe="wagma", group_size=1) == "Lockstep"


def test_dpwa_uses_a_constant_only_where_it_is_one() -> None:
    assert "interpolation_value" in used_options(METHODS["dpwa"], Config(recipe="dpwa"))
    assert "interpolation_value" not in used_options(METHODS["dpwa"], Config(recipe="dpwa", interpolation="loss"))
    assert [Config(**options).weighs_losses for options in ({}, {"interpolation": "loss"})] == [False, True]  # type: ignore[arg-type]
    assert Config(divergence_threshold=0.1).weighs_losses


def test_every_option_of_a_method_is_one_of_the_configuration_and_in_its_identity() -> None:
    assert set(METHOD_OPTIONS) <= Config().identity.keys()
    for method in METHODS.values():
        assert used_options(method, Config()) <= set(METHOD_OPTIONS)


def test_local_sgd_averages_and_never_gossips(wrapped: Callable[..., dict[str, Any]]) -> None:
    schedule = wrapped(4, recipe="localsgd", sync_period=3)["schedule"]
    assert schedule == gm.Schedule(gossip_every=3, average_every=1)
    with pytest.raises(ValueError, match="got sync_period=0 for localsgd, expected 1 step or more; leave it out"):
        wrapped(4, recipe="localsgd", sync_period=0)


def test_a_target_for_the_distance_controls_the_rounds(wrapped: Callable[..., dict[str, Any]]) -> None:
    for recipe in ("dpsgd", "sgp", "osgp"):
        assert wrapped(4, recipe=recipe, consensus_target=2.0)["schedule"] == gm.ConsensusControl(2.0)
    options = {"consensus_target": 3.0, "consensus_remedy": "rounds", "gossip_every": 20, "average_every": 5}
    expected = gm.ConsensusControl(3.0, remedy="rounds", gossip_every=20, max_interval=20, average_every=5)
    assert wrapped(4, recipe="dpsgd", **options)["schedule"] == expected
    with pytest.raises(ValueError, match=r"got peers_per_itr=0:2,30:1 with consensus_target=2.0, expected a number"):
        wrapped(4, recipe="dpsgd", consensus_target=2.0, peers_per_itr="0:2,30:1")
    with pytest.raises(ValueError, match=r"got consensus_target=-1.0, expected 0 or more"):
        Config(recipe="dpsgd", consensus_target=-1.0)
    assert "consensus_remedy" not in used_options(METHODS["dpsgd"], Config(consensus_remedy="rounds"))


def test_options_reach_the_outer_method(wrapped: Callable[..., dict[str, Any]]) -> None:
    rates = {"sync_period": 7, "outer_lr": 0.4, "outer_momentum": 0.25}
    for recipe, expected, default in (
        ("diloco", gm.DiLoCo(7, lr=0.4, momentum=0.25), gm.DiLoCo(10)),
        ("streamingdiloco", gm.StreamingDiLoCo(7, lr=0.4, momentum=0.25), gm.StreamingDiLoCo(10)),
        ("eagerdiloco", gm.EagerDiLoCo(7, lr=0.4, momentum=0.25), gm.EagerDiLoCo(10)),
        (
            "slowmo",
            gm.SlowMo(7, lr=0.4, momentum=0.25, inner_lr="optimizer"),
            gm.SlowMo(10, inner_lr="optimizer"),
        ),
        ("noloco", gm.NoLoCo(7, lr=0.4, momentum=0.25, seed=1), gm.NoLoCo(10, seed=1)),
        ("gasloc", gm.GASLoC(7, lr=0.4, momentum=0.25), gm.GASLoC(10)),
    ):
        arguments = wrapped(6, recipe=recipe, **rates)
        assert arguments["outer"] == expected
        assert ("graph" in arguments) == (recipe == "gasloc")
        assert wrapped(6, recipe=recipe)["outer"] == default
        assert wrapped(6, recipe=recipe, anchor_device="cpu")["outer"] == replace(default, anchor_device="cpu")
    for recipe, options, expected in (
        ("streamingdiloco", {"outer_own_weight": 0.0}, gm.StreamingDiLoCo(10, own_weight=0.0)),
        ("slowmo", {"outer_gossip_every": 2}, gm.SlowMo(10, inner_lr="optimizer", gossip_every=2)),
        ("noloco", {"outer_pull": 0.4}, gm.NoLoCo(10, pull=0.4, seed=1)),
        ("gasloc", {"step_size": 0.25}, gm.GASLoC(10, step_size=0.25)),
    ):
        assert wrapped(6, recipe=recipe, **options)["outer"] == expected
    with pytest.raises(ValueError, match=r"got own_weight=1\.0, expected 0 <= own_weight < 1"):
        wrapped(6, recipe="streamingdiloco", outer_own_weight=1.0)
    sparse = wrapped(6, recipe="sparseloco", sync_period=7, compression_ratio=0.03, error_decay=0.9)["outer"]
    code = gm.ChunkTopK(123, 4096, values=gm.TwoBit())
    assert str(sparse) == str(gm.SparseLoCo(7, lr=1.0, decay=0.9, compressor=code))
    for bits, qsgd in ((4, gm.QSGD(4, 32, 1, unbiased=True)), (8, gm.QSGD(8, 512, 1, unbiased=True))):
        for recipe, method in (("diloco", gm.DiLoCo), ("eagerdiloco", gm.EagerDiLoCo)):
            assert str(wrapped(6, recipe=recipe, outer_bits=bits)["outer"]) == str(method(10, compressor=qsgd))
        streaming = gm.StreamingDiLoCo(10, momentum=0.5, compressor=qsgd)
        found = wrapped(6, recipe="streamingdiloco", outer_bits=bits, outer_momentum=0.5)["outer"]
        assert str(found) == str(streaming)
    with pytest.raises(ValueError, match=r"got outer_bits=2, expected one of 0, 4, 8"):
        Config(recipe="diloco", outer_bits=2)
    with pytest.raises(ValueError, match=r"got outer_bits=2, expected 4 or 8, or 0 for drifts as they are"):
        METHODS["diloco"].make(nn.Linear(1, 1), MethodOptions(outer_bits=2), Context())
    assert "outer_bits" not in used_options(METHODS["slowmo"], Config(outer_bits=4))
    with pytest.raises(ValueError, match=r"NoLoCo: got pull=0.7 with momentum=0.9, expected pull < 2"):
        wrapped(4, recipe="noloco", outer_momentum=0.9)


def test_relay_sgd_takes_trees(wrapped: Callable[..., dict[str, Any]]) -> None:
    for name, graph in (("chain", gm.ChainGraph(6)), ("auto", gm.DoubleBinaryTreeGraph(6))):
        assert repr(wrapped(6, recipe="relaysgd", graph=name)["graph"]) == repr(graph)
    with pytest.raises(ValueError, match=r"got graph='ring', expected one of auto, chain, double-binary-tree: this"):
        wrapped(6, recipe="relaysgd", graph="ring")
    assert repr(wrapped(6, recipe="choco", graph="chain")["graph"]) == repr(gm.ChainGraph(6))
    with pytest.raises(
        ValueError, match=r"got graph='chain', expected one of auto, .* for a recipe that chooses peers_"
    ):
        wrapped(6, recipe="dpsgd", graph="chain")


def test_codes_that_need_no_static_graph_take_pairs(wrapped: Callable[..., dict[str, Any]]) -> None:
    for recipe in ("deepsqueeze", "moniqua", "powergossip"):
        graph = wrapped(8, recipe=recipe, graph="bipartite-exponential")["graph"]
        assert isinstance(graph, gm.DynamicBipartiteExponentialGraph)
    with pytest.raises(ValueError, match="got graph='bipartite-exponential', expected one of auto, ring"):
        wrapped(8, recipe="choco", graph="bipartite-exponential")
    with pytest.raises(ValueError, match="got graph='exponential', expected an undirected one; take ring"):
        make_undirected_graph("exponential", num_nodes=8)
