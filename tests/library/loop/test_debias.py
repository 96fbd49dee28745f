"""z in storage, x for the optimizer: also where its step raises, and not longer than a wrapper needs it."""

from __future__ import annotations

import copy
import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import optimizer as torch_optimizer

from gossip_modules.flat.buffer import FlatBuffer
from gossip_modules.loop.debias import Debias, Form
from gossip_modules.loop.hooks import STEP_HOOKS, Observer
from gossip_modules.loop.owner import no_owner
from gossip_modules.loop.turn import Turn
from gossip_modules.wrappers.gossip import GossipDataParallel
from tests.harness.cases import each_once
from tests.harness.problems import loss_of, mlp, sgd, train_step
from tests.harness.progress import local_of
from tests.harness.ranks import run_ranks
from tests.harness.reference import flatten
from tests.library.wrappers.wrapping import irregular


class StepError(Exception):
    """Of an optimizer."""


class Failing(torch.optim.SGD):
    """Adds one to every parameter, and raises."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.add_(1.0)
        raise StepError


class Weighted(Observer):
    """The observer of a model whose push-sum weight is not one."""

    def __init__(self, module: nn.Module, weight: float) -> None:
        buffer = FlatBuffer(module)
        buffer.vector.push_sum_weight.fill_(weight)
        super().__init__(buffer)
        self.debias = Debias(buffer, Turn(), no_owner)
        self.add(self.debias)


def weighted(seed: int = 0, weight: float = 0.5) -> tuple[nn.Module, Weighted]:
    module = mlp(seed)
    return module, Weighted(module, weight)


def in_the_module(wrapper: GossipDataParallel) -> Tensor:
    return flatten(wrapper.module)


def training_forward(wrapper: GossipDataParallel) -> Tensor:
    """The model that a training forward without a round computes with."""
    seen: list[Tensor] = []
    with wrapper.no_sync(), wrapper.module.register_forward_pre_hook(lambda *_: seen.append(flatten(wrapper.module))):
        wrapper(torch.zeros(1, 3))
    return seen[0]


def forward_without_gradients(wrapper: GossipDataParallel) -> Tensor:
    with torch.no_grad():
        wrapper(torch.zeros(1, 3))
    return in_the_module(wrapper)


def evaluation(wrapper: GossipDataParallel) -> Tensor:
    wrapper.eval()
    seen = in_the_module(wrapper)
    wrapper.train()
    return seen


def state(wrapper: GossipDataParallel) -> Tensor:
    saved = wrapper.state_dict()
    return torch.cat([saved[f"module.{name}"].flatten() for name, _ in wrapper.module.named_parameters()]).double()


def a_copy(wrapper: GossipDataParallel) -> Tensor:
    return in_the_module(copy.deepcopy(wrapper))


ENTRIES = [training_forward, forward_without_gradients, evaluation, state, a_copy]


@pytest.mark.parametrize(("look", "overlap"), each_once(ENTRIES, [False, True]))
def test_after_a_step_that_raises_the_next_use_sees_the_estimate(
    look: Callable[[GossipDataParallel], Tensor], overlap: bool
) -> None:
    """Of what the optimizer had come to: each numerator grew by one, so each estimate by 1 / w."""

    def body(group: dist.ProcessGroup) -> float:
        wrapper = GossipDataParallel(
            mlp(group.rank()), graph=irregular(), process_group=group, overlap=overlap, init_sync=False
        )
        optimizer: Any = sgd(wrapper)
        for step in range(4):
            train_step(wrapper, optimizer, group.rank(), step)
        with wrapper.no_sync():
            wrapper(torch.zeros(1, 3))  # the round of this step, so that none changes what is looked at below
        wrapper.flush()
        before, weight = in_the_module(wrapper), wrapper.get_extra_state()["weight"].clone()
        with pytest.raises(StepError):
            Failing(wrapper.parameters(), lr=0.1).step()
        seen = look(wrapper)
        torch.testing.assert_close(seen, before + 1 / weight, rtol=1e-5, atol=1e-6)
        assert torch.equal(in_the_module(wrapper), seen), "the parameters still hold something else"
        loss_of(wrapper, group.rank(), 5)  # and training goes on with it
        train_step(wrapper, optimizer, group.rank(), 6)
        assert local_of(wrapper).loop.debias is not None
        assert local_of(wrapper).loop.debias.form is Form.ESTIMATE
        wrapper.close()
        return float(weight)

    assert max(abs(weight - 1) for weight in run_ranks(3, body)) > 0.1


def test_an_object_that_goes_within_a_step_leaves_the_walk_over_the_hooks_alone() -> None:
    """torch raises where its hooks change while it goes over them."""
    module, observer = weighted()
    objects = [observer]
    del observer

    def drop(*_: object) -> None:
        objects.clear()
        gc.collect()

    with torch_optimizer.register_optimizer_step_pre_hook(drop):
        torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1).step()
    before = flatten(module)
    torch.optim.SGD(module.parameters(), lr=0.1).step()
    assert torch.equal(flatten(module), before)


def test_one_pair_of_hooks_serves_all_objects() -> None:
    def hooks() -> int:
        registered = (torch_optimizer._global_optimizer_pre_hooks, torch_optimizer._global_optimizer_post_hooks)
        return sum(getattr(hook, "__self__", None) is STEP_HOOKS for table in registered for hook in table.values())

    kept = [weighted(seed) for seed in range(3)]
    assert hooks() == 2
    for _, observer in kept:
        observer.close()
    assert hooks() == 2


def test_steps_and_wrappers_of_many_threads() -> None:
    """Objects come and go while other threads step: no step fails, and each of our own is taken at x."""
    errors: list[Exception] = []

    def work(seed: int) -> None:
        try:
            for _ in range(30):
                module, observer = weighted(seed)
                start = flatten(module)
                optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
                for parameter in module.parameters():
                    parameter.grad = torch.ones_like(parameter)
                optimizer.step()
                torch.testing.assert_close(flatten(module), start - 2)
                observer.close()
        except Exception as error:  # noqa: BLE001 (raised below, in the main thread)
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors[0]


@pytest.mark.parametrize(
    ("weight", "limits_steps", "length"), [(0.25, False, 4.0), (0.25, True, 1.0), (1.0, True, 1.0), (4.0, True, 0.25)]
)
def test_steps_of_the_estimate_are_no_longer_than_the_rate_where_that_is_limited(
    weight: float, limits_steps: bool, length: float
) -> None:
    module, observer = weighted(weight=weight)
    before, debias = flatten(module), observer.debias
    debias.limits_steps = limits_steps
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    torch.optim.SGD(module.parameters(), lr=1.0).step()
    assert debias.form is Form.ESTIMATE
    torch.testing.assert_close(flatten(module), before - length)
    debias.to_numerator()
    torch.testing.assert_close(flatten(module), weight * (before - length))


def test_a_limited_step_that_raises_leaves_the_estimate_to_the_next_caller() -> None:
    module, observer = weighted(weight=2.0)
    before, debias = flatten(module), observer.debias
    debias.limits_steps = True
    with pytest.raises(StepError):
        Failing(module.parameters(), lr=1.0).step()
    assert debias.form is Form.LIMITED
    debias.to_numerator()
    torch.testing.assert_close(flatten(module), 2.0 * (before + 0.5))
    debias.to_estimate()
    torch.testing.assert_close(flatten(module), before + 0.5)


@pytest.mark.parametrize("is_keyword", [False, True])
def test_a_step_with_a_closure_moves_the_numerator(is_keyword: bool) -> None:
    """The forward in it runs at the estimate, as Lightning's always does."""

    def train(group: dist.ProcessGroup, *, has_closure: bool) -> Tensor:
        wrapper = GossipDataParallel(mlp(0), graph=irregular(), process_group=group)
        optimizer: Any = sgd(wrapper)
        for step in range(4):

            def closure(step: int = step) -> Any:
                optimizer.zero_grad()
                loss = loss_of(wrapper, group.rank(), step)
                loss.backward()
                return loss

            if not has_closure:
                closure()
                optimizer.step()
            elif is_keyword:
                optimizer.step(closure=closure)
            else:
                optimizer.step(closure)
        wrapper.close()
        return in_the_module(wrapper)

    expected = run_ranks(3, lambda group: train(group, has_closure=False))
    found = run_ranks(3, lambda group: train(group, has_closure=True))
    for own, own_expected in zip(found, expected, strict=True):
        torch.testing.assert_close(own, own_expected, rtol=0, atol=0)


def test_the_hooks_of_an_optimizer_see_the_estimate_and_its_own_code_the_numerator() -> None:
    """Hooks that were registered before and after the first step, and a hook on all optimizers."""
    module, _observer = weighted(weight=0.5)
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    seen: list[Tensor] = []

    def look(*_: object) -> None:
        seen.append(flatten(module))

    for _ in range(2):
        before, after = flatten(module), flatten(module) - 2.0  # the step of x, of the length 1, is one of z = x / 0.5
        for parameter in module.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.register_step_pre_hook(look)
        optimizer.register_step_post_hook(look)
        with torch_optimizer.register_optimizer_step_post_hook(look):
            optimizer.step()
        num_hooks = len(seen) // 2
        for k, found in enumerate(seen):
            torch.testing.assert_close(found, before if k < num_hooks else after)
        seen.clear()
