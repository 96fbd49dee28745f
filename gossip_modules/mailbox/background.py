"""BackgroundCall: a call in a thread of a clock, and its result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from .clock import Clock

T = TypeVar("T")


class BackgroundCall(Generic[T]):
    """A call that runs in a thread of the clock.

    Args:
        clock: starts the thread, and measures waits.
        call: the call.
        name: the name of the thread.
    """

    def __init__(self, clock: Clock, call: Callable[[], T], *, name: str) -> None:
        self._call = call
        self._result: T | None = None
        self._error: BaseException | None = None
        self.is_done = False
        self._thread = clock.start(self._run, name)

    def _run(self) -> None:
        try:
            self._result = self._call()
        except BaseException as error:  # noqa: BLE001 (raised by `result`)
            self._error = error
        self.is_done = True

    def wait(self, seconds: float) -> bool:
        """Wait at most so long for the end of the call; returns whether it has ended."""
        if not self.is_done:
            self._thread.join(seconds)
        return self.is_done

    def result(self) -> T:
        """The result of the call, which has ended, or its error."""
        assert self.is_done, "wait() has returned True"
        if self._error is not None:
            raise self._error
        return self._result  # type: ignore[return-value]
