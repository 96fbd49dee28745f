"""A model whose compute time is waited, not burnt: many ranks fit on few cores, and a GPU's pace can be played."""

from __future__ import annotations

import math
import time
from typing import Any, cast

import torch
from torch import Tensor, nn

FORWARD_SHARE = 1 / 3
"""Of the compute time; a backward pass is twice the work."""
_BASE_PARAMETERS = 11_181_642
_BASE_WIDTHS = (64, 128, 256, 512)
_NUM_CLASSES = 10


def resnet_shapes(num_parameters: float) -> list[list[tuple[int, ...]]]:
    """The shapes of the parameters of each layer of a ResNet-18, from the first to the last.

    Args:
        num_parameters: about so many; the widths are scaled to it. 11.2e6: those of the original, with 10 classes.
    """
    scale = math.sqrt(num_parameters / _BASE_PARAMETERS)
    widths = [max(1, round(width * scale)) for width in _BASE_WIDTHS]
    layers = [_convolution(3, widths[0], 7)]
    inputs = widths[0]
    for stage, width in enumerate(widths):
        for block in range(2):
            layers += [_convolution(inputs, width, 3), _convolution(width, width, 3)]
            if stage and not block:
                layers.append(_convolution(inputs, width, 1))
            inputs = width
    return [*layers, [(_NUM_CLASSES, inputs), (_NUM_CLASSES,)]]


def _convolution(inputs: int, outputs: int, size: int) -> list[tuple[int, ...]]:
    """With its BatchNorm."""
    return [(outputs, inputs, size, size), (outputs,), (outputs,)]


class WaitedModel(nn.Module):
    """Layers of a ResNet-18's parameters whose forward and backward passes are sleeps.

    Each of L layers takes 1 / L of the pass, and its gradients appear when its share of the backward pass is over, the
    last layer's first: so methods that send gradients as they come do so as in life. Sleeps end at absolute times
    after the start of the pass, so what the processor really does meanwhile, and oversleeping, does not add up.

    Gradients are one number everywhere: they cost one pass over memory, within the time that is waited.

    Args:
        num_parameters: see `resnet_shapes`.
        compute_seconds: forward and backward together, at a factor of 1.
        gradient: their value, another one on each rank.

    Attributes:
        factor: of the compute time of the next step: see `Delays`.
    """

    def __init__(self, num_parameters: float, *, compute_seconds: float, gradient: float = 1e-3) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.layers = nn.ModuleList(
            nn.ParameterList([0.05 * torch.randn(shape, generator=generator) for shape in shapes])
            for shapes in resnet_shapes(num_parameters)
        )
        self.compute_seconds = compute_seconds
        self.gradient = gradient
        self.factor = 1.0
        self._start = 0.0

    def forward(self, x: Tensor) -> Tensor:
        """x, a float32 scalar that requires no gradient, after the time of a forward pass; a loss."""
        self._start = time.perf_counter()
        x = x.detach().requires_grad_()
        for index, layer in enumerate(self.layers):
            x = _WaitedLayer.apply(x, self, index, *cast(nn.ParameterList, layer))
        return cast(Tensor, _Turn.apply(x, self))

    def begin_pass(self) -> None:
        """The pass starts now."""
        self._start = time.perf_counter()

    def wait_for(self, num_layers: int, share: float) -> None:
        """Until so many layers of the pass are over, which is that share of the step."""
        seconds = self.compute_seconds * self.factor * share * num_layers / len(self.layers)
        time.sleep(max(self._start + seconds - time.perf_counter(), 0.0))


class _WaitedLayer(torch.autograd.Function):
    """x -> x, after a while; its gradients are constants."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, model: WaitedModel, index: int, *parameters: Tensor) -> Tensor:
        """Wait for the layer's end in the forward pass."""
        ctx.model, ctx.index, ctx.shapes = model, index, [p.shape for p in parameters]
        model.wait_for(index + 1, FORWARD_SHARE)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """Wait for the layer's end in the backward pass, then hand out its gradients."""
        model: WaitedModel = ctx.model
        values = [torch.full(shape, model.gradient) for shape in ctx.shapes]
        model.wait_for(len(model.layers) - ctx.index, 1 - FORWARD_SHARE)
        return gradients[0], None, None, *values


class _Turn(torch.autograd.Function):
    """x -> x; the backward pass begins here."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, model: WaitedModel) -> Tensor:
        """Nothing to wait for."""
        ctx.model = model
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """Start the clock."""
        ctx.model.begin_pass()
        return gradients[0], None
