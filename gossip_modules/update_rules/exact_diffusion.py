"""Exact diffusion: D2 with (I + W) / 2, on every undirected graph."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..graph_manager.named_graphs import undirected_ring
from ..mixing_manager.base import MetropolisHastingsMixing, MixingManager
from .carried import Carried
from .rule import UpdateRule
from .sgd_momentum import SGDStep


@dataclass(frozen=True)
class ExactDiffusion(UpdateRule):
    """Exact diffusion: each rank adapts, corrects what its adaptation repeats, and combines.

    In a round on rank i, where psi_i = x_i - u_i is what its optimizer has left:

        phi_i = psi_i + x_i - psi'_i              # psi': that of the round before; phi = psi in the first one
        x_i   = phi_i / 2 + sum_j W_ij phi_j / 2

    It is `D2` with (I + W) / 2 in the place of W, whose eigenvalues are never below 0: so it has D2's limit, the
    optimum of the mean of all losses, without its condition on the eigenvalues, and agrees about half as fast.

    x_i - psi'_i is scaled where the learning rate changes, as the c of D2. Without graph and mixing, ranks form a ring
    with weights of one third.

    Yuan, Ying, Zhao, Sayed, "Exact Diffusion for Distributed Optimization and Learning - Part I: Algorithm
    Development", IEEE Transactions on Signal Processing 2019, arXiv 1702.05122, Algorithm 1.

    Raises:
        ValueError: (when the model is wrapped) weights that are not symmetric, or that change.

    Example:
        >>> model = GossipDataParallel(model, rule=ExactDiffusion())
    """

    vectors = ("c",)  # x - psi'
    scales_with_rate = ("c",)
    needs_static_graph = True
    keeps_sums = True  # that of the c is zero

    def default_mixing(self, world_size: int) -> MixingManager:
        """See `UpdateRule`."""
        return MetropolisHastingsMixing(undirected_ring(world_size))

    def round(self, v: Carried, mix: Callable[[], None], step: SGDStep | None) -> None:
        """See `UpdateRule`."""
        for psi, phi, c in v.each("c"):
            torch.add(psi, c, out=phi)
        mix()
        for psi, x, c in v.each("c"):
            x.add_(psi).add_(c).div_(2)
            torch.sub(x, psi, out=c)
