"""Engines decide when rounds run relative to training: the base classes, and the blocking engine."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any, NoReturn

from torch import Tensor

from ..flat.nonfinite import FiniteCheck, check_policy, is_finite, refuse
from ..flat.vector import FlatVector
from ..mixing_manager.base import MixingManager
from ..profiling import Span
from ..rounds.mixer import GlobalAverage, Mixer
from ..schedule import Action, Schedule
from ..state import Restart, State, branch, leaf
from ..transport.base import Transport
from ..worlds.world import ALONE, ModelWorld

MAX_KEPT = 4  # corrections of flushes that `add_again` tells apart
_UNNAMED = "LockstepEngine"  # the engine of old checkpoints without a name


@dataclass
class EngineStats:
    """Statistics of communication: time, number of rounds and staleness."""

    wait_seconds: float = 0.0
    num_rounds: int = 0
    num_skipped: int = 0
    total_staleness: int = 0
    max_staleness: int = 0

    def record(self, staleness: int) -> None:
        """Count a round that took effect `staleness` forwards later than with max_staleness=0."""
        self.num_rounds += 1
        self.total_staleness += staleness
        self.max_staleness = max(self.max_staleness, staleness)

    def summary(self) -> dict[str, float]:
        """Return the counters by the names of `comm_stats()`."""
        return {
            "wait_seconds": self.wait_seconds,
            "num_rounds": self.num_rounds,
            "num_skipped": self.num_skipped,
            "mean_staleness": self.total_staleness / max(self.num_rounds, 1),
            "max_staleness": self.max_staleness,
        }


class Engine(State, ABC):
    """Runs rounds of communication: `round` is called once per training step, at the safe point before the forward."""

    is_asynchronous: bool = False
    """Whether threads of the engine answer peers at any time, so that the rounds of ranks are not in lockstep."""
    is_in_lockstep: bool = True
    """Whether workers of a membership begin a generation at the same step, and not each at its own next step."""
    is_cut_off: bool = False
    """Whether rounds with this generation have ended, so that the next one need not wait for its first step."""

    needs_generation: bool = False
    """Whether steps are lost until the next generation begins, so that the next step waits for it."""

    successor: Engine | None = None
    """The engine that takes the place of this one at the next step, with its mixer and its counters."""

    t: int = leaf(0, is_needed=True)
    """The number of rounds started so far."""

    def __init__(self) -> None:
        self.step = 0  # training steps seen so far
        self.stats = EngineStats()
        self.is_closed = False

    @property
    def is_in_flight(self) -> bool:
        """Whether `flush()` would apply a correction."""
        return False

    adds_again: bool = False
    """Whether `add_again` adds corrections; else a flush to other weights than those of training loses them."""
    is_waiting: bool = False
    """Whether `round` or `flush` waits for a round in flight, with the model and the counters still as before."""

    @property
    def can_leave_out(self) -> bool:
        """Whether `state_dict()` may be called while a round is in flight.

        The state and the model are then the same as in a run where no rank has taken part in this round.
        """
        return False

    @property
    def has_peers(self) -> bool:
        """Whether other ranks may wait for this one until it is closed."""
        return True

    @abstractmethod
    def round(self, x: FlatVector) -> bool:
        """Run the safe point of a training step: x <- x + due corrections; mutates x and its weight.

        Returns:
            Whether x was written.
        """

    def set_out(self, x: FlatVector) -> None:
        """Begin training at x, with rounds after optimizer steps: the first round runs after step 1."""

    def flush(self, x: FlatVector) -> bool:
        """Wait for all rounds in flight: x <- x + their corrections. Returns whether x was written."""
        return False

    def add_again(self, x: FlatVector, *, after: int = 0) -> bool:
        """Add the corrections of the flushes since the last round to the parameters of x again.

        Buffers and weight stay. Call it if x held other weights during those flushes and has its own values back. A
        lockstep engine without corrections does nothing: the round is lost on this rank.

        Args:
            x: the model, mutated.
            after: the number of flushes whose corrections x has already; at most `MAX_KEPT`. Only flushes that wrote
                count, and all flushes from the one with the number `MAX_KEPT` on count as one.

        Returns:
            Whether x was written.
        """
        return False

    def close(self) -> None:
        """End threads and free buffers; idempotent."""

    def round_stats(self) -> dict[str, float]:
        """Return the counters of rounds, for `comm_stats()`."""
        return self.stats.summary()

    def snapshot(self) -> Engine:
        """Return an engine without rounds, with the counters of this one, for a copy of the model."""
        return IdleEngine(self)

    # What a membership asks for, at a safe point.

    def rebind(self, weights: Any, transport: Any, x: FlatVector) -> None:
        """Change the weights and the transport. No round may be in flight.

        Args:
            weights: the weights of rounds from now on.
            transport: the transport of rounds from now on.
            x: the model.
        """
        raise NotImplementedError(f"{type(self).__name__} runs rounds in a world that stays as it is")

    def go_to(self, x: FlatVector, t: int, step: int) -> None:
        """Go on with another model, and drop the state of the algorithm.

        Args:
            x: the model.
            t: the number of the next round.
            step: the number of training steps so far.
        """
        self.restart()
        self.t, self.step = t, step

    def advance(self, num_steps: int) -> None:
        """Count `num_steps` training steps run elsewhere; a negative number takes steps back."""
        self.step += num_steps

    def skipped(self) -> int:
        """Return the training steps left out since the last call, beside the steps of `advance`."""
        return 0

    def withdraw(self) -> None:
        """Give the model to no peer before the next round."""

    def give_up(self, x: FlatVector) -> bool:
        """Apply the received corrections to x and drop later ones; returns False if `flush` is to be called."""
        return False

    def join(self, x: FlatVector, state: Mapping[str, Any]) -> None:
        """Go on with the model x from `state`, `state_dict(joins=True)` of another worker, and its "step"."""
        self.go_to(x, int(state["t"]), int(state["step"]))

    @property
    def state_name(self) -> str:
        """The name in checkpoints. An engine loads the states of engines with the same name."""
        return type(self).__name__

    def to_layout(self, state: dict[str, Any]) -> dict[str, Any]:
        """See `State`."""
        return {"engine": self.state_name, **state}

    def from_layout(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """See `State`."""
        return {name: value for name, value in state.items() if name != "engine"}

    def check_state(self, state: Any, *, of: object = None) -> None:
        """See `State`: a state belongs to one kind of engine."""
        name = state.get("engine", _UNNAMED)
        if state and name != self.state_name:
            raise ValueError(
                f"got the state of a {name}, expected the state of a {self.state_name}; wrap as for the saved model, "
                "or load the model alone: module.load_state_dict"
            )
        super().check_state(state, of=self.state_name)

    def saved_flights(self) -> list[dict[str, Any]] | None:
        """Wait for the rounds in flight, and return them for a checkpoint; they stay in flight.

        Returns:
            Plain values and tensors that share memory; None: a `flush` must come before the checkpoint.
        """
        return None if self.is_in_flight else []

    def resume_flights(self, saved: Sequence[Mapping[str, Any]]) -> None:
        """Go on with rounds of `saved_flights()`, after `load_state_dict`."""


class IdleEngine(Engine):
    """An engine without rounds, for a copy of a wrapper; the threads for peers belong to the original.

    Args:
        other: the engine with the counters to copy.
    """

    def __init__(self, other: Engine) -> None:
        super().__init__()
        self.t, self.step, self.stats = other.t, other.step, replace(other.stats)
        self._state_name = other.state_name

    @property
    def state_name(self) -> str:
        """See `Engine`: the name of the copied engine."""
        return self._state_name

    def round(self, x: FlatVector) -> bool:
        """See `Engine`."""
        return False

    def from_layout(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """See `State`: the number of rounds in a state of the copied engine."""
        return {name: state[name] for name in state if name == "t"}


class LockstepEngine(Engine):
    """Runs the rounds of a mixer in lockstep: all ranks run round t together.

    Args:
        gossiper: the mixer, bound to its peers.
        schedule: the steps with gossip or averages.
        on_nonfinite: "raise" raises FloatingPointError if a round would mix infinities or NaN into a model, "spread"
            does not check.
        world: the processes that decide about rounds together.

    Raises:
        ValueError: `on_nonfinite` has another value; or the mixer keeps models of peers, and the schedule has exact
            averages.
    """

    step: int = leaf(0, is_needed=True)
    gossiper: Mixer = branch(is_needed=True)

    def __init__(
        self, gossiper: Mixer, schedule: Schedule, *, on_nonfinite: str = "raise", world: ModelWorld = ALONE
    ) -> None:
        super().__init__()
        self.world, self._is_alone = world, world.sharers is None
        self.on_nonfinite = check_policy(on_nonfinite)
        if gossiper.keeps_models and schedule.average_every:
            raise ValueError(
                f"got {schedule} with {gossiper}, expected average_every=0: it keeps models of peers from before such "
                "an average, and would undo it; leave the averages out"
            )
        self.gossiper = gossiper
        self.schedule = schedule
        self.choice: dict[str, Any] | None = None  # that this engine was made from: see [Note: overlap="auto"]
        self._is_warm_up = False  # whether the last round was an average after which the algorithm begins
        # The mean of the weights changes if a rank dies, or joins with half the weight of another rank.
        sums_weights = gossiper.transport.is_elastic and gossiper.is_weighted
        self.averager = GlobalAverage(gossiper.transport, sums_weights=sums_weights)
        self._scheduled_average = GlobalAverage(gossiper.transport, sums_weights=sums_weights, may_fail=True)

    @property
    def state_name(self) -> str:
        """See `Engine`: one name for all lockstep engines."""
        return "LockstepEngine"

    def to_layout(self, state: dict[str, Any]) -> dict[str, Any]:
        """See `State`."""
        choice = {} if self.choice is None else {"choice": self.choice}
        return {**super().to_layout(state), **choice}

    def entry_names(self) -> set[str]:
        """See `State`; a state may have the choice of overlap that the engine was made from."""
        return {*super().entry_names(), "choice"}

    def check_state(self, state: Any, *, of: object = None) -> None:
        """See `State`."""
        if "control" in state:
            raise ValueError(
                "got the state of a ConsensusControl, which is gone, expected the state of a run with a Schedule; load "
                "the model alone, module.load_state_dict, and train with SlowMo(4, momentum=0.4) or "
                "Schedule(average_every=8)"
            )
        super().check_state(state, of=of)

    def close(self) -> None:
        """See `Engine`."""
        self.gossiper.close()

    def rebind(self, weights: MixingManager, transport: Transport, x: FlatVector) -> None:
        """See `Engine`."""
        self.gossiper.rebind(weights, transport)
        self.averager.transport = self._scheduled_average.transport = transport

    def round_stats(self) -> dict[str, float]:
        """See `Engine`; with the choice of overlap, if there is one."""
        numbers = {} if self.choice is None else {k: v for k, v in self.choice.items() if isinstance(v, int | float)}
        own = self.gossiper.stats()
        return {**super().round_stats(), **own, **{f"auto_{name}": float(v) for name, v in numbers.items()}}

    def set_out(self, x: FlatVector) -> None:
        """See `Engine`."""
        self.gossiper.begin(x)
        self.step = 1

    @property
    def is_in_flight(self) -> bool:
        """See `Engine`."""
        return not self.gossiper.is_plain and self.gossiper.is_in_flight

    def flush(self, x: FlatVector) -> bool:
        """See `Engine`."""
        return self.gossiper.flush(x)

    def saved_flights(self) -> list[dict[str, Any]] | None:
        """See `Engine`."""
        return self.gossiper.saved_flights()

    def resume_flights(self, saved: Sequence[Mapping[str, Any]]) -> None:
        """See `Engine`."""
        self.gossiper.resume_flights(saved)

    def join(self, x: FlatVector, state: Mapping[str, Any]) -> None:
        """See `Engine`."""
        self.load_state_dict(state)

    def progress(self) -> tuple[float, ...]:
        """Return the counters, for `FollowingEngine.follow`."""
        return float(self.t), float(self.step), float(self.is_in_flight), *map(float, astuple(self.stats))

    def shared(self, x: FlatVector) -> Sequence[Tensor]:
        """See `Mixer`."""
        return self.gossiper.shared(x)

    def take_shared(self, x: FlatVector) -> None:
        """See `Mixer`."""
        self.gossiper.take_shared(x)

    def advance(self, num_steps: int) -> None:
        """See `Engine`; also counts the rounds of these steps, which are a function of the step."""
        target = self.step + num_steps
        for step in range(self.step, target):
            self.t += self._has_round(step)
        for step in range(target, self.step):
            self.t -= self._has_round(step)
        self.step = target

    def _has_round(self, step: int) -> bool:
        """Whether a round runs in this step."""
        action = self.schedule.action(step)
        return self.gossiper.is_due(step) if action is Action.GOSSIP else action is not Action.SKIP

    def _next_mixer(self) -> Mixer | None:
        """Return the mixer of this step, None if no round runs; advances the step."""
        step, self.step = self.step, self.step + 1
        action = self._action(step)
        self._is_warm_up = action is Action.WARM_UP
        if action is Action.SKIP:
            return None
        if action is not Action.GOSSIP:
            return self._scheduled_average
        if not self.gossiper.is_plain:
            self.gossiper.k = step
        return self.gossiper

    def _action(self, step: int) -> Action:
        """Return the action at a step, by the schedule and the algorithm."""
        action = self.schedule.action(step)
        runs = action is not Action.GOSSIP or self.gossiper.is_plain or self.gossiper.is_due(step)
        return action if runs else Action.SKIP

    def _limit_of(self, mixer: Mixer, t: int) -> dict[str, Any]:
        """Return the arguments of `CallThread.result` for round t: the timeout and the description for the error."""
        transport = self.gossiper.transport

        def what() -> str:
            peers = [transport.names[i] for i in mixer.sources if i != transport.rank]
            return f"rank {transport.names[transport.rank]}: round {t} with ranks {peers}"

        return {"what": what, "timeout": transport.timeout}

    def _refuse_nonfinite(self, mixer: Mixer, t: int, *, is_own: bool, is_here: bool = True) -> NoReturn:
        names, rank = self.gossiper.transport.names, self.gossiper.transport.rank
        senders = () if is_own or not is_here else [names[i] for i in mixer.sources if i != rank]
        refuse(names[rank], f"round {t}", senders=senders, is_here=is_own or is_here)


class SyncEngine(LockstepEngine):
    """Blocking rounds: x <- W(t) x, in place, before the forward, without a copy, a thread or a stream.

    If the model of a rank is not finite, the rank raises before it sends the model; on a GPU without a membership it
    raises one round later.
    """

    def __init__(
        self, gossiper: Mixer, schedule: Schedule, *, on_nonfinite: str = "raise", world: ModelWorld = ALONE
    ) -> None:
        super().__init__(gossiper, schedule, on_nonfinite=on_nonfinite, world=world)
        # With a membership a round waits for the GPU anyway, and no other worker is to get values that are not finite.
        self._is_finite: Callable[[FlatVector], bool] = is_finite if gossiper.transport.is_elastic else FiniteCheck()

    def round(self, x: FlatVector) -> bool:
        """See `Engine`."""
        start, step, mixer = time.perf_counter(), self.step, self._next_mixer()
        if self.on_nonfinite == "raise" and (mixer is not None or self.gossiper.has_news):
            self._check_finite(mixer or self.gossiper, x)
        has_changed = False if self.gossiper.is_plain else self.gossiper.begin(x, step)
        if mixer is self._scheduled_average:  # no round may be in flight during an average over all ranks
            has_changed |= self.gossiper.flush(x)
        if mixer is None:
            if has_changed:
                self.stats.wait_seconds += time.perf_counter() - start
            return has_changed
        with Span("gossip.round", [f"t={self.t}"]):
            mixer.start(x, self.t)
            self.t += 1
            mixer.finish(x)
            if mixer is self._scheduled_average and not self._scheduled_average.has_failed:
                self.gossiper.restart(Restart.AVERAGE)
                if self._is_warm_up:
                    self.gossiper.begin_anew(x, step)
        self.stats.wait_seconds += time.perf_counter() - start
        self.stats.record(0)
        self.gossiper.transport.traffic.mixed(0)
        return True

    def _check_finite(self, mixer: Mixer, x: FlatVector) -> None:
        """Raise FloatingPointError if x, which is about to be sent, is not finite; nothing has changed yet."""
        is_rare = self.gossiper.can_recover  # rounds are rare, so that the check may wait for the GPU
        looks_well = is_finite(x) if is_rare else self._is_finite(x)
        if not (looks_well if self._is_alone else self.world.agree(looks_well)):
            self._refuse_nonfinite(mixer, self.t, is_own=True)
