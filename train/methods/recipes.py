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
from train.job.addresses import own_host
from train.job.preemption import StopRequest
from train.methods.compression import COMPRESSORS, WIRE_DTYPES, choco, deep_squeeze, moniqua, power_gossip
from train.methods.graphs import base_graph, make_graph, make_static_graph, peers_by_round
from train.methods.pace import Lockstep, Pace, SharedRounds, SharedSteps

if TYPE_CHECKING:
    from train.job.world import World
    from train.run.state import TrainingState
    from train.run_config import RunConfig
    from train.tasks.base import Task

Wrapper: TypeAlias = (
    gm.GossipDataParallel
    | gm.AllReduceDataParallel
    | gm.BilatGossipDataParallel
    | gm.GroupAverageDataParallel
    | gm.PairwiseDataParallel
)

INTERPOLATIONS: Mapping[str, Callable[[RunConfig], gm.Interpolation]] = {
    "constant": lambda config: gm.ConstantInterpolation(config.interpolation_value),
    "clock": lambda config: gm.ClockInterpolation(),
    "loss": lambda config: gm.LossInterpolation(),
}
"""How far dpwa goes towards a peer's model."""

METHOD_OPTIONS = (
    *("graph", "peers_per_itr", "gossip_every", "average_every", "nprocs_per_node", "overlap", "max_staleness"),
    *("wire_dtype", "budget", "plan", "compressor", "compression_ratio", "compression_bits", "step_size", "theta"),
    *("power_rank", "power_iterations", "warm_start", "compress_vectors", "group_size", "sync_period", "wait_avoiding"),
    *("interpolation", "interpolation_value", "divergence_threshold", "fetch_probability"),
)
"""Options of RunConfig that a recipe may heed; one that it does not is named in a warning."""


def in_lockstep(state: TrainingState, config: RunConfig, world: World, request: StopRequest) -> Pace:
    """Every rank takes every step."""
    return Lockstep(state, request, world.control, lag=1 + config.max_staleness)


def sharing_steps(state: TrainingState, config: RunConfig, world: World, request: StopRequest) -> Pace:
    """Fast ranks take more of the steps."""
    return SharedSteps(state, request, world)


def sharing_rounds(state: TrainingState, config: RunConfig, world: World, request: StopRequest) -> Pace:
    """Late ranks skip rounds, where groups do not wait for them."""
    if config.wait_avoiding and config.group_size != 1:
        return SharedRounds(state, request, world)
    # Ranks that average among themselves drift apart until all average.
    return Lockstep(state, request, world.control, lag=max(1, config.sync_period))


@dataclass(frozen=True)
class Recipe:
    """A method: what a table calls it, how it wraps a model given (module, config, world, task), what it heeds.

    `max_staleness` is heeded where rounds in lockstep overlap, and a compressor brings options of its own. `make_pace`
    says how ranks take their steps, given (state, config, world, request to stop).
    """

    title: str
    make: Callable[[nn.Module, RunConfig, World, Task], Wrapper]
    options: frozenset[str] = frozenset()
    always_overlaps: bool = False
    make_pace: Callable[[TrainingState, RunConfig, World, StopRequest], Pace] = in_lockstep

    def wrap(self, module: nn.Module, config: RunConfig, world: World, task: Task) -> Wrapper:
        """The wrapper around `module`; rank 0 warns of options that are set and have no effect."""
        if (idle := self.idle(config)) and world.rank == 0:
            warnings.warn(f"{', '.join(idle)}: without effect with --recipe {config.recipe}", stacklevel=2)
        config = self.without_idle(config)
        return self.make(module, replace(config, overlap=True) if self.always_overlaps else config, world, task)

    def idle(self, config: RunConfig) -> list[str]:
        """The METHOD_OPTIONS that are set and have no effect."""
        heeded, defaults = self.heeded(config), _defaults(config)
        return [name for name in METHOD_OPTIONS if name not in heeded and getattr(config, name) != defaults[name]]

    def without_idle(self, config: RunConfig) -> RunConfig:
        """`config` with the defaults of what has no effect: equal for runs that are equal."""
        defaults = _defaults(config)
        return replace(config, **{name: defaults[name] for name in self.idle(config)})

    def heeded(self, config: RunConfig) -> frozenset[str]:
        """The METHOD_OPTIONS that shape a run of `config`."""
        options = self.options
        if "plan" in options and config.plan:  # it says who talks to whom, and how often
            options -= {"graph", "budget"}
        if "compressor" in options:
            options |= COMPRESSORS[config.compressor].options
        if "interpolation" in options and config.interpolation == "constant":
            options |= {"interpolation_value"}
        if self.always_overlaps or ({"overlap", "gossip_every"} <= options and config.overlap):
            options |= {"max_staleness"}
        return options


def _defaults(config: RunConfig) -> dict[str, Any]:
    return {field.name: field.default for field in fields(config)}


def wrap_all_reduce(module: nn.Module, config: RunConfig, world: World, task: Task) -> Wrapper:
    """AllReduce SGD: gradients averaged over all ranks at every step."""
    wrapper = gm.AllReduceDataParallel(module)
    settle_buckets(wrapper, task.example_inputs())
    return wrapper


def settle_buckets(wrapper: gm.AllReduceDataParallel, inputs: tuple[Tensor, ...]) -> None:
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


def wrap_gossip(
    module: nn.Module,
    config: RunConfig,
    world: World,
    task: Task,
    *,
    whom: Callable[[RunConfig, int, Task], dict[str, Any]],
    what: Callable[[RunConfig], dict[str, Any]],
    push_sum: bool = False,
) -> Wrapper:
    """Gossip: parameters mixed with those of a few peers before every forward.

    Args:
        module, config, world, task: of the run.
        whom: arguments of the wrapper that say who talks to whom, of (config, number of nodes, task).
        what: arguments of the wrapper that say what is said.
        push_sum: whether the graph may be directed.
    """
    if world.size % config.nprocs_per_node:
        raise ValueError(
            f"got nprocs_per_node={config.nprocs_per_node} for {world.size} processes, expected a divisor; change one"
        )
    return gm.GossipDataParallel(
        module,
        **whom(config, world.size // config.nprocs_per_node, task),
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


def peers_of_a_graph(config: RunConfig, num_nodes: int, task: Task, *, push_sum: bool) -> dict[str, Any]:
    """Some peers of any graph in each round."""
    peers = peers_by_round(
        config.peers_per_itr,
        steps_per_epoch=task.steps_per_epoch,
        steps_per_round=max(config.gossip_every, config.max_staleness + 1),
    )
    return {"graph": make_graph(config.graph, num_nodes=num_nodes, peers_per_itr=peers, push_sum=push_sum)}


def all_neighbours(config: RunConfig, num_nodes: int, task: Task) -> dict[str, Any]:
    """All neighbours on an undirected graph that never changes."""
    return {"graph": make_static_graph(config.graph, num_nodes=num_nodes)}


def random_matchings(config: RunConfig, num_nodes: int, task: Task) -> dict[str, Any]:
    """Matchings of a base graph, each by its own coin: those of a plan, or planned here."""
    if config.plan:
        graph = gm.MatchaGraph.from_plan(config.plan, seed=config.seed, world_size=num_nodes)
    else:
        graph = gm.MatchaGraph(base_graph(config.graph, num_nodes=num_nodes), budget=config.budget, seed=config.seed)
    return {"mixing": gm.LaplacianMixing(graph)}


def parameters(config: RunConfig) -> dict[str, Any]:
    """The parameters themselves, maybe in fewer bits."""
    return {"wire_dtype": WIRE_DTYPES[config.wire_dtype]}


def code(config: RunConfig, *, gossiper: Callable[[RunConfig], gm.Gossiper]) -> dict[str, Any]:
    """A lossy code of the parameters."""
    return {"gossiper": gossiper(config)}


def wrap_bilateral(module: nn.Module, config: RunConfig, world: World, task: Task) -> Wrapper:
    """AD-PSGD: pairs average while both go on training."""
    return gm.BilatGossipDataParallel(
        module,
        graph=make_graph(config.graph, num_nodes=world.size, peers_per_itr=1, push_sum=False),
        timeout=timedelta(seconds=config.timeout_seconds),
    )


def wrap_group_average(module: nn.Module, config: RunConfig, world: World, task: Task) -> Wrapper:
    """WAGMA-SGD: groups that change average without waiting for late members."""
    return gm.GroupAverageDataParallel(
        module,
        group_size=config.group_size or None,
        sync_period=config.sync_period,
        wait_avoiding=config.wait_avoiding,
        overlap=config.overlap,
        timeout=timedelta(seconds=config.timeout_seconds),
    )


def wrap_pairwise(module: nn.Module, config: RunConfig, world: World, task: Task) -> Wrapper:
    """dpwa: each rank pulls the model of another; they tell each other here under which address they serve theirs."""
    own, host = _worker(world.rank), own_host(world)
    wrappers: list[gm.PairwiseDataParallel] = []

    def serve() -> str:
        wrapper = gm.PairwiseDataParallel(
            module,
            name=own,
            peers={own: f"tcp://{host}:*"},
            interpolation=INTERPOLATIONS[config.interpolation](config),
            divergence_threshold=config.divergence_threshold,
            fetch_probability=config.fetch_probability,
            seed=config.seed,
            average_timeout=timedelta(seconds=config.timeout_seconds),
            init_from_peers=False,  # all have made the same model
        )
        wrappers.append(wrapper)
        return wrapper.address

    for rank, address in enumerate(world.on_every_rank(serve)):
        if rank != world.rank:
            wrappers[0].add_peer(_worker(rank), address)
    return wrappers[0]


def _worker(rank: int) -> str:
    return f"rank_{rank:04d}"


_GOSSIP = frozenset({"graph", "gossip_every", "average_every", "nprocs_per_node"})


def _exact(title: str, *options: str, push_sum: bool, always_overlaps: bool = False) -> Recipe:
    whom = partial(peers_of_a_graph, push_sum=push_sum)
    make = partial(wrap_gossip, whom=whom, what=parameters, push_sum=push_sum)
    return Recipe(title, make, _GOSSIP | {"peers_per_itr", "wire_dtype", *options}, always_overlaps)


def _compressed(title: str, gossiper: Callable[[RunConfig], gm.Gossiper], *options: str) -> Recipe:
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
        _GOSSIP | {"budget", "plan", "overlap", "wire_dtype"},
    ),
    "choco": _compressed("CHOCO-SGD", choco, "compressor"),
    "deepsqueeze": _compressed("DeepSqueeze", deep_squeeze, "compressor"),
    "moniqua": _compressed("Moniqua", moniqua, "theta", "compression_bits"),
    "powergossip": _compressed(
        "PowerGossip", power_gossip, "power_rank", "power_iterations", "warm_start", "compress_vectors"
    ),
    "adpsgd": Recipe("AD-PSGD", wrap_bilateral, frozenset({"graph"}), make_pace=sharing_steps),
    "wagma": Recipe(
        "WAGMA-SGD",
        wrap_group_average,
        frozenset({"group_size", "sync_period", "wait_avoiding", "overlap"}),
        make_pace=sharing_rounds,
    ),
    "dpwa": Recipe(
        "dpwa",
        wrap_pairwise,
        frozenset({"interpolation", "divergence_threshold", "fetch_probability"}),
        make_pace=sharing_steps,
    ),
}
