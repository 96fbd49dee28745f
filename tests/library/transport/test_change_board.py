"""ChangeBoard: who learns that ranks exchange other tensors, and in what words."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from gossip_modules.transport.change_board import ChangeBoard, first_difference
from gossip_modules.transport.stores import BoundedStore, Records


class Rank:
    """One rank of two or more; `step` is that which comes next, and `num_ended` how often its waits were ended."""

    def __init__(
        self, store: dist.Store, rank: int, *, num_ranks: int = 2, key: bytes | None = None, skips_foreign: bool = False
    ) -> None:
        self.step, self.tensors, self.num_ended = 0, ["a", "b"], 0
        self.waiting: dict[int, float] = {}
        self.board = ChangeBoard(
            Records(BoundedStore(store, timeout=timedelta(seconds=1), key=key), skips_foreign=skips_foreign),
            rank,
            range(10, 10 + num_ranks),
            step=lambda: self.step,
            tensors=lambda: self.tensors,
            end_waits=self.end_waits,
            waiting=self.waiting,
        )

    def end_waits(self) -> None:
        self.num_ended += 1

    def announce(self, *tensors: str) -> None:
        self.tensors = list(tensors)
        self.board.announce(self.tensors)


def ranks(n: int = 2) -> list[Rank]:
    store = dist.HashStore()
    return [Rank(store, rank, num_ranks=n) for rank in range(n)]


def test_a_rank_that_has_begun_the_step_without_the_change_is_named() -> None:
    one, other = ranks()
    one.step = other.step = 3
    one.announce("b")
    other.step = 4  # inside the round of step 3
    with pytest.raises(ValueError, match=r"rank 11 has 'a' where rank 10 has 'b'; freeze, .* on all ranks at the same"):
        other.board.check()
    with pytest.raises(ValueError, match="rank 11 has 'a' where rank 10 has 'b'"):
        one.board.check()
    assert (one.num_ended, other.num_ended) == (1, 1)


def test_a_rank_that_is_not_there_yet_is_no_reason() -> None:
    one, other = ranks()
    one.step = other.step = 3
    one.announce("b")
    for rank in (one, other):
        rank.board.check()
    other.announce("b")
    one.step = other.step = 9
    for rank in (one, other):
        rank.board.check()
    assert (one.num_ended, other.num_ended) == (0, 0)


def test_a_rank_that_was_met_in_another_operation_is_there() -> None:
    one, other = ranks()
    one.announce("a", "b", "c")
    with pytest.raises(ValueError, match="rank 11 has nothing more where rank 10 has 'c'"):
        other.board.check(is_there=True)


def test_a_rank_without_a_note_hears_of_the_others() -> None:
    one, other, third = ranks(3)
    one.step = 3
    one.announce("b")
    other.step = 4
    with pytest.raises(ValueError, match="rank 11 has 'a' where rank 10 has 'b'"):
        other.board.check()
    with pytest.raises(ValueError, match="rank 11 has 'a' where rank 10 has 'b'"):
        third.board.check()  # a step behind: its connection to one of them has closed


def test_a_wait_that_lasts_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = ranks()
    one.announce("b")
    other.step = 1
    other.board.look()  # it waits for nobody
    assert other.num_ended == 0
    monkeypatch.setattr("gossip_modules.transport.change_board._LOOK_SECONDS", 0.0)
    other.waiting[0] = time.monotonic()
    other.board.look()
    assert other.num_ended == 1
    with pytest.raises(ValueError, match="rank 11 has 'a' where rank 10 has 'b'"):
        other.board.raise_if_known()


def test_ranks_of_which_some_have_the_key_end_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    one, other = Rank(store, 0, key=b"the key of the job"), Rank(store, 1)
    one.announce("b")
    other.step = 1
    monkeypatch.setattr("gossip_modules.transport.change_board._LOOK_SECONDS", 0.0)
    other.waiting[0] = time.monotonic()
    other.board.look()
    assert other.num_ended == 1
    with pytest.raises(ValueError, match="is signed, and this process has no key"):
        other.board.raise_if_known()
    store.set("2", "[1]")
    store.add("count", 1)
    with pytest.raises(ValueError, match="is not signed with this job's key"):
        one.board.check()


KEY = b"the key of the job"


def test_a_signed_change_of_an_earlier_run_changes_nothing() -> None:
    before, after = dist.HashStore(), dist.HashStore()
    Rank(before, 0, key=KEY)
    Rank(before, 1, key=KEY).announce("b")
    own = Rank(after, 0, key=KEY)
    own.step = 1  # in the round of step 0
    after.add("count", 1)
    after.set("1", before.get("1"))  # type: ignore[arg-type]
    own.board.check()
    Rank(after, 1, key=KEY).announce("b")
    with pytest.raises(ValueError, match="rank 11 has 'b' where rank 10 has 'a'"):
        own.board.check()


def test_a_change_reaches_a_rank_that_comes_later() -> None:
    store = dist.HashStore()
    one = Rank(store, 0, key=KEY)
    one.announce("b")
    late = Rank(store, 1, key=KEY)
    late.step = 1
    late.board.check()
    one.board.check()  # as its thread does in a wait that lasts
    with pytest.raises(ValueError, match="rank 11 has 'a' where rank 10 has 'b'"):
        late.board.check()


def test_values_of_a_stranger_are_passed_over_by_ranks_that_know_that_all_have_the_key() -> None:
    store = dist.HashStore()
    one, other = (Rank(store, rank, key=KEY, skips_foreign=True) for rank in range(2))
    for number in range(1, 251):
        store.add("count", 1)
        store.set(str(number), '[0, 3, true, ["b"]]')
    one.step = other.step = 3
    one.announce("b")
    other.step = 4
    for _ in range(2):
        other.board.check()
    with pytest.raises(ValueError, match="rank 11 has 'a' where rank 10 has 'b'"):
        other.board.check()  # each look passes over a bounded number


class CannotCount(dist.Store):
    """A store of a user, with less than a board needs."""


def test_a_store_that_cannot_count_only_tells_less() -> None:
    rank = Rank(CannotCount(), 0)
    rank.announce("b")
    rank.board.check()
    rank.waiting[0] = time.monotonic()
    rank.board.look()
    assert rank.num_ended == 0


def test_first_difference() -> None:
    assert first_difference(["a", "b"], ["a", "c"]) == ("'b'", "'c'")
    assert first_difference(["a"], ["a", "c"]) == ("nothing more", "'c'")
    assert first_difference(["a"], ["a"]) == ("", "")
