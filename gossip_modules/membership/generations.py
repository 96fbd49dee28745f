"""Generations: how one begins, and how the next is formed."""

from __future__ import annotations

import logging
import math
import time
from datetime import timedelta

from ..transport.deadline import Deadline
from . import limits
from .events.roster import MARGIN
from .links import connect_links
from .liveness.background_log import log
from .liveness.contact import Contact
from .participant import Change
from .view import View
from .worker_state import WorkerState


class Generations(WorkerState):
    """The part of `Membership` that forms generations, begins them, and notices who is lost.

    [Note: first step] A worker that has connected with the members of the next generation names a step that it does not
    begin before it knows the generation's first one: that is the largest step that any of them has named. So all begin
    at the same step, and only who has come to its own before the others have spoken waits.

    [Note: paces] Workers that are not in lockstep name no step: each begins a generation at its own next one. Who comes
    to that first waits for nobody, and closes its links of the generation before some time later; to those who still
    train in that one, this says nothing of whether it lives.
    """

    def _first_step(self, view: View) -> int:
        """The step of this worker with which a generation begins; see [Note: paces]."""
        assert self._participant is not None
        return view.start if self._participant.is_in_lockstep else max(self._clock, 0)

    def _next_is(self, clock: int) -> None:
        """Note which step of the clock the training step is that comes next; see [Note: clock] of `Turns`."""
        assert self._participant is not None
        self._steps_before = self._participant.step - clock

    def _wait_for_first_step(self, clock: int, deadline: Deadline) -> None:
        """[Note: first step] A generation cannot begin without the store: then rounds go on as they are."""
        with self._moved:
            while not (self._limit is None or self._limit > clock or self._is_excluded or self._closed.is_set()):
                self._moved.wait(limits.POLL)
                if not self._log.is_connected or deadline.is_over:
                    self._unsent = [event for event in self._unsent if event["event"] != "ready"]
                    self._limit = None

    def _drop_late(self, clock: int) -> None:
        """A generation began before this worker knew it, as the store was away: its members form another one."""
        with self._lock:
            late, self._due = self._due, []
            self._retired += [(time.monotonic(), transport) for _, transport in late]
        for view, _ in late:
            log.warning("job %s: generation %d came too late, at step %d", self.name, view.generation, clock)
            self._say({"event": "again", "by": self.id, "generation": view.generation})

    def _skip_to(self, start: int) -> int:
        """Leave out the training steps up to the first one of a generation; returns that."""
        assert self._participant is not None
        with self._lock:
            num_steps, self._clock = start - self._clock, start
        self._participant.advance(num_steps)
        return start

    def _switch(self, clock: int) -> Change:
        """Begin the latest generation that is due: one before it that would begin no sooner is left out by all."""
        self._next_is(clock)
        with self._lock:
            count = sum(view.start <= clock for view, _ in self._due)
            before, (view, transport) = self._active, self._due[count - 1]
            growth = math.prod(other.growth for other, _ in self._due[:count])
            reasons = {number: why for other, _ in self._due[:count] for number, why in other.reasons.items()}
            old = [other for other in (self._transport, *(other for _, other in self._due[: count - 1])) if other]
            self._active, self._transport, self._due = view, transport, self._due[count:]
            self._has_joined = self._has_joined or not self._is_newcomer
            self._watch_peers()
        known = set() if before is None else {m.number for m in before.members}
        members = tuple(member.number for member in view.members)
        joined = tuple(number for number in members if number not in known)
        left = {number: reasons.get(number, "it left") for number in sorted(known - set(members))}
        start = self._first_step(view) + self._steps_before
        change = Change(view.generation, start, view.ids.index(self.id), members, joined, left)
        if before is not None:
            self.num_joins += len(joined)
            self.num_deaths += len(left)
        assert self._participant is not None
        self._participant.begin(growth)  # also ends a round over the old links
        with self._lock:
            transport.num_bytes_sent += sum(other.num_bytes_sent for other in old)
            self._retired += [(time.monotonic() + limits.RETIRE, other) for other in old]
        self._tell(change, is_first=before is None)
        self._callbacks.untold.append(change)
        return change

    def _tell(self, change: Change, *, is_first: bool) -> None:
        who = [f"worker {n} left ({why})" for n, why in change.left.items()]
        if change.joined and not is_first:
            who.append(f"workers {list(change.joined)} joined")
        log.log(
            logging.INFO if is_first else logging.WARNING,
            "job %s: generation %d from step %d with %d workers %s%s",
            self.name,
            change.generation,
            change.step,
            len(change.members),
            list(change.members),
            ": " + "; ".join(who) if who else "",
        )

    def _adopt(self, view: View) -> None:
        """The generation has formed: it is due, or goes on without this worker."""
        if not view.has(self.id):
            if self._active is not None and self._roster.loaded >= self._known:  # [Note: stale snapshot]
                self._is_excluded = True
            return
        if self._due and self._due[-1][0].generation >= view.generation:
            return
        transport = self._formed.pop(view.generation, None)
        if transport is None:  # its links were made over a store that has gone, or it came too late
            if view.generation > self._asked_again:
                self._asked_again = view.generation
                self._say({"event": "again", "by": self.id, "generation": view.generation})
            return
        self._due.append((view, transport))
        self._limit = None
        self._garbage += self._keys_of(view)
        self._forming_since = {g: since for g, since in self._forming_since.items() if g > view.generation}
        self._hurried = {g for g in self._hurried if g > view.generation}
        for generation in [g for g in self._formed if g < view.generation]:
            self._retired.append((time.monotonic(), self._formed.pop(generation)))
        self._watch_peers()

    def _keys_of(self, view: View) -> list[str]:
        """What this worker has put into the store to form a generation."""
        assert self._participant is not None
        rank = view.ids.index(self.id)
        peers = set(self._participant.links(rank, len(view.members))) - {rank}
        pairs = [f"links/{view.generation}/{min(rank, peer)}-{max(rank, peer)}/0" for peer in sorted(peers)]
        ends = [f"{pair}/{end}" for pair in pairs for end in (0, 1)]
        return [f"arrived/{view.generation}/{self.id}", f"links/{view.generation}/all/0/{rank}", *ends]

    def _break_with_those_who_left(self) -> None:
        """Wait for nobody who is not in the generation that is due; also where it is no peer, in a collective."""
        with self._lock:
            view, transport, due = self._active, self._transport, self._due[-1:]
        if view is not None and transport is not None and due:
            for rank, worker in enumerate(view.ids):
                if not due[0][0].has(worker) and rank not in transport.lost:
                    transport.break_link(rank)

    def _watch_peers(self) -> None:
        """Watch the peers of the generation that trains, and of those that are due."""
        assert self._participant is not None
        assert self._heartbeats is not None
        watched: dict[int, Contact] = {}
        forming = self._roster.forming
        for view in (self._active, *(view for view, _ in self._due), forming):
            if view is not None and view.has(self.id):
                for rank in self._participant.peers(view.ids.index(self.id), len(view.members)):
                    member = view.members[rank]
                    watched[member.id] = member.contact
        watched.pop(self.id, None)
        lost = set() if self._active is None or self._transport is None else {
            self._active.ids[rank] for rank in self._transport.lost
        }  # fmt: skip
        self._heartbeats.watch({worker: contact for worker, contact in watched.items() if worker not in lost})

    def _hurry(self, forming: View) -> None:
        """Leave out those that have not come to form a generation."""
        is_late = time.monotonic() - self._forming_since[forming.generation] > limits.FORMING + limits.CONNECT
        if is_late and forming.generation not in self._hurried:
            self._hurried.add(forming.generation)
            for worker in forming.ids:
                if worker not in self._roster.ready and worker != self.id:
                    self._accuse_absent(worker, forming)

    def _form(self, view: View) -> None:
        """A thread of its own: connect with the members of a generation, and say so."""
        assert self._participant is not None
        rank = view.ids.index(self.id)
        try:
            if not self._all_come(view):
                return
            transport = connect_links(
                lambda name: self._log.lent_store(
                    f"links/{view.generation}/{name}", is_void=lambda: self._is_given_up(view)
                ),
                rank,
                len(view.members),
                self._participant.links(rank, len(view.members)),
                names=[member.number for member in view.members],
                timeout=self.timeout,
                patience=timedelta(seconds=limits.CONNECT),
                on_lost=lambda peer, error, is_closed: self._on_lost(view, peer, error, is_closed),
                host=self._link_host,
            )
        except (RuntimeError, OSError) as error:
            if self._closed.is_set() or self._is_given_up(view):
                return
            log.warning("job %s: generation %d was not formed: %s", self.name, view.generation, error)
            self._say({"event": "again", "by": self.id, "generation": view.generation})
            return
        with self._moved:
            if self._is_given_up(view) or self._closed.is_set():
                self._retired.append((time.monotonic(), transport))
                return
            transport.on_broken = lambda: self._say({"event": "again", "by": self.id, "generation": view.generation})
            self._formed[view.generation] = transport
            step = 0
            if self._participant.is_in_lockstep:
                step = self._limit = self._clock + MARGIN if self._active is not None else 0
            ready = {"event": "ready", "id": self.id, "generation": view.generation, "step": step}
            self._unsent.append({**ready, "weight": self._participant.weight})
        self._wake.set()

    def _is_given_up(self, view: View) -> bool:
        """Whether a generation that has not begun is not being formed any more: another one is in its place."""
        forming = self._roster.forming
        return forming is None or forming.generation != view.generation

    def _warn_of_loopback(self, view: View) -> None:
        """Other machines cannot reach this worker where it has told them to: say so once, before it is left out."""
        hosts = {m.host for m in view.members} - {m.host for m in view.members if m.id == self.id}
        if hosts and self._host.startswith("127.") and not self._has_warned:
            self._has_warned = True
            log.warning(
                "job %s: got %s for the address of this worker, which only its own machine reaches, in a job with "
                "workers on %s; give the store by the name of its machine, not as %s, or pass host=",
                self.name,
                self._host,
                sorted(hosts),
                self._log.address,
            )

    def _all_come(self, view: View) -> bool:
        """Wait until all members are about to connect; False: another generation is formed instead.

        A thread that waits here can be left behind at the exit of the interpreter, one inside Gloo cannot.
        """
        self._log.arrive(f"{view.generation}/{self.id}")
        start, missing, are_accused = time.monotonic(), set(view.ids), False
        while missing := {worker for worker in missing if not self._log.has_arrived(f"{view.generation}/{worker}")}:
            if self._is_given_up(view) or self._closed.wait(limits.BUSY_POLL):
                return False
            if not are_accused and time.monotonic() - start > limits.FORMING:
                are_accused = True
                for worker in sorted(missing):
                    self._accuse_absent(worker, view)
        return True

    def _accuse_absent(self, worker: int, view: View) -> None:
        """Say that a member has not come to form a generation; see [Note: late accusations]."""
        why = f"it did not come to form generation {view.generation}"
        self._accuse(worker, why, may_have_ended=False, generation=view.generation)

    def _silent(self, worker: int, seconds: float) -> None:
        """From the thread of heartbeats."""
        self._give_up_on(worker, f"it was silent for {seconds:.2f} s", may_have_ended=False)

    def _ended(self, worker: int) -> None:
        """From the thread of heartbeats."""
        if worker not in self._roster.left:
            self._give_up_on(worker, "its connection closed", may_have_ended=True)

    def _give_up_on(self, worker: int, why: str, *, may_have_ended: bool) -> None:
        with self._lock:
            views = [(self._active, self._transport), *self._due]
            forming = self._roster.forming
        is_forming = forming is not None and forming.has(worker)
        if is_forming and not any(view is not None and view.has(worker) for view, _ in views):
            self._accuse(worker, why, may_have_ended=may_have_ended)
        for view, transport in views:
            if view is not None and transport is not None and view.has(worker):
                transport.break_link(view.ids.index(worker))
                self._accuse(worker, why, may_have_ended=may_have_ended)

    def _on_lost(self, view: View, rank: int, error: str, is_closed: bool) -> None:
        """From the thread that runs the round."""
        if self._is_over(view):
            return
        why = "its connection closed" if is_closed else f"it did not answer within {self.timeout.total_seconds():g} s"
        self._accuse(view.ids[rank], why, may_have_ended=is_closed)
        if self._heartbeats is not None:
            self._heartbeats.forget(view.ids[rank])

    def _is_over(self, view: View) -> bool:
        """Whether another generation has followed, as far as that does not go without saying: see [Note: paces]."""
        assert self._participant is not None
        later = (self._active, *(due for due, _ in self._due))
        return not self._participant.is_in_lockstep and any(v and v.generation > view.generation for v in later)
