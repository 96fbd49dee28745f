"""AllReduceDataParallel: the exact baseline, torch's DistributedDataParallel with the wrappers' common methods."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ..engine.engine import EngineStats
from ..engine.gradients import GradientEngine
from ..flat.nonfinite import FiniteCheck, check_policy
from ..flat.selection import Selection, set_noise_source
from ..flat.sharded import is_gathered
from ..flat.vector import FlatVector
from ..loop.gradient_watch import weakly
from ..membership.background_log import log
from ..membership.membership import Membership
from ..old_names import OldModuleNames, takes_old_arguments
from ..rounds.mixer import GlobalAverage
from ..transport.agreement import broadcast_state
from ..transport.connect import CPU, connect
from ..transport.process_group import DEFAULT_TIMEOUT
from ..transport.state_tree import copied
from .arguments import as_timeout, check_flags, check_process_group, group_of
from .averaging import AveragedModel, AveragingMixin
from .base import GossipWrapper
from .checkpoint import Checkpoint
from .composition import check_inside, check_whole, claim, release
from .participant import Participant, check_links
from .state import check_prefix

_PARTS = 16  # of the parameters, of which each step looks at one: a pass over all would take 5 % of a step


class PackedModel(AveragedModel):
    """A module with its tensors in their own memory: averages work on a packed copy of them.

    Args:
        module, selection, averager: see `AveragedModel`.
    """

    selection: Selection = Selection()

    def __init__(self, module: nn.Module, selection: Selection, averager: GlobalAverage) -> None:
        self.module, self.selection, self.averager = module, selection, averager

    @property
    def trained(self) -> list[Tensor]:
        """See `AveragedModel`."""
        ignored = self.selection.ignored_ids(self.module)
        return [p for p in self.module.parameters() if p.requires_grad and id(p) not in ignored]

    @property
    def exchanged_tensors(self) -> list[Tensor]:
        """See `AveragedModel`: gradients travel."""
        return self.trained

    def read(self) -> FlatVector:
        """See `AveragedModel`."""
        buffers = self.selection.averaged(self.module).values()
        return FlatVector.pack([*self.trained, *buffers], num_buffers=len(buffers))

    def write(self, vector: FlatVector) -> None:
        """See `AveragedModel`."""
        vector.unpack_to([*self.trained, *self.selection.averaged(self.module).values()])


class AllReduceDataParallel(OldModuleNames, DistributedDataParallel, AveragingMixin):
    """AllReduce SGD: gradients averaged over all ranks, bit for bit as DistributedDataParallel does.

    It adds the methods of the gossip wrappers: `flush`, `close`, `average_`, `averaged`, `consensus_distance` and
    `comm_stats`, so that one training loop serves all methods. Errors of these methods name the failed rank; errors of
    DistributedDataParallel, in a forward or a backward, are torch's own.

    Args:
        module: as for DistributedDataParallel.
        timeout: for the waits of the added methods, in seconds or as a timedelta; the gradients' all-reduce has the
            process group's own.
        on_nonfinite: the reaction to infinities or NaN in parameters. One rank's gradients bring them to all. "raise":
            FloatingPointError at a training forward, on all ranks: at the next one if all parameters hold some, and
            within sixteen if any does (each forward looks at a sixteenth of the tensors in turn); "spread": do not
            look, as DistributedDataParallel.
        ignore: names of parameters and buffers to leave local, also at the start, such as "head.bias", or patterns,
            such as "adapter.*"; in addition to the module's `_ddp_params_and_buffers_to_ignore`.
        membership: a `Membership`, where workers may die and join: the wrapper is an `ElasticAllReduce` then.
        ddp_options: any argument of DistributedDataParallel; `gradient_as_bucket_view` is True if you leave it out.

    Raises:
        ValueError: invalid arguments.
        RuntimeError: torch.distributed is not initialised.
        TimeoutError, ConnectionError: (construction and the added methods) a peer is late or gone; names it.
    """

    def __new__(cls, *args: Any, membership: Membership | None = None, **options: Any) -> Any:
        """An `ElasticAllReduce` with a membership, which this class is a base of in `isinstance`."""
        if membership is None:
            return super().__new__(cls)
        return ElasticAllReduce(*args, membership=membership, **options)

    @takes_old_arguments(passed_on_to=DistributedDataParallel.__init__)
    def __init__(
        self,
        module: nn.Module,
        *,
        timeout: timedelta | float = DEFAULT_TIMEOUT,
        on_nonfinite: str = "raise",
        ignore: Sequence[str] = (),
        membership: Membership | None = None,
        **ddp_options: Any,
    ) -> None:
        check_inside(module, wrapper=type(self).__name__)
        if is_gathered(module):
            raise ValueError(
                "got a module of fully_shard to wrap in AllReduceDataParallel, expected a whole one: fully_shard "
                "averages gradients itself; leave the wrapper out, or shard over a mesh of two dimensions (HSDP)"
            )
        check_policy(on_nonfinite)
        device = next((parameter.device for parameter in module.parameters()), CPU)  # DDP refuses a module of none
        mesh, group = ddp_options.get("device_mesh"), ddp_options.get("process_group")
        check_process_group(group)
        if mesh is not None:
            group = mesh.get_group()
        elif group is None and dist.is_initialized():
            group = dist.group.WORLD
        transport = self._transport = connect(group, module_device=device, timeout=as_timeout(timeout))
        local = self._local = PackedModel(module, Selection(ignore=ignore), GlobalAverage(transport))
        local.selection.check(module)
        set_noise_source(module, 0)
        if transport.backend == "gloo":
            transport.barrier(what="making an AllReduceDataParallel")  # names an absent rank, as torch does not
        with local.selection.ignored_by_ddp(module):
            super().__init__(module, **{"gradient_as_bucket_view": True, **ddp_options})
        n = dist.get_world_size(self.process_group)
        # The parameters whose gradients are reduced, as they are now for good.
        self._reduced = sorted(local.trained, key=Tensor.numel)
        num_bytes = sum(p.numel() * p.element_size() for p in self._reduced)
        self._bytes_per_step = 2 * (n - 1) * num_bytes // n
        self._num_steps = 0
        self._is_finite = FiniteCheck() if on_nonfinite == "raise" else None
        claim(self)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As DistributedDataParallel."""
        is_step = self.training and torch.is_grad_enabled() and self.require_backward_grad_sync
        is_finite, num_parts = self._is_finite if is_step else None, min(_PARTS, len(self._reduced))
        part = slice(self._num_steps % num_parts, None, num_parts)
        if is_finite is not None and not is_finite.of_part(self._reduced, part):
            raise FloatingPointError(
                f"rank {dist.get_rank(self.process_group)}: before step {self._num_steps} the model holds "
                "infinities or NaN, on all ranks, as gradients are averaged; expected finite ones. Go on from "
                "a checkpoint with a smaller learning rate, clipped gradients or a GradScaler; "
                "on_nonfinite='spread' does not look"
            )
        self._transport.thread = threading.get_ident()  # if it raises, the other ranks get to know at once
        output = super().forward(*args, **kwargs)
        self._num_steps += is_step
        self._transport.count_on_ring(self._bytes_per_step * is_step)
        return output

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        check_prefix(state_dict, prefix, self.module, wrapper=type(self).__name__, is_stateless=True)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def checkpoint(self, *optimizers: Optimizer) -> Checkpoint:
        """See `GossipDataParallel.checkpoint`."""
        return Checkpoint(self, self, self._local, optimizers)

    def flush(self) -> None:
        """Nothing is ever in flight after a backward."""

    def close(self) -> None:
        """Release the resources of averages; further training still averages gradients."""
        release(self)
        self._transport.close()

    def comm_stats(self) -> dict[str, float]:
        """As the gossip wrappers' `comm_stats`. bytes_sent is computed for a ring all-reduce of the gradients;
        wait_seconds is NaN, as the waits are inside DistributedDataParallel's backward."""
        return super().comm_stats()

    def _round_stats(self) -> dict[str, float]:
        return EngineStats(wait_seconds=float("nan"), num_rounds=self._num_steps).summary()


@AllReduceDataParallel.register
class ElasticAllReduce(GossipWrapper):
    """All-reduce SGD with a membership: `AllReduceDataParallel(module, membership=membership)`.

    At the end of each backward the gradients of all workers are averaged, as one message for each dtype. A backward of
    a forward inside `no_sync()` averages nothing. If a worker dies in an average, all workers drop the gradients of
    that step, and the next step waits for the next generation. `comm_stats()["num_skipped"]` counts such steps, and the
    log of the membership names them. After a missed average a worker takes model and tracked state from another worker
    when the generation begins; see `GradientEngine`. So all workers hold the same model, as without a membership.

    Run a backward for each step on all workers, as with DistributedDataParallel: averages meet in their order, so
    without a backward a worker would average gradients of other steps than the rest. A nested backward, as in a
    reentrant checkpoint, and `torch.autograd.grad` of parameters average once more. This changes nothing but the bytes.

    A `torch.amp.GradScaler` refuses a step without gradients: skip `scaler.step` where all gradients are None.

    Args:
        module: the model, on its device. Its trained tensors become views of one flat vector.
        membership: its workers. All of them begin with the model of the first one.
        process_group: leave it out, as a `Membership` has its own.
        device_mesh: leave it out.
        timeout: leave it out, as a `Membership` has its own.
        on_nonfinite: the reaction to infinities or NaN in parameters. "raise": FloatingPointError at the next training
            forward; "spread": do not look.
        ignore: the names of parameters and buffers to keep local, or patterns; their gradients are not averaged.
        broadcast_buffers: whether rank 0 sends its floating-point buffers, such as running statistics, in each step.

    Raises:
        ValueError: invalid arguments, or a job of other workers.
        FloatingPointError: (forward) see `on_nonfinite`.
    """

    @takes_old_arguments()
    def __init__(
        self,
        module: nn.Module,
        *,
        membership: Membership,
        timeout: timedelta | float = DEFAULT_TIMEOUT,
        on_nonfinite: str = "raise",
        ignore: Sequence[str] = (),
        broadcast_buffers: bool = True,
        process_group: dist.ProcessGroup | None = None,
        device_mesh: dist.DeviceMesh | None = None,
    ) -> None:
        process_group = group_of(process_group, device_mesh)
        check_links(membership, group=process_group, init_sync=True, timeout=as_timeout(timeout))
        check_policy(on_nonfinite)
        check_flags(broadcast_buffers=broadcast_buffers)
        # As DistributedDataParallel, which averages gradients in both modes.
        super().__init__(module, selection=Selection(broadcast_buffers, ignore), gossip_in_eval_mode=True)
        check_whole(module, what="a membership")
        local = self._local
        local.name, local.averages_gradients = AllReduceDataParallel.__name__, True
        local.description = {"on_nonfinite": on_nonfinite, "selection": str(local.selection)}
        local.world = Participant(local, membership, lambda n: n, peers=_watched, has_links=False)
        self._handle: torch.utils.hooks.RemovableHandle | None = None
        self._is_synced = False  # the last training forward was outside no_sync()
        engine = GradientEngine(local.transport, share=self._share, on_nonfinite=on_nonfinite)
        self._start(engine, GlobalAverage(local.transport))

    def _train(self, *, is_current: bool) -> None:
        """A training forward begins: its backward averages gradients."""
        super()._train(is_current=is_current)
        self._is_synced = self._sync
        if self._handle is None or not is_current:
            if self._handle is not None:
                self._handle.remove()
            watched = [parameter for parameter in self._local.trained if parameter.requires_grad]
            self._handle = register_multi_grad_hook(watched, weakly(self._note_backward), mode="any")

    def _note_backward(self, gradient: Tensor) -> None:
        """A backward has computed a first gradient; averages follow at its end."""
        if self._is_synced and not (self._local.is_closed or self._local.is_averaged):
            torch.autograd.Variable._execution_engine.queue_callback(self._average_gradients)

    def _average_gradients(self) -> None:
        engine, world = self._local.engine, self._local.world
        assert isinstance(engine, GradientEngine)
        assert isinstance(world, Participant)
        if not engine.average(self._local.trained):
            name, step = world.membership.name, engine.step - 1
            log.warning("job %s: step %d is lost: a worker failed while gradients were averaged", name, step)

    def _compare_with_average(self, own: FlatVector) -> None:
        """Do nothing: ranks with averaged gradients have equal models."""

    def _release(self) -> None:
        super()._release()
        if self._handle is not None:
            self._handle.remove()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_handle": None}

    def _share(self, source: int) -> None:
        """The tracked state of all workers <- the state of rank `source`."""
        world = self._local.world
        assert isinstance(world, Participant)
        tracked, transport = world.membership.job.tracked, self._local.transport
        state = {name: copied(value.state_dict()) for name, value in tracked.items()}
        state = broadcast_state(transport, state, source=source, what="sharing the tracked state")
        for name, value in tracked.items():
            value.load_state_dict(state[name])


def _watched(world_size: int, rank: int) -> set[int]:
    """The watched ranks, at distances 1, 2, 4, ...: several dead neighbours are all seen."""
    distances = [1 << k for k in range((world_size - 1).bit_length())]
    return {(rank + sign * distance) % world_size for distance in distances for sign in (-1, 1)} - {rank}
