"""Exact diffusion: D2 with (I + W) / 2, on every undirected graph."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..registry import Paper
from ..rounds import Algorithm, Memory, Mix, Round, Vectors


@dataclass(frozen=True)
class ExactDiffusion(Algorithm):
    """Exact diffusion: each rank adapts, corrects the part that its adaptation repeats, and combines.

    In a round on rank i, where psi_i = x_i - u_i is the model after the optimizer step:

        phi_i = psi_i + x_i - psi'_i              # psi': psi of the round before; phi = psi in the first round
        x_i   = phi_i / 2 + sum_j W_ij phi_j / 2

    The law is `D2` with (I + W) / 2 in place of W. Its eigenvalues are never below 0, so exact diffusion needs no
    condition on them. It has the limit of D2, the optimum of the mean of all losses, and agrees about half as fast.

    Without a proximal operator and with one step size, NIDS has the same recursion (Li, Shi, Yan, "A Decentralized
    Proximal-Gradient Method with Network Independent Step-Sizes and Separated Convergence Rates", IEEE Transactions on
    Signal Processing 2019, arXiv 1704.07807); only its first step does not mix.

    x_i - psi'_i is scaled when the learning rate changes, as c in D2. The default is a ring with weights of one third.

    Yuan, Ying, Zhao, Sayed, "Exact Diffusion for Distributed Optimization and Learning - Part I: Algorithm
    Development", IEEE Transactions on Signal Processing 2019, arXiv 1702.05122, Algorithm 1.

    Raises:
        ValueError: (when the model is wrapped) the weights are not symmetric, or they change.

    Example:
        >>> model = GossipDataParallel(model, algorithm=ExactDiffusion())
    """

    title: ClassVar[str] = "Exact diffusion"
    summary: ClassVar[str] = "is D2 with (I + W) / 2, on every undirected graph"
    paper: ClassVar[Paper | None] = Paper(
        "Yuan, Ying, Zhao, Sayed",
        "Exact Diffusion for Distributed Optimization and Learning - Part I: Algorithm Development",
        "IEEE Transactions on Signal Processing 2019",
        "1702.05122",
    )
    needs_current: ClassVar[bool] = True
    needs_whole_rounds: ClassVar[bool] = True
    is_skippable: ClassVar[bool] = False  # the sum of the c over ranks is zero
    needs_static_graph: ClassVar[bool] = True
    follows_rate: ClassVar[bool] = True

    def round(self, v: Vectors, m: Memory, k: int) -> Round:
        """See `Algorithm`."""
        c = m.vector("c", average="reset", generation="reset", in_units_of_rate=True)  # x - psi'
        sent = m.scratch().sum_(v.x, c)  # phi
        yield Mix(sent)
        sent.add_(v.x).add_(c).div_(2)  # (phi + W phi) / 2
        c.sum_(sent, v.x, alpha=-1)
        v.x.set_(sent)
