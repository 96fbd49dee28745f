"""RelaySGD: the mean of models that are as old as their way is long."""

from __future__ import annotations

import copy
import time
from typing import Any

import networkx as nx
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from gossip_modules import GossipDataParallel, RelaySGD, RingGraph, Schedule, connect
from gossip_modules.algorithms.relay_sgd import trees_of
from gossip_modules.extend import PushPull
from gossip_modules.graph_manager import ChainGraph, DoubleBinaryTreeGraph, GraphManager, NetworkXGraph
from gossip_modules.mixing_manager import MetropolisHastingsMixing
from gossip_modules.rounds.rounds import mixer_of
from gossip_modules.rounds.stacked import Stacked
from gossip_modules.testing import Chaos, Join, Kill, Worker
from tests.harness.problems import mlp
from tests.harness.quadratics import CURVATURES, LEARNING_RATE, MINIMA, START, solve
from tests.harness.ranks import CPU, TIMEOUT, run_ranks, solo_group

A, B = (torch.tensor(values, dtype=torch.float64) for values in (CURVATURES, MINIMA))


def rounds_of(graph: GraphManager) -> Stacked:
    """Rounds of all ranks in one thread."""
    return Stacked(RelaySGD(), MetropolisHastingsMixing(graph))


def distances(tree: Any, n: int) -> list[dict[int, int]]:
    links = nx.empty_graph(n)
    links.add_edges_from(tree)
    lengths = dict(nx.all_pairs_shortest_path_length(links))
    return [lengths[i] for i in range(n)]


def relayed(sent: list[Tensor], hops: list[dict[int, int]]) -> Tensor:
    """1/n sum_j x_j, each as many rounds old as there are hops, less one; the own model where there was none yet."""
    t, n = len(sent) - 1, len(hops)
    rows = []
    for i in range(n):
        ages = {j: max(hops[i][j] - 1, 0) for j in range(n)}
        models = [sent[t - age][j] if age <= t else sent[t][i] for j, age in ages.items()]
        rows.append(torch.stack(models).mean(0))
    return torch.stack(rows)


@pytest.mark.parametrize(
    "graph",
    [ChainGraph(5), DoubleBinaryTreeGraph(6), DoubleBinaryTreeGraph(7), NetworkXGraph(nx.star_graph(4)), ChainGraph(1)],
    ids=str,
)
def test_each_rank_has_the_mean_of_models_as_old_as_their_way_is_long(graph: GraphManager) -> None:
    n, trees = graph.world_size, trees_of(graph)
    rounds, generator = rounds_of(graph), torch.Generator().manual_seed(1)
    x = torch.randn(n, 8, generator=generator, dtype=torch.float64)
    sent: list[Tensor] = []
    for t in range(8):
        x = x - 0.1 * torch.randn(n, 8, generator=generator, dtype=torch.float64)  # the optimizer's step
        sent.append(x.clone())
        rounds.step(x, t)
        width = 8 // len(trees)
        for k, tree in enumerate(trees):
            part = slice(k * width, (k + 1) * width)
            torch.testing.assert_close(x[:, part], relayed([s[:, part] for s in sent], distances(tree, n)))
    num_bytes = 8 * 2 * (n - 1) * (8 * 8 + 8 * len(trees))  # models and counts over each link both ways
    assert n * rounds.sent_bytes == pytest.approx(num_bytes)


@pytest.mark.parametrize("graph", [ChainGraph(5), DoubleBinaryTreeGraph(5)], ids=str)
def test_ranks_with_different_data_reach_the_optimum(graph: GraphManager) -> None:
    rounds = rounds_of(graph)
    x = torch.full((5, 2), START, dtype=torch.float64)
    for t in range(320):
        x = x - LEARNING_RATE * A[:, None] * (x - B[:, None])
        rounds.step(x, t)
    torch.testing.assert_close(x, torch.full_like(x, 0.8), rtol=0, atol=1e-8)


def test_training_is_the_law() -> None:
    x, sent = torch.full((5,), START, dtype=torch.float64), []
    hops = distances(trees_of(ChainGraph(5))[0], 5)
    for step in range(21):
        x = x - LEARNING_RATE * A * (x - B) if step else x  # a round comes before the first step
        sent.append(x)
        x = relayed(sent, hops)
    found = solve(lambda: {"algorithm": RelaySGD(), "graph": ChainGraph})
    torch.testing.assert_close(found, x, rtol=0, atol=1e-12)


@pytest.mark.parametrize("n", [1, 2, 3, 4, 6, 7, 12, 16, 25, 33])
def test_two_trees_are_shallow_and_an_inner_rank_of_one_is_a_leaf_of_the_other(n: int) -> None:
    graph = DoubleBinaryTreeGraph(n)
    inner = []
    for links in graph.trees:
        tree = nx.empty_graph(n)
        tree.add_edges_from(links)
        assert nx.is_tree(tree)
        assert nx.diameter(tree) <= 2 * n.bit_length()
        degrees = dict(tree.degree)
        assert max(degrees.values()) <= 3
        inner.append({rank for rank, degree in degrees.items() if degree > 1})
    if n > 2:
        assert len(inner[0] & inner[1]) <= 1
    assert graph.is_symmetric
    assert graph.period == 1
    assert ChainGraph(n).phone_book(0) == ((1,) if n > 1 else ())


def test_sums_of_a_narrow_model_are_float32_and_other_tensors_start_anew() -> None:
    def body(group: dist.ProcessGroup) -> None:
        mixer = mixer_of(RelaySGD(), PushPull())
        mixer.bind(MetropolisHastingsMixing(ChainGraph(2)), connect(group, module_device=CPU, timeout=TIMEOUT))
        both = torch.randn(2, 6, generator=torch.Generator().manual_seed(1)).bfloat16()
        x = mixer.mix(both[group.rank()].clone(), 0)
        torch.testing.assert_close(x.float(), both.float().mean(0), rtol=0, atol=0.03)
        state = copy.deepcopy(mixer.state_dict())
        assert state["memory"]["links"][1 - group.rank()]["received"].numel() == 6 * 4 + 8
        mixer.mix(torch.randn(4), 1)
        mixer.load_state_dict(state)
        with pytest.raises(
            ValueError, match=r"got the state of a link with .*\(32,\).*, expected .*\(24,\).*; load a checkpoint"
        ):
            mixer.mix(torch.randn(4), 2)
        with pytest.raises(ValueError, match=r"RelaySGD\(\): got the state of links to \[5\], expected \[\d\]"):
            mixer.load_state_dict({**state, "links": [5]})

    with pytest.warns(UserWarning, match=r"RelaySGD\(\): other tensors are trained than before; .* starts anew"):
        run_ranks(2, body)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"graph": RingGraph(5, peers_per_itr=2)}, "RelaySGD: got RingGraph.*, expected a tree that never changes"),
        ({"graph": RingGraph(1), "overlap": True}, r"got overlap=True with RelaySGD\(\), expected overlap=False"),
        (
            {"graph": RingGraph(1), "schedule": Schedule(average_every=2)},
            r"got .* with RelaySGD\(\), expected average_",
        ),
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict[str, Any], message: str) -> None:
    if options["graph"].world_size > 1:
        with pytest.raises(ValueError, match=message):
            RelaySGD().check(MetropolisHastingsMixing(options["graph"]))
        return
    with pytest.raises(ValueError, match=message):
        GossipDataParallel(mlp(), process_group=solo_group(), algorithm=RelaySGD(), **options)


def test_ranks_find_the_optimum_of_those_that_live() -> None:
    """After a death and a join too: with exact gradients the fixed point is the optimum of their mean loss."""
    found: dict[int, float] = {}

    def body(worker: Worker) -> None:
        membership = worker.membership(min_workers=3, timeout=60, min_deadline=20.0)
        model = nn.Linear(1, 1, bias=False, dtype=torch.float64)
        wrapper = GossipDataParallel(model, membership=membership, algorithm=RelaySGD(), push_sum=False)
        optimizer = torch.optim.SGD(wrapper.parameters(), lr=0.1)
        membership.track(optimizer=optimizer)
        ends: list[int] = []
        membership.on_change(lambda change: ends.append(change.step + 120) if 3 in change.members else None)
        membership.join()
        for step in membership.steps(1 << 30):
            if ends and step >= ends[0]:
                break
            optimizer.zero_grad()
            (wrapper(torch.ones(1, 1, dtype=torch.float64)) - worker.rank).square().sum().backward()
            found[worker.rank] = model.weight.item()  # after the round, before the step
            optimizer.step()
            time.sleep(0.001)
        wrapper.close()

    Chaos([Kill(step=9, rank=0), Join(step=14)]).run(body, 3)
    del found[0]
    assert found == pytest.approx(dict.fromkeys((1, 2, 3), (1 + 2 + 3) / 3), abs=1e-6)
