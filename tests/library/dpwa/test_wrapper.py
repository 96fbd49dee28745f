"""dpwa as a wrapper and as a loop-level averager: what is merged, and training."""

from __future__ import annotations

import contextlib
import itertools
from datetime import timedelta
from functools import partial

import pytest
import torch
from torch import nn

from gossip_modules.dpwa.interpolation import ClockInterpolation, ConstantInterpolation, LossInterpolation
from tests.harness.problems import batch, mlp, net
from tests.harness.progress import local_of, round_of, take_corrections
from tests.library.dpwa.workers import (
    ANY_PORT,
    REFUSED,
    averager,
    distance,
    filled,
    has_fetched,
    introduce,
    silent_peer,
    value_of,
    wait_for,
    wrap,
)

# What is merged.


def test_one_exchange_is_the_interpolation(workers: contextlib.ExitStack) -> None:
    a, b = filled(0.0), filled(8.0)
    first, second = averager(workers, "a", a, interpolation=ConstantInterpolation(0.25)), averager(workers, "b", b)
    introduce(("a", first), ("b", second))
    first.update_send(1.0)
    assert first.update_wait(1.0)
    assert value_of(a) == 2.0
    assert value_of(b) == 8.0  # a pull changes nobody else
    assert first.comm_stats()["clock"] == 0.75  # 1 of its own, 0 of the other
    second.update_send()
    assert second.update_wait()
    assert value_of(b) == 4.0  # the average with what a published before its batch, which is 0


def test_by_clock_a_newcomer_takes_the_whole_model(workers: contextlib.ExitStack) -> None:
    a, b = filled(0.0), filled(8.0)
    first, second = (averager(workers, n, m, interpolation=ClockInterpolation()) for n, m in (("a", a), ("b", b)))
    for _ in range(2):
        second.update_send()  # alone
    introduce(("a", first), ("b", second))
    second.update_send()
    first.update_send()
    assert first.update_wait()
    assert value_of(a) == 8.0 * 3 / 4
    assert first.comm_stats()["clock"] == pytest.approx(3 * 3 / 4 + 1 * 1 / 4)


def test_by_loss_the_worse_takes_more(workers: contextlib.ExitStack) -> None:
    a, b = filled(0.0), filled(8.0)
    first, second = (averager(workers, n, m, interpolation=LossInterpolation()) for n, m in (("a", a), ("b", b)))
    introduce(("a", first), ("b", second))
    first.update_send(1.0)
    assert not first.update_wait(3.0)  # the other has told no loss yet: nothing to go by
    second.update_send(1.0)
    first.update_send()
    assert first.update_wait(3.0)
    assert value_of(a) == 8.0 * 3 / 4


def test_below_the_divergence_threshold_merges_are_smaller(workers: contextlib.ExitStack) -> None:
    a = filled(0.0)
    first = averager(workers, "a", a, divergence_threshold=0.5)
    introduce(("a", first), ("b", averager(workers, "b", filled(8.0))))
    first.update_send()
    assert first.update_wait(0.125)
    assert value_of(a) == 8.0 * 0.5 * 0.125 / 0.5


def test_a_worker_that_diverged_takes_the_model_of_the_other_and_is_not_copied(workers: contextlib.ExitStack) -> None:
    a, b = filled(float("nan")), filled(8.0)
    first = averager(workers, "a", a, interpolation=LossInterpolation(), on_nonfinite="spread")
    second = averager(workers, "b", b, interpolation=LossInterpolation())
    introduce(("a", first), ("b", second))
    second.update_send(1.0)
    second.update_wait(1.0)
    first.update_send(float("nan"))
    assert first.update_wait()
    assert value_of(a) == 8.0
    assert first.comm_stats()["num_refused_losses"] == 1
    with pytest.warns(
        UserWarning, match="worker 'b' refused the model of 'a': got a model with infinite or NaN values"
    ):
        second.update_send(1.0)  # the model that a had published when it began was refused
    assert value_of(b) == 8.0
    assert second.comm_stats()["num_refused_models"] in (1, 2)  # the fetch that has just begun may have ended too


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16], ids=str)
def test_dtypes(workers: contextlib.ExitStack, dtype: torch.dtype) -> None:
    a, b = filled(1.0, dtype=dtype), filled(2.0, dtype=dtype)
    first, second = averager(workers, "a", a), averager(workers, "b", b)
    introduce(("a", first), ("b", second))
    first.update_send()
    assert first.update_wait()
    assert value_of(a) == 1.5


def test_mixed_dtypes_and_buffers_travel(workers: contextlib.ExitStack) -> None:
    def module(seed: int) -> nn.Module:
        made = nn.ModuleList([net(seed), mlp(seed).double()])
        made.register_parameter("phase", nn.Parameter(torch.full((3, 2), 1j * seed)))
        for buffer in made.buffers():
            buffer.add_(seed)
        return made

    a, b = module(1), module(2)
    expected = [(x + y) / 2 for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True)]
    first, second = averager(workers, "a", a), averager(workers, "b", b)
    introduce(("a", first), ("b", second))
    first.update_send()
    assert first.update_wait()
    for x, y in zip(a.state_dict().values(), expected, strict=True):
        if x.is_floating_point() or x.is_complex():
            torch.testing.assert_close(x, y)


def test_gradient_steps_under_the_fetch_are_kept(workers: contextlib.ExitStack) -> None:
    a = filled(0.0)
    first = averager(workers, "a", a)
    introduce(("a", first), ("b", averager(workers, "b", filled(8.0))))
    first.update_send()
    with torch.no_grad():
        next(a.parameters()).add_(2.0)  # the batch
    assert first.update_wait()
    assert value_of(a) == 2.0 + 0.5 * (8.0 - 2.0)


# Training.


def test_wrappers_converge_to_each_other_while_they_train(workers: contextlib.ExitStack) -> None:
    modules = [net(seed) for seed in (1, 2)]
    group = [(name, wrap(workers, name, module)) for name, module in zip("ab", modules, strict=True)]
    introduce(*group)
    before = distance(*modules)
    for step in range(60):
        for rank, (_, worker) in enumerate(group):
            x, y = batch(rank, step)
            loss = nn.functional.mse_loss(worker(x), y)
            loss.backward()
            with torch.no_grad():
                for parameter in worker.parameters():
                    assert parameter.grad is not None
                    parameter.sub_(1e-3 * parameter.grad)
                    parameter.grad = None
            worker.report_loss(loss.item())
            wait_for(partial(has_fetched, worker))
    assert distance(*modules) < before / 10
    stats = group[0][1].comm_stats()
    assert stats["num_rounds"] >= 55
    assert stats["max_staleness"] == 0
    num_bytes = local_of(group[0][1]).buffer.vector.layout.num_bytes
    assert stats["bytes_received"] > stats["num_rounds"] * num_bytes
    peers = {name.partition("/")[2] for name in stats if "/" in name}
    assert sum(stats[f"bytes_received/{peer}"] for peer in peers) >= stats["num_rounds"] * num_bytes
    assert all(stats[f"staleness/{peer}"] == 0 and stats[f"wait_median/{peer}"] > 0 for peer in peers)


def test_a_forward_does_not_wait_for_a_fetch(workers: contextlib.ExitStack) -> None:
    with silent_peer() as address:
        worker = wrap(workers, "a", filled(1.0), peers={"a": ANY_PORT, "b": address}, timeout=timedelta(seconds=1))
        for _ in range(5):
            worker(torch.ones(1, 50))
        stats = worker.comm_stats()
        assert stats["wait_seconds"] == 0
        assert stats["num_rounds"] == 0
        assert round_of(worker) == 1  # the first fetch is under way all the time
        worker.eval()  # waits for it, as long as it may take, and finds nothing
        assert worker.comm_stats()["num_failed_fetches"] == 1


def test_eval_merges_the_fetch_under_way(workers: contextlib.ExitStack) -> None:
    a = filled(0.0)
    worker = wrap(workers, "a", a)
    introduce(("a", worker), ("b", wrap(workers, "b", filled(8.0))))
    worker(torch.ones(1, 50))
    assert worker.last_peer is None
    worker.eval()
    assert value_of(a) == 4.0
    assert worker.last_peer == "b"
    worker(torch.ones(1, 50))
    assert not take_corrections(worker)


def test_a_merge_invalidates_older_graphs(workers: contextlib.ExitStack) -> None:
    worker = wrap(workers, "a", mlp(1))
    introduce(("a", worker), ("b", wrap(workers, "b", mlp(2))))
    x, y = batch(0, 0)
    loss = nn.functional.mse_loss(worker(x), y)
    worker.flush()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_loss_that_is_needed_must_be_reported(workers: contextlib.ExitStack) -> None:
    worker = wrap(workers, "a", filled(0.0), interpolation=LossInterpolation())
    worker(torch.ones(1, 50))
    with pytest.raises(
        RuntimeError, match=r"worker 'a': got no loss before the second .*LossInterpolation.*report_loss"
    ):
        worker(torch.ones(1, 50))
    worker.report_loss(1.0)
    worker(torch.ones(1, 50))


def test_fetch_probability(workers: contextlib.ExitStack) -> None:
    def fetches(name: str, probability: float) -> list[bool]:
        worker = averager(workers, name, filled(0.0), fetch_probability=probability)
        worker.add_peer("dead", REFUSED)
        counts = [0.0]
        for _ in range(200):
            worker.update_send()
            worker.update_wait()
            counts.append(worker.comm_stats()["num_fetches"])
        return [after > before for before, after in itertools.pairwise(counts)]

    assert not any(fetches("a", 0.0))
    assert all(fetches("a", 1.0))
    assert 60 < sum(fetches("a", 0.5)) < 140  # 100 expected, with a standard deviation of 7
    assert fetches("a", 0.5) != fetches("b", 0.5)  # each worker has a generator of its own
