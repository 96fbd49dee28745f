"""The methods that the benchmarks compare: each trains a model of its own, one `step()` at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gossip_modules as gm
from benchmarks.by_hand import (
    AllReduceLoop,
    BlockingSGP,
    DiLoCoLoop,
    Loss,
    NarrowSGP,
    OptimizerFactory,
    OverlappedSGP,
    PlainLoop,
    SignChoco,
    make_optimizer,
)
from gossip_modules.extend import GossipWrapper
from gossip_modules.graph_manager import CompleteGraph
from gossip_modules.membership.serve import serve


class DDP(PlainLoop):
    """torch's DistributedDataParallel.

    Args:
        options: any argument of DistributedDataParallel.
    """

    def __init__(self, model: nn.Module, optimizer: OptimizerFactory = make_optimizer, **options: Any) -> None:
        super().__init__(model, optimizer)
        self.model = self.replica = DistributedDataParallel(model, **options)


class DecentDP(PlainLoop):
    """Decent-DP from PyPI; it owns the optimizer and steps inside the backward pass.

    Args:
        topology: "ring" (one peer a round), "one-peer-exp", ...: see its documentation.
    """

    def __init__(
        self, model: nn.Module, optimizer: OptimizerFactory = make_optimizer, *, topology: str = "ring"
    ) -> None:
        from decent_dp.ddp import DecentralizedDataParallel
        from loguru import logger

        logger.remove()
        self.decent = DecentralizedDataParallel(
            model, lambda named: optimizer([p for _, p in named]), topology=topology, _local_world_size=1
        )
        self.model = self.decent

    def step(self, loss: Loss) -> None:
        """See `PlainLoop`."""
        loss(self.model).backward()

    def close(self) -> None:
        """Wait for what is under way."""
        for work in self.decent._comm_ops:
            if work is not None:
                work.wait()


class Wrapped(PlainLoop):
    """A model in a wrapper of ours, or in none, with the plain loop.

    Args:
        wrap: gives the wrapped module.
    """

    def __init__(
        self, model: nn.Module, optimizer: OptimizerFactory = make_optimizer, *, wrap: Callable[[nn.Module], nn.Module]
    ) -> None:
        super().__init__(model, optimizer)
        self.model = wrap(model)

    def progress(self, num_own_steps: int) -> int:
        """See `PlainLoop`; in WAGMA the round, which ranks reach after unequal numbers of steps."""
        return self.model.round if isinstance(self.model, gm.GroupAverageDataParallel) else num_own_steps

    def close(self) -> None:
        """Apply what is under way, end what the wrapper started."""
        if isinstance(self.model, GossipWrapper | gm.AllReduceDataParallel):
            self.model.close()


class PeriodicallyAveraged(Wrapped):
    """A wrapper of ours whose ranks train alone from one average over all of them to the next."""


SYNC_EVERY = 2  # steps between outer steps


def _gossip(model: nn.Module, **options: Any) -> PlainLoop:
    """GossipDataParallel."""
    return Wrapped(model, wrap=lambda module: gm.GossipDataParallel(module, **options))


def _ring(model: nn.Module, **options: Any) -> PlainLoop:
    """GossipDataParallel on the one-way ring of the hand-written loops."""
    return _gossip(model, graph=gm.RingGraph(dist.get_world_size()), **options)


def _all(model: nn.Module, **options: Any) -> PlainLoop:
    """GossipDataParallel with all ranks as neighbours, without push-sum."""
    n = dist.get_world_size()
    return _gossip(model, graph=CompleteGraph(n, peers_per_itr=n - 1), push_sum=False, **options)


class InMembership(Wrapped):
    """SGP with a membership, whose store rank 0 serves.

    Args:
        key: the key of the job; None: there is none.
    """

    def __init__(self, model: nn.Module, *, key: str | None = None) -> None:
        port = torch.zeros(1, dtype=torch.int64)
        if dist.get_rank() == 0:
            self._store = serve(0)
            port.fill_(self._store.port)
        dist.broadcast(port, 0)
        self.membership = gm.Membership(
            f"127.0.0.1:{port.item()}", min_workers=dist.get_world_size(), key=key, min_deadline=30.0
        )
        super().__init__(model, wrap=lambda module: gm.GossipDataParallel(module, membership=self.membership))
        self._steps = self.membership.steps(1 << 40)

    def step(self, loss: Loss) -> None:
        """See `PlainLoop`."""
        next(self._steps)
        super().step(loss)


CONTENDERS: Mapping[str, Callable[[nn.Module], PlainLoop]] = {
    "local": PlainLoop,
    "hand-sgp": BlockingSGP,
    "hand-osgp": OverlappedSGP,
    "hand-diloco": partial(DiLoCoLoop, sync_every=SYNC_EVERY),
    "hand-ar": AllReduceLoop,
    "ddp": DDP,
    "ddp-view": partial(DDP, gradient_as_bucket_view=True),
    "decent-dp": DecentDP,
    "sgp": _ring,
    "osgp": partial(_ring, overlap=True),
    "diloco": lambda model: _gossip(model, algorithm=gm.DiLoCo(SYNC_EVERY)),
    "ar": lambda model: Wrapped(model, wrap=gm.AllReduceDataParallel),
    "dpsgd": partial(_gossip, push_sum=False),
    "sgp-bf16": partial(_ring, wire_dtype=torch.bfloat16),
    "choco": lambda model: _gossip(model, algorithm=gm.Choco(gm.TopK(0.01), step_size=0.04)),
    "choco-sign": lambda model: _gossip(model, algorithm=gm.Choco(gm.SignNorm(), step_size=0.3)),
    "powergossip": lambda model: _gossip(model, algorithm=gm.PowerGossip()),
    "adpsgd": lambda model: Wrapped(model, wrap=gm.BilatGossipDataParallel),
    "wagma": lambda model: Wrapped(model, wrap=gm.GroupAverageDataParallel),
    "hand-sgp-bf16": NarrowSGP,
    "hand-choco-sign": SignChoco,
    "clipped": lambda model: _gossip(model, algorithm=gm.ClippedGossip(1.0)),
    "dpsgd-all": _all,
    "clipped-all": partial(_all, algorithm=gm.ClippedGossip(1.0)),
    "trimmed-all": partial(_all, algorithm=gm.TrimmedMean(0.4)),
    "bounded-all": partial(_all, max_relative_distance=0.5),
    "member": InMembership,
    "member-key": partial(InMembership, key="the key of a benchmark"),
}
STANDARDS: Mapping[str, str] = {
    "sgp": "hand-sgp",
    "osgp": "hand-osgp",
    "diloco": "hand-diloco",
    "ar": "ddp-view",
    "hand-ar": "ddp-view",
    "dpsgd": "hand-sgp",
    "decent-dp": "hand-osgp",
    "sgp-bf16": "ddp",
    "hand-sgp-bf16": "ddp",
    "hand-choco-sign": "ddp",
    "choco-sign": "ddp",
    "powergossip": "ddp",
    "wagma": "ddp",
    "clipped": "dpsgd",
    "clipped-all": "dpsgd-all",
    "trimmed-all": "dpsgd-all",
    "bounded-all": "dpsgd-all",
    "member-key": "member",
}
"""The method that each method is compared with; the other methods are compared with `local`."""
