"""Roster: the same generations from the same events, whatever they are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gossip_modules.membership.roster import GARBAGE, Roster

DESCRIPTION = {"model": "mlp", "graph": "ring"}


def come(worker: int, *, min_workers: int = 4, description: Mapping[str, str] = DESCRIPTION) -> dict[str, Any]:
    member = {"id": worker, "number": -1, "host": "node", "pid": worker, "address": ["127.0.0.1", 1000 + worker]}
    return {"event": "come", "member": member, "description": dict(description), "min_workers": min_workers}


def come_from(worker: int, address: object) -> dict[str, Any]:
    event = come(worker)
    return {**event, "member": {**event["member"], "address": address}}


def report(by: int, of: int, *, is_sure: bool = False, generation: int = 0) -> dict[str, Any]:
    why = f"it did not come to form generation {generation}" if generation else "it was silent"
    return {"event": "report", "by": by, "of": of, "why": why, "is_sure": is_sure, "generation": generation}


class StrictRoster(Roster):
    """An event may be garbage, which is ignored; but who goes and who remains is known of any."""

    def _change(self) -> None:
        try:
            super()._change()
        except GARBAGE as error:
            raise AssertionError("an event would be ignored that is no garbage") from error


def formed(roster: Roster, *, step: int = 10, weight: float = 1.0) -> Roster:
    """All that are to form a generation say that they are ready."""
    assert roster.forming is not None
    forming = roster.forming
    for worker in forming.ids:
        roster.apply({"event": "ready", "id": worker, "generation": forming.generation, "step": step, "weight": weight})
    return roster


def job(size: int, **options: Any) -> Roster:
    roster = Roster(**options)
    for worker in range(size):
        roster.apply(come(worker, min_workers=size))
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
        roster.apply(come(worker))
    assert roster.forming is None
    roster.apply(come(3))
    assert formed(roster).view == roster.view
    assert ids(roster) == (0, 1, 2, 3)


@pytest.mark.parametrize("counts", [(4, 2, 2, 2), (2, 4, 2, 2)])
def test_the_first_generation_has_as_many_as_anybody_asked_for(counts: tuple[int, ...]) -> None:
    roster = Roster()
    for worker, count in enumerate(counts):
        assert roster.forming is None
        roster.apply(come(worker, min_workers=count))
    assert forming(roster) == (0, 1, 2, 3)


def test_who_leaves_before_the_beginning_asks_for_nobody() -> None:
    roster = Roster()
    roster.apply(come(0, min_workers=4))
    for worker in (1, 2):
        roster.apply(come(worker, min_workers=2))
    restored = Roster.loads(roster.dumps())
    for state in (roster, restored):
        state.apply({"event": "leave", "id": 0, "why": "it left"})
        assert forming(state) == (1, 2)


def test_a_generation_starts_at_the_largest_step_when_all_are_ready() -> None:
    roster = job(4)
    roster.apply(report(0, 2))
    assert roster.forming is not None
    for worker, step in ((0, 7), (1, 12)):
        roster.apply(
            {"event": "ready", "id": worker, "generation": roster.forming.generation, "step": step, "weight": 1.0}
        )
        assert ids(roster) == (0, 1, 2, 3)
    roster.apply({"event": "ready", "id": 3, "generation": roster.forming.generation, "step": 9, "weight": 1.0})
    assert ids(roster) == (0, 1, 3)
    assert roster.view is not None
    assert (roster.view.generation, roster.view.start, roster.view.reasons) == (2, 12, {2: "it was silent"})


@pytest.mark.parametrize(
    ("weight", "growth"), [(1.0, 1.0), (0.8, 1.0), (1.4, 1.0), (0.7, 2.0), (0.018, 64.0), (1.42, 0.5), (1e6, 2.0**-20)]
)
def test_weights_stay_near_one_whoever_dies(weight: float, growth: float) -> None:
    roster = job(4)
    roster.apply(report(0, 2))
    formed(roster, weight=weight)
    assert roster.view is not None
    assert roster.view.growth == growth


def test_the_mean_of_the_weights_is_kept_where_somebody_joins() -> None:
    roster = job(4)
    roster.apply(come(9))
    roster.apply({"event": "loaded", "id": 9, "attempt": 0})
    formed(roster, weight=0.8)
    assert roster.view is not None
    assert roster.view.growth == 5 / 4
    again = Roster.loads(roster.dumps())
    assert again.view == roster.view


def test_a_weight_that_is_none_is_garbage() -> None:
    roster = job(4)
    roster.apply(report(0, 2))
    formed(roster, weight=0.0)
    assert roster.forming is not None


def test_who_was_accused_by_somebody_that_died_at_the_door_stays_away() -> None:
    """Two workers have loaded; one sees the other die, and dies itself before a generation is formed."""
    roster = job(4)
    for worker in (8, 9):
        roster.apply(come(worker))
        roster.apply({"event": "loaded", "id": worker, "attempt": 0})
    roster.apply(report(8, 9, is_sure=True))
    assert forming(roster) == (0, 1, 2, 3, 8)
    roster.apply(report(0, 8, is_sure=True))
    assert forming(roster) == (0, 1, 2, 3)
    roster.apply(report(1, 3))
    assert forming(roster) == (0, 1, 2)
    assert ids(formed(roster)) == (0, 1, 2)
    assert not roster.reports


def test_who_leaves_at_the_door_is_no_obstacle_to_what_follows() -> None:
    roster = job(4)
    roster.apply(come(8))
    roster.apply({"event": "loaded", "id": 8, "attempt": 0})
    roster.apply({"event": "leave", "id": 8, "why": "it was interrupted"})
    roster.apply(report(0, 3))
    assert forming(roster) == (0, 1, 2)


def test_who_fails_while_a_generation_is_formed_is_left_out_of_the_next() -> None:
    roster = job(5)
    roster.apply(report(0, 1))
    roster.apply(report(2, 3))
    assert ids(formed(roster)) == (0, 2, 4)


def test_who_has_come_after_all_is_not_left_out_of_a_later_generation() -> None:
    """That it did not come is read when the generation has formed, or a later one."""
    roster = job(4)
    roster.apply(come(9))
    roster.apply({"event": "loaded", "id": 9, "attempt": 0})
    late = [report(by, 9, generation=roster.last_generation) for by in (0, 1)]
    formed(roster)
    roster.apply(late[0])
    assert roster.forming is None
    roster.apply(report(0, 3))
    assert forming(roster) == (0, 1, 2, 9)
    formed(roster)
    roster.apply(late[1])
    assert roster.forming is None
    roster.apply(report(1, 9, generation=roster.last_generation + 1))  # of one that nobody has formed
    assert forming(roster) == (0, 1, 2)


def test_who_has_come_after_all_is_accused_of_it_no_more() -> None:
    """The accusation that would leave half of the four members, without the first, waits in the roster."""
    roster = job(4)
    roster.apply(report(0, 1))
    for by, of in ((2, 0), (3, 1), (3, 0)):
        roster.apply(report(by, of, generation=roster.last_generation))
    assert roster.forming is not None
    assert {0, 3} <= set(forming(roster)), "nobody is left out by this"
    members = ids(formed(roster))
    assert roster.forming is None
    assert roster.reports == []
    assert {0, 3} <= set(members)


@pytest.mark.parametrize("is_first", [True, False])
def test_who_is_also_accused_of_silence_stays_accused(is_first: bool) -> None:
    """What holds longer counts of two accusations by the same worker."""
    roster = job(4)
    for by, of in ((0, 1), (2, 0), (3, 1)):
        roster.apply(report(by, of))
    of_both = [report(3, 0, generation=roster.last_generation), report(3, 0)]
    for event in of_both if is_first else reversed(of_both):
        roster.apply(event)
    assert roster.forming is not None
    assert {0, 3} <= set(forming(roster))
    formed(roster)
    assert roster.forming is not None
    assert not {0, 3} <= set(forming(roster))


def test_a_worker_joins_with_what_a_donor_gives() -> None:
    roster = job(3)
    roster.apply(come(9))
    joiner = roster.joiners[9]
    assert joiner.donor in ids(roster)
    assert roster.forming is None
    roster.apply({"event": "loaded", "id": 9, "attempt": 0})
    assert ids(formed(roster)) == (0, 1, 2, 9)
    assert roster.view is not None
    assert [member.number for member in roster.view.members] == [0, 1, 2, 3]
    assert not roster.joiners


def test_another_donor_gives_where_one_has_died() -> None:
    roster = job(3)
    roster.apply(come(9))
    first = roster.joiners[9].donor
    roster.apply(report((first + 1) % 3, first, is_sure=True))
    formed(roster)
    assert roster.joiners[9].donor != first
    assert roster.joiners[9].attempt == 1
    roster.apply({"event": "loaded", "id": 9, "attempt": 0})  # what the first one gave came too late
    assert roster.forming is None
    roster.apply({"event": "loaded", "id": 9, "attempt": 1})
    assert ids(formed(roster)) == (*(worker for worker in range(3) if worker != first), 9)


def test_a_joiner_that_does_not_come_is_forgotten() -> None:
    roster = job(3)
    roster.apply(come(9))
    roster.apply({"event": "loaded", "id": 9, "attempt": 0})
    roster.apply(report(0, 9))
    assert ids(formed(roster)) == (0, 1, 2)
    roster.apply({"event": "leave", "id": 1, "why": "it left"})
    assert ids(formed(roster)) == (0, 2)


def test_another_model_is_refused_with_both_sides() -> None:
    roster = job(3)
    roster.apply(come(9, description={"model": "resnet", "graph": "ring"}))
    assert roster.joiners[9].refusal == "model: got 'resnet', expected 'mlp'"
    assert roster.forming is None


def test_when_all_have_left_another_job_may_begin() -> None:
    roster = job(2)
    roster.apply({"event": "leave", "id": 0, "why": "it left"})
    formed(roster)
    roster.apply({"event": "leave", "id": 1, "why": "it left"})
    assert roster.view is None
    for worker in (10, 11):
        roster.apply(come(worker, min_workers=2))
    assert ids(formed(roster)) == (10, 11)


def restart(roster: Roster, worker: int, *, answers: int = 0, **options: Any) -> dict[str, Any]:
    return {**come(worker, **options), "event": "restart", "generation": roster.last_generation, "replies": answers}


def test_a_job_that_nobody_lives_in_begins_anew_with_those_at_the_door() -> None:
    roster = job(3)
    for worker in (10, 11):
        roster.apply(come(worker, min_workers=2))
    roster.apply(restart(roster, 10, min_workers=2))
    assert roster.view is None
    assert roster.forming is not None
    assert roster.forming.ids == (10, 11)
    roster.apply(restart(job(3), 11, min_workers=2))  # it found the same
    assert ids(formed(roster)) == (10, 11)
    assert roster.view is not None
    assert roster.view.generation == 2
    assert len({member.number for member in roster.view.members} | {0, 1, 2}) == 5


def test_another_model_may_begin_restart() -> None:
    roster = job(2)
    other = {"model": "resnet", "graph": "ring"}
    roster.apply(come(9))
    roster.apply(come(10, description=other))
    assert roster.joiners[10].refusal
    roster.apply(restart(roster, 10, description=other, min_workers=1))
    assert ids(formed(roster)) == (10,)
    assert roster.joiners[9].refusal == "model: got 'mlp', expected 'resnet'"


def test_a_member_that_answers_keeps_its_job() -> None:
    roster = job(3)
    roster.apply(come(10))
    event = restart(roster, 10)
    roster.apply({"event": "query", "id": 10})
    roster.apply({"event": "reply", "id": 99})  # a stranger
    assert (roster.num_queries, roster.num_replies) == (1, 0)
    roster.apply({"event": "reply", "id": 1})
    roster.apply(event)
    assert ids(roster) == (0, 1, 2)
    roster.apply(report(0, 1))
    event = restart(roster, 10, answers=1)
    roster.apply(report(0, 2))  # who forms a generation lives
    roster.apply(event)
    assert ids(roster) == (0, 1, 2)
    roster.apply(restart(roster, 12, answers=1))  # of a worker that is not at the door
    assert ids(roster) == (0, 1, 2)


@pytest.mark.parametrize(
    "event",
    [
        {},
        {"event": "explode"},
        {"event": "come"},
        {"event": "report", "by": "x", "of": 1, "why": 2, "is_sure": 3},
        *({**report(0, 1), "generation": generation} for generation in (None, "soon", float("inf"))),
        {"event": "ready", "id": None},
        *(come_from(7, address) for address in (["127.0.0.1", 0], ["127.0.0.1", 1 << 20], ["127.0.0.1", 1e999])),
        *(come_from(7, address) for address in (["node", 4000], ["::1", 4000], ["127.0.0.1"], 4000)),
        *(come_from(worker, ["127.0.0.1", 4000]) for worker in (-1, 1 << 64)),
    ],
)
def test_garbage_changes_nothing(event: Mapping[str, Any]) -> None:
    roster = job(3)
    before = roster.dumps()
    roster.apply(event)
    assert roster.dumps() == before
    assert roster.forming is None


WORKERS = st.integers(0, 6)
EVENTS = st.one_of(
    st.builds(come, WORKERS, min_workers=st.integers(1, 4)),
    st.builds(report, WORKERS, WORKERS, is_sure=st.booleans()),
    st.builds(report, WORKERS, WORKERS, generation=st.integers(0, 6)),
    st.builds(lambda worker: {"event": "leave", "id": worker, "why": "it left"}, WORKERS),
    st.builds(
        lambda worker, attempt: {"event": "loaded", "id": worker, "attempt": attempt}, WORKERS, st.integers(0, 2)
    ),
    st.builds(
        lambda worker, by, attempt: {"event": "gave up", "id": worker, "by": by, "attempt": attempt},
        WORKERS,
        WORKERS,
        st.integers(0, 2),
    ),
    st.builds(
        lambda worker, generation, step: {
            "event": "ready",
            "id": worker,
            "generation": generation,
            "step": step,
            "weight": 1.0,
        },
        WORKERS,
        st.integers(1, 6),
        st.integers(0, 50),
    ),
    st.just({"event": "query", "id": 0}),
    st.builds(lambda worker: {"event": "reply", "id": worker}, WORKERS),
    st.builds(
        lambda worker, generation, answers: {
            **come(worker, min_workers=2),
            "event": "restart",
            "generation": generation,
            "replies": answers,
        },
        WORKERS,
        st.integers(1, 6),
        st.integers(0, 1),
    ),
    st.just({"event": "all ready"}),
)


@settings(max_examples=100, deadline=None)
@given(st.lists(EVENTS, max_size=40))
def test_any_events_leave_a_roster_that_makes_sense(events: list[dict[str, Any]]) -> None:
    """Generations only grow, have members that differ, and are the same for all who read the same events."""
    roster, other = StrictRoster(), StrictRoster()
    generation = 0
    for event in events:
        for state in (roster, other):
            if event == {"event": "all ready"}:
                if state.forming is not None:
                    formed(state)
            else:
                state.apply(event)
        other = StrictRoster.loads(other.dumps())  # type: ignore[assignment]
        assert vars(other) == vars(roster)
        assert (roster.view, roster.forming, roster.joiners) == (other.view, other.forming, other.joiners)
        for view in (roster.view, roster.forming):
            if view is not None:
                assert len(set(view.ids)) == len(view.ids) > 0
                assert len({member.number for member in view.members}) == len(view.members)
        if roster.view is not None:
            assert roster.view.generation >= generation
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
            roster.apply(come(100 + i, min_workers=3))
            roster.apply({"event": "loaded", "id": 100 + i, "attempt": 0})
        elif len(roster.view.ids) == 1:
            continue
        elif what == "leave":
            roster.apply({"event": "leave", "id": member, "why": "it left"})
        else:
            roster.apply(report(next(w for w in roster.view.ids if w != member), member, is_sure=True))
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
        roster.apply(come(worker, min_workers=2, description=description))
    formed(roster, step=0)
    for worker in (2, 3):
        roster.apply(come(worker, min_workers=2, description=description))
    assert [(joiner.is_full, joiner.refusal) for joiner in roster.joiners.values()] == [
        (False, ""),
        (True, "max_workers=3"),
    ]
    roster.apply({"event": "loaded", "id": 2, "attempt": 0})
    assert ids(formed(roster)) == (0, 1, 2)
    roster.apply({"event": "leave", "id": 0, "why": "it left"})
    assert ids(formed(roster)) == (1, 2)
    roster.apply(come(4, min_workers=2, description=description))
    assert not roster.joiners[4].refusal


@pytest.mark.parametrize("description", [{"max_workers": "3"}, {**DESCRIPTION, "max_workers": "9"}])
def test_a_roster_does_not_grow_with_those_who_are_refused(description: dict[str, str]) -> None:
    """Spare workers are refused and started again for as long as the job runs."""
    roster = Roster()
    for worker in range(3):
        roster.apply(come(worker, min_workers=3, description={"max_workers": "3"}))
    formed(roster, step=0)
    for worker in range(3, 203):
        roster.apply(come(worker, description=description))
        assert roster.joiners[worker].refusal
    assert len(roster.joiners) == 64


def test_who_was_left_out_at_the_door_comes_again_without_what_it_was_accused_of() -> None:
    roster = job(4)
    for number in range(2):
        roster.apply(come(8))
        joiner = roster.joiners[8]
        roster.apply({"event": "loaded", "id": 8, "attempt": joiner.attempt})
        assert forming(roster) == (0, 1, 2, 3, 8)
        if number == 0:
            roster.apply(report(1, 8))
            assert forming(roster) == (0, 1, 2, 3)
            assert 8 not in roster.joiners
    assert ids(formed(roster)) == (0, 1, 2, 3, 8)


def test_a_stale_snapshot_takes_the_job_from_nobody() -> None:
    """Worker 3 was stopped, and is the first to find a store that came back empty; the others had gone on."""
    going_on = job(4)
    stale = going_on.dumps()
    going_on.apply(report(0, 3))
    know = {"event": "know", "roster": formed(going_on).dumps()}
    roster = Roster()
    roster.apply({"event": "know", "roster": stale})
    assert roster.forming is None, "the generation that trains is restored"
    roster.apply({**come(9), "description": DESCRIPTION})
    for other in range(3):
        roster.apply(report(3, other, is_sure=True))
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
    for garbage in ({}, {"roster": 3}, {"roster": "{}"}, {"roster": know["roster"].replace('"view": {', '"view": [{')}):
        roster.apply({"event": "know", **garbage})
        assert ids(roster) == (0, 1, 2)


def test_founders_of_a_store_that_came_back_empty_do_not_take_the_job() -> None:
    roster = Roster()
    for worker in (8, 9):
        roster.apply(come(worker, min_workers=2))
    formed(roster)
    before = job(3)
    roster.apply({"event": "know", "roster": before.dumps()})
    assert ids(formed(roster)) == (0, 1, 2)
    assert not roster.has_place(8), "it comes again"


def test_a_generation_that_was_being_formed_is_formed_anew_over_the_next_store() -> None:
    before = job(3)
    before.apply(report(0, 2))
    assert before.forming is not None
    roster = Roster()
    roster.apply({"event": "know", "roster": before.dumps()})
    assert roster.forming is not None
    assert roster.forming.generation == before.forming.generation + 1
    assert ids(formed(roster)) == (0, 1)


def test_a_roster_that_is_none_is_no_roster() -> None:
    before = job(3).dumps()
    for garbage in ("", "{}", "3", '{"view": null}', '{"view": 3}', before.replace('"founders"', '"strangers"')):
        with pytest.raises(GARBAGE):
            Roster.loads(garbage)
