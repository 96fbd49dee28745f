"""Outer steps by hand: each is decided by a close, whose workers exchange their drifts while the others train on."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from gossip_modules.extend import Average, Memory, OuterMethod, RoundLost, Vectors
from gossip_modules.flat.vector import FlatVector
from gossip_modules.rounds.requests import Mail
from gossip_modules.rounds.vector import Vector


class Closes:
    """n workers, of which each keeps its anchor and its model until an outer step takes effect on it.

    A worker that a close leaves out gets `RoundLost`. A worker of a close computes its drift from its own anchor. Then
    its memory becomes the memory after the close before, and its round goes on with the mean.

    Args:
        outer: the method.
        start: the model, any shape, of all workers.
        n: the number of workers.
    """

    def __init__(self, outer: OuterMethod, start: Tensor, n: int) -> None:
        self.outer = outer
        self.x = [start.clone() for _ in range(n)]
        self.memories = [Memory() for _ in range(n)]
        self._vectors = [Vector.of(FlatVector.over(x)) for x in self.x]
        self._newest: Any = None
        for rank in range(n):
            outer.begin(self._describe(rank), self.memories[rank])

    def close(self, in_time: Collection[int], *, begins: Collection[int] | None = None) -> None:
        """Run an outer step.

        Args:
            in_time: the workers of the close.
            begins: the workers that begin a round; None: all.
        """
        everyone = range(len(self.x)) if begins is None else begins
        rounds = {rank: self.outer.round(self._describe(rank), self.memories[rank], 0) for rank in everyone}
        requests: dict[int, Any] = {rank: next(own) for rank, own in rounds.items()}
        assert all(isinstance(request, Average) for request in requests.values())
        parts = zip(*(requests[rank].x.parts for rank in in_time), strict=True)
        means = [torch.stack(part).mean(0) for part in parts]
        sent = [list(requests[rank].numbers) for rank in in_time]
        numbers = torch.tensor(sent, dtype=torch.float64) if sent[0] else None
        for rank, own in rounds.items():
            memory, is_late = self.memories[rank], rank not in in_time
            for part, mean in zip(requests[rank].x.parts, means, strict=True):
                part.copy_(torch.full_like(mean, float("nan")) if is_late else mean)
            if self._newest is not None and not is_late:
                memory.overwrite({**self._newest, "numbers": memory.numbers})
            with contextlib.suppress(StopIteration, RoundLost):
                own.throw(RoundLost()) if is_late else own.send(numbers)
        self._newest = copy.deepcopy(self.memories[next(iter(in_time))].state_dict(joins=True))

    def _describe(self, rank: int) -> Vectors:
        self.memories[rank].fit(self._vectors[rank])
        return Vectors(self._vectors[rank], Mail(), t=0, rank=rank, num_ranks=len(self.x))
