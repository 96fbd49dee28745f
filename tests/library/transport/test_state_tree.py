"""States become JSON and tensors, and what cannot is refused with its place."""

from __future__ import annotations

import json
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import MultiStepLR

from gossip_modules.transport.state_tree import copied, decode, encode


class Pair(NamedTuple):
    one: int
    two: int


class Names(dict[str, int]):
    """A type that the other end does not know."""


class Labelled(torch.Tensor):
    """The same."""


def travelled(state: Any) -> Any:
    """What arrives of a copy."""
    header, tensors = encode(copied(state))
    return decode(json.loads(json.dumps(header)), tensors)


@pytest.mark.parametrize(
    "value",
    [
        Counter({50: 2, 80: 1}),
        OrderedDict([("b", 1), ("a", OrderedDict())]),
        defaultdict(list, {"seen": [1, 2]}),
        defaultdict(None, {1: 2}),
        torch.Size([2, 3]),
        {(1, "x"): [(None, True), 1.5]},
    ],
    ids=lambda value: type(value).__name__,
)
def test_containers_arrive_with_their_types(value: Any) -> None:
    got = travelled({"of": [value]})["of"][0]
    assert (type(got), got) == (type(value), value)
    if isinstance(value, defaultdict):
        assert got.default_factory is value.default_factory


def test_a_copy_is_one_of_tensors_in_any_container() -> None:
    x = torch.ones(2)
    copy = copied({"x": OrderedDict(x=[x]), "y": defaultdict(list, {1: (x,)})})
    x.zero_()
    assert torch.equal(copy["x"]["x"][0], torch.ones(2))
    assert torch.equal(copy["y"][1][0], torch.ones(2))
    assert copy["y"][2] == []


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Pair(1, 2), "got a Pair in state"),
        (lambda: Names(a=1), "got a Names in state"),
        (lambda: defaultdict(lambda: 1), "got a defaultdict in state"),
        (lambda: torch.eye(2).to_sparse(), "got a tensor of layout torch.sparse_coo in state"),
        (lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8), "got a quantized tensor in state"),
        (lambda: torch.empty(3, device="meta"), "got a meta tensor, which has no numbers, in state"),
        (lambda: torch.ones(2).as_subclass(Labelled), "got a Labelled in state"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*quantize.*")  # torch means to drop these
def test_values_that_would_arrive_with_another_type_are_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(TypeError, match=message + r"\['mine'\], expected"):
        encode(copied({"mine": make()}))


def test_a_scheduler_goes_on_past_its_milestones() -> None:
    """Its milestones are a Counter, which it asks for its elements."""

    def make() -> MultiStepLR:
        return MultiStepLR(torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=1.0), [2, 2, 4])

    scheduler, other = make(), make()
    state: Any = scheduler.state_dict()
    other.load_state_dict(travelled(state))
    assert other.state_dict() == state
    assert list(other.milestones.elements()) == [2, 2, 4]


def test_parameters_arrive_as_tensors() -> None:
    header, tensors = encode({"x": nn.Parameter(torch.ones(2))})
    assert torch.equal(decode(header, tensors)["x"], torch.ones(2))
