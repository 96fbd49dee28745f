"""The methods of this library: the algorithms, by the facts of their classes, and the wrappers with arguments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..algorithms.choco import Choco
from ..algorithms.clipped_gossip import ClippedGossip
from ..algorithms.d2 import D2
from ..algorithms.d_psgd import DPSGD
from ..algorithms.decentlam import DecentLaM
from ..algorithms.deep_squeeze import DeepSqueeze
from ..algorithms.diloco import DiLoCo
from ..algorithms.eager_diloco import EagerDiLoCo
from ..algorithms.exact_diffusion import ExactDiffusion
from ..algorithms.extra import EXTRA
from ..algorithms.gasloc import GASLoC
from ..algorithms.gradient_tracking import GradientTracking
from ..algorithms.isoloco import IsoLoCo
from ..algorithms.kgt import KGT
from ..algorithms.local_sgd import LocalSGD
from ..algorithms.moniqua import Moniqua
from ..algorithms.muloco import MuLoCo
from ..algorithms.noloco import NoLoCo
from ..algorithms.power_gossip import PowerGossip
from ..algorithms.prox_skip import ProxSkip
from ..algorithms.pulse_loco import PULSELoCo
from ..algorithms.qg_dsgdm import QGDSGDm
from ..algorithms.relay_sgd import RelaySGD
from ..algorithms.sgp import PushSum
from ..algorithms.slowmo import SlowMo
from ..algorithms.sparse_loco import SparseLoCo
from ..algorithms.sparta import Sparta
from ..algorithms.streaming_diloco import StreamingDiLoCo
from ..algorithms.trimmed_mean import TrimmedMean
from ..engine.overlap import Overlap
from ..registry import Method, Paper, StepSizes
from ..wrappers.all_reduce import AllReduceDataParallel
from .graphs import pairs, static
from .options import WRAPPER_OPTIONS
from .wrapping import (
    ROUNDS,
    entry,
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
LOCAL = NODES | {"schedule"}
"""The options of such a method that may begin with averages in every step."""


CHOCO_STEP_SIZES: StepSizes = {
    "SignNorm()": 0.45,
    "TopK(0.01)": 0.0375,
    "RandomK(0.01)": 0.01,
    "QSGD(4)": 0.34,
    "QSGD(8)": 0.34,
    "Cast(bfloat16)": 1.0,
    "Cast(float16)": 1.0,
}
"""SignNorm: Koloskova et al., ICLR 2020, arXiv 1907.09356; TopK: Vogels et al., NeurIPS 2020, arXiv 2008.01425; RandomK
and QSGD with 16 levels, 4 bits: Koloskova et al., ICML 2019, arXiv 1902.00340; all on a ring. 8 bits are finer than 4,
so a step size for 4 bits serves 8; at 2 bits it diverges. A cast is as good as exact: 1."""
DEEP_SQUEEZE_STEP_SIZES: StepSizes = {"SignNorm()": 0.01}
"""Vogels et al., NeurIPS 2020, arXiv 2008.01425, on a ring of 8."""


# The settings of methods that are wrappers with arguments, by the names of these arguments.


@dataclass(frozen=True)
class AllReduce:
    """AllReduce SGD: `AllReduceDataParallel`."""


@dataclass(frozen=True)
class SGP:
    """Stochastic Gradient Push: `GossipDataParallel`, whose rounds are `PushSum` (algorithms/sgp.py)."""


@dataclass(frozen=True)
class OverlapSGP:
    """Overlap SGP: the rounds of SGP run under the next steps, by `Overlap` (engine/overlap.py)."""


@dataclass(frozen=True)
class MATCHA:
    """MATCHA on the graph of --graph, or by a plan in a file.

    Args:
        budget: see `MatchaGraph`.
        plan: the JSON file of `python -m gossip_modules.matcha --output`; "": the graph of --graph.
    """

    budget: float = 0.5
    plan: str = ""


@dataclass(frozen=True)
class ADPSGD:
    """AD-PSGD: `BilatGossipDataParallel`."""


@dataclass(frozen=True)
class A2CiD2:
    """A2CiD2: `BilatGossipDataParallel` with continuous momentum."""


@dataclass(frozen=True)
class WAGMA:
    """WAGMA-SGD: the arguments of `GroupAverageDataParallel`.

    Args:
        group_size: see `GroupAverageDataParallel`.
        sync_period: see `GroupAverageDataParallel`.
        wait_avoiding: see `GroupAverageDataParallel`.
    """

    group_size: int | None = None
    sync_period: int = 10
    wait_avoiding: bool = True


@dataclass(frozen=True)
class Dpwa:
    """dpwa: the arguments of `PairwiseDataParallel`.

    Args:
        interpolation: see `PairwiseDataParallel`; None: the default there.
        divergence_threshold: see `PairwiseDataParallel`.
        fetch_probability: see `PairwiseDataParallel`.
    """

    interpolation: Any = None
    divergence_threshold: float = 0.0
    fetch_probability: float = 1.0


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
        make=AllReduce,
        text="AllReduce()",
        wrap=wrap_all_reduce,
        example="AllReduceDataParallel(model)",
    ),
    Method(
        "dpsgd",
        "D-PSGD",
        "averages parameters with a few peers on an undirected graph",
        DPSGD,
        make=DPSGD,
        fixed={"push_sum": False},
        text="DPSGD()",
        wrap=wrap_gossip,
        paper=Paper(
            "Lian, Zhang, Zhang, Hsieh, Zhang, Liu",
            "Can Decentralized Algorithms Outperform Centralized Algorithms?",
            "NeurIPS 2017",
            "1705.09056",
        ),
        example="GossipDataParallel(model, push_sum=False)",
        options=PLAIN,
        simulated_graph=pairs,
    ),
    Method(
        "sgp",
        "SGP",
        "pushes parameters to a few peers on any graph, and divides by a weight that is sent along",
        PushSum,
        make=SGP,
        fixed={"push_sum": True},
        text="SGP()",
        wrap=wrap_gossip,
        paper=_SGP,
        example="GossipDataParallel(model)",
        options=PLAIN,
        simulated_graph=_exponential,
    ),
    Method(
        "osgp",
        "Overlap SGP",
        "SGP whose rounds run while the next steps are computed",
        Overlap,
        make=OverlapSGP,
        fixed={"push_sum": True, "overlap": True},
        text="OverlapSGP()",
        wrap=wrap_gossip,
        paper=_SGP,
        example="GossipDataParallel(model, overlap=True)",
        options=PLAIN,
        simulated_graph=_exponential,
    ),
    Method(
        "matcha",
        "MATCHA",
        "averages with the peers of random matchings of a graph, its important links more often",
        "matcha.graph:MatchaGraph",
        make=MATCHA,
        text="MATCHA()",
        wrap=wrap_matcha,
        paper=Paper(
            "Wang, Sahu, Yang, Joshi, Kar",
            "MATCHA: Speeding Up Decentralized SGD via Matching Decomposition Sampling",
            "ICC 2019",
            "1905.09435",
        ),
        example="GossipDataParallel(model, graph=lambda n: MatchaGraph(nx.complete_graph(n), budget=0.5))",
        options=PLAIN - {"peers_per_itr"},
        simulated_graph=_ring,
    ),
    entry(
        Choco,
        options=COMPRESSED,
        text="Choco(SignNorm(), step_size=0.45)",
        step_sizes=CHOCO_STEP_SIZES,
    ),
    entry(
        DeepSqueeze,
        options=COMPRESSED,
        text="DeepSqueeze(SignNorm(), step_size=0.01)",
        step_sizes=DEEP_SQUEEZE_STEP_SIZES,
    ),
    entry(
        Moniqua,
        options=COMPRESSED,
        text="Moniqua(theta=1.0)",
        example="Moniqua(theta=0.5)",
    ),
    entry(PowerGossip, options=COMPRESSED),
    Method(
        "adpsgd",
        "AD-PSGD",
        "averages pairs of models while both ranks go on training",
        "ad_psgd.exchange:BilateralAverage",
        make=ADPSGD,
        text="ADPSGD()",
        wrap=wrap_bilateral,
        paper=Paper(
            "Lian, Zhang, Zhang, Liu",
            "Asynchronous Decentralized Parallel Stochastic Gradient Descent",
            "ICML 2018",
            "1710.06952",
        ),
        example="BilatGossipDataParallel(model)",
        options=frozenset({"graph", "gossip_every"}),
        pace="shared_steps",
        simulated_graph=lambda n, peers: "bipartite-complete" if n % 2 else "bipartite-exponential",
    ),
    Method(
        "a2cid2",
        "A2CiD2",
        "is AD-PSGD with a continuous momentum, which makes ranks on sparse graphs agree sooner",
        "ad_psgd.momentum:ContinuousMomentum",
        make=A2CiD2,
        fixed={"continuous_momentum": True},
        text="A2CiD2()",
        wrap=wrap_bilateral,
        paper=Paper(
            "Nabli, Belilovsky, Oyallon",
            "A2CiD2: Accelerating Asynchronous Communication in Decentralized Deep Learning",
            "NeurIPS 2023",
            "2306.08289",
        ),
        example="BilatGossipDataParallel(model, continuous_momentum=True)",
        options=frozenset({"graph"}),
        pace="shared_steps",
        simulated_graph=lambda n, peers: "bipartite-complete" if n % 2 else "bipartite-exponential",
    ),
    Method(
        "wagma",
        "WAGMA-SGD",
        "averages changing groups of ranks, and late ranks contribute their previous model",
        "wagma.engine:WaitAvoidingEngine",
        make=WAGMA,
        text="WAGMA()",
        wrap=wrap_group_average,
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
        "dpwa.engine:PairwiseEngine",
        make=Dpwa,
        text="Dpwa()",
        wrap=wrap_pairwise,
        paper=Paper("Jin, Yuan, Iandola, Keutzer", "How to scale distributed deep learning?", "2016", "1611.04581"),
        example='PairwiseDataParallel(model, name="w0", peers={"w0": "tcp://127.0.0.1:*"})',
        pace="shared_steps",
        needs_fixed_ranks="its workers come and go without one; see the guide to dpwa",
    ),
    entry(
        LocalSGD,
        options=LOCAL,
        text="LocalSGD(sync_every=10)",
    ),
    entry(DiLoCo, options=LOCAL, text="DiLoCo(sync_every=10)", example="DiLoCo()"),
    entry(
        StreamingDiLoCo,
        options=NODES,
        text="StreamingDiLoCo(sync_every=10)",
        example="StreamingDiLoCo()",
    ),
    entry(
        EagerDiLoCo,
        options=NODES,
        text="EagerDiLoCo(sync_every=10)",
        example="EagerDiLoCo()",
    ),
    entry(MuLoCo, options=LOCAL, text="MuLoCo(sync_every=10)", example="MuLoCo()"),
    entry(IsoLoCo, options=frozenset(), text="IsoLoCo(sync_every=10, lr=1.0)", example="IsoLoCo()"),
    entry(
        SparseLoCo,
        options=NODES,
        text="SparseLoCo(sync_every=10, compressor=ChunkTopK(41, values=TwoBit()))",
        example="SparseLoCo()",
    ),
    entry(PULSELoCo, options=NODES, text="PULSELoCo(sync_every=10)", example="PULSELoCo()"),
    entry(
        SlowMo,
        options=NODES,
        text="SlowMo(sync_every=10, inner_lr='optimizer')",
        example="SlowMo()",
    ),
    entry(NoLoCo, options=NODES, text="NoLoCo(sync_every=10)", example="NoLoCo()", simulated_graph=None),
    entry(
        GASLoC,
        options=GRAPH,
        text="GASLoC(sync_every=10)",
        example="GASLoC()",
        simulated_graph=static,
    ),
    entry(QGDSGDm, options=GRAPH),
    entry(D2, options=GRAPH, simulated_graph=_ring),
    entry(ExactDiffusion, options=GRAPH, simulated_graph=_ring),
    entry(EXTRA, options=GRAPH, simulated_graph=_ring),
    entry(GradientTracking, options=GRAPH, simulated_graph=_ring),
    entry(KGT, options=GRAPH, text="KGT(sync_every=10)", simulated_graph=_ring),
    entry(ProxSkip, options=GRAPH, text="ProxSkip(probability=0.1)", simulated_graph=_ring),
    entry(DecentLaM, options=GRAPH, simulated_graph=_ring),
    entry(ClippedGossip, options=COMPRESSED - {"nprocs_per_node"}, text="ClippedGossip(radius=1.0)"),
    entry(TrimmedMean, options=COMPRESSED),
    entry(
        RelaySGD,
        options=GRAPH,
        simulated_graph=lambda n, peers: "double-binary-tree",
    ),
    entry(
        Sparta,
        options=COMPRESSED,
        text="Sparta(0.01)",
        example="Sparta()",
        simulated_graph=lambda n, peers: "complete",
    ),
)
"""All of them, in the order of the tables."""
