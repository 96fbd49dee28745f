"""K-GT: gradient tracking with K local steps, each corrected by the difference to the mean gradient."""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass
from typing import ClassVar

from ..checks import checked_integer
from ..registry import Paper
from ..rounds import Memory, Mix, Round, Vectors, is_number
from ..schedule import Schedule
from .gradient_tracking import GradientTracking


@dataclass(frozen=True)
class KGT(GradientTracking):
    """K-GT: K steps along u_i + c_i, then one exchange, which makes c_i the mean step minus the step of this rank.

    With K = `sync_every`, s = `lr`, u_i the step of the optimizer of rank i, and c_i zero at first:

        x_i <- x_i - u_i - c_i                        # in each of K steps, from x_i = phi_i on
        z_i  = (phi_i - x_i) / K                      # after K steps: the mean step
        c_i <- c_i - z_i + sum_j W_ij z_j
        phi_i <- sum_j W_ij (phi_j - s K z_j)         # the next K steps begin here

    At a fixed point c_i cancels the step of rank i: with exact gradients all ranks reach the optimum of the mean of
    their losses, however their data differ, and however many steps lie between two exchanges. Local steps without c, as
    in `LocalSGD`, end beside the optimum. The sum of the c over ranks is zero. An exchange sends two messages to each
    neighbour, one after the other; all other steps send nothing.

    In the notation of the paper u = eta_c g, c here is eta_c times c there, and s = eta_s. The paper begins with c_i =
    mean gradient minus the gradient of the rank; here c starts at zero, and the first exchange makes it so. c is
    scaled when the learning rate changes, as c in `D2`. W must be symmetric and must never change. The default is a
    ring with weights of one third.

    Liu, Lin, Koloskova, Stich, "Decentralized Gradient Tracking with Local Steps", 2023, arXiv 2301.01313, Algorithm 1.

    Args:
        sync_every: K, the number of optimizer steps from one exchange to the next, at least 1.
        lr: s, the share of K steps that an exchange keeps; above 0. 1: x_i <- sum_j W_ij x_j.

    Raises:
        ValueError: an argument is out of its range. When the model is wrapped: the weights are not symmetric, they
            change, or the schedule leaves steps out.

    Example:
        >>> model = GossipDataParallel(model, algorithm=KGT(sync_every=10))
    """

    sync_every: int = 10
    _: KW_ONLY
    lr: float = 1.0

    title: ClassVar[str] = "K-GT"
    summary: ClassVar[str] = "takes local steps, each corrected by the difference to the mean step, and gossips both"
    paper: ClassVar[Paper | None] = Paper(
        "Liu, Lin, Koloskova, Stich",
        "Decentralized Gradient Tracking with Local Steps",
        "2023",
        "2301.01313",
    )
    needs_static_graph: ClassVar[bool] = True

    def __post_init__(self) -> None:
        checked_integer("sync_every", self.sync_every, 1, "pass K, the optimizer steps between two exchanges")
        if not (is_number(self.lr) and 0 < self.lr < math.inf):
            raise ValueError(f"KGT: got lr={self.lr!r}, expected a number above 0; 1 keeps the local steps as they are")

    def check_schedule(self, schedule: Schedule) -> None:
        """See `Algorithm`."""
        if schedule.gossip_every > 1:
            raise ValueError(
                f"got {schedule} with {self}, expected gossip_every=1: each step adds its correction, and sync_every "
                "chooses the steps with messages; leave gossip_every out"
            )

    def is_silent(self, k: int) -> bool:
        """See `Algorithm`."""
        return k % self.sync_every != 0

    def round(self, v: Vectors, m: Memory, k: int) -> Round:
        """See `Algorithm`."""
        phi = m.vector("phi", start="x", average="reset", generation="reset")  # x after the last exchange
        c = m.vector("c", average="reset", generation="reset", in_units_of_rate=True)
        if self.is_silent(k):
            v.x.sub_(c)
            return
        z, sent = m.scratch("z").sum_(phi, v.x, alpha=-1).add_(c), m.scratch()  # K z
        sent.sum_(phi, z, alpha=-self.lr)
        yield Mix(z)
        yield Mix(sent)
        z.sub_(phi).add_(v.x).sub_(c)  # K (W z - z)
        c.add_(z, alpha=1 / self.sync_every)
        phi.set_(sent)
        v.x.set_(sent)
