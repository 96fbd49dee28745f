"""WorkerState: what one worker of a membership knows, and what its threads share."""

from __future__ import annotations

import contextlib
import math
import random
import threading
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, Protocol

from ..transport import threads
from ..transport.deadline import Deadline
from ..transport.threads import Waits
from . import limits
from .callbacks import Callbacks
from .events.event_log import EventLog
from .events.roster import Roster
from .heartbeats import Heartbeats
from .links import LinkTransport
from .liveness.background_log import log
from .liveness.contact import digest
from .liveness.probe import LifeSign, probe
from .participant import Change, Participant
from .view import Joiner, Member, View


class OneWorker(Protocol):
    """What a membership needs of the processes that are one worker; see `Siblings`."""

    leads: bool
    stats: dict[str, float]
    lost: tuple[int, ...]
    must_leave: bool

    def as_one(self, act: Callable[[], object]) -> Change | None:
        """Have the first process act for all of them; the last change of generation in it, if any."""

    def close(self) -> None:
        """Give back the group inside the node."""


class WorkerState:
    """What a worker knows of the job; the base of `Membership`, whose arguments these are.

    [Note: lock of a membership] `_lock` guards all that is below `_reset`, and `_moved` is notified when the roster, or
    what is due, has changed. Who holds it waits for nobody.
    """

    def __init__(
        self,
        log: EventLog,
        *,
        name: str,
        timeout: timedelta,
        host: str,
        link_host: str | None,
        on_partition: str,
        interval: float,
        floor: float,
    ) -> None:
        self.name, self.timeout = name, timeout
        self._log, self._host, self._on_partition = log, host, on_partition
        self._heartbeat_options: dict[str, float] = {"interval": interval, "floor": floor}
        self._callbacks = Callbacks()
        self._tracked: dict[str, Any] = {}
        self._participant: Participant | None = None
        self._description: dict[str, str] = {}
        self._lock = threading.RLock()
        self._moved = threading.Condition(self._lock)
        self._closed = log.ended
        self._wake = threading.Event()  # the watcher has something to do
        self._watcher: threading.Thread | None = None
        self.num_joins = self.num_deaths = 0
        self._link_host, self._has_warned = link_host, False  # of Gloo
        self._has_met = False  # whether a listener of another worker was ever in reach
        self.siblings: OneWorker | None = None  # where several processes are this worker
        self.is_leaving = False
        self._thread = threading.get_ident()  # that trains
        self._steps_before = 0  # see [Note: clock] of `Turns`
        self._reset()

    def _as_one(self, act: Callable[[], Change | None]) -> Change | None:
        """Act, in the first process where several are this worker: see `Siblings`."""
        return act() if self.siblings is None else self.siblings.as_one(act)

    def _reset(self) -> None:
        """As a worker that nobody knows."""
        self.id = time.time_ns() // 1000 * 1000 + random.SystemRandom().randrange(1000)
        self._roster = Roster(on_partition=self._on_partition)
        self._active: View | None = None
        self._transport: LinkTransport | None = None
        self._due: list[tuple[View, LinkTransport]] = []  # generations that are to begin, in their order
        self._formed: dict[int, LinkTransport] = {}
        self._forming_since: dict[int, float] = {}
        self._retired: list[tuple[float, LinkTransport]] = []
        self._unsent: list[Mapping[str, Any]] = []
        self._garbage: list[str] = []  # keys in the store
        self._serving: set[tuple[int, int, int]] = set()  # `Joiner.key`, like those of `_given`
        self._snapshots: list[Joiner] = []  # that the training thread is to take
        self._receiving: tuple[int, Waits] | None = None  # the attempt of the donor that gives, and the waits for it
        self._given: dict[tuple[int, int, int], tuple[float, Mapping[str, Any]]] = {}  # see [Note: what was given]
        self._unclaimed: list[Mapping[str, Any]] = []  # what was given to workers that will not bring it
        self._is_ahead = False  # whether `steps` has called `at_step` for the forward that comes
        self._failure: FloatingPointError | None = None  # of that call, which the forward is to raise
        self._is_again = False  # whether that is of a step which `at_step` has counted, as its round has failed
        self._hurried: set[int] = set()
        self._asked_again = 0  # the last generation without links that the others were asked to form again
        self._limit: int | None = None  # the step that is not begun before the next generation is known
        self._clock = -1  # calls of `at_step`, those of the job before this worker came included
        self._is_excluded = self._has_stopped = False  # see [Note: errors that end a loop]
        self._can_rejoin = self._is_cut_off = False  # of who is excluded
        self._next_probe = 0.0
        self._next_doubt = math.inf  # when to look whether those who are accused have ended
        self._known = 0  # a generation after that of a snapshot, of which the others are being told
        self._num_heard = 0  # knocks, see [Note: another life]
        self._coming: Mapping[str, Any] = {}  # the event with which this worker came
        self._store_life = self._asked_life = 1  # that in which a donor was asked
        self._is_coming_again = False  # see [Note: coming again]
        self._has_joined = False
        self._is_newcomer = False
        self._heartbeats: Heartbeats | None = None

    def _require_view(self) -> View:
        view = self._active
        if view is None:
            raise RuntimeError("this worker has no place in the job yet, expected join() before; wrap the model first")
        return view

    @property
    def rank(self) -> int:
        """The position of this worker in the generation that trains; it changes with generations."""
        view = self._require_view()
        return view.ids.index(self.id)

    @property
    def world_size(self) -> int:
        """The number of workers in the generation that trains."""
        return len(self._require_view().members)

    @property
    def generation(self) -> int:
        """The number of the generation that trains; 0 before the first."""
        return 0 if self._active is None else self._active.generation

    @property
    def members(self) -> tuple[int, ...]:
        """The numbers of the workers of the generation that trains, by rank."""
        return tuple(member.number for member in self._require_view().members)

    @property
    def number(self) -> int:
        """The number of this worker in logs and errors; it keeps it for as long as it lives."""
        return self._require_view().members[self.rank].number

    @property
    def transport(self) -> LinkTransport:
        """Of the generation that trains."""
        assert self._transport is not None, "attach() or join() comes first"
        return self._transport

    @property
    def is_waiting_at_the_door(self) -> bool:
        """Whether this worker has no generation yet."""
        return self._active is None

    @property
    def lost(self) -> tuple[int, ...]:
        """The numbers of members that this worker has lost, and which the generation still counts."""
        return self.own_lost if self.siblings is None else self.siblings.lost

    @property
    def own_lost(self) -> tuple[int, ...]:
        """`lost`, as this process sees it now."""
        transport = self._transport
        return () if transport is None else tuple(sorted(transport.names[i] for i in transport.lost))

    def stats(self) -> dict[str, float]:
        """generation, live (workers), joins and deaths since the start, deadline (largest of the peers', seconds)."""
        return self.own_stats() if self.siblings is None else dict(self.siblings.stats)

    def own_stats(self) -> dict[str, float]:
        """`stats`, as this process sees them now."""
        view, heartbeats = self._active, self._heartbeats
        deadlines = [] if view is None or heartbeats is None else [
            heartbeats.deadline(worker) for worker in view.ids if worker != self.id
        ]  # fmt: skip
        return {
            "generation": self.generation,
            "live": 0 if view is None else len(view.members) - len(self.own_lost),
            "joins": self.num_joins,
            "deaths": self.num_deaths,
            "deadline": max(deadlines, default=0.0),
        }

    def wait_stats(self) -> dict[str, float]:
        """Seconds that rounds waited for each peer, of the last 64: wait_median/<number> and wait_mad/<number>.

        Of a generation, by the number of the worker; mad: the median absolute deviation. In a node its first process
        has them, as it alone gossips.
        """
        transport = self._transport
        figures: dict[str, float] = {}
        for name, (median, mad) in ({} if transport is None else transport.waits_for()).items():
            figures |= {f"wait_median/{name}": median, f"wait_mad/{name}": mad}
        return figures

    @property
    def must_leave(self) -> bool:
        """Whether `steps` is to end: `Membership.leave` was called."""
        return self.is_leaving if self.siblings is None else self.siblings.must_leave

    def _attempt(self) -> int:
        """The number of the donor that is to give; -1: none will."""
        joiner = self._roster.joiners.get(self.id)
        return -1 if joiner is None or joiner.refusal else joiner.attempt

    def _release_all(self) -> None:
        if self._heartbeats is not None:
            self._heartbeats.close()
        if (receiving := self._receiving) is not None:
            receiving[1].close()
        with self._lock:
            transports = self._transports()
            self._formed, self._retired, self._due = {}, [], []
        for transport in transports:
            transport.close()

    def _transports(self) -> list[LinkTransport]:
        """Of all generations, under the lock."""
        transports = [*self._formed.values(), *(t for _, t in self._retired), *(t for _, t in self._due)]
        transports += [] if self._transport is None else [self._transport]
        return list({id(transport): transport for transport in transports}.values())

    def _await(self, condition: Callable[[], bool], deadline: Deadline) -> bool:
        """Wait until `condition`, which the watcher may make true, `leave` or the deadline; whether it is so."""
        with self._moved:
            while not (condition() or self._closed.is_set() or self.is_leaving or deadline.is_over):
                self._moved.wait(min(limits.POLL, deadline.left))  # `leave` notifies nobody: a signal may call it
            return condition()

    def _say(self, event: Mapping[str, Any]) -> None:
        """Have the watcher append an event."""
        with self._lock:
            self._unsent.append(event)
        self._wake.set()

    def _accuse(self, worker: int, why: str, *, may_have_ended: bool, generation: int = 0) -> None:
        """Say that a worker has failed; generation: see `Accusation`."""
        log.warning("job %s: rounds go on without worker %s: %s", self.name, self._number_of(worker), why)
        if may_have_ended:
            threads.start(self._accuse_if_ended, worker, why, name="gossip-accuse")
        else:
            self._say_accusation(worker, why, is_sure=False, generation=generation)

    def _say_accusation(self, worker: int, why: str, *, is_sure: bool, generation: int = 0) -> None:
        about = {"of": worker, "why": why, "is_sure": is_sure, "generation": generation}
        self._say({"event": "accuse", "by": self.id, **about})

    def _accuse_if_ended(self, worker: int, why: str, is_accused: bool = False) -> None:
        """A thread of its own: say whether the process of a worker has ended.

        Those who have given this worker up have closed their connections with it, and live. That all others have ended
        would make it the majority. So their machines are asked; only one that refuses says that a process has ended.

        Args:
            worker: whose connection has closed, or who is accused.
            why: as others are told.
            is_accused: of anything else; then it is only said again if it has ended.
        """
        contacts = {member.id: member.contact for member in self._known_members() if member.id == worker}
        has_ended = False
        with contextlib.suppress(OSError):  # no descriptor is left here: nothing says that it has ended
            signs = probe(contacts, job=digest(self.name), seconds=limits.PROBE)
            has_ended = signs.get(worker) is LifeSign.ENDED
        if has_ended or not is_accused:
            self._say_accusation(worker, why, is_sure=has_ended)

    def _known_members(self) -> list[Member]:
        views = (self._active, self._roster.forming, self._roster.view)
        return [member for view in views if view is not None for member in view.members]

    def _number_of(self, worker: int) -> int:
        return next((member.number for member in self._known_members() if member.id == worker), -1)
