"""Evaluation that swaps other weights into the parameters and back loses no correction, and adds none twice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from gossip_modules import BilatGossipDataParallel, Choco, GossipDataParallel, StreamingDiLoCo, TopK, gossip
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


# Swaps by pointer: `backup = p.data; p.data = average`.


def points_to_average(module: nn.Module, *, is_cloned: bool = False, every: int = 1) -> dict[nn.Parameter, Tensor]:
    """Half of the weights in place of the weights, in memory of the script; returns the memory of the weights."""
    saved = {}
    for parameter in list(module.parameters())[::every]:
        saved[parameter] = parameter.data.clone() if is_cloned else parameter.data
        parameter.data = parameter.data / 2
    return saved


def points_back(saved: dict[nn.Parameter, Tensor]) -> None:
    for parameter, before in saved.items():
        parameter.data = before


POINTERS = pytest.mark.parametrize("options", [{}, {"is_cloned": True}, {"every": 2}], ids=["alias", "clone", "part"])


@POINTERS
@pytest.mark.parametrize("act", ACTS)
def test_a_swap_by_pointer_keeps_all_corrections(act: Callable[[Any], None], options: dict[str, Any]) -> None:
    rank = Mailed()
    saved = points_to_average(rank.wrapper, **options)
    rank.mail()
    act(rank.wrapper)
    rank.mail()
    act(rank.wrapper)
    points_back(saved)
    torch.testing.assert_close(rank.change(), torch.full_like(rank.start, 2.0))
    torch.testing.assert_close(rank.change(), torch.full_like(rank.start, 2.0))
    rank.wrapper.close()


@POINTERS
def test_a_swap_between_two_flushes_lacks_the_second_correction_alone(options: dict[str, Any]) -> None:
    rank = Mailed()
    rank.mail()
    rank.wrapper.eval()
    saved = points_to_average(rank.wrapper, **options)
    rank.mail()
    save(rank.wrapper)
    points_back(saved)
    torch.testing.assert_close(rank.change(), torch.full_like(rank.start, 2.0))
    rank.wrapper.close()


def test_corrections_of_a_step_before_are_not_added_twice() -> None:
    """Validation after the backward, and again after the optimizer step, both without a round between."""
    rank = Mailed()
    rank.optimizer.param_groups[0]["lr"] = 0.0
    loss_of(rank.wrapper, 0, 1).backward()
    rank.mail()
    save(rank.wrapper)
    rank.optimizer.step()
    saved = swap_in(rank.wrapper)
    rank.mail()
    save(rank.wrapper)
    swap_out(rank.wrapper, saved)
    torch.testing.assert_close(rank.change(), torch.full_like(rank.start, 2.0))
    rank.wrapper.close()


@pytest.mark.parametrize("act", ACTS)
def test_memory_that_a_script_has_taken_is_not_written(act: Callable[[Any], None]) -> None:
    rank = Mailed()
    saved = points_to_average(rank.wrapper)
    averages = {parameter: parameter.data for parameter in saved}
    before = [x.clone() for x in (*saved.values(), *averages.values())]
    rank.mail()
    act(rank.wrapper)
    for x, value in zip((*saved.values(), *averages.values()), before, strict=True):
        assert torch.equal(x, value)
    rank.wrapper.close()


def test_a_swap_by_pointer_in_a_loop_without_an_optimizer_keeps_the_correction() -> None:
    wrapper = BilatGossipDataParallel(mlp(), process_group=solo_group())
    loss_of(wrapper, 0, 0).backward()
    for parameter in wrapper.parameters():
        parameter.data.sub_(0.1)
    before = flatten(wrapper.module)
    saved = points_to_average(wrapper.module)
    mail_to(wrapper)
    save(wrapper)
    points_back(saved)
    wrapper.train()
    torch.testing.assert_close(flatten(wrapper.module) - before, torch.ones_like(before))
    wrapper.close()


def test_a_half_precision_copy_that_stands_there_for_a_while_loses_no_correction() -> None:
    rank = Mailed()
    saved = {parameter: parameter.data for parameter in rank.wrapper.parameters()}
    for parameter in saved:
        parameter.data = parameter.data.bfloat16()
    rank.mail()
    rank.wrapper.eval()
    state = rank.wrapper.state_dict()
    assert all(x.dtype == torch.bfloat16 for name, x in state.items() if name.startswith("module."))
    points_back(saved)
    torch.testing.assert_close(rank.change(), torch.ones_like(rank.start))
    rank.wrapper.close()


SWAPS = ["eval_first", "apply_first", "state", "train_first"]
LOOPS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "overlap": (GossipDataParallel, {"overlap": True}),
    "staleness 2": (GossipDataParallel, {"overlap": True, "max_staleness": 2}),
    "weights that move": (GossipDataParallel, {"overlap": True, "graph": "random-push"}),
    "compressed": (
        GossipDataParallel,
        {"overlap": True, "graph": "ring", "push_sum": False, "algorithm": Choco(TopK(0.5), step_size=0.3)},
    ),
    "gossip()": (gossip, {"overlap": True}),
    "AD-PSGD": (BilatGossipDataParallel, {}),
}


@pytest.mark.parametrize("order", SWAPS)
@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_with_an_average_swapped_in_by_pointer_keeps_all_steps(name: str, order: str) -> None:
    """Each step adds -0.01 (rank + 1) to every parameter: the mean over n ranks moves by -0.01 (n + 1) / 2 a step."""
    make, options = LOOPS[name]
    num_ranks, num_steps = 2, 12

    def body(group: dist.ProcessGroup) -> Tensor:
        rank = group.rank()
        model = make(nn.Linear(3, 2).double(), process_group=group, **options)
        start = flatten(model).clone()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        x = torch.ones(1, 3, dtype=torch.float64)
        for step in range(num_steps):
            loss = model(x).sum() * 0 + sum(p.sum() for p in model.parameters()) * (rank + 1)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % 4 == 2:
                if order == "eval_first":
                    model.eval()
                saved = points_to_average(model)
                if order != "eval_first":
                    model.eval()
                with torch.no_grad():
                    model(x)
                if order == "state":
                    model.state_dict()
                if order == "train_first":
                    model.train()
                points_back(saved)
                model.train()
        (model if make is not gossip else model._gossip).settle()
        model.average_()
        result = flatten(model) - start
        (model if make is not gossip else model._gossip).close()
        return result

    exact = -0.01 * num_steps * (num_ranks + 1) / 2
    for found in run_ranks(num_ranks, body):
        torch.testing.assert_close(found, torch.full_like(found, exact))


@pytest.mark.parametrize("is_pointer", [True, False], ids=["pointer", "copy"])
def test_a_late_outer_step_that_would_be_put_away_with_an_average_warns(is_pointer: bool) -> None:
    algorithm = StreamingDiLoCo(sync_every=2, fragments=1, delay=1)
    model = GossipDataParallel(mlp(), process_group=solo_group(), algorithm=algorithm)
    optimizer = sgd(model)
    for step in range(3):
        train_step(model, optimizer, 0, step)
    assert engine_of(model).is_in_flight
    _ = points_to_average(model) if is_pointer else swap_in(model)
    evaluate(model)
    assert engine_of(model).is_in_flight
    save(model)  # the round stays in flight
    assert engine_of(model).is_in_flight
    with pytest.warns(UserWarning, match=r"while other weights stand in its parameters.*put them back before you save"):
        model.settle()
    model.close()
