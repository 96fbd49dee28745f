"""The ways of training side by side in `step_time.py`: each trains a model of its own, one `step()` at a time."""

from __future__ import annotations

import gc
from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from gossip_modules import GossipDataParallel, RingGraph

Optimizer = torch.optim.Optimizer


def make_optimizer(parameters: list[nn.Parameter]) -> Optimizer:
    """The same optimizer for everyone."""
    return torch.optim.SGD(parameters, lr=0.001, momentum=0.9, nesterov=True, weight_decay=1e-4)


class Contender(ABC):
    """One method: a model, its optimizer and how they talk."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.optimizer = make_optimizer(list(model.parameters()))

    def step(self, x: Tensor, y: Tensor) -> None:
        """One training step on a batch."""
        loss = cross_entropy(self.model(x), y)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()

    @abstractmethod
    def close(self) -> None:
        """End what the method started."""


class Local(Contender):
    """No communication: what nobody can beat."""

    def close(self) -> None:
        """Nothing to end."""


class _HandWritten(Contender):
    """A flat buffer on a one-way ring, by hand: what a person would write in 30 lines for one model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        tensors = [t for t in (*model.parameters(), *model.buffers()) if t.is_floating_point()]
        self.flat = torch.cat([t.detach().reshape(-1) for t in tensors])
        offset = 0
        for t in tensors:
            t.data = self.flat[offset : offset + t.numel()].view(t.shape)
            offset += t.numel()
        self.inbox = torch.empty_like(self.flat)
        n, rank = dist.get_world_size(), dist.get_rank()
        self.source, self.target = (rank - 1) % n, (rank + 1) % n
        self.works: list[dist.Work] = []

    def post(self, message: Tensor) -> None:
        """Receive first, then send; both in the background."""
        receive = dist.irecv(self.inbox, self.source)
        send = dist.isend(message, self.target)
        assert receive is not None
        assert send is not None
        self.works = [receive, send]

    def wait(self) -> None:
        """Until both are done; a work may be waited for once only."""
        for work in self.works:
            work.wait()
        self.works = []

    def close(self) -> None:
        """Until nothing is under way."""
        self.wait()


class HandWrittenBlocking(_HandWritten):
    """Step, exchange, average."""

    def step(self, x: Tensor, y: Tensor) -> None:
        """See `Contender`."""
        super().step(x, y)
        self.post(self.flat)
        self.wait()
        self.flat.lerp_(self.inbox, 0.5)


class HandWrittenOverlapped(_HandWritten):
    """The exchange of a snapshot runs under forward and backward; its difference is added afterwards."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.snapshot = torch.empty_like(self.flat)

    def step(self, x: Tensor, y: Tensor) -> None:
        """See `Contender`."""
        if self.works:
            self.wait()
            self.flat.add_(self.inbox.sub_(self.snapshot), alpha=0.5)
        self.snapshot.copy_(self.flat)
        self.post(self.snapshot)
        super().step(x, y)


class DDP(Contender):
    """torch's DistributedDataParallel."""

    def __init__(self, model: nn.Module, *, gradient_as_bucket_view: bool = False) -> None:
        super().__init__(model)
        self.model = DistributedDataParallel(model, gradient_as_bucket_view=gradient_as_bucket_view)

    def close(self) -> None:
        """Nothing to end."""


class DecentDP(Contender):
    """Decent-DP from PyPI, one peer a round; it owns the optimizer and steps inside the backward pass."""

    def __init__(self, model: nn.Module) -> None:
        from decent_dp.ddp import DecentralizedDataParallel
        from loguru import logger

        logger.remove()
        self.decent = DecentralizedDataParallel(
            model, lambda named: make_optimizer([p for _, p in named]), topology="ring", _local_world_size=1
        )
        self.model = self.decent

    def step(self, x: Tensor, y: Tensor) -> None:
        """See `Contender`."""
        cross_entropy(self.model(x), y).backward()

    def close(self) -> None:
        """Wait for what is under way."""
        for work in self.decent._comm_ops:
            if work is not None:
                work.wait()


class Ours(Contender):
    """GossipDataParallel on the same one-way ring."""

    def __init__(self, model: nn.Module, *, overlap: bool, comm_device: str | None = None) -> None:
        super().__init__(model)
        graph = RingGraph(dist.get_world_size())
        self.wrapper = GossipDataParallel(model, graph=graph, overlap=overlap, comm_device=comm_device)
        self.model = self.wrapper

    def close(self) -> None:
        """Flush and end the gossip thread."""
        self.wrapper.close()


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
    "GossipDataParallel": lambda model: Ours(model, overlap=False),
    "GossipDataParallel(overlap=True)": lambda model: Ours(model, overlap=True),
}
