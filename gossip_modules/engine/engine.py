"""Engines decide when rounds run relative to training: their base class, and the engine of a copy."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..flat.vector import FlatVector
from ..state import State, leaf

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

    t: int = leaf(0, is_needed=True)
    """The number of rounds started so far."""

    def __init__(self) -> None:
        self.step = 0  # training steps seen so far
        self.num_skipped_steps = 0  # training steps left out and not counted yet, beside the steps of `advance`
        self.stats = EngineStats()
        self.is_closed = False

    @property
    def is_in_flight(self) -> bool:
        """Whether `flush()` would apply a correction."""
        return False

    adds_again: bool = False
    """Whether `add_again` adds corrections; else a flush to other weights than those of training loses them."""
    may_be_in_flight: bool = True
    """Whether `is_in_flight` may be true between two steps."""
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

    def start_training(self, x: FlatVector) -> None:
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

    def check_state(self, state: Mapping[str, Any], *, of: object = None) -> None:
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

    @property
    def flight_settings(self) -> str:
        """The settings that an engine needs in order to go on with `saved_flights()` of this one."""
        return ""

    def resume_flights(self, saved: Sequence[Mapping[str, Any]], settings: str) -> bool:
        """Go on with rounds in flight, after `load_state_dict`.

        Args:
            saved: the rounds, from `saved_flights()`.
            settings: `flight_settings` of the engine that saved them.

        Returns:
            Whether the rounds are in flight now. An engine with other settings leaves them out.
        """
        return False


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
