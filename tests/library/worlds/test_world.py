"""The processes that hold one model decide alike."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist

from gossip_modules.testing import run_ranks
from gossip_modules.transport.process_group import ProcessGroupTransport
from gossip_modules.worlds.world import ALONE, ModelWorld
from tests.harness.ranks import TIMEOUT


def test_a_process_with_a_whole_model_decides_alone() -> None:
    x = torch.ones(2)
    assert ALONE.agree(True)
    assert not ALONE.agree(False)
    ALONE.first(x)
    ALONE.sum_over_processes(x)
    assert x.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("is_copied", [False, True])
def test_processes_of_one_model_get_equal_answers(is_copied: bool) -> None:
    def body(group: dist.ProcessGroup) -> list[object]:
        world = ModelWorld(ProcessGroupTransport(group, device=torch.device("cpu"), timeout=TIMEOUT))
        if is_copied:
            world = copy.deepcopy(world)
        first, total = (torch.full((2,), 1.0 + group.rank()) for _ in range(2))
        world.first(first)
        world.sum_over_processes(total)
        return [world.agree(True), world.agree(group.rank() == 0), first.tolist(), total.tolist()]

    assert run_ranks(2, body) == [[True, False, [1.0, 1.0], [3.0, 3.0]]] * 2
