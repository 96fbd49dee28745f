"""How each method wraps a model: functions of (module, options, context), which the entries of the registry name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..ad_psgd.wrapper import BilatGossipDataParallel
from ..algorithms.outer_method import OuterMethod
from ..consensus_control import ConsensusControl
from ..dpwa.interpolation import ClockInterpolation, ConstantInterpolation, Interpolation, LossInterpolation
from ..dpwa.wrapper import PairwiseDataParallel
from ..gossiper.gossiper import Gossiper
from ..matcha.graph import MatchaGraph
from ..mixing_manager.laplacian import LaplacianMixing
from ..rounds.algorithm import Algorithm
from ..schedule import Schedule
from ..wagma.wrapper import GroupAverageDataParallel
from ..wrappers.all_reduce import AllReduceDataParallel
from ..wrappers.gossip import GossipDataParallel
from .compressors import WIRE_DTYPES
from .graphs import (
    base_graph,
    choose_graph,
    make_graph,
    make_static_graph,
    make_tree,
    make_undirected_graph,
    peers_by_round,
)
from .options import Context, MethodOptions

Wrapper: TypeAlias = (
    GossipDataParallel
    | AllReduceDataParallel
    | BilatGossipDataParallel
    | GroupAverageDataParallel
    | PairwiseDataParallel
)
"""What wraps a model in a run."""

INTERPOLATIONS: Mapping[str, Callable[[MethodOptions], Interpolation]] = {
    "constant": lambda options: ConstantInterpolation(options.interpolation_value),
    "clock": lambda options: ClockInterpolation(),
    "loss": lambda options: LossInterpolation(),
}
"""How far dpwa goes towards a peer's model."""


def wrap_all_reduce(module: nn.Module, options: MethodOptions, context: Context) -> Wrapper:
    """AllReduce SGD: gradients averaged over all ranks at every step."""
    wrapper = AllReduceDataParallel(module)
    if context.example_inputs is not None:
        settle_buckets(wrapper, context.example_inputs())
    return wrapper


def settle_buckets(wrapper: AllReduceDataParallel, inputs: tuple[Tensor, ...]) -> None:
    """Take the one backward after which DistributedDataParallel reorders its buckets, and leave no other trace.

    The order in which Gloo adds up the ranks depends on the place in a bucket. Without this, the first step of every
    process would round differently from all others, and a resumed run from one that never stopped.

    Args:
        wrapper: new, in train mode.
        inputs: of the model, on the device.
    """
    before = {name: tensor.clone() for name, tensor in wrapper.module.state_dict().items()}
    with torch.random.fork_rng(devices=[inputs[0].device] if inputs[0].is_cuda else []):
        # Past our wrapper's own forward, which would count the traffic of a step that is none.
        DistributedDataParallel.forward(wrapper, *inputs).sum().backward()
    wrapper.module.load_state_dict(before)
    wrapper.zero_grad(set_to_none=True)


def rounds_of(options: MethodOptions) -> Schedule | ConsensusControl:
    """Which steps gossip and which average over all, or what controls that.

    Raises:
        ValueError: control, with numbers of peers by epoch.
    """
    every = options.gossip_every
    if not options.consensus_target:
        return Schedule(gossip_every=every, average_every=options.average_every)
    if ":" in options.peers_per_itr:
        raise ValueError(
            f"got peers_per_itr={options.peers_per_itr} with consensus_target={options.consensus_target}, expected a "
            "number: how many rounds an epoch has is not known before; leave one of them out"
        )
    control = ConsensusControl(options.consensus_target, remedy=options.consensus_remedy)
    control = replace(control, gossip_every=every, max_interval=max(control.max_interval, every))
    return replace(control, average_every=options.average_every) if options.average_every else control


def wrap_gossip(
    module: nn.Module,
    options: MethodOptions,
    context: Context,
    *,
    whom: Callable[[MethodOptions, int, Context], dict[str, Any]],
    what: Callable[[MethodOptions, Context], dict[str, Any]],
    push_sum: bool = False,
    schedule: Callable[[MethodOptions], Schedule | ConsensusControl] = rounds_of,
) -> Wrapper:
    """Gossip: parameters mixed with those of a few peers in every step.

    Args:
        module, options, context: what is wrapped, how, and where.
        whom: arguments of the wrapper that say who talks to whom, of (options, number of nodes, context).
        what: arguments of the wrapper that say what is sent.
        push_sum: whether the graph may be directed.
        schedule: which step gossips and which averages over all, or what controls that.
    """
    return GossipDataParallel(
        module,
        **choose_graph(whom, options, context),
        **what(options, context),
        push_sum=push_sum,
        overlap=options.overlap,
        max_staleness=options.max_staleness,
        schedule=schedule(options),
        nprocs_per_node=options.nprocs_per_node,
        comm_device=context.comm_device,
        timeout=context.timeout,
        membership=context.membership,
    )


def peers_of_a_graph(
    options: MethodOptions, num_nodes: int, context: Context, *, push_sum: bool = False
) -> dict[str, Any]:
    """Some peers of any graph in each round."""
    peers = peers_by_round(
        options.peers_per_itr,
        steps_per_epoch=context.steps_per_epoch,
        steps_per_round=max(options.gossip_every, options.max_staleness + 1),
    )
    return {"graph": make_graph(options.graph, num_nodes=num_nodes, peers_per_itr=peers, push_sum=push_sum)}


def all_neighbours(options: MethodOptions, num_nodes: int, context: Context) -> dict[str, Any]:
    """All neighbours on an undirected graph that never changes."""
    return {"graph": make_static_graph(options.graph, num_nodes=num_nodes)}


def undirected_neighbours(options: MethodOptions, num_nodes: int, context: Context) -> dict[str, Any]:
    """All neighbours on an undirected graph that never changes, one peer on an undirected graph that does."""
    return {"graph": make_undirected_graph(options.graph, num_nodes=num_nodes)}


def tree_neighbours(options: MethodOptions, num_nodes: int, context: Context) -> dict[str, Any]:
    """All neighbours in a tree, or in two."""
    return {"graph": make_tree(options.graph, num_nodes=num_nodes)}


def random_matchings(options: MethodOptions, num_nodes: int, context: Context) -> dict[str, Any]:
    """Matchings of a base graph, each by its own coin: those of a plan, or planned here."""
    if options.plan:
        graph = MatchaGraph.from_plan(options.plan, seed=context.seed, world_size=num_nodes)
    else:
        base = base_graph(options.graph, num_nodes=num_nodes)
        graph = MatchaGraph(base, budget=options.budget, seed=context.seed)
    return {"mixing": LaplacianMixing(graph)}


def parameters(options: MethodOptions, context: Context) -> dict[str, Any]:
    """The parameters themselves, maybe in fewer bits."""
    return {"wire_dtype": WIRE_DTYPES[options.wire_dtype]}


def code(
    options: MethodOptions, context: Context, *, gossiper: Callable[[MethodOptions, int], Gossiper | Algorithm]
) -> dict[str, Any]:
    """What a gossiper makes of the parameters."""
    return {"gossiper": gossiper(options, context.seed)}


def averages_only(options: MethodOptions) -> Schedule:
    """Every `sync_period` steps an exact average over all ranks, and no gossip between.

    Raises:
        ValueError: it never averages.
    """
    if options.sync_period < 1:
        raise ValueError(
            f"got sync_period={options.sync_period} for localsgd, expected 1 step or more; leave it out for 10"
        )
    return Schedule(gossip_every=options.sync_period, average_every=1)


def wrap_local_sgd(module: nn.Module, options: MethodOptions, context: Context) -> Wrapper:
    """Local SGD: ranks train alone, and average their parameters over all ranks every `sync_period` steps."""
    return wrap_gossip(module, options, context, whom=peers_of_a_graph, what=parameters, schedule=averages_only)


def wrap_with(
    argument: str,
    make: Callable[[MethodOptions, int], OuterMethod | Algorithm],
    *,
    whom: Callable[[MethodOptions, int, Context], dict[str, Any]] | None = None,
) -> Callable[[nn.Module, MethodOptions, Context], Wrapper]:
    """How a method wraps a model that is one argument of the wrapper, given (options, seed), on a graph or none."""

    def wrap(module: nn.Module, options: MethodOptions, context: Context) -> Wrapper:
        arguments: dict[str, Any] = {argument: make(options, context.seed)}
        return GossipDataParallel(
            module,
            **arguments,
            **(choose_graph(whom, options, context) if whom else {}),
            nprocs_per_node=options.nprocs_per_node,
            comm_device=context.comm_device,
            timeout=context.timeout,
            membership=context.membership,
        )

    return wrap


def wrap_gossiper(
    gossiper: Callable[[MethodOptions, int], Gossiper | Algorithm], *, is_static: bool
) -> Callable[[nn.Module, MethodOptions, Context], Wrapper]:
    """How a method wraps a model that is a gossiper on an undirected graph, which never changes if `is_static`."""
    whom = all_neighbours if is_static else undirected_neighbours
    return partial(wrap_gossip, whom=whom, what=partial(code, gossiper=gossiper))


def wrap_bilateral(module: nn.Module, options: MethodOptions, context: Context) -> Wrapper:
    """AD-PSGD: pairs average while both go on training."""

    def pairs(options: MethodOptions, num_nodes: int, context: Context) -> dict[str, Any]:
        return {"graph": make_graph(options.graph, num_nodes=num_nodes, peers_per_itr=1, push_sum=False)}

    return BilatGossipDataParallel(
        module, **choose_graph(pairs, options, context), timeout=context.timeout, membership=context.membership
    )


def wrap_group_average(module: nn.Module, options: MethodOptions, context: Context) -> Wrapper:
    """WAGMA-SGD: groups that change average without waiting for late members."""
    return GroupAverageDataParallel(
        module,
        group_size=options.group_size or None,
        sync_period=options.sync_period,
        wait_avoiding=options.wait_avoiding,
        overlap=options.overlap,
        timeout=context.timeout,
        membership=context.membership,
    )


def wrap_pairwise(module: nn.Module, options: MethodOptions, context: Context) -> Wrapper:
    """dpwa: each rank pulls the model of another; they tell each other here under which address they serve theirs."""
    own, host = _worker(context.rank), context.own_host()
    wrappers: list[PairwiseDataParallel] = []

    def serve() -> str:
        wrapper = PairwiseDataParallel(
            module,
            name=own,
            peers={own: f"tcp://{host}:*"},
            interpolation=INTERPOLATIONS[options.interpolation](options),
            divergence_threshold=options.divergence_threshold,
            fetch_probability=options.fetch_probability,
            seed=context.seed,
            average_timeout=context.timeout,
            init_from_peers=False,  # all have made the same model
        )
        wrappers.append(wrapper)
        return wrapper.address

    for rank, address in enumerate(context.on_every_rank(serve)):
        if rank != context.rank:
            wrappers[0].add_peer(_worker(rank), address)
    return wrappers[0]


def _worker(rank: int) -> str:
    return f"rank_{rank:04d}"
