"""Other tensors in the memory of a module, made before it is wrapped: they follow, or the module is refused."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from gossip_modules import GossipDataParallel
from gossip_modules.extend import FlatBuffer
from tests.harness.problems import fill_
from tests.harness.ranks import run_ranks

ALIASES: dict[str, Callable[[nn.Linear], Tensor]] = {
    "detach": lambda layer: layer.weight.detach(),
    "data": lambda layer: layer.weight.data,
    "a row": lambda layer: layer.weight.detach()[1],
    "transposed": lambda layer: layer.weight.detach().t(),
    "flat": lambda layer: layer.weight.detach().view(-1),
    "a column": lambda layer: layer.weight.detach()[:, 1],
    "of another dtype": lambda layer: layer.weight.detach().view(torch.int32),
    "a view that autograd knows": lambda layer: layer.weight[1:],
    "in a state dict": lambda layer: layer.state_dict()["weight"],
}


@pytest.mark.parametrize("make", ALIASES.values(), ids=ALIASES)
def test_an_alias_follows(make: Callable[[nn.Linear], Tensor]) -> None:
    layer = fill_(nn.Linear(3, 4), 0)
    assert isinstance(layer, nn.Linear)
    alias = make(layer)
    before = alias.detach().clone()
    buffer = FlatBuffer(layer)
    assert torch.equal(alias, before)
    buffer.vector.segments[0].uniform_(generator=torch.Generator().manual_seed(0))
    assert torch.equal(alias, make(layer))
    layer.bias.requires_grad_(False)
    buffer.attach()  # a new vector
    buffer.vector.segments[0].fill_(3.0)
    assert torch.equal(alias, make(layer))
    layer.double()  # as without a vector, the alias stays behind
    buffer.reattach()


def test_a_transposed_alias_of_a_square_weight_stays_transposed() -> None:
    layer = nn.Linear(3, 3)
    alias = layer.weight.detach().t()
    FlatBuffer(layer)
    assert torch.equal(alias, layer.weight.t())


def test_an_alias_of_a_layer_that_is_not_contiguous_follows() -> None:
    layer = nn.Linear(3, 4, bias=False)
    layer.weight = nn.Parameter(torch.arange(12.0).view(3, 4).t())
    alias = layer.weight.detach()
    buffer = FlatBuffer(layer)
    assert torch.equal(alias, torch.arange(12.0).view(3, 4).t())
    buffer.vector.segments[0].mul_(2)
    assert torch.equal(alias, layer.weight)


class Teacher(nn.Module):
    """A student and a frozen twin that shows the same tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
        self.teacher = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
        for own, other in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
            own.data = other.data
            own.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.student(x) - self.teacher(x) / 2


@pytest.mark.parametrize("is_inside", [True, False])
def test_a_frozen_twin_follows_over_rounds(is_inside: bool) -> None:
    def body(group: dist.ProcessGroup) -> None:
        both = Teacher()
        model = GossipDataParallel(both if is_inside else both.student, process_group=group)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.full((2, 3), 1.0 + group.rank())).square().mean().backward()
            optimizer.step()
        model.close()
        for own, other in zip(both.teacher.parameters(), both.student.parameters(), strict=True):
            assert torch.equal(own, other)
            assert own.data_ptr() == other.data_ptr()

    run_ranks(2, body)


def test_a_twin_that_another_wrapper_trains_is_refused() -> None:
    def body(group: dist.ProcessGroup) -> None:
        layer = nn.Linear(2, 2)
        twin = nn.Linear(2, 2)
        model = GossipDataParallel(layer, process_group=group)
        twin.weight.data = layer.weight.data
        with pytest.raises(ValueError, match=r"parameter 'weight' is in a GossipDataParallel already"):
            GossipDataParallel(twin, process_group=group)
        model.close()

    run_ranks(1, body)


@pytest.mark.parametrize("shares", [lambda m: m.share_memory(), lambda m: m.weight.share_memory_()])
def test_shared_memory_is_refused(shares: Callable[[nn.Module], object]) -> None:
    layer = nn.Linear(2, 2)
    shares(layer)
    with pytest.raises(ValueError, match=r"got 'weight' in shared memory.*Wrap copy.deepcopy\(module\)"):
        FlatBuffer(layer)
    FlatBuffer(copy.deepcopy(layer))


def test_share_memory_after_wrapping_is_refused_at_the_next_round() -> None:
    def body(group: dist.ProcessGroup) -> None:
        layer = nn.Linear(2, 2)
        model = GossipDataParallel(layer, process_group=group)
        model(torch.ones(1, 2)).sum().backward()
        layer.share_memory()
        with pytest.raises(ValueError, match="in shared memory"):
            model(torch.ones(1, 2))
        layer.load_state_dict(copy.deepcopy(layer.state_dict()), assign=True)
        model.close()

    run_ranks(1, body)


def flattened(module: nn.Module) -> Tensor:
    """Its parameters as views of one tensor, as cuDNN lays out the weights of an RNN."""
    flat = torch.cat([x.detach().flatten() for x in module.parameters()])
    nn.utils.vector_to_parameters(flat, module.parameters())
    return flat


def test_flattened_weights_of_an_rnn_move() -> None:
    rnn = nn.LSTM(3, 4)
    flattened(rnn)
    x = torch.ones(2, 1, 3)
    before = rnn(x)[0].detach()
    alias = rnn.get_parameter("weight_hh_l0").detach()
    buffer = FlatBuffer(rnn)
    assert torch.equal(rnn(x)[0], before)
    buffer.vector.segments[0].zero_()
    assert not alias.any()
    assert not rnn(x)[0].any()


def test_frozen_parts_of_flattened_weights_stay() -> None:
    rnn = nn.LSTM(3, 4)
    flattened(rnn)
    frozen = rnn.get_parameter("weight_hh_l0").requires_grad_(False)
    before = frozen.clone()
    FlatBuffer(rnn).vector.segments[0].zero_()
    assert torch.equal(frozen, before)


def test_a_tensor_over_several_parameters_is_refused() -> None:
    layer = nn.Linear(2, 3)
    flat = flattened(layer)
    message = r"got a tensor of shape \(9,\) that shares memory with 'weight' and 'bias' of the module.*Delete it"
    with pytest.raises(ValueError, match=message):
        FlatBuffer(layer)
    del flat
    FlatBuffer(layer)


def test_tied_weights_and_their_alias() -> None:
    layer = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    layer[1].weight = layer[0].weight
    alias = layer.get_parameter("1.weight").detach()
    FlatBuffer(layer).vector.segments[0].fill_(2.0)
    assert layer[1].weight is layer[0].weight
    assert bool((alias == 2).all())


def test_nothing_is_looked_for_where_there_is_no_alias(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
    layer(torch.ones(4, 3)).sum().backward()
    optimizer.step()

    def refuse(*_: object) -> list[object]:
        raise AssertionError

    monkeypatch.setattr(gc, "get_objects", refuse)
    buffer = FlatBuffer(layer)
    layer[0].requires_grad_(False)
    buffer.attach()
    layer.double()
    buffer.reattach()
    copy.deepcopy(buffer).reattach()


def test_an_alias_follows_a_tensor_that_stays_while_another_one_is_replaced() -> None:
    layer = nn.Linear(3, 4)
    aliases = [layer.weight.detach(), layer.weight.data[1]]
    buffer = FlatBuffer(layer)
    left = layer.bias.data
    layer.bias.data = torch.ones(4)
    buffer.reattach()
    buffer.vector.segments[0].fill_(3.0)
    assert torch.equal(aliases[0], torch.full((4, 3), 3.0))
    assert torch.equal(aliases[1], torch.full((3,), 3.0))
    assert not left.equal(torch.full((4,), 3.0))


class Tied(nn.Module):
    """An embedding whose table is the weight of the output layer too."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(4, 3), nn.Linear(3, 4, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.embed(x))


def grow(model: Tied) -> None:
    """A larger embedding, before the output layer gets one."""
    model.embed.weight = nn.Parameter(torch.cat([model.embed.weight.detach(), torch.zeros(2, 3)]))


def untie(model: Tied) -> None:
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())


def assign(model: Tied) -> None:
    model.load_state_dict({name: x.clone() for name, x in model.state_dict().items()}, assign=True)


@pytest.mark.parametrize("change", [grow, untie, assign])
@pytest.mark.parametrize("options", [{}, {"overlap": True}], ids=str)
def test_both_tables_of_a_weight_that_is_tied_no_more_are_gossiped(
    change: Callable[[Tied], None], options: dict[str, Any]
) -> None:
    def body(group: dist.ProcessGroup) -> Tensor:
        model = Tied()
        wrapper = GossipDataParallel(model, process_group=group, **options)
        for step in range(4):
            if step == 1:
                change(model)
                nn.init.constant_(model.head.weight, float(group.rank()))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
            wrapper(torch.tensor([1, 3])).sum().backward()
            optimizer.step()
        wrapper.flush()
        result = model.head.weight.detach().clone()
        wrapper.close()
        return result

    for head in run_ranks(2, body):
        assert torch.equal(head, torch.full_like(head, 0.5))


def test_a_tie_in_a_place_that_was_another_weight_takes_it_out_of_the_vector() -> None:
    model = Tied()
    untie(model)
    buffer = FlatBuffer(model)
    model.head.weight = model.embed.weight
    assert not buffer.is_attached()
    buffer.reattach()
    assert [slot.name for slot in buffer.slots] == ["embed.weight"]
    assert buffer.is_attached()
    assert buffer.is_complete()
