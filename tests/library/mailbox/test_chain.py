"""The chain of closes is of the rounds that move the anchor, beside which rounds of gossip may lack a worker."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gossip_modules import SlowMo
from tests.harness.mailbox import MailRun, MailWorker, steps
from tests.harness.quadratics import Point, plain_sgd

H, NUM_OUTER, N = 4, 4, 3


def test_a_worker_that_misses_gossip_takes_part_in_the_next_average(caplog: pytest.LogCaptureFixture) -> None:
    """Worker 2 is late in the first round of gossip, and in time later."""

    def body(worker: MailWorker) -> tuple[dict[str, int], Tensor]:
        point = Point()
        model = worker.wrap(point, algorithm=SlowMo(H, gossip_every=2))

        def loss(step: int) -> Tensor:
            worker.clock.sleep(1.0)
            value: Tensor = model(worker.number)
            return value

        steps(worker, plain_sgd(model.parameters()), loss, H * NUM_OUTER)
        return worker.closes(), worker.anchor()

    found = MailRun({1: [2]}, quorum=2).train(N, body)
    assert all(torch.equal(found[0][1], anchor) for _, anchor in found)
    assert "going on from the newest model" not in caplog.text
