"""The steps of a delay: an outer step that arrives late blends with them, carries them, or drops them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from gossip_modules import (
    DiLoCo,
    EagerDiLoCo,
    GASLoC,
    GossipDataParallel,
    LocalSGD,
    NoLoCo,
    SlowMo,
    SparseLoCo,
    StreamingDiLoCo,
    TopK,
)
from gossip_modules.algorithms.late_steps import decide
from gossip_modules.compression import QSGD
from gossip_modules.extend import OuterMethod
from gossip_modules.graph_manager import CompleteGraph
from gossip_modules.mixing_manager import UniformMixing
from gossip_modules.rounds import Memory, Vector, Vectors
from gossip_modules.rounds.requests import Mail
from tests.harness.quadratics import START, Point, descended, plain_sgd, solve, train_rows
from tests.harness.ranks import run_ranks

CARRIED = [0.5247336230, 0.5580054889, 0.6466253591, 0.7721164217, 1.0662357556]


def late(arrive: Any) -> tuple[Tensor, Tensor]:
    """phi and x of problem Q: rounds begin after 5, 10, 15, 20 steps, and arrive two steps later.

    Args:
        arrive: x from (x, s, phi, drifts).
    """
    x = torch.full((5,), START, dtype=torch.float64)
    phi, m = x.clone(), torch.zeros(5, dtype=torch.float64)
    for _ in range(4):
        x = descended(x, 5 if _ == 0 else 3)
        s, drifts = x, phi - x
        x = descended(x, 2)
        m = 0.9 * m + drifts.mean()
        phi = phi - 0.7 * (drifts.mean() + 0.9 * m)
        x = arrive(x, s, phi, drifts)
    return phi, x


@pytest.mark.parametrize(
    ("options", "arrive", "golden"),
    [
        ({"own_weight": 0.0}, lambda x, s, phi, d: phi, 0.8231293508),
        ({}, lambda x, s, phi, d: (x + phi) / 2, 0.6155506627),
        ({"arrival": "carry"}, lambda x, s, phi, d: phi + x - s, 0.7347390268),
    ],
    ids=["overwrite", "blend", "carry"],
)
def test_golden_values(options: dict[str, Any], arrive: Any, golden: float) -> None:
    phi, x = late(arrive)
    assert abs(float(phi[0]) - golden) < 1e-9
    found = solve(lambda: {"algorithm": DiLoCo(5, delay=2, **options)}, num_steps=22)
    torch.testing.assert_close(found, x, rtol=0, atol=1e-12)
    if "arrival" in options:
        torch.testing.assert_close(found, torch.tensor(CARRIED, dtype=torch.float64), rtol=0, atol=1e-9)


def mean_cosine(drifts: Tensor) -> float:
    """Of all pairs of drifts [n, d], weighted by their norms."""
    products = drifts @ drifts.T
    norms = drifts.norm(dim=1)
    pairs = ~torch.eye(len(drifts), dtype=torch.bool)
    return float(products[pairs].sum() / torch.outer(norms, norms)[pairs].sum())


def test_adaptive_arrival_follows_the_cosine_of_drifts() -> None:
    """In problem Q drifts agree at first, and oppose each other near the optimum."""
    seen, carries = [], [True]

    def arrive(x: Tensor, s: Tensor, phi: Tensor, drifts: Tensor) -> Tensor:
        cosine = mean_cosine(drifts[:, None])
        seen.append(cosine)
        carries.append(cosine >= 0.6 if not 0.4 <= cosine < 0.6 else carries[-1])
        return phi + x - s if carries[-1] else phi

    _, x = late(arrive)
    assert min(seen) < 0.4
    found = solve(lambda: {"algorithm": DiLoCo(5, delay=2, arrival="adaptive")}, num_steps=22)
    torch.testing.assert_close(found, x, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("cosine", "before", "expected"),
    [(0.7, 0.0, 1.0), (0.5, 0.0, 0.0), (0.5, 1.0, 1.0), (0.3, 1.0, 0.0), (0.6, 0.0, 1.0)],
)
def test_adaptive_arrival_keeps_its_choice_between_the_limits(cosine: float, before: float, expected: float) -> None:
    norms = torch.tensor([2.0, 1.0], dtype=torch.float64)
    total = (4 + 1 + 2 * 2 * (cosine + 1e-12)) ** 0.5
    mean, memory = Vector([torch.tensor([total / 2], dtype=torch.float64)]), Memory()
    memory.numbers["carries"] = before
    decide(Vectors(mean, Mail(), t=0, rank=0, num_ranks=2), memory, mean, norms)
    assert memory.numbers["carries"] == expected


PLAIN: dict[str, Any] = {"lr": 1.0, "momentum": 0.0}


@pytest.mark.parametrize(
    "outer",
    [
        DiLoCo(4, delay=2, arrival="carry", **PLAIN),
        DiLoCo(4, delay=2, arrival="adaptive", **PLAIN),
        StreamingDiLoCo(4, fragments=2, delay=3, arrival="carry", anchor_device="cpu", **PLAIN),
        SparseLoCo(4, delay=2, arrival="carry", compressor=TopK(1.0)),
        SlowMo(4, delay=2, arrival="carry", **PLAIN),
        NoLoCo(4, delay=2, arrival="carry", **PLAIN),
        GASLoC(4, delay=2, arrival="carry", **PLAIN),
    ],
    ids=lambda outer: type(outer).__name__ + outer.arrival,
)
def test_no_step_of_the_delay_is_lost(outer: OuterMethod) -> None:
    """Ranks that take equal steps, and whose outer steps average, train as one worker alone."""

    def body(group: dist.ProcessGroup) -> None:
        model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 70)).double()
        for parameter in model.parameters():
            nn.init.zeros_(parameter)
        alone = copy.deepcopy(model)
        wrapper = GossipDataParallel(model, process_group=group, algorithm=outer)
        for k in range(10):
            batch = torch.arange(6.0).double().view(2, 3) * (k + 1)
            wrapper(batch), alone(batch)
            with torch.no_grad():
                for module in (model, alone):
                    for parameter in module.parameters():
                        parameter.add_(0.01 * (k + 1))
        wrapper.close()
        torch.testing.assert_close(model.state_dict(), alone.state_dict())

    run_ranks(2, body)


def test_a_decision_of_adaptive_arrival_ends_with_it() -> None:
    """A run that goes on with arrival="carry" carries, whatever the run before has decided last."""

    def body(group: dist.ProcessGroup) -> list[float]:
        state, found = None, []
        for arrival, num_steps in (("adaptive", 22), ("carry", 5)):
            point = Point()
            wrapper = GossipDataParallel(point, process_group=group, algorithm=DiLoCo(5, delay=2, arrival=arrival))
            optimizer = plain_sgd(wrapper.parameters())
            if state is not None:
                wrapper.load_state_dict(state)
            for _ in range(num_steps):
                optimizer.zero_grad()
                wrapper(group.rank()).backward()
                optimizer.step()
            wrapper.flush()  # the round that is due after so many steps
            state = copy.deepcopy(wrapper.state_dict())
            found.append(point.x.item())
            wrapper.close()
        return found

    dropped, carried = torch.tensor(run_ranks(5, body), dtype=torch.float64).T
    assert dropped.std() < 1e-12  # the round before has dropped the steps of its delay
    assert carried.std() > 0.01


@pytest.mark.parametrize("arrival", ["carry", "adaptive"])
def test_rows_arrive_late_as_ranks_do(arrival: str) -> None:
    outer = DiLoCo(5, delay=2, arrival=arrival)
    rows = train_rows(outer, UniformMixing(CompleteGraph(5, peers_per_itr=4)), 22)
    torch.testing.assert_close(rows[-1], solve(lambda: {"algorithm": outer}, num_steps=22), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DiLoCo(arrival="late"), "DiLoCo: got arrival='late', expected one of 'blend', 'carry', 'adaptive'"),
        (lambda: NoLoCo(arrival="adaptive"), "NoLoCo: got arrival='adaptive', expected one of 'blend', 'carry';"),
        (lambda: DiLoCo(delay=1, own_weight=0.5, arrival="carry"), "got own_weight=0.5 with arrival='carry'"),
        (lambda: DiLoCo(arrival="adaptive", compressor=QSGD(4)), "got arrival='adaptive' with compressor=QSGD"),
    ],
)
def test_options_that_do_not_fit_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("kind", [EagerDiLoCo, LocalSGD])
def test_methods_that_lose_nothing_have_no_choice(kind: Any) -> None:
    with pytest.raises(TypeError, match="arrival"):
        kind(arrival="carry")
