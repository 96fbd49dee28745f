"""Generations: how the next one is formed, and how it begins."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import time
from collections.abc import Iterable
from dataclasses import asdict
from datetime import timedelta
from typing import Any

from ..transport import threads
from ..transport.deadline import Deadline
from ..transport.gloo import num_devices
from ..transport.job_key import WITHOUT_KEY
from . import limits
from .background_log import log
from .links import LinkTransport, alone, connect_links
from .liveness.contact import Contact
from .roster import MARGIN, Roster
from .tracked import TrackedCounts
from .view import Change, View


class Generations:
    """The part of a `LocalWorker` for forming generations, beginning them, and noticing lost members.

    [Note: clock] Generations begin at steps of the clock of a membership. The clock counts calls of
    `Membership.at_step` and begins at 0 with the job. The wrapper counts the steps of `Membership.steps`, and goes on
    from the steps of a loaded checkpoint. `JobState.steps_before` is the difference, the same on all workers.

    [Note: first step] Once a worker has connected with the members of the next generation, it names a step. It does not
    begin this step before it knows the first step of the generation: the largest step named by a member. So all begin
    at the same step. A worker waits only if it reaches its step before the others have named theirs.

    [Note: one position] All members of a generation in lockstep begin it at one step of the wrapper, with one number of
    rounds. A donor's copy has both, and the step of the clock that belongs to them. A worker goes from there to the
    first step of the generation, which may also be an earlier step: its donor may have trained on without the others.

    [Note: paces] Workers out of lockstep name no step: each begins a generation at its own next step. The first to come
    to it waits for no other, and closes its links of the generation before some time later. For workers in the old
    generation such a closed link does not mean a failed worker.

    Args:
        worker: the `LocalWorker` of this part; its lock guards all this.

    Attributes:
        active: the active generation; None before the first.
        transport: the transport of that generation.
        due: the next generations, with their transports, in their order.
        formed: by generation, the transports of generations before their begin.
        limit: the step to begin only once the next generation is known; None: there is no such step.
        clock: see [Note: clock].
    """

    def __init__(self, worker: Any) -> None:
        self.worker, self.job = worker, worker.job
        self.active: View | None = None
        self.transport: LinkTransport | None = None
        self.due: list[tuple[View, LinkTransport]] = []
        self.formed: dict[int, LinkTransport] = {}
        self.limit: int | None = None
        self.clock = -1
        self._tried: set[int] = set()  # generations that this worker has begun to form
        self._asked_again: set[int] = set()  # generations that the others were asked to form again
        self._retired: list[tuple[float, LinkTransport]] = []  # with the time at which they close
        self._garbage: list[str] = []  # keys in the store
        self._posted: list[str] = []  # the same, until another generation begins
        self._counts: tuple[int, TrackedCounts] | None = None  # the last ones, with their generation
        self._reported: set[int] = set()  # by this worker, as the roster had it at the last turn

    # Beginning.

    def first_step(self, view: View) -> int:
        """The first step of this worker in a generation; see [Note: paces]."""
        return view.start if self.job.participant.is_in_lockstep else max(self.clock, 0)

    def next_is(self, clock: int) -> None:
        """Note the step of the clock for the next training step; see [Note: clock]."""
        self.job.steps_before = self.job.participant.step - clock

    def settle(self, how: str) -> None:
        """Apply the round in flight, before anything else changes at this training step; raises its errors.

        Then the step is not counted, so that the next call takes the same one again: see [Note: after infinities] of
        `LocalModel`.

        how: the method of the participant, "flush" or "settle".
        """
        try:
            self.job.together(how, None, getattr(self.job.participant, how))
        except BaseException:
            self.clock -= 1
            raise

    def wait_for_first_step(self, clock: int, deadline: Deadline) -> None:
        """See [Note: first step]. A generation cannot begin without the store: then rounds go on as they are."""
        worker = self.worker
        with worker.moved:
            while not (self.limit is None or self.limit > clock or worker.is_excluded or self.job.closed.is_set()):
                worker.moved.wait(limits.POLL)
                if not self.job.store.is_connected or deadline.is_over:
                    self.limit = None

    def drop_late(self) -> None:
        """A generation began before this worker knew it, as the store was away: its members form another one."""
        with self.worker.lock:
            late, self.due = self.due, []
            self.retire(*(transport for _, transport in late))
        for view, _ in late:
            log.warning("job %s: generation %d came too late, at step %d", self.job.name, view.generation, self.clock)
            self._ask_again(view)

    def go_to(self, start: int) -> None:
        """Go to the first step of a generation, from an earlier or a later one: see [Note: one position]."""
        with self.worker.lock:
            step, self.clock = start + self.job.steps_before, start
        self.job.together("go_to", step, lambda: self.job.participant.go_to(step))

    def begin(self, clock: int) -> Change:
        """Begin the latest due generation. All workers skip an earlier one, unless it would begin sooner."""
        job = self.job
        self.next_is(clock)
        with self.worker.lock:
            count = sum(view.start <= clock for view, _ in self.due)
            before, (view, transport) = self.active, self.due[count - 1]
            growth = math.prod(other.growth for other, _ in self.due[:count])
            reasons = {number: why for other, _ in self.due[:count] for number, why in other.reasons.items()}
            old = [other for other in (self.transport, *(other for _, other in self.due[: count - 1])) if other]
            self.active, self.transport, self.due = view, transport, self.due[count:]
            job.founded = self.worker.roster.founded
            self.watch_peers()
        known = set() if before is None else {m.number for m in before.members}
        members = tuple(member.number for member in view.members)
        joined = tuple(number for number in members if number not in known)
        left = {number: reasons.get(number, "it left") for number in sorted(known - set(members))}
        start = self.first_step(view) + job.steps_before
        change = Change(view.generation, start, view.ids.index(self.worker.id), members, joined, left)
        if before is not None:
            job.num_joins += len(joined)
            job.num_deaths += len(left)
        self.switch_links(view, transport, growth)  # also ends a round over the old links
        if joined and (before is not None or (change.rank == 0 and not self.worker.is_founder)):
            place = {"generation": view.generation, "clock": clock}
            job.together("post_counts", place, lambda: self.post_counts(**place))
        with self.worker.lock:
            transport.num_round_bytes += sum(other.num_bytes_sent for other in old)
            self.retire(*old, seconds=limits.RETIRE)
        what = [f"worker {n} left ({why})" for n, why in left.items()]
        if joined and before is not None:
            what.append(f"workers {list(joined)} joined")
        log.log(
            logging.INFO if before is None else logging.WARNING,
            "job %s: generation %d from step %d with %d workers %s%s",
            job.name,
            change.generation,
            change.step,
            len(members),
            list(members),
            ": " + "; ".join(what) if what else "",
        )
        if before is None and self.worker.is_founder and change.rank == 0:
            self._warn_without_key()
        job.untold.append(change)
        return change

    def switch_links(self, view: View, transport: LinkTransport, growth: float) -> None:
        """Let the model turn to the links of a generation, on all processes with its shards."""
        what = {"view": asdict(view), "growth": growth}
        self.job.together("begin", what, lambda: self.job.participant.begin(transport, growth))

    def post_counts(self, generation: int, clock: int) -> None:
        """Post the tracked state at the first step of a generation for its newcomers.

        See [Note: state at entry] of `TrackedCounts`.
        """
        with self.worker.lock:
            self._garbage, self._posted = [*self._garbage, *self._posted], []
        try:
            counts = TrackedCounts(clock, self.job.tracked)
        except Exception as error:  # noqa: BLE001 (of the user's objects: training goes on, and another member posts)
            log.warning("job %s: got no state of the tracked objects for newcomers: %r", self.job.name, error)
            return
        self._counts = generation, counts
        threads.start(self._post, generation, counts, name="gossip-counts")

    def _post(self, generation: int, counts: TrackedCounts) -> None:
        """In a thread of its own; where the store is away, newcomers may wait for its return."""
        name = f"{generation}/{self.counts}"
        try:
            text = counts.dumps()
        except ValueError as error:
            log.warning("job %s: newcomers do not get the tracked state of this step: %s", self.job.name, error)
            return
        while self.active is not None and self.active.generation == generation:
            with contextlib.suppress(RuntimeError, OSError):
                self.job.store.post(name, self.worker.id, text)
                with self.worker.lock:
                    self._posted.append(f"{name}/{self.worker.id}")
                return
            if self.job.closed.wait(limits.POLL):
                return

    @property
    def counts(self) -> str:
        """The name for the exchange of tracked state between processes of the same place in all replicas."""
        return "counts" + (f"/shard/{self.job.shard}" if self.job.shard else "")

    def follow(self, view: View, growth: float) -> None:
        """Begin the generation begun by the first process of this replica.

        Raises:
            ConnectionError: this process has no links for it.
        """
        with self.worker.lock:
            number, before = view.generation, self.transport
            links = alone(self.job.timeout) if len(view.members) == 1 else self.formed.pop(number, None)
            if links is None:
                raise ConnectionError(f"got generation {number} to begin, for which this process has no links")
            self.active, self.transport = view, links
        self.job.participant.begin(links, growth)
        with self.worker.lock:
            if before is not None:
                links.num_round_bytes += before.num_bytes_sent
                self.retire(before, seconds=limits.RETIRE)
            self.retire(*(self.formed.pop(g) for g in [g for g in self.formed if g <= number]))
            self._garbage += self._keys_of(number)

    # Forming; all that is not in a thread of its own is called by the watcher, under the lock.

    def act(self) -> None:
        """Form the generation in the roster, or take over a formed one."""
        forming, view = self.worker.roster.forming, self.worker.roster.view
        if forming is not None and forming.has(self.worker.id) and forming.generation not in self._tried:
            self._tried.add(forming.generation)
            self.limit = None  # it was named for another one
            self.watch_peers()
            self._warn_of_loopback(forming)
            threads.start(self._form, forming, name="gossip-forming")
        is_later = view is not None and view.generation > (0 if self.active is None else self.active.generation)
        # The worker is not in a later one: see [Note: one history] of `Roster`.
        if view is not None and (is_later or not view.has(self.worker.id)):
            self._adopt(view)

    def form_again(self) -> None:
        """The roster was restored: begin to form the next generation again, and report losses again."""
        view = self.worker.roster.view
        if view is not None and view.generation > (0 if self.active is None else self.active.generation):
            self._adopt(view)  # all were ready when the store went, as the worker that restored it had read
        self.limit = None
        if not self.job.shard:  # else the first process of the replica may begin any of them: see `follow`
            self.retire(*self.formed.values())
            self.formed = {}
        self._tried, self._asked_again = set(), set()
        if self._counts is not None:  # a newcomer may not have read them
            threads.start(self._post, *self._counts, name="gossip-counts")
        if self.active is not None and self.transport is not None:
            for rank in self.transport.failed:
                self.worker.report(
                    self.active.ids[rank], "it was lost while the store had no roster of this job", may_have_ended=True
                )

    def _adopt(self, view: View) -> None:
        """The generation has formed: it is due, or goes on without this worker."""
        if self.job.shard:  # the first process of the replica tells it
            return
        if not view.has(self.worker.id):
            self.worker.is_excluded = self.worker.is_excluded or self.active is not None
            return
        if self.due and self.due[-1][0].generation >= view.generation:
            return
        transport = self.formed.pop(view.generation, None)
        if transport is None:  # its links were made over a store that has gone, or it came too late
            if view.generation not in self._asked_again:
                self._ask_again(view)
            return
        self.due.append((view, transport))
        self.limit = None
        self._garbage += [f"{view.generation}/ready/{self.worker.id}", *self._keys_of(view.generation)]
        self.retire(*(self.formed.pop(g) for g in [g for g in self.formed if g < view.generation]))
        self.watch_peers()

    def _keys_of(self, generation: int) -> list[str]:
        """The keys written by this process while it connected with others."""
        devices, me = range(num_devices(self.job.link_host)), self.worker.id
        keys = [f"{generation}/{self._addresses(device)}/{me}" for device in devices]
        return keys if self.job.num_shards == 1 else [*keys, f"{generation}/linked/{me}/{self.job.shard}"]

    def _addresses(self, device: int | str) -> str:
        """The name for the exchange of addresses between the processes of the same place in all replicas."""
        return f"addresses/{device}" + (f"/shard/{self.job.shard}" if self.job.shard else "")

    def _ask_again(self, view: View) -> None:
        """Ask the others to form a generation again: this worker has no links, or lost them."""
        self._asked_again.add(view.generation)
        self.worker.say(Roster.form_again, self.worker.id, view.generation)

    def _form(self, view: View) -> None:
        """In a thread of its own: connect with the members of a generation, and begin it when all are ready."""
        worker, participant = self.worker, self.job.participant
        rank, shard, num_shards = view.ids.index(worker.id), self.job.shard, self.job.num_shards
        try:
            transport = connect_links(
                lambda device, text: self._gather(view, self._addresses(device), text, limits.FORMING),
                rank,
                len(view.members),
                participant.links(rank, len(view.members)),
                store=self.job.store.prefixed(f"{view.generation}/all" + (f"/{shard}" if shard else "")),
                names=[member.number for member in view.members],
                timeout=self.job.timeout,
                patience=timedelta(seconds=limits.CONNECT),
                on_lost=lambda peer, error, is_closed: self._on_lost(view, peer, is_closed=is_closed),
                host=self.job.link_host,
                key=self.job.store.key,
            )
            transport.on_broken = lambda: self._ask_again(view)
            with worker.moved:
                if self._is_void(view) or self.job.closed.is_set():
                    self.retire(transport)
                    return
                if (before := self.formed.get(view.generation)) is not None:  # see `form_again`
                    self.retire(before)
                self.formed[view.generation] = transport
            if num_shards > 1:  # the worker is ready when all its processes have connected
                others, is_void = range(num_shards) if not shard else [shard], lambda: self._is_void(view)
                linked = f"{view.generation}/linked/{worker.id}"
                self.job.store.gather(linked, shard, "", others, is_void=is_void)
            if shard:
                return
            with worker.moved:
                step = 0
                if participant.is_in_lockstep and not self._is_void(view):
                    step = self.limit = self.clock + MARGIN if self.active is not None else 0
                    before = worker.roster.view
                    if before is not None and not any(map(before.has, view.ids)):  # newcomers, after all members
                        step = max(self.clock, 0)  # of the donor's copy
            texts = self._gather(view, "ready", json.dumps([step, participant.weight]), limits.CONNECT)
            pairs = map(json.loads, texts)
            ready = {member: (int(step), float(weight)) for member, (step, weight) in zip(view.ids, pairs, strict=True)}
            worker.say(Roster.begin, view.generation, ready)
        except (RuntimeError, OSError, ValueError) as error:
            if not (self.job.closed.is_set() or self._is_void(view)):
                log.warning("job %s: generation %d was not formed: %s", self.job.name, view.generation, error)
                self._ask_again(view)

    def _gather(self, view: View, what: str, text: str, patience: float) -> list[str]:
        """The texts of all members; the absent ones are reported after so many seconds.

        See [Note: late reports] of `Roster`.
        """
        return self.job.store.gather(
            f"{view.generation}/{what}",
            self.worker.id,
            text,
            view.ids,
            is_void=lambda: self._is_void(view),
            on_late=lambda missing: self._report_absent(missing, view),
            patience=patience,
        )

    def late_members(self, view: View) -> list[int]:
        """The members still missing from a generation in formation; else the members without a connection, if any."""
        store = self.job.store
        for what in ("addresses/0", "ready") if store.is_connected else ():
            if late := store.missing(f"{view.generation}/{what}", view.ids):
                return late
        return []

    def _is_void(self, view: View) -> bool:
        """Whether another generation has taken the place of a generation before its begin."""
        forming = self.worker.roster.forming
        return forming is None or forming.generation != view.generation

    def _report_absent(self, workers: Iterable[int], view: View) -> None:
        why = f"it did not come to form generation {view.generation}"
        for worker in workers:
            self.worker.report(worker, why, may_have_ended=False, generation=view.generation)

    def _warn_without_key(self) -> None:
        """Warn once for a job, on its first worker, if strangers may reach its ports."""
        if self.job.store.key is None and not self.job.host.startswith("127."):
            log.warning("job %s: got workers at %s and no key: %s", self.job.name, self.job.host, WITHOUT_KEY)

    def _warn_of_loopback(self, view: View) -> None:
        """Warn once, before this worker is left out, if other machines cannot reach it at its address."""
        hosts = {m.host for m in view.members} - {m.host for m in view.members if m.id == self.worker.id}
        if hosts and self.job.host.startswith("127.") and not self.job.has_warned:
            self.job.has_warned = True
            log.warning(
                "job %s: got %s for the address of this worker, which only its own machine reaches, in a job with "
                "workers on %s; give the store by the name of its machine, not as %s, or pass host=",
                self.job.name,
                self.job.host,
                sorted(hosts),
                self.job.store.address,
            )

    # Lost members.

    def watch_peers(self) -> None:
        """Watch the peers of the active generation, of due generations, and of the generation in formation."""
        participant, liveness = self.job.participant, self.worker.liveness
        if liveness is None:  # the first process of the replica watches
            return
        watched: dict[int, Contact] = {}
        for view in (self.active, *(view for view, _ in self.due), self.worker.roster.forming):
            if view is not None and view.has(self.worker.id):
                for rank in participant.peers(view.ids.index(self.worker.id), len(view.members)):
                    watched[view.members[rank].id] = view.members[rank].contact
        lost = {self.worker.id}
        if self.active is not None and self.transport is not None:
            lost |= {self.active.ids[rank] for rank in self.transport.failed}
        liveness.watch({worker: contact for worker, contact in watched.items() if worker not in lost})

    def on_silent(self, worker: int, seconds: float) -> None:
        """See `LivenessMonitor`."""
        self._give_up_on(worker, f"it was silent for {seconds:.2f} s", may_have_ended=False)

    def on_ended(self, worker: int) -> None:
        """See `LivenessMonitor`."""
        if worker not in self.worker.roster.left:
            self._give_up_on(worker, "its connection closed", may_have_ended=True)

    def _give_up_on(self, worker: int, why: str, *, may_have_ended: bool) -> None:
        with self.worker.lock:
            views = [(view, links) for view, links in [(self.active, self.transport), *self.due] if view and links]
            forming = self.worker.roster.forming
        links = [(view, links) for view, links in views if view.has(worker)]
        for view, transport in links:
            transport.break_link(view.ids.index(worker))
        if links or (forming is not None and forming.has(worker)):
            self.worker.report(worker, why, may_have_ended=may_have_ended)

    def _on_lost(self, view: View, rank: int, *, is_closed: bool) -> None:
        """Called by the thread of the round."""
        participant, later = self.job.participant, (self.active, *(due for due, _ in self.due))
        if not participant.is_in_lockstep and any(v and v.generation > view.generation for v in later):
            return  # [Note: paces]
        late = f"it did not answer within {self.job.timeout.total_seconds():g} s"
        self.worker.report(view.ids[rank], "its connection closed" if is_closed else late, may_have_ended=is_closed)
        if self.worker.liveness is not None:
            self.worker.liveness.forget(view.ids[rank])

    # Closing.

    def retire(self, *transports: LinkTransport, seconds: float = 0.0) -> None:
        """Close these later, in the watcher; `seconds`: for ranks that are behind."""
        self._retired += [(time.monotonic() + seconds, transport) for transport in transports]

    def tidy(self) -> None:
        """Close old links, and end waits for departed workers. The watcher calls it without the lock."""
        with self.worker.lock:
            now, active, transport, due = time.monotonic(), self.active, self.transport, self.due[-1:]
            roster, links = self.worker.roster, [(active, transport), *self.due]
            old = [retired for until, retired in self._retired if until < now]
            self._retired = [(until, retired) for until, retired in self._retired if until >= now]
            garbage, self._garbage = self._garbage, []
        for retired in old:
            retired.close()
        latest = due[0][0] if due else roster.view if self.job.shard else None
        if active is not None and transport is not None and latest and latest.generation > active.generation:
            for rank, worker in enumerate(active.ids):  # also one that is no peer, in a collective
                if not latest.has(worker) and rank not in transport.failed:
                    transport.break_link(rank)
        if self.job.num_shards > 1:  # the processes of a replica tell each other of lost peers by their reports
            reported, before = {report.of for report in roster.reports if report.by == self.worker.id}, self._reported
            self._reported = reported
            for view, own in links:
                for worker in reported - before:
                    if view is not None and own is not None and view.has(worker):
                        own.break_link(view.ids.index(worker))
        self.job.store.forget(garbage)

    def transports(self) -> list[LinkTransport]:
        """The links of all generations."""
        with self.worker.lock:
            transports = [*self.formed.values(), *(t for _, t in self._retired), *(t for _, t in self.due)]
            transports += [] if self.transport is None else [self.transport]
        return list({id(transport): transport for transport in transports}.values())

    def close(self) -> None:
        """Close all links."""
        with self.worker.lock:
            transports = self.transports()
            self.formed, self._retired, self.due = {}, [], []
        for transport in transports:
            transport.close()
