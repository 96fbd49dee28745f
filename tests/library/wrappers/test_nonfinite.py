"""Infinities and NaN: noticed before they spread, or let pass."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from gossip_modules import (
    AllReduceDataParallel,
    BilatGossipDataParallel,
    Choco,
    GossipDataParallel,
    GroupAverageDataParallel,
    PowerGossip,
    RingGraph,
    Schedule,
    SignNorm,
)
from gossip_modules.flat.nonfinite import is_finite
from gossip_modules.flat.vector import FlatVector
from tests.harness.problems import loss_of, mlp, net, sgd, train_step
from tests.harness.ranks import HangUp, run_ranks, solo_group
from tests.harness.reference import flatten

MODES: list[dict[str, Any]] = [{}, {"push_sum": False}, {"overlap": True}, {"overlap": True, "max_staleness": 2}]
SICK = 2


def wrap(module: nn.Module, group: dist.ProcessGroup, **options: Any) -> GossipDataParallel:
    """Who has stopped for an error is missed by the others for two seconds only."""
    defaults = {"init_sync": False, "timeout": timedelta(seconds=2)}
    return GossipDataParallel(module, process_group=group, **{**defaults, **options})


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_is_finite(dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max
    x = torch.full((5000,), largest, dtype=dtype)  # a sum that overflows
    assert is_finite(FlatVector.over(x))
    for value in (float("inf"), -float("inf"), float("nan")):
        bad = x.clone()
        bad[4321] = value
        assert not is_finite(FlatVector.over(bad))
    assert not is_finite(FlatVector.over(torch.tensor([float("inf"), -float("inf")], dtype=dtype)))


def gossip(wrapper: GossipDataParallel, *, num_steps: int) -> None:
    for step in range(num_steps):
        loss_of(wrapper, 0, step)


def fall_ill(wrapper: GossipDataParallel, value: float) -> None:
    with torch.no_grad():
        wrapper.module.get_parameter("2.bias")[0] = value


# Both values without overlap and with it; `test_is_finite` has them in every dtype.
@pytest.mark.parametrize(
    ("options", "value"),
    [(options, float(name)) for options, name in zip(MODES, ("nan", "inf", "inf", "nan"), strict=True)],
)
def test_the_sick_rank_is_named_and_no_model_is_touched(options: dict[str, Any], value: float) -> None:
    """The others learn of it, at the latest when the sick rank is gone, with finite models."""

    def body(group: dist.ProcessGroup) -> str:
        wrapper = wrap(mlp(group.rank()), group, **options)
        for step in range(2):
            loss_of(wrapper, 0, step)
        wrapper.flush()
        if group.rank() == SICK:
            fall_ill(wrapper, value)
        with pytest.raises((FloatingPointError, ConnectionError, TimeoutError)) as caught:
            gossip(wrapper, num_steps=10)
        message = str(caught.value)
        if group.rank() == SICK:
            assert re.search("rank 2: in round .* its own model holds infinities or NaN", message)
            raise HangUp
        if caught.type is FloatingPointError:
            assert f"what ranks [{SICK}] have sent holds infinities or NaN" in message
        assert bool(flatten(wrapper.module).isfinite().all())
        return message

    assert len(run_ranks(4, body)) == 3  # the sick rank has no result


def test_a_rank_with_a_mended_model_takes_the_step_again() -> None:
    """The rank then takes part in the round in which the others wait for it."""
    schedule = Schedule(gossip_every=2, average_every=2)

    def body(group: dist.ProcessGroup, *, falls_ill: bool) -> tuple[Tensor, int]:
        wrapper = wrap(mlp(group.rank()), group, push_sum=False, schedule=schedule)
        bias, num_raised = wrapper.module.get_parameter("2.bias").detach(), 0
        for step in range(8):
            healthy = bias.clone()
            if falls_ill and group.rank() == SICK:
                fall_ill(wrapper, float("nan"))
            try:
                loss_of(wrapper, 0, step)
            except FloatingPointError:
                num_raised += 1
                bias.copy_(healthy)
                loss_of(wrapper, 0, step)
            if not bool(bias.isfinite().all()):  # there was no round
                bias.copy_(healthy)
        wrapper.close()
        return flatten(wrapper.module), num_raised

    undisturbed = run_ranks(4, lambda group: body(group, falls_ill=False))
    results = run_ranks(4, lambda group: body(group, falls_ill=True))
    assert [num_raised > 0 for _, num_raised in results] == [rank == SICK for rank in range(4)]
    for (got, _), (want, _) in zip(results, undisturbed, strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize(
    ("gossiper", "options"),
    [
        (lambda: Choco(SignNorm(), step_size=0.3), {"schedule": Schedule(gossip_every=2, average_every=3)}),
        (PowerGossip, {}),
    ],
)
def test_overlapped_messages_that_change_the_state_are_looked_at_before_they_are_sent(
    gossiper: Any, options: dict[str, Any]
) -> None:
    """So who takes its whole model back, buffers included, goes on as if nothing had happened."""

    def body(group: dist.ProcessGroup, *, falls_ill: bool) -> tuple[Tensor, int]:
        model = net(group.rank())
        graph = RingGraph(4, peers_per_itr=2)
        wrapper = wrap(model, group, push_sum=False, overlap=True, algorithm=gossiper(), graph=graph, **options)
        optimizer, num_raised = sgd(model), 0
        for step in range(10):
            if falls_ill and group.rank() == SICK and step in (2, 4, 6):  # rounds of each schedule; one is an average
                healthy = copy.deepcopy(model.state_dict())
                with torch.no_grad():
                    model.get_parameter("second.bias")[0] = float("nan")
                with pytest.raises(FloatingPointError, match=r"rank 2: in round .* its own model holds infinities"):
                    loss_of(wrapper, SICK, step)
                num_raised += 1
                model.load_state_dict(healthy)
            train_step(wrapper, optimizer, group.rank(), step)
        wrapper.flush()
        wrapper.close()
        return torch.cat([flatten(model), *(x.flatten().float() for x in model.buffers())]), num_raised

    undisturbed = run_ranks(4, lambda group: body(group, falls_ill=False))
    results = run_ranks(4, lambda group: body(group, falls_ill=True))
    assert [num_raised for _, num_raised in results] == [0, 0, 3, 0]
    for (got, _), (want, _) in zip(results, undisturbed, strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("options", MODES[1:3])
def test_it_spreads_where_it_may(options: dict[str, Any]) -> None:
    def body(group: dist.ProcessGroup) -> bool:
        wrapper = wrap(mlp(group.rank()), group, on_nonfinite="spread", **options)
        if group.rank() == SICK:
            fall_ill(wrapper, float("nan"))
        for step in range(12):
            loss_of(wrapper, 0, step)
        wrapper.flush()
        wrapper.close()
        return bool(flatten(wrapper.module).isfinite().all())

    assert run_ranks(4, body) == [False] * 4


@pytest.mark.parametrize("options", MODES[1:3])
def test_large_finite_models_are_no_error(options: dict[str, Any]) -> None:
    def body(group: dist.ProcessGroup) -> Tensor:
        model = mlp()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(torch.finfo(parameter.dtype).max / 4)
        wrapper = wrap(model, group, **options)
        for _ in range(3):
            wrapper(torch.zeros(1, 3))
        wrapper.close()
        return flatten(model)

    assert all(bool(x.isfinite().all()) for x in run_ranks(2, body))


@pytest.mark.parametrize(
    ("policy", "remedy"),
    [("skip", ": a membership leaves a worker with .* a GradScaler, or a check of the loss"), ("ignore", ", an error")],
)
@pytest.mark.parametrize(
    "wrapper", [GossipDataParallel, BilatGossipDataParallel, GroupAverageDataParallel, AllReduceDataParallel]
)
def test_another_policy_is_an_error(wrapper: Callable[..., object], policy: str, remedy: str) -> None:
    with pytest.raises(ValueError, match=f"got on_nonfinite='{policy}', expected 'raise' or 'spread'{remedy}"):
        wrapper(mlp(), process_group=solo_group(), on_nonfinite=policy)
