"""Composed: what follows of an algorithm and of the mixer that answers its `Mix`, whatever runs its rounds."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..flat.vector import FlatVector
from ..graph_manager.base import GraphManager
from ..mixing_manager.base import MixingManager
from ..mixing_manager.relaxed import RelaxedMixing
from .algorithm import Algorithm
from .mixer import Mixer


class Composed(Mixer):
    """A mixer whose rounds are those of an algorithm over another mixer.

    Args:
        algorithm: what a round does.
        mixer: answers `Mix`.
    """

    def __init__(self, algorithm: Algorithm, mixer: Mixer) -> None:
        self.algorithm, self.mixer = algorithm, mixer
        self._k = self._t = 0  # the optimizer steps before the round, and its number

    def check(self, mixing: MixingManager) -> None:
        """See `Mixer`."""
        self.mixer.check(mixing)
        own, inner = self.algorithm, self.mixer
        if own.averages_exactly and own.mixes and inner.keeps_models:
            raise ValueError(
                f"got {inner} between the exact averages of {own}, expected an algorithm that keeps no models of "
                "peers: it would relay those from before an average, and undo it; leave it out, or pass gossip_every=0"
            )
        if own.needs_whole_rounds and not (inner.is_whole or inner.keeps_models):
            raise ValueError(
                f"got {inner} with {own}, expected plain gossip: its memory repeats what a round has changed, and "
                "differences that compressed rounds leave out may grow by it from round to round; leave the inner "
                "algorithm out. NoLoCo and GASLoC: or pass momentum=0 (NoLoCo: and pull <= 1), take "
                "GASLoC(optimizer=...), or compress exact averages: SparseLoCo(). An algorithm of your own that leaves "
                "nothing out says so by is_whole = True"
            )
        own.check(self._relaxed(mixing))

    def _relaxed(self, mixing: MixingManager) -> MixingManager:
        """About what answers to `Mix` are made by."""
        step_size = self.mixer.algorithm.step_size_on(mixing) if isinstance(self.mixer, Composed) else 1.0
        return mixing if step_size == 1.0 else RelaxedMixing(mixing, step_size)

    @property
    def is_weighted(self) -> bool:
        """See `Mixer`."""
        return self.mixer.is_weighted

    @property
    def keeps_models(self) -> bool:  # type: ignore[override]
        """See `Mixer`."""
        return self.algorithm.keeps_models or self.mixer.keeps_models

    @property
    def is_skippable(self) -> bool:  # type: ignore[override]
        """See `Mixer`."""
        return self.algorithm.is_skippable and self.mixer.is_skippable and not self.can_recover

    @property
    def is_whole(self) -> bool:  # type: ignore[override]
        """See `Mixer`."""
        return self.algorithm.is_whole and self.mixer.is_whole

    @property
    def can_recover(self) -> bool:  # type: ignore[override]
        """See `Mixer`."""
        return self.algorithm.can_recover

    @property
    def needs_symmetric_weights(self) -> bool:  # type: ignore[override]
        """See `Mixer`."""
        return (
            self.algorithm.needs_symmetric_weights
            or self.algorithm.needs_static_graph
            or self.mixer.needs_symmetric_weights
        )

    def default_graph(self, world_size: int) -> GraphManager | None:
        """See `Mixer`."""
        return self.algorithm.default_graph(world_size) or self.mixer.default_graph(world_size)

    def default_mixing(self, world_size: int) -> MixingManager | None:
        """See `Mixer`."""
        return self.algorithm.default_mixing(world_size) or self.mixer.default_mixing(world_size)

    def is_due(self, k: int) -> bool:
        """See `Mixer`."""
        if self.algorithm.is_due(k):
            self._k = k
            return True
        return False

    def start(self, s: FlatVector, t: int) -> None:
        """See `Mixer`; the round itself runs in `finish` or `difference`."""
        self._t = t

    def describe(self, dtypes: Sequence[torch.dtype]) -> str:
        """What all ranks must agree on. dtypes: of the parameters, in float32 at least."""
        inner = f".over({self.mixer.describe(dtypes)})" if isinstance(self.mixer, Composed) else f" by {self.mixer}"
        return f"{self.algorithm.describe(dtypes)}{inner if self.algorithm.mixes else ''}"

    def __repr__(self) -> str:
        inner = f".over({self.mixer!r})" if isinstance(self.mixer, Composed) else ""
        return f"{self.algorithm!r}{inner}"
