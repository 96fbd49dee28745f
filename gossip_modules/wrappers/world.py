"""ModelWorld: the ranks that train together."""

from __future__ import annotations


class ModelWorld:
    """A world of ranks that stays as it is: one generation for ever, which ends where a rank fails.

    Attributes:
        changes: whether workers may die and join.
        has_lost_peers: whether members of this generation had failed at the last step, so that the graph has holes.
    """

    changes: bool = False
    has_lost_peers: bool = False

    def at_step(self) -> bool:
        """Begin the generation that is due, at the safe point of a training step.

        Returns:
            Whether the model may have changed, such as by a donor's state.
        """
        return False

    def repeat_step(self) -> None:
        """The round of this step has failed: the next call of `at_step` is of the same step."""

    def stats(self) -> dict[str, float]:
        """Counters of the workers, for `comm_stats()`."""
        return {}

    def close(self) -> None:
        """Leave the world."""
