"""FollowingEngine: the counters of an engine whose rounds another process runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ..flat.vector import FlatVector
from ..rounds.old_checkpoints import converted
from .engine import Engine, EngineStats, LockstepEngine

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
