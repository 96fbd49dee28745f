"""ControlledMixer: rounds of gossip that measure the distance between ranks and apply `ConsensusControl`."""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..consensus_control import ConsensusControl, ControlLaw, Differences, Observed, Step, next_step
from ..devices import wide_dtype
from ..flat.vector import FlatVector, in_chunks
from ..rounds.loaded import check_layout
from ..rounds.mixer import GlobalAverage, Mixer
from ..rounds.push_pull import PushPull


def check_control(gossiper: Mixer, control: ConsensusControl) -> None:
    """Raise ValueError if the corrections of a mixer do not measure the distance between ranks."""
    if gossiper.transport.is_elastic:
        raise ValueError(
            f"got schedule={control} with a membership, expected a Schedule: ranks that may lose messages cannot all "
            "decide alike; use Schedule(gossip_every=...)"
        )
    if not isinstance(gossiper, PushPull):
        raise ValueError(
            f"got schedule={control} with {gossiper}, expected plain gossip: the corrections of other algorithms do "
            "not tell how far ranks are apart; leave algorithm out, or use a Schedule"
        )
    if gossiper.is_weighted:
        raise ValueError(
            f"got schedule={control} with {gossiper.mixing}, expected doubly stochastic weights, with which a "
            "correction tells how far ranks are apart; use an undirected graph with push_sum=False, or a Schedule"
        )


class ControlledMixer(Mixer):
    """One round under `ConsensusControl`: x <- W x, then more rounds or an average if ranks are too far apart.

    With average_every=1 a round is x <- mean_j x_j alone. A round of gossip before it would keep the mean, and only add
    bytes.

    All ranks take equal decisions: see [Note: one decision] of `ConsensusControl`.

    Args:
        gossiper: the mixer of the rounds of gossip, bound to its peers.
        averager: the average over the same ranks.
        control: the settings.

    Raises:
        ValueError: see `check_control`.
    """

    def __init__(self, gossiper: Mixer, averager: GlobalAverage, control: ConsensusControl) -> None:
        check_control(gossiper, control)
        self._gossiper, self._averager = gossiper, averager
        self.control = control
        self._is_exact = control.average_every == 1
        self._first = averager if self._is_exact else gossiper  # the mixer that a round begins with
        self.law = ControlLaw(control)
        self._differences = Differences(gossiper.mixing)
        self.transport = gossiper.transport
        self._kept: FlatVector | None = None  # before a round: the model after the last one; in it: as it was sent
        self._loaded: Sequence[Tensor] = ()  # the parameters of `_kept` from a checkpoint, until the next round
        self._drift: Tensor | None = None
        self._own_buffer_weight = 1.0

    @property
    def own_buffer_weight(self) -> float:
        """See `Mixer`: the product over the rounds, a lower bound of the total weight of the rank's own buffers."""
        return self._own_buffer_weight

    @property
    def sources(self) -> Sequence[int]:
        """See `Mixer`."""
        return self._first.sources

    def chunks(self, s: FlatVector) -> Sequence[FlatVector]:
        """See `Mixer`."""
        return self._first.chunks(s)

    def start(self, s: FlatVector, t: int) -> None:
        """See `Mixer`. The number t in W(t) counts all rounds of gossip, also several in one step."""
        self._first.start(s, self._next_round())
        self._keep(s)  # the exchange only reads s too

    def start_filling(self, s: FlatVector, t: int, fill: Callable[[int], None]) -> None:
        """See `Mixer`."""
        self._first.start_filling(s, self._next_round(), fill)
        self._keep(s)

    def finish(self, s: FlatVector) -> None:
        """See `Mixer`."""
        self._first.finish(s)
        law, kept = self.law.round(), self._kept_of()
        next(law)  # the step that has just ended
        self._go_on(law, next_step(law, self._observed(squared_distance(s, kept))), s)
        kept.copy_(s)

    def difference(self, s: FlatVector) -> float:
        """See `Mixer`."""
        alpha, law, kept = self._first.difference(s), self.law.round(), self._kept_of()
        next(law)
        step = next_step(law, self._observed(alpha**2 * squared_norm(s)))
        if step is None:
            kept.add_(s, alpha=alpha)
            return alpha
        correction = s.clone()
        s.copy_(kept).add_(correction, alpha=alpha)
        self._go_on(law, step, s)
        correction.copy_(s)
        s.add_(kept, alpha=-1.0)
        kept.copy_(correction)
        return 1.0

    # Parts of a round.

    def _next_round(self) -> int:
        """Return the number t of this round of gossip, and count it."""
        t = self.law.num_gossip_rounds
        self.law.num_gossip_rounds = t + 1
        return t

    def _keep(self, s: FlatVector) -> None:
        """Measure the drift of the model since the last round, and keep a copy of the vector that is sent."""
        kept, loaded = self._kept, self._loaded
        if kept is None or kept.layout != s.layout or kept.raw.device != s.raw.device:
            kept = s.clone()
            self._drift = None
            parameters = kept.where(is_buffer=False).segments
            if [x.numel() for x in loaded] == [x.numel() for x in parameters]:
                for x, theirs in zip(parameters, loaded, strict=True):
                    x.copy_(theirs)
                self._drift = squared_distance(s, kept)
        else:
            self._drift = squared_distance(s, kept)
        self._kept, self._loaded = kept.copy_(s), ()
        self._differences.step(max(self.law.steps_between, 1))
        self._own_buffer_weight = 1.0

    def _kept_of(self) -> FlatVector:
        assert self._kept is not None, "no round is in flight: start() comes first"
        return self._kept

    def _observed(self, squared_correction: Tensor) -> Observed:
        """Gather the measurement of the step of gossip that has just ended. Collective."""
        self._own_buffer_weight *= self._first.own_buffer_weight
        gain = 1.0 if self._is_exact else self._differences.mix(self.law.num_gossip_rounds - 1)
        drift, self._drift = self._drift, None
        unknown = torch.full_like(squared_correction, -1.0)
        own = squared_correction, unknown if drift is None else drift, torch.full_like(unknown, gain)
        corrections, drifts, gains = self._gather(*own)
        return Observed(corrections, drifts, gains[0])

    def _go_on(self, law: Generator[Step, Observed, None], step: Step | None, s: FlatVector) -> None:
        """Run the steps of a round from this one on; None: the round has ended."""
        while step is not None:
            if step is Step.GOSSIP:
                last = s.clone()
                self._gossiper.mix(s, self._next_round())
                observed = self._observed(squared_distance(s, last))
            else:
                self._averager.mix(s, self.law.num_gossip_rounds)
                observed = Observed(self._gather(squared_distance(s, self._kept_of()))[0])
                self._differences.average()
                self._own_buffer_weight = min(self._own_buffer_weight, self._averager.own_buffer_weight)
            step = next_step(law, observed)

    def _gather(self, *own: Tensor) -> tuple[list[float], ...]:
        """Gather numbers of this rank, float64 [1] each; returns a list with the numbers of all ranks for each.

        Collective.
        """
        law, n = self.law, self.transport.world_size
        count = torch.full_like(own[0], float(law.num_gossip_rounds))
        mine = torch.cat((*own, count))
        table = mine.new_empty(n * len(mine))
        self.transport.all_gather(table, mine, what=f"consensus control after round {law.num_gossip_rounds - 1}")
        *columns, counts = (column.tolist() for column in table.view(n, -1).unbind(dim=1))
        if len({*counts}) > 1:
            raise RuntimeError(
                f"got ranks after {[int(count) for count in counts]} rounds of gossip under {self.control}, expected "
                "one number: they have loaded different checkpoints; load checkpoints that were saved at one step"
            )
        return tuple(columns)

    # State.

    def state_dict(self) -> dict[str, Any]:
        """The numbers of the law and, with a relative target, the model after the last round; it shares memory."""
        kept = self._loaded if self._kept is None else self._kept.where(is_buffer=False).segments
        return {
            "law": self.law.state_dict(),
            "differences": self._differences.covariance,
            "kept": list(kept) if self.control.is_relative else [],
        }

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise ValueError if `state` is neither empty nor a state of `state_dict()` of this version."""
        if state:
            numbers = self.law.state_dict().keys()
            check_layout(state, ("law", "differences", "kept"), needed=("law", "differences"), of=self.control)
            check_layout(state["law"], numbers, needed=numbers, of=self.control)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state of `state_dict()`; an empty state resets."""
        self._kept, self._drift = None, None
        self._loaded = copy.deepcopy(list(state.get("kept", ())))
        self.law.reset()
        self._differences.average()
        if state:
            self.law.load_state_dict(state["law"])
            self._differences.covariance.copy_(state["differences"])

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._gossiper!r}, {self.control!r})"


def squared_norm(x: FlatVector) -> Tensor:
    """Return ||x||^2 over the parameters, [1] in `wide_dtype` on the device of x."""
    return _total(x, ((chunk for (chunk,) in in_chunks(s)) for s in x.where(is_buffer=False).segments))


def squared_distance(x: FlatVector, y: FlatVector) -> Tensor:
    """Return ||x - y||^2 over the parameters, [1] in `wide_dtype` on the device of x, without a copy.

    The layouts of x and y must be equal.
    """
    pairs = zip(x.where(is_buffer=False).segments, y.where(is_buffer=False).segments, strict=True)
    return _total(x, ((_wide(a) - _wide(b) for a, b in in_chunks(s, r)) for s, r in pairs))


def _total(x: FlatVector, chunks: Any) -> Tensor:
    total = torch.zeros(1, dtype=wide_dtype(x.raw.device), device=x.raw.device)
    for segment in chunks:
        for chunk in segment:
            total += torch.linalg.vector_norm(chunk, dtype=total.dtype) ** 2
    return total


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.element_size() < 4 else x
