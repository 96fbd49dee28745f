"""Devices other than the CPU: pinned memory, float64, and waits. Streams and events are torch's for any accelerator."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor


def host_zeros(shape: Sequence[int], dtype: torch.dtype, *, beside: torch.device) -> Tensor:
    """Return zeros in host memory, pinned if copies to and from the device `beside` are faster then."""
    return torch.zeros(shape, dtype=dtype, device="cpu", pin_memory=_has_pinned_memory(beside.type))


def wide_dtype(device: torch.device) -> torch.dtype:
    """Return float64, or float32 if the device cannot compute in float64, like Apple's GPUs."""
    return _wide_dtype(device.type)


def wait_for_queue(device: torch.device) -> None:
    """Return when everything that this thread has queued on the device is complete; at once for the CPU."""
    if device.type != "cpu":  # by an event, since MPS cannot wait for a stream
        torch.accelerator.current_stream(device).record_event().synchronize()


@functools.cache
def _has_pinned_memory(device_type: str) -> bool:
    if device_type in ("cpu", "mps"):  # whose memory is the host's
        return False
    try:
        torch.empty(1, device="cpu", pin_memory=True)
    except RuntimeError:  # its backend has none
        return False
    return True


@functools.cache
def _wide_dtype(device_type: str) -> torch.dtype:
    try:
        torch.ones(1, dtype=torch.float64, device=device_type).mul_(0.5)
    except (RuntimeError, TypeError):
        return torch.float32
    return torch.float64
