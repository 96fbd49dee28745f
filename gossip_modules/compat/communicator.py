"""MATCHA's communicators: `communicate(model)` after `optimizer.step()` runs one gossip round of a plain module."""

from __future__ import annotations

import time
from typing import Any

from torch import nn

from ..algorithms.choco import Choco
from ..compression.sparsifier import TopK
from ..matcha.graph import MatchaGraph
from ..schedule import Schedule
from ..wrappers.gossip import GossipDataParallel
from .processors import FixedProcessor, MatchaProcessor

__all__ = ["ChocoCommunicator", "FixedProcessor", "MatchaProcessor", "centralizedCommunicator", "decenCommunicator"]


class Communicator:
    """The base of the communicators: a `GossipDataParallel` around the model, made at the first `communicate`.

    A step is in the order of MATCHA: x <- W(t) (x - lr g). The model stays a plain module, and the loop calls it as
    before. Every rank keeps its own initial parameters; `torch.manual_seed` before the model is built makes them equal.

    Args:
        rank: the rank of this process.
        size: the number of ranks.
        options: any argument of `GossipDataParallel`.

    Attributes:
        wrapper: the `GossipDataParallel`, for `averaged()`, `consensus_distance()`, `comm_stats()` and its state; None
            before the first `communicate`.
    """

    def __init__(self, rank: int, size: int, **options: Any) -> None:
        self.rank, self.size = rank, size
        self.wrapper: GossipDataParallel | None = None
        self._options = {"push_sum": False, "init_sync": False, "rounds": "manual", **options}

    def communicate(self, model: nn.Module) -> float:
        """Collective: one round of `model`, in place, after `optimizer.step()`.

        Args:
            model: a plain module, the same one in every call. The first call makes its parameters views of one vector.

        Returns:
            The seconds of the round.

        Raises:
            ValueError: another module than before, a wrapped module, or ranks with different settings.
            TimeoutError, ConnectionError: a peer is late or gone; names it.
        """
        start = time.perf_counter()
        if self.wrapper is None:
            self.wrapper = self._wrap(model)
        if model is not self.wrapper.module:
            raise ValueError(
                f"got another {type(model).__name__} than in the first communicate(model), expected the same module; "
                "make a communicator for each model"
            )
        self.wrapper.gossip_step()
        return time.perf_counter() - start

    def close(self) -> None:
        """Apply all corrections and give back connections; idempotent."""
        if self.wrapper is not None:
            self.wrapper.close()

    def _wrap(self, model: nn.Module) -> GossipDataParallel:
        wrapper = GossipDataParallel(model, **self._options)
        place = wrapper._local.place
        if place is not None and place != (self.rank, self.size):
            wrapper.close()
            raise ValueError(
                f"{type(self).__name__}: got rank={self.rank} and size={self.size} on rank {place[0]} of {place[1]}, "
                "expected these; pass torch.distributed.get_rank() and get_world_size()"
            )
        return wrapper


class decenCommunicator(Communicator):
    """D-PSGD or MATCHA: `GossipDataParallel(model, graph=topology, push_sum=False)`.

    Args:
        rank: the rank of this process.
        size: the number of ranks.
        topology: a `MatchaProcessor` or `FixedProcessor`, or any graph that `GossipDataParallel` takes.
        options: any argument of `GossipDataParallel`.

    Example:
        >>> topology = MatchaProcessor(select_graph(0), 0.5, rank, size, iterations)
        >>> communicator = decenCommunicator(rank, size, topology)
        >>> for x, y in loader:
        ...     criterion(model(x), y).backward()
        ...     optimizer.step()
        ...     optimizer.zero_grad()
        ...     communicator.communicate(model)
    """

    def __init__(self, rank: int, size: int, topology: Any, **options: Any) -> None:
        super().__init__(rank, size, graph=topology, **options)


class ChocoCommunicator(Communicator):
    """CHOCO-SGD: `GossipDataParallel(model, graph=topology, algorithm=Choco(TopK(1 - ratio), step_size=consensus_lr))`.

    Args:
        rank: the rank of this process.
        size: the number of ranks.
        topology: a graph that never changes: a `MatchaProcessor` or `FixedProcessor` of budget 1, or a static graph.
        ratio: the share of the entries that is left out, at least 0, less than 1.
        consensus_lr: the consensus step size.
        options: any argument of `GossipDataParallel`.

    Raises:
        ValueError: the graph changes from round to round, or `ratio` is out of range.
    """

    def __init__(
        self, rank: int, size: int, topology: Any, ratio: float = 0.9, consensus_lr: float = 0.1, **options: Any
    ) -> None:
        if isinstance(topology, MatchaGraph) and topology.is_dynamic:
            raise ValueError(
                "ChocoCommunicator: got a topology whose links change from round to round, expected one that never "
                "changes, since CHOCO-SGD adds up what all neighbours have sent; pass commBudget=1"
            )
        if not 0 <= ratio < 1:
            raise ValueError(
                f"ChocoCommunicator: got ratio={ratio}, expected 0 <= ratio < 1, the share that is left out"
            )
        algorithm = Choco(TopK(1 - ratio), step_size=consensus_lr)
        super().__init__(rank, size, graph=topology, algorithm=algorithm, **options)


class centralizedCommunicator(Communicator):
    """The exact average after every step: `GossipDataParallel(model, schedule=Schedule(average_every=1))`.

    Args:
        rank: the rank of this process.
        size: the number of ranks.
        options: any argument of `GossipDataParallel`.
    """

    def __init__(self, rank: int, size: int, **options: Any) -> None:
        super().__init__(rank, size, schedule=Schedule(average_every=1), **options)
