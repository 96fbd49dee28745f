"""Waits that another thread can end."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from gossip_modules.transport.waits import InTurn, Posted, Waits

LIMIT = 20.0


class Message:
    """In the place of a message of Gloo: it is done when told so, and a wait for it cannot be taken back."""

    def __init__(self) -> None:
        self.is_waited_for, self.may_end = threading.Event(), threading.Event()

    def wait(self, timeout: timedelta) -> None:
        self.is_waited_for.set()
        if not self.may_end.wait(timeout.total_seconds()):
            raise RuntimeError("timed out")


def in_a_thread(body: Callable[[], None]) -> Callable[[], str]:
    """Run it; what is returned waits for its end, and gives the text of its error."""
    errors: list[str] = []

    def run() -> None:
        try:
            body()
        except RuntimeError as error:
            errors.append(str(error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()

    def end() -> str:
        thread.join(LIMIT)
        assert not thread.is_alive()
        return errors[0] if errors else ""

    return end


def begin(waits: Waits, **arguments: Any) -> tuple[Message, Callable[[], str]]:
    """A wait that is under way, and what waits for its end."""
    message = Message()
    end = in_a_thread(lambda: waits.wait(message, timedelta(seconds=10 * LIMIT), **arguments))  # type: ignore[arg-type]
    assert message.is_waited_for.wait(LIMIT)
    return message, end


def test_a_wait_ends_with_its_message_or_its_error() -> None:
    waits = Waits()
    message, end = begin(waits, of=1)
    message.may_end.set()
    assert end() == ""
    with pytest.raises(RuntimeError, match="timed out"):
        waits.wait(Message(), timedelta(milliseconds=1))  # type: ignore[arg-type]
    waits.close()


def test_waits_for_one_peer_are_given_up() -> None:
    """Those for others go on; what is done already, as its message came before, is no error afterwards."""
    waits = Waits()
    given_up, end = begin(waits, of=1)
    other, end_of_other = begin(waits, of=2)
    waits.give_up(1)
    assert "given up" in end()
    done = Message()
    done.may_end.set()
    waits.wait(done, timedelta(seconds=LIMIT), of=1)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="timed out"):
        waits.wait(Message(), timedelta(seconds=10 * LIMIT), of=1)  # type: ignore[arg-type]
    other.may_end.set()
    assert end_of_other() == ""
    given_up.may_end.set()
    waits.close()


def test_a_turn_that_is_given_up_goes_on_to_no_other_message() -> None:
    """The caller waits for the messages after it, while the thread of the turn is still inside the message."""
    before, waits, first, second = threading.enumerate(), Waits(), Message(), Message()
    turn = InTurn([Posted(first, peer=1), Posted(second, peer=2)])  # type: ignore[arg-type]
    end = in_a_thread(lambda: waits.wait(turn, timedelta(seconds=10 * LIMIT)))
    assert first.is_waited_for.wait(LIMIT)
    waits.give_up(2)  # its message comes later
    assert waits.under_way() == {1}
    (thread,) = (t for t in threading.enumerate() if t.name == "gossip-wait" and t not in before)
    waits.give_up(1)
    assert "given up" in end()
    assert turn.present == 0
    first.may_end.set()
    thread.join(LIMIT)
    assert not thread.is_alive()
    assert not second.is_waited_for.is_set()
    waits.close()


def test_a_turn_waits_for_all_and_stops_at_the_message_that_fails() -> None:
    waits, done, late, after = Waits(), Message(), Message(), Message()
    done.may_end.set()
    posted = [(done, 1), (done, 2), (late, 1), (after, 2)]
    turn = InTurn([Posted(message, peer=peer) for message, peer in posted])  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="timed out"):
        waits.wait(turn, timedelta(milliseconds=1))
    assert turn.present == 2
    assert turn.seconds.keys() == {1, 2}
    assert not after.is_waited_for.is_set()
    waits.close()


@pytest.mark.parametrize("is_closed", [True, False], ids=["closed", "lost"])
def test_no_thread_is_left(is_closed: bool) -> None:
    """Neither an idle one nor one that was left in a wait that has ended since."""
    waits = Waits()
    done, end = begin(waits)
    done.may_end.set()
    assert end() == ""
    (idle,) = (caller.thread for caller in waits._idle)
    late, end = begin(waits)  # in the same thread
    assert not waits._idle
    if is_closed:
        waits.close()
        assert "given up" in end()
        late.may_end.set()
    else:
        late.may_end.set()
        assert end() == ""
        del waits
    idle.join(LIMIT)
    assert not idle.is_alive()
