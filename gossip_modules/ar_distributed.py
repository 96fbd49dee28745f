"""AllReduceDataParallel: the exact baseline, torch's DistributedDataParallel with the wrappers' common methods."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from .averaging import AveragingMixin
from .connect import connect
from .flat_vector import FlatVector
from .gossiper import GlobalAverage
from .transport import DEFAULT_TIMEOUT


class AllReduceDataParallel(DistributedDataParallel, AveragingMixin):
    """AllReduce SGD: gradients averaged over all ranks, bit for bit as DistributedDataParallel does.

    What it adds is what the gossip wrappers have too: `flush`, `close`, `average_`, `averaged`, `consensus_distance`
    and `comm_stats`, so that one training loop serves all methods.

    Args:
        module: as for DistributedDataParallel.
        timeout: for the waits of what is added; the gradients' all-reduce has the process group's own.
        ddp_options: any argument of DistributedDataParallel.
    """

    def __init__(self, module: nn.Module, *, timeout: timedelta = DEFAULT_TIMEOUT, **ddp_options: Any) -> None:
        super().__init__(module, **ddp_options)
        device = next(module.parameters()).device
        self._averager = GlobalAverage(connect(self.process_group, module_device=device, timeout=timeout))
        n = dist.get_world_size(self.process_group)
        num_bytes = sum(p.numel() * p.element_size() for p in module.parameters() if p.requires_grad)
        self._bytes_per_step = 2 * (n - 1) * num_bytes // n
        self._num_steps = 0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As DistributedDataParallel."""
        if self.training and torch.is_grad_enabled() and self.require_backward_grad_sync:
            self._num_steps += 1
        return super().forward(*args, **kwargs)

    def flush(self) -> None:
        """Nothing is ever in flight after a backward."""

    def close(self) -> None:
        """Nothing to end."""

    def comm_stats(self) -> dict[str, float]:
        """As the gossip wrappers' `comm_stats`. bytes_sent is what a ring all-reduce of the gradients sends, by
        calculation; wait_seconds is NaN, as the waits are inside DistributedDataParallel's backward."""
        return {
            "bytes_sent": self._num_steps * self._bytes_per_step + self._averager.transport.num_bytes_sent,
            "wait_seconds": float("nan"),
            "num_rounds": self._num_steps,
            "mean_staleness": 0.0,
            "max_staleness": 0.0,
            "consensus_distance": self._last_consensus_distance,
        }

    @property
    def _parameters_and_buffers(self) -> tuple[list[Tensor], list[Tensor]]:
        parameters = [p for p in self.module.parameters() if p.requires_grad]
        return parameters, [b for b in self.module.buffers() if b.is_floating_point()]

    def _read(self) -> FlatVector:
        parameters, buffers = self._parameters_and_buffers
        return FlatVector.pack([*parameters, *buffers])

    def _write(self, vector: FlatVector) -> None:
        parameters, buffers = self._parameters_and_buffers
        vector.unpack_to([*parameters, *buffers])

    def _parameters_of(self, vector: FlatVector) -> Sequence[Tensor]:
        numels = dict.fromkeys((x.dtype for x in vector.segments), 0)
        for parameter in self._parameters_and_buffers[0]:
            is_pair = parameter.is_complex()
            numels[parameter.dtype.to_real() if is_pair else parameter.dtype] += parameter.numel() * (1 + is_pair)
        return [x[: numels[x.dtype]] for x in vector.segments]
