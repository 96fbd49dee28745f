"""How methods are simulated: the rounds of an algorithm as they are, and the wrappers of this library by a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from ..algorithms.d_psgd import DPSGD
from ..algorithms.relay_sgd import RelaySGD
from ..graph_manager import networkx_graph
from ..graph_manager.base import GraphManager
from ..graph_manager.butterfly_groups import ButterflyGroups
from ..graph_manager.named_graphs import named_graph
from ..matcha.graph import MatchaGraph
from ..methods.chosen import Chosen, read_algorithm, read_compressor
from ..methods.graphs import pairs
from ..mixing_manager.base import MixingManager
from ..mixing_manager.graph_weights import default_mixing
from ..registry import Method
from ..rounds.algorithm import Algorithm, Over
from ..rounds.rows import StackedMixing
from ..rounds.stacked import Stacked
from ..schedule import Schedule
from .asynchronous import BilateralMethod, GroupMethod, PullMethod
from .choice import CODES, Choice
from .clocks import BucketClock, GatherClock, OverlapClock, SyncClock
from .codes import message_of
from .control import gossip_of, schedule_of
from .delays import MessageCost
from .gossip import LockstepMethod, SimulatedMethod
from .setting import Setting

MAX_DENSE_RANKS = 512
"""For more, dense linear algebra, as for the plan of a MATCHA graph, takes longer than all other methods together."""


def chosen_for(choice: Choice, setting: Setting, *, seed: int | None = None) -> Chosen:
    """The method with its settings: by the text that was chosen, else by its recipe and the setting.

    Args:
        choice: resolved.
        setting: of the simulation.
        seed: of the draws of the method; None: its own.

    Raises:
        ValueError: no step size is published for the code that was chosen, and the setting has none.
    """
    if choice.algorithm:
        return read_algorithm(choice.algorithm, seed=seed)
    chosen = read_algorithm(choice.method, seed=seed)
    wanted: dict[str, Any] = {
        "sync_every": setting.local_steps,
        "sync_period": setting.local_steps,
        "theta": setting.theta,
        "budget": setting.budget,
        "lr": setting.outer_lr,
        "momentum": setting.outer_momentum,
        "step_size": setting.step_size,
    }
    if choice.compressor:
        wanted["compressor"] = read_compressor(CODES[choice.compressor], seed=seed)
        wanted["step_size"] = setting.step_size or _published(chosen.method, CODES[choice.compressor])
    elif setting.world_size > MAX_DENSE_RANKS and getattr(chosen.made, "step_size", 0.0) is None:
        wanted["step_size"] = setting.step_size or 1.0  # the best one takes the spectrum of W
    return chosen.with_settings(wanted)


def _published(method: Method, code: str) -> float:
    if code not in method.step_sizes:
        raise ValueError(
            f"got {method.name} with {code} and no step_size, expected one: known are those of "
            f"{', '.join(method.step_sizes)}; pass --step-size, found on a few steps"
        )
    return method.step_sizes[code]


def make_method(choice: Choice, setting: Setting) -> SimulatedMethod:
    """The method that was chosen, ready for its first forward.

    Raises:
        ValueError: the graph has no such size, or the method cannot work on it.
    """
    choice = choice.resolved(setting.world_size, setting.peers_per_itr)
    chosen = chosen_for(choice, setting, seed=setting.seed)
    simulate = chosen.method.simulate or _SIMULATIONS.get(choice.method, simulate_rounds)
    method: SimulatedMethod = simulate(chosen, choice, setting)
    method.algorithm = choice.algorithm or chosen_for(choice, setting).text
    return method


def _graph(choice: Choice, setting: Setting) -> GraphManager:
    assert choice.graph is not None, "choices are resolved before methods are made"
    return named_graph(choice.graph, setting.world_size, setting.peers_per_itr)


def _undirected(choice: Choice, graph: GraphManager, *, is_static: bool) -> GraphManager:
    """The graph.

    Raises:
        ValueError: it is directed, or is to be static and changes.
    """
    if not graph.is_symmetric or (is_static and graph.is_dynamic):
        wanted = "an undirected graph that never changes" if is_static else "an undirected graph"
        remedy = "hypercube, torus or ring" if is_static else "bipartite-exponential, torus or ring"
        raise ValueError(f"got {choice.method} on {graph!r}, expected {wanted}; take {remedy}, with all neighbours")
    return graph


def simulate_rounds(chosen: Chosen, choice: Choice, setting: Setting) -> SimulatedMethod:
    """The rounds of an algorithm, which training waits for."""
    if not isinstance(chosen.made, Algorithm):
        raise ValueError(
            f"got {choice.method}, whose `simulate` is None, expected a method that the simulator knows: an Algorithm, "
            "or one that is registered with simulate="
        )
    algorithm, n = chosen.made, setting.world_size
    outer = algorithm.outer if isinstance(algorithm, Over) else algorithm
    mixing = _weights(algorithm, outer, choice, setting)
    driver = Stacked(algorithm, mixing, n, shape=setting.shape)
    schedule = schedule_of(choice.method, setting) if "gossip_every" in chosen.method.options else Schedule()
    return LockstepMethod(driver, schedule, _clock(algorithm, outer, mixing, setting))


def _weights(algorithm: Algorithm, outer: Algorithm, choice: Choice, setting: Setting) -> MixingManager | None:
    """W(t) on the graph that was chosen, or that the algorithm has by default; None: it only averages exactly."""
    n = setting.world_size
    if not outer.mixes:
        return None
    if not choice.graph:
        own = outer.default_graph(n) or named_graph(pairs(n), n)
        return outer.default_mixing(n) or default_mixing(own, push_sum=False)
    parts = [outer, algorithm.inner] if isinstance(algorithm, Over) else [outer]
    is_static = any(getattr(part, "needs_static_graph", False) for part in parts)
    graph = _undirected(choice, _graph(choice, setting), is_static=is_static)
    own_mixing = outer.default_mixing(n) if choice.graph == "ring" else None
    return own_mixing or default_mixing(graph, push_sum=False)


def _clock(algorithm: Algorithm, outer: Algorithm, mixing: MixingManager | None, setting: Setting) -> SyncClock:
    """What a round of an algorithm takes; with a delay, as long as a round that training waits for."""
    num_parameters = setting.num_parameters / getattr(outer, "num_fragments", 1)
    sender = algorithm
    while isinstance(sender, Over):
        sender = sender.inner
    if isinstance(sender, RelaySGD) and mixing is not None:
        message = setting.network.plain_message(_relayed_share(mixing.graph) * setting.model_bytes)
    else:
        message = message_of(sender, num_parameters, setting.network)
    if outer.averages_exactly and vars(sender).get("compressor") is not None:
        return GatherClock(setting.compute, setting.network, message)
    return SyncClock(setting.compute, setting.network, message, model_bytes=4 * num_parameters)


def _relayed_share(tree: GraphManager) -> float:
    """The share of a model in a message of RelaySGD: half, on a link that is in one of two trees."""
    num_links = sum(len(tree.phone_book(rank)) for rank in range(tree.world_size)) / 2
    return (tree.world_size - 1) / num_links if num_links else 1.0


def _all_reduce(chosen: Chosen, choice: Choice, setting: Setting) -> SimulatedMethod:
    kind = BucketClock if setting.has_gradients else SyncClock
    clock = kind(setting.compute, setting.network, MessageCost(setting.model_bytes))
    return LockstepMethod(Stacked(DPSGD(), None, setting.world_size), Schedule(average_every=1), clock)


def _gossip(chosen: Chosen, choice: Choice, setting: Setting) -> SimulatedMethod:
    """D-PSGD, SGP, Overlap SGP: gossip of the models themselves, also under a control."""
    arguments = chosen.arguments
    mixing, overlap = default_mixing(_graph(choice, setting), push_sum=arguments["push_sum"]), "overlap" in arguments
    clock = (OverlapClock if overlap else SyncClock)(setting.compute, setting.network, setting.message)
    return gossip_of(mixing, setting, clock, overlap=overlap)


def _matcha(chosen: Chosen, choice: Choice, setting: Setting) -> SimulatedMethod:
    n = setting.world_size
    if n > MAX_DENSE_RANKS:
        raise ValueError(
            f"got matcha with {n} workers, expected at most {MAX_DENSE_RANKS}: its plan is n x n matrices; take dpsgd"
        )
    base = networkx_graph(_undirected(choice, _graph(choice, setting), is_static=True))
    mixing = default_mixing(MatchaGraph(base, budget=chosen.made.budget, seed=setting.seed), push_sum=False)
    clock = SyncClock(setting.compute, setting.network, setting.message)
    return gossip_of(mixing, replace(setting, schedule=schedule_of(choice.method, setting)), clock)


def _ad_psgd(chosen: Chosen, choice: Choice, setting: Setting) -> SimulatedMethod:
    graph = _graph(choice, setting)
    if not graph.is_bipartite or graph.num_peers(0) > 1:
        raise ValueError(
            f"got adpsgd on {graph!r}, expected a bipartite graph with one peer per round; take bipartite-exponential"
        )
    mixing = StackedMixing(default_mixing(graph, push_sum=False))
    return BilateralMethod(mixing, setting.compute, setting.network, setting.message)


def _wagma(chosen: Chosen, choice: Choice, setting: Setting) -> SimulatedMethod:
    groups, period = ButterflyGroups(setting.world_size), chosen.made.sync_period
    return GroupMethod(setting.compute, setting.network, setting.message, groups, sync_period=period)


def _dpwa(chosen: Chosen, choice: Choice, setting: Setting) -> SimulatedMethod:
    return PullMethod(setting.compute, setting.network, setting.message, seed=setting.seed)


_SIMULATIONS: Mapping[str, Callable[[Chosen, Choice, Setting], SimulatedMethod]] = {
    "ar": _all_reduce,
    **dict.fromkeys(("dpsgd", "sgp", "osgp"), _gossip),
    "matcha": _matcha,
    "adpsgd": _ad_psgd,
    "wagma": _wagma,
    "dpwa": _dpwa,
}
"""The methods that are no algorithms, by name."""
