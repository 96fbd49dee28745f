"""How update rules and RelaySGD are simulated."""

from __future__ import annotations

from ..algorithms.relay_sgd import RelaySGD, trees_of
from ..graph_manager.named_graphs import named_graph
from ..mixing_manager.base import MetropolisHastingsMixing
from ..rounds.algorithm import Algorithm
from ..rounds.stacked import Stacked
from ..schedule import Schedule
from ..simulate.choice import Choice
from ..simulate.clocks import SyncClock
from ..simulate.gossip import LockstepMethod, SimulatedMethod
from ..simulate.setting import Setting
from .simulated import undirected


def simulate_rule(rule: Algorithm, choice: Choice, setting: Setting) -> SimulatedMethod:
    """A rule on the graph that was chosen; on a ring with the rule's own weights."""
    mixing = undirected(choice, setting, is_static=rule.needs_static_graph)
    if choice.graph == "ring":
        mixing = rule.default_mixing(setting.world_size) or mixing
    message = setting.network.plain_message(setting.model_bytes)
    clock = SyncClock(setting.compute, setting.network, message, model_bytes=setting.model_bytes)
    return LockstepMethod(Stacked(rule, mixing), Schedule(), clock)


def simulate_relay_sgd(choice: Choice, setting: Setting) -> SimulatedMethod:
    """RelaySGD itself, on a tree or two; a link that is in one of two carries half a model."""
    assert choice.graph is not None, "choices are resolved before methods are made"
    graph = named_graph(choice.graph, setting.world_size)
    trees_of(graph)
    mixing = MetropolisHastingsMixing(graph)
    num_links = sum(len(graph.phone_book(rank)) for rank in range(graph.world_size)) / 2
    share = (graph.world_size - 1) / num_links if num_links else 1.0
    message = setting.network.plain_message(share * setting.model_bytes)
    clock = SyncClock(setting.compute, setting.network, message, model_bytes=setting.model_bytes)
    return LockstepMethod(Stacked(RelaySGD(), mixing, shape=setting.shape), Schedule(), clock)
