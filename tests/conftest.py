"""Fixtures of several test files."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import logging
import os
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import _pytest.logging
import pytest
from _pytest.assertion import rewrite

from tests.harness.processes import shared_server, start_server, use_server, wait_for_server
from tests.harness.ranks import end_threads, forget_threads
from tests.watchdog import Watchdog

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# torch's store looks up the name of each client's host. Where the name server of a machine leaves out answers when many
# ask at once, each of these is 5 s in which the store answers nobody.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """Collection makes 600,000 objects and hardly any garbage: passes of the garbage collector would find nothing."""
    gc.disable()
    try:
        _rewrite_share(session.config)
        return (yield)
    finally:
        gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """The processes that run all tests have one server of forks, which imports while they collect."""
    config = node.config
    if config.args_source is config.ArgsSource.TESTPATHS and "not e2e" not in config.option.markexpr:
        start_server()
        node.workerinput["server"] = shared_server()


def _rewrite_share(config: pytest.Config) -> None:
    """Where several processes run all tests, each rewrites the assertions of its share of files for all of them.

    pytest keeps rewritten files, but in a new clone each process would come to each file at the same time and rewrite
    it: 6 s for all files. pytest has no public function for this.
    """
    given = getattr(config, "workerinput", {})
    is_off = sys.dont_write_bytecode or rewrite.assertstate_key not in config.stash  # --assert=plain
    if "server" not in given or is_off:
        return
    first, step = int(given["workerid"].removeprefix("gw")), given["workercount"]
    for path in sorted(Path(__file__).parent.rglob("test_*.py"))[first::step]:
        kept = rewrite.get_cache_dir(path) / f"{path.stem}{rewrite.PYC_TAIL}"
        if not kept.exists() and rewrite.try_makedirs(kept.parent):
            with contextlib.suppress(SyntaxError):  # collection reports it, with the file
                source_hash, code = rewrite._rewrite_test(path, config)
                rewrite._write_pyc(config.stash[rewrite.assertstate_key], code, source_hash, kept)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Where tests start processes, the server of them starts here: see `start_server`."""
    _freeze()
    if "server" in (given := getattr(session.config, "workerinput", {})):
        use_server(given["server"])
    elif any(item.get_closest_marker("e2e") for item in session.items):
        start_server()


def _freeze() -> None:
    """Keep all objects of now out of every pass of the garbage collector and of gc.get_referrers().

    [Note: frozen objects] Imports and collection make 600,000 objects, half a second for each full pass, and tests
    import more. run_ranks() makes a pass for each rank that fails, a wrapper makes some to find optimizers and other
    tensors in the memory of its module, and Python makes some by itself. So objects are frozen again after each file of
    tests, where all that its tests have made is garbage.
    """
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, object, object]:
    """The timeout of the first test that starts processes begins when their server is ready."""
    if item.get_closest_marker("e2e"):
        wait_for_server()
    result = yield
    if nextitem is None or nextitem.path != item.path:
        _freeze()
    return result


class _CatchingLogs(_pytest.logging.catching_logs[Any]):
    """Handlers of pytest on the root logger alone, which the records of all our loggers reach.

    pytest looks at every logger, six times for each test, for those that do not propagate. Torch has 57 of these, and
    each test would take 1 to 2 ms more. pytest has no public function for this.
    """

    __slots__ = ()

    def __enter__(self) -> Any:
        root = logging.getLogger()
        root.addHandler(self.handler)
        self.attached_loggers.append(root)
        if self.level is not None:
            self.handler.setLevel(self.level)
            self.orig_level = root.level
            root.setLevel(min(self.orig_level, self.level))
        return self.handler


if "attached_loggers" in _pytest.logging.catching_logs.__slots__:  # older pytest looks at the root logger alone
    _pytest.logging.catching_logs = _CatchingLogs  # type: ignore[misc]

_stderr = pytest.StashKey[int]()
_watchdog = pytest.StashKey[Watchdog]()
_LOCKED_SECONDS = 60.0  # after which no thread gets the interpreter's lock any more, the watchdog's neither


def pytest_configure(config: pytest.Config) -> None:
    """While a test runs, its own standard error is a file of pytest's.

    Threads that wake up let the running one go on: as a rule of Linux they take its place, also where it holds the lock
    of a connection, and Gloo's thread then asks for the lock again and again until it runs. That was half of the
    processor time of Gloo's threads. Later threads and processes have the policy of the one that starts them.
    """
    if hasattr(os, "SCHED_BATCH"):
        with contextlib.suppress(PermissionError):  # a container may refuse it: then tests take longer
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
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
