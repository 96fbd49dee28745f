"""Schedule: the action at each training step: none, a gossip round, or an exact global average."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple


class Action(Enum):
    """The communication of a training step."""

    SKIP = "skip"
    GOSSIP = "gossip"
    AVERAGE = "average"
    WARM_UP = "warm_up"  # an average, after which the algorithm begins


class Times(NamedTuple):
    """The steps `first`, `first + every`, `first + 2 * every`, ...

    Attributes:
        first: the first step, counted from 0.
        every: the number of steps from one to the next, >= 1.

    Example:
        >>> first, every = Times(3, every=6)
        >>> list(range(first, 20, every))
        [3, 9, 15]
    """

    first: int
    every: int


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

    def check_times(self, times: Iterable[Times], *, of: object) -> None:
        """Raise ValueError if an algorithm would lose rounds at steps that it chooses itself.

        Each of these steps must have a round. At most every `average_every`-th of the rounds at some `Times` may be an
        exact average, so that none of them, such as a fragment of a model, has averages only. Steps up to
        `average_until` do not count: all of them have averages.

        Args:
            times: the steps with rounds that the algorithm asks for, such as the steps of each fragment.
            of: the algorithm, for the error.
        """
        a = self.average_every
        for first, every in times:  # each is a multiple of gossip_every, if the first two of them are
            if missed := next((k for k in (first, first + every) if k % self.gossip_every), None):
                raise ValueError(
                    f"got {self} with {of}, whose round after step {missed} it would leave out, expected a schedule "
                    "with all rounds of the algorithm: it chooses the steps itself, by sync_every; leave gossip_every "
                    "at 1, and choose another sync_every for fewer rounds"
                )
            # Round number u = u_0 + j h is an average if u + 1 = 0 modulo a: never, or every (a / gcd(h, a))-th time.
            u_0, h = first // self.gossip_every, every // self.gossip_every
            common = math.gcd(h, a) if a else 1
            if common > 1 and (u_0 + 1) % common == 0:
                raise ValueError(
                    f"got {self} with {of}, of whose rounds after the steps {first}, {first + every}, ... {common} of "
                    f"{a} would be exact averages, expected at most one of average_every: an average takes the place "
                    "of a round; take an average_every that has no common divisor with the steps from one round to the "
                    "next, or leave it out"
                )
