"""Joining: how a worker comes to a job, and takes the state of training that a donor gives."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import asdict
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ..transport.deadline import Deadline
from ..transport.gloo import gloo_backend
from ..transport.threads import Waits
from . import limits
from .donor import transfer
from .donor.giving import Giving, name_of
from .heartbeats import Heartbeats
from .links import alone
from .liveness.background_log import log
from .liveness.door import JobFullError as JobFullError
from .participant import Change
from .view import Joiner, Member, View

_MAX_STATES = 64  # times the model: what a donor may send


class Joining(Giving):
    """The part of `Membership` for workers that come."""

    min_workers: int

    def _come(self, deadline: Deadline | None = None) -> None:
        """Append "come", and wait until this worker is in the first generation or at the door.

        Args:
            deadline: of all waits; None: where a worker has just started, each life of the job has a deadline of its
                own, and so has the silence of the members of a former life.
        """
        heartbeats = Heartbeats(
            self.id,
            job=self.name,
            host=self._host,
            on_silent=self._silent,
            on_ended=self._ended,
            **self._heartbeat_options,
        )
        self._heartbeats = heartbeats
        member = json.loads(json.dumps(asdict(self._myself(heartbeats))))  # as it is read from the log
        event = {
            "event": "come",
            "member": member,
            "description": self._description,
            "min_workers": self.min_workers,
        }
        with self._lock:
            self._coming, self._store_life = event, self._log.num_lives
            self._unsent.append(event)
        self._start_watching()
        while True:
            has_place = self._await(
                lambda: bool(self._due) or self.id in self._roster.joiners, deadline or Deadline(self.timeout)
            )
            if not has_place:
                if self.is_leaving and not self._closed.is_set():
                    break  # as one that waits at the door, where `steps` ends
                raise self._nobody_came()
            if self._due or not self._is_abandoned(deadline or Deadline(2 * self.timeout)):
                break
            self._begin_anew(deadline or Deadline(self.timeout))
        self._is_newcomer = not self._due
        self._raise_if_refused()

    def _myself(self, heartbeats: Heartbeats, number: int = -1) -> Member:
        contact = heartbeats.contact
        return Member(self.id, number, socket.gethostname(), os.getpid(), contact.address, contact.secret.hex())

    def _nobody_came(self) -> Exception:
        if self._closed.is_set():
            return RuntimeError(f"job {self.name!r}: the membership was closed before the job began; make another one")
        seconds = f"{self.timeout.total_seconds():g} s"
        if not self._log.is_connected:
            where = f"the store of job {self.name!r} at {self._log.address}"
            return TimeoutError(f"{where} did not answer within {seconds}")
        with self._lock:
            num_founders = len(self._roster.founders)
            num_awaited = max(self._num_awaited(), self._coming["min_workers"])
        why = self._what_is_late() or (
            f"got {num_founders} workers, expected min_workers={num_awaited}; start the others, or ask for fewer"
        )
        return TimeoutError(f"job {self.name!r} did not begin within {seconds}: {why}")

    def _what_is_late(self) -> str:
        """What holds up the generation that this worker is to begin, for errors; "" where none is being formed."""
        with self._lock:
            roster, me = self._roster, self.id
            view = roster.forming or roster.view
            late = [] if view is None else [member for member in view.members if member.id not in roster.ready]
        if view is None or not view.has(me):
            return ""
        if roster.forming is None:  # all have said that they are ready
            return f"all {len(view.members)} workers have connected, but this one has lost its links; start all again"
        names = [f"{member}, this worker," if member.id == me else str(member) for member in late]
        return (
            f"all {len(view.members)} workers have come, but {' and '.join(names)} did not connect with the others in "
            "time; see that no worker is stopped, that the machines reach each other, and that timeout= is long enough"
        )

    def _enter(self, deadline: Deadline) -> None:
        """At the door: get the state from a donor, then wait for the first step; all that until the deadline.

        [Note: left out at the door] A worker that was stopped, or out of reach, while the generation formed that it was
        to begin is left out of it, and nobody waits for it any more: it comes again, as one that the job does not know.
        """
        assert self._participant is not None
        has_state = False
        while not self._due:
            received = self._receive_state(deadline)
            if received is not None:
                attempt, state = received
                self._load(state)
                self._say_loaded(attempt)
            with self._lock:
                view = self._roster.view  # which a store that came back may have with what was received before
                has_state = received is not None or (has_state and view is not None and view.has(self.id))
            if not self._await(
                lambda: bool(self._due) or self._store_life != self._asked_life or self._is_left_out(), deadline
            ):
                self._raise_if_over()
                why = self._what_is_late() or "none was formed; start it again"
                raise TimeoutError(
                    f"job {self.name!r}: no generation with this worker began within {deadline.seconds:g} s: {why}"
                )
            with self._lock:
                is_left_out = self._is_left_out()
            if is_left_out:
                self._come_once_more(deadline)
        with self._lock:
            start = self._first_step(self._due[0][0])
            if has_state:
                self._participant.advance(start - self._clock)
            self._clock = start - 1
        self._switch(start)
        if not has_state:
            self._found(deadline)

    def _found(self, deadline: Deadline) -> None:
        """Take the model of the first worker, in a generation that has just begun."""
        assert self._participant is not None
        with self.transport.within(deadline):
            self._participant.found()

    def _is_left_out(self) -> bool:
        return not (self._due or self._is_coming_again or self._has_place())

    def _come_once_more(self, deadline: Deadline) -> None:
        """See [Note: left out at the door].

        Raises:
            TimeoutError: it was left out again and again until the deadline.
        """
        if deadline.is_over:
            raise TimeoutError(
                f"job {self.name!r}: the others left this worker out of each generation that it was to begin, for "
                f"{deadline.seconds:g} s; see that they reach it at {self._host}, or pass host="
            )
        log.warning("job %s: the others left this worker out before it began, and it comes again", self.name)
        with self._lock:
            self._is_coming_again = True
            self._say(self._coming)

    def _come_back(self, deadline: Deadline) -> None:
        """Come once more, if the job goes on without this worker; see [Note: left out at the door]."""
        with self._lock:
            is_over = self._roster.view is None and self._roster.forming is None
        if is_over:
            raise ConnectionError(f"job {self.name!r} ended while this worker was joining it; start another one")
        self._come_once_more(deadline)

    def _say_loaded(self, attempt: int) -> None:
        """But not of a life of the store that is over; see [Note: coming again]."""
        with self._lock:
            if self._store_life == self._asked_life:
                self._say({"event": "loaded", "id": self.id, "attempt": attempt})

    def _receive_state(self, deadline: Deadline) -> tuple[int, Mapping[str, Any]] | None:
        """What a donor gives, and the number of the attempt; None: it takes the place of a founder that has died."""
        assert self._participant is not None
        reason = "none has answered"
        while True:
            self._raise_if_over()
            with self._lock:
                is_old = self._is_coming_again  # what is known is of a life of the store that is over
                joiner, roster = self._roster.joiners.get(self.id), self._roster
                life = self._asked_life = self._store_life
                is_founder = any(v is not None and v.has(self.id) for v in (roster.view, roster.forming))
            if is_old and self._await(lambda: not self._is_coming_again, deadline):
                continue
            if joiner is None and (self.id in roster.founders or is_founder):
                return None
            if joiner is None:
                self._come_back(deadline)
                continue
            self._raise_if_it_cannot_join(joiner)
            name = name_of(joiner)
            try:
                if self._is_offered(name, joiner.attempt, deadline):
                    return joiner.attempt, self._receive(self._meet_donor(name, deadline), joiner.attempt, deadline)
            except (RuntimeError, ValueError, OSError) as error:
                reason = str(error)
            if deadline.is_over:
                raise TimeoutError(
                    f"job {self.name!r}: no donor has given the state of training within "
                    f"{deadline.seconds:g} s, while its workers live: {reason}; start this one again"
                )
            if self._attempt() == joiner.attempt:
                self._say({"event": "gave up", "id": self.id, "attempt": joiner.attempt, "by": self.id})
                before = joiner.attempt, life
                self._await(lambda before=before: (self._attempt(), self._store_life) != before, deadline)  # type: ignore[misc]

    def _meet_donor(self, name: str, deadline: Deadline) -> dist.ProcessGroup:
        patience = min(timedelta(seconds=limits.CONNECT), deadline.left_for_gloo)
        with self._log.lent_store(name, limit=patience) as store:
            group: dist.ProcessGroup = gloo_backend(store, 1, 2, patience, host=self._link_host)
        return group

    def _raise_if_it_cannot_join(self, joiner: Joiner) -> None:
        if joiner.donor < 0:
            self._raise_if_refused()
        if joiner.refusal:
            raise ConnectionError(
                f"job {self.name!r}: this worker cannot join, since its donor cannot give the state of "
                f"training: {joiner.refusal}"
            )

    def _receive(self, group: dist.ProcessGroup, attempt: int, deadline: Deadline) -> Mapping[str, Any]:
        """What the donor sends; a RuntimeError where another one is to, as it has died in the middle.

        A large model may come for longer than the deadline allows to wait: each piece that has come extends it.
        """
        assert self._participant is not None
        limit = _MAX_STATES * self._participant.num_bytes + (1 << 30)
        with self._lock:
            waits = Waits()
            self._receiving = attempt, waits
        self._wake.set()
        try:
            state: Mapping[str, Any] = transfer.receive(group, deadline=deadline, max_bytes=limit, waits=waits)
        finally:
            waits.close()
            self._receiving = None
        return state

    def _is_offered(self, name: str, attempt: int, deadline: Deadline) -> bool:
        """Wait until the donor, which may be slow, is about to give; False: another one will, or it is too late."""
        asked = time.monotonic()
        while not self._log.has_arrived(name, limit=deadline.left_for_gloo):
            if self._attempt() != attempt or self.is_leaving or self._closed.wait(limits.BUSY_POLL) or deadline.is_over:
                return False
            if time.monotonic() - asked > limits.KNOCK:
                if self._is_abandoned(deadline):
                    self._begin_anew(deadline)
                asked = time.monotonic()
        return True

    def _load(self, state: Mapping[str, Any]) -> None:
        assert self._participant is not None
        self._participant.take(state["model"])
        for name, value in state["tracked"].items():
            if name in self._tracked:
                self._tracked[name].load_state_dict(value)
        missing = sorted(set(self._tracked) - set(state["tracked"]))
        if missing:
            log.warning("the donor tracks no %s: they start anew; track() the same names on all workers", missing)
        with self._lock:
            self._clock = int(state["clock"])

    def _rejoin(self, deadline: Deadline) -> Change:
        """This worker was declared dead, and lives: it drops what it has and joins as a new one.

        Training stands still meanwhile, so all waits have one deadline; where that passes, the worker trains on alone
        for as long as it has waited, and tries again.
        """
        was, has_stopped = self.id, self._has_stopped
        why = "was left out of the job while it was silent" if not has_stopped else "trains on after an error"
        log.warning("job %s: this worker %s, and joins again", self.name, why)
        assert self._participant is not None
        self._settle(self._participant.settle)
        before, number, clock = self._require_view(), self.number, self._clock
        self._has_met = self._has_met or (self._heartbeats is not None and self._heartbeats.has_met)
        self._release_all()
        with self._lock:
            self._reset()
            if has_stopped:
                self._unsent.append({"event": "leave", "id": was, "why": "an error ended its training"})
            self._log.rewind()
        try:
            self._come(deadline)
            if self._is_newcomer:
                self._enter(deadline)
            else:
                self._switch(0)
                self._found(deadline)
        except (TimeoutError, ConnectionError) as error:
            if self._closed.is_set():
                raise
            return self._go_on_alone(before, number, clock, error, deadline.passed)
        self._has_joined = True
        self._clock += 1  # of the step that goes on now
        view = self._require_view()
        members = tuple(member.number for member in view.members)
        return Change(view.generation, view.start, self.rank, members, (self.number,), {})

    def _go_on_alone(self, before: View, number: int, clock: int, error: Exception, seconds: float) -> Change:
        """Joining again has failed, which took so many seconds: train as a world of one, until somebody is reached."""
        log.warning(
            "job %s: this worker trains on alone, and tries again, since it could not join: %s", self.name, error
        )
        assert self._participant is not None
        assert self._heartbeats is not None
        self._say({"event": "leave", "id": self.id, "why": "it could not join"})
        with self._lock:
            generation = max(before.generation, self._roster.last_generation)
            me = self._myself(self._heartbeats, number)
            self._active = View(generation, (me,), start=clock, turns=before.turns_before(clock))
            self._transport = alone(self.timeout)
            self._is_excluded = self._is_cut_off = self._has_joined = True
            self._next_probe = time.monotonic() + max(limits.KNOCK, seconds)
            self._retired += [(time.monotonic(), transport) for _, transport in self._due]
            self._due, self._limit, self._clock = [], None, clock
        self._participant.begin(1.0)
        change = Change(generation, clock + self._steps_before, 0, (number,), (), {})
        self._callbacks.untold.append(change)
        return change
