"""Recorded: trainings of the Lab that take the same steps on many networks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar
from unittest import mock

from torch import Tensor

from gossip_modules.lab.clock import Exchanges
from gossip_modules.lab.comparison import LabTraining


class Recorded(LabTraining):
    """A training whose steps are taken once, for methods with workers in step: a network changes only their time.

    All trainings of a plan, a number of workers and a number of steps must have the same task and seed.
    """

    trained: ClassVar[dict[tuple[str, int, int], list[tuple[Exchanges, Tensor]]]] = {}

    def run(self, num_steps: int) -> Iterator[Tensor]:
        """See `LabTraining`; from the second time on only the clock goes on."""
        if self.plan.method.pace != "lockstep":
            yield from super().run(num_steps)
        elif (steps := self.trained.get(self._key(num_steps))) is None:
            yield from self._record(num_steps)
        else:
            for step, (exchanges, z) in enumerate(steps):
                self.num_steps += step > 0
                self.method.clock.advance(exchanges)
                yield z

    def _key(self, num_steps: int) -> tuple[str, int, int]:
        return repr(self.plan), self.setting.world_size, num_steps

    def _record(self, num_steps: int) -> Iterator[Tensor]:
        clock, given = self.method.clock, list[Exchanges]()
        advance = clock.advance

        def note(exchanges: Exchanges) -> None:
            given.append(exchanges)
            advance(exchanges)

        steps = self.trained[self._key(num_steps)] = list[tuple[Exchanges, Tensor]]()
        with mock.patch.object(clock, "advance", note):
            try:
                for z in super().run(num_steps):
                    steps.append((given[-1], z.clone()))
                    yield z
            except (RuntimeError, ValueError):  # of Moniqua, whose bound is then doubled
                del self.trained[self._key(num_steps)]
                raise
