"""What a membership and the wrapper that trains have to do with each other."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol


class Participant(Protocol):
    """What a membership needs of the wrapper that trains."""

    def peers(self, rank: int, world_size: int) -> Iterable[int]:
        """The ranks that this one has links with, in any round."""

    def found(self) -> None:
        """Begin with the model of the first rank; all workers of the first generation call it."""

    def begin(self, growth: float) -> None:
        """Turn to the transport of the generation that trains now; called at a safe point, by the training thread.

        Args:
            growth: what all of its members multiply their push-sum weights by.
        """

    @property
    def weight(self) -> float:
        """The push-sum weight, as it was at the last safe point; 1.0 where there is none. From any thread."""

    def settle(self) -> None:
        """Apply what is in flight."""

    def give(self) -> Mapping[str, Any]:
        """Copies of everything that a worker needs to join; called at a safe point, by the training thread."""

    def take_back(self, state: Mapping[str, Any]) -> None:
        """What `give` gave has reached nobody."""

    @property
    def num_bytes(self) -> int:
        """Of the model."""

    def take(self, state: Mapping[str, Any]) -> None:
        """Go on from what `give` gave."""

    def advance(self, num_steps: int) -> None:
        """Count training steps that the others have taken since `give`."""

    @property
    def step(self) -> int:
        """The training step that comes next."""


@dataclass(frozen=True)
class Change:
    """A generation that has begun.

    Attributes:
        generation: its number.
        step: the first training step of its rounds.
        rank: of this worker, its position in the graph.
        members: the numbers of the workers, by rank.
        joined: the numbers of those that were not in the generation before.
        left: why each of those left that are in it no more, by number.
    """

    generation: int
    step: int
    rank: int
    members: tuple[int, ...]
    joined: tuple[int, ...]
    left: Mapping[int, str]
