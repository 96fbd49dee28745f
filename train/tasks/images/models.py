"""The image classifiers: a small CNN, ResNet-20 for 32x32 images and torchvision's ResNet-50."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping

import torch.nn.functional as F
from torch import Tensor, nn


def conv_norm(in_channels: int, out_channels: int, *, stride: int = 1) -> nn.Sequential:
    """A 3x3 convolution with BatchNorm, which makes a bias redundant."""
    return nn.Sequential(
        nn.Conv2d(in_channels, out_channels, 3, stride=stride, padding=1, bias=False), nn.BatchNorm2d(out_channels)
    )


def small_cnn(in_channels: int, num_classes: int) -> nn.Module:
    """Three convolutions, 32k parameters; enough for 8x8 digits.

    Args:
        in_channels: channels of an image.
        num_classes: logits of the output [B, num_classes].

    Returns:
        The model, a function of images [B, in_channels, H, W] with H, W >= 4.
    """
    return nn.Sequential(
        conv_norm(in_channels, 24),
        nn.ReLU(inplace=True),
        conv_norm(24, 32),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        conv_norm(32, 64),
        nn.ReLU(inplace=True),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 4, num_classes),
    )


class BasicBlock(nn.Module):
    """relu(x + f(x)); where the shape changes, x is subsampled and padded with zero channels (He et al., option A)."""

    def __init__(self, in_channels: int, out_channels: int, *, stride: int) -> None:
        super().__init__()
        self.stride = stride
        self.num_new_channels = out_channels - in_channels
        self.first = conv_norm(in_channels, out_channels, stride=stride)
        self.second = conv_norm(out_channels, out_channels)

    def forward(self, x: Tensor) -> Tensor:
        """x: [B, in_channels, H, W]; returns [B, out_channels, H / stride, W / stride]."""
        shortcut = x
        if self.stride != 1 or self.num_new_channels:
            shortcut = F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.num_new_channels))
        return F.relu(shortcut + self.second(F.relu(self.first(x))))


def resnet20(in_channels: int, num_classes: int) -> nn.Module:
    """ResNet-20 for 32x32 images, 0.27 M parameters (He et al., CVPR 2016, arXiv 1512.03385, section 4.2)."""
    blocks: list[nn.Module] = []
    channels = 16
    for width in (16, 32, 64):
        for index in range(3):
            stride = 2 if width != 16 and index == 0 else 1
            blocks.append(BasicBlock(channels, width, stride=stride))
            channels = width
    stem = nn.Sequential(conv_norm(in_channels, 16), nn.ReLU(inplace=True))
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, num_classes))
    model = nn.Sequential(stem, *blocks, head)
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return model


def resnet50(in_channels: int, num_classes: int) -> nn.Module:
    """torchvision's ResNet-50; the last gamma of each block starts at 0 and the classifier at N(0, 0.01).

    The recipe of Goyal et al., "Accurate, Large Minibatch SGD", 2017, arXiv 1706.02677, section 5.1.
    """
    # Imported here: torchvision takes two seconds to import, and the digits need none of it.
    from torchvision.models import resnet50 as torchvision_resnet50

    if in_channels != 3:
        raise ValueError(f"got images of {in_channels} channels, expected 3 for resnet50; use --model cnn or resnet20")
    model: nn.Module = torchvision_resnet50(num_classes=num_classes, zero_init_residual=True)
    classifier = model.get_submodule("fc")
    assert isinstance(classifier, nn.Linear), "torchvision's ResNet-50 ends in a linear layer"
    nn.init.normal_(classifier.weight, std=0.01)
    nn.init.zeros_(classifier.bias)
    return model


MODELS: Mapping[str, Callable[[int, int], nn.Module]] = {"cnn": small_cnn, "resnet20": resnet20, "resnet50": resnet50}


def fingerprint(module: nn.Module) -> str:
    """A short hash of the names, shapes and dtypes of a model's state."""
    layout = [f"{name} {tuple(tensor.shape)} {tensor.dtype}" for name, tensor in module.state_dict().items()]
    return hashlib.sha256("\n".join(layout).encode()).hexdigest()[:16]
