"""Who remains where members report each other: more than half of those whose end was not seen."""

from __future__ import annotations

import pytest

from tests.library.membership.test_roster import apply, formed, forming, ids, job, report


@pytest.mark.parametrize(
    ("size", "reports", "remaining"),
    [
        pytest.param(8, [(0, 7), (4, 5), (4, 6)], (0, 1, 2, 3, 4), id="the larger part goes on"),
        pytest.param(4, [(0, 2), (0, 3)], (0, 1), id="of two halves that with the first"),
        pytest.param(4, [(2, 0), (2, 1)], (0, 1, 3), id="half without the first: those in most accusations go"),
        pytest.param(3, [(0, 1), (1, 0)], (0, 2), id="the first accusation of two counts"),
    ],
)
def test_the_majority_goes_on(size: int, reports: list[tuple[int, int]], remaining: tuple[int, ...]) -> None:
    roster = job(size)
    for by, of in reports:
        apply(roster, report(by, of))
    if roster.forming is not None:
        formed(roster)
    assert set(ids(roster)) == set(remaining)


def test_a_worker_that_is_left_out_for_its_accusation_is_told_the_reason() -> None:
    """Of two, the first one remains, though it may be the one that does not answer."""
    roster = job(2)
    apply(roster, report(1, 0))
    assert roster.forming is not None
    assert dict(roster.forming.reasons) == {1: "it said of worker 0: it was silent"}
    assert ids(formed(roster)) == (0,)


def test_a_minority_forms_nothing() -> None:
    roster = job(5)
    for by in (3, 4):
        for of in (0, 1, 2):
            apply(roster, report(by, of))
    if roster.forming is not None:
        formed(roster)
    assert {0, 1, 2} & set(ids(roster)), "three of five were left out by two"


def test_both_parts_go_on_where_that_is_asked_for() -> None:
    roster = job(5, on_partition="both")
    for of in (0, 1, 2):
        apply(roster, report(4, of))
    assert ids(formed(roster)) == (3, 4)


def test_processes_that_have_ended_do_not_count() -> None:
    roster = job(4)
    for of in (0, 1, 2):
        apply(roster, report(3, of, is_sure=True))
    assert ids(formed(roster)) == (3,)


def test_an_accusation_becomes_sure_when_the_silent_have_ended() -> None:
    roster = job(5)
    for by in (3, 4):
        for of in (0, 1, 2):
            apply(roster, report(by, of))
    assert forming(roster) == (0, 1, 2), "two of five are no majority"
    for of in (0, 1):
        apply(roster, report(3, of, is_sure=True))
        apply(roster, report(3, of))
    assert len(roster.reports) == 6
    assert forming(roster) == (3, 4), "two of the three that may live"
