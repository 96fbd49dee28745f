"""The main job: scripts a person reads top to bottom. Start at gossip_sgd.py; `train.run(...)` trains from Python.

`config`, `output_dir`, `log_metric`, `log_info` and `main` are those of PowerGossip's train.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from train.job.listener import LogInfo, LogMetric
    from train.job.result import RunResult
    from train.run_config import RunConfig

config: dict[str, Any] = {}
"""What `main` trains: options of this project or keys of PowerGossip, by name. What is not there has its default."""
output_dir: str = ""
"""The folder that `main` writes to; empty: the option out_dir."""
log_metric: LogMetric | None = None
"""What `main` calls with what is measured, see `run`."""
log_info: LogInfo | None = None
"""What `main` calls with what the run is and has come to, see `run`."""


def run(
    config: RunConfig | Mapping[str, Any],
    *,
    log_metric: LogMetric | None = None,
    log_info: LogInfo | None = None,
) -> RunResult:
    """Train from Python, as the scripts do: alone, as in a notebook, or as one rank under torchrun, mpirun or srun.

    torch.distributed is initialised for the run, and not after it; nor are the signal handlers and the number of
    threads of the run there any more. torch's global generator is seeded.

    Args:
        config: of the run: a configuration of a task (`train.tasks.images.config.Config`, and those of translation and
            language_model), or options by name, such as {"recipe": "sgp", "epochs": 2}, with "task", one of images,
            translation and language_model, images where it is not given, and "preset".
        log_metric: called on every rank with a name, values and tags: "train" at every `log_every` steps, "epoch" with
            the columns of the table of this rank after every epoch; the tag is rank.
        log_info: called on every rank with what the run is, before its first step, and with its results at the end.

    Returns:
        What has come of it.

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
