"""EXTRA: D-PSGD that combines before it steps, and subtracts the sum of all earlier disagreements."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..registry import Paper
from ..rounds import Algorithm, Memory, Mix, Round, Vectors


@dataclass(frozen=True)
class EXTRA(Algorithm):
    """EXTRA: x(t+1) = (I + W) x(t) - (I + W) / 2 x(t-1) - u(t) + u(t-1), where u is the optimizer's step.

    In a round on rank i, where h_i = x_i - u_i is the model after the optimizer step, and p_i is zero at first:

        z_i = sum_j W_ij x_j              # x: before the optimizer step
        x_i <- h_i + (z_i - x_i) - p_i
        p_i <- p_i + (x_i - z_i) / 2      # x and z as in the first line

    These lines are the recursion of the paper, summed over rounds. At a fixed point the ranks agree, and p cancels the
    step of each rank: with exact gradients all ranks reach the optimum of the mean of their losses, however their data
    differ. The sum of the p over ranks is zero, so the mean of the models moves by the mean of the steps.

    `ExactDiffusion` adapts before it combines, and so takes larger learning rates.

    p is in units of the learning rate. When the rate changes, on all ranks alike, p is scaled by the ratio of the new
    rate to the old rate before the round: see [Note: Units of the learning rate] of `RateUnits`. W must be symmetric
    and must never change. The default is a ring with weights of one third.

    Shi, Ling, Wu, Yin, "EXTRA: An Exact First-Order Algorithm for Decentralized Consensus Optimization", SIAM Journal
    on Optimization 2015, arXiv 1404.6264, equation 2.13 with (I + W) / 2 as the second matrix.

    Raises:
        ValueError: (when the model is wrapped) the weights are not symmetric, or they change.

    Example:
        >>> model = GossipDataParallel(model, algorithm=EXTRA())
    """

    summary: ClassVar[str] = "combines models of before the step, and subtracts the sum of earlier disagreements"
    paper: ClassVar[Paper | None] = Paper(
        "Shi, Ling, Wu, Yin",
        "EXTRA: An Exact First-Order Algorithm for Decentralized Consensus Optimization",
        "SIAM Journal on Optimization 2015",
        "1404.6264",
    )
    needs_current: ClassVar[bool] = True
    needs_whole_rounds: ClassVar[bool] = True
    is_skippable: ClassVar[bool] = False  # the sum of the p over ranks is zero
    needs_static_graph: ClassVar[bool] = True
    follows_rate: ClassVar[bool] = True

    def round(self, v: Vectors, m: Memory, k: int) -> Round:
        """See `Algorithm`."""
        last = m.vector("last", start="x", average="reset", generation="reset")  # x after the last round
        p = m.vector("p", average="reset", generation="reset", in_units_of_rate=True)
        sent = m.scratch().set_(last)
        yield Mix(sent)  # z
        sent.sub_(last)  # z - x
        last.sum_(sent, p, alpha=-1).add_(v.x)
        p.sub_(sent, alpha=0.5)
        v.x.set_(last)
