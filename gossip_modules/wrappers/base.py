"""The one nn.Module base of the gossip wrappers: a round before each training forward, no_sync, eval flush, state."""

from __future__ import annotations

import contextlib
import threading
import warnings
import weakref
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..engine.engine import Engine, IdleEngine
from ..flat.buffer import FlatBuffer
from ..flat.vector import FlatVector
from ..transport.agreement import broadcast_tensors, check_agreement
from ..transport.connect import connect
from ..transport.process_group import ProcessGroupTransport
from .averaging import AveragingMixin
from .composition import check_inside
from .state import MetadataState
from .step import TrainingStep
from .unsynced_steps import UnsyncedSteps


class GossipWrapper(TrainingStep, MetadataState, AveragingMixin):
    """A module whose parameters are mixed with those of other ranks before its training forwards.

    [Note: One forward is one round] At a training forward (the wrapped module in train mode, grad enabled, something to
    train) the parameters are exactly "after optimizer.step()", so the round runs there and needs no handle on the
    optimizer; a GradScaler that skips a step on one rank skips no round. Inside `no_sync()` a forward belongs to the
    same optimizer step as the next one: the round runs at the first forward of each step, like mixing after the
    previous `step()`. The mode is that of the wrapped module, since trainers put modules in train mode without the
    wrapper's knowledge. A forward in eval mode starts no round unless `gossip_in_eval_mode`; training so is an error.

    [Note: What travels] is what is trained at a training forward: the first one after `requires_grad_()`, or after
    layers have come or gone, makes a new vector on all ranks alike. Nothing else does: a `flush()`, which one rank may
    call alone (for `eval()`, or to save), leaves vectors as they are, so that those of all ranks still match. An
    asynchronous wrapper, whose peers may ask for its model at any time, goes on with what is frozen and refuses what is
    new.

    [Note: Safe point] Gossip writes parameters in place, through storage that autograd does not watch. So it bumps
    their version: a backward through a graph that was built before the round fails with autograd's own "modified by
    an inplace operation" instead of computing wrong gradients. For two forwards per step put all but the last in
    `no_sync()`.

    A subclass makes the engine, which says when rounds run: its constructor sets `_engine` and `_averager`. What a
    training forward does is in `TrainingStep`.

    Args:
        module: mutated: its trained tensors become views of one flat vector, which keeps their values.
        gossip_buffers: whether floating-point buffers (BatchNorm statistics) are mixed too, or stay local.
        gossip_in_eval_mode: whether forwards in eval mode with grad enabled are training forwards too.
        num_slices: the vector is padded to this many equal slices.

    Raises:
        ValueError: the module is wrapped or sharded by another tool, or has nothing to train.
    """

    _engine: Engine

    def __init__(
        self,
        module: nn.Module,
        *,
        gossip_buffers: bool = True,
        gossip_in_eval_mode: bool = False,
        num_slices: int = 1,
    ) -> None:
        super().__init__()
        check_inside(module, wrapper=type(self).__name__)
        self.module = module
        self.gossip_in_eval_mode = gossip_in_eval_mode
        self._unsynced_steps = UnsyncedSteps()
        self._sync = True
        self._is_step_start = True
        self._is_closed = False
        self._is_checked = False  # what is around it
        self._has_trained = False
        self._trains = False  # in this forward
        self._place: tuple[int, int] | None = None  # rank and world size, where there are such
        self._buffer = FlatBuffer(module, include_buffers=gossip_buffers, num_slices=num_slices)

    # What constructors share.

    def _hello(self, process_group: dist.ProcessGroup | None, *, timeout: timedelta) -> ProcessGroupTransport:
        """A transport over a group that exists, for what must be agreed on before any group is made.

        Ranks that disagree would make different groups and hang.
        """
        world = dist.group.WORLD if process_group is None and dist.is_initialized() else process_group
        return connect(world, module_device=self._buffer.vector.raw.device, comm_device=None, timeout=timeout)

    def _agree(
        self, hello: ProcessGroupTransport, description: Mapping[str, str | Sequence[str]], *, init_sync: bool
    ) -> None:
        """Check that ranks agree on wrapper, `description` and model, then start from rank 0's tensors if asked.

        The last use of `hello`, which is closed.
        """
        whole = {"wrapper": type(self).__name__, **description, "model": self._buffer.signature()}
        try:
            check_agreement(hello, whole)
            self._place = hello.rank, hello.world_size
            if init_sync:
                flat = {id(tensor) for tensor in self._buffer.tensors}
                rest = [x for x in (*self.module.parameters(), *self.module.buffers()) if id(x) not in flat]
                broadcast_tensors(hello, [self._buffer.vector.raw, *rest])
        finally:
            hello.close()

    def _close_when_collected(self) -> None:
        """[Note: Lost wrappers] Threads outlive a wrapper nobody closed, and would go on giving peers its model.

        The constructor of a subclass whose engine has threads calls this when the engine is there.
        """
        weakref.finalize(self, _close_lost, self._engine, type(self).__name__).atexit = False  # at exit they just end

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Forwards inside belong to the same optimizer step as the first forward outside: one round for all.

        Gradient accumulation as with DistributedDataParallel: all micro-batches but the last go in here. `eval()` ends
        a step, so an epoch that breaks off inside leaves no rank out of step with the others.
        """
        before, self._sync = self._sync, False
        try:
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

    def close(self) -> None:
        """See `AveragingMixin`. Forwards after it are local."""
        if not self._is_closed:
            try:
                if self._engine.is_asynchronous:
                    self._engine.close()  # before the flush, which applies what peers say meanwhile
                self.flush()
            finally:
                self._is_closed = True
                self._engine.close()
                self._release()

    def _release(self) -> None:
        """Give back groups, threads and connections, when nothing uses them any more."""

    @property
    @abstractmethod
    def _bytes_sent(self) -> int:
        """Payload that this rank has sent."""

    def comm_stats(self) -> dict[str, float]:
        """What communication did on this rank so far; local and cheap.

        Returns:
            bytes_sent (payload, collectives included), wait_seconds (training thread blocked), num_rounds, num_skipped
            (rounds that were left out for infinities or NaN), mean_staleness and max_staleness (forwards that rounds
            were late), consensus_distance (as last measured by `consensus_distance()`, NaN before).
        """
        stats = self._engine.stats
        return {
            "bytes_sent": self._bytes_sent,
            "wait_seconds": stats.wait_seconds,
            "num_rounds": stats.num_rounds,
            "num_skipped": stats.num_skipped,
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
        """The round counter, what the algorithm remembers, and whose it is: plain values and tensors."""
        place = {} if self._place is None else dict(zip(("rank", "world_size"), self._place, strict=True))
        return {"is_step_start": self._is_step_start, "engine": self._engine.state_dict(), **place}

    def set_extra_state(self, state: dict[str, Any] | None) -> None:
        """Take back what `get_extra_state` gave; None (a checkpoint of a plain model) warns and starts anew.

        Raises:
            ValueError: it is the state of another rank, or of a world of another size; nothing is changed then.
        """
        if state is None:
            warnings.warn(
                "the state dict holds no gossip state: counting rounds from 0. It is that of a plain model, or one "
                "without its metadata, as torch.distributed.checkpoint makes it",
                stacklevel=2,
            )
            self._is_step_start = True
            self._engine.reset()
            return
        self._check_place(state)
        self._is_step_start = state["is_step_start"]
        self._engine.load_state_dict(state["engine"])

    def _check_place(self, state: Mapping[str, Any]) -> None:
        """Each rank has a model, a push-sum weight and a memory of its own."""
        found = state.get("rank"), state.get("world_size")
        if self._place is not None and found != self._place and found != (None, None):
            (rank, world_size), (own, own_size) = found, self._place
            raise ValueError(
                f"got the state of rank {rank} of {world_size}, expected that of rank {own} of {own_size}: every rank "
                "has a model of its own, so each loads what it has saved itself, with as many ranks as then; to start "
                "from one model everywhere, save that of averaged() and load it into the module before it is wrapped"
            )

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self.flush()
        self._unsynced_steps.forget()
        super()._load_from_state_dict(*args, **kwargs)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> GossipWrapper:
        """`.to()`, `.half()` and their like: what is in flight belongs to the old dtype and device."""
        self.flush()
        super()._apply(fn, recurse)
        return self

    def __getstate__(self) -> dict[str, Any]:
        self.flush()
        state = self.__dict__.copy()
        if self._engine.is_asynchronous:  # its threads answer for one model; a copy is a snapshot that stays local
            state.update(_engine=IdleEngine(self._engine), _is_closed=True)
        return state

    # What AveragingMixin needs.

    def _read(self) -> FlatVector:
        self.flush()
        self._share_buffers()
        self._to_numerator()
        return self._buffer.vector

    def _write(self, vector: FlatVector) -> None:
        self._to_estimate()
        torch.autograd.graph.increment_version(self._buffer.parameters)

    def _parameters_of(self, vector: FlatVector) -> Sequence[Tensor]:
        return [x[: part.numel()] for x, part in zip(vector.segments, self._buffer.parameter_segments, strict=True)]


def _close_lost(engine: Engine, name: str) -> None:
    """[Note: Lost wrappers] Whichever thread collects garbage waits for nobody."""
    if engine.is_closed:
        return

    def close() -> None:
        with contextlib.suppress(Exception):  # of peers: there is nobody left to tell
            engine.close()

    threading.Thread(target=close, name="gossip-closing", daemon=True).start()
    warnings.warn(f"a {name} was lost without close(): it leaves its peers now", ResourceWarning, stacklevel=2)
