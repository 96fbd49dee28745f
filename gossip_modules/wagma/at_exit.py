"""What a wrapper with threads does at the end of a program that has not closed it."""

from __future__ import annotations

import atexit
import sys
import weakref
from collections.abc import Callable
from typing import Protocol


class Closable(Protocol):
    """What is used of the wrapper."""

    def _close(self, error: BaseException | None, *, is_patient: bool) -> None: ...


def close_at_exit(wrapper: Closable) -> Callable[[], None]:
    """At the end of the program the wrapper closes, if it is still there. Returns what takes that back."""

    def close() -> None:
        found = reference()
        if found is not None:
            found._close(getattr(sys, "last_exc", None) or getattr(sys, "last_value", None), is_patient=False)

    def take_back(_: object = None) -> None:
        atexit.unregister(close)

    reference = weakref.ref(wrapper, take_back)
    atexit.register(close)
    return take_back
