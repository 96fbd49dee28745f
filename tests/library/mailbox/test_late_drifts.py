"""The drift of a late worker counts once and only once, in each method with an anchor."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

from gossip_modules import DiLoCo, IsoLoCo, MuLoCo, SlowMo, SparseLoCo, TopK
from gossip_modules.extend import Algorithm
from tests.harness.late_drifts import WEIGHTS
from tests.harness.mailbox import MailRun, MailWorker, equal, steps
from tests.harness.quadratics import CURVATURES, LEARNING_RATE, MINIMA, plain_sgd

H, N = 3, 4
SLOT = 20.0  # seconds from one outer step to the next
SCALES = torch.tensor([1.0, 0.2, 0.7, 1.3, 0.4, 0.9], dtype=torch.float64)
CENTRES = torch.tensor([0.3, -1.0, 0.5, 2.0, -0.2, 1.1], dtype=torch.float64)
TOKENS = (3, 1, 4, 2)
SCHEDULES: Sequence[Mapping[int, Collection[int]]] = (
    {},
    {2: [3]},
    {1: [0]},
    {2: [2], 3: [2]},
    {1: [1, 2], 2: [1], 3: [0]},
    {1: [3], 2: [3], 3: [3]},
)


class Pair(nn.Module):
    """A matrix and a vector, with a quadratic loss for each worker."""

    def __init__(self) -> None:
        super().__init__()
        start = torch.linspace(-1, 1, 6, dtype=torch.float64)
        self.a, self.b = nn.Parameter(start[:4].view(2, 2).clone()), nn.Parameter(start[4:].clone())

    def forward(self, worker: int) -> Tensor:
        x = torch.cat([self.a.flatten(), self.b])
        return CURVATURES[worker] / 2 * (SCALES * (x - MINIMA[worker] * CENTRES).square()).sum()

    def value(self) -> Tensor:
        return torch.cat([self.a.detach().flatten(), self.b.detach()])


class Law(NamedTuple):
    """An outer method: its algorithm, the step of its anchor, and its message.

    Attributes:
        algorithm: the algorithm.
        step: (momentum, mean drift) to the new momentum and the change of the anchor.
        code: the largest entries of a vector, as its message has them; None: whole vectors.
        decay: the share of the unsent rest.
        weighted_by: a name of `WEIGHTS`.
    """

    algorithm: Callable[[], Algorithm]
    step: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
    code: Callable[[Tensor], Tensor] | None = None
    decay: float = 1.0
    weighted_by: str | None = None


def nesterov(lr: float, momentum: float) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    def step(m: Tensor, drift: Tensor) -> tuple[Tensor, Tensor]:
        m = momentum * m + drift
        return m, -lr * (drift + momentum * m)

    return step


def slow(m: Tensor, drift: Tensor) -> tuple[Tensor, Tensor]:
    m = 0.5 * m + drift
    return m, -m


def isotropic(m: Tensor, drift: Tensor) -> tuple[Tensor, Tensor]:
    u, s, vh = torch.linalg.svd(drift[:4].view(2, 2))
    return nesterov(1.8, 0.8)(m, torch.cat([(s.mean() * u @ vh).flatten(), drift[4:]]))


def largest(x: Tensor) -> Tensor:
    """The three largest entries."""
    kept = torch.zeros_like(x)
    kept[x.abs().topk(3).indices] = 1.0
    return x * kept


LAWS: Mapping[str, Law] = {
    "diloco": Law(lambda: DiLoCo(H), nesterov(0.7, 0.9)),
    "diloco-tokens": Law(lambda: DiLoCo(H, weighted_by="tokens"), nesterov(0.7, 0.9), weighted_by="tokens"),
    "diloco-steps": Law(lambda: DiLoCo(H, weighted_by="num_steps"), nesterov(0.7, 0.9), weighted_by="num_steps"),
    "diloco-compressed": Law(
        lambda: DiLoCo(H, lr=0.5, momentum=0.5, compressor=TopK(0.5)), nesterov(0.5, 0.5), code=largest
    ),
    "muloco": Law(lambda: MuLoCo(H), nesterov(0.7, 0.6)),
    "isoloco": Law(lambda: IsoLoCo(H), isotropic),
    "sparseloco": Law(lambda: SparseLoCo(H, compressor=TopK(0.5)), nesterov(1.0, 0.0), code=largest, decay=0.95),
    "slowmo": Law(lambda: SlowMo(H), slow),
}


def descended(x: Tensor, num_steps: int) -> Tensor:
    """x [n, 6] after so many steps of SGD, each worker on its own loss."""
    curvatures, minima = (
        torch.tensor(values[: len(x)], dtype=torch.float64)[:, None] for values in (CURVATURES, MINIMA)
    )
    for _ in range(num_steps):
        x = x - LEARNING_RATE * curvatures * SCALES * (x - minima * CENTRES)
    return x


def oracle(law: Law, late: Mapping[int, Collection[int]], num_outer: int) -> tuple[Tensor, Tensor]:
    """The anchor [6] and the models [n, 6] after so many outer steps, by the law and the definition of lateness."""
    phi = Pair().value()
    x, base, rest = phi.repeat(N, 1), phi.repeat(N, 1), torch.zeros(N, 6, dtype=torch.float64)
    num_steps, m = [0] * N, torch.zeros(6, dtype=torch.float64)
    for r in range(1, num_outer + 1):
        x = descended(x, H)
        num_steps = [count + H for count in num_steps]
        messages, weights = [], []
        in_time = [i for i in range(N) if i not in late.get(r, ())]
        for i in in_time:
            sent = base[i] - x[i]
            if law.code is not None:
                rest[i] = law.decay * rest[i] + sent
                sent = law.code(rest[i])
                rest[i] -= sent
            messages.append(sent)
            weights.append(WEIGHTS[law.weighted_by](TOKENS[i] * num_steps[i], num_steps[i]))
        w = torch.tensor(weights, dtype=torch.float64)
        m, change = law.step(m, (w[:, None] * torch.stack(messages)).sum(0) / w.sum())
        phi = phi + change
        for i in in_time:
            x[i], base[i], num_steps[i] = phi, phi, 0
    return phi, x


def trained(worker: MailWorker, algorithm: Algorithm, num_outer: int) -> tuple[Tensor, Tensor]:
    """The anchor and the model of a worker."""
    pair = Pair()
    model = worker.wrap(pair, algorithm=algorithm)

    def meet(step: int) -> None:
        """Let all workers begin the round of this step at one time."""
        if step % H == 0:
            worker.clock.sleep(SLOT - worker.clock.now() % SLOT)

    def loss(step: int) -> Tensor:
        value: Tensor = model(worker.number)
        if algorithm.counts_tokens:
            model.count_tokens(TOKENS[worker.number])
        return value

    steps(worker, plain_sgd(model.parameters()), loss, H * num_outer, before=meet)
    return worker.anchor(), pair.value()


@pytest.mark.parametrize("held_for", [0.0, 2.0])
@pytest.mark.parametrize("late", SCHEDULES, ids=str)
@pytest.mark.parametrize("name", LAWS)
def test_late_drifts_have_the_law_of_the_method(
    name: str, late: Mapping[int, Collection[int]], held_for: float
) -> None:
    """Also where the late worker trains on with its round in flight."""
    law, num_outer = LAWS[name], 4
    run = MailRun(late, held_for=held_for, quorum=1)
    found = run.train(N, lambda worker: trained(worker, law.algorithm(), num_outer))
    anchor, models = oracle(law, late, num_outer)
    for i, (phi, x) in enumerate(found):
        torch.testing.assert_close(phi, anchor, rtol=0, atol=1e-12, msg=f"the anchor of worker {i}")
        torch.testing.assert_close(x, models[i], rtol=0, atol=1e-12)
    assert equal([phi for phi, _ in found])
