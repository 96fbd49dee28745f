"""The average of ranks while a round with an exact average travels in the gossip thread."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor

from gossip_modules import (
    EagerDiLoCo,
    GossipDataParallel,
    Schedule,
    SlowMo,
    SparseLoCo,
    StreamingDiLoCo,
)
from gossip_modules.transport.process_group import ProcessGroupTransport
from tests.harness.cases import each_once
from tests.harness.problems import mlp, sgd, train_step
from tests.harness.ranks import TIMEOUT, assert_no_gossip_threads, run_ranks

OPTIONS: list[dict[str, Any]] = [
    {"algorithm": EagerDiLoCo(4)},
    {"algorithm": StreamingDiLoCo(4, delay=2)},
    {"algorithm": SlowMo(4, delay=2)},
    {"algorithm": SparseLoCo(4, delay=2)},
    {"overlap": True, "push_sum": False, "schedule": Schedule(average_every=1)},
]


def delay_collectives(wrapper: GossipDataParallel) -> None:
    """From here on the gossip thread begins them after the training thread has called for the average."""
    transport, trainer, has_called = wrapper._local.averager.transport, threading.current_thread(), threading.Event()
    assert isinstance(transport, ProcessGroupTransport)
    all_gather, all_reduce, settle = transport.all_gather, transport.all_reduce, wrapper.settle

    def hold() -> None:
        if threading.current_thread() is not trainer:
            assert has_called.wait(TIMEOUT.total_seconds())

    def late_all_gather(out: Tensor, x: Tensor, *, what: str) -> None:
        hold()
        all_gather(out, x, what=what)

    def late_all_reduce(x: Tensor, *, what: str) -> None:
        hold()
        all_reduce(x, what=what)

    def note_and_settle() -> None:
        has_called.set()
        settle()

    transport.all_gather, transport.all_reduce = late_all_gather, late_all_reduce  # type: ignore[method-assign]
    wrapper.settle = note_and_settle  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("options", "call"), each_once(OPTIONS, ["averaged_state_dict", "average_", "consensus_distance"]), ids=str
)
def test_it_is_the_same_call_on_a_rank_whose_gossip_thread_is_late(options: dict[str, Any], call: str) -> None:
    def body(group: dist.ProcessGroup) -> None:
        wrapper = GossipDataParallel(mlp(), process_group=group, **options)
        optimizer = sgd(wrapper)
        for step in range(9):
            if step == 8:
                wrapper.flush()
                if group.rank():
                    delay_collectives(wrapper)
            train_step(wrapper, optimizer, group.rank(), step)
        getattr(wrapper, call)()
        wrapper.close()

    run_ranks(2, body)
    assert_no_gossip_threads()
