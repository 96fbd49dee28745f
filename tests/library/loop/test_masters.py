"""Masters in the forms of mixed-precision tools: rounds reach them all, and nothing else."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from gossip_modules import DiLoCo
from tests.harness.problems import loss_of, mlp
from tests.harness.ranks import run_ranks, solo_group
from tests.harness.reference import flatten
from tests.library.loop.optimizers import LEARNING_RATE, MastersIn, PartialMasterSGD, SteppedMasters
from tests.library.wrappers.wrapping import irregular, wrap

NUM_STEPS = 12  # more than those after which a warning would say that nothing trains the model
FORMS: list[Callable[..., Any]] = [
    PartialMasterSGD,
    *(partial(MastersIn, form=form) for form in ("partial", "each", "two", "groups", "padded")),
]
NAMES = ["state", "partial", "each", "two", "groups", "padded"]
OPTIONS: list[Callable[[], dict[str, Any]]] = [dict, lambda: {"overlap": True}, lambda: {"algorithm": DiLoCo(3)}]


def train(wrapper: Any, optimizer: Any, rank: int, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        loss_of(wrapper, rank, step).backward()
        optimizer.step()


def trained(make: Any, *, dtype: torch.dtype = torch.float32, **options: Any) -> list[Tensor]:
    """The parameters of two ranks."""

    def body(group: dist.ProcessGroup) -> Tensor:
        wrapper = wrap(mlp(group.rank()).to(dtype), group, init_sync=True, **options)
        train(wrapper, make(wrapper.parameters()), group.rank(), range(NUM_STEPS))
        wrapper.close()
        return flatten(wrapper.module)

    return run_ranks(2, body)


@pytest.mark.parametrize("options", OPTIONS, ids=["sync", "overlap", "outer"])
def test_masters_in_every_form_train_as_the_parameters_do(options: Callable[[], dict[str, Any]]) -> None:
    plain = trained(partial(torch.optim.SGD, lr=LEARNING_RATE), **options())
    for make in FORMS:
        for found, expected in zip(trained(make, **options()), plain, strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("make", FORMS, ids=NAMES)
def test_float32_masters_in_every_form_train_a_bfloat16_model_as_all_masters_in_one_optimizer_do(make: Any) -> None:
    expected = trained(SteppedMasters, dtype=torch.bfloat16)
    for found, other in zip(trained(make, dtype=torch.bfloat16), expected, strict=True):
        torch.testing.assert_close(found, other, rtol=0.05, atol=0.02)


class Average(torch.optim.Optimizer):
    """Keeps a moving average of the parameters, and changes none of them."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            state.setdefault("average", parameter.clone()).lerp_(parameter, 0.1)


class AveragingSGD(torch.optim.Optimizer):
    """Keeps a moving average beside its steps, which copies the parameters after the first one."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            parameter.sub_(parameter.grad, alpha=LEARNING_RATE)
            self.state[parameter].setdefault("average", parameter.clone()).lerp_(parameter, 0.1)


def averages(optimizer: torch.optim.Optimizer) -> Tensor:
    return torch.cat([optimizer.state[x]["average"].double().flatten() for x in optimizer.param_groups[0]["params"]])


@pytest.mark.parametrize(("is_beside", "graph"), [(False, None), (True, None), (True, irregular())])
@pytest.mark.filterwarnings("ignore:got AveragingSGD, whose state 'average' began as a copy")
def test_a_moving_average_in_the_state_of_an_optimizer_is_an_average(is_beside: bool, graph: Any) -> None:
    def body(group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
        wrapper = wrap(mlp(group.rank()), group, init_sync=True, graph=graph)
        parameters = list(wrapper.parameters())
        optimizer = torch.optim.SGD(parameters, lr=LEARNING_RATE) if is_beside else AveragingSGD(parameters)
        keeper = Average(parameters) if is_beside else optimizer
        expected = None
        for step in range(NUM_STEPS):
            train(wrapper, optimizer, group.rank(), range(step, step + 1))
            if is_beside:
                keeper.step()
            now = torch.cat([x.detach().double().flatten() for x in parameters])
            expected = now if expected is None else expected.lerp(now, 0.1)
        wrapper.close()
        assert expected is not None
        return averages(keeper), expected

    for found, expected in run_ranks(3, body):
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
        if is_beside:
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_a_plain_model_that_trains_beside_on_the_same_data_is_no_master() -> None:
    def train_beside(*, has_wrapper: bool) -> Tensor:
        module, beside = mlp(), mlp()
        model = wrap(module, solo_group()) if has_wrapper else module
        optimizer = torch.optim.SGD(beside.parameters(), lr=LEARNING_RATE)
        for step in range(NUM_STEPS):
            loss_of(model, 0, step).backward()
            with torch.no_grad():
                for x in module.parameters():
                    assert x.grad is not None
                    x.sub_(x.grad, alpha=LEARNING_RATE).add_(0.125 * (step == 2))
                    x.grad = None
            train(beside, optimizer, 0, range(step, step + 1))
        return flatten(beside)

    assert torch.equal(train_beside(has_wrapper=True), train_beside(has_wrapper=False))


# Declared copies.


class HiddenMasters:
    """Masters in no optimizer of torch, as one flat vector in the order of the parameters, with zeros at its end."""

    def __init__(self, parameters: Any) -> None:
        self.parameters = list(parameters)
        self.flat = torch.cat([*(x.detach().float().flatten() for x in self.parameters), torch.zeros(3)])

    def zero_grad(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    @torch.no_grad()
    def step(self) -> None:
        at = 0
        for parameter in self.parameters:
            assert parameter.grad is not None
            part = self.flat[at : at + parameter.numel()]
            part.sub_(parameter.grad.float().flatten(), alpha=LEARNING_RATE)
            parameter.copy_(part.view(parameter.shape))
            at += parameter.numel()


@pytest.mark.parametrize("options", OPTIONS, ids=["sync", "overlap", "outer"])
def test_copies_that_a_script_declares_train_as_the_parameters_do(options: Callable[[], dict[str, Any]]) -> None:
    def body(group: dist.ProcessGroup) -> Tensor:
        wrapper = wrap(mlp(group.rank()), group, init_sync=True, **options())
        optimizer = HiddenMasters(wrapper.parameters())
        wrapper.follow([(list(wrapper.parameters()), optimizer.flat)])
        train(wrapper, optimizer, group.rank(), range(NUM_STEPS))
        wrapper.close()
        return flatten(wrapper.module)

    plain = trained(partial(torch.optim.SGD, lr=LEARNING_RATE), **options())
    for found, expected in zip(run_ranks(2, body), plain, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_copies_are_refused_with_the_reason() -> None:
    module = mlp()
    wrapper = wrap(module, solo_group())
    p = next(module.parameters())
    wrong: list[tuple[Any, str]] = [
        ([p], "got Parameter as entry 0 of copies, expected a parameter and its copy: such as zip"),
        ([(torch.zeros(2), torch.zeros(2))], "got 1 tensors in entry 0 of copies that are no parameters"),
        ([(p, torch.zeros(5))], "got a copy of 5 elements of torch.float32 for '0.weight', expected 12 "),
        ([(p, torch.zeros(12, dtype=torch.int32))], "got a copy of 12 elements of torch.int32"),
        ([([p], torch.zeros(5))], "expected 12 floating-point elements or more"),
        ([(p, p.detach() + 1)], "got a copy of '0.weight' with other values than the parameter"),
        ([(p, p.detach().repeat_interleave(2, 0)[::2].t())], "that is not contiguous"),
    ]
    for copies, message in wrong:
        with pytest.raises(ValueError, match=re.escape(message)):
            wrapper.follow(copies)
    wrapper.close()
    after_steps = wrap(mlp(), solo_group(), rounds="step")
    with pytest.raises(ValueError, match="got follow\\(\\) with rounds='step'"):
        after_steps.follow([])
    after_steps.close()
