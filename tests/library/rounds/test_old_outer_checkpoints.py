"""Checkpoints of 0.1.0, whose outer steps had an engine of their own, go on to the bit."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist

from gossip_modules import DiLoCo, GASLoC, GossipDataParallel, NoLoCo, SlowMo, StreamingDiLoCo
from gossip_modules.extend import OuterMethod
from tests.harness.problems import mlp, sgd, train_step
from tests.harness.ranks import run_ranks
from tests.harness.reference import flatten

STATES = {"SlowMo": ("u", "u", 1), "NoLoCo": ("momentum", "momentum_buffer", -1), "GASLoC": ("y", "y", 1)}


def anchor_of(name: str, state: dict[str, Any]) -> dict[str, Any]:
    """What 0.1.0 saved of one fragment: what is a vector now was in the optimizer."""
    memory = state["memory"]
    optimizer = memory.get("optimizers", {}).get("outer", {})
    if name in STATES:
        vector, key, sign = STATES[name]
        parts = {k: {key: sign * x} for k, x in enumerate(memory["vectors"][vector])}
        optimizer = {"kind": "Any", "made_with": [], "state": parts, "param_groups": [{"params": list(parts)}]}
    return {"phi": memory["vectors"]["phi"], "optimizer": optimizer}


@pytest.mark.parametrize(
    "outer", [DiLoCo(3), SlowMo(3), NoLoCo(3), GASLoC(3), StreamingDiLoCo(4, fragments=2, delay=1)], ids=str
)
def test_a_checkpoint_of_an_older_version_goes_on_to_the_bit(outer: OuterMethod) -> None:
    name = type(outer).__name__

    def body(group: dist.ProcessGroup) -> None:
        rank, model = group.rank(), mlp()
        wrapper, optimizer = GossipDataParallel(model, process_group=group, algorithm=outer), sgd(model)
        for step in range(8):
            train_step(wrapper, optimizer, rank, step)
        wrapper.settle()
        values, steps = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
        extra = copy.deepcopy(wrapper.get_extra_state())
        engine = extra["engine"]
        gossiper = engine["gossiper"]
        anchors = [anchor_of(name, each) for each in gossiper.get("fragments", [gossiper])]
        extra["engine"] = {
            "engine": f"{name} engine",
            "t": engine["t"],
            "step": engine["step"],
            "gossiper": {},
            "anchor": anchors[0] if len(anchors) == 1 else {"fragments": anchors},
        }
        for step in range(8, 14):
            train_step(wrapper, optimizer, rank, step)
        wrapper.close()
        other = mlp(3)
        resumed, optimizer = GossipDataParallel(other, process_group=group, algorithm=outer), sgd(other)
        other.load_state_dict(values)
        resumed.set_extra_state(extra)
        optimizer.load_state_dict(steps)
        for step in range(8, 14):
            train_step(resumed, optimizer, rank, step)
        resumed.close()
        assert torch.equal(flatten(other), flatten(model))

    run_ranks(2, body)
