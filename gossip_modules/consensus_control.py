"""ConsensusControl: ranks communicate as often as it takes to hold a consensus distance, and no more often."""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal, NamedTuple

import torch

from .mixing_manager.base import MixingManager

_LEAST_DISTANCE = 0.5  # of the target: where models are closer, ranks communicate less often
_MEMORY = 0.9  # of the running mean of updates, from one round to the next
_CALIBRATION_MEMORY = 0.5  # of the factor that exact averages correct, from one of them to the next
_MAX_KNOWN_RANKS = 256  # beyond, products of n x n matrices take longer than a round
_ROUNDING = 1e-12
_LEAST_GAIN = 1e-9  # less is rounding, or a round in which nobody has a peer
_COUNTERS = ("num_gossip_rounds", "interval", "last_step", "steps_between", "rounds_since_average")
_MEASURES = ("squared_update", "calibration", "estimate", "bound")
_STATS = ("num_skipped_steps", "num_added_rounds", "num_averages")


@dataclass(frozen=True)
class ConsensusControl:
    """In place of a `Schedule`: holds the consensus distance of the ranks' models at a target.

    The consensus distance Xi, Xi^2 = mean_i ||x_i - mean_j x_j||^2, says how far ranks are apart. Kong et al. find that
    gossip trains as well as all-reduce while Xi stays below a critical value, and that it need not be smaller. A step
    with a round, for ranks with models x_i that have taken j steps since the last one:

        c_i     = sum_j W_ij x_j - x_i                            # the correction, which a round computes anyway
        Xi^2    ~ q mean_i ||c_i||^2 / gain                       # [Note: the estimate]
        bound   = target * u,  u^2 = running mean of mean_i ||drift_i||^2 / j      # or the target itself
        Xi > bound:      until it is not, an exact average now, or one more round of gossip; interval <- interval / 2
        Xi < bound / 2:  interval <- interval + 1                 # steps to the next round

    [Note: the estimate] For symmetric W with eigenvalues 1 > l_2 >= ... >= l_n the correction is bounded by
    (1 - l_2) Xi <= sqrt(mean_i ||c_i||^2) <= (1 - l_n) Xi. Where between depends on the differences: a round takes
    those of neighbours away, and leaves those of far ranks, which neighbours do not see. So the gain is that of the
    differences which are to be expected since the last exact average, if the steps of the ranks are independent and of
    one size: C <- 0 at an average, C <- C + j (I - J) after j steps, gain = tr((W - I) C (W - I)^T) / tr(C), and
    C <- W C W^T in the round. On a complete graph with equal weights the gain is 1 and the estimate exact, whatever the
    models. An exact average measures Xi itself, as the size of its own correction: with each of them q is corrected,
    for steps that are not independent, as with different data. In worlds of more than 256 ranks C is I - J always.

    [Note: one decision] A round is an operation of all ranks, so all must decide alike. After a round each rank has its
    own ||c_i||^2 and drift; all ranks gather them (32 bytes each), and every rank computes the same decision from the
    same numbers, by additions, products and roots that are rounded alike on all machines; of what is not, the gain,
    all take that of rank 0. With overlap this happens on the gossip thread, in the order of the rounds, and what it
    says of the next round is read at the first step at which one may start: by then the round has arrived on every
    rank. So no rank can wait in a round that another one leaves out. A rank that fails is an error, as in any round.

    Costs one copy of the model; and, where the target is relative, a copy in checkpoints.

    Args:
        target: the consensus distance to hold: in units of the update of one step where it is relative, else as
            `GossipDataParallel.consensus_distance` measures it.
        is_relative: whether the target is in units of how far a rank's optimizer moves its model in one step, so that
            it follows the learning rate and the gradients: with SGD, of the learning rate times the norm of a gradient.
            Where a rank has taken j steps between two rounds, that is its drift over sqrt(j).
        remedy: what to do when the distance is above the target: "average", an exact average at once; or "rounds",
            more rounds of gossip in this step, which on a graph that changes from round to round means more peers.
        gossip_every: the least number of steps from one round to the next.
        max_interval: the largest.
        max_rounds: the most rounds of gossip in a step, with remedy="rounds".
        average_every: every so many rounds at the latest there is an exact average, and the first ones after 2, 4, 8,
            ... rounds, as the beginning of training is where the distance matters most; 0 = only as a remedy; 1 =
            every round is an exact average and nothing else, so the distance is measured exactly, and what is
            controlled is how many steps there are from one to the next.

    Raises:
        ValueError: a number out of range, or an unknown remedy; more rounds of gossip where there are none. When the
            model is wrapped: weights that are not doubly stochastic; a compressed gossiper, whose correction is not
            that of its weights; a membership, with which ranks may hear different things; or several processes for
            one model.

    Kong, Lin, Koloskova, Jaggi, Stich, "Consensus Control for Decentralized Deep Learning", ICML 2021, arXiv
    2102.04828. There the distance itself is computed, with a collective; the estimate, and communicating less often,
    are of this library.

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
                "got remedy='rounds' with average_every=1, expected remedy='average': each round is an exact average, "
                "and none of gossip; or pass another average_every"
            )


class Differences:
    """C, the covariance of the differences between ranks that is to be expected: see [Note: the estimate].

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
        """Ranks have taken so many steps."""
        if self._is_known:
            self.covariance += num_steps * self._directions

    def mix(self, t: int) -> float:
        """Round t; its gain, 0 where nobody has a peer."""
        if not self._is_known:
            return self._gain_in_all_directions(t)
        matrix = self._mixing.matrix(t)
        before = self.covariance
        if before.trace() < _ROUNDING:  # an exact average by rounds of gossip: what is left is rounding
            before = self._directions
        correction = matrix - torch.eye(len(matrix), dtype=torch.float64, device="cpu")
        self.covariance = matrix @ self.covariance @ matrix.T
        squared = torch.sum((correction @ before) * correction).item()
        return squared / max(before.trace().item(), _ROUNDING)

    def _gain_in_all_directions(self, t: int) -> float:
        """||W - I||_F^2 / (n - 1), from the rows of W: O(n k) for k peers."""
        n = self._mixing.graph.world_size
        rows = (self._mixing.weights(rank, t) for rank in range(n))
        return math.fsum((row.own - 1) ** 2 + math.fsum(w**2 for w in row.inp.values()) for row in rows) / (n - 1)

    def average(self) -> None:
        """All ranks are equal."""
        self.covariance.zero_()


class Step(Enum):
    """A step of a round: gossip, or the exact average of all models."""

    GOSSIP = 1
    AVERAGE = 2


class Observed(NamedTuple):
    """The measurement of a step.

    Attributes:
        squared_corrections: ||c_i||^2 of each rank. Of an exact average that ends a round: from the models as they were
            sent, ||x_i - mean_j x_j||^2.
        squared_drifts: how far each rank has moved since the last round, squared; negative where that is not known.
        gain: of the step, of one rank.
    """

    squared_corrections: Sequence[float]
    squared_drifts: Sequence[float] = ()
    gain: float = 1.0


def next_step(law: Generator[Step, Observed, None], observed: Observed) -> Step | None:
    """The step after one that was measured; None: the round has ended."""
    try:
        return law.send(observed)
    except StopIteration:
        return None


class ControlLaw:
    """What `ConsensusControl` decides, from measurements of all ranks: the same on each of them.

    Args:
        control: the settings.
    """

    def __init__(self, control: ConsensusControl) -> None:
        self.control = control
        self.reset()

    def reset(self) -> None:
        """Start anew."""
        self.num_gossip_rounds = 0  # so far: their number t, in W(t)
        self.interval = self.control.gossip_every  # steps from one round to the next
        self.last_step = -1  # with a round; -1: none yet
        self.steps_between = 0  # the last step with a round and the one before; 0: there is none before
        self.rounds_since_average = 0
        self.squared_update = math.nan  # u^2
        self.calibration = 1.0  # q
        self.estimate = self.bound = math.nan
        self.num_skipped_steps = self.num_added_rounds = self.num_averages = 0

    def starts_round(self, step: int) -> bool:
        """Whether ranks communicate at this step; asked once for each, in their order, or again if that failed."""
        is_first = self.last_step < 0
        since = step - self.last_step
        if since == 0:  # the round has not begun
            return True
        # Until a round may start, the last one may be under way: its thread writes `interval`, which is not read then.
        if not is_first and (since < self.control.gossip_every or since < self.interval):
            self.num_skipped_steps += 1
            return False
        self.steps_between = 0 if is_first else since
        self.last_step = step
        self.rounds_since_average += 1
        return True

    def round(self) -> Generator[Step, Observed, None]:
        """The steps of one round: yields each, and gets its measurement by all ranks."""
        control, is_exact = self.control, self.control.average_every == 1
        is_apart = self._take((yield Step.AVERAGE if is_exact else Step.GOSSIP))
        estimate, num_added = self.estimate, 0  # of the models as they were sent
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
        """Take in the measurement of a step; returns whether the models are further apart than they may be."""
        self.observe_update(observed.squared_drifts)
        return self.observe(observed.squared_corrections, observed.gain)

    def observe_update(self, squared_drifts: Sequence[float]) -> None:
        """Take in how far each rank has moved since the last round, squared; negative where that is not known."""
        known = [drift for drift in squared_drifts if not drift < 0]
        if self.steps_between and math.isfinite(mean := _mean(known)):
            squared = mean / self.steps_between
            is_first = math.isnan(self.squared_update)
            self.squared_update = squared if is_first else _MEMORY * self.squared_update + (1 - _MEMORY) * squared

    def observe(self, squared_corrections: Sequence[float], gain: float) -> bool:
        """Take in the corrections of a round of gossip; returns whether the models are further apart than they may be.

        Args:
            squared_corrections: ||c_i||^2 of each rank.
            gain: of the round, of one rank; nothing is learnt where it is next to 0.
        """
        seen = _mean(squared_corrections) / gain if gain > _LEAST_GAIN else math.nan
        self.estimate = math.sqrt(self.calibration * seen)
        unit = math.sqrt(self.squared_update) if self.control.is_relative else 1.0
        self.bound = self.control.target * unit
        return self._is_known(self.estimate) and self.estimate > self.bound

    def average(self, estimate: float, squared_distances: Sequence[float]) -> None:
        """Compare an estimate with what an exact average has found of the same models.

        Args:
            estimate: by the round of gossip before it.
            squared_distances: ||x_i - mean_j x_j||^2 of each rank.
        """
        found = _mean(squared_distances)
        if found > 0 and 0 < estimate < math.inf:
            ratio = self.calibration * found / estimate**2
            self.calibration = _CALIBRATION_MEMORY * self.calibration + (1 - _CALIBRATION_MEMORY) * ratio
        self.estimate = math.sqrt(found)
        self.count_average()

    def count_average(self) -> None:
        """There was an exact average."""
        self.num_averages += 1
        self.rounds_since_average = 0

    def adapt(self, distance: float) -> None:
        """Choose the steps to the next round, by the distance at the beginning of this one."""
        if not self._is_known(distance):
            return
        if distance > self.bound:
            self.interval = max(self.interval // 2, self.control.gossip_every)
        elif distance < _LEAST_DISTANCE * self.bound:
            self.interval = min(self.interval + 1, self.control.max_interval)

    def _is_known(self, distance: float) -> bool:
        """Whether there is something to compare: not before the first update, or while models do not move."""
        return math.isfinite(distance) and self.bound > 0

    @property
    def is_average_due(self) -> bool:
        """Whether this round must end in an exact average whatever was measured."""
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
        """All numbers."""
        return {name: getattr(self, name) for name in (*_COUNTERS, *_MEASURES, *_STATS)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict()` gave."""
        for name in (*_COUNTERS, *_MEASURES, *_STATS):
            setattr(self, name, state[name])


def _mean(values: Sequence[float]) -> float:
    """Rounded once, so the same on all machines; NaN where one is not finite, or there are none."""
    return math.fsum(values) / len(values) if values and all(map(math.isfinite, values)) else math.nan
