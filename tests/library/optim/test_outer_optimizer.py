"""OuterOptimizer: equal to one worker of the Lab, with the state, groups, schedulers and hooks of its optimizer."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import StepLR
from torch.optim.optimizer import register_optimizer_step_post_hook

from gossip_modules import (
    DiLoCo,
    IsoLoCo,
    LocalSGD,
    MuLoCo,
    NoLoCo,
    OuterOptimizer,
    SlowMo,
    SparseLoCo,
    StreamingDiLoCo,
)
from gossip_modules.lab import Compute, LabPlan, LabTask, Network, Setting
from gossip_modules.lab.comparison import LabTraining
from gossip_modules.rounds.periodic import Periodic

STEPS = 14


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).tanh())


def net() -> Net:
    torch.manual_seed(0)
    return Net().double()


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch) - batch.roll(1, 1)).square().mean()


def batch(step: int) -> Tensor:
    return torch.randn(4, 16, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def train(model: nn.Module, optimizer: Optimizer, first: int, last: int, *schedulers: Any) -> None:
    for step in range(first, last):
        optimizer.zero_grad()
        loss(model, batch(step)).backward()
        optimizer.step()
        for scheduler in schedulers:
            scheduler.step()


def parameters_of(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().double().flatten() for p in model.parameters()])


def by_the_lab(algorithm: Any, make: Callable[[Any], Optimizer]) -> dict[str, Tensor]:
    """The parameters by name, in the order of the Lab's vectors, on which chunks and fragments depend."""
    plan, network = LabPlan.of(algorithm), Network("1 Gbit/s")
    task = LabTask(lambda: net(), loss, lambda worker, step, generator: batch(step), make)
    training = LabTraining(plan, Setting(1, None, Compute(0.1), network), task)
    *_, z = training.run(STEPS)
    return {name.removeprefix("model."): view[0] for name, view in training.models.views(z).items()}


ALGORITHMS: dict[str, Periodic] = {
    "DiLoCo": DiLoCo(5, lr=0.7, momentum=0.5),
    "in every step": DiLoCo(1, lr=0.7, momentum=0.5),
    "MuLoCo": MuLoCo(5),
    "Adam outside": DiLoCo(5, optimizer=lambda parameters: torch.optim.Adam(parameters, lr=0.01)),
    "fragments": DiLoCo(5, momentum=0.5, fragments=2),
    "SlowMo": SlowMo(5, lr=0.8, momentum=0.5, inner_lr="optimizer"),
    "IsoLoCo": IsoLoCo(5, lr=0.5),
    "SparseLoCo": SparseLoCo(5),
    "anchor in host memory": DiLoCo(5, momentum=0.5, anchor_device="cpu"),
}
OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
}


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("algorithm", ALGORITHMS.values(), ids=ALGORITHMS)
def test_it_is_one_worker_of_the_lab(algorithm: Periodic, make: Callable[[Any], Optimizer]) -> None:
    model, expected = net(), by_the_lab(algorithm, make)
    own = {name: model.get_parameter(name) for name in expected}
    train(model, OuterOptimizer(make(own.values()), algorithm), 0, STEPS)
    assert max((own[name].detach() - value).abs().max() for name, value in expected.items()) < 1e-12


def test_it_is_the_law() -> None:
    """phi <- phi - c (D + b m), m <- b m + D, on f(x) = x^2 / 2, by hand."""
    x = nn.Parameter(torch.tensor([2.0], dtype=torch.float64))
    optimizer = OuterOptimizer(torch.optim.SGD([x], lr=0.1), DiLoCo(3, lr=0.7, momentum=0.5))
    phi, m = 2.0, 0.0
    for _ in range(4):
        for _ in range(3):
            x.grad = x.detach().clone()
            optimizer.step()
        drift = phi - phi * 0.9**3
        m = 0.5 * m + drift
        phi -= 0.7 * (drift + 0.5 * m)
        assert x.item() == pytest.approx(phi, abs=1e-14)


@pytest.mark.parametrize("step", [2, 7])
@pytest.mark.parametrize("algorithm", ALGORITHMS.values(), ids=ALGORITHMS)
def test_a_loaded_state_goes_on_with_the_same_bits(algorithm: Periodic, step: int, tmp_path: Path) -> None:
    whole, half, other = net(), net(), net()
    train(whole, OuterOptimizer(OPTIMIZERS["AdamW"](whole.parameters()), algorithm), 0, STEPS)

    first = OuterOptimizer(OPTIMIZERS["AdamW"](half.parameters()), algorithm)
    train(half, first, 0, step)
    torch.save({"model": half.state_dict(), "optimizer": first.state_dict()}, tmp_path / "checkpoint.pt")
    saved = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    second = OuterOptimizer(OPTIMIZERS["AdamW"](other.parameters()), algorithm)
    train(other, second, 0, 3)  # another run, which the state replaces
    other.load_state_dict(saved["model"])
    second.load_state_dict(saved["optimizer"])
    train(other, second, step, STEPS)
    assert torch.equal(parameters_of(other), parameters_of(whole))


def test_a_copy_goes_on_with_the_same_bits() -> None:
    model = net()
    optimizer = OuterOptimizer(OPTIMIZERS["AdamW"](model.parameters()), DiLoCo(5, momentum=0.5))
    train(model, optimizer, 0, 7)
    own, copied = copy.deepcopy((model, optimizer))
    train(model, optimizer, 7, STEPS)
    train(own, copied, 7, STEPS)
    assert torch.equal(parameters_of(own), parameters_of(model))


def test_the_state_of_the_optimizer_alone_begins_outer_steps_anew() -> None:
    model, other = net(), net()
    plain = OPTIMIZERS["AdamW"](model.parameters())
    train(model, plain, 0, 4)
    other.load_state_dict(model.state_dict())
    optimizer = OuterOptimizer(OPTIMIZERS["AdamW"](other.parameters()), LocalSGD(5))
    optimizer.load_state_dict(copy.deepcopy(plain.state_dict()))
    assert optimizer.num_steps == 0
    train(model, plain, 4, 9)
    train(other, optimizer, 4, 9)  # an average over one worker changes nothing
    assert (parameters_of(model) - parameters_of(other)).abs().max() < 1e-14


@pytest.mark.parametrize("of_inner", [True, False])
def test_schedulers_and_groups_work_with_either_object(of_inner: bool) -> None:
    model, plain = net(), net()

    def run(own: Net, algorithm: Periodic) -> tuple[Optimizer, Any]:
        groups: list[dict[str, Any]] = [
            {"params": own.first.parameters(), "lr": 0.1},
            {"params": own.last.parameters()},
        ]
        inner = torch.optim.SGD(groups, lr=0.05, momentum=0.9)
        outer = OuterOptimizer(inner, algorithm)
        scheduler = StepLR(inner if of_inner else outer, step_size=4, gamma=0.5)
        train(own, outer, 0, 5, scheduler)
        return outer, scheduler

    outer, scheduler = run(model, DiLoCo(5, lr=0.5, momentum=0.0))
    assert [group["lr"] for group in outer.param_groups] == [0.05, 0.025] == scheduler.get_last_lr()
    run(plain, LocalSGD(5))
    middle = (parameters_of(net()) + parameters_of(plain)) / 2  # half of the drift of five steps
    assert (parameters_of(model) - middle).abs().max() < 1e-15


def test_hooks_see_the_parameters_after_the_outer_step_and_a_step_counts_once() -> None:
    model = net()
    inner = OPTIMIZERS["SGD"](model.parameters())
    optimizer = OuterOptimizer(inner, DiLoCo(2, lr=0.0001, momentum=0.0))
    start, seen, of_all = parameters_of(model), [], []
    optimizer.register_step_post_hook(lambda *_: seen.append(parameters_of(model)))
    handle = register_optimizer_step_post_hook(lambda *_: of_all.append(1))
    train(model, optimizer, 0, 2)
    train(model, inner, 2, 4)  # steps of the optimizer itself count too
    handle.remove()
    assert len(seen) == len(of_all) == optimizer.num_steps == 4
    for after in (seen[1], seen[3]):
        assert (after - start).abs().max() < 1e-3 < (seen[0] - start).abs().max()


def test_a_skipped_step_of_a_grad_scaler_does_not_count() -> None:
    model = net().float()
    optimizer = OuterOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), DiLoCo(2))
    scaler = torch.amp.GradScaler("cpu")
    for bad in (False, True, False):
        optimizer.zero_grad()
        scaler.scale(loss(model, batch(0).float()) * (float("inf") if bad else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
    assert optimizer.num_steps == 2


def test_narrow_and_complex_parameters_step_in_their_own_dtypes() -> None:
    """The anchor has float32 at least, so a step below the grain of bfloat16 is not lost."""
    narrow = nn.Parameter(torch.full((3,), 256.0, dtype=torch.bfloat16))
    pair = nn.Parameter(torch.tensor([1.0 + 2.0j]))
    optimizer = OuterOptimizer(torch.optim.SGD([narrow, pair], lr=2.0), DiLoCo(1, lr=0.25, momentum=0.0))
    for _ in range(4):  # 256 - 0.5 k: bfloat16 has steps of 1 below 256
        narrow.grad, pair.grad = torch.ones_like(narrow), torch.full_like(pair, 1j)
        optimizer.step()
    assert narrow.dtype == torch.bfloat16
    assert pair.dtype == torch.complex64
    assert narrow.tolist() == pytest.approx([254.0] * 3)
    assert pair.item() == pytest.approx(1.0 + 0.0j, abs=1e-6)


def test_a_closure_gives_its_loss() -> None:
    x = nn.Parameter(torch.tensor([2.0]))
    optimizer = OuterOptimizer(torch.optim.LBFGS([x], max_iter=1), DiLoCo(1, lr=1.0, momentum=0.0))

    def closure() -> Tensor:
        optimizer.zero_grad()
        value = x.square().sum()
        value.backward()
        return value

    assert optimizer.step(closure).item() == 4.0
    assert x.item() != 2.0


def test_parameters_are_added_before_the_first_step_only() -> None:
    model, more = net(), nn.Parameter(torch.zeros(2, dtype=torch.float64))
    inner = OPTIMIZERS["SGD"](model.first.parameters())
    optimizer = OuterOptimizer(inner, DiLoCo(1))
    optimizer.add_param_group({"params": model.last.parameters()})
    train(model, optimizer, 0, 2)
    with pytest.raises(ValueError, match="got other parameters after the first step, expected the same ones"):
        optimizer.add_param_group({"params": [more]})
    inner.add_param_group({"params": [more]})
    with pytest.raises(ValueError, match="make a new OuterOptimizer"):
        train(model, optimizer, 2, 3)


@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        (NoLoCo(5), "expected one that averages over all ranks every few steps; pass e.g. DiLoCo"),
        (SlowMo(4, gossip_every=1), "expected one that averages over all ranks"),
        ("diloco", "got algorithm=diloco, expected one that averages"),
        (StreamingDiLoCo(10), "expected no delay and no weights: there is one worker"),
        (DiLoCo(5, weighted_by="tokens"), "expected no delay and no weights"),
    ],
)
def test_algorithms_that_need_others_are_refused(algorithm: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        OuterOptimizer(OPTIMIZERS["SGD"](net().parameters()), algorithm)


def test_other_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match=r"expected a torch\.optim\.Optimizer; pass e\.g\."):
        OuterOptimizer(net().parameters(), DiLoCo(5))  # type: ignore[arg-type]
    optimizer = OuterOptimizer(OPTIMIZERS["SGD"](net().parameters()), DiLoCo(5))
    model = net()
    cut = OuterOptimizer(OPTIMIZERS["SGD"](model.parameters()), DiLoCo(5, fragments=2))
    train(model, cut, 0, 1)
    with pytest.raises(ValueError, match=r"got a state with 2 fragments .* expected 1; load it with the algorithm"):
        optimizer.load_state_dict(cut.state_dict())


def test_it_needs_no_process_group() -> None:
    assert not torch.distributed.is_initialized()
    assert np.isfinite(parameters_of(net()).numpy()).all()
