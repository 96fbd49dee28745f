"""Submission: a method with its optimizer, in a file of submissions/."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from benchmarks.record import short_hash
from benchmarks.records import submissions
from benchmarks.records.task import NextByte, loss
from benchmarks.records.tracks import MAX_STEPS
from gossip_modules.lab.models import Objective, WorkerParameters

NUM_WARM = 20
_NO_SETTINGS = {"params", "param_names"}  # of a group of parameters


@dataclass(frozen=True)
class Submission:
    """A method with its optimizer. A submission is the one class of its file that derives from this one.

    Args:
        rate: the learning rate.

    Attributes:
        title: the name in tables.
        grid: the settings that are tried with seed 0 on the validation split, as arguments of the class. The best of a
            track is the one that competes there. One setting is not tried.
    """

    rate: float

    title: ClassVar[str]
    grid: ClassVar[Sequence[Mapping[str, Any]]]

    @property
    def recipe(self) -> Mapping[str, Any]:
        """The optimizer and the learning rates of a training, where they are not those of this class; by name."""
        parts = (type(self).optimizer, type(self).scheduler)
        if parts == (Submission.optimizer, Submission.scheduler):
            return {}
        own, usual = _training_of(self), _training_of(Submission(self.rate))
        return {name: value for name, value in own.items() if value != usual[name]}

    def method(self) -> Any:
        """The method, as `gossip_modules.lab.compare` takes it."""
        raise NotImplementedError

    def optimizer(self, parameters: WorkerParameters) -> Optimizer:
        """Return the optimizer of a worker; AdamW unless a submission has its own.

        Args:
            parameters: a list; its attribute `model` is the model, for optimizers such as `MuonAdamW`.
        """
        return torch.optim.AdamW(parameters, lr=self.rate, betas=(0.9, 0.95), weight_decay=0.01)

    def scheduler(self, optimizer: Optimizer) -> LRScheduler:
        """Return the schedule of the learning rate: it rises for 20 steps and stays."""
        return LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / NUM_WARM))


def _training_of(submission: Submission) -> Mapping[str, str]:
    """Return the optimizer with the settings of its groups, and a hash of the learning rates of all steps."""
    module = Objective(NextByte(), loss)
    named = dict(module.named_parameters())
    parameters = WorkerParameters(named.values(), list(named), module)
    optimizer = submission.optimizer(parameters)
    groups = [{name: group[name] for name in sorted(set(group) - _NO_SETTINGS)} for group in optimizer.param_groups]
    text = "; ".join(", ".join(f"{name}={value}" for name, value in group.items() if value) for group in groups)
    scheduler, rates = submission.scheduler(optimizer), []
    for _ in range(MAX_STEPS):
        rates.append(sorted({group["lr"] for group in optimizer.param_groups}))
        optimizer.step()
        scheduler.step()
    return {"optimizer": f"{type(optimizer).__name__}({text})", "rates": short_hash(repr(rates).encode())}


def names() -> list[str]:
    """Return the names of all submissions: those of their files."""
    return sorted(module.name for module in pkgutil.iter_modules(submissions.__path__))


def entry(name: str) -> type[Submission]:
    """Return the class of a submission."""
    module = importlib.import_module(f"{submissions.__name__}.{name}")
    found = [x for x in vars(module).values() if isinstance(x, type) and x.__module__ == module.__name__]
    (own,) = (x for x in found if issubclass(x, Submission))
    return own
