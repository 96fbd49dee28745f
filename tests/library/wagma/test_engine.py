"""The engine of WAGMA-SGD: averages of groups, late ranks, global averages."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist

from gossip_modules.extend import FlatVector
from gossip_modules.graph_manager.butterfly_groups import ButterflyGroups
from gossip_modules.wagma.group_average import GroupAverage
from gossip_modules.wagma.pace import RelativePace
from gossip_modules.wagma.worker import WaitAvoidingWorker
from tests.harness.memory import num_vectors
from tests.harness.ranks import run_ranks
from tests.library.wagma.workers import PATIENCE, Rank, be_on_time


def members(rank: int, t: int, *, n: int, size: int) -> tuple[int, ...]:
    """The group of a rank."""
    return ButterflyGroups(n, group_size=size).members(rank, t)


@pytest.mark.parametrize(("n", "size"), [(2, 2), (8, 4), (5, 4)])
def test_ranks_on_time_get_the_mean_of_their_group(n: int, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    num_rounds = 3
    be_on_time(monkeypatch)

    def body(group: dist.ProcessGroup) -> list[float]:
        rank = Rank(group, size=size)
        values = [rank.round() for _ in range(num_rounds)]
        stats = rank.engine.stats
        assert (stats.num_rounds, stats.max_staleness) == (num_rounds, 0)
        rank.end()
        return values

    values = run_ranks(n, body)
    x = [float(rank) for rank in range(n)]
    for t in range(num_rounds):
        groups = [members(rank, t, n=n, size=size) for rank in range(n)]
        x = [sum(x[j] for j in group) / len(group) for group in groups]
        torch.testing.assert_close([row[t] for row in values], x, atol=1e-6, rtol=0)
    if n.bit_count() == 1 and size**num_rounds >= n:
        assert [row[-1] for row in values] == [(n - 1) / 2] * n  # exact: sums of small integers


@pytest.mark.parametrize("late", [None, 1])
def test_two_vectors_beside_the_model_are_enough_for_ranks_less_than_a_round_late(late: int | None) -> None:
    """Rank 1 comes to each round after its worker has begun it."""
    meet, numel, n = threading.Barrier(4), 10_037 + (late or 0), 4  # of no other test

    def body(group: dist.ProcessGroup) -> int:
        rank = Rank(group, numel=numel)
        for t in range(6):
            meet.wait(PATIENCE)
            if group.rank() == late:
                with rank.worker.state:
                    rank.worker.wait(lambda: rank.worker.num_started > t)  # noqa: B023 (called here)
            rank.round()
        meet.wait(PATIENCE)
        # One rank counts those of all: the others would wait for each other's passes over all objects of the tests.
        count = num_vectors(rank.vector.layout.num_bytes) if group.rank() == 0 else 0
        meet.wait(PATIENCE)
        rank.end()
        return count

    receive_buffers = 1  # the vector is one chunk
    assert n * 2 < max(run_ranks(n, body)) <= n * (1 + 2 + receive_buffers)


def test_a_late_rank_merges_as_in_the_paper() -> None:
    turn = threading.Barrier(2)

    def body(group: dist.ProcessGroup) -> None:
        rank = Rank(group)
        turn.wait(PATIENCE)
        if group.rank() == 0:
            assert rank.round(10.0) == (10 + 1) / 2  # the other's model of the start
            assert rank.round(20.0) == (20 + 1) / 2
            turn.wait(PATIENCE)
            turn.wait(PATIENCE)
            assert rank.round(40.0) == (40 + 7) / 2  # its newest publication
            assert rank.engine.stats.max_staleness == 0
        else:
            turn.wait(PATIENCE)
            with rank.worker.state:
                rank.worker.wait_for(lambda: rank.worker.num_done == 2, "round 1")
            # Version 1 is the newest average, whose sum holds this rank's model of the start.
            assert rank.round(3.0) == pytest.approx((20 + 1 + 3) / 3, abs=1e-6)
            assert rank.engine.t == 1
            # That average is in the model already: nothing to merge, something to publish.
            assert rank.round(7.0) == 7.0
            assert rank.engine.t == 2
            turn.wait(PATIENCE)
            with rank.worker.state:
                rank.worker.wait_for(lambda: rank.worker.num_started == 3, "round 2")
            assert rank.round(5.0) == pytest.approx((40 + 7 + 5) / 3, abs=1e-6)
            assert rank.engine.stats.max_staleness == 2  # round 1 of the model of the start, which is round -1
            assert rank.engine.stats.total_staleness == 1 + 2 + 1  # 7 was published as round 1
        rank.end()
        assert rank.engine.t == 3

    run_ranks(2, body)


def test_overlapped_ranks_on_time_keep_the_steps_they_take_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """x <- x + (average - y): a group of two whose ranks add their own number to their model in each step."""
    n, num_rounds = 2, 4
    be_on_time(monkeypatch)

    def body(group: dist.ProcessGroup) -> list[float]:
        rank, update = Rank(group, overlap=True), 2.0 ** group.rank()
        values = []
        for _ in range(num_rounds):
            values.append(rank.round())  # corrected by the last average, published for the next
            assert rank.engine.is_in_flight
            rank.x += update
        rank.engine.flush(rank.vector)
        assert not rank.engine.is_in_flight
        values.append(rank.value)
        rank.end()
        return values

    first, second = run_ranks(n, body)
    x = [0.0, 1.0]
    for t in range(num_rounds + 1):
        assert [first[t], second[t]] == pytest.approx(x, abs=1e-6)
        mean = sum(x) / n
        x = [mean + 1.0, mean + 2.0]


def test_an_overlapped_late_rank_waits_for_nothing() -> None:
    turn, is_running, may_run = threading.Barrier(2), threading.Event(), threading.Event()

    def body(group: dist.ProcessGroup) -> None:
        rank = Rank(group, overlap=True)
        start = rank.worker.average.start

        def gated(s: FlatVector, t: int, fill: Any = None) -> None:
            if t == 2 and group.rank() == 1:
                is_running.set()
            assert t < 2 or may_run.wait(PATIENCE), "nobody let round 2 run"
            start(s, t, fill)

        rank.worker.average.start = gated  # type: ignore[method-assign]
        turn.wait(PATIENCE)
        if group.rank() == 0:
            assert rank.round(10.0) == 10.0
            assert rank.round(20.0) == 20 + (10 + 1) / 2 - 10
            rank.engine.flush(rank.vector)
            rank.round(30.0)
            assert rank.engine.t == 3
            turn.wait(PATIENCE)
        else:
            turn.wait(PATIENCE)
            assert is_running.wait(PATIENCE)
            assert (rank.worker.num_started, rank.worker.num_done) == (3, 2)
            assert rank.round(3.0) == pytest.approx((15.5 + 1 + 3) / 3, abs=1e-6)
            assert rank.round(7.0) == 7.0  # nothing new to merge
            assert rank.round(9.0) == 9.0  # round 2 is running, with the model of the start
            assert rank.engine.t == 3
            assert not rank.engine.is_in_flight
            may_run.set()
        rank.end()

    run_ranks(2, body)


def test_closing_with_a_group_average_under_way_says_that_it_is_lost(
    impatient_close: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_over = threading.Event()
    monkeypatch.setattr(WaitAvoidingWorker, "_run", lambda worker, t: is_over.wait(PATIENCE))

    def body(group: dist.ProcessGroup) -> None:
        rank = Rank(group, overlap=True)
        if group.rank() == 0:
            rank.round()
            with pytest.warns(UserWarning, match="closed before the group average of round 0"):
                rank.engine.close()
            assert not rank.engine.flush(rank.vector)
            is_over.set()
        else:
            assert is_over.wait(PATIENCE)
            rank.engine.close()

    run_ranks(2, body)


def test_a_rank_that_comes_while_its_round_runs_waits_for_it() -> None:
    entered, come, ready = threading.Event(), threading.Event(), threading.Event()

    def body(group: dist.ProcessGroup) -> None:
        rank = Rank(group)
        if group.rank() == 1:
            average = rank.worker.average
            start = average.start

            def held_start(s: FlatVector, t: int, fill: Any = None) -> None:
                entered.set()
                assert come.wait(PATIENCE)
                start(s, t, fill)

            average.start = held_start  # type: ignore[method-assign]
            ready.set()
            assert entered.wait(PATIENCE)
            come.set()
            assert rank.round(4.0) == pytest.approx((10 + 1 + 4) / 3, abs=1e-6)
        else:
            assert ready.wait(PATIENCE)
            assert rank.round(10.0) == (10 + 1) / 2
        rank.end()

    run_ranks(2, body)


def test_simultaneous_activators_run_each_average_once(monkeypatch: pytest.MonkeyPatch) -> None:
    n, num_rounds = 4, 6
    be_on_time(monkeypatch)
    runs: Counter[tuple[int, int]] = Counter()
    start = GroupAverage.start

    def counted_start(average: GroupAverage, s: FlatVector, t: int, fill: Any = None) -> None:
        runs[average.transport.rank, t] += 1
        start(average, s, t, fill)

    monkeypatch.setattr(GroupAverage, "start", counted_start)

    def body(group: dist.ProcessGroup) -> None:
        rank = Rank(group)
        for _ in range(num_rounds):
            rank.round()  # all of them start it
        rank.end()

    run_ranks(n, body)
    assert runs == {(rank, t): 1 for rank in range(n) for t in range(num_rounds)}


@pytest.mark.parametrize(("n", "seed", "overlap"), [(6, 2, False), (4, 3, True)])
def test_random_delays(n: int, seed: int, overlap: bool) -> None:
    """Global averages make all equal, staleness stays below the period, no model is torn, all end in one round."""
    period, num_rounds = 5, 23
    after: list[list[float]] = []

    def body(group: dist.ProcessGroup) -> int:
        rank = Rank(group, period=period, numel=200_000, overlap=overlap)
        average = rank.engine._averager.mix

        def noted(x: Any, t: int) -> Any:
            assert rank.worker.num_done >= t
            result = average(x, t)
            values[t] = rank.value
            return result

        rank.engine._averager.mix = noted  # type: ignore[method-assign]
        values: dict[int, float] = {}
        delays = random.Random(100 * seed + group.rank())
        while rank.engine.t < num_rounds:
            time.sleep(delays.choice((0.0, 0.0, 0.001, 0.004)) * (4 if group.rank() == 0 else 1))
            rank.round(float(delays.randrange(10**6)))
            assert rank.engine.t <= num_rounds
        rank.engine.flush(rank.vector)
        rank.engine.settle(rank.vector)
        assert rank.engine.stats.max_staleness < period
        assert rank.engine.stats.num_rounds == num_rounds
        after.append([values[t] for t in sorted(values)])
        assert sorted(values) == list(range(period - 1, num_rounds, period))
        rank.engine.close()
        return rank.engine.t

    assert run_ranks(n, body) == [num_rounds] * n
    assert all(values == after[0] for values in after), f"seed {seed}"


def test_publications_are_never_torn() -> None:
    n, numel = 2, 1 << 18
    done = threading.Event()

    def body(group: dist.ProcessGroup) -> None:
        rank = Rank(group, numel=numel)
        if group.rank() == 0:
            for step in range(60):
                rank.round(1e6 * (step % 7))
            done.set()
        else:
            step = 0
            while not done.is_set():
                rank.x.fill_(1e6 * (step % 5))
                with rank.worker.state:  # a late rank's half of a round, as often as it goes
                    pass
                rank.worker.publish(rank.vector, t=rank.worker.num_started)
                step += 1
            assert step > 0
        rank.end()

    run_ranks(n, body)


def test_a_rank_in_training_joins_a_global_average_that_others_are_at() -> None:
    turn = threading.Barrier(2)

    def body(group: dist.ProcessGroup) -> None:
        rank = Rank(group, period=4)
        if group.rank() == 0:
            values = [rank.round(float(10 * t)) for t in range(4)]
            assert values[:3] == [(10 * t + 1) / 2 for t in range(3)]
            assert values[3] == (30 + 100) / 2
        else:
            with rank.worker.state:
                rank.worker.wait_for(lambda: rank.worker.newest_arrival == 3, "the global average")
            assert rank.round(100.0) == (30 + 100) / 2  # not round 0: one step for four of the other
        assert rank.engine.t == 4
        assert rank.worker.published.latest.standing == 3
        turn.wait(PATIENCE)
        rank.end()

    run_ranks(2, body)


@pytest.mark.parametrize("comes", [True, False])
def test_a_slow_rank_waits_for_a_global_average_that_is_near(comes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    # Of the rank that waits; the real time of its step in this test is not enough for four rounds on a busy machine.
    monkeypatch.setattr(RelativePace, "seconds", PATIENCE if comes else 0.01)
    turn = threading.Barrier(2)

    def body(group: dist.ProcessGroup) -> None:
        rank = Rank(group, period=10)
        if group.rank() == 0:
            for _ in range(6):
                rank.round()
            turn.wait(PATIENCE)
            if comes:
                for _ in range(4):
                    rank.round()
        else:
            pace = rank.engine._pace
            for _ in range(3):  # its steps take as long as five of the others
                pace.start_step(0)
                pace.finish_step(5, is_halted=False)
            turn.wait(PATIENCE)
            with rank.worker.state:
                rank.worker.wait_for(lambda: rank.worker.newest_arrival >= 5, "six rounds of the other")
            rank.round()
            assert rank.engine.t == (10 if comes else 6)
        rank.end()
        assert rank.engine.t == (10 if comes else 6)

    run_ranks(2, body)


def test_a_slow_rank_skips_the_rounds_that_others_have_passed() -> None:
    turn = threading.Barrier(2)

    def body(group: dist.ProcessGroup) -> list[int]:
        rank = Rank(group)
        seen = []
        for turns in range(1, 5):
            if group.rank() == 0:
                for _ in range(3):
                    rank.round()
                turn.wait(PATIENCE)
            else:
                turn.wait(PATIENCE)
                with rank.worker.state:
                    rank.worker.wait_for(lambda: rank.worker.newest_arrival >= 3 * turns - 1, "its rounds")  # noqa: B023
                rank.round()
                seen.append(rank.engine.t)
            turn.wait(PATIENCE)
        rank.end()
        return seen

    # Late three times, it comes to rounds 0, 1 and 2 in person; from then on it is known to be slow.
    assert run_ranks(2, body)[1] == [1, 2, 3, 12]


@pytest.mark.parametrize("n", [2, 5])
def test_ranks_that_settle_serve_training_ranks(n: int) -> None:
    def body(group: dist.ProcessGroup) -> tuple[int, float]:
        rank = Rank(group, period=4)
        for _ in range(11 if group.rank() == 0 else 2):
            rank.round()
        is_written = rank.engine.settle(rank.vector)
        assert is_written == (group.rank() != 0)
        assert rank.worker.num_done == rank.engine.t == 11
        rank.engine.close()
        return rank.engine.t, rank.value

    results = run_ranks(n, body)
    assert [t for t, _ in results] == [11] * n
    assert len({value for _, value in results[1:]}) == 1  # nothing since the last global average
