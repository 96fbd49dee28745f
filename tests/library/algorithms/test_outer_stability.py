"""Outer methods refuse graphs on which differences between ranks grow by their own momentum."""

from __future__ import annotations

import re
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

from gossip_modules import GASLoC, GossipDataParallel, Membership, NoLoCo, RingGraph
from gossip_modules.extend import OuterMethod
from gossip_modules.graph_manager import (
    BaseGraph,
    CompleteGraph,
    DynamicBipartiteExponentialGraph,
    EquiDynGraph,
    EquiStaticGraph,
    GraphManager,
    RandomMatchingGraph,
)
from gossip_modules.mixing_manager import GraphMixing, MixingManager, default_mixing
from gossip_modules.rounds.memory import Memory
from gossip_modules.rounds.requests import Mix, Vectors
from gossip_modules.rounds.vector import Vector
from tests.harness.problems import mlp
from tests.harness.progress import engine_of, local_of
from tests.harness.ranks import run_ranks


@pytest.mark.parametrize("outer", [GASLoC(), GASLoC(delay=2), NoLoCo(), NoLoCo(delay=2)], ids=str)
def test_the_default_graph_is_stable_in_every_world(outer: OuterMethod) -> None:
    for n in range(1, 33):
        graph = outer.default_graph(n)
        assert graph is not None
        outer.check(default_mixing(graph, push_sum=False))


@pytest.mark.parametrize(
    ("outer", "graph"),
    [
        (GASLoC(), RingGraph(8)),
        (GASLoC(), BaseGraph(11)),
        (GASLoC(), DynamicBipartiteExponentialGraph(10)),
        (GASLoC(step_size=0.4, delay=2), EquiStaticGraph(20)),
        (NoLoCo(), EquiStaticGraph(25)),
        (NoLoCo(), RingGraph(8)),
        (NoLoCo(momentum=0.2, pull=1.8), BaseGraph(5)),
        (NoLoCo(momentum=0.0, pull=1.6), RingGraph(8, peers_per_itr=2)),
        (NoLoCo(delay=2, pull=1.2), RingGraph(8)),
        (GASLoC(delay=2), BaseGraph(11)),
        (NoLoCo(), BaseGraph(11)),
        (NoLoCo(delay=2), RingGraph(6, peers_per_itr=2)),
        (GASLoC(), CompleteGraph(5, peers_per_itr=4)),
        (GASLoC(step_size=1.0), EquiDynGraph(9, seed=1)),
    ],
    ids=str,
)
def test_a_graph_is_refused_where_outer_steps_of_the_method_itself_grow(
    outer: OuterMethod, graph: GraphManager
) -> None:
    """Steps on an anchor of all ranks, from models that differ and never train: by how much they differ after."""
    mixing = default_mixing(graph, push_sum=False)
    middle, last = differences(outer, mixing, num_steps=150), differences(outer, mixing, num_steps=300)
    if last < 0.1:
        outer.check(mixing)
    else:
        method = type(outer).__name__
        with pytest.raises(ValueError, match=rf"{method}: got .* on .*{type(graph).__name__}.*grow") as caught:
            outer.check(mixing)
        factor = float(re.findall(r"grow ([\d.]+) times from one outer step to the next", str(caught.value))[0])
        assert factor == pytest.approx((last / middle) ** (1 / 150), abs=0.015)


def differences(outer: OuterMethod, mixing: MixingManager, *, num_steps: int) -> float:
    """The distance from the mean after so many outer steps; the mean is taken off, as it would be all that is left."""
    x = torch.randn(mixing.graph.world_size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x -= x.mean()
    memory, mail = Memory(), Mock(side_effect=AssertionError)
    memory.fit(Vector([x]))
    v = Vectors(Vector([x]), mail, t=0, rank=0, num_ranks=len(x))
    outer.begin(v, memory)
    x *= 1.5  # so that they have drifted
    for t in range(num_steps):
        generator = outer.round(v, memory, outer.sync_every)
        request = next(generator)
        assert isinstance(request, Mix)
        (sent,) = request.x.parts
        sent.copy_(mixing.matrix(t) @ sent)
        assert next(generator, None) is None
    return float((x - x.mean()).norm())


def test_random_pairs_of_noloco_have_a_limit_of_their_own() -> None:
    NoLoCo(momentum=0.0, pull=1.9).check(GraphMixing(RandomMatchingGraph(6)))


def test_the_wrapper_refuses_a_graph_that_the_rates_are_unstable_on() -> None:
    def body(group: dist.ProcessGroup) -> None:
        with pytest.raises(
            ValueError, match=r"NoLoCo: .*expected a factor of at most 1; take a smaller pull, an undir"
        ):
            GossipDataParallel(mlp(), process_group=group, algorithm=NoLoCo(), graph=RingGraph(8))

    run_ranks(8, body)


@pytest.mark.parametrize("graph", [RingGraph, BaseGraph])
def test_a_membership_looks_at_every_number_of_workers_when_the_model_is_wrapped(graph: type[GraphManager]) -> None:
    membership = Membership(dist.HashStore(), min_workers=2)
    with pytest.raises(ValueError, match=rf"GASLoC: got step_size=0.5 and momentum=0.9 on .*{graph.__name__}\(\d+"):
        GossipDataParallel(mlp(), algorithm=GASLoC(), graph=graph, membership=membership)
    membership.close()


def test_a_generation_of_another_size_goes_on_without_another_look() -> None:
    """Sizes that were not tried when the model was wrapped: no survivor may end in a step because of them."""

    def body(group: dist.ProcessGroup) -> None:
        wrapper = GossipDataParallel(mlp(), process_group=group, algorithm=GASLoC())
        unstable = default_mixing(RingGraph(8), push_sum=False)
        engine_of(wrapper).rebind(unstable, local_of(wrapper).transport, local_of(wrapper).vector)
        with pytest.raises(ValueError, match=r"GASLoC: got step_size=0.5 .* grow 1.19"):
            GASLoC().check(unstable)
        wrapper.close()

    run_ranks(8, body)
