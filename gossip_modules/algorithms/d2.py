"""D2: D-PSGD that adds the changes of earlier rounds, so that uneven data leaves no bias."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..graph_manager.named_graphs import undirected_ring
from ..mixing_manager import LaplacianMixing
from ..mixing_manager.base import MetropolisHastingsMixing, MixingManager
from ..mixing_manager.spectra import lowest_eigenvalue
from ..registry import Paper
from ..rounds import Algorithm, Memory, Mix, Round, Vectors

_LIMIT = -1 / 3


@dataclass(frozen=True)
class D2(Algorithm):
    """D2: x(t+1) = W (2 x(t) - x(t-1) - u(t) + u(t-1)), where u is the step of this rank's optimizer; x(1) = W (x - u).

    In a round on rank i, where h_i is the model after the optimizer step, and c_i is zero at first:

        x_i = sum_j W_ij (h_j + c_j)
        c_i = x_i - h_i

    c_i is the sum of the changes by earlier rounds, x(t) - x(t-1) + u(t-1). At a fixed point W c = c - u, so c cancels
    the step of each rank: with exact gradients all ranks reach the optimum of the mean of their losses, however their
    data differ. The mean of the models moves by the mean of the steps. u is the step of any optimizer. With SGD u is lr
    times the gradient, as in the paper. With momentum the limit is the same. With an optimizer that scales gradients,
    such as Adam, the mean of the scaled gradients is zero in the limit.

    c is proportional to the learning rate. When the rate changes, on all ranks alike, c is scaled by the ratio of the
    new rate to the old rate before the round: see [Note: Units of the learning rate] of `RateUnits`. The paper has a
    constant rate.

    W must be symmetric, must never change, and all its eigenvalues must be above -1/3. Otherwise differences between
    ranks do not vanish. A ring of even size with weights of one third has the eigenvalue -1/3. The default is a ring:
    with weights of one third for an odd number of ranks, else with 1/2 for the rank itself and 1/4 for each neighbour.
    `ExactDiffusion` has no condition on eigenvalues.

    Tang, Lian, Yan, Zhang, Liu, "D2: Decentralized Training over Decentralized Data", ICML 2018, arXiv 1803.07068,
    Algorithm 1.

    Raises:
        ValueError: (when the model is wrapped) the weights are not symmetric, they change, or they have an eigenvalue
            of -1/3 or less.

    Example:
        >>> model = GossipDataParallel(model, algorithm=D2())
    """

    summary: ClassVar[str] = "gossips, and adds the changes of earlier rounds, so that uneven data leaves no bias"
    paper: ClassVar[Paper | None] = Paper(
        "Tang, Lian, Yan, Zhang, Liu", "D2: Decentralized Training over Decentralized Data", "ICML 2018", "1803.07068"
    )
    needs_current: ClassVar[bool] = True
    needs_whole_rounds: ClassVar[bool] = True
    is_skippable: ClassVar[bool] = False  # the sum of the c over ranks is zero
    needs_static_graph: ClassVar[bool] = True
    follows_rate: ClassVar[bool] = True

    def default_mixing(self, world_size: int) -> MixingManager:
        """See `Algorithm`."""
        ring = undirected_ring(world_size)
        mixing = MetropolisHastingsMixing(ring)
        if world_size == 2 or world_size % 2:
            return mixing
        return LaplacianMixing(ring, alpha=0.25)

    def check(self, mixing: MixingManager) -> None:
        """See `Algorithm`; checks the eigenvalues for up to 1,024 ranks."""
        super().check(mixing)
        lowest = lowest_eigenvalue(mixing)
        if lowest is not None and lowest <= _LIMIT + 1e-9:
            raise ValueError(
                f"D2: got {mixing} with an eigenvalue of {lowest:.4g}, expected all above -1/3: the differences "
                "between ranks would not die out; take ExactDiffusion(), which mixes with (I + W) / 2, or "
                "mixing=lambda graph: LaplacianMixing(graph, alpha=a) with a below 4/3 over the largest eigenvalue of "
                "the Laplacian, on a ring 0.25; or, over another algorithm, a smaller step_size there"
            )

    def round(self, v: Vectors, m: Memory, k: int) -> Round:
        """See `Algorithm`."""
        c = m.vector("c", average="reset", generation="reset", in_units_of_rate=True)
        sent = m.scratch().sum_(v.x, c)  # h + c
        yield Mix(sent)
        c.sum_(sent, v.x, alpha=-1)  # x - h
        v.x.set_(sent)
