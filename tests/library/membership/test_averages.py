"""Global averages of the schedule, where workers die before and within them, and how long rounds wait."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from gossip_modules import Schedule
from gossip_modules.engine.lockstep import OverlapEngine, SyncEngine
from gossip_modules.extend import PushPull
from gossip_modules.flat.vector import FlatVector
from gossip_modules.graph_manager.named_graphs import undirected_ring
from gossip_modules.membership.links import LinkTransport
from gossip_modules.mixing_manager import MetropolisHastingsMixing
from gossip_modules.rounds.mixer import GlobalAverage
from tests.harness.progress import engine_of
from tests.library.membership.test_links import Ended, run_links
from tests.library.membership.test_membership import Job, Worker, close

MIXING = MetropolisHastingsMixing(undirected_ring(4))


def engine_over(transport: LinkTransport, *, is_late: bool) -> SyncEngine | OverlapEngine:
    """Every round is an average."""
    gossiper = PushPull()
    gossiper.bind(MIXING, transport)
    return (OverlapEngine if is_late else SyncEngine)(gossiper, Schedule(average_every=1))


def before(transport: LinkTransport, engine: Any, s: FlatVector) -> None:
    raise Ended


def within(transport: LinkTransport, engine: Any, s: FlatVector) -> None:
    """It has come, and has no result."""
    wait = transport._whole._wait_for_all

    def wait_and_end(*arguments: Any) -> None:
        wait(*arguments)
        transport._break_whole()
        raise Ended

    transport._whole._wait_for_all = wait_and_end  # type: ignore
    engine._scheduled_average.finish(s)


@pytest.mark.parametrize("is_late", [False, True], ids=["in place", "overlapped"])
@pytest.mark.parametrize("die", [before, within])
def test_living_workers_keep_their_models_where_a_worker_dies(
    die: Callable[[LinkTransport, Any, FlatVector], None], is_late: bool
) -> None:
    """Rank 2 of 4 ends in the second average; the third is not made either, and asks for another generation, once."""

    def body(transport: LinkTransport, barrier: threading.Barrier) -> list[float]:
        engine, s = engine_over(transport, is_late=is_late), FlatVector.over(torch.full((5,), float(transport.rank)))
        asked: list[int] = []
        transport.on_broken = lambda: asked.append(1)
        engine.round(s)
        engine.flush(s)
        seen = [s.segments[0][0].item()]
        s.segments[0].add_(transport.rank)
        barrier.wait()
        if transport.rank == 2:
            die(transport, engine, s)
        for _ in range(3):
            engine.round(s)
            engine.flush(s)
            seen.append(s.segments[0][0].item())
        engine.close()
        return [*seen, float(len(asked))]

    results, _ = run_links(4, MIXING, body)
    assert results == [[1.5, *3 * [1.5 + rank], 1.0] if rank != 2 else None for rank in range(4)]


def test_a_collective_ends_where_a_rank_is_declared_dead() -> None:
    """Rank 1 lives and does not come; rank 3, which waits as well, has no link with it."""

    def body(transport: LinkTransport, barrier: threading.Barrier) -> None:
        if transport.rank in (0, 3):
            timer = threading.Timer(0.3, transport.break_link, (1,))
            timer.start()
            with pytest.raises(ConnectionError, match="the average among ranks"):
                transport.all_reduce(torch.ones(1), what="the average")
            timer.join()
        barrier.wait()

    run_links(4, MIXING, body)


def test_an_average_on_demand_that_fails_leaves_the_model_as_it_was() -> None:
    """The first tensors are summed, and part of the last ones, when a worker dies: those who live train on."""

    def body(transport: LinkTransport, barrier: threading.Barrier) -> None:
        s = FlatVector.pack([torch.full((3,), 1.0 + transport.rank), torch.full((2,), 5.0, dtype=torch.float64)])
        s.push_sum_weight.fill_(0.5)
        was = s.clone()
        sum_up = transport.all_reduce

        def fail(x: torch.Tensor, *, what: str) -> None:
            sum_up(x, what=what)
            if x.dtype == torch.float64:
                raise ConnectionError(what)

        transport.all_reduce = fail  # type: ignore[method-assign]
        with pytest.raises(ConnectionError, match="global average"):
            GlobalAverage(transport).mix(s, 0)
        for x, y in zip([*s.segments, s.push_sum_weight], [*was.segments, was.push_sum_weight], strict=True):
            assert torch.equal(x, y)
        barrier.wait()

    run_links(4, MIXING, body)


def averages_again(job: Job, workers: list[Worker]) -> None:
    averages: list[Any] = [engine_of(worker.wrapper)._scheduled_average for worker in workers if worker.wrapper]
    for average in averages:
        average.has_failed = True
    job.until(lambda: not any(average.has_failed for average in averages), "all average again")


def test_a_wrapper_averages_again_in_the_next_generation() -> None:
    job = Job(dist.HashStore(), min_workers=3, schedule=Schedule(average_every=3))
    founders = job.start(3)
    job.until_live(founders)
    founders[0].is_killed.set()
    job.until_live(founders[1:])
    newcomer, *_ = job.start(1, seed=1)
    alive = [*founders[1:], newcomer]
    job.until_live(alive)
    averages_again(job, alive)
    assert len(job.end()) == 3
    close(alive)


def test_a_worker_that_stands_still_holds_no_average_up() -> None:
    """Its neighbours on the ring declare it dead; the fourth, which waits for it too, reads it in the log."""
    job = Job(dist.HashStore(), min_workers=4, push_sum=False, graph=undirected_ring, schedule=Schedule(3, 1))
    workers = job.start(4)
    job.until_live(workers)
    stopped, *others = sorted(workers, key=lambda worker: worker.membership.rank)  # type: ignore[union-attr]
    stopped.is_paused.set()
    for worker in (others[0], others[2]):
        worker.membership.worker.generations.on_silent(stopped.membership.id, 9.0)  # type: ignore[union-attr]
    job.until_live(others)
    averages_again(job, others)
    stopped.is_paused.clear()
    stopped.may_go_on.set()
    job.until_live(workers)
    averages_again(job, workers)
    assert len(job.end()) == 4
    close(workers)


def test_statistics_say_how_long_rounds_wait_for_each_peer() -> None:
    job = Job(dist.HashStore(), min_workers=3)
    workers = job.start(3)
    job.until_live(workers)
    for worker in job.end():
        assert worker.wrapper is not None
        assert worker.membership is not None
        own, stats = worker.membership.number, worker.wrapper.comm_stats()
        waits = {int(name.partition("/")[2]): stats[name] for name in stats if name.startswith("wait_median/")}
        assert set(waits) == set(worker.changes[-1].members) - {own}
        assert min(waits.values()) > 0
        assert all(stats[f"wait_mad/{peer}"] >= 0 for peer in waits)
    close(workers)
