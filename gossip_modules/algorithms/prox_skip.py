"""ProxSkip: local steps with control variates, and gossip after a step with a fixed probability."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import ClassVar

import numpy as np

from ..checks import checked_seed
from ..mixing_manager.base import MixingManager
from ..mixing_manager.spectra import lowest_eigenvalue
from ..registry import Paper
from ..rounds import Algorithm, Memory, Mix, Round, Vectors, is_number


@dataclass(frozen=True)
class ProxSkip(Algorithm):
    """ProxSkip: each step adds the control variate h_i, and with probability p all ranks gossip after it.

    With p = `probability`, s = `step_size`, u_i the step of the optimizer of rank i, and h_i zero at first:

        y_i  = x_i - u_i + h_i
        with probability p, drawn for all ranks together:
            x_i <- y_i + s (sum_j W_ij y_j - y_i)
            h_i <- h_i + p (x_i - y_i)
        else:
            x_i <- y_i

    At a fixed point h_i = u_i: with exact gradients all ranks reach the optimum of the mean of their losses, however
    their data differ. On a complete graph, with kappa the condition number of the losses, p = 1 / sqrt(kappa) takes as
    many steps as p = 1 in the bound of the paper, so ranks send 1 / sqrt(kappa) of the messages. Sparse graphs need a
    larger p. The sum of the h over ranks is zero.

    With s = 1 on a complete graph this is Scaffnew, the method for an exact average. With p = 1 it is `D2` for s = 1,
    and `ExactDiffusion` for s = 1/2. All eigenvalues of I + s (W - I) must be at least 0, as in the proof; with s = 1/2
    that holds for every W. In the notation of the paper u = gamma g, h here is gamma h there, and s = gamma tau / p.

    h is scaled when the learning rate changes, as c in `D2`. W must be symmetric and must never change. The default
    is a ring with weights of one third.

    Mishchenko, Malinovsky, Stich, Richtarik, "ProxSkip: Yes! Local Gradient Steps Provably Lead to Communication
    Acceleration! Finally!", ICML 2022, arXiv 2202.09357, Algorithm 2, and its variant for decentralised training.

    Args:
        probability: p, the share of the steps with a round of gossip; 0 < p <= 1.
        step_size: s, how far a round goes; 0 < s <= 1.
        seed: the seed of the draws of steps, equal on all ranks.

    Raises:
        ValueError: an argument is out of its range; (when the model is wrapped) the weights are not symmetric, they
            change, or I + s (W - I) has a negative eigenvalue.

    Example:
        >>> model = GossipDataParallel(model, algorithm=ProxSkip(probability=0.1))
    """

    probability: float = 0.1
    _: KW_ONLY
    step_size: float = 0.5
    seed: int = 0

    summary: ClassVar[str] = "takes local steps with control variates, and gossips after a random share of them"
    paper: ClassVar[Paper | None] = Paper(
        "Mishchenko, Malinovsky, Stich, Richtarik",
        "ProxSkip: Yes! Local Gradient Steps Provably Lead to Communication Acceleration! Finally!",
        "ICML 2022",
        "2202.09357",
    )
    needs_current: ClassVar[bool] = True
    needs_whole_rounds: ClassVar[bool] = True
    is_skippable: ClassVar[bool] = False  # the sum of the h over ranks is zero
    needs_static_graph: ClassVar[bool] = True
    follows_rate: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for name, value in (("probability", self.probability), ("step_size", self.step_size)):
            if not (is_number(value) and 0 < value <= 1):
                raise ValueError(
                    f"ProxSkip: got {name}={value!r}, expected 0 < {name} <= 1; probability=1 gossips after each step, "
                    "and step_size=0.5 fits every undirected graph"
                )
        checked_seed(self.seed)

    def check(self, mixing: MixingManager) -> None:
        """See `Algorithm`; checks the eigenvalues for up to 1,024 ranks."""
        super().check(mixing)
        lowest = lowest_eigenvalue(mixing)
        if lowest is not None and self.step_size * (1 - lowest) > 1 + 1e-6:
            raise ValueError(
                f"ProxSkip: got step_size={self.step_size} and {mixing} with an eigenvalue of {lowest:.4g}, expected "
                f"step_size <= {1 / (1 - lowest):.4g}, so that no eigenvalue of I + step_size (W - I) is negative; "
                "take step_size=0.5"
            )

    def is_silent(self, k: int) -> bool:
        """See `Algorithm`."""
        return bool(np.random.default_rng((self.seed, k)).random() >= self.probability)

    def round(self, v: Vectors, m: Memory, k: int) -> Round:
        """See `Algorithm`."""
        h = m.vector("h", average="reset", generation="reset", in_units_of_rate=True)
        if self.is_silent(k):
            v.x.add_(h)
            return
        sent, y = m.scratch(), m.scratch("y").sum_(v.x, h)
        yield Mix(sent.set_(y))
        sent.sub_(y).mul_(self.step_size)  # s (W y - y)
        h.add_(sent, alpha=self.probability)
        v.x.set_(y.add_(sent))
