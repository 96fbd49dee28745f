"""Recipes: each training method as the wrapper it puts around the model. A new method is a new entry of RECIPES."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gossip_modules as gm
from train.compression import COMPRESSORS, WIRE_DTYPES, choco, deep_squeeze, moniqua, power_gossip
from train.graphs import base_graph, make_graph, make_static_graph, peers_by_round
from train.images import BatchKey

if TYPE_CHECKING:
    from train.config import Config
    from train.data import Data
    from train.world import World

Wrapper: TypeAlias = gm.GossipDataParallel | gm.AllReduceDataParallel

METHOD_OPTIONS = (
    *("graph", "peers_per_itr", "gossip_every", "average_every", "nprocs_per_node", "overlap", "max_staleness"),
    *("wire_dtype", "budget", "compressor", "compression_ratio", "compression_bits", "step_size", "theta"),
    *("power_rank", "power_iterations", "warm_start", "compress_vectors"),
)
"""Options of Config that a recipe may heed; one that it does not is named in a warning."""


@dataclass(frozen=True)
class Recipe:
    """A method: what a table calls it, how it wraps a model given (module, config, world, data), what it heeds.

    `max_staleness` is heeded with overlap, and a compressor brings options of its own.
    """

    title: str
    make: Callable[[nn.Module, Config, World, Data], Wrapper]
    options: frozenset[str] = frozenset()
    always_overlaps: bool = False

    def wrap(self, module: nn.Module, config: Config, world: World, data: Data) -> Wrapper:
        """The wrapper around `module`; rank 0 warns of options that are set and have no effect."""
        if (idle := self.idle(config)) and world.rank == 0:
            warnings.warn(f"{', '.join(idle)}: without effect with --recipe {config.recipe}", stacklevel=2)
        config = self.without_idle(config)
        return self.make(module, replace(config, overlap=True) if self.always_overlaps else config, world, data)

    def idle(self, config: Config) -> list[str]:
        """The METHOD_OPTIONS that are set and have no effect."""
        heeded, defaults = self.heeded(config), _defaults(config)
        return [name for name in METHOD_OPTIONS if name not in heeded and getattr(config, name) != defaults[name]]

    def without_idle(self, config: Config) -> Config:
        """`config` with the defaults of what has no effect: equal for runs that are equal."""
        defaults = _defaults(config)
        return replace(config, **{name: defaults[name] for name in self.idle(config)})

    def heeded(self, config: Config) -> frozenset[str]:
        """The METHOD_OPTIONS that shape a run of `config`."""
        options = self.options
        if "compressor" in options:
            options |= COMPRESSORS[config.compressor].options
        if self.always_overlaps or ("overlap" in options and config.overlap):
            options |= {"max_staleness"}
        return options


def _defaults(config: Config) -> dict[str, Any]:
    return {field.name: field.default for field in fields(config)}


def wrap_all_reduce(module: nn.Module, config: Config, world: World, data: Data) -> Wrapper:
    """AllReduce SGD: gradients averaged over all ranks at every step."""
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
    module: nn.Module,
    config: Config,
    world: World,
    data: Data,
    *,
    whom: Callable[[Config, int, Data], dict[str, Any]],
    what: Callable[[Config], dict[str, Any]],
    push_sum: bool = False,
) -> Wrapper:
    """Gossip: parameters mixed with those of a few peers before every forward.

    Args:
        module, config, world, data: of the run.
        whom: arguments of the wrapper that say who talks to whom, of (config, number of nodes, data).
        what: arguments of the wrapper that say what is said.
        push_sum: whether the graph may be directed.
    """
    if world.size % config.nprocs_per_node:
        raise ValueError(
            f"got nprocs_per_node={config.nprocs_per_node} for {world.size} processes, expected a divisor; change one"
        )
    return gm.GossipDataParallel(
        module,
        **whom(config, world.size // config.nprocs_per_node, data),
        **what(config),
        push_sum=push_sum,
        overlap=config.overlap,
        max_staleness=config.max_staleness,
        schedule=gm.Schedule(gossip_every=config.gossip_every, average_every=config.average_every),
        nprocs_per_node=config.nprocs_per_node,
        # Gloo moves host memory only, so parameters on a GPU are staged.
        comm_device=torch.device("cpu") if config.comm_device == "cpu" or world.backend == "gloo" else None,
        timeout=timedelta(seconds=config.timeout_seconds),
    )


def peers_of_a_graph(config: Config, num_nodes: int, data: Data, *, push_sum: bool) -> dict[str, Any]:
    """Some peers of any graph in each round."""
    peers = peers_by_round(
        config.peers_per_itr,
        steps_per_epoch=data.steps_per_epoch,
        steps_per_round=max(config.gossip_every, config.max_staleness + 1),
    )
    return {"graph": make_graph(config.graph, num_nodes=num_nodes, peers_per_itr=peers, push_sum=push_sum)}


def all_neighbours(config: Config, num_nodes: int, data: Data) -> dict[str, Any]:
    """All neighbours on an undirected graph that never changes."""
    return {"graph": make_static_graph(config.graph, num_nodes=num_nodes)}


def random_matchings(config: Config, num_nodes: int, data: Data) -> dict[str, Any]:
    """Matchings of a base graph, each by its own coin."""
    base = base_graph(config.graph, num_nodes=num_nodes)
    return {"mixing": gm.LaplacianMixing(gm.MatchaGraph(base, budget=config.budget, seed=config.seed))}


def parameters(config: Config) -> dict[str, Any]:
    """The parameters themselves, maybe in fewer bits."""
    return {"wire_dtype": WIRE_DTYPES[config.wire_dtype]}


def code(config: Config, *, gossiper: Callable[[Config], gm.Gossiper]) -> dict[str, Any]:
    """A lossy code of the parameters."""
    return {"gossiper": gossiper(config)}


_GOSSIP = frozenset({"graph", "gossip_every", "average_every", "nprocs_per_node"})


def _exact(title: str, *options: str, push_sum: bool, always_overlaps: bool = False) -> Recipe:
    whom = partial(peers_of_a_graph, push_sum=push_sum)
    make = partial(wrap_gossip, whom=whom, what=parameters, push_sum=push_sum)
    return Recipe(title, make, _GOSSIP | {"peers_per_itr", "wire_dtype", *options}, always_overlaps)


def _compressed(title: str, gossiper: Callable[[Config], gm.Gossiper], *options: str) -> Recipe:
    make = partial(wrap_gossip, whom=all_neighbours, what=partial(code, gossiper=gossiper))
    return Recipe(title, make, _GOSSIP | {"overlap", "step_size", *options})


RECIPES: Mapping[str, Recipe] = {
    "ar": Recipe("AllReduce SGD", wrap_all_reduce),
    "dpsgd": _exact("D-PSGD", "overlap", push_sum=False),
    "sgp": _exact("SGP", push_sum=True),
    "osgp": _exact("Overlap SGP", push_sum=True, always_overlaps=True),
    "matcha": Recipe(
        "MATCHA",
        partial(wrap_gossip, whom=random_matchings, what=parameters),
        _GOSSIP | {"budget", "overlap", "wire_dtype"},
    ),
    "choco": _compressed("CHOCO-SGD", choco, "compressor"),
    "deepsqueeze": _compressed("DeepSqueeze", deep_squeeze, "compressor"),
    "moniqua": _compressed("Moniqua", moniqua, "theta", "compression_bits"),
    "powergossip": _compressed(
        "PowerGossip", power_gossip, "power_rank", "power_iterations", "warm_start", "compress_vectors"
    ),
}
