"""MailRounds: the rounds of an algorithm over a mailbox, for the whole model or for each of its fragments."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ..flat.vector import FlatVector
from ..mixing_manager.base import MixingManager
from ..rounds.algorithm import Algorithm
from ..rounds.mixer import Mixer
from ..rounds.periodic import Periodic
from ..rounds.rounds import Rounds
from ..state import branch
from .driver import MailDriver, Notes
from .errors import RoundGone
from .job import MailJob


class MailRounds(Rounds):
    """The rounds of an algorithm over a mailbox: see [Note: In flight] of `MailDriver`.

    Args:
        algorithm, plain: see `Rounds`.

    Attributes:
        waited, longest_wait: the seconds for which rounds have kept training waiting, in all and at most in one step.
    """

    make_driver = MailDriver
    drivers: list[MailDriver] = branch(name="fragments")  # type: ignore[assignment]

    def __init__(self, algorithm: Algorithm, plain: Mixer) -> None:
        super().__init__(algorithm, plain)
        outer = algorithm.parts[0]
        self._times = outer if isinstance(outer, Periodic) else None
        self._began = self._waited = self._until = 0.0  # of this step: the begin, the wait so far, the end of all waits
        self.waited = self.longest_wait = 0.0
        self.is_delayed = True
        self.is_skippable = False  # a model that is not finite must not enter a round

    def join_run(
        self, job: MailJob, choose: Callable[[int], MixingManager], *, notes: Notes, rejoin: Callable[[RoundGone], None]
    ) -> None:
        """Answer requests by the objects of a run: see `MailDriver.join_run`.

        Args:
            job: see `MailDriver.join_run`.
            choose: see `MailDriver.join_run`.
            notes: told of the end of each round of the first fragment.
            rejoin: lets this worker go on from the newest model of the run; its argument is the reason.
        """
        self.job, self._rejoin = job, rejoin
        for p, driver in enumerate(self.drivers):
            driver.join_run(job, str(p), choose)
        self.drivers[0].notes = notes

    def describe(self, dtypes: Sequence[torch.dtype]) -> str:
        """See `Mixer`; without `sync_every`, which belongs to the pace of a worker."""
        text, own = super().describe(dtypes), f"sync_every={getattr(self._times, 'sync_every', 0)}, "
        return text.replace(own, "", 1) if self._times is not None else text

    def recover(self, x: FlatVector) -> None:
        """x <- the anchors of all fragments; x stays before the first step, where all workers are equal."""
        for p, driver in enumerate(self.drivers):
            if driver.has_begun:
                with self._part(p, x) as part:
                    driver.recover(part)

    def begin(self, x: FlatVector, k: int = 0) -> bool:
        """See `Rounds`; also ends the rounds in flight whose outcome is there.

        All waits of a step together end `grace` seconds and two looks at the medium after its begin. While the medium
        is away there is nothing to wait for.
        """
        settings = self.job.settings
        self._began, self._waited = self.job.clock.now(), 0.0
        self._until = self._began + (0.0 if self.job.medium.is_away else settings.grace + 2 * settings.poll)
        has_changed = super().begin(x, k)
        delay = 0 if self._times is None else self._times.delay
        assert isinstance(delay, int), "a mailbox takes no delay='auto'"
        with self._rejoining():
            for p, driver in enumerate(self.drivers):
                if (begun := driver.begun_at) is None or k < begun + delay:
                    continue
                if driver.is_ready or (delay and k == begun + delay and driver.wait(self._until)):
                    has_changed = True
                    self._land_one(p, x)
            for p, driver in enumerate(self.drivers if self.algorithm.has_equal_memory else ()):
                if driver.is_behind:
                    with self._part(p, x) as part:
                        driver.read_ahead(part)
        self._note_wait()
        return has_changed

    def _starting_at(self, k: int) -> Sequence[int]:
        return [0] if self._times is None else self._times.starting_at(k)

    def finish(self, s: FlatVector) -> None:
        """See `Mixer`; a worker that has missed more rounds than the run keeps begins again from its newest model."""
        with self._rejoining():
            self._finish(s)
        self._note_wait()

    @contextmanager
    def _rejoining(self) -> Iterator[None]:
        try:
            yield
        except RoundGone as error:
            self._give_up()
            self._rejoin(error)

    def _note_wait(self) -> None:
        """Training has waited until now in this step."""
        seconds = self.job.clock.now() - self._began - self._waited
        self._waited += seconds
        self.waited += seconds
        self.longest_wait = max(self.longest_wait, self._waited)

    def stats(self) -> dict[str, float]:
        """See `Rounds`: also the waits of training."""
        return {**super().stats(), "waited": self.waited, "longest_wait": self.longest_wait}

    def _finish(self, s: FlatVector) -> None:
        starting = self._starting_at(self.k) or ([0] if self.algorithm.is_due(self.k) else [])
        delay = 0 if self._times is None else self._times.delay
        for p in starting:
            driver = self.drivers[p]
            if driver.task is not None and driver.wait(self._until):  # a round of before
                self._land_one(p, s)
            if driver.task is None:
                with self._part(p, s) as part:
                    driver.post(part, self.k, until=self._until)
                    if driver.task is not None:
                        self._wait_or_detach(driver, part, waits=not delay)

    def _wait_or_detach(self, driver: MailDriver, part: FlatVector, *, waits: bool) -> None:
        if waits and driver.wait(self._until):
            driver.land(part, kept=0.0, is_now=True)
        else:
            driver.detach(part, keeps_sent=waits or (self._times is not None and self._times.keeps_sent))

    def _land_one(self, p: int, x: FlatVector) -> None:
        """End a round in flight, after steps of training."""
        with self._part(p, x) as part:
            self.drivers[p].land(part, kept=0.0 if self._times is None else self._times.kept, is_now=False)

    def difference(self, s: FlatVector) -> float:
        """See `Mixer`."""
        raise NotImplementedError("the wrapper refuses overlap=True over a mailbox")

    is_in_flight = False
    """See `Rounds`: a round ends at the begin of a step only, so nothing is to be applied between two steps."""

    def flush(self, x: FlatVector) -> bool:
        """See `Rounds`; a round in flight may take long, and ends in a later step."""
        return False

    def saved_flights(self) -> list[dict[str, Any]] | None:
        """See `Rounds`: a round in flight belongs to the run, and is no part of a checkpoint."""
        return []

    def _give_up(self) -> None:
        for driver in self.drivers:
            driver.task = None
        super()._give_up()
