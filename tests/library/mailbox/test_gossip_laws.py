"""Methods that mix over the graph of a close have their law, with late workers and without."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from gossip_modules import GASLoC, LocalSGD, NoLoCo
from gossip_modules.graph_manager import RandomMatchingGraph
from gossip_modules.graph_manager.named_graphs import undirected_ring
from gossip_modules.mixing_manager import GraphMixing, MetropolisHastingsMixing, MixingManager
from tests.harness.mailbox import MailRun, MailWorker, steps
from tests.harness.quadratics import plain_sgd
from tests.library.mailbox.test_late_drifts import SLOT, H, N, Pair, descended

OPTIONS: Mapping[str, Any] = {
    "noloco": lambda: {"algorithm": NoLoCo(H)},
    "gasloc": lambda: {"algorithm": GASLoC(H)},
    "dpsgd": lambda: {"push_sum": False, "schedule": H, "graph": undirected_ring},
    "localsgd": lambda: {"algorithm": LocalSGD(H)},
}
SCHEDULES: tuple[Mapping[int, Collection[int]], ...] = ({}, {2: [3]}, {1: [0], 2: [0]}, {2: [1, 2], 3: [1]})


def weights(name: str, n: int) -> MixingManager:
    if name == "noloco":
        return GraphMixing(RandomMatchingGraph(n, seed=0))
    return MetropolisHastingsMixing(undirected_ring(n))


def oracle(name: str, late: Mapping[int, Collection[int]], num_outer: int) -> Tensor:
    """The models [n, 6] after so many rounds; a late worker keeps its model and its memory."""
    x = Pair().value().repeat(N, 1)
    phi, y, m = x.clone(), x.clone(), torch.zeros_like(x)
    for r in range(1, num_outer + 1):
        x = descended(x, H)
        # A schedule has a round before the first step too, which leaves equal models as they are.
        c = [i for i in range(N) if i not in late.get(r + (name == "dpsgd"), ())]
        w = torch.ones(1, 1, dtype=torch.float64) if len(c) == 1 else weights(name, len(c)).matrix(r - 1).double()
        if name == "localsgd":
            x[c] = x[c].mean(0).expand(len(c), 6)
        elif name == "dpsgd":
            x[c] = w @ x[c]
        elif name == "noloco":
            m[c] = 0.5 * m[c] + w @ (0.7 * (x - phi) + 0.7 * phi)[c] - 0.7 * phi[c]
            phi[c] = phi[c] + m[c]
            x[c] = phi[c]
        else:
            new = phi + 0.7 * (x - phi)
            e = (new + 0.9 * (new - y))[c]
            y[c] = new[c]
            phi[c] = e + 0.5 * (w @ e - e)
            x[c] = phi[c]
    return x


@pytest.mark.parametrize("held_for", [0.0, 2.0])
@pytest.mark.parametrize("late", SCHEDULES, ids=str)
@pytest.mark.parametrize("name", OPTIONS)
def test_mixing_over_a_close_is_the_law(name: str, late: Mapping[int, Collection[int]], held_for: float) -> None:
    def body(worker: MailWorker) -> Tensor:
        pair = Pair()
        model = worker.wrap(pair, **OPTIONS[name]())

        def meet(step: int) -> None:
            if step % H == 0:
                worker.clock.sleep(SLOT - worker.clock.now() % SLOT)

        steps(worker, plain_sgd(model.parameters()), lambda step: model(worker.number), 4 * H, before=meet)
        return pair.value()

    found = MailRun(late, held_for=held_for, quorum=1).train(N, body)
    torch.testing.assert_close(torch.stack(found), oracle(name, late, 4), rtol=0, atol=1e-12)
