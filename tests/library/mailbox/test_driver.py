"""Drifts of late workers count once, in a later round, and nothing of a worker is lost."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from gossip_modules import DiLoCo, PULSELoCo
from tests.harness.late_drifts import outer_steps
from tests.harness.mailbox import MailRun, MailWorker, steps
from tests.harness.quadratics import Point, plain_sgd

H, NUM_OUTER = 5, 4
LATE = {2: [4], 4: [4]}


def solution(worker: MailWorker, algorithm: DiLoCo) -> tuple[float, float]:
    """The model and the anchor after all outer steps on problem Q."""
    point = Point()
    model = worker.wrap(point, algorithm=algorithm)
    steps(worker, plain_sgd(model.parameters()), lambda step: model(worker.number), H * NUM_OUTER)
    return point.x.item(), worker.anchor().item()


def test_workers_in_time_have_the_golden_value_of_diloco() -> None:
    found = MailRun().train(5, lambda worker: solution(worker, DiLoCo(H)))
    assert {x for pair in found for x in pair} == {found[0][0]}
    assert found[0][0] == pytest.approx(0.7702157507, abs=5e-11)


def test_the_drift_of_a_late_worker_counts_in_the_next_outer_step() -> None:
    found = MailRun(LATE).train(5, lambda worker: solution(worker, DiLoCo(H)))
    last = outer_steps(LATE)[-1]
    assert [x for x, _ in found] == pytest.approx(last.models.tolist(), abs=1e-12)
    assert [phi for _, phi in found[:4]] == pytest.approx([last.anchor] * 4, abs=1e-12)
    assert (last.anchor, last.models[4]) == pytest.approx((0.1789581115, 1.8775301647), abs=5e-11)


class Wide(nn.Module):
    """Enough numbers in bfloat16 that a bit for each is more than the bytes of a message beside its tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.ones(1 << 20, dtype=torch.bfloat16))

    def forward(self) -> Tensor:
        return self.x.sum()


def test_a_message_may_have_all_entries_and_their_bits() -> None:
    def anchor(worker: MailWorker) -> Tensor:
        model = worker.wrap(Wide(), algorithm=PULSELoCo(2, lr=0.5, momentum=0.5))
        steps(worker, torch.optim.SGD(model.parameters(), lr=1.0), lambda step: model(), 2)
        return worker.anchor()

    for phi in MailRun().train(2, anchor):
        torch.testing.assert_close(phi, torch.full_like(phi, 1 - 0.5 * (2 + 0.5 * 2)))  # the drift is 2 everywhere
