"""Progress: a count that all ranks share."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from multiprocessing.connection import Connection

import pytest
import torch.distributed as dist

from gossip_modules.transport.stores import Progress, job_store


def test_every_step_is_claimed_once_whoever_is_faster() -> None:
    store = dist.HashStore()

    def claim_all(rank: int) -> list[int]:
        progress, claimed = Progress(store), []
        while (step := progress.add(1)) <= 400:
            claimed.append(step)
        return claimed

    with ThreadPoolExecutor(4) as pool:
        claims = [step for claimed in pool.map(claim_all, range(4)) for step in claimed]
    assert sorted(claims) == list(range(1, 401))


def test_a_count_is_read_added_to_and_restored() -> None:
    store = dist.HashStore()
    progress, other, unrelated = Progress(store), Progress(store), Progress(store, name="images")
    assert progress.total == 0
    assert progress.add(3) == 3
    assert other.add(2) == progress.total == 5
    assert unrelated.total == 0
    progress.restore(40)
    assert other.add(1) == 41
    progress.restore(0)
    assert other.total == 0


def test_a_negative_count_is_refused() -> None:
    with pytest.raises(ValueError, match=r"got total=-1, expected a count of 0 or more"):
        Progress(dist.HashStore()).restore(-1)


def test_without_a_store_the_process_group_must_exist() -> None:
    for make in (job_store, Progress):
        with pytest.raises(RuntimeError, match=r"torch.distributed is not initialised.*init_process_group\(\) before"):
            make()


def test_without_a_store_it_is_that_of_the_process_group() -> None:
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        assert Progress().add(2) == 2
        assert Progress(job_store()).total == 2
        assert Progress(job_store(), name="other").total == 0
    finally:
        dist.destroy_process_group()


def serve(pipe: Connection) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipe.send(store.port)
    pipe.recv()


@pytest.mark.e2e
def test_a_store_that_is_gone_is_named() -> None:
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe()
    server = context.Process(target=serve, args=(theirs,))
    server.start()
    try:
        store = dist.TCPStore("127.0.0.1", ours.recv(), timeout=timedelta(seconds=5), wait_for_workers=False)
        progress = Progress(store)
        assert progress.add(1) == 1
    finally:
        ours.send("end")
        server.join()
    with pytest.raises(ConnectionError, match=r"adding 2 to the progress 'steps' of the job: its key-value store did"):
        progress.add(2)
    with pytest.raises(ConnectionError, match=r"restoring 7 as the progress 'steps' of the job.*rank 0, has ended"):
        progress.restore(7)
