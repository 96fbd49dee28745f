"""Steps that torch's hooks do not see have rounds, or a warning; steps that are none have no round."""

from __future__ import annotations

import contextlib
import functools
import inspect
import types
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict

from gossip_modules import D2, BilatGossipDataParallel, GossipDataParallel, RingGraph
from tests.harness.problems import loss_of, mlp, sgd, train_step
from tests.harness.progress import local_of
from tests.harness.ranks import run_ranks, solo_group
from tests.harness.reference import flatten
from tests.library.wrappers.wrapping import wrap

UNSEEN = r"got 3 changes of the parameters of a GossipDataParallel.*rounds='manual'"

Update = Callable[[torch.optim.Optimizer], None]


def replaced(optimizer: torch.optim.Optimizer) -> None:
    """A step without hooks, as of a tool that replaces the method on the instance."""
    plain = torch.no_grad()(inspect.unwrap(type(optimizer).step))
    optimizer.step = types.MethodType(lambda self, closure=None: plain(self), optimizer)  # type: ignore[method-assign]
    optimizer.step()


def by_hand(optimizer: torch.optim.Optimizer) -> None:
    """An update with the gradients, beside an idle optimizer."""
    with torch.no_grad():
        for parameter in parameters_of(optimizer):
            assert parameter.grad is not None
            parameter.add_(parameter.grad, alpha=-0.01)


def through_data(optimizer: torch.optim.Optimizer) -> None:
    """The same without a new version of the parameters, as a replayed graph of CUDA."""
    for parameter in parameters_of(optimizer):
        assert parameter.grad is not None
        parameter.data.add_(parameter.grad, alpha=-0.01)


def parameters_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def num_rounds(wrapper: Any) -> int:
    wrapper.flush()
    return int(wrapper.comm_stats()["num_rounds"])


@pytest.mark.parametrize("update", [replaced, by_hand, through_data])
@pytest.mark.parametrize(("rounds", "num_seen"), [("forward", 0), ("forward", 3), ("step", 2)])
def test_updates_that_no_hook_sees_have_rounds_and_a_warning(rounds: str, num_seen: int, update: Update) -> None:
    wrapper = wrap(mlp(), solo_group(), rounds=rounds)
    optimizer = sgd(wrapper)

    def loop() -> None:
        for step in range(10):
            loss = loss_of(wrapper, 0, step)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step() if step < num_seen else update(optimizer)

    with pytest.warns(UserWarning, match=UNSEEN):
        loop()
    assert num_rounds(wrapper) == (10 if rounds == "forward" else 9)  # the last update has no forward after it
    wrapper.close()


@pytest.mark.filterwarnings("ignore:got 3 training forwards")
def test_micro_batches_of_updates_by_hand_are_of_one_step() -> None:
    wrapper = wrap(mlp(), solo_group())
    optimizer = sgd(wrapper)

    def loop() -> None:
        for step in range(10):
            for _ in range(3):
                loss_of(wrapper, 0, step).backward()
            through_data(optimizer)
            optimizer.zero_grad()

    with pytest.warns(UserWarning, match=UNSEEN):
        loop()
    assert num_rounds(wrapper) == 10
    wrapper.close()


@pytest.mark.parametrize("drops", ["before the forward", "after the forward"])
def test_a_rank_whose_updates_change_nothing_takes_part_in_all_rounds(drops: str) -> None:
    def body(group: dist.ProcessGroup) -> tuple[int, float]:
        wrapper = wrap(mlp(group.rank()), group, graph=RingGraph, push_sum=False, timeout=20)
        optimizer = sgd(wrapper)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="got 3 changes")
            for step in range(10):
                is_zero = group.rank() == 1 and step in (0, 2, 5, 6)
                loss = loss_of(wrapper, group.rank(), step) * (not is_zero)
                if drops == "after the forward":
                    optimizer.zero_grad()
                loss.backward()
                through_data(optimizer)
                if drops == "before the forward":
                    optimizer.zero_grad()
        result = num_rounds(wrapper), wrapper.consensus_distance()
        wrapper.close()
        return result

    results = run_ranks(3, body)
    assert [rounds for rounds, _ in results] == [10, 10, 10]
    assert len({distance for _, distance in results}) == 1


def test_steps_that_hooks_see_again_have_one_round_each() -> None:
    wrapper = wrap(mlp(), solo_group())
    optimizer = sgd(wrapper)

    def loop() -> None:
        for step in range(12):
            optimizer.zero_grad()
            loss_of(wrapper, 0, step).backward()
            by_hand(optimizer) if step < 6 else optimizer.step()

    with pytest.warns(UserWarning, match=UNSEEN):
        loop()
    assert num_rounds(wrapper) == 12
    wrapper.close()


@pytest.mark.parametrize("make", [GossipDataParallel, BilatGossipDataParallel])
@pytest.mark.parametrize("has_optimizer", [False, True])
def test_closing_tells_of_updates_without_any_forward_of_the_wrapper(make: Any, has_optimizer: bool) -> None:
    wrapper = make(mlp(), process_group=solo_group())
    optimizer = sgd(wrapper) if has_optimizer else torch.optim.SGD([nn.Parameter(torch.zeros(1))])
    for step in range(10):
        wrapper.module.zero_grad()
        loss_of(wrapper.module, 0, step).backward()
        for parameter in wrapper.parameters():
            parameter.data.add_(parameter.grad, alpha=-0.01)
    with pytest.warns(UserWarning, match=r"closed .* after 10 backwards .* gossip_step\(\)"):
        wrapper.close()
    del optimizer


def test_closing_tells_of_few_updates() -> None:
    wrapper = wrap(mlp(), solo_group())
    optimizer = sgd(wrapper)
    for step in range(2):
        optimizer.zero_grad()
        loss_of(wrapper, 0, step).backward()
        by_hand(optimizer)
    with pytest.warns(UserWarning, match="closed .* after 2 changes of parameters"):
        wrapper.close()


def test_closing_tells_of_updates_without_gradients() -> None:
    """As methods of order zero make them: two forwards at perturbed points, and an update along the perturbation."""
    wrapper = wrap(mlp(), solo_group())
    with torch.no_grad():
        for step in range(10):
            loss = loss_of(wrapper, 0, step)
            for parameter in wrapper.parameters():
                parameter.data.add_(loss, alpha=-0.01)
    with pytest.warns(UserWarning, match="closed .* after 10 forwards without autograd in train mode"):
        wrapper.close()


CAPTURED = "got a round .* in the capture of a CUDA graph"


@pytest.mark.parametrize("rounds", ["forward", "step", "manual"])
def test_a_captured_step_is_told_and_a_captured_round_refused(rounds: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wrapper = wrap(mlp(), solo_group(), rounds=rounds)
    optimizer = sgd(wrapper)
    loss_of(wrapper, 0, 0).backward()
    monkeypatch.setattr(local_of(wrapper).buffer, "is_capturable", True)
    monkeypatch.setattr(local_of(wrapper).buffer, "is_captured", lambda: True)

    def step() -> None:
        refusal = pytest.raises(RuntimeError, match=CAPTURED) if rounds == "step" else contextlib.nullcontext()
        with refusal:
            optimizer.step()

    if rounds == "manual":
        step()
    else:
        with pytest.warns(UserWarning, match="got a step of SGD in the capture of a CUDA graph"):
            step()
    with pytest.raises(RuntimeError, match=CAPTURED):
        wrapper.gossip_step()
    wrapper.close()


@pytest.mark.parametrize("rounds", ["forward", "step", "manual"])
def test_closing_tells_nothing_of_steps_that_hooks_see(rounds: str) -> None:
    wrapper = wrap(mlp(), solo_group(), rounds=rounds)
    optimizer = sgd(wrapper)
    for step in range(12):
        train_step(wrapper, optimizer, 0, step)
    wrapper.module.load_state_dict(mlp(1).state_dict())
    wrapper.close()


# Steps that do not count, and steps that change nothing and count.


@pytest.mark.parametrize("rounds", ["forward", "step"])
@pytest.mark.parametrize("options", [{}, {"algorithm": D2(), "push_sum": False}], ids=str)
def test_the_step_that_makes_the_state_for_a_checkpoint_is_none(options: dict[str, Any], rounds: str) -> None:
    def trained(*, saves: bool) -> Tensor:
        wrapper = wrap(mlp(), solo_group(), rounds=rounds, **options)
        optimizer = torch.optim.SGD(wrapper.parameters(), lr=0.05)  # without state, which is made for each checkpoint
        for step in range(5):
            if saves:
                get_state_dict(wrapper.module, optimizer)
            loss_of(wrapper, 0, step).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert num_rounds(wrapper) == 5
        assert local_of(wrapper).num_steps == 5
        wrapper.close()
        return flatten(wrapper.module)

    assert torch.equal(trained(saves=True), trained(saves=False))


@pytest.mark.parametrize("calls_inner", [False, True])
@pytest.mark.parametrize("rounds", ["forward", "step"])
def test_a_rank_whose_steps_change_nothing_takes_part_in_all_rounds(rounds: str, calls_inner: bool) -> None:
    """Its gradients are zero, or its learning rate is 0 for some steps."""

    def body(group: dist.ProcessGroup) -> int:
        wrapper = wrap(mlp(group.rank()), group, graph=RingGraph, push_sum=False, timeout=20, rounds=rounds)
        optimizer = torch.optim.SGD(wrapper.parameters(), lr=0.05)
        for step in range(8):
            optimizer.param_groups[0]["lr"] = 0.0 if step < 2 else 0.05
            optimizer.zero_grad()
            is_zero = group.rank() == 1 and step in (0, 4, 5)
            (loss_of(wrapper.module if calls_inner else wrapper, group.rank(), step) * (not is_zero)).backward()
            optimizer.step()
        rounds_done = num_rounds(wrapper)
        wrapper.close()
        return rounds_done

    if calls_inner and rounds == "forward":
        with pytest.raises(RuntimeError, match="got two steps of SGD"):
            run_ranks(2, body)
    else:
        assert run_ranks(3, body) == [8, 8, 8]


def test_a_step_inside_a_backward_is_refused_where_rounds_follow_steps() -> None:
    wrapper = wrap(mlp(), solo_group(), rounds="step")

    for parameter in wrapper.parameters():
        optimizer = torch.optim.SGD([parameter], lr=0.05)
        parameter.register_post_accumulate_grad_hook(lambda _, optimizer=optimizer: optimizer.step())
    with pytest.raises(RuntimeError, match=r"inside a backward .* rounds='step'.*rounds='forward'"):
        loss_of(wrapper, 0, 0).backward()
    wrapper.close()


class Child(torch.optim.SGD):
    """Steps as its parent class, whose step torch hooks, too."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class Around(torch.optim.Optimizer):
    """Steps by another optimizer of the same parameters, as Lookahead does."""

    def __init__(self, parameters: Any) -> None:
        self.inner = torch.optim.SGD(parameters, lr=0.05)
        super().__init__(self.inner.param_groups, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)


@pytest.mark.parametrize("rounds", ["forward", "step"])
@pytest.mark.parametrize("make", [functools.partial(Child, lr=0.05), Around])
def test_a_step_inside_a_step_has_no_round_of_its_own(make: Callable[..., torch.optim.Optimizer], rounds: str) -> None:
    wrapper = wrap(mlp(), solo_group(), rounds=rounds)
    optimizer = make(wrapper.parameters())
    for step in range(6):
        train_step(wrapper, optimizer, 0, step)
    assert num_rounds(wrapper) == 6
    wrapper.close()
