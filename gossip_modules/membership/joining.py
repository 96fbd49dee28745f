"""Joining: how a worker comes to a job, takes the state of training from a donor, and joins again."""

from __future__ import annotations

import os
import random
import socket
import time
from dataclasses import asdict
from functools import partial
from typing import Any

from ..flat.sharded import with_shards
from ..transport.deadline import Deadline
from ..transport.waits import Waits
from ..worlds.all_or_none import LOST
from . import donor, limits
from .background_log import log
from .links import alone
from .liveness.contact import LifeSign
from .liveness.monitor import LivenessMonitor
from .roster import Roster
from .tracked import check_alike, described, load_counts
from .view import Change, Joiner, Member, View
from .worker import LocalWorker

_MAX_STATES = 64  # times the model: the largest state that a donor may send


class JobFullError(ConnectionError):
    """The job has as many workers as it takes; a later start may find a place."""


class LeftWhileJoiningError(ConnectionError):
    """`leave` was called before this worker took part."""


class Joining:
    """The steps of a worker from its start to its first generation; they run in the training thread.

    [Note: abandoned jobs] If all workers of a job die, the job stays in its store as it was. An arriving worker asks
    for a reply: it connects with each member's listener, and posts a query. Members answer in the roster. Only if none
    answers, it restarts the job, as the first founder, under the same name. It has waited until then for two seconds if
    the processes of all members have ended, as their machines refuse the connection, and for `timeout` if one is
    silent, since a machine that has lost its power looks like one that is stopped or cut off. A reply, or a generation
    that forms, before the event "restart" makes it void.

    Args:
        worker: that joins.
    """

    def __init__(self, worker: LocalWorker) -> None:
        self.worker, self.job = worker, worker.job
        self._reason = "none has answered"

    def come(self, deadline: Deadline | None = None) -> None:
        """Post "come", and wait until this worker is in the first generation or in the join queue.

        Args:
            deadline: the deadline of all waits; None: each wait has its own, as for a worker that has just started.

        Raises:
            TimeoutError, RuntimeError, ValueError, JobFullError: it has no place.
        """
        worker = self.worker
        member = this_member(worker.start_liveness())
        self.job.together("come", worker.id, lambda: None)
        with worker.lock:
            min_workers, description = self.job.min_workers, self.job.description
            worker.coming = {"member": member, "description": description, "min_workers": min_workers}
        self.job.wake.set()
        limit, generations = self.job.timeout, worker.generations
        while not generations.due:
            has_place = worker.wait_until(
                lambda: bool(generations.due) or worker.joiner is not None, deadline or Deadline(limit)
            )
            if not has_place and (worker.is_over or not self.job.is_leaving):
                raise self._nobody_came()
            if not has_place or generations.due or not self._restart_if_abandoned(deadline or Deadline(2 * limit)):
                break
        self._raise_if_refused()

    def join(self, deadline: Deadline) -> None:
        """Enter the join queue, and begin the first generation of this worker, before the deadline."""
        self.come(deadline)
        if self.worker.generations.due:
            self.found(deadline)
        else:
            self.enter(deadline)

    def enter(self, deadline: Deadline) -> None:
        """Get the state from a donor, then wait for the first generation, before the deadline."""
        worker, generations = self.worker, self.worker.generations

        def has_changed() -> bool:
            joiner = worker.joiner
            return bool(generations.due) or worker.is_job_over or (joiner is not None and joiner.key != worker.loaded)

        while not generations.due:
            self._raise_if_over()
            joiner = worker.joiner
            if joiner is not None and joiner.key != worker.loaded:
                if self._receive_state(joiner, deadline):
                    self.job.together("load", None, self.load)
                    self.say_loaded(joiner)
            elif not worker.wait_until(has_changed, deadline):
                self._raise_if_over()
                raise self._nothing_began(deadline)
        clock = 0 if worker.is_founder else self._take_counts(deadline)
        with worker.lock:
            start = generations.first_step(generations.due[0][0])
            if not worker.is_founder:
                start = start if self.job.participant.is_in_lockstep else max(start, clock)
                generations.go_to(start)
            generations.clock = start - 1
        if worker.is_founder:
            self.found(deadline, start)
        else:
            generations.begin(start)

    def found(self, deadline: Deadline, start: int = 0) -> None:
        """Begin a generation with the model of its first worker."""
        participant, generations = self.job.participant, self.worker.generations
        generations.begin(start)
        assert generations.transport is not None
        with generations.transport.within(deadline):
            self.job.together("found", None, participant.found)

    # The state of training.

    def _receive_state(self, joiner: Joiner, deadline: Deadline) -> bool:
        """Receive the state from a donor; False: the attempt has failed, and another one follows."""
        worker = self.worker
        if joiner.donor < 0:
            self._raise_if_refused()
        if joiner.refusal:
            raise ConnectionError(
                f"job {self.job.name!r}: this worker cannot join, since its donor cannot give the state of "
                f"training: {joiner.refusal}"
            )
        try:
            self.job.together("receive", asdict(joiner), lambda: self.receive(joiner, deadline, asks=True))
            return True
        except (RuntimeError, ValueError, OSError) as error:
            self._reason = str(error)
        self._raise_if_over()
        if deadline.is_over:
            if worker.num_comings > 1:
                raise self._nothing_began(deadline)
            raise TimeoutError(
                f"job {self.job.name!r}: no donor has given the state of training within "
                f"{deadline.seconds:g} s, while its workers live: {self._reason}; start this one again"
            )
        if worker.joiner == joiner:
            worker.say(Roster.change_donor, worker.id, joiner.attempt)
            worker.wait_until(lambda: worker.joiner != joiner, Deadline(min(limits.QUERY, deadline.left)))
        return False

    def receive(self, joiner: Joiner, deadline: Deadline, *, asks: bool) -> None:
        """Meet the donor, and receive the state; a RuntimeError if it has died, where another donor is to send it.

        Each received piece extends the deadline, because a large model may take longer.

        asks: whether to look for members of an abandoned job meanwhile.
        """
        job, asked = self.job, Deadline(limits.QUERY)

        def is_void() -> bool:
            """Whether another donor is to send, or it is too late; the donor may be slow."""
            nonlocal asked
            if asks and asked.is_over:
                self._restart_if_abandoned(deadline)
                asked = Deadline(limits.QUERY)
            return self.worker.is_over or job.is_leaving or deadline.is_over or self.worker.joiner != joiner

        name = donor.meeting_of(joiner, job.shard)
        with donor.meet(job.store, name, 1, is_void=is_void, host=job.link_host) as group:
            limit = _MAX_STATES * job.participant.num_bytes + (1 << 30)
            with self.worker.lock:
                waits = Waits()
                self.worker.receiving = joiner.attempt, waits
            job.wake.set()
            try:
                self.worker.received = donor.receive(group, deadline=deadline, max_bytes=limit, waits=waits)
            finally:
                waits.close()
                self.worker.receiving = None

    def load(self) -> None:
        """Load the received state.

        Raises:
            ValueError: the donor tracks other objects; nothing has changed then.
        """
        state, self.worker.received = self.worker.received, None
        tracked = self.job.tracked
        check_alike(described(tracked), state["kinds"])
        self.job.participant.take(state["model"])
        for name, value in state["tracked"].items():
            tracked[name].load_state_dict(with_shards(value, tracked[name]))
        generations = self.worker.generations
        generations.clock = int(state["clock"])
        generations.next_is(generations.clock)

    def say_loaded(self, joiner: Joiner) -> None:
        """Post the event of the loaded state."""
        self.worker.loaded = joiner.key
        self.job.wake.set()

    def _take_counts(self, deadline: Deadline) -> int:
        """Wait until a member is at the first step of the generation, and take its tracked state.

        See [Note: state at entry] of `TrackedCounts`. Training with the others goes on without the store, so it is not
        waited for.

        Returns:
            The step of the clock of the member; 0 without a member.
        """
        worker, job, generations = self.worker, self.job, self.worker.generations
        while job.tracked:
            with worker.lock:
                first, view = generations.due[0][0], worker.roster.view
                coming = [due for due, _ in generations.due if due.start <= first.start][::-1]
            if coming[0].ids[0] == worker.id:  # members that were there before come first: there is none
                break
            is_out = view is not None and not view.has(worker.id)
            self._raise_if_over()
            if is_out or deadline.is_over or not job.store.is_connected:
                log.warning(
                    "job %s: this worker has the tracked state %s as its donor had it at step %d, since no member gave "
                    "it at step %d: a schedule of learning rates may be behind",
                    job.name,
                    sorted(job.tracked),
                    job.participant.step,
                    first.start + job.steps_before,
                )
                break
            for due in coming:
                source = job.store.first_of(f"{due.generation}/counts", due.ids)
                if source is not None:
                    what = {"generation": due.generation, "source": source}
                    return int(job.together("take_counts", what, partial(self.take_counts, **what)))
            job.closed.wait(limits.BUSY_POLL)
        return 0

    def take_counts(self, generation: int, source: int) -> int:
        """Load the tracked state that a member has posted at the first step of a generation; returns its clock."""
        store, name = self.job.store, f"{generation}/{self.worker.generations.counts}"
        (text,) = store.values(name, [source], is_void=lambda: self.worker.is_over)
        return load_counts(text, self.job.tracked)

    # Abandoned jobs.

    def _restart_if_abandoned(self, deadline: Deadline) -> bool:
        """Post "restart" if no member shows a sign of life: see [Note: abandoned jobs].

        Returns:
            Whether it was posted, and is applied, or void; False: a member lives, or the time was too short to know.
        """
        worker, job = self.worker, self.job
        with worker.lock:
            seen, members = self._seen(), list(worker.roster.present().values())
        has_asked, start = False, time.monotonic()
        while not (worker.is_over or job.is_leaving):
            signs = worker.signs_of(members)
            if LifeSign.LIVES in signs.values() or self._seen() != seen:
                return False
            if not has_asked:
                has_asked = True
                worker.say(Roster.ask, random.SystemRandom().getrandbits(32))
            have_ended = set(signs.values()) == {LifeSign.ENDED}
            patience = limits.ENDED if have_ended else job.timeout.total_seconds()
            if not job.store.is_connected:  # a reply would not arrive
                start = time.monotonic()
            if time.monotonic() - start > patience:
                break
            if deadline.is_over:
                return False
            job.closed.wait(limits.POLL)
        else:
            return False
        assert worker.coming is not None
        worker.say(Roster.restart, **worker.coming, seen=seen)
        if worker.wait_until(lambda: worker.joiner is None or self._seen() != seen, deadline) and worker.joiner is None:
            found = [f"worker {m.number} on {m.host} {signs[m.id].value}" for m in members if m.id in signs]
            log.warning("job %s: no worker lives, so it begins anew under this name: %s", job.name, "; ".join(found))
        return True

    def _seen(self) -> tuple[int, int]:
        """Changes where any member lives."""
        return self.worker.roster.last_generation, self.worker.roster.reply

    # Errors.

    def _raise_if_over(self) -> None:
        if self.worker.has_stopped:
            raise ConnectionError(f"job {self.job.name!r}: this worker has failed while it was joining; start it again")
        if self.job.closed.is_set():
            raise RuntimeError(f"job {self.job.name!r}: the membership was closed while this worker was joining")
        if self.job.is_leaving:
            raise LeftWhileJoiningError(
                f"job {self.job.name!r}: leave() was called while this worker was joining; close() it"
            )
        if self.worker.is_job_over:
            raise ConnectionError(f"job {self.job.name!r} ended while this worker was joining it; start another one")

    def _raise_if_refused(self) -> None:
        joiner, where = self.worker.refused, f"job {self.job.name!r} at {self.job.store.address}"
        if joiner is None:
            return
        if joiner.is_full:
            raise JobFullError(
                f"{where} has as many workers as it takes ({joiner.refusal}): this one is not needed; start it again "
                "when another has ended"
            )
        raise ValueError(
            f"{where} refused this worker, which differs from it: {joiner.refusal}; start it with the model and the "
            "options of the job"
        )

    def _nothing_began(self, deadline: Deadline) -> TimeoutError:
        if self.worker.num_comings > 1:
            return TimeoutError(
                f"job {self.job.name!r}: the others left this worker out of each generation that it was to begin, for "
                f"{deadline.seconds:g} s; see that they reach it at {self.job.host}, or pass host="
            )
        why = self._late_members() or "none was formed; start it again"
        return TimeoutError(
            f"job {self.job.name!r}: no generation with this worker began within {deadline.seconds:g} s: {why}"
        )

    def _nobody_came(self) -> Exception:
        name, store, roster = self.job.name, self.job.store, self.worker.roster
        if self.worker.has_stopped:
            return ConnectionError(f"job {name!r}: this worker has failed before the job began; start it again")
        if self.job.closed.is_set():
            return RuntimeError(f"job {name!r}: the membership was closed before the job began; make another one")
        seconds = f"{self.job.timeout.total_seconds():g} s"
        if not store.is_connected:
            return TimeoutError(f"the store of job {name!r} at {store.address} did not answer within {seconds}")
        if store.other_format:
            return ValueError(store.other_format)
        num_awaited = max(roster.num_founders if self.worker.id in roster.founders else 0, self.job.min_workers)
        num_founders = len(roster.founders)
        why = self._late_members() or (
            f"got {num_founders} workers, expected min_workers={num_awaited}; start the others, or ask for fewer"
        )
        return TimeoutError(f"job {name!r} did not begin within {seconds}: {why}")

    def _late_members(self) -> str:
        """The members missing for the first generation of this worker; "" where none is being formed."""
        roster, me = self.worker.roster, self.worker.id
        view = roster.forming or roster.view
        if view is None or not view.has(me):
            return ""
        if roster.forming is None:  # all have posted that they are ready
            return f"all {len(view.members)} workers have connected, but this one has lost its links; start all again"
        late_ids = self.worker.generations.late_members(view)
        late = [member for member in view.members if member.id in late_ids]
        names = [f"{member}, this worker," if member.id == me else str(member) for member in late]
        return (
            f"all {len(view.members)} workers have come, but {' and '.join(names)} did not connect with the others in "
            "time; see that no worker is stopped, that the machines reach each other, and that timeout= is long enough"
        )


def this_member(liveness: LivenessMonitor, number: int = -1) -> Member:
    """This worker, as others see it in the roster."""
    contact = liveness.contact
    return Member(contact.worker, number, socket.gethostname(), os.getpid(), contact.address, contact.secret.hex())


def rejoin(membership: Any, deadline: Deadline) -> Change:
    """This worker was declared dead, and lives: it drops its state and joins as a new one.

    Training stands still meanwhile, so all waits have one deadline; where that passes, the worker trains on alone for
    as long as it has waited, and tries again.
    """
    old, job = membership.worker, membership.job
    why = "trains on after an error" if old.has_stopped else "was left out of the job while it was silent"
    log.warning("job %s: this worker %s, and joins again", job.name, why)
    old.generations.settle("settle")
    before, number = membership.view, membership.number
    old.note_meetings()
    old.release()
    worker = membership.worker = LocalWorker(job)
    if old.has_stopped:
        worker.say(Roster.leave, old.id, why="an error ended its training")
    try:
        Joining(worker).join(deadline)
    except LOST as error:
        if worker.is_over:
            raise
        log.warning(
            "job %s: this worker trains on alone, and tries again, since it could not join: %s", job.name, error
        )
        return go_on_alone(worker, before, number, old.generations.clock, deadline.passed)
    worker.generations.clock += 1  # of the step that goes on now
    view, rank = membership.view, membership.rank
    return Change(view.generation, view.start, rank, membership.members, (membership.number,), {})


def go_on_alone(worker: LocalWorker, before: View, number: int, clock: int, seconds: float) -> Change:
    """Joining again has failed, which took so many seconds: train as a world of one, until another is reached.

    Args:
        worker: that could not join.
        before: its last generation.
        number: in that.
        clock: the clock of the present training step.
        seconds: that the attempt took.
    """
    job, generations = worker.job, worker.generations
    assert worker.liveness is not None
    worker.say(Roster.leave, worker.id, why="it could not join")
    with worker.lock:
        generation = max(before.generation, worker.roster.last_generation)
        me = this_member(worker.liveness, number)
        view = generations.active = View(generation, (me,), start=clock, turns=before.turns_before(clock))
        transport = generations.transport = alone(job.timeout)
        generations.retire(*(links for _, links in generations.due))
        generations.due, generations.limit, generations.clock = [], None, clock
        worker.is_excluded = worker.is_cut_off = True
        worker.next_probe = time.monotonic() + max(limits.QUERY, seconds)
    generations.switch_links(view, transport, 1.0)
    change = Change(generation, clock + job.steps_before, 0, (number,), (), {})
    job.untold.append(change)
    return change
