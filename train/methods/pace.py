"""Pace: where a run is when its ranks do, or do not, take their steps together.

[Note: Position] The position of a run is the number of optimizer steps per rank that lie behind it. Epochs, the
learning rate, validation, checkpoints and the end follow it. In lockstep it is the number of every rank's own steps.
Asynchronous ranks take more of them or fewer, so between two boundaries, at which all meet, it is counted otherwise.
The images of a rank follow its own steps, see Data.train_stream: that is what a checkpoint can restore exactly.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple, Protocol

import torch.distributed as dist
from torch import nn

import gossip_modules as gm
from gossip_modules.methods import Chosen, WrapperOptions
from train.job.preemption import StopRequest
from train.job.stop import LockstepStop, StoreStop
from train.job.world import World


class StepCounter(Protocol):
    """What counts the optimizer steps of this rank."""

    step: int


class Meeting(NamedTuple):
    """What all ranks know after they have met."""

    position: int
    """Up to which every rank trains before it does anything else; nobody is further."""
    is_told_to_stop: bool
    """Whether any of them was."""


class Pace(ABC):
    """How the ranks of a run count their steps and hear of a request to stop.

    Training goes `while (position := pace.claim(boundary)) is not None and not pace.should_stop(): step`, then all
    meet.
    """

    @property
    @abstractmethod
    def position(self) -> int:
        """See [Note: Position]; the same on every rank when all have met."""

    @abstractmethod
    def claim(self, boundary: int) -> int | None:
        """The position of this rank's next step; None: no step before `boundary` is left to it."""

    @abstractmethod
    def should_stop(self) -> bool:
        """After each claim: whether to give it up, because the run was told to stop."""

    @abstractmethod
    def meet(self, *, is_told_to_stop: bool) -> Meeting:
        """Collective: come together after the last claim, and before the first; a rank says whether it was told."""

    def drain(self) -> None:
        """Collective, at the end of a run: leave no message on its way."""


class Lockstep(Pace):
    """Every rank takes every step.

    Args:
        counter: the steps of this rank.
        request: this rank's request to stop.
        group: a Gloo group of all ranks.
        lag: see LockstepStop.
    """

    def __init__(self, counter: StepCounter, request: StopRequest, group: dist.ProcessGroup, *, lag: int) -> None:
        self._counter = counter
        self._stop = LockstepStop(request, group, lag=lag)

    @property
    def position(self) -> int:
        """See `Pace`."""
        return self._counter.step

    def claim(self, boundary: int) -> int | None:
        """See `Pace`."""
        return self.position if self.position < boundary else None

    def should_stop(self) -> bool:
        """See `Pace`; collective."""
        return self._stop.should_stop()

    def meet(self, *, is_told_to_stop: bool) -> Meeting:
        """See `Pace`; all ranks are here, and were told alike."""
        return Meeting(self.position, is_told_to_stop)

    def drain(self) -> None:
        """See `Pace`."""
        self._stop.drain()


class SharedSteps(Pace):
    """Ranks share the steps of the run: each claims one after the other, so that fast ranks take more of them.

    To a boundary all ranks together take exactly as many steps as in lockstep. AD-PSGD, dpwa.

    Args:
        counter: the steps of this rank.
        request: this rank's request to stop.
        world: the world of the run.
    """

    def __init__(self, counter: StepCounter, request: StopRequest, world: World) -> None:
        self._counter = counter
        self._world = world
        self._stop = StoreStop(request, world.store)
        self._progress = gm.Progress(world.store)
        self._position = 0

    @property
    def position(self) -> int:
        """See `Pace`; between two meetings that of the last claim."""
        return self._position

    def claim(self, boundary: int) -> int | None:
        """See `Pace`."""
        position = (self._progress.add(1) - 1) // self._world.size
        self._position = min(position, boundary)
        return position if position < boundary else None

    def should_stop(self) -> bool:
        """See `Pace`."""
        return self._stop.should_stop()

    def meet(self, *, is_told_to_stop: bool) -> Meeting:
        """See `Pace`. Claims that were given up are open again."""
        steps, told = zip(*self._world.gather((self._counter.step, is_told_to_stop)), strict=True)
        if self._world.rank == 0:
            self._progress.restore(sum(steps))
        self._world.barrier()  # no claim before the count is right
        self._position = -(-sum(steps) // self._world.size)
        return Meeting(self._position, any(told))


class SharedRounds(Pace):
    """The rounds of the wrapper are the steps of the run: late ranks skip those that the others have passed. WAGMA.

    Args:
        wrapper: counts the rounds.
        request: this rank's request to stop.
        world: the world of the run.
    """

    def __init__(self, wrapper: nn.Module, request: StopRequest, world: World) -> None:
        assert isinstance(wrapper, gm.GroupAverageDataParallel), "only WAGMA counts rounds for all ranks"
        self._wrapper = wrapper
        self._world = world
        self._stop = StoreStop(request, world.store)

    @property
    def position(self) -> int:
        """See `Pace`."""
        return self._wrapper.round

    def claim(self, boundary: int) -> int | None:
        """See `Pace`."""
        position = self.position
        return position if position < boundary else None

    def should_stop(self) -> bool:
        """See `Pace`."""
        return self._stop.should_stop()

    def meet(self, *, is_told_to_stop: bool) -> Meeting:
        """See `Pace`. Settling takes part in the averages that others wait in, and ends in one round on all ranks."""
        self._wrapper.settle()
        return Meeting(self.position, any(self._world.gather(is_told_to_stop)))


def make_pace(
    chosen: Chosen,
    options: WrapperOptions,
    *,
    counter: StepCounter,
    wrapper: nn.Module,
    request: StopRequest,
    world: World,
) -> Pace:
    """How ranks take their steps by a method.

    Args:
        chosen: the method.
        options: arguments of its wrapper.
        counter: the steps of this rank.
        wrapper: the wrapper of this rank's model.
        request: this rank's request to stop.
        world: the world of the run.
    """
    arguments = chosen.arguments
    if chosen.method.pace == "shared_steps":
        return SharedSteps(counter, request, world)
    if chosen.method.pace == "shared_rounds" and arguments["wait_avoiding"] and arguments["group_size"] != 1:
        return SharedRounds(wrapper, request, world)
    # Ranks that train alone, or average in groups, drift apart until all average.
    return Lockstep(counter, request, world.control, lag=max(chosen.period, 1 + options.max_staleness))
