"""The ways of training side by side in the benchmarks: each trains a model of its own, one `step()` at a time."""

from __future__ import annotations

import gc
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from gossip_modules import AllReduceDataParallel, GossipDataParallel, GroupAverageDataParallel, RingGraph
from gossip_modules.extend import GossipWrapper

Optimizer: TypeAlias = torch.optim.Optimizer
OptimizerFactory: TypeAlias = Callable[[list[nn.Parameter]], Optimizer]
Loss: TypeAlias = Callable[[nn.Module], Tensor]
"""The loss of a model on the batch of the step: a scalar."""


def make_optimizer(parameters: list[nn.Parameter]) -> Optimizer:
    """The same optimizer for everyone."""
    return torch.optim.SGD(parameters, lr=0.001, momentum=0.9, nesterov=True, weight_decay=1e-4)


class Contender(ABC):
    """One method: a model, its optimizer and how they talk.

    Args:
        model: what is trained.
        optimizer: makes the optimizer of its parameters.
    """

    def __init__(self, model: nn.Module, optimizer: OptimizerFactory = make_optimizer) -> None:
        self.model = model
        self.optimizer = optimizer(list(model.parameters()))

    def step(self, loss: Loss) -> None:
        """One training step on a batch."""
        value = loss(self.model)
        self.optimizer.zero_grad()
        value.backward()
        self.optimizer.step()

    def progress(self, num_own_steps: int) -> int:
        """How far training is after so many steps of this rank; ranks that end together end at the same progress."""
        return num_own_steps

    @abstractmethod
    def close(self) -> None:
        """End what the method started."""


class Local(Contender):
    """No communication: what nobody can beat."""

    def close(self) -> None:
        """Nothing to end."""


class HandWritten(Contender):
    """A flat buffer on a one-way ring, by hand: what a person would write in 30 lines for one model."""

    def __init__(self, model: nn.Module, optimizer: OptimizerFactory = make_optimizer) -> None:
        super().__init__(model, optimizer)
        tensors = [t for t in (*model.parameters(), *model.buffers()) if t.is_floating_point()]
        self.flat = torch.cat([t.detach().reshape(-1) for t in tensors])
        offset = 0
        for t in tensors:
            t.data = self.flat[offset : offset + t.numel()].view(t.shape)
            offset += t.numel()
        self.inbox = torch.empty_like(self.flat)
        self.staging: tuple[Tensor, Tensor] | None = None  # Gloo sends and receives in the host's memory
        if self.flat.is_cuda:
            self.staging = self.flat.cpu().pin_memory(), self.flat.cpu().pin_memory()
        n, rank = dist.get_world_size(), dist.get_rank()
        self.source, self.target = (rank - 1) % n, (rank + 1) % n
        self.works: list[dist.Work] = []

    def post(self, message: Tensor) -> None:
        """Receive first, then send; both in the background."""
        inbox = self.inbox
        if self.staging is not None:
            inbox, outbox = self.staging
            message = outbox.copy_(message)
        receive = dist.irecv(inbox, self.source)
        send = dist.isend(message, self.target)
        assert receive is not None
        assert send is not None
        self.works = [receive, send]

    def wait(self) -> None:
        """Until both are done; a work may be waited for once only."""
        for work in self.works:
            work.wait()
        if self.works and self.staging is not None:
            self.inbox.copy_(self.staging[0], non_blocking=True)
        self.works = []

    def close(self) -> None:
        """Until nothing is under way."""
        self.wait()


class HandWrittenBlocking(HandWritten):
    """Step, exchange, average."""

    def step(self, loss: Loss) -> None:
        """See `Contender`."""
        super().step(loss)
        self.post(self.flat)
        self.wait()
        self.flat.lerp_(self.inbox, 0.5)


class HandWrittenOverlapped(HandWritten):
    """The exchange of a snapshot runs under forward and backward; its difference is added afterwards."""

    def __init__(self, model: nn.Module, optimizer: OptimizerFactory = make_optimizer) -> None:
        super().__init__(model, optimizer)
        self.snapshot = torch.empty_like(self.flat)

    def step(self, loss: Loss) -> None:
        """See `Contender`."""
        if self.works:
            self.wait()
            self.flat.add_(self.inbox.sub_(self.snapshot), alpha=0.5)
        self.snapshot.copy_(self.flat)
        self.post(self.snapshot)
        super().step(loss)


class DDP(Contender):
    """torch's DistributedDataParallel.

    Args:
        options: any argument of DistributedDataParallel.
    """

    def __init__(self, model: nn.Module, optimizer: OptimizerFactory = make_optimizer, **options: Any) -> None:
        super().__init__(model, optimizer)
        self.model = self.replica = DistributedDataParallel(model, **options)

    def close(self) -> None:
        """Nothing to end."""


class DecentDP(Contender):
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
        """See `Contender`."""
        loss(self.model).backward()

    def close(self) -> None:
        """Wait for what is under way."""
        for work in self.decent._comm_ops:
            if work is not None:
                work.wait()


class Wrapped(Contender):
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
        """See `Contender`; in WAGMA the round, which ranks reach after unequal numbers of steps."""
        return self.model.round if isinstance(self.model, GroupAverageDataParallel) else num_own_steps

    def close(self) -> None:
        """Apply what is under way, end what the wrapper started."""
        if isinstance(self.model, GossipWrapper | AllReduceDataParallel):
            self.model.close()


class PeriodicallyAveraged(Wrapped):
    """A wrapper of ours whose ranks train alone from one average over all of them to the next."""


def _ours(model: nn.Module, *, overlap: bool) -> Contender:
    """GossipDataParallel on the same one-way ring."""
    graph = RingGraph(dist.get_world_size())
    return Wrapped(model, wrap=lambda module: GossipDataParallel(module, graph=graph, overlap=overlap))


def tensor_bytes() -> int:
    """Bytes of memory under all tensors alive in this process; what several tensors share counts once."""
    spans = set()
    for thing in gc.get_objects():
        if issubclass(type(thing), Tensor) and thing.layout == torch.strided:
            storage = thing.untyped_storage()
            spans.add((storage.data_ptr(), storage.data_ptr() + storage.nbytes()))
    total = covered = 0
    for start, stop in sorted(spans):
        total += max(stop - max(start, covered), 0)
        covered = max(covered, stop)
    return total


CONTENDERS: dict[str, Callable[[nn.Module], Contender]] = {
    "local step, no communication": Local,
    "hand-written, blocking": HandWrittenBlocking,
    "hand-written, overlapped": HandWrittenOverlapped,
    "DDP": DDP,
    "DDP, gradient_as_bucket_view": lambda model: DDP(model, gradient_as_bucket_view=True),
    "Decent-DP": DecentDP,
    "GossipDataParallel": lambda model: _ours(model, overlap=False),
    "GossipDataParallel(overlap=True)": lambda model: _ours(model, overlap=True),
}
