"""Siblings: several processes that are one worker of a membership, whose first one acts for all of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from ...transport.agreement import broadcast_state
from ...transport.process_group import ProcessGroupTransport
from ...transport.state_tree import copied, encode
from ..liveness.door import JobFullError, LeftAtDoorError
from ..participant import Change
from ..view import view_of
from .participant import NodeParticipant

if TYPE_CHECKING:
    from ..membership import Membership

PATIENCE = 5  # times the timeout of the membership: the first process waits for other workers while its siblings wait
_KINDS = (ValueError, TypeError, FloatingPointError, TimeoutError, ConnectionError, JobFullError, LeftAtDoorError)
_ERRORS = {kind.__name__: kind for kind in _KINDS}


class _News(IntEnum):
    """What the first process has to tell."""

    NONE = 0
    MESSAGE = 1
    ERROR = 2


class RoundProgress(Protocol):
    """What `Siblings.run` needs of an engine: `progress` in the first process, `follow` in the others."""

    def progress(self) -> tuple[float, ...]:
        """How far it has come."""

    def follow(self, progress: Sequence[float]) -> None:
        """Be as far as this."""


class Siblings:
    """The processes of one node, which together are one worker of a membership.

    [Note: one worker, several processes] Only the first process of a node talks to the store, sends heartbeats, has
    links, and gossips. At each safe point, where a worker alone would look for what has changed (`join`, `at_step`),
    all processes of the node meet:

        the first one:  does what a worker alone would do
                        tells the others: nothing has changed; or it has failed; or the generation, the model and the
                        step as they are now, and what is tracked, if that has come from a donor
        the others:     wait for this, and take it

    So they hold the same model, and give the same answers, at each training step. Rounds are the first process's too.
    When it has run one it tells the others whether its model was written, how far its engine is and whether something
    is in flight, or that it has failed (`run`); then it gives them its model. What an algorithm keeps from round to
    round, such as links, an anchor or corrections, is in the first process only, and dies with the node. After an error
    in a round, which all processes raise, the others take its model at the next safe point: it may have been half
    written.

    Args:
        membership: of this process.
        control: over the processes of the node, with messages in CPU memory.
        data: the same for tensors of the model; may be `control`.

    Attributes:
        is_apart: whether this process is at a safe point, where what it does with its model is not shared at once.
        stats: as the first process saw them at the last safe point; see `Membership.stats`.
        lost: see `Membership.lost`, at the last safe point.
        must_leave: whether a process of the node had called `Membership.leave` before the last safe point.
    """

    def __init__(self, membership: Membership, control: ProcessGroupTransport, data: ProcessGroupTransport) -> None:
        self.membership, self.control, self.data = membership, control, data
        self.leads = control.rank == 0
        self.is_apart = False
        self.stats: dict[str, float] = membership.own_stats()
        self.lost: tuple[int, ...] = ()
        self.must_leave = False
        self._has_failed = False  # a round, since the last safe point; in the first process

    def as_one(self, act: Callable[[], object]) -> Change | None:
        """Have the first process act for all of them; the last change of generation in it, if any.

        Raises:
            Exception: what `act` raises, on all.
            TimeoutError, ConnectionError: a sibling is late or gone; names it.
        """
        self.is_apart = True
        try:
            message = self._call(lambda: self._act(act))
            if message is not None:
                self.lost = tuple(message["lost"])
                if not self.leads:
                    self._take(message)
        finally:
            self.is_apart = False
        changes = self.membership._callbacks.untold
        return changes[-1] if changes else None

    def close(self) -> None:
        """Give back the groups inside the node. Idempotent."""
        self.data.close()
        self.control.close()

    def share(self, x: Tensor, act: Callable[[], object], *, what: str) -> None:
        """x <- what the first process has in it after it has acted; on all.

        Raises as `as_one`.
        """
        self._call(lambda: _nothing(act()))
        self.data.broadcast(x, source=0, what=what)

    def run(self, act: Callable[[], bool], rounds: RoundProgress) -> bool:
        """What `act`, which runs rounds, gives in the first process; on all.

        Raises as `as_one`. At a safe point it acts in this process only.
        """
        if self.is_apart:
            return act()
        result, error = False, None
        if self.leads:
            try:
                result = act()
            except Exception as raised:  # noqa: BLE001 (told to the others, and raised below)
                error, self._has_failed = raised, True
        numbers = torch.tensor([error is not None, result, *rounds.progress()], dtype=torch.float64, device="cpu")
        try:
            self.control.broadcast(numbers, source=0, what="a round of the node")
            failed, result, *progress = numbers.tolist()
            if failed:
                text = broadcast_state(self.control, _told(error), source=0, what="why a round has failed")
        except (TimeoutError, ConnectionError) as failure:
            raise (error or failure) from failure
        if not self.leads:
            rounds.follow(progress)
        if failed:
            raise error if error is not None else self._error_of(text)
        return bool(result)

    @property
    def _participant(self) -> NodeParticipant:
        participant = self.membership._participant
        assert isinstance(participant, NodeParticipant)
        return participant

    def _call(self, act: Callable[[], Mapping[str, Any] | None]) -> Mapping[str, Any] | None:
        """What `act` gives in the first process, in all of them."""
        message, error = None, None
        if self.leads:
            try:
                message = act()
                encode(message)
            except Exception as raised:  # noqa: BLE001 (told to the others, and raised below)
                error, message, self._has_failed = raised, _told(raised), True
        news = _News.NONE if message is None else _News.MESSAGE if error is None else _News.ERROR
        try:
            news = self._tell(news)
            if news is not _News.NONE:
                message = broadcast_state(self.control, message, source=0, what="what has changed in the membership")
        except (TimeoutError, ConnectionError) as failure:
            raise (error or failure) from failure
        if news is _News.ERROR:
            raise error if error is not None else self._error_of(message)
        return message

    def _tell(self, news: _News) -> _News:
        """What there is to tell, with `stats`; and whether somebody wants to leave, whom all hear."""
        own = self.membership.own_stats() if self.leads else dict.fromkeys(self.stats, 0.0)
        membership = self.membership
        before = membership._steps_before if self.leads else 0
        header = torch.tensor([news, membership.is_leaving, before, *own.values()], dtype=torch.float64, device="cpu")
        self.control.all_reduce(header, what="a training step of the node")
        kind, leaving, before, *stats = header.tolist()
        membership._steps_before = int(before)
        self.must_leave = leaving > 0
        self.stats = dict(zip(own, stats, strict=True))
        return _News(int(kind))

    def _error_of(self, message: Any) -> Exception:
        kind = _ERRORS.get(message["kind"], RuntimeError)
        prefix = "" if kind.__name__ == message["kind"] else f"{message['kind']}: "
        return kind(f"process {self.control.names[0]}, the first one of this node, failed: {prefix}{message['text']}")

    def _act(self, act: Callable[[], object]) -> Mapping[str, Any] | None:
        """In the first process: what has changed by this; None: nothing has."""
        membership, before = self.membership, self._summary()
        was_in, was = membership.generation > 0, membership.id
        act()
        if membership.generation > 0:
            self._participant.look_at_weight()
        after, lost = self._summary(), membership.own_lost
        is_new = after != before or self._has_failed
        if not is_new and lost == self.lost:
            return None
        message: dict[str, Any] = {
            "lost": list(lost),
            "changes": [asdict(change) for change in membership._callbacks.untold],
        }
        view = membership._active
        message |= {"id": membership.id, "has_joined": membership._has_joined, "view": None}
        if view is not None and is_new:
            message |= {"view": asdict(view), "model": self._participant.copy()}
            self._has_failed = False
            if not was_in or membership.id != was:  # the state may have come from a donor
                tracked = membership._tracked
                message["tracked"] = {name: copied(value.state_dict()) for name, value in tracked.items()}
        return message

    def _summary(self) -> tuple[object, ...]:
        """Of what a safe point may change: equal before and after where it has changed nothing."""
        membership, participant = self.membership, self._participant
        engine, vector = participant.wrapper._engine, participant.wrapper._buffer.vector
        weight = vector.push_sum_weight.item() if participant.is_weighted else 1.0  # which waits for a GPU
        counters = engine.t, engine.step, engine.is_in_flight
        return membership.id, membership._active, membership._has_joined, *counters, weight

    def _take(self, message: Mapping[str, Any]) -> None:
        """In the others: go on from what has changed."""
        membership = self.membership
        membership.id, membership._has_joined = message["id"], message["has_joined"]
        membership.num_joins, membership.num_deaths = int(self.stats["joins"]), int(self.stats["deaths"])
        membership._callbacks.untold += [Change(**change) for change in message["changes"]]
        if message["view"] is None:
            return
        membership._active = view_of(message["view"])
        self._participant.take(message["model"])
        self._participant.place()
        if "tracked" in message:
            self._take_tracked(message["tracked"])

    def _take_tracked(self, states: Mapping[str, Any]) -> None:
        own = self.membership._tracked
        if own.keys() != states.keys():
            raise ValueError(
                f"process {self.control.names[self.control.rank]}: got track() of {sorted(own)}, expected that of the "
                f"first process of the node, {sorted(states)}; track the same on all of them"
            )
        for name, state in states.items():
            own[name].load_state_dict(state)


def _told(error: Exception | None) -> dict[str, str]:
    """What the others are told of an error."""
    return {} if error is None else {"kind": type(error).__name__, "text": str(error)}


def _nothing(_: object) -> None:
    return None
