"""Roster: who is live, as every worker computes it from the same log of events."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from ..liveness.majority import add_accusation, left_out
from ..view import Joiner, Member, View, accusation_of, differences, member_of
from .roster_state import RosterState

# What the events of a stranger, or of another version, may raise.
GARBAGE = (AttributeError, KeyError, TypeError, ValueError, ArithmeticError)
_MAX_REFUSED = 64
_SQRT_HALF = 0.7071067811865476
MARGIN = 2  # training steps between the last rank that is ready for a generation and its first step


class Roster(RosterState):
    """The state of the membership: a function of the events in the log, in their order, and of nothing else.

    So all workers that have read the log as far know the same generations without a leader. Time is not part of it: a
    worker that finds others late says so in an event.

    A change: somebody accuses a member, leaves, or has loaded the state of training. Then the next generation is to be
    formed by those that remain. Each connects with the others, and says so ("ready"), with the step that it has come
    to and beyond which it does not train (see [Note: first step]) before all have. When all have, the generation
    starts at the largest of these steps.

    [Note: majority] Members that cannot reach each other accuse each other. A generation needs more than half of the
    members of the one before, or half with the first of them; those whose process has ended do not count. Where the
    accusations in their order leave no majority, those that are in most of them go.

    [Note: late accusations] That a member did not come to form a generation is void when that or a later one begins.

    [Note: weights] A worker that joins has half of its donor's push-sum weight, so that all then multiply theirs by the
    number of members over that of those who were there, and the mean of the weights is as before. It is not kept where
    workers die, each with what it holds: after hundreds of deaths it may be anything. The optimizer steps on x = z w,
    so that a step of z is as long as the learning rate over w. So each says its weight with "ready", and where their
    mean would be more than a factor of sqrt(2) from one, all multiply theirs by a power of two, which changes no z.

    [Note: stale snapshot] The first worker that finds an empty store puts there what it knows. If it was stopped or cut
    off, that is too little: the others went on without it, and the generations that it forms alone must not take the
    job from them. A worker that has seen a later generation than the snapshot says so ("know"), with its own state,
    which replaces all that has come from the snapshot; its members form the next generation.
    """

    def apply(self, event: Mapping[str, Any]) -> None:
        """Take in one event of the log; what is not understood, or comes too late, changes nothing."""
        handlers = {
            "come": self._come,
            "loaded": self._loaded,
            "gave up": self._gave_up,
            "ready": self._ready,
            "accuse": self._accuse,
            "leave": self._leave,
            "again": self._again,
            "knock": self._knock,
            "here": self._here,
            "anew": self._anew,
            "know": self._know,
        }
        handler = handlers.get(str(event.get("event")))
        if handler is None:
            return
        try:
            handler(event)
        except GARBAGE:
            return

    # Who comes.

    def _come(self, event: Mapping[str, Any]) -> None:
        member = member_of(event["member"])
        if member.id in self.founders or any(member.id == other.id for other in self.present()):
            return
        if self.view is None and self.forming is None:
            self._found(member, event)
            return
        if member.id in self.joiners:  # it says so again where the store came back empty
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
        donor = members[member.id % len(members)].id
        self.accusations = [a for a in self.accusations if member.id not in (a.by, a.of)]  # left out
        self.joiners[member.id] = Joiner(replace(member, number=self._new_number()), donor)

    def _found(self, member: Member, event: Mapping[str, Any]) -> None:
        description = {str(key): str(value) for key, value in event["description"].items()}
        if self.founders:
            refusal = differences(self.description, description)
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

    def _knock(self, event: Mapping[str, Any]) -> None:
        self.num_knocks += 1

    def _here(self, event: Mapping[str, Any]) -> None:
        """A member answers who was asked by a worker at the door whether it lives."""
        if any(member.id == event["id"] for member in self.present()):
            self.num_answers += 1

    def _anew(self, event: Mapping[str, Any]) -> None:
        """A worker at the door has found nobody who lives: those who wait there found the job again."""
        worker, life = int(event["member"]["id"]), (event["generation"], event["answers"])
        waiting, description = self._waiting(), self.description
        if self.present():
            if life != (self.last_generation, self.num_answers) or worker not in self.joiners:
                return
            self._end()
        self.joiners.pop(worker, None)
        self._come(event)
        for member in waiting:
            self._come({**event, "member": asdict(member), "description": description})

    def _end(self) -> None:
        """The job is over, and another may begin."""
        self.view = self.forming = None
        self.accusations, self.left, self.founders, self.asked, self.joiners = [], {}, {}, {}, {}

    def _refuse(self, member: Member, why: str, *, is_full: bool = False) -> None:
        """It reads so here; the oldest of those who have done so are forgotten."""
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
        """A donor and a joiner have not come together: another donor tries, unless the reason is the state itself."""
        joiner = self.joiners[event["id"]]
        if self.view is None or joiner.refusal or joiner.attempt != event["attempt"] or joiner.is_loaded:
            return
        if event.get("is_gone") and event["number"] == joiner.member.number:  # it has not come again
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

    # Who goes.

    def _accuse(self, event: Mapping[str, Any]) -> None:
        accusation = accusation_of(event)
        if self.view is not None and 0 < accusation.generation <= self.view.generation:
            return  # [Note: late accusations]
        present = {worker for view in (self.view, self.forming) if view is not None for worker in view.ids}
        if {accusation.by, accusation.of} <= present and add_accusation(self.accusations, accusation):
            self._change()

    def _leave(self, event: Mapping[str, Any]) -> None:
        worker = int(event["id"])
        if self.joiners.pop(worker, None) is None and self.founders.pop(worker, None) is None and self.view is None:
            return
        if any(view is not None and view.has(worker) for view in (self.view, self.forming)):
            self.left[worker] = str(event["why"])
            self._change()
        elif not self.present():  # it may have asked for more than the others
            self._begin()

    # The next generation.

    def _change(self) -> None:
        """Form the generation of those who remain, with those who have loaded."""
        base = self.view or self.forming
        if base is None:
            return
        candidates = {m.id: m for m in base.members}
        if self.forming is not None:
            candidates |= {m.id: m for m in self.forming.members}
        candidates |= {j.member.id: j.member for j in self.joiners.values() if j.is_loaded}
        # Who has died or left at the door is no candidate any more: what it saw, and what was seen of it, is over.
        self.accusations = [a for a in self.accusations if a.by in candidates and a.of in candidates]
        self.left = {worker: why for worker, why in self.left.items() if worker in candidates}
        gone = left_out(base.ids, candidates, self.accusations, self.left, on_partition=self.on_partition)
        if gone is None:
            return
        if self.view is None:  # a founder has gone: the first generation waits for another one
            self.forming, self.accusations, self.left = None, [], {}
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
        for view in (self.forming, self.view if self.forming is None else None):
            if view is not None and view.generation == event["generation"] and view.has(int(event["by"])):
                self.forming = None
                self._form(view.members, view.reasons)
                return

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
        self.ready = {}
        self.founders, self.asked = {}, {}
        pairs = [a for a in self.accusations if self.view.has(a.by) and self.view.has(a.of)]
        self.accusations = [a for a in pairs if not a.generation]  # [Note: late accusations]
        self.left = {}
        self.joiners = {worker: joiner for worker, joiner in self.joiners.items() if not self.view.has(worker)}
        for joiner in list(self.joiners.values()):
            if not (joiner.refusal or joiner.is_loaded or self.view.has(joiner.donor)):
                self._give_another_donor(joiner)
        if self.accusations:
            self._change()

    def _know(self, event: Mapping[str, Any]) -> None:
        """See [Note: stale snapshot]."""
        later = Roster(on_partition=self.on_partition)
        later.loads(json.dumps(event["state"]))
        if later.view is None or later.loaded <= self.loaded:
            return
        joiners = {worker: joiner for worker, joiner in self.joiners.items() if not later.view.has(worker)}
        generation = max(self.last_generation, later.last_generation)
        number = max(self.next_number, later.next_number)
        self.loads(json.dumps(event["state"]))
        self.last_generation, self.next_number, self.joiners = generation, number, joiners
        for joiner in list(joiners.values()):
            if not (joiner.refusal or joiner.is_loaded or later.view.has(joiner.donor)):
                self._give_another_donor(joiner)
        self._form(later.view.members, {})


def _growth(weights: Sequence[float], num_joined: int) -> float:
    """See [Note: weights] of `Roster`."""
    growth = len(weights) / max(len(weights) - num_joined, 1)
    # No logarithm, whose rounding may differ from machine to machine.
    mantissa, exponent = math.frexp(growth * math.fsum(weights) / len(weights))
    return math.ldexp(growth, (mantissa < _SQRT_HALF) - exponent)
