"""Writes of tensors are noticed by versions, or by samples where versions do not tell."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from gossip_modules.flat.buffer import FlatBuffer
from gossip_modules.loop.gradient_watch import WatchedGradient
from gossip_modules.loop.moment import Moment, ParameterSamples, sample
from tests.harness.problems import loss_of, mlp


def in_place(x: Tensor) -> None:
    x.add_(1.0)


def by_data(x: Tensor) -> None:
    x.data.add_(1.0)


def without_change(x: Tensor) -> None:
    x.add_(0.0)


def not_at_all(x: Tensor) -> None: ...


@pytest.mark.parametrize(
    ("write", "num_writes", "has_changed"),
    [(in_place, 1, True), (by_data, 0, True), (without_change, 1, False), (not_at_all, 0, False)],
)
@torch.no_grad()
def test_versions_tell_of_operations_and_samples_of_values(
    write: Callable[[Tensor], None], num_writes: int, has_changed: bool
) -> None:
    tensors = [torch.ones(200), torch.ones(3)]
    moment = Moment(tensors, tensors)
    write(tensors[0])
    assert moment.num_writes() == num_writes
    assert moment.has_changed() == has_changed
    assert moment.is_written() == (num_writes > 0 or has_changed)
    moment.now()
    assert not moment.is_written()


@torch.no_grad()
def test_a_change_of_few_units_in_the_last_place_is_left_out_on_demand() -> None:
    x = torch.ones(10)
    moment = Moment([x])
    x[0] = 1 + 2 * torch.finfo(x.dtype).eps
    assert moment.has_changed()
    assert not moment.has_changed(num_ulps=4)


@pytest.mark.parametrize("is_written_before", [False, True])
def test_writes_of_gossip_are_no_writes_of_the_loop(is_written_before: bool) -> None:
    model = mlp()
    buffer = FlatBuffer(model)
    gradient = WatchedGradient(buffer)
    gradient.begin()
    assert gradient.parameter is not None
    with torch.no_grad():
        if is_written_before:
            gradient.parameter.add_(1.0)
        buffer.vector.raw.add_(1)
        gradient.note_gossip_write()
    assert gradient.is_stepped() == is_written_before
    gradient.begin()
    assert not gradient.is_stepped()
    gradient.close()


@pytest.mark.parametrize("drop", ["none", "zero", "keep"])
def test_a_gradient_that_is_there_after_a_backward_and_then_is_not_was_dropped(drop: str) -> None:
    model = mlp()
    gradient = WatchedGradient(FlatBuffer(model))
    gradient.begin()
    loss_of(model, 0, 0).backward()
    assert gradient.num_backwards == 1
    if drop != "keep":
        model.zero_grad(set_to_none=drop == "none")
    assert gradient.is_dropped() == (drop != "keep")
    gradient.close()


def test_samples_of_parameters_tell_which_ones_differ_in_any_memory() -> None:
    model = nn.ModuleList([nn.Linear(20, 3), nn.Linear(3, 2)])
    buffer = FlatBuffer(model)
    samples = ParameterSamples(buffer.vector.layout, torch.device("cpu"))
    before, other = samples.read(buffer.vector), buffer.vector.clone()
    with torch.no_grad():
        buffer.parameters[1].add_(1.0)
    is_equal = samples.are_equal(samples.read(buffer.vector), before)
    assert is_equal.tolist() == [k != 1 for k in range(len(buffer.parameters))]
    samples.copy_parameters(buffer.vector, other, ~is_equal)
    assert torch.equal(buffer.vector.raw, other.raw)


def test_a_sample_of_complex_numbers_has_both_parts() -> None:
    assert sample(torch.tensor([[1 + 2j, 3 + 4j]])).tolist() == [1.0, 2.0, 3.0, 4.0]
