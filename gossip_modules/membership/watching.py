"""Watching: the thread that reads the log of events, and does what it asks for."""

from __future__ import annotations

import atexit
import json
import math
import threading
import time
import weakref
from collections.abc import Mapping
from typing import Any

from ..transport import threads
from . import limits
from .events.roster import GARBAGE, Roster
from .generations import Generations
from .liveness.background_log import log
from .liveness.contact import digest
from .liveness.loop_error import hear_of_uncaught_errors
from .liveness.probe import LifeSign, probe

_VOID = ("come", "loaded", "gave up", "ready", "again")  # see [Note: coming again]


class Watching(Generations):
    """The part of `Membership` that its watcher runs.

    [Note: coming again] What restores a store that came back empty is the generation that trains: it says nothing of
    workers at the door, nor of those who wait for the first generation. So each of these comes again in every life of
    the store, and what it or its donor said before is void: who has the state of training gets it once more. Coming
    twice is coming once.
    """

    def _look(self) -> float:
        """One turn of the watcher; returns the seconds until the next."""
        if self._log.is_anew and self._roster.view is not None:
            self._log.restore(self._roster.dumps())
        if self._log.num_lives != self._store_life:
            self._come_again()
        with self._lock:
            unsent, self._unsent = self._unsent, []
        for i, event in enumerate(unsent):
            if not self._log.append(event):
                with self._lock:
                    self._unsent[:0] = unsent[i:]
                break
        has_answer = self._log.read(self._restart, self._apply)
        self._act()
        self._tidy()
        self._seek()
        with self._lock:
            is_busy = self._roster.forming is not None or bool(self._unsent) or self._active is None
        return limits.BUSY_POLL if is_busy and has_answer else limits.POLL

    def _tidy(self) -> None:
        """Delete from the store what nobody needs any more."""
        with self._lock:
            garbage, self._garbage = self._garbage, []
            self._serving &= {joiner.key for joiner in self._roster.joiners.values()}
            state = self._roster.dumps(is_whole=True) if self._log.is_long() else ""  # a rewind comes with the lock
        self._log.forget(*garbage)
        if state:
            self._log.cut(state)

    def _come_again(self) -> None:
        """The store is another one; see [Note: coming again]."""
        with self._moved:
            self._store_life = self._log.num_lives
            if self._active is not None or self._due or not self._coming:
                return
            self._unsent = [event for event in self._unsent if event["event"] not in _VOID] + [self._coming]
            self._is_coming_again = True
            if self._roster.view is None:
                self._roster = Roster(on_partition=self._on_partition)
                self._form_anew()
            self._moved.notify_all()

    def _has_place(self) -> bool:
        """Whether the job counts with this worker, in a generation or at the door, as far as the log was read."""
        roster = self._roster
        is_waiting = self.id in roster.joiners or self.id in roster.founders
        return is_waiting or any(member.id == self.id for member in roster.present())

    def _form_anew(self) -> None:
        """What was being formed over a store that has gone is closed."""
        self._limit, self._asked_again = None, 0
        self._retired += [(time.monotonic(), transport) for transport in self._formed.values()]
        self._formed, self._forming_since = {}, {}

    def _settle_given(self) -> None:
        """Under the lock: take back what went to workers that will not bring it; see [Note: what was given].

        [Note: what was given] A donor keeps in mind what it has given away, such as a half of its push-sum weight,
        until the log says that the worker is in a generation. A worker that dies before, or gets another state from
        another donor, brings nothing: then the donor takes it back, and no weight is lost.
        """
        roster = self._roster
        for key, (until, state) in list(self._given.items()):
            has_come = roster.view is not None and roster.view.has(key[0])
            joiner = roster.joiners.get(key[0])
            may_come = joiner is not None and joiner.key == key and not joiner.refusal
            may_come = may_come and (joiner.is_loaded or time.monotonic() < until)  # type: ignore[union-attr]
            if has_come or not may_come:
                del self._given[key]
                self._unclaimed += [] if has_come else [state]

    def _restart(self, state: str, num_events: int) -> None:
        """Begin with a base of the log; where the store has come back empty, what was being formed is formed anew."""
        with self._moved:
            mine, view = self._roster.dumps(), self._roster.view
            try:
                self._roster.loads(state)
            except GARBAGE as error:
                log.warning("job %s: the store begins with what is no state of a job (%r): ignored", self.name, error)
                return
            self._settle_given()
            self._is_coming_again = self._is_coming_again and not self._has_place()
            if num_events:
                return
            if view is not None and view.generation > self._roster.loaded:  # [Note: stale snapshot]
                self._known = view.generation
                self._say({"event": "know", "state": json.loads(mine)})
            restored = self._roster.view
            if restored is not None and restored.generation > self.generation:
                self._adopt(restored)  # all were ready when the store went, as who restored it had read
            self._form_anew()
            self._serving, self._snapshots = set(), []  # who comes again is served again
            view, transport = self._active, self._transport
            lost = [] if view is None or transport is None else [view.ids[rank] for rank in transport.lost]
            for worker in lost:
                self._accuse(worker, "it was lost while the store was away", may_have_ended=True)

    def _apply(self, event: Mapping[str, Any]) -> None:
        with self._moved:
            before = self._num_awaited()
            self._roster.apply(event)
            if self._num_awaited() > max(before, self._coming.get("min_workers", 0)):
                self._warn_of_more_founders()
            self._is_coming_again = self._is_coming_again and event != self._coming
            self._settle_given()
            self._moved.notify_all()

    def _num_awaited(self) -> int:
        """How many workers the first generation is to have, if this one waits for it."""
        return self._roster.num_founders if self.id in self._roster.founders else 0

    def _warn_of_more_founders(self) -> None:
        log.warning(
            "job %s: got min_workers=%d, and %d of another worker: the first generation has so many; give all the same",
            self.name,
            self._coming["min_workers"],
            self._roster.num_founders,
        )

    def _act(self) -> None:
        """Do what the roster asks of this worker."""
        with self._moved:
            roster = self._roster
            self._settle_given()
            forming, view = roster.forming, roster.view
            if forming is not None and forming.has(self.id) and forming.generation not in self._forming_since:
                self._forming_since[forming.generation] = time.monotonic()
                self._limit = None  # it was said for another one
                self._watch_peers()
                self._warn_of_loopback(forming)
                threads.start(self._form, forming, name="gossip-forming")
            if forming is not None and forming.generation in self._formed:
                self._hurry(forming)
            if view is not None and view.generation > self.generation:
                self._adopt(view)
            for joiner in roster.joiners.values():
                if joiner.donor == self.id and not joiner.is_loaded and joiner.key not in self._serving:
                    self._serving.add(joiner.key)
                    self._snapshots.append(joiner)
            if roster.num_knocks != self._num_heard and any(self.id == member.id for member in roster.present()):
                self._unsent.append({"event": "here", "id": self.id})
            self._num_heard = roster.num_knocks
            self._moved.notify_all()
            receiving = self._receiving  # which the training thread ends without the lock
            if receiving is not None and (self.is_leaving or receiving[0] != self._attempt()):
                receiving[1].close()
            now = time.monotonic()
            old = [transport for until, transport in self._retired if until < now]
            self._retired = [(until, transport) for until, transport in self._retired if until >= now]
        for transport in old:
            transport.close()
        self._break_with_those_who_left()
        self._ascertain(now)

    def _ascertain(self, now: float) -> None:
        """Once a second, ask whether those have ended who are accused, and of whom that is not known.

        Where too few remain to go on without them, who was stopped or cut off counts as long as it may live.
        """
        with self._lock:
            accusations = self._roster.accusations
            sure = {accusation.of for accusation in accusations if accusation.is_sure}
            doubted = {accusation.of: accusation.why for accusation in accusations if accusation.of not in sure}
            is_member = any(member.id == self.id for member in self._roster.present())
            if not (doubted and is_member) or self._is_excluded:
                self._next_doubt = math.inf
                return
            self._next_doubt = min(self._next_doubt, now + limits.RETRY)
            if now < self._next_doubt:
                return
            self._next_doubt = now + limits.RETRY
        for worker, why in doubted.items():
            if worker != self.id:
                threads.start(self._accuse_if_ended, worker, why, True, name="gossip-accuse")

    def _seek(self) -> None:
        """Left out of the job: is there anybody to join again? Until then this worker trains on by itself."""
        now = time.monotonic()
        if not self._is_excluded or self._can_rejoin or now < self._next_probe:
            return
        with self._lock:
            view, beats = self._roster.view, self._heartbeats
        self._next_probe = now + limits.RETRY
        contacts = {} if view is None else {member.id: member.contact for member in view.members}
        has_met = self._has_met or (beats is not None and beats.has_met)  # else no listener may be in anybody's reach
        signs = probe(contacts, job=digest(self.name), seconds=limits.PROBE)
        self._can_rejoin = LifeSign.LIVES in signs.values() or (bool(signs) and not has_met)
        if not (self._can_rejoin or self._is_cut_off):
            self._is_cut_off = True
            log.warning(
                "job %s: the others go on without this worker, which reaches none of them: it trains on without them, "
                "and joins again when it reaches one",
                self.name,
            )

    def close(self) -> None:
        """Leave; the others go on. Idempotent."""
        if self._closed.is_set():
            return
        acts = self.siblings is None or self.siblings.leads
        if acts and self._participant is not None and not self._is_excluded:
            has_left = self._log.append({"event": "leave", "id": self.id, "why": "it left"})
            if self._heartbeats is not None:
                self._heartbeats.has_said_farewell = has_left
        self._closed.set()
        self._wake.set()
        with self._moved:
            self._moved.notify_all()
        if self._watcher is not None and self._watcher is not threading.current_thread():
            self._watcher.join(1.0)
        self._release_all()

    def _end_liveness(self) -> None:
        """The others are to go on at once, and not when this process has ended: an error has ended the training.

        [Note: errors that end a loop] A process may take seconds to end after an error: a script cleans up, threads are
        joined, and a program that runs out of memory is slow. So the lifelines of the worker close as soon as the error
        leaves the loop over `steps`, or when nothing catches it. A script that catches the error and trains on joins
        again, as a new worker does. A worker that is alone holds nobody up.
        """
        view, beats = self._active, self._heartbeats
        is_alone = view is not None and len(view.members) == 1
        if self._closed.is_set() or self._has_stopped or beats is None or is_alone:
            return
        self._has_stopped = True
        log.warning("job %s: an error ended the training of this worker, and the others go on without it", self.name)
        beats.close()

    def _start_watching(self) -> None:
        hear_of_uncaught_errors(_end_liveness_in)
        if self._watcher is None:
            reference = weakref.ref(self)
            self._watcher = threads.start(_watch, reference, self._wake, self._closed, name="gossip-membership")
            _live.add(self)


_live: weakref.WeakSet[Watching] = weakref.WeakSet()


def _end_liveness_in(thread: int | None) -> None:
    """See [Note: errors that end a loop]; thread: that the error has ended; None: the process ends."""
    for membership in list(_live):
        if thread in (None, membership._thread):
            membership._end_liveness()


@atexit.register
def _close_all() -> None:
    """End all waits before the exit of the interpreter joins the threads: see [Note: threads at exit]."""
    for membership in list(_live):
        membership._closed.set()
        membership._wake.set()
        if membership._heartbeats is not None:
            membership._heartbeats.close()
        with membership._lock:
            transports = membership._transports()
        for transport in transports:  # an interrupt leaves waits under way, of which no thread is to come back later
            transport.end_waits()


def _watch(reference: weakref.ref[Watching], wake: threading.Event, closed: threading.Event) -> None:
    """The watcher: reads the log, and does what it asks for; it ends with its membership."""
    while not closed.is_set():
        membership = reference()
        if membership is None:
            return
        try:
            seconds = membership._look()
        except Exception:  # noqa: BLE001 (without it, who comes and goes would go unnoticed)
            log.exception("job %s: the watcher of the membership goes on after an error", membership.name)
            seconds = 1.0
        del membership
        wake.wait(seconds)
        wake.clear()
