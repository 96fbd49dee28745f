"""LocalWorker: one start of a worker in its job, and the state that its threads share."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from datetime import timedelta
from operator import methodcaller
from typing import Any, Concatenate, ParamSpec

from ..transport import threads
from ..transport.deadline import Deadline
from ..transport.waits import Waits
from . import limits
from .background_log import log
from .donor import Donor
from .generations import Generations
from .liveness.contact import LifeSign, digest, probe
from .liveness.monitor import LivenessMonitor
from .roster import Event, Roster
from .shared_roster import SharedRoster
from .view import Change, FailureReport, Joiner, Member, View

P = ParamSpec("P")


@dataclass
class JobState:
    """The settings of a membership, and the state that a worker keeps when it joins its job again.

    Attributes:
        store: the store of the roster.
        name, timeout, min_workers: see `Membership`.
        host: the address at which others reach this worker.
        link_host: the same for Gloo; None: its own choice.
        liveness_options: `interval` and `floor` of `LivenessMonitor`.
        description: the options that all workers must agree on.
        tracked: see `Membership.track`.
        participant: the `Participant` of the wrapper; None before the model is wrapped.
        untold: changes of generation that the user's callbacks have not received.
        steps_before: see [Note: clock] of `Generations`.
        founded: `Roster.founded` of the generation that this worker began last.
        num_joins, num_deaths: since the start.
        is_leaving: whether `Membership.leave` was called.
        has_met: whether a listener of another worker was ever in reach.
        has_warned: whether it has warned of a loopback address.
        wake: set when the watcher has something to do.
        shard, num_shards: the place of this process among the processes with shards of one model, and their number;
            only the first one speaks for the worker. See `ReplicaProcesses`.
        together: has all of them do the same to the model, and returns the result of this process. Its arguments are
            the name of the act, what the others need to know for it, and the act in this process.
    """

    store: SharedRoster
    timeout: timedelta
    min_workers: int
    host: str
    link_host: str | None
    liveness_options: dict[str, float]
    description: dict[str, str]
    tracked: dict[str, Any] = field(default_factory=dict)
    participant: Any = None
    untold: list[Change] = field(default_factory=list)
    steps_before: int = 0
    founded: int = 0
    num_joins: int = 0
    num_deaths: int = 0
    is_leaving: bool = False
    has_met: bool = False
    has_warned: bool = False
    wake: threading.Event = field(default_factory=threading.Event)
    shard: int = 0
    num_shards: int = 1
    together: Callable[[str, Any, Callable[[], Any]], Any] = lambda name, argument, act: act()

    @property
    def name(self) -> str:
        return self.store.name

    @property
    def closed(self) -> threading.Event:
        """Set when the membership is closed."""
        return self.store.ended


class LocalWorker:
    """One start of a worker: its identity, its view of the job, and the events that it posts.

    [Note: lock of a worker] `lock` guards the state of this object and of its parts, and `moved` is notified when the
    roster, or the due generations, have changed. A thread that holds it waits for nothing else. The watcher calls
    `turn` again and again; all other threads post events by `say`.

    [Note: coming again] A worker may lose its place before its first generation: it was stopped, or out of reach, while
    that formed, or the store came back without it. The watcher then posts "come" again, with another attempt, so that
    events about earlier attempts are void.

    Args:
        job: see `JobState`.

    Attributes:
        id: the id of this start.
        roster: as last read.
        unsent: events to post.
        coming: the arguments of `Roster.come`; None before this worker comes.
        attempt: the latest attempt of this worker in the join queue; -1: it was never there.
        num_comings: how often it has come.
        is_founder: whether it begins with the model of the first worker, and not with a donor's.
        refused: the entry of this worker in the join queue, if it was refused.
        loaded: the `Joiner.key` of the state that it has loaded, which the watcher posts; None: it has none.
        receiving: the attempt of the donor that sends the state now, and the waits for it.
        received: the state that a donor has sent, until it is loaded.
        is_excluded: whether the job goes on without this worker.
        can_rejoin: whether an excluded worker has reached another one.
        is_cut_off: whether it has reached none.
        has_stopped: see [Note: errors that end a loop] of `Membership`.
        next_probe: when an excluded worker looks for others again.
    """

    def __init__(self, job: JobState) -> None:
        self.job = job
        self.id = time.time_ns() // 1000 * 1000 + random.SystemRandom().randrange(1000)
        self.lock = threading.RLock()
        self.moved = threading.Condition(self.lock)
        self.roster = Roster()
        self.unsent: list[Event] = []
        self.coming: dict[str, Any] | None = None
        self.attempt, self.num_comings = -1, 0
        self.is_founder = False
        self.refused: Joiner | None = None
        self.loaded: tuple[int, int] | None = None
        self.receiving: tuple[int, Waits] | None = None
        self.received: Any = None
        self.is_excluded = self.can_rejoin = self.is_cut_off = self.has_stopped = False
        self.next_probe, self._next_doubt = 0.0, 0.0
        self._query, self._num_epochs = 0, job.store.num_epochs
        self.liveness: LivenessMonitor | None = None
        self.generations = Generations(self)
        self.donor = Donor(self)

    @property
    def joiner(self) -> Joiner | None:
        """This worker in the join queue."""
        return self.roster.joiners.get(self.id)

    @property
    def is_over(self) -> bool:
        """Whether the membership is closed, or the replica of this process has fallen."""
        return self.has_stopped or self.job.closed.is_set()

    @property
    def is_member(self) -> bool:
        """Whether it is in the active generation, or in the one that is being formed."""
        return self.id in self.roster.present()

    def start_liveness(self) -> LivenessMonitor:
        job, generations = self.job, self.generations
        options: dict[str, Any] = {**job.liveness_options, "key": job.store.key}
        options |= {"on_silent": generations.on_silent, "on_ended": generations.on_ended}
        self.liveness = LivenessMonitor(self.id, job=job.name, host=job.host, **options)
        return self.liveness

    def say(self, event: Callable[Concatenate[Roster, P], None], *arguments: P.args, **options: P.kwargs) -> None:
        """Have the watcher post an event: a method of `Roster`, with its arguments."""
        with self.lock:
            self.unsent.append(methodcaller(event.__name__, *arguments, **options))
        self.job.wake.set()

    def wait_until(self, condition: Callable[[], bool], deadline: Deadline) -> bool:
        """Wait for `condition`, `leave`, the end of the worker or the deadline; returns the condition."""
        with self.moved:
            while not (condition() or self.is_over or self.job.is_leaving or deadline.is_over):
                self.moved.wait(min(limits.POLL, deadline.left))  # `leave` notifies nobody: a signal may call it
            return condition()

    def known_members(self) -> list[Member]:
        views: tuple[View | None, ...] = (self.generations.active, self.roster.forming, self.roster.view)
        return [member for view in views if view is not None for member in view.members]

    def lost(self) -> tuple[int, ...]:
        """See `Membership.lost`; of this process."""
        transport = self.generations.transport
        return () if transport is None else tuple(sorted(transport.names[i] for i in transport.failed))

    def stats(self) -> dict[str, float]:
        """See `Membership.stats`; of this process."""
        view, deadlines = self.generations.active, [0.0]
        if view is not None and self.liveness is not None:
            deadlines += [self.liveness.deadline(worker) for worker in view.ids if worker != self.id]
        return {
            "generation": 0 if view is None else view.generation,
            "live": 0 if view is None else len(view.members) - len(self.lost()),
            "joins": self.job.num_joins,
            "deaths": self.job.num_deaths,
            "deadline": max(deadlines),
        }

    def release(self) -> None:
        """Close all connections."""
        if self.liveness is not None:
            self.liveness.close()
        if (receiving := self.receiving) is not None:
            receiving[1].close()
        self.generations.close()

    # A training step.

    @property
    def is_steady(self) -> bool:
        """Whether the next training step begins as the one before: nothing has changed, and nothing is about to."""
        generations, donor = self.generations, self.donor
        transport = generations.transport
        is_to_act = generations.due or generations.limit is not None or donor.snapshots or donor.unclaimed
        if transport is None or transport.world_size == 1:
            return False
        is_whole = not (transport.failed or self.is_excluded or self.has_stopped)
        return is_whole and not (is_to_act or self.roster.forming)

    def count_step(self) -> int:
        """Count a training step; the number of it on the clock. Only the training thread counts."""
        num_skipped, step = self.job.participant.counts()
        clock = self.generations.clock = self.generations.clock + 1 + num_skipped
        self.job.steps_before = step - clock
        return clock

    def begin_step(self, deadline: Deadline) -> None:
        """Count the step, and wait where [Note: first step] of `Generations` asks for it."""
        generations = self.generations
        with self.lock:
            clock = self.count_step()
            must_wait = generations.limit is not None and clock >= generations.limit
            if self.has_stopped:
                self.is_excluded = self.can_rejoin = True
        if must_wait:
            generations.wait_for_first_step(clock, deadline)

    def act_at_step(self) -> Change | None:
        """Give the state to joiners, and begin a generation that is due."""
        generations, donor, participant = self.generations, self.donor, self.job.participant
        if generations.due and generations.first_step(generations.due[0][0]) < generations.clock:
            generations.drop_late()
        due, gives = (generations.due[0][0] if generations.due else None), donor.must_act
        begins = due is not None and (participant.is_cut_off or generations.first_step(due) == generations.clock)
        if begins or gives:
            generations.settle("flush")
        if gives:
            donor.take_back()
            donor.take_snapshots()
        if due is None or not begins:
            return None
        if participant.is_cut_off:
            generations.go_to(due.start)
        return generations.begin(generations.clock)

    # Reports of failures.

    def signs_of(self, members: Iterable[Member]) -> dict[int, LifeSign]:
        """The signs of life of these workers, by id; empty where no descriptor is left here."""
        contacts = {member.id: member.contact for member in members}
        try:
            return probe(contacts, job=digest(self.job.name), seconds=limits.PROBE, key=self.job.store.key)
        except OSError:
            return {}

    def report(self, worker: int, why: str, *, may_have_ended: bool, generation: int = 0) -> None:
        """Report that a worker has failed; generation: see `FailureReport`."""
        number = next((member.number for member in self.known_members() if member.id == worker), -1)
        log.warning("job %s: rounds go on without worker %s: %s", self.job.name, number, why)
        if may_have_ended:
            threads.start(self._report_if_ended, worker, why, name="gossip-report")
        else:
            self._post_report(worker, why, is_sure=False, generation=generation)

    def _post_report(self, worker: int, why: str, *, is_sure: bool, generation: int = 0) -> None:
        self.say(Roster.report, FailureReport(self.id, worker, why, is_sure, generation))

    def _report_if_ended(self, worker: int, why: str, is_reported: bool = False) -> None:
        """In a thread of its own: report a worker, and whether its process has ended.

        Workers that have given this one up have closed their connections with it, and live. If all of them counted as
        ended, this worker would be the majority. So it asks their machines; only a refused connection shows that a
        process has ended.

        Args:
            worker: whose connection has closed, or that was reported.
            why: the reason, for logs.
            is_reported: whether it was reported before; then it is only reported again if it has ended.
        """
        signs = self.signs_of(member for member in self.known_members() if member.id == worker)
        has_ended = signs.get(worker) is LifeSign.ENDED
        if has_ended or not is_reported:
            self._post_report(worker, why, is_sure=has_ended)

    # The watcher.

    def turn(self) -> float:
        """Post events, read the roster, and act on it; returns the seconds until the next turn."""
        with self.lock:
            unsent, self.unsent = self.unsent, []
        self.job.store.worker = self.id
        has_answer = self.job.store.update(unsent)
        with self.moved:
            if has_answer:
                self._take(self.job.store.roster)
            else:
                self.unsent[:0] = unsent
            self.generations.act()
            if not self.job.shard:
                self.donor.act()
            self.moved.notify_all()
            receiving, joiner = self.receiving, self.joiner  # the training thread ends it without the lock
            attempt = -1 if joiner is None or joiner.refusal else joiner.attempt
            if receiving is not None and (self.has_stopped or self.job.is_leaving or receiving[0] != attempt):
                receiving[1].close()
        self.generations.tidy()
        if not self.job.shard:
            self._ask_whether_reported_have_ended()
            self._seek()
        with self.lock:
            is_busy = (
                bool(self.unsent) or self.generations.active is None or (bool(self.lost()) and not self.roster.forming)
            )
        return limits.BUSY_POLL if is_busy and has_answer else limits.POLL

    def _take(self, roster: Roster) -> None:
        """Under the lock: take over what the store has."""
        before, self.roster, generations = self.roster, roster, self.generations
        if self.coming is not None and self.id in roster.founders:
            self.is_founder = True
            asked = self.coming["min_workers"]
            if roster.num_founders > max(asked, before.num_founders if self.id in before.founders else 0):
                log.warning(
                    "job %s: got min_workers=%d, and %d of another worker: the first generation has so many; give all "
                    "the same",
                    self.job.name,
                    asked,
                    roster.num_founders,
                )
        if (joiner := self.joiner) is not None:
            self.attempt, self.is_founder = joiner.attempt, False
            self.refused = joiner if joiner.refusal else None
            if joiner.key == self.loaded and not joiner.is_loaded:  # not posted yet, or lost with the store
                self.say(Roster.mark_loaded, self.id, joiner.attempt)
        elif roster.has_place(self.id):
            self.refused = None
        if self._num_epochs != self.job.store.num_epochs or roster.branch != before.branch:
            self._num_epochs = self.job.store.num_epochs
            generations.form_again()
        if self._must_come():
            if self.num_comings and generations.active is None:
                log.warning("job %s: this worker has lost its place before it began, and comes again", self.job.name)
            self.num_comings += 1
            self.say(Roster.come, **self.coming, attempt=self.attempt + 1)  # type: ignore[arg-type]
        if roster.query != self._query and self.is_member and not self.job.shard:
            self.say(Roster.answer, self.id, roster.query)
        self._query = roster.query

    def _must_come(self) -> bool:
        """See [Note: coming again]."""
        has_begun = self.generations.active is not None or bool(self.generations.due)
        is_over = has_begun or self.is_job_over or self.refused is not None
        return not (self.coming is None or is_over or self.roster.has_place(self.id))

    @property
    def is_job_over(self) -> bool:
        """Whether the job has ended while this worker was in its join queue."""
        return self.attempt >= 0 and not self.roster.founders and not self.roster.present()

    def _ask_whether_reported_have_ended(self) -> None:
        """Once a second, ask the machines of reported workers that may live.

        Where too few workers remain to go on without them, each that was stopped or cut off counts while it may live.
        """
        now = time.monotonic()
        with self.lock:
            reports = self.roster.reports
            sure = {report.of for report in reports if report.is_sure}
            doubted = {r.of: r.why for r in reports if r.of not in sure and r.of != self.id}
            if self.is_excluded or not (doubted and self.is_member) or now < self._next_doubt:
                return
        self._next_doubt = now + limits.RETRY
        for worker, why in doubted.items():
            threads.start(self._report_if_ended, worker, why, True, name="gossip-report")

    def _seek(self) -> None:
        """Excluded from the job: look for a worker to join again. Until then this one trains on by itself."""
        now = time.monotonic()
        if not self.is_excluded or self.can_rejoin or now < self.next_probe:
            return
        with self.lock:
            view = self.roster.view
            if self._go_on_as_job():
                return
        self.next_probe = now + limits.RETRY
        signs = {} if view is None else self.signs_of(view.members)
        self.note_meetings()  # where there were none, perhaps no listener is in any worker's reach
        self.can_rejoin = LifeSign.LIVES in signs.values() or (bool(signs) and not self.job.has_met)
        if not (self.can_rejoin or self.is_cut_off):
            self.is_cut_off = True
            log.warning(
                "job %s: the others go on without this worker, which reaches none of them: it trains on without them, "
                "and joins again when it reaches one",
                self.job.name,
            )

    def _go_on_as_job(self) -> bool:
        """Under the lock: go on as the job, if the others have ended it without this worker, which trains on.

        Then newcomers join this worker. Else it would found another job with them, and might take a fresh model.
        """
        roster, active = self.roster, self.generations.active
        assert active is not None, "it is excluded"
        assert self.coming is not None, "it has come before"
        me = tuple(member for member in active.members if member.id == self.id)
        own = Roster(
            roster.on_partition,
            view=replace(active, members=me, reasons={}),
            description=self.coming["description"],
            last_generation=roster.last_generation,
            next_number=roster.next_number,
            founded=self.job.founded,
            branch=roster.branch,
        )
        if roster.goes_on_from(own, self.id):
            return False
        log.warning(
            "job %s: the others have ended, and this worker trains on alone as the job: newcomers join it",
            self.job.name,
        )
        self.is_excluded = self.is_cut_off = False
        self.say(Roster.restore, own, self.id, random.SystemRandom().getrandbits(62))
        return True

    def note_meetings(self) -> None:
        """Keep whether this worker has ever reached another one."""
        self.job.has_met = self.job.has_met or (self.liveness is not None and self.liveness.has_met)
