"""The watchdog of the tests: it reports what hangs, also while threads run."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.ranks import TIMEOUT
from tests.watchdog import Watchdog

SECONDS = TIMEOUT.total_seconds()
NUM_THREADS = 3
NUM_REPORTS = 10  # by faulthandler's own timer they end the process in a third of the runs


def recurse(depth: int) -> int:
    return recurse(depth - 1) + 1 if depth else depth


@pytest.fixture
def running() -> Iterator[None]:
    """Threads whose stacks change all the time, by more than one chunk of the interpreter's memory for frames."""
    is_over = threading.Event()

    def run() -> None:
        while not is_over.is_set():
            recurse(200)

    threads = [threading.Thread(target=run, daemon=True) for _ in range(NUM_THREADS)]
    for thread in threads:
        thread.start()
    yield
    is_over.set()
    for thread in threads:
        thread.join()


@pytest.mark.usefixtures("running")
def test_it_reports_the_stacks_of_threads_that_run(tmp_path: Path) -> None:
    with (tmp_path / "report").open("w+") as file:
        for _ in range(NUM_REPORTS):
            ended = threading.Event()
            Watchdog(file.fileno(), end=ended.set).start(0.0)
            assert ended.wait(SECONDS)
        file.seek(0)
        report = file.read()
    assert report.count("Current thread") == NUM_REPORTS
    assert report.count("in recurse") > NUM_THREADS * NUM_REPORTS


def test_one_that_is_called_off_reports_nothing_until_it_is_started_again(tmp_path: Path) -> None:
    ended = threading.Event()
    with (tmp_path / "report").open("w+") as file:
        watchdog = Watchdog(file.fileno(), end=ended.set)
        watchdog.start(SECONDS)
        watchdog.call_off()
        assert not ended.is_set()
        assert file.read() == ""
        watchdog.start(0.0)
        assert ended.wait(SECONDS)
        file.seek(0)
        assert "Current thread" in file.read()
