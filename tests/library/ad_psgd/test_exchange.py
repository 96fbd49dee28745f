"""Exchanges between an active and a passive rank: opposite corrections, and the rank that is named if it is missing."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from gossip_modules.ad_psgd.exchange import BilateralAverage
from gossip_modules.ad_psgd.shared_model import SharedModel
from gossip_modules.engine.engine import EngineStats
from gossip_modules.flat.vector import FlatVector
from gossip_modules.transport.connect import connect
from tests.harness.ranks import CPU, TIMEOUT, HangUp, run_ranks, solo_group

PATIENCE = 10.0
SOON = timedelta(seconds=0.4)
STEP = 7


class Rank:
    """The exchanges of one rank: x = [start] * 4, y open for peers. Rank 0 is passive, the others are active.

    Rank 0 answers from here on. Where a test prepares it first, the others ask after a barrier.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        *,
        start: float,
        timeout: timedelta = TIMEOUT,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.x = FlatVector.over(torch.full((4,), start, dtype=dtype))
        self.shared, self.steps = SharedModel(self.x), list[int]()
        self.shared.publish(self.x, step=STEP)
        self.transport = connect(group, module_device=CPU, timeout=timeout)
        peers = [0] if group.rank() else range(1, group.size())
        self.bilateral = BilateralAverage(self.shared, self.transport, peers, stats=EngineStats())

    def ask(self, t: int, weight: float = 0.5) -> bool:
        """Exchange with rank 0; returns whether it is still there."""
        self.bilateral.ask(0, t, weight)
        assert self.bilateral.wait(PATIENCE)
        return 0 not in self.bilateral.closed_peers

    def wait_for(self, is_over: Callable[[], bool]) -> None:
        """Wait until something is true."""
        deadline = time.monotonic() + PATIENCE
        while not is_over():
            assert time.monotonic() < deadline
            time.sleep(1e-3)

    def raise_failure(self) -> None:
        """Wait until this rank has failed, and raise the failure."""
        self.bilateral.liveness.failed.result(PATIENCE)

    def close(self) -> None:
        """End the exchanges, as an engine does."""
        self.bilateral.shut_down()
        self.bilateral.close(PATIENCE)

    def value(self) -> float:
        """x with its pending correction."""
        self.steps += self.shared.collect(self.x)
        assert len(self.x.segments[0].unique()) == 1
        return float(self.x.segments[0][0])


@pytest.mark.parametrize(("weight", "dtype"), [(0.5, torch.float32), (0.25, torch.float64), (0.25, torch.bfloat16)])
def test_both_ends_move_by_opposite_corrections(weight: float, dtype: torch.dtype) -> None:
    def body(group: dist.ProcessGroup) -> float:
        me = Rank(group, start=8.0 * group.rank(), dtype=dtype)
        if group.rank() == 1:
            assert me.ask(3, weight)
        me.wait_for(lambda: me.shared.has_pending)
        me.close()
        value = me.value()
        assert me.steps == [STEP]
        return value

    assert run_ranks(2, body) == [8 * weight, 8 - 8 * weight]


def test_the_weight_of_the_active_rank_is_sent_exactly() -> None:
    def body(group: dist.ProcessGroup) -> float:
        me = Rank(group, start=float(group.rank()), dtype=torch.float64)
        if group.rank() == 1:
            me.ask(0, 1 / 3)
        me.wait_for(lambda: me.shared.has_pending)
        me.close()
        return me.value()

    assert run_ranks(2, body) == [1 / 3, 1 - 1 / 3]


def test_corrections_are_added_to_the_present_model() -> None:
    """The sum is kept although both ends take steps between snapshot and delivery."""
    are_ready = threading.Barrier(2)

    def body(group: dist.ProcessGroup) -> float:
        me = Rank(group, start=8.0 * group.rank())
        deliver = me.shared.deliver

        def train_then_deliver(correction: FlatVector, **how: Any) -> None:
            me.x.segments[0].add_(100.0)
            me.shared.publish(me.x, step=STEP)
            deliver(correction, **how)

        me.shared.deliver = train_then_deliver  # type: ignore[method-assign]
        are_ready.wait(PATIENCE)
        if group.rank() == 1:
            me.ask(0)
        me.wait_for(lambda: me.shared.has_pending)
        me.close()
        return me.value()

    assert run_ranks(2, body) == [104.0, 104.0]


def test_a_passive_rank_answers_several_ranks_until_all_have_shut_down() -> None:
    num_exchanges = 20

    def body(group: dist.ProcessGroup) -> tuple[float, int]:
        me = Rank(group, start=float(group.rank()), dtype=torch.float64)
        if group.rank() == 0:
            me.wait_for(lambda: len(me.shared._steps) == 6 * num_exchanges)
        else:
            assert all(me.ask(t) for t in range(num_exchanges * group.rank()))
        me.close()
        return me.value(), len(me.steps)

    results = run_ranks(4, body)
    assert sum(value for value, _ in results) == pytest.approx(0 + 1 + 2 + 3, abs=1e-12)
    assert [count for _, count in results] == [6 * num_exchanges, *(num_exchanges * rank for rank in (1, 2, 3))]


def test_a_rank_that_closes_says_so_and_keeps_its_model() -> None:
    are_ready, is_asked = threading.Barrier(2), threading.Event()

    def body(group: dist.ProcessGroup) -> float:
        me = Rank(group, start=8.0 * group.rank())
        me.bilateral.is_closing = group.rank() == 0
        are_ready.wait(PATIENCE)
        if group.rank() == 0:
            assert is_asked.wait(PATIENCE)
        else:
            for _ in range(2):
                assert not me.ask(0)
            is_asked.set()
        me.close()
        assert not me.shared.has_pending
        return me.value()

    assert run_ranks(2, body) == [0.0, 8.0]


def test_a_rank_that_has_withdrawn_its_model_is_still_there() -> None:
    """Before its first step, or while it loads a checkpoint: y is not the model that it trains."""
    withdrawn, asked, published = threading.Event(), threading.Event(), threading.Event()

    def body(group: dist.ProcessGroup) -> float:
        me = Rank(group, start=8.0 * group.rank())
        if group.rank() == 0:
            me.shared.withdraw()
            withdrawn.set()
            assert asked.wait(PATIENCE)
            assert not me.shared.has_pending
            me.shared.publish(me.x, step=STEP)
            published.set()
        else:
            assert withdrawn.wait(PATIENCE)
            assert me.ask(0)
            assert not me.shared.has_pending
            asked.set()
            assert published.wait(PATIENCE)
            assert me.ask(1)
        me.wait_for(lambda: me.shared.has_pending)
        me.close()
        return me.value()

    assert run_ranks(2, body) == [4.0, 4.0]


def test_it_is_freed_with_its_holder() -> None:
    """At once: it has the links of its generation and two copies of the model."""
    me = Rank(solo_group(), start=0.0)
    me.close()
    bilateral = weakref.ref(me.bilateral)
    del me
    assert bilateral() is None


# A rank that is missing.


def test_a_passive_rank_that_does_not_answer_is_named() -> None:
    def body(group: dist.ProcessGroup) -> None:
        if group.rank() == 1:
            # Enough for a pause on a busy machine, after which rank 0 would be given up before it is asked.
            me = Rank(group, start=0.0, timeout=timedelta(seconds=2))
            me.bilateral.ask(0, 7, 0.5)
            pattern = r"^rank 1: asking in round 7 failed after \d\.\d s \(timeout 2 s\): rank 0 does not answer"
            with pytest.raises(TimeoutError, match=pattern):
                me.raise_failure()
            me.close()

    run_ranks(2, body)


def test_a_passive_rank_that_died_is_named() -> None:
    def body(group: dist.ProcessGroup) -> None:
        me = Rank(group, start=0.0)
        if group.rank() == 0:
            me.bilateral.liveness.fail(ConnectionError("it dies"))
            me.transport.close_connections()
            me.close()
            raise HangUp
        me.bilateral.ask(0, 7, 0.5)
        with pytest.raises(ConnectionError, match=r"^rank 1: (in round 0, rank 0 died|asking in round 7: .* rank 0)"):
            me.raise_failure()
        me.close()

    run_ranks(2, body)


def test_an_active_rank_that_asks_and_sends_nothing_is_named() -> None:
    def body(group: dist.ProcessGroup) -> None:
        me = Rank(group, start=0.0, timeout=SOON if group.rank() == 0 else TIMEOUT)
        if group.rank() == 0:
            pattern = r"^rank 0: answering round 7 of rank 1 failed after .*: rank 1 did not come; .*; it trains"
            with pytest.raises(TimeoutError, match=pattern):
                me.raise_failure()
        else:
            header, reply = torch.tensor([0, 7, 0, 0]), torch.empty(1, dtype=torch.int64)
            me.transport.exchange({0: [header]}, {0: [reply]}, tag=0).wait()
            with pytest.raises(TimeoutError, match=r"rank 1: .*rank 0 has given this rank up"):
                me.raise_failure()
        me.close()

    run_ranks(2, body)


def test_training_waits_for_the_exchange_under_way() -> None:
    """Nothing of it can be delivered after `wait` has returned."""
    are_ready, is_serving = threading.Barrier(2), threading.Event()

    def body(group: dist.ProcessGroup) -> float:
        me = Rank(group, start=8.0 * group.rank())
        if group.rank() == 1:
            are_ready.wait(PATIENCE)
            me.ask(0)
            me.close()
            return me.value()
        deliver = me.shared.deliver

        def late(correction: FlatVector, **how: Any) -> None:
            is_serving.set()
            deliver(correction, **how)

        me.shared.deliver = late  # type: ignore[method-assign]
        are_ready.wait(PATIENCE)
        assert is_serving.wait(PATIENCE)
        assert me.bilateral.wait(PATIENCE)
        value = me.value()
        me.close()
        assert not me.shared.has_pending
        return value

    assert run_ranks(2, body) == [4.0, 4.0]
