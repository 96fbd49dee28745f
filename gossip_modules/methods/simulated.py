"""How each method is simulated: functions of (choice, setting), which the entries of the registry name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

from ..algorithms.choco import Choco
from ..algorithms.d_psgd import DPSGD
from ..graph_manager.base import GraphManager
from ..graph_manager.butterfly_groups import ButterflyGroups
from ..graph_manager.named_graphs import default_graph_name, named_graph
from ..graph_manager.static_graphs import networkx_graph
from ..matcha.graph import MatchaGraph
from ..mixing_manager.base import MixingManager
from ..mixing_manager.graph_weights import default_mixing
from ..rounds.algorithm import Algorithm, Over
from ..rounds.rows import StackedMixing
from ..rounds.stacked import Stacked
from ..schedule import Schedule
from ..simulate.asynchronous import BilateralMethod, PullMethod
from ..simulate.choice import Choice
from ..simulate.clocks import BucketClock, OverlapClock, SyncClock
from ..simulate.codes import coded_message
from ..simulate.delays import MessageCost
from ..simulate.gossip import DeepSqueezeRule, LockstepMethod, MoniquaRule, Rule, RuleMethod, SimulatedMethod
from ..simulate.groups import GroupMethod
from ..simulate.power_gossip import PowerGossipRule, power_message, power_step_size
from ..simulate.setting import Setting
from .compressors import (
    CHOCO_STEP_SIZES,
    DEEP_SQUEEZE_STEP_SIZES,
    MONIQUA_STEP_SIZES,
    compressor_step_size,
    make_compressor,
    step_size_of,
)
from .controlled_simulation import gossip_of, schedule_of
from .simulated_options import MethodOptions

PeersPerItr: TypeAlias = int | Mapping[int, int]
"""Peers per round, or a schedule of it."""
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


def _lockstep(rule: Rule, mixing: MixingManager, choice: Choice, setting: Setting, message: MessageCost) -> RuleMethod:
    clock = SyncClock(setting.compute, setting.network, message, model_bytes=setting.model_bytes)
    return RuleMethod(rule, StackedMixing(mixing), schedule_of(choice.method, setting), clock)


def lockstep(
    algorithm: Algorithm | Over, mixing: MixingManager, choice: Choice, setting: Setting, message: MessageCost
) -> LockstepMethod:
    """An algorithm with the schedule of the setting."""
    clock = SyncClock(setting.compute, setting.network, message, model_bytes=setting.model_bytes)
    return LockstepMethod(Stacked(algorithm, mixing, shape=setting.shape), schedule_of(choice.method, setting), clock)


def simulate_all_reduce(choice: Choice, setting: Setting) -> SimulatedMethod:
    """AllReduce SGD."""
    kind = BucketClock if setting.has_gradients else SyncClock
    clock = kind(setting.compute, setting.network, MessageCost(setting.model_bytes))
    return LockstepMethod(Stacked(DPSGD(), None, setting.world_size), Schedule(average_every=1), clock)


def simulate_local_sgd(choice: Choice, setting: Setting) -> SimulatedMethod:
    """Local SGD."""
    clock = SyncClock(setting.compute, setting.network, MessageCost(setting.model_bytes))
    schedule = Schedule(gossip_every=setting.local_steps, average_every=1)
    driver = Stacked(DPSGD(), None, setting.world_size)
    return LockstepMethod(driver, schedule, clock, options={"sync_period": setting.local_steps})


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
    return lockstep(DPSGD(), mixing, choice, setting, setting.network.plain_message(setting.model_bytes))


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


def simulate_choco(choice: Choice, setting: Setting) -> SimulatedMethod:
    """CHOCO-SGD."""
    options = options_of(choice, setting)
    compressor = make_compressor(options, setting.seed)
    algorithm = Choco(compressor, step_size=compressor_step_size(options, "choco", CHOCO_STEP_SIZES))
    message = coded_message(compressor, setting.num_parameters, setting.links)
    return lockstep(algorithm, undirected(choice, setting, is_static=True), choice, setting, message)


def simulate_deep_squeeze(choice: Choice, setting: Setting) -> SimulatedMethod:
    """DeepSqueeze."""
    options = options_of(choice, setting)
    compressor = make_compressor(options, setting.seed)
    rule = DeepSqueezeRule(compressor, step_size=compressor_step_size(options, "deepsqueeze", DEEP_SQUEEZE_STEP_SIZES))
    message = coded_message(compressor, setting.num_parameters, setting.links)
    return _lockstep(rule, undirected(choice, setting), choice, setting, message)


def simulate_moniqua(choice: Choice, setting: Setting) -> SimulatedMethod:
    """Moniqua."""
    one_pass = setting.links.memory_seconds(setting.model_bytes)
    message = MessageCost(setting.num_parameters, encode_seconds=4 * one_pass, decode_seconds=4 * one_pass)  # 8 bits
    step_size = step_size_of(options_of(choice, setting), "moniqua", MONIQUA_STEP_SIZES, "moniqua", "compression_bits")
    rule = MoniquaRule(setting.theta or MethodOptions.theta, step_size=step_size, seed=setting.seed)
    return _lockstep(rule, undirected(choice, setting), choice, setting, message)


def simulate_power_gossip(choice: Choice, setting: Setting) -> SimulatedMethod:
    """PowerGossip."""
    mixing = undirected(choice, setting)
    rule = PowerGossipRule(setting.shape, step_size=setting.step_size or power_step_size(mixing), seed=setting.seed)
    return _lockstep(rule, mixing, choice, setting, power_message(setting.num_parameters, setting.links))


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
