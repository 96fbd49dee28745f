"""Outer steps of workers that die and come: one anchor for all who live, and the step of torch.optim on their drift."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from gossip_modules import (
    DiLoCo,
    EagerDiLoCo,
    GASLoC,
    GossipDataParallel,
    NoLoCo,
    Schedule,
    SlowMo,
    SparseLoCo,
    StreamingDiLoCo,
    TopK,
)
from gossip_modules.engine.lockstep import SyncEngine
from gossip_modules.extend import OuterMethod, PushPull
from gossip_modules.flat.vector import FlatVector
from gossip_modules.membership.links import LinkTransport
from gossip_modules.mixing_manager import MixingManager
from gossip_modules.rounds.driver import Driver
from gossip_modules.rounds.memory import Memory
from gossip_modules.rounds.requests import Mail, RoundLost, Vectors
from gossip_modules.rounds.rounds import mixer_of
from gossip_modules.rounds.vector import Vector
from gossip_modules.testing import Chaos, Join, Kill
from gossip_modules.testing import Worker as ChaosWorker
from tests.harness.progress import engine_of
from tests.harness.ranks import TIMEOUT
from tests.library.membership.scripted import Ended, ScriptedWorker, run_workers

SIZE, H = 200, 4
SECONDS = 20.0
START = torch.linspace(-1, 1, SIZE, dtype=torch.float64)
GENERATIONS = [(0, (0, 1, 2, 3)), (11, (0, 2, 3)), (18, (0, 2, 3, 4))]  # first step, members; 1 dies at step 8
SNAPSHOT, LAST = 15, 27
"""The step at which worker 0 gives its state to worker 4: an outer step follows before that one begins."""


def members_at(step: int) -> tuple[int, ...]:
    return next(members for first, members in reversed(GENERATIONS) if first <= step)


def inner(x: Tensor, name: int) -> Tensor:
    """A step of SGD on a parabola of the worker's own."""
    return x - 0.05 * (1 + name) * (x - name)


def drivers_of(engine: Any) -> list[Driver]:
    return list(engine.mixer.drivers)


def tensors_of(memory: Memory) -> list[Tensor]:
    """The anchor, and all that steps it; not what a rank keeps for itself."""
    state = memory.state_dict(joins=True)
    vectors = state.get("vectors", {})
    found = [x for name in sorted(vectors) for x in vectors[name]]
    for optimizer in state.get("optimizers", {}).values():
        for values in optimizer["state"].values():
            found += [value for value in values.values() if isinstance(value, Tensor)]
    return [x.clone() for x in found]


def state_of(engine: Any) -> list[Tensor]:
    return [x for driver in drivers_of(engine) for x in tensors_of(driver.memory)]


class Notes:
    """What each outer step has sent and got, by its fragment and step."""

    def __init__(self, engine: SyncEngine) -> None:
        self.drifts: dict[tuple[int, int], Tensor] = {}
        self.applied: dict[tuple[int, int], Tensor] = {}
        for p, driver in enumerate(drivers_of(engine)):
            self._watch(p, driver)

    def _watch(self, p: int, driver: Driver) -> None:
        mix = driver._mix

        def note(x: Any, v: Any, mixer: Any) -> None:
            key, before = (p, driver.open_round.k if driver.open_round else 0), x.parts[0].clone()
            mix(x, v, mixer)
            if mixer is driver.averager:
                self.drifts[key] = before
                if not mixer.has_failed:
                    assert key not in self.applied
                    self.applied[key] = x.parts[0].clone()

        driver._mix = note  # type: ignore[method-assign]


class Worker(ScriptedWorker):
    """A vector, and an engine of outer steps on it."""

    def __init__(self, name: int, store: dist.Store, outer: OuterMethod) -> None:
        super().__init__(name, store)
        self.outer, self.x = outer, FlatVector.over(START.clone())
        self.seen: dict[int, list[Tensor]] = {}  # anchors and optimizers after the round of each step
        self.models: dict[int, Tensor] = {}
        self.engine: SyncEngine | None = None
        self.notes: Notes | None = None
        self.loaded: tuple[dict[str, Any], Tensor] | None = None
        self.sick_at: tuple[int, ...] = ()  # steps
        self.schedule = Schedule()

    def turn_to(self, mixing: MixingManager, transport: LinkTransport, *, is_first: bool) -> None:
        if is_first:
            gossiper: Any = mixer_of(self.outer, PushPull())
            gossiper.bind(mixing, transport)
            self.engine = SyncEngine(gossiper, self.schedule)
            self.notes = Notes(self.engine)
            if self.loaded is not None:
                state, model = self.loaded
                self.engine.load_state_dict(state)
                self.engine.advance(GENERATIONS[-1][0] - SNAPSHOT)
                self.x.segments[0].copy_(model)
                self.engine.rebind(mixing, transport, self.x)
        else:
            assert self.engine is not None
            self.engine.flush(self.x)
            self.engine.rebind(mixing, transport, self.x)

    def train(self, first: int, last: int) -> None:
        assert self.engine is not None
        x = self.x.segments[0]
        for step in range(first, last):
            assert self.engine.step == step
            if step in self.sick_at:
                self.raise_and_go_on()
            self.engine.round(self.x)
            self.seen[step], self.models[step] = state_of(self.engine), x.clone()
            x.copy_(inner(x, self.name))

    def raise_and_go_on(self) -> None:
        """A round with a model that is not finite, as by a script that then takes its model back."""
        assert self.engine is not None
        healthy, step = self.x.segments[0].clone(), self.engine.step
        self.x.segments[0][-1] = float("nan")
        with pytest.raises(FloatingPointError, match="its own model holds infinities or NaN"):
            self.engine.round(self.x)
        self.engine.step = step  # as a wrapper does
        self.x.segments[0].copy_(healthy)

    def flush(self) -> None:
        assert self.engine is not None
        self.engine.flush(self.x)

    @property
    def drifts(self) -> dict[tuple[int, int], Tensor]:
        return {} if self.notes is None else self.notes.drifts

    @property
    def applied(self) -> dict[tuple[int, int], Tensor]:
        return {} if self.notes is None else self.notes.applied

    def end(self) -> None:
        if self.engine is not None:
            self.engine.close()
        super().end()


# How worker 1 dies in the outer step at step 8.


def before(worker: Worker) -> None:
    """In the round before."""


def within(worker: Worker) -> None:
    """It has come to the average, and has no result."""
    assert worker.transport is not None
    transport = worker.transport
    wait = transport._whole._wait_for_all

    def wait_and_end(*arguments: Any) -> None:
        wait(*arguments)
        transport._break_whole()
        raise Ended

    transport._whole._wait_for_all = wait_and_end  # type: ignore
    worker.train(8, 9)
    worker.flush()  # raises what the thread has


def at_the_end(worker: Worker) -> None:
    """All have the result, and all but worker 3 are told so: see `deaf`."""
    worker.train(8, 9)
    worker.flush()


def deaf(worker: Worker) -> None:
    """This worker does not hear that the others have the result of the outer step at step 8."""
    assert worker.transport is not None
    transport, barrier = worker.transport, worker.transport.barrier

    def meet_and_fail(*, what: str) -> None:
        barrier(what=what)
        if what.startswith("end of the global average"):
            transport._break_whole()
            raise ConnectionError("it died")

    transport.barrier = meet_and_fail  # type: ignore[method-assign]


def four_three_four(
    make: Callable[[], OuterMethod],
    die: Callable[[Worker], None],
    *,
    sick_at: tuple[int, ...] = (),
    schedule: Schedule = Schedule(),  # noqa: B008
) -> list[Worker]:
    """The workers of `GENERATIONS`, of which worker 2 is sick at some steps."""
    given: queue.Queue[tuple[dict[str, Any], Tensor]] = queue.Queue()
    moment = threading.Barrier(4)  # nobody hears of a death before it comes to the outer step

    def survivor(worker: Worker) -> None:
        worker.begin(1, GENERATIONS[0][1])
        worker.train(0, 8)
        worker.flush()  # the round in flight arrives, and no worker dies in it
        moment.wait(TIMEOUT.total_seconds())
        if die is at_the_end and worker.name == 3:
            deaf(worker)
        worker.train(8, 11)
        worker.begin(2, GENERATIONS[1][1])
        worker.train(11, SNAPSHOT)
        assert worker.engine is not None
        if worker.name == 0:
            worker.flush()
            given.put((worker.engine.state_dict(joins=True), worker.x.segments[0].clone()))
        worker.train(SNAPSHOT, 18)
        worker.begin(3, GENERATIONS[2][1])
        worker.train(18, LAST)
        worker.flush()

    def dying(worker: Worker) -> None:
        worker.begin(1, GENERATIONS[0][1])
        worker.train(0, 8)
        worker.flush()  # the round in flight arrives, and no worker dies in it
        moment.wait(TIMEOUT.total_seconds())
        die(worker)
        raise Ended

    def newcomer(worker: Worker) -> None:
        worker.loaded = given.get(timeout=2 * TIMEOUT.total_seconds())
        worker.begin(3, GENERATIONS[2][1])
        worker.train(18, LAST)
        worker.flush()

    bodies = [survivor, dying, survivor, survivor, newcomer]

    def make_worker(name: int, store: dist.Store) -> Worker:
        worker = Worker(name, store, make())
        worker.sick_at, worker.schedule = (sick_at if name == 2 else ()), schedule
        return worker

    return run_workers(bodies, make_worker)


def heavy() -> DiLoCo:
    return DiLoCo(H, optimizer=lambda parameters: torch.optim.Adam(parameters, lr=0.3))


def optimizer_of(outer: OuterMethod, phi: Tensor) -> torch.optim.Optimizer:
    """An optimizer of torch's that does the same."""
    if isinstance(outer, DiLoCo):
        return outer.make_optimizer([phi])
    assert isinstance(outer, SlowMo)
    return torch.optim.SGD([phi], lr=outer.lr, momentum=outer.momentum)


def oracle(outer: OuterMethod, die: Callable[[Worker], None]) -> list[tuple[Tensor, dict[int, Tensor]]]:
    """phi, and x of all who live, after the round of each step: torch.optim on the mean drift of those who live."""
    phi, x = START.clone(), {name: START.clone() for name in range(4)}
    optimizer = optimizer_of(outer, phi)
    seen, has_failed = [], False
    for step in range(LAST):
        members = members_at(step)
        if step == SNAPSHOT:
            x[4] = x[0].clone()
        if step == 8 and die is not at_the_end:
            has_failed = True
            del x[1]
        is_due = step > 0 and step % H == 0 and not has_failed
        if step == 11 and has_failed:
            is_due, has_failed = True, False
        if is_due:
            live = [name for name in x if name in members]
            phi.grad = torch.stack([phi - x[name] for name in live]).mean(0)
            optimizer.step()
            for name in live:
                if not (step == 8 and name == 3):  # the deaf one
                    x[name] = phi.clone()
        if step == 11 and die is at_the_end:
            x[3] = phi.clone()
        if step == 18:
            x[4] = phi.clone()  # an outer step was taken since the snapshot
        seen.append((phi.clone(), {name: value.clone() for name, value in x.items()}))
        if step == 8:
            x.pop(1, None)
        x = {name: inner(value, name) for name, value in x.items() if name in members}
        x |= {4: seen[-1][1][4]} if SNAPSHOT <= step < 18 else {}
    return seen


@pytest.mark.parametrize(
    ("make", "die", "sick_at"),
    [
        pytest.param(lambda: DiLoCo(H), before, (), id="DiLoCo-before"),
        pytest.param(lambda: DiLoCo(H), within, (), id="DiLoCo-within"),
        # At step 11 it takes the outer step again that has failed at step 8.
        pytest.param(lambda: DiLoCo(H), before, (4, 11, 12), id="DiLoCo-sick"),
        pytest.param(heavy, at_the_end, (), id="Adam-at-the-end"),
        pytest.param(lambda: SlowMo(H, momentum=0.7), within, (), id="SlowMo-within"),
    ],
)
def test_outer_steps_equal_torch_optim_on_the_mean_drift_of_living_workers(
    make: Callable[[], OuterMethod], die: Callable[[Worker], None], sick_at: tuple[int, ...]
) -> None:
    workers, expected = four_three_four(make, die, sick_at=sick_at), oracle(make(), die)
    for step, (phi, models) in enumerate(expected):
        live = [worker for worker in workers if step in worker.seen]
        assert len(live) >= 3
        for worker in live:
            if die is at_the_end and worker.name == 3 and 8 <= step < 11:
                continue
            torch.testing.assert_close(worker.seen[step][0], phi, rtol=0, atol=1e-12)  # "phi" is the first name
            torch.testing.assert_close(worker.models[step], models[worker.name], rtol=0, atol=1e-12)
            assert all(map(torch.equal, worker.seen[step], workers[0].seen[step])), (worker.name, step)


def streaming() -> StreamingDiLoCo:
    return StreamingDiLoCo(H, fragments=2, delay=1)


def check_drifts(workers: list[Worker], die: Callable[[Worker], None]) -> None:
    """Each outer step was applied once on all, with the mean drift of those who lived then."""
    for worker in workers:
        for (p, began), mean in worker.applied.items():
            last = 8 if die is at_the_end else 7  # with worker 1
            names = [k for k in members_at(began) if k != 1 or began <= last]
            drifts = torch.stack([workers[k].drifts[p, began] for k in names])
            torch.testing.assert_close(mean, drifts.mean(0), rtol=0, atol=1e-12)
    every = {(p, k) for k in range(LAST) for p in workers[0].outer.starting_at(k)}
    assert len(every) >= 6
    assert set(workers[0].applied) == set(workers[2].applied) == every


@pytest.mark.parametrize("die", [within, at_the_end])
def test_fragments_that_travel_under_training_have_one_anchor(die: Callable[[Worker], None]) -> None:
    workers = four_three_four(streaming, die)
    check_drifts(workers, die)
    for worker in workers[2:]:
        for step in set(worker.seen) & set(workers[0].seen):
            is_flushed = SNAPSHOT <= step < 18 or (die is at_the_end and 8 <= step < 11)  # worker 0 alone; the deaf one
            if not is_flushed:
                assert all(map(torch.equal, worker.seen[step], workers[0].seen[step])), (worker.name, step)


@pytest.mark.parametrize("die", [within, at_the_end])
def test_fragments_of_eager_updates_go_on_after_an_average_that_is_lost(die: Callable[[Worker], None]) -> None:
    """Their drifts of this average are in later ones, so that anchors differ by drifts in flight only."""
    workers = four_three_four(lambda: EagerDiLoCo(H, fragments=2, lr=1.0, momentum=0.0), die)
    for worker in workers[2:]:
        assert worker.x.segments[0].isfinite().all()
        assert max(worker.seen) == LAST - 1


@pytest.mark.parametrize("die", [within, at_the_end])
def test_an_average_at_the_beginning_that_some_have_makes_one_anchor(die: Callable[[Worker], None]) -> None:
    """The last average of the beginning is at step 8, in which worker 1 dies; the next generation is at step 11."""
    workers = four_three_four(lambda: DiLoCo(H), die, schedule=Schedule(average_until=8))
    for worker in workers[2:]:
        for step in range(11 if worker.name < 4 else 18, LAST):
            assert all(map(torch.equal, worker.seen[step], workers[0].seen[step])), (worker.name, step)


def training(outer: OuterMethod, seen: dict[int, Any], last: list[int]) -> Callable[[ChaosWorker], None]:
    """A body for `Chaos`: trains until the worker that joins has taken three outer steps."""

    def body(worker: ChaosWorker) -> None:
        membership = worker.membership(min_workers=3, timeout=60, min_deadline=20.0)
        model = nn.Linear(200, 1, dtype=torch.float64)
        wrapper = GossipDataParallel(model, membership=membership, algorithm=outer, push_sum=False)
        optimizer = torch.optim.SGD(wrapper.parameters(), lr=0.001)
        membership.track(optimizer=optimizer)
        first, engine, own = membership.join(), engine_of(wrapper), seen.setdefault(worker.rank, {})
        for step in membership.steps(1 << 30):
            if worker.rank == 3 and step == first + 3 * H:
                last.append(step + 4 * H)  # nobody is two outer steps ahead of it
            if last and step >= last[0]:
                break
            loss = (wrapper(torch.ones(1, 200, dtype=torch.float64)) - worker.rank).square().sum()
            own[step] = membership.members, [driver.stamps.taken for driver in drivers_of(engine)], state_of(engine)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            time.sleep(0.001)
        wrapper.close()

    return body


@pytest.mark.parametrize(
    "outer",
    [
        replace(streaming(), own_weight=None, arrival="adaptive"),
        *(SlowMo(H, gossip_every=1), NoLoCo(H), SparseLoCo(H, compressor=TopK(0.3))),
    ],
)
def test_no_survivor_raises_and_anchors_are_one_after_a_death_and_a_join(outer: OuterMethod) -> None:
    seen: dict[int, Any] = {}
    Chaos([Kill(step=9, rank=0), Join(step=14)]).run(training(outer, seen, []), 3)
    newcomer = seen[3]
    assert len(newcomer) >= 3 * H
    assert all(len(members) == 3 for members, *_ in newcomer.values())
    num_tensors = 1 if isinstance(outer, SparseLoCo) else 2  # an anchor, and its momentum
    assert len(newcomer[max(newcomer)][2]) >= num_tensors
    if outer.averages_exactly:
        num_compared = 0
        for rank in (1, 2):
            for step, (members, stamps, anchors) in newcomer.items():
                theirs = seen[rank][step]
                if (members, stamps) == theirs[:2]:
                    assert all(map(torch.equal, anchors, theirs[2])), (rank, step)
                    num_compared += 1
        assert num_compared >= 4 * H


class AverageOf:
    """Rounds of n ranks by hand: the average of each is there, or lost."""

    def __init__(self, outer: OuterMethod, n: int) -> None:
        self.outer, self.models = outer, [FlatVector.over(torch.zeros(4, dtype=torch.float64)) for _ in range(n)]
        self.memories = [Memory() for _ in range(n)]

    def round(self, drifts: Tensor, *, is_lost: bool) -> None:
        rounds = []
        for rank, (x, memory) in enumerate(zip(self.models, self.memories, strict=True)):
            vector = Vector.of(x)
            memory.fit(vector)
            v = Vectors(vector, Mail(), t=0, rank=rank, num_ranks=len(self.models))
            self.outer.begin(v, memory)
            x.segments[0].sub_(drifts[rank])
            rounds.append(self.outer.round(v, memory, 0))
        requests: list[Any] = [next(own) for own in rounds]
        mean = torch.stack([request.x.parts[0] for request in requests]).mean(0)
        for own, request in zip(rounds, requests, strict=True):
            request.x.parts[0].copy_(torch.full_like(mean, float("nan")) if is_lost else mean)
            with contextlib.suppress(StopIteration, RoundLost):
                own.throw(RoundLost()) if is_lost else own.send(None)


@pytest.mark.parametrize("lost", [(), (1,), (0, 1), (2,)])
def test_no_step_is_lost_with_an_average_of_eager_updates(lost: tuple[int, ...]) -> None:
    """With c = 1 and without momentum the anchor moves by all mean drifts, each once, on each rank."""
    torch.manual_seed(0)
    drifts = torch.randn(3, 3, 4, dtype=torch.float64)  # by round and rank
    by_hand = AverageOf(EagerDiLoCo(1, lr=1.0, momentum=0.0), 3)
    for k, own in enumerate(drifts):
        by_hand.round(own, is_lost=k in lost)
    for _ in range(2):  # for what is late
        by_hand.round(torch.zeros(3, 4, dtype=torch.float64), is_lost=False)
    for x in by_hand.models:
        torch.testing.assert_close(x.segments[0], -drifts.mean(1).sum(0), rtol=0, atol=1e-12)


def test_anchors_of_eager_updates_come_together_after_a_death_and_a_join() -> None:
    anchors: dict[int, Tensor] = {}
    last: list[int] = []

    def body(worker: ChaosWorker) -> None:
        membership = worker.membership(min_workers=3, timeout=60, min_deadline=20.0)
        model = nn.Linear(200, 1, dtype=torch.float64)
        outer = EagerDiLoCo(H, lr=1.0, momentum=0.0)
        wrapper = GossipDataParallel(model, membership=membership, algorithm=outer, push_sum=False)
        optimizer = torch.optim.SGD(wrapper.parameters(), lr=0.001)
        membership.track(optimizer=optimizer)
        first = membership.join()
        for step in membership.steps(1 << 30):
            if worker.rank == 3 and step == first + 3 * H:
                last.append(step + 2 * H)
            if last and step >= last[0]:
                optimizer.param_groups[0]["lr"] = 0.0
            if last and step >= last[0] + 4 * H:
                break
            optimizer.zero_grad()
            (wrapper(torch.ones(1, 200, dtype=torch.float64)) - worker.rank).square().sum().backward()
            optimizer.step()
            time.sleep(0.001)
        anchors[worker.rank] = state_of(engine_of(wrapper))[-1]
        wrapper.close()

    Chaos([Kill(step=9, rank=0), Join(step=14)]).run(body, 3)
    assert sorted(anchors) == [1, 2, 3]
    assert anchors[1].norm() > 0
    for rank in (2, 3):
        torch.testing.assert_close(anchors[rank], anchors[1], rtol=0, atol=1e-12)


class Loading:
    """What a worker that joins loads until the others have frozen a layer, and have taken outer steps since then."""

    def __init__(self, frozen_at: list[int], steps: dict[int, int], *, is_newcomer: bool) -> None:
        self.frozen_at, self.steps, self.is_newcomer = frozen_at, steps, is_newcomer

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert self.is_newcomer
        self.frozen_at.append(max(self.steps.values()) + 2 * H)  # nobody is an outer step and more ahead of another
        deadline = time.monotonic() + SECONDS
        while min(self.steps.values()) < self.frozen_at[0] + 2 * H:
            assert time.monotonic() < deadline, f"{self.steps}, and freeze at {self.frozen_at}"
            time.sleep(0.001)


@pytest.mark.filterwarnings("ignore:.*other tensors are trained than before")
@pytest.mark.parametrize(("outer", "options"), [(NoLoCo(H), {}), (GASLoC(H), {}), (DiLoCo(H), {"push_sum": False})])
def test_a_layer_may_be_frozen_while_a_worker_joins(outer: OuterMethod, options: dict[str, Any]) -> None:
    """Its donor gave the anchor before that: it begins anew when the others have done so long ago."""
    frozen_at: list[int] = []
    steps: dict[int, int] = {}
    last: list[int] = []
    deaths: dict[int, float] = {}

    def body(worker: ChaosWorker) -> None:
        membership = worker.membership(min_workers=2, timeout=SECONDS, min_deadline=SECONDS)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
        wrapper = GossipDataParallel(model, membership=membership, algorithm=outer, **options)
        optimizer = torch.optim.SGD(wrapper.parameters(), lr=0.001)
        membership.track(loading=Loading(frozen_at, steps, is_newcomer=worker.rank == 2))
        first = membership.join()
        for step in membership.steps(1 << 30):
            if not last:  # else somebody may have ended
                deaths[worker.rank] = wrapper.comm_stats()["deaths"]
            if worker.rank == 2 and step == first + 3 * H:
                last.append(step + 4 * H)
            if last and step >= last[0]:
                break
            if frozen_at and step >= frozen_at[0]:
                model[0].requires_grad_(False)
            steps[worker.rank] = step
            optimizer.zero_grad()
            wrapper(torch.ones(1, 4)).square().sum().backward()
            optimizer.step()
            time.sleep(0.001)
        wrapper.close()

    Chaos([Join(step=6)]).run(body, 2)
    assert deaths == {0: 0.0, 1: 0.0, 2: 0.0}
