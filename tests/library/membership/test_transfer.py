"""The state of training arrives as it was given, without pickle."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from gossip_modules.membership import donor
from gossip_modules.transport.deadline import Deadline
from gossip_modules.transport.gloo import gloo_backend
from gossip_modules.transport.state_tree import encode
from tests.harness.ranks import TIMEOUT


def sent(state: Any) -> Any:
    """What the other end of a link gets."""
    store, errors = dist.HashStore(), []

    def give() -> None:
        try:
            donor.send(gloo_backend(store, 0, 2, TIMEOUT), state, timeout=TIMEOUT)
        except TypeError as error:
            errors.append(error)

    thread = threading.Thread(target=give)
    thread.start()
    group = gloo_backend(store, 1, 2, TIMEOUT)
    got = donor.receive(group, deadline=Deadline(TIMEOUT))
    thread.join(TIMEOUT.total_seconds())
    assert not errors
    return got


def test_the_state_of_an_optimizer_arrives() -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    state = optimizer.state_dict()
    got = sent(state)
    other = torch.optim.AdamW(nn.Linear(3, 2).parameters())
    other.load_state_dict(got)
    assert other.state_dict()["param_groups"] == state["param_groups"]
    for key, values in state["state"].items():
        for name, value in values.items():
            assert torch.equal(other.state_dict()["state"][key][name], value)


def test_values_of_all_kinds_arrive() -> None:
    state = {
        "x": torch.arange(6, dtype=torch.bfloat16).view(2, 3).t(),
        "empty": torch.zeros(0, 3),
        "scalar": torch.tensor(True),
        1: [None, False, 2, 3.5, float("inf"), "text"],
        "long": torch.arange(2_500_000),
        "pair": (0.9, {"nested": torch.tensor([1 + 2j])}),
    }
    got = sent(state)
    assert got.keys() == state.keys()
    assert (got[1], got["pair"][0]) == (state[1], 0.9)
    for name in ("x", "empty", "scalar", "long"):
        assert torch.equal(got[name], state[name])  # type: ignore[arg-type]
    assert torch.equal(got["pair"][1]["nested"], torch.tensor([1 + 2j]))


def test_objects_are_refused_with_their_place() -> None:
    with pytest.raises(TypeError, match=r"got a Linear in state\['sampler'\]\[0\], expected tensors"):
        encode({"sampler": [nn.Linear(1, 1)]})
