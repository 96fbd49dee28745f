"""The entries of a roster: members, generations, joining workers, and reports of failures."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .liveness.contact import Address, Contact


@dataclass(frozen=True)
class Member:
    """One worker.

    Attributes:
        id: of this start of the process; another start is another member.
        number: of the worker in names and logs: 0, 1, ... in the order of arrival; -1: not given yet.
        host: of the process.
        pid: of the process.
        address: of its heartbeats, (host, port).
        secret: its random number in hexadecimal digits; see [Note: secrets of workers].
    """

    id: int
    number: int = -1
    host: str = ""
    pid: int = 0
    address: Address = ("", 0)
    secret: str = field(default="", repr=False)

    @property
    def contact(self) -> Contact:
        """The address of the worker, and the secret that identifies it."""
        return Contact(self.id, self.address, bytes.fromhex(self.secret))

    def __str__(self) -> str:
        return f"worker {self.number} ({self.host}, process {self.pid})"


@dataclass(frozen=True)
class View:
    """A generation: its members in the order of their positions, and the training step with which it starts.

    Attributes:
        generation: 1, 2, ...; a generation that could not be formed is skipped.
        members: position i of the graph is members[i].
        start: the first step of its rounds; -1 while it is being formed.
        growth: the factor of all push-sum weights when it begins; see [Note: weights] of `Roster`.
        turns: the training steps of all workers in the generations before, added up.
        reasons: by number of each member that left since the generation before, why.
    """

    generation: int
    members: tuple[Member, ...]
    start: int = -1
    growth: float = 1.0
    turns: int = 0
    reasons: Mapping[int, str] = field(default_factory=dict)

    def turns_before(self, step: int) -> int:
        """The training steps of all workers before `step`, which is of this generation, added up."""
        return self.turns + (step - self.start) * len(self.members)

    @property
    def ids(self) -> tuple[int, ...]:
        """The ids of the members, by position."""
        return tuple(member.id for member in self.members)

    def has(self, worker: int) -> bool:
        """Whether the worker is a member."""
        return worker in self.ids


@dataclass(frozen=True)
class Joiner:
    """A worker that waits in the join queue.

    Attributes:
        member: the worker.
        donor: the id of the member that gives it the state of training; -1: none does.
        attempt: grows with each donor, and with each time that the worker comes again.
        is_loaded: whether it has that state.
        refusal: why it may not join; empty: it may.
        is_full: whether the reason is that the job has as many workers as it takes.
    """

    member: Member
    donor: int
    attempt: int = 0
    is_loaded: bool = False
    refusal: str = ""
    is_full: bool = False

    @property
    def key(self) -> tuple[int, int]:
        """Identifies one transfer of the state."""
        return self.member.id, self.attempt


@dataclass(frozen=True)
class FailureReport:
    """A member's report that another one has failed.

    Attributes:
        by: the id of the reporting member.
        of: the id of the failed one.
        why: the reason, for logs.
        is_sure: whether its process has ended, since its machine refused a connection.
        generation: the one that it did not come to form, after which the report is void; 0: the report holds in all.
    """

    by: int
    of: int
    why: str
    is_sure: bool
    generation: int = 0


def member_of(state: Mapping[str, Any]) -> Member:
    """A member from the store, where anybody may write; raises ValueError for one to which no packet can be sent."""
    host, port = state["address"]
    host, port, worker = str(host), int(port), int(state["id"])
    ipaddress.IPv4Address(host)
    if not 0 < port < 1 << 16 or not 0 <= worker < 1 << 64:
        raise ValueError(f"got worker {worker} at port {port}, expected one that fits a packet")
    secret = bytes.fromhex(state.get("secret", "")).hex()
    return Member(worker, int(state["number"]), str(state["host"]), int(state["pid"]), (host, port), secret)


def report_of(state: Mapping[str, Any]) -> FailureReport:
    by, of, generation = int(state["by"]), int(state["of"]), int(state.get("generation", 0))
    return FailureReport(by, of, str(state["why"]), bool(state["is_sure"]), generation)


def view_of(state: Mapping[str, Any]) -> View:
    members = tuple(member_of(member) for member in state["members"])
    reasons = {int(number): str(why) for number, why in state["reasons"].items()}
    generation, start, turns = (int(state[x]) for x in ("generation", "start", "turns"))
    return View(generation, members, start, float(state["growth"]), turns, reasons)


def differences(expected: Mapping[str, str], got: Mapping[str, str]) -> str:
    """The differences between the descriptions of a job and of a worker, with both sides; empty: they are equal."""
    names = [name for name in {**expected, **got} if expected.get(name) != got.get(name)]
    return "; ".join(f"{name}: got {got.get(name)!r:.200}, expected {expected.get(name)!r:.200}" for name in names)
