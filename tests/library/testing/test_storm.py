"""The faults of a stormy store happen as often as drawn, from the seed alone."""

from __future__ import annotations

import uuid
from typing import Any

import pytest

from gossip_modules.mailbox.errors import Transient
from gossip_modules.mailbox.medium import open_medium
from gossip_modules.testing.storm import StormyMedium
from tests.library.mailbox.clock import InstantClock


def stormy(seed: int, **faults: Any) -> StormyMedium:
    inner = open_medium(f"memory://{uuid.uuid4().hex}", timeout=5.0, key=b"key", clock=InstantClock())
    return StormyMedium(inner, seed, **faults)


def faults_of(medium: StormyMedium) -> list[str]:
    """What happened to each of 200 tries."""
    found = []
    for i in range(200):
        try:
            medium._create(f"a/{i}", b"x")
            found.append("done")
        except Transient as error:
            found.append(f"{error} {'a/' + str(i) in medium.inner._list('')}")
    return found


def test_a_calm_store_is_the_store() -> None:
    medium = stormy(0)
    assert set(faults_of(medium)) == {"done"}
    assert medium.clock.now() == 0.0


def test_faults_are_drawn_from_the_seed() -> None:
    first, again, other = (faults_of(stormy(seed, loss=0.3, unavailable=0.3)) for seed in (1, 1, 2))
    assert first == again
    assert first != other
    assert set(first) == {"done", "the answer was lost True", "503 Service Unavailable False"}


def test_tries_are_late() -> None:
    medium = stormy(0, delay=2.0)
    faults_of(medium)
    assert 200 * 0.8 < medium.clock.now() < 200 * 1.2


def test_an_outage_has_its_times() -> None:
    medium = stormy(0, outage=[(1.0, 2.0)])
    for now, is_out in [(0.0, False), (1.0, True), (1.9, True), (2.0, False)]:
        medium.clock.sleep(now - medium.clock.now())
        if is_out:
            with pytest.raises(Transient, match="an outage"):
                medium._list("")
        else:
            assert medium._list("") == {}


def test_young_objects_may_be_absent_and_old_ones_are_there() -> None:
    medium = stormy(0, stale=0.5, stale_seconds=1.0)
    medium.create("a", b"x")
    young = [medium.get("a", max_bytes=9) for _ in range(50)]
    assert set(young) == {None, b"x"}
    assert medium.counts.refused == 0
    medium.clock.sleep(1.0)
    assert {medium.get("a", max_bytes=9) for _ in range(50)} == {b"x"}


def test_a_list_may_be_the_one_before() -> None:
    medium, sizes = stormy(0, stale=0.5), list[int]()
    for i in range(50):
        medium.create(f"a/{i}", b"x")
        sizes.append(len(medium.list("a")) - (i + 1))
    assert set(sizes) == {0, -1}
