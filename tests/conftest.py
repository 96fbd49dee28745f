"""Fixtures of several test files."""

from __future__ import annotations

import faulthandler
import gc
import os
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.harness.processes import start_server, wait_for_server
from tests.harness.ranks import end_threads, forget_threads
from tests.watchdog import Watchdog

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# torch's store looks up the name of each client's host. Where the name server of a machine leaves out answers when many
# ask at once, each of these is 5 s in which the store answers nobody.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")


def pytest_collection_finish(session: pytest.Session) -> None:
    """Keep what imports and collection have made out of every pass of the garbage collector and of gc.get_referrers().

    These are 600,000 objects in a run of all tests, half a second for each full pass. run_ranks() makes one for each
    rank that fails, wrappers make one where their module seems to be taken, and Python makes some by itself.

    Where tests start processes, the server of them starts here: see `start_server`.
    """
    gc.collect()
    gc.freeze()
    if any(item.get_closest_marker("e2e") for item in session.items):
        start_server()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """The timeout of the first test that starts processes begins when their server is ready."""
    if item.get_closest_marker("e2e"):
        wait_for_server()
    return (yield)


_stderr = pytest.StashKey[int]()
_watchdog = pytest.StashKey[Watchdog]()
_LOCKED_SECONDS = 60.0  # after which no thread gets the interpreter's lock any more, the watchdog's neither


def pytest_configure(config: pytest.Config) -> None:
    """While a test runs, its own standard error is a file of pytest's."""
    config.stash[_stderr] = os.dup(2)
    config.stash[_watchdog] = Watchdog(config.stash[_stderr])


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """A test whose timeout cannot interrupt it ends with its process, after the stack of each thread is written.

    pytest-timeout raises an exception in the main thread, once: where that waits inside a library, or waits again to
    clean up, all tests would wait with it, and nobody would learn which test it is. See [Note: stacks of running
    threads] of `Watchdog`.
    """
    marker = item.get_closest_marker("timeout")
    seconds = float(item.config.getini("timeout") if marker is None else marker.args[0])
    limit = 2 * seconds + 60
    item.config.stash[_watchdog].start(limit)
    faulthandler.dump_traceback_later(limit + _LOCKED_SECONDS, exit=True, file=item.config.stash[_stderr])


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    """See `pytest_runtest_setup`."""
    yield
    item.config.stash[_watchdog].call_off()
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture(autouse=True)
def _only_its_own_threads() -> Iterator[None]:
    """A test answers for the threads that it starts."""
    forget_threads()
    yield
    end_threads()


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """The figures that are written, in their order."""
    from matplotlib.figure import Figure  # here: most tests draw nothing, and it takes a second

    written: list[Figure] = []
    write = Figure.savefig

    def savefig(figure: Figure, path: Path, **options: Any) -> None:
        written.append(figure)
        write(figure, path, **options)

    monkeypatch.setattr(Figure, "savefig", savefig)
    return written
