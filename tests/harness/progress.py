"""How far a wrapper has come, by its public state; and its engine, for tests of engines alone."""

from __future__ import annotations

from typing import Any

import torch

from gossip_modules.dpwa.averager import PairwiseWorker
from gossip_modules.engine.lockstep import LockstepEngine
from gossip_modules.engine.overlap import LateRound
from gossip_modules.transport.threads import CallThread
from tests.harness.reference import flatten


def local_of(wrapper: Any) -> Any:
    """The model of this rank in a wrapper, for tests of its parts."""
    return wrapper._local


def engine_of(wrapper: Any) -> Any:
    """The engine, for tests that make it fail or hold it up."""
    return wrapper._engine if isinstance(wrapper, PairwiseWorker) else local_of(wrapper).engine


def state_of(wrapper: Any) -> Any:
    """The algorithm's own state, as checkpoints hold it."""
    return wrapper.get_extra_state()["engine"]


def step_of(wrapper: Any) -> int:
    """The training steps so far."""
    return int(state_of(wrapper)["step"])


def round_of(wrapper: Any) -> int:
    """The rounds that were started so far."""
    return int(state_of(wrapper)["t"])


def weight_of(wrapper: Any) -> float:
    """The push-sum weight."""
    return float(wrapper.get_extra_state()["weight"])


def take_corrections(wrapper: Any) -> bool:
    """Flush, and return whether that has changed the model."""
    before = flatten(wrapper)
    wrapper.flush()
    return not torch.equal(flatten(wrapper), before)


def flight_of(engine: LockstepEngine) -> LateRound:
    """The round in flight under training."""
    assert engine.overlap is not None
    assert engine.overlap.flight is not None
    return engine.overlap.flight


def thread_of(engine: LockstepEngine) -> CallThread:
    """The gossip thread of rounds under training."""
    assert engine.overlap is not None
    assert engine.overlap.flights.thread is not None
    return engine.overlap.flights.thread
