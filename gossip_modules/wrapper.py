"""The one nn.Module base of the gossip wrappers: the round before a forward, no_sync, eval flush, state."""

from __future__ import annotations

import contextlib
import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.profiler import record_function

from .agreement import broadcast_tensors, check_agreement
from .averaging import AveragingMixin
from .connect import connect
from .debias import Debias
from .defaults import choose_gossiper, choose_mixing
from .engine import Engine
from .flat_buffer import FlatBuffer
from .flat_vector import FlatVector
from .gossiper import Gossiper
from .graph_manager import GraphManager
from .metadata_state import MetadataState
from .mixing_manager import MixingManager
from .node import Node, count_nodes
from .schedule import Schedule
from .transport import DEFAULT_TIMEOUT
from .uneven_inputs import UnevenInputs

DEFAULT_SCHEDULE = Schedule()


class GossipWrapper(MetadataState, UnevenInputs, AveragingMixin):
    """A module that averages its parameters with a few peers before every training forward.

    [Note: One forward is one round] At a training forward (train mode, grad enabled) the parameters are exactly
    "after optimizer.step()", so the round runs there and needs no handle on the optimizer; a GradScaler that skips a
    step on one rank skips no round. Inside `no_sync()` a forward belongs to the same optimizer step as the next one:
    the round runs at the first forward of each step, like mixing after the previous `step()`.

    [Note: Safe point] Gossip writes parameters in place, through storage that autograd does not watch. So it bumps
    their version: a backward through a graph that was built before the round fails with autograd's own "modified by
    an inplace operation" instead of computing wrong gradients. For two forwards per step put all but the last in
    `no_sync()`.

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
        find_unused_parameters: for `nprocs_per_node > 1`, as for DistributedDataParallel.
        timeout: for every wait.

    Raises:
        ValueError: arguments that do not fit, or ranks that disagree on model, graph, mixing or options.
        RuntimeError: torch.distributed is not initialised.
        TimeoutError, ConnectionError: (construction, forward, `flush()`) a peer is late or gone; names it.
    """

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
        find_unused_parameters: bool = False,
        timeout: timedelta = DEFAULT_TIMEOUT,
    ) -> None:
        super().__init__()
        UnevenInputs.__init__(self)
        self.module = module
        self._sync = True
        self._is_step_start = True
        self._is_closed = False
        self._has_trained = False
        if find_unused_parameters and nprocs_per_node == 1:
            warnings.warn("find_unused_parameters has no effect with nprocs_per_node=1", stacklevel=3)
        num_slices = max(nprocs_per_node, 1)  # count_nodes refuses less
        self._buffer = FlatBuffer(module, include_buffers=gossip_buffers, num_slices=num_slices)
        device = self._buffer.vector.raw.device
        # A collective of its own before any group is made: ranks that disagree would make different groups and hang.
        world = dist.group.WORLD if process_group is None and dist.is_initialized() else process_group
        hello = connect(world, module_device=device, comm_device=None, timeout=timeout)
        num_nodes = count_nodes(hello.world_size, nprocs_per_node, process_group)
        gossiper = choose_gossiper(gossiper, push_sum=push_sum, wire_dtype=wire_dtype)
        mixing = choose_mixing(graph, mixing, push_sum=push_sum, world_size=num_nodes, gossiper=gossiper)
        options = (schedule, self._engine_options(), nprocs_per_node, gossip_buffers, init_sync, str(comm_device))
        check_agreement(
            hello,
            {
                "wrapper": type(self).__name__,
                "graph": repr(mixing.graph),
                "mixing": repr(mixing),
                "gossiper": repr(gossiper),
                "options (schedule, engine, nprocs_per_node, gossip_buffers, init_sync, comm_device)": repr(options),
                "model": self._buffer.signature(),
            },
        )
        if init_sync:
            flat = {id(tensor) for tensor in self._buffer.tensors}
            rest = [x for x in (*module.parameters(), *module.buffers()) if id(x) not in flat]
            broadcast_tensors(hello, [self._buffer.vector.raw, *rest])
        self._node: Node | None = None
        links: dict[str, Any] = {"module_device": device, "comm_device": comm_device, "timeout": timeout}
        if nprocs_per_node > 1:
            self._node = Node(
                module, num_slices=nprocs_per_node, find_unused_parameters=find_unused_parameters, **links
            )
        ranks = Node.peers(nprocs_per_node) if nprocs_per_node > 1 else None
        self._transport = connect(process_group, ranks=ranks, **links)
        gossiper.bind(mixing, self._transport)
        self._engine = self._make_engine(gossiper, schedule)
        self._averager = self._engine.averager
        self._debias = Debias(self._buffer, is_needed=gossiper.is_weighted)

    @abstractmethod
    def _make_engine(self, gossiper: Gossiper, schedule: Schedule) -> Engine:
        """When rounds run."""

    def _engine_options(self) -> str:
        """What the ranks' engines must agree on."""
        return ""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward, after this step's gossip round if it is a training forward."""
        self._before_forward()
        # The node's replica averages gradients and shares buffers, so all its processes must call it: in training only.
        is_node_wide = self._node is not None and self.training and torch.is_grad_enabled()
        module = self._node.replica if self._node is not None and is_node_wide else self.module
        with record_function(f"{type(self).__name__}.forward"):
            return module(*args, **kwargs)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Forwards inside belong to the same optimizer step as the first forward outside: one round for all.

        Gradient accumulation as with DistributedDataParallel: all micro-batches but the last go in here. `eval()` ends
        a step, so an epoch that breaks off inside leaves no rank out of step with the others.
        """
        before, self._sync = self._sync, False
        try:
            with contextlib.nullcontext() if self._node is None else self._node.replica.no_sync():
                yield
        finally:
            self._sync = before

    def train(self, mode: bool = True) -> GossipWrapper:
        """As `nn.Module.train`, after a flush; eval mode also ends the current step."""
        self.flush()
        self._is_step_start = self._is_step_start or not mode
        return super().train(mode)

    def flush(self) -> None:
        """See `AveragingMixin`. Leaves the de-biased estimate in the parameters."""
        if self._is_closed:
            return
        if not self._buffer.is_attached():
            self._take_in()
        self._land()
        if not self._buffer.is_complete():
            self._buffer.attach()

    @torch.no_grad()
    def _take_in(self) -> None:
        """Attach tensors that were put in place of ours; what is in flight is applied to their values."""
        if self._engine.is_in_flight:
            self._buffer.pull()
            self._land()
            self._buffer.push()
        self._buffer.attach()

    def _land(self) -> None:
        if self._engine.is_in_flight:
            self._debias.to_numerator()
            with torch.no_grad():
                self._engine.flush(self._gossiped)
            self._written()
        self._debias.to_estimate()

    def close(self) -> None:
        """See `AveragingMixin`. Forwards after it are local."""
        if not self._is_closed:
            try:
                self.flush()
            finally:
                self._is_closed = True
                self._debias.stop()
                self._engine.close()

    def comm_stats(self) -> dict[str, float]:
        """What communication did on this rank so far; local and cheap.

        Returns:
            bytes_sent (payload, all nodes' collectives included), wait_seconds (training thread blocked), num_rounds,
            mean_staleness and max_staleness (forwards that rounds were late), consensus_distance (as last measured by
            `consensus_distance()`, NaN before).
        """
        stats = self._engine.stats
        local_bytes = 0 if self._node is None else self._node.transport.num_bytes_sent
        return {
            "bytes_sent": self._transport.num_bytes_sent + local_bytes,
            "wait_seconds": stats.wait_seconds,
            "num_rounds": stats.num_rounds,
            "mean_staleness": stats.total_staleness / max(stats.num_rounds, 1),
            "max_staleness": stats.max_staleness,
            "consensus_distance": self._last_consensus_distance,
        }

    # State; see MetadataState.

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As `nn.Module.state_dict`, flushed and de-biased; gossip state rides in its metadata, not in its keys."""
        self.flush()
        return super().state_dict(*args, **kwargs)

    def get_extra_state(self) -> dict[str, Any]:
        """Push-sum weight, round counter and codec state: plain values and tensors."""
        return {
            "weight": self._buffer.vector.weight.clone(),
            "is_step_start": self._is_step_start,
            "engine": self._engine.state_dict(),
        }

    def set_extra_state(self, state: dict[str, Any] | None) -> None:
        """Take back what `get_extra_state` gave; None (a checkpoint of a plain model) warns and starts anew."""
        if state is None:
            warnings.warn(
                "the state dict holds no gossip state: counting rounds from 0, push-sum weight 1", stacklevel=2
            )
            state = {"weight": torch.ones(1), "is_step_start": True, "engine": {"t": 0, "step": 0, "gossiper": {}}}
        self._buffer.vector.weight.copy_(state["weight"])
        self._is_step_start = state["is_step_start"]
        self._engine.load_state_dict(state["engine"])

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self.flush()
        super()._load_from_state_dict(*args, **kwargs)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> GossipWrapper:
        """`.to()`, `.half()` and their like: what is in flight belongs to the old dtype and device."""
        self.flush()
        super()._apply(fn, recurse)
        return self

    def __getstate__(self) -> dict[str, Any]:
        self.flush()
        return self.__dict__.copy()

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

    # The round itself.

    @torch.compiler.disable
    def _before_forward(self) -> None:
        """[Note: One forward is one round]"""
        if self.training and torch.is_grad_enabled() and not self._is_closed:
            if torch._C._current_graph_task_id() != -1:  # inside a backward: the recomputation of a checkpoint
                if not self._has_trained:
                    raise RuntimeError(
                        "got a training forward inside a backward and none before it, expected rounds to run in the "
                        "forward; checkpoint parts of the module, or pass use_reentrant=False"
                    )
                return
            self._has_trained = True
            if self._is_step_start:
                self._notify()
                self._step_start()
            self._is_step_start = self._sync

    def _step_start(self) -> None:
        if not self._buffer.is_attached():
            self._take_in()
        if self._node is not None:
            self._node.share_buffers(self._buffer.buffer_segments)
        with torch.no_grad(), record_function(f"{type(self).__name__}.mix"):
            self._debias.to_numerator()
            if self._engine.round(self._gossiped):
                self._written()
            self._debias.to_estimate()

    @property
    def _gossiped(self) -> FlatVector:
        return self._buffer.vector if self._node is None else self._node.slice(self._buffer.vector)

    def _written(self) -> None:
        """[Note: Safe point]"""
        if self._node is not None:
            self._node.gather(self._buffer.vector)
        torch.autograd.graph.increment_version(self._buffer.parameters)

    # What AveragingMixin needs.

    def _read(self) -> FlatVector:
        self.flush()
        if self._node is not None:
            self._node.share_buffers(self._buffer.buffer_segments)
        self._debias.to_numerator()
        return self._buffer.vector

    def _write(self, vector: FlatVector) -> None:
        self._debias.to_estimate()
        torch.autograd.graph.increment_version(self._buffer.parameters)

    def _parameters_of(self, vector: FlatVector) -> Sequence[Tensor]:
        return [x[: part.numel()] for x, part in zip(vector.segments, self._buffer.parameter_segments, strict=True)]
