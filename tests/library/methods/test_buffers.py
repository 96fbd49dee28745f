"""Running statistics under all methods: each round mixes them like parameters, and nothing else changes them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from gossip_modules import GossipDataParallel
from tests.harness.problems import loss_of, net, train_step
from tests.harness.ranks import run_ranks
from tests.library.methods.combinations import ROWS, optimizer_of

LEFT_OUT = ("osgp", "streamingdiloco", "eagerdiloco", "matcha", "clippedgossip", "trimmedmean")
"""Methods whose rounds take effect in a later step, one whose round may have no link, and two that mix no buffers."""


@pytest.mark.parametrize("name", [name for name in ROWS if name not in LEFT_OUT])
def test_two_ranks_have_the_mean_after_a_round(name: str) -> None:
    def body(group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
        model = net()
        wrapper = GossipDataParallel(model, process_group=group, **ROWS[name]())
        optimizer = optimizer_of(wrapper)
        norm: Any = model.norm
        for step in range(2):
            train_step(wrapper, optimizer, group.rank(), step)
        before = norm.running_var.clone()
        model.eval()
        wrapper.gossip_in_eval_mode = True  # so that this forward leaves the statistics alone
        loss_of(wrapper, group.rank(), 9)
        wrapper.close()
        return before, norm.running_var

    (one, first), (other, second) = run_ranks(2, body)
    torch.testing.assert_close(first, (one + other) / 2)
    torch.testing.assert_close(second, first)
    assert not torch.equal(one, other)
