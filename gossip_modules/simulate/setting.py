"""What all methods of one simulated comparison share: workers, model, compute, links and schedule."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from ..consensus_control import ConsensusControl
from ..schedule import Schedule
from .delays import ComputeModel, LinkModel, MessageCost, Network, check


@dataclass(frozen=True)
class ControlRates:
    """How often ranks communicate under a `ConsensusControl`, per step of training, as a run has measured it.

    This depends on the model, the data and the learning rate, so nothing but a run can tell it: some hundred steps, on
    few ranks if need be. Rounds are then spread evenly over the steps; in training the first averages come earlier.

    Args:
        rounds_per_step: steps with a round, of gossip or an exact average, per step; above 0, at most 1.
        averages_per_step: exact averages per step; with average_every=1 every round is one, and nothing is to be said.
        added_rounds_per_step: rounds of gossip beyond the first one of a step, per step, with remedy="rounds".

    Raises:
        ValueError: a number out of range.

    >>> stats = {"num_rounds": 100, "num_skipped_steps": 300, "num_averages": 20, "num_added_rounds": 0}
    >>> ControlRates.measured(stats)
    ControlRates(rounds_per_step=0.25, averages_per_step=0.05, added_rounds_per_step=0.0)
    """

    rounds_per_step: float
    averages_per_step: float = 0.0
    added_rounds_per_step: float = 0.0

    def __post_init__(self) -> None:
        rounds, averages, added = self.rounds_per_step, self.averages_per_step, self.added_rounds_per_step
        expected = "above 0 and at most 1: the share of the steps that have a round; take num_rounds of comm_stats()"
        check("rounds_per_step", rounds, 0 < rounds <= 1, f"{expected} over the number of steps")
        expected = f"at least 0 and no more than rounds_per_step={rounds}: an exact average ends a round"
        check("averages_per_step", averages, 0 <= averages <= rounds, expected)
        check("added_rounds_per_step", added, 0 <= added < math.inf, "a number of at least 0; leave it out")

    @classmethod
    def measured(cls, stats: Mapping[str, float]) -> ControlRates:
        """The rates of a run, by its `comm_stats()` after a `flush()`; the run was not resumed from a checkpoint.

        Raises:
            ValueError: it had no `ConsensusControl`, or no round.
        """
        counters = ("num_rounds", "num_skipped_steps", "num_averages", "num_added_rounds")
        if missing := [name for name in counters if name not in stats]:
            raise ValueError(
                f"got stats without {', '.join(missing)}, expected comm_stats() of a run with "
                "schedule=ConsensusControl(...)"
            )
        num_rounds, num_skipped, num_averages, num_added = (stats[name] for name in counters)
        if not num_rounds:
            raise ValueError("got stats of a run without a round, expected some hundred steps; train first")
        num_steps = num_rounds + num_skipped
        return cls(num_rounds / num_steps, num_averages / num_steps, num_added / num_steps)


@dataclass(frozen=True)
class Setting:
    """What all methods of a comparison share.

    Args:
        world_size: workers n.
        num_parameters: float32 parameters of the real model, for which time and bytes are predicted.
        compute, links: what steps and messages take.
        shape: of the matrix that the parameters of the problem are; `simulate` sets it.
        has_gradients: whether there is something to learn, so that AllReduce averages gradients and not models;
            `simulate` sets it.
        peers_per_itr: peers per round, or a schedule of it; None: all neighbours on static graphs, one on others.
        schedule: which step gossips and which averages over all; or a `ConsensusControl`, of methods that take one.
        control_rates: how often ranks communicate under the control, as measured on your model. None: as often as the
            control, which is run itself on the models of the problem, finds necessary there. With a relative target
            that tells how methods compare; on other models and data it may be more or less often.
        local_steps: of local SGD and outer optimizers, from one average or outer step to the next; also WAGMA's
            `sync_period`.
        step_size: of consensus, for coded gossip and GASLoC; None: the published one.
        theta: of Moniqua, for the whole run; None = the least of 1, 2, 4, ... that no two neighbours differ by, which
            `simulate` finds.
        budget: of MATCHA.
        outer_lr, outer_momentum: of outer optimizers; None: those that the method's paper has.
        seed: of the draws of methods.

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
    schedule: Schedule | ConsensusControl = field(default_factory=Schedule)
    control_rates: ControlRates | None = None
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
            is_count = isinstance(value, int) and not isinstance(value, bool) and value >= 1
            check(name, value, is_count, "a whole number of at least 1")
        if self.control_rates is not None and not isinstance(self.schedule, ConsensusControl):
            raise ValueError(
                f"got control_rates={self.control_rates} with {self.schedule}, expected none: they say how often ranks "
                "communicate under a ConsensusControl; give schedule=ConsensusControl(target=2.0)"
            )
        size, theta, lr, momentum = self.step_size, self.theta, self.outer_lr, self.outer_momentum
        check("step_size", size, size is None or 0 < size <= 2, "above 0 and at most 2; leave it out")
        check("theta", theta, theta is None or 0 < theta < math.inf, "a positive number; leave it out")
        check("outer_lr", lr, lr is None or 0 < lr < math.inf, "a positive number; leave it out")
        is_good = momentum is None or 0 <= momentum < 1
        check("outer_momentum", momentum, is_good, "at least 0 and less than 1; leave it out")

    @property
    def model_bytes(self) -> int:
        """The bytes of the real model."""
        return 4 * self.num_parameters

    @property
    def network(self) -> Network:
        """The links of all workers."""
        return Network(self.links, self.world_size)

    @property
    def message(self) -> MessageCost:
        """The real model as it is."""
        return self.network.plain_message(self.model_bytes)
