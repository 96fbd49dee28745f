"""Update rules as methods: their entries, and how they and RelaySGD are simulated."""

from __future__ import annotations

from functools import partial
from typing import Any

from ..algorithms.d2 import D2
from ..algorithms.decentlam import DecentLaM
from ..algorithms.exact_diffusion import ExactDiffusion
from ..algorithms.gradient_tracking import GradientTracking
from ..algorithms.qg_dsgdm import QGDSGDm
from ..algorithms.relay_sgd import RelaySGD, trees_of
from ..graph_manager.named_graphs import named_graph
from ..mixing_manager.base import MetropolisHastingsMixing
from ..registry import Method, Paper
from ..rounds.algorithm import Algorithm
from ..rounds.stacked import Stacked
from ..schedule import Schedule
from ..simulate.choice import Choice
from ..simulate.clocks import SyncClock
from ..simulate.gossip import LockstepMethod, SimulatedMethod
from ..simulate.setting import Setting
from .options import Context, MethodOptions
from .simulated import pairs, undirected
from .wrapping import all_neighbours, tree_neighbours, undirected_neighbours, wrap_with


def named_neighbours(options: MethodOptions, num_nodes: int, context: Context, *, is_static: bool) -> dict[str, Any]:
    """The graph that is named, which never changes if `is_static`; auto: that of the rule, with its weights."""
    if options.graph == "auto":
        return {}
    return (all_neighbours if is_static else undirected_neighbours)(options, num_nodes, context)


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


_GRAPH = frozenset({"graph"})
_NODES = frozenset({"nprocs_per_node"})


def _method(name: str, title: str, summary: str, rule: Algorithm, paper: Paper) -> Method:
    """The entry of a rule, which one object serves: it holds settings only."""
    return Method(
        name,
        title,
        summary,
        type(rule),
        make=wrap_with(
            "algorithm", lambda options, seed: rule, whom=partial(named_neighbours, is_static=rule.needs_static_graph)
        ),
        simulate=partial(simulate_rule, rule),
        paper=paper,
        example=f"GossipDataParallel(model, algorithm={type(rule).__name__}())",
        graph="undirected, static" if rule.needs_static_graph else "undirected",
        options=_GRAPH if rule.needs_sgd else _GRAPH | _NODES,
        needs_sgd=rule.needs_sgd,
        simulated_graph=(lambda n, peers: "ring") if rule.default_mixing(4) else pairs,
    )


RULE_METHODS: tuple[Method, ...] = (
    _method(
        "qgdsgdm",
        "QG-DSGDm",
        "gossips, with momentum that is made of how the mixed models move",
        QGDSGDm(),
        Paper(
            "Lin, Karimireddy, Stich, Jaggi",
            "Quasi-Global Momentum: Accelerating Decentralized Deep Learning on Heterogeneous Data",
            "ICML 2021",
            "2102.04761",
        ),
    ),
    _method(
        "d2",
        "D2",
        "gossips, and adds what earlier rounds have changed, so that uneven data leaves no bias",
        D2(),
        Paper(
            "Tang, Lian, Yan, Zhang, Liu",
            "D2: Decentralized Training over Decentralized Data",
            "ICML 2018",
            "1803.07068",
        ),
    ),
    _method(
        "exactdiffusion",
        "Exact diffusion",
        "is D2 with (I + W) / 2, on every undirected graph",
        ExactDiffusion(),
        Paper(
            "Yuan, Ying, Zhao, Sayed",
            "Exact Diffusion for Distributed Optimization and Learning - Part I: Algorithm Development",
            "IEEE Transactions on Signal Processing 2019",
            "1702.05122",
        ),
    ),
    _method(
        "gradienttracking",
        "Gradient tracking",
        "steps along an estimate of the mean step of all ranks, which is gossiped too",
        GradientTracking(),
        Paper(
            "Di Lorenzo, Scutari",
            "NEXT: In-Network Nonconvex Optimization",
            "IEEE Transactions on Signal and Information Processing over Networks 2016",
            "1602.00591",
        ),
    ),
    _method(
        "decentlam",
        "DecentLaM",
        "gossips, with momentum that sees the gossip as part of the gradient",
        DecentLaM(),
        Paper(
            "Yuan, Chen, Huang, Zhang, Pan, Xu, Yin",
            "DecentLaM: Decentralized Momentum SGD for Large-batch Deep Training",
            "ICCV 2021",
            "2104.11981",
        ),
    ),
    Method(
        "relaysgd",
        "RelaySGD",
        "relays sums of models through trees, so that every rank averages those of all",
        RelaySGD,
        make=wrap_with("algorithm", lambda options, seed: RelaySGD(), whom=tree_neighbours),
        simulate=simulate_relay_sgd,
        paper=Paper(
            "Vogels, He, Koloskova, Lin, Karimireddy, Stich, Jaggi",
            "RelaySum for Decentralized Deep Learning on Heterogeneous Data",
            "NeurIPS 2021",
            "2110.04175",
        ),
        example="GossipDataParallel(model, algorithm=RelaySGD())",
        graph="tree",
        options=_GRAPH | _NODES,
        simulated_graph=lambda n, peers: "double-binary-tree",
    ),
)
