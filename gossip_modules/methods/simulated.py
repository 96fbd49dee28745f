"""How each method is simulated: functions of (choice, setting), which the entries of the registry name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

from ..algorithms.d_psgd import DPSGD
from ..algorithms.outer_method import OuterMethod
from ..algorithms.power_gossip import PowerGossip
from ..algorithms.relay_sgd import RelaySGD
from ..graph_manager.base import GraphManager
from ..graph_manager.butterfly_groups import ButterflyGroups
from ..graph_manager.named_graphs import default_graph_name, named_graph
from ..graph_manager.static_graphs import networkx_graph
from ..matcha.graph import MatchaGraph
from ..mixing_manager.base import MetropolisHastingsMixing, MixingManager
from ..mixing_manager.graph_weights import default_mixing
from ..rounds.algorithm import Algorithm
from ..rounds.rows import StackedMixing
from ..rounds.stacked import Stacked
from ..schedule import Schedule
from ..simulate.asynchronous import BilateralMethod, PullMethod
from ..simulate.choice import Choice
from ..simulate.clocks import BucketClock, GatherClock, OverlapClock, SyncClock
from ..simulate.codes import coded_message
from ..simulate.delays import MessageCost
from ..simulate.gossip import LockstepMethod, SimulatedMethod
from ..simulate.groups import GroupMethod
from ..simulate.power_gossip import power_message, power_step_size
from ..simulate.setting import Setting
from .controlled_simulation import gossip_of, schedule_of
from .gossipers import choco, deep_squeeze, moniqua, sparta
from .one_thread import measured_message, pair
from .simulated_options import MethodOptions

PeersPerItr: TypeAlias = int | Mapping[int, int]
"""Peers per round, or a schedule of it."""
MakeOuter: TypeAlias = Callable[[MethodOptions, int], OuterMethod]
"""Makes an outer method, given options and a seed."""
MAX_MATCHA_RANKS = 512
"""For more, the plan of a MATCHA graph, dense linear algebra, takes longer than all other methods together."""


def pairs(world_size: int, peers_per_itr: PeersPerItr = 1) -> str:
    """The graph of D-PSGD where none is named: pairs, or in small odd worlds a ring."""
    if world_size == 1:
        return "bipartite-exponential"
    return default_graph_name(world_size, push_sum=False, peers_per_itr=peers_per_itr)


def static(world_size: int, peers_per_itr: PeersPerItr = 1) -> str:
    """The best undirected graph that never changes."""
    if world_size & (world_size - 1) == 0:
        return "hypercube"
    is_prime = all(world_size % divisor for divisor in range(2, int(world_size**0.5) + 1))
    return "ring" if is_prime else "torus"


def lockstep(
    algorithm: Algorithm,
    mixing: MixingManager | None,
    setting: Setting,
    message: MessageCost,
    *,
    schedule: Schedule | None = None,
    options: Mapping[str, float] | None = None,
) -> LockstepMethod:
    """The rounds of an algorithm, which training waits for.

    Args:
        algorithm: what a round does.
        mixing: the weights; None: exact averages alone.
        setting: has compute and links.
        message: what a rank sends to a peer.
        schedule: which step does what; None: the algorithm says when it has rounds.
        options: see `LockstepMethod`.
    """
    clock = SyncClock(setting.compute, setting.network, message, model_bytes=setting.model_bytes)
    driver = Stacked(algorithm, mixing, setting.world_size, shape=setting.shape)
    return LockstepMethod(driver, schedule or Schedule(), clock, options=options)


def simulate_all_reduce(choice: Choice, setting: Setting) -> SimulatedMethod:
    """AllReduce SGD."""
    kind = BucketClock if setting.has_gradients else SyncClock
    clock = kind(setting.compute, setting.network, MessageCost(setting.model_bytes))
    return LockstepMethod(Stacked(DPSGD(), None, setting.world_size), Schedule(average_every=1), clock)


def simulate_local_sgd(choice: Choice, setting: Setting) -> SimulatedMethod:
    """Local SGD."""
    schedule, message = Schedule(gossip_every=setting.local_steps, average_every=1), MessageCost(setting.model_bytes)
    return lockstep(DPSGD(), None, setting, message, schedule=schedule, options={"sync_period": setting.local_steps})


def _graph(choice: Choice, setting: Setting) -> GraphManager:
    assert choice.graph is not None, "choices are resolved before methods are made"
    return named_graph(choice.graph, setting.world_size, setting.peers_per_itr)


def undirected(choice: Choice, setting: Setting, *, is_static: bool = False) -> MixingManager:
    """The weights on the graph that was chosen.

    Raises:
        ValueError: it is directed, or is to be static and changes.
    """
    graph = _graph(choice, setting)
    if not graph.is_symmetric or (is_static and graph.is_dynamic):
        wanted = "an undirected graph that never changes" if is_static else "an undirected graph"
        remedy = "hypercube, torus or ring" if is_static else "bipartite-exponential, torus or ring"
        raise ValueError(f"got {choice.method} on {graph!r}, expected {wanted}; take {remedy}, with all neighbours")
    return default_mixing(graph, push_sum=False)


def _plain(mixing: MixingManager, setting: Setting) -> SimulatedMethod:
    """Gossip of the models themselves, which training waits for."""
    clock = SyncClock(setting.compute, setting.network, setting.network.plain_message(setting.model_bytes))
    return gossip_of(mixing, setting, clock)


def simulate_d_psgd(choice: Choice, setting: Setting) -> SimulatedMethod:
    """D-PSGD."""
    return _plain(default_mixing(_graph(choice, setting), push_sum=False), setting)


def simulate_sgp(choice: Choice, setting: Setting) -> SimulatedMethod:
    """SGP."""
    return _plain(default_mixing(_graph(choice, setting), push_sum=True), setting)


def simulate_osgp(choice: Choice, setting: Setting) -> SimulatedMethod:
    """Overlap SGP."""
    mixing = default_mixing(_graph(choice, setting), push_sum=True)
    clock = OverlapClock(setting.compute, setting.network, setting.network.plain_message(setting.model_bytes))
    return gossip_of(mixing, setting, clock, overlap=True)


def simulate_matcha(choice: Choice, setting: Setting) -> SimulatedMethod:
    """MATCHA."""
    n = setting.world_size
    if n > MAX_MATCHA_RANKS:
        raise ValueError(
            f"got matcha with {n} workers, expected at most {MAX_MATCHA_RANKS}: its plan is n x n matrices; take dpsgd"
        )
    graph = undirected(choice, setting, is_static=True).graph
    base = networkx_graph(graph)
    mixing = default_mixing(MatchaGraph(base, budget=setting.budget, seed=setting.seed), push_sum=False)
    schedule = schedule_of(choice.method, setting)
    return lockstep(DPSGD(), mixing, setting, setting.network.plain_message(setting.model_bytes), schedule=schedule)


def options_of(choice: Choice, setting: Setting) -> MethodOptions:
    """The options of training that the choice and the setting stand for."""
    return MethodOptions(
        compressor=choice.compressor or MethodOptions.compressor,
        step_size=setting.step_size or 0.0,
        theta=setting.theta or MethodOptions.theta,
        budget=setting.budget,
        sync_period=setting.local_steps,
        outer_lr=setting.outer_lr or MethodOptions.outer_lr,
        outer_momentum=MethodOptions.outer_momentum if setting.outer_momentum is None else setting.outer_momentum,
    )


def _coded(algorithm: Algorithm, mixing: MixingManager, choice: Choice, setting: Setting) -> SimulatedMethod:
    """An algorithm that sends its vectors in a code."""
    message = coded_message(algorithm.compressor, setting.num_parameters, setting.links)  # type: ignore[attr-defined]
    return lockstep(algorithm, mixing, setting, message, schedule=schedule_of(choice.method, setting))


def simulate_choco(choice: Choice, setting: Setting) -> SimulatedMethod:
    """CHOCO-SGD."""
    algorithm = choco(options_of(choice, setting), setting.seed)
    return _coded(algorithm, undirected(choice, setting, is_static=True), choice, setting)


def simulate_deep_squeeze(choice: Choice, setting: Setting) -> SimulatedMethod:
    """DeepSqueeze."""
    algorithm = deep_squeeze(options_of(choice, setting), setting.seed)
    return _coded(algorithm, undirected(choice, setting), choice, setting)


def simulate_moniqua(choice: Choice, setting: Setting) -> SimulatedMethod:
    """Moniqua."""
    one_pass = setting.links.memory_seconds(setting.model_bytes)
    message = MessageCost(setting.num_parameters, encode_seconds=4 * one_pass, decode_seconds=4 * one_pass)  # 8 bits
    algorithm = moniqua(options_of(choice, setting), setting.seed)
    schedule = schedule_of(choice.method, setting)
    return lockstep(algorithm, undirected(choice, setting), setting, message, schedule=schedule)


def simulate_power_gossip(choice: Choice, setting: Setting) -> SimulatedMethod:
    """PowerGossip."""
    mixing = undirected(choice, setting)
    algorithm = PowerGossip(step_size=setting.step_size or power_step_size(mixing), seed=setting.seed)
    message = power_message(setting.num_parameters, setting.links)
    return lockstep(algorithm, mixing, setting, message, schedule=schedule_of(choice.method, setting), options={})


def simulate_sparta(choice: Choice, setting: Setting) -> SimulatedMethod:
    """SPARTA."""
    algorithm = sparta(options_of(choice, setting), setting.seed)
    message = measured_message(Stacked(algorithm, pair()), setting.num_parameters, setting.links)
    schedule = schedule_of(choice.method, setting)
    return lockstep(algorithm, undirected(choice, setting), setting, message, schedule=schedule)


def simulate_outer(make: MakeOuter) -> Callable[[Choice, Setting], SimulatedMethod]:
    """How outer methods are simulated: on the graph that was chosen, on their own, or with exact averages."""

    def simulate(choice: Choice, setting: Setting) -> SimulatedMethod:
        outer = make(options_of(choice, setting), setting.seed)
        mixing = None
        if not outer.averages_exactly:
            own = outer.default_graph(setting.world_size) if not choice.graph else None
            mixing = undirected(choice, setting) if own is None else default_mixing(own, push_sum=False)
        driver = Stacked(outer, mixing, setting.world_size)
        return LockstepMethod(driver, Schedule(), _outer_clock(outer, setting))

    return simulate


def _outer_clock(outer: OuterMethod, setting: Setting) -> SyncClock:
    """What an outer step of a fragment takes; one with a delay takes as long as one that training waits for."""
    if (code := getattr(outer, "compressor", None)) is not None:
        message = coded_message(code, setting.num_parameters // outer.num_fragments, setting.links)
        return GatherClock(setting.compute, setting.network, message)
    size = setting.model_bytes / outer.num_fragments
    return SyncClock(setting.compute, setting.network, setting.network.plain_message(size), model_bytes=size)


def simulate_rule(rule: Algorithm, choice: Choice, setting: Setting) -> SimulatedMethod:
    """An algorithm that mixes vectors of the model on the graph that was chosen; on a ring with its own weights."""
    mixing = undirected(choice, setting, is_static=rule.needs_static_graph)
    if choice.graph == "ring":
        mixing = rule.default_mixing(setting.world_size) or mixing
    return lockstep(rule, mixing, setting, setting.network.plain_message(setting.model_bytes), options={})


def simulate_relay_sgd(choice: Choice, setting: Setting) -> SimulatedMethod:
    """RelaySGD, on a tree or two; a link that is in one of two has messages of half a model."""
    assert choice.graph is not None, "choices are resolved before methods are made"
    graph = named_graph(choice.graph, setting.world_size)
    num_links = sum(len(graph.phone_book(rank)) for rank in range(graph.world_size)) / 2
    share = (graph.world_size - 1) / num_links if num_links else 1.0
    message = setting.network.plain_message(share * setting.model_bytes)
    return lockstep(RelaySGD(), MetropolisHastingsMixing(graph), setting, message, options={})


def simulate_ad_psgd(choice: Choice, setting: Setting) -> SimulatedMethod:
    """AD-PSGD."""
    graph = _graph(choice, setting)
    if not graph.is_bipartite or graph.num_peers(0) > 1:
        raise ValueError(
            f"got adpsgd on {graph!r}, expected a bipartite graph with one peer per round; take bipartite-exponential"
        )
    message = setting.network.plain_message(setting.model_bytes)
    mixing = StackedMixing(default_mixing(graph, push_sum=False))
    return BilateralMethod(mixing, setting.compute, setting.network, message)


def simulate_wagma(choice: Choice, setting: Setting) -> SimulatedMethod:
    """WAGMA-SGD."""
    message = setting.network.plain_message(setting.model_bytes)
    groups = ButterflyGroups(setting.world_size)
    method = GroupMethod(setting.compute, setting.network, message, groups, sync_period=setting.local_steps)
    method.options = {"sync_period": setting.local_steps}
    return method


def simulate_dpwa(choice: Choice, setting: Setting) -> SimulatedMethod:
    """dpwa."""
    message = setting.network.plain_message(setting.model_bytes)
    return PullMethod(setting.compute, setting.network, message, seed=setting.seed)
