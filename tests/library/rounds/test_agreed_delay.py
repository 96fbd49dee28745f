"""delay="auto": ranks agree on the delay of outer steps, which then are those of a run with this delay."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import gossip_modules as gm
from gossip_modules.extend import Algorithm
from gossip_modules.lab import Compute, LabPlan, Network, Setting
from gossip_modules.lab.models import Models
from gossip_modules.lab.tasks import Consensus
from gossip_modules.rounds.agreed_delay import AgreedDelay
from gossip_modules.transport.process_group import ProcessGroupTransport
from gossip_modules.wrappers.choices import Choices
from tests.harness.ranks import CPU, TIMEOUT, run_ranks, solo_group


def test_the_slowest_rank_of_the_round_before_decides() -> None:
    taken = [(2, 3, 5), (4, 1, 1), (3, 9, 2), (1, 1, 1)]  # steps from the begin of each round to its reply, by rank

    def body(group: dist.ProcessGroup) -> list[int]:
        transport = ProcessGroupTransport(group, device=CPU, timeout=TIMEOUT)
        agreed, found = AgreedDelay(9), []
        for number, steps in enumerate(taken):
            begun = 10 * number
            found.append(agreed.at(begun))
            due = begun + found[-1]
            agreed.k = min(begun + steps[group.rank()], due)  # training waits at the step when it is due
            agreed.land(due, agreed.agree(transport, begun=begun, due=due))
        return [*found, agreed.at(10 * len(taken))]

    # Half of the period, twice, as nothing was measured; rank 2 has waited, 1.5 x 4; so has rank 0; then rank 1.
    assert run_ranks(3, body) == [[4, 4, 6, 6, 9]] * 3


def test_a_delay_begins_when_its_round_is_due_and_is_bounded() -> None:
    agreed = AgreedDelay(6)
    agreed.land(12, -1.0)
    agreed.land(20, 4.0)
    agreed.land(30, 40.0)
    assert [agreed.at(k) for k in (12, 19, 20, 29, 30)] == [3, 3, 4, 4, 6]
    other = AgreedDelay(6)
    other.load_state_dict(agreed.state_dict())
    assert other.present == 6
    other.load_state_dict({})
    assert other.present == 3


class Run:
    """A model in training by an outer method, by rank."""

    def __init__(self, group: dist.ProcessGroup, algorithm: Algorithm, state: dict[str, Any] | None = None) -> None:
        self.rank, self.k = group.rank(), 0
        module = nn.Linear(5, 3)
        with torch.no_grad():
            for x in module.parameters():
                x.fill_(0.5)
        self.model = gm.GossipDataParallel(module, process_group=group, algorithm=algorithm)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        if state is not None:
            self.model.load_state_dict(state["model"])
            self.k = state["k"]

    def train(self, num_steps: int) -> list[Tensor]:
        """Train, and return the weights after each step."""
        seen = []
        for _ in range(num_steps):
            draw = torch.Generator().manual_seed(100 * self.rank + self.k)
            self.optimizer.zero_grad()
            self.model(torch.randn(4, 5, generator=draw)).square().sum().backward()
            self.optimizer.step()
            self.k += 1
            seen.append(next(self.model.parameters()).detach().clone())
        return seen


@pytest.mark.parametrize(
    ("method", "options"),
    [
        (gm.DiLoCo, {}),
        (gm.DiLoCo, {"fragments": 2, "arrival": "carry"}),
        (gm.StreamingDiLoCo, {"fragments": 2}),
        (gm.LocalSGD, {}),
        (gm.SparseLoCo, {"fragments": 2}),
    ],
)
def test_a_run_with_an_agreed_delay_has_the_bits_of_one_with_this_delay(
    method: Any, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(AgreedDelay, "agree", lambda *_, **__: 3.0)

    def body(group: dist.ProcessGroup) -> None:
        auto = Run(group, method(6, delay="auto", **options))
        auto.train(16)
        assert auto.model.comm_stats()["auto_delay"] == 3.0
        state = copy.deepcopy({"model": auto.model.state_dict(), "k": auto.k})
        built = Run(group, method(6, delay=3, **options), state)
        resumed = Run(group, method(6, delay="auto", **options), state)
        seen = [run.train(13) for run in (auto, built, resumed)]
        for other in seen[1:]:
            assert all(map(torch.equal, seen[0], other))

    run_ranks(2, body)


def test_all_ranks_apply_outer_steps_in_the_same_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[int, list[tuple[int, int]]] = {}
    at = AgreedDelay.at

    def noted(self: AgreedDelay, k: int) -> int:
        delay = at(self, k)
        asked.setdefault(id(self), []).append((k, delay))
        return delay

    monkeypatch.setattr(AgreedDelay, "at", noted)

    def body(group: dist.ProcessGroup) -> float:
        run = Run(group, gm.StreamingDiLoCo(8, delay="auto"))
        run.train(40)
        if group.rank() == 0:
            run.model.flush()  # one rank alone, as to save: its delays stay those of the others
        run.train(20)
        return run.model.comm_stats()["auto_delay"]

    delays = run_ranks(3, body)
    assert len(set(delays)) == 1
    assert 1 <= delays[0] <= 7
    first, *others = asked.values()
    assert len(others) == 2
    assert all(other == first for other in others)


@pytest.mark.parametrize(
    ("make", "options", "expected"),
    [
        (lambda: gm.NoLoCo(4, delay="auto"), {}, r"NoLoCo: got delay='auto', expected a number of steps: its rounds"),
        (lambda: gm.DiLoCo(1, delay="auto"), {}, "got delay='auto' with sync_every=1, expected 0 <= delay <= 0"),
        (lambda: gm.DiLoCo(4, delay="soon"), {}, "got delay='soon' with sync_every=4, expected 0 <= delay <= 3"),
        (lambda: gm.DiLoCo(4, delay="auto"), {"overlap": True}, r"got overlap=True beside DiLoCo\(.*delay='auto'"),
    ],
)
def test_methods_that_cannot_agree_are_refused_with_a_remedy(make: Any, options: dict[str, Any], expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        gm.GossipDataParallel(nn.Linear(2, 2), process_group=solo_group(), algorithm=make(), **options)


@pytest.mark.parametrize(("nprocs_per_node", "is_sharded"), [(2, False), (1, True)])
def test_processes_of_one_model_cannot_agree(nprocs_per_node: int, is_sharded: bool) -> None:
    choices = Choices(algorithm=gm.DiLoCo(4, delay="auto"))
    expected = r"got DiLoCo\(.*delay='auto'.*\) for a model that several processes hold together .* pass delay=1"
    with pytest.raises(ValueError, match=expected):
        choices.check(overlap=False, init_sync=True, nprocs_per_node=nprocs_per_node, is_sharded=is_sharded)


def test_the_lab_refuses_it() -> None:
    setting = Setting(3, None, Compute(0.1), Network("1 Gbit/s"))
    plan = LabPlan.of(gm.DiLoCo(4, delay="auto")).resolved(3)
    with pytest.raises(ValueError, match="expected a number of steps as delay"):
        plan.make(setting, Models(Consensus(), 3))
