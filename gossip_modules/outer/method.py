"""OuterMethod: what ranks do every H steps with where training has taken them; a method writes a step on an anchor."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass

from torch import Tensor
from torch.optim import Optimizer

from ..graph_manager.base import GraphManager
from .anchor import Anchor


@dataclass(frozen=True)
class OuterMethod(ABC):
    """What happens every `sync_every` optimizer steps: the models x of the ranks move an anchor phi, and x <- phi.

    The anchor is where the ranks last began. How far a rank has come from there, its *drift* phi - x, is mixed over
    ranks, and serves an optimizer, the outer one, as the gradient of the anchor. An outer step of a rank:

        start(anchor, x):   sent = phi - x                   # the drift of this rank
                            sent <- its average over ranks, or W(t) of it
        finish(anchor):     phi <- step of the outer optimizer, with the gradient `sent`
                            x <- phi

    Those are the defaults; a method overrides what it does otherwise. It holds settings only, so that one object may
    serve several wrappers: what a rank remembers is in its `Anchor`.

    Args:
        sync_every: H, the number of optimizer steps from one outer step to the next, at least 1.

    Raises:
        ValueError: `sync_every` is no whole number of at least 1.
    """

    sync_every: int
    _: KW_ONLY

    def __post_init__(self) -> None:
        if isinstance(self.sync_every, bool) or not isinstance(self.sync_every, int) or self.sync_every < 1:
            raise ValueError(
                f"{type(self).__name__}: got sync_every={self.sync_every!r}, expected a whole number of at least 1, "
                "the optimizer steps between two outer steps; 30 to 500 are usual"
            )

    @property
    def averages_exactly(self) -> bool:
        """Whether outer steps average over all ranks, rather than mix on a graph."""
        return True

    @property
    def gossip_every(self) -> int:
        """The number of steps between rounds of gossip in addition to the outer steps; 0: there are none."""
        return 0

    def default_graph(self, world_size: int) -> GraphManager | None:
        """The graph that outer steps mix on where the user names none; None: the wrapper's own default."""
        return None

    def check(self, graph: GraphManager, matrix: Callable[[int], Tensor]) -> None:
        """Raise ValueError when the method is wrong with the weights that it mixes with.

        Args:
            graph: who mixes with whom.
            matrix: W(t) of round t, [n, n].
        """

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

    def _check_rates(self, *, momentum: float, **positive: float) -> None:
        """Raise ValueError where a rate is none."""
        for name, value in positive.items():
            if not 0 < value < math.inf:
                raise ValueError(f"{type(self).__name__}: got {name}={value!r}, expected a number above 0")
        if not 0 <= momentum < 1:
            raise ValueError(
                f"{type(self).__name__}: got momentum={momentum!r}, expected 0 <= momentum < 1; 1 would sum up all "
                "drifts for ever"
            )
