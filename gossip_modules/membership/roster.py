"""Roster: the members of a job, as a function of events."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from .view import FailureReport, Joiner, Member, View, differences, member_of, report_of, view_of

# What the events of a stranger, or of another version, may raise.
GARBAGE = (AttributeError, KeyError, TypeError, ValueError, ArithmeticError, RecursionError)
_MAX_REFUSED = 64
_SQRT_HALF = 0.7071067811865476
MARGIN = 2  # training steps between the last rank that is ready for a generation and its first step


class Roster:
    """The state of the membership: a function of the events of its workers, in their order, and of nothing else.

    All workers share one roster, see `SharedRoster`, so they know the same generations without a leader. Time is not
    part of it: a worker that finds another one late reports it in an event.

    A change begins when a member reports another one, leaves, or has loaded the state of training. Then the remaining
    workers form the next generation. Each connects with the others and posts "ready", with a step that it does not
    begin (see [Note: first step]) before all are ready. Then the generation starts at the largest of these steps.

    [Note: majority] Members that cannot reach each other report each other. A generation needs more than half of the
    members of the one before, or half with the first of them; members whose process has ended do not count. Where the
    reports in their order leave no majority, the workers with the most reports are left out.

    [Note: late reports] A report that a member did not come to form a generation is void when that or a later one
    begins.

    [Note: weights] A worker that joins has half of its donor's push-sum weight. All then multiply their weights by the
    number of members over the number before, so the mean of the weights is as before. Workers that die take their
    weight with them, so that the mean may be anything after hundreds of deaths. The optimizer steps on x = z w, so a
    step of z is as long as the learning rate over w. Therefore each worker posts its weight with "ready", and where
    their mean would be more than a factor of sqrt(2) from one, all multiply theirs by a power of two, which changes no
    z.

    [Note: stale snapshot] A store that was started again is empty, and each worker that finds it so posts its own
    roster ("know"). The first one restores the job. If it was stopped or cut off, it knows too little: the others went
    on without it, and the generations that it forms alone must not take the job from them. So a roster with a later
    generation than the restored one replaces it, and its members form the next generation.

    Attributes:
        view: the generation that trains; None before the first.
        loaded: the generation with which a roster was restored; 0: it never was.
        forming: the generation that is being formed.
        ready: by member of `forming`, a step that it does not begin, and its push-sum weight.
        joiners: the join queue, by worker.
        founders: the workers that wait for the first generation.
        asked: how many workers each of them asks for.
        reports: of failures, in their order.
        left: why each worker of `view` that has left by itself did so.
        num_queries, num_replies: of workers that ask for a sign of life; see [Note: abandoned jobs] of `Joining`.
    """

    def __init__(self, *, on_partition: str = "majority") -> None:
        self.on_partition = on_partition
        self.view: View | None = None
        self.forming: View | None = None
        self.ready: dict[int, tuple[int, float]] = {}
        self.joiners: dict[int, Joiner] = {}
        self.founders: dict[int, Member] = {}
        self.asked: dict[int, int] = {}
        self.description: dict[str, str] = {}
        self.reports: list[FailureReport] = []
        self.left: dict[int, str] = {}
        self.last_generation = self.next_number = self.loaded = 0
        self.num_queries = self.num_replies = 0

    @property
    def num_founders(self) -> int:
        """The size of the first generation: the largest that a founder asks for."""
        return max((self.asked.get(worker, 1) for worker in self.founders), default=1)

    def present(self) -> list[Member]:
        """The members of the generation that trains, and of the one that is being formed."""
        views = [view for view in (self.view, self.forming) if view is not None]
        return list({member.id: member for view in views for member in view.members}.values())

    def has_place(self, worker: int) -> bool:
        """Whether the worker is a member, a founder or in the join queue."""
        return worker in self.joiners or worker in self.founders or any(worker == m.id for m in self.present())

    def dumps(self) -> str:
        """The roster as text."""
        return json.dumps({key: value for key, value in vars(self).items() if key != "on_partition"}, default=asdict)

    @classmethod
    def loads(cls, text: str, *, on_partition: str = "majority") -> Roster:
        """The roster of a text from `dumps`; raises one of `GARBAGE` for any other."""
        state, new = json.loads(text), cls(on_partition=on_partition)
        new.view, new.forming = (view and view_of(view) for view in (state["view"], state["forming"]))
        new.ready = {int(worker): (int(step), float(weight)) for worker, (step, weight) in state["ready"].items()}
        new.joiners = {int(k): Joiner(**{**j, "member": member_of(j["member"])}) for k, j in state["joiners"].items()}
        new.founders = {int(worker): member_of(member) for worker, member in state["founders"].items()}
        new.asked = {int(worker): int(count) for worker, count in state["asked"].items()}
        new.description = dict(state["description"])
        new.reports = list(map(report_of, state["reports"]))
        new.left = {int(worker): str(why) for worker, why in state["left"].items()}
        for name in ("last_generation", "next_number", "loaded", "num_queries", "num_replies"):
            setattr(new, name, int(state[name]))
        return new

    def apply(self, event: Mapping[str, Any]) -> None:
        """Take in one event; one that is not understood, or comes too late, changes nothing."""
        handlers = {
            "come": self._come,
            "loaded": self._loaded,
            "gave up": self._gave_up,
            "ready": self._ready,
            "report": self._report,
            "leave": self._leave,
            "again": self._again,
            "query": self._query,
            "reply": self._reply,
            "restart": self._restart,
            "know": self._know,
        }
        handler = handlers.get(str(event.get("event")))
        if handler is None:
            return
        try:
            handler(event)
        except GARBAGE:
            return

    # Workers that come.

    def _come(self, event: Mapping[str, Any]) -> None:
        member = member_of(event["member"])
        if self.has_place(member.id):
            return
        if self.view is None and self.forming is None:
            self._found(member, event)
            return
        refusal = differences(self.description, event["description"])
        if refusal:
            self._refuse(member, refusal)
            return
        members = (self.forming or self.view).members  # type: ignore[union-attr]
        limit = int(self.description.get("max_workers", 0))
        if limit and len({m.id for m in (*members, *self._waiting())}) >= limit:
            self._refuse(member, f"max_workers={limit}", is_full=True)
            return
        attempt, donor = int(event.get("attempt", 0)), members[member.id % len(members)].id
        self.reports = [r for r in self.reports if member.id not in (r.by, r.of)]  # it was left out, and comes again
        self.joiners[member.id] = Joiner(replace(member, number=self._new_number()), donor, attempt)

    def _found(self, member: Member, event: Mapping[str, Any]) -> None:
        description = {str(key): str(value) for key, value in event["description"].items()}
        refusal = differences(self.description, description) if self.founders else ""
        if refusal:
            self._refuse(member, refusal)
            return
        self.asked[member.id] = int(event["min_workers"])
        self.description = description
        self.founders[member.id] = replace(member, number=self._new_number())
        self._begin()

    def _begin(self) -> None:
        """Form the first generation, if all have come."""
        if len(self.founders) >= self.num_founders:
            self._form(self.founders.values(), {})

    def _query(self, event: Mapping[str, Any]) -> None:
        self.num_queries += 1

    def _reply(self, event: Mapping[str, Any]) -> None:
        """A member replies to a query."""
        if any(member.id == event["id"] for member in self.present()):
            self.num_replies += 1

    def _restart(self, event: Mapping[str, Any]) -> None:
        """A joining worker has found no member alive: the workers in the join queue found the job again."""
        worker, seen = int(event["member"]["id"]), (event["generation"], event["replies"])
        waiting, description = self._waiting(), self.description
        if self.present():
            if seen != (self.last_generation, self.num_replies) or worker not in self.joiners:
                return
            self._end()
        self.joiners.pop(worker, None)
        self._come(event)
        for member in waiting:
            self._come({**event, "member": asdict(member), "description": description})

    def _end(self) -> None:
        """The job is over, and another may begin."""
        self.view = self.forming = None
        self.reports, self.left, self.founders, self.asked, self.joiners = [], {}, {}, {}, {}

    def _refuse(self, member: Member, why: str, *, is_full: bool = False) -> None:
        """The worker reads the refusal in the join queue; the oldest refusals are dropped."""
        refused = [worker for worker, joiner in self.joiners.items() if joiner.refusal]
        for worker in refused[: -_MAX_REFUSED + 1]:
            del self.joiners[worker]
        self.joiners[member.id] = Joiner(member, donor=-1, refusal=why, is_full=is_full)

    def _new_number(self) -> int:
        self.next_number += 1
        return self.next_number - 1

    def _loaded(self, event: Mapping[str, Any]) -> None:
        joiner = self.joiners[event["id"]]
        if not joiner.refusal and joiner.attempt == event["attempt"] and not joiner.is_loaded:
            self.joiners[joiner.member.id] = replace(joiner, is_loaded=True)
            self._change()

    def _gave_up(self, event: Mapping[str, Any]) -> None:
        """A transfer has failed: another donor tries, unless the reason is the state itself, or the worker is gone."""
        joiner = self.joiners[event["id"]]
        if self.view is None or joiner.refusal or joiner.attempt != event["attempt"] or joiner.is_loaded:
            return
        if event.get("is_gone"):
            del self.joiners[joiner.member.id]
        elif event.get("why"):
            self.joiners[joiner.member.id] = replace(joiner, refusal=str(event["why"]))
        elif event["by"] in (joiner.member.id, joiner.donor):
            self._give_another_donor(joiner)

    def _give_another_donor(self, joiner: Joiner) -> None:
        assert self.view is not None
        members = [m for m in self.view.members if m.id not in self.left and m.id != joiner.donor] or self.view.members
        attempt = joiner.attempt + 1
        donor = members[(joiner.member.id + attempt) % len(members)].id
        self.joiners[joiner.member.id] = replace(joiner, donor=donor, attempt=attempt)

    def _replace_lost_donors(self) -> None:
        """Give another donor to joiners whose donor is not in the generation that trains."""
        assert self.view is not None
        for joiner in list(self.joiners.values()):
            if not (joiner.refusal or joiner.is_loaded or self.view.has(joiner.donor)):
                self._give_another_donor(joiner)

    # Workers that go.

    def _report(self, event: Mapping[str, Any]) -> None:
        report = report_of(event)
        if self.view is not None and 0 < report.generation <= self.view.generation:
            return  # [Note: late reports]
        present = {member.id for member in self.present()}
        if {report.by, report.of} <= present and _add_report(self.reports, report):
            self._change()

    def _leave(self, event: Mapping[str, Any]) -> None:
        worker = int(event["id"])
        if self.joiners.pop(worker, None) is None and self.founders.pop(worker, None) is None and self.view is None:
            return
        if any(worker == member.id for member in self.present()):
            self.left[worker] = str(event["why"])
            self._change()
        elif not self.present():  # it may have asked for more than the others
            self._begin()

    # The next generation.

    def _change(self) -> None:
        """Form the generation of the remaining workers, with those that have loaded the state."""
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

    def _again(self, event: Mapping[str, Any]) -> None:
        """A generation could not be connected, or begun in time: the same members form another one."""
        view = self.forming or self.view
        if view is not None and view.generation == event["generation"] and view.has(int(event["by"])):
            self.forming = None
            self._form(view.members, view.reasons)

    def _form(self, members: Iterable[Member], reasons: Mapping[int, str]) -> None:
        members = tuple(members)
        if self.forming is not None and tuple(m.id for m in members) == self.forming.ids:
            return
        self.last_generation += 1
        self.forming = View(self.last_generation, members, reasons=dict(reasons))
        self.ready = {}

    def _ready(self, event: Mapping[str, Any]) -> None:
        """[Note: first step] `step` is one that the member does not start before it knows the first step."""
        forming, worker = self.forming, int(event["id"])
        if forming is None or event["generation"] != forming.generation or not forming.has(worker):
            return
        weight = float(event["weight"])
        if not 0.0 < weight < math.inf:
            raise ValueError(f"got weight {weight}, expected a number above 0")
        self.ready[worker] = int(event["step"]), weight
        if set(self.ready) != set(forming.ids):
            return
        start, growth, turns = max(step for step, _ in self.ready.values()), 1.0, 0
        if self.view is not None:
            start = max(start, self.view.start)  # the one before may not have begun
            num_joined, turns = len(set(forming.ids) - set(self.view.ids)), self.view.turns_before(start)
            growth = _growth([weight for _, weight in self.ready.values()], num_joined)
        self.view = replace(forming, start=start, growth=growth, turns=turns)
        self.forming = None
        self.ready, self.founders, self.asked, self.left = {}, {}, {}, {}
        pairs = [report for report in self.reports if self.view.has(report.by) and self.view.has(report.of)]
        self.reports = [report for report in pairs if not report.generation]  # [Note: late reports]
        self.joiners = {worker: joiner for worker, joiner in self.joiners.items() if not self.view.has(worker)}
        self._replace_lost_donors()
        if self.reports:
            self._change()

    def _know(self, event: Mapping[str, Any]) -> None:
        """See [Note: stale snapshot]."""
        before, later = self, Roster.loads(event["roster"], on_partition=self.on_partition)
        if later.view is None or later.view.generation <= before.loaded:
            return
        later.loaded = later.view.generation
        joiners = {**later.joiners, **before.joiners}
        later.joiners = {worker: joiner for worker, joiner in joiners.items() if not later.view.has(worker)}
        later.last_generation = max(before.last_generation, later.last_generation)
        later.next_number = max(before.next_number, later.next_number)
        later._replace_lost_donors()
        members, was_forming = (later.forming or later.view).members, later.forming is not None
        later.forming = None
        if was_forming or before.view is not None:
            later._form(members, {})
        self.__dict__.update(vars(later))


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
        members: of the generation that trains.
        candidates: for the next one.
        reports: of failures, in their order.
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
    """Whether the remaining members are more than half of those that may live, or half with the first of them.

    Args:
        members: of the generation that trains.
        gone: the workers that would be left out; their reports prove nothing about the others.
        reports: of failures.
        left: the workers that have left by themselves.
    """
    ended = {report.of for report in reports if report.is_sure and report.by not in gone} | set(left)
    counted = [worker for worker in members if worker not in ended]
    remaining = [worker for worker in counted if worker not in gone]
    if not counted:
        return True
    return 2 * len(remaining) > len(counted) or (2 * len(remaining) == len(counted) and remaining[0] == counted[0])


def _add_report(reports: list[FailureReport], new: FailureReport) -> bool:
    """Append a report, or replace one that was less sure or holds less long; returns whether it changes the roster.

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
