"""Evaluation that swaps other weights into the parameters and back loses no correction, and adds none twice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from gossip_modules import BilatGossipDataParallel, GossipDataParallel, gossip
from tests.harness.problems import loss_of, mlp, train_step
from tests.harness.progress import engine_of, local_of
from tests.harness.ranks import run_ranks, solo_group
from tests.harness.reference import flatten
from tests.library.wrappers.wrapping import irregular

LEARNING_RATE = 0.05


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=LEARNING_RATE)


def swap_in(module: nn.Module) -> list[Tensor]:
    """Half of the weights in place of the weights, as tools do that evaluate an average; returns the weights."""
    saved = [parameter.detach().clone() for parameter in module.parameters()]
    for parameter in module.parameters():
        parameter.data.mul_(0.5)
    return saved


def swap_out(module: nn.Module, saved: list[Tensor]) -> None:
    for parameter, before in zip(module.parameters(), saved, strict=True):
        parameter.data.copy_(before)


# AD-PSGD: a correction of one, as if a peer had answered.


def mail_to(wrapper: BilatGossipDataParallel) -> None:
    correction = local_of(wrapper).vector.like()
    correction.segments[0].fill_(1.0)
    engine_of(wrapper).shared.deliver(correction, alpha=1.0, step=0)


class Mailed:
    """A rank without peers that has taken a step; `mail` brings it a correction of one."""

    def __init__(self) -> None:
        self.wrapper = BilatGossipDataParallel(mlp(), process_group=solo_group())
        self.optimizer = sgd(self.wrapper)
        train_step(self.wrapper, self.optimizer, 0, 0)
        self.start = flatten(self.wrapper.module)

    def mail(self) -> None:
        mail_to(self.wrapper)

    def change(self) -> Tensor:
        """What the next training forward finds added to the weights."""
        self.wrapper.train()
        loss_of(self.wrapper, 0, 1)
        return flatten(self.wrapper.module) - self.start


def evaluate(wrapper: Any) -> None:
    wrapper.eval()
    with torch.no_grad():
        loss_of(wrapper, 0, 0)


def save(wrapper: Any) -> None:
    wrapper.state_dict()


def settle(wrapper: Any) -> None:
    wrapper.settle()


def average(wrapper: Any) -> None:
    with wrapper.averaged():
        evaluate(wrapper)


ACTS: list[Callable[[Any], None]] = [evaluate, save, settle, average]


@pytest.mark.parametrize("act", ACTS)
def test_a_correction_that_comes_while_other_weights_stand_there_is_kept(act: Callable[[Any], None]) -> None:
    rank = Mailed()
    saved = swap_in(rank.wrapper)
    rank.mail()
    act(rank.wrapper)
    rank.mail()
    act(rank.wrapper)
    swap_out(rank.wrapper, saved)
    torch.testing.assert_close(rank.change(), torch.full_like(rank.start, 2.0))
    torch.testing.assert_close(rank.change(), torch.full_like(rank.start, 2.0))
    rank.wrapper.close()


@pytest.mark.parametrize("act", ACTS)
def test_weights_that_were_saved_before_eval_come_back_with_the_correction(act: Callable[[Any], None]) -> None:
    rank = Mailed()
    rank.mail()
    saved = [parameter.detach().clone() for parameter in rank.wrapper.parameters()]
    act(rank.wrapper)
    swap_in(rank.wrapper)
    act(rank.wrapper)
    swap_out(rank.wrapper, saved)
    torch.testing.assert_close(rank.change(), torch.ones_like(rank.start))
    rank.wrapper.close()


def test_evaluation_leaves_the_weights_that_were_swapped_in_as_they_are() -> None:
    rank = Mailed()
    swap_in(rank.wrapper)
    rank.mail()
    before = flatten(rank.wrapper.module)
    evaluate(rank.wrapper)
    assert torch.equal(flatten(rank.wrapper.module), before)
    rank.wrapper.close()


@pytest.mark.parametrize("act", ACTS)
def test_a_correction_is_added_once_where_nothing_is_swapped(act: Callable[[Any], None]) -> None:
    rank = Mailed()
    rank.mail()
    act(rank.wrapper)
    rank.mail()
    act(rank.wrapper)
    torch.testing.assert_close(flatten(rank.wrapper.module) - rank.start, torch.full_like(rank.start, 2.0))
    torch.testing.assert_close(rank.change(), torch.full_like(rank.start, 2.0))
    rank.wrapper.close()


def test_a_step_after_the_swap_has_the_correction_too() -> None:
    """Validation between the backward and the step."""
    rank = Mailed()
    rank.optimizer.param_groups[0]["lr"] = 0.0
    loss_of(rank.wrapper, 0, 1).backward()
    saved = swap_in(rank.wrapper)
    rank.mail()
    save(rank.wrapper)
    swap_out(rank.wrapper, saved)
    rank.optimizer.step()
    torch.testing.assert_close(rank.change(), torch.ones_like(rank.start))
    rank.wrapper.close()


def test_weights_that_are_clipped_or_loaded_after_a_flush_stay_so() -> None:
    rank = Mailed()
    rank.mail()
    save(rank.wrapper)
    for parameter in rank.wrapper.parameters():
        parameter.data.clamp_(-0.01, 0.01)
    clipped = flatten(rank.wrapper.module)
    loss_of(rank.wrapper, 0, 1)
    assert torch.equal(flatten(rank.wrapper.module), clipped)
    rank.mail()
    save(rank.wrapper)
    rank.wrapper.module.load_state_dict(mlp(3).state_dict())
    loss_of(rank.wrapper, 0, 2)
    assert torch.equal(flatten(rank.wrapper.module), flatten(mlp(3)))
    rank.wrapper.close()


def test_a_loop_that_writes_parameters_itself_is_flushed_as_ever() -> None:
    wrapper = BilatGossipDataParallel(mlp(), process_group=solo_group())
    loss_of(wrapper, 0, 0).backward()
    for parameter in wrapper.parameters():
        parameter.data.sub_(0.1)
    before = flatten(wrapper.module)
    mail_to(wrapper)
    evaluate(wrapper)
    torch.testing.assert_close(flatten(wrapper.module) - before, torch.ones_like(before))
    wrapper.close()


# Rounds in flight of lockstep wrappers.


@pytest.mark.parametrize("graph", [None, irregular()])
@pytest.mark.parametrize("act", [evaluate, save])
@pytest.mark.parametrize("make", [GossipDataParallel, gossip])
def test_one_rank_that_evaluates_an_average_keeps_its_rounds(
    make: Callable[..., Any], act: Callable[[Any], None], graph: Any
) -> None:
    def body(group: dist.ProcessGroup) -> Tensor:
        wrapper = make(mlp(group.rank()), process_group=group, init_sync=False, overlap=True, graph=graph)
        optimizer = sgd(wrapper)
        for step in range(6):
            wrapper.train()
            train_step(wrapper, optimizer, group.rank(), step)
            if swaps and group.rank() == 0:
                saved = swap_in(wrapper)
                act(wrapper)
                swap_out(wrapper, saved)
        wrapper.settle()
        result = flatten(wrapper)
        wrapper.close()
        return result

    swaps = False
    expected = run_ranks(3, body)
    swaps = True
    for found, right in zip(run_ranks(3, body), expected, strict=True):
        torch.testing.assert_close(found, right, rtol=1e-5, atol=1e-6)
