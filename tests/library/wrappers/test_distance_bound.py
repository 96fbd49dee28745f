"""`max_relative_distance`: a model that is too far from the own one changes nothing but the message count."""

from __future__ import annotations

import logging
import math
from typing import Any

import networkx as nx
import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from gossip_modules import BilatGossipDataParallel, GossipDataParallel, Membership, RingGraph, connect
from gossip_modules.extend import FlatVector, PushPull, PushSum
from gossip_modules.graph_manager import NetworkXGraph, NPeerDynamicDirectedExponentialGraph
from gossip_modules.mixing_manager import MetropolisHastingsMixing, UniformMixing
from gossip_modules.schedule import Schedule
from gossip_modules.wrappers.choices import Choices
from tests.harness.ranks import CPU, TIMEOUT, run_ranks, solo_group

N, LIAR = 4, 3
RING = RingGraph(N, peers_per_itr=2)
DIRECTED = NPeerDynamicDirectedExponentialGraph(N)
LIE = {"far": 100.0, "NaN": math.nan, "infinity": math.inf}
METHODS: dict[str, tuple[dict[str, Any], Any]] = {
    "SGP": ({"graph": DIRECTED}, UniformMixing(DIRECTED)),
    "Overlap SGP": ({"graph": DIRECTED, "overlap": True}, UniformMixing(DIRECTED)),
    "D-PSGD": ({"graph": RING, "push_sum": False}, MetropolisHastingsMixing(RING)),
    "D-PSGD, overlap": ({"graph": RING, "push_sum": False, "overlap": True}, MetropolisHastingsMixing(RING)),
    "int8": ({"graph": RING, "push_sum": False, "wire_dtype": torch.int8}, MetropolisHastingsMixing(RING)),
    "bfloat16": ({"graph": RING, "push_sum": False, "wire_dtype": torch.bfloat16}, MetropolisHastingsMixing(RING)),
    "deltas": (
        {"graph": RING, "push_sum": False, "wire_dtype": torch.bfloat16, "deltas": True},
        MetropolisHastingsMixing(RING),
    ),
}


def honest(rank: int) -> float:
    return 8.0 + rank / 4  # exact in bfloat16


def after(mixing: Any, x: np.ndarray[Any, Any], t: int, limit: float) -> np.ndarray[Any, Any]:
    """The models of honest ranks after a round: a refused message has the own model in its place."""
    w, new = mixing.matrix(t).double().numpy(), np.zeros_like(x)
    for i in range(len(x)):
        for j in range(len(x) if i != LIAR else 0):
            if w[i, j]:
                is_near = abs(x[j] - x[i]) <= limit * abs(x[i])
                new[i] += w[i, j] * (x[j] if is_near else x[i])
    return new


def train(
    group: dist.ProcessGroup, lie: float, num_rounds: int, **options: Any
) -> tuple[list[float], dict[str, float]]:
    """Run rounds in which the last rank sends another model than its own; returns models and `comm_stats()`."""
    module = nn.Linear(3, 1)
    with torch.no_grad():
        for x in module.parameters():
            x.fill_(honest(group.rank()))
    model = GossipDataParallel(
        module, process_group=group, init_sync=False, on_nonfinite="spread", **{"max_relative_distance": 0.5, **options}
    )
    found = []
    for _ in range(num_rounds):
        if group.rank() == LIAR:
            with torch.no_grad():
                for x in module.parameters():
                    x.fill_(lie)
        model(torch.ones(1, 3))
        model.flush()
        found.append(module.bias.item())
        assert torch.equal(module.weight, torch.full_like(module.weight, found[-1])) or group.rank() == LIAR
    stats = model.comm_stats()
    model.close()
    return found, stats


@pytest.mark.parametrize("lie", LIE)
@pytest.mark.parametrize("method", METHODS)
def test_a_far_model_is_replaced_by_the_own_one(method: str, lie: str, caplog: pytest.LogCaptureFixture) -> None:
    options, mixing = METHODS[method]
    with caplog.at_level(logging.WARNING, "gossip_modules.robust"):
        ranks = run_ranks(N, lambda group: train(group, LIE[lie], 3, **options))
    expected = np.array([honest(rank) for rank in range(N)])
    for t in range(3):
        expected[LIAR] = LIE[lie]
        expected = after(mixing, expected, t, 0.5)
        for rank in range(N - 1):
            assert ranks[rank][0][t] == pytest.approx(expected[rank], rel=1e-2 if "wire_dtype" in options else 1e-6)
    receivers = [rank for rank in range(N - 1) if any(mixing.matrix(t)[rank, LIAR] for t in range(3))]
    for rank in range(N - 1):
        count = sum(bool(mixing.matrix(t)[rank, LIAR]) for t in range(3))
        assert ranks[rank][1].get(f"num_refused/{LIAR}", 0) == count
    texts = [record.getMessage() for record in caplog.records if f"rank {LIAR} is left out" in record.getMessage()]
    assert sorted(text.split(":")[0] for text in texts) == [f"rank {rank}" for rank in receivers]  # once for each


@pytest.mark.parametrize("method", METHODS)
def test_near_models_are_mixed_as_without_a_bound(method: str) -> None:
    options, _ = METHODS[method]
    bounded = run_ranks(N, lambda group: train(group, honest(LIAR), 4, **options))
    free = run_ranks(N, lambda group: train(group, honest(LIAR), 4, **{**options, "max_relative_distance": None}))
    assert [models for models, _ in bounded] == [models for models, _ in free]
    assert not any(name.startswith("num_refused") for _, stats in bounded for name in stats)


def test_the_messages_of_a_rank_that_comes_back_are_mixed_again(caplog: pytest.LogCaptureFixture) -> None:
    graph = RingGraph(2)

    def body(group: dist.ProcessGroup) -> float:
        gossiper = PushPull(max_relative_distance=0.5)
        gossiper.bind(MetropolisHastingsMixing(graph), connect(group, module_device=CPU, timeout=TIMEOUT))
        x = torch.full((5,), 8.0)
        for t in range(6):
            sent = FlatVector.over(torch.full((5,), 100.0) if group.rank() and t in (0, 1, 3) else x)
            gossiper.mix(sent, t)
            x = sent.segments[0] if not group.rank() else x
        return float(x[0])

    with caplog.at_level(logging.WARNING, "gossip_modules.robust"):
        assert run_ranks(2, body)[0] == 8.0
    texts = [text for text in caplog.messages if text.startswith("rank 0: the model of rank 1 is left out here")]
    assert [text.split(",")[0][-7:] for text in texts] == ["round 0", "round 3"]


@pytest.mark.parametrize(
    ("weight", "is_mixed"),
    [(1.0, True), (4.0, True), (4.1, False), (0.06, False), (-1.0, False), (math.nan, False)],
)
def test_estimates_are_compared_and_weights_are_bounded(weight: float, is_mixed: bool) -> None:
    """The estimate of a message is its vector over its weight; a weight above the number of ranks is a lie."""
    graph = NPeerDynamicDirectedExponentialGraph(4)

    def body(group: dist.ProcessGroup) -> tuple[float, float]:
        gossiper = PushSum(max_relative_distance=0.5)
        gossiper.bind(UniformMixing(graph), connect(group, module_device=CPU, timeout=TIMEOUT))
        gossiper._sends_weight = True  # as with a membership
        own = weight if group.rank() == LIAR else 0.5
        s = FlatVector.over(torch.full((5,), 8.0 * (own if math.isfinite(own) and own else 1.0)))
        s.push_sum_weight.fill_(own)
        gossiper.mix(s, 0)
        return float(s.segments[0][0]), s.push_sum_weight.item()

    x, w = run_ranks(4, body)[0]  # which hears rank 3
    assert w == pytest.approx((0.5 + weight) / 2 if is_mixed else 0.5)
    assert x / w == pytest.approx(8.0)


def test_zeros_of_a_rank_that_keeps_its_weight_are_no_refusal() -> None:
    """See [Note: weights that run dry] of `Neighbours`: the sums of x and of w are kept."""
    graph = NPeerDynamicDirectedExponentialGraph(4)

    def body(group: dist.ProcessGroup) -> tuple[float, float, dict[str, float]]:
        gossiper = PushSum(max_relative_distance=0.5)
        gossiper.bind(UniformMixing(graph), connect(group, module_device=CPU, timeout=TIMEOUT))
        gossiper._sends_weight = True  # as with a membership
        own = 0.0 if group.rank() == LIAR else 1.0
        s = FlatVector.over(torch.full((5,), 8.0 * own))
        s.push_sum_weight.fill_(own)
        gossiper.mix(s, 0)
        return float(s.segments[0][0]), s.push_sum_weight.item(), gossiper.transport.traffic.summary()

    x, w, counts = run_ranks(4, body)[0]  # which hears rank 3
    assert (x, w) == (4.0, 0.5)
    assert not any(name.startswith("num_refused") for name in counts)


@pytest.mark.parametrize("lie", [math.nan, 1e30])
@pytest.mark.parametrize("make", [GossipDataParallel, BilatGossipDataParallel])
def test_far_buffers_are_left_out(make: Any, lie: float) -> None:
    def body(group: dist.ProcessGroup) -> Tensor:
        module = nn.BatchNorm1d(3)
        model = make(module, process_group=group, init_sync=False, on_nonfinite="spread", max_relative_distance=0.5)
        assert module.running_var is not None
        model.eval()  # so that the buffers stay
        if group.rank():
            module.running_var[1] = lie
        model.train()
        for _ in range(3):
            model(torch.randn(4, 3))
        model.flush()
        model.close()
        return module.running_var.clone()

    assert float(run_ranks(2, body)[0].max()) < 10


def test_an_ad_psgd_rank_takes_nothing_of_a_far_model_and_trains_on(caplog: pytest.LogCaptureFixture) -> None:
    def body(group: dist.ProcessGroup) -> tuple[float, float]:
        module = nn.Linear(3, 1, bias=False)
        with torch.no_grad():
            module.weight.fill_(100.0 if group.rank() else 8.0)
        model = BilatGossipDataParallel(module, process_group=group, init_sync=False, max_relative_distance=2.0)
        while not model.comm_stats()["num_rounds"] + model.comm_stats()["num_skipped"]:
            model(torch.ones(1, 3))
        dist.barrier(group)
        model.settle()
        refused = model.comm_stats().get(f"num_refused/{1 - group.rank()}", 0)
        found = module.weight[0, 0].item()
        model.close()
        return found, refused

    with caplog.at_level(logging.WARNING, "gossip_modules.robust"):
        (near, refused), (far, accepted) = run_ranks(2, body)
    assert near == 8.0  # |100 - 8| > 2 * 8
    assert refused > 0
    assert far < 100.0  # |8 - 100| < 2 * 100
    assert not accepted
    assert "rank 0: the model of rank 1 is left out here" in caplog.text


@pytest.mark.parametrize("bound", [0.0, -1.0, math.nan, "near", True])
@pytest.mark.parametrize("wrapper", [GossipDataParallel, BilatGossipDataParallel])
def test_a_bound_is_a_positive_number(wrapper: Any, bound: Any) -> None:
    with pytest.raises(ValueError, match=r"got max_relative_distance=.*, expected a positive number"):
        wrapper(nn.Linear(2, 1), process_group=solo_group(), max_relative_distance=bound)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"algorithm": "d2", "push_sum": False}, r"got max_relative_distance=0.5 with D2\(.*expected plain gossip"),
        ({"algorithm": PushPull(), "push_sum": False}, "got max_relative_distance=0.5 beside PushPull"),
        ({"algorithm": "diloco"}, "got max_relative_distance=0.5 with DiLoCo.*or ClippedGossip or TrimmedMean"),
        ({"schedule": Schedule(average_every=3)}, r"got max_relative_distance=0.5 with Schedule\(.*has no sender"),
        ({"schedule": Schedule(average_until=3)}, r"got max_relative_distance=0.5 with Schedule\(.*has no sender"),
        ({"membership": Membership("memory://bound", min_workers=1)}, "got max_relative_distance=0.5 with a mailbox"),
    ],
    ids=["an algorithm", "a mixer", "outer steps", "averages", "averages at first", "a mailbox"],
)
def test_refusals(options: dict[str, Any], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        GossipDataParallel(nn.Linear(2, 1), process_group=solo_group(), max_relative_distance=0.5, **options)


@pytest.mark.parametrize("settings", [{"average_every": 3}, {"average_until": 3}])
def test_a_mixer_with_a_bound_refuses_exact_averages(settings: dict[str, Any]) -> None:
    mixer, schedule = PushSum(max_relative_distance=0.5), Schedule(**settings)
    with pytest.raises(ValueError, match=r"got max_relative_distance=0.5 with Schedule\(.*has no sender"):
        GossipDataParallel(nn.Linear(2, 1), process_group=solo_group(), algorithm=mixer, schedule=schedule)


@pytest.mark.parametrize(
    "choices", [Choices(max_relative_distance=0.5), Choices(algorithm=PushSum(max_relative_distance=0.5))]
)
@pytest.mark.parametrize("place", [{"nprocs_per_node": 2}, {"nprocs_per_node": 1, "is_sharded": True}])
def test_a_model_in_shards_has_no_bound(choices: Choices, place: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"got max_relative_distance=0.5 for a model that several processes hold"):
        choices.check(overlap=False, init_sync=True, **place)


def test_weights_in_place_of_refused_messages_must_not_grow() -> None:
    graph = NetworkXGraph(nx.DiGraph([(0, 1), (1, 2), (2, 3), (3, 0), (0, 2)]))
    with pytest.raises(ValueError, match="whose rows do not sum to one, expected row-stochastic weights: a rank puts"):
        PushSum(max_relative_distance=0.5).check(UniformMixing(graph))
