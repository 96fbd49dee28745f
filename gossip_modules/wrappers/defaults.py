"""The graph, weights and gossiper of a wrapper for which the user names none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ..consensus_control import ConsensusControl
from ..graph_manager.base import GraphManager
from ..graph_manager.dynamic_graphs import (
    DynamicBipartiteCompleteGraph,
    DynamicBipartiteExponentialGraph,
)
from ..graph_manager.named_graphs import default_graph, undirected_ring
from ..mixing_manager.base import MixingManager
from ..mixing_manager.graph_weights import default_mixing
from ..rounds.algorithm import Algorithm, Over
from ..rounds.mixer import Mixer
from ..rounds.pieces import mixer_of
from ..rounds.push_pull import PushPull, PushSum
from ..schedule import Schedule
from .arguments import (
    GossiperLike,
    GraphLike,
    MixingLike,
    as_gossiper,
    as_graph,
    as_mixing,
    check_algorithm,
    check_flags,
    check_gossips,
    check_periodic,
    check_size,
    check_wire_dtype,
)


def choose_gossiper(
    gossiper: GossiperLike | None, *, push_sum: bool, wire_dtype: torch.dtype | None = None
) -> PushPull:
    """`gossiper`, or push-sum, or push-pull, the latter two with that dtype on the wire.

    Raises:
        ValueError: a gossiper and a wire dtype, or something else in their place.
    """
    check_wire_dtype(wire_dtype)
    check_flags(push_sum=push_sum)
    if gossiper is None:
        return (PushSum if push_sum else PushPull)(wire_dtype=wire_dtype)
    if wire_dtype is not None:
        raise ValueError(
            f"got algorithm={gossiper} and wire_dtype={wire_dtype}, expected one of them; give it to the gossiper, "
            "e.g. PushPull(wire_dtype=torch.bfloat16)"
        )
    return as_gossiper(gossiper)


def choose_mixing(
    graph: GraphLike | None,
    mixing: MixingLike | None,
    *,
    push_sum: bool,
    world_size: int,
    gossiper: Mixer | None = None,
) -> MixingManager:
    """The mixing manager, with its graph.

    Push-sum: the one-peer exponential graph with uniform weights. Push-pull: see `default_graph_name`. A gossiper with
    a default graph: that; one that needs symmetric weights: a ring with both neighbours in every world. A graph that
    has weights of its own: these. A MatchaGraph: its Laplacian. Another symmetric graph without push-sum:
    Metropolis-Hastings weights.

    Raises:
        ValueError: `mixing` is over another graph than `graph`, or one of another size.
    """
    if isinstance(mixing, MixingManager):
        if graph is not None and not (isinstance(graph, GraphManager) and repr(graph) == repr(mixing.graph)):
            raise ValueError(
                f"got graph={graph} and a mixing over {mixing.graph}, expected one graph; pass mixing only"
            )
        check_size(mixing.graph, world_size)
        return mixing
    is_undirected = gossiper is not None and gossiper.needs_symmetric_weights
    if graph is None and gossiper is not None:
        graph = gossiper.default_graph(world_size)
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
        ValueError: another graph than that of `mixing`, one that is not bipartite, or has several peers per round.
    """
    if graph is None and mixing is None:
        even = DynamicBipartiteExponentialGraph
        graph = (DynamicBipartiteCompleteGraph if world_size % 2 and world_size > 1 else even)(world_size)
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
        graph, mixing, push_sum, gossiper, wire_dtype, schedule, outer, algorithm: see `GossipDataParallel`.
    """

    graph: GraphLike | None
    mixing: MixingLike | None
    push_sum: bool
    gossiper: GossiperLike | None
    wire_dtype: torch.dtype | None
    schedule: Schedule | ConsensusControl
    outer: object = None
    algorithm: Algorithm | Over | None = None

    def choose(
        self, num_nodes: int, *, overlap: bool, init_sync: bool, on_nonfinite: str, nprocs_per_node: int
    ) -> tuple[MixingManager, Mixer]:
        """The weights, with their graph, and the gossiper, with defaults for the arguments that were left out.

        Args:
            num_nodes: the number of ranks that gossip.
            overlap, init_sync, on_nonfinite, nprocs_per_node: other arguments of the wrapper.

        Raises:
            ValueError: arguments that do not fit each other.
        """
        options = {"on_nonfinite": on_nonfinite, "nprocs_per_node": nprocs_per_node}
        self._check_arguments(overlap=overlap, init_sync=init_sync, **options)
        gossiper = self._gossiper()
        return self._mixing_of(self.graph, self.mixing, num_nodes, gossiper), gossiper

    def _check_arguments(self, *, overlap: bool, init_sync: bool, **others: Any) -> None:
        check_flags(push_sum=self.push_sum)
        gossip = {
            "graph": self.graph,
            "mixing": self.mixing,
            "gossiper": self.gossiper,
            "wire_dtype": self.wire_dtype,
        }
        if self.outer is not None:
            raise ValueError(
                f"got outer={self.outer!r}, expected an algorithm such as DiLoCo(sync_every=30); for another optimizer "
                "pass DiLoCo(optimizer=lambda parameters: torch.optim.Adam(parameters))"
            )
        check_gossips(self.schedule, gossip | {"algorithm": self.algorithm})
        if self.algorithm is not None:
            check_periodic(self._parts[0], self.schedule, overlap=overlap, init_sync=init_sync, gossip=gossip)
            check_algorithm(self.algorithm, self.schedule, overlap=overlap, nprocs_per_node=others["nprocs_per_node"])
        if isinstance(self.schedule, ConsensusControl) and others["nprocs_per_node"] != 1:
            raise ValueError(
                f"got nprocs_per_node={others['nprocs_per_node']} with schedule={self.schedule}, expected 1: each "
                "process of a node sees its shard of the model only, so that those of one node would decide "
                "differently; use a Schedule"
            )

    def choose_for_any_size(self, **options: Any) -> tuple[Callable[[int], MixingManager], Mixer]:
        """The weights as a function of the number of ranks, whatever the graph of one rank would be; the gossiper.

        Args:
            options: as those of `choose`, for its checks. The size of a node is none of them: one process gossips the
                whole model.

        Raises:
            ValueError: arguments that do not fit each other; a gossiper whose rounds do not go on without peers that
                fail.
        """
        self._check_arguments(**options, nprocs_per_node=1)
        gossiper = self._gossiper().for_membership()

        def choose(world_size: int) -> MixingManager:
            own = (self.graph, self.mixing) if world_size > 1 else (None, None)
            return self._mixing_of(*own, world_size, gossiper)

        return choose, gossiper

    def _gossiper(self) -> Any:
        innermost = self._parts[-1] if self._parts else None
        if self.wire_dtype is not None and innermost is not None and not innermost.takes_wire_dtype:
            raise ValueError(
                f"got wire_dtype={self.wire_dtype} with {innermost}, expected one of them: all messages are those of "
                "the algorithm, which no wire rounds; leave wire_dtype out"
            )
        plain = choose_gossiper(self.gossiper, push_sum=self._sends_weights, wire_dtype=self.wire_dtype)
        return plain if self.algorithm is None else mixer_of(self.algorithm, plain)

    def was_on_a_ring(self, mixing: MixingManager) -> bool:
        """Whether rounds with these weights, which nobody named, were on a ring in older versions."""
        is_default = (
            self.graph is None and self.mixing is None and isinstance(mixing.graph, DynamicBipartiteCompleteGraph)
        )
        gossips = all(part.mixes for part in self._parts)
        return is_default and gossips and self.schedule.average_every != 1  # 1: all rounds are exact averages

    @property
    def _sends_weights(self) -> bool:
        """Whether models have push-sum weights: not where other vectors are mixed."""
        return self.push_sum and all(part.takes_push_sum for part in self._parts)

    @property
    def _parts(self) -> tuple[Algorithm, ...]:
        """The algorithms, each over the next; plain gossip is none."""
        return () if self.algorithm is None else self.algorithm.parts

    def _mixing_of(
        self, graph: GraphLike | None, mixing: MixingLike | None, num_nodes: int, gossiper: Mixer
    ) -> MixingManager:
        """The weights; the method says them where the user names neither graph nor weights."""
        if graph is None and mixing is None:
            mixing = gossiper.default_mixing(num_nodes)
        return choose_mixing(graph, mixing, push_sum=self._sends_weights, world_size=num_nodes, gossiper=gossiper)
