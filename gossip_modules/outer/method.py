"""OuterMethod: what ranks do every H steps with where training has taken them; a method writes a step on an anchor."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field
from numbers import Real

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..compression.compressor import Compressor
from ..graph_manager.base import GraphManager
from ..mixing_manager.base import MixingManager
from .anchor import Anchor
from .fragment import Fragments, is_fragments
from .optimizer import MakeOptimizer, described, made_optimizer


@dataclass(frozen=True)
class OuterMethod(ABC):
    """What happens every `sync_every` optimizer steps: the models x of the ranks move an anchor phi, and x <- phi.

    The anchor is where the ranks last began. How far a rank has come from there, its *drift* phi - x, is mixed over
    ranks, and serves an optimizer, the outer one, as the gradient of the anchor. An outer step of a rank:

        start(anchor, x):   sent = phi - x                   # the drift of this rank
                            sent <- its average over ranks, or W(t) of it; with a delay under the next `delay` steps
        finish(anchor):     phi <- step of the outer optimizer, with the gradient `sent`
                            x <- phi; with a delay lerp(phi, x, own_weight)

    Those are the defaults; a method overrides what it does otherwise. It holds settings only, so that one object may
    serve several wrappers: what a rank remembers is in its `Anchor`.

    Args:
        sync_every: H, the number of optimizer steps from one outer step to the next, at least 1.
        fragments: the parts of the model that take outer steps at different times, evenly spread over the H steps, each
            with an anchor and an optimizer of its own: their number, for equal runs in the order of the module; or for
            each a list of names of modules or parameters, which have each trained tensor once. Where there are more
            than H, several take theirs in one step, one after the other.
        delay: tau, the number of optimizer steps for which an outer step travels in a thread, less than H; 0: training
            waits for it.
        own_weight: alpha, what a rank keeps of its model where an outer step arrives: x <- alpha x + (1 - alpha) phi;
            0 <= alpha < 1. None: 1/2 with a delay, else 0. At 0 the steps taken under way are lost.
        anchor_device: "cpu" keeps the anchor, the vector that is mixed and the state of the outer optimizer in the
            host's memory, where outer steps are computed then; see [Note: Anchors in host memory] of `Anchor`. None:
            beside the model. Ranks may differ in it.

    Raises:
        ValueError: one of these is out of its range.
    """

    sync_every: int
    _: KW_ONLY
    fragments: Fragments = 1
    delay: int = 0
    own_weight: float | None = None
    anchor_device: torch.device | str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if isinstance(self.sync_every, bool) or not isinstance(self.sync_every, int) or self.sync_every < 1:
            raise ValueError(
                f"{type(self).__name__}: got sync_every={self.sync_every!r}, expected a whole number of at least 1, "
                "the optimizer steps between two outer steps; 30 to 500 are usual"
            )
        if self.anchor_device is not None and str(self.anchor_device) != "cpu":
            raise ValueError(
                f"{type(self).__name__}: got anchor_device={self.anchor_device!r}, expected 'cpu', or None for the "
                "device of the model"
            )
        self._check_overlap()

    def _check_overlap(self) -> None:
        """Raise ValueError where fragments or delays are none."""
        name = type(self).__name__
        if not is_fragments(self.fragments):
            raise ValueError(
                f"{name}: got fragments={self.fragments!r}, expected their number, at least 1, or for each of them a "
                "list of names of modules, as in [['embed', 'layers.0'], ['layers.1', 'head']]; one name in a fragment "
                "is a list too: [['embed'], ['head']]"
            )
        if isinstance(self.delay, bool) or not isinstance(self.delay, int) or not 0 <= self.delay <= self.max_delay:
            raise ValueError(
                f"{name}: got delay={self.delay!r} with sync_every={self.sync_every}, expected 0 <= delay <= "
                f"{self.max_delay} optimizer steps, since an outer step must be over when that fragment takes its next"
            )
        if not (is_number(self.kept) and 0 <= self.kept < 1):
            raise ValueError(
                f"{name}: got own_weight={self.own_weight!r}, expected 0 <= own_weight < 1; 0 takes the anchor as it is"
            )
        if self.gossip_every and (self.delay or self.num_fragments > 1):
            raise ValueError(
                f"{name}: got gossip_every={self.gossip_every} with delay={self.delay} and fragments={self.fragments!r}"
                ", expected no gossip between outer steps that travel under training or in parts; pass gossip_every=0"
            )

    def describe(self, dtypes: Sequence[torch.dtype]) -> str:
        """What all ranks must agree on: the settings, and the outer optimizer with what it is made with.

        Makes one, of an element of each dtype.

        Args:
            dtypes: of the anchor, see `anchor_dtypes`.

        Raises:
            ValueError: a function of the user's makes no outer optimizer.
        """
        if not dtypes:  # nothing is trained
            return str(self)
        optimizer = made_optimizer(self.make_optimizer, [torch.zeros(1, dtype=dtype, device="cpu") for dtype in dtypes])
        return f"{self}, {described(optimizer)}"

    @property
    def num_fragments(self) -> int:
        """The number of fragments."""
        return self.fragments if isinstance(self.fragments, int) else len(self.fragments)

    def starting_at(self, step: int) -> list[int]:
        """The fragments that take an outer step after so many optimizer steps."""
        firsts = [p * self.sync_every // self.num_fragments for p in range(self.num_fragments)]
        return [p for p, k in enumerate(firsts) if step >= max(k, 1) and (step - k) % self.sync_every == 0]

    def last_start(self, fragment: int, step: int) -> int:
        """After how many optimizer steps, at most `step`, that fragment took its last outer step; 0: none so far."""
        first = fragment * self.sync_every // self.num_fragments or self.sync_every
        return step - (step - first) % self.sync_every if step >= first else 0

    @property
    def max_delay(self) -> int:
        """The longest `delay`."""
        return self.sync_every - 1

    @property
    def kept(self) -> float:
        """alpha: `own_weight`, or what it is where that is None."""
        return (0.5 if self.delay else 0.0) if self.own_weight is None else self.own_weight

    @property
    def is_eager(self) -> bool:
        """Whether phi, and with it x, moves in `start`, before what is sent has been mixed."""
        return False

    @property
    def needs_whole_rounds(self) -> bool:
        """Whether differences of ranks may grow where a round of gossip leaves some of them out, as compressed ones do.

        Asked where it mixes on a graph.
        """
        return False

    @property
    def averages_exactly(self) -> bool:
        """Whether outer steps average over all ranks, rather than mix on a graph."""
        return True

    @property
    def wire_compressor(self) -> Compressor | None:
        """What makes the messages of all ranks, of which `sent` becomes the mean; None: `sent` travels as it is.

        A method that has one averages over all ranks, and calls `Anchor.compress_drift` or `Anchor.compress` in
        `start`. Buffers are averaged exactly all the same.
        """
        return None

    @property
    def gossip_every(self) -> int:
        """The number of steps between rounds of gossip in addition to the outer steps; 0: there are none."""
        return 0

    def default_graph(self, world_size: int) -> GraphManager | None:
        """The graph that outer steps mix on where the user names none; None: the wrapper's own default."""
        return None

    def check(self, mixing: MixingManager) -> None:
        """Raise ValueError when the method is wrong with these weights, doubly stochastic, which it mixes with."""

    @property
    def needs_inner_rate(self) -> bool:
        """Whether `inner_rate` is to be asked."""
        return False

    def inner_rate(self, optimizer: Optimizer) -> float:
        """The learning rate of a step that the model's own optimizer has just taken; `start` finds the last one.

        Args:
            optimizer: holds some of the model's parameters.
        """
        return float(optimizer.param_groups[0]["lr"])

    @abstractmethod
    def make_optimizer(self, parameters: Sequence[Tensor]) -> Optimizer:
        """The outer optimizer.

        Args:
            parameters: the anchor, one flat tensor for each dtype; float32 or wider.
        """

    def start(self, anchor: Anchor, x: Sequence[Tensor]) -> None:
        """anchor.sent <- what is mixed over ranks.

        Args:
            anchor: of this rank; `sent` is written.
            x: the parameters of this rank, flat, as `anchor.parameters`; maybe of narrower dtypes.
        """
        anchor.take_drift(x)

    def finish(self, anchor: Anchor) -> None:
        """anchor.parameters <- those of the next H steps, from what was mixed: `anchor.sent`."""
        anchor.step()

    def _check_optimizer(self, optimizer: MakeOptimizer | None) -> None:
        """Raise ValueError where it is no function, or stands beside rates that the method would make its own with."""
        if optimizer is None:
            return
        name, example = type(self).__name__, "`lambda parameters: torch.optim.Adam(parameters, lr=0.3)`"
        if not callable(optimizer):
            raise ValueError(
                f"{name}: got optimizer={optimizer!r}, expected a function of parameters, such as {example}; the "
                "anchor that it steps is made later"
            )
        rates = {rate: getattr(self, rate) for rate in ("lr", "momentum")}
        if rates != {rate: getattr(type(self), rate) for rate in rates}:
            given = " and ".join(f"{rate}={value}" for rate, value in rates.items())
            raise ValueError(
                f"{name}: got {given} beside an optimizer, expected one or the other; give the rates to the optimizer"
            )

    def _check_rates(self, *, momentum: float, **positive: float) -> None:
        """Raise ValueError where a rate is none."""
        for name, value in positive.items():
            if not (is_number(value) and 0 < value < math.inf):
                raise ValueError(f"{type(self).__name__}: got {name}={value!r}, expected a number above 0")
        if not (is_number(momentum) and 0 <= momentum < 1):
            raise ValueError(
                f"{type(self).__name__}: got momentum={momentum!r}, expected 0 <= momentum < 1; 1 would sum up all "
                "drifts for ever"
            )

    def _check_error_feedback(self, compressor: object, **decays: float) -> None:
        """Raise ValueError where it is no compressor, or a decay of what its messages leave out is none."""
        name = type(self).__name__
        for argument, value in decays.items():
            if not (is_number(value) and 0 <= value <= 1):
                raise ValueError(
                    f"{name}: got {argument}={value!r}, expected 0 <= {argument} <= 1: above 1 what was not sent would "
                    "grow; 1 keeps all of it, and 0.95 is usual for SparseLoCo"
                )
        if not isinstance(compressor, Compressor):
            raise ValueError(
                f"{name}: got compressor={compressor!r}, expected a Compressor; pass e.g. "
                "ChunkTopK(64, values=TwoBit()) to SparseLoCo, and QSGD(4, bucket_size=32, unbiased=True) to DiLoCo"
            )


def is_number(value: object) -> bool:
    """Whether it is one: not a string, None or True."""
    return isinstance(value, Real) and not isinstance(value, bool)
