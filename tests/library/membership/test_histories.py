"""A member never loses its job to a roster that knows nothing of it; and all workers settle on one roster."""

from __future__ import annotations

import json
from collections.abc import Callable
from operator import methodcaller

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from gossip_modules.membership import shared_roster
from gossip_modules.membership.roster import Event, Roster
from gossip_modules.membership.shared_roster import SharedRoster
from gossip_modules.membership.view import GARBAGE, FailureReport, View
from tests.library.membership.test_membership import Job, close
from tests.library.membership.test_roster import (
    DESCRIPTION,
    begin,
    come,
    formed,
    job,
    know,
    leave,
    loaded,
    member,
    report,
)
from tests.library.membership.test_shared_roster import KEY, TIMEOUT

NUM_WORKERS = 5


@pytest.fixture(autouse=True)
def _read_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_roster, "_FRESH_SECONDS", 0.0)


class World:
    """Workers that share a roster. Each one acts on what it has read, and may be suspended for a while."""

    def __init__(self) -> None:
        self.store, self.texts = dist.HashStore(), [""]
        self.workers = [SharedRoster(self.store, name="job", timeout=TIMEOUT) for _ in range(NUM_WORKERS)]
        self.suspended: set[int] = set()
        self.active: dict[int, tuple[int, View]] = {}  # by worker, the job and the generation that it trains in
        for worker, shared in enumerate(self.workers):
            shared.worker = worker

    def text(self) -> str:
        return self.store.get(KEY).decode() if self.store.check([KEY]) else ""

    def update(self, worker: int, *events: Event, is_leaving: bool = False) -> None:
        """One turn of the watcher of a worker."""
        if worker in self.suspended:
            return
        shared = self.workers[worker]
        assert shared.update(events)
        roster, known = shared.roster, self.active.pop(worker, None)
        if known is not None and not (roster.view is None and is_leaving):
            founded, view = known
            assert roster.view is not None, "a member does not believe that its job has gone"
            assert roster.founded <= founded, "a member does not leave its job for a later one"
            assert roster.founded < founded or roster.view.generation >= view.generation, "no generation comes back"
        if roster.view is not None and roster.is_member(worker):
            self.active[worker] = roster.founded, roster.view
        self.texts.append(self.text())

    def form(self, worker: int) -> None:
        """The generation that forms begins, if all its workers are awake."""
        forming = self.workers[worker].roster.forming
        if forming is not None and not self.suspended & set(forming.ids):
            self.update(worker, begin(forming.ids, forming.generation, step=0))

    def act(self, action: str, worker: int, other: int) -> None:
        roster = self.workers[worker].roster
        options = {"description": DESCRIPTION, "min_workers": 1 + other % 2}
        joiner = roster.joiners.get(other)
        acts: dict[str, Callable[[], None]] = {
            "update": lambda: self.update(worker),
            "come": lambda: self.update(worker, come(worker, min_workers=1 + other % 2)),
            "restart": lambda: self.update(
                worker, methodcaller("restart", member(worker), **options, seen=(roster.last_generation, roster.reply))
            ),
            "load": lambda: self.update(worker, loaded(other, 0 if joiner is None else joiner.attempt)),
            "report": lambda: self.update(worker, report(worker, other, is_sure=True)),
            "leave": lambda: self.update(worker, leave(worker), is_leaving=True),
            "form": lambda: self.form(worker),
            "suspend": lambda: self.suspended.add(worker),
            "wake": lambda: self.suspended.discard(worker),
            "garbage": lambda: self.store.set(KEY, ("not json", "{}", "3")[other % 3]),
            "old": lambda: self.store.set(KEY, self.texts[other * len(self.texts) // NUM_WORKERS]),
            "empty": lambda: self.store.set(KEY, without_view(self.text())),
        }
        acts[action]()

    def settle(self) -> None:
        """All wake. After two turns of each, none writes anything, and all have read the same."""
        self.suspended.clear()
        first = min((founded for founded, _ in self.active.values()), default=None)
        for _ in range(2):
            for worker in range(NUM_WORKERS):
                self.update(worker)
        text = self.text()
        for worker in range(NUM_WORKERS):
            self.update(worker)
        assert self.text() == text, "the workers overwrite each other's roster"
        rosters = [shared.roster.dumps() for shared in self.workers]
        assert len(set(rosters)) == 1
        if first is not None:
            assert self.workers[0].roster.founded == first, "the job that was founded first goes on"


def without_view(text: str) -> str:
    """The roster after the end of its job."""
    try:
        roster = Roster.loads(text)
    except GARBAGE:
        return text
    roster.view = roster.forming = None
    roster.joiners = {}
    return roster.dumps()


WORKERS = st.integers(0, NUM_WORKERS - 1)
TRAINING = [("come", 0, 1), ("come", 1, 1), ("form", 1, 0), ("update", 0, 0)]
ACTIONS = [
    *("update", "come", "restart", "load", "report", "leave", "form", "suspend", "wake", "garbage", "old", "empty"),
    *("update", "form", "come"),
]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(ACTIONS), WORKERS, WORKERS), max_size=40))
def test_members_keep_their_job_over_restarts_garbage_and_suspensions(actions: list[tuple[str, int, int]]) -> None:
    world = World()
    for action in [*TRAINING, *actions]:
        world.act(*action)
    world.settle()


@pytest.mark.parametrize("min_workers", [1, 2])
def test_members_that_were_suspended_take_their_job_back_from_a_newcomer(min_workers: int) -> None:
    world = World()
    for action in [*TRAINING, ("suspend", 0, 0), ("suspend", 1, 0), ("come", 2, 0), ("restart", 2, min_workers - 1)]:
        world.act(*action)
    newcomer = world.workers[2].roster
    if min_workers == 1:
        world.form(2)
        assert 2 in world.active
    else:
        assert (newcomer.view, list(newcomer.founders)) == (None, [2])
    for action in [("wake", 0, 0), ("update", 0, 0), ("form", 0, 0), ("update", 2, 0)]:
        world.act(*action)
    roster = world.workers[2].roster
    assert roster.view is not None
    assert roster.view.ids == (0, 1)
    assert 2 not in world.active
    world.act("come", 2, 0)
    assert roster.view.has(world.workers[2].roster.joiners[2].donor)


def test_the_order_of_jobs_does_not_depend_on_clocks_where_one_follows_the_other() -> None:
    roster = job(2)
    before = roster.founded
    for worker in (0, 1):
        roster.leave(worker, why="it left")
    roster.come(member(0), description=DESCRIPTION, min_workers=1)
    formed(roster)
    assert roster.founded > before


def test_a_stale_copy_of_the_roster_is_replaced() -> None:
    going_on = job(3)
    stale = Roster.loads(going_on.dumps())
    going_on.report(FailureReport(0, 2, "it was silent", is_sure=False))
    going_on.begin(2, {0: (5, 1.0), 1: (5, 1.0)})
    know(going_on.dumps(), worker=1, branch=9)(stale)
    assert stale.forming is not None
    assert stale.forming.ids == (0, 1)
    assert stale.forming.generation == 3


def test_newcomers_join_members_whose_roster_was_emptied() -> None:
    """The members train on meanwhile, in the same generation."""
    store = dist.HashStore()
    jobs = Job(store, min_workers=2)
    workers = jobs.start(2)
    jobs.until_live(workers)
    emptied = json.loads(store.get(KEY)) | {"view": None, "forming": None, "joiners": {}}
    store.set(KEY, json.dumps(emptied))
    store.add("gossip/job/version", 1)
    (newcomer,) = jobs.start(1)
    jobs.until_live([*workers, newcomer])
    assert newcomer.first > 0
    assert all(len(w.changes) == 2 for w in workers), "they have never left the job"
    close(jobs.end())
