"""UpdateRule: what a round makes of the steps that each rank has taken on its own data; a method writes one round."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch

from ..mixing_manager.base import MixingManager
from .carried import Carried
from .sgd_momentum import SGDStep

_MAX_CHECKED_RANKS = 1024


@dataclass(frozen=True)
class UpdateRule(ABC):
    """How a round turns the models that the ranks' optimizers have left into the next ones.

    D-PSGD mixes them: x <- W h, where h = x - u is the model after the step u of this rank's optimizer. Where ranks
    have different data their steps differ for ever, and the models settle beside the optimum. The rules of this package
    carry vectors from round to round that make up for it:

        h = x - u                        # the user's optimizer, between two rounds
        x <- round(h, what is carried)   # one or several mixings `sent <- W(t) sent`

    A rule holds settings only, so that one object may serve several wrappers: what a rank remembers is in `Carried`.

    Attributes:
        vectors: the names of the vectors that are carried, each as long as the model; zero at first.
        scales_with_rate: the names of those that are made of steps, and so are in units of the learning rate. Before a
            round they are scaled to the rate of the steps since the last one: see `Carried`.
        needs_sgd: whether the rule reads and writes the momentum of the user's optimizer, which must be
            `torch.optim.SGD` then. Other rules work with any optimizer.
        takes_nesterov: whether that may have nesterov=True.
        needs_gradients: with `needs_sgd`, whether a parameter without a gradient must be stepped by its momentum too,
            which SGD does not; its gradient becomes zero then.
        needs_static_graph: whether the weights must be symmetric, and must never change.
        keeps_sums: whether the law holds only while what is carried has a certain sum over ranks, so that it begins
            anew where workers die or join.
    """

    vectors: ClassVar[tuple[str, ...]] = ()
    scales_with_rate: ClassVar[tuple[str, ...]] = ()
    needs_sgd: ClassVar[bool] = False
    takes_nesterov: ClassVar[bool] = True
    needs_gradients: ClassVar[bool] = False
    needs_static_graph: ClassVar[bool] = False
    keeps_sums: ClassVar[bool] = False

    def default_mixing(self, world_size: int) -> MixingManager | None:
        """The weights where the user names neither graph nor weights; None: those of D-PSGD."""
        return None

    def check(self, mixing: MixingManager) -> None:
        """Raise ValueError when the rule is wrong with these weights."""
        name = type(self).__name__
        if not mixing.is_doubly_stochastic:
            raise ValueError(
                f"{name}: got {mixing}, expected doubly stochastic weights, which keep the mean of all models; use an "
                "undirected graph, such as RingGraph(n, peers_per_itr=2), without mixing="
            )
        if not self.needs_static_graph:
            return
        if not (mixing.graph.is_symmetric and mixing.is_symmetric):
            raise ValueError(
                f"{name}: got {mixing}, expected symmetric weights on an undirected graph; take "
                "RingGraph(n, peers_per_itr=2), a torus or a hypercube with all neighbours, or QGDSGDm or "
                "GradientTracking, which need doubly stochastic weights only"
            )
        if mixing.graph.is_dynamic or mixing.period != 1:
            raise ValueError(
                f"{name}: got {mixing} of period {mixing.period}, expected a graph that never changes, since what it "
                "carries is a sum over rounds with the same weights; take a ring with peers_per_itr=2, or QGDSGDm or "
                "GradientTracking on this graph"
            )

    def check_step(self, mixing: MixingManager, step: SGDStep) -> None:
        """Raise ValueError when the rule is wrong with these weights and the rates of the first step of SGD."""

    @abstractmethod
    def round(self, v: Carried, mix: Callable[[], None], step: SGDStep | None) -> None:
        """One round of this rank: `sent` <- the parameters of the next step.

        Args:
            v: `x`, what the optimizer has left, which must not be changed; `sent`, the vector that is mixed; and the
                vectors that are carried.
            mix: sent <- W(t) sent, a message to each peer; may be called several times, as often on all ranks.
            step: the rates of the step of SGD since the last round, where the rule `needs_sgd`; None: there was none,
                as before the first round.
        """


def lowest_eigenvalue(mixing: MixingManager) -> float | None:
    """Of weights that are symmetric and never change; None for a world too large to look, or without weights."""
    if not 1 < mixing.graph.world_size <= _MAX_CHECKED_RANKS:
        return None
    return float(torch.linalg.eigvalsh(mixing.matrix(0).double())[0])
