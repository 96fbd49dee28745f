"""The engine of a process whose rounds another one runs: its counters, and whose state it takes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch

from gossip_modules import D2, QGDSGDm, RingGraph, Schedule
from gossip_modules.engine.following import FollowingEngine
from gossip_modules.engine.lockstep import LockstepEngine, OverlapEngine, SyncEngine
from gossip_modules.extend import PushPull
from gossip_modules.flat.buffer import FlatBuffer
from gossip_modules.flat.vector import FlatVector
from gossip_modules.loop.hooks import Observer
from gossip_modules.membership.links import alone
from gossip_modules.mixing_manager import MetropolisHastingsMixing
from gossip_modules.rounds.rounds import mixer_of
from tests.harness.problems import mlp, sgd

MAKE: dict[str, Callable[[], LockstepEngine]] = {
    "sync": lambda: SyncEngine(bound(PushPull()), Schedule(gossip_every=2)),
    "overlap": lambda: OverlapEngine(bound(PushPull()), Schedule()),
    "D2": lambda: SyncEngine(bound(mixer_of(D2(), PushPull())), Schedule()),
}


def bound(gossiper: Any) -> Any:
    gossiper.bind(MetropolisHastingsMixing(RingGraph(1)), alone(timedelta(seconds=5)))
    return gossiper


def pair(name: str) -> tuple[LockstepEngine, FollowingEngine]:
    """An engine that runs rounds, and one that follows it."""
    return MAKE[name](), FollowingEngine(MAKE[name]())


@pytest.mark.parametrize("name", MAKE)
def test_it_is_as_far_as_the_other_one(name: str) -> None:
    engine, follower = pair(name)
    x = FlatVector.over(torch.linspace(-1, 1, 8))
    for _ in range(3):
        engine.round(x)
        follower.follow(engine.progress())
        assert (follower.t, follower.step, follower.is_in_flight) == (engine.t, engine.step, engine.is_in_flight)
        assert follower.stats == engine.stats
    assert not follower.flush(x)
    assert not follower.is_in_flight
    follower.restart()
    assert (follower.t, follower.step) == (0, 0)
    engine.flush(x)
    engine.close()
    follower.close()


@pytest.mark.parametrize("name", MAKE)
def test_it_takes_the_state_of_the_other_one_which_takes_its_own_only_if_that_is_all(name: str) -> None:
    engine, follower = pair(name)
    x = FlatVector.over(torch.linspace(-1, 1, 8))
    for _ in range(3):
        engine.round(x)
    engine.flush(x)
    follower.load_state_dict(engine.state_dict())
    assert (follower.t, follower.step) == (engine.t, engine.step)
    state = follower.state_dict()
    other = pair(name)[1]
    other.load_state_dict(copy.deepcopy(state))
    assert (other.t, other.step) == (engine.t, engine.step)
    if name == "D2":
        with pytest.raises(
            ValueError, match=r"got the state of a process that follows D2\(\), expected the state of a"
        ):
            engine.load_state_dict(state)
    else:
        assert state == engine.state_dict()
    engine.close()
    follower.close()


def test_momentum_that_another_process_has_written_is_that_of_the_optimizer() -> None:
    model = mlp()
    buffer = FlatBuffer(model)
    gossiper = bound(mixer_of(QGDSGDm(), PushPull()))
    observer = Observer(buffer)
    gossiper.bind_to_training(observer)
    follower = FollowingEngine(SyncEngine(gossiper, Schedule()))
    optimizer = sgd(model)
    for value in (1.0, 2.0):
        (momentum,) = follower.shared(buffer.vector)
        momentum.fill_(value)
        follower.take_shared(buffer.vector)
        optimizer.param_groups[0].update(lr=0.1, weight_decay=0.0, nesterov=False)
        before = [parameter.detach().clone() for parameter in model.parameters()]
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()  # x - 0.1 * 0.9 * momentum
        for parameter, x in zip(model.parameters(), before, strict=True):
            torch.testing.assert_close(parameter.detach(), x - 0.09 * value)
    follower.close()
    optimizer.step()
    optimizer.step()  # no rule watches it any more
