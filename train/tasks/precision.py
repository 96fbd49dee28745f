"""Precision: dtype of the forward, memory format of images, and the scale of the loss."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Precision:
    """How a forward computes.

    Args:
        device: where it does.
        amp: dtype of autocast, 'bfloat16' or 'float16'; 'none': no autocast.
        is_channels_last: memory format of images and convolution kernels.
    """

    device: torch.device
    amp: str = "none"
    is_channels_last: bool = False

    def prepare_module(self, module: nn.Module) -> nn.Module:
        """The module on the device, its kernels in the memory format; changes the module."""
        module = module.to(self.device)
        return module.to(memory_format=torch.channels_last) if self.is_channels_last else module

    def prepare(self, x: Tensor) -> Tensor:
        """x on the device; images [B, C, H, W] in the memory format, labels [B] as they are."""
        is_channels_last = x.ndim == 4 and self.is_channels_last
        memory_format = torch.channels_last if is_channels_last else torch.contiguous_format
        return x.to(self.device, non_blocking=True, memory_format=memory_format)

    def autocast(self) -> AbstractContextManager[None]:
        """The context of a forward."""
        if self.amp == "none":
            return nullcontext()
        return torch.autocast(self.device.type, dtype=getattr(torch, self.amp))

    def make_scaler(self) -> torch.amp.GradScaler:
        """The scale of the loss: at work for float16, 1 otherwise."""
        return torch.amp.GradScaler(self.device.type, enabled=self.amp == "float16")
