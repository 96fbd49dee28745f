"""The stamps by which workers agree on one memory."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from gossip_modules.flat.vector import FlatVector
from gossip_modules.rounds.memory import Memory
from gossip_modules.rounds.stamps import Stamps
from gossip_modules.rounds.vector import Vector
from gossip_modules.testing import run_ranks
from gossip_modules.transport.process_group import ProcessGroupTransport
from tests.harness.ranks import TIMEOUT


@pytest.mark.parametrize(("taken", "expected"), [(8, 2.0), (12, 1.0)], ids=["in step", "ahead of the others"])
def test_the_newest_memory_is_of_a_round_before_the_present_step(taken: int, expected: float) -> None:
    """Rank 1 has the memory of a donor that may have had a round at step 12 without the others, which are at 10."""

    def body(group: dist.ProcessGroup) -> float:
        transport = ProcessGroupTransport(group, device=torch.device("cpu"), timeout=TIMEOUT)
        memory, stamps = Memory(), Stamps()
        memory.fit(Vector.of(FlatVector.over(torch.zeros(1))))
        memory.vector("anchor").parts[0].fill_(1.0 + group.rank())
        stamps.taken = stamps.lost = taken if group.rank() else 7
        stamps.go_back(10)
        stamps.agree(memory, transport, who="the test")
        assert stamps.taken == stamps.lost == (8 if taken == 8 else 7)
        return float(memory.vector("anchor").parts[0])

    assert run_ranks(2, body) == [expected] * 2
