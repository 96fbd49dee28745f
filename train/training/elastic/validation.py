"""Validation in an elastic run, in which somebody may die."""

from __future__ import annotations

import torch

import gossip_modules as gm
from gossip_modules.methods import Wrapper
from train.tasks.base import Task
from train.training.evaluate import Validation


def validate(wrapper: Wrapper, task: Task, membership: gm.Membership, *, with_average: bool) -> Validation | None:
    """Metrics of this worker's model, and on the first worker of the average; None: somebody has died in it.

    Args:
        wrapper: in train mode, before and after.
        task: whose test set is read.
        membership: the membership of the run.
        with_average: whether all workers are here, to average their models, or the average needs none of them.
    """
    sent_before = wrapper.comm_stats()["bytes_sent"]
    wrapper.eval()
    averaged: dict[str, float] = {}
    distance = float("nan")
    try:
        with torch.no_grad(), task.precision.autocast():
            own = task.evaluate(wrapper.module)
        if with_average:
            if not membership.is_by_mail:  # whose average is the anchor, which this worker has
                distance = wrapper.consensus_distance()
            with wrapper.averaged():
                if membership.rank == 0 or membership.is_by_mail:  # the others wait for it in their next round
                    with torch.no_grad(), task.precision.autocast():
                        averaged = task.evaluate_averaged(wrapper.module)
    except (ConnectionError, TimeoutError) as error:
        print(f"worker {membership.number}: no average to validate: {error}", flush=True)
        return None
    finally:
        wrapper.train()
    return Validation(own, averaged, distance, wrapper.comm_stats()["bytes_sent"] - sent_before)
