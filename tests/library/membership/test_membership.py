"""Membership: jobs whose workers, here threads, die, come and are cut off, and go on."""

from __future__ import annotations

import copy
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from operator import methodcaller
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from gossip_modules import GossipDataParallel, Membership, RingGraph
from gossip_modules.extend import PushSum
from gossip_modules.graph_manager import BaseGraph
from gossip_modules.membership import limits
from gossip_modules.membership.background_log import log
from gossip_modules.membership.joining import Joining
from gossip_modules.membership.view import Change
from gossip_modules.transport.deadline import Deadline
from tests.harness.progress import local_of, step_of, weight_of
from tests.harness.ranks import at_the_end
from tests.library.membership.stores import serve

SECONDS = 60.0  # of any wait: nothing here should take as long
PATIENT = 20.0  # of silence, so that a loaded machine declares nobody dead


def member_of(store: dist.Store | str, *, min_workers: int, **options: Any) -> Membership:
    return Membership(store, min_workers=min_workers, timeout=SECONDS, **{"min_deadline": PATIENT, **options})


def model_of(seed: int = 0) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return model


def die(membership: Membership) -> None:
    """As at the end of a process: connections close, and nobody is told."""
    membership.release()


def receive_state(member: Membership) -> None:
    """Receive the state that a donor gives to a worker in the join queue."""
    joiner = member.worker.joiner
    assert joiner is not None
    assert Joining(member.worker)._receive_state(joiner, Deadline(SECONDS))


class Job:
    """Workers as threads that train until the test says that it is enough, at one step for all."""

    def __init__(self, store: dist.Store | str, *, min_workers: int, **options: Any) -> None:
        self.store, self.min_workers, self.options = store, min_workers, options
        self.workers: list[Worker] = []
        self.last = 1 << 30
        self.lock = threading.Lock()
        at_the_end(self.abandon)

    def start(self, count: int, **options: Any) -> list[Worker]:
        workers = [Worker(self, **options) for _ in range(count)]
        self.workers += workers
        for worker in workers:
            worker.thread.start()
        return workers

    def until(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + SECONDS
        while not condition():
            errors = [w.error for w in self.workers if w.error is not None and not w.is_killed.is_set()]
            if errors:
                raise errors[0]
            assert time.monotonic() < deadline, what
            time.sleep(0.005)

    def until_live(self, workers: list[Worker]) -> None:
        """Until all of them are in one generation, with nobody else, and have taken a step in it."""

        def is_so() -> bool:
            views = [worker.members for worker in workers]
            return len(set(views)) == 1 and len(views[0]) == len(workers)

        self.until(is_so, f"got {[worker.members for worker in workers]}, expected one generation of {len(workers)}")

    def until_store_has_gone(self) -> None:
        """Until all that live have noticed it."""
        members = [w.membership for w in self.workers if w.membership is not None and not w.is_killed.is_set()]
        self.until(lambda: not any(member.job.store.is_connected for member in members), "the store has gone")

    def until_queued(self, worker: Worker) -> None:
        """Until a worker is in the join queue."""
        self.until(lambda: worker.membership is not None and worker.membership.worker.joiner is not None, "it has come")

    def until_founder(self, worker: Worker) -> None:
        """Until a worker waits for others to found the job."""
        self.until(lambda: worker.membership is not None and worker.membership.worker.is_founder, "it has come")

    def end(self) -> list[Worker]:
        """Stop all that live at one step, far enough ahead for all."""
        alive = [worker for worker in self.workers if worker.thread.is_alive() and not worker.is_killed.is_set()]
        with self.lock:  # nobody begins a step meanwhile
            self.last = max(worker.step for worker in alive) + 20
        for worker in alive:
            worker.thread.join(SECONDS)
            assert not worker.thread.is_alive(), f"a worker hangs at step {worker.step} of {self.last}"
        for worker in self.workers:
            if worker.error is not None and not worker.is_killed.is_set():
                raise worker.error
        return alive

    def abandon(self) -> None:
        """Where the test has failed: nobody trains on."""
        alive = [worker for worker in self.workers if worker.thread.is_alive()]
        for worker in alive:
            worker.is_killed.set()
            worker.may_go_on.set()
            if worker.membership is not None:
                die(worker.membership)
        for worker in alive:
            worker.thread.join(1.0)


class Worker:
    """One of them."""

    def __init__(self, job: Job, *, seed: int = 0, learning_rate: float = 0.01, model: nn.Module | None = None) -> None:
        self.job, self.learning_rate = job, learning_rate
        self.model = model_of(seed) if model is None else model
        self.is_killed, self.is_paused, self.may_go_on = threading.Event(), threading.Event(), threading.Event()
        self.error: Exception | None = None
        self.membership: Membership | None = None
        self.wrapper: Any = None
        self.changes: list[Change] = []
        self.members: tuple[int, ...] = ()
        self.first = self.step = -1
        self.momentum: torch.Tensor | None = None  # when it began
        self.thread = threading.Thread(target=self.run, daemon=True)

    def run(self) -> None:
        try:
            self.train()
        except Exception as error:  # noqa: BLE001 (raised in the thread of the test)
            self.error = error
            if self.membership is not None:
                die(self.membership)

    def train(self) -> None:
        options = dict(self.job.options)
        member_options = {name: options.pop(name) for name in ("min_deadline", "key") if name in options}
        wrap = options.pop("wrap", GossipDataParallel)
        member = self.membership = member_of(self.job.store, min_workers=self.job.min_workers, **member_options)
        member.on_change(self.changes.append)
        wrapper = self.wrapper = wrap(self.model, membership=member, **options)
        optimizer = torch.optim.SGD(wrapper.parameters(), lr=self.learning_rate, momentum=0.9)
        member.track(optimizer=optimizer)
        self.first = member.join()
        if optimizer.state:
            self.momentum = next(iter(optimizer.state.values()))["momentum_buffer"].clone()
        generator = torch.Generator().manual_seed(member.number)
        while True:
            with self.job.lock:
                if step_of(wrapper) >= self.job.last:
                    break
                self.step = step_of(wrapper) + 1
            if self.is_killed.is_set():
                die(member)
                wrapper.close()
                return
            if self.is_paused.is_set():
                self.may_go_on.wait(SECONDS)
            loss = wrapper(torch.randn(4, 4, generator=generator)).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            self.members = member.members
            time.sleep(0.001)
        wrapper.flush()

    @property
    def weight(self) -> float:
        assert self.wrapper is not None
        return weight_of(self.wrapper)


def close(workers: list[Worker]) -> None:
    """They leave one by one, and each time the others begin to connect for a generation that nobody waits for.

    Where one closes meanwhile, the thread of another one waits for it inside Gloo for `limits.CONNECT`.
    """
    with mock.patch.object(limits, "CONNECT", 2.0):
        for worker in workers:
            if worker.wrapper is not None:
                worker.wrapper.close()


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="SGP"),
        pytest.param({"overlap": True}, id="Overlap SGP"),
        pytest.param({"push_sum": False, "graph": lambda n: RingGraph(n, peers_per_itr=min(2, n - 1))}, id="D-PSGD"),
    ],
)
def test_workers_die_and_come_without_an_error(options: dict[str, Any]) -> None:
    """3 workers, then 4, then without the first, then 4 again."""
    job = Job(dist.HashStore(), min_workers=3, **options)
    founders = job.start(3)
    job.until_live(founders)
    newcomer, *_ = job.start(1, seed=1)
    job.until_live([*founders, newcomer])
    assert newcomer.first > 0
    assert newcomer.momentum is not None, "the state of the optimizer came from the donor"
    founders[0].is_killed.set()
    job.until_live([*founders[1:], newcomer])
    another, *_ = job.start(1, seed=2)
    job.until_live([*founders[1:], newcomer, another])
    alive = job.end()
    assert [step_of(worker.wrapper) for worker in alive] == [job.last] * 4
    for worker in founders[1:]:
        assert [len(change.members) for change in worker.changes] == [3, 4, 3, 4]
        assert list(worker.changes[2].left.values()) == ["its connection closed"]
        stats = worker.wrapper.comm_stats()
        assert (stats["live"], stats["joins"], stats["deaths"]) == (4, 2, 1)
    if options.get("push_sum", True):  # what a donor gives is made up for, and a death takes what it takes
        assert sum(worker.weight for worker in alive) == pytest.approx(4.0, abs=2.0)
    else:
        assert [worker.weight for worker in alive] == [1.0] * 4
    close(alive)


def test_weights_and_the_store_stay_as_they_are_whoever_comes_and_goes() -> None:
    """The optimizer steps on z w: weights that only fell would make the steps of z ever longer."""
    job = Job(dist.HashStore(), min_workers=2)
    workers = job.start(2)
    job.until_live(workers)
    for i in range(6):
        newcomer, *_ = job.start(1, seed=i)
        job.until_live([*workers, newcomer])
        workers[0].is_killed.set()
        workers = [workers[1], newcomer]
        job.until_live(workers)
    job.end()
    assert all(0.2 < worker.weight < 5.0 for worker in workers), [worker.weight for worker in workers]
    close(workers)
    assert job.store.num_keys() < 60  # type: ignore[union-attr] # 198 if none were deleted


def test_a_worker_that_dies_while_it_joins_does_not_delay_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has the state, and does not come to form the generation."""
    monkeypatch.setattr(limits, "FORMING", 0.5)
    job = Job(dist.HashStore(), min_workers=2)
    workers = job.start(2)
    job.until_live(workers)
    member = member_of(job.store, min_workers=2)
    wrapper = GossipDataParallel(model_of(), membership=member)
    member.track(optimizer=torch.optim.SGD(wrapper.parameters(), lr=0.01))
    receive_state(member)
    Joining(member.worker).load()
    member.job.store.update([methodcaller("mark_loaded", member.id, 0)])
    die(member)
    wrapper.close()
    workers[0].is_killed.set()
    job.until_live(workers[1:])
    newcomer, *_ = job.start(1)
    job.until_live([workers[1], newcomer])
    close(job.end())


def test_a_state_that_cannot_be_given_refuses_the_newcomer_only() -> None:
    class Odd:
        def state_dict(self) -> dict[str, Any]:
            return {"seen": {1, 2}}

        def load_state_dict(self, state: dict[str, Any]) -> None: ...

    job = Job(dist.HashStore(), min_workers=2)
    workers = job.start(2)
    job.until_live(workers)
    for worker in workers:
        assert worker.membership is not None
        worker.membership.track(odd=Odd())
    other = member_of(job.store, min_workers=2)
    wrapper = GossipDataParallel(model_of(), membership=other)
    with pytest.raises(ConnectionError, match=r"cannot give the state .* got a set in state\['odd'\]\['seen'\]"):
        other.join()
    wrapper.close()
    assert len(job.end()) == 2
    close(workers)


def test_steps_are_those_of_the_job() -> None:
    store = dist.HashStore()
    member = member_of(store, min_workers=1)
    wrapper = GossipDataParallel(model_of(), membership=member)
    seen = []
    for step in member.steps(3):
        wrapper(torch.ones(4, 4)).sum().backward()
        seen.append((step, step_of(wrapper)))
    assert seen == [(0, 1), (1, 2), (2, 3)]
    with pytest.raises(RuntimeError, match="got no training forward in step 3, expected one"):
        list(member.steps(5))
    wrapper.close()


def test_all_but_one_may_die() -> None:
    job = Job(dist.HashStore(), min_workers=3)
    workers = job.start(3)
    job.until_live(workers)
    for worker in workers[:2]:
        worker.is_killed.set()
    job.until_live(workers[2:])
    (last,) = job.end()
    assert last.membership.world_size == 1  # type: ignore[union-attr]
    close([last])


def test_a_worker_that_was_cut_off_joins_again_by_itself() -> None:
    """Its heartbeats end while it stands still, as when a process is stopped; the others go on without it."""
    job = Job(dist.HashStore(), min_workers=3)
    workers = job.start(3)
    job.until_live(workers)
    stopped, *others = workers
    stopped.is_paused.set()
    for worker in (stopped, *others):
        assert worker.membership is not None
        beats = worker.membership.worker.liveness
        assert beats is not None
        if worker is stopped:
            beats.close()
        else:  # the others go on to allow each other more
            beats._peers[stopped.membership.id].gaps.clear()  # type: ignore[union-attr]
            worker.membership.worker.generations.on_silent(stopped.membership.id, 9.0)  # type: ignore[union-attr]
    job.until_live(others)
    stopped.is_paused.clear()
    stopped.may_go_on.set()
    job.until_live(workers)
    alive = job.end()
    assert len(alive) == 3
    assert len({worker.membership.number for worker in alive if worker.membership is not None}) == 3
    close(alive)


def test_the_store_may_go_and_come_back_empty() -> None:
    server = serve()
    port = server.port
    job = Job(f"127.0.0.1:{port}", min_workers=3)
    workers = job.start(3)
    job.until_live(workers)
    del server
    job.until(
        lambda: not any(w.membership.job.store.is_connected for w in workers if w.membership), "the store has gone"
    )
    steps = [worker.step for worker in workers]
    workers[0].is_killed.set()
    job.until(lambda: all(w.step > s + 20 for w, s in zip(workers[1:], steps[1:], strict=True)), "training goes on")
    server = serve(port)
    job.until_live(workers[1:])
    newcomer, *_ = job.start(1)
    job.until_live([*workers[1:], newcomer])
    close(job.end())
    del server


def test_another_model_is_refused_and_the_job_goes_on() -> None:
    job = Job(dist.HashStore(), min_workers=2)
    workers = job.start(2)
    job.until_live(workers)
    other = member_of(job.store, min_workers=2)
    with pytest.raises(ValueError, match=r"refused this worker, .* model: got 'Linear with 5 .* expected 'Sequential"):
        GossipDataParallel(nn.Linear(4, 1), membership=other)
    with mock.patch.object(log, "warning") as warning:
        other.worker.turn()  # the roster has no entry of it any more
    assert not warning.called
    assert not other.worker.unsent, "a refused worker does not come again"
    assert len(job.end()) == 2
    close(workers)


def test_averages_are_over_living_workers() -> None:
    job = Job(dist.HashStore(), min_workers=3)
    workers = job.start(3)
    job.until_live(workers)
    workers[1].is_killed.set()
    alive = [workers[0], workers[2]]
    job.until_live(alive)
    job.end()
    found: dict[int, tuple[float, torch.Tensor]] = {}

    def average(k: int) -> None:
        wrapper = alive[k].wrapper
        assert wrapper is not None
        distance = wrapper.consensus_distance()
        wrapper.average_()
        found[k] = distance, local_of(wrapper).buffer.vector.raw.clone()

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(average, range(2)))
    assert found[0][0] == found[1][0] < 1.0
    assert torch.equal(found[0][1], found[1][1])
    assert [worker.weight for worker in alive] == [1.0, 1.0]
    close(alive)


def test_too_few_workers_is_an_error_with_their_number() -> None:
    membership = Membership(dist.HashStore(), min_workers=3, timeout=0.5)
    with pytest.raises(TimeoutError, match=r"got 1 workers, expected min_workers=3; start the others"):
        GossipDataParallel(model_of(), membership=membership)


def test_founders_that_ask_for_more_workers_are_heeded(caplog: pytest.LogCaptureFixture) -> None:
    job = Job(dist.HashStore(), min_workers=2)
    (first,) = job.start(1)
    job.until(
        lambda: first.membership is not None and len(first.membership.worker.roster.founders) == 1, "the first came"
    )
    other = Membership(job.store, min_workers=3, timeout=1.5)
    with pytest.raises(TimeoutError, match="expected min_workers=3"):
        GossipDataParallel(model_of(), membership=other)
    job.until(lambda: "got min_workers=2, and 3 of another worker" in caplog.text, "the other one is told")
    job.until_live([first, *job.start(1)])  # a worker that has gone asks for no other any more
    close(job.end())


def test_one_membership_is_for_one_wrapper() -> None:
    membership = Membership(dist.HashStore(), min_workers=1, timeout=timedelta(seconds=SECONDS))
    wrapper = GossipDataParallel(
        model_of(), membership=membership, algorithm=PushSum(), graph=lambda n: BaseGraph(n, 1)
    )
    assert (membership.rank, membership.world_size, membership.join()) == (0, 1, 0)
    with pytest.raises(ValueError, match="got membership of job 'job' in a second wrapper, expected one wrapper"):
        GossipDataParallel(model_of(), membership=membership)
    with pytest.raises(TypeError, match="got sampler of type int, expected an object with state_dict"):
        membership.track(sampler=3)
    membership.leave()
    assert list(membership.steps(3)) == []
    wrapper.close()
    with pytest.raises(RuntimeError, match="got join\\(\\) of a membership that is closed"):
        membership.join()


def test_a_membership_without_a_wrapper_has_no_place() -> None:
    membership = Membership(dist.HashStore(), min_workers=1)
    with pytest.raises(RuntimeError, match="has no place in the job yet"):
        membership.rank  # noqa: B018
    with pytest.raises(RuntimeError, match="without a wrapper"):
        membership.join()
    membership.close()


def test_one_line_of_the_log_names_the_lost_worker_and_the_reason(caplog: pytest.LogCaptureFixture) -> None:
    job = Job(dist.HashStore(), min_workers=2)
    with caplog.at_level(logging.WARNING, logger="gossip_modules.membership"):
        workers = job.start(2)
        job.until_live(workers)
        number = workers[1].membership.number  # type: ignore[union-attr]
        workers[1].is_killed.set()
        job.until_live(workers[:1])
        close(job.end())
        assert log.flush(SECONDS)
    lines = [record.getMessage() for record in caplog.records if "generation" in record.getMessage()]
    assert any(f"worker {number} left (its connection closed)" in line for line in lines), lines


def test_a_copy_is_a_snapshot_and_a_state_fits_any_worker() -> None:
    store = dist.HashStore()
    wrapper, x = GossipDataParallel(model_of(), membership=member_of(store, min_workers=1)), torch.ones(4, 4)
    wrapper(x).sum().backward()
    copied = copy.deepcopy(wrapper)
    with pytest.warns(UserWarning, match="got a training forward in a copy"):
        copied(x)
    state = wrapper.state_dict()
    wrapper.close()
    saved = state._metadata[""]["gossip_state"]
    saved.update(rank=3, world_size=4)
    again = GossipDataParallel(model_of(1), membership=member_of(store, min_workers=1))
    again.load_state_dict(state)
    assert step_of(again) == 1
    for name, value in again.module.state_dict().items():
        assert torch.equal(value, wrapper.module.state_dict()[name])
    with pytest.raises(ValueError, match="got a wrapper with a membership inside Join, expected none"):
        again.join_hook()
    again.close()
