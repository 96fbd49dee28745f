"""The methods of this library: an entry for each. `own.py` makes that of a gossiper in one call."""

from __future__ import annotations

from functools import partial

from ..ad_psgd.exchange import BilateralAverage
from ..algorithms.power_gossip import PowerGossip
from ..dpwa.engine import PairwiseEngine
from ..engine.overlap import OverlapEngine
from ..gossiper.choco import Choco
from ..gossiper.deep_squeeze import DeepSqueeze
from ..gossiper.moniqua import Moniqua
from ..gossiper.push_sum import PushPull, PushSum
from ..matcha.graph import MatchaGraph
from ..registry import Method, Paper
from ..schedule import Schedule
from ..wagma.engine import WaitAvoidingEngine
from ..wrappers.all_reduce import AllReduceDataParallel
from .compressors import CHOCO_STEP_SIZES, COMPRESSORS, DEEP_SQUEEZE_STEP_SIZES, MONIQUA_STEP_SIZES, WIRE_DTYPES
from .gossipers import choco, deep_squeeze, moniqua, power_gossip
from .outer_methods import OUTER_METHODS
from .rule_methods import RULE_METHODS
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
    simulate_power_gossip,
    simulate_sgp,
    simulate_wagma,
    static,
)
from .wrapping import (
    parameters,
    peers_of_a_graph,
    random_matchings,
    wrap_all_reduce,
    wrap_bilateral,
    wrap_gossip,
    wrap_gossiper,
    wrap_group_average,
    wrap_local_sgd,
    wrap_pairwise,
)

ROUNDS = frozenset({"graph", "gossip_every", "average_every", "nprocs_per_node"})
"""Options of whatever gossips in rounds."""
PLAIN = ROUNDS | {"peers_per_itr", "wire_dtype", "consensus_target"}
"""Options of gossip of the parameters themselves."""
COMPRESSED = ROUNDS | {"overlap", "step_size"}
"""Options of compressed gossip."""

_push_sum = partial(
    wrap_gossip,
    whom=partial(peers_of_a_graph, push_sum=True),
    what=parameters,
    push_sum=True,
)
_SGP = Paper(
    "Assran, Loizou, Ballas, Rabbat",
    "Stochastic Gradient Push for Distributed Deep Learning",
    "ICML 2019",
    "1811.10792",
)

BUILT_IN: tuple[Method, ...] = (
    Method(
        "ar",
        "AllReduce SGD",
        "averages gradients over all ranks at every step",
        AllReduceDataParallel,
        make=wrap_all_reduce,
        simulate=simulate_all_reduce,
        example="AllReduceDataParallel(model)",
        aliases=("allreduce",),
        needs_fixed_ranks="every step needs the gradients of all; an all-reduce that survives its workers is torchft",
    ),
    Method(
        "dpsgd",
        "D-PSGD",
        "averages parameters with a few peers on an undirected graph",
        PushPull,
        make=partial(wrap_gossip, whom=peers_of_a_graph, what=parameters),
        simulate=simulate_d_psgd,
        paper=Paper(
            "Lian, Zhang, Zhang, Hsieh, Zhang, Liu",
            "Can Decentralized Algorithms Outperform Centralized Algorithms?",
            "NeurIPS 2017",
            "1705.09056",
        ),
        example="GossipDataParallel(model, push_sum=False)",
        graph="undirected",
        options=PLAIN | {"overlap"},
        gossiper=lambda options, seed: PushPull(wire_dtype=WIRE_DTYPES[options.wire_dtype]),
        simulated_graph=pairs,
    ),
    Method(
        "sgp",
        "SGP",
        "pushes parameters to a few peers on any graph, and divides by a weight that travels along",
        PushSum,
        make=_push_sum,
        simulate=simulate_sgp,
        paper=_SGP,
        example="GossipDataParallel(model)",
        graph="any",
        options=PLAIN,
        simulated_graph=lambda n, peers: "npeer-exponential",
    ),
    Method(
        "osgp",
        "Overlap SGP",
        "SGP whose rounds travel while the next steps are computed",
        OverlapEngine,
        make=_push_sum,
        simulate=simulate_osgp,
        paper=_SGP,
        example="GossipDataParallel(model, overlap=True)",
        graph="any",
        options=PLAIN,
        always_overlaps=True,
        simulated_graph=lambda n, peers: "npeer-exponential",
    ),
    Method(
        "matcha",
        "MATCHA",
        "averages with the peers of random matchings of a graph, its important links more often",
        MatchaGraph,
        make=partial(wrap_gossip, whom=random_matchings, what=parameters),
        simulate=simulate_matcha,
        paper=Paper(
            "Wang, Sahu, Yang, Joshi, Kar",
            "MATCHA: Speeding Up Decentralized SGD via Matching Decomposition Sampling",
            "ICC 2019",
            "1905.09435",
        ),
        example="GossipDataParallel(model, graph=MatchaGraph(base, budget=0.5))",
        graph="undirected, static",
        options=ROUNDS | {"budget", "plan", "overlap", "wire_dtype"},
        simulated_graph=lambda n, peers: "ring",
    ),
    Method(
        "choco",
        "CHOCO-SGD",
        "sends compressed differences to a copy of each model that its neighbours can follow",
        Choco,
        make=wrap_gossiper(choco, is_static=True),
        simulate=simulate_choco,
        paper=Paper(
            "Koloskova, Stich, Jaggi",
            "Decentralized Stochastic Optimization and Gossip Algorithms with Compressed Communication",
            "ICML 2019",
            "1902.00340",
        ),
        example="GossipDataParallel(model, gossiper=Choco(SignNorm(), step_size=0.45))",
        graph="undirected, static",
        options=COMPRESSED | {"compressor"},
        gossiper=choco,
        step_sizes=CHOCO_STEP_SIZES,
        simulated_graph=static,
        codes=tuple(COMPRESSORS),
    ),
    Method(
        "deepsqueeze",
        "DeepSqueeze",
        "sends compressed models, and adds what was lost to the next message",
        DeepSqueeze,
        make=wrap_gossiper(deep_squeeze, is_static=False),
        simulate=simulate_deep_squeeze,
        paper=Paper(
            "Tang, Lian, Qiu, Yuan, Zhang, Zhang, Liu",
            "DeepSqueeze: Decentralization Meets Error-Compensated Compression",
            "2019",
            "1907.07346",
        ),
        example="GossipDataParallel(model, gossiper=DeepSqueeze(SignNorm(), step_size=0.01))",
        graph="undirected",
        options=COMPRESSED | {"compressor"},
        gossiper=deep_squeeze,
        step_sizes=DEEP_SQUEEZE_STEP_SIZES,
        simulated_graph=pairs,
        codes=tuple(COMPRESSORS),
    ),
    Method(
        "moniqua",
        "Moniqua",
        "sends parameters modulo a bound on the differences of neighbours, in a few bits each",
        Moniqua,
        make=wrap_gossiper(moniqua, is_static=False),
        simulate=simulate_moniqua,
        paper=Paper(
            "Lu, De Sa", "Moniqua: Modulo Quantized Communication in Decentralized SGD", "ICML 2020", "2002.11787"
        ),
        example="GossipDataParallel(model, gossiper=Moniqua(theta=0.5))",
        graph="undirected",
        options=COMPRESSED | {"theta", "compression_bits"},
        gossiper=moniqua,
        step_sizes=MONIQUA_STEP_SIZES,
        simulated_graph=pairs,
    ),
    Method(
        "powergossip",
        "PowerGossip",
        "sends low-rank approximations of the differences between neighbours, by power iteration",
        PowerGossip,
        make=wrap_gossiper(power_gossip, is_static=False),
        simulate=simulate_power_gossip,
        paper=Paper(
            "Vogels, Karimireddy, Jaggi",
            "Practical Low-Rank Communication Compression in Decentralized Deep Learning",
            "NeurIPS 2020",
            "2008.01425",
        ),
        example="GossipDataParallel(model, algorithm=PowerGossip())",
        graph="undirected",
        options=COMPRESSED | {"power_rank", "power_iterations", "warm_start", "compress_vectors"},
        gossiper=power_gossip,
        simulated_graph=pairs,
    ),
    Method(
        "adpsgd",
        "AD-PSGD",
        "averages pairs of models while both ranks go on training",
        BilateralAverage,
        make=wrap_bilateral,
        simulate=simulate_ad_psgd,
        paper=Paper(
            "Lian, Zhang, Zhang, Liu",
            "Asynchronous Decentralized Parallel Stochastic Gradient Descent",
            "ICML 2018",
            "1710.06952",
        ),
        example="BilatGossipDataParallel(model)",
        graph="bipartite",
        options=frozenset({"graph"}),
        pace="shared_steps",
        simulated_graph=lambda n, peers: "bipartite-complete" if n % 2 else "bipartite-exponential",
    ),
    Method(
        "wagma",
        "WAGMA-SGD",
        "averages changing groups of ranks, and late ranks contribute what they last had",
        WaitAvoidingEngine,
        make=wrap_group_average,
        simulate=simulate_wagma,
        paper=Paper(
            "Li, Ben-Nun, Nadiradze, Di Girolamo, Dryden, Alistarh, Hoefler",
            "Breaking (Global) Barriers in Parallel Stochastic Optimization with Wait-Avoiding Group Averaging",
            "IEEE TPDS 2021",
            "2005.00124",
        ),
        example="GroupAverageDataParallel(model)",
        options=frozenset({"group_size", "sync_period", "wait_avoiding", "overlap"}),
        pace="shared_rounds",
    ),
    Method(
        "dpwa",
        "dpwa",
        "pulls the model of a random peer, and goes part of the way towards it",
        PairwiseEngine,
        make=wrap_pairwise,
        simulate=simulate_dpwa,
        paper=Paper("Jin, Yuan, Iandola, Keutzer", "How to scale distributed deep learning?", "2016", "1611.04581"),
        example='PairwiseDataParallel(model, name="w0", peers=addresses)',
        options=frozenset({"interpolation", "divergence_threshold", "fetch_probability"}),
        pace="shared_steps",
        needs_fixed_ranks="its workers come and go without one; see the guide to dpwa",
    ),
    Method(
        "localsgd",
        "Local SGD",
        "trains alone, and averages parameters over all ranks every few steps",
        Schedule,
        make=wrap_local_sgd,
        simulate=simulate_local_sgd,
        paper=Paper("Stich", "Local SGD Converges Fast and Communicates Little", "ICLR 2019", "1805.09767"),
        example="GossipDataParallel(model, schedule=Schedule(gossip_every=10, average_every=1))",
        options=frozenset({"sync_period", "nprocs_per_node"}),
    ),
    *OUTER_METHODS,
    *RULE_METHODS,
)
