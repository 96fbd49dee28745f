"""The methods side by side: none, hand-written loops, ours through their wrappers, and the peers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import networkx as nx
import torch
from torch import nn

import gossip_modules as gm
from benchmarks.by_hand import BlockingSGP, OverlappedSGP, PlainLoop
from benchmarks.cluster import peers
from benchmarks.cluster.network.place import Place
from benchmarks.contenders import PeriodicallyAveraged, Wrapped
from gossip_modules.compression import Absmax
from gossip_modules.engine.measuring import NUM_MEASURED, NUM_WARM
from gossip_modules.extend import Algorithm
from gossip_modules.graph_manager.named_graphs import undirected_ring
from gossip_modules.methods import read_algorithm

SYNC_PERIOD = 10
"""Rounds from one global average of WAGMA to the next: its default."""
EXACT_PERIOD = 8
"""Rounds of SGP from one exact average to the next."""
MEASURED_ROUNDS = NUM_WARM + NUM_MEASURED + 1
"""Steps of overlap="auto" before its choice, so that the steps that are timed come after it."""


@dataclass(frozen=True)
class ClusterMethod:
    """A row of the table.

    Args:
        title: its name there.
        make: the contender of a rank; on all ranks at once.
        period: steps after which all ranks meet, of methods that do not in every step; trials end at multiples of it.
        is_alone: whether it leaves threads or servers behind, so that no other trial may use the same processes.
        is_asynchronous: whether what it computes depends on how fast each rank is.
    """

    title: str
    make: Callable[[nn.Module, Place], PlainLoop]
    period: int = 1
    is_alone: bool = False
    is_asynchronous: bool = False


def _plain(kind: Callable[..., PlainLoop], **options: Any) -> Callable[[nn.Module, Place], PlainLoop]:
    """A contender that needs the default process group only."""
    return lambda model, place: kind(model, place.make_optimizer, **options)


def _ours(wrapper: Callable[..., nn.Module], **options: Any) -> Callable[[nn.Module, Place], PlainLoop]:
    """A wrapper of ours. An option that is a function of the number of ranks is called with it."""

    def make(model: nn.Module, place: Place) -> PlainLoop:
        chosen = {name: value(place.world_size) if callable(value) else value for name, value in options.items()}
        return Wrapped(model, place.make_optimizer, wrap=lambda x: wrapper(x, timeout=place.timeout, **chosen))

    return make


def _periodic(**options: Any) -> Callable[[nn.Module, Place], PlainLoop]:
    """`GossipDataParallel` whose ranks train alone between averages over all of them."""
    return lambda model, place: PeriodicallyAveraged(
        model, place.make_optimizer, wrap=lambda x: gm.GossipDataParallel(x, timeout=place.timeout, **options)
    )


def _mixed(make: Callable[[nn.Module, Place], PlainLoop]) -> Callable[[nn.Module, Place], PlainLoop]:
    """A contender whose rounds mix the first moments of the optimizer too."""

    def with_momentum(model: nn.Module, place: Place) -> PlainLoop:
        momentum = gm.MixedMomentum(model)
        loop = make(model, place)
        momentum.of(loop.optimizer)
        return loop

    return with_momentum


def _dpwa(model: nn.Module, place: Place) -> PlainLoop:
    workers = {f"worker{rank}": f"tcp://{address}:{place.port}" for rank, address in enumerate(place.addresses)}
    wrap = partial(gm.PairwiseDataParallel, name=f"worker{place.rank}", peers=workers, timeout=place.timeout)
    return Wrapped(model, place.make_optimizer, wrap=wrap)


def _base_graph(n: int) -> nx.Graph:
    """Of MATCHA: every rank beside the two on its left and the two on its right, where there are that many."""
    return nx.circulant_graph(n, [1, 2]) if n > 4 else nx.circulant_graph(n, [1])


_gossip = partial(_ours, gm.GossipDataParallel)
_pairs = partial(_gossip, push_sum=False)

BOUND = "local"
"""What nobody can beat, and to which the processor time of the others is compared."""
OURS: Mapping[str, ClusterMethod] = {
    "sgp": ClusterMethod("SGP, one-peer exponential", _gossip()),
    "osgp": ClusterMethod("OSGP", _gossip(overlap=True)),
    "osgp-ring": ClusterMethod("OSGP, one-way ring", _gossip(overlap=True, graph=lambda n: gm.RingGraph(n))),
    "sgp-2peers": ClusterMethod("SGP, two peers", _gossip(peers_per_itr=2)),
    "sgp-exact": ClusterMethod(
        f"SGP, each {EXACT_PERIOD}th round exact",
        _gossip(schedule=gm.Schedule(average_every=EXACT_PERIOD)),
        period=EXACT_PERIOD,
    ),
    "auto": ClusterMethod(
        'SGP, overlap="auto", wire_dtype="auto"',
        _gossip(overlap="auto", wire_dtype="auto"),
        period=MEASURED_ROUNDS,
    ),
    "sgp-bf16": ClusterMethod("SGP, bfloat16 on the wire", _gossip(wire_dtype=torch.bfloat16)),
    "osgp-bf16": ClusterMethod("OSGP, bfloat16 on the wire", _gossip(overlap=True, wire_dtype=torch.bfloat16)),
    "sgp-mixed": ClusterMethod("SGP, momentum mixed too", _mixed(_gossip())),
    "sgp-bf16-mixed": ClusterMethod(
        "SGP, momentum mixed too, bfloat16 on the wire", _mixed(_gossip(wire_dtype=torch.bfloat16))
    ),
    "osgp-int8": ClusterMethod("OSGP, int8 on the wire", _gossip(overlap=True, wire_dtype=torch.int8)),
    "sgp-int8": ClusterMethod("SGP, int8 on the wire", _gossip(wire_dtype=torch.int8)),
    "osgp-int8-mixed": ClusterMethod(
        "OSGP, momentum mixed too, int8 on the wire", _mixed(_gossip(overlap=True, wire_dtype=torch.int8))
    ),
    "osgp-bf16-mixed": ClusterMethod(
        "OSGP, momentum mixed too, bfloat16 on the wire", _mixed(_gossip(overlap=True, wire_dtype=torch.bfloat16))
    ),
    **{
        f"local-{every}-mixed": ClusterMethod(
            f"Local SGD, H = {every}, momentum mixed too",
            _mixed(_periodic(algorithm=gm.LocalSGD(sync_every=every))),
            period=every,
        )
        for every in (2, 4)
    },
    **{
        f"local-4-mixed-{bits}": ClusterMethod(
            f"Local SGD, H = 4, {bits} bits, momentum mixed too",
            _mixed(
                _periodic(
                    algorithm=gm.DiLoCo(
                        4, lr=1.0, momentum=0.0, compressor=Absmax(bits, block_size), collective="all_reduce"
                    )
                )
            ),
            period=4,
        )
        for bits, block_size in ((4, 32), (8, 64))
    },
    "dpsgd-ring": ClusterMethod("D-PSGD, ring", _pairs(graph=undirected_ring)),
    "dpsgd": ClusterMethod("D-PSGD, pairs", _pairs(graph=gm.graph_manager.DynamicBipartiteExponentialGraph)),
    "dpsgd-overlap": ClusterMethod(
        "D-PSGD, pairs, overlapped", _pairs(graph=gm.graph_manager.DynamicBipartiteExponentialGraph, overlap=True)
    ),
    "matcha": ClusterMethod("MATCHA, budget 0.5", _pairs(graph=lambda n: gm.MatchaGraph(_base_graph(n), budget=0.5))),
    "matcha-sparse": ClusterMethod(
        "MATCHA, budget 0.1", _pairs(graph=lambda n: gm.MatchaGraph(_base_graph(n), budget=0.1))
    ),
    "matcha-overlap": ClusterMethod(
        "MATCHA, budget 0.1, overlapped",
        _pairs(graph=lambda n: gm.MatchaGraph(_base_graph(n), budget=0.1), overlap=True),
    ),
    "choco": ClusterMethod("CHOCO, sign, ring", _pairs(algorithm=gm.Choco(gm.SignNorm(), step_size=0.45))),
    "deepsqueeze": ClusterMethod(
        "DeepSqueeze, sign, ring", _pairs(algorithm=gm.DeepSqueeze(gm.SignNorm(), step_size=0.01))
    ),
    "moniqua": ClusterMethod("Moniqua, 8 bits, ring", _pairs(algorithm=gm.Moniqua(theta=0.5, bits=8))),
    "powergossip": ClusterMethod("PowerGossip, rank 1, ring", _pairs(algorithm=gm.PowerGossip())),
    "powergossip-overlap": ClusterMethod(
        "PowerGossip, rank 1, ring, overlapped", _pairs(algorithm=gm.PowerGossip(), overlap=True)
    ),
    "adpsgd": ClusterMethod("AD-PSGD", _ours(gm.BilatGossipDataParallel), is_asynchronous=True),
    "wagma": ClusterMethod(
        "WAGMA",
        _ours(gm.GroupAverageDataParallel, sync_period=SYNC_PERIOD),
        period=SYNC_PERIOD,
        is_asynchronous=True,
    ),
    "owagma": ClusterMethod(
        "WAGMA, overlapped",
        _ours(gm.GroupAverageDataParallel, sync_period=SYNC_PERIOD, overlap=True),
        period=SYNC_PERIOD,
        is_asynchronous=True,
    ),
    "dpwa": ClusterMethod("dpwa", _dpwa, is_asynchronous=True),
    "local-average": ClusterMethod(
        f"local SGD, average every {peers.PERIOD}",
        _ours(gm.GroupAverageDataParallel, group_size=lambda n: 1, sync_period=peers.PERIOD),
        period=peers.PERIOD,
    ),
    "localsgd": ClusterMethod(
        f"local SGD, period {peers.PERIOD}",
        _periodic(schedule=gm.Schedule(gossip_every=peers.PERIOD, average_every=1)),
        period=peers.PERIOD,
    ),
    "diloco": ClusterMethod(
        f"DiLoCo, period {peers.PERIOD}", _periodic(algorithm=gm.DiLoCo(peers.PERIOD)), period=peers.PERIOD
    ),
    "streamingdiloco": ClusterMethod(
        f"Streaming DiLoCo, period {peers.PERIOD}, 2 fragments, delay 2",
        _periodic(algorithm=gm.StreamingDiLoCo(peers.PERIOD, fragments=2, delay=2)),
        period=peers.PERIOD,
    ),
    "streamingdiloco-auto": ClusterMethod(
        f'Streaming DiLoCo, period {peers.PERIOD}, 2 fragments, delay="auto"',
        _periodic(algorithm=gm.StreamingDiLoCo(peers.PERIOD, fragments=2, delay="auto")),
        period=3 * peers.PERIOD,  # in which the first delay is agreed
    ),
    "sparseloco": ClusterMethod(
        f"SparseLoCo, period {peers.PERIOD}", _periodic(algorithm=gm.SparseLoCo(peers.PERIOD)), period=peers.PERIOD
    ),
}
OTHERS: Mapping[str, ClusterMethod] = {
    "hand": ClusterMethod("hand-written SGP, one-way ring", _plain(BlockingSGP)),
    "hand-overlap": ClusterMethod("hand-written OSGP, one-way ring", _plain(OverlappedSGP)),
    "ddp": ClusterMethod("DDP", peers.ddp()),
    "ddp-view": ClusterMethod("DDP, gradient_as_bucket_view", peers.ddp(gradient_as_bucket_view=True)),
    "ddp-fp16": ClusterMethod("DDP, fp16 hook", peers.ddp_hook("fp16_compress_hook")),
    "ddp-bf16": ClusterMethod("DDP, bf16 hook", peers.ddp_hook("bf16_compress_hook")),
    "ddp-powersgd": ClusterMethod("DDP, PowerSGD hook, rank 1, one bucket", peers.ddp_power_sgd),
    "post-local": ClusterMethod(f"torch post-local SGD, period {peers.PERIOD}", peers.post_local, period=peers.PERIOD),
    "decent-ring": ClusterMethod("Decent-DP, ring", peers.decent(topology="ring")),
    "decent-exp": ClusterMethod("Decent-DP, one-peer exponential", peers.decent(topology="one-peer-exp")),
    "torchft-local": ClusterMethod(
        f"torchft LocalSGD, period {peers.PERIOD}", peers.torchft_local, peers.PERIOD, is_alone=True
    ),
    "torchft-diloco": ClusterMethod(
        f"torchft DiLoCo, period {peers.PERIOD}", peers.torchft_diloco, peers.PERIOD, is_alone=True
    ),
}
CLUSTER_METHODS: Mapping[str, ClusterMethod] = {
    BOUND: ClusterMethod("no communication", _plain(PlainLoop)),
    **OURS,
    **OTHERS,
}


def between_nodes(text: str, size: int) -> str:
    """Return the name of a method between nodes of so many consecutive ranks, for `method_of`.

    Args:
        text: "sgp", "osgp", or the text of an algorithm.
        size: the ranks of a node, which average their gradients in every step.
    """
    return f"{text} between nodes of {size}"


def method_of(name: str) -> ClusterMethod:
    """Return a row of CLUSTER_METHODS, or the row of an algorithm of the library.

    Args:
        name: of CLUSTER_METHODS, or the text of an algorithm, such as "DiLoCo(sync_every=8)". Its period is the one of
            the algorithm; two of them if messages arrive later, which takes a period until it is as usual. Or "ar", our
            AllReduceDataParallel, or what `between_nodes` returns.

    Raises:
        ValueError: there is no such method.
    """
    if name in CLUSTER_METHODS:
        return CLUSTER_METHODS[name]
    if name == "ar":
        return ClusterMethod("AllReduceDataParallel", _ours(gm.AllReduceDataParallel))
    text, is_node, size = name.partition(between_nodes("", 0)[:-1])
    nodes = {"nprocs_per_node": int(size)} if is_node else {}
    if nodes and text in ("sgp", "osgp"):
        return ClusterMethod(name, _gossip(overlap=text == "osgp", **nodes))
    try:
        chosen = read_algorithm(text)
    except ValueError as error:
        names = ", ".join(CLUSTER_METHODS)
        raise ValueError(f"got the method {name!r}, expected some of {names}, or an algorithm: {error}") from None
    algorithm = chosen.made
    if not isinstance(algorithm, Algorithm):
        raise ValueError(f"got the method {name!r}, expected an algorithm, or a short name; see --help")
    num_periods = 2 if getattr(algorithm.parts[0], "delay", 0) else 1
    return ClusterMethod(name, _periodic(algorithm=algorithm, **nodes), period=num_periods * chosen.period)


def optimizer_of(name: str, *, is_adam: bool) -> str:
    """Return the optimizer of a method, of `OPTIMIZERS`: SGD, or the variant of Adam for its gradients.

    Args:
        name: see `method_of`.
        is_adam: AdamW, or GossipAdamW in our methods, whose ranks step by their own gradients.
    """
    return "SGD" if not is_adam else "AdamW" if name == BOUND or name in OTHERS else "GossipAdamW"


def require_methods(names: Sequence[str]) -> None:
    """Make sure that there are such methods, each once.

    Raises:
        ValueError: otherwise.
    """
    if not names or len(set(names)) < len(names):
        raise ValueError(
            f"got methods={tuple(names)}, expected some of {', '.join(CLUSTER_METHODS)}, each once; see --help"
        )
    for name in names:
        method_of(name)
