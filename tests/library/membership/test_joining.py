"""Joining a job whose model is no longer what it was at the start."""

from __future__ import annotations

import logging
import re
import threading
import time
from dataclasses import replace
from datetime import timedelta
from operator import methodcaller
from typing import Any

import networkx as nx
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from gossip_modules import GossipDataParallel, MatchaGraph, Membership
from gossip_modules.engine.lockstep import LockstepEngine
from gossip_modules.membership import donor as donor_module
from gossip_modules.membership import limits
from gossip_modules.membership import membership as membership_module
from gossip_modules.membership import worker as worker_module
from gossip_modules.membership.background_log import log
from gossip_modules.membership.donor import Donor
from gossip_modules.membership.generations import Generations
from gossip_modules.membership.liveness.contact import LifeSign
from gossip_modules.membership.liveness.monitor import LivenessMonitor
from gossip_modules.membership.roster import Roster
from gossip_modules.membership.shared_roster import SharedRoster
from gossip_modules.membership.view import FailureReport, View
from gossip_modules.membership.worker import LocalWorker
from tests.harness.progress import local_of, round_of, weight_of
from tests.library.membership.test_membership import (
    SECONDS,
    Job,
    close,
    die,
    member_of,
    model_of,
    receive_state,
)


class Frozen(nn.Sequential):
    """Trains its first layer in five steps only."""

    steps: torch.Tensor

    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 3), nn.Linear(3, 1))
        self.register_buffer("steps", torch.tensor(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        if self.steps == 5:
            self[0].requires_grad_(requires_grad=False)
        result: torch.Tensor = super().forward(x)
        return result


@pytest.mark.parametrize("options", [{}, {"overlap": True}], ids=["SGP", "Overlap SGP"])
def test_a_worker_joins_a_job_that_has_frozen_a_layer(options: dict[str, Any]) -> None:
    job = Job(dist.HashStore(), min_workers=2, **options)
    workers = [worker for _ in range(2) for worker in job.start(1, model=Frozen())]
    job.until(lambda: min(worker.step for worker in workers) > 8, "the layer is frozen")
    (newcomer,) = job.start(1, model=Frozen())
    job.until_live([*workers, newcomer])
    alive = job.end()
    assert len(alive) == 3
    first, second, new = (worker.model[0].weight for worker in [*workers, newcomer])  # type: ignore[index]
    assert not any(weight.requires_grad for weight in (first, second, new))
    assert torch.equal(first, second)  # averaged exactly when it has left the vector
    assert torch.equal(new, first)
    assert all(worker.model[1].weight.requires_grad for worker in alive)  # type: ignore[index]
    close(alive)


class Growing(nn.Sequential):
    """Gets a second layer in the forward after it was told to."""

    is_growing = False

    def forward(self, x: Tensor) -> Tensor:
        if self.is_growing and len(self) == 1:
            self.append(nn.Linear(1, 1))
        return super().forward(x)


def test_another_set_of_layers_is_refused_and_the_job_goes_on() -> None:
    """A layer that was added on the way, which the newcomer's model does not have."""
    job = Job(dist.HashStore(), min_workers=1)
    (worker,) = job.start(1, model=Growing(nn.Linear(4, 1)))
    job.until_live([worker])
    growing: Any = worker.model
    growing.is_growing = True
    job.until(lambda: worker.wrapper is not None and len(local_of(worker.wrapper).buffer.tensors) == 4, "it travels")
    other = member_of(job.store, min_workers=1)
    wrapper = GossipDataParallel(Growing(nn.Linear(4, 1)), membership=other)
    other.track(optimizer=torch.optim.SGD(wrapper.parameters(), lr=0.01))
    with pytest.raises(ValueError, match=r"got a donor that trains \['1.bias .* where this worker has \[\], expected"):
        other.join()
    wrapper.close()
    assert len(job.end()) == 1
    close([worker])


def test_a_founder_that_dies_before_the_beginning_is_waited_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "FORMING", 0.5)
    store = dist.HashStore()
    job = Job(store, min_workers=3)
    (first,) = job.start(1)
    job.until(
        lambda: first.membership is not None and len(first.membership.worker.roster.founders) == 1, "the first came"
    )
    first.is_killed.set()
    assert first.membership is not None
    die(first.membership)
    workers = job.start(3)
    job.until_live(workers)
    close(job.end())


def test_matcha_goes_on_with_living_and_new_workers() -> None:
    planned: list[int] = []

    def graph(n: int) -> MatchaGraph:
        planned.append(n)
        return MatchaGraph(nx.cycle_graph(n), budget=0.5)

    job = Job(dist.HashStore(), min_workers=3, push_sum=False, graph=graph)
    workers = job.start(3)
    job.until_live(workers)
    workers[0].is_killed.set()
    job.until_live(workers[1:])
    job.until_live([*workers[1:], *job.start(1, seed=1)])
    alive = job.end()
    assert len({round_of(worker.wrapper) for worker in alive}) == 1
    assert planned.count(2) == planned.count(3) == 4, "each worker plans once for each number of workers"
    close(alive)


def test_a_host_is_that_of_heartbeats_and_links(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    new = dist.ProcessGroupGloo.create_device

    def create_device(hostname: str, **options: Any) -> Any:
        asked.append(hostname)
        return new(hostname=hostname, **options)

    monkeypatch.setattr(dist.ProcessGroupGloo, "create_device", staticmethod(create_device))
    member = member_of(dist.HashStore(), min_workers=1, host="127.0.0.1")
    wrapper = GossipDataParallel(nn.Linear(2, 1), membership=member)
    assert member.worker.liveness is not None
    assert (set(asked), member.worker.liveness.contact.address[0]) == ({"127.0.0.1"}, "127.0.0.1")
    wrapper.close()
    with pytest.raises(ValueError, match=r"got host='192.0.2.1', which is no IPv4 address of this machine"):
        member_of(dist.HashStore(), min_workers=1, host="192.0.2.1")


def test_loopback_in_a_job_of_several_machines_is_warned_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    names = iter(["node0", "node1"])
    job = Job(dist.HashStore(), min_workers=2)
    monkeypatch.setattr("gossip_modules.membership.joining.socket.gethostname", lambda: next(names, "node1"))
    with caplog.at_level(logging.WARNING, logger="gossip_modules.membership"):
        job.until_live(job.start(2))
        close(job.end())
        assert log.flush(60.0)
    lines = [record.getMessage() for record in caplog.records]
    assert any("got 127.0.0.1 for the address of this worker" in x and "with workers on ['node0']" in x for x in lines)


@pytest.mark.parametrize("is_loaded", [True, False])
def test_the_weight_of_a_worker_that_dies_before_it_joins_goes_back_to_its_donor(
    monkeypatch: pytest.MonkeyPatch, is_loaded: bool
) -> None:
    """Half of its weight: where many die at the door, weights would fall without bound."""
    monkeypatch.setattr(limits, "FORMING", 2.0)
    job = Job(dist.HashStore(), min_workers=2)
    workers = job.start(2)
    job.until_live(workers)
    donors = [worker.membership for worker in workers if worker.membership is not None]
    member = member_of(job.store, min_workers=2)
    wrapper = GossipDataParallel(model_of(), membership=member)
    receive_state(member)
    for donor in donors:  # of one that says nothing, nobody knows: the donor waits until its timeout
        with donor.worker.lock:
            donor.worker.donor.given = {
                key: (until if is_loaded else 0.0, state) for key, (until, state) in donor.worker.donor.given.items()
            }
    if is_loaded:
        member.job.store.update([methodcaller("mark_loaded", member.id, 0)])
    die(member)
    wrapper.close()
    if is_loaded:
        job.until(lambda: all(donor.generation > 1 for donor in donors), "they go on without it")
    job.until(
        lambda: not any(donor.worker.donor.given or donor.worker.donor.unclaimed for donor in donors), "nothing is owed"
    )
    alive = job.end()
    assert sum(worker.weight for worker in alive) == pytest.approx(2.0, rel=1e-5)
    close(alive)


@pytest.mark.parametrize("sign", [LifeSign.ENDED, LifeSign.SILENT])
def test_a_worker_that_vanishes_before_it_gets_the_state_is_forgotten(
    sign: LifeSign, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it would keep one of `max_workers` places, and be given the state again and again."""
    job = Job(dist.HashStore(), min_workers=2)
    workers = job.start(2)
    job.until_live(workers)
    members = [worker.membership for worker in workers if worker.membership is not None]
    monkeypatch.setattr(limits, "CONNECT", 1.0 if sign is LifeSign.ENDED else 0.2)
    if sign is LifeSign.SILENT:  # its machine has no power
        monkeypatch.setattr(worker_module, "probe", lambda addresses, **_: dict.fromkeys(addresses, sign))
    attempts: list[tuple[int, bool]] = []
    say = LocalWorker.say

    def record(worker: LocalWorker, event: Any, *arguments: Any, **options: Any) -> None:
        if event in (Roster.change_donor, Roster.forget):
            attempts.append((arguments[1], event is Roster.forget))
        say(worker, event, *arguments, **options)

    monkeypatch.setattr(LocalWorker, "say", record)
    member = member_of(job.store, min_workers=2)
    wrapper = GossipDataParallel(model_of(), membership=member)
    die(member)
    wrapper.close()
    job.until(
        lambda: all(m.worker.roster.next_number == 3 and not m.worker.roster.joiners for m in members),
        "it is forgotten",
    )
    assert attempts == ([(0, True)] if sign is LifeSign.ENDED else [(0, False), (1, False), (2, True)])
    close(job.end())


def test_a_worker_that_dies_while_it_loads_the_state_is_forgotten() -> None:
    job = Job(dist.HashStore(), min_workers=2)
    workers = job.start(2)
    job.until_live(workers)
    donors = [worker.membership for worker in workers if worker.membership is not None]
    for donor in donors:
        donor.job.timeout = timedelta(seconds=1)
    member = member_of(job.store, min_workers=2)
    wrapper = GossipDataParallel(model_of(), membership=member)
    receive_state(member)
    die(member)
    wrapper.close()
    job.until(lambda: not any(donor.worker.roster.joiners for donor in donors), "it is forgotten")
    close(job.end())


def test_a_new_member_is_not_removed_by_a_donor_that_waited_for_it_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the donors of earlier attempts say comes when it is a member."""
    monkeypatch.setattr(limits, "CONNECT", 1.0)
    job = Job(dist.HashStore(), min_workers=1)
    workers = job.start(1)
    job.until_live(workers)
    late = [threading.Event() for _ in range(3)]
    meet, say = donor_module.meet, LocalWorker.say

    def fail_at_first(store: SharedRoster, name: str, rank: int, **options: Any) -> Any:
        if rank and num_failures[0] < len(late):
            while store.missing(f"{name}/0", [0]):  # the donor has come
                time.sleep(0.005)
            num_failures[0] += 1
            raise RuntimeError("as told")
        return meet(store, name, rank, **options)

    def note(worker: LocalWorker, event: Any, *arguments: Any, **options: Any) -> None:
        say(worker, event, *arguments, **options)
        if event in (Roster.change_donor, Roster.forget) and arguments[0] != worker.id and arguments[1] < len(late):
            late[arguments[1]].set()

    num_failures = [0]
    monkeypatch.setattr(donor_module, "meet", fail_at_first)
    monkeypatch.setattr(LocalWorker, "say", note)
    (newcomer,) = job.start(1)
    job.until_live([*workers, newcomer])
    assert newcomer.membership is not None
    number = newcomer.membership.number
    assert all(has_come.wait(SECONDS) for has_come in late)
    step = newcomer.step
    job.until(lambda: newcomer.step > step + 20, "it trains on")
    assert newcomer.membership.number == number
    assert [len(change.members) for change in newcomer.changes] == [2]
    close(job.end())


def test_a_worker_without_a_reachable_listener_joins(monkeypatch: pytest.MonkeyPatch) -> None:
    """A firewall refuses its listener, and lets the links of gossip pass."""
    job = Job(dist.HashStore(), min_workers=1)
    workers = job.start(1)
    job.until_live(workers)
    begin = LivenessMonitor.__init__

    def elsewhere(self: LivenessMonitor, *args: Any, **options: Any) -> None:
        begin(self, *args, **options)
        self.contact = replace(self.contact, address=("127.0.0.1", 1))

    monkeypatch.setattr(LivenessMonitor, "__init__", elsewhere)
    (newcomer,) = job.start(1)
    job.until_live([*workers, newcomer])
    close(job.end())


def test_a_donor_that_dies_in_the_middle_is_replaced_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gloo ends no wait for a message of which a part has come; see [Note: waits that do not end] of `Waits`."""
    job = Job(dist.HashStore(), min_workers=2)
    workers = job.start(2)
    job.until_live(workers)
    is_receiving, may_end, receive = threading.Event(), threading.Event(), donor_module.receive

    class HalfReceived:
        def wait(self, timeout: timedelta) -> None:
            is_receiving.set()
            may_end.wait(timeout.total_seconds())

    def receive_half(group: dist.ProcessGroup, **options: Any) -> Any:
        if not is_receiving.is_set():
            options["waits"].wait(HalfReceived(), options["deadline"].left_for_gloo)
        return receive(group, **options)

    monkeypatch.setattr(donor_module, "receive", receive_half)
    (newcomer,) = job.start(1)
    job.until(is_receiving.is_set, "it gets the state")
    donor = next(worker for worker in workers if worker.membership is not None and worker.membership.worker.donor.given)
    donor.is_killed.set()
    survivor = workers[1 - workers.index(donor)]
    job.until_live([survivor, newcomer])
    may_end.set()
    close(job.end())


class Failing:
    """What is tracked, and fails as its state is asked for, in as many calls as are left."""

    def __init__(self, calls_left: list[int]) -> None:
        self.calls_left = calls_left  # of all workers

    def state_dict(self) -> dict[str, Any]:
        self.calls_left[0] -= 1
        if self.calls_left[0] >= 0:
            raise MemoryError("no room for a copy")
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@pytest.mark.parametrize("num_failing", [1, 2])
@pytest.mark.parametrize("is_of_engine", [True, False])
def test_a_donor_whose_state_cannot_be_copied_trains_on(
    monkeypatch: pytest.MonkeyPatch, is_of_engine: bool, num_failing: int
) -> None:
    """Another one gives; where both have failed, the newcomer is told why. No weight is lost."""
    failing = Failing([num_failing])
    job = Job(dist.HashStore(), min_workers=2)
    workers = job.start(2)
    job.until_live(workers)
    if is_of_engine:
        state_of = LockstepEngine.state_dict

        def state_dict(self: LockstepEngine, *, joins: bool = False, has_links: bool = True) -> dict[str, Any]:
            if joins:
                failing.state_dict()
            return state_of(self, joins=joins, has_links=has_links)

        monkeypatch.setattr(LockstepEngine, "state_dict", state_dict)
    else:
        for worker in workers:
            assert worker.membership is not None
            worker.membership.track(failing=failing)
        track = Membership.track
        monkeypatch.setattr(Membership, "track", lambda member, **objects: track(member, failing=failing, **objects))
    (newcomer,) = job.start(1, seed=1)
    if num_failing == 1:
        workers = [*workers, newcomer]
        job.until_live(workers)
    else:
        newcomer.is_killed.set()  # its error is expected
        newcomer.thread.join(SECONDS)
        assert re.search("donor cannot give the state of training: MemoryError: no room", str(newcomer.error))
    assert failing.calls_left[0] <= 0
    alive = job.end()
    assert len(alive) == len(workers)
    assert sum(worker.weight for worker in alive) == pytest.approx(len(alive), rel=1e-5)
    close(workers)


def test_a_worker_that_came_late_to_its_first_generation_stays_in_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """That it did not come to form the first one is read when that has begun."""
    monkeypatch.setattr(limits, "FORMING", 0.1)
    say, form = LocalWorker.say, Generations._form
    said: list[tuple[LocalWorker, FailureReport]] = []
    is_accused = threading.Event()

    def say_by(self: LocalWorker, event: Any, *arguments: Any, **options: Any) -> None:
        if event is Roster.report:
            said.append((self, *arguments))
            is_accused.set()
        else:
            say(self, event, *arguments, **options)

    def form_by(self: Generations, view: View) -> None:
        if not self.worker.is_founder and self.active is None:
            is_accused.wait(SECONDS)
        form(self, view)

    monkeypatch.setattr(LocalWorker, "say", say_by)
    monkeypatch.setattr(Generations, "_form", form_by)
    job = Job(dist.HashStore(), min_workers=2)
    workers = job.start(2)
    job.until_live(workers)
    (newcomer,) = job.start(1, seed=1)
    job.until_live([*workers, newcomer])
    assert said
    for by, report in said:
        by.job.store.update([methodcaller("report", report)])
    (another,) = job.start(1, seed=2)
    job.until_live([*workers, newcomer, another])
    for worker in (*workers, newcomer):
        assert not any(change.left for change in worker.changes)
    close(job.end())


def test_a_worker_alone_has_weight_one() -> None:
    member = member_of(dist.HashStore(), min_workers=1)
    wrapper = GossipDataParallel(nn.Linear(2, 1), membership=member)
    local_of(wrapper).buffer.vector.push_sum_weight.fill_(0.001)
    before = local_of(wrapper).buffer.vector.raw.clone()
    assert member.job.participant is not None
    member.job.participant.at_step()
    assert weight_of(wrapper) == 1.0
    assert torch.equal(local_of(wrapper).buffer.vector.raw, before), "its estimate stays"
    wrapper.close()


def test_workers_agree_in_a_partition() -> None:
    job = Job(dist.HashStore(), min_workers=1)
    (worker,) = job.start(1)
    job.until_live([worker])
    other = member_of(job.store, min_workers=1, on_partition="both")
    with pytest.raises(ValueError, match="on_partition: got 'both', expected 'majority'"):
        GossipDataParallel(model_of(), membership=other)
    close(job.end())


def test_another_version_of_the_library_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(dist.HashStore(), min_workers=1)
    (worker,) = job.start(1)
    job.until_live([worker])
    mine = membership_module.__version__
    monkeypatch.setattr(membership_module, "__version__", "9.9.9")
    with pytest.raises(ValueError, match=f"version of gossip_modules: got '9.9.9', expected '{mine}'"):
        GossipDataParallel(model_of(), membership=member_of(job.store, min_workers=1))
    close(job.end())


def test_a_worker_that_is_closed_while_it_joins_raises_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(dist.HashStore(), min_workers=1)
    (worker,) = job.start(1)
    job.until_live([worker])
    monkeypatch.setattr(Donor, "take_snapshots", lambda _: None)
    (newcomer,) = job.start(1)
    job.until_queued(newcomer)
    newcomer.is_killed.set()  # its error is expected
    assert newcomer.membership is not None
    newcomer.membership.close()
    job.until(lambda: newcomer.error is not None, "it ends")
    assert re.search("membership (was closed|that is closed)", str(newcomer.error))
    close(job.end())
