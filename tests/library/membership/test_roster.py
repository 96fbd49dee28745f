"""Roster: the same generations from the same events, whatever they are."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from functools import partial
from operator import methodcaller
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gossip_modules.membership.roster import Event, Roster
from gossip_modules.membership.view import GARBAGE, FailureReport, Member, View, parsed

DESCRIPTION = {"model": "mlp", "graph": "ring"}


def member(worker: int) -> Member:
    return Member(worker, -1, "node", worker, ("127.0.0.1", 1000 + worker))


def come(worker: int, *, min_workers: int = 4, description: Mapping[str, str] = DESCRIPTION) -> Event:
    return methodcaller("come", member(worker), description=dict(description), min_workers=min_workers)


def report(by: int, of: int, *, is_sure: bool = False, generation: int = 0) -> Event:
    why = f"it did not come to form generation {generation}" if generation else "it was silent"
    return methodcaller("report", FailureReport(by, of, why, is_sure, generation))


def leave(worker: int) -> Event:
    return methodcaller("leave", worker, why="it left")


def loaded(worker: int, attempt: int) -> Event:
    return methodcaller("mark_loaded", worker, attempt)


def begin(members: Iterable[int], generation: int, *, step: int, weight: float = 1.0) -> Event:
    return methodcaller("begin", generation, dict.fromkeys(members, (step, weight)))


def know(known: str, *, worker: int = 0, branch: int = 1) -> Event:
    return methodcaller("restore", Roster.loads(known), worker, branch)


def apply(roster: Roster, event: Event) -> None:
    """Apply an event twice, as a worker does that has not received the reply of the store: it counts once."""
    event(roster)
    once = roster.dumps()
    event(roster)
    assert roster.dumps() == once


def formed(roster: Roster, *, step: int = 10, weight: float = 1.0) -> Roster:
    """All that are to form a generation say that they are ready."""
    assert roster.forming is not None
    apply(roster, begin(roster.forming.ids, roster.forming.generation, step=step, weight=weight))
    return roster


def job(size: int, **options: Any) -> Roster:
    roster = Roster(**options)
    for worker in range(size):
        apply(roster, come(worker, min_workers=size))
    return formed(roster, step=0)


def ids(roster: Roster) -> tuple[int, ...]:
    assert roster.view is not None
    return roster.view.ids


def forming(roster: Roster) -> tuple[int, ...]:
    assert roster.forming is not None
    return roster.forming.ids


def test_the_first_generation_has_as_many_as_were_asked_for() -> None:
    roster = Roster()
    for worker in range(3):
        apply(roster, come(worker))
    assert roster.forming is None
    apply(roster, come(3))
    assert formed(roster).view == roster.view
    assert ids(roster) == (0, 1, 2, 3)


@pytest.mark.parametrize("counts", [(4, 2, 2, 2), (2, 4, 2, 2)])
def test_the_first_generation_has_as_many_as_anybody_asked_for(counts: tuple[int, ...]) -> None:
    roster = Roster()
    for worker, count in enumerate(counts):
        assert roster.forming is None
        apply(roster, come(worker, min_workers=count))
    assert forming(roster) == (0, 1, 2, 3)


def test_a_worker_that_leaves_before_the_beginning_asks_for_no_other() -> None:
    roster = Roster()
    apply(roster, come(0, min_workers=4))
    for worker in (1, 2):
        apply(roster, come(worker, min_workers=2))
    restored = Roster.loads(roster.dumps())
    for state in (roster, restored):
        apply(state, leave(0))
        assert forming(state) == (1, 2)


def test_a_generation_starts_at_the_largest_step_when_all_are_ready() -> None:
    roster = job(4)
    apply(roster, report(0, 2))
    assert roster.forming is not None
    for steps in ({0: 7, 1: 12}, {0: 7, 1: 12, 2: 9}):  # which are not its members
        apply(roster, methodcaller("begin", 2, {worker: (step, 1.0) for worker, step in steps.items()}))
        assert ids(roster) == (0, 1, 2, 3)
    apply(roster, methodcaller("begin", 2, {0: (7, 1.0), 1: (12, 1.0), 3: (9, 1.0)}))
    assert ids(roster) == (0, 1, 3)
    assert roster.view is not None
    assert (roster.view.generation, roster.view.start, roster.view.reasons) == (2, 12, {2: "it was silent"})


@pytest.mark.parametrize(
    ("weight", "growth"), [(1.0, 1.0), (0.8, 1.0), (1.4, 1.0), (0.7, 2.0), (0.018, 64.0), (1.42, 0.5), (1e6, 2.0**-20)]
)
def test_weights_stay_near_one_whoever_dies(weight: float, growth: float) -> None:
    roster = job(4)
    apply(roster, report(0, 2))
    formed(roster, weight=weight)
    assert roster.view is not None
    assert roster.view.growth == growth


def test_the_mean_of_the_weights_is_kept_where_somebody_joins() -> None:
    roster = job(4)
    apply(roster, come(9))
    apply(roster, loaded(9, 0))
    formed(roster, weight=0.8)
    assert roster.view is not None
    assert roster.view.growth == 5 / 4
    again = Roster.loads(roster.dumps())
    assert again.view == roster.view


@pytest.mark.parametrize("weight", [0.0, -1.0, math.inf, math.nan])
def test_a_weight_that_is_none_does_not_count(weight: float) -> None:
    roster = job(4)
    apply(roster, report(0, 2))
    apply(roster, methodcaller("begin", 2, {0: (5, weight), 1: (5, 0.5), 3: (5, 0.5)}))
    assert roster.view is not None
    assert (ids(roster), roster.view.growth) == ((0, 1, 3), 2.0)


def test_a_worker_accused_by_one_that_died_while_joining_stays_away() -> None:
    """Two workers have loaded; one sees the other die, and dies itself before a generation is formed."""
    roster = job(4)
    for worker in (8, 9):
        apply(roster, come(worker))
        apply(roster, loaded(worker, 0))
    apply(roster, report(8, 9, is_sure=True))
    assert forming(roster) == (0, 1, 2, 3, 8)
    apply(roster, report(0, 8, is_sure=True))
    assert forming(roster) == (0, 1, 2, 3)
    apply(roster, report(1, 3))
    assert forming(roster) == (0, 1, 2)
    assert ids(formed(roster)) == (0, 1, 2)
    assert not roster.reports


def test_a_worker_that_leaves_while_it_joins_is_no_obstacle() -> None:
    roster = job(4)
    apply(roster, come(8))
    apply(roster, loaded(8, 0))
    apply(roster, leave(8))
    apply(roster, report(0, 3))
    assert forming(roster) == (0, 1, 2)


def test_a_worker_that_fails_while_a_generation_is_formed_is_left_out_of_the_next() -> None:
    roster = job(5)
    apply(roster, report(0, 1))
    apply(roster, report(2, 3))
    assert ids(formed(roster)) == (0, 2, 4)


def test_a_worker_that_came_late_is_not_left_out_of_a_later_generation() -> None:
    """That it did not come is read when the generation has formed, or a later one."""
    roster = job(4)
    apply(roster, come(9))
    apply(roster, loaded(9, 0))
    late = [report(by, 9, generation=roster.last_generation) for by in (0, 1)]
    formed(roster)
    apply(roster, late[0])
    assert roster.forming is None
    apply(roster, report(0, 3))
    assert forming(roster) == (0, 1, 2, 9)
    formed(roster)
    apply(roster, late[1])
    assert roster.forming is None
    apply(roster, report(1, 9, generation=roster.last_generation + 1))  # of one that nobody has formed
    assert forming(roster) == (0, 1, 2)


def test_a_worker_that_came_late_is_accused_of_it_no_more() -> None:
    """The accusation that would leave half of the four members, without the first, waits in the roster."""
    roster = job(4)
    apply(roster, report(0, 1))
    for by, of in ((2, 0), (3, 1), (3, 0)):
        apply(roster, report(by, of, generation=roster.last_generation))
    assert roster.forming is not None
    assert {0, 3} <= set(forming(roster)), "nobody is left out by this"
    members = ids(formed(roster))
    assert roster.forming is None
    assert roster.reports == []
    assert {0, 3} <= set(members)


@pytest.mark.parametrize("is_first", [True, False])
def test_a_worker_that_is_also_accused_of_silence_stays_accused(is_first: bool) -> None:
    """What holds longer counts of two accusations by the same worker."""
    roster = job(4)
    for by, of in ((0, 1), (2, 0), (3, 1)):
        apply(roster, report(by, of))
    of_both = [report(3, 0, generation=roster.last_generation), report(3, 0)]
    for event in of_both if is_first else reversed(of_both):
        apply(roster, event)
    assert roster.forming is not None
    assert {0, 3} <= set(forming(roster))
    formed(roster)
    assert roster.forming is not None
    assert not {0, 3} <= set(forming(roster))


def test_a_worker_joins_with_the_state_of_a_donor() -> None:
    roster = job(3)
    apply(roster, come(9))
    joiner = roster.joiners[9]
    assert joiner.donor in ids(roster)
    assert roster.forming is None
    apply(roster, loaded(9, 0))
    assert ids(formed(roster)) == (0, 1, 2, 9)
    assert roster.view is not None
    assert [member.number for member in roster.view.members] == [0, 1, 2, 3]
    assert not roster.joiners


def test_another_donor_gives_where_one_has_died() -> None:
    roster = job(3)
    apply(roster, come(9))
    first = roster.joiners[9].donor
    apply(roster, report((first + 1) % 3, first, is_sure=True))
    formed(roster)
    assert roster.joiners[9].donor != first
    assert roster.joiners[9].attempt == 1
    apply(roster, loaded(9, 0))  # what the first one gave came too late
    assert roster.forming is None
    apply(roster, loaded(9, 1))
    assert ids(formed(roster)) == (*(worker for worker in range(3) if worker != first), 9)


def test_a_joiner_that_does_not_come_is_forgotten() -> None:
    roster = job(3)
    apply(roster, come(9))
    apply(roster, loaded(9, 0))
    apply(roster, report(0, 9))
    assert ids(formed(roster)) == (0, 1, 2)
    apply(roster, leave(1))
    assert ids(formed(roster)) == (0, 2)


def test_another_model_is_refused_with_both_sides() -> None:
    roster = job(3)
    apply(roster, come(9, description={"model": "resnet", "graph": "ring"}))
    assert roster.joiners[9].refusal == "model: got 'resnet', expected 'mlp'"
    assert roster.forming is None


def test_when_all_have_left_another_job_may_begin() -> None:
    roster = job(2)
    apply(roster, leave(0))
    formed(roster)
    apply(roster, leave(1))
    assert roster.view is None
    for worker in (10, 11):
        apply(roster, come(worker, min_workers=2))
    assert ids(formed(roster)) == (10, 11)


def restart(
    worker: int, seen: tuple[int, int], *, min_workers: int = 4, description: Mapping[str, str] = DESCRIPTION
) -> Event:
    options = {"description": dict(description), "min_workers": min_workers}
    return methodcaller("restart", member(worker), **options, seen=seen)


def test_a_job_without_living_members_begins_anew_with_its_joining_workers() -> None:
    roster = job(3)
    for worker in (10, 11):
        apply(roster, come(worker, min_workers=2))
    apply(roster, restart(10, (1, 0), min_workers=2))
    assert roster.view is None
    assert roster.forming is not None
    assert roster.forming.ids == (10, 11)
    apply(roster, restart(11, (1, 0), min_workers=2))  # it found the same
    assert ids(formed(roster)) == (10, 11)
    assert roster.view is not None
    assert roster.view.generation == 2
    assert len({member.number for member in roster.view.members} | {0, 1, 2}) == 5


def test_another_model_may_begin_restart() -> None:
    roster = job(2)
    other = {"model": "resnet", "graph": "ring"}
    apply(roster, come(9))
    apply(roster, come(10, description=other))
    assert roster.joiners[10].refusal
    apply(roster, restart(10, (1, 0), description=other, min_workers=1))
    assert ids(formed(roster)) == (10,)
    assert roster.joiners[9].refusal == "model: got 'mlp', expected 'resnet'"


def test_a_member_that_answers_keeps_its_job() -> None:
    roster = job(3)
    apply(roster, come(10))
    event = restart(10, (1, 0))
    apply(roster, methodcaller("ask", 77))
    apply(roster, methodcaller("answer", 99, 77))  # a stranger
    assert (roster.query, roster.reply) == (77, 0)
    apply(roster, methodcaller("answer", 1, 77))
    apply(roster, event)
    assert ids(roster) == (0, 1, 2)
    apply(roster, report(0, 1))
    event = restart(10, (roster.last_generation, 77))
    apply(roster, report(0, 2))  # who forms a generation lives
    apply(roster, event)
    assert ids(roster) == (0, 1, 2)
    apply(roster, restart(12, (roster.last_generation, 77)))  # of a worker that is not at the door
    assert ids(roster) == (0, 1, 2)


WORKERS = st.integers(0, 6)
EVENTS = st.one_of(
    st.builds(come, WORKERS, min_workers=st.integers(1, 4)),
    st.builds(report, WORKERS, WORKERS, is_sure=st.booleans()),
    st.builds(report, WORKERS, WORKERS, generation=st.integers(0, 6)),
    st.builds(leave, WORKERS),
    st.builds(loaded, WORKERS, st.integers(0, 2)),
    *(st.builds(partial(methodcaller, name), WORKERS, st.integers(0, 2)) for name in ("change_donor", "forget")),
    st.builds(partial(methodcaller, "refuse", why="it fails"), WORKERS, st.integers(0, 2)),
    *(st.builds(partial(methodcaller, name), WORKERS, st.integers(1, 6)) for name in ("form_again", "answer")),
    st.builds(begin, st.sets(WORKERS, min_size=1), st.integers(1, 6), step=st.integers(0, 50)),
    st.just(methodcaller("ask", 5)),
    st.builds(restart, WORKERS, st.tuples(st.integers(1, 6), st.integers(0, 6)), min_workers=st.just(2)),
    st.builds(lambda size: know(job(size).dumps()), st.integers(1, 3)),
    st.none(),
)
"""None: all members of the generation that is being formed are ready."""


@settings(max_examples=100, deadline=None)
@given(st.lists(EVENTS, max_size=40))
def test_any_events_leave_a_roster_that_makes_sense(events: list[Event | None]) -> None:
    """Generations only grow, have members that differ, and are the same for all who read the same events."""
    roster, other = Roster(), Roster()
    generation = 0
    for event in events:
        for state in (roster, other):
            if event is not None:
                apply(state, event)
            elif state.forming is not None:
                formed(state)
        other = Roster.loads(other.dumps())
        assert other == roster
        for view in (roster.view, roster.forming):
            if view is not None:
                assert len(set(view.ids)) == len(view.ids) > 0
                assert len({member.number for member in view.members}) == len(view.members)
        if roster.view is not None:
            assert roster.view.generation >= (0 if roster.loaded else generation)
            generation = roster.view.generation
            assert roster.forming is None or roster.forming.generation > generation


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["leave", "join", "death"]), st.integers(0, 7), st.integers(0, 30))))
def test_turns_count_the_steps_of_all_workers_without_a_gap(history: list[tuple[str, int, int]]) -> None:
    """Each worker of each step has a number of its own, and none is left out, whatever the generations."""
    roster, views = job(3), []
    for i, (what, who, step) in enumerate(history):
        assert roster.view is not None
        views.append(roster.view)
        member = roster.view.ids[who % len(roster.view.ids)]
        if what == "join":
            apply(roster, come(100 + i, min_workers=3))
            apply(roster, loaded(100 + i, 0))
        elif len(roster.view.ids) == 1:
            continue
        elif what == "leave":
            apply(roster, leave(member))
        else:
            apply(roster, report(next(w for w in roster.view.ids if w != member), member, is_sure=True))
        formed(roster, step=step)  # also before the first step of the generation before
    assert roster.view is not None
    views.append(roster.view)
    given = [
        view.turns_before(step) + rank
        for view, end in zip(views, [*(view.start for view in views[1:]), roster.view.start + 3], strict=True)
        for step in range(view.start, end)
        for rank in range(len(view.members))
    ]
    assert given == list(range(len(given)))


def test_a_job_takes_as_many_workers_as_it_says() -> None:
    description = {**DESCRIPTION, "max_workers": "3"}
    roster = Roster()
    for worker in range(2):
        apply(roster, come(worker, min_workers=2, description=description))
    formed(roster, step=0)
    for worker in (2, 3):
        apply(roster, come(worker, min_workers=2, description=description))
    assert [(joiner.is_full, joiner.refusal) for joiner in roster.joiners.values()] == [
        (False, ""),
        (True, "max_workers=3"),
    ]
    apply(roster, loaded(2, 0))
    assert ids(formed(roster)) == (0, 1, 2)
    apply(roster, leave(0))
    assert ids(formed(roster)) == (1, 2)
    apply(roster, come(4, min_workers=2, description=description))
    assert not roster.joiners[4].refusal


@pytest.mark.parametrize("description", [{"max_workers": "3"}, {**DESCRIPTION, "max_workers": "9"}])
def test_a_roster_does_not_grow_with_refused_workers(description: dict[str, str]) -> None:
    """Spare workers are refused and started again for as long as the job runs."""
    roster = Roster()
    for worker in range(3):
        apply(roster, come(worker, min_workers=3, description={"max_workers": "3"}))
    formed(roster, step=0)
    for worker in range(3, 203):
        apply(roster, come(worker, description=description))
        assert roster.joiners[worker].refusal
    assert len(roster.joiners) == 64


def test_a_worker_that_was_left_out_while_joining_comes_again_without_its_accusation() -> None:
    roster = job(4)
    for number in range(2):
        apply(roster, come(8))
        joiner = roster.joiners[8]
        apply(roster, loaded(8, joiner.attempt))
        assert forming(roster) == (0, 1, 2, 3, 8)
        if number == 0:
            apply(roster, report(1, 8))
            assert forming(roster) == (0, 1, 2, 3)
            assert 8 not in roster.joiners
    assert ids(formed(roster)) == (0, 1, 2, 3, 8)


def test_a_stale_snapshot_does_not_take_the_job_from_its_members() -> None:
    """Worker 3 was stopped, and is the first to find a store that came back empty; the others had gone on."""
    going_on = job(4)
    stale = going_on.dumps()
    apply(going_on, report(0, 3))
    later = know(formed(going_on).dumps(), branch=2)
    roster = Roster()
    apply(roster, know(stale, worker=3))
    assert roster.forming is None, "the generation that trains is restored"
    apply(roster, come(9))
    for other in range(3):
        apply(roster, report(3, other, is_sure=True))
    assert ids(formed(roster)) == (3,)
    assert roster.view is not None
    alone = roster.view.generation
    for _ in range(2):  # both others know it
        apply(roster, later)
    assert ids(formed(roster)) == (0, 1, 2)
    assert roster.view.generation == alone + 1
    assert roster.joiners[9].donor in ids(roster)
    apply(roster, later)
    assert roster.forming is None


def test_founders_of_a_store_that_came_back_empty_do_not_take_the_job() -> None:
    roster = Roster()
    for worker in (8, 9):
        apply(roster, come(worker, min_workers=2))
    formed(roster)
    before = job(3)
    apply(roster, know(before.dumps()))
    assert ids(formed(roster)) == (0, 1, 2)
    assert not roster.has_place(8), "it comes again"


def test_a_generation_that_was_being_formed_is_formed_anew_over_the_next_store() -> None:
    before = job(3)
    apply(before, report(0, 2))
    assert before.forming is not None
    roster = Roster()
    apply(roster, know(before.dumps()))
    assert roster.forming is not None
    assert roster.forming.generation == before.forming.generation + 1
    assert ids(formed(roster)) == (0, 1)


def test_a_generation_has_members() -> None:
    with pytest.raises(ValueError, match="got generation 3 without members, expected one or more"):
        View(3, ())
    text = job(1).dumps()
    members = text[text.index('"members": [') : text.index(', "start"')]
    with pytest.raises(GARBAGE):
        Roster.loads(text.replace(members, '"members": []'))


def test_a_roster_that_is_none_is_no_roster() -> None:
    before = job(3).dumps()
    others = [before.replace(*pair) for pair in (('"founders"', '"strangers"'), ('"view": {', '"view": [{'))]
    for garbage in ("", "{}", "3", '{"view": null}', '{"view": 3}', "[" * 200_000, *others):
        with pytest.raises(GARBAGE):
            Roster.loads(garbage)


@pytest.mark.parametrize("worker", [-1, 1 << 64])
def test_a_worker_has_a_number_that_fits_a_packet(worker: int) -> None:
    with pytest.raises(GARBAGE):
        parsed(Member, {**asdict(member(1)), "id": worker})


@pytest.mark.parametrize(
    "address",
    [*(["127.0.0.1", port] for port in (0, 1 << 20, 1e999)), ["node", 4000], ["::1", 4000], ["127.0.0.1"], 4000],
)
def test_a_worker_has_an_address_to_which_packets_can_be_sent(address: object) -> None:
    with pytest.raises(GARBAGE):
        parsed(Member, {**asdict(member(1)), "address": address})
