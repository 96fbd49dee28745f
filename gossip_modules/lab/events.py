"""LabKill and LabJoin: workers that die and join in a training of the Lab."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True)
class LabKill:
    """A worker dies before a step.

    Args:
        step: the number of the step.
        worker: the number of the worker.
        seconds: the time until the others go on without it.
    """

    step: int
    worker: int
    seconds: float = 1.0


@dataclass(frozen=True)
class LabJoin:
    """A worker joins before a step, with the training state of the first worker that is there.

    Args:
        step: the number of the step.
        seconds: the time for which the others wait.
    """

    step: int
    seconds: float = 1.0


Event: TypeAlias = LabKill | LabJoin
