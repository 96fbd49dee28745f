"""AllReduceDataParallel: the exact baseline, torch's DistributedDataParallel with the wrappers' common methods."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..flat.nonfinite import FiniteCheck, check_policy
from ..flat.selection import Selection
from ..flat.vector import FlatVector
from ..old_calls import ForeignArguments, Refused, foreign_arguments
from ..rounds.mixer import GlobalAverage
from ..transport.connect import CPU, connect
from ..transport.process_group import DEFAULT_TIMEOUT
from .arguments import as_timeout, check_process_group
from .averaging import AveragingMixin
from .composition import check_inside, hold, let_go
from .gradient_group import NamedReplica, leaving_alone
from .other_names import ALL_REDUCE_ARGUMENTS, OldNames
from .state import check_prefix

_GOSSIP_ARGUMENTS: ForeignArguments = {
    "membership": Refused(
        "a step needs the gradients of all ranks; take GossipDataParallel, or torchft for an all-reduce that survives "
        "its workers"
    ),
    "gossip_buffers": Refused("buffers are those of rank 0; write broadcast_buffers=False where each rank has its own"),
}


class AllReduceDataParallel(OldNames, NamedReplica, AveragingMixin):
    """AllReduce SGD: gradients averaged over all ranks, bit for bit as DistributedDataParallel does.

    What it adds is what the gossip wrappers have too: `flush`, `close`, `average_`, `averaged`, `consensus_distance`
    and `comm_stats`, so that one training loop serves all methods; and over Gloo, errors that name who failed.

    Args:
        module: as for DistributedDataParallel.
        timeout: for the waits of the added methods, in seconds or as a timedelta; the gradients' all-reduce has the
            process group's own.
        on_nonfinite: what to do about parameters that hold infinities or NaN, which one rank's gradients bring to all.
            "raise": FloatingPointError at the next training forward, on all ranks; "spread": do not look, as
            DistributedDataParallel.
        ignore: the names of parameters and buffers that always stay local, also at the start, such as "head.bias", or
            patterns, such as "adapter.*"; beside those that the module's `_ddp_params_and_buffers_to_ignore` names.
        ddp_options: any argument of DistributedDataParallel.

    Raises:
        ValueError: a membership, which this wrapper does not take; for an all-reduce that survives its workers there
            is torchft.
        RuntimeError: torch.distributed is not initialised.
        TimeoutError, ConnectionError: (construction, forward, backward) a peer is late or gone; names it.
    """

    @foreign_arguments(_GOSSIP_ARGUMENTS, ALL_REDUCE_ARGUMENTS, passed_on_to=DistributedDataParallel.__init__)
    def __init__(
        self,
        module: nn.Module,
        *,
        timeout: timedelta | float = DEFAULT_TIMEOUT,
        on_nonfinite: str = "raise",
        ignore: Sequence[str] = (),
        **ddp_options: Any,
    ) -> None:
        check_inside(module, wrapper=type(self).__name__)
        if check_policy(on_nonfinite) == "skip":
            raise ValueError(
                "got on_nonfinite='skip' for AllReduceDataParallel, expected 'raise' or 'spread': a gradient of one "
                "rank is in the average of all; let a GradScaler skip such steps"
            )
        device = next((parameter.device for parameter in module.parameters()), CPU)  # DDP refuses a module of none
        mesh, group = ddp_options.get("device_mesh"), ddp_options.get("process_group")
        check_process_group(group)
        if mesh is not None:
            group = mesh.get_group()
        elif group is None and dist.is_initialized():
            group = dist.group.WORLD
        transport = self._transport = connect(group, module_device=device, timeout=as_timeout(timeout))
        self._averager = GlobalAverage(transport)
        self.__dict__["_chosen"] = Selection(ignore=ignore)  # before nn.Module has its own
        self._chosen.check(module)
        with leaving_alone(module, self._chosen):
            super().__init__(module, transport, what="making an AllReduceDataParallel", **ddp_options)
        n = dist.get_world_size(self.process_group)
        num_bytes = sum(p.numel() * p.element_size() for p in self._trained)
        self._bytes_per_step = 2 * (n - 1) * num_bytes // n
        self._num_steps = 0
        self._is_finite = FiniteCheck() if on_nonfinite == "raise" else None
        hold(self)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As DistributedDataParallel."""
        is_step = self.training and torch.is_grad_enabled() and self.require_backward_grad_sync
        is_finite = self._is_finite if is_step else None
        if is_finite is not None and not is_finite.of_all(self._trained):
            raise FloatingPointError(
                f"rank {dist.get_rank(self.process_group)}: before step {self._num_steps} the model holds "
                "infinities or NaN, on all ranks, as gradients are averaged; expected finite ones. Go on from "
                "a checkpoint with a smaller learning rate, clipped gradients or a GradScaler; "
                "on_nonfinite='spread' does not look"
            )
        output = super().forward(*args, **kwargs)
        self._num_steps += is_step
        return output

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        check_prefix(state_dict, prefix, self.module, wrapper=type(self).__name__, is_stateless=True)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def flush(self) -> None:
        """Nothing is ever in flight after a backward."""

    def _forget_models(self) -> None:
        """Nothing is kept of other models."""

    def close(self) -> None:
        """Give back what averages need; a script that trains on still averages gradients."""
        let_go(self)
        self._transport.close()

    def comm_stats(self) -> dict[str, float]:
        """As the gossip wrappers' `comm_stats`. bytes_sent is what a ring all-reduce of the gradients sends, by
        calculation; wait_seconds is NaN, as the waits are inside DistributedDataParallel's backward."""
        return {
            "bytes_sent": self._num_steps * self._bytes_per_step + self._transport.num_bytes_sent,
            "wait_seconds": float("nan"),
            "num_rounds": self._num_steps,
            "num_skipped": 0,
            "mean_staleness": 0.0,
            "max_staleness": 0.0,
            "consensus_distance": self._last_consensus_distance,
        }

    @property
    def _selection(self) -> Selection:
        return self._chosen

    @property
    def _trained(self) -> list[Tensor]:
        ignored = self._selection.ignored_ids(self.module)
        return [p for p in self.module.parameters() if p.requires_grad and id(p) not in ignored]

    def _read(self) -> FlatVector:
        buffers = self._selection.averaged(self.module).values()
        return FlatVector.pack([*self._trained, *buffers], num_buffers=len(buffers))

    def _write(self, vector: FlatVector) -> None:
        vector.unpack_to([*self._trained, *self._selection.averaged(self.module).values()])
