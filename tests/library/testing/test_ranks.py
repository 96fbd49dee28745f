"""The helper that runs ranks as threads: an error is reported as it is, and nobody waits for it."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

from gossip_modules import GossipDataParallel
from tests.harness.ranks import HangUp, run_ranks


def receive(group: dist.ProcessGroup) -> None:
    """Wait for a message of rank 1."""
    group.recv([torch.zeros(1)], 1, 0).wait()


def test_the_first_error_is_raised_and_the_others_do_not_hang() -> None:
    def body(group: dist.ProcessGroup) -> None:
        if group.rank() == 1:
            raise KeyError("the cause")
        receive(group)

    start = time.monotonic()
    with pytest.raises(KeyError, match="the cause"):
        run_ranks(3, body)
    assert time.monotonic() - start < 5


def test_ranks_beside_a_default_process_group_of_the_caller() -> None:
    def body(group: dist.ProcessGroup) -> None:
        GossipDataParallel(nn.Linear(2, 1 + group.rank()), process_group=group)

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(ValueError, match=r"ranks do not agree with rank 0: rank 1: model: got weight \(2, 2\)"):
            run_ranks(2, body)
        run_ranks(2, lambda group: GossipDataParallel(nn.Linear(2, 1), process_group=group).close())
    finally:
        dist.destroy_process_group()


def test_a_rank_can_be_gone_without_an_error() -> None:
    def body(group: dist.ProcessGroup) -> int:
        if group.rank() == 1:
            raise HangUp
        with pytest.raises(RuntimeError, match=r"(?i)connection"):
            receive(group)
        return group.rank()

    assert run_ranks(3, body) == [0, 2]
