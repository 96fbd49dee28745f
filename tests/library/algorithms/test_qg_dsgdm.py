"""QG-DSGDm refuses graphs on which differences between ranks grow by the momentum of the mixing."""

from __future__ import annotations

import re
from functools import partial

import pytest
import torch
import torch.distributed as dist

from gossip_modules import GossipDataParallel, QGDSGDm, RingGraph
from gossip_modules.extend import SGDStep
from gossip_modules.graph_manager import BaseGraph, EquiDynGraph, EquiStaticGraph, GraphManager, default_graph
from gossip_modules.mixing_manager import MatrixMixing, MixingManager, default_mixing
from gossip_modules.rounds.stacked import Stacked
from tests.harness.problems import loss_of, mlp, train_step
from tests.harness.ranks import run_ranks


class Unchecked(QGDSGDm):
    """QG-DSGDm that takes any weights."""

    def check(self, mixing: MixingManager) -> None:
        """See `Algorithm`."""


@pytest.mark.parametrize(("b", "mu"), [(0.9, None), (0.4, None), (0.99, 0.0), (0.5, 0.9)])
def test_the_limit_of_quasi_global_momentum_is_that_of_its_recursion(b: float, mu: float | None) -> None:
    """x' = w (x - b m) and m' = mu m + (1 - mu) (x - x') for an eigenvalue w of the weights."""
    keep = b if mu is None else mu
    limit = -(1 + keep) / (1 + keep + 2 * (1 - keep) * b)
    for lowest in (limit - 0.01, limit + 0.01):
        mixing = MatrixMixing(RingGraph(2), torch.tensor([[1 + lowest, 1 - lowest], [1 - lowest, 1 + lowest]]) / 2)
        if lowest > limit:
            QGDSGDm(mu).check_step(mixing, SGDStep(0.1, b))
        else:
            with pytest.raises(
                ValueError, match=rf"QGDSGDm: got mu={keep:g} and a momentum={b:g} on .* grow 1.0\d* times"
            ):
                QGDSGDm(mu).check_step(mixing, SGDStep(0.1, b))


@pytest.mark.parametrize(
    ("mu", "graph"),
    [
        (None, RingGraph(7)),
        (None, RingGraph(8)),
        (None, RingGraph(16)),
        (None, BaseGraph(25)),
        (0.5, BaseGraph(5)),
        (0.5, BaseGraph(25)),
        (0.5, BaseGraph(8)),
        (0.5, EquiStaticGraph(25)),
        (0.5, RingGraph(12, peers_per_itr=2)),
        (0.5, EquiDynGraph(9)),
    ],
    ids=str,
)
def test_a_graph_is_refused_where_rounds_of_the_rule_itself_grow(mu: float | None, graph: GraphManager) -> None:
    """Rounds on a vector of all ranks, of models that differ and steps that are the momentum alone."""
    mixing, rule = default_mixing(graph, push_sum=False), QGDSGDm(mu)
    x = torch.randn(graph.world_size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x -= x.mean()
    driver, norms = Stacked(Unchecked(mu), mixing), []
    for t in range(600):
        if driver.momentum is not None:
            x -= 0.9 * driver.momentum[:, 0]
        driver.step(x[:, None], t, sgd=SGDStep(1.0, 0.9) if t else None)
        norms.append(float((x - x.mean()).norm()))
    if norms[-1] < 0.1:
        rule.check(mixing)
    else:
        with pytest.raises(
            ValueError, match=rf"QGDSGDm: got mu=.* and (a|the usual) momentum=0.9 on .*{type(graph).__name__}"
        ) as caught:
            rule.check(mixing)
        factor = float(re.findall(r"grow ([\d.]+) times from one round to the next", str(caught.value))[0])
        assert factor == pytest.approx((norms[599] / norms[299]) ** (1 / 300), abs=0.01)


def test_the_default_graphs_suit_quasi_global_momentum() -> None:
    for n in range(1, 33):
        QGDSGDm().check(default_mixing(default_graph(n, push_sum=False), push_sum=False))


def test_the_first_step_shows_a_momentum_with_which_differences_grow() -> None:
    """On a directed ring of six they die out with 0.9, and grow with 0.6."""

    def body(group: dist.ProcessGroup, momentum: float) -> None:
        model = mlp()
        wrapper = GossipDataParallel(model, process_group=group, algorithm=QGDSGDm(), graph=RingGraph(6))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=momentum)
        train_step(wrapper, optimizer, group.rank(), 0)
        if momentum == 0.6:
            with pytest.raises(ValueError, match=r"QGDSGDm: got mu=0.6 and a momentum=0.6 on .* grow 1.03\d\d times"):
                loss_of(wrapper, group.rank(), 1)
        else:
            train_step(wrapper, optimizer, group.rank(), 1)
        wrapper.close()

    for momentum in (0.6, 0.9):
        run_ranks(6, partial(body, momentum=momentum))
