"""Infinities and NaN of one worker stay there: no other worker and no saved model gets them, and it may go on."""

from __future__ import annotations

import logging
import uuid
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gossip_modules import BilatGossipDataParallel, DiLoCo, GossipDataParallel, NoLoCo
from gossip_modules.membership.background_log import log
from tests.harness.mailbox import MailRun, MailWorker

H, NUM_STEPS = 4, 26
METHODS: dict[str, dict[str, Any]] = {
    "diloco": {"algorithm": DiLoCo(H)},
    "noloco": {"algorithm": NoLoCo(H)},
    "gossip": {"schedule": H, "push_sum": False},
    "push-sum": {"schedule": H},
    "pairs": {"schedule": H},
}


def train(
    worker: MailWorker,
    method: str,
    *,
    sick_after: int = NUM_STEPS,
    mends: bool = False,
    sick: int = 1,
    momentum: float = 0.0,
) -> Tensor:
    """Train two numbers; returns them. One worker gets NaN in its model after a step.

    Args:
        worker: the worker.
        method: its method.
        sick_after: the step.
        mends: whether it catches the error, and goes on with another model.
        sick: the number of this worker.
        momentum: of SGD.
    """
    point = nn.Linear(2, 1, bias=False)
    nn.init.ones_(point.weight)
    if method == "pairs":
        worker.model = BilatGossipDataParallel(point, membership=worker.membership, **METHODS[method])  # type: ignore[assignment]
    else:
        worker.model = GossipDataParallel(point, membership=worker.membership, **METHODS[method])
    optimizer = torch.optim.SGD(point.parameters(), lr=0.1, momentum=momentum)
    worker.membership.track(optimizer=optimizer)
    for step in worker.membership.steps(NUM_STEPS):
        worker.clock.sleep(0.5)
        try:
            loss = worker.model(torch.eye(2)).square().sum()
        except FloatingPointError as error:
            if not str(error).startswith(f"rank {worker.number}: "):
                raise
            if not mends:
                break
            with torch.no_grad():
                point.weight.fill_(1.0)
            continue
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step == sick_after and worker.number == sick:
            with torch.no_grad():
                point.weight[0, 0] = float("nan")
    return point.weight.detach().clone()


@pytest.mark.parametrize("method", METHODS)
def test_a_worker_that_leaves_with_nan_gives_them_to_nobody(method: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger=log.name):
        first, sick, last = MailRun(quorum=1).train(3, lambda worker: train(worker, method, sick_after=9))
    assert first.isfinite().all()
    assert last.isfinite().all()
    assert sick.isnan().any()
    by_letters = method in ("push-sum", "pairs")
    assert ("worker 1 leaves with infinities, NaN or other tensors" in caplog.text) == by_letters


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("sick_after", [8, 9, 11, 12])
def test_no_saved_model_has_nan(method: str, sick_after: int) -> None:
    """A worker alone diverges, at each place of a round; the next one begins with finite numbers."""
    name = uuid.uuid4().hex
    MailRun(name=name).train(1, lambda worker: train(worker, method, sick=0, sick_after=sick_after, momentum=0.9))
    (found,) = MailRun(name=name).train(1, lambda worker: train(worker, method, momentum=0.9))
    assert found.isfinite().all()


@pytest.mark.parametrize("method", METHODS)
def test_a_worker_that_mends_its_model_goes_on(method: str) -> None:
    run = MailRun(quorum=1)
    found = run.train(3, lambda worker: train(worker, method, sick_after=9, mends=True))
    assert all(x.isfinite().all() for x in found)
    assert all(worker.membership._world.step == NUM_STEPS for worker in run.workers)  # type: ignore[union-attr]
