"""A training run that is called from Python: the functions behind `train.run` and `train.main`."""

from __future__ import annotations

import difflib
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, fields
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist

from train.job.errors import UsageError, usage_errors
from train.job.listener import LogInfo, LogMetric, RunListener
from train.job.preemption import SIGNALS, StopRequest
from train.job.rank_environment import rank_environment
from train.job.result import RunResult
from train.old_options.tables import OPTIONS
from train.old_options.translate import translated_config
from train.run_config import RunConfig
from train.training.process import run_to_result

TASKS: Mapping[str, tuple[str, str]] = {
    "images": ("config.Config", "task.ImageTask"),
    "translation": ("config.TranslationConfig", "task.TranslationTask"),
    "language_model": ("config.LanguageModelConfig", "task.LanguageModelTask"),
}
"""The configuration and the class of each task, in train/tasks/<name>/."""


def run(
    config: RunConfig | Mapping[str, Any], *, log_metric: LogMetric | None = None, log_info: LogInfo | None = None
) -> RunResult:
    """See `train.run`."""
    if dist.is_available() and dist.is_initialized():
        raise UsageError(
            "got torch.distributed initialised already, expected not: a run does so itself, and ends it; call "
            "torch.distributed.destroy_process_group() before"
        )
    chosen = as_config(config)
    if chosen.elastic:
        raise UsageError(
            "got elastic=True for train.run, expected False: a worker that comes and goes is a process of its own; "
            "start python -m train.gossip_sgd --elastic for each"
        )
    with _settings_kept() as make_stop:
        listener = RunListener(log_metric, log_info)
        return run_to_result(chosen, _task_of(chosen), make_stop=make_stop, listener=listener)


def main(
    config: Mapping[str, Any],
    *,
    output_dir: str = "",
    log_metric: LogMetric | None = None,
    log_info: LogInfo | None = None,
) -> RunResult:
    """See `train.main`."""
    given, num_workers = dict(config), config.get("n_workers", "N")
    with usage_errors():
        place = rank_environment(os.environ)
    for name, actual in (("n_workers", place.size), ("rank", place.rank)):
        if (value := given.pop(name, actual)) != actual:
            raise UsageError(
                f"got {name}={value!r} in rank {place.rank} of {place.size} processes, expected {actual}; start "
                f"torchrun --nproc-per-node {num_workers}, which tells each process its place"
            )
    task = "language_model" if given.get("task") == "LSTM" else given.get("task", "images")
    names = _options(_config_type(task if task in TASKS else "images"))
    options = {name: value for name, value in given.items() if name != "task" or value not in TASKS}
    options = translated_config(options, names) | ({"task": task} if task in TASKS else {})
    if output_dir:
        options["out_dir"] = output_dir
    return run(options, log_metric=log_metric, log_info=log_info)


def as_config(config: RunConfig | Mapping[str, Any]) -> RunConfig:
    """The configuration that options by name describe.

    Raises:
        UsageError: there is no such task, preset or option, or a value that is out of bounds.
    """
    if isinstance(config, RunConfig):
        return config
    if not isinstance(config, Mapping):
        raise UsageError(
            f"got {config!r} to train, expected a configuration of a task, or options by name; pass such as "
            '{"recipe": "sgp", "epochs": 2}'
        )
    options = dict(config)
    kind = _config_type(options.pop("task", "images"))
    preset: Mapping[str, Any] = {}
    if (name := options.pop("preset", None)) is not None:
        if name not in kind.PRESETS:
            raise UsageError(f"got preset={name!r}, expected one of {', '.join(kind.PRESETS) or 'none'}; leave it out")
        preset = kind.PRESETS[name]
    known = _options(kind)
    for name in options:
        if name not in known:
            raise UsageError(_unknown(name, known))
    values = {name: _as(known[name], value, name=name) for name, value in options.items()}
    with usage_errors():
        chosen = kind(**{**preset, **values})
        chosen.check_preset(preset)
    return chosen


def _unknown(name: str, known: Mapping[str, Any]) -> str:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.8)
    if name in OPTIONS:
        return f"got {name!r}, an option of another system, expected one of this project; {OPTIONS[name]}"
    remedy = f"did you mean {near[0]!r}?" if near else f"the options are {', '.join(sorted(known))}"
    return f"got {name!r}, which is no option of this task, expected one; {remedy}"


def _as(default: Any, value: Any, *, name: str) -> Any:
    """The value, of the type of its default: a list is as good as a tuple, and 1 as 1.0."""
    if isinstance(default, tuple) and isinstance(value, list | tuple):
        return tuple(value)
    if isinstance(default, float) and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if type(value) is not type(default) and (name, value) != ("overlap", "auto"):
        kind = type(default).__name__
        raise UsageError(f"got {name}={value!r}, expected a value of type {kind}; the default is {default!r}")
    return value


def _config_type(task: object) -> type[RunConfig]:
    if task not in TASKS:
        raise UsageError(f"got task={task!r}, expected one of {', '.join(TASKS)}; leave it out for images")
    kind: type[RunConfig] = _load(str(task), TASKS[str(task)][0])
    return kind


def _task_of(config: RunConfig) -> Any:
    """The class of the task that a configuration is of."""
    for name, (_, task) in TASKS.items():
        if type(config).__module__.startswith(f"train.tasks.{name}."):
            return _load(name, task)
    raise UsageError(
        f"got a {type(config).__name__}, which is the configuration of no task of train/, expected one of "
        f"{', '.join(TASKS)}; call train.training.process.run(config, make_task) for a task of yours"
    )


def _load(task: str, name: str) -> Any:
    module, _, attribute = name.partition(".")
    return getattr(import_module(f"train.tasks.{task}.{module}"), attribute)


def _options(kind: type[RunConfig]) -> dict[str, Any]:
    """The options of a task with their defaults."""
    return {
        option.name: option.default if option.default is not MISSING else getattr(kind(), option.name)
        for option in fields(kind)
    }


@contextmanager
def _settings_kept() -> Iterator[Any]:
    """Put back the number of threads, the choice of kernels and the signal handlers that a run changes."""
    num_threads, is_deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    stops: list[StopRequest] = []

    def make_stop() -> StopRequest:
        is_main = threading.current_thread() is threading.main_thread()  # no other one may handle signals
        stops.append(StopRequest(SIGNALS if is_main else ()))
        return stops[-1]

    try:
        yield make_stop
    finally:
        for stop in stops:
            stop.close()
        torch.set_num_threads(num_threads)
        torch.use_deterministic_algorithms(is_deterministic)
