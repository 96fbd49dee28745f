"""What is kept of a roster, and begun with."""

from __future__ import annotations

import json

import pytest

from gossip_modules.membership.events.roster import Roster
from tests.library.membership.events.test_roster import DESCRIPTION, accuse, come, formed, forming, ids, job


def test_the_state_of_an_earlier_version_is_read() -> None:
    """It had one number for all founders."""
    roster = Roster()
    roster.apply(come(0, min_workers=2))
    state = json.loads(roster.dumps(is_whole=True))
    del state["asked"]
    restored = Roster()
    restored.loads(json.dumps({**state, "num_founders": 2}))
    assert restored.num_founders == 2
    restored.apply(come(1, min_workers=2))
    assert forming(restored) == (0, 1)


def test_a_stale_snapshot_takes_the_job_from_nobody() -> None:
    """Worker 3 was stopped, and is the first to find a store that came back empty; the others had gone on."""
    going_on = job(4)
    stale = going_on.dumps()
    going_on.apply(accuse(0, 3))
    know = {"event": "know", "state": json.loads(formed(going_on).dumps())}
    roster = Roster()
    roster.loads(stale)
    roster.apply({**come(9), "description": DESCRIPTION})
    for other in range(3):
        roster.apply(accuse(3, other, is_sure=True))
    assert ids(formed(roster)) == (3,)
    assert roster.view is not None
    alone = roster.view.generation
    for _ in range(2):  # both others know it
        roster.apply(know)
    assert ids(formed(roster)) == (0, 1, 2)
    assert roster.view.generation == alone + 1
    assert roster.joiners[9].donor in ids(roster)
    roster.apply(know)
    assert roster.forming is None
    for garbage in ({}, {"state": 3}, {"state": {"view": None}}, {"state": {**know["state"], "view": {}}}):
        roster.apply({"event": "know", **garbage})
        assert ids(roster) == (0, 1, 2)


def test_a_store_that_comes_back_gets_the_state() -> None:
    roster = job(4)
    roster.apply(accuse(0, 3))
    formed(roster)
    other = Roster()
    other.loads(roster.dumps())
    assert (other.view, other.description, other.next_number) == (roster.view, roster.description, roster.next_number)
    for state in (roster, other):
        state.apply(accuse(0, 1))
    assert formed(other).view == formed(roster).view


def test_a_state_that_is_none_changes_nothing() -> None:
    roster = job(3)
    before = roster.dumps(is_whole=True)
    for garbage in ("{}", "3", '{"view": null}', '{"view": 3}', before.replace('"founders"', '"strangers"')):
        with pytest.raises((AttributeError, KeyError, TypeError, ValueError)):
            roster.loads(garbage)
        assert roster.dumps(is_whole=True) == before
