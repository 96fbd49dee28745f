"""Callbacks around optimizer steps: once for each step, in order, also for steps inside steps and steps that raise."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gossip_modules.flat.buffer import FlatBuffer
from gossip_modules.loop.hooks import Methods, Observer, StepListener


class Watcher(Observer):
    """Records its calls.

    Args:
        parameters: its parameters.
        sees_inner_steps: see `StepListener`.
    """

    def __init__(self, parameters: list[nn.Parameter], *, sees_inner_steps: bool = False) -> None:
        self.sees_inner_steps = sees_inner_steps
        self.calls: list[str] = []
        self.counts = True
        super().__init__(FlatBuffer(nn.ParameterList(parameters)))

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.calls.append("before")

    def enter_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.calls.append("enter")

    def reenter_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.calls.append("reenter")

    def leave_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.calls.append("leave")

    def end_step(self, optimizer: torch.optim.Optimizer, listeners: Methods) -> None:
        if self.counts:
            super().end_step(optimizer, listeners)

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.calls.append("after")

    def taken(self) -> list[str]:
        calls, self.calls = self.calls, []
        return calls


WHOLE = ["before", "enter", "leave", "after"]
AROUND = ["before", "enter", "reenter", "leave", "after"]


@pytest.fixture
def parameters() -> list[nn.Parameter]:
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    return [parameter]


@pytest.fixture
def watcher(parameters: list[nn.Parameter]) -> Iterator[Watcher]:
    watcher = Watcher(parameters)
    yield watcher
    watcher.close()


class Parent(torch.optim.SGD):
    """Runs `inner` before its own step, and raises an error if it is told to."""

    inner: Callable[[], Any] = staticmethod(lambda: None)
    raises = False

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.inner()
        if self.raises:
            raise ArithmeticError("a step that fails")
        return super().step(closure)


def test_a_step_that_calls_the_step_of_its_parent_class_is_one_step(
    parameters: list[nn.Parameter], watcher: Watcher
) -> None:
    torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)  # so that torch hooks the step of the parent class, too
    optimizer = Parent(parameters, lr=0.5)
    for _ in range(2):
        optimizer.step()
        assert watcher.taken() == AROUND


@pytest.mark.parametrize("sees_inner_steps", [False, True])
def test_a_step_of_another_optimizer_inside_a_step_is_a_part_of_it(
    parameters: list[nn.Parameter], sees_inner_steps: bool
) -> None:
    watcher, optimizer = Watcher(parameters, sees_inner_steps=sees_inner_steps), Parent(parameters, lr=0.5)
    optimizer.inner = torch.optim.Adam(parameters, lr=0.5).step
    optimizer.step()
    inner = WHOLE if sees_inner_steps else ["reenter"]
    assert watcher.taken() == ["before", "enter", *inner, "reenter", "leave", "after"]
    watcher.close()


def test_a_step_of_another_model_inside_a_step_is_a_step_of_its_own(
    parameters: list[nn.Parameter], watcher: Watcher
) -> None:
    other = Parent([nn.Parameter(torch.ones(1))], lr=0.5)
    other.inner = torch.optim.Adam(parameters, lr=0.5).step
    other.step()
    assert watcher.taken() == WHOLE


@pytest.mark.parametrize("is_caught", [False, True])
def test_steps_after_one_that_raised_are_counted(
    parameters: list[nn.Parameter], watcher: Watcher, is_caught: bool
) -> None:
    optimizer, failing = Parent(parameters, lr=0.5), Parent(parameters, lr=0.5)
    failing.raises = True

    def fail() -> None:
        with pytest.raises(ArithmeticError):
            failing.step()

    if is_caught:  # inside another step
        optimizer.inner = fail
    else:
        fail()
        assert watcher.taken() == ["before", "enter"]
    for _ in range(2):
        optimizer.step()
        assert watcher.taken() == (["before", "enter", "reenter", "reenter", "leave", "after"] if is_caught else AROUND)


class Everywhere(StepListener):
    """A listener of all steps."""

    num_steps = 0

    def concerns(self, optimizer: torch.optim.Optimizer) -> bool:
        return True

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.num_steps += 1


def test_a_step_that_concerns_a_reader_alone_is_no_step_of_its_observer(
    parameters: list[nn.Parameter], watcher: Watcher
) -> None:
    listener = Everywhere(watcher.buffer)
    watcher.add(listener)
    own, other = (torch.optim.Adam(x, lr=0.5) for x in (parameters, [nn.Parameter(torch.ones(1))]))
    other.step()
    assert (listener.num_steps, watcher.taken()) == (1, [])
    own.step()
    assert (listener.num_steps, watcher.taken()) == (2, WHOLE)
    listener.close()
    own.step()
    assert (listener.num_steps, watcher.taken()) == (2, WHOLE)


def test_parameters_in_a_new_layout_are_found_again(parameters: list[nn.Parameter], watcher: Watcher) -> None:
    optimizer = torch.optim.SGD(parameters, lr=0.5)
    optimizer.step()
    assert watcher.taken() == WHOLE
    new = nn.Parameter(torch.ones(2))
    watcher.buffer.module.register_parameter("1", new)
    torch.optim.SGD([new], lr=0.5).step()
    assert watcher.taken() == []
    optimizer = torch.optim.SGD([new], lr=0.5)
    optimizer.step()
    watcher.buffer.attach()
    optimizer.step()
    assert watcher.taken() == WHOLE


def test_a_step_that_does_not_count_has_no_end(parameters: list[nn.Parameter], watcher: Watcher) -> None:
    optimizer = torch.optim.Adam(parameters, lr=0.5)
    watcher.counts = False
    optimizer.step()
    assert watcher.taken() == ["before", "enter", "leave"]


def test_the_hooks_of_an_optimizer_are_outside_of_its_own_code(
    parameters: list[nn.Parameter], watcher: Watcher
) -> None:
    optimizer = torch.optim.Adam(parameters, lr=0.5)
    for step in range(2):  # hooks that come before and after the first step
        optimizer.register_step_pre_hook(lambda *_: watcher.calls.append("own"))
        optimizer.register_step_post_hook(lambda *_: watcher.calls.append("own"))
        optimizer.step()
        own = ["own"] * (step + 1)
        assert watcher.taken() == ["before", *own, "enter", "leave", *own, "after"]


def test_a_closure_is_followed_by_a_return_into_the_step(parameters: list[nn.Parameter], watcher: Watcher) -> None:
    optimizer = torch.optim.Adam(parameters, lr=0.5)

    def closure() -> Tensor:
        watcher.calls.append("closure")
        return torch.zeros(())

    optimizer.step(closure)
    assert watcher.taken() == ["before", "enter", "closure", "reenter", "leave", "after"]


class WithAllAttributes(torch.optim.SGD):
    """Gives all its attributes to a copy, the hooks included."""

    def __getstate__(self) -> dict[str, Any]:
        return dict(vars(self))

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


def test_an_optimizer_that_is_copied_and_pickled_with_its_hooks_steps_on(
    parameters: list[nn.Parameter], watcher: Watcher
) -> None:
    optimizer = WithAllAttributes(parameters, lr=0.5)
    optimizer.step()
    assert watcher.taken() == WHOLE
    assert pickle.dumps(optimizer)
    copy.deepcopy(optimizer).step()
    assert watcher.taken() == []
    optimizer.step()
    assert watcher.taken() == WHOLE
