"""Batches: equal with and without loader processes, which last, end when told, and whose death is an error."""

from __future__ import annotations

import gc
import itertools
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from train.job.errors import DataError
from train.tasks.images.images import BatchKey, Images
from train.tasks.images.loader import Batches

KILLED, SILENT, BROKEN, UNSOUND = 3, 4, 5, 6


class Processes(Images):
    """Batch `seed` is (seed, process that has read it); some seeds are accidents."""

    labels = np.zeros(8, dtype=np.int64)

    def __getitem__(self, key: BatchKey) -> tuple[Tensor, Tensor]:
        if key.seed == KILLED:
            os.kill(os.getpid(), signal.SIGKILL)
        if key.seed == SILENT:
            threading.Event().wait()
        if key.seed == BROKEN:
            raise ValueError("got a broken image")
        if key.seed == UNSOUND:
            raise DataError("got a.jpg that does not decode")
        return torch.tensor(key.seed), torch.tensor(os.getpid())


def batches_of(seeds: Iterator[int] | range, *, num_workers: int, timeout_seconds: float = 20.0) -> Batches:
    keys = (BatchKey(np.arange(2), seed=seed) for seed in seeds)
    return Batches(Processes(), keys, num_workers=num_workers, timeout_seconds=timeout_seconds)


def descriptors() -> set[tuple[str, str]]:
    """The open files of this process: number, and what it leads to."""
    found = set()
    for path in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # that of the listing itself
            found.add((path.name, os.readlink(path)))
    return found


@pytest.mark.parametrize("num_workers", [0, 2])
def test_batches_come_in_the_order_of_their_keys_from_the_same_processes(num_workers: int) -> None:
    batches = batches_of(itertools.count(100), num_workers=num_workers)
    read = [(int(seed), int(pid)) for seed, pid in itertools.islice(batches, 12)]
    assert [seed for seed, _ in read] == list(range(100, 112))
    pids = {pid for _, pid in read}
    assert len(pids) == max(1, num_workers)
    assert (os.getpid() in pids) == (num_workers == 0)
    for _ in range(2):
        batches.close()
    assert not multiprocessing.active_children()
    assert list(batches) == []


def test_processes_and_descriptors_end_with_the_last_batch() -> None:
    before = descriptors()
    assert len(list(batches_of(range(10, 16), num_workers=2))) == 6
    assert not multiprocessing.active_children()
    # The queues of the processes are closed by threads of multiprocessing's, which nobody waits for, or with a cycle.
    deadline = time.monotonic() + 20
    while (left := descriptors() - before) and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.01)
    assert not left


def test_a_signal_to_the_whole_job_does_not_end_a_loader() -> None:
    batches = batches_of(itertools.count(100), num_workers=1)
    pid = int(next(batches)[1])
    os.kill(pid, signal.SIGTERM)
    os.kill(pid, signal.SIGUSR1)
    assert {int(label) for _, label in itertools.islice(batches, 6)} == {pid}
    batches.close()


def test_a_killed_loader_is_an_error() -> None:
    batches = batches_of(range(8), num_workers=1)
    # Ours, or torch's where its signal comes between two batches.
    with pytest.raises(
        RuntimeError, match=r"got no batch from 1 loader processes .*killed|is killed by signal: Killed"
    ):
        list(batches)
    batches.close()
    assert not multiprocessing.active_children()


def test_a_silent_loader_is_an_error_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL", 0.2)  # how long torch waits for its end
    batches = batches_of(range(SILENT, 8), num_workers=1, timeout_seconds=0.5)
    with pytest.raises(RuntimeError, match=r"timed out.*expected one within 0.5 s"):
        next(batches)
    assert not multiprocessing.active_children()


def test_processes_end_with_a_program_that_has_not_closed_them(monkeypatch: pytest.MonkeyPatch) -> None:
    at_exit: list[Callable[[], None]] = []
    monkeypatch.setattr("atexit.register", lambda function, *args: at_exit.append(lambda: function(*args)))
    batches = batches_of(itertools.count(100), num_workers=1)
    next(batches)
    at_exit[-1]()  # the first to be called, before torch waits
    assert not multiprocessing.active_children()
    assert list(batches) == []


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_file_that_cannot_be_read_is_one_line(num_workers: int) -> None:
    """The error of the loader process, without its traceback."""
    batches = batches_of(range(UNSOUND, 8), num_workers=num_workers)
    with pytest.raises(DataError, match=r"^got a.jpg that does not decode$"):
        next(batches)
    assert not multiprocessing.active_children()


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_error_in_a_loader_is_that_error(num_workers: int) -> None:
    batches = batches_of(range(BROKEN, 8), num_workers=num_workers)
    with pytest.raises(ValueError, match="got a broken image"):
        next(batches)
    assert not multiprocessing.active_children()
