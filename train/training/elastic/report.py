"""What an elastic run leaves at its end: the averaged model, and the results of the workers that are left."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from typing import Any, Protocol

import torch

import gossip_modules as gm
from gossip_modules.methods import Wrapper
from train.job.outputs import EXPORT
from train.job.world import gather_json
from train.run_config import RunConfig
from train.tasks.base import Task
from train.training.evaluate import Validation
from train.training.export import export_model
from train.training.log import RunLog
from train.training.report import RankResult, write_report
from train.training.state import TrainingState


class Finished(Protocol):
    """A run whose last step has been taken: an `ElasticRun`."""

    task: Task
    config: RunConfig
    membership: gm.Membership
    wrapper: Wrapper
    state: TrainingState
    log: RunLog | None

    @property
    def changes(self) -> Sequence[Mapping[str, Any]]: ...


def report(run: Finished, validation: Validation | None) -> None:
    """Export the averaged model, and on the first worker write and print the results; all workers call it.

    Over a mailbox each worker writes its results, into a folder that may be its own.

    Where one of them has died in the last average, the first worker's own model, which is close to it, takes its place,
    and the last line says so.

    Args:
        run: is closed on return.
        validation: the validation of the averaged model; None: there is none.
    """
    members = run.membership
    is_first = members.is_by_mail or members.rank == 0
    is_averaged = validation is not None
    average = nullcontext() if members.is_by_mail and not is_averaged else run.wrapper.averaged()
    if validation is None:
        own = _own_metrics(run)
        validation = Validation(own, own, float("nan"), 0.0)
    result = RankResult.of(validation, run.state.step, run.state.meters, run.wrapper.comm_stats())
    numbers, results = [members.number], [result]
    try:
        answers = gather_json(members.transport, (members.number, asdict(result)))
        numbers, results = [n for n, _ in answers], [RankResult(**values) for _, values in answers]
        with average:
            _export(run, is_first)
    except (ConnectionError, TimeoutError) as error:
        is_averaged = False
        print(f"worker {members.number}: the models could not be averaged at the end: {error}", flush=True)
        _export(run, is_first)
    number = members.number
    run.wrapper.close()  # what follows takes a while, and the others have left
    if is_first:
        model = "averaged model" if is_averaged else f"model of worker {number}"
        whose = (run.config.run_dir, run.config, run.task.score, validation, results)
        write_report(*whose, changes=run.changes, numbers=numbers, model=model)
        assert run.log is not None
        run.log.hyper_parameters(run.config.used_choices, validation.averaged)


def _own_metrics(run: Finished) -> dict[str, float]:
    run.wrapper.eval()
    with torch.no_grad(), run.task.precision.autocast():
        metrics = run.task.evaluate_averaged(run.wrapper.module)
    run.wrapper.train()
    return metrics


def _export(run: Finished, is_first: bool) -> None:
    if is_first:
        metadata = {**run.task.metadata, "recipe": run.config.recipe}
        export_model(run.wrapper.module, run.config.run_dir / EXPORT, metadata=metadata)
        run.task.finish(run.wrapper.module)
