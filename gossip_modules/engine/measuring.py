"""Measurement: the times of blocking rounds, until all ranks have chosen the overlap of later rounds."""

from __future__ import annotations

import logging
import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

import torch
from torch import Tensor

from ..devices import wait_for_queue
from ..flat.vector import FlatVector
from ..transport.agreement import rows_of_all
from ..transport.base import Transport
from ..worlds.world import ModelWorld
from .overlap import Overlap

NUM_WARM, NUM_MEASURED = 2, 6
"""Rounds that are left out of the medians, and rounds that the choice is made from."""
WORTHWHILE = 0.1
"""Overlap must hide this share of a step with its round, since it costs two passes over the model."""

LARGE = 1 << 20
"""Bytes of a round from which a slow network is worth advice; smaller models are examples and tests."""

_log = logging.getLogger("gossip_modules.overlap")


@dataclass(frozen=True)
class OverlapChoice:
    """The choice of all ranks, and the measurements behind it.

    Attributes:
        overlap, max_staleness: the arguments of `GossipDataParallel` for further training.
        wire_dtype: the name of the dtype of messages, such as "bfloat16"; None: no rounding.
        step_seconds: the median duration of a step without its round, of the slowest rank.
        round_seconds: the median time added to a step by a round.
        advice: arguments to pass in place of these, if the network still takes more than half of the time; else "".
    """

    overlap: bool
    max_staleness: int
    wire_dtype: str | None
    step_seconds: float
    round_seconds: float
    advice: str = ""

    def numbers(self) -> dict[str, float]:
        """Return the numbers among the attributes, for `comm_stats()`."""
        return {f"auto_{name}": float(v) for name, v in asdict(self).items() if isinstance(v, int | float)}

    def __str__(self) -> str:
        chosen = f"overlap={self.overlap}"
        chosen += f", max_staleness={self.max_staleness}" if self.max_staleness else ""
        chosen += f", wire_dtype=torch.{self.wire_dtype}" if self.wire_dtype else ""
        measured = f"a step takes {1e3 * self.step_seconds:.4g} ms, a round {1e3 * self.round_seconds:.4g} ms"
        return f"{chosen} ({measured}){'; ' * bool(self.advice)}{self.advice}"


@dataclass(frozen=True)
class OverlapLimits:
    """The settings to choose from.

    Args:
        max_staleness: the largest staleness.
        wire_dtype: the dtype to which messages may be rounded; None: they are not rounded.
        has_wide_messages: whether messages are numbers wider than bfloat16, so that rounding makes them shorter.
        gossip_every: the steps from one round to the next.
    """

    max_staleness: int = 0
    wire_dtype: torch.dtype | None = None
    has_wide_messages: bool = True
    gossip_every: int = 1

    def allow(self, choice: OverlapChoice) -> bool:
        """Whether a choice is within the limits, as a choice of another run may not be."""
        is_allowed_wire = choice.wire_dtype is None or getattr(torch, choice.wire_dtype) is self.wire_dtype
        return choice.max_staleness <= self.max_staleness and is_allowed_wire

    def choose(
        self, measured: Sequence[Sequence[float]], latency: float = 0.0, num_bytes: float = math.inf
    ) -> OverlapChoice:
        """Return the choice for the measurements of all ranks.

        The wire comes first: messages are rounded, if they may be, where a round takes longer than the rest of a step
        and the bytes take more of it than the latency. Half of the bytes then take half of their time. Rounds overlap
        if this saves a tenth of a step with its round; otherwise they block, since overlap costs two passes over the
        model. They may be late by the smallest number of steps that hides a round. If no setting hides it, the
        staleness is the largest one, so that rounds are rarest.

        Args:
            measured: the seconds of a step and of a round, medians of each rank; equal on all ranks.
            latency: the seconds of an exchange of a few bytes.
            num_bytes: the bytes that a rank sends in a round.

        Example:
            >>> OverlapLimits(max_staleness=2).choose([(0.10, 0.25), (0.05, 0.30)]).max_staleness
            2
        """
        step = max(seconds for seconds, _ in measured)
        # Ranks that compute less wait in the round; the rank that computes longest sees the round alone.
        cost = max(sum(pair) for pair in measured) - step
        if len(measured) == 1:
            return OverlapChoice(False, 0, None, step, cost)
        wire = cost - min(latency, cost)
        is_slow_wire = self.has_wide_messages and cost > step and wire > latency
        is_narrow = self.wire_dtype is not None and is_slow_wire
        left = cost - wire / 2 if is_narrow else cost
        staleness = next((late for late in range(self.max_staleness) if left <= (late + 1) * step), self.max_staleness)
        saved = min(left, step + left * staleness / (staleness + 1))  # of a step with its round, by overlap
        overlaps = saved >= WORTHWHILE * (step + left)
        dtype = str(self.wire_dtype).removeprefix("torch.") if is_narrow else None
        staleness = staleness if overlaps else 0
        hidden, period = (staleness + 1) * step if overlaps else 0.0, max(self.gossip_every, staleness + 1)
        wait = max(left - hidden, 0.0) / period  # of a step, on average
        advice = ""
        if wait > step > 0 and num_bytes >= LARGE:
            bfloat16 = "wire_dtype=torch.bfloat16 halves the messages, and " if is_slow_wire and not is_narrow else ""
            advice = (
                f"training waits {wait / (step + wait):.0%} of the time for the network: {bfloat16}"
                # An average of all models sends each model almost twice.
                f"algorithm=LocalSGD(sync_every={math.ceil(2 * cost / step)}), or DiLoCo, waits at most half of it"
            )
        return OverlapChoice(overlaps, staleness, dtype, step, cost, advice)


class Measurement:
    """Times of blocking rounds, from which all ranks choose the overlap of later rounds.

    [Note: overlap="auto"] Each rank takes the time of its rounds and of the steps between them, but not of the averages
    that training begins with under `Schedule(average_until=...)`. After the eighth round, in the same step on all
    ranks, a gather of three numbers per rank gives all ranks the same measurements. The next gather takes the latency
    of the network, and a third one shares it. From these numbers each rank computes the same choice. If several
    processes hold one model, all of them take the measurements of the first one. The engine turns to the choice after
    this round, so training goes on with the bits of a run that was built with the chosen settings and resumed here.

    Args:
        limits: the settings to choose from.
        is_eager: see `Overlap`.
    """

    def __init__(self, limits: OverlapLimits, *, is_eager: bool = True) -> None:
        self.limits, self._is_eager = limits, is_eager
        self._sent = 0  # bytes before the measured rounds
        self.clear()

    def clear(self) -> None:
        """Drop all times."""
        self._steps: list[float] = []
        self._rounds: list[float] = []
        self._ended: float | None = None  # when the last step's round has ended
        self._start = 0.0

    def begin_step(self, x: FlatVector) -> None:
        """Note the time at the safe point of a step, before its round."""
        wait_for_queue(x.raw.device)
        self._start = time.perf_counter()
        if self._ended is not None:
            self._steps.append(self._start - self._ended)

    def end_step(self, x: FlatVector, *, has_round: bool, num_bytes_sent: int) -> bool:
        """Note the time after the round of a step.

        Args:
            x: the model.
            has_round: whether the step had a round that counts.
            num_bytes_sent: the bytes that this rank has sent so far.

        Returns:
            Whether `agree` is to be called.
        """
        wait_for_queue(x.raw.device)
        self._ended = time.perf_counter()
        if not has_round:
            return False
        self._rounds.append(self._ended - self._start)
        if len(self._rounds) == NUM_WARM:
            self._sent = num_bytes_sent
        return len(self._rounds) == NUM_WARM + NUM_MEASURED

    def agree(
        self, x: FlatVector, t: int, transport: Transport, *, can_narrow: bool, world: ModelWorld, gossip_every: int
    ) -> OverlapChoice:
        """Choose, on all ranks alike; collective.

        Args:
            x: the model.
            t: the number of the last round.
            transport: the transport of the rounds.
            can_narrow: whether messages are vectors that may be rounded, and are not.
            world: the processes that hold the model; all take the measurements of the first one.
            gossip_every: the steps from one round to the next.
        """

        def gather(own: Sequence[float]) -> Tensor:
            mine = torch.tensor(own, dtype=torch.float64, device="cpu")
            return rows_of_all(transport, mine, what=f"choosing overlap after round {t}")

        medians = [statistics.median(seconds[NUM_WARM:]) for seconds in (self._steps, self._rounds)]
        measured = gather([*medians, (transport.num_bytes_sent - self._sent) / NUM_MEASURED])
        start = time.perf_counter()  # all ranks are here
        gather([0.0])
        latency = gather([time.perf_counter() - start]).min()
        world.first(measured)
        world.first(latency)
        is_wide = can_narrow and any(segment.dtype.itemsize > 2 for segment in x.segments)
        limits = replace(self.limits, has_wide_messages=is_wide, gossip_every=gossip_every)
        choice = limits.choose(measured[:, :2].tolist(), latency.item(), measured[:, 2].max().item())
        if transport.rank == 0:
            level = logging.WARNING if choice.advice else logging.INFO
            _log.log(level, 'overlap="auto": %s, after round %d', choice, t)
        return choice

    def overlap_of(self, choice: OverlapChoice) -> Overlap | None:
        """Return the overlap of a choice; None for blocking rounds."""
        return Overlap(max_staleness=choice.max_staleness, is_eager=self._is_eager) if choice.overlap else None
