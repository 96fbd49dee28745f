"""Drawn faults of the store, deaths, restarts and slow workers: the laws of each close hold whatever happens."""

from __future__ import annotations

import os
import random
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from gossip_modules import DiLoCo, LocalSGD, NoLoCo, SparseLoCo, StreamingDiLoCo, TopK
from gossip_modules.extend import Algorithm
from gossip_modules.mailbox.clock import Clock
from gossip_modules.mailbox.medium import Medium
from gossip_modules.mailbox.rounds import Close
from gossip_modules.testing.storm import StormyMedium
from tests.harness.mailbox import MailRun, MailWorker, in_memory, steps
from tests.harness.quadratics import Point, plain_sgd

H, NUM_STEPS = 3, 36
GRACE, POLL, TRY = 6.0, 0.5, 0.5  # TRY: the longest delay of a try
NUM_DRAWS = int(os.environ.get("GOSSIP_STORMS", "2"))
"""The number of storms for each method."""
METHODS: Mapping[str, Algorithm] = {
    "diloco": DiLoCo(H),
    "diloco-tokens": DiLoCo(H, weighted_by="tokens"),
    "streaming": StreamingDiLoCo(H, delay=1, arrival="carry", fragments=1),
    "sparseloco": SparseLoCo(H, compressor=TopK(1.0)),
    "localsgd": LocalSGD(H),
    "noloco": NoLoCo(H),
}


class Storm:
    """A run with drawn faults.

    Args:
        algorithm: its method.
        seed: draws all faults.
    """

    def __init__(self, algorithm: Algorithm, seed: int) -> None:
        self.algorithm, self.draw = algorithm, random.Random(seed)
        self.has_anchor = algorithm.has_equal_memory
        begin = self.draw.uniform(5.0, 30.0)
        self.outage = [(begin, begin + self.draw.uniform(0.0, 20.0))]
        self.anchors: dict[int, dict[int, Tensor]] = {}  # by the number of rounds in the memory: by worker
        self.waits: list[float] = []
        self.run = MailRun(
            opens=self.open,
            seed=seed,
            key=b"key of these tests",
            grace=GRACE,
            poll=POLL,
            quorum=2,
            interval=3.0,
            timeout=500.0,
        )
        self.speeds = [self.draw.choice([0.3, 1.0, 1.0, 4.0]) for _ in range(4)]
        self.deaths = {self.draw.randrange(4): self.draw.randrange(5, NUM_STEPS)} if self.draw.random() < 0.7 else {}

    def open(self, name: str, *, clock: Clock, key: bytes | None) -> Medium:
        faults = {kind: self.draw.choice([0.0, 0.05, 0.2]) for kind in ("loss", "stale", "unavailable")}
        inner = in_memory(name, clock=clock, key=key)
        return StormyMedium(inner, self.draw.randrange(1 << 30), delay=TRY, outage=self.outage, **faults)

    def work(self, worker: MailWorker) -> Tensor:
        point, generations = Point(), list[int]()
        model = worker.wrap(point, algorithm=self.algorithm)
        i = worker.number % 4

        def before(step: int) -> None:
            worker.clock.sleep(self.speeds[i])
            if self.deaths.get(worker.number) == step:
                self.run.start(self.work, min_workers=1)
                worker.die()

        def loss(step: int) -> Tensor:
            began = worker.clock.now()
            value: Tensor = model(i)
            if generations:  # a worker that begins takes over the rounds since the saved model, however long it takes
                self.waits.append(worker.clock.now() - began)
            generations.append(worker.membership.generation)
            if self.algorithm.counts_tokens:
                model.count_tokens(1 + i)
            if self.has_anchor:
                known = self.anchors.setdefault(worker.drivers[0].next.get("average", 0), {})
                known[worker.number] = worker.anchor()
            return value

        steps(worker, plain_sgd(model.parameters()), loss, NUM_STEPS, before=before)
        assert generations == sorted(generations)
        return point.x.detach().clone()


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("seed", range(NUM_DRAWS))
def test_the_laws_hold_in_a_storm(name: str, seed: int) -> None:
    storm = Storm(METHODS[name], seed)
    for _ in range(4):
        storm.run.start(storm.work, min_workers=4)
    results = [x for x in storm.run.end() if x is not None]
    assert len(results) == 4
    assert torch.stack(results).isfinite().all()

    for number, known in storm.anchors.items():
        first = next(iter(known.values()))
        assert all(torch.equal(first, anchor) for anchor in known.values()), f"anchors after {number} rounds: {known}"

    longest = max(storm.waits)
    assert longest <= GRACE + 2 * POLL + 1e-9, f"a step waited {longest:g} s"

    objects: dict[str, Any] = {}
    medium = storm.run.workers[0].medium
    for path in objects_of(storm):
        data = medium.seal.open(path, raw_of(storm, path))
        assert data is not None, path
        objects[path] = data
    closes = [path for path in objects if path.endswith("/close")]
    assert closes
    for path in closes:
        close = Close.read(int(path.split("/")[2]), objects[path])
        assert list(close.members) == sorted(set(close.members))
        assert close.by in close.members


def inner_of(storm: Storm) -> Medium:
    stormy = storm.run.workers[0].medium.inner
    assert isinstance(stormy, StormyMedium)
    return stormy.inner


def objects_of(storm: Storm) -> list[str]:
    return sorted(inner_of(storm)._list(""))


def raw_of(storm: Storm, path: str) -> bytes:
    data = inner_of(storm)._get(path, 1 << 30)
    assert data is not None
    return bytes(data)
