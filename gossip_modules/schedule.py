"""Schedule: the action at each training step: none, a gossip round, or an exact global average."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Action(Enum):
    """The communication of a training step."""

    SKIP = "skip"
    GOSSIP = "gossip"
    AVERAGE = "average"
    WARM_UP = "warm_up"  # an average, after which the algorithm begins


@dataclass(frozen=True)
class Schedule:
    """Gossip at every `gossip_every`-th step; every `average_every`-th of these rounds is an exact global average.

    A pure function of the step, hence the same on every rank. With `average_every` this is Gossip-PGA (Chen et al.,
    "Accelerating Gossip SGD with Periodic Global Averaging", ICML 2021, arXiv 2105.09080).

    With `average_until`, training begins as all-reduce SGD: an exact average follows each of the first steps, and the
    algorithm begins with the model after them. With `LocalSGD` this is post-local SGD (Lin et al., "Don't Use Large
    Mini-Batches, Use Local SGD", ICLR 2020, arXiv 1808.07217). Averages of models are averages of gradients for SGD,
    with momentum too, not for Adam.

    Args:
        gossip_every: steps from one round to the next, >= 1.
        average_every: rounds from one global average to the next; 0 = never.
        average_until: the number of optimizer steps at the beginning, each followed by an exact average; 0 = none.

    Raises:
        ValueError: a count out of range, or no whole number.
    """

    gossip_every: int = 1
    average_every: int = 0
    average_until: int = 0

    def __post_init__(self) -> None:
        counts = ((self.gossip_every, 1), (self.average_every, 0), (self.average_until, 0))
        if any(isinstance(count, bool) or not isinstance(count, int) or count < least for count, least in counts):
            raise ValueError(
                f"got gossip_every={self.gossip_every!r}, average_every={self.average_every!r}, average_until="
                f"{self.average_until!r}, expected whole numbers, gossip_every >= 1 and the others >= 0; use "
                "average_every=0 for no global averages"
            )

    def action(self, step: int) -> Action:
        """The action at `step`, counted from 0."""
        if step <= self.average_until and self.average_until:
            return Action.WARM_UP
        if step % self.gossip_every:
            return Action.SKIP
        if self.average_every and (step // self.gossip_every + 1) % self.average_every == 0:
            return Action.AVERAGE
        return Action.GOSSIP
