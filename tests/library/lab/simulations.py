"""What several tests of this folder share."""

from __future__ import annotations

import functools
from typing import Any

import networkx as nx
import numpy as np
import torch
from torch import Tensor

import gossip_modules as gm
from gossip_modules.graph_manager.named_graphs import GRAPHS, named_graph
from gossip_modules.lab import Compute, Consensus, Digits, LabPlan, Network, Prediction, Setting
from gossip_modules.lab.models import Models
from gossip_modules.lab.plan import Running
from gossip_modules.rounds.requests import SGDStep
from gossip_modules.rounds.rows import Array, Flags
from gossip_modules.schedule import Action, Schedule

EVEN = Compute(seconds=0.15, overhead_seconds=0.01)


UNEVEN = Compute(
    seconds=0.1, overhead_seconds=0.02, rank_spread=0.3, step_spread=0.4, straggle_share=0.2, straggle_factor=5, seed=3
)


LINKS = Network("1 Gbit/s")


CLUSTER = Setting(8, 11_175_000, EVEN, LINKS)  # 44.7 MB
MODEL_BYTES = 4 * 11_175_000


@functools.cache
def digits() -> Digits:
    """One problem for all tests of a process: training does not change it, and its images take 0.1 s to draw."""
    return Digits()


def irregular(n: int, *, is_directed: bool) -> gm.graph_manager.GraphManager:
    """A ring with chords from rank 0: degrees differ."""
    graph = nx.cycle_graph(n, create_using=nx.DiGraph if is_directed else nx.Graph)
    graph.add_edges_from((0, j) for j in range(2, n - 1, 2))
    return gm.graph_manager.NetworkXGraph(graph)


def graphs(n: int) -> dict[str, gm.graph_manager.GraphManager]:
    """All kinds that exist for n ranks, with one peer and with more."""
    found: dict[str, gm.graph_manager.GraphManager] = {}
    for name in GRAPHS:
        for peers in (1, 2, None):
            try:
                found[f"{name} {peers}"] = named_graph(name, n, peers)
            except ValueError:
                continue  # no such size
    found["matcha"] = gm.MatchaGraph(nx.cycle_graph(n), budget=0.5, seed=1)
    return {**found, "undirected": irregular(n, is_directed=False), "directed": irregular(n, is_directed=True)}


def prediction(method: str, *, error: float, seconds: float, disagreement: float = 0.0) -> Prediction:
    plan = LabPlan.of(method)
    return Prediction(plan, 0.4, error, 10.0, seconds / 10, seconds, 1e6, 0.5, disagreement, max_disagreement=0.2)


class Rounds:
    """The rounds and the clock of a method, on models of a test."""

    def __init__(self, running: Running) -> None:
        self.running, self.driver, self.clock, self._k = running, running.driver, running.clock, 0

    def forward(self, x: Tensor, sgd: SGDStep | None = None) -> None:
        """A safe point: x [n, d] takes in the messages of peers, and time goes on."""
        schedule = self.running.schedule
        action = schedule.action(self._k) if self._k or self.clock.begins_with_round else Action.SKIP
        self.clock.advance(self.driver.step(x, self._k, action, sgd=sgd))
        self._k += 1

    @property
    def starts(self) -> Array:
        return self.clock.starts

    @property
    def is_stepping(self) -> Flags | None:
        return self.clock.is_stepping

    @property
    def sent_bytes(self) -> float:
        return self.clock.sent_bytes


def made(what: object, setting: Setting, **others: object) -> Rounds:
    """The method of a plan, for float64 models of 8 x 8 numbers."""
    plan: Any = LabPlan.of(what, **others)
    task = Consensus() if isinstance(plan.schedule, Schedule) else digits()  # a control is in units of updates
    return Rounds(plan.make(setting, Models(task, setting.world_size)))


def start(n: int, seed: int = 0) -> Tensor:
    """The models of `Consensus`."""
    return Consensus(seed=seed).start(torch.zeros(n, 64, dtype=torch.float64))


def workers(n: int) -> np.ndarray:
    return np.arange(n)
