"""LockstepParticipant: what a wrapper with rounds in lockstep does when workers come and go."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ..flat.buffer import FlatBuffer
from ..graph_manager.base import GraphManager
from ..mixing_manager.base import MixingManager
from ..transport.agreement import broadcast_tensors
from .membership import Membership


class ElasticWrapper(Protocol):
    """What is used of the wrapper."""

    module: nn.Module
    _buffer: FlatBuffer
    _engine: Any  # a LockstepEngine
    _description: dict[str, str]
    _transport: Any
    _place: tuple[int, int] | None

    def _reattach(self) -> None: ...

    def _choose(self) -> None: ...

    def _apply_in_flight(self) -> None: ...

    def _to_estimate(self) -> None: ...


def check_elastic(
    *,
    outer: object,
    rule: object,
    group: object,
    comm_device: object,
    nprocs_per_node: int,
    graph: object,
    mixing: object,
) -> None:
    """Raise ValueError for arguments that do not fit a membership."""
    for name, value in (("graph", graph), ("mixing", mixing)):
        if isinstance(value, (GraphManager, MixingManager)) or (value is not None and not _is_function(value)):
            raise ValueError(
                f"got {name}={value} with a membership, expected a class, a function or a name, since it is made anew "
                f"for each number of workers, e.g. graph=RingGraph or graph=lambda n: BaseGraph(n, 2)"
            )
    if outer is not None:
        raise ValueError(
            f"got outer={outer} with a membership, expected None: its anchor must be the same on all workers, also on "
            "one that joins between two outer steps"
        )
    if rule is not None:
        raise ValueError(
            f"got rule={rule} with a membership, expected None: what a rank carries from round to round makes up for "
            "what the others carry, and would be lost with it"
        )
    if group is not None:
        raise ValueError("got process_group with a membership, expected None: a membership connects its workers itself")
    if comm_device not in (None, "cpu", torch.device("cpu")):
        raise ValueError(f"got comm_device={comm_device} with a membership, expected 'cpu' or None: its links are Gloo")
    if nprocs_per_node != 1:
        raise ValueError(
            f"got nprocs_per_node={nprocs_per_node} with a membership, expected 1: each process is a worker that may "
            "come and go"
        )


def _is_function(value: object) -> bool:
    return callable(value) or isinstance(value, str)


_KEPT_SIZES = 64
_CHECKED_SIZES = 16  # worlds of so many workers at least must have a graph


class LockstepParticipant:
    """Between a wrapper and its membership: graphs for any number of workers, and the state of one that joins.

    [Note: generations] A generation of the membership is a set of workers, a transport over links of its own, and the
    training step with which it begins. At that step, before the round, every worker applies what is in flight over the
    old links and turns to the new ones, with graph and weights for the new number of workers. Rounds and steps count
    on. A worker that joins gets half of its donor's push-sum weight; then all multiply theirs by the same number, see
    [Note: weights] of `Roster`. A worker that has lost all others, and trains on as a world of one, has the weight one.

    Args:
        wrapper: that trains.
        membership: who takes part.
        choose: the weights, with their graph, for a number of workers; the same function on all of them.
        check: raises ValueError for weights that do not suit the algorithm.

    Raises:
        ValueError: there is no graph for some number of workers, or `check` raises it.
    """

    def __init__(
        self,
        wrapper: ElasticWrapper,
        membership: Membership,
        choose: Callable[[int], MixingManager],
        *,
        check: Callable[[MixingManager], None],
    ) -> None:
        self.wrapper, self.membership = wrapper, membership
        self.weight = 1.0
        self.choose = functools.lru_cache(maxsize=_KEPT_SIZES)(choose)  # MATCHA plans each graph, which takes a while
        failing: dict[int, Exception] = {}
        chosen = []
        for n in range(1, max(2 * membership.min_workers, _CHECKED_SIZES) + 1):
            try:
                chosen.append(self.choose(n))
            except ValueError as error:
                failing[n] = error
        if failing:
            raise ValueError(
                f"got a graph or mixing that does not exist for {list(failing)} workers, expected one for any number, "
                f"since workers may die and join; e.g. RingGraph or BaseGraph: {next(iter(failing.values()))}"
            )
        for mixing in chosen:
            check(mixing)

    def describe(self) -> dict[str, str]:
        """What a worker that joins must have in common with the others."""
        signature = "\n".join(self.wrapper._buffer.signature())
        digest = hashlib.sha256(signature.encode()).hexdigest()[:16]
        size = sum(parameter.numel() for parameter in self.wrapper._buffer.parameters)
        return {
            **self.wrapper._description,
            "wrapper": type(self.wrapper).__name__,
            "model": f"{type(self.wrapper.module).__name__} with {size} parameters, signature {digest}",
        }

    def at_step(self) -> None:
        """At the safe point of every training step; see [Note: generations]."""
        if self.membership.is_waiting_at_the_door:
            self.membership.join()
        self.membership.at_step()
        if self.wrapper._engine.gossiper.is_weighted:
            transport = self.membership.transport
            if len(transport.lost) == transport.world_size - 1:
                self._set_weight_to_one()
            self.weight = self.wrapper._buffer.vector.push_sum_weight.item()

    def _set_weight_to_one(self) -> None:
        """Of who is alone; it changes no estimate."""
        weight = self.wrapper._buffer.vector.push_sum_weight
        if weight.item() != 1.0:
            self.wrapper._apply_in_flight()
            self.wrapper._to_estimate()
            weight.fill_(1.0)

    # What the membership calls.

    def begin(self, growth: float) -> None:
        """See `Participant`."""
        transport, wrapper = self.membership.transport, self.wrapper
        wrapper._apply_in_flight()
        if wrapper._engine.gossiper.is_weighted:  # the storage holds z = x / w, so this changes no estimate
            wrapper._to_estimate()
            weight = wrapper._buffer.vector.push_sum_weight
            weight.mul_(growth)
        wrapper._engine.rebind(self.choose(transport.world_size), transport)
        wrapper._transport = transport
        wrapper._place = transport.rank, transport.world_size

    @torch.no_grad()
    def found(self) -> None:
        """See `Participant`; who was in an earlier life of the job gives up its own rounds and weight."""
        vector, engine = self.wrapper._buffer.vector, self.wrapper._engine
        self.wrapper._to_estimate()
        counts = torch.tensor([engine.t, engine.step])
        broadcast_tensors(self.membership.transport, [vector.raw, counts, *self._others()])
        vector.push_sum_weight.fill_(1.0)
        engine.t, engine.step = counts.tolist()

    def settle(self) -> None:
        """See `Participant`."""
        self.wrapper._apply_in_flight()

    def peers(self, rank: int, world_size: int) -> Iterable[int]:
        """See `Participant`."""
        graph: GraphManager = self.choose(world_size).graph
        gives = set(graph.phone_book(rank))
        return gives | {peer for peer in range(world_size) if rank in graph.phone_book(peer)}

    @property
    def step(self) -> int:
        """See `Participant`."""
        return self.wrapper._engine.step

    def advance(self, num_steps: int) -> None:
        """See `Participant`."""
        self.wrapper._engine.advance(num_steps)

    @torch.no_grad()
    def give(self) -> Mapping[str, Any]:
        """See `Participant`. Halves the push-sum weight, whose other half goes with the copy."""
        wrapper = self.wrapper
        wrapper._apply_in_flight()  # a correction of the whole weight would leave nothing of the half
        wrapper._choose()  # what was frozen since the last round
        if not wrapper._buffer.is_attached():
            wrapper._reattach()
        vector = wrapper._buffer.vector
        if wrapper._engine.gossiper.is_weighted:
            wrapper._to_estimate()
            vector.push_sum_weight.mul_(0.5)
        return {
            "vector": vector.raw.clone(),
            "weight": vector.push_sum_weight.clone(),
            "others": [tensor.detach().clone() for tensor in self._others()],
            "engine": {"t": wrapper._engine.t, "step": wrapper._engine.step},
            "travels": wrapper._buffer.signature(),
            "trained": [name for name, tensor in wrapper.module.named_parameters() if tensor.requires_grad],
        }

    def take_back(self, state: Mapping[str, Any]) -> None:
        """See `Participant`."""
        if self.wrapper._engine.gossiper.is_weighted:
            self.wrapper._apply_in_flight()
            self.wrapper._to_estimate()
            self.wrapper._buffer.vector.push_sum_weight.add_(state["weight"])

    @property
    def num_bytes(self) -> int:
        """See `Participant`."""
        return self.wrapper._buffer.vector.layout.num_bytes

    @torch.no_grad()
    def take(self, state: Mapping[str, Any]) -> None:
        """See `Participant`."""
        wrapper = self.wrapper
        wrapper._apply_in_flight()  # of links that are closed: nothing of it stays
        if not wrapper._buffer.is_attached():
            wrapper._reattach()
        wrapper._to_estimate()
        self._choose_as(state["travels"], set(state["trained"]))
        wrapper._engine.gossiper.load_state_dict({})  # what it kept of its peers
        vector = wrapper._buffer.vector
        vector.raw.copy_(state["vector"])
        vector.push_sum_weight.copy_(state["weight"])
        self.weight = vector.push_sum_weight.item()
        for own, other in zip(self._others(), state["others"], strict=True):
            own.copy_(other)
        wrapper._engine.t, wrapper._engine.step = int(state["engine"]["t"]), int(state["engine"]["step"])
        torch.autograd.graph.increment_version(wrapper._buffer.parameters)

    def _choose_as(self, travels: Sequence[str], trained: Collection[str]) -> None:
        """Freeze what the job has frozen on the way, and train what it trains.

        Args:
            travels: the signature of the donor's vector, which an engine with rounds under way keeps when less is
                trained than travels.
            trained: the names of the parameters that the donor trains.
        """
        buffer, named = self.wrapper._buffer, dict(self.wrapper.module.named_parameters())
        if buffer.signature() != travels:
            travelling = {text.split(" ", 1)[0] for text in travels}
            for name, parameter in named.items():
                parameter.requires_grad_(name in travelling)
            buffer.attach()
            if buffer.signature() != travels:
                ours, theirs = set(buffer.signature()) - set(travels), set(travels) - set(buffer.signature())
                raise ValueError(
                    f"got a donor that trains {sorted(theirs)} where this worker has {sorted(ours)}, expected the same "
                    "tensors on both; layers that are added or taken away on the way must be so before the model is "
                    "wrapped"
                )
        for name, parameter in named.items():
            parameter.requires_grad_(name in trained)

    def _others(self) -> list[Tensor]:
        """Parameters and buffers that do not travel: frozen ones, counters."""
        module, in_buffer = self.wrapper.module, {id(tensor) for tensor in self.wrapper._buffer.tensors}
        tensors = (*module.parameters(), *module.buffers())
        return list({id(x): x for x in tensors if id(x) not in in_buffer}.values())
