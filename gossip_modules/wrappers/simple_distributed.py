"""SimpleGossipDataParallel: SGP and D-PSGD by blocking rounds, no stream, no thread."""

from __future__ import annotations

from ..engine.engine import LockstepEngine, SyncEngine
from ..gossip.gossiper import Gossiper
from ..schedule import Schedule
from .lockstep_wrapper import LockstepWrapper


class SimpleGossipDataParallel(LockstepWrapper):
    """x_i <- sum_j W_ij(t) x_j before every training forward, in the training thread.

    The same arithmetic as `GossipDataParallel(overlap=False)` with nothing to configure but graph and weights; what
    to read first, and what to use where threads are unwelcome. Arguments: see `LockstepWrapper`.

    Assran et al., "Stochastic Gradient Push for Distributed Deep Learning", ICML 2019, arXiv 1811.10792, Algorithm 1;
    Lian et al., "Can Decentralized Algorithms Outperform Centralized Algorithms?", NeurIPS 2017, arXiv 1705.09056.

    Example:
        >>> model = SimpleGossipDataParallel(nn.Linear(10, 2), push_sum=False)
        >>> model(torch.randn(4, 10)).sum().backward()  # gossips, then computes
    """

    def _make_engine(self, gossiper: Gossiper, schedule: Schedule) -> LockstepEngine:
        return SyncEngine(gossiper, schedule, on_nonfinite=self._on_nonfinite)
