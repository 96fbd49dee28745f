"""Checkpoints with a round in flight: it is saved as it is, and a run that goes on from them has the same bits."""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from gossip_modules import (
    QSGD,
    DiLoCo,
    EagerDiLoCo,
    GASLoC,
    GossipDataParallel,
    LocalSGD,
    MuLoCo,
    NoLoCo,
    RandomK,
    SlowMo,
    SparseLoCo,
    StreamingDiLoCo,
)
from gossip_modules.extend import Average, Memory, OuterMethod, Round, Vector, Vectors
from tests.harness.problems import loss_of, mlp, net, sgd, train_step
from tests.harness.progress import engine_of
from tests.harness.ranks import run_ranks
from tests.harness.reference import flatten

NAMES_BUT_FIRST = [name for name, _ in net().named_children() if name != "first"]
BY_NAME = [["first"], NAMES_BUT_FIRST]
CASES: dict[str, dict[str, Any]] = {
    "LocalSGD, delay 3": {"algorithm": LocalSGD(4, delay=3)},
    "DiLoCo, delay 3": {"algorithm": DiLoCo(4, delay=3)},
    "DiLoCo, adaptive": {"algorithm": DiLoCo(4, delay=3, arrival="adaptive")},
    "DiLoCo, Adam": {
        "algorithm": DiLoCo(4, delay=2, optimizer=lambda x: torch.optim.Adam(x, lr=0.05), arrival="carry")
    },
    "DiLoCo, compressed": {"algorithm": DiLoCo(3, delay=2, compressor=QSGD(4, bucket_size=8, unbiased=True))},
    "DiLoCo, by tokens": {"algorithm": DiLoCo(4, delay=2, weighted_by="tokens")},
    "streaming": {"algorithm": StreamingDiLoCo(4, fragments=2, delay=3)},
    "streaming, compressed": {
        "algorithm": StreamingDiLoCo(4, fragments=2, delay=2, compressor=QSGD(4, bucket_size=8, unbiased=True))
    },
    "eager": {"algorithm": EagerDiLoCo(3, fragments=BY_NAME)},
    "eager, compressed": {
        "algorithm": EagerDiLoCo(3, fragments=BY_NAME, compressor=QSGD(4, bucket_size=8, unbiased=True))
    },
    "MuLoCo": {"algorithm": MuLoCo(4, delay=2)},
    "SlowMo": {"algorithm": SlowMo(3, delay=2)},
    "NoLoCo": {"algorithm": NoLoCo(3, delay=2)},
    "GASLoC": {"algorithm": GASLoC(3, fragments=2, delay=1)},
    "SparseLoCo": {"algorithm": SparseLoCo(3, compressor=RandomK(0.1), fragments=2, delay=2)},
    "host memory": {"algorithm": DiLoCo(4, delay=3, anchor_device="cpu")},
}
PLACES, LAST = (5, 6, 9), 14


def run(
    group: dist.ProcessGroup, case: dict[str, Any], *, seed: int, first: int, saved: Any = None
) -> tuple[Tensor, Any]:
    """Train from step `first` to the last step; return the parameters and the checkpoints at `PLACES`."""
    model, checkpoints = net(seed), {}
    wrapper, optimizer = GossipDataParallel(model, process_group=group, **case), sgd(model)
    if saved is not None:
        loss_of(wrapper, group.rank(), 0)  # it has an anchor of its own already
        wrapper.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    for step in range(first, LAST):
        if step in PLACES:
            file = io.BytesIO()
            torch.save({"model": wrapper.state_dict(), "optimizer": optimizer.state_dict()}, file)
            checkpoints[step] = file.getvalue()
        train_step(wrapper, optimizer, group.rank(), step)
        if "tokens" in str(case):
            wrapper.count_tokens(1 + (group.rank() + 2 * step) % 5)
    result = flatten(model).clone()
    wrapper.close()
    return result, checkpoints


@pytest.mark.parametrize("name", CASES)
def test_a_round_in_flight_is_saved_as_it_is(name: str) -> None:
    def body(group: dist.ProcessGroup) -> None:
        case = CASES[name]
        expected, checkpoints = run(group, case, seed=0, first=0)
        has_flights = False
        for place, file in checkpoints.items():
            saved = torch.load(io.BytesIO(file), weights_only=True)
            has_flights |= bool(saved["model"]._metadata[""]["gossip_state"].get("flights"))
            found, again = run(group, case, seed=5, first=place, saved=saved)
            assert torch.equal(found, expected), place
            assert torch.load(io.BytesIO(again[place]), weights_only=True)["model"].keys() == saved["model"].keys()
        assert has_flights, "a checkpoint was saved with a round in flight"

    run_ranks(2, body)


@pytest.mark.parametrize("name", CASES)
def test_a_checkpoint_changes_no_bit_of_the_run(name: str) -> None:
    def body(group: dist.ProcessGroup) -> None:
        expected, _ = run(group, CASES[name], seed=0, first=0)
        model = net(0)
        wrapper, optimizer = GossipDataParallel(model, process_group=group, **CASES[name]), sgd(model)
        for step in range(LAST):
            train_step(wrapper, optimizer, group.rank(), step)
            if "tokens" in str(CASES[name]):
                wrapper.count_tokens(1 + (group.rank() + 2 * step) % 5)
        assert torch.equal(flatten(model), expected)
        wrapper.close()

    run_ranks(2, body)


@dataclass(frozen=True)
class KeepsTensor(OuterMethod):
    """Local SGD whose round keeps a tensor, outside the memory, until the reply comes."""

    def round(self, v: Vectors, m: Memory, k: int) -> Round:
        sent = m.scratch().set_(v.x)
        before = v.x.parts[0].clone()
        yield Average(sent)
        v.x.add_(sent).sub_(Vector([before]))


def test_a_round_that_keeps_a_tensor_of_its_own_is_applied_before_a_save() -> None:
    def body(group: dist.ProcessGroup) -> None:
        wrapper = GossipDataParallel(mlp(), process_group=group, algorithm=KeepsTensor(4, delay=3))
        optimizer = sgd(wrapper)
        for step in range(6):
            train_step(wrapper, optimizer, group.rank(), step)
        assert engine_of(wrapper).is_in_flight
        state = wrapper.state_dict()
        assert not engine_of(wrapper).is_in_flight
        assert "flights" not in state._metadata[""]["gossip_state"]
        wrapper.close()

    run_ranks(2, body)
