"""ConsensusControl: ranks communicate as often as a target for the consensus distance requires."""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal, NamedTuple

import torch

from .mixing_manager.base import MixingManager

_LEAST_DISTANCE = 0.5  # if the distance is below this share of the bound, ranks communicate less often
_MEMORY = 0.9  # the weight of earlier rounds in the running mean of updates
_CALIBRATION_MEMORY = 0.5  # the weight of earlier exact averages in the calibration
_MAX_KNOWN_RANKS = 256  # for more ranks, products of n x n matrices take longer than a round
_ROUNDING = 1e-12
_LEAST_GAIN = 1e-9  # a smaller gain is a rounding error, or the round has no links
_STATS = ("num_skipped_steps", "num_added_rounds", "num_averages")


@dataclass(frozen=True)
class ConsensusControl:
    """A schedule that holds the consensus distance of the models at a target; use it in place of a `Schedule`.

    The consensus distance Xi, Xi^2 = mean_i ||x_i - mean_j x_j||^2, measures how far the models of ranks are apart.
    Kong et al. find that gossip trains as well as all-reduce while Xi stays below a critical value, and that a smaller
    Xi does not help. In a step with a round, j steps after the last one, rank i with the model x_i computes:

        c_i     = sum_j W_ij x_j - x_i                            # the correction, which a round computes anyway
        Xi^2    ~ q mean_i ||c_i||^2 / gain                       # [Note: the estimate]
        bound   = target * u,  u^2 = running mean of mean_i ||drift_i||^2 / j      # or the target itself
        Xi > bound:      until it is not, an exact average now, or one more round of gossip; interval <- interval / 2
        Xi < bound / 2:  interval <- interval + 1                 # steps to the next round

    [Note: the estimate] For symmetric W with eigenvalues 1 > l_2 >= ... >= l_n the correction is bounded by
    (1 - l_2) Xi <= sqrt(mean_i ||c_i||^2) <= (1 - l_n) Xi. Its size between the bounds depends on the differences: a
    round reduces differences between neighbours, and hardly changes differences between distant ranks. So the gain is
    computed for the differences to be expected since the last exact average, if the steps of the ranks are independent
    and of equal size: C <- 0 at an average, C <- C + j (I - J) after j steps, gain = tr((W - I) C (W - I)^T) / tr(C),
    and C <- W C W^T in the round. On a complete graph with equal weights the gain is 1, and the estimate is exact for
    all models. An exact average measures Xi itself, as the size of its own correction. Each average corrects q, for
    steps that are not independent, for example because ranks have different data. For more than 256 ranks C is always
    I - J.

    [Note: one decision] A round is an operation of all ranks, so all ranks must take equal decisions. After a round
    each rank has its own ||c_i||^2 and drift. All ranks gather these numbers (32 bytes each), and every rank computes
    the decision from them, by additions, products and roots that round alike on all machines. The gain may round
    differently, so all ranks use the gain of rank 0. With overlap the gossip thread decides, in the order of the
    rounds. Training reads the decision at the first step at which the next round may start. By then the last round has
    arrived on every rank, so no rank waits in a round that another rank leaves out. If a rank fails, all raise an
    error, as in any round.

    It takes one copy of the model and, with a relative target, a copy in checkpoints.

    Args:
        target: the consensus distance to hold, in units of the update of one step if `is_relative`, else in the unit of
            `GossipDataParallel.consensus_distance`.
        is_relative: whether the unit of the target is the distance by which the optimizer of a rank moves its model in
            one step. The target then follows the learning rate and the gradients; with SGD the unit is the learning
            rate times the norm of a gradient. After j steps between two rounds the unit is the drift over sqrt(j).
        remedy: the reaction to a distance above the target: "average" takes an exact average at once; "rounds" runs
            more rounds of gossip in this step, which reach more peers on a graph that changes from round to round.
        gossip_every: the smallest number of steps from one round to the next.
        max_interval: the largest number of steps from one round to the next.
        max_rounds: the largest number of rounds of gossip in a step, with remedy="rounds".
        average_every: the largest number of rounds from one exact average to the next. The first averages come after 2,
            4, 8, ... rounds, since the distance matters most at the beginning of training. 0: averages only as a
            remedy. 1: every round is an exact average and nothing else. The distance is then measured exactly, and the
            control only changes the number of steps between averages.

    Raises:
        ValueError: a number is out of range, the remedy is unknown, or remedy="rounds" has no rounds of gossip to add.
            When the model is wrapped: the weights are not doubly stochastic; the algorithm compresses, so that its
            correction is not (W - I) x; there is a membership, whose workers may receive different messages; or several
            processes share one model.

    Kong, Lin, Koloskova, Jaggi, Stich, "Consensus Control for Decentralized Deep Learning", ICML 2021, arXiv
    2102.04828. The paper computes the distance itself by a collective. The estimate and the variable interval are
    additions of this library.

    Example:
        >>> model = GossipDataParallel(model, push_sum=False, schedule=ConsensusControl(target=2.0))
    """

    target: float
    is_relative: bool = True
    remedy: Literal["average", "rounds"] = "average"
    gossip_every: int = 1
    max_interval: int = 16
    max_rounds: int = 8
    average_every: int = 16

    def __post_init__(self) -> None:
        is_number = isinstance(self.target, int | float) and not isinstance(self.target, bool)
        if not (is_number and 0 < self.target < math.inf):
            raise ValueError(
                f"got target={self.target!r}, expected a finite number above 0: the consensus distance to hold, in "
                "units of the update of one step; start with 2.0"
            )
        if not isinstance(self.is_relative, bool):
            raise ValueError(
                f"got is_relative={self.is_relative!r}, expected True, for a target in units of the update of one "
                "step, or False, for one as consensus_distance() measures it"
            )
        if self.remedy not in ("average", "rounds"):
            raise ValueError(
                f"got remedy={self.remedy!r}, expected 'average', an exact average, or 'rounds', more rounds of gossip"
            )
        least = {"gossip_every": 1, "max_interval": 1, "max_rounds": 1, "average_every": 0}
        for name, smallest in least.items():
            count = getattr(self, name)
            if isinstance(count, bool) or not isinstance(count, int) or count < smallest:
                raise ValueError(f"got {name}={count!r}, expected a whole number of at least {smallest}")
        if self.max_interval < self.gossip_every:
            raise ValueError(
                f"got max_interval={self.max_interval} and gossip_every={self.gossip_every}, expected no less: they "
                "are the largest and the least number of steps between rounds; pass a larger max_interval"
            )
        if self.average_every == 1 and self.remedy == "rounds":
            raise ValueError(
                "got remedy='rounds' with average_every=1, expected remedy='average': each round is an exact average "
                "without gossip; or pass another average_every"
            )


class Differences:
    """C, the expected covariance of the differences between ranks: see [Note: the estimate].

    Args:
        mixing: the weights W(t).
    """

    def __init__(self, mixing: MixingManager) -> None:
        self._mixing = mixing
        n = mixing.graph.world_size
        self._is_known = n <= _MAX_KNOWN_RANKS
        size = n if self._is_known else 0
        self._directions = torch.eye(size, dtype=torch.float64, device="cpu") - 1 / max(n, 1)  # I - J
        self.covariance = torch.zeros(size, size, dtype=torch.float64, device="cpu")

    def step(self, num_steps: int) -> None:
        """Include `num_steps` optimizer steps of the ranks."""
        if self._is_known:
            self.covariance += num_steps * self._directions

    def mix(self, t: int) -> float:
        """Include round t; returns its gain, 0 if the round has no links."""
        if not self._is_known:
            return self._gain_in_all_directions(t)
        matrix = self._mixing.matrix(t)
        before = self.covariance
        if before.trace() < _ROUNDING:  # rounds of gossip have averaged exactly, up to rounding errors
            before = self._directions
        correction = matrix - torch.eye(len(matrix), dtype=torch.float64, device="cpu")
        self.covariance = matrix @ self.covariance @ matrix.T
        squared = torch.sum((correction @ before) * correction).item()
        return squared / max(before.trace().item(), _ROUNDING)

    def _gain_in_all_directions(self, t: int) -> float:
        """Return ||W - I||_F^2 / (n - 1), from the rows of W in O(n k) for k peers."""
        n = self._mixing.graph.world_size
        rows = (self._mixing.weights(rank, t) for rank in range(n))
        return math.fsum((row.own - 1) ** 2 + math.fsum(w**2 for w in row.inp.values()) for row in rows) / (n - 1)

    def average(self) -> None:
        """Include an exact average, after which all ranks are equal."""
        self.covariance.zero_()


class Step(Enum):
    """A step of a round: gossip, or the exact average of all models."""

    GOSSIP = 1
    AVERAGE = 2


class Observed(NamedTuple):
    """The measurement of a step.

    Attributes:
        squared_corrections: ||c_i||^2 of each rank. For an exact average that ends a round, the squared distance
            ||x_i - mean_j x_j||^2 of the models at the beginning of the round.
        squared_drifts: the squared drift of each rank since the last round; negative if it is not known.
        gain: the gain of the step, computed by one rank.
    """

    squared_corrections: Sequence[float]
    squared_drifts: Sequence[float] = ()
    gain: float = 1.0


def next_step(law: Generator[Step, Observed, None], observed: Observed) -> Step | None:
    """Send the measurement of a step to the law, and return the next step; None: the round has ended."""
    try:
        return law.send(observed)
    except StopIteration:
        return None


class ControlLaw:
    """The decisions of `ConsensusControl` from the measurements of all ranks, equal on each rank.

    Args:
        control: the settings.
    """

    def __init__(self, control: ConsensusControl) -> None:
        self.control = control
        self.reset()

    def reset(self) -> None:
        """Reset all numbers."""
        self.num_gossip_rounds = 0  # so far; the number t of the next round in W(t)
        self.interval = self.control.gossip_every  # steps from one round to the next
        self.last_step = -1  # the last step with a round; -1: none yet
        self.steps_between = 0  # steps between the last two steps with a round; 0: there was at most one
        self.rounds_since_average = 0
        self.squared_update = math.nan  # u^2
        self.calibration = 1.0  # q
        self.estimate = self.bound = math.nan
        self.num_skipped_steps = self.num_added_rounds = self.num_averages = 0

    def starts_round(self, step: int) -> bool:
        """Whether ranks communicate at this step; called once for each step in order, or again if the round failed."""
        is_first = self.last_step < 0
        since = step - self.last_step
        if since == 0:  # the round has not begun
            return True
        # Until a round may start, the last one may be in flight. Its thread writes `interval`, so it is not read here.
        if not is_first and (since < self.control.gossip_every or since < self.interval):
            self.num_skipped_steps += 1
            return False
        self.steps_between = 0 if is_first else since
        self.last_step = step
        self.rounds_since_average += 1
        return True

    def round(self) -> Generator[Step, Observed, None]:
        """Run one round: a generator that yields each step and receives its measurement by all ranks."""
        control, is_exact = self.control, self.control.average_every == 1
        is_apart = self._take((yield Step.AVERAGE if is_exact else Step.GOSSIP))
        estimate, num_added = self.estimate, 0  # the estimate at the beginning of the round
        if is_exact:
            self.count_average()
            self.adapt(estimate)
            return
        while is_apart and control.remedy == "rounds" and num_added + 1 < control.max_rounds:
            is_apart = self._take((yield Step.GOSSIP))
            num_added += 1
        self.num_added_rounds += num_added
        if self.is_average_due or (is_apart and control.remedy == "average"):
            self.average(estimate, (yield Step.AVERAGE).squared_corrections)
            estimate = self.estimate
        self.adapt(estimate)

    def _take(self, observed: Observed) -> bool:
        """Include the measurement of a step; returns whether the distance is above the bound."""
        self.observe_update(observed.squared_drifts)
        return self.observe(observed.squared_corrections, observed.gain)

    def observe_update(self, squared_drifts: Sequence[float]) -> None:
        """Include the squared drift of each rank since the last round; negative if it is not known."""
        known = [drift for drift in squared_drifts if not drift < 0]
        if self.steps_between and math.isfinite(mean := _mean(known)):
            squared = mean / self.steps_between
            is_first = math.isnan(self.squared_update)
            self.squared_update = squared if is_first else _MEMORY * self.squared_update + (1 - _MEMORY) * squared

    def observe(self, squared_corrections: Sequence[float], gain: float) -> bool:
        """Include the corrections of a round of gossip; returns whether the distance is above the bound.

        Args:
            squared_corrections: ||c_i||^2 of each rank.
            gain: the gain of the round, from one rank. Next to 0 it tells nothing.
        """
        seen = _mean(squared_corrections) / gain if gain > _LEAST_GAIN else math.nan
        self.estimate = math.sqrt(self.calibration * seen)
        unit = math.sqrt(self.squared_update) if self.control.is_relative else 1.0
        self.bound = self.control.target * unit
        return self._is_known(self.estimate) and self.estimate > self.bound

    def average(self, estimate: float, squared_distances: Sequence[float]) -> None:
        """Correct the calibration by the distance that an exact average has measured.

        Args:
            estimate: the estimate of the same distance by the round of gossip before.
            squared_distances: ||x_i - mean_j x_j||^2 of each rank.
        """
        found = _mean(squared_distances)
        if found > 0 and 0 < estimate < math.inf:
            ratio = self.calibration * found / estimate**2
            self.calibration = _CALIBRATION_MEMORY * self.calibration + (1 - _CALIBRATION_MEMORY) * ratio
        self.estimate = math.sqrt(found)
        self.count_average()

    def count_average(self) -> None:
        """Count an exact average."""
        self.num_averages += 1
        self.rounds_since_average = 0

    def adapt(self, distance: float) -> None:
        """Choose the number of steps to the next round from the distance at the beginning of this round."""
        if not self._is_known(distance):
            return
        if distance > self.bound:
            self.interval = max(self.interval // 2, self.control.gossip_every)
        elif distance < _LEAST_DISTANCE * self.bound:
            self.interval = min(self.interval + 1, self.control.max_interval)

    def _is_known(self, distance: float) -> bool:
        """Whether distance and bound can be compared; False before the first update, or if models do not move."""
        return math.isfinite(distance) and self.bound > 0

    @property
    def is_average_due(self) -> bool:
        """Whether this round must end in an exact average, whatever the distance is."""
        every = self.control.average_every
        return every > 0 and self.rounds_since_average >= min(every, 2 ** min(self.num_averages + 1, 30))

    def stats(self) -> dict[str, float]:
        """See `GossipDataParallel.comm_stats`."""
        return {
            "consensus_estimate": self.estimate,
            "consensus_bound": self.bound,
            "gossip_interval": self.interval,
            **{name: getattr(self, name) for name in _STATS},
        }

    def state_dict(self) -> dict[str, Any]:
        """Return all numbers."""
        return {name: value for name, value in vars(self).items() if name != "control"}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state of `state_dict()`."""
        for name in self.state_dict():
            setattr(self, name, state[name])


def _mean(values: Sequence[float]) -> float:
    """Return the mean, rounded once and so equal on all machines; NaN for no values or a value that is not finite."""
    return math.fsum(values) / len(values) if values and all(map(math.isfinite, values)) else math.nan
