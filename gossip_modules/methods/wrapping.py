"""Functions of (module, chosen, options, context) that wrap a model by a method, for the registry."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..extras import load, place_of
from ..graph_manager.base import GraphManager
from ..graph_manager.named_graphs import named_graph
from ..registry import METHODS, Method, enter
from ..rounds.algorithm import Algorithm
from ..schedule import Schedule
from ..wrappers.all_reduce import AllReduceDataParallel
from ..wrappers.base import GossipWrapper
from ..wrappers.gossip import GossipDataParallel
from .chosen import Chosen, read_algorithm, read_graph, read_schedule
from .graphs import base_graph, make_graph, pairs, peers_by_round, static
from .options import WRAPPER_OPTIONS, Context, WrapperOptions, unused_options, without_unused

Wrapper: TypeAlias = GossipWrapper | AllReduceDataParallel
"""A wrapper of a model in a run."""

WIRE_DTYPES: Mapping[str, torch.dtype | None] = {
    "none": None,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int8": torch.int8,
}
"""The values of the option wire_dtype."""


ROUNDS = frozenset(WRAPPER_OPTIONS) - {"peers_per_itr"}
"""The options of a method that runs in rounds by an algorithm."""


def entry(algorithm: type[Any], *, text: str = "", example: str = "", **others: Any) -> Method:
    """Return the entry of an algorithm in the table of methods, made of the facts declared by its class.

    Args:
        algorithm: a class with the facts of `Algorithm`: `short_name`, `title`, `summary`, `paper`. Without them the
            name of the class and the first line of its docstring serve.
        text: the text of Python behind `--recipe`; "": the class without arguments.
        example: the same for the documentation; "": `text`.
        others: more fields of `Method`.
    """
    facts, name = vars(algorithm), algorithm.__name__  # without the facts of its base
    text, graph = text or f"{name}()", static if algorithm.needs_static_graph else pairs
    made: dict[str, Any] = {
        "name": facts.get("short_name") or name.lower(),
        "title": facts.get("title") or name,
        "summary": facts.get("summary") or (algorithm.__doc__ or "").strip().partition("\n")[0],
        "paper": facts.get("paper"),
        "wrap": wrap_gossip,
        "example": f"GossipDataParallel(model, algorithm={example or text})",
        "options": ROUNDS,
        "simulated_graph": graph if algorithm.mixes and not algorithm.averages_exactly else None,
    }
    return Method(algorithm=algorithm, make=algorithm, text=text, **{**made, **others})


def chosen_of(made: Any) -> Chosen:
    """Return the method and settings of an object: an algorithm, or the settings of another method.

    Raises:
        ValueError: the object is neither.
    """
    outermost = made.parts[0] if isinstance(made, Algorithm) else made
    method = next((method for method in METHODS.values() if method.make is type(outermost)), None)
    if method is None and not isinstance(outermost, Algorithm):
        raise ValueError(f"got {made!r}, expected an algorithm, such as DiLoCo(), or settings, such as SGP()")
    return Chosen(method or entry(type(outermost)), made)


def register(method: Method | type[Any], **fields: Any) -> Method:
    """Enter a method in METHODS, and return it. The method is then a recipe and a row of the Lab.

    Args:
        method: the class of your `Algorithm`, or an entry.
        fields: the arguments of `entry`, for a class.

    Raises:
        ValueError: the name of the method is taken, or is not a word in lower case.
    """
    return enter(method if isinstance(method, Method) else entry(method, **fields))


def wrap(text: str, module: nn.Module, options: WrapperOptions, context: Context) -> Wrapper:
    """Wrap a model by a method, and return the wrapper. Rank 0 warns of set options without effect.

    Args:
        text: the algorithm, or the short name of a method; see `read_algorithm`.
        module: the model.
        options: arguments of the wrapper.
        context: the run.

    Raises:
        ValueError: the text names no method; the method does not support an option or the membership.
    """
    chosen = read_algorithm(text, seed=context.seed)
    method = chosen.method
    if context.membership is not None and (why := method.needs_fixed_ranks):
        raise ValueError(f"got a membership for {method.title}, expected None: {why}")
    if (unused := unused_options(method, options)) and context.rank == 0:
        warnings.warn(f"got {', '.join(unused)}, without effect with {method.title}; leave it out", stacklevel=2)
    wrapper: Wrapper = method.wrap(module, chosen, without_unused(method, options), context)
    return wrapper


def wrap_all_reduce(module: nn.Module, chosen: Chosen, options: WrapperOptions, context: Context) -> Wrapper:
    """AllReduce SGD: gradients averaged over all ranks at every step."""
    wrapper = AllReduceDataParallel(module, membership=context.membership, **chosen.arguments)
    if context.example_inputs is not None and context.membership is None:
        settle_buckets(wrapper, context.example_inputs())
    return wrapper


def settle_buckets(wrapper: AllReduceDataParallel, inputs: tuple[torch.Tensor, ...]) -> None:
    """Run the one backward before DistributedDataParallel reorders its buckets, and leave no other trace.

    The order in which Gloo adds up the ranks depends on the place in a bucket. Without this, the first step of every
    process would round differently from all others, and a resumed run from an uninterrupted run.

    Args:
        wrapper: new, in train mode.
        inputs: inputs of the model, on the device.
    """
    before = {name: tensor.clone() for name, tensor in wrapper.module.state_dict().items()}
    device = inputs[0].device
    with torch.random.fork_rng(devices=[] if device.type == "cpu" else [device], device_type=device.type):
        # Past our wrapper's own forward, which would count the traffic of a step that is none.
        DistributedDataParallel.forward(wrapper, *inputs).sum().backward()
    wrapper.module.load_state_dict(before)
    wrapper.zero_grad(set_to_none=True)


def wrap_gossip(module: nn.Module, chosen: Chosen, options: WrapperOptions, context: Context) -> Wrapper:
    """Rounds: `GossipDataParallel` with the algorithm, on the graph of the options."""
    graph = _graph_of(chosen, options, context)
    arguments = chosen.arguments if graph is None else {"graph": graph, **chosen.arguments}
    return _gossip(module, arguments, options, context)


def _gossip(module: nn.Module, own: Mapping[str, Any], options: WrapperOptions, context: Context) -> Wrapper:
    """`GossipDataParallel` with these arguments, and the arguments of the options and of the run."""
    arguments: dict[str, Any] = {
        "overlap": options.overlap,
        "max_staleness": options.max_staleness,
        "schedule": schedule_of(options),
        "wire_dtype": "auto" if options.wire_dtype == "auto" else WIRE_DTYPES[options.wire_dtype],
        "nprocs_per_node": options.nprocs_per_node,
        "comm_device": context.comm_device,
        "timeout": context.timeout,
        "membership": context.membership,
    }
    return GossipDataParallel(module, **{**arguments, **own})


def schedule_of(options: WrapperOptions) -> Schedule:
    """The steps with a round and those with an average.

    Raises:
        ValueError: a schedule beside its own options.
    """
    own = Schedule(gossip_every=options.gossip_every, average_every=options.average_every)
    if not options.schedule:
        return own
    if own != Schedule():
        raise ValueError(
            f"got schedule={options.schedule!r} with gossip_every={options.gossip_every} and average_every="
            f"{options.average_every}, expected the schedule alone; give these to it"
        )
    return read_schedule(options.schedule)


def wrap_matcha(module: nn.Module, chosen: Chosen, options: WrapperOptions, context: Context) -> Wrapper:
    """MATCHA: matchings of a base graph, each by its own coin; by a plan, or planned here."""
    settings, kind = chosen.made, load(place_of("MatchaGraph"))

    def graph(world_size: int) -> GraphManager:
        made: GraphManager
        if settings.plan:
            made = kind.from_plan(settings.plan, seed=context.seed, world_size=world_size)
        else:
            base = base_graph(options.graph, num_nodes=world_size)
            made = kind(base, budget=settings.budget, seed=context.seed)
        return made

    return _gossip(module, {"graph": graph, "push_sum": False}, options, context)


def wrap_bilateral(module: nn.Module, chosen: Chosen, options: WrapperOptions, context: Context) -> Wrapper:
    """AD-PSGD: pairs average while both go on training."""
    graph = _graph_of(chosen, options, context)
    run: dict[str, Any] = {"timeout": context.timeout, "membership": context.membership}
    if "gossip_every" in chosen.method.options:
        run["schedule"] = options.gossip_every
    wrapper: Wrapper = load(place_of("BilatGossipDataParallel"))(module, graph=graph, **run, **chosen.arguments)
    return wrapper


def wrap_group_average(module: nn.Module, chosen: Chosen, options: WrapperOptions, context: Context) -> Wrapper:
    """WAGMA-SGD: changing groups average without waiting for late members."""
    run: dict[str, Any] = {"overlap": options.overlap, "timeout": context.timeout, "membership": context.membership}
    wrapper: Wrapper = load(place_of("GroupAverageDataParallel"))(module, **chosen.arguments, **run)
    return wrapper


def wrap_pairwise(module: nn.Module, chosen: Chosen, options: WrapperOptions, context: Context) -> Wrapper:
    """dpwa: each rank pulls the model of another; they tell each other here under which address they serve theirs."""
    own, host = _worker(context.rank), context.own_host()
    wrappers: list[Any] = []

    def serve() -> str:
        wrapper = load(place_of("PairwiseDataParallel"))(
            module,
            name=own,
            peers={own: f"tcp://{host}:*"},
            **{name: value for name, value in chosen.arguments.items() if value is not None},
            seed=context.seed,
            average_timeout=context.timeout,
            init_from_peers=False,  # all have made the same model
        )
        wrappers.append(wrapper)
        return str(wrapper.address)

    for rank, address in enumerate(context.on_every_rank(serve)):
        if rank != context.rank:
            wrappers[0].add_peer(_worker(rank), address)
    wrapped: Wrapper = wrappers[0]
    return wrapped


def _worker(rank: int) -> str:
    return f"rank_{rank:04d}"


def _graph_of(chosen: Chosen, options: WrapperOptions, context: Context) -> GraphManager | Callable[[int], Any] | None:
    """The argument `graph` of a wrapper, a function of the number of nodes; None: the wrapper's own choice."""
    if "(" in options.graph:
        return read_graph(options.graph, seed=context.seed)
    if "peers_per_itr" not in chosen.method.options and chosen.method.pace == "lockstep":
        return None if options.graph == "auto" else lambda num_nodes: named_graph(options.graph, num_nodes)
    peers = peers_by_round(
        options.peers_per_itr,
        steps_per_epoch=context.steps_per_epoch,
        steps_per_round=max(options.gossip_every, options.max_staleness + 1),
    )
    if options.graph == "auto" and peers == 1:
        return None
    push_sum = bool(chosen.arguments.get("push_sum"))
    return lambda num_nodes: make_graph(options.graph, num_nodes=num_nodes, peers_per_itr=peers, push_sum=push_sum)
