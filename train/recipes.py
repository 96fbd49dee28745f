"""Recipes: each training method as the wrapper it puts around the model. A new method is a new entry of RECIPES."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gossip_modules as gm
from train.images import BatchKey

if TYPE_CHECKING:
    from train.config import Config
    from train.data import Data
    from train.world import World

Wrapper: TypeAlias = gm.GossipDataParallel | gm.AllReduceDataParallel


@dataclass(frozen=True)
class Recipe:
    """A method: what a table calls it, and how it wraps a model given (module, config, world, data)."""

    title: str
    wrap: Callable[[nn.Module, Config, World, Data], Wrapper]


def wrap_all_reduce(module: nn.Module, config: Config, world: World, data: Data) -> Wrapper:
    """AllReduce SGD: gradients averaged over all ranks at every step."""
    numbers = {"gossip_every": 1, "average_every": 0, "max_staleness": 0, "nprocs_per_node": 1}
    _warn_without_effect(config, world, {"graph": "auto", "peers_per_itr": "1", **numbers})
    wrapper = gm.AllReduceDataParallel(module)
    images, _ = data.train[BatchKey(data.shard[:2], seed=None)]
    settle_buckets(wrapper, images.to(world.device))
    return wrapper


def settle_buckets(wrapper: gm.AllReduceDataParallel, images: Tensor) -> None:
    """Take the one backward after which DistributedDataParallel reorders its buckets, and leave no other trace.

    The order in which Gloo adds up the ranks depends on the place in a bucket. Without this, the first step of every
    process would round differently from all others, and a resumed run from one that never stopped.

    Args:
        wrapper: new, in train mode.
        images: any batch, [B, C, H, W], B >= 2.
    """
    before = {name: tensor.clone() for name, tensor in wrapper.module.state_dict().items()}
    with torch.random.fork_rng(devices=[images.device] if images.is_cuda else []):
        # Past our wrapper's own forward, which would count the traffic of a step that is none.
        DistributedDataParallel.forward(wrapper, images).sum().backward()
    wrapper.module.load_state_dict(before)
    wrapper.zero_grad(set_to_none=True)


def wrap_gossip(
    module: nn.Module, config: Config, world: World, data: Data, *, push_sum: bool, overlap: bool
) -> Wrapper:
    """Gossip: parameters mixed with those of a few peers before every forward."""
    if not overlap:
        _warn_without_effect(config, world, {"max_staleness": 0})
    if world.size % config.nprocs_per_node:
        raise ValueError(
            f"got nprocs_per_node={config.nprocs_per_node} for {world.size} processes, expected a divisor; change one"
        )
    max_staleness = config.max_staleness if overlap else 0
    return gm.GossipDataParallel(
        module,
        graph=make_graph(
            config.graph,
            num_nodes=world.size // config.nprocs_per_node,
            peers_per_itr=peers_by_round(
                config.peers_per_itr,
                steps_per_epoch=data.steps_per_epoch,
                steps_per_round=max(config.gossip_every, max_staleness + 1),
            ),
            push_sum=push_sum,
        ),
        push_sum=push_sum,
        overlap=overlap,
        max_staleness=max_staleness,
        schedule=gm.Schedule(gossip_every=config.gossip_every, average_every=config.average_every),
        nprocs_per_node=config.nprocs_per_node,
        # Gloo moves host memory only, so parameters on a GPU are staged.
        comm_device=torch.device("cpu") if config.comm_device == "cpu" or world.backend == "gloo" else None,
        timeout=timedelta(seconds=config.timeout_seconds),
    )


RECIPES: Mapping[str, Recipe] = {
    "ar": Recipe("AllReduce SGD", wrap_all_reduce),
    "dpsgd": Recipe("D-PSGD", partial(wrap_gossip, push_sum=False, overlap=False)),
    "sgp": Recipe("SGP", partial(wrap_gossip, push_sum=True, overlap=False)),
    "osgp": Recipe("Overlap SGP", partial(wrap_gossip, push_sum=True, overlap=True)),
}

GRAPHS: Mapping[str, Callable[..., gm.GraphManager] | None] = {
    "auto": None,
    "exponential": gm.DynamicDirectedExponentialGraph,
    "npeer-exponential": gm.NPeerDynamicDirectedExponentialGraph,
    "bipartite-exponential": gm.DynamicBipartiteExponentialGraph,
    "linear": gm.DynamicDirectedLinearGraph,
    "bipartite-linear": gm.DynamicBipartiteLinearGraph,
    "ring": gm.RingGraph,
    "torus": gm.TorusGraph,
    "hypercube": gm.HypercubeGraph,
    "complete": gm.CompleteGraph,
}


def make_graph(
    name: str, *, num_nodes: int, peers_per_itr: int | Mapping[int, int], push_sum: bool
) -> gm.GraphManager | None:
    """The graph of that name in GRAPHS; None lets the wrapper choose, which it can for one peer per round.

    Args:
        name: key of GRAPHS.
        num_nodes: ranks of the graph.
        peers_per_itr: peers per round, or by first round.
        push_sum: whether the graph may be directed.
    """
    graph = GRAPHS[name]
    if graph is not None:
        return graph(num_nodes, peers_per_itr=peers_per_itr)
    if peers_per_itr == 1:
        return None
    if push_sum:
        return gm.NPeerDynamicDirectedExponentialGraph(num_nodes, peers_per_itr=peers_per_itr)
    if num_nodes % 2 == 0:
        return gm.DynamicBipartiteExponentialGraph(num_nodes, peers_per_itr=peers_per_itr)
    return gm.RingGraph(num_nodes, peers_per_itr=peers_per_itr)


def peers_by_round(text: str, *, steps_per_epoch: int, steps_per_round: int) -> int | dict[int, int]:
    """Peers per round out of '2', or, by the first round of each epoch named, out of '0:2,30:1'.

    Args:
        text: one number, or comma-separated <epoch>:<peers>, the first epoch being 0.
        steps_per_epoch: optimizer steps, hence training forwards, in an epoch.
        steps_per_round: steps from one round to the next.

    Raises:
        ValueError: the text says something else.
    """
    try:
        if ":" not in text:
            return int(text)
        pairs = [(int(epoch), int(peers)) for epoch, peers in (pair.split(":") for pair in text.split(","))]
    except ValueError as error:
        raise ValueError(
            f"got peers_per_itr={text!r}, expected a number or <epoch>:<peers> pairs; write '2' or '0:2,30:1'"
        ) from error
    # Rounds happen at the multiples of steps_per_round: the first one in an epoch rounds its first step up.
    return {-(-epoch * steps_per_epoch // steps_per_round): peers for epoch, peers in pairs}


def _warn_without_effect(config: Config, world: World, defaults: Mapping[str, object]) -> None:
    changed = [name for name, default in defaults.items() if getattr(config, name) != default]
    if changed and world.rank == 0:
        warnings.warn(f"{', '.join(changed)}: without effect with --recipe {config.recipe}", stacklevel=3)
