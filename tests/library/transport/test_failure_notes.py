"""FailureNotes: who failed first, from what each rank has seen."""

from __future__ import annotations

import json
import sys

import pytest
import torch.distributed as dist

from gossip_modules.transport import failure_notes
from gossip_modules.transport.failure_notes import GONE, SILENT, Cause, FailureNotes, describe
from gossip_modules.transport.stores import BoundedStore, Records
from tests.harness.ranks import solo_group

MEMBERS = range(5)


def notes_of(store: dist.Store, rank: int) -> FailureNotes:
    return FailureNotes(Records(BoundedStore(store)), rank)


def test_a_chain_of_closed_connections_leads_to_the_first() -> None:
    """2 died; 3 saw it, 4 saw 3 end, and 0 sees all three connections closed."""
    store = dist.HashStore()
    notes_of(store, 3).leave({2: GONE}, "round 5")
    notes_of(store, 4).leave({3: GONE}, "round 6")
    cause = notes_of(store, 0).explain({4: GONE, 3: GONE, 2: GONE}, members=MEMBERS)
    assert cause == Cause(frozenset({2}), "rank 2 is gone (seen by rank 3)")
    cause = notes_of(store, 1).explain({4: GONE}, members=MEMBERS)
    assert cause == Cause(frozenset({2}), "rank 2 is gone (seen by rank 3)")


def test_a_rank_that_gave_up_waiting_is_not_to_blame() -> None:
    store = dist.HashStore()
    notes_of(store, 1).leave({2: SILENT}, "round 5")
    assert notes_of(store, 0).explain({1: GONE}, members=MEMBERS).text == "rank 2 does not answer (seen by rank 1)"
    woken = notes_of(store, 2).explain({1: GONE}, members=MEMBERS)
    assert woken == Cause(frozenset(), "rank 1 gave up round 5 (rank 2 does not answer)")


def test_without_notes_the_own_observation_counts() -> None:
    cause = notes_of(dist.HashStore(), 0).explain({2: GONE, 1: SILENT}, members=MEMBERS)
    assert cause == Cause(frozenset({1, 2}), "rank 1 does not answer; rank 2 is gone")


def test_where_all_ranks_wait_for_an_unknown_one_the_silent_rank_is_named() -> None:
    store = dist.HashStore()
    for rank in (0, 1, 3):
        notes_of(store, rank).leave({}, "a sum")
    cause = notes_of(store, 4).explain({}, members=MEMBERS)
    assert cause == Cause(frozenset({2}), "rank 2 does not answer, the others wait in vain too")


def test_an_error_of_its_own_is_told() -> None:
    store = dist.HashStore()
    notes_of(store, 2).leave({}, "failed: ValueError: a bad label", is_cause=True)
    notes_of(store, 3).leave({2: GONE}, "round 5")
    for blamed in ({2: GONE}, {3: GONE}, {}):
        cause = notes_of(store, 0).explain(blamed, members=MEMBERS)
        assert cause == Cause(frozenset({2}), "rank 2 failed: ValueError: a bad label")


@pytest.mark.parametrize("blamed", [{2: GONE}, {3: GONE}, {}])
def test_the_end_of_a_program_is_no_death(blamed: dict[int, str], monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    monkeypatch.delattr(sys, "last_value", raising=False)
    monkeypatch.setattr(failure_notes, "_of_job", {notes_of(store, 2)})
    failure_notes._leave_last_note()
    notes_of(store, 3).leave({2: GONE}, "round 5")
    cause = notes_of(store, 0).explain(blamed, members=MEMBERS)
    assert cause.ranks == {2}
    assert cause.text.startswith("rank 2 has come to the end of its program, while others train: ")
    assert "torch.distributed.algorithms.Join" in cause.text


def test_ranks_that_waited_for_each_other_are_all_told() -> None:
    """Rank 1 called averaged() alone while the others trained."""
    store = dist.HashStore()
    notes_of(store, 1).leave(dict.fromkeys((0, 2), "did not call averaged()"), "averaged()")
    notes_of(store, 0).leave({1: SILENT}, "round 3")
    cause = notes_of(store, 2).explain({1: SILENT}, members=range(3))
    assert cause == Cause(frozenset(), "rank 1 gave up averaged() (ranks 0, 2 did not call averaged())")
    assert "rank 0 gave up round 3" in notes_of(store, 1).explain({0: GONE}, members=range(3)).text


def test_one_rank_leaves_one_note_and_old_ones_do_not_count() -> None:
    store = dist.HashStore()
    notes = notes_of(store, 1)
    notes.leave({2: GONE}, "round 5")
    notes.leave({3: GONE}, "round 6")
    assert notes_of(store, 0).explain({1: GONE}, members=MEMBERS).ranks == {2}
    records = Records(BoundedStore(store))
    records.skip()
    assert FailureNotes(records, 0).explain({1: GONE}, members=MEMBERS).ranks == {1}


def signed_notes_of(store: dist.Store, rank: int) -> FailureNotes:
    """As `FailureNotes.of` makes them."""
    signed = BoundedStore(store, key=b"sixteen bytes and more", place="here")
    return FailureNotes(Records(signed, skips_foreign=True), rank)


def test_a_signed_note_of_an_earlier_generation_changes_nothing() -> None:
    """A stranger reads "rank 3 failed", and puts it back into the store of the next generation, or after a restart."""
    before, after = dist.HashStore(), dist.HashStore()
    reader = signed_notes_of(before, 0)
    signed_notes_of(before, 3).leave({}, "failed: ValueError: a bad label", is_cause=True)
    assert reader.explain({}, members=MEMBERS) == Cause(frozenset({3}), "rank 3 failed: ValueError: a bad label")
    reader = signed_notes_of(after, 0)
    after.add("count", 1)
    after.set("1", before.get("1"))  # type: ignore[arg-type]
    assert reader.explain({}, members=MEMBERS) == Cause(frozenset(), "")
    assert reader.explain({1: GONE}, members=MEMBERS).ranks == {1}
    signed_notes_of(after, 2).leave({}, "failed: OSError: a full disk", is_cause=True)
    assert reader.explain({2: GONE}, members=MEMBERS).text == "rank 2 failed: OSError: a full disk"


def test_a_replayed_nonce_lets_no_old_note_in() -> None:
    """A stranger also puts the nonces of before in the place of the present ones."""
    before, after = dist.HashStore(), dist.HashStore()
    signed_notes_of(before, 0)
    signed_notes_of(before, 3).leave({}, "failed: ValueError: a bad label", is_cause=True)
    reader = signed_notes_of(after, 0)
    for key in ("nonce/1", "nonce/2", "1"):
        after.set(key, before.get(key))  # type: ignore[arg-type]
    after.add("count", 1)
    assert reader.explain({}, members=MEMBERS) == Cause(frozenset(), "")


@pytest.mark.parametrize("value", [None, "a value without a code"])
def test_readers_after_a_missing_or_foreign_nonce_get_notes(value: str | None) -> None:
    """A rank has died before it left its nonce, or a stranger has counted one, before rank 0 comes."""
    store = dist.HashStore()
    writer = signed_notes_of(store, 3)
    number = store.add("nonces", 1)
    if value is not None:
        store.set(f"nonce/{number}", value)
    reader = signed_notes_of(store, 0)
    writer.leave({}, "failed: ValueError: a bad label", is_cause=True)
    assert reader.explain({3: GONE}, members=MEMBERS).text == "rank 3 failed: ValueError: a bad label"


def test_a_reader_after_a_missing_nonce_gets_the_last_record_of_before() -> None:
    store = dist.HashStore()
    records = Records(BoundedStore(store, key=b"sixteen bytes and more", place="here"))
    store.add("nonces", 1)
    records.append([1])
    late = Records(BoundedStore(store, key=b"sixteen bytes and more", place="here"))
    assert late.new() == []
    records.new()  # looks for readers, and appends its record again
    assert late.new() == [[1]]


def test_a_foreign_note_hides_no_other_one() -> None:
    store = dist.HashStore()
    reader = signed_notes_of(store, 0)
    number = store.add("count", 1)
    store.set(str(number), json.dumps([3, [], "failed: a forgery", True]))
    signed_notes_of(store, 2).leave({}, "failed: OSError: a full disk", is_cause=True)
    assert reader.explain({2: GONE}, members=MEMBERS).text == "rank 2 failed: OSError: a full disk"


def test_a_store_that_does_not_answer_is_no_obstacle() -> None:
    class Gone(dist.Store):
        def add(self, key: str, amount: int) -> int:
            raise dist.DistStoreError("reset by peer")

    notes = FailureNotes(Records(BoundedStore(Gone())), 0)
    notes.leave({2: GONE}, "round 5")
    cause = notes.explain({2: GONE}, members=MEMBERS)
    assert not cause.ranks
    assert "the rank that failed first is not known" in cause.text


def test_describe() -> None:
    assert describe({1: GONE}) == "rank 1 is gone"
    assert describe({3: GONE, 1: GONE, 2: "did not come"}) == "ranks 1, 3 are gone, rank 2 did not come"


def test_a_rank_that_only_others_blame_is_told_the_reason() -> None:
    """Rank 0 does not know whom its all-reduce waits for; rank 1 was in averaged() and missed all others."""
    store = dist.HashStore()
    notes_of(store, 1).leave({0: "did not call averaged()", 2: "did not call averaged()"}, "averaged()")
    cause = notes_of(store, 0).explain({}, members=range(3))
    assert cause == Cause(frozenset(), "rank 1 gave up averaged() (ranks 0, 2 did not call averaged())")


@pytest.mark.parametrize("is_prefixed", [False, True])
def test_a_store_without_operations_has_no_notes(is_prefixed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch's under MPI: its error would take the place of the error of a failed wait."""
    store = dist.PrefixStore("default", dist.Store()) if is_prefixed else dist.Store()
    group = solo_group()
    monkeypatch.setattr(type(group), "get_group_store", lambda _: store, raising=False)
    assert FailureNotes.of(group, 0) is None
