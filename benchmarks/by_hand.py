"""Training loops in plain torch.distributed, each about 30 lines for one model: the standard for the wrappers' speed.

The loops have no timeouts, no checks and no state to save. All keep the model in one flat vector; plain gossip runs on
a one-way ring: x_i <- (x_i + x_(i-1)) / 2.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

Optimizer: TypeAlias = torch.optim.Optimizer
OptimizerFactory: TypeAlias = Callable[[list[nn.Parameter]], Optimizer]
Loss: TypeAlias = Callable[[nn.Module], Tensor]
"""The loss of a model on the batch of the step: a scalar."""
PIECE = 1 << 17  # entries that stay in the cache of a processor
BLOCK = 2048  # entries with one magnitude


def make_optimizer(parameters: list[nn.Parameter]) -> Optimizer:
    """The optimizer of all methods."""
    return torch.optim.SGD(parameters, lr=0.001, momentum=0.9, nesterov=True, weight_decay=1e-4)


def flatten(tensors: list[Tensor]) -> Tensor:
    """Make tensors of one dtype views of a new vector with their values, and return the vector."""
    flat = torch.cat([x.detach().reshape(-1) for x in tensors])
    for x, part in zip(tensors, flat.split([x.numel() for x in tensors]), strict=True):
        x.data = part.view(x.shape)
    return flat


class PlainLoop:
    """A training loop over one model without communication, which no method can beat.

    Args:
        model: the model to train.
        optimizer: makes the optimizer of its parameters.
    """

    def __init__(self, model: nn.Module, optimizer: OptimizerFactory = make_optimizer) -> None:
        self.model = model
        self.optimizer = optimizer(list(model.parameters()))

    def step(self, loss: Loss) -> None:
        """Run one training step on a batch."""
        value = loss(self.model)
        self.optimizer.zero_grad()
        value.backward()
        self.optimizer.step()

    def progress(self, num_own_steps: int) -> int:
        """The progress of training after so many steps of this rank, equal on ranks that end together."""
        return num_own_steps

    def close(self) -> None:
        """Wait for everything in flight, and end everything that the loop has started."""


class FlatLoop(PlainLoop):
    """A loop over a model in one flat vector: trained tensors and floating-point buffers."""

    def __init__(self, model: nn.Module, optimizer: OptimizerFactory = make_optimizer) -> None:
        super().__init__(model, optimizer)
        self.flat = flatten([x for x in (*model.parameters(), *model.buffers()) if x.is_floating_point()])


class RingLoop(FlatLoop):
    """Gossip on a one-way ring."""

    def __init__(self, model: nn.Module, optimizer: OptimizerFactory = make_optimizer) -> None:
        super().__init__(model, optimizer)
        self.inbox = torch.empty_like(self.flat)
        n, rank = dist.get_world_size(), dist.get_rank()
        self.source, self.target = (rank - 1) % n, (rank + 1) % n
        self.works: list[dist.Work | None] = []

    def post(self, message: Tensor) -> None:
        """Receive first, then send; both in the background."""
        self.works = [dist.irecv(self.inbox, self.source), dist.isend(message, self.target)]

    def wait(self) -> None:
        """Wait for both messages; a work may be waited for once only."""
        for work in self.works:
            assert work is not None
            work.wait()
        self.works = []

    def close(self) -> None:
        """Wait for the round in flight."""
        self.wait()


class BlockingSGP(RingLoop):
    """SGP: step, exchange, average."""

    def step(self, loss: Loss) -> None:
        """Run one training step on a batch."""
        super().step(loss)
        self.post(self.flat)
        self.wait()
        self.flat.lerp_(self.inbox, 0.5)


class OverlappedSGP(RingLoop):
    """Overlap SGP: a snapshot travels under forward and backward; its correction is added before the next forward."""

    def __init__(self, model: nn.Module, optimizer: OptimizerFactory = make_optimizer) -> None:
        super().__init__(model, optimizer)
        self.snapshot = torch.empty_like(self.flat)

    def step(self, loss: Loss) -> None:
        """Run one training step on a batch."""
        if self.works:
            self.wait()
            self.flat.add_(self.inbox.sub_(self.snapshot), alpha=0.5)
        self.snapshot.copy_(self.flat)
        self.post(self.snapshot)
        super().step(loss)


class NarrowSGP(RingLoop):
    """SGP with messages in bfloat16: x_i <- x_i + (y_(i-1) - y_i) / 2 with the rounded models y."""

    def __init__(self, model: nn.Module, optimizer: OptimizerFactory = make_optimizer) -> None:
        super().__init__(model, optimizer)
        self.message, self.inbox = (torch.empty_like(self.flat, dtype=torch.bfloat16) for _ in range(2))

    def step(self, loss: Loss) -> None:
        """Run one training step on a batch."""
        PlainLoop.step(self, loss)
        self.message.copy_(self.flat)
        self.post(self.message)
        self.wait()
        for x, own, theirs in zip(*(v.split(PIECE) for v in (self.flat, self.message, self.inbox)), strict=True):
            x.add_(own.float(), alpha=-0.5).add_(theirs.float(), alpha=0.5)


class SignChoco(RingLoop):
    """CHOCO-SGD with signs on two ranks: the bits of x - public and a mean magnitude for each 2,048 entries are sent.

    Args:
        step_size: gamma.
    """

    def __init__(
        self, model: nn.Module, optimizer: OptimizerFactory = make_optimizer, *, step_size: float = 0.3
    ) -> None:
        super().__init__(model, optimizer)
        self.step_size = step_size
        self.num_blocks = -(-self.flat.numel() // BLOCK)
        self.public, self.drift = (torch.zeros(self.num_blocks, BLOCK) for _ in range(2))
        self.difference = torch.zeros_like(self.public)
        self.message, self.inbox = (torch.empty(self.num_blocks, 4 + BLOCK // 8, dtype=torch.uint8) for _ in range(2))

    def step(self, loss: Loss) -> None:
        """Run one training step on a batch."""
        PlainLoop.step(self, loss)
        d = self.flat.numel()
        torch.sub(self.flat, self.public.view(-1)[:d], out=self.difference.view(-1)[:d])
        scales, bits = self.parts(self.message)
        for x, scale, own in zip(*(v.split(PIECE // BLOCK) for v in (self.difference, scales, bits)), strict=True):
            scale.copy_(x.abs().mean(1, keepdim=True))
            own.copy_(torch.from_numpy(np.packbits(np.less(x.numpy(), 0), axis=1, bitorder="little")))
        self.post(self.message)
        self.wait()
        for message, changes in (
            (self.message, ((self.public, 1.0), (self.drift, -0.5))),
            (self.inbox, ((self.drift, 0.5),)),
        ):
            self.add(message, changes)
        self.flat.add_(self.drift.view(-1)[:d], alpha=self.step_size)

    def add(self, message: Tensor, changes: tuple[tuple[Tensor, float], ...]) -> None:
        """Add the values of a message to vectors, each with a factor."""
        scales, bits = self.parts(message)
        for first in range(0, self.num_blocks, PIECE // BLOCK):
            rows = slice(first, first + PIECE // BLOCK)
            codes = torch.from_numpy(np.unpackbits(bits[rows].numpy(), axis=1, bitorder="little"))
            values = codes.mul_(-2).add_(1).view(torch.int8).float().mul_(scales[rows])
            for target, factor in changes:
                target[rows].add_(values, alpha=factor)

    @staticmethod
    def parts(message: Tensor) -> tuple[Tensor, Tensor]:
        """The scales, float32 [blocks, 1], and the bits of a message."""
        return message[:, :4].view(torch.float32), message[:, 4:]


class DiLoCoLoop(FlatLoop):
    """DiLoCo: after every `sync_every` steps an outer step of SGD with Nesterov momentum on the averaged drift."""

    def __init__(self, model: nn.Module, optimizer: OptimizerFactory = make_optimizer, *, sync_every: int = 2) -> None:
        super().__init__(model, optimizer)
        self.sync_every, self.k = sync_every, 0
        self.anchor, self.drift = self.flat.clone(), torch.empty_like(self.flat)
        self.momentum = torch.zeros_like(self.flat)

    def step(self, loss: Loss) -> None:
        """Run one training step on a batch."""
        super().step(loss)
        self.k += 1
        if self.k % self.sync_every == 0:
            torch.sub(self.anchor, self.flat, out=self.drift)
            dist.all_reduce(self.drift)
            self.drift.div_(dist.get_world_size())
            self.momentum.mul_(0.9).add_(self.drift)
            self.anchor.sub_(self.drift.add_(self.momentum, alpha=0.9), alpha=0.7)
            self.flat.copy_(self.anchor)


class AllReduceLoop(PlainLoop):
    """All-reduce SGD: gradients are views of flat buckets, and each bucket is reduced when its last gradient is there.

    Args:
        bucket_bytes: the least size of a bucket but the last.
    """

    def __init__(
        self, model: nn.Module, optimizer: OptimizerFactory = make_optimizer, *, bucket_bytes: int = 25 << 20
    ) -> None:
        super().__init__(model, optimizer)
        self.buckets: list[Tensor] = []
        self.works: list[dist.Work | None] = []
        group: list[Tensor] = []
        parameters = list(model.parameters())[::-1]  # about the order of a backward
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
            group.append(parameter)
            if sum(x.nbytes for x in group) >= bucket_bytes or parameter is parameters[-1]:
                self.add_bucket(group)
                group = []

    def add_bucket(self, group: list[Tensor]) -> None:
        """Make the gradients of these parameters one bucket."""
        gradients = [x.grad for x in group if x.grad is not None]
        bucket, num_missing = flatten(gradients), [len(group)]
        self.buckets.append(bucket)

        def count(_: Tensor) -> None:
            num_missing[0] -= 1
            if num_missing[0] == 0:
                num_missing[0] = len(group)
                self.works.append(dist.all_reduce(bucket.div_(dist.get_world_size()), async_op=True))

        for x in group:
            x.register_post_accumulate_grad_hook(count)

    def step(self, loss: Loss) -> None:
        """Run one training step on a batch."""
        value = loss(self.model)
        for bucket in self.buckets:
            bucket.zero_()
        value.backward()
        for work in self.works:
            assert work is not None
            work.wait()
        self.works.clear()
        self.optimizer.step()
