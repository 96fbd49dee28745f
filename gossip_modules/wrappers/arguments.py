"""The arguments of the wrappers as a user gives them, turned into what the library works with.

Each function takes an argument whose meaning is certain, and raises a ValueError with got, expected and remedy for any
other one.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Callable, Mapping
from numbers import Integral
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import torch.distributed as dist

from ..compression.compressor import Compressor
from ..consensus_control import ConsensusControl
from ..graph_manager.base import GraphManager
from ..graph_manager.named_graphs import GRAPHS, PREDEFINED_GRAPHS, named_graph
from ..graph_manager.static_graphs import NetworkXGraph
from ..mixing_manager.base import MixingManager
from ..rounds.algorithm import Algorithm, Over
from ..rounds.periodic import Periodic
from ..rounds.push_pull import PushPull
from ..schedule import Schedule
from ..transport.waits import as_timeout as as_timeout  # which `Membership` takes from below

if TYPE_CHECKING:
    import networkx as nx

GraphLike: TypeAlias = "GraphManager | str | Callable[[int], GraphManager | nx.Graph] | nx.Graph"
MixingLike: TypeAlias = MixingManager | Callable[[GraphManager], MixingManager]
GossiperLike: TypeAlias = PushPull | Callable[[], PushPull]


def as_graph(graph: GraphLike, world_size: int) -> GraphManager:
    """The graph of `world_size` ranks that is meant.

    Args:
        graph: a graph manager; a class or function of the number of ranks, like `RingGraph`; a name of `GRAPHS`, like
            "ring"; or a networkx graph.
        world_size: the number of ranks; of nodes, if several processes form one.
    """
    expected = 'a GraphManager, its class (RingGraph), a function n -> graph, a name ("ring") or a networkx graph'
    made: Any = graph
    if isinstance(graph, str):
        made = _named_graph(graph, world_size)
    elif callable(graph) and not isinstance(graph, GraphManager):
        made = _call(graph, world_size, argument="graph", expected=expected)
    if _is_networkx(made):
        made = NetworkXGraph(made)
    if isinstance(made, MixingManager):
        raise ValueError(f"got the mixing {made} as graph, expected {expected}; pass mixing=... instead")
    if not isinstance(made, GraphManager):
        raise ValueError(f"got graph={graph!r}, which makes no graph, expected {expected}")
    check_size(made, world_size)
    return made


def check_size(graph: GraphManager, world_size: int) -> None:
    """Raise ValueError when the graph has another number of ranks."""
    if graph.world_size != world_size:
        raise ValueError(
            f"got a graph of {graph.world_size} ranks, expected {world_size}, the size of the process group (with "
            "nprocs_per_node the number of nodes); build the graph of that size, or pass a class or function of the "
            "number of ranks, like graph=RingGraph"
        )


def as_mixing(mixing: MixingLike, graph: GraphManager) -> MixingManager:
    """The mixing manager that is meant: itself, or what a class or function makes of the graph."""
    expected = "a MixingManager, its class (UniformMixing) or a function graph -> mixing"
    made = mixing
    if callable(mixing) and not isinstance(mixing, MixingManager):
        made = _call(mixing, graph, argument="mixing", expected=expected)
    if not isinstance(made, MixingManager):
        raise ValueError(f"got mixing={mixing!r}, expected {expected}; or leave it out for the weights of the graph")
    return made


def as_gossiper(gossiper: GossiperLike) -> PushPull:
    """The gossiper that is meant: itself, or what its class makes without arguments."""
    expected = "plain gossip, PushPull() or PushSum(), or an algorithm, such as PowerGossip()"
    if isinstance(gossiper, Compressor) or (isinstance(gossiper, type) and issubclass(gossiper, Compressor)):
        raise ValueError(
            f"got the compressor {gossiper!r} as gossiper, expected {expected}; pass the compressor to a gossiper, as "
            "in Choco(TopK(0.01), step_size=0.04)"
        )
    made = _call(gossiper, argument="gossiper", expected=expected) if isinstance(gossiper, type) else gossiper
    if not isinstance(made, PushPull):
        raise ValueError(f"got gossiper={gossiper!r}, expected {expected}, or None for push-sum or push-pull")
    return made


def as_schedule(schedule: Schedule | ConsensusControl | int) -> Schedule | ConsensusControl:
    """The schedule itself, or a schedule with a round at every `schedule`-th step."""
    if isinstance(schedule, Schedule | ConsensusControl):
        return schedule
    if isinstance(schedule, bool) or not isinstance(schedule, int) or schedule < 1:
        raise ValueError(
            f"got schedule={schedule!r}, expected a Schedule, a ConsensusControl, or the number of steps from one "
            "round to the next, at least 1; schedule=1, the default, gossips at every step"
        )
    return Schedule(gossip_every=schedule)


def check_gossips(schedule: Schedule | ConsensusControl, gossip: Mapping[str, object]) -> None:
    """Raise ValueError where arguments say what ranks send, but each of their rounds is an exact average.

    Args:
        schedule: when ranks communicate.
        gossip: the arguments, by name; None where they were left out. A graph is one of those of every wrapper, and
            does no harm.
    """
    given = [name for name, value in gossip.items() if value is not None and name not in ("graph", "mixing")]
    if given and isinstance(schedule, Schedule) and schedule.average_every == 1:
        raise ValueError(
            f"got {', '.join(given)} with {schedule}, expected none: each round of this schedule is an exact average, "
            "so that ranks never gossip; leave them out"
        )


def check_periodic(
    algorithm: Algorithm, schedule: object, *, overlap: bool, init_sync: bool, gossip: Mapping[str, object]
) -> None:
    """Raise ValueError where an algorithm stands beside arguments that do not fit to it.

    Args:
        algorithm: what a round does.
        schedule, overlap, init_sync: other arguments of the wrapper.
        gossip: those that say how ranks gossip, by name; None where they were left out.
    """
    if overlap and isinstance(algorithm, Periodic) and algorithm.delay:
        raise ValueError(
            f"got overlap=True beside {algorithm}, expected one of them: its delay says for how many steps a round "
            "travels under training; leave overlap out"
        )
    if algorithm.has_equal_memory and not init_sync:
        raise ValueError(
            f"got init_sync=False beside {algorithm}, expected True: all ranks move one anchor, so they must start "
            "from one model"
        )
    given = [name for name, value in gossip.items() if value is not None]
    if given and not algorithm.mixes:
        raise ValueError(
            f"got {', '.join(given)} beside {algorithm}, expected none: it averages over all ranks and never gossips; "
            "leave them out, or take an algorithm that gossips: GASLoC, NoLoCo or SlowMo(gossip_every=1); narrow "
            "drifts are sent by DiLoCo(compressor=Cast(torch.bfloat16))"
        )


def check_algorithm(
    algorithm: Algorithm | Over, schedule: Schedule | ConsensusControl, *, overlap: bool, nprocs_per_node: int
) -> None:
    """Raise ValueError where an algorithm stands beside arguments with which its mathematics does not hold.

    Args:
        algorithm: what the user gave.
        schedule: when ranks communicate.
        overlap, nprocs_per_node: other arguments of the wrapper.
    """
    if overlap and any(part.needs_current for part in algorithm.parts):
        raise ValueError(
            f"got overlap=True with {algorithm}, expected overlap=False: it needs the result of a round before the "
            "next step; leave overlap out"
        )
    if not algorithm.parts[0].needs_sgd:
        return
    if isinstance(schedule, ConsensusControl) or schedule.gossip_every != 1:
        raise ValueError(
            f"got schedule={schedule} with {algorithm}, expected a round after every step: it makes the momentum of "
            "the next step of how far one step has moved the model; leave schedule out, or take D2, ExactDiffusion or "
            "GradientTracking"
        )
    if nprocs_per_node != 1:
        raise ValueError(
            f"got nprocs_per_node={nprocs_per_node} with {algorithm}, expected 1: it writes the momentum of the whole "
            "model, of which each process of a node mixes a shard; take D2, ExactDiffusion or GradientTracking"
        )


def check_wire_dtype(wire_dtype: object) -> None:
    """Raise ValueError where it is no dtype, such as its name."""
    if wire_dtype is not None and not isinstance(wire_dtype, torch.dtype):
        raise ValueError(
            f"got wire_dtype={wire_dtype!r}, expected a torch.dtype; pass torch.bfloat16, torch.float16 or None"
        )


def check_process_group(process_group: object) -> None:
    """Raise ValueError where it is no process group that this rank is in."""
    if process_group is None or isinstance(process_group, dist.ProcessGroup):
        return
    if process_group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(
            "got a process group that this rank is no member of, expected one with it; wrap on the group's ranks only"
        )
    raise ValueError(
        f"got process_group={process_group!r}, expected a ProcessGroup; make one with "
        "torch.distributed.new_group(ranks), take mesh.get_group() of a device mesh, or pass None for all ranks"
    )


def as_whole(number: int, *, name: str) -> int:
    """The number; raises ValueError where it is no whole one."""
    if isinstance(number, bool) or not isinstance(number, Integral):
        raise ValueError(f"got {name}={number!r}, expected a whole number; pass an int, like {name}=2")
    return int(number)


def check_flags(**flags: object) -> None:
    """Raise ValueError where one is neither True nor False, such as the string "no", which counts as true."""
    for name, value in flags.items():
        if isinstance(value, str) or value not in (True, False):
            raise ValueError(f"got {name}={value!r}, expected True or False; leave it out for the default")


def check_overlap(overlap: bool, max_staleness: int) -> None:
    """Raise ValueError where rounds are to be late that do not overlap with training."""
    check_flags(overlap=overlap)
    as_whole(max_staleness, name="max_staleness")
    if max_staleness < 0 or (max_staleness > 0 and not overlap):
        raise ValueError(
            f"got max_staleness={max_staleness} with overlap={overlap}, expected max_staleness >= 0, and 0 without "
            "overlap; pass overlap=True to let rounds be late"
        )


def _named_graph(name: str, world_size: int) -> GraphManager:
    names = [*GRAPHS, *PREDEFINED_GRAPHS]
    if name not in names:
        near = difflib.get_close_matches(name.lower().replace("_", "-").removesuffix("graph"), names, n=1)
        guess = f"did you mean {near[0]!r}?" if near else "choose one of them"
        raise ValueError(f"got graph={name!r}, expected one of {', '.join(names)}; {guess}")
    return named_graph(name, world_size)


def _call(make: Callable[..., Any], *args: Any, argument: str, expected: str) -> Any:
    """The object that the class or function makes."""
    try:
        return make(*args)
    except (TypeError, AttributeError) as error:
        name = getattr(make, "__name__", repr(make))
        given = ", ".join(map(repr, args))
        raise ValueError(
            f"got {argument}={name}, and {name}({given}) fails with {error!r}; expected {expected}; call it yourself "
            "with what it needs and pass the result"
        ) from error


def _is_networkx(graph: object) -> bool:
    networkx = sys.modules.get("networkx")  # whoever made such a graph has imported it
    return networkx is not None and isinstance(graph, networkx.Graph)
