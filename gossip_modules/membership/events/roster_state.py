"""RosterState: what a roster knows, and the same as text."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from ..view import Accusation, Joiner, Member, View, accusation_of, member_of, view_of


class RosterState:
    """The base of `Roster`: its attributes, without what changes them.

    Attributes:
        view: the generation that trains; None before the first.
        loaded: the generation of the state that was taken from a snapshot, or from somebody who knew a later one.
        forming: the one that is being formed.
        ready: by member, the step that it has come to, and its push-sum weight; of `forming`.
        joiners: by worker.
        founders: who has come before the first generation.
        asked: how many workers each of them asks for.
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
        self.accusations: list[Accusation] = []
        self.left: dict[int, str] = {}  # by worker, of members of `view`
        self.last_generation = 0
        self.next_number = 0
        self.loaded = 0
        self.num_knocks = self.num_answers = 0  # see [Note: another life] of `Door`

    @property
    def num_founders(self) -> int:
        """How many workers the first generation has: the most that a founder asks for."""
        return max((self.asked.get(worker, 1) for worker in self.founders), default=1)

    def present(self) -> list[Member]:
        """The members of the generation that trains, and of the one that is being formed."""
        views = [view for view in (self.view, self.forming) if view is not None]
        return list({member.id: member for view in views for member in view.members}.values())

    def dumps(self, *, is_whole: bool = False) -> str:
        """What all agree in, for a store that came back empty; `is_whole`: for who reads on at the next event."""
        state: dict[str, Any] = {
            "view": None if self.view is None else asdict(self.view),
            "description": self.description,
            "last_generation": self.last_generation,
            "next_number": self.next_number,
        }
        if is_whole:
            state |= {
                "forming": None if self.forming is None else asdict(self.forming),
                "ready": list(self.ready.items()),
                **{name: [asdict(x) for x in getattr(self, name).values()] for name in ("joiners", "founders")},
                "asked": list(self.asked.items()),
                "accusations": [asdict(accusation) for accusation in self.accusations],
                "left": list(self.left.items()),
                "calls": [self.num_knocks, self.num_answers],
                "loaded": self.loaded,
            }
        return json.dumps(state)

    def loads(self, text: str) -> None:
        """Take back what `dumps` gave; raises, and changes nothing, where it is something else."""
        state = json.loads(text)
        new = type(self)(on_partition=self.on_partition)
        new.view = None if state["view"] is None else view_of(state["view"])
        new.description = dict(state["description"])
        new.last_generation, new.next_number = int(state["last_generation"]), int(state["next_number"])
        new.loaded = 0 if new.view is None else new.view.generation
        if "forming" in state:
            new._load_whole(state)
        self.__dict__.update(new.__dict__)

    def _load_whole(self, state: Mapping[str, Any]) -> None:
        self.forming = None if state["forming"] is None else view_of(state["forming"])
        self.ready = {int(worker): (int(step), float(weight)) for worker, (step, weight) in state["ready"]}
        self.left = dict(state["left"])
        self.joiners = {j["member"]["id"]: Joiner(**{**j, "member": member_of(j["member"])}) for j in state["joiners"]}
        self.founders = {member.id: member for member in map(member_of, state["founders"])}
        asked = state.get("asked", [(founder, state.get("num_founders", 1)) for founder in self.founders])  # of before
        self.asked = {int(worker): int(count) for worker, count in asked}
        self.accusations = [accusation_of(accusation) for accusation in state["accusations"]]
        self.num_knocks, self.num_answers = map(int, state["calls"])
        self.loaded = int(state["loaded"])
