"""LockstepEngine: the rounds of a mixer, round t on all ranks together, in the step or under training."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, astuple, replace
from typing import Any, NoReturn

import torch
from torch import Tensor

from ..flat.nonfinite import FiniteCheck, check_policy, is_finite, log_left_out, refuse
from ..flat.vector import FlatVector
from ..mixing_manager.base import MixingManager
from ..old_names import takes_old_arguments
from ..profiling import Span
from ..rounds.mixer import GlobalAverage, Mixer
from ..rounds.push_pull import PushPull
from ..rounds.rounds import Rounds
from ..schedule import Action, Schedule
from ..state import Restart, branch, leaf, transient
from ..transport.base import Transport
from ..worlds.world import ALONE, ModelWorld
from .engine import Engine
from .measuring import Measurement, OverlapChoice
from .overlap import LateRound, Overlap

_DELAY = re.compile(r"\bdelay=(?:'auto'|[1-9]\d*)")  # in the text of an algorithm whose rounds have a delay
_NEWER = ", collective='all_gather'"
"""A setting at its default that checkpoints of version 0.1 do not name."""
_OVERLAP = "overlap=True"  # the settings of a round of an `Overlap`, which any mixer may have begun


class LockstepEngine(Engine):
    """Runs the rounds of a mixer in lockstep: all ranks run round t together.

    Without `overlap` a round is x <- W(t) x, in place, before the forward, without a copy, a thread or a stream. If the
    model of a rank is not finite, the rank raises before it sends the model; on a GPU without a membership it raises
    one round later. With `overlap` see [Note: Overlap] of `Overlap`.

    Args:
        mixer: the mixer, bound to its peers; with `overlap` the gossip thread calls it.
        schedule: the steps with gossip or averages. With `overlap` a round starts every max_staleness + 1 steps at
            most, unless the algorithm chooses the steps.
        overlap: lets rounds run under training; None: training waits for each round.
        measurement: chooses the overlap after the first rounds, which block: see [Note: overlap="auto"] of
            `Measurement`.
        on_nonfinite: "raise" raises FloatingPointError if a round would mix infinities or NaN into a model, "spread"
            does not check.
        world: the processes that decide about rounds together, so that all of them raise, or choose, alike.

    Attributes:
        rounds: the mixer, if it runs the rounds of an algorithm; None: plain gossip, with a round in each step of the
            schedule.
        choice: the choice of `measurement`; None before the choice.

    Raises:
        ValueError: `on_nonfinite` has another value; or the mixer keeps models of peers, and the schedule has exact
            averages.
    """

    step: int = leaf(0, is_needed=True)
    mixer: Mixer = branch(name="gossiper", is_needed=True)
    _left: Overlap | None = transient(None)  # a round of a checkpoint, for rounds that do not overlap; applied next

    @takes_old_arguments()
    def __init__(
        self,
        mixer: Mixer,
        schedule: Schedule,
        *,
        overlap: Overlap | None = None,
        measurement: Measurement | None = None,
        on_nonfinite: str = "raise",
        world: ModelWorld = ALONE,
    ) -> None:
        super().__init__()
        self.world, self._is_alone = world, world.sharers is None
        self.on_nonfinite = check_policy(on_nonfinite)
        if mixer.keeps_models and schedule.average_every:
            raise ValueError(
                f"got {schedule} with {mixer}, expected average_every=0: it keeps models of peers from before such "
                "an average, and would undo it; leave the averages out"
            )
        self.mixer, self.schedule = mixer, schedule
        self.rounds = mixer if isinstance(mixer, Rounds) else None
        self._has_own_times = self.rounds is not None and self.rounds.algorithm.has_own_times
        # The mean of the weights changes if a rank dies, or joins with half the weight of another rank.
        sums_weights = mixer.transport.is_elastic and mixer.is_weighted
        self.averager = GlobalAverage(mixer.transport, sums_weights=sums_weights)
        self._scheduled_average = GlobalAverage(mixer.transport, sums_weights=sums_weights, may_fail=True)
        self.choice: OverlapChoice | None = None
        self._measurement, self.overlap = measurement, overlap
        self._turn_to(overlap)
        # With a membership a round waits for the GPU anyway, and no other worker is to get values that are not finite.
        # Rounds that start from an anchor are rare, so that the check may wait for the GPU.
        may_wait = mixer.transport.is_elastic or (self.rounds is not None and self.rounds.algorithm.can_recover)
        self._is_finite: Callable[[FlatVector], bool] = is_finite if may_wait else FiniteCheck()

    def _turn_to(self, overlap: Overlap | None) -> None:
        """Let rounds run under training from now on, or in the step."""
        self.overlap, self.adds_again = overlap, overlap is not None
        self.may_be_in_flight = overlap is not None or (self.rounds is not None and self.rounds.is_delayed)
        if overlap is not None and not self._has_own_times:
            gossip_every = max(self.schedule.gossip_every, overlap.max_staleness + 1)
            self.schedule = replace(self.schedule, gossip_every=gossip_every)
        # Peers can leave out a correction that is under way, but not a message that changes their state.
        self._looks_at_model = self.on_nonfinite == "raise" and (overlap is None or not self.mixer.is_skippable)

    def start_training(self, x: FlatVector) -> None:
        """See `Engine`."""
        if self.rounds is not None:
            self.rounds.begin(x)
        self.step = 1

    # A step.

    def round(self, x: FlatVector) -> bool:
        """See `Engine`: wait for the round that is due, and mix by the mixer of this step, or let it depart."""
        start, k, overlap, rounds = time.perf_counter(), self.step, self.overlap, self.rounds
        if self._measurement is not None:
            self._measurement.begin_step(x)
        flight = None if overlap is None else overlap.begin_step()
        landing = flight if flight is not None and self._lands(flight, x) else None
        action = self.schedule.action(k)
        if rounds is not None and action is Action.GOSSIP:
            if self._has_own_times and not rounds.algorithm.is_due(k):
                action = Action.SKIP
            else:  # and no round is in flight any more, which would read the number
                rounds.k = k
        mixer = None
        if action is not Action.SKIP:
            mixer = self.mixer if action is Action.GOSSIP else self._scheduled_average
        self.step = k + 1
        if self._looks_at_model and (mixer is not None or (rounds is not None and rounds.has_news)):
            self._check_finite(mixer or self.mixer, x)
        has_changed = self._left is not None and self.flush(x)
        if flight is None:
            has_changed |= self.mixer.begin(x, k)
            if rounds is not None and mixer is self._scheduled_average:  # an average has no round in flight beside it
                has_changed |= rounds.flush(x)
        if overlap is not None:
            return self._go_on(overlap, x, mixer, landing) or has_changed
        if mixer is not None:
            has_changed = True
            with Span("gossip.round", [f"t={self.t}"]):
                mixer.start(x, self.t)
                self.t += 1
                mixer.finish(x)
                if mixer is self._scheduled_average:
                    self._note_average(x, k, begins=action is Action.WARM_UP)
            self.stats.num_rounds += 1
            self.mixer.transport.traffic.mixed(0)
        if has_changed:
            self.stats.wait_seconds += time.perf_counter() - start
        if self._measurement is not None:
            self._measure(self._measurement, x, has_round=action in (Action.GOSSIP, Action.AVERAGE))
        return has_changed

    def _has_round(self, k: int) -> bool:
        """Whether a round runs after k steps, by the schedule and the algorithm."""
        action = self.schedule.action(k)
        if action is Action.GOSSIP:
            return self.rounds is None or self.rounds.algorithm.is_due(k)
        return action is not Action.SKIP

    def _note_average(self, x: FlatVector, k: int, *, begins: bool = False) -> None:
        """Restart the state that an average in place of a round makes invalid.

        Args:
            x: the model.
            k: the number of optimizer steps before the average.
            begins: whether the algorithm begins with the model after the average.
        """
        if not self._scheduled_average.has_failed:
            self.mixer.restart(Restart.AVERAGE)
            if begins and self.rounds is not None:
                self.rounds.start_over(x, k)

    def advance(self, num_steps: int) -> None:
        """See `Engine`; also counts the rounds of these steps, which are a function of the step."""
        target = self.step + num_steps
        for step in range(self.step, target):
            self.t += self._has_round(step)
        for step in range(target, self.step):
            self.t -= self._has_round(step)
        self.step = target

    # Under training.

    def _lands(self, flight: LateRound, x: FlatVector) -> bool:
        """Whether the round ends in this step. Its correction is there then, and not applied yet."""
        if not (flight.is_due(self.step) or self._has_round(self.step)):
            return False
        assert self.overlap is not None, "a round in flight overlaps"
        self._wait(self.overlap, flight, x)
        return True

    def _go_on(self, overlap: Overlap, x: FlatVector, mixer: Mixer | None, landing: LateRound | None) -> bool:
        """Apply the correction of the round that has arrived, and let the round of this step depart."""
        k = self.step - 1
        if landing is not None:
            overlap.convert_buffers(landing, x)
        if mixer is not None:
            t, self.t = self.t, self.t + 1
            is_average, checks = mixer is self._scheduled_average, self.on_nonfinite != "spread"
            self.stats.wait_seconds += overlap.depart(
                x, mixer, t, begun=k, landing=landing, is_average=is_average, checks=checks
            )
        elif landing is not None:
            overlap.apply(landing, x)
        if landing is not None:
            self.stats.record(landing.staleness_at(k))
        return landing is not None

    def _wait(self, overlap: Overlap, flight: LateRound, x: FlatVector) -> None:
        """Wait for the round, which stays in flight, with its correction in the snapshot."""
        start, transport, self.is_waiting = time.perf_counter(), self.mixer.transport, True
        try:
            overlap.wait(flight, transport)
        finally:
            self.is_waiting = False
        self.stats.wait_seconds += time.perf_counter() - start
        transport.traffic.mixed(flight.staleness_at(self.step))  # before the next round departs
        if self.on_nonfinite != "spread" and not self.world.agree(flight.is_finite):
            self._refuse_or_leave_out(overlap, flight, x)
        if flight.is_average:
            self._note_average(x, flight.begun)

    def flush(self, x: FlatVector) -> bool:
        """See `Engine`."""
        overlap = self._left or self.overlap
        if overlap is None:
            return self.rounds is not None and self.rounds.flush(x)
        if (flight := overlap.flight) is None:
            self._left = None  # its round has raised an error
            return False
        self._wait(overlap, flight, x)
        self._left = None
        overlap.convert_buffers(flight, x)
        overlap.apply(flight, x, is_flush=True)
        self.stats.record(flight.staleness_at(self.step))
        return True

    @property
    def is_in_flight(self) -> bool:
        """See `Engine`."""
        if self._left is not None:
            return True
        if self.overlap is not None:
            return self.overlap.flight is not None
        return self.rounds is not None and self.rounds.is_in_flight

    @property
    def can_leave_out(self) -> bool:
        """See `Engine`: the memory of an algorithm may change on the gossip thread."""
        return self.overlap is not None and self.rounds is None

    def add_again(self, x: FlatVector, *, after: int = 0) -> bool:
        """See `Engine`."""
        return self.overlap is not None and not after and self.overlap.add_again(x)

    def saved_flights(self) -> list[dict[str, Any]] | None:
        """See `Engine`."""
        overlap = self.overlap
        if self._left is not None:
            return None
        if overlap is None:
            return [] if self.rounds is None else self.rounds.saved_flights()
        if (flight := overlap.flight) is None:
            return []
        if self.mixer.transport.is_elastic:
            return None
        overlap.wait(flight, self.mixer.transport)
        return [overlap.saved(flight)]

    @property
    def flight_settings(self) -> str:
        """See `Engine`. A round with a delay ends at the step that was its due, under any other delay too."""
        return _OVERLAP if self.overlap is not None else _DELAY.sub("delay=...", str(self.mixer)).replace(_NEWER, "")

    def resume_flights(self, saved: Sequence[Mapping[str, Any]], settings: str) -> bool:
        """See `Engine`. A round under training has its correction, which any engine of this class can apply."""
        if settings == _OVERLAP:
            if (overlap := self.overlap) is None:
                overlap = self._left = Overlap()
            overlap.resume(saved)
            return True
        if self.rounds is None or settings != self.flight_settings:
            return False
        self.rounds.resume_flights(saved)
        return True

    # Infinities and NaN.

    def _check_finite(self, mixer: Mixer, x: FlatVector) -> None:
        """Raise FloatingPointError if x, which is about to be sent, is not finite.

        A round that has arrived is then still in flight and not applied, so you can repair x and repeat the step.
        """
        looks_well = self._is_finite(x)
        if not (looks_well if self._is_alone else self.world.agree(looks_well)):
            self._refuse(mixer.sources, self.t, is_own=True)

    def _refuse_or_leave_out(self, overlap: Overlap, flight: LateRound, x: FlatVector) -> None:
        """Raise FloatingPointError, since the correction has infinities or NaN.

        In a membership only the worker that has sent them raises. The others set the correction to zero.
        """
        transport, received = self.mixer.transport, flight.received
        # If another process of the node has found them, all that this one has received is finite.
        is_sent = not flight.is_finite and received is not None and all(map(is_finite, received))
        is_own = is_sent or not is_finite(x)
        if not transport.is_elastic or not self.world.agree(not is_own):
            overlap.flights.cancel()
            self._refuse(flight.sources, flight.t, is_own=is_own, is_here=not flight.is_finite)
        log_left_out(transport.names[transport.rank], f"round {flight.t}", self._names_of(flight.sources))
        overlap.leave_out(flight)
        self.stats.num_skipped += 1

    def _refuse(self, sources: Sequence[int], t: int, *, is_own: bool, is_here: bool = True) -> NoReturn:
        transport = self.mixer.transport
        senders = () if is_own or not is_here else self._names_of(sources)
        refuse(transport.names[transport.rank], f"round {t}", senders=senders, is_here=is_own or is_here)

    def _names_of(self, ranks: Sequence[int]) -> list[int]:
        transport = self.mixer.transport
        return [transport.names[i] for i in ranks if i != transport.rank]

    # The choice of overlap.

    def _measure(self, measurement: Measurement, x: FlatVector, *, has_round: bool) -> None:
        """Note the times of a step, and choose after the last one that is measured."""
        if measurement.end_step(x, has_round=has_round, num_bytes_sent=self.mixer.transport.num_bytes_sent):
            transport, every, can_narrow = (
                self.mixer.transport,
                self.schedule.gossip_every,
                self._open_plain is not None,
            )
            choice = measurement.agree(
                x, self.t - 1, transport, can_narrow=can_narrow, world=self.world, gossip_every=every
            )
            self._choose(choice)

    @property
    def _open_plain(self) -> PushPull | None:
        """The plain gossip of all messages, if they may be rounded and are not; else None."""
        if self.rounds is not None and not self.rounds.algorithm.parts[-1].takes_wire_dtype:
            return None
        plain = self.mixer if self.rounds is None else self.rounds.plain
        return plain if isinstance(plain, PushPull) and plain.wire_dtype is None else None

    def _choose(self, choice: OverlapChoice) -> None:
        """Run later rounds as chosen."""
        assert self._measurement is not None
        measurement, self._measurement, self.choice = self._measurement, None, choice
        if choice.wire_dtype is not None:
            assert self._open_plain is not None, "the wrapper refuses a narrow wire for others"
            self._open_plain.narrow(getattr(torch, choice.wire_dtype))
        self._turn_to(measurement.overlap_of(choice))

    # State.

    @property
    def state_name(self) -> str:
        """See `Engine`: one name for all lockstep engines."""
        return "LockstepEngine"

    def to_layout(self, state: dict[str, Any]) -> dict[str, Any]:
        """See `State`."""
        choice = {} if self.choice is None else {"choice": asdict(self.choice)}
        return {**super().to_layout(state), **choice}

    def entry_names(self) -> set[str]:
        """See `State`; a state may have the choice of overlap."""
        return {*super().entry_names(), "choice"}

    def check_state(self, state: Mapping[str, Any], *, of: object = None) -> None:
        """See `State`."""
        if "control" in state:
            raise ValueError(
                "got the state of a ConsensusControl, which is gone, expected the state of a run with a Schedule; load "
                "the model alone, module.load_state_dict, and train with SlowMo(4, momentum=0.4) or "
                "Schedule(average_every=8)"
            )
        super().check_state(state, of=of)

    def fill(self, state: Mapping[str, Any]) -> None:
        """See `State`; a choice of overlap is loaded if this run chooses too, and the choice is within its limits."""
        super().fill(state)
        choice = OverlapChoice(**state["choice"]) if "choice" in state else None
        if choice is not None and self._measurement is not None and self._measurement.limits.allow(choice):
            self._choose(choice)

    def interrupt(self) -> None:
        """See `State`: a round under training is dropped."""
        self._left = None
        if self.overlap is not None:
            self.overlap.resume([])

    def restarted(self, event: Restart) -> None:
        """See `State`."""
        if event is Restart.ALL and self._measurement is not None:
            self._measurement.clear()

    def join(self, x: FlatVector, state: Mapping[str, Any]) -> None:
        """See `Engine`."""
        self.load_state_dict(state)

    def close(self) -> None:
        """See `Engine`. A round in flight ends by itself, since peers have its message."""
        self.mixer.close()
        if self.overlap is not None:
            self.overlap.close()

    def rebind(self, weights: MixingManager, transport: Transport, x: FlatVector) -> None:
        """See `Engine`."""
        self.mixer.rebind(weights, transport)
        self.averager.transport = self._scheduled_average.transport = transport

    def round_stats(self) -> dict[str, float]:
        """See `Engine`; with the choice of overlap, if there is one."""
        choice = {} if self.choice is None else self.choice.numbers()
        return {**super().round_stats(), **self.mixer.stats(), **choice}

    def progress(self) -> tuple[float, ...]:
        """Return the counters, for `FollowingEngine.follow`."""
        return float(self.t), float(self.step), float(self.is_in_flight), *map(float, astuple(self.stats))

    def shared(self, x: FlatVector) -> Sequence[Tensor]:
        """See `Rounds`."""
        return () if self.rounds is None else self.rounds.shared(x)

    def take_shared(self, x: FlatVector) -> None:
        """See `Rounds`."""
        if self.rounds is not None:
            self.rounds.take_shared(x)


class SyncEngine(LockstepEngine):
    """Blocking rounds: see `LockstepEngine`.

    Args:
        mixer: see `LockstepEngine`.
        schedule: see `LockstepEngine`.
        on_nonfinite: see `LockstepEngine`.
        world: see `LockstepEngine`.
    """

    @takes_old_arguments()
    def __init__(
        self, mixer: Mixer, schedule: Schedule, *, on_nonfinite: str = "raise", world: ModelWorld = ALONE
    ) -> None:
        super().__init__(mixer, schedule, on_nonfinite=on_nonfinite, world=world)


class OverlapEngine(LockstepEngine):
    """Rounds under training: see `LockstepEngine` and [Note: Overlap] of `Overlap`.

    Args:
        mixer: see `LockstepEngine`.
        schedule: see `LockstepEngine`.
        max_staleness: see `Overlap`.
        is_eager: see `Overlap`.
        on_nonfinite: see `LockstepEngine`.
        world: see `LockstepEngine`.
    """

    @takes_old_arguments()
    def __init__(
        self,
        mixer: Mixer,
        schedule: Schedule,
        *,
        max_staleness: int = 0,
        is_eager: bool = True,
        on_nonfinite: str = "raise",
        world: ModelWorld = ALONE,
    ) -> None:
        overlap = Overlap(max_staleness=max_staleness, is_eager=is_eager)
        super().__init__(mixer, schedule, overlap=overlap, on_nonfinite=on_nonfinite, world=world)
