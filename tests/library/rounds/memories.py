"""What a wrapper's algorithm remembers."""

from __future__ import annotations

from torch.optim import Optimizer

from gossip_modules import GossipDataParallel
from gossip_modules.rounds.driver import Driver
from gossip_modules.rounds.memory import Memory
from gossip_modules.rounds.optimizer_watch import OptimizerWatch
from gossip_modules.rounds.rounds import Rounds
from tests.harness.progress import engine_of


def drivers_of(wrapper: GossipDataParallel) -> list[Driver]:
    """One for each fragment."""
    gossiper: object = engine_of(wrapper).mixer
    assert isinstance(gossiper, Rounds)
    return gossiper.drivers


def memory_of(wrapper: GossipDataParallel) -> Memory:
    """That of a wrapper whose algorithm has one for the whole model."""
    (driver,) = drivers_of(wrapper)
    return driver.memory


def watch_of(wrapper: GossipDataParallel) -> OptimizerWatch:
    """It watches the optimizer of the model."""
    watch = drivers_of(wrapper)[0].watch
    assert watch is not None
    return watch


def optimizer_of(wrapper: GossipDataParallel) -> Optimizer:
    """The outer optimizer."""
    return memory_of(wrapper).optimizers["outer"].optimizer
