"""The attributes of Stochastic Gradient Push that work on a wrapper."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def transfer_params(wrapper: Any) -> Callable[..., bool]:
    """Run the round of a wrapper with rounds="manual"."""

    def transfer(mix: bool = True) -> bool:
        if getattr(wrapper, "rounds", "") == "manual":
            wrapper.gossip_step()
        return True

    return transfer


def block(wrapper: Any) -> Callable[[], None]:
    """Wait for all ranks."""
    transport = wrapper._local.averager.transport
    return lambda: transport.all_reduce(torch.zeros(1, device=transport.device), what="block()")


def push_sum_weight(wrapper: Any) -> Tensor:
    """The push-sum weight, float64 [1], a copy; 1 for a wrapper without one."""
    buffer = getattr(wrapper._local, "buffer", None)
    return torch.ones(1, dtype=torch.float64, device="cpu") if buffer is None else buffer.vector.push_sum_weight.clone()


def nothing(wrapper: Any) -> Callable[[], None]:
    """A call that does nothing."""
    return lambda: None
