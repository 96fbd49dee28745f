"""The choices of the user: graph, weights and algorithm of a wrapper, with defaults where arguments were left out."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch

from ..algorithms.sgp import PushSum
from ..compression.compressor import Compressor
from ..graph_manager import DynamicBipartiteCompleteGraph, DynamicBipartiteExponentialGraph
from ..graph_manager.base import GraphManager
from ..graph_manager.named_graphs import default_graph, undirected_ring
from ..mixing_manager.base import MixingManager
from ..mixing_manager.graph_weights import default_mixing
from ..registry import METHODS, named
from ..rounds.algorithm import Algorithm, Over
from ..rounds.mixer import Mixer
from ..rounds.periodic import Periodic
from ..rounds.push_pull import PushPull
from ..rounds.rounds import mixer_of
from ..schedule import Schedule
from .arguments import GraphLike, MixingLike, as_graph, as_mixing, check_flags, check_size

Chosen: TypeAlias = Algorithm | Mixer | None
AlgorithmLike: TypeAlias = Chosen | type[Algorithm | Mixer] | str


def as_algorithm(algorithm: AlgorithmLike) -> Chosen:
    """The algorithm that is meant: the object itself, or one of the class, or of the class with that name.

    Args:
        algorithm: an `Algorithm`, one over another, a class of it, a name such as "diloco", or None for plain gossip.

    Raises:
        ValueError: the argument is something else, or a class that needs arguments; says which.
    """
    made: Any = algorithm
    if isinstance(algorithm, str):
        method = named(algorithm)
        made = method.make
        if not method.is_algorithm:
            raise ValueError(
                f"got algorithm={algorithm!r}, which is a wrapper with arguments, expected an algorithm that runs in "
                f"rounds; write {method.example}"
            )
    if isinstance(made, type) and issubclass(made, Algorithm | Mixer):
        made = _with_defaults(made, algorithm)
    if made is None or isinstance(made, Algorithm | Mixer):
        return made
    if isinstance(made, Compressor) or (isinstance(made, type) and issubclass(made, Compressor)):
        raise ValueError(
            f"got the compressor {algorithm!r} as algorithm, expected an algorithm that sends compressed messages; "
            "pass the compressor to one, as in Choco(TopK(0.01), step_size=0.04)"
        )
    raise ValueError(
        f"got algorithm={algorithm!r}, expected an Algorithm such as DiLoCo() or Choco(TopK(0.01), step_size=0.04), "
        f"its class or its name, such as 'diloco'; the names are "
        + ", ".join(name for name, method in METHODS.items() if method.is_complete)
    )


def wire_limit(wire_dtype: Any, overlap: bool | str) -> tuple[torch.dtype | None, Any]:
    """Return the dtype of the wire that ranks may choose, and the given one; at least one of them is None.

    Args:
        wire_dtype, overlap: see `GossipDataParallel`.
    """
    if wire_dtype != "auto":
        return None, wire_dtype
    if overlap != "auto":
        raise ValueError(
            f"got wire_dtype='auto' with overlap={overlap}, expected overlap='auto', which measures; or pass "
            "wire_dtype=torch.bfloat16"
        )
    return torch.bfloat16, None


def written(algorithm: Any) -> str:
    """A dataclass as in a line of Python, without the settings that are the defaults; "..." stands for a function."""
    if isinstance(algorithm, Over):
        return f"{written(algorithm.outer)}.over({written(algorithm.inner)})"
    if not dataclasses.is_dataclass(algorithm):
        return repr(algorithm)
    settings = [
        f"{field.name}={'...' if inspect.isroutine(value) else repr(value)}"
        for field in dataclasses.fields(algorithm)
        if field.init and (value := getattr(algorithm, field.name)) != field.default
    ]
    return f"{type(algorithm).__name__}({', '.join(settings)})"


def _with_defaults(kind: type[Any], given: object) -> Any:
    """An object of the class, whose arguments all have defaults."""
    parameters = inspect.signature(kind).parameters.values()
    if missing := [parameter.name for parameter in parameters if parameter.default is parameter.empty]:
        examples = [method.example for method in METHODS.values() if method.make is kind and method.example]
        examples.append(f"algorithm={kind.__name__}({', '.join(f'{x}=...' for x in missing)})")
        shown = repr(given) if isinstance(given, str) else kind.__name__
        raise ValueError(
            f"got algorithm={shown}, expected {kind.__name__} with its arguments, as {' and '.join(missing)} "
            f"{'has' if len(missing) == 1 else 'have'} no default; write {examples[0]}"
        )
    return kind()


def choose_mixing(
    graph: GraphLike | None,
    mixing: MixingLike | None,
    *,
    push_sum: bool,
    world_size: int,
    algorithm: Algorithm | None = None,
) -> MixingManager:
    """The mixing manager, with its graph.

    The default graph is the algorithm's own; else a ring with both neighbours, where it needs symmetric weights; else
    `default_graph`. The default weights belong to the graph: see `default_mixing`.

    Raises:
        ValueError: `mixing` is over another graph than `graph`, or over one of another size.
    """
    if isinstance(mixing, MixingManager):
        if graph is not None and not (isinstance(graph, GraphManager) and repr(graph) == repr(mixing.graph)):
            raise ValueError(
                f"got graph={graph} and a mixing over {mixing.graph}, expected one graph; pass mixing only"
            )
        check_size(mixing.graph, world_size)
        return mixing
    is_undirected = algorithm is not None and (algorithm.needs_symmetric_weights or algorithm.needs_static_graph)
    if graph is None and algorithm is not None:
        graph = algorithm.default_graph(world_size)
    if graph is None:
        graph = undirected_ring(world_size) if is_undirected else default_graph(world_size, push_sum=push_sum)
    graph = as_graph(graph, world_size)
    if mixing is not None:
        return as_mixing(mixing, graph)
    return default_mixing(graph, push_sum=push_sum and not is_undirected)


def choose_bipartite_mixing(graph: GraphLike | None, mixing: MixingLike | None, *, world_size: int) -> MixingManager:
    """The mixing manager of AD-PSGD, with its graph: active and passive ranks, one peer per round.

    Default: pairs at exponential distances where the world is even, else each active rank meets each passive one in
    turn; half and half.

    Raises:
        ValueError: `mixing` is over another graph, or the graph is not bipartite, or has several peers per round.
    """
    if graph is None and mixing is None:
        is_even = world_size % 2 == 0 or world_size == 1
        graph = (DynamicBipartiteExponentialGraph if is_even else DynamicBipartiteCompleteGraph)(world_size)
    chosen = choose_mixing(graph, mixing, push_sum=False, world_size=world_size)
    pairs = chosen.graph

    def has_pairs_only(t: int) -> bool:
        return all(pairs.out_degree(rank, t) <= 1 for rank in range(world_size))

    if world_size > 1 and not (pairs.is_bipartite and pairs.is_symmetric and pairs.in_every_round(has_pairs_only)):
        raise ValueError(
            f"got {pairs}, expected a bipartite graph with one peer per round: active ranks ask, passive ranks answer; "
            "use DynamicBipartiteExponentialGraph, DynamicBipartiteLinearGraph or DynamicBipartiteCompleteGraph"
        )
    return chosen


@dataclass(frozen=True)
class Choices:
    """The choices of the user of a lockstep wrapper: peers, weights, algorithm, and the steps with a round.

    Args:
        graph, mixing, push_sum, algorithm, wire_dtype, schedule, deltas, max_relative_distance: see
            `GossipDataParallel`.
    """

    graph: GraphLike | None = None
    mixing: MixingLike | None = None
    push_sum: bool = True
    algorithm: Chosen = None
    wire_dtype: torch.dtype | None = None
    schedule: Schedule = field(default_factory=Schedule)
    deltas: bool = False
    max_relative_distance: float | None = None

    def check_auto(self, wire_limit: torch.dtype | None, *, has_membership: bool) -> None:
        """Raise ValueError where ranks cannot choose overlap by themselves.

        Args:
            wire_limit: the dtype that ranks may choose for messages; None: they choose none.
            has_membership: whether workers may die and join.
        """
        if has_membership:
            raise ValueError(
                "got overlap='auto' with a membership, expected True or False: a worker that joins later has not "
                "measured, and would train by other settings; take the choice of a run without a membership"
            )
        if self._parts and isinstance(outer := self._parts[0], Periodic):
            delay = "delay='auto'" if outer.averages_exactly else "delay=1, for example,"
            remedy = "" if outer.delay else f" and pass {delay} to the algorithm"
            raise ValueError(
                f"got overlap='auto' with {self.algorithm}, expected False: its delay is the number of steps for which "
                f"rounds run under training; leave overlap out{remedy}"
            )
        if wire_limit is not None:
            replace(self, wire_dtype=wire_limit).mixer()  # raises where no wire rounds the messages

    def check(
        self,
        *,
        overlap: bool | str,
        init_sync: bool,
        nprocs_per_node: int,
        is_sharded: bool = False,
        has_membership: bool = False,
    ) -> None:
        """Raise ValueError where arguments of the wrapper do not fit each other."""
        check_flags(push_sum=self.push_sum, deltas=self.deltas)
        if self.wire_dtype is not None and not isinstance(self.wire_dtype, torch.dtype):
            raise ValueError(
                f"got wire_dtype={self.wire_dtype!r}, expected a torch.dtype; pass torch.bfloat16, torch.float16, "
                "torch.int8 or None"
            )
        given = [name for name in ("algorithm", "wire_dtype") if getattr(self, name) is not None]
        if given and self.schedule.average_every == 1:
            raise ValueError(
                f"got {', '.join(given)} with {self.schedule}, expected none: each round of this schedule is an exact "
                "average, so that ranks never gossip; leave them out"
            )
        for part in self._parts if nprocs_per_node != 1 or is_sharded else ():
            part.check_shards(nprocs_per_node)
        if self._parts and getattr(self._parts[0], "delay", 0) == "auto" and (nprocs_per_node != 1 or is_sharded):
            raise ValueError(
                f"got {self.algorithm} for a model that several processes hold together (nprocs_per_node, or shards), "
                "expected a number of steps as delay: the processes of one model must apply a round in one step, and "
                "each of them measures its own shard; pass delay=1, for example"
            )
        if isinstance(self.algorithm, Algorithm):
            self.algorithm.check_schedule(self.schedule)
            self.algorithm.check_overlap(overlap, self.schedule)
        if self._parts:
            self._check_algorithm(self._parts[0], init_sync=init_sync, nprocs_per_node=nprocs_per_node)
        place: dict[str, Any] = {"is_sharded": is_sharded, "has_membership": has_membership}
        self.mixer().check_options(self.schedule, overlap=overlap, nprocs_per_node=nprocs_per_node, **place)

    def _check_algorithm(self, outer: Algorithm, *, init_sync: bool, nprocs_per_node: int) -> None:
        """Raise ValueError where the algorithm, whose first part is `outer`, stands beside what does not fit to it."""
        if outer.has_equal_memory and not init_sync:
            raise ValueError(
                f"got init_sync=False beside {outer}, expected True: all ranks move one anchor, so they must start "
                "from one model"
            )
        gossip = [name for name in ("graph", "mixing", "wire_dtype") if getattr(self, name) is not None]
        if gossip and not outer.mixes:
            raise ValueError(
                f"got {', '.join(gossip)} beside {outer}, expected none: it averages over all ranks and never gossips; "
                "leave them out, or take an algorithm that gossips: GASLoC, NoLoCo or SlowMo(gossip_every=1); narrow "
                "drifts are sent by DiLoCo(compressor=Cast(torch.bfloat16))"
            )
        if outer.needs_sgd and self.schedule.gossip_every != 1:
            raise ValueError(
                f"got schedule={self.schedule} with {self.algorithm}, expected a round after every step: it makes the "
                "momentum of the next step of how far one step has moved the model; leave schedule out, or take D2, "
                "ExactDiffusion or GradientTracking"
            )
        if outer.needs_sgd and nprocs_per_node != 1:
            raise ValueError(
                f"got nprocs_per_node={nprocs_per_node} with {self.algorithm}, expected 1: it writes the momentum of "
                "the whole model, of which each process of a node mixes a shard; take D2, ExactDiffusion or "
                "GradientTracking"
            )

    def mixer(self) -> Mixer:
        """The mixer that runs the rounds; not bound yet.

        Raises:
            ValueError: a dtype of the wire beside an algorithm that has messages of its own; or deltas, or a bound on
                distances, beside another algorithm than plain gossip.
        """
        innermost = self._parts[-1] if self._parts else self.algorithm
        takes_wire_dtype = innermost is None or (isinstance(innermost, Algorithm) and innermost.takes_wire_dtype)
        if self.wire_dtype is not None and not takes_wire_dtype:
            raise ValueError(
                f"got wire_dtype={self.wire_dtype} with {innermost}, expected one of them: the algorithm makes its own "
                "messages, and no wire rounds these; leave wire_dtype out. PushPull has its own argument wire_dtype"
            )
        plain_only = {"deltas": self.deltas, "max_relative_distance": self.max_relative_distance}
        given = ", ".join(f"{name}={value}" for name, value in plain_only.items() if value not in (False, None))
        if given and isinstance(self.algorithm, PushPull):
            raise ValueError(
                f"got {given} beside {self.algorithm}, expected one of them; pass all arguments to "
                f"{type(self.algorithm).__name__}, which has them too"
            )
        if isinstance(self.algorithm, Mixer) and not given:
            return self.algorithm
        make = PushSum if self._sends_weights else PushPull
        plain = make(wire_dtype=self.wire_dtype, deltas=self.deltas, max_relative_distance=self.max_relative_distance)
        mixer = mixer_of(self.algorithm, plain) if isinstance(self.algorithm, Algorithm) else plain
        if given and (mixer is not plain or isinstance(self.algorithm, Mixer)):
            raise ValueError(
                f"got {given} with {self.algorithm}, expected plain gossip, which sends whole models: SGP, Overlap "
                "SGP, D-PSGD or MATCHA; leave it out, or take a compressor for outer methods, or ClippedGossip or "
                "TrimmedMean, which trust no neighbour"
            )
        return mixer

    def weights(self, world_size: int) -> MixingManager:
        """The weights for so many ranks; the algorithm says them where the user names neither graph nor weights."""
        mixing, algorithm = self.mixing, self.algorithm if isinstance(self.algorithm, Algorithm) else None
        if self.graph is None and mixing is None and algorithm is not None:
            mixing = algorithm.default_mixing(world_size)
        push_sum = self._sends_weights
        return choose_mixing(self.graph, mixing, push_sum=push_sum, world_size=world_size, algorithm=algorithm)

    def for_membership(self) -> Choices:
        """The same choices, with the algorithm that runs where peers fail, come and go."""
        algorithm = self.algorithm
        return replace(self, algorithm=algorithm.for_membership() if isinstance(algorithm, Algorithm) else algorithm)

    def for_any_size(self) -> Callable[[int], MixingManager]:
        """The weights as a function of the number of ranks, whatever the graph of one rank would be."""
        alone = replace(self, graph=None, mixing=None)
        return lambda world_size: (self if world_size > 1 else alone).weights(world_size)

    def was_on_a_ring(self, mixing: MixingManager) -> bool:
        """Whether rounds with these weights, which nobody named, were on a ring in older versions."""
        is_default = self.graph is None and self.mixing is None
        gossips = all(part.mixes for part in self._parts) and self.schedule.average_every != 1
        return is_default and gossips and isinstance(mixing.graph, DynamicBipartiteCompleteGraph)

    @property
    def _sends_weights(self) -> bool:
        """Whether models have push-sum weights: not where other vectors are mixed."""
        return self.push_sum and all(part.takes_push_sum for part in self._parts)

    @property
    def _parts(self) -> tuple[Algorithm, ...]:
        """The algorithms, each over the next; empty for plain gossip."""
        return self.algorithm.parts if isinstance(self.algorithm, Algorithm) else ()


@dataclass(frozen=True)
class PairChoices(Choices):
    """The choices of the user of AD-PSGD, whose active ranks ask passive ones; for a mailbox."""

    def weights(self, world_size: int) -> MixingManager:
        """See `Choices` and `choose_bipartite_mixing`."""
        return choose_bipartite_mixing(self.graph, self.mixing, world_size=world_size)
