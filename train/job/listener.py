"""RunListener: functions of a caller that a run calls with its measurements."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

LogMetric: TypeAlias = Callable[[str, Mapping[str, Any], Mapping[str, Any]], object]
LogInfo: TypeAlias = Callable[[Mapping[str, Any]], object]


@dataclass(frozen=True)
class RunListener:
    """Functions that are called on every rank; an exception in one of them ends the run.

    Args:
        log_metric: called with a name, values and tags: "train" with step, loss and learning_rate at every `log_every`
            steps, and "epoch" with the columns of the table of this rank after every epoch. The tag is rank. None:
            nobody listens.
        log_info: called once with the configuration, before the first step, and once with the results. None: as above.
    """

    log_metric: LogMetric | None = None
    log_info: LogInfo | None = None

    def metric(self, name: str, values: Mapping[str, Any], *, rank: int) -> None:
        """Pass values on, without those that are empty."""
        if self.log_metric is not None:
            known = {key: value for key, value in values.items() if value is not None}
            self.log_metric(name, known, {"rank": rank})

    def info(self, values: Mapping[str, Any]) -> None:
        """Pass on the configuration, or the results."""
        if self.log_info is not None:
            self.log_info(values)


NOBODY = RunListener()
