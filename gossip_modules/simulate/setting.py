"""What all methods of one simulated comparison share: workers, model, compute, links and schedule."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from ..schedule import Schedule
from .delays import ComputeModel, LinkModel, Network


@dataclass(frozen=True)
class Setting:
    """What all methods of a comparison share.

    Args:
        world_size: workers n.
        num_parameters: of the real model, float32, of which time and bytes are.
        compute, links: what steps and messages take.
        shape: of the matrix that the parameters of the problem are; `simulate` sets it.
        has_gradients: whether there is something to learn, so that AllReduce averages gradients and not models;
            `simulate` sets it.
        peers_per_itr: peers per round, or a schedule of it; None: all neighbours on static graphs, one on others.
        schedule: which step gossips and which averages over all.
        local_steps: of local SGD and outer optimizers, from one average or outer step to the next; also WAGMA's
            `sync_period`.
        step_size: of consensus, for coded gossip; None: the published one.
        theta: of Moniqua, for the whole run; None = the least of 1, 2, 4, ... that no two neighbours differ by, which
            `simulate` finds.
        budget: of MATCHA.
        outer_lr, outer_momentum: of outer optimizers; None: those that the method's paper has.
        seed: of what is random in methods.

    Raises:
        ValueError: a number out of range.
    """

    world_size: int
    num_parameters: int
    compute: ComputeModel
    links: LinkModel
    shape: tuple[int, int] = (8, 8)
    has_gradients: bool = True
    peers_per_itr: int | Mapping[int, int] | None = None
    schedule: Schedule = field(default_factory=Schedule)
    local_steps: int = 10
    step_size: float | None = None
    theta: float | None = None
    budget: float = 0.5
    outer_lr: float | None = None
    outer_momentum: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("world_size", "num_parameters", "local_steps"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"got {name}={value}, expected a whole number of at least 1")
        if self.step_size is not None and not 0 < self.step_size <= 2:
            raise ValueError(f"got step_size={self.step_size}, expected above 0 and at most 2; leave it out")
        if self.theta is not None and not 0 < self.theta < math.inf:
            raise ValueError(f"got theta={self.theta}, expected a positive number; leave it out")
        if self.outer_lr is not None and not 0 < self.outer_lr < math.inf:
            raise ValueError(f"got outer_lr={self.outer_lr}, expected a positive number; leave it out")
        if self.outer_momentum is not None and not 0 <= self.outer_momentum < 1:
            raise ValueError(
                f"got outer_momentum={self.outer_momentum}, expected at least 0 and less than 1; leave it out"
            )

    @property
    def model_bytes(self) -> int:
        """Of the real model."""
        return 4 * self.num_parameters

    @property
    def network(self) -> Network:
        """The links of all workers."""
        return Network(self.links, self.world_size)
