"""LockstepWrapper: all ranks take the same rounds, with the peers of a graph and the weights of a mixing manager."""

from __future__ import annotations

import contextlib
import warnings
from abc import abstractmethod
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..engine.engine import LockstepEngine
from ..flat.nonfinite import check_policy
from ..gossip.gossiper import Gossiper
from ..graph_manager.base import GraphManager
from ..mixing_manager.base import MixingManager
from ..schedule import Schedule
from ..transport.connect import connect
from ..transport.process_group import DEFAULT_TIMEOUT
from .base import GossipWrapper
from .debias import Debias
from .defaults import choose_gossiper, choose_mixing
from .join import UnevenInputs
from .node import Node, count_nodes

DEFAULT_SCHEDULE = Schedule()


class LockstepWrapper(GossipWrapper, UnevenInputs):
    """A wrapper in which round t of one rank is round t of all: who talks to whom, with which weights, what is said.

    Subclasses choose the engine.

    Args:
        module: mutated: its trained tensors become views of one flat vector. Values are kept, or those of rank 0.
        graph: who sends to whom; None = `defaults.choose_mixing`. Its world size is the number of nodes.
        mixing: the weights, over that graph; None = see `defaults.choose_mixing`.
        push_sum: SGP (any directed graph) rather than D-PSGD (push-pull).
        gossiper: an algorithm of its own instead; where it needs no particular graph, `push_sum` chooses the default.
        wire_dtype: torch.bfloat16 or torch.float16: what travels is rounded to it, parameters are not: see `PushPull`.
        schedule: which steps gossip, which average globally.
        process_group: used as it is, so it must carry nothing else; None = a new group over all ranks.
        nprocs_per_node: consecutive ranks that form one node and hold one model: see `Node`.
        comm_device: "cpu" sends GPU parameters through pinned memory; None = the GPU if the group has NCCL.
        init_sync: start from the parameters and buffers of rank 0.
        gossip_buffers: whether floating-point buffers (BatchNorm statistics) are averaged too, or stay local.
        gossip_in_eval_mode: whether forwards in eval mode (frozen BatchNorm statistics, no dropout) with grad enabled
            are training forwards too, which start rounds.
        on_nonfinite: what to do about infinities and NaN, which gossip hands to all ranks within a few rounds. "raise":
            FloatingPointError at the rank that has them, before others get them (with overlap, at those that were sent
            them too, before they are applied). "skip": leave out such rounds, which `comm_stats()` counts; without
            overlap it costs a copy of the model, and no compressed gossiper can. "spread": do not look.
        find_unused_parameters: for `nprocs_per_node > 1`, as for DistributedDataParallel.
        timeout: for every wait.

    Raises:
        ValueError: arguments that do not fit, or ranks that disagree on model, graph, mixing or options.
        RuntimeError: torch.distributed is not initialised.
        TimeoutError, ConnectionError: (construction, forward, `flush()`) a peer is late or gone; names it.
        FloatingPointError: (forward, `flush()`) see `on_nonfinite`.
    """

    _debias: Debias

    def __init__(
        self,
        module: nn.Module,
        *,
        graph: GraphManager | None = None,
        mixing: MixingManager | None = None,
        push_sum: bool = True,
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
        if find_unused_parameters and nprocs_per_node == 1:
            warnings.warn("find_unused_parameters has no effect with nprocs_per_node=1", stacklevel=3)
        # count_nodes refuses less
        super().__init__(
            module,
            gossip_buffers=gossip_buffers,
            gossip_in_eval_mode=gossip_in_eval_mode,
            num_slices=max(nprocs_per_node, 1),
        )
        self._on_nonfinite = check_policy(on_nonfinite)
        UnevenInputs.__init__(self)
        device = self._buffer.vector.raw.device
        hello = self._hello(process_group, timeout=timeout)
        num_nodes = count_nodes(hello.world_size, nprocs_per_node, process_group)
        gossiper = choose_gossiper(gossiper, push_sum=push_sum, wire_dtype=wire_dtype)
        mixing = choose_mixing(graph, mixing, push_sum=push_sum, world_size=num_nodes, gossiper=gossiper)
        options = (
            *(schedule, self._engine_options(), nprocs_per_node, gossip_buffers, init_sync, str(comm_device)),
            *(gossip_in_eval_mode, on_nonfinite),
        )
        description = {
            "graph": repr(mixing.graph),
            "mixing": repr(mixing),
            "gossiper": repr(gossiper),
            "options (schedule, engine, nprocs_per_node, gossip_buffers, init_sync, comm_device, gossip_in_eval_mode, "
            "on_nonfinite)": repr(options),
        }
        self._agree(hello, description, init_sync=init_sync)
        links: dict[str, Any] = {"module_device": device, "comm_device": comm_device, "timeout": timeout}
        if nprocs_per_node > 1:
            self._node = Node(
                module, num_slices=nprocs_per_node, find_unused_parameters=find_unused_parameters, **links
            )
        ranks = Node.peers(nprocs_per_node) if nprocs_per_node > 1 else None
        self._transport = connect(process_group, ranks=ranks, **links)
        gossiper.bind(mixing, self._transport)
        self._engine: LockstepEngine = self._make_engine(gossiper, schedule)
        self._averager = self._engine.averager
        self._debias = Debias(self._buffer, is_needed=gossiper.is_weighted)

    @abstractmethod
    def _make_engine(self, gossiper: Gossiper, schedule: Schedule) -> LockstepEngine:
        """When rounds run."""

    def _engine_options(self) -> str:
        """What the ranks' engines must agree on."""
        return ""

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """See `GossipWrapper`; the processes of a node average gradients when it ends."""
        with super().no_sync(), contextlib.nullcontext() if self._node is None else self._node.replica.no_sync():
            yield

    def settle(self) -> None:
        """See `AveragingMixin`. As all ranks call it, it also makes what is trained now what travels."""
        if not (self._is_closed or self._is_averaged):
            self._choose()
        super().settle()

    def close(self) -> None:
        """See `AveragingMixin`. Forwards after it are local."""
        try:
            super().close()
        finally:
            self._debias.stop()

    def _release(self) -> None:
        self._transport.close()
        if self._node is not None:
            self._node.transport.close()

    @property
    def _bytes_sent(self) -> int:
        local_bytes = 0 if self._node is None else self._node.transport.num_bytes_sent
        return self._transport.num_bytes_sent + local_bytes

    def get_extra_state(self) -> dict[str, Any]:
        """See `GossipWrapper`; with the push-sum weight."""
        return {"weight": self._buffer.vector.weight.clone(), **super().get_extra_state()}

    def set_extra_state(self, state: dict[str, Any] | None) -> None:
        """See `GossipWrapper`; without state the push-sum weight is 1.

        Raises:
            ValueError: the state is that of a wrapper of another kind.
        """
        if state is not None and "weight" not in state:
            raise ValueError(
                f"got gossip state without a push-sum weight, expected that of a {type(self).__name__} or its like; "
                "wrap as when it was saved, or load the model alone: module.load_state_dict"
            )
        super().set_extra_state(state)
        self._buffer.vector.weight.copy_(torch.ones(1) if state is None else state["weight"])

    # Uneven inputs.

    @property
    def join_device(self) -> torch.device:
        """See `UnevenInputs`."""
        return self._transport.device

    @property
    def _join_timeout(self) -> timedelta:
        return self._transport.timeout

    def _check_join(self) -> None:
        if self._node is not None:
            raise ValueError(
                f"got nprocs_per_node={self._node.num_slices} inside Join, expected 1; "
                "give the processes of a node equally many batches"
            )
        if self._transport.world_size != dist.get_world_size():
            raise ValueError(
                f"got Join over a process group of {self._transport.world_size} of {dist.get_world_size()} ranks, "
                "expected all; Join counts the ranks of the default group"
            )
