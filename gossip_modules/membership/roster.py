"""Roster: the members of a job, as a function of events."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TypeAlias

from .view import FailureReport, Joiner, Member, View, differences, parsed

FORMAT = 2  # the version of the text of a roster
_MAX_REFUSED = 64
_SQRT_HALF = 0.7071067811865476
MARGIN = 2  # training steps between the last rank that is ready for a generation and its first step


class OtherFormatError(ValueError):
    """The text is the roster of another release of this package."""


@dataclass
class Roster:
    """The state of the membership: a function of the events of its workers, in their order, and of nothing else.

    All workers share one roster, see `SharedRoster`, so they know the same generations without a leader. Time is not
    part of the roster: a worker reports a late worker in an event.

    A change begins when a member reports another one, leaves, or has loaded the state of training. Then the remaining
    workers form the next generation. Each worker connects with the others, and names a step to them. It does not begin
    this step before it knows the steps of all; see [Note: first step] of `Generations`. Then the generation starts at
    the largest of these steps.

    [Note: events] An event is one of the public methods below `loads`, with its arguments. A late event changes
    nothing. A second application of an event changes nothing either: without a reply of the store a worker applies an
    event again.

    [Note: majority] Members report each other if they cannot reach each other. A generation needs more than half of the
    members of the one before, or half with the first of them; members with an ended process do not count. If the
    reports in their order leave no majority, the workers with the most reports are left out.

    [Note: late reports] A report that a member did not come to form a generation is void when that or a later one
    begins.

    [Note: weights] A joining worker gets half of its donor's push-sum weight. All then multiply their weights by the
    number of members over the number before, so the mean of the weights is as before. The weights of dead workers are
    lost, so the mean may have any value after hundreds of deaths. The optimizer steps on x = z w, so a step of z is as
    long as the learning rate over w. Therefore each ready worker posts its weight. If the mean of the weights would be
    more than a factor of sqrt(2) from one, all workers multiply their weights by a power of two. This changes no z.

    [Note: stale snapshot] A restarted store is empty. Each worker posts its own roster when it finds an empty store
    (`restore`). The first one restores the job. If this worker was stopped or cut off, the others went on without it,
    and the generations of its old roster must not take the job from them. So a roster with a later generation than the
    restored one replaces it, and its members form the next generation.

    [Note: one history] A member never loses its job to a roster that knows nothing of it, such as an empty roster, an
    old copy, or the roster of a job that a newcomer has founded while all members were suspended. Each worker compares
    the roster in the store with its known one (`goes_on_from`), and restores its own where that comes first:

        between two jobs under one name       the one that was founded first, which has trained longer
        between two generations of one job    the later one

    All workers apply the same order, so at most one of two workers restores its roster. The members of the other one
    are not in it: they join as newcomers. The members of a job accept its end by `leave` only.

    Attributes:
        on_partition: see `Membership`.
        view: the active generation; None before the first.
        forming: the generation in formation.
        joiners: the join queue, by worker.
        founders: the workers in wait for the first generation.
        asked: how many workers each of them asks for.
        description: the common options of all workers.
        reports: the reports of failures, in their order.
        left: the workers of `view` that have left by themselves, with reasons.
        last_generation: the largest number of a generation.
        next_number: the number of the next worker.
        founded: identifies the job under this name, in the order in which such jobs were founded; 0: none was.
        branch: a random number of the last `restore`, which the roster has until the next one; 0: there was none.
        loaded: the generation of the restored roster; 0: the roster was never restored.
        query, reply: the numbers of the last query, and of the last answered one; see [Note: abandoned jobs] of
            `Joining`.
    """

    on_partition: str = "majority"
    view: View | None = None
    forming: View | None = None
    joiners: dict[int, Joiner] = field(default_factory=dict)
    founders: dict[int, Member] = field(default_factory=dict)
    asked: dict[int, int] = field(default_factory=dict)
    description: dict[str, str] = field(default_factory=dict)
    reports: list[FailureReport] = field(default_factory=list)
    left: dict[int, str] = field(default_factory=dict)
    last_generation: int = 0
    next_number: int = 0
    founded: int = 0
    branch: int = 0
    loaded: int = 0
    query: int = 0
    reply: int = 0

    @property
    def num_founders(self) -> int:
        """The size of the first generation: the largest request of a founder."""
        return max((self.asked.get(worker, 1) for worker in self.founders), default=1)

    def present(self) -> dict[int, Member]:
        """The members of the active generation, and of the generation in formation, by id."""
        views = [view for view in (self.view, self.forming) if view is not None]
        return {member.id: member for view in views for member in view.members}

    def has_place(self, worker: int) -> bool:
        """Whether the worker is a member, a founder or in the join queue."""
        return worker in self.joiners or worker in self.founders or worker in self.present()

    def dumps(self) -> str:
        """The roster as text."""
        return json.dumps({"version": FORMAT, **asdict(self)})

    @staticmethod
    def loads(text: str) -> Roster:
        """The roster of a text from `dumps`.

        Raises:
            OtherFormatError: the text is from another release.
            Exception: one of `GARBAGE`, for any other text.
        """
        value = json.loads(text)
        if isinstance(value, dict) and ("version" in value or "last_generation" in value):
            version = value.pop("version", 1)  # releases before the second version wrote none
            expected = Roster.__dataclass_fields__.keys()
            if version != FORMAT:
                raise OtherFormatError(f"roster: got version {version!r:.20}, expected {FORMAT}")
            if value.keys() != expected:
                names = sorted(value.keys() ^ expected)
                raise OtherFormatError(f"roster: got version {FORMAT} with other entries, {names!s:.200}")
        roster: Roster = parsed(Roster, value)
        return roster

    # Workers that come.

    def come(self, member: Member, *, description: Mapping[str, str], min_workers: int, attempt: int = 0) -> None:
        """A worker asks for a place; attempt: see `Joiner`."""
        if self.has_place(member.id):
            return
        is_first = not self.present()
        refusal = differences(self.description, description) if self.founders or not is_first else ""
        if refusal:
            self._refuse(member, refusal)
        elif is_first:
            self.asked[member.id] = min_workers
            self.description = dict(description)
            self.founders[member.id] = self._numbered(member)
            self._begin()
        else:
            self._enqueue(member, attempt)

    def _begin(self) -> None:
        """Form the first generation, if all have come."""
        if len(self.founders) >= self.num_founders:
            self._form(self.founders.values(), {})

    def _enqueue(self, member: Member, attempt: int) -> None:
        members = (self.forming or self.view).members  # type: ignore[union-attr]
        limit = int(self.description.get("max_workers", 0))
        if limit and len({m.id for m in (*members, *self._waiting())}) >= limit:
            self._refuse(member, f"max_workers={limit}", is_full=True)
            return
        donor = members[member.id % len(members)].id
        self.reports = [r for r in self.reports if member.id not in (r.by, r.of)]  # it was left out, and comes again
        self.joiners[member.id] = Joiner(self._numbered(member), donor, attempt)

    def _refuse(self, member: Member, why: str, *, is_full: bool = False) -> None:
        """The worker reads the refusal in the join queue; the oldest refusals are dropped."""
        refused = [worker for worker, joiner in self.joiners.items() if joiner.refusal]
        for worker in refused[: -_MAX_REFUSED + 1]:
            del self.joiners[worker]
        self.joiners[member.id] = Joiner(member, donor=-1, refusal=why, is_full=is_full)

    def _numbered(self, member: Member) -> Member:
        self.next_number += 1
        return replace(member, number=self.next_number - 1)

    def ask(self, query: int) -> None:
        """A joining worker asks the members for a sign of life; query: a number that it has drawn."""
        self.query = query

    def answer(self, worker: int, query: int) -> None:
        """A member answers a query."""
        if worker in self.present():
            self.reply = query

    def restart(
        self, member: Member, *, description: Mapping[str, str], min_workers: int, seen: tuple[int, int]
    ) -> None:
        """A joining worker has found no member alive: the workers in the join queue found the job again.

        seen: the last generation and the last answered query that this worker knows.
        """
        waiting, before = self._waiting(), self.description
        if self.present():
            if seen != (self.last_generation, self.reply) or member.id not in self.joiners:
                return
            self._end()
        self.joiners.pop(member.id, None)
        self.come(member, description=description, min_workers=min_workers)
        for other in waiting:
            self.come(other, description=before, min_workers=min_workers)

    def _end(self) -> None:
        """The job is over, and another may begin."""
        self.view = self.forming = None
        self.reports, self.left, self.founders, self.asked, self.joiners = [], {}, {}, {}, {}

    def mark_loaded(self, worker: int, attempt: int) -> None:
        """A worker in the join queue has loaded the state of its donor in this attempt."""
        joiner = self._open(worker, attempt)
        if joiner is not None:
            self.joiners[worker] = replace(joiner, is_loaded=True)
            self._change()

    def refuse(self, worker: int, attempt: int, *, why: str) -> None:
        """A donor cannot send the state to a worker in the join queue, and no other could."""
        joiner = self._open(worker, attempt)
        if joiner is not None:
            self.joiners[worker] = replace(joiner, refusal=why)

    def forget(self, worker: int, attempt: int) -> None:
        """A worker in the join queue is gone."""
        if self._open(worker, attempt) is not None:
            del self.joiners[worker]

    def change_donor(self, worker: int, attempt: int) -> None:
        """A transfer has failed: another member sends the state to a worker in the join queue."""
        joiner = self._open(worker, attempt)
        if joiner is None or self.view is None:
            return
        members = [m for m in self.view.members if m.id not in self.left and m.id != joiner.donor] or self.view.members
        donor = members[(worker + attempt + 1) % len(members)].id
        self.joiners[worker] = replace(joiner, donor=donor, attempt=attempt + 1)

    def _open(self, worker: int, attempt: int) -> Joiner | None:
        """The worker in the join queue, if it has no state yet in this attempt."""
        joiner = self.joiners.get(worker)
        is_open = joiner is not None and joiner.attempt == attempt and not (joiner.refusal or joiner.is_loaded)
        return joiner if is_open else None

    def _replace_lost_donors(self) -> None:
        """Give another donor to a joiner if its donor is not in the active generation."""
        assert self.view is not None
        for worker, joiner in list(self.joiners.items()):
            if not self.view.has(joiner.donor):
                self.change_donor(worker, joiner.attempt)

    # Workers that go.

    def report(self, report: FailureReport) -> None:
        """A member reports that another one has failed."""
        if self.view is not None and 0 < report.generation <= self.view.generation:
            return  # [Note: late reports]
        if {report.by, report.of} <= self.present().keys() and _add_report(self.reports, report):
            self._change()

    def leave(self, worker: int, *, why: str) -> None:
        """A worker leaves by itself."""
        self.joiners.pop(worker, None)
        self.founders.pop(worker, None)
        if worker in self.present():
            self.left[worker] = why
            self._change()
        elif not self.present():  # it may have asked for more than the others
            self._begin()

    # The next generation.

    def _change(self) -> None:
        """Form the generation of the remaining workers, and of joiners with a loaded state."""
        base = self.view or self.forming
        if base is None:
            return
        candidates = {m.id: m for m in (*base.members, *(self.forming.members if self.forming else ()))}
        candidates |= {j.member.id: j.member for j in self.joiners.values() if j.is_loaded}
        # Reports by and of workers that have died in the join queue, or left it, are over.
        self.reports = [r for r in self.reports if r.by in candidates and r.of in candidates]
        self.left = {worker: why for worker, why in self.left.items() if worker in candidates}
        gone = _left_out(base.ids, candidates, self.reports, self.left, on_partition=self.on_partition)
        if gone is None:
            return
        if self.view is None:  # a founder has gone: the first generation waits for another one
            self.forming, self.reports, self.left = None, [], {}
            self.founders = {m.id: m for m in (*base.members, *self._waiting()) if m.id not in gone}
            self.joiners = {key: joiner for key, joiner in self.joiners.items() if joiner.refusal}
            self._begin()
            return
        reasons = {candidates[worker].number: why for worker, why in gone.items()}
        for worker in gone:
            self.joiners.pop(worker, None)
        remaining = [member for worker, member in candidates.items() if worker not in gone]
        if remaining:
            self._form(remaining, reasons)
        else:
            self._end()

    def _waiting(self) -> list[Member]:
        return [joiner.member for joiner in self.joiners.values() if not joiner.refusal]

    def form_again(self, by: int, generation: int) -> None:
        """A generation could not be connected, or begun in time: the same members form another one."""
        view = self.forming or self.view
        if view is not None and view.generation == generation and view.has(by):
            self.forming = None
            self._form(view.members, view.reasons)

    def _form(self, members: Iterable[Member], reasons: Mapping[int, str]) -> None:
        members = tuple(members)
        if self.forming is not None and tuple(m.id for m in members) == self.forming.ids:
            return
        self.last_generation += 1
        self.forming = View(self.last_generation, members, reasons=dict(reasons))

    def begin(self, generation: int, ready: Mapping[int, tuple[int, float]]) -> None:
        """All members have connected with each other: [Note: first step] of `Generations`, [Note: weights].

        Args:
            generation: that is being formed.
            ready: by member, a step that it does not start before it knows the first one, and its push-sum weight.
        """
        forming = self.forming
        if forming is None or generation != forming.generation or ready.keys() != set(forming.ids):
            return
        start, growth, turns = max(step for step, _ in ready.values()), 1.0, 0
        if self.view is None:
            self.founded = max(self.founded + 1, min(forming.ids))  # ids begin with the time of a worker's start
        else:
            start = max(start, self.view.start)  # the one before may not have begun
            num_joined, turns = len(set(forming.ids) - set(self.view.ids)), self.view.turns_before(start)
            growth = _growth([weight for _, weight in ready.values() if 0.0 < weight < math.inf] or [1.0], num_joined)
        self.view = replace(forming, start=start, growth=growth, turns=turns)
        self.forming = None
        self.founders, self.asked, self.left = {}, {}, {}
        pairs = [report for report in self.reports if self.view.has(report.by) and self.view.has(report.of)]
        self.reports = [report for report in pairs if not report.generation]  # [Note: late reports]
        self.joiners = {worker: joiner for worker, joiner in self.joiners.items() if not self.view.has(worker)}
        self._replace_lost_donors()
        if self.reports:
            self._change()

    def goes_on_from(self, known: Roster, worker: int) -> bool:
        """Whether a worker takes this roster over in place of the known one, or restores that: [Note: one history].

        Args:
            known: as the worker has read it last.
            worker: its id.
        """
        before, is_member = known.view, known.is_member(worker)
        if before is None:
            return True
        if self.view is None or self.founded != known.founded:
            is_other_job = self.view is not None and self.founded < known.founded
            return self.last_generation > 0 and (is_other_job or not is_member)
        if self.branch == known.branch:
            return before.generation <= self.view.generation
        return before.generation <= self.loaded

    def is_member(self, worker: int) -> bool:
        """Whether the worker is in the active generation, and has not left."""
        return self.view is not None and self.view.has(worker) and worker not in self.left

    def restore(self, known: Roster, worker: int, branch: int) -> None:
        """A worker knows this roster, which the one in the store does not go on from; branch: see `Roster.branch`."""
        if known.view is None or self.goes_on_from(known, worker):
            return
        view, had_begun, joiners = known.view, self.view is not None, {**known.joiners, **self.joiners}
        restored = replace(
            copy.deepcopy(known),
            forming=None,
            joiners={worker: joiner for worker, joiner in joiners.items() if not view.has(worker)},
            last_generation=max(self.last_generation, known.last_generation),
            next_number=max(self.next_number, known.next_number),
            branch=branch,
            loaded=view.generation,
        )
        vars(self).update(vars(restored))
        self._replace_lost_donors()
        if known.forming is not None or had_begun:
            self._form((known.forming or view).members, {})


Event: TypeAlias = Callable[[Roster], object]
"""One of the public methods of `Roster` with its arguments: see [Note: events]."""


def _growth(weights: Sequence[float], num_joined: int) -> float:
    """See [Note: weights] of `Roster`."""
    growth = len(weights) / max(len(weights) - num_joined, 1)
    # No logarithm, whose rounding may differ from machine to machine.
    mantissa, exponent = math.frexp(growth * math.fsum(weights) / len(weights))
    return math.ldexp(growth, (mantissa < _SQRT_HALF) - exponent)


def _left_out(
    members: Sequence[int],
    candidates: Mapping[int, Member],
    reports: Sequence[FailureReport],
    left: Mapping[int, str],
    *,
    on_partition: str,
) -> dict[int, str] | None:
    """The workers that are left out, with reasons; None: too few would remain. See [Note: majority] of `Roster`.

    Args:
        members: the members of the active generation.
        candidates: for the next one.
        reports: the reports of failures, in their order.
        left: the workers that have left by themselves, with reasons.
        on_partition: "majority" or "both".
    """

    def is_enough(gone: Mapping[int, str]) -> bool:
        return on_partition == "both" or _has_majority(members, gone, reports, left)

    gone = dict(left)
    for report in reports:
        if report.by not in gone and report.of not in gone:
            gone[report.of] = report.why
    if is_enough(gone):
        return gone
    gone = dict(left)
    while open_ones := [report for report in reports if report.by not in gone and report.of not in gone]:
        count = {worker: sum(worker in (r.by, r.of) for r in open_ones) for worker in candidates if worker not in gone}
        worst = max(count, key=lambda worker: (count[worker], candidates[worker].number))
        gone[worst] = next((r.why for r in open_ones if r.of == worst), None) or next(
            f"it said of worker {candidates[r.of].number}: {r.why}" for r in open_ones if r.by == worst
        )
    return gone if is_enough(gone) else None


def _has_majority(
    members: Sequence[int], gone: Mapping[int, str], reports: Sequence[FailureReport], left: Mapping[int, str]
) -> bool:
    """Whether more than half of the members that may live remain, or half of them with the first.

    Args:
        members: the members of the active generation.
        gone: the workers to leave out; their reports prove nothing about the others.
        reports: the reports of failures.
        left: the workers that have left by themselves.
    """
    ended = {report.of for report in reports if report.is_sure and report.by not in gone} | set(left)
    counted = [worker for worker in members if worker not in ended]
    remaining = [worker for worker in counted if worker not in gone]
    if not counted:
        return True
    return 2 * len(remaining) > len(counted) or (2 * len(remaining) == len(counted) and remaining[0] == counted[0])


def _add_report(reports: list[FailureReport], new: FailureReport) -> bool:
    """Append a report, or replace a less sure or less lasting one; returns whether this changes the roster.

    Args:
        reports: in their order; changed.
        new: the same worker may report the same one again, when that has ended.
    """
    for i, old in enumerate(reports):
        if (old.by, old.of) == (new.by, new.of):
            is_surer = new.is_sure and not old.is_sure
            holds_longer = old.generation > 0 == new.generation and not old.is_sure
            if is_surer or holds_longer:
                reports[i] = new
            return is_surer
    reports.append(new)
    return True
