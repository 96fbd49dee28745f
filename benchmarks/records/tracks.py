"""The tracks: workers, links, data and deaths that a record is about."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from gossip_modules.lab import Compute, Join, Kill, Network

TARGET_BITS = 3.1
"""Bits per byte of the averaged model on the test split, that training has to reach."""
MAX_STEPS, EVERY = 300, 10
NUM_PARAMETERS = 10_000_000
"""Seconds and bytes are those of a model with so many parameters in float32."""
COMPUTE = Compute(0.2, step_spread=0.1)


@dataclass(frozen=True)
class Track:
    """A cluster and its data.

    Attributes:
        title: in words.
        workers: the number of workers.
        network: their links.
        alpha: of the Dirichlet distribution of the shares of the text's parts; inf: equal shares.
        death_every: the steps from one death to the next; 20 steps later a worker joins. 0: nobody dies.
    """

    title: str
    workers: int
    network: Network
    alpha: float = math.inf
    death_every: int = 0

    @property
    def events(self) -> list[Kill | Join]:
        """The deaths and the workers that join."""
        found: list[Kill | Join] = []
        for worker, step in enumerate(range(self.death_every, MAX_STEPS, self.death_every) if self.death_every else ()):
            found.append(Kill(step, worker))
            if step + 20 < MAX_STEPS:
                found.append(Join(step + 20))
        return found


TRACKS: Mapping[str, Track] = {
    "slow": Track("8 workers with links of 100 Mbit/s", 8, Network("100 Mbit/s, 1 ms")),
    "regions": Track(
        "64 workers in four regions, 10 Gbit/s inside and 200 Mbit/s, 80 ms between them",
        64,
        Network.regions(
            dict.fromkeys(("eu", "us", "asia", "africa"), 1), inside="10 Gbit/s, 0.1 ms", between="200 Mbit/s, 80 ms"
        ),
    ),
    "deaths": Track("8 workers, of which one dies every 50 steps, 1 Gbit/s", 8, Network("1 Gbit/s"), death_every=50),
    "uneven": Track("8 workers with data from Dirichlet(0.1), 100 Mbit/s", 8, Network("100 Mbit/s, 1 ms"), alpha=0.1),
}
