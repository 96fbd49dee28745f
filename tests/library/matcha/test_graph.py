"""MATCHA's graph: a pure function of (seed, t) that keeps the contract of graphs and spends its budget."""

from __future__ import annotations

import copy
import doctest
import gc
import json
import pickle
import tracemalloc
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import networkx as nx
import numpy as np
import pytest
import torch.distributed as dist
from torch import nn

from gossip_modules import GossipDataParallel
from gossip_modules.graph_manager import select_graph
from gossip_modules.graph_manager.matchings import decompose, predefined_matchings
from gossip_modules.matcha import graph as module
from gossip_modules.matcha import joint_probabilities
from gossip_modules.matcha.__main__ import main as write_plan
from gossip_modules.matcha.graph import MatchaGraph
from gossip_modules.mixing_manager.laplacians import dpsgd_weight, mixing_weight, periodic_dpsgd_weight
from tests.harness.ranks import run_ranks

ROUNDS = (*range(40), 10**6, 2**40)
MAKERS: dict[str, Callable[[], MatchaGraph]] = {
    "half the budget": lambda: MatchaGraph(predefined_matchings(0), budget=0.5, seed=3),
    "all": lambda: MatchaGraph(predefined_matchings(2), budget=1.0),
    "some always, some never": lambda: MatchaGraph(select_graph(0), probabilities=(1, 1, 1, 0, 1)),
    "joint": lambda: MatchaGraph(predefined_matchings(4), budget=0.3, joint=True, seed=1),
    "periodic": lambda: MatchaGraph(predefined_matchings(1), budget=0.4, periodic=True, seed=2),
    "periodic ring": lambda: MatchaGraph(nx.cycle_graph(5), budget=0.4, periodic=True, seed=2),
    "ring": lambda: MatchaGraph(nx.cycle_graph(6), budget=0.5),
    "odd ring": lambda: MatchaGraph(nx.cycle_graph(5), budget=0.7),
    "pair": lambda: MatchaGraph(nx.path_graph(2), budget=0.2),
    "world of one": lambda: MatchaGraph(nx.empty_graph(1), budget=0.5),
}
EVERY_GRAPH = pytest.mark.parametrize("name", MAKERS)


@cache
def made(name: str) -> MatchaGraph:
    return MAKERS[name]()


def edges(graph: MatchaGraph, t: int) -> set[tuple[int, int]]:
    return {(i, j) for i in range(graph.world_size) for j in graph.out_peers(i, t)}


@EVERY_GRAPH
def test_peers_are_those_of_the_active_matchings(name: str) -> None:
    graph = made(name)
    for t in ROUNDS:
        active = graph.active(t)
        links = {link for matching, is_on in zip(graph.matchings, active, strict=True) if is_on for link in matching}
        assert edges(graph, t) == links | {(v, u) for u, v in links}
        for rank in range(graph.world_size):
            peers = graph.out_peers(rank, t)
            assert peers == graph.in_peers(rank, t) == tuple(sorted(set(peers)))
            assert set(peers) <= set(graph.phone_book(rank))
            assert len(peers) == graph.out_degree(rank, t) <= graph.num_peers(t)


@EVERY_GRAPH
def test_predicates_agree_with_the_rounds(name: str) -> None:
    graph = made(name)
    seen = [edges(graph, t) for t in range(200)]
    degrees = [{graph.out_degree(rank, t) for rank in range(graph.world_size)} for t in range(200)]
    assert graph.is_dynamic == any(one != seen[0] for one in seen)
    assert graph.period == (0 if graph.is_dynamic else 1)
    assert graph.is_symmetric
    assert graph.is_regular == all(len(one) == 1 for one in degrees)
    assert [graph.canonical_round(t) for t in (0, 7)] == ([0, 7] if graph.is_dynamic else [0, 0])
    assert next(iter(graph.distinct_rounds())) == 0
    assert graph.in_every_round(lambda t: True) == (not graph.is_dynamic)
    assert not graph.is_passive(0)


@EVERY_GRAPH
def test_all_ranks_derive_the_same_rounds(name: str) -> None:
    ranks = [MAKERS[name](), copy.deepcopy(made(name)), pickle.loads(pickle.dumps(made(name)))]  # noqa: S301
    assert {repr(rank) for rank in ranks} == {repr(made(name))}
    np.random.seed(7)  # noqa: NPY002 (what other code does to the global generators must not matter)
    for t in reversed(ROUNDS):
        assert len({tuple(rank.active(t)) for rank in ranks} | {tuple(made(name).active(t))}) == 1


def test_rounds_are_those_of_the_generator_that_numpy_promises_to_keep() -> None:
    graph = made("half the budget")
    for t in (0, 1, 2**40):
        generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence(3, spawn_key=(t,))))
        assert graph.active(t) == (generator.random(5) < graph.probabilities).tolist()


def test_seeds_and_rounds_are_independent() -> None:
    graphs = [MatchaGraph(nx.cycle_graph(4), probabilities=(0.5, 0.5), seed=seed) for seed in range(4)]
    flags = np.hstack([[graph.active(t) for t in range(500)] for graph in graphs]).T.astype(float)
    correlation = np.corrcoef(np.vstack([flags, np.roll(flags[:1], 1)])) - np.eye(9)
    assert np.abs(correlation).max() < 4 / np.sqrt(500)


@pytest.mark.parametrize("name", ["half the budget", "joint", "periodic", "odd ring"])
def test_the_budget_is_spent_on_average(name: str) -> None:
    graph = made(name)
    flags = np.array([graph.active(t) for t in range(4000)])
    p = np.array(graph.probabilities)
    assert np.abs(flags.mean(axis=0) - p).max() <= 4 * np.sqrt(0.25 / 4000)
    cost = flags.sum(axis=1)
    assert cost.mean() == pytest.approx(graph.expected_cost, abs=4 * cost.std() / np.sqrt(4000) + 1e-9)
    budget = {"half the budget": 0.5, "joint": 0.3, "periodic": 0.4, "odd ring": 0.7}[name]
    assert graph.expected_cost / graph.full_cost == pytest.approx(budget, abs=1e-4)
    if graph.is_periodic:
        assert set(cost) == {0, len(p)}


@pytest.mark.parametrize("index", range(6))
def test_a_fixed_graph_uses_all_matchings_and_contracts_at_sqrt_rho(index: int) -> None:
    matchings = predefined_matchings(index)
    graph = MatchaGraph(matchings, budget=1.0)
    n = graph.world_size
    assert (graph.alpha, graph.rho) == dpsgd_weight(matchings)
    x = np.random.default_rng(index).normal(size=n)
    mean, distances = x.mean(), [np.linalg.norm(x - x.mean())]
    for t in range(30):
        assert all(graph.active(t))
        assert [graph.out_degree(rank, t) for rank in range(n)] == [d for _, d in sorted(select_graph(index).degree)]
        x = np.array([x[i] + graph.alpha * sum(x[j] - x[i] for j in graph.in_peers(i, t)) for i in range(n)])
        distances.append(np.linalg.norm(x - mean))
    assert x.mean() == pytest.approx(mean)
    ratios = np.array(distances[1:]) / distances[:-1]
    assert (ratios <= np.sqrt(graph.rho) + 1e-7).all()
    assert ratios[-1] > 0.97 * np.sqrt(graph.rho)  # after many rounds the slowest mode is left


@pytest.mark.parametrize("joint", [False, True])
def test_random_rounds_contract_by_rho_in_the_mean(joint: bool) -> None:
    graph = MatchaGraph(predefined_matchings(0), budget=0.5, seed=5, joint=joint)
    x = np.eye(8) - 1 / 8  # all directions at once
    logs = []
    for t in range(300):
        before = np.linalg.norm(x)
        x = x + graph.alpha * np.array(
            [sum((x[j] - x[i] for j in graph.in_peers(i, t)), np.zeros(8)) for i in range(8)]
        )
        logs.append(2 * np.log(np.linalg.norm(x) / before))
        x -= x.mean(axis=0)  # rounding puts some there, and it does not shrink
        x /= np.linalg.norm(x)
    assert np.mean(logs) < np.log(graph.rho)  # Jensen: the typical round is better than the mean square


def test_plans_are_those_of_their_functions() -> None:
    matchings = predefined_matchings(0)
    joint = joint_probabilities(matchings, 0.5)
    graph = MatchaGraph(matchings, budget=0.5, joint=True)
    assert (graph.probabilities, graph.alpha, graph.rho) == (tuple(joint.probabilities), joint.alpha, joint.rho)
    periodic = MatchaGraph(matchings, budget=0.3, periodic=True)
    assert (periodic.alpha, periodic.rho) == periodic_dpsgd_weight(matchings, 0.3)
    given = MatchaGraph(matchings, probabilities=[0.5] * 5)
    assert (given.alpha, given.rho) == mixing_weight(matchings, [0.5] * 5)
    circle = nx.circulant_graph(9, [1, 2])
    assert MatchaGraph(circle, budget=0.5).matchings == tuple(decompose(circle))


def test_seconds() -> None:
    graph = select_graph(5)
    costs = {edge: 0.5 if 0 in edge else 0.1 for edge in graph.edges}
    found = MatchaGraph(graph, budget_seconds=0.3, costs=costs)
    assert found.full_cost == pytest.approx(1.0)
    assert found.expected_cost == pytest.approx(0.3, abs=1e-5)
    with pytest.raises(ValueError, match=r"got budget_seconds=0\.3 without costs"):
        MatchaGraph(graph, budget_seconds=0.3)


def test_the_base_graph_is_left_alone() -> None:
    graph = select_graph(3)
    before = list(graph.edges)
    MatchaGraph(graph, budget=0.5)
    assert list(graph.edges) == before


def test_memory_does_not_grow_with_rounds() -> None:
    graph = made("half the budget")
    graph.out_peers(0, 0)
    tracemalloc.start()
    try:
        for t in range(2000):
            graph.out_peers(t % 8, t)
        gc.collect()
        ours = [tracemalloc.Filter(True, f"*/gossip_modules/{room}/*") for room in ("matcha", "graph_manager")]
        snapshot = tracemalloc.take_snapshot().filter_traces(ours)  # threads of other tests may allocate meanwhile
    finally:
        tracemalloc.stop()
    assert sum(trace.size for trace in snapshot.traces) < 20_000


def test_repr_tells_schedules_apart() -> None:
    matchings = predefined_matchings(0)
    graphs = [
        MatchaGraph(matchings, budget=0.5),
        MatchaGraph(matchings, budget=0.5, seed=1),
        MatchaGraph(matchings, budget=0.4),
        MatchaGraph(matchings[::-1], budget=0.5),
        MatchaGraph(matchings, probabilities=[0.5] * 5),
        MatchaGraph(matchings, budget=0.5, periodic=True),
    ]
    assert len({repr(graph) for graph in graphs}) == len(graphs)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "got budget=None and budget_seconds=None, expected one of them"),
        ({"budget": 0}, "got budget=0, expected above 0"),
        ({"budget": 0.5, "seed": -1}, "got seed=-1, expected an integer of at least 0"),
        ({"budget": 0.5, "seed": 0.5}, "got seed=0.5"),
        ({"budget": 0.5, "joint": True, "periodic": True}, "got joint=True, periodic=True and probabilities=None"),
        ({"budget": 0.5, "probabilities": [0.5] * 2}, "got probabilities beside budget=0.5"),
        ({"probabilities": [0.5] * 3}, "expected 2 numbers from 0 to 1"),
        ({"probabilities": [0.5, 1.5]}, "expected 2 numbers from 0 to 1"),
        ({"probabilities": [1, 0]}, "expected those above 0 to belong to matchings that connect all ranks"),
    ],
)
def test_mistakes_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MatchaGraph(nx.cycle_graph(4), **options)


def test_a_world_of_one_however_it_is_said() -> None:
    bases: list[Any] = [nx.empty_graph(1), []]
    ways: list[dict[str, Any]] = [
        {"budget": 0.5},
        {"budget": 0.5, "joint": True},
        {"budget": 0.5, "periodic": True},
        {"probabilities": []},
    ]
    graphs = [MatchaGraph(base, **options) for base in bases for options in ways]
    assert {(g.world_size, g.matchings, g.probabilities, g.alpha, g.rho) for g in graphs} == {(1, (), (), 1.0, 0.0)}


def written_plan(tmp_path: Path, *arguments: str) -> tuple[Path, dict[str, Any]]:
    """A plan that the command wrote, as a file and as what is in it."""
    path = tmp_path / "plan.json"
    write_plan([*arguments, "--num-budgets", "0", "--output", str(path)])
    return path, json.loads(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("index", range(6))
def test_a_plan_on_paper_is_the_graph_that_trains(
    index: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """However the predefined graph is said: by its plan, by its links, or by the matchings themselves."""
    path, plan = written_plan(tmp_path, "--graph", str(index), "--budget", "0.5")
    printed = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("MATCHA  "))
    graphs = [
        MatchaGraph.from_plan(path, seed=4),
        MatchaGraph(select_graph(index), budget=0.5, seed=4),
        MatchaGraph(nx.Graph(list(select_graph(index).edges)[::-1]), budget=0.5, seed=4),
        MatchaGraph(predefined_matchings(index), budget=0.5, seed=4),
    ]
    for graph in graphs:
        assert printed.split()[-2:] == [f"{graph.alpha:.6f}", f"{graph.rho:.6f}"]
        assert graph.rho == plan["rho"]
    assert len({repr(graph) for graph in graphs}) == 1, "ranks that come by it differently would not agree"
    joint = MatchaGraph.from_plan(path, joint=True)
    assert joint.rho == pytest.approx(plan["joint"]["rho"], abs=1e-9)
    assert joint.rho <= plan["rho"] + 1e-6


def test_links_in_a_file_have_the_matchings_that_train(tmp_path: Path) -> None:
    links = tmp_path / "links.txt"
    links.write_text("\n".join(f"{u} {v}" for u, v in select_graph(0).edges), encoding="utf-8")
    path, plan = written_plan(tmp_path, "--edges", str(links), "--budget", "0.5")
    assert plan["rho"] == MatchaGraph.from_plan(path).rho == MatchaGraph(select_graph(0), budget=0.5).rho


def test_plans_with_seconds_and_of_many_ranks(tmp_path: Path) -> None:
    links = tmp_path / "links.txt"
    links.write_text("0 1 0.01\n1 2 .01\n3 2 0.1\n0 3 0.1\n", encoding="utf-8")
    path, plan = written_plan(tmp_path, "--edges", str(links), "--budget-seconds", "0.05")
    assert MatchaGraph.from_plan(path, world_size=4).rho == plan["rho"]
    path, plan = written_plan(tmp_path, "--nodes", "70", "--radius", "0.25", "--seed", "1", "--budget", "0.2")
    assert MatchaGraph.from_plan(path).rho == plan["rho"]
    with pytest.raises(ValueError, match=r"got a plan .*plan.json: plans of more than 64 ranks hold no joint"):
        MatchaGraph.from_plan(path, joint=True)


def test_plans_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    path, plan = written_plan(tmp_path, "--graph", "0", "--budget", "0.5")
    text = path.read_text(encoding="utf-8")
    with pytest.raises(ValueError, match=r"got the plan .* for 8 ranks, expected one for the 4 .* Start 8, or make"):
        MatchaGraph.from_plan(path, world_size=4)
    with pytest.raises(ValueError, match=r"got a plan that cannot be used, .*nowhere: .*No such file.* Expected JSON"):
        MatchaGraph.from_plan(tmp_path / "nowhere")
    damages: list[tuple[str | dict[str, Any], str]] = [
        (text[: len(text) // 2], r"got a plan that cannot be used, .* line .*write it again"),
        ("[]", r"got a plan that cannot be used, .* Expected JSON with matchings"),
        ({**plan, "rho": None}, "got a plan that cannot be used"),
        ({**plan, "rho": 0.5}, r"its rho is 0.500000, but 0.643975 for its probabilities"),
        ({**plan, "probabilities": plan["probabilities"][:-1]}, "expected 5 numbers from 0 to 1.*write it again"),
        ({**plan, "probabilities": plan["probabilities"][::-1]}, "got a plan that cannot be used"),
        ({**plan, "matchings": plan["matchings"][1:]}, "got a plan that cannot be used"),
        ({**plan, "matchings": [[[0, 1], [1, 2]]]}, "got a plan .*no rank twice"),
        ({**plan, "matchings": 3}, "got a plan that cannot be used"),
    ]
    for damage, message in damages:
        path.write_text(damage if isinstance(damage, str) else json.dumps(damage), encoding="utf-8")
        with pytest.raises(ValueError, match=message):
            MatchaGraph.from_plan(path)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="write it again"):
        MatchaGraph.from_plan(path)
    del plan["joint"]["rho"]
    path.write_text(json.dumps(plan), encoding="utf-8")
    with pytest.raises(ValueError, match=r"got a plan .*: 'rho' is missing"):
        MatchaGraph.from_plan(path, joint=True)


def test_ranks_agree_on_the_plan(tmp_path: Path) -> None:
    """A rank with another file is named when the model is wrapped, before a round."""
    links = tmp_path / "links.txt"
    links.write_text("0 1\n1 2\n", encoding="utf-8")
    paths = []
    for budget in ("0.5", "0.6"):
        (folder := tmp_path / budget).mkdir()
        paths.append(written_plan(folder, "--edges", str(links), "--budget", budget)[0])

    def body(group: dist.ProcessGroup) -> None:
        graph = MatchaGraph.from_plan(paths[group.rank() == 2], world_size=3)
        with pytest.raises(ValueError, match="ranks do not agree with rank 0: rank 2: graph: got MatchaGraph"):
            GossipDataParallel(nn.Linear(2, 2), graph=graph, push_sum=False, process_group=group)

    run_ranks(3, body)


def test_ranks_and_rounds_that_do_not_exist() -> None:
    graph = made("ring")
    with pytest.raises(ValueError, match="got rank 6, expected 0 to 5"):
        graph.out_peers(6, 0)
    with pytest.raises(ValueError, match="got round t=-1, expected t >= 0"):
        graph.out_peers(0, -1)
    with pytest.raises(ValueError, match="in 2 pieces"):
        MatchaGraph(nx.Graph([(0, 1), (2, 3)]), budget=0.5)


def test_example() -> None:
    assert doctest.testmod(module).failed == 0
