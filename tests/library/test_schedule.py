"""What happens at step k."""

from __future__ import annotations

from typing import Any

import pytest

from gossip_modules import Schedule
from gossip_modules.schedule import Action


@pytest.mark.parametrize("gossip_every", [1, 2, 3])
@pytest.mark.parametrize("average_every", [0, 1, 2, 3])
def test_every_step_has_the_action_of_the_definition(gossip_every: int, average_every: int) -> None:
    """Count rounds: the H-th, 2 H-th, ... of them averages."""
    schedule = Schedule(gossip_every, average_every)
    num_rounds = 0
    for step in range(24):
        if step % gossip_every:
            expected = Action.SKIP
        else:
            num_rounds += 1
            is_average = average_every > 0 and num_rounds % average_every == 0
            expected = Action.AVERAGE if is_average else Action.GOSSIP
        assert schedule.action(step) is expected


def test_default_gossips_at_every_step() -> None:
    assert {Schedule().action(step) for step in range(10)} == {Action.GOSSIP}


@pytest.mark.parametrize("counts", [(0, 0), (-1, 0), (1, -1), (1, 2.5), (0.5, 0), (1, "8"), (1, True), (1, None)])
def test_counts_out_of_range(counts: tuple[Any, Any]) -> None:
    message = rf"got gossip_every={counts[0]!r}, average_every={counts[1]!r}, expected whole .*; use average_every=0"
    with pytest.raises(ValueError, match=message):
        Schedule(*counts)
