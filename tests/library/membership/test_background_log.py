"""Messages of a membership: no thread of it waits for a handler of the log."""

from __future__ import annotations

import ast
import logging
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

import gossip_modules
from gossip_modules.membership import background_log
from gossip_modules.membership.background_log import NAME, BackgroundLogger, log
from tests.library.membership.test_membership import Job, close

SECONDS = 30.0


class Handler(logging.Handler):
    """It waits, while it is told to, with the first message that it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.may_go_on, self.is_waiting = threading.Event(), threading.Event()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.is_waiting.set()
        self.may_go_on.wait(2 * SECONDS)
        self.records.append(record)

    @property
    def messages(self) -> list[str]:
        return [record.getMessage() for record in self.records]


@pytest.fixture
def handler() -> Iterator[Handler]:
    made = Handler()
    logging.getLogger(NAME).addHandler(made)
    yield made
    made.may_go_on.set()
    assert log.flush(SECONDS)
    logging.getLogger(NAME).removeHandler(made)


def test_workers_go_on_while_a_handler_of_the_log_waits(handler: Handler) -> None:
    job = Job(dist.HashStore(), min_workers=2)
    workers = job.start(2)
    job.until_live(workers)
    workers[0].is_killed.set()  # which the others log
    job.until_live(workers[1:])
    workers += job.start(1)  # and a donor gives, and generations begin
    job.until_live(workers[1:])
    assert handler.is_waiting.wait(SECONDS)
    for worker in workers[1:]:
        assert worker.membership is not None
        assert worker.membership.worker.lock.acquire(timeout=SECONDS)
        worker.membership.worker.lock.release()
    close(job.end())
    assert handler.messages == []
    handler.may_go_on.set()
    assert log.flush(SECONDS)
    assert any("rounds go on without worker" in message for message in handler.messages)


def test_messages_are_those_of_their_callers_in_order(handler: Handler) -> None:
    handler.may_go_on.set()
    error: Exception | None = None
    try:
        raise ValueError("its reason")
    except ValueError as caught:
        error = caught
        log.exception("job %s: %s", "a", caught)
    log.debug("nobody listens to these")
    log.warning("%d members", 2)
    assert log.flush(SECONDS)
    first, second = handler.records
    assert (first.getMessage(), second.getMessage()) == ("job a: its reason", "2 members")
    assert (first.name, first.filename, first.funcName) == (
        NAME,
        Path(__file__).name,
        "test_messages_are_those_of_their_callers_in_order",
    )
    assert first.threadName == threading.current_thread().name
    assert first.exc_text is not None
    assert "ValueError: its reason" in first.exc_text
    assert (first.args, first.exc_info) == (None, None), "an error holds frames, with groups and models in them"
    assert error is not None


def test_the_level_of_the_logger_counts(handler: Handler) -> None:
    handler.may_go_on.set()
    target, before = logging.getLogger(NAME), logging.getLogger(NAME).level
    try:
        for level in (logging.ERROR, logging.INFO):
            target.setLevel(level)
            log.info("%d", level)
    finally:
        target.setLevel(before)
    assert log.flush(SECONDS)
    assert handler.messages == [str(logging.INFO)]


def test_waiting_messages_are_bounded_and_dropped_ones_are_counted(
    handler: Handler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background_log, "_MAX_WAITING", 5)
    log.warning("first")
    assert handler.is_waiting.wait(SECONDS)
    for i in range(8):
        log.warning("%d", i)
    assert not log.flush(0.0)
    handler.may_go_on.set()
    assert log.flush(SECONDS)
    told = "3 messages were dropped while a handler of the log did not go on"
    assert handler.messages == ["first", "0", told, "1", "2", "3", "4"]


def test_a_forked_child_has_a_thread_of_its_own() -> None:
    mine = BackgroundLogger(f"{NAME}.test")
    mine.warning("it begins")
    assert mine.flush(SECONDS)
    thread = mine._thread
    mine.begin()  # as after a fork
    mine.warning("it begins again")
    assert mine.flush(SECONDS)
    assert mine._thread is not thread


_ROOT = Path(gossip_modules.__file__).parent
_COMMANDS = {"serve.py"}  # which print for the user, in the main thread
_LOUD = {"warn", "print", "debug", "info", "warning", "error", "exception", "critical"}


def _calls(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func)


@pytest.mark.parametrize("path", sorted((_ROOT / "membership").rglob("*.py")), ids=lambda p: p.stem)
def test_no_module_of_the_membership_writes_by_itself(path: Path) -> None:
    if path.name in _COMMANDS | {"background_log.py"}:
        return
    loud = {"print", "warnings.warn", "logging.getLogger", *(f"logging.{name}" for name in _LOUD)}
    assert loud.isdisjoint(_calls(ast.parse(path.read_text(encoding="utf-8")))), "use `log` of background_log"


def _is_lock(expression: ast.expr) -> bool:
    name = ast.unparse(expression).rpartition(".")[2]
    return name.endswith(("lock", "_moved", "condition")) or name in ("state", "shared", "_starting")


def test_no_thread_writes_while_it_holds_a_lock() -> None:
    found = []
    for path in _ROOT.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.With) and any(_is_lock(item.context_expr) for item in node.items):
                calls = {call for part in node.body for call in _calls(part)}
                found += [f"{path.name}:{node.lineno}: {call}" for call in calls & {"print", "warnings.warn"}]
    assert found == []
