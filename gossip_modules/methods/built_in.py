"""The methods of this library: the algorithms, by the facts of their classes, and the wrappers with arguments."""

from __future__ import annotations

from functools import partial
from typing import Any

from ..ad_psgd.exchange import BilateralAverage
from ..algorithms.choco import Choco
from ..algorithms.d2 import D2
from ..algorithms.d_psgd import DPSGD
from ..algorithms.decentlam import DecentLaM
from ..algorithms.deep_squeeze import DeepSqueeze
from ..algorithms.diloco import DiLoCo
from ..algorithms.eager_diloco import EagerDiLoCo
from ..algorithms.exact_diffusion import ExactDiffusion
from ..algorithms.gasloc import GASLoC
from ..algorithms.gradient_tracking import GradientTracking
from ..algorithms.local_sgd import LocalSGD
from ..algorithms.moniqua import Moniqua
from ..algorithms.noloco import NoLoCo
from ..algorithms.power_gossip import PowerGossip
from ..algorithms.qg_dsgdm import QGDSGDm
from ..algorithms.relay_sgd import RelaySGD
from ..algorithms.slowmo import SlowMo
from ..algorithms.sparse_loco import SparseLoCo
from ..algorithms.sparta import Sparta
from ..algorithms.streaming_diloco import StreamingDiLoCo
from ..dpwa.config import DEFAULT_INTERPOLATION
from ..dpwa.engine import PairwiseEngine
from ..dpwa.interpolation import Interpolation
from ..engine.overlap import OverlapEngine
from ..matcha.graph import MatchaGraph
from ..registry import Method, Paper
from ..rounds.push_pull import PushPull, PushSum
from ..wagma.engine import WaitAvoidingEngine
from ..wrappers.all_reduce import AllReduceDataParallel
from .compressors import CHOCO_STEP_SIZES, COMPRESSORS, DEEP_SQUEEZE_STEP_SIZES, MONIQUA_STEP_SIZES, WIRE_DTYPES
from .entries import ROUNDS, entry
from .gossipers import choco, deep_squeeze, moniqua, power_gossip, sparta
from .options import WRAPPER_OPTIONS
from .outer_methods import diloco, eager_diloco, gasloc, noloco, slowmo, sparse_loco, streaming_diloco
from .simulated import (
    pairs,
    simulate_ad_psgd,
    simulate_all_reduce,
    simulate_choco,
    simulate_d_psgd,
    simulate_deep_squeeze,
    simulate_dpwa,
    simulate_local_sgd,
    simulate_matcha,
    simulate_moniqua,
    simulate_osgp,
    simulate_outer,
    simulate_power_gossip,
    simulate_relay_sgd,
    simulate_rule,
    simulate_sgp,
    simulate_sparta,
    simulate_wagma,
    static,
)
from .wrapping import (
    wrap_all_reduce,
    wrap_bilateral,
    wrap_gossip,
    wrap_group_average,
    wrap_matcha,
    wrap_pairwise,
)

PLAIN = frozenset(WRAPPER_OPTIONS)
"""The options of gossip of the parameters themselves."""
COMPRESSED = ROUNDS - {"wire_dtype", "schedule"}
"""The options of compressed gossip."""
GRAPH = frozenset({"graph", "nprocs_per_node"})
"""The options of a method that says itself when its rounds run."""
NODES = frozenset({"nprocs_per_node"})
"""The options of such a method without a graph."""


def all_reduce() -> dict[str, Any]:
    """AllReduce SGD: the wrapper takes no arguments here."""
    return {}


def d_psgd() -> dict[str, Any]:
    """D-PSGD: plain gossip without push-sum."""
    return {"push_sum": False}


def sgp() -> dict[str, Any]:
    """SGP: plain gossip with push-sum."""
    return {"push_sum": True}


def overlap_sgp() -> dict[str, Any]:
    """Overlap SGP: SGP under training."""
    return {"push_sum": True, "overlap": True}


def matcha(budget: float = 0.5, plan: str = "") -> dict[str, Any]:
    """MATCHA: on the graph of --graph, or by the JSON file that `python -m gossip_modules.matcha --output` wrote."""
    return {"budget": budget, "plan": plan}


def ad_psgd() -> dict[str, Any]:
    """AD-PSGD: the wrapper takes no arguments here."""
    return {}


def wagma(group_size: int | None = None, sync_period: int = 10, wait_avoiding: bool = True) -> dict[str, Any]:
    """WAGMA-SGD: arguments of `GroupAverageDataParallel`."""
    return {"group_size": group_size, "sync_period": sync_period, "wait_avoiding": wait_avoiding}


def dpwa(
    interpolation: Interpolation = DEFAULT_INTERPOLATION,
    divergence_threshold: float = 0.0,
    fetch_probability: float = 1.0,
) -> dict[str, Any]:
    """dpwa: arguments of `PairwiseDataParallel`."""
    return {
        "interpolation": interpolation,
        "divergence_threshold": divergence_threshold,
        "fetch_probability": fetch_probability,
    }


_SGP = Paper(
    "Assran, Loizou, Ballas, Rabbat",
    "Stochastic Gradient Push for Distributed Deep Learning",
    "ICML 2019",
    "1811.10792",
)
_ring: Any = lambda n, peers: "ring"  # noqa: E731
_exponential: Any = lambda n, peers: "npeer-exponential"  # noqa: E731

BUILT_IN: tuple[Method, ...] = (
    Method(
        "ar",
        "AllReduce SGD",
        "averages gradients over all ranks at every step",
        AllReduceDataParallel,
        make=all_reduce,
        text="AllReduce()",
        wrap=wrap_all_reduce,
        simulate=simulate_all_reduce,
        example="AllReduceDataParallel(model)",
        aliases=("allreduce",),
        needs_fixed_ranks="every step needs the gradients of all; an all-reduce that survives its workers is torchft",
    ),
    Method(
        "dpsgd",
        "D-PSGD",
        "averages parameters with a few peers on an undirected graph",
        DPSGD,
        make=d_psgd,
        text="DPSGD()",
        wrap=wrap_gossip,
        simulate=simulate_d_psgd,
        paper=Paper(
            "Lian, Zhang, Zhang, Hsieh, Zhang, Liu",
            "Can Decentralized Algorithms Outperform Centralized Algorithms?",
            "NeurIPS 2017",
            "1705.09056",
        ),
        example="GossipDataParallel(model, push_sum=False)",
        options=PLAIN,
        gossiper=lambda options, seed: PushPull(wire_dtype=WIRE_DTYPES[options.wire_dtype]),
        simulated_graph=pairs,
    ),
    Method(
        "sgp",
        "SGP",
        "pushes parameters to a few peers on any graph, and divides by a weight that is sent along",
        PushSum,
        make=sgp,
        text="SGP()",
        wrap=wrap_gossip,
        simulate=simulate_sgp,
        paper=_SGP,
        example="GossipDataParallel(model)",
        options=PLAIN,
        simulated_graph=_exponential,
    ),
    Method(
        "osgp",
        "Overlap SGP",
        "SGP whose rounds run while the next steps are computed",
        OverlapEngine,
        make=overlap_sgp,
        text="OverlapSGP()",
        wrap=wrap_gossip,
        simulate=simulate_osgp,
        paper=_SGP,
        example="GossipDataParallel(model, overlap=True)",
        options=PLAIN,
        simulated_graph=_exponential,
    ),
    Method(
        "matcha",
        "MATCHA",
        "averages with the peers of random matchings of a graph, its important links more often",
        MatchaGraph,
        make=matcha,
        text="MATCHA()",
        wrap=wrap_matcha,
        simulate=simulate_matcha,
        paper=Paper(
            "Wang, Sahu, Yang, Joshi, Kar",
            "MATCHA: Speeding Up Decentralized SGD via Matching Decomposition Sampling",
            "ICC 2019",
            "1905.09435",
        ),
        example="GossipDataParallel(model, graph=MatchaGraph(base, budget=0.5))",
        options=PLAIN - {"peers_per_itr"},
        simulated_graph=_ring,
    ),
    entry(
        Choco,
        options=COMPRESSED,
        text="Choco(SignNorm(), step_size=0.45)",
        simulate=simulate_choco,
        gossiper=choco,
        step_sizes=CHOCO_STEP_SIZES,
        simulated_graph=static,
        codes=tuple(COMPRESSORS),
    ),
    entry(
        DeepSqueeze,
        options=COMPRESSED,
        text="DeepSqueeze(SignNorm(), step_size=0.01)",
        simulate=simulate_deep_squeeze,
        gossiper=deep_squeeze,
        step_sizes=DEEP_SQUEEZE_STEP_SIZES,
        simulated_graph=pairs,
        codes=tuple(COMPRESSORS),
    ),
    entry(
        Moniqua,
        options=COMPRESSED,
        text="Moniqua(theta=1.0)",
        example="Moniqua(theta=0.5)",
        simulate=simulate_moniqua,
        gossiper=moniqua,
        step_sizes=MONIQUA_STEP_SIZES,
        simulated_graph=pairs,
    ),
    entry(
        PowerGossip, options=COMPRESSED, simulate=simulate_power_gossip, gossiper=power_gossip, simulated_graph=pairs
    ),
    Method(
        "adpsgd",
        "AD-PSGD",
        "averages pairs of models while both ranks go on training",
        BilateralAverage,
        make=ad_psgd,
        text="ADPSGD()",
        wrap=wrap_bilateral,
        simulate=simulate_ad_psgd,
        paper=Paper(
            "Lian, Zhang, Zhang, Liu",
            "Asynchronous Decentralized Parallel Stochastic Gradient Descent",
            "ICML 2018",
            "1710.06952",
        ),
        example="BilatGossipDataParallel(model)",
        options=frozenset({"graph"}),
        pace="shared_steps",
        simulated_graph=lambda n, peers: "bipartite-complete" if n % 2 else "bipartite-exponential",
    ),
    Method(
        "wagma",
        "WAGMA-SGD",
        "averages changing groups of ranks, and late ranks contribute their previous model",
        WaitAvoidingEngine,
        make=wagma,
        text="WAGMA()",
        wrap=wrap_group_average,
        simulate=simulate_wagma,
        paper=Paper(
            "Li, Ben-Nun, Nadiradze, Di Girolamo, Dryden, Alistarh, Hoefler",
            "Breaking (Global) Barriers in Parallel Stochastic Optimization with Wait-Avoiding Group Averaging",
            "IEEE TPDS 2021",
            "2005.00124",
        ),
        example="GroupAverageDataParallel(model)",
        options=frozenset({"overlap"}),
        pace="shared_rounds",
    ),
    Method(
        "dpwa",
        "dpwa",
        "pulls the model of a random peer, and goes part of the way towards it",
        PairwiseEngine,
        make=dpwa,
        text="Dpwa()",
        wrap=wrap_pairwise,
        simulate=simulate_dpwa,
        paper=Paper("Jin, Yuan, Iandola, Keutzer", "How to scale distributed deep learning?", "2016", "1611.04581"),
        example='PairwiseDataParallel(model, name="w0", peers=addresses)',
        pace="shared_steps",
        needs_fixed_ranks="its workers come and go without one; see the guide to dpwa",
    ),
    entry(
        LocalSGD,
        options=NODES,
        text="LocalSGD(sync_every=10)",
        simulate=simulate_local_sgd,
    ),
    entry(DiLoCo, options=NODES, text="DiLoCo(sync_every=10)", example="DiLoCo()", simulate=simulate_outer(diloco)),
    entry(
        StreamingDiLoCo,
        options=NODES,
        text="StreamingDiLoCo(sync_every=10)",
        example="StreamingDiLoCo()",
        simulate=simulate_outer(streaming_diloco),
    ),
    entry(
        EagerDiLoCo,
        needs_fixed_ranks="a drift under way would be lost with its worker",
        options=NODES,
        text="EagerDiLoCo(sync_every=10)",
        example="EagerDiLoCo()",
        simulate=simulate_outer(eager_diloco),
    ),
    entry(
        SparseLoCo,
        needs_fixed_ranks="what a worker has not sent yet would be lost with it",
        options=NODES,
        text="SparseLoCo(sync_every=10, compressor=ChunkTopK(41, values=TwoBit()))",
        example="SparseLoCo()",
        simulate=simulate_outer(sparse_loco),
    ),
    entry(
        SlowMo,
        options=NODES,
        text="SlowMo(sync_every=10, inner_lr='optimizer')",
        example="SlowMo()",
        simulate=simulate_outer(slowmo),
    ),
    entry(NoLoCo, options=NODES, text="NoLoCo(sync_every=10)", example="NoLoCo()", simulate=simulate_outer(noloco)),
    entry(
        GASLoC,
        options=GRAPH,
        text="GASLoC(sync_every=10)",
        example="GASLoC()",
        simulate=simulate_outer(gasloc),
        simulated_graph=static,
    ),
    entry(QGDSGDm, options=GRAPH, simulate=partial(simulate_rule, QGDSGDm()), simulated_graph=pairs),
    entry(D2, options=GRAPH, simulate=partial(simulate_rule, D2()), simulated_graph=_ring),
    entry(ExactDiffusion, options=GRAPH, simulate=partial(simulate_rule, ExactDiffusion()), simulated_graph=_ring),
    entry(GradientTracking, options=GRAPH, simulate=partial(simulate_rule, GradientTracking()), simulated_graph=_ring),
    entry(DecentLaM, options=GRAPH, simulate=partial(simulate_rule, DecentLaM()), simulated_graph=_ring),
    entry(
        RelaySGD,
        needs_fixed_ranks="a sum that is lost with a worker is missing on one side of the tree",
        options=GRAPH,
        simulate=simulate_relay_sgd,
        simulated_graph=lambda n, peers: "double-binary-tree",
    ),
    entry(
        Sparta,
        options=COMPRESSED,
        text="Sparta(0.01)",
        example="Sparta()",
        simulate=simulate_sparta,
        gossiper=sparta,
        simulated_graph=lambda n, peers: "complete",
    ),
)
"""All of them, in the order of the tables."""
