"""Training methods by name, as the simulator runs them: which graph, code, schedule and clock each one is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import networkx as nx

from ..graph_manager.base import GraphManager
from ..graph_manager.butterfly_groups import ButterflyGroups
from ..graph_manager.named_graphs import GRAPHS, PREDEFINED_GRAPHS, named_graph
from ..matcha.graph import MatchaGraph
from ..mixing_manager.base import MixingManager
from ..schedule import Schedule
from .asynchronous import BilateralMethod, PullMethod
from .clocks import BucketClock, OverlapClock, SyncClock
from .codes import COMPRESSORS, coded_message
from .delays import Message
from .gossip import ChocoRule, DeepSqueezeRule, LockstepMethod, MoniquaRule, Plain, Rule, SimulatedMethod
from .groups import GroupMethod
from .mixing import SimulatedMixing, mixing_for
from .power_gossip import PowerGossipRule, power_message, power_step_size
from .setting import Setting

MAX_MATCHA_RANKS = 512
"""For more, the plan of a MATCHA graph, dense linear algebra, takes longer than all other methods together."""
STEP_SIZES: Mapping[tuple[str, str], float] = {
    ("choco", "sign"): 0.4,
    ("choco", "topk"): 0.04,
    ("choco", "randomk"): 0.01,
    ("choco", "qsgd"): 0.34,
    ("choco", "bfloat16"): 1.0,
    ("deepsqueeze", "sign"): 0.01,
    ("deepsqueeze", "topk"): 0.01,
    ("deepsqueeze", "randomk"): 0.01,
    ("deepsqueeze", "qsgd"): 0.34,
    ("deepsqueeze", "bfloat16"): 1.0,
}
"""Of consensus, by method and code: those of the papers on a ring, and 1 for what is as good as exact."""

THETA = 1.0
"""Of Moniqua, what training takes unless it is told otherwise."""


class Choice(NamedTuple):
    """What a user chooses: a method, and a graph and a code where it has them; None = its own choice.

    >>> Choice.parse("choco:hypercube:topk")
    Choice(method='choco', graph='hypercube', compressor='topk')
    """

    method: str
    graph: str | None = None
    compressor: str | None = None

    @classmethod
    def parse(cls, text: str) -> Choice:
        """`method`, `method:graph` or `method:graph:code`; an empty graph is the method's own choice.

        Raises:
            ValueError: no such method, graph or code, or one that the method has not.
        """
        name, *rest = text.split(":")
        if name not in METHODS or len(rest) > 2:
            raise ValueError(
                f"got method={text!r}, expected <method>[:<graph>[:<code>]] with a method of {', '.join(METHODS)}; "
                "e.g. sgp, dpsgd:ring or choco:torus:topk"
            )
        graph, compressor = [*(part or None for part in rest), None, None][:2]
        kind = METHODS[name]
        if graph is not None and (kind.graph is None or graph not in (*GRAPHS, *PREDEFINED_GRAPHS)):
            names = ", ".join([*GRAPHS, *PREDEFINED_GRAPHS]) if kind.graph else "no graph for it"
            raise ValueError(f"got graph={graph!r} of {name}, expected {names}; e.g. dpsgd:ring")
        if compressor is not None and (kind.compressor is None or compressor not in COMPRESSORS):
            names = ", ".join(COMPRESSORS) if kind.compressor else "no code for it"
            raise ValueError(f"got code={compressor!r} of {name}, expected {names}; e.g. choco:torus:topk")
        return cls(name, graph, compressor)

    def resolved(self, world_size: int) -> Choice:
        """With the method's own choices filled in; '' where it has no graph or code."""
        kind = METHODS[self.method]
        graph = self.graph or (kind.graph(world_size) if kind.graph else "")
        return Choice(self.method, graph, self.compressor or kind.compressor or "")


class Kind(NamedTuple):
    """A method: how it is made, and its own choice of a graph, given n, and of a code; None where it has none."""

    make: Callable[[Choice, Setting], SimulatedMethod]
    graph: Callable[[int], str] | None = None
    compressor: str | None = None


def make_method(choice: Choice, setting: Setting) -> SimulatedMethod:
    """The method that was chosen, ready for its first forward.

    Raises:
        ValueError: the graph has no such size, or the method cannot work on it.
    """
    return METHODS[choice.method].make(choice.resolved(setting.world_size), setting)


def pairs(world_size: int) -> str:
    """The best graph for exchanges in pairs, or in odd worlds a ring."""
    return "ring" if world_size % 2 and world_size > 1 else "bipartite-exponential"


def static(world_size: int) -> str:
    """The best undirected graph that never changes."""
    if world_size & (world_size - 1) == 0:
        return "hypercube"
    is_prime = all(world_size % divisor for divisor in range(2, int(world_size**0.5) + 1))
    return "ring" if is_prime else "torus"


def _lockstep(
    rule: Rule, mixing: MixingManager | None, setting: Setting, message: Message, *, num_phases: int = 1
) -> LockstepMethod:
    clock = SyncClock(setting.compute, setting.network, message, num_phases=num_phases, model_bytes=setting.model_bytes)
    return LockstepMethod(rule, None if mixing is None else SimulatedMixing(mixing), setting.schedule, clock)


def _all_reduce(choice: Choice, setting: Setting) -> SimulatedMethod:
    kind = BucketClock if setting.has_gradients else SyncClock
    clock = kind(setting.compute, setting.network, Message(setting.model_bytes))
    return LockstepMethod(Plain(), None, Schedule(average_every=1), clock)


def _local_sgd(choice: Choice, setting: Setting) -> SimulatedMethod:
    clock = SyncClock(setting.compute, setting.network, Message(setting.model_bytes))
    return LockstepMethod(Plain(), None, Schedule(gossip_every=setting.local_steps, average_every=1), clock)


def _graph(choice: Choice, setting: Setting) -> GraphManager:
    assert choice.graph is not None, "choices are resolved before methods are made"
    return named_graph(choice.graph, setting.world_size, setting.peers_per_itr)


def _undirected(choice: Choice, setting: Setting, *, is_static: bool = False) -> MixingManager:
    graph = _graph(choice, setting)
    if not graph.is_symmetric or (is_static and graph.is_dynamic):
        wanted = "an undirected graph that never changes" if is_static else "an undirected graph"
        remedy = "hypercube, torus or ring" if is_static else "bipartite-exponential, torus or ring"
        raise ValueError(f"got {choice.method} on {graph!r}, expected {wanted}; take {remedy}, with all neighbours")
    return mixing_for(graph, push_sum=False)


def _dpsgd(choice: Choice, setting: Setting) -> SimulatedMethod:
    message = setting.network.plain_message(setting.model_bytes)
    return _lockstep(Plain(), mixing_for(_graph(choice, setting), push_sum=False), setting, message)


def _sgp(choice: Choice, setting: Setting) -> SimulatedMethod:
    message = setting.network.plain_message(setting.model_bytes)
    return _lockstep(Plain(), mixing_for(_graph(choice, setting), push_sum=True), setting, message)


def _osgp(choice: Choice, setting: Setting) -> SimulatedMethod:
    mixing = SimulatedMixing(mixing_for(_graph(choice, setting), push_sum=True))
    clock = OverlapClock(setting.compute, setting.network, setting.network.plain_message(setting.model_bytes))
    return LockstepMethod(Plain(), mixing, setting.schedule, clock, overlap=True)


def _matcha(choice: Choice, setting: Setting) -> SimulatedMethod:
    n = setting.world_size
    if n > MAX_MATCHA_RANKS:
        raise ValueError(
            f"got matcha with {n} workers, expected at most {MAX_MATCHA_RANKS}: its plan is n x n matrices; take dpsgd"
        )
    graph = _undirected(choice, setting, is_static=True).graph
    base = nx.Graph()
    base.add_nodes_from(range(n))
    base.add_edges_from((i, j) for i in range(n) for j in graph.phone_book(i))
    matcha = mixing_for(MatchaGraph(base, budget=setting.budget, seed=setting.seed), push_sum=False)
    return _lockstep(Plain(), matcha, setting, setting.network.plain_message(setting.model_bytes))


def _coded(choice: Choice, setting: Setting) -> SimulatedMethod:
    """CHOCO and DeepSqueeze."""
    assert choice.compressor is not None, "choices are resolved before methods are made"
    compressor = COMPRESSORS[choice.compressor]()
    step_size = setting.step_size or STEP_SIZES[choice.method, choice.compressor]
    is_choco = choice.method == "choco"
    rule = (ChocoRule if is_choco else DeepSqueezeRule)(compressor, step_size=step_size)
    mixing = _undirected(choice, setting, is_static=is_choco)
    return _lockstep(rule, mixing, setting, coded_message(compressor, setting.num_parameters, setting.links))


def _moniqua(choice: Choice, setting: Setting) -> SimulatedMethod:
    one_pass = setting.links.memory_seconds(setting.model_bytes)
    message = Message(setting.num_parameters, encode_seconds=4 * one_pass, decode_seconds=4 * one_pass)  # 8 bits
    rule = MoniquaRule(setting.theta or THETA, step_size=setting.step_size or 1.0, seed=setting.seed)
    return _lockstep(rule, _undirected(choice, setting), setting, message)


def _power_gossip(choice: Choice, setting: Setting) -> SimulatedMethod:
    mixing = _undirected(choice, setting)
    rule = PowerGossipRule(setting.shape, step_size=setting.step_size or power_step_size(mixing), seed=setting.seed)
    return _lockstep(rule, mixing, setting, power_message(setting.num_parameters, setting.links))


def _ad_psgd(choice: Choice, setting: Setting) -> SimulatedMethod:
    graph = _graph(choice, setting)
    if not graph.is_bipartite or graph.num_peers(0) > 1:
        raise ValueError(
            f"got adpsgd on {graph!r}, expected a bipartite graph with one peer per round; take bipartite-exponential"
        )
    message = setting.network.plain_message(setting.model_bytes)
    mixing = SimulatedMixing(mixing_for(graph, push_sum=False))
    return BilateralMethod(mixing, setting.compute, setting.network, message)


def _wagma(choice: Choice, setting: Setting) -> SimulatedMethod:
    message = setting.network.plain_message(setting.model_bytes)
    groups = ButterflyGroups(setting.world_size)
    return GroupMethod(setting.compute, setting.network, message, groups, sync_period=setting.local_steps)


def _dpwa(choice: Choice, setting: Setting) -> SimulatedMethod:
    message = setting.network.plain_message(setting.model_bytes)
    return PullMethod(setting.compute, setting.network, message, seed=setting.seed)


METHODS: Mapping[str, Kind] = {
    "allreduce": Kind(_all_reduce),
    "dpsgd": Kind(_dpsgd, pairs),
    "sgp": Kind(_sgp, lambda n: "npeer-exponential"),
    "osgp": Kind(_osgp, lambda n: "npeer-exponential"),
    "matcha": Kind(_matcha, lambda n: "ring"),
    "choco": Kind(_coded, static, "sign"),
    "deepsqueeze": Kind(_coded, pairs, "qsgd"),
    "moniqua": Kind(_moniqua, pairs),
    "powergossip": Kind(_power_gossip, pairs),
    "adpsgd": Kind(_ad_psgd, lambda n: "bipartite-complete" if n % 2 else "bipartite-exponential"),
    "wagma": Kind(_wagma),
    "dpwa": Kind(_dpwa),
    "localsgd": Kind(_local_sgd),
}
"""By the names of the command line."""
