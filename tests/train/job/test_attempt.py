"""The store of an attempt: what workers find there when torchrun has started them again."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from train.job.attempt import attempt_store

TIMEOUT = timedelta(seconds=20)


def attempt(store: dist.Store, size: int) -> list[dist.Store]:
    """One attempt of `size` ranks, as threads; the store of each."""
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(lambda rank: attempt_store(store, rank, size, timeout=TIMEOUT), range(size)))


def test_each_attempt_has_keys_of_its_own_that_its_ranks_share() -> None:
    store = dist.HashStore()
    for size in (4, 4, 2, 1, 3):  # also when torchrun's agents come and go
        stores = attempt(store, size)
        assert not any(own.check(["stop"]) for own in stores)
        assert [own.add("steps", 1) for own in stores] == list(range(1, size + 1))
        stores[-1].set("stop", "")
        assert all(own.check(["stop"]) for own in stores)


def test_ranks_that_were_killed_while_they_met_are_not_taken_for_those_of_now() -> None:
    store = dist.HashStore()
    # Rank 2 of the attempt before has come, and rank 0 had not answered: nobody else may wait for it now.
    with pytest.raises(TimeoutError, match=r"rank 2 waited 0.05 s for rank 0 to start.*see what rank 0 has printed"):
        attempt_store(store, 2, 3, timeout=timedelta(seconds=0.05))
    # Rank 0 of that attempt has answered rank 1, which then died.
    answering = threading.Thread(target=lambda: attempt_store(store, 1, 3, timeout=TIMEOUT))
    answering.start()
    with pytest.raises(TimeoutError, match=r"rank 0 waited 0.5 s for rank 2 to start.*raise --timeout-seconds"):
        attempt_store(store, 0, 3, timeout=timedelta(seconds=0.5))
    answering.join()
    stores = attempt(store, 3)
    stores[0].set("key", "now")
    assert [own.get("key") for own in stores] == [b"now"] * 3
