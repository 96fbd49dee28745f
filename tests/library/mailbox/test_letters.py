"""A letter counts at one of its ends, over each kind of store; what is no letter stays where it is."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from gossip_modules.flat.vector import FlatVector
from gossip_modules.mailbox.job import MailJob, Settings
from gossip_modules.mailbox.letters import Letters
from gossip_modules.mailbox.medium import open_medium

KEY = b"the key of the job"
SETTINGS = Settings(quorum=1, grace=5.0, poll=0.1, interval=5.0, timeout=5.0, audit=0.0, save_every=1)


def vector(*values: float) -> FlatVector:
    return FlatVector.over(torch.tensor(values, dtype=torch.float64))


class End:
    """A worker and its letters."""

    def __init__(self, address: str, *, key: bytes = KEY, size: int = 2) -> None:
        self.medium = open_medium(address, timeout=5.0, key=key)
        self.job = MailJob(self.medium, SETTINGS)
        self.job.claim({})
        self.letters = Letters(self.job, vector(*[0.0] * size).layout)

    @property
    def deadline(self) -> float:
        return self.medium.clock.now() + 5.0

    def send(self, other: End, *values: float) -> None:
        self.letters.post(other.job.number, {"weight": 0.5}, vector(*values))
        self.letters.deliver(deadline=self.deadline)

    def arrived(self) -> list[list[float]]:
        """The vectors of the letters that count here, after a look."""
        self.letters.collect(deadline=self.deadline)
        found, self.letters.arrived = self.letters.arrived, []
        return [letter.vector.segments[0].tolist() for letter in found]

    def settle(self, *live: End) -> None:
        self.letters.settle([end.job.number for end in live], deadline=self.deadline)


@pytest.fixture
def ends(address: str) -> Iterator[tuple[End, End]]:
    pair = End(address), End(address)
    yield pair
    for end in pair:
        end.medium.close()


def paths(end: End) -> list[str]:
    return sorted(end.medium.list("mail"))


def test_a_letter_arrives_once_and_its_objects_go(ends: tuple[End, End]) -> None:
    sender, receiver = ends
    sender.send(receiver, 1.0, 2.0)
    assert receiver.arrived() == [[1.0, 2.0]]
    assert receiver.arrived() == []
    assert paths(sender) == ["mail/000001/000000/0000000000.taken"]
    sender.settle(receiver)
    assert sender.letters.posted == []
    sender.send(receiver, 3.0, 4.0)
    assert receiver.arrived() == [[3.0, 4.0]]
    assert receiver.arrived() == []
    assert paths(sender) == ["mail/000001/000000/0000000001.taken"]


def test_a_letter_to_a_silent_worker_goes_back(ends: tuple[End, End]) -> None:
    sender, receiver = ends
    sender.send(receiver, 1.0, 2.0)
    sender.settle()
    assert [letter.vector.segments[0].tolist() for letter in sender.letters.arrived] == [[1.0, 2.0]]
    assert receiver.arrived() == []
    sender.settle()
    assert len(sender.letters.arrived) == 1
    assert paths(sender) == ["mail/000001/000000/0000000000.taken"]


def test_a_taken_letter_does_not_go_back(ends: tuple[End, End]) -> None:
    sender, receiver = ends
    sender.send(receiver, 1.0, 2.0)
    assert receiver.arrived() == [[1.0, 2.0]]
    sender.settle()
    assert not sender.letters.arrived
    assert not sender.letters.posted


def memory_ends(name: str) -> tuple[End, End]:
    return End(f"memory://letters-{name}"), End(f"memory://letters-{name}")


def test_forged_moved_and_strange_objects_are_no_letters() -> None:
    sender, receiver = memory_ends("forged")
    sender.send(receiver, 1.0, 2.0)
    (path,) = paths(sender)
    sealed = sender.medium._get(path, 1 << 20)
    assert sealed is not None
    sender.medium._create("mail/000001/000000/0000000007", bytes(sealed))  # moved
    sender.medium._create("mail/000001/000000/0000000008", bytes(sealed)[:-1])
    forger = open_medium("memory://letters-forged", timeout=5.0, key=b"another key")
    forger.create("mail/000001/000000/0000000009", b"forged")
    for strange in ("mail/000001/x/0", "mail/000001/000000/1", "mail/000001/000000/0000000003/x"):
        forger.create(strange, b"")
    assert receiver.arrived() == [[1.0, 2.0]]
    assert receiver.arrived() == []
    assert receiver.medium.counts.refused >= 3


def test_a_forged_decision_stops_a_letter_and_doubles_none() -> None:
    sender, receiver = memory_ends("decision")
    sender.send(receiver, 1.0, 2.0)
    forger = open_medium("memory://letters-decision", timeout=5.0, key=b"another key")
    forger.create("mail/000001/000000/0000000000.taken", b"forged")
    assert receiver.arrived() == []
    sender.settle()
    assert sender.letters.arrived == []
    forger.delete(["mail/000001/000000/0000000000.taken"])
    assert receiver.arrived() == [[1.0, 2.0]]
    sender.settle()
    assert sender.letters.arrived == []


def test_a_letter_with_another_layout_stays() -> None:
    sender = End("memory://letters-layout", size=3)
    receiver = End("memory://letters-layout")
    sender.send(receiver, 1.0, 2.0, 3.0)
    assert receiver.arrived() == []
    sender.settle()
    assert len(sender.letters.arrived) == 1


def test_letters_arrive_by_sender_and_age() -> None:
    first, second = memory_ends("order")
    third = End("memory://letters-order")
    for value in (2.0, 1.0):
        second.send(third, value, 0.0)
    first.send(third, 3.0, 0.0)
    assert third.arrived() == [[3.0, 0.0], [2.0, 0.0], [1.0, 0.0]]
    assert second.letters.num_unread(2) == 2
    second.settle(third)
    assert second.letters.num_unread(2) == 0
