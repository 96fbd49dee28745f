"""What people would use instead: torch's own methods and those of other packages, each imported when it is asked for.

Every function here returns what makes the contender of a rank. A package that is
missing, or does not run, raises there: a row of the table says so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from benchmarks.by_hand import Loss, OptimizerFactory, PlainLoop
from benchmarks.cluster.network.place import Place
from benchmarks.cluster.torchft_replica import Replica
from benchmarks.contenders import DDP, DecentDP

Make: TypeAlias = Callable[[nn.Module, Place], PlainLoop]
PERIOD = 4
"""Steps from one average to the next, of methods that average models now and then."""


def ddp(**options: Any) -> Make:
    """torch's DistributedDataParallel."""
    return lambda model, place: DDP(model, place.make_optimizer, **options)


def ddp_hook(name: str) -> Make:
    """With gradients that travel in half precision, by a hook of `torch`'s `default_hooks`."""

    def make(model: nn.Module, place: Place) -> PlainLoop:
        contender = DDP(model, place.make_optimizer)
        contender.replica.register_comm_hook(None, getattr(default_hooks, name))
        return contender

    return make


def ddp_power_sgd(model: nn.Module, place: Place) -> PlainLoop:
    """With gradients of low rank, but for the first tenth of a training, which torch's documentation advises.

    In one bucket: the hook starts a collective when another has ended, and over Gloo those of several buckets meet in
    another order on each rank, which ends the process.
    """
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

    contender = DDP(model, place.make_optimizer, bucket_cap_mb=10_000)
    state = PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
    contender.replica.register_comm_hook(state, powerSGD_hook)
    return contender


def post_local(model: nn.Module, place: Place) -> PlainLoop:
    """torch's post-local SGD, without the phase before: no gradients travel, models are averaged every PERIOD steps."""
    from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
    from torch.distributed.optim import PostLocalSGDOptimizer

    contender = DDP(model, place.make_optimizer)
    alone, _ = dist.new_subgroups(group_size=1)
    state = PostLocalSGDState(process_group=None, subgroup=alone, start_localSGD_iter=0)
    contender.replica.register_comm_hook(state, post_localSGD_hook)
    averager = PeriodicModelAverager(period=PERIOD, warmup_steps=PERIOD - 1)  # after steps 4, 8, ...
    contender.optimizer = PostLocalSGDOptimizer(contender.optimizer, averager)
    return contender


def decent(*, topology: str) -> Make:
    """Decent-DP; see `DecentDP`."""
    return lambda model, place: DecentDP(model, place.make_optimizer, topology=topology)


class _TorchFT(PlainLoop):
    """The plain loop inside a context manager of torchft's that hooks itself into the optimizer."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: OptimizerFactory,
        enter: Callable[[nn.Module, torch.optim.Optimizer], Any],
        replica: _Replica,
    ) -> None:
        super().__init__(model, optimizer)
        self._context = enter(model, self.optimizer)
        self._context.__enter__()
        self._replica = replica
        self._num_steps = 0

    def step(self, loss: Loss) -> None:
        """See `PlainLoop`."""
        super().step(loss)
        self._num_steps += 1

    def close(self) -> None:
        """End the context and the servers.

        Raises:
            RuntimeError: an average has failed, which torchft keeps to itself.
        """
        # A replica that heals counts as the others, but here none can: nobody serves checkpoints.
        num_averages = self._replica.manager.current_step()
        self._context.__exit__(None, None, None)
        self._replica.close()
        if num_averages != self._num_steps // PERIOD:
            raise RuntimeError(
                f"got {num_averages} averages in {self._num_steps} steps, expected one every {PERIOD}; torchft's log "
                "says why"
            )


class _Replica(Replica):
    """A rank of the cluster as a replica; rank 0 has the lighthouse.

    Replicas cannot heal here: the server of checkpoints listens on the machine's own name, which no other host reaches.
    """

    def __init__(self, model: nn.Module, place: Place) -> None:
        from torchft.coordination import LighthouseServer

        lighthouse = f"{place.control_addresses[0]}:{place.port}"
        self._lighthouse: Any = None
        if place.rank == 0:
            self._lighthouse = LighthouseServer(lighthouse, place.world_size, join_timeout_ms=10_000)
        place.meet("lighthouse")
        super().__init__(
            model.load_state_dict,
            model.state_dict,
            lighthouse=lighthouse,
            host=place.addresses[place.rank],
            name=f"rank{place.rank}",
            min_replicas=place.world_size,
            timeout=place.timeout,
            use_async_quorum=False,
        )

    def close(self) -> None:
        """End the servers."""
        super().close()
        if self._lighthouse is not None:
            self._lighthouse.shutdown()


def torchft_local(model: nn.Module, place: Place) -> PlainLoop:
    """torchft's LocalSGD."""
    from torchft.local_sgd import LocalSGD

    replica = _Replica(model, place)

    def enter(m: nn.Module, inner: torch.optim.Optimizer) -> Any:
        return LocalSGD(replica.manager, m, inner, sync_every=PERIOD)

    return _TorchFT(model, place.make_optimizer, enter, replica)


def torchft_diloco(model: nn.Module, place: Place) -> PlainLoop:
    """torchft's DiLoCo, with the outer optimizer of its paper."""
    from torchft.local_sgd import DiLoCo

    replica = _Replica(model, place)

    def enter(m: nn.Module, inner: torch.optim.Optimizer) -> Any:
        outer = torch.optim.SGD(m.parameters(), lr=0.7, momentum=0.9, nesterov=True)
        return DiLoCo(replica.manager, [m], inner, outer, sync_every=PERIOD, pin_memory=False)

    return _TorchFT(model, place.make_optimizer, enter, replica)
