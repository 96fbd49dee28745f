"""Mass of rounds under training at a death, when their messages were delivered and not applied: an exact account."""

from __future__ import annotations

import random
import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from gossip_modules import RingGraph
from gossip_modules.engine.lockstep import OverlapEngine
from gossip_modules.extend import PushPull, PushSum
from gossip_modules.flat.vector import FlatVector
from gossip_modules.graph_manager import NPeerDynamicDirectedExponentialGraph
from gossip_modules.membership.links import LinkTransport
from gossip_modules.mixing_manager import MetropolisHastingsMixing, UniformMixing
from gossip_modules.schedule import Schedule
from tests.harness.progress import flight_of
from tests.library.membership.test_links import Ended, run_links

SIZE, DIM, AFTER = 5, 301, 4
GOSSIPERS: dict[str, Any] = {
    "SGP": lambda: PushSum(),
    "SGP in chunks": lambda: PushSum(chunk_bytes=256),
    "SGP on a narrow wire": lambda: PushSum(wire_dtype=torch.bfloat16),
    "SGP on a wire of eight bits": lambda: PushSum(wire_dtype=torch.int8),
    "D-PSGD": lambda: PushPull(),
    "D-PSGD in chunks": lambda: PushPull(chunk_bytes=256),
}


def mass_of(x: FlatVector) -> Tensor:
    """The parameters and the push-sum weight."""
    return torch.cat([x.segments[0], x.push_sum_weight.double()]).clone()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", GOSSIPERS)
def test_survivors_and_the_dead_worker_together_hold_the_whole_mass(name: str, seed: int) -> None:
    """One worker dies with a round in flight that is complete on all workers.

    A survivor that learns of the death before it applies the round takes its share back, and leaves out the message of
    the dead worker. So if all do, their sum is as before. A survivor that has applied the round has given the share.
    """
    rng, is_weighted = random.Random(seed), name.startswith("SGP")
    dying, last = rng.randrange(SIZE), rng.randrange(1, 6)
    may_be_late = is_weighted and "wire" not in name and seed > 0
    knows = [not may_be_late or rng.random() < 0.5 for _ in range(SIZE)]
    graph: Any = NPeerDynamicDirectedExponentialGraph(SIZE) if is_weighted else RingGraph(SIZE, peers_per_itr=2)
    mixing: Any = (UniformMixing if is_weighted else MetropolisHastingsMixing)(graph)
    start = torch.linspace(-1, 1, DIM, dtype=torch.float64)
    sent: dict[int, Tensor] = {}  # by rank, in the last round of all
    known = threading.Barrier(SIZE)

    def body(transport: LinkTransport, barrier: threading.Barrier) -> list[Tensor]:
        rank, x = transport.rank, FlatVector.over(start * (1 + transport.rank))
        gossiper = GOSSIPERS[name]()
        gossiper.bind(mixing, transport)
        engine = OverlapEngine(gossiper, Schedule())
        for step in range(last):
            engine.round(x)
            if step == last - 1:
                sent[rank] = mass_of(x)
            x.segments[0].add_(0.1 * (1 + rank + step))
        flight_of(engine).future.result()
        update = mass_of(x) - sent[rank]
        barrier.wait()
        if rank == dying:
            known.wait()
            engine.close()
            raise Ended
        if not knows[rank]:
            engine.flush(x)
        known.wait()
        if dying in {*transport._links}:
            transport.break_link(dying)
        engine.flush(x)
        masses = [mass_of(x) - update]
        for _ in range(AFTER):
            engine.round(x)
            engine.flush(x)
            masses.append(mass_of(x) - update)
        engine.close()
        return masses

    results, _ = run_links(SIZE, mixing, body)
    held = sent[dying].clone()
    for rank in set(range(SIZE)) - {dying}:
        if not knows[rank]:
            held += mixing.weights(dying, last - 1).inp.get(rank, 0.0) * sent[rank]
            held -= mixing.weights(rank, last - 1).inp.get(dying, 0.0) * sent[dying]
    alive = [result for result in results if result is not None]
    for masses in zip(*alive, strict=True):
        torch.testing.assert_close(sum(masses) + held, sum(sent.values()), rtol=0, atol=1e-12)
