"""A round under training that the gossip thread begins late."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import pytest
import torch
from torch import nn

from gossip_modules import GossipDataParallel, LocalSGD
from gossip_modules.extend import FlatVector, Memory, Round, Vectors
from gossip_modules.rounds.rounds import Rounds
from tests.harness.ranks import TIMEOUT, solo_group


@dataclass(frozen=True)
class Noted(LocalSGD):
    """Local SGD that notes the number of steps with which its rounds run."""

    noted: list[int] = field(default_factory=list, compare=False, repr=False)

    def round(self, v: Vectors, m: Memory, k: int) -> Round:
        self.noted.append(k)
        return super().round(v, m, k)


def test_a_round_that_starts_late_runs_with_the_step_at_which_it_departed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gossip thread comes to the round of step 3 when training is at step 4, which has no round."""
    start, is_at_4 = Rounds.start, threading.Event()

    def late(self: Rounds, s: FlatVector, t: int) -> None:
        assert is_at_4.wait(TIMEOUT.total_seconds())
        start(self, s, t)

    monkeypatch.setattr(Rounds, "start", late)
    algorithm, x = Noted(3), torch.ones(1, 4)
    model = GossipDataParallel(
        nn.Linear(4, 1), process_group=solo_group(), algorithm=algorithm, overlap=True, max_staleness=2
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(9):
        loss = model(x).sum()  # with the round of so many steps
        if step == 4:
            is_at_4.set()
        loss.backward()
        optimizer.step()
    model.close()
    assert algorithm.noted == [3, 6]
