"""One exchange between an active and a passive rank: opposite corrections, and who is named if somebody is missing."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist

from gossip_modules.ad_psgd.exchange import BilateralAverage
from gossip_modules.engine.shared_model import SharedModel
from gossip_modules.flat.vector import FlatVector
from gossip_modules.transport.connect import connect
from tests.harness.ranks import CPU, TIMEOUT, HangUp, run_ranks, solo_group

PATIENCE = 10.0
SOON = timedelta(seconds=0.4)
STEP = 7


_ranks: list[Rank] = []


@pytest.fixture(autouse=True)
def _ranks_outlive_their_messages() -> Iterator[None]:
    """Who shuts down does not wait; an engine keeps what has posted the message as long as it lives."""
    yield
    _ranks.clear()


class Rank:
    """What an engine holds of one rank: x = [start] * 4, y open for peers."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        *,
        start: float,
        timeout: timedelta = TIMEOUT,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.x = FlatVector.over(torch.full((4,), start, dtype=dtype))
        self.shared = SharedModel(self.x)
        self.shared.publish(self.x)
        transport = connect(group, module_device=CPU, timeout=timeout)
        self.bilateral = BilateralAverage(self.shared, transport, clock=lambda: STEP)

    def shut_down(self) -> None:
        """What an active rank does at last."""
        _ranks.append(self)
        self.bilateral.shut_down([0])

    def value(self) -> float:
        """x with its pending correction."""
        self.shared.collect(self.x)
        assert len(self.x.segments[0].unique()) == 1
        return float(self.x.segments[0][0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("weight", [0.5, 0.25])
def test_both_ends_move_by_opposite_corrections(weight: float, dtype: torch.dtype) -> None:
    def body(group: dist.ProcessGroup) -> float:
        me = Rank(group, start=8.0 * group.rank(), dtype=dtype)
        if group.rank() == 0:
            me.bilateral.answer([1])
        else:
            assert me.bilateral.ask(0, 3, weight)
            me.shut_down()
        assert list(me.bilateral.delivered) == [STEP]
        assert not me.bilateral.is_serving
        return me.value()

    assert run_ranks(2, body) == [8 * weight, 8 - 8 * weight]


def test_the_weight_of_the_active_rank_travels_exactly() -> None:
    def body(group: dist.ProcessGroup) -> float:
        me = Rank(group, start=float(group.rank()), dtype=torch.float64)
        if group.rank() == 0:
            me.bilateral.answer([1])
        else:
            me.bilateral.ask(0, 0, 1 / 3)
            me.shut_down()
        return me.value()

    assert run_ranks(2, body) == [1 / 3, 1 - 1 / 3]


def test_corrections_are_added_to_what_the_model_has_become() -> None:
    """The sum is kept although both ends take steps between snapshot and delivery."""

    def body(group: dist.ProcessGroup) -> float:
        me = Rank(group, start=8.0 * group.rank())
        deliver = me.shared.deliver

        def train_then_deliver(correction: FlatVector, *, alpha: float) -> None:
            me.x.segments[0].add_(100.0)
            me.shared.publish(me.x)
            deliver(correction, alpha=alpha)

        me.shared.deliver = train_then_deliver  # type: ignore[method-assign]
        if group.rank() == 0:
            me.bilateral.answer([1])
        else:
            me.bilateral.ask(0, 0, 0.5)
            me.shut_down()
        return me.value()

    assert run_ranks(2, body) == [104.0, 104.0]


def test_a_listener_answers_several_ranks_until_all_have_shut_down() -> None:
    num_exchanges = 20

    def body(group: dist.ProcessGroup) -> tuple[float, int]:
        me = Rank(group, start=float(group.rank()), dtype=torch.float64)
        if group.rank() == 0:
            me.bilateral.answer([1, 2, 3])
        else:
            assert all(me.bilateral.ask(0, t, 0.5) for t in range(num_exchanges * group.rank()))
            me.shut_down()
        return me.value(), len(me.bilateral.delivered)

    results = run_ranks(4, body)
    assert sum(value for value, _ in results) == pytest.approx(0 + 1 + 2 + 3, abs=1e-12)
    assert [count for _, count in results] == [6 * num_exchanges, *(num_exchanges * rank for rank in (1, 2, 3))]


def test_a_rank_that_closes_says_so_and_keeps_its_model() -> None:
    def body(group: dist.ProcessGroup) -> float:
        me = Rank(group, start=8.0 * group.rank())
        if group.rank() == 0:
            me.bilateral.stop_answering()
            me.bilateral.answer([1])
        else:
            for _ in range(2):
                assert not me.bilateral.ask(0, 0, 0.5)
            me.shut_down()
            assert not me.bilateral.ask(0, 0, 0.5)  # nor is anything sent
        assert not me.shared.has_pending
        return me.value()

    assert run_ranks(2, body) == [0.0, 8.0]


def test_a_rank_that_has_withdrawn_its_model_is_still_there() -> None:
    """Before its first step, or while it loads a checkpoint: y is not what it trains."""
    withdrawn, asked = threading.Event(), threading.Event()

    def body(group: dist.ProcessGroup) -> float:
        me = Rank(group, start=8.0 * group.rank())
        if group.rank() == 0:
            me.shared.withdraw()
            listener = threading.Thread(target=me.bilateral.answer, args=([1],), daemon=True)
            listener.start()
            withdrawn.set()
            assert asked.wait(PATIENCE)
            assert not me.shared.has_pending
            me.shared.publish(me.x)
            withdrawn.set()
            listener.join(PATIENCE)
        else:
            assert withdrawn.wait(PATIENCE)
            withdrawn.clear()
            assert me.bilateral.ask(0, 0, 0.5)
            assert not me.shared.has_pending
            asked.set()
            assert withdrawn.wait(PATIENCE)
            assert me.bilateral.ask(0, 1, 0.5)
            me.shut_down()
        return me.value()

    assert run_ranks(2, body) == [4.0, 4.0]


def test_it_is_freed_with_its_holder() -> None:
    """At once: it has the links of its generation and two copies of the model."""
    me = Rank(solo_group(), start=0.0)
    bilateral = weakref.ref(me.bilateral)
    del me
    assert bilateral() is None


# Who is missing.


def test_a_passive_rank_that_does_not_answer_is_named() -> None:
    def body(group: dist.ProcessGroup) -> None:
        if group.rank() == 1:
            me = Rank(group, start=0.0, timeout=SOON)
            pattern = r"^rank 1: asking in round 7: .*with rank 0 has not ended after \d\.\d s \(timeout 0\.4 s\)"
            with pytest.raises(TimeoutError, match=pattern):
                me.bilateral.ask(0, 7, 0.5)

    run_ranks(2, body)


def test_a_passive_rank_that_died_is_named() -> None:
    def body(group: dist.ProcessGroup) -> None:
        me = Rank(group, start=0.0)
        if group.rank() == 0:
            raise HangUp
        with pytest.raises(ConnectionError, match=r"^rank 1: asking in round 7: (receive from|send to) rank 0 failed"):
            me.bilateral.ask(0, 7, 0.5)
        me.shut_down()  # for nobody

    run_ranks(2, body)


def test_an_active_rank_that_asks_and_sends_nothing_is_named_by_the_listener() -> None:
    def body(group: dist.ProcessGroup) -> None:
        me = Rank(group, start=0.0, timeout=SOON if group.rank() == 0 else TIMEOUT)
        if group.rank() == 0:
            with pytest.raises(
                TimeoutError,
                match=r"^rank 0: answering round 7 of rank 1: the exchange with rank 1 has not ended after \d\.\d s",
            ):
                me.bilateral.answer([1])
        else:
            header, reply = torch.tensor([0, 7, 0]), torch.empty(1, dtype=torch.int64)
            me.bilateral.transport.exchange({0: [header]}, {0: [reply]}, tag=0).wait()

    run_ranks(2, body)


def test_an_answer_that_does_not_end_is_named() -> None:
    """`wait_until_served` of training, while the listener is stuck with its peer."""
    is_serving, is_over = threading.Event(), threading.Event()

    def body(group: dist.ProcessGroup) -> None:
        me = Rank(group, start=0.0, timeout=SOON if group.rank() == 0 else TIMEOUT)
        if group.rank() == 1:
            me.bilateral.ask(0, 0, 0.5)
            me.shut_down()
            return
        snapshot = me.shared.snapshot

        def stuck(out: FlatVector) -> None:
            is_serving.set()
            assert is_over.wait(PATIENCE)
            snapshot(out)

        me.shared.snapshot = stuck  # type: ignore[method-assign]

        def answer() -> None:
            with pytest.raises(TimeoutError, match="rank 0: answering round 0 of rank 1"):
                me.bilateral.answer([1])

        listener = threading.Thread(target=answer, daemon=True)
        listener.start()
        assert is_serving.wait(PATIENCE)
        assert me.bilateral.is_serving
        with pytest.raises(TimeoutError, match=r"^rank 0: answering round 0 of rank 1: .*with rank 1 has not ended"):
            me.bilateral.wait_until_served()
        is_over.set()
        listener.join(PATIENCE)
        me.bilateral.wait_until_served()
        assert me.shared.has_pending

    run_ranks(2, body)


def test_training_waits_for_the_answer_under_way() -> None:
    """Nothing of it can be delivered after `wait_until_served` has returned."""
    is_serving = threading.Event()

    def body(group: dist.ProcessGroup) -> float:
        me = Rank(group, start=8.0 * group.rank())
        if group.rank() == 1:
            me.bilateral.ask(0, 0, 0.5)
            me.shut_down()
            return me.value()
        deliver = me.shared.deliver

        def late(deliver: Callable[..., None], correction: FlatVector, *, alpha: float) -> None:
            is_serving.set()
            deliver(correction, alpha=alpha)

        me.shared.deliver = partial(late, deliver)  # type: ignore[method-assign]
        listener = threading.Thread(target=me.bilateral.answer, args=([1],), daemon=True)
        listener.start()
        assert is_serving.wait(PATIENCE)
        me.bilateral.wait_until_served()
        value = me.value()
        listener.join(PATIENCE)
        assert not me.shared.has_pending
        return value

    assert run_ranks(2, body) == [4.0, 4.0]
