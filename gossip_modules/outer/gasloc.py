"""GASLoC: DiLoCo by gossip, where the momentum is mixed along with the parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..graph_manager.named_graphs import undirected_ring
from ..graph_manager.static_graphs import RingGraph
from ..mixing_manager.base import MixingManager
from ..mixing_manager.growth import blocks, check_growth, identity_like
from .anchor import Anchor
from .method import OuterMethod
from .optimizer import MakeOptimizer


@dataclass(frozen=True)
class GASLoC(OuterMethod):
    """GASLoC: H steps alone, an outer step of each rank by itself, and one round of gossip of the result.

    Every `sync_every` = H optimizer steps, with c = `lr`, g = `momentum`, alpha = `step_size`, W(t) the weights of the
    wrapper's graph and L = I - W(t):

        y_i   <- phi_i + c (x_i - phi_i)
        e_i   <- y_i + g (y_i - y'_i)                        # y': y of the outer step before; at first phi
        phi_i <- e_i + alpha (sum_j W_ij(t) e_j - e_i)       # (I - alpha L) e
        x_i   <- phi_i

    The extrapolation e is mixed as a whole, momentum and all: so ranks do not disagree for ever, and with alpha = 1 on
    a complete graph this is `DiLoCo` with the same rates. On an undirected graph that never changes, differences of the
    ranks die out where all eigenvalues of I - alpha L are above -1 / (1 + 2 g); with alpha = 1/2 none is below 0. On
    directed graphs, and on those that change, the momentum may let differences grow with any alpha: so with the rates
    given here on pairs at exponential distances of 10 ranks, or on `BaseGraph(11)`. Such weights are refused, in worlds
    of up to 128 ranks (1,024 where the graph never changes). Without graph and mixing, ranks form a ring.

    Cagnasso, Belilovsky, Oyallon, "Unifying Local Communications and Local Updates for LLM Pretraining", 2026, arXiv
    2606.11081. The law is given here as secondary sources have it; some add the momentum unmixed.

    Args:
        sync_every: H, the number of optimizer steps from one outer step to the next.
        lr: c, the outer learning rate.
        momentum: g, the outer momentum; 0 <= g < 1.
        step_size: alpha, how far a round goes; 0 < alpha <= 1.
        optimizer: another outer optimizer, in place of lr and momentum, as of `DiLoCo`: it steps the anchor of each
            rank with that rank's own drift as gradient, e_i <- step(phi_i, phi_i - x_i), and e is mixed. What it
            remembers, such as a momentum, stays on its rank. Whether differences of ranks grow is not looked at then:
            with x <- phi, that is without a delay and an own_weight, they cannot on account of the rounds, as a drift
            has nothing of them.

    Raises:
        ValueError: a rate out of range, or rates beside an optimizer; weights on which differences of ranks would grow;
            (when the model is wrapped) with a momentum, a gossiper that compresses.

    Example:
        >>> model = GossipDataParallel(model, outer=GASLoC(sync_every=50), graph=RingGraph(8, peers_per_itr=2))
    """

    sync_every: int = 30
    _: KW_ONLY
    lr: float = 0.7
    momentum: float = 0.9
    step_size: float = 0.5
    optimizer: MakeOptimizer | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_rates(lr=self.lr, momentum=self.momentum, step_size=self.step_size)
        if self.step_size > 1:
            raise ValueError(f"GASLoC: got step_size={self.step_size!r}, expected at most 1, a whole round of gossip")

        self._check_optimizer(self.optimizer)

    @property
    def averages_exactly(self) -> bool:
        """See `OuterMethod`."""
        return False

    @property
    def needs_whole_rounds(self) -> bool:
        """See `OuterMethod`: y - y' has what the last round has changed."""
        return self.optimizer is None and self.momentum > 0

    def default_graph(self, world_size: int) -> RingGraph:
        """See `OuterMethod`: the ring with both neighbours, on which differences die out in every world."""
        return undirected_ring(world_size)

    def check(self, mixing: MixingManager) -> None:
        """See `OuterMethod` and `growth`. Of an optimizer of the user's the law is not known."""
        if self.optimizer is not None:
            return
        rates = {"step_size": self.step_size, "momentum": self.momentum}
        if self.kept:
            rates |= {"lr": self.lr, "own_weight": self.kept}
        check_growth("GASLoC", rates, mixing, self._law, step="outer step", remedy="a smaller momentum")

    def _law(self, w: Tensor) -> Tensor:
        """(phi, y, x) <- itself in an outer step, without drift; without x where it becomes phi."""
        c, g, kept, one = self.lr, self.momentum, self.kept, identity_like(w)
        a = (1 - self.step_size) * one + self.step_size * w
        if not kept:
            return blocks([[(1 + g) * a, -g * a], [one, 0 * one]])
        phi = [(1 + g) * (1 - c) * a, -g * a, (1 + g) * c * a]
        x = [(1 - kept) * part for part in phi]
        return blocks([phi, [(1 - c) * one, 0 * one, c * one], [*x[:2], x[2] + kept * one]])

    def make_optimizer(self, parameters: Sequence[Tensor]) -> Optimizer:
        """See `OuterMethod`."""
        if self.optimizer is not None:
            return self.optimizer(parameters)
        return Extrapolation(parameters, lr=self.lr, momentum=self.momentum)

    def start(self, anchor: Anchor, x: Sequence[Tensor]) -> None:
        """See `OuterMethod`: the outer step of this rank comes first, and its result is mixed."""
        anchor.take_drift(x)
        anchor.step()
        for sent, phi in zip(anchor.gradients, anchor.parameters, strict=True):
            sent.copy_(phi)

    def finish(self, anchor: Anchor) -> None:
        """See `OuterMethod`."""
        for phi, mixed in zip(anchor.parameters, anchor.gradients, strict=True):
            phi.lerp_(mixed, self.step_size)


class Extrapolation(Optimizer):
    """y <- phi - c D;  phi <- y + g (y - y'), where D is the gradient and y' the y of the step before, at first phi.

    Args:
        params: phi.
        lr: c.
        momentum: g.
    """

    def __init__(self, params: Any, *, lr: float, momentum: float) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """See `torch.optim.Optimizer`; without a closure."""
        for group in self.param_groups:
            for phi in group["params"]:
                if phi.grad is None:
                    continue
                state = self.state[phi]
                if not state:
                    state["y"] = phi.clone()
                y = phi.add_(phi.grad, alpha=-group["lr"])
                change = y - state["y"]
                state["y"].copy_(y)
                phi.add_(change, alpha=group["momentum"])
