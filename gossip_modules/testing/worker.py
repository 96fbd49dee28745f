"""Worker: the handle of a training loop that `Chaos` runs, on threads and in processes alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..membership.membership import Membership
from ..membership.participant import Change


class Worker:
    """One of the workers that `Chaos` starts, as its training loop sees it.

    Args:
        rank: its number, in the order of their start.
        store: "host:port" of the job's store.
        steps: with events for it, or for no worker in particular.
        at_event: called with the step when training comes to one of these, or is past it.
    """

    def __init__(self, rank: int, store: str, steps: Sequence[int], at_event: Callable[[int], None]) -> None:
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

    def _at_step(self, step: int) -> None:
        is_due = bool(self._steps) and self._steps[-1] <= step
        while self._steps and self._steps[-1] <= step:
            self._steps.pop()
        if is_due:
            self._at_event(step)


class _ChaosMembership(Membership):
    """A membership that reports each training step that begins."""

    def __init__(self, store: str, *, at_step: Callable[[int], None], **options: Any) -> None:
        super().__init__(store, **options)
        self._begins = at_step

    def at_step(self) -> Change | None:
        """See `Membership`."""
        change = super().at_step()
        if self.job.participant is not None:
            self._begins(self.job.participant.step)
        return change
