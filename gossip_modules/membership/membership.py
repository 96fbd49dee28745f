"""Membership: who is live; generations come and go while training goes on."""

from __future__ import annotations

import atexit
import logging
import math
import os
import random
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from ..transport.gloo import gloo_backend
from . import transfer
from .event_log import EventLog
from .heartbeats import Heartbeats
from .links import LinkTransport, connect_links
from .roster import MARGIN, Joiner, Member, Roster, View

_log = logging.getLogger(__name__)
_POLL, _BUSY_POLL = 0.1, 0.01  # seconds between two looks at the log; while a generation is being formed
_FORMING_SECONDS = 5.0  # after which those that have not come to form a generation are left out of it
_CONNECT_SECONDS = 10.0  # for those that have come
_MAX_STATES = 64  # times the model: what a donor may send
_RETIRE_SECONDS = 5.0  # that links of the generation before stay open, for ranks that are behind


class Participant(Protocol):
    """What a membership needs of the wrapper that trains."""

    def peers(self, rank: int, world_size: int) -> Iterable[int]:
        """The ranks that this one has links with, in any round."""

    def found(self) -> None:
        """Begin with the model of the first rank; all workers of the first generation call it."""

    def begin(self, growth: float) -> None:
        """Turn to the transport of the generation that trains now; called at a safe point, by the training thread.

        Args:
            growth: its number of members, by that of those who were in the one before.
        """

    def settle(self) -> None:
        """Apply what is in flight."""

    def give(self) -> Mapping[str, Any]:
        """Copies of everything that a worker needs to join; called at a safe point, by the training thread."""

    def take_back(self, state: Mapping[str, Any]) -> None:
        """What `give` gave has reached nobody."""

    @property
    def num_bytes(self) -> int:
        """Of the model."""

    def take(self, state: Mapping[str, Any]) -> None:
        """Go on from what `give` gave."""

    def advance(self, num_steps: int) -> None:
        """Count training steps that the others have taken since `give`."""

    @property
    def step(self) -> int:
        """The training step that comes next."""


@dataclass(frozen=True)
class Change:
    """A generation that has begun.

    Attributes:
        generation: its number.
        step: the first training step of its rounds.
        rank: of this worker, its position in the graph.
        members: the numbers of the workers, by rank.
        joined: the numbers of those that were not in the generation before.
        left: why each of those left that are in it no more, by number.
    """

    generation: int
    step: int
    rank: int
    members: tuple[int, ...]
    joined: tuple[int, ...]
    left: Mapping[int, str]


class Membership:
    """Who takes part in training: workers may die, come back, and be added, and nobody who lives waits for them.

    Give one to a wrapper. Its workers meet in a key-value store that outlives them, and need it only when somebody
    comes or goes; heartbeats and messages go from worker to worker. torch.distributed is not initialised.

    A worker whose connection closes, or that is silent for longer than its deadline, is left out of rounds at once:
    what would have travelled stays with who has it, so that nothing but what it held is lost. Meanwhile those who
    remain form the next generation, with a graph for as many as they are, and begin it at one training step.

    Each start of a process is a new worker. One that comes to a job that runs already gets model, optimizer and step
    from one of the others, its donor, beside the donor's training. A worker that was declared dead and wakes notices
    it and joins anew, by itself.

    Args:
        store: "host:port", where `python -m gossip_modules.membership.serve` runs, or a `torch.distributed.Store`.
        min_workers: how many workers the first generation has; whoever comes later joins.
        name: of the job, where several share a store.
        timeout: the limit of every wait, in seconds or as a timedelta. Only a worker whose process lives and whose
            training stands still is waited for so long.
        interval: seconds between two heartbeats.
        min_deadline: seconds of silence that are always allowed; more where heartbeats are irregular. A machine that
            runs more threads than it has cores may keep a thread waiting for some tenths of a second.
        on_partition: where workers cannot reach each other: "majority": the larger part forms a generation, the others
            train on without it and join again when they can; "both": each part forms one.
        host: the address at which others reach this process; None: that of the interface towards the store.

    Raises:
        ConnectionError: the store does not answer; names address and seconds.
        ValueError: arguments that do not fit.

    Example (each worker is a process of its own, started with the same command):
        >>> membership = Membership("node0:29400", min_workers=4)
        >>> model = GossipDataParallel(model, graph=RingGraph, membership=membership)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> membership.track(optimizer=optimizer)
        >>> for step in membership.steps(num_steps):
        ...     x, y = batch(step, membership.rank, membership.world_size)
        ...     loss = criterion(model(x), y)
        ...     optimizer.zero_grad()
        ...     loss.backward()
        ...     optimizer.step()
    """

    def __init__(
        self,
        store: dist.Store | str,
        *,
        min_workers: int,
        name: str = "job",
        timeout: timedelta | float = 60.0,
        interval: float = 0.05,
        min_deadline: float = 1.0,
        on_partition: str = "majority",
        host: str | None = None,
    ) -> None:
        if not isinstance(min_workers, int) or isinstance(min_workers, bool) or min_workers < 1:
            raise ValueError(f"got min_workers={min_workers!r}, expected a whole number of at least 1")
        if on_partition not in ("majority", "both"):
            raise ValueError(f"got on_partition={on_partition!r}, expected 'majority' or 'both'")
        if interval <= 0 or min_deadline < 2 * interval:
            raise ValueError(
                f"got interval={interval!r} and min_deadline={min_deadline!r}, expected seconds, the second at least "
                "twice the first"
            )
        self.min_workers = min_workers
        self.name = name
        self.timeout = timeout if isinstance(timeout, timedelta) else timedelta(seconds=timeout)
        self._log = EventLog(store, name=name, timeout=min(self.timeout, timedelta(seconds=10)))
        self._host = host or _own_address(self._log.address)
        self._heartbeat_options = {"interval": interval, "floor": min_deadline}
        self._on_partition = on_partition
        self._callbacks: list[Callable[[Change], None]] = []
        self._tracked: dict[str, Any] = {}
        self._participant: Participant | None = None
        self._description: dict[str, str] = {}
        self._lock = threading.RLock()
        self._moved = threading.Condition(self._lock)  # notified when the roster, or what is due, has changed
        self._closed = threading.Event()
        self._wake = threading.Event()  # the watcher has something to do
        self._watcher: threading.Thread | None = None
        self.num_joins = self.num_deaths = 0
        self._reset()

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
        self._serving: set[tuple[int, int]] = set()
        self._snapshots: list[Joiner] = []  # that the training thread is to take
        self._unclaimed: list[Mapping[str, Any]] = []  # what was given to workers that did not get it
        self._is_ahead = False  # whether `steps` has called `at_step` for the forward that comes
        self._hurried: set[int] = set()
        self._limit: int | None = None  # the step that is not begun before the next generation is known
        self._clock = -1  # calls of `at_step`, those of the job before this worker came included
        self._is_excluded = False
        self._has_joined = False
        self._is_newcomer = False
        self._heartbeats: Heartbeats | None = None

    # What users call.

    def track(self, **objects: Any) -> None:
        """Say what a worker that joins gets beside the model: objects with `state_dict` and `load_state_dict`.

        Args:
            objects: by name, the same on all workers: an optimizer, a learning rate scheduler, a sampler. Their states
                are tensors and plain values.

        Raises:
            TypeError: an object without these methods.
        """
        for name, value in objects.items():
            if not (hasattr(value, "state_dict") and hasattr(value, "load_state_dict")):
                raise TypeError(
                    f"got {name} of type {type(value).__name__}, expected an object with state_dict() and "
                    "load_state_dict(), like an optimizer"
                )
        self._tracked.update(objects)

    def join(self) -> int:
        """Begin; returns the training step that this worker goes on from, 0 at the start of the job.

        A worker that comes to a job that runs gets the state of training first, and returns when its generation
        begins. The first training forward calls it otherwise.

        Raises:
            TimeoutError: no donor, or no generation, within `timeout`.
        """
        self._check_attached()
        if not self._has_joined:
            if self._is_newcomer:
                self._enter()
            self._has_joined = True
        return self._participant.step  # type: ignore[union-attr]

    def steps(self, num_steps: int) -> Iterator[int]:
        """The training steps from the one that this worker comes to, up to `num_steps`: 0, 1, ... for a founder.

        A generation that is due begins before its first step is handed out, so `rank` and `world_size` are those of the
        round that comes. After a worker was declared dead and has joined again, steps go on from that of the others.

        Raises:
            RuntimeError: a step went by without a training forward.
            TimeoutError: see `join`.
        """
        self.join()
        assert self._participant is not None
        while (step := self._participant.step) < num_steps:
            self.at_step()
            self._is_ahead = True
            step = self._participant.step
            if step < num_steps:
                yield step
                if self._participant.step == step:
                    raise RuntimeError(
                        f"got no training forward in step {step}, expected one: each step is one round with the others"
                    )

    def on_change(self, callback: Callable[[Change], None]) -> None:
        """Call `callback` with every generation that begins, in the training thread, before its first round."""
        self._callbacks.append(callback)

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
    def lost(self) -> tuple[int, ...]:
        """The numbers of members that this worker has lost, and which the generation still counts."""
        transport = self._transport
        return () if transport is None else tuple(sorted(transport.names[i] for i in transport.lost))

    def stats(self) -> dict[str, float]:
        """generation, live (workers), joins and deaths since the start, deadline (largest of the peers', seconds)."""
        view, heartbeats = self._active, self._heartbeats
        deadlines = [] if view is None or heartbeats is None else [
            heartbeats.deadline(worker) for worker in view.ids if worker != self.id
        ]  # fmt: skip
        return {
            "generation": self.generation,
            "live": 0 if view is None else len(view.members) - len(self.lost),
            "joins": self.num_joins,
            "deaths": self.num_deaths,
            "deadline": max(deadlines, default=0.0),
        }

    def close(self) -> None:
        """Leave; the others go on. Idempotent."""
        if self._closed.is_set():
            return
        if self._participant is not None and not self._is_excluded:
            self._log.append({"event": "leave", "id": self.id, "why": "it left"})
        self._closed.set()
        self._wake.set()
        with self._moved:
            self._moved.notify_all()
        if self._watcher is not None and self._watcher is not threading.current_thread():
            self._watcher.join(1.0)
        self._release_all()

    def _release_all(self) -> None:
        if self._heartbeats is not None:
            self._heartbeats.close()
        with self._lock:
            transports = [*self._formed.values(), *(t for _, t in self._retired)]
            transports += [transport for _, transport in self._due]
            transports += [] if self._transport is None else [self._transport]
            self._formed, self._retired, self._due = {}, [], []
        for transport in {id(t): t for t in transports}.values():
            transport.close()

    # What the wrapper calls.

    def attach(self, participant: Participant, description: Mapping[str, str]) -> None:
        """Come to the job: on return the first generation is formed, or this worker waits at the door of another.

        Args:
            participant: who trains.
            description: what all workers must agree on, by name.

        Raises:
            ValueError: the job is another one; says in what. It goes on without this worker.
            TimeoutError: too few workers have come.
        """
        if self._participant is not None:
            raise ValueError(
                f"got membership of job {self.name!r} in a second wrapper, expected one for each; make another "
                "Membership with another name"
            )
        self._participant = participant
        self._description = dict(description)
        self._come()
        if not self._is_newcomer:
            self._switch(0)
            participant.found()

    @property
    def transport(self) -> LinkTransport:
        """Of the generation that trains."""
        assert self._transport is not None, "attach() or join() comes first"
        return self._transport

    @property
    def is_waiting_at_the_door(self) -> bool:
        """Whether this worker has no generation yet."""
        return self._active is None

    def at_step(self) -> Change | None:
        """At the safe point of a training step, before its round: what has changed, or None.

        Gives snapshots to workers that join, waits where [Note: first step] asks for it, and begins generations that
        are due. Called once for each training step, whose number is that of calls on all workers; by the forward,
        unless `steps` has called it.
        """
        if self._is_ahead:
            self._is_ahead = False
            return None
        with self._lock:
            clock = self._clock = self._clock + 1
            must_wait = self._limit is not None and clock >= self._limit
        if must_wait:
            self._wait_for_first_step(clock)
        if self._is_excluded:
            return self._rejoin()
        if self._due and self._due[0][0].start < clock:
            self._drop_late(clock)
        if self._unclaimed:
            self._take_back()
        if self._snapshots:
            self._take_snapshots()
        if self._due and self._due[0][0].start == clock:
            return self._switch(clock)
        return None

    # The training thread.

    def _check_attached(self) -> None:
        if self._participant is None:
            raise RuntimeError("got join() of a membership without a wrapper, expected it after the model was wrapped")
        if self._closed.is_set():
            raise RuntimeError("got join() of a membership that is closed, expected it before close(); make another")

    def _require_view(self) -> View:
        view = self._active
        if view is None:
            raise RuntimeError("this worker has no place in the job yet, expected join() before; wrap the model first")
        return view

    def _come(self) -> None:
        """Append "come", and wait until this worker is in the first generation or at the door."""
        heartbeats = Heartbeats(
            self.id, job=self.name, host=self._host, on_silent=self._silent, **self._heartbeat_options
        )
        self._heartbeats = heartbeats
        me = Member(self.id, host=socket.gethostname(), pid=os.getpid(), address=heartbeats.address)
        event = {
            "event": "come",
            "member": {"id": me.id, "number": -1, "host": me.host, "pid": me.pid, "address": list(me.address)},
            "description": self._description,
            "min_workers": self.min_workers,
        }
        self._unsent.append(event)
        if self._watcher is None:
            self._watcher = threading.Thread(
                target=_watch, args=(weakref.ref(self), self._wake, self._closed), name="gossip-membership", daemon=True
            )
            self._watcher.start()
            _live.add(self)

        def is_known() -> bool:
            return bool(self._due) or self.id in self._roster.joiners

        if not self._await(is_known):
            came = len(self._roster.founders)
            self.close()
            raise TimeoutError(
                f"job {self.name!r} did not begin within {self.timeout.total_seconds():g} s: got {came} workers, "
                f"expected min_workers={self.min_workers}; start the others, or ask for fewer"
                if self._log.is_connected
                else f"the store of job {self.name!r} at {self._log.address} did not answer within "
                f"{self.timeout.total_seconds():g} s"
            )
        self._is_newcomer = not self._due
        joiner = self._roster.joiners.get(self.id)
        if joiner is not None and joiner.refusal:
            self.close()
            raise ValueError(
                f"job {self.name!r} at {self._log.address} refused this worker, which differs from it: "
                f"{joiner.refusal}; start it with the model and the options of the job"
            )

    def _enter(self) -> None:
        """At the door: get the state from a donor, then wait for the first step."""
        assert self._participant is not None
        received = self._receive_state()
        if received is not None:
            attempt, state = received
            self._load(state)
            self._say({"event": "loaded", "id": self.id, "attempt": attempt})
        if not self._await(lambda: bool(self._due)):
            raise TimeoutError(
                f"job {self.name!r}: no generation with this worker began within {self.timeout.total_seconds():g} s; "
                "start it again"
            )
        with self._lock:
            start = self._due[0][0].start
            if received is not None:
                self._participant.advance(start - self._clock)
            self._clock = start - 1
        self._switch(start)
        if received is None:
            self._participant.found()

    def _receive_state(self) -> tuple[int, Mapping[str, Any]] | None:
        """What a donor gives, and the number of the attempt; None: it takes the place of a founder that has died."""
        assert self._participant is not None
        deadline = time.monotonic() + self.timeout.total_seconds()
        reason = "none has answered"
        while True:
            with self._lock:
                joiner, roster = self._roster.joiners.get(self.id), self._roster
                is_founder = any(v is not None and v.has(self.id) for v in (roster.view, roster.forming))
            if joiner is None and (self.id in roster.founders or is_founder):
                return None
            if joiner is None:
                raise ConnectionError(f"job {self.name!r} ended while this worker was joining it; start another one")
            if joiner.refusal:
                raise ConnectionError(
                    f"job {self.name!r}: this worker cannot join, since its donor cannot give the state of what it "
                    f"tracks: {joiner.refusal}"
                )
            name = f"give/{self.id}/{joiner.attempt}"
            try:
                if self._is_offered(name, joiner.attempt, deadline):
                    with self._log.lent_store(name) as store:
                        group = gloo_backend(store, 1, 2, _seconds(_CONNECT_SECONDS))
                    limit = _MAX_STATES * self._participant.num_bytes + (1 << 30)
                    return joiner.attempt, transfer.receive(group, timeout=self.timeout, max_bytes=limit)
            except (RuntimeError, ValueError, OSError) as error:
                reason = str(error)
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"job {self.name!r}: no donor has given the state of training within "
                    f"{self.timeout.total_seconds():g} s: {reason}; if all its workers have died, start the store "
                    "again, or give the job another name"
                )
            if self._attempt() == joiner.attempt:
                self._say({"event": "gave up", "id": self.id, "attempt": joiner.attempt, "by": self.id})
                self._await(lambda attempt=joiner.attempt: self._attempt() != attempt)  # type: ignore[misc]

    def _is_offered(self, name: str, attempt: int, deadline: float) -> bool:
        """Wait until the donor, which may be slow, is about to give; False: another one will, or it is too late."""
        while not self._log.has_arrived(name):
            if self._attempt() != attempt or self._closed.wait(_BUSY_POLL) or time.monotonic() > deadline:
                return False
        return True

    def _attempt(self) -> int:
        """The number of the donor that is to give; -1: none will."""
        joiner = self._roster.joiners.get(self.id)
        return -1 if joiner is None or joiner.refusal else joiner.attempt

    def _load(self, state: Mapping[str, Any]) -> None:
        assert self._participant is not None
        self._participant.take(state["model"])
        for name, value in state["tracked"].items():
            if name in self._tracked:
                self._tracked[name].load_state_dict(value)
        missing = sorted(set(self._tracked) - set(state["tracked"]))
        if missing:
            _log.warning("the donor tracks no %s: they start anew; track() the same names on all workers", missing)
        with self._lock:
            self._clock = int(state["clock"])

    def _take_snapshots(self) -> None:
        assert self._participant is not None
        with self._lock:
            joiners = [joiner for joiner in self._snapshots if self._roster.joiners.get(joiner.member.id) == joiner]
            self._snapshots = []
        for joiner in joiners:
            try:
                tracked = {name: _copied(value.state_dict()) for name, value in self._tracked.items()}
                transfer.encode(tracked)
            except Exception as error:  # noqa: BLE001 (of the user's objects: the joiner is told, training goes on)
                self._give_up(joiner, why=f"{type(error).__name__}: {error}")
                continue
            state = {"model": self._participant.give(), "tracked": tracked, "clock": self._clock}
            self._start_thread(self._serve, joiner, state, name="gossip-donor")

    def _give_up(self, joiner: Joiner, *, why: str = "") -> None:
        event = {"event": "gave up", "id": joiner.member.id, "attempt": joiner.attempt, "by": self.id}
        self._say({**event, "why": why} if why else event)

    def _start_thread(self, body: Callable[..., None], *arguments: Any, name: str) -> None:
        """A thread that connects with others, for which the exit of the interpreter waits; see `_close_all`."""
        thread = threading.Thread(target=body, args=arguments, name=name, daemon=True)
        _connecting.add(thread)
        thread.start()

    def _wait_for_first_step(self, clock: int) -> None:
        """[Note: first step] A generation cannot begin without the store: then rounds go on as they are."""
        deadline = time.monotonic() + self.timeout.total_seconds()
        with self._moved:
            while not (self._limit is None or self._limit > clock or self._is_excluded or self._closed.is_set()):
                self._moved.wait(_POLL)
                if not self._log.is_connected or time.monotonic() > deadline:
                    self._unsent = [event for event in self._unsent if event["event"] != "ready"]
                    self._limit = None

    def _drop_late(self, clock: int) -> None:
        """A generation began before this worker knew it, as the store was away: its members form another one."""
        with self._lock:
            late, self._due = self._due, []
            self._retired += [(time.monotonic(), transport) for _, transport in late]
        for view, _ in late:
            _log.warning("job %s: generation %d came too late, at step %d", self.name, view.generation, clock)
            self._say({"event": "again", "by": self.id, "generation": view.generation})

    def _await(self, condition: Callable[[], bool]) -> bool:
        """Wait until `condition`, which the watcher may make true, or the timeout; returns whether it is."""
        with self._moved:
            return self._moved.wait_for(lambda: condition() or self._closed.is_set(), self.timeout.total_seconds())

    def _switch(self, clock: int) -> Change:
        """Begin the latest generation that is due: one before it that would begin no sooner is left out by all."""
        with self._lock:
            count = sum(view.start <= clock for view, _ in self._due)
            before, (view, transport) = self._active, self._due[count - 1]
            growth = math.prod(len(v.members) / max(len(v.members) - v.num_joined, 1) for v, _ in self._due[:count])
            reasons = {number: why for other, _ in self._due[:count] for number, why in other.reasons.items()}
            old = [other for other in (self._transport, *(other for _, other in self._due[: count - 1])) if other]
            self._active, self._transport, self._due = view, transport, self._due[count:]
            self._has_joined = self._has_joined or not self._is_newcomer
            self._watch_peers()
        known = set() if before is None else {m.number for m in before.members}
        members = tuple(member.number for member in view.members)
        joined = tuple(number for number in members if number not in known)
        left = {number: reasons.get(number, "it left") for number in sorted(known - set(members))}
        change = Change(view.generation, view.start, view.ids.index(self.id), members, joined, left)
        if before is not None:
            self.num_joins += len(joined)
            self.num_deaths += len(left)
        assert self._participant is not None
        self._participant.begin(growth)  # also ends a round over the old links
        with self._lock:
            transport.num_bytes_sent += sum(other.num_bytes_sent for other in old)
            self._retired += [(time.monotonic() + _RETIRE_SECONDS, other) for other in old]
        self._tell(change, is_first=before is None)
        for callback in self._callbacks:
            callback(change)
        return change

    def _tell(self, change: Change, *, is_first: bool) -> None:
        who = [f"worker {n} left ({why})" for n, why in change.left.items()]
        if change.joined and not is_first:
            who.append(f"workers {list(change.joined)} joined")
        _log.log(
            logging.INFO if is_first else logging.WARNING,
            "job %s: generation %d from step %d with %d workers %s%s",
            self.name,
            change.generation,
            change.step,
            len(change.members),
            list(change.members),
            ": " + "; ".join(who) if who else "",
        )

    def _rejoin(self) -> Change:
        """This worker was declared dead, and lives: it drops what it has and joins as a new one."""
        _log.warning("job %s: this worker was left out of the job while it was silent, and joins again", self.name)
        assert self._participant is not None
        self._participant.settle()
        callbacks, joins, deaths = self._callbacks, self.num_joins, self.num_deaths
        self._release_all()
        with self._lock:
            self._reset()
            self._callbacks, self.num_joins, self.num_deaths = callbacks, joins, deaths
            self._log.rewind()
        self._come()
        if self._is_newcomer:
            self._enter()
        else:
            self._switch(0)
            self._participant.found()
        self._has_joined = True
        self._clock += 1  # of the step that goes on now
        view = self._require_view()
        members = tuple(member.number for member in view.members)
        return Change(view.generation, view.start, self.rank, members, (self.number,), {})

    # From other threads.

    def _silent(self, worker: int, seconds: float) -> None:
        """From the thread of heartbeats."""
        with self._lock:
            views = [(self._active, self._transport), *self._due]
            forming = self._roster.forming
        is_forming = forming is not None and forming.has(worker)
        if is_forming and not any(view is not None and view.has(worker) for view, _ in views):
            self._accuse(worker, f"it was silent for {seconds:.2f} s", is_sure=False)
        for view, transport in views:
            if view is not None and transport is not None and view.has(worker):
                transport.break_link(view.ids.index(worker))
                self._accuse(worker, f"it was silent for {seconds:.2f} s", is_sure=False)

    def _on_lost(self, view: View, rank: int, error: str, is_closed: bool) -> None:
        """From the thread that runs the round."""
        why = "its connection closed" if is_closed else f"it did not answer within {self.timeout.total_seconds():g} s"
        self._accuse(view.ids[rank], why, is_sure=is_closed)
        if self._heartbeats is not None:
            self._heartbeats.forget(view.ids[rank])

    def _accuse(self, worker: int, why: str, *, is_sure: bool) -> None:
        _log.warning("job %s: rounds go on without worker %s: %s", self.name, self._number_of(worker), why)
        self._say({"event": "accuse", "by": self.id, "of": worker, "why": why, "is_sure": is_sure})

    def _number_of(self, worker: int) -> int:
        for view in (self._active, self._roster.forming, self._roster.view):
            for member in () if view is None else view.members:
                if member.id == worker:
                    return member.number
        return -1

    def _say(self, event: Mapping[str, Any]) -> None:
        """Have the watcher append an event."""
        with self._lock:
            self._unsent.append(event)
        self._wake.set()

    def _serve(self, joiner: Joiner, state: Mapping[str, Any]) -> None:
        """A thread of its own: give the state to a worker that joins."""
        name = f"give/{joiner.member.id}/{joiner.attempt}"
        try:
            self._log.arrive(name)
            with self._log.lent_store(name) as store:
                group = gloo_backend(store, 0, 2, _seconds(_CONNECT_SECONDS))
            transfer.send(group, state, timeout=self.timeout)
        except (RuntimeError, OSError) as error:
            _log.warning("job %s: %s did not get the state of training: %s", self.name, joiner.member, error)
            with self._lock:
                self._unclaimed.append(state["model"])
            self._give_up(joiner)

    def _take_back(self) -> None:
        assert self._participant is not None
        with self._lock:
            unclaimed, self._unclaimed = self._unclaimed, []
        for state in unclaimed:
            self._participant.take_back(state)

    # The watcher.

    def _look(self) -> float:
        """One turn of the watcher; returns the seconds until the next."""
        if self._log.is_anew and self._roster.view is not None:
            self._log.restore(self._roster.dumps())
        with self._lock:
            unsent, self._unsent = self._unsent, []
        for i, event in enumerate(unsent):
            if not self._log.append(event):
                with self._lock:
                    self._unsent[:0] = unsent[i:]
                break
        has_answer = self._log.read(self._restart, self._apply)
        self._act()
        with self._lock:
            is_busy = self._roster.forming is not None or bool(self._unsent) or self._active is None
        return _BUSY_POLL if is_busy and has_answer else _POLL

    def _restart(self, snapshot: str) -> None:
        """The store has come back empty, with what all knew; what was being formed is formed anew."""
        with self._moved:
            self._roster.loads(snapshot)
            self._limit = None
            self._retired += [(time.monotonic(), transport) for transport in self._formed.values()]
            self._formed, self._forming_since = {}, {}
            view, transport = self._active, self._transport
            lost = [] if view is None or transport is None else [view.ids[rank] for rank in transport.lost]
            why = "it was lost while the store was away"
            self._unsent += [
                {"event": "accuse", "by": self.id, "of": worker, "why": why, "is_sure": False} for worker in lost
            ]

    def _apply(self, event: Mapping[str, Any]) -> None:
        with self._moved:
            self._roster.apply(event)
            self._moved.notify_all()

    def _act(self) -> None:
        """Do what the roster asks of this worker."""
        with self._moved:
            roster = self._roster
            forming, view = roster.forming, roster.view
            if forming is not None and forming.has(self.id) and forming.generation not in self._forming_since:
                self._forming_since[forming.generation] = time.monotonic()
                self._limit = None  # it was said for another one
                self._watch_peers()
                self._start_thread(self._form, forming, name="gossip-forming")
            if forming is not None and forming.generation in self._formed:
                self._hurry(forming)
            if view is not None and view.generation > self.generation:
                self._adopt(view)
            for joiner in roster.joiners.values():
                key = joiner.member.id, joiner.attempt
                if joiner.donor == self.id and not joiner.is_loaded and key not in self._serving:
                    self._serving.add(key)
                    self._snapshots.append(joiner)
            self._moved.notify_all()
            now = time.monotonic()
            old = [transport for until, transport in self._retired if until < now]
            self._retired = [(until, transport) for until, transport in self._retired if until >= now]
        for transport in old:
            transport.close()

    def _adopt(self, view: View) -> None:
        """The generation has formed: it is due, or goes on without this worker."""
        if not view.has(self.id):
            if self._active is not None:
                self._is_excluded = True
            return
        if self._due and self._due[-1][0].generation >= view.generation:
            return
        transport = self._formed.pop(view.generation, None)
        if transport is None:  # it was formed before this process had read so far
            return
        self._due.append((view, transport))
        self._limit = None
        for generation in [g for g in self._formed if g < view.generation]:
            self._retired.append((time.monotonic(), self._formed.pop(generation)))
        self._watch_peers()

    def _watch_peers(self) -> None:
        """Watch the peers of the generation that trains, and of those that are due."""
        assert self._participant is not None
        assert self._heartbeats is not None
        watched: dict[int, tuple[str, int]] = {}
        forming = self._roster.forming
        for view in (self._active, *(view for view, _ in self._due), forming):
            if view is not None and view.has(self.id):
                for rank in self._participant.peers(view.ids.index(self.id), len(view.members)):
                    member = view.members[rank]
                    watched[member.id] = member.address
        watched.pop(self.id, None)
        lost = set() if self._active is None or self._transport is None else {
            self._active.ids[rank] for rank in self._transport.lost
        }  # fmt: skip
        self._heartbeats.watch({worker: address for worker, address in watched.items() if worker not in lost})

    def _hurry(self, forming: View) -> None:
        """Leave out those that have not come to form a generation."""
        is_late = time.monotonic() - self._forming_since[forming.generation] > _FORMING_SECONDS + _CONNECT_SECONDS
        if is_late and forming.generation not in self._hurried:
            self._hurried.add(forming.generation)
            for worker in forming.ids:
                if worker not in self._roster.ready and worker != self.id:
                    self._unsent.append(
                        {
                            "event": "accuse",
                            "by": self.id,
                            "of": worker,
                            "why": f"it did not come to form generation {forming.generation}",
                            "is_sure": False,
                        }
                    )

    def _form(self, view: View) -> None:
        """A thread of its own: connect with the members of a generation, and say so."""
        assert self._participant is not None
        rank = view.ids.index(self.id)
        try:
            if not self._all_come(view):
                return
            transport = connect_links(
                lambda name: self._log.lent_store(f"links/{view.generation}/{name}"),
                rank,
                len(view.members),
                self._participant.peers(rank, len(view.members)),
                names=[member.number for member in view.members],
                timeout=self.timeout,
                patience=_seconds(_CONNECT_SECONDS),
                on_lost=lambda peer, error, is_closed: self._on_lost(view, peer, error, is_closed),
            )
        except (RuntimeError, OSError) as error:
            _log.warning("job %s: generation %d was not formed: %s", self.name, view.generation, error)
            self._say({"event": "again", "by": self.id, "generation": view.generation})
            return
        with self._moved:
            forming = self._roster.forming
            if forming is None or forming.generation != view.generation or self._closed.is_set():
                self._retired.append((time.monotonic(), transport))
                return
            self._formed[view.generation] = transport
            self._limit = self._clock + MARGIN if self._active is not None else 0
            self._unsent.append({"event": "ready", "id": self.id, "generation": view.generation, "step": self._limit})
        self._wake.set()

    def _all_come(self, view: View) -> bool:
        """Wait until all members are about to connect; False: another generation is formed instead.

        A thread that waits here can be left behind at the exit of the interpreter, one inside Gloo cannot.
        """
        self._log.arrive(f"{view.generation}/{self.id}")
        start, missing, are_accused = time.monotonic(), set(view.ids), False
        while missing := {worker for worker in missing if not self._log.has_arrived(f"{view.generation}/{worker}")}:
            forming = self._roster.forming
            if forming is None or forming.generation != view.generation or self._closed.wait(_BUSY_POLL):
                return False
            if not are_accused and time.monotonic() - start > _FORMING_SECONDS:
                are_accused = True
                for worker in sorted(missing):
                    self._accuse(worker, f"it did not come to form generation {view.generation}", is_sure=False)
        return True


_live: weakref.WeakSet[Membership] = weakref.WeakSet()
_connecting: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """A thread that comes back from C++ code after the interpreter has ended would abort the process."""
    for membership in list(_live):
        membership._closed.set()
        membership._wake.set()
        if membership._heartbeats is not None:
            membership._heartbeats.close()
        if membership._watcher is not None:
            membership._watcher.join(1.0)
    for thread in list(_connecting):
        thread.join(_CONNECT_SECONDS)


def _watch(reference: weakref.ref[Membership], wake: threading.Event, closed: threading.Event) -> None:
    """The watcher: reads the log, and does what it asks for; it ends with its membership."""
    while not closed.is_set():
        membership = reference()
        if membership is None:
            return
        try:
            seconds = membership._look()
        except Exception:  # noqa: BLE001 (without it, who comes and goes would go unnoticed)
            _log.exception("job %s: the watcher of the membership goes on after an error", membership.name)
            seconds = 1.0
        del membership
        wake.wait(seconds)
        wake.clear()


def _seconds(seconds: float) -> timedelta:
    return timedelta(seconds=seconds)


def _copied(state: Any) -> Any:
    """A state dict whose tensors training does not change."""
    if isinstance(state, torch.Tensor):
        return state.detach().clone()
    if isinstance(state, dict):
        return {key: _copied(value) for key, value in state.items()}
    if isinstance(state, (list, tuple)):
        copies = [_copied(value) for value in state]
        return copies if isinstance(state, list) else tuple(copies)
    return state


def _own_address(store: str) -> str:
    """The address of the interface towards the store; that of this machine where it is none of a network."""
    host, _, port = store.rpartition(":")
    if not port.isdigit():
        return "127.0.0.1"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, int(port)))
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])


__all__: Sequence[str] = ["Change", "Membership", "Participant"]
