"""Tracked objects of a newcomer: as those of the members at its first step, and refused where they differ."""

from __future__ import annotations

import re
import time
from collections import defaultdict
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gossip_modules as gm
from gossip_modules import GossipDataParallel
from gossip_modules.membership.tracked import TrackedCounts, check_alike, described, load_counts
from tests.library.membership.test_membership import Job, Worker, close, die, member_of, model_of


class Sampler:
    """TrackedCounts batches; its order is drawn by a generator."""

    def __init__(self) -> None:
        self.position, self.order = 0, torch.zeros(8, dtype=torch.int64)

    def draw(self) -> None:
        self.position += 1
        self.order = torch.randperm(8, generator=torch.Generator().manual_seed(self.position))

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position, "order": self.order}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position, self.order = state["position"], state["order"]


METHODS: dict[str, dict[str, Any]] = {
    "SGP": {},
    "Overlap SGP": {"overlap": True},
    "DiLoCo": {"algorithm": gm.DiLoCo(4)},
    "WAGMA": {"wrap": gm.GroupAverageDataParallel},
    "AllReduce": {"wrap": gm.AllReduceDataParallel},
}


@pytest.mark.parametrize("name", METHODS)
def test_a_newcomer_has_the_counts_of_the_members_from_its_first_step(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps of Adam, a schedule that changes in each step, and a sampler, at each step on all workers.

    A worker of WAGMA-SGD may leave out steps later, and its counts with them.
    """
    seen: dict[int, list[Any]] = defaultdict(list)
    entries: dict[Worker, Any] = {}

    def train(worker: Worker) -> None:
        options = dict(worker.job.options)
        member = worker.membership = member_of(worker.job.store, min_workers=2)
        wrapper = worker.wrapper = options.pop("wrap", GossipDataParallel)(worker.model, membership=member, **options)
        optimizer = torch.optim.Adam(wrapper.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: 1 / (1 + k))
        sampler = Sampler()
        member.track(optimizer=optimizer, schedule=schedule, sampler=sampler)
        for step in member.steps(1 << 30):
            if worker.first < 0:
                worker.first = step
            with worker.job.lock:
                if step >= worker.job.last:
                    break
                worker.step = step + 1
            if worker.is_killed.is_set():
                die(member)
                wrapper.close()
                return
            counts = {int(state["step"]) for state in optimizer.state.values()}
            now = [
                counts,
                optimizer.param_groups[0]["lr"],
                schedule.last_epoch,
                sampler.position,
                sampler.order.tolist(),
            ]
            sampler.draw()
            loss = wrapper(torch.randn(4, 4)).pow(2).mean()
            model = [p.tolist() for p in wrapper.parameters()] if name == "AllReduce" else []
            seen[step].append((now, model))
            entries.setdefault(worker, (now, model))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            worker.members = member.members
            time.sleep(0.001)
        wrapper.flush()

    monkeypatch.setattr(Worker, "train", train)
    job = Job(dist.HashStore(), min_workers=2, **METHODS[name])
    workers = job.start(2)
    job.until_live(workers)
    workers += job.start(1, seed=1)
    job.until_live(workers)
    workers.pop(0).is_killed.set()
    job.until_live(workers)
    workers += job.start(1, seed=2)
    job.until_live(workers)
    job.end()
    assert sum(len(states) > 1 for states in seen.values()) > 20
    for newcomer in workers[1:]:
        assert seen[newcomer.first].count(entries[newcomer]) > 1, f"step {newcomer.first}"
    for step, states in seen.items() if name != "WAGMA" else ():
        assert all(state == states[0] for state in states[1:]), f"step {step}: {states}"
    close(workers)


@pytest.mark.parametrize(
    ("track", "message"),
    [
        (
            lambda p: {},
            r"got optimizer=nothing in track\(\) of this worker, expected SGD of parameters \[8, 4\], \[8\]",
        ),
        (lambda p: {"optimizer": torch.optim.AdamW(p)}, r"got optimizer=AdamW of .*, expected SGD of parameters"),
        (
            lambda p: {"optimizer": torch.optim.SGD([{"params": p[:2]}, {"params": p[2:]}])},
            r"got optimizer=SGD of parameters \[8, 4\], \[8\]; \[8\], .*, expected SGD of parameters \[8, 4\], \[8\], ",
        ),
        (lambda p: {"optimizer": torch.optim.SGD(p), "sampler": Sampler()}, r"got sampler=Sampler .*expected nothing"),
    ],
    ids=["nothing", "another class", "other groups", "one object more"],
)
def test_other_tracked_objects_are_refused_where_the_newcomer_runs(track: Any, message: str) -> None:
    job = Job(dist.HashStore(), min_workers=1)
    (worker,) = job.start(1)
    job.until_live([worker])
    other = member_of(job.store, min_workers=1)
    wrapper = GossipDataParallel(model_of(1), membership=other)
    other.track(**track([*wrapper.parameters()]))
    before = [p.clone() for p in wrapper.parameters()]
    with pytest.raises(ValueError, match=message) as caught:
        other.join()
    assert "\n" not in str(caught.value)
    assert all(map(torch.equal, before, wrapper.parameters()))
    wrapper.close()
    step = worker.step
    job.until(lambda: worker.step > step + 5, "the job goes on")
    close(job.end())


def test_counts_without_moments() -> None:
    """A newcomer has the moments of its donor, and the counts of a member, but not for a parameter without moments."""

    def stepped(num_steps: int, *names: str) -> tuple[nn.Module, torch.optim.Adam]:
        model = nn.Linear(3, 2)
        optimizer = torch.optim.Adam(model.parameters())
        for _ in range(num_steps):
            for name, p in model.named_parameters():
                p.grad = torch.ones_like(p) if name in names else None
            optimizer.step()
        return model, optimizer

    _, member = stepped(7, "weight", "bias")
    _, newcomer = stepped(4, "weight")
    moments = newcomer.state_dict()["state"][0]["exp_avg"].clone()
    assert load_counts(TrackedCounts(5, {"optimizer": member}).dumps(), {"optimizer": newcomer}) == 5
    state = newcomer.state_dict()["state"]
    assert list(state) == [0]
    assert state[0]["step"].item() == 7
    assert torch.equal(state[0]["exp_avg"], moments)


def test_descriptions_of_one_kind_are_alike() -> None:
    model = model_of()
    own, other = torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.SGD(model_of(1).parameters(), lr=0.5)
    check_alike(described({"a": own, "b": Sampler()}), described({"b": Sampler(), "a": other}))
    remedy = "call membership.track(a=a) with the same objects before the first training step"
    with pytest.raises(ValueError, match=re.escape(remedy)):
        check_alike({}, described({"a": own}))
