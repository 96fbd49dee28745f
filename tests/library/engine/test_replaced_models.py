"""Models that are replaced in the middle of training, by the average or by other weights, stay what they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from gossip_modules import (
    D2,
    EXTRA,
    KGT,
    Choco,
    DecentLaM,
    DiLoCo,
    ExactDiffusion,
    GASLoC,
    GossipDataParallel,
    GradientTracking,
    NoLoCo,
    PowerGossip,
    ProxSkip,
    QGDSGDm,
    RelaySGD,
    RingGraph,
    SignNorm,
    SlowMo,
    SparseLoCo,
    gossip,
)
from tests.harness.quadratics import Point
from tests.harness.ranks import run_ranks

NUM_RANKS, PERIOD = 4, 2


def on_a_ring(**options: Any) -> dict[str, Any]:
    return {"graph": RingGraph(NUM_RANKS, peers_per_itr=2), "push_sum": False, **options}


METHODS: dict[str, Callable[[], dict[str, Any]]] = {
    "sgp": dict,
    "D-PSGD": on_a_ring,
    "overlap": lambda: {"overlap": True},
    "choco": lambda: on_a_ring(algorithm=Choco(SignNorm(), step_size=0.4)),
    "powergossip": lambda: on_a_ring(algorithm=PowerGossip()),
    "relaysgd": lambda: {"algorithm": RelaySGD()},
    "diloco": lambda: {"algorithm": DiLoCo(PERIOD)},
    "slowmo": lambda: {"algorithm": SlowMo(PERIOD, gossip_every=1, inner_lr="optimizer")},
    "noloco": lambda: {"algorithm": NoLoCo(PERIOD)},
    "gasloc": lambda: {"algorithm": GASLoC(PERIOD), "graph": RingGraph(NUM_RANKS, peers_per_itr=2)},
    "sparseloco": lambda: {"algorithm": SparseLoCo(PERIOD)},
    "qgdsgdm": lambda: {"algorithm": QGDSGDm()},
    "decentlam": lambda: {"algorithm": DecentLaM()},
    "d2": lambda: {"algorithm": D2()},
    "exactdiffusion": lambda: {"algorithm": ExactDiffusion()},
    "extra": lambda: {"algorithm": EXTRA()},
    "gradienttracking": lambda: {"algorithm": GradientTracking()},
    "kgt": lambda: {"algorithm": KGT(2)},
    "proxskip": lambda: {"algorithm": ProxSkip(0.7)},
}
KEEPS_MOMENTUM = ("diloco", "slowmo", "sparseloco")  # in average_(), as all ranks have the same anchor


def train(wrapper: nn.Module, optimizer: torch.optim.Optimizer, rank: int, num_steps: int, scale: float = 1.0) -> None:
    for _ in range(num_steps):
        optimizer.zero_grad()
        (scale * wrapper(rank)).backward()
        optimizer.step()


def sgd_for(name: str, wrapper: nn.Module) -> torch.optim.Optimizer:
    momentum = 0.9 if name in ("qgdsgdm", "decentlam") else 0.0
    return torch.optim.SGD(wrapper.parameters(), lr=0.05, momentum=momentum)


def distance(x: Tensor, value: Tensor) -> float:
    return float((x.detach() - value).abs().max())


@pytest.mark.parametrize("name", [name for name in METHODS if name not in KEEPS_MOMENTUM])
def test_after_an_average_ranks_stay_together(name: str) -> None:
    def body(group: dist.ProcessGroup) -> None:
        point = Point()
        wrapper = GossipDataParallel(point, process_group=group, **METHODS[name]())
        optimizer = sgd_for(name, wrapper)
        train(wrapper, optimizer, group.rank(), 2 * PERIOD + 2)
        wrapper.settle()
        assert wrapper.consensus_distance() > 1e-4
        with wrapper.averaged():
            expected = point.x.detach().clone()
        wrapper.average_()
        assert distance(point.x, expected) < 1e-12
        train(wrapper, optimizer, group.rank(), 3 * PERIOD, scale=0.0)
        wrapper.flush()
        assert distance(point.x, expected) < 1e-12
        wrapper.close()

    run_ranks(NUM_RANKS, body)


@pytest.mark.parametrize("name", ["diloco", "slowmo"])  # SparseLoCo leaves out another part of other drifts
def test_an_average_changes_nothing_in_exact_outer_steps(name: str) -> None:
    def body(group: dist.ProcessGroup, *, averages: bool) -> Tensor:
        point = Point()
        options = {"algorithm": SlowMo(PERIOD)} if name == "slowmo" else METHODS[name]()
        wrapper = GossipDataParallel(point, process_group=group, **options)
        optimizer = sgd_for(name, wrapper)
        train(wrapper, optimizer, group.rank(), 2 * PERIOD)
        if averages:
            wrapper.average_()  # at an outer step
        wrapper(group.rank())
        wrapper.close()
        return point.x.detach().clone()

    def both(group: dist.ProcessGroup) -> None:
        torch.testing.assert_close(body(group, averages=True), body(group, averages=False), rtol=0, atol=1e-12)

    run_ranks(NUM_RANKS, both)


@pytest.mark.parametrize("name", METHODS)
def test_training_goes_on_from_weights_that_are_loaded(name: str) -> None:
    def body(group: dist.ProcessGroup) -> None:
        point = Point()
        wrapper = GossipDataParallel(point, process_group=group, **METHODS[name]())
        optimizer = sgd_for(name, wrapper)
        train(wrapper, optimizer, group.rank(), 2 * PERIOD + 2)
        expected = torch.tensor([7.0], dtype=torch.float64)
        wrapper.settle()
        point.load_state_dict({"x": expected})
        wrapper.set_extra_state(None)  # says nothing, as it is meant
        train(wrapper, optimizer, group.rank(), 3 * PERIOD, scale=0.0)
        wrapper.flush()
        assert distance(point.x, expected) < 1e-12
        wrapper.close()

    run_ranks(NUM_RANKS, body)


def test_the_model_inside_averaged_is_no_new_model() -> None:
    """Nothing starts anew, not even by `average_` inside."""

    def body(group: dist.ProcessGroup, *, looks: bool) -> Tensor:
        point = Point()
        wrapper = GossipDataParallel(point, process_group=group, algorithm=NoLoCo(PERIOD))
        optimizer = sgd_for("noloco", wrapper)
        train(wrapper, optimizer, group.rank(), PERIOD + 1)
        if looks:
            with wrapper.averaged():
                wrapper.average_()
        train(wrapper, optimizer, group.rank(), PERIOD)
        wrapper.close()
        return point.x.detach().clone()

    def both(group: dist.ProcessGroup) -> None:
        torch.testing.assert_close(body(group, looks=True), body(group, looks=False), rtol=0, atol=1e-12)

    run_ranks(NUM_RANKS, both)


def test_a_composable_model_loads_a_plain_one_and_starts_anew() -> None:
    def body(group: dist.ProcessGroup) -> None:
        point = gossip(Point(), process_group=group, algorithm=NoLoCo(PERIOD))
        optimizer = sgd_for("noloco", point)
        train(point, optimizer, group.rank(), PERIOD + 1)
        expected = torch.tensor([7.0], dtype=torch.float64)
        point.settle()
        point.load_state_dict({"x": expected})
        train(point, optimizer, group.rank(), 2 * PERIOD, scale=0.0)
        assert distance(next(point.parameters()), expected) < 1e-12
        point.close()

    with pytest.warns(UserWarning, match="the state dict holds no gossip state"):
        run_ranks(2, body)
