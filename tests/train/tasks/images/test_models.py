"""The models: sizes derived from the papers, shapes, initialisation."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from train.tasks.images.models import MODELS, BasicBlock


def num_parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def test_resnet20_has_the_layers_of_the_paper() -> None:
    model = MODELS["resnet20"](3, 10)
    # 6n + 2 layers for n = 3: 19 convolutions and the classifier.
    assert sum(isinstance(module, nn.Conv2d) for module in model.modules()) == 19
    kernels = 9 * (3 * 16 + 6 * 16 * 16 + 16 * 32 + 5 * 32 * 32 + 32 * 64 + 5 * 64 * 64)
    norms = 2 * (7 * 16 + 6 * 32 + 6 * 64)
    assert num_parameters(model) == kernels + norms + 64 * 10 + 10
    assert model(torch.rand(2, 3, 32, 32)).shape == (2, 10)


def test_basic_block_shortcut_subsamples_and_pads_with_zeros() -> None:
    block = BasicBlock(2, 4, stride=2)
    nn.init.zeros_(block.get_parameter("second.1.weight"))  # f(x) = 0, so that the block is its shortcut
    x = torch.rand(1, 2, 6, 6)
    y = block(x)
    assert torch.equal(y[:, :2], x[:, :, ::2, ::2])
    assert not y[:, 2:].any()


def test_cnn_takes_images_of_any_size() -> None:
    model = MODELS["cnn"](1, 10)
    assert num_parameters(model) < 40_000
    assert model(torch.rand(2, 1, 8, 8)).shape == model(torch.rand(2, 1, 28, 28)).shape == (2, 10)


def test_resnet50_starts_every_block_as_the_identity() -> None:
    with torch.device("meta"):
        assert num_parameters(MODELS["resnet50"](3, 1000)) == 25_557_032  # torchvision's documentation
    with pytest.raises(ValueError, match=r"got images of 1 channels, expected 3 for resnet50; use --model cnn"):
        MODELS["resnet50"](1, 10)
    model = MODELS["resnet50"](3, 10)
    gammas = [module.weight for name, module in model.named_modules() if name.endswith("bn3")]
    assert len(gammas) == 16
    assert not any(gamma.any() for gamma in gammas)
    assert model.get_parameter("fc.weight").std().item() == pytest.approx(0.01, rel=0.05)
