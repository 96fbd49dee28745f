"""The dense oracle: all ranks in one process, W(t) as a matrix, everything in float64.

It shares no arithmetic with the library: of a graph it asks `out_peers` alone, and each rule is the line of the paper.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from gossip_modules.graph_manager import GraphManager

Matrix = Callable[[int], Tensor]  # round t -> W(t), float64 [n, n]


def uniform(graph: GraphManager) -> Matrix:
    """W[i, j] = 1 / (1 + out-degree of j) on the edges j -> i and the diagonal."""

    def matrix(t: int) -> Tensor:
        W = torch.zeros(graph.world_size, graph.world_size, dtype=torch.float64)
        for j in range(graph.world_size):
            receivers = [j, *graph.out_peers(j, t)]
            W[receivers, j] = 1 / len(receivers)
        return W

    return matrix


def metropolis(graph: GraphManager) -> Matrix:
    """W[i, j] = 1 / (1 + max(degree i, degree j)) on undirected edges; the diagonal is what is left."""

    def matrix(t: int) -> Tensor:
        rows = [graph.out_peers(rank, t) for rank in range(graph.world_size)]
        W = torch.zeros(graph.world_size, graph.world_size, dtype=torch.float64)
        for i, row in enumerate(rows):
            for j in row:
                W[i, j] = 1 / (1 + max(len(row), len(rows[j])))
        return W + torch.diag(1 - W.sum(1))

    return matrix


def trained(module: nn.Module) -> list[Tensor]:
    """What gossip mixes: trained parameters, then floating-point buffers."""
    parameters = [p for p in module.parameters() if p.requires_grad]
    return [*parameters, *(b for b in module.buffers() if b.is_floating_point())]


def flatten(module: nn.Module) -> Tensor:
    """All that gossip mixes as one float64 vector [d] on the CPU, a copy."""
    return torch.cat([x.detach().double().flatten() for x in trained(module)]).cpu()


def scatter(x: Tensor, module: nn.Module) -> None:
    """The inverse of `flatten`, in place."""
    tensors = trained(module)
    for tensor, part in zip(tensors, x.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.detach().copy_(part.view_as(tensor))


class Snapshot(NamedTuple):
    """One training step of all ranks."""

    estimates: Tensor  # z = x / w in forward and backward, float64 [n, d]
    numerators: Tensor  # x after the optimizer step, float64 [n, d]
    weights: Tensor  # w, float64 [n]


class Oracle:
    """n models in float64, mixed by matrices.

    Args:
        models: one per rank, float64; trained in place.
        optimizers: one per rank, over the parameters of its model.
        matrix: W(t).
        gossip_every: steps from one round to the next.
        average_every: every so-manieth round is W = J, the exact average; 0 = never.
        overlap: a round starts from a snapshot and is added later: x_{k+1} = W_k x_k + u_k. Buffers are averaged as
            they are then: b <- W_ii b + sum_j W_ij b_j as it was sent, over the others j.
        max_staleness: with overlap, how many forwards later than that a round is added, always.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        matrix: Matrix,
        *,
        gossip_every: int = 1,
        average_every: int = 0,
        overlap: bool = False,
        max_staleness: int = 0,
    ) -> None:
        self.models, self.optimizers, self.matrix = models, optimizers, matrix
        self.gossip_every, self.average_every = max(gossip_every, max_staleness + 1), average_every
        self.overlap, self.max_staleness = overlap, max_staleness
        self.weights = torch.ones(len(models), dtype=torch.float64)
        self.num_steps = 0
        self._flight: tuple[int, Tensor, Tensor, Tensor] | None = None  # start step, W, and x and w as they were sent

    def run(self, num_steps: int, loss: Callable[[nn.Module, int, int], Tensor]) -> Iterator[Snapshot]:
        """`num_steps` training steps of all ranks; `loss(model, rank, step)`."""
        for _ in range(num_steps):
            self._gossip()
            estimates = self._stack()
            for rank, (model, optimizer) in enumerate(zip(self.models, self.optimizers, strict=True)):
                optimizer.zero_grad()
                loss(model, rank, self.num_steps).backward()
                scatter(flatten(model) * self.weights[rank], model)
                optimizer.step()
            self.num_steps += 1
            yield Snapshot(estimates, self._stack(), self.weights.clone())

    def flush(self) -> Snapshot:
        """Apply what is in flight."""
        x, self.weights = self._apply_in_flight(self._stack(), self.weights)
        return Snapshot(x / self.weights[:, None], x, self.weights)

    def _gossip(self) -> None:
        """Before a forward: x <- W x, or what overlap makes of it; leaves z = x / w in the models."""
        x, w = self._stack(), self.weights
        if self._flight is not None and self.num_steps - self._flight[0] > self.max_staleness:
            x, w = self._apply_in_flight(x, w)
        t, is_between = divmod(self.num_steps, self.gossip_every)
        if not is_between:
            n = len(self.models)
            is_average = self.average_every > 0 and (t + 1) % self.average_every == 0
            W = torch.full((n, n), 1 / n, dtype=torch.float64) if is_average else self.matrix(t)
            if self.overlap:
                self._flight = (self.num_steps, W, x, w)
            else:
                x, w = W @ x, W @ w
        self.weights = w
        for row, model in zip(x / w[:, None], self.models, strict=True):
            scatter(row, model)

    def _apply_in_flight(self, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        """What x and w become by the round in flight, which there may be."""
        if self._flight is None:
            return x, w
        _, W, s, s_w = self._flight
        self._flight = None
        own = W.diag()[:, None]
        buffers = torch.cat([torch.full((x.numel(),), not x.requires_grad) for x in trained(self.models[0])])
        return torch.where(buffers, own * x + (W @ s - own * s), x + (W @ s - s)), w + (W @ s_w - s_w)

    def _stack(self) -> Tensor:
        return torch.stack([flatten(model) for model in self.models])
