"""The average of workers without a process group: exact, and in time also where a rank does not come."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from gossip_modules.dpwa.wrapper import PairwiseDataParallel
from tests.harness.processes import run_processes

LONG, SHORT = timedelta(seconds=30), timedelta(seconds=1)


def average_alone(rank: int) -> tuple[float, float]:
    """Rank 1 averages twice and leaves; the others average once more."""
    module = nn.Linear(1, 1, bias=False)
    nn.init.constant_(module.weight, float(rank))
    model = PairwiseDataParallel(
        module, name="w", peers={"w": "tcp://127.0.0.1:*"}, timeout=timedelta(seconds=0.5), average_timeout=LONG
    )
    with model.averaged():
        mean = module.weight.item()
    state = model.averaged_state_dict()
    assert {name: value.item() for name, value in state.items()} == ({"weight": mean} if rank == 0 else {})
    seconds = 0.0
    if rank != 1:
        start = time.monotonic()
        with pytest.raises((ConnectionError, TimeoutError), match=rf"rank {rank}: .*rank 1\b"):
            model.average_()
        seconds = time.monotonic() - start
    model.close()
    return mean, seconds


@pytest.mark.e2e
def test_an_average_without_a_rank_ends_in_time_and_names_it() -> None:
    for outcome in run_processes(3, average_alone):
        assert not outcome.error
        mean, seconds = outcome.result
        assert mean == 1.0
        assert seconds < LONG.total_seconds() / 2


def test_inside_an_average_another_one_ends_before_it() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = PairwiseDataParallel(nn.Linear(1, 1), name="w", peers={"w": "tcp://127.0.0.1:*"})
        with model.averaged():
            assert model.averaged_state_dict().keys() == {"weight", "bias"}
            model(torch.ones(1, 1))  # no round: the parameters are the average, not those of this worker
            assert model.comm_stats()["clock"] == 0
        model(torch.ones(1, 1))
        assert model.comm_stats()["clock"] == 1
        model.close()
    finally:
        dist.destroy_process_group()


def test_the_default_follows_the_timeout() -> None:
    def time_of(**options: timedelta) -> timedelta:
        model = PairwiseDataParallel(nn.Linear(1, 1), name="w", peers={"w": "tcp://127.0.0.1:*"}, **options)  # type: ignore[arg-type]
        model.close()
        averager: Any = model._local.averager
        limit: timedelta = averager._timeout
        return limit

    assert time_of() == timedelta(seconds=10)
    assert time_of(timeout=timedelta(minutes=1)) == timedelta(minutes=1)
    assert time_of(timeout=SHORT) == SHORT
    assert time_of(timeout=timedelta(minutes=1), average_timeout=SHORT) == SHORT
