"""The main job: scripts a person reads top to bottom. Start at gossip_sgd.py; `train.run(...)` trains from Python.

`config`, `output_dir`, `log_metric`, `log_info` and `main` are names of PowerGossip's train.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from train.job.listener import LogInfo, LogMetric
    from train.job.result import RunResult
    from train.run_config import RunConfig

config: dict[str, Any] = {}
"""The options of `main`, by their names here or in PowerGossip. Options that are not there have their defaults."""
output_dir: str = ""
"""The folder that `main` writes to; empty: the option out_dir."""
log_metric: LogMetric | None = None
"""A function that `main` calls with measurements, see `run`; None: there is none."""
log_info: LogInfo | None = None
"""A function that `main` calls with the configuration and the results, see `run`; None: there is none."""


def run(
    config: RunConfig | Mapping[str, Any],
    *,
    log_metric: LogMetric | None = None,
    log_info: LogInfo | None = None,
) -> RunResult:
    """Train from Python, as the scripts do: alone, as in a notebook, or as one rank under torchrun, mpirun or srun.

    The run initialises torch.distributed and ends it. Signal handlers and the number of threads are as before
    afterwards. The run seeds torch's global generator.

    Args:
        config: a configuration of a task, such as `train.tasks.images.config.Config`; or options by name, such as
            {"recipe": "sgp", "epochs": 2}. "task" is images (the default), translation or language_model, and "preset"
            one of its presets.
        log_metric: called on every rank with a name, values and tags: "train" at every `log_every` steps, "epoch" with
            the columns of the table of this rank after every epoch; the tag is rank.
        log_info: called on every rank with the configuration, before the first step, and with the results at the end.

    Returns:
        The results.

    Raises:
        ValueError: the run cannot be as `config` says, or all ranks agree that it must end.
        TimeoutError, ConnectionError: a rank is late or gone; names it.

    Example:
        >>> import train
        >>> result = train.run({"recipe": "sgp", "epochs": 1, "out_dir": "runs/first"}, log_metric=print)
        >>> result.averaged_test
        {'accuracy_percent': 87.43}
    """
    from train.call import run as call

    return call(config, log_metric=log_metric, log_info=log_info)


def main() -> RunResult:
    """`run(config, log_metric=log_metric, log_info=log_info)` with the values of this module, written to `output_dir`.

    Raises:
        ValueError: as `run`; also a key of PowerGossip that has no counterpart.

    Warns:
        UserWarning: keys of PowerGossip; says what they are called here.
    """
    from train.call import main as call

    return call(config, output_dir=output_dir, log_metric=log_metric, log_info=log_info)
