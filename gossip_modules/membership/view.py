"""The entries of a roster: members, generations, joining workers, and reports; their JSON; and changes."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass, field, is_dataclass
from functools import cache
from itertools import repeat
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from .liveness.contact import Address, Contact

# What the value of another program, or of another version, may raise where it is read.
GARBAGE = (AttributeError, KeyError, TypeError, ValueError, ArithmeticError, RecursionError)


@dataclass(frozen=True)
class Member:
    """One worker.

    Raises:
        ValueError: no packet can be sent to its address. Anybody may write to the store of the roster.

    Attributes:
        id: the id of this start of the process; another start is another member.
        number: the number of the worker in names and logs: 0, 1, ... in the order of arrival; -1: not given yet.
        host: the host of the process.
        pid: the id of the process.
        address: the address of its listener, (host, port).
        secret: its random number in hexadecimal digits; see [Note: secrets of workers] of `Contact`.
    """

    id: int
    number: int
    host: str
    pid: int
    address: Address
    secret: str = field(default="", repr=False)

    def __post_init__(self) -> None:
        host, port = self.address
        ipaddress.IPv4Address(host)
        bytes.fromhex(self.secret)
        if not 0 < port < 1 << 16 or not 0 <= self.id < 1 << 64:
            raise ValueError(f"got worker {self.id} at port {port}, expected one that fits a packet")

    @property
    def contact(self) -> Contact:
        """The address of the worker, and the secret that identifies it."""
        return Contact(self.id, self.address, bytes.fromhex(self.secret))

    def __str__(self) -> str:
        return f"worker {self.number} ({self.host}, process {self.pid})"


@dataclass(frozen=True)
class View:
    """A generation: its members in the order of their positions, and its first training step.

    Attributes:
        generation: its number: 1, 2, ...; the number of a failed formation is skipped.
        members: position i of the graph is members[i].
        start: the first step of its rounds; -1 while it is being formed.
        growth: the factor of all push-sum weights when it begins; see [Note: weights] of `Roster`.
        turns: the training steps of all workers in the generations before, added up.
        reasons: the reason of each departure since the generation before, by number of the member.

    Raises:
        ValueError: it has no members.
    """

    generation: int
    members: tuple[Member, ...]
    start: int = -1
    growth: float = 1.0
    turns: int = 0
    reasons: Mapping[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.members:
            raise ValueError(f"got generation {self.generation} without members, expected one or more")

    def turns_before(self, step: int) -> int:
        """The sum of the training steps of all workers before `step`, a step of this generation."""
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
    """A worker in the join queue.

    Attributes:
        member: the worker.
        donor: the id of its donor of the training state; -1: it has no donor.
        attempt: grows with each donor, and with each new arrival of the worker.
        is_loaded: whether it has the state.
        refusal: the reason for a refusal; empty: the worker may join.
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
        generation: the number of the generation in formation without the failed worker; the report is void afterwards.
            0: the report holds in all generations.
    """

    by: int
    of: int
    why: str
    is_sure: bool
    generation: int = 0


def parsed(kind: Any, value: Any) -> Any:
    """The value of a type, such as a dataclass of typed fields, from its JSON; raises one of `GARBAGE` for any other.

    Args:
        kind: a dataclass, a number, a string, a bool; or a dict, a list, a tuple or an optional value of such.
        value: as `json.loads` returns it for the JSON of `asdict`.
    """
    origin, arguments = get_origin(kind), get_args(kind)
    if is_dataclass(kind):
        hints = _hints_of(kind)  # type: ignore[arg-type]
        if hints.keys() != value.keys():
            raise ValueError(f"got {sorted(value)}, expected {sorted(hints)}")
        return kind(**{name: parsed(hints[name], entry) for name, entry in value.items()})  # type: ignore[operator]
    if origin is UnionType:
        return None if value is None else parsed(arguments[0], value)
    if origin in (dict, Mapping):
        return {parsed(arguments[0], key): parsed(arguments[1], entry) for key, entry in value.items()}
    if origin is list:
        return [parsed(arguments[0], entry) for entry in value]
    if origin is tuple:
        kinds = repeat(arguments[0]) if Ellipsis in arguments else arguments
        return tuple(parsed(*pair) for pair in zip(kinds, value))
    return kind(value)


@cache
def _hints_of(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)


def differences(expected: Mapping[str, str], got: Mapping[str, str]) -> str:
    """The differences between the descriptions of a job and of a worker, with both sides; empty: they are equal."""
    names = [name for name in {**expected, **got} if expected.get(name) != got.get(name)]
    return "; ".join(f"{name}: got {got.get(name)!r:.200}, expected {expected.get(name)!r:.200}" for name in names)


@dataclass(frozen=True)
class Change:
    """A new generation, after its begin.

    Attributes:
        generation: its number.
        step: the first training step of its rounds.
        rank: the rank of this worker, its position in the graph.
        members: the numbers of the workers, by rank.
        joined: the numbers of new members.
        left: the reason of each departure, by number of the worker.
    """

    generation: int
    step: int
    rank: int
    members: tuple[int, ...]
    joined: tuple[int, ...]
    left: Mapping[int, str]
