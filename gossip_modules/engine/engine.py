"""When rounds run, relative to training: the bases of all engines, and rounds that run at once."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any, NoReturn

import torch
from torch import Tensor

from ..consensus_control import ConsensusControl
from ..flat.nonfinite import FiniteCheck, check_policy, is_finite, refuse
from ..flat.vector import FlatVector
from ..mixing_manager.base import MixingManager
from ..rounds.mixer import ElasticAverage, GlobalAverage, Mixer, NonfiniteRound
from ..rounds.old_checkpoints import converted
from ..schedule import Action, Schedule
from ..transport.base import Transport, is_elastic, timeout_of
from ..transport.state_tree import copied
from .controlled import ControlledMixer

_UNNAMED = "LockstepEngine"  # checkpoints from when there was no other


@dataclass
class EngineStats:
    """What communication cost so far, and how late it was."""

    wait_seconds: float = 0.0
    num_rounds: int = 0
    num_skipped: int = 0
    total_staleness: int = 0
    max_staleness: int = 0

    def record(self, staleness: int) -> None:
        """Count a round that took effect `staleness` forwards later than a synchronous overlap would have it."""
        self.num_rounds += 1
        self.total_staleness += staleness
        self.max_staleness = max(self.max_staleness, staleness)


class Engine(ABC):
    """When a model meets those of its peers: once per training step, at the safe point before the forward."""

    is_asynchronous: bool = False
    """Whether threads of its own answer peers at any time, so that a rank's rounds are not those of the others."""

    def __init__(self) -> None:
        self.t = 0  # rounds started so far
        self.stats = EngineStats()
        self.is_closed = False

    @property
    def is_in_flight(self) -> bool:
        """Whether there is something that `flush()` would apply."""
        return False

    @property
    def has_peers(self) -> bool:
        """Whether there may be others that wait for this one, if it is not closed."""
        return True

    @abstractmethod
    def round(self, x: FlatVector) -> bool:
        """Once per training step, at the safe point: x <- x + corrections that are due; mutates x and its weight.

        Returns:
            Whether x was written.
        """

    def set_out(self, x: FlatVector) -> None:
        """Training begins at x, and rounds will run after optimizer steps: the first one after step 1."""

    def flush(self, x: FlatVector) -> bool:
        """x <- x + everything in flight; returns, when nothing is, whether x was written."""
        return False

    def add_again(self, x: FlatVector) -> bool:
        """x <- x + what flushes since the last round have added to its parameters; buffers and weight stay.

        Called where other weights stood in x during those flushes, and x is back. Lockstep engines that keep no
        corrections do nothing: that round is lost on this rank.

        Returns:
            Whether x was written.
        """
        return False

    def close(self) -> None:
        """End threads and free buffers; idempotent."""

    def control_stats(self) -> dict[str, float]:
        """What controls the rounds, if anything does: see `ConsensusControl`."""
        return {}

    @property
    def state_name(self) -> str:
        """Whose state it is: engines of one name understand each other's."""
        return type(self).__name__

    def state_dict(self) -> dict[str, Any]:
        """Counters and the state of the algorithm. Nothing may be in flight."""
        return {"engine": self.state_name, "t": self.t}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict()` gave. Nothing may be in flight.

        Raises:
            ValueError: it is the state of another engine; nothing is changed then.
        """
        name = state.get("engine", _UNNAMED)
        if name != self.state_name:
            raise ValueError(
                f"got the state of a {name}, expected that of a {self.state_name}; wrap as when it was saved, or load "
                "the model alone: module.load_state_dict"
            )
        self.t = state["t"]

    def reset(self) -> None:
        """Start anew, as without any state. Nothing may be in flight."""
        self.t = 0

    def forget_models(self) -> None:
        """Every rank has taken the average: start anew what was kept of other models. Nothing may be in flight.

        Counters go on, so that ranks still agree on what comes next if one of them has failed in the average.
        """


class IdleEngine(Engine):
    """No rounds any more: of a copy that another engine's threads do not answer for.

    Args:
        other: whose counters it keeps.
    """

    def __init__(self, other: Engine) -> None:
        super().__init__()
        self.t, self.stats = other.t, replace(other.stats)
        self._state_name = other.state_name

    @property
    def state_name(self) -> str:
        """See `Engine`: that of the engine whose counters these are."""
        return self._state_name

    def round(self, x: FlatVector) -> bool:
        """See `Engine`."""
        return False


class LockstepEngine(Engine):
    """Runs rounds of a gossiper; round t of one rank is round t of all.

    Args:
        gossiper: bound to its peers; or another mixer with a transport.
        schedule: which step gossips, which averages globally; or what controls that by the distance of the models.
        on_nonfinite: "raise" raises FloatingPointError where a round would mix infinities or NaN into a model, "skip"
            leaves such a round out, "spread" does not look.

    Raises:
        ValueError: `on_nonfinite` is none of these, or "skip" with a gossiper whose state every message changes; a
            gossiper that keeps models, with exact averages; or see `ConsensusControl`.
    """

    def __init__(self, gossiper: Mixer, schedule: Schedule | ConsensusControl, *, on_nonfinite: str = "raise") -> None:
        super().__init__()
        self.on_nonfinite = check_policy(on_nonfinite)
        if on_nonfinite == "skip" and not (gossiper.is_skippable or gossiper.can_recover):
            raise ValueError(
                f"got on_nonfinite='skip' with {gossiper}, expected 'raise' or 'spread': every message changes its "
                "state, so that none can be left out"
            )
        control = schedule if isinstance(schedule, ConsensusControl) else None
        if gossiper.keeps_models and schedule.average_every and control is None:
            raise ValueError(
                f"got {schedule} with {gossiper}, expected average_every=0: it keeps models of peers from before such "
                "an average, and would undo it; leave the averages out"
            )
        self.gossiper = gossiper
        self.schedule = schedule
        # A rank that leaves out what others have sent it keeps its own weight, and they have given theirs away; and a
        # rank that dies, or joins with half the weight of another, changes their mean.
        loses_weight = on_nonfinite == "skip" or is_elastic(gossiper.transport)
        sums_weights = loses_weight and gossiper.is_weighted
        self.averager = GlobalAverage(gossiper.transport, sums_weights=sums_weights)
        self._scheduled_average = self.averager
        if is_elastic(gossiper.transport):
            self._scheduled_average = ElasticAverage(gossiper.transport, sums_weights=sums_weights)
        self._control = None if control is None else ControlledMixer(gossiper, self.averager, control)
        self.step = 0  # training steps seen so far
        # Whether all processes of a node have found finite numbers, given what this one, with its shard, has found:
        # they must all raise, or leave a round out. The same answer on all.
        self.agree_finite: Callable[[bool], bool] = bool

    @property
    def state_name(self) -> str:
        """See `Engine`: the same for all that run rounds in lockstep."""
        return "LockstepEngine"

    def state_dict(self) -> dict[str, Any]:
        """See `Engine`."""
        control = {} if self._control is None else {"control": self._control.state_dict()}
        return {**super().state_dict(), "step": self.step, "gossiper": self.gossiper.state_dict(), **control}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `Engine`."""
        state = converted(state)
        super().load_state_dict(state)
        self.step = state["step"]
        self.gossiper.load_state_dict(state["gossiper"])
        if self._control is not None:
            self._control.load_state_dict(state.get("control", {}))

    def reset(self) -> None:
        """See `Engine`."""
        self.t = self.step = 0
        self.gossiper.reset()
        if self._control is not None:
            self._control.load_state_dict({})

    def close(self) -> None:
        """See `Engine`."""
        self.gossiper.close()

    def forget_models(self) -> None:
        """See `Engine`. Where workers may fail in the average, both ends of a link must keep what they have."""
        if is_elastic(self.gossiper.transport):
            self.gossiper.end_average()
        else:
            self.gossiper.forget_models()

    def rebind(self, mixing: MixingManager, transport: Transport) -> None:
        """Run rounds over another transport, with other weights. Nothing may be in flight."""
        self.gossiper.rebind(mixing, transport)
        self.averager.transport = self._scheduled_average.transport = transport

    def control_stats(self) -> dict[str, float]:
        """See `Engine`."""
        return {} if self._control is None else self._control.law.stats()

    def set_out(self, x: FlatVector) -> None:
        """See `Engine`."""
        self.gossiper.begin(x)
        self.step = 1

    @property
    def is_in_flight(self) -> bool:
        """See `Engine`."""
        return self.gossiper.is_in_flight

    def flush(self, x: FlatVector) -> bool:
        """See `Engine`."""
        return self.gossiper.flush(x)

    def state_for_newcomer(self, x: FlatVector) -> dict[str, Any]:
        """Copies of what a worker that joins goes on from: `state_dict()`, without what links to peers keep.

        Nothing may be in flight. x: the model, as rounds mix it.
        """
        return dict(copied({**self.state_dict(), "gossiper": self.gossiper.state_for_newcomer()}))

    def progress(self) -> tuple[float, ...]:
        """How far it has come: what `FollowingEngine.follow` takes."""
        return float(self.t), float(self.step), float(self.is_in_flight), *map(float, astuple(self.stats))

    def shared(self, x: FlatVector) -> Sequence[Tensor]:
        """See `Mixer`."""
        return self.gossiper.shared(x)

    def take_shared(self, x: FlatVector) -> None:
        """See `Mixer`."""
        self.gossiper.take_shared(x)

    def advance(self, num_steps: int) -> None:
        """Count training steps as if they had been taken here."""
        for _ in range(num_steps):
            self.t += self._next_mixer() is not None

    def _next_mixer(self) -> Mixer | None:
        """What this step does, None when it skips; advances the step."""
        step, self.step = self.step, self.step + 1
        if self._control is not None:
            return self._control if self._control.law.starts_round(step) else None
        assert isinstance(self.schedule, Schedule)
        action = self.schedule.action(step)
        if action is Action.GOSSIP:
            return self.gossiper if self.gossiper.is_due(step) else None
        return self._scheduled_average if action is Action.AVERAGE else None

    def _recover(self, mixer: Mixer | None, x: FlatVector) -> None:
        """Make x finite where it is about to be sent, by what the algorithm keeps."""
        is_sent = mixer is not None or self.gossiper.has_news
        if is_sent and self.gossiper.can_recover and not self.agree_finite(is_finite(x)):
            self.gossiper.recover(x)
            self.stats.num_skipped += 1

    def _limit_of(self, mixer: Mixer, t: int) -> dict[str, Any]:
        """How long to wait for round t in the gossip thread, and what to say then: see `GossipThread.result`."""
        transport = self.gossiper.transport

        def what() -> str:
            peers = [transport.names[i] for i in mixer.sources if i != transport.rank]
            return f"rank {transport.names[transport.rank]}: round {t} with ranks {peers}"

        return {"what": what, "timeout": timeout_of(transport)}

    def _refuse_nonfinite(self, mixer: Mixer, t: int, *, is_own: bool, is_here: bool = True) -> NoReturn:
        names, rank = self.gossiper.transport.names, self.gossiper.transport.rank
        senders = () if is_own or not is_here else [names[i] for i in mixer.sources if i != rank]
        refuse(names[rank], f"round {t}", senders=senders, is_here=is_own or is_here)


class SyncEngine(LockstepEngine):
    """Blocking rounds: x <- W(t) x, in place, before the forward. No copy, no thread, no stream.

    A rank whose own model is not finite raises before it sends it, on a GPU one round later; with on_nonfinite="skip"
    each rank looks at the correction, which then takes a copy of the model.
    """

    def __init__(self, gossiper: Mixer, schedule: Schedule | ConsensusControl, *, on_nonfinite: str = "raise") -> None:
        super().__init__(gossiper, schedule, on_nonfinite=on_nonfinite)
        self._is_finite = FiniteCheck()
        if on_nonfinite == "skip" and not gossiper.can_recover:
            gossiper.refuse_nonfinite(self._agree_finite)

    def round(self, x: FlatVector) -> bool:
        """See `Engine`."""
        start, step, mixer = time.perf_counter(), self.step, self._next_mixer()
        self._look(mixer, x)
        has_changed = self.gossiper.begin(x, step)
        if mixer is self._scheduled_average:  # of all ranks, beside which nothing may travel
            has_changed |= self.gossiper.flush(x)
        if mixer is None:
            if has_changed:
                self.stats.wait_seconds += time.perf_counter() - start
            return has_changed
        with torch.profiler.record_function("gossip.round", f"t={self.t}"):
            if self.on_nonfinite == "skip" and not self.gossiper.can_recover:
                self._mix_if_finite(mixer, x)
            else:
                mixer.start(x, self.t)
                self.t += 1
                mixer.finish(x)
            if mixer is self._scheduled_average and not self._scheduled_average.has_failed:
                self.gossiper.end_average()
        self.stats.wait_seconds += time.perf_counter() - start
        self.stats.record(0)
        return True

    def _look(self, mixer: Mixer | None, x: FlatVector) -> None:
        """Raise where x is not finite and is about to be sent, or recover it; before anything has changed."""
        is_rare = self.gossiper.can_recover  # so that a look may wait for the GPU
        if self.on_nonfinite == "raise" and (mixer is not None or self.gossiper.has_news):
            if not self.agree_finite(is_finite(x) if is_rare else self._is_finite(x)):
                self._refuse_nonfinite(mixer or self.gossiper, self.t, is_own=True)
        elif self.on_nonfinite == "skip" and is_rare:
            self._recover(mixer, x)

    def _mix_if_finite(self, mixer: Mixer, x: FlatVector) -> None:
        """x <- x + c, unless that is not finite."""
        correction = x.clone()
        mixer.start(correction, self.t)
        self.t += 1
        try:
            alpha = mixer.difference(correction)
            if not self._agree_finite(is_finite(correction)):
                raise NonfiniteRound
        except NonfiniteRound:
            self.stats.num_skipped += 1
        else:
            x.add_(correction, alpha=alpha)

    def _agree_finite(self, is_finite: bool) -> bool:
        return self.agree_finite(is_finite)  # which a node replaces


_FOLLOWS = "process that follows "


class FollowingEngine(LockstepEngine):
    """What the other processes of a node have where the first one has an engine, which runs the rounds of all.

    It runs no rounds. The counters are those of the other engine, as `follow` was told last. What that one keeps from
    round to round (an anchor, corrections, links) is not here, so the state of this one has counters only. Where that
    is not all there is to it, it has a name of its own, and only another `FollowingEngine` loads it.

    Args:
        engine: what the first process has, made here too: its constructor refuses what does not fit. It runs no rounds.
    """

    def __init__(self, engine: LockstepEngine) -> None:
        super().__init__(engine.gossiper, engine.schedule, on_nonfinite=engine.on_nonfinite)
        self._engine, self._followed = engine, engine.state_name
        self._is_in_flight = False

    @property
    def is_in_flight(self) -> bool:
        """See `Engine`: of the other engine."""
        return self._is_in_flight

    @property
    def state_name(self) -> str:
        """See `Engine`."""
        name, whole = super().state_name, self.gossiper.state_dict()
        return name if self._followed == name and not whole else f"{_FOLLOWS}{self.gossiper}"

    def follow(self, progress: Sequence[float]) -> None:
        """Take what `LockstepEngine.progress` of the other engine gave."""
        t, step, is_in_flight, wait_seconds, *counts = progress
        self.t, self.step, self._is_in_flight = int(t), int(step), bool(is_in_flight)
        self.stats = EngineStats(wait_seconds, *map(int, counts))

    def round(self, x: FlatVector) -> bool:
        """See `Engine`; the first process runs it."""
        raise AssertionError("a process that follows another one runs no rounds of its own")

    def flush(self, x: FlatVector) -> bool:
        """See `Engine`: what was in flight is applied by the other engine."""
        self._is_in_flight = False
        return False

    def shared(self, x: FlatVector) -> Sequence[Tensor]:
        """See `LockstepEngine`: room for it."""
        return self._engine.shared(x)

    def take_shared(self, x: FlatVector) -> None:
        """See `LockstepEngine`."""
        self._engine.take_shared(x)

    def close(self) -> None:
        """See `Engine`."""
        self._engine.close()

    def state_dict(self) -> dict[str, Any]:
        """See `Engine`: the counters."""
        return {**super().state_dict(), "gossiper": {}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `Engine`; also that of the other engine, of which it takes the counters."""
        state = converted(state)
        name = str(state.get("engine"))
        is_known = name == self._followed or name.startswith(_FOLLOWS)
        Engine.load_state_dict(self, {**state, "engine": self.state_name} if is_known else state)
        self.step, self._is_in_flight = state["step"], False

    def reset(self) -> None:
        """See `Engine`."""
        self.t, self.step, self._is_in_flight = 0, 0, False

    def forget_models(self) -> None:
        """See `Engine`; of the other engine, made here too, which may write the momentum of the optimizer."""
        self._engine.forget_models()
