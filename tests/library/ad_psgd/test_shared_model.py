"""SharedModel: nothing torn, nothing lost, whatever the threads do."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from gossip_modules.ad_psgd.shared_model import SharedModel
from gossip_modules.flat.buffer import FlatBuffer
from gossip_modules.flat.vector import FlatVector
from tests.harness.memory import num_vectors

PATIENCE = 10.0


def vector(value: float, length: int = 4) -> FlatVector:
    """Float32 [length] of one value."""
    return FlatVector.over(torch.full((length,), value))


def value(x: FlatVector) -> float:
    """The value of a vector of equal elements."""
    assert (x.segments[0] == x.segments[0][0]).all(), "torn"
    return float(x.segments[0][0])


def snapshot(shared: SharedModel) -> FlatVector:
    """What a peer would get."""
    return shared.snapshots.latest.vector.clone()


def test_y_is_a_copy_that_only_publish_renews() -> None:
    x = vector(1.0)
    shared = SharedModel(x)
    assert value(snapshot(shared)) == 1.0
    x.segments[0].fill_(2.0)
    assert value(snapshot(shared)) == 1.0
    shared.publish(x, step=0)
    assert value(snapshot(shared)) == 2.0


def test_a_correction_goes_to_y_at_once_and_to_x_once() -> None:
    x = vector(1.0)
    shared = SharedModel(x)
    assert not shared.has_pending
    assert not shared.collect(x)
    shared.deliver(vector(4.0), alpha=0.5, step=0)
    shared.deliver(vector(1.0), alpha=-1.0, step=0)
    assert shared.has_pending
    assert (value(x), value(snapshot(shared))) == (1.0, 2.0)
    x.segments[0].add_(10.0)  # a step of training meanwhile
    assert shared.collect(x)
    assert (value(x), value(snapshot(shared))) == (12.0, 2.0)
    assert not shared.has_pending
    assert not shared.collect(x)
    assert value(x) == 12.0


def test_corrections_start_from_zero_each_time() -> None:
    """The pending correction and the one in transfer change places: neither brings back old values."""
    x = vector(0.0)
    shared = SharedModel(x)
    for i in range(5):
        shared.deliver(vector(1.0), alpha=1.0, step=0)
        assert shared.collect(x)
        assert value(x) == i + 1


def test_publish_keeps_the_pending_correction() -> None:
    x = vector(1.0)
    shared = SharedModel(x)
    shared.deliver(vector(1.0), alpha=1.0, step=0)
    shared.publish(x, step=0)
    assert value(snapshot(shared)) == 1.0
    assert shared.collect(x)
    assert value(x) == 2.0


def test_y_is_for_peers_from_publish_to_withdraw() -> None:
    x = vector(1.0)
    shared = SharedModel(x)
    assert not shared.snapshots.is_open
    for _ in range(2):
        shared.publish(x, step=0)
        assert shared.snapshots.is_open
        shared.withdraw()
        assert not shared.snapshots.is_open
    shared.deliver(vector(1.0), alpha=1.0, step=0)  # of an exchange that was under way
    assert shared.collect(x)
    assert value(x) == 2.0


def test_all_dtypes_of_a_model() -> None:
    module = nn.ModuleList([nn.Linear(2, 2).to(dtype) for dtype in (torch.float32, torch.float64, torch.bfloat16)])
    x = FlatBuffer(module).vector
    start = x.clone()
    shared = SharedModel(x)
    correction = shared.snapshots.vector()
    for segment in correction.segments:
        segment.fill_(0.5)
    shared.deliver(correction, alpha=0.25, step=0)
    shared.collect(x)
    assert {segment.dtype for segment in x.segments} == {torch.float32, torch.float64, torch.bfloat16}
    for before, after in zip(start.segments, x.segments, strict=True):
        torch.testing.assert_close(after, before + 0.125)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_buffers_are_averaged_with_their_values_when_mail_is_applied(dtype: torch.dtype) -> None:
    """b <- (b / 2 + 8 / 2) * 3 / 4 + 2 / 4 for the b of that moment; parameters get w times the correction."""
    module = nn.BatchNorm1d(3).to(dtype)
    x = FlatBuffer(module).vector
    shared = SharedModel(x)
    (y,) = shared.buffers_of(x)
    assert y.numel() == 6
    for received, alpha in ((8.0, 0.5), (2.0, 0.25)):
        correction = shared.snapshots.vector()
        correction.segments[0].fill_(received)
        shared.deliver(correction, alpha=alpha, step=0)
    (published,) = shared.buffers_of(snapshot(shared))
    assert published.tolist() == [(0 + 8) / 2 * 3 / 4 + 2 / 4] * 3 + [(1 + 8) / 2 * 3 / 4 + 2 / 4] * 3
    for start in (16.0, 0.0):  # twice: nothing of the correction before comes back
        y.fill_(start)
        before = module.weight.detach().clone()
        assert shared.collect(x)
        assert y.tolist() == [3 / 8 * start + 3.5] * 6
        assert (module.weight == before + 4.5).all()
        for received, alpha in ((8.0, 0.5), (2.0, 0.25)):
            correction = shared.snapshots.vector()
            correction.segments[0].fill_(received)
            shared.deliver(correction, alpha=alpha, step=0)


@pytest.mark.parametrize("call", ["publish", "collect"])
def test_another_layout_is_refused(call: str) -> None:
    shared = SharedModel(vector(1.0))
    for other in (vector(1.0, 6), FlatVector.over(torch.ones(2, dtype=torch.float64))):
        with pytest.raises(
            ValueError, match=r"got a model of \d+ bytes on cpu .* \(16 bytes on cpu\), expected .*before wrapping"
        ):
            shared.publish(other, step=0) if call == "publish" else shared.collect(other)


def test_three_vectors_beside_the_model_are_enough() -> None:
    """Training publishes under each exchange, and a correction waits when the next exchange begins."""
    x = FlatVector.over(torch.ones(10_037))
    shared = SharedModel(x)
    received = shared.snapshots.vector()
    for step in range(4):
        shared.publish(x, step=step)
        for _ in range(2):
            y = shared.snapshots.acquire()  # an exchange begins
            shared.collect(x, is_kept=step == 2)
            shared.publish(x, step=step)
            assert num_vectors(x.layout.num_bytes) <= 1 + 3 + (step == 2), "a kept correction is one more"
            shared.snapshots.release(y)
            shared.deliver(received, alpha=0.5, step=step)
        shared.collect(x)
    assert num_vectors(x.layout.num_bytes) <= 1 + 3


@pytest.fixture
def restless() -> object:
    """Threads change places as often as Python can make them."""
    import sys

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.usefixtures("restless")
def test_no_snapshot_is_torn() -> None:
    """Every published vector is of one value; corrections are too."""
    x = vector(0.0, 200_000)
    shared = SharedModel(x)
    is_over = threading.Event()

    def peer(i: int) -> int:
        correction, seen = vector(float(i), 200_000), set()
        while not is_over.is_set():
            with shared.lock:  # as a rank that sends nothing of it
                seen.add(value(shared.snapshots.latest.vector))
            shared.deliver(correction, alpha=1.0, step=0)
        return len(seen)

    with ThreadPoolExecutor(2) as pool:
        peers = [pool.submit(peer, i) for i in (1, 2)]
        try:
            for i in range(300):
                x.segments[0].fill_(float(i))
                shared.publish(x, step=0)
                shared.collect(x)
                value(x)
        finally:
            is_over.set()
        assert all(one.result(PATIENCE) > 1 for one in peers)


@pytest.mark.usefixtures("restless")
def test_no_correction_is_lost() -> None:
    """Whole numbers below 2**24, so that every sum is exact."""
    num_corrections = 400
    x = vector(0.0, 10_000)
    shared = SharedModel(x)

    def peer(size: float) -> None:
        for _ in range(num_corrections):
            shared.deliver(vector(size, 10_000), alpha=1.0, step=0)

    with ThreadPoolExecutor(3) as pool:
        peers = [pool.submit(peer, size) for size in (1.0, 5.0, -2.0)]
        steps = 0
        while not all(one.done() for one in peers):
            x.segments[0].add_(1.0)
            steps += 1
            with shared.lock:
                shared.collect(x)
                shared.publish(x, step=0)
                assert value(snapshot(shared)) == value(x)
        for one in peers:
            one.result(PATIENCE)
    shared.collect(x)
    assert value(x) == steps + num_corrections * (1 + 5 - 2)
