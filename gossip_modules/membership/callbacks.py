"""Callbacks: who hears of generations, after all else is done."""

from __future__ import annotations

from collections.abc import Callable

from .participant import Change


class Callbacks:
    """The functions of `Membership.on_change`, and the changes that they have not heard of.

    They are called last, so that a script that catches their error goes on from a state that makes sense.

    Attributes:
        untold: what has changed since the last `tell`, in its order.
    """

    def __init__(self) -> None:
        self.untold: list[Change] = []
        self._functions: list[Callable[[Change], None]] = []

    def add(self, function: Callable[[Change], None]) -> None:
        """Call it from now on."""
        self._functions.append(function)

    def tell(self) -> None:
        """Tell all of them what has changed; raises the first of their errors when all have heard of all."""
        changes, self.untold = self.untold, []
        errors: list[Exception] = []
        for change in changes:
            for function in self._functions:
                try:
                    function(change)
                except Exception as error:  # noqa: BLE001 (raised below)
                    errors.append(error)
        try:
            if errors:
                raise errors[0]
        finally:
            errors.clear()  # the traceback of an error holds this frame
