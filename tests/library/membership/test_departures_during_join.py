"""A newcomer whose members leave while it comes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gossip_modules import GossipDataParallel
from gossip_modules.membership.generations import Generations
from gossip_modules.membership.view import View
from gossip_modules.testing import Chaos, Join, Worker


class Count:
    """A tracked object that counts steps."""

    def __init__(self) -> None:
        self.num_steps = 0

    def state_dict(self) -> dict[str, int]:
        """The count."""
        return {"num_steps": self.num_steps}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Take the count of a donor."""
        self.num_steps = state["num_steps"]


def test_a_newcomer_whose_members_have_all_left_goes_on_from_their_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """They leave before they have connected with it, as soon as it has their state: it begins a generation alone."""
    form = Generations._form

    def form_without_members(self: Generations, view: View) -> None:
        if len(view.members) == 1 or all(member.number != 2 for member in view.members):
            form(self, view)

    monkeypatch.setattr(Generations, "_form", form_without_members)

    def body(worker: Worker) -> tuple[int, int]:
        member, count = worker.membership(min_workers=2, timeout=60.0), Count()
        wrapper = GossipDataParallel(nn.Linear(2, 1), membership=member)
        member.track(count=count)
        first = -1, -1
        try:
            for step in member.steps(1 << 30):
                first = (step, count.num_steps) if first[0] < 0 else first
                wrapper(torch.ones(1, 2)).sum().backward()
                count.num_steps += 1
                roster = member.job.store.roster
                has_come = any(joiner.is_loaded for joiner in roster.joiners.values())
                if worker.rank == 2 or has_come:
                    break
        finally:
            wrapper.close()
        return first

    step, num_steps = Chaos([Join(10)]).run(body, 2)[2]
    assert step == num_steps >= 10
