"""One optimizer step of a run."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

import torch

import gossip_modules as gm
from train.run_config import RunConfig
from train.tasks.base import MicroBatch, Task
from train.tasks.parameter_groups import clip_gradients, set_learning_rate
from train.training.state import TrainingState


def train_step(
    task: Task, config: RunConfig, state: TrainingState, batch: Sequence[MicroBatch], *, learning_rate: float
) -> None:
    """One optimizer step, its gradient a mean over all items of `batch`; only the last part of it gossips.

    AllReduce reduces gradients there.

    Args:
        task, config: of the run.
        state: the state of the run; is changed.
        batch: what the step reads.
        learning_rate: the learning rate of this step.
    """
    wrapper, optimizer = state.wrapper, state.optimizer
    num_items = sum(part.num_items for part in batch)
    mean_loss, num_correct = torch.zeros((), device=state.device), torch.zeros((), device=state.device)
    set_learning_rate(optimizer, learning_rate)
    for part in batch:
        with nullcontext() if part is batch[-1] else wrapper.no_sync():
            inputs, targets = task.on_device(part)
            with task.precision.autocast():
                outputs = wrapper(*inputs)
                loss = task.loss(outputs, targets) * (part.num_items / num_items)
            state.scaler.scale(loss).backward()
        mean_loss += loss.detach()
        num_correct += task.num_correct(outputs.detach(), targets)
    state.meters.update(mean_loss, num_correct, num_items)
    if config.weighs_losses and isinstance(wrapper, gm.PairwiseDataParallel):
        wrapper.report_loss(mean_loss.item())
    if config.clip_norm:
        state.scaler.unscale_(optimizer)
        clip_gradients(optimizer, config.clip_norm)
    state.scaler.step(optimizer)
    state.scaler.update()
    optimizer.zero_grad(set_to_none=True)
    state.step += 1
