"""Chaos on a network: events of packets, on hosts of their own."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest
import torch
from torch import nn

from gossip_modules import GossipDataParallel
from gossip_modules.membership.view import Change
from gossip_modules.testing import Chaos, Delay, Loss, Partition, Stop, Worker
from gossip_modules.testing.events import Event

MAX_STEPS = 2000


@pytest.mark.parametrize("event", [Delay(1, 0), Loss(1, 0), Partition(1, (0,))])
@pytest.mark.parametrize("backend", ["threads", "processes"])
def test_workers_of_one_network_have_no_events_of_packets(event: Event, backend: Any) -> None:
    with pytest.raises(ValueError, match=r"got .*, whose workers share one network, expected backend='network'"):
        Chaos([event], backend=backend)


def test_events_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match=r"got delay=0, expected seconds above 0"):
        Delay(1, 0, delay=0)
    with pytest.raises(ValueError, match=r"got fraction=5, expected one above 0 and at most 1"):
        Loss(1, 0, fraction=5)
    for ranks in ((), (-1,), (True,)):
        with pytest.raises(ValueError, match=r"got ranks=.*, expected numbers of workers"):
            Partition(1, ranks)


def train(worker: Worker) -> list[int]:
    """Trains until 20 steps after all three are together again; the numbers of workers that it has seen."""
    membership = worker.membership(min_workers=3, min_deadline=1.0)
    model = GossipDataParallel(nn.Linear(4, 1), membership=membership)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    membership.track(optimizer=optimizer)
    sizes, last = [3], MAX_STEPS

    def see(change: Change) -> None:
        nonlocal last
        sizes.append(len(change.members))
        if change.generation > 1 and sizes[-1] == 3:
            last = change.step + 20

    membership.on_change(see)
    for step in membership.steps(MAX_STEPS):
        if step >= last:
            break
        loss = model(torch.ones(2, 4)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        time.sleep(0.05)
    model.close()
    return sizes


@pytest.mark.soak
@pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() != 0 or not os.access("/dev/net/tun", os.W_OK),
    reason="network namespaces take root and /dev/net/tun",
)
@pytest.mark.parametrize(
    "events", [[Partition(20, (2,), 4.0)], [Loss(10, 1, 0.05), Delay(10, 1, 0.02), Stop(20, 2, 4.0)]]
)
def test_a_worker_that_is_cut_off_or_stopped_comes_back(events: list[Event]) -> None:
    found = Chaos(events, backend="network").run(train, 3)
    assert sorted(found) == [0, 1, 2]
    for rank, sizes in found.items():
        assert sizes[-1] == 3, found
        if rank != 2:
            assert 2 in sizes, found
