"""Noise and drift are those of closed forms, and every graph has a row."""

from __future__ import annotations

import math

import numpy as np
import pytest

from benchmarks import default_graphs
from benchmarks.default_graphs import disagreement, graphs, rows_of
from gossip_modules import RingGraph
from gossip_modules.graph_manager import EquiDynGraph
from gossip_modules.mixing_manager import UniformMixing, default_mixing


def test_noise_and_drift_are_geometric_series(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(default_graphs, "NUM_ROUNDS", 1000)
    n = 5
    noise, drift = disagreement(UniformMixing(RingGraph(n, peers_per_itr=2)))
    eigenvalues = np.array([(1 + 2 * math.cos(2 * math.pi * k / n)) / 3 for k in range(1, n)])
    assert noise == pytest.approx((eigenvalues**2 / (1 - eigenvalues**2)).sum() / n)
    assert drift == pytest.approx((np.abs(eigenvalues) / (1 - eigenvalues)).max())
    # Of independent rounds: rho + rho^2 + ..., for each of the n - 1 directions.
    graph = EquiDynGraph(n)
    noise, _ = disagreement(default_mixing(graph, push_sum=True))
    assert noise == pytest.approx(graph.rho / (1 - graph.rho) * (n - 1) / n, rel=0.1)


def test_every_graph_has_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(default_graphs, "NUM_ROUNDS", 30)
    rows = rows_of(3, error=1e-6)
    assert [row["role"] for row in rows] == list(graphs(3))
    base = next(row for row in rows if row["role"] == "base, 1 peer")
    assert (base["contraction_per_round"], base["rounds"], base["messages"]) == (0, 3, 2)
    ring = next(row for row in rows if row["role"] == "ring, both neighbours")
    assert (ring["graph"], ring["messages_per_round"], ring["noise"], ring["drift"]) == ("RingGraph", 2, 0, 0)
