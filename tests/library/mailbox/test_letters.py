"""A letter counts at one of its ends, over each kind of store; what is no letter stays where it is."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterable, Iterator

import pytest
import torch

from gossip_modules.flat.vector import FlatVector
from gossip_modules.lab.virtual_clock import VirtualClock
from gossip_modules.mailbox.errors import Transient, Unavailable
from gossip_modules.mailbox.job import MailJob, Settings
from gossip_modules.mailbox.letters import Letters
from gossip_modules.mailbox.medium import Medium, open_medium
from gossip_modules.mailbox.memory import MemoryMedium
from gossip_modules.mailbox.sealed import Seal
from gossip_modules.testing.storm import StormyMedium

KEY = b"the key of the job"
SETTINGS = Settings(quorum=1, grace=5.0, poll=0.1, interval=5.0, timeout=5.0, audit=0.0, save_every=1)


def vector(*values: float) -> FlatVector:
    return FlatVector.over(torch.tensor(values, dtype=torch.float64))


class End:
    """A worker and its letters."""

    def __init__(self, store: str | Medium, *, size: int = 2) -> None:
        self.medium = open_medium(store, timeout=5.0, key=KEY) if isinstance(store, str) else store
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
    assert not sender.letters.posted
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


def test_a_letter_that_was_taken_without_an_answer_stays_when_the_next_one_comes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its sender knows that it was taken, and the receiver does not; then a read of an old state does not find it."""
    sender, receiver = memory_ends("unanswered")
    medium = receiver.medium
    create, get = medium._create, medium._get
    sender.send(receiver, 1.0, 2.0)

    def unanswered(path: str, data: bytes) -> bool:
        create(path, data)
        raise Transient("the answer was lost")

    with monkeypatch.context() as patch:
        patch.setattr(medium, "_create", unanswered)
        with pytest.raises(Unavailable, match="the answer was lost"):
            receiver.letters.collect(deadline=medium.clock.now())
    sender.settle(receiver)
    assert not sender.letters.posted
    sender.send(receiver, 3.0, 4.0)
    monkeypatch.setattr(medium, "_get", lambda path, size: None if path.endswith("/0000000000") else get(path, size))
    assert receiver.arrived() == [[1.0, 2.0], [3.0, 4.0]]


class LateMedium(StormyMedium):
    """A store with faults, in which some writes and deletions take effect long after their tries have failed."""

    lateness = 0.0

    def _create(self, path: str, data: bytes) -> bool:
        self._let_be_late(lambda: self.inner._create(path, data))
        return super()._create(path, data)

    def _delete(self, paths: Iterable[str]) -> None:
        paths = list(paths)
        self._let_be_late(lambda: self.inner._delete(paths))
        super()._delete(paths)

    def _let_be_late(self, request: Callable[[], object]) -> None:
        if self._faults.random() < self.lateness:
            seconds = self._faults.uniform(0.0, 15.0)

            def late() -> None:
                self.clock.sleep(seconds)
                request()

            self.clock.start(late, "a late request")
            raise Transient("the answer was lost")


@pytest.mark.parametrize("seeds", [range(12), range(12, 24), range(24, 36)], ids=str)
def test_each_letter_counts_once_whatever_the_order_of_requests(seeds: Iterable[int]) -> None:
    """Each end holds others to be silent that are not."""
    assert sum(num_back(seed) for seed in seeds) > 0


def num_back(seed: int) -> int:
    """Assert that each letter counts once after drawn requests; returns the number of letters that have gone back."""
    clock, draw, sent = VirtualClock(seed=seed), random.Random(seed), list[float]()
    stores = [
        LateMedium(MemoryMedium(f"once-{seed}", timeout=5.0, clock=clock, seal=Seal(KEY)), seed=10 * seed + i)
        for i in range(3)
    ]
    ends = [End(store, size=1) for store in stores]
    for store in stores:
        store.loss, store.unavailable, store.delay, store.lateness = 0.35, 0.1, 0.2, 0.05
        store.stale, store.stale_seconds = 0.3, 30.0

    def look(end: End, live: Iterable[End]) -> None:
        deadline = clock.now() + 1.0
        with contextlib.suppress(Unavailable):
            end.letters.settle([other.job.number for other in live], deadline=deadline)
            end.letters.deliver(deadline=deadline)
            end.letters.collect(deadline=deadline)

    def work(end: End) -> None:
        for _ in range(20):
            number = draw.choice([other.job.number for other in ends if other is not end])
            if end.letters.num_unread(number) < 2:
                sent.append(float(len(sent)))
                end.letters.post(number, {}, vector(sent[-1]))
            look(end, [other for other in ends if draw.random() < 0.7])
            clock.sleep(draw.uniform(0.0, 2.0))

    def look_in_calm() -> None:
        clock.sleep(30.0)
        for end in 4 * ends:
            look(end, ends)

    for end in ends:
        clock.start(lambda end=end: work(end), "an end")  # type: ignore[misc]
    clock.run()
    for store in stores:
        store.loss = store.unavailable = store.stale = store.delay = store.lateness = 0.0
    clock.start(look_in_calm, "calm")
    clock.run()
    clock.close()
    arrived = [letter for end in ends for letter in end.letters.arrived]
    assert sorted(letter.vector.segments[0].item() for letter in arrived) == sent, f"seed {seed}"
    assert not any(end.letters.posted for end in ends), f"seed {seed}"
    return sum(letter.sender == end.job.number for end in ends for letter in end.letters.arrived)


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
