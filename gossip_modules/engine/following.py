"""FollowingEngine: the engine of a process whose rounds another process of its node runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from ..flat.vector import FlatVector
from ..state import Restart
from .engine import EngineStats
from .lockstep import LockstepEngine

_FOLLOWS = "process that follows "


class FollowingEngine(LockstepEngine):
    """The engine of the other processes of a node; the engine of the first process runs the rounds of all.

    It runs no rounds. `follow` copies the counters of the first process. The state from round to round (an anchor,
    corrections, links) is not here, so the state of this engine has counters only. If the first process has more state,
    this one has another name in checkpoints, and only a `FollowingEngine` loads it.

    Args:
        engine: an engine as the first process has it, made here so that its constructor checks the arguments. It runs
            no rounds.
    """

    def __init__(self, engine: LockstepEngine) -> None:
        super().__init__(engine.mixer, engine.schedule, on_nonfinite=engine.on_nonfinite, world=engine.world)
        self._engine, self._followed = engine, engine.state_name
        self.adds_again = engine.adds_again
        self._is_in_flight = False

    @property
    def is_in_flight(self) -> bool:
        """See `Engine`: whether the engine of the first process has a round in flight."""
        return self._is_in_flight

    @property
    def state_name(self) -> str:
        """See `Engine`."""
        name, whole = super().state_name, self.mixer.state_dict()
        return name if self._followed == name and not whole else f"{_FOLLOWS}{self.mixer}"

    def saved_flights(self) -> list[dict[str, Any]] | None:
        """See `Engine`: all processes of a node flush together, before each of them saves."""
        return None if self._is_in_flight else []

    def follow(self, progress: Sequence[float]) -> None:
        """Copy the counters that `LockstepEngine.progress` returned on the first process."""
        t, step, is_in_flight, wait_seconds, *counts = progress
        self.t, self.step, self._is_in_flight = int(t), int(step), bool(is_in_flight)
        self.stats = EngineStats(wait_seconds, *map(int, counts))

    def round(self, x: FlatVector) -> bool:
        """See `Engine`; only the first process may call it."""
        raise AssertionError("a process that follows another one runs no rounds of its own")

    def flush(self, x: FlatVector) -> bool:
        """See `Engine`; the engine of the first process applies the round in flight."""
        self._is_in_flight = False
        return False

    def shared(self, x: FlatVector) -> Sequence[Tensor]:
        """See `LockstepEngine`; returns the memory to receive into."""
        return self._engine.shared(x)

    def take_shared(self, x: FlatVector) -> None:
        """See `LockstepEngine`."""
        self._engine.take_shared(x)

    def close(self) -> None:
        """See `Engine`."""
        self._engine.close()

    def state_dict(self, *, joins: bool = False, has_links: bool = True) -> dict[str, Any]:
        """See `State`; contains the counters only."""
        return {"engine": self.state_name, "t": self.t, "step": self.step, "gossiper": {}}

    def check_state(self, state: Mapping[str, Any], *, of: object = None) -> None:
        """See `State`; a state of the first process has the counters too."""
        name = str(state.get("engine"))
        is_known = name == self._followed or name.startswith(_FOLLOWS)
        if not is_known:
            super().check_state(state)

    def fill(self, state: Mapping[str, Any]) -> None:
        """See `State`."""
        self.t, self.step, self._is_in_flight = state.get("t", 0), state.get("step", 0), False

    def restart(self, event: Restart = Restart.ALL) -> None:
        """See `State`; the engine that was made here may write the momentum of the optimizer."""
        if event is Restart.ALL:
            self.fill({})
        else:
            self._engine.restart(event)
