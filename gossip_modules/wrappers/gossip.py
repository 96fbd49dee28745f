"""GossipDataParallel: SGP, Overlap SGP and D-PSGD as a wrapper that is used like DistributedDataParallel."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

from ..engine.engine import LockstepEngine, SyncEngine
from ..engine.overlap import OverlapEngine
from ..gossip.gossiper import Gossiper
from ..graph_manager.base import GraphManager
from ..mixing_manager.base import MixingManager
from ..schedule import Schedule
from ..transport.process_group import DEFAULT_TIMEOUT
from .lockstep_wrapper import DEFAULT_SCHEDULE, LockstepWrapper


class GossipDataParallel(LockstepWrapper):
    """Data-parallel training by gossip: x_i <- sum_j W_ij(t) x_j with a few peers, where DDP averages over all.

    One training forward is one round; the optimizer, its state and the loop are the user's own.

    | method       | arguments                                                     |
    |--------------|---------------------------------------------------------------|
    | SGP          | (the defaults)                                                |
    | Overlap SGP  | overlap=True, and max_staleness=tau - 1 for tau > 1           |
    | D-PSGD       | push_sum=False                                                |
    | Gossip-PGA   | schedule=Schedule(average_every=H)                            |
    | MATCHA       | graph=MatchaGraph(base, budget=0.5)                           |
    | PowerGossip  | gossiper=PowerGossip(), or Choco, DeepSqueeze, Moniqua        |

    Assran et al., "Stochastic Gradient Push for Distributed Deep Learning", ICML 2019, arXiv 1811.10792, Algorithms 1
    and 2; Lian et al., "Can Decentralized Algorithms Outperform Centralized Algorithms?", NeurIPS 2017, arXiv
    1705.09056, Algorithm 1.

    Args:
        overlap: run each round under the next forward and backward, on a thread of its own, instead of before it.
            Costs a second copy of the model.
        max_staleness: with overlap, forwards that a round may be late before training waits for it; rounds then
            start every max_staleness + 1 steps.
        module, graph, ...: see `LockstepWrapper`, also for what is raised.

    Example:
        >>> model = GossipDataParallel(model)  # was: DistributedDataParallel(model)
        >>> for x, y in loader:
        ...     loss = criterion(model(x), y)  # gossips, then computes
        ...     optimizer.zero_grad()
        ...     loss.backward()
        ...     optimizer.step()
        >>> with model.averaged():
        ...     evaluate(model)
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        graph: GraphManager | None = None,
        mixing: MixingManager | None = None,
        push_sum: bool = True,
        overlap: bool = False,
        max_staleness: int = 0,
        gossiper: Gossiper | None = None,
        wire_dtype: torch.dtype | None = None,
        schedule: Schedule = DEFAULT_SCHEDULE,
        process_group: dist.ProcessGroup | None = None,
        nprocs_per_node: int = 1,
        comm_device: torch.device | str | None = None,
        init_sync: bool = True,
        gossip_buffers: bool = True,
        gossip_in_eval_mode: bool = False,
        on_nonfinite: str = "raise",
        find_unused_parameters: bool = False,
        timeout: timedelta = DEFAULT_TIMEOUT,
    ) -> None:
        if max_staleness < 0 or (max_staleness > 0 and not overlap):
            raise ValueError(
                f"got max_staleness={max_staleness} with overlap={overlap}, expected max_staleness >= 0, and 0 without "
                "overlap; pass overlap=True to let rounds be late"
            )
        self.overlap = overlap
        self.max_staleness = max_staleness
        super().__init__(
            module,
            graph=graph,
            mixing=mixing,
            push_sum=push_sum,
            gossiper=gossiper,
            wire_dtype=wire_dtype,
            schedule=schedule,
            process_group=process_group,
            nprocs_per_node=nprocs_per_node,
            comm_device=comm_device,
            init_sync=init_sync,
            gossip_buffers=gossip_buffers,
            gossip_in_eval_mode=gossip_in_eval_mode,
            on_nonfinite=on_nonfinite,
            find_unused_parameters=find_unused_parameters,
            timeout=timeout,
        )

    def _make_engine(self, gossiper: Gossiper, schedule: Schedule) -> LockstepEngine:
        if not self.overlap:
            return SyncEngine(gossiper, schedule, on_nonfinite=self._on_nonfinite)
        return OverlapEngine(
            gossiper,
            schedule,
            max_staleness=self.max_staleness,
            is_eager=self._node is None,
            on_nonfinite=self._on_nonfinite,
        )

    def _engine_options(self) -> str:
        return f"overlap={self.overlap}, max_staleness={self.max_staleness}"
