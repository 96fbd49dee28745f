"""Models of dpwa that are not finite or far away, and strangers."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import nn

from gossip_modules.dpwa.averager import PairwiseAverager
from tests.harness.progress import engine_of
from tests.harness.strangers import ask_and_never_read, connect
from tests.library.dpwa.workers import ANY_PORT, REFUSED, averager, filled, num_descriptors, value_of, wait_for, wrap

# Models that are not finite, or far away.


def pair(workers: contextlib.ExitStack, own: float, peer: float, **options: Any) -> tuple[nn.Module, PairwiseAverager]:
    """A worker and its module, both with these values, and a peer of it."""
    a = filled(own)
    first = averager(workers, "a", a, **options)
    first.add_peer("b", averager(workers, "b", filled(peer)).address)
    return a, first


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_worker_notices_that_its_own_model_is_not_finite(workers: contextlib.ExitStack, bad: float) -> None:
    a, worker = pair(workers, bad, 8.0)
    worker.update_send()
    with pytest.raises(
        FloatingPointError,
        match=r"worker 'a': the own model held infinities or NaN in round 1 when it met that of 'b', expected.*check",
    ):
        worker.update_wait()
    assert worker.comm_stats()["num_rounds"] == 0
    with torch.no_grad():
        next(a.parameters()).fill_(4.0)  # a checkpoint, say
    worker.update_send()
    assert worker.update_wait()
    assert value_of(a) == 6.0


def test_a_wrapper_notices_it_too_where_no_peer_answers(workers: contextlib.ExitStack) -> None:
    worker = wrap(workers, "a", filled(float("nan")), peers={"a": ANY_PORT, "b": REFUSED})
    worker(torch.ones(1, 50))
    with pytest.raises(FloatingPointError, match="worker 'a': the own model held infinities or NaN in round 1, expect"):
        worker.eval()


def test_merges_into_a_model_that_is_not_finite_can_be_made(workers: contextlib.ExitStack) -> None:
    a, worker = pair(workers, float("inf"), 8.0, on_nonfinite="spread")
    worker.update_send()
    assert worker.update_wait()
    assert torch.isinf(next(a.parameters())).all()


@pytest.mark.parametrize("far", [1e38, -1e7])
def test_a_model_far_from_ours_is_refused(workers: contextlib.ExitStack, far: float) -> None:
    a, worker = pair(workers, 3.0, far)
    worker.update_send()
    assert not worker.update_wait()
    with pytest.warns(
        UserWarning, match=r"worker 'a' refused the model of 'b': got a model at a root mean square distance of 1e\+"
    ):
        worker.update_send()
    assert value_of(a) == 3.0
    assert worker.comm_stats()["num_refused_models"] >= 1


def test_a_model_far_from_ours_is_not_started_from(workers: contextlib.ExitStack) -> None:
    a = filled(3.0)
    bad = averager(workers, "b", filled(1e38))
    worker = averager(workers, "a", a, peers={"b": bad.address}, init_from_peers=True, max_distance=0.1)
    assert value_of(a) == 3.0
    with pytest.warns(UserWarning, match="refused the model of 'b'"):
        worker.update_send()
    near = averager(workers, "c", filled(100.0))
    b = filled(3.0)
    averager(workers, "a", b, peers={"c": near.address}, init_from_peers=True, max_distance=0.1)
    assert value_of(b) == 100.0  # which a beginner may be far from


@pytest.mark.parametrize(("max_distance", "is_merged"), [(2.1, True), (1.9, False)])
def test_the_distance_is_in_units_of_the_own_model(
    workers: contextlib.ExitStack, max_distance: float, is_merged: bool
) -> None:
    _, worker = pair(workers, 100.0, 300.0, max_distance=max_distance)
    worker.update_send()
    assert worker.update_wait() == is_merged
    if not is_merged:
        with pytest.warns(UserWarning, match=r"distance of 200 from ours, expected 1.9 \* 100 at most"):
            worker.update_send()


# What strangers do.


def test_clients_that_read_nothing_leave_merges_as_they_are(workers: contextlib.ExitStack) -> None:
    numel = 3_000_000  # 12 MB, more than the buffers of a connection take
    a = filled(0.0, numel)
    worker, asker = averager(workers, "a", a), averager(workers, "b", filled(8.0, numel))
    asker.add_peer("a", worker.address)
    with contextlib.ExitStack() as stack:
        for _ in range(4):
            worker.update_send()
            stack.enter_context(ask_and_never_read(worker.address, engine_of(worker).server.shape))
        for _ in range(10):
            asker.update_send()
            assert asker.update_wait()
        assert asker.comm_stats()["num_rounds"] == 10
    wait_for(lambda: worker.comm_stats()["num_unread_replies"] == 4)


def test_connections_of_strangers_leave_a_worker_its_descriptors(workers: contextlib.ExitStack) -> None:
    worker, asker = averager(workers, "a", filled(0.0)), averager(workers, "b", filled(8.0))
    asker.add_peer("a", worker.address)
    worker.update_send()
    before = num_descriptors()
    with contextlib.ExitStack() as strangers:
        for _ in range(300):
            strangers.enter_context(connect(worker.address))
        asker.update_send()
        assert asker.update_wait()  # and connections are accepted in their order, so all others are by now
        wait_for(lambda: worker.comm_stats()["num_refused_connections"] > 200)
        assert num_descriptors() - before - 300 < 150  # the other ends are ours too
