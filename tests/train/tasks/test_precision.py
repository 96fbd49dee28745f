"""Precision: dtype of the forward, memory format, scale of the loss."""

from __future__ import annotations

import torch
from torch import nn

from train.tasks.precision import Precision

CPU = torch.device("cpu")


def test_images_and_kernels_take_the_memory_format_and_labels_do_not() -> None:
    precision = Precision(CPU, is_channels_last=True)
    convolution = nn.Conv2d(3, 4, 3)
    assert precision.prepare_module(convolution) is convolution
    assert convolution.weight.is_contiguous(memory_format=torch.channels_last)
    images = precision.prepare(torch.rand(2, 3, 5, 5))
    assert images.is_contiguous(memory_format=torch.channels_last)
    assert convolution(images).is_contiguous(memory_format=torch.channels_last)
    assert precision.prepare(torch.arange(4)).tolist() == [0, 1, 2, 3]
    assert Precision(CPU).prepare(torch.rand(2, 3, 5, 5)).is_contiguous()


def test_autocast_and_scaler_follow_the_dtype() -> None:
    layer, x = nn.Linear(2, 2), torch.rand(1, 2)
    for amp, dtype in (("none", torch.float32), ("bfloat16", torch.bfloat16), ("float16", torch.float16)):
        precision = Precision(CPU, amp)
        with precision.autocast():
            assert layer(x).dtype == dtype
        assert precision.make_scaler().is_enabled() == (amp == "float16")
