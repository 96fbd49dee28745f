"""Ranks that are rows of one tensor do what ranks in threads do, algorithm by algorithm."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import gossip_modules as gm
from gossip_modules import algorithms
from gossip_modules.algorithms.choco import Choco, LinkChoco
from gossip_modules.algorithms.clipped_gossip import ClippedGossip
from gossip_modules.algorithms.d2 import D2
from gossip_modules.algorithms.d_psgd import DPSGD
from gossip_modules.algorithms.deep_squeeze import DeepSqueeze
from gossip_modules.algorithms.diloco import DiLoCo
from gossip_modules.algorithms.eager_diloco import EagerDiLoCo
from gossip_modules.algorithms.gasloc import GASLoC
from gossip_modules.algorithms.local_sgd import LocalSGD
from gossip_modules.algorithms.moniqua import Moniqua
from gossip_modules.algorithms.noloco import NoLoCo
from gossip_modules.algorithms.power_gossip import PowerGossip
from gossip_modules.algorithms.slowmo import SlowMo
from gossip_modules.algorithms.sparse_loco import SparseLoCo
from gossip_modules.algorithms.sparta import Sparta
from gossip_modules.algorithms.streaming_diloco import StreamingDiLoCo
from gossip_modules.rounds.algorithm import Algorithm, Over
from gossip_modules.rounds.requests import SGDStep
from gossip_modules.rounds.stacked import Stacked
from tests.harness.progress import engine_of
from tests.harness.ranks import run_ranks

NUM_RANKS, NUM_STEPS, SHAPE, LR = 5, 10, (8, 16), 0.1  # 2 x 64 elements: no message ends in padding
TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-12}


def found_algorithms() -> Iterator[type[Algorithm]]:
    """All that the library has."""
    for module in pkgutil.walk_packages(algorithms.__path__, f"{algorithms.__name__}."):
        for _, each in inspect.getmembers(importlib.import_module(module.name), inspect.isclass):
            if issubclass(each, Algorithm) and not inspect.isabstract(each) and each.__module__ == module.name:
                yield each


EXAMPLES: dict[type[Algorithm], list[Algorithm]] = {
    Choco: [
        Choco(code, step_size=size)
        for code, size in ((gm.SignNorm(8), 0.3), (gm.QSGD(4), 0.3), (gm.TopK(0.3), 0.2), (gm.RandomK(0.3), 0.2))
    ],
    DiLoCo: [
        DiLoCo(3),
        DiLoCo(3, merge=gm.RDA()),
        DiLoCo(3, compressor=gm.QSGD(4, bucket_size=8, unbiased=True), error_decay=0.9),
        DiLoCo(3, compressor=gm.QSGD(4, bucket_size=8, unbiased=True), collective="all_reduce"),
    ],
    SparseLoCo: [SparseLoCo(3, compressor=gm.TopK(0.3))],
    gm.PULSELoCo: [gm.PULSELoCo(3)],
    SlowMo: [SlowMo(3)],
    NoLoCo: [NoLoCo(3)],
    GASLoC: [GASLoC(3)],
    LocalSGD: [LocalSGD(3)],
    gm.MuLoCo: [gm.MuLoCo(3)],
    gm.IsoLoCo: [gm.IsoLoCo(3, lr=0.1, momentum=0.3)],
    StreamingDiLoCo: [StreamingDiLoCo(4, fragments=2), StreamingDiLoCo(6, fragments=2, delay=3, own_weight=0.3)],
    EagerDiLoCo: [EagerDiLoCo(3), EagerDiLoCo(3, compressor=gm.QSGD(8, bucket_size=8, unbiased=True))],
    LinkChoco: [LinkChoco(gm.SignNorm(8), step_size=0.3)],
    DeepSqueeze: [DeepSqueeze(gm.SignNorm(8), step_size=0.1), DeepSqueeze(gm.RandomK(0.3), step_size=0.2)],
    Moniqua: [Moniqua(20.0)],
    PowerGossip: [PowerGossip(), PowerGossip(rank=2, num_iterations=2)],
    Sparta: [Sparta(0.2)],
    ClippedGossip: [ClippedGossip(0.5)],
    gm.TrimmedMean: [gm.TrimmedMean(0.3)],
    gm.KGT: [gm.KGT(3), gm.KGT(2, lr=0.7)],
    gm.ProxSkip: [gm.ProxSkip(0.5)],
}
"""Of algorithms that cannot be made without arguments, or take several ways with them."""


def examples() -> list[Algorithm]:
    """An object of each algorithm at least."""
    return [made for kind in found_algorithms() for made in (EXAMPLES[kind] if kind in EXAMPLES else [kind()])]


def targets(dtype: torch.dtype) -> Tensor:
    """The optimum of each rank: [n, *SHAPE]."""
    return torch.randn(NUM_RANKS, *SHAPE, dtype=dtype, generator=torch.Generator().manual_seed(1))


def momentum_of(algorithm: Algorithm) -> float:
    own = algorithm.outer if isinstance(algorithm, Over) else algorithm
    return 0.5 if own.needs_sgd else 0.0


def graph_for(algorithm: Algorithm) -> dict[str, Any]:
    """A ring, where the algorithm has none of its own."""
    has_own = algorithm.averages_exactly or algorithm.default_graph(NUM_RANKS) or algorithm.default_mixing(NUM_RANKS)
    return {} if has_own else {"graph": gm.RingGraph(NUM_RANKS, peers_per_itr=2)}


def one_of_each() -> list[Algorithm]:
    """The first example of each algorithm, where the codes of messages make no difference."""
    return list({type(each): each for each in reversed(examples())}.values())


def may_overlap(algorithm: Algorithm) -> bool:
    return not (algorithm.needs_current or algorithm.keeps_models or getattr(algorithm, "delay", False))


class Quadratic(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(*SHAPE, dtype=dtype))

    def forward(self, target: Tensor) -> Tensor:
        return (self.w - target).square().sum() / 2


def in_threads(algorithm: Algorithm, dtype: torch.dtype, **arguments: Any) -> tuple[Tensor, Any, float]:
    """Training by ranks in threads: the models [n, d], the weights of the wrapper, and the bytes that a rank sends."""
    goals = targets(dtype)

    def body(group: dist.ProcessGroup) -> tuple[Tensor, Any, int]:
        model: Any = gm.GossipDataParallel(Quadratic(dtype), process_group=group, algorithm=algorithm, **arguments)
        optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=momentum_of(algorithm))
        before = model.comm_stats()["bytes_sent"]
        for _ in range(NUM_STEPS):
            loss = model(goals[group.rank()])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        model.settle()
        trained, mixing = model.module.w.detach().clone(), engine_of(model).mixer.mixing
        sent = model.comm_stats()["bytes_sent"] - before
        model.close()
        return trained.flatten(), mixing, sent

    ranks = run_ranks(NUM_RANKS, body)
    return torch.stack([each[0] for each in ranks]), ranks[0][1], sum(each[2] for each in ranks) / NUM_RANKS


def stacked(driver: Stacked, dtype: torch.dtype, schedule: gm.Schedule) -> Tensor:
    """The models [n, d] after the same training as rows."""
    goals, momentum = targets(dtype).flatten(1), momentum_of(driver.algorithm)
    x = nn.Parameter(torch.zeros_like(goals))
    optimizer = torch.optim.SGD([x], lr=LR, momentum=momentum)
    for k in range(NUM_STEPS):
        driver.step(x.data, k, schedule.action(k), sgd=SGDStep(LR, momentum) if k else None)
        if k and driver.momentum is not None:
            optimizer.state[x]["momentum_buffer"].copy_(driver.momentum)
        x.grad = driver.estimates(x.data) - goals
        optimizer.step()
    driver.settle(x.data)
    return driver.estimates(x.data)


def compare(algorithm: Algorithm, dtype: torch.dtype, **arguments: Any) -> None:
    real, mixing, sent = in_threads(algorithm, dtype, **arguments)
    own = algorithm.outer if isinstance(algorithm, Over) else algorithm
    driver = Stacked(
        algorithm,
        None if own.averages_exactly else mixing,
        NUM_RANKS,
        overlap=arguments.get("overlap", False),
        wire_dtype=arguments.get("wire_dtype"),
        shapes=[SHAPE],
    )
    rows = stacked(driver, dtype, arguments.get("schedule", gm.Schedule()))
    torch.testing.assert_close(rows, real, rtol=0, atol=TOLERANCE[dtype])
    padded = 64 / sent if arguments.get("wire_dtype") is torch.int8 else 0  # a message ends with a cache line
    assert driver.sent_bytes == pytest.approx(sent, rel=1e-6 + NUM_STEPS * padded * 2)
    assert float(real.std(dim=0).max()) > 1e-3, "ranks are equal"
    assert float(real.abs().max()) > 0.1, "nothing was learnt"


@pytest.mark.parametrize("algorithm", examples(), ids=repr)
def test_rows_are_ranks(algorithm: Algorithm) -> None:
    compare(algorithm, torch.float64, push_sum=False, **graph_for(algorithm))


@pytest.mark.parametrize("algorithm", [each for each in one_of_each() if may_overlap(each)], ids=repr)
def test_rows_are_ranks_whose_rounds_overlap(algorithm: Algorithm) -> None:
    compare(algorithm, torch.float32, push_sum=False, overlap=True, **graph_for(algorithm))


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_rows_have_push_sum_weights(dtype: torch.dtype, overlap: bool) -> None:
    import networkx as nx

    star = gm.graph_manager.NetworkXGraph(nx.star_graph(NUM_RANKS - 1))
    compare(DPSGD(), dtype, graph=star, overlap=overlap, schedule=gm.Schedule(gossip_every=2, average_every=3))


@pytest.mark.parametrize("algorithm", examples(), ids=repr)
def test_an_algorithm_states_the_steps_of_its_rounds(algorithm: Algorithm) -> None:
    assert algorithm.has_own_times == (algorithm.times is not None)
    if (times := algorithm.times) is not None:
        stated = {k for first, every in times for k in range(first, 60, every)}
        assert {k for k in range(1, 60) if algorithm.is_due(k)} == stated


@pytest.mark.parametrize("algorithm", [DPSGD(), D2(), EXAMPLES[Choco][0]], ids=repr)
def test_rows_take_exact_averages(algorithm: Algorithm) -> None:
    ring = gm.RingGraph(NUM_RANKS, peers_per_itr=2)
    compare(algorithm, torch.float64, graph=ring, push_sum=False, schedule=gm.Schedule(average_every=3))


@pytest.mark.parametrize("wire_dtype", [torch.bfloat16, torch.int8])
@pytest.mark.parametrize("algorithm", [DPSGD(), D2()], ids=repr)
def test_rows_go_through_a_narrow_wire(algorithm: Algorithm, wire_dtype: torch.dtype) -> None:
    ring = gm.RingGraph(NUM_RANKS, peers_per_itr=2)
    compare(algorithm, torch.float64, graph=ring, push_sum=False, wire_dtype=wire_dtype)
