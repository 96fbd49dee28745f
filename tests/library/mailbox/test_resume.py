"""A run goes on from its objects alone when all workers have ended, and newcomers begin at its anchor."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Sequence
from pathlib import Path

import pytest

from gossip_modules.mailbox.clock import Clock
from gossip_modules.mailbox.errors import MailboxError
from gossip_modules.mailbox.job import read_run
from gossip_modules.mailbox.medium import open_medium
from gossip_modules.mailbox.memory import MemoryMedium
from gossip_modules.mailbox.rounds import Close
from gossip_modules.mailbox.saved_models import SavedModels
from gossip_modules.mailbox.sealed import Seal
from gossip_modules.membership.background_log import log
from tests.harness.quadratics import CURVATURES, LEARNING_RATE, MINIMA, START
from tests.library.mailbox.runs import OUTER, H, Worker, train


def anchors(nums_steps: Sequence[int], *, lr: Sequence[float] | None = None) -> list[float]:
    """The anchors after outer steps of so many inner steps of three workers, with a learning rate for each of them."""
    anchor, m, found = START, 0.0, []
    for num_steps, rate in zip(nums_steps, lr or [LEARNING_RATE] * len(nums_steps), strict=True):
        models = []
        for curvature, minimum in zip(CURVATURES[:3], MINIMA[:3], strict=True):
            x = anchor
            for _ in range(num_steps):
                x -= rate * curvature * (x - minimum)
            models.append(x)
        drift = anchor - sum(models) / 3
        m = OUTER["momentum"] * m + drift
        anchor -= OUTER["lr"] * (drift + OUTER["momentum"] * m)
        found.append(anchor)
    return found


@pytest.fixture(params=["memory", "file"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"memory://{uuid.uuid4().hex}" if request.param == "memory" else f"file://{tmp_path}/run"


def leave(worker: Worker) -> None:
    """End as a worker whose machine is taken away between two steps; the others are told."""
    worker.membership.close()


def vanish(worker: Worker) -> None:
    """End without a word."""
    worker.membership.release()


def models_of(address: str) -> SavedModels:
    medium = open_medium(address, timeout=5.0, key=b"key of these tests")
    read_run(medium)
    return SavedModels(medium)


class ModelsAreRefused(MemoryMedium):
    """A medium with room for the first model only."""

    def __init__(self, name: str) -> None:
        super().__init__(name, timeout=30.0, clock=Clock(), seal=Seal(b"key of these tests"))

    def create(self, path: str, data: bytes, *, deadline: float | None = None) -> bool:
        if path.startswith("model/") and int(path.split("/")[1]):
            raise MailboxError(f"no room for {path}")
        return super().create(path, data, deadline=deadline)


def test_a_run_that_ended_goes_on_from_its_objects(address: str) -> None:
    train(address, 2 * H)
    workers = train(address, 4 * H)
    (first,) = {worker.first for worker in workers}
    assert first == 2 * H + 1
    x = anchors([H, H, 3 * H - first, H])
    for worker in workers:
        assert worker.x[first] == pytest.approx(x[1], abs=1e-12)
        assert worker.x[4 * H] == pytest.approx(x[3], abs=1e-12)


def test_the_optimizer_goes_on(address: str) -> None:
    (before,) = train(address, 2 * H, parabolas=[0], momentum=0.9)
    (buffer,) = [state["momentum_buffer"].item() for state in before.optimizer.state.values()]
    (after,) = train(address, 2 * H + 1, parabolas=[0], momentum=0.9)
    assert [state["momentum_buffer"].item() for state in after.optimizer.state.values()] == [buffer]
    assert buffer != 0.0


def test_rounds_after_the_newest_model_are_applied(address: str) -> None:
    before = train(address, 4 * H, save_every=3, end=leave)
    assert models_of(address).numbers() == [0, 3]
    workers = train(address, 4 * H, save_every=3)
    for worker in workers:
        assert worker.x[worker.first] == pytest.approx(before[0].x[4 * H], abs=1e-12)
    assert before[0].x[4 * H] == pytest.approx(anchors([H] * 4)[-1], abs=1e-12)


def test_a_damaged_model_is_passed_over_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    address = f"file://{tmp_path}/run"
    before = train(address, 2 * H)
    path = tmp_path / "run" / "model" / f"{2:010d}"
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with caplog.at_level(logging.WARNING, logger=log.name):
        workers = train(address, 2 * H)
        log.flush(5.0)
    assert "the model of round 2 is damaged or gone; the one before it is used" in caplog.text
    for worker in workers:
        assert worker.x[worker.first] == pytest.approx(before[0].x[2 * H], abs=1e-12)


def test_a_run_without_any_model_that_opens_is_refused(tmp_path: Path) -> None:
    address = f"file://{tmp_path}/run"
    train(address, H, parabolas=[0])
    for path in (tmp_path / "run" / "model").iterdir():
        path.write_bytes(b"?")
    with pytest.raises(OSError, match=r"no saved model of the run opens, expected one"):
        train(address, H, parabolas=[0], grace=0.2)


def test_workers_that_vanished_are_not_waited_for(address: str) -> None:
    train(address, 2 * H, end=vanish, interval=0.02)
    workers = train(address, 4 * H, interval=0.02, grace=0.5)
    medium = workers[0].membership.medium
    closes = [path for path in medium.list("round/0-average") if path.endswith("/close")]
    data = medium.get(max(closes), max_bytes=1 << 20)
    assert data is not None
    close = Close.read(len(closes) - 1, data)
    assert close.number >= 2
    assert set(close.members) <= {worker.membership.number for worker in workers}


@pytest.mark.parametrize("save_every", [1, 1000])
def test_the_first_drift_of_a_newcomer_has_no_steps_of_others(address: str, save_every: int) -> None:
    """Three newcomers that stand still leave the anchor to its momentum."""
    train(address, 3 * H, save_every=save_every, end=leave)
    workers = train(address, 3 * H, save_every=save_every, lr=0.0)
    x = anchors([H, H, H, 1], lr=[LEARNING_RATE] * 3 + [0.0])
    for worker in workers:
        first_round = (worker.first // H + 1) * H
        assert worker.x[worker.first] == pytest.approx(x[2], abs=1e-12)
        assert worker.x[first_round] == pytest.approx(x[3], abs=1e-12)


def test_workers_that_end_together_leave_the_last_model_once(address: str) -> None:
    before = train(address, 4 * H, save_every=1000)
    models = models_of(address)
    assert models.numbers() == [0, 4]
    last = models.load()
    assert last is not None
    assert (last.is_average, last.step) == (True, 4 * H + 1)
    assert last.model["x"].item() == before[0].x[4 * H]


def test_a_model_that_is_not_saved_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    name = uuid.uuid4().hex
    with caplog.at_level(logging.WARNING, logger=log.name):
        (worker,) = train(lambda: ModelsAreRefused(name), 2 * H, parabolas=[0])
        log.flush(5.0)
    assert "worker 0: the model of round 2 is not saved: no room for model/0000000002" in caplog.text
    assert SavedModels(worker.membership.medium).numbers() == [0]
    assert f"worker/{0:06d}/left" in worker.membership.medium.list()
