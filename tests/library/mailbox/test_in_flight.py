"""Each optimizer step of a worker counts once; in the midst of rounds a wrapper gives a right answer, or refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from gossip_modules import DiLoCo, LocalSGD, NoLoCo, StreamingDiLoCo
from gossip_modules.extend import Algorithm
from tests.harness.mailbox import MailRun, MailWorker, equal, steps
from tests.harness.quadratics import CURVATURES, MINIMA, plain_sgd

H, N = 4, 3


class Pair(nn.Module):
    """Two numbers, in modules of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.ParameterList([torch.full((2,), 0.5, dtype=torch.float64)]) for _ in range(2))

    def forward(self, worker: int) -> Tensor:
        parts = torch.cat([self.a[0], 0.5 * self.b[0]])
        return CURVATURES[worker] / 2 * (parts - MINIMA[worker]).square().sum()

    def value(self) -> Tensor:
        return torch.cat([self.a[0].detach(), self.b[0].detach()])


class Trained(NamedTuple):
    """The end of a worker: the sum of its optimizer steps, its model, its anchor, and whether rounds are in flight."""

    total: Tensor
    model: Tensor
    anchor: Tensor
    in_flight: list[bool]


def trained(worker: MailWorker, algorithm: Algorithm, num_steps: int, seconds: float) -> Trained:
    """Train a worker whose steps take so many seconds."""
    pair, total = Pair(), torch.zeros(4, dtype=torch.float64)
    model = worker.wrap(pair, algorithm=algorithm)
    optimizer = plain_sgd(model.parameters())
    for step in worker.membership.steps(num_steps + 1):
        worker.clock.sleep(seconds)
        loss = model(worker.number)
        if step == num_steps:
            break
        optimizer.zero_grad()
        loss.backward()
        before = pair.value()
        optimizer.step()
        total += pair.value() - before
    return Trained(total, pair.value(), worker.anchor(), [driver.task is not None for driver in worker.drivers])


FRAGMENTS: dict[str, Any] = {"fragments": [["a"], ["b"]], "arrival": "carry"}


@pytest.mark.parametrize(
    ("algorithm", "num_steps"),
    [
        (DiLoCo(H), 24),
        (DiLoCo(H, arrival="carry", delay=1), 25),
        (StreamingDiLoCo(H, delay=1, **FRAGMENTS), 25),
        (StreamingDiLoCo(H, delay=3, **FRAGMENTS), 27),
    ],
    ids=str,
)
@pytest.mark.parametrize("seconds", [(0.2, 0.2, 0.2), (0.1, 0.5, 3.0), (2.0, 0.2, 0.2)], ids=str)
@pytest.mark.parametrize("held_for", [0.0, 3.0, 9.0])
def test_each_step_counts_once(algorithm: Any, num_steps: int, seconds: tuple[float, ...], held_for: float) -> None:
    """The sent drifts of a worker, and the drift that it has at the end, are the sum of its steps.

    Anchors follow the means of the drifts. Some rounds have late messages, and some end in flight, with this worker or
    without it.
    """
    run = MailRun({2: [1], 3: [1, 2], 5: [0]}, held_for=held_for, quorum=1)
    found = run.train(N, lambda worker: trained(worker, algorithm, num_steps, seconds[worker.number]))
    drifts = run.drifts()
    num_landed, size = 0, 4 // len(drifts)
    for i, (worker, own) in enumerate(zip(run.workers, found, strict=True)):
        parts = [x.split(size) for x in (own.total, own.model, own.anchor)]
        for p, (driver, rows) in enumerate(zip(worker.drivers, (drifts[p] for p in sorted(drifts)), strict=True)):
            total, model, anchor = (x[p] for x in parts)
            counted = sum((row[i] for row in rows if i in row), torch.zeros(size, dtype=torch.float64))
            if not own.in_flight[p]:
                num_landed += 1
                rest = anchor - model - missed_by(driver, size)
                torch.testing.assert_close(counted + rest, -total, rtol=0, atol=1e-12)
    assert num_landed
    for p, (name, rows) in enumerate(sorted(drifts.items())):
        phi, m = torch.full((4 // len(drifts),), 0.5, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
        history = [phi]
        for row in rows:
            mean = torch.stack(list(row.values())).mean(0)
            m = 0.9 * m + mean
            phi = phi - 0.7 * (mean + 0.9 * m)
            history.append(phi)
        for worker, own in zip(run.workers, found, strict=True):
            torch.testing.assert_close(
                own.anchor.split(size)[p], history[worker.closes()[f"{name}-average"]], rtol=0, atol=1e-12
            )


def missed_by(driver: Any, size: int) -> Tensor:
    """The sum of the changes of the anchor that a late worker has not applied to its model."""
    entry = driver.memory.entries.get("missed rounds")
    return torch.zeros(size, dtype=torch.float64) if entry is None else torch.cat(list(entry.vector.parts))


def test_two_runs_in_one_process_do_not_meet() -> None:
    """Each worker trains a model of each of two runs, in turn; each run is as it is alone."""

    def alone(worker: MailWorker) -> Tensor:
        return trained(worker, DiLoCo(H), 12, 0.5).anchor

    expected = MailRun(key=b"key of these tests").train(2, alone)[0]
    one, other = MailRun(key=b"key of these tests"), MailRun(key=b"key of these tests")
    other.clock.close()
    other.clock = one.clock

    def both(worker: MailWorker) -> list[Tensor]:
        second = MailWorker(other, min_workers=2)
        other.workers.append(second)
        pairs, optimizers = (Pair(), Pair()), []
        for own, pair in zip((worker, second), pairs, strict=True):
            optimizers.append(plain_sgd(own.wrap(pair, algorithm=DiLoCo(H)).parameters()))
        loops = [own.membership.steps(13) for own in (worker, second)]
        for step, _ in zip(*loops, strict=True):
            worker.clock.sleep(0.5)
            for own, optimizer in zip((worker, second), optimizers, strict=True):
                loss = own.model(own.number)
                if step < 12:
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
        second.model.close()
        return [worker.anchor(), second.anchor()]

    for anchors in one.train(2, both):
        assert equal([expected, *anchors])


def test_micro_batches_under_no_sync_are_one_step() -> None:
    def body(worker: MailWorker, is_accumulated: bool) -> Tensor:
        pair = Pair()
        model = worker.wrap(pair, algorithm=DiLoCo(H))
        optimizer = plain_sgd(model.parameters())
        for step in worker.membership.steps(2 * H + 1):
            optimizer.zero_grad()
            if is_accumulated:
                with model.no_sync():
                    (model(worker.number) / 2).backward()
                (model(worker.number) / 2).backward()
            else:
                model(worker.number).backward()
            if step < 2 * H:
                optimizer.step()
        return worker.anchor()

    once, again = (MailRun().train(2, lambda worker, flag=flag: body(worker, flag)) for flag in (False, True))  # type: ignore[misc]
    assert equal(once)
    torch.testing.assert_close(again, once, rtol=0, atol=1e-12)


def test_evaluation_and_checkpoints_between_steps_change_nothing() -> None:
    def body(worker: MailWorker, is_watched: bool) -> Tensor:
        pair = Pair()
        model = worker.wrap(pair, algorithm=DiLoCo(H))

        def look(step: int) -> None:
            if is_watched and step:
                before = pair.value()
                model.eval()
                with torch.no_grad():
                    model(worker.number)
                with model.averaged():
                    torch.testing.assert_close(pair.value(), worker.anchor(), rtol=0, atol=0)
                assert torch.equal(pair.value(), before)
                model.train()
                model.state_dict()
                model.flush()
                model.settle()

        steps(worker, plain_sgd(model.parameters()), lambda step: model(worker.number), 3 * H, before=look)
        return worker.anchor()

    plain, watched = (MailRun({2: [1]}).train(N, lambda w, flag=flag: body(w, flag)) for flag in (False, True))  # type: ignore[misc]
    assert equal([*plain, *watched])


@pytest.mark.parametrize("algorithm", [DiLoCo(H), NoLoCo(H), LocalSGD(H)], ids=lambda each: type(each).__name__)
def test_averages_over_all_workers_are_the_anchor_or_refused(algorithm: Algorithm) -> None:
    """A worker alone cannot average over all: what needs that says so, before it changes anything."""

    def body(worker: MailWorker) -> None:
        pair = Pair()
        model = worker.wrap(pair, algorithm=algorithm)
        optimizer = plain_sgd(model.parameters())
        steps(worker, optimizer, lambda step: model(worker.number), 2 * H + 2)
        before = pair.value()
        calls: list[Callable[[], object]] = [
            model.average_,
            model.consensus_distance,
            lambda: model.average_optimizer_state(optimizer),
        ]
        if not algorithm.has_equal_memory:
            calls += [model.averaged_state_dict, model.averaged().__enter__]
        for call in calls:
            with pytest.raises((ValueError, RuntimeError), match=r"(?s)got .*expected .*"):
                call()
        assert torch.equal(pair.value(), before)
        if algorithm.has_equal_memory:
            state = model.averaged_state_dict(rank0_only=False)
            assert torch.equal(torch.cat([state["a.0"], state["b.0"]]), worker.anchor())

    MailRun().train(2, body)
