"""Background: threads with names, whose first error reaches training."""

from __future__ import annotations

import gc
import sys
import threading
import weakref

import pytest

from gossip_modules.engine.background import Background
from tests.harness.ranks import gossip_threads

PATIENCE = 10.0


def fail_with(text: str) -> None:
    """The body of a thread that meets an error."""
    raise ConnectionError(text)


def ended(background: Background) -> bool:
    """Whether all threads end in time."""
    return background.close(PATIENCE)


def test_threads_are_named_daemons_that_end_with_their_body() -> None:
    background, is_over = Background(), threading.Event()
    background.start("gossip-test", lambda: None if is_over.wait(PATIENCE) else fail_with("nobody came"))
    (thread,) = (thread for thread in gossip_threads() if thread.name == "gossip-test")
    assert thread.daemon
    assert thread.name == "gossip-test"
    background.raise_if_failed()
    is_over.set()
    assert ended(background)
    assert thread not in gossip_threads()
    background.raise_if_failed()


def test_the_first_error_is_raised_again_and_again() -> None:
    background = Background()
    background.start("gossip-a", lambda: fail_with("rank 3 is gone"))
    assert ended(background)
    background.start("gossip-b", lambda: fail_with("rank 4 is gone"))
    assert ended(background)
    for _ in range(2):
        with pytest.raises(ConnectionError, match="rank 3 is gone"):
            background.raise_if_failed()


def test_an_error_is_not_raised_twice_on_close() -> None:
    background = Background()
    background.raise_if_unseen()
    background.start("gossip-test", lambda: fail_with("rank 3 is gone"))
    assert ended(background)
    with pytest.raises(ConnectionError):
        background.raise_if_unseen()
    background.raise_if_unseen()


def test_a_system_exit_of_a_thread_is_an_error_too() -> None:
    background = Background()
    background.start("gossip-test", lambda: sys.exit(3))
    assert ended(background)
    with pytest.raises(SystemExit):
        background.raise_if_failed()


def test_close_leaves_a_thread_that_does_not_end() -> None:
    background, is_over = Background(), threading.Event()
    background.start("gossip-test", lambda: None if is_over.wait(PATIENCE) else fail_with("nobody came"))
    assert not background.close(0.01)
    is_over.set()
    assert ended(background)
    assert background.close()


class Connection:
    """What the frames of an error hold."""

    def explain(self, error: ConnectionError) -> None:
        """Raise an error in a frame that holds it."""
        raise error

    def fail(self) -> None:
        """Raise an error that has another one as its cause."""
        try:
            self.explain(ConnectionError("rank 3 is gone"))
        except ConnectionError as error:
            self.explain(ConnectionError(str(error)))


def test_objects_in_the_frames_of_an_error_are_freed_when_it_is_forgotten() -> None:
    background, connection = Background(), Connection()
    held = weakref.ref(connection)
    background.start("gossip-test", connection.fail)
    del connection
    assert ended(background)
    gc.disable()
    try:
        assert held() is not None
        background.forget()
        assert held() is None
    finally:
        gc.enable()
    background.raise_if_failed()
    background.fail(ConnectionError("later"))
    background.raise_if_failed()
