"""Participants whose rounds go over a graph: what changes with the number of workers, in lockstep or not."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from typing import Any

import torch

from ..graph_manager.base import GraphManager
from ..mixing_manager.base import MixingManager
from ..transport.process_group import DEFAULT_TIMEOUT
from .links import LinkTransport
from .membership import Membership
from .participant import ModelParticipant


def check_elastic(
    membership: object,
    *,
    graph: object,
    mixing: object,
    example: str = "graph=RingGraph or graph=BaseGraph",
    **links: Any,
) -> None:
    """Raise ValueError for arguments of a wrapper that do not fit a membership.

    Args:
        membership: see `check_links`.
        graph, mixing: as the user gave them.
        example: graphs that do, for the error.
        links: the other arguments of `check_links`.
    """
    check_links(membership, **links)
    for name, value in (("graph", graph), ("mixing", mixing)):
        if isinstance(value, (GraphManager, MixingManager)) or (value is not None and not _is_function(value)):
            raise ValueError(
                f"got {name}={value} with a membership, expected a class, a function or a name, since it is made anew "
                f"for each number of workers, e.g. {example}"
            )


def check_links(
    membership: object, *, group: object, init_sync: object, timeout: timedelta, comm_device: object = None
) -> None:
    """Raise ValueError for anything but a membership, and for arguments of a wrapper that a membership decides.

    Args:
        membership: what the user gave as one.
        group, comm_device: of messages.
        init_sync: all workers begin with the model of the first one.
        timeout: the timeout of the membership, or the default of wrappers.
    """
    if not isinstance(membership, Membership):
        store = membership if isinstance(membership, str) else "host:port"
        raise ValueError(
            f"got membership={membership!r}, expected a Membership; pass Membership({store!r}, min_workers=...)"
        )
    if not init_sync or isinstance(init_sync, str):
        raise ValueError(
            f"got init_sync={init_sync!r} with a membership, expected True: its workers begin with the model of the "
            "first one, and who joins with that of a donor; leave init_sync out"
        )
    if timeout not in (DEFAULT_TIMEOUT, membership.timeout):
        raise ValueError(
            f"got timeout={timeout.total_seconds():g} s with a membership, which has a timeout of "
            f"{membership.timeout.total_seconds():g} s, expected none; pass it to Membership(..., timeout=...)"
        )
    if group is not None:
        raise ValueError("got process_group with a membership, expected None: a membership connects its workers itself")
    if comm_device not in (None, "cpu", torch.device("cpu")):
        raise ValueError(f"got comm_device={comm_device} with a membership, expected 'cpu' or None: its links are Gloo")


def _is_function(value: object) -> bool:
    return callable(value) or isinstance(value, str)


_KEPT_SIZES = 64
_CHECKED_SIZES = 16  # worlds of so many workers at least must have a graph


class GraphParticipant(ModelParticipant):
    """A participant that exchanges with the neighbours of a graph, which is made for each number of workers.

    Args:
        wrapper: that trains.
        membership: who takes part.
        choose: the weights, with their graph, for a number of workers; the same function on all of them.
        check: raises ValueError for weights that do not suit the algorithm.
        example: graphs that exist for any number, for the error.

    Raises:
        ValueError: there is no graph for some number of workers, or `check` raises it.
    """

    def __init__(
        self,
        wrapper: Any,
        membership: Membership,
        choose: Callable[[int], MixingManager],
        *,
        check: Callable[[MixingManager], None] = lambda mixing: None,
        example: str = "RingGraph or BaseGraph",
    ) -> None:
        super().__init__(wrapper, membership)
        self.choose = functools.lru_cache(maxsize=_KEPT_SIZES)(choose)  # MATCHA plans each graph, which takes a while
        failing: dict[int, Exception] = {}
        chosen = []
        for n in range(1, (membership.max_workers or max(2 * membership.min_workers, _CHECKED_SIZES)) + 1):
            try:
                chosen.append(self.choose(n))
            except ValueError as error:
                failing[n] = error
        if failing:
            raise ValueError(
                f"got a graph or mixing that does not exist for {list(failing)} workers, expected one for any number, "
                f"since workers may die and join; e.g. {example}: {next(iter(failing.values()))}"
            )
        for n, mixing in enumerate(chosen, start=1):
            try:
                check(mixing)
            except ValueError as error:
                raise ValueError(
                    f"{error}; {n} workers are tried since others may come: give the membership max_workers, or leave "
                    "graph and mixing out"
                ) from error

    def _turn_to(self, transport: LinkTransport, growth: float) -> None:
        """See `ModelParticipant`."""
        self.engine.rebind(self.choose(transport.world_size), transport)

    def peers(self, rank: int, world_size: int) -> Iterable[int]:
        """See `ModelParticipant`."""
        graph: GraphManager = self.choose(world_size).graph
        gives = set(graph.phone_book(rank))
        return gives | {peer for peer in range(world_size) if rank in graph.phone_book(peer)}


class LockstepParticipant(GraphParticipant):
    """Between a wrapper with rounds in lockstep and its membership.

    [Note: generations] A generation of the membership is a set of workers, a transport over links of its own, and the
    training step with which it begins. At that step, every worker first applies the round in flight over the old links
    and turns to the new ones, with graph and weights for the new number of workers. Rounds and steps count
    on. A worker that joins gets half of its donor's push-sum weight; then all multiply theirs by the same number, see
    [Note: weights] of `Roster`. A worker that has lost all its peers, and trains on alone, has the weight one.
    """

    def at_step(self) -> None:
        """See `ModelParticipant`."""
        super().at_step()
        self.look_at_weight()

    def look_at_weight(self) -> None:
        """At the safe point, in a generation."""
        if self.is_weighted:
            if self.membership.transport.is_alone:
                self._set_weight_to_one()
            self.weight = self.buffer.vector.push_sum_weight.item()

    def _set_weight_to_one(self) -> None:
        """A worker that is alone has weight one; this changes no estimate."""
        weight = self.buffer.vector.push_sum_weight
        if weight.item() != 1.0:
            try:
                self.wrapper._apply_in_flight()
            except FloatingPointError:  # [Note: after infinities]
                self.membership.repeat_step()
                raise
            self.wrapper._to_estimate()
            weight.fill_(1.0)

    def _turn_to(self, transport: LinkTransport, growth: float) -> None:
        """See `ModelParticipant`."""
        wrapper = self.wrapper
        if self.is_weighted:  # the storage holds z = x / w, so this changes no estimate
            wrapper._to_estimate()
            self.buffer.vector.push_sum_weight.mul_(growth)
        super()._turn_to(transport, growth)

    def advance(self, num_steps: int) -> None:
        """See `ModelParticipant`."""
        self.engine.advance(num_steps)

    @property
    def is_weighted(self) -> bool:
        """See `ModelParticipant`."""
        return bool(self.engine.gossiper.is_weighted)

    def _go_to(self, t: int, step: int) -> None:
        self.engine.reset()
        super()._go_to(t, step)

    def _engine_state(self) -> Mapping[str, Any]:
        return dict(self.engine.state_for_newcomer(self.buffer.vector))

    def _load_engine(self, state: Mapping[str, Any]) -> None:
        self.engine.load_state_dict(state)  # and nothing that it kept of its peers
