"""The arguments of the wrappers as a user gives them, turned into what the library works with.

Each function takes an argument whose meaning is certain, and raises a ValueError with got, expected and remedy for any
other one.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from numbers import Integral
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import torch.distributed as dist

from ..graph_manager import NetworkXGraph
from ..graph_manager.base import GraphManager
from ..graph_manager.named_graphs import NAMES, named_graph
from ..mixing_manager.base import MixingManager
from ..schedule import Schedule
from ..transport.connect import connect, group_or_world
from ..transport.deadline import Deadline
from ..transport.deadline import as_timeout as as_timeout
from ..transport.process_group import DEFAULT_TIMEOUT, ProcessGroupTransport

if TYPE_CHECKING:
    import networkx as nx


GraphLike: TypeAlias = "GraphManager | str | Callable[[int], GraphManager | nx.Graph] | nx.Graph"
MixingLike: TypeAlias = MixingManager | Callable[[GraphManager], MixingManager]


def as_graph(graph: GraphLike, world_size: int) -> GraphManager:
    """The graph of `world_size` ranks that is meant.

    Args:
        graph: a graph manager; a class or function of the number of ranks, like `RingGraph`; a name of
            `named_graphs.NAMES`, like "ring"; or a networkx graph.
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


def as_schedule(schedule: Schedule | int) -> Schedule:
    """The schedule itself, or a schedule with a round at every `schedule`-th step."""
    if isinstance(schedule, Schedule):
        return schedule
    if isinstance(schedule, bool) or not isinstance(schedule, int) or schedule < 1:
        raise ValueError(
            f"got schedule={schedule!r}, expected a Schedule, or the number of steps from one round to the next, at "
            "least 1; schedule=1, the default, gossips at every step"
        )
    return Schedule(gossip_every=schedule)


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


def group_of(process_group: dist.ProcessGroup | None, device_mesh: dist.DeviceMesh | None) -> dist.ProcessGroup | None:
    """The group over which ranks gossip: `process_group`, or the group of a mesh of one dimension.

    Raises:
        ValueError: both are given, or the mesh has several dimensions.
    """
    if device_mesh is None:
        return process_group
    if process_group is not None:
        raise ValueError("got process_group and device_mesh, expected one of them; leave process_group out")
    if getattr(device_mesh, "ndim", None) != 1:
        raise ValueError(
            f"got device_mesh={device_mesh!r}, expected a DeviceMesh of one dimension, over which replicas gossip; "
            "pass one dimension of yours, like mesh['replicate']"
        )
    return device_mesh.get_group()


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


def check_overlap(overlap: bool | str, max_staleness: int) -> None:
    """Raise ValueError where rounds are to be late that do not overlap with training."""
    if isinstance(overlap, str) and overlap != "auto":
        raise ValueError(f"got overlap={overlap!r}, expected True or False, or 'auto'")
    check_flags(overlap=bool(overlap) if isinstance(overlap, str) else overlap)
    as_whole(max_staleness, name="max_staleness")
    if max_staleness < 0 or (max_staleness > 0 and not overlap):
        raise ValueError(
            f"got max_staleness={max_staleness} with overlap={overlap}, expected max_staleness >= 0, and 0 without "
            "overlap; pass overlap=True to let rounds be late"
        )


def _named_graph(name: str, world_size: int) -> GraphManager:
    if name not in NAMES:
        near = difflib.get_close_matches(name.lower().replace("_", "-").removesuffix("graph"), NAMES, n=1)
        guess = f"did you mean {near[0]!r}?" if near else "choose one of them"
        raise ValueError(f"got graph={name!r}, expected one of {', '.join(NAMES)}; {guess}")
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
    # A script that made such a graph has imported it. Another thread may import it now: then the class is not there.
    kind = getattr(sys.modules.get("networkx"), "Graph", None)
    return kind is not None and isinstance(graph, kind)


@dataclass(frozen=True)
class Links:
    """How the ranks of a wrapper reach each other, as its arguments say.

    Args:
        process_group: the group that carries the messages; None = a new group over `ranks`.
        comm_device: the device of the messages, see `connect`.
        backend: the backend that the group must have; None = any.
        timeout: the limit of every wait.

    Raises:
        ValueError: an argument of another kind.
    """

    process_group: dist.ProcessGroup | None = None
    comm_device: torch.device | str | None = None
    backend: str | None = None
    timeout: timedelta = DEFAULT_TIMEOUT

    def __post_init__(self) -> None:
        check_process_group(self.process_group)

    @property
    def place(self) -> tuple[int, int]:
        """This rank, and the number of ranks.

        Raises:
            RuntimeError: torch.distributed is not initialised.
        """
        group = group_or_world(self.process_group)
        return group.rank(), group.size()

    def connect(
        self, module_device: torch.device, *, ranks: Sequence[int] | None = None, deadline: Deadline | None = None
    ) -> ProcessGroupTransport:
        """A transport over the group that the arguments ask for; it raises as `connect` does."""
        return connect(
            self.process_group,
            ranks=ranks,
            module_device=module_device,
            comm_device=self.comm_device,
            backend=self.backend,
            deadline=deadline,
            timeout=self.timeout,
        )
