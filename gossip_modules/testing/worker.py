"""Worker: what the training loop of a user gets of `Chaos`, on threads and in processes alike."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ..membership.membership import Membership
from ..membership.participant import Change


class Killed(BaseException):
    """Ends the loop of a worker that is a thread, as SIGKILL ends a process; no `except Exception` catches it."""


class Worker:
    """One of the workers that `Chaos` starts, as its training loop sees it.

    Args:
        rank: its number, in the order of their start.
        store: "host:port" of the job's store.
        steps: that have events for it, or for nobody in particular.
        at_event: called with the membership and the step when training comes to one of these, or is past it.
    """

    def __init__(
        self, rank: int, store: str, steps: Sequence[int], at_event: Callable[[Membership, int], None]
    ) -> None:
        self.rank, self.store = rank, store
        self._steps = sorted(steps, reverse=True)
        self._at_event = at_event
        self.joined: Membership | None = None

    def membership(self, **options: Any) -> Membership:
        """The membership to train with, to which the events happen.

        Args:
            options: of `Membership`, but for its store: `min_workers` at least.

        Raises:
            RuntimeError: the worker has one already.
        """
        if self.joined is not None:
            raise RuntimeError(
                f"got a second membership() of worker {self.rank}, expected one; give one to the wrapper"
            )
        self.joined = _ChaosMembership(self.store, at_step=self._at_step, **options)
        return self.joined

    def _at_step(self, membership: Membership, step: int) -> None:
        is_due = False
        while self._steps and self._steps[-1] <= step:
            self._steps.pop()
            is_due = True
        if is_due:
            self._at_event(membership, step)


class _ChaosMembership(Membership):
    """A membership that says of each training step that it begins."""

    def __init__(self, store: str, *, at_step: Callable[[Membership, int], None], **options: Any) -> None:
        super().__init__(store, **options)
        self._begins = at_step

    def at_step(self) -> Change | None:
        """See `Membership`."""
        was_told = self._is_ahead
        change = super().at_step()
        if not was_told and self._participant is not None:
            self._begins(self, self._participant.step)
        return change


def break_off(membership: Membership) -> None:
    """What the end of a process does: connections close, and nobody is told."""
    membership._closed.set()
    membership._wake.set()
    membership._release_all()


@contextlib.contextmanager
def standing_still(membership: Membership) -> Iterator[None]:
    """Within, no thread of this worker's membership does anything, as in a process that is stopped.

    All of them need one of the two locks for whatever they do, and no thread of another worker does.
    """
    beats = membership._heartbeats
    with membership._lock, contextlib.nullcontext() if beats is None else beats._lock:
        yield
