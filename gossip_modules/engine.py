"""When rounds run, relative to training: at once, or under the next forward and backward."""

from __future__ import annotations

import contextlib
import time
from abc import ABC, abstractmethod
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

import torch

from .flat_vector import FlatVector
from .gossip_thread import GossipThread
from .gossiper import GlobalAverage, Mixer
from .schedule import Action, Schedule

_UNNAMED = "LockstepEngine"  # checkpoints from when there was no other


@dataclass
class EngineStats:
    """What communication cost so far, and how late it was."""

    wait_seconds: float = 0.0
    num_rounds: int = 0
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

    @abstractmethod
    def round(self, x: FlatVector) -> bool:
        """Once per training step, at the safe point: x <- x + corrections that are due; mutates x and its weight.

        Returns:
            Whether x was written.
        """

    def flush(self, x: FlatVector) -> bool:
        """x <- x + everything in flight; returns, when nothing is, whether x was written."""
        return False

    def close(self) -> None:
        """End threads and free buffers; idempotent."""

    @property
    def state_name(self) -> str:
        """Whose state it is: engines of one name understand each other's."""
        return type(self).__name__

    def state_dict(self) -> dict[str, Any]:
        """Counters and what the algorithm remembers. Nothing may be in flight."""
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
        schedule: which step gossips, which averages globally.
    """

    def __init__(self, gossiper: Mixer, schedule: Schedule) -> None:
        super().__init__()
        self.gossiper = gossiper
        self.schedule = schedule
        self.averager = GlobalAverage(gossiper.transport)
        self.step = 0  # training steps seen so far

    @property
    def state_name(self) -> str:
        """See `Engine`: the same for all that run rounds in lockstep."""
        return "LockstepEngine"

    def state_dict(self) -> dict[str, Any]:
        """See `Engine`."""
        return {**super().state_dict(), "step": self.step, "gossiper": self.gossiper.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `Engine`."""
        super().load_state_dict(state)
        self.step = state["step"]
        self.gossiper.load_state_dict(state["gossiper"])

    def reset(self) -> None:
        """See `Engine`."""
        self.load_state_dict({"t": 0, "step": 0, "gossiper": {}})

    def _next_mixer(self) -> Mixer | None:
        """What this step does, None when it skips; advances the step."""
        action = self.schedule.action(self.step)
        self.step += 1
        return {Action.GOSSIP: self.gossiper, Action.AVERAGE: self.averager, Action.SKIP: None}[action]


class SyncEngine(LockstepEngine):
    """Blocking rounds: x <- W(t) x, in place, before the forward. No copy, no thread, no stream."""

    def round(self, x: FlatVector) -> bool:
        """See `Engine`."""
        mixer = self._next_mixer()
        if mixer is None:
            return False
        start = time.perf_counter()
        with torch.profiler.record_function("gossip.round", f"t={self.t}"):
            mixer.start(x, self.t)
            self.t += 1
            mixer.finish(x)
        self.stats.wait_seconds += time.perf_counter() - start
        self.stats.record(0)
        return True


@dataclass
class _Flight:
    future: Future[float]
    step: int


class OverlapEngine(LockstepEngine):
    """Rounds that run on the gossip thread while training computes: x <- x + (W(t) - I) s when round t is done.

    [Note: Overlap] s is a snapshot of x. The round started before forward k is applied before forward k + 1, when x
    has taken one optimizer step u: x <- W x + u. Nothing of u is lost or scaled, and since 1^T (W - I) = 0 the sum
    of x over ranks keeps every gradient step exactly, however late a round is applied.

    [Note: Staleness] One round is in flight at a time, so with max_staleness = k one starts every k + 1 steps at most
    (tau = k + 1 in Overlap SGP). Starting at fixed steps keeps the number of rounds equal on all ranks whatever
    their speed, and with one in flight the recursion s(t + 1) = W(t) s(t) + u(t) is stable for every k; a pipeline of
    k stale corrections is not. A round is applied as soon as it is complete, and waited for at its last forward.

    Assran et al., arXiv 1811.10792, Algorithm 2 (Overlap SGP).

    Args:
        gossiper: bound to its peers; only the gossip thread calls it.
        schedule: which step gossips; no more often than every max_staleness + 1 steps.
        max_staleness: forwards that a round may be late before training waits for it.
        is_eager: apply a round that is complete before its last forward. False applies all rounds at a fixed step,
            so that the processes of a node agree.
    """

    def __init__(self, gossiper: Mixer, schedule: Schedule, *, max_staleness: int = 0, is_eager: bool = True) -> None:
        super().__init__(gossiper, replace(schedule, gossip_every=max(schedule.gossip_every, max_staleness + 1)))
        self.max_staleness = max_staleness
        self.is_eager = is_eager
        self._snapshot: FlatVector | None = None
        self._flight: _Flight | None = None
        self._thread: GossipThread | None = None
        self._stream: torch.cuda.Stream | None = None

    @property
    def is_in_flight(self) -> bool:
        """See `Engine`."""
        return self._flight is not None

    def round(self, x: FlatVector) -> bool:
        """See `Engine`."""
        is_written = False
        if self._flight is not None:
            is_last = self.step - self._flight.step > self.max_staleness
            if is_last or (self.is_eager and self._flight.future.done()):
                is_written = self.flush(x)
        mixer = self._next_mixer()
        if mixer is not None:
            self._depart(mixer, x)
        return is_written

    def flush(self, x: FlatVector) -> bool:
        """See `Engine`."""
        if self._flight is None:
            return False
        assert self._snapshot is not None
        flight = self._flight
        start = time.perf_counter()
        with torch.profiler.record_function("gossip.wait"):
            try:
                alpha = flight.future.result()
            except Exception:  # of the round; an interrupt instead leaves it in flight, done or not
                self._flight = None
                raise
        self._flight = None
        self.stats.wait_seconds += time.perf_counter() - start
        if self._stream is not None:
            torch.cuda.current_stream(x.raw.device).wait_stream(self._stream)  # c is written before it is added
        with torch.profiler.record_function("gossip.apply"):
            x.add_(self._snapshot, alpha=alpha)
        self.stats.record(max(self.step - flight.step - 1, 0))
        return True

    def close(self) -> None:
        """See `Engine`. A round in flight is left to end by itself: its peers have its message."""
        if self._thread is not None:
            self._thread.close()
        self._thread = self._snapshot = self._flight = None

    def __getstate__(self) -> dict[str, Any]:
        assert self._flight is None, "flush() before copying: a round is in flight"
        return {**self.__dict__, "_thread": None, "_stream": None, "_snapshot": None}

    def _depart(self, mixer: Mixer, x: FlatVector) -> None:
        """Take the snapshot and hand it to the gossip thread."""
        assert self._flight is None, "one round in flight at a time"
        if self._snapshot is None or self._snapshot.layout != x.layout or self._snapshot.raw.device != x.raw.device:
            self._snapshot = x.like()
            self._stream = torch.cuda.Stream(x.raw.device) if x.raw.is_cuda else None
        if self._thread is None:
            self._thread = GossipThread(f"gossip-{self.gossiper.transport.rank}")
        snapshot, stream, t = self._snapshot.copy_(x), self._stream, self.t
        self.t += 1
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream(x.raw.device))  # s is written before it is sent

        def run() -> float:
            on_stream = torch.cuda.stream(stream) if stream is not None else contextlib.nullcontext()
            with torch.no_grad(), on_stream, torch.profiler.record_function("gossip.round", f"t={t}"):
                mixer.start(snapshot, t)
                alpha = mixer.difference(snapshot)
            return alpha

        self._flight = _Flight(self._thread.submit(run), self.step - 1)
