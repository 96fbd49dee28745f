"""Rules that carry steps keep the optimum when the learning rate changes."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from gossip_modules import D2, ExactDiffusion, GossipDataParallel, GradientTracking, RingGraph
from gossip_modules.extend import Algorithm, Memory
from gossip_modules.mixing_manager import MetropolisHastingsMixing
from gossip_modules.rounds.rates import RateUnits
from gossip_modules.rounds.vector import Vector
from tests.harness.problems import loss_of, mlp, train_step
from tests.harness.progress import local_of
from tests.harness.quadratics import CURVATURES, MINIMA, START, train_rows
from tests.harness.ranks import run_ranks, solo_group
from tests.harness.reference import flatten

RULES: list[Algorithm] = [D2(), ExactDiffusion(), GradientTracking()]
A, B = (torch.tensor(values, dtype=torch.float64) for values in (CURVATURES, MINIMA))
LR = 0.1
N = 5
RING = RingGraph(N, peers_per_itr=2)
W = MetropolisHastingsMixing(RING).matrix(0).double()
MILD = torch.tensor([0.8, 0.9, 1.0, 1.1, 1.2]).double()  # with which 120 steps reach the optimum


def optimum_of(curvatures: Tensor) -> float:
    return float((curvatures * B).sum() / curvatures.sum())


OPTIMUM = optimum_of(A)

Rate = Callable[[int], float]  # of step k


def drop(k: int) -> float:
    return LR if k < 250 else LR / 10


def warm_up(k: int) -> float:
    return LR * min(1.0, k / 50)


def cosine(k: int) -> float:
    return LR * (1 + math.cos(math.pi * min(max(k - 250, 0), 50) / 50)) / 2  # to exactly zero


def restarts(k: int) -> float:
    return LR * (1 + math.cos(math.pi * (k % 100) / 100)) / 2


def oracle(rule: Algorithm, rate: Rate, num_steps: int, *, momentum: float = 0.0) -> Tensor:
    """x float64 [n] of all ranks after each step and round, [num_steps, n], from the lines of the papers.

    What is carried is kept in units of the gradient, so that no rate is in it: c = eta d.
    """
    x, m, d = torch.full((N,), START, dtype=torch.float64), torch.zeros(N).double(), torch.zeros(N).double()
    weights = (torch.eye(N).double() + W) / 2 if isinstance(rule, ExactDiffusion) else W
    history = []
    for k in range(num_steps):
        eta = rate(k)
        m = momentum * m + A * (x - B)
        if isinstance(rule, GradientTracking):
            y = m if k == 0 else W @ (m + d)
            d, x = y - m, W @ (x - eta * y)
        else:
            h = x - eta * m
            x = weights @ (h + eta * d)
            d = (x - h) / eta if eta else d
        history.append(x)
    return torch.stack(history)


def train(rule: Algorithm, rate: Rate, num_steps: int, *, momentum: float) -> Tensor:
    """The same by the wrapper and torch.optim.SGD, on ranks that are threads."""

    def body(group: dist.ProcessGroup) -> Tensor:
        rank, x = group.rank(), nn.Parameter(torch.full((1,), START, dtype=torch.float64))
        module = nn.Module()
        module.x = x
        module.forward = lambda: A[rank] / 2 * (x - B[rank]).square().sum()
        model = GossipDataParallel(module, process_group=group, algorithm=rule, graph=RING)
        optimizer = torch.optim.SGD([x], lr=1.0, momentum=momentum)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
        history = []
        for _ in range(num_steps):
            optimizer.zero_grad()
            model().backward()
            history.append(x.detach().clone())
            optimizer.step()
            scheduler.step()
        model()
        history.append(x.detach().clone())
        model.close()
        return torch.cat(history[1:])

    return torch.stack(run_ranks(N, body), dim=1)


# A vector that is scaled up from a rate of 1 / 4000 has the rounding of that rate.
RATES = [(drop, 1e-12), (warm_up, 1e-12), (cosine, 1e-12), (restarts, 1e-10)]


@pytest.mark.parametrize(("rule", "rate", "bound"), [(rule, *case) for rule, case in zip([*RULES, D2()], RATES)])
def test_every_rank_follows_the_law_at_rates_that_change(rule: Algorithm, rate: Rate, bound: float) -> None:
    starts: dict[Rate, int] = {drop: 240, warm_up: 0, cosine: 280, restarts: 90}
    first = starts[rate]

    def shifted(k: int) -> float:
        return rate(k + first) / 2

    found, law = train(rule, shifted, 24, momentum=0.5), oracle(rule, shifted, 24, momentum=0.5)
    torch.testing.assert_close(found, law, rtol=0, atol=bound)


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize(("rate", "bound"), RATES)
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_the_law_keeps_the_optimum(rule: Algorithm, rate: Rate, bound: float, momentum: float) -> None:
    """Where it has been reached; the rates of momentum are smaller, for the same step."""

    def scaled(k: int) -> float:
        return (1 - momentum) * rate(k if rate is warm_up else k - 150)

    distance = (oracle(rule, scaled, 550, momentum=momentum) - OPTIMUM).abs().amax(1)
    assert distance[390:].max() < (2e-8 if momentum else bound)


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_a_drop_by_ten_keeps_the_optimum(rule: Algorithm) -> None:
    def rate(k: int) -> float:
        return 0.4 if k < 120 else 0.04

    x = train_rows(rule, MetropolisHastingsMixing(RING), 130, rate=rate, curvatures=MILD.tolist())
    distance = (x[1:] - optimum_of(MILD)).abs().amax(1)
    assert distance[118:].max() < 1e-12


# What is kept, part by part.


def kept(values: dict[str, float]) -> tuple[Memory, Callable[[Any], list[float]]]:
    """A memory with a vector "c" of twos, over parameters of three elements each, in units of the rates that are given;
    and a function that begins a round with other rates, and gives the first element of each."""
    module = nn.ParameterDict({name: nn.Parameter(torch.zeros(3)) for name in values})
    x = Vector.of(local_of(GossipDataParallel(module, process_group=solo_group())).buffer.vector)
    memory = Memory()
    memory.fit(x)
    memory.scale(values)
    c = memory.vector("c", in_units_of_rate=True)
    c.parts[0].fill_(2.0)

    def parts(rates: Any) -> list[float]:
        memory.scale(rates)
        return [float(part[0]) for part in c.parts[0].split(3)]

    return memory, parts


def test_each_parameter_is_scaled_by_its_own_rate() -> None:
    memory, parts = kept({"a": 0.1, "b": 0.2})
    assert parts({"a": 0.1, "b": 0.1}) == [2.0, 1.0]
    assert parts(0.4) == pytest.approx([8.0, 4.0])
    assert parts(None) == pytest.approx([8.0, 4.0])  # nobody knows the rates
    assert parts({"b": 0.8}) == pytest.approx([8.0, 8.0])  # nor that of the first parameter
    assert memory.state_dict()["rates"] == {"a": 0.4, "b": 0.8}


def test_a_rate_of_zero_leaves_the_memory_for_later() -> None:
    memory, parts = kept({"a": 0.1, "b": 0.1})
    (c,) = memory.vector("c").parts
    for _ in range(2):
        assert parts({"a": 0.0, "b": 0.2}) == [0.0, 4.0], "the round uses nothing"
        c.fill_(4.0)  # by the round
        memory.end_round()
        assert [float(part[0]) for part in c.split(3)] == [2.0, 4.0]
    parts({"a": 0.0, "b": 0.2})
    assert memory.state_dict()["rates"] == {"a": 0.1, "b": 0.2}, "a round that ends with an error loses nothing"
    assert [float(part[0]) for part in c.split(3)] == [2.0, 4.0]
    assert parts(0.2) == [4.0, 4.0]


def test_a_vector_of_a_rate_that_is_rounding_starts_from_zero() -> None:
    assert kept({"a": 1e-8, "b": 1e-4})[1](0.1) == [0.0, 2000.0]


def test_a_state_of_an_older_version_has_no_rates() -> None:
    memory, _ = kept({"a": 0.1, "b": 0.2})
    state = memory.state_dict()
    del state["rates"]
    memory.load_state_dict(state)
    c = memory.vector("c", in_units_of_rate=True)
    for rate, expected in ((0.4, 2.0), (0.8, 4.0)):
        memory.scale(rate)
        assert float(c.parts[0][0]) == expected


# The rates of steps.


def rates_of(wrapper: GossipDataParallel) -> Any:
    return wrapper.get_extra_state()["engine"]["gossiper"]["optimizer"]["step_rates"]


def test_rates_are_those_of_the_steps_since_the_last_round() -> None:
    model = mlp()
    wrapper = GossipDataParallel(model, process_group=solo_group(), algorithm=D2(), rounds="manual")
    wrapper.gossip_step()
    lr = torch.tensor(0.25)  # changed in place by schedulers
    groups = [{"params": model[0].parameters(), "lr": lr}, {"params": model[2].parameters()}]  # type: ignore[index]
    optimizer = torch.optim.Adam(groups, lr=0.5)
    train_step(wrapper, optimizer, 0, 0)
    names = [name for name, _ in model.named_parameters()]
    assert rates_of(wrapper) == {"rates": dict(zip(names, (0.25, 0.25, 0.5, 0.5), strict=True)), "num_steps": 1}
    lr.fill_(0.75)
    optimizer.step()
    assert rates_of(wrapper) == {"rates": 0.5, "num_steps": 2}, "the mean of the steps"
    for group in optimizer.param_groups:
        group["lr"] = 0.125
    assert rates_of(wrapper)["rates"] == 0.5, "a scheduler that has set the next rate"
    wrapper.gossip_step()
    assert rates_of(wrapper) == {"rates": 0.125, "num_steps": 0}, "what a step that is left out would have had"
    assert wrapper.get_extra_state()["engine"]["gossiper"]["memory"]["rates"] == 0.5
    wrapper.close()


class Signs(torch.optim.Optimizer):
    """An optimizer without a learning rate."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Closer to zero by 0.01."""
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                parameter.sub_(0.01 * parameter.grad.sign())


def test_an_optimizer_without_a_rate_scales_nothing() -> None:
    model = mlp()
    wrapper, optimizer = (
        GossipDataParallel(model, process_group=solo_group(), algorithm=D2()),
        Signs(model.parameters()),
    )
    for step in range(2):
        train_step(wrapper, optimizer, 0, step)
    assert rates_of(wrapper) == {"num_steps": 1}
    wrapper.close()


def test_an_optimizer_that_takes_the_place_of_another_one_counts() -> None:
    model = mlp()
    wrapper = GossipDataParallel(model, process_group=solo_group(), algorithm=D2())
    optimizers = [torch.optim.SGD(model.parameters(), lr=rate) for rate in (0.5, 0.25, 0.125)]
    for optimizer in (optimizers[0], optimizers[2], optimizers[1]):
        train_step(wrapper, optimizer, 0, 0)
        assert rates_of(wrapper)["rates"] == optimizer.param_groups[0]["lr"]
    wrapper.close()


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_the_sum_over_ranks_stays_where_one_rank_leaves_out_steps(rule: Algorithm) -> None:
    """As a GradScaler does, also before the first step, and where the rate changes."""

    def body(group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
        model = mlp(3).double()
        wrapper = GossipDataParallel(model, process_group=group, algorithm=rule)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
        for step in range(6):
            if step in (0, 3) and group.rank() == 0:
                optimizer.zero_grad()
                loss_of(wrapper, 0, step).backward()
                optimizer._opt_called = True  # type: ignore[attr-defined]  # or the scheduler warns
            else:
                optimizer.zero_grad()
                loss_of(wrapper, group.rank(), step).backward()
                optimizer.step()
            scheduler.step()
        optimizer.zero_grad()
        loss_of(wrapper, group.rank(), 6)
        name = "z" if isinstance(rule, GradientTracking) else "c"
        (vector,) = wrapper.get_extra_state()["engine"]["gossiper"]["memory"]["vectors"][name]
        wrapper.close()
        return vector, flatten(model)

    vectors, _ = zip(*run_ranks(3, body), strict=True)
    assert vectors[0].abs().max() > 1e-4
    torch.testing.assert_close(sum(vectors), torch.zeros_like(vectors[0]), rtol=0, atol=1e-12)


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("is_before_round", [True, False])
def test_a_checkpoint_around_a_change_goes_on_to_the_bit(rule: Algorithm, is_before_round: bool) -> None:
    def body(group: dist.ProcessGroup) -> None:
        rank = group.rank()
        model, other = mlp(3), mlp(4)

        def start(module: nn.Module) -> tuple[GossipDataParallel, torch.optim.Optimizer, Any]:
            wrapper = GossipDataParallel(module, process_group=group, algorithm=rule)
            groups = [{"params": module[0].parameters()}, {"params": module[2].parameters(), "lr": 0.2}]  # type: ignore[index]
            optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.5)
            return wrapper, optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)

        first, second = start(model), start(other)
        wrapper, optimizer, scheduler = first
        for step in range(3):
            train_step(wrapper, optimizer, rank, step)
            scheduler.step()
        if not is_before_round:
            loss_of(wrapper, rank, 3)
        for to, state in zip(second, first, strict=True):
            to.load_state_dict(copy.deepcopy(state.state_dict()))
        for wrapper, optimizer, scheduler in (first, second):
            if not is_before_round:
                local_of(wrapper).loop.end()
            for step in range(3, 6):
                train_step(wrapper, optimizer, rank, step)
                scheduler.step()
            wrapper.close()
        assert torch.equal(flatten(other), flatten(model))

    run_ranks(2, body)


def test_constant_rates_scale_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> None:
        raise AssertionError("scaled")

    model = mlp()
    wrapper = GossipDataParallel(model, process_group=solo_group(), algorithm=D2())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        train_step(wrapper, optimizer, 0, step)
    monkeypatch.setattr(RateUnits, "_scale", refuse)
    for step in range(3):
        train_step(wrapper, optimizer, 0, step)
    optimizer.param_groups[0]["lr"] = 0.05
    train_step(wrapper, optimizer, 0, 5)
    with pytest.raises(AssertionError, match="scaled"):
        loss_of(wrapper, 0, 6)
    wrapper.close()
