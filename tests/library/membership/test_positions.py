"""All members of a generation begin it at one training step, with one number of rounds."""

from __future__ import annotations

import random
import threading
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn

import gossip_modules as gm
from gossip_modules.engine.engine import Engine
from gossip_modules.engine.gradients import GradientEngine
from gossip_modules.membership.donor import Donor
from gossip_modules.membership.view import Change
from tests.harness.progress import local_of
from tests.library.membership import test_membership
from tests.library.membership.test_membership import Job, Worker, close, member_of

Wrap = Callable[..., Any]

IN_LOCKSTEP: dict[str, tuple[Wrap, dict[str, Any]]] = {
    "SGP": (gm.GossipDataParallel, {"schedule": gm.Schedule(3, average_every=2), "push_sum": False}),
    "Overlap SGP": (gm.GossipDataParallel, {"overlap": True}),
    "Streaming DiLoCo": (gm.GossipDataParallel, {"algorithm": gm.StreamingDiLoCo(8, delay=2, fragments=2)}),
    "WAGMA": (gm.GroupAverageDataParallel, {}),
    "AllReduce": (gm.AllReduceDataParallel, {}),
}
WRAPPERS = {**IN_LOCKSTEP, "AD-PSGD": (gm.BilatGossipDataParallel, {})}


@pytest.mark.parametrize("name", WRAPPERS)
def test_a_position_follows_from_the_step(name: str) -> None:
    """A worker that counts steps forward and back has the step and the rounds of one that went there directly."""
    wrap, options = WRAPPERS[name]
    membership = member_of(dist.HashStore(), min_workers=1)
    wrapper = wrap(nn.Linear(2, 2), membership=membership, **options)
    participant, engine = membership.job.participant, local_of(wrapper).engine
    positions = [(engine.step, engine.t)]
    for _ in range(40):
        participant.advance(1)
        positions.append((engine.step, engine.t))
    assert [step for step, _ in positions] == [*range(41)]
    rng = random.Random(name)
    for step in [rng.randrange(41) for _ in range(20)]:
        participant.go_to(step)
        assert (engine.step, engine.t) == positions[step]
    wrapper.close()


def note_positions(worker: Worker, seen: dict[int, list[tuple[int, int]]]) -> Callable[[Change], None]:
    def note(change: Change) -> None:
        assert worker.membership is not None
        engine: Engine = worker.membership.job.participant.local.engine
        counts_averages = isinstance(engine, GradientEngine)  # which are compared in the first round
        seen[change.generation].append((engine.step, 0 if counts_averages else engine.t))

    return note


@pytest.mark.parametrize("lead", [0, 5], ids=["donors in step", "donors ahead"])
@pytest.mark.parametrize("name", IN_LOCKSTEP)
def test_members_of_one_generation_have_one_position(name: str, lead: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random joins and deaths. A donor that is ahead of the others was left out of the generation that comes."""
    copy = Donor.copy

    def copy_ahead(donor: Donor) -> None:
        generations, participant = donor.worker.generations, donor.job.participant
        generations.clock += lead
        participant.local.engine.advance(lead)
        copy(donor)
        generations.clock -= lead
        participant.local.engine.advance(-lead)

    monkeypatch.setattr(Donor, "copy", copy_ahead)
    wrap, options = IN_LOCKSTEP[name]
    seen: dict[int, list[tuple[int, int]]] = defaultdict(list)
    run = Worker.train

    def train(worker: Worker) -> None:
        worker.changes = Noting(note_positions(worker, seen))  # type: ignore[assignment]
        run(worker)

    monkeypatch.setattr(Worker, "train", train)
    monkeypatch.setattr(test_membership, "step_of", lambda wrapper: local_of(wrapper).engine.step)
    job = Job(dist.HashStore(), min_workers=2, wrap=wrap, **options)
    rng, alive = random.Random(f"{name} {lead}"), job.start(2)
    job.until_live(alive)
    for _ in range(2):
        if len(alive) > 1 and rng.random() < 0.4:
            dying = alive.pop(rng.randrange(len(alive)))
            dying.is_killed.set()
        alive += job.start(1, seed=1)
        job.until_live(alive)
    final = {(local_of(worker.wrapper).engine.step, local_of(worker.wrapper).engine.t) for worker in job.end()}
    assert len(final) == 1
    assert len(seen) > 2
    for generation, positions in seen.items():
        assert len({*positions}) == 1, f"generation {generation}: {positions}"
    close(alive)


class Noting:
    """Appends by a call, with a lock."""

    def __init__(self, act: Callable[[Change], None]) -> None:
        self._act, self._lock = act, threading.Lock()

    def append(self, change: Change) -> None:
        with self._lock:
            self._act(change)
