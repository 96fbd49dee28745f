"""SGD with momentum: which parameters decay, and which forms of momentum there are."""

from __future__ import annotations

from torch import nn

from train.tasks.momentum_sgd import sgd
from train.tasks.parameter_groups import set_learning_rate


def test_only_matrices_and_kernels_of_trainable_parameters_decay() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Linear(2, 2))
    model[2].bias.requires_grad_(False)
    optimizer = sgd(model, momentum=0.9, nesterov=True, weight_decay=0.1)
    decay = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert decay == {
        id(p): (0.1 if name in ("0.weight", "2.weight") else 0.0)
        for name, p in model.named_parameters()
        if name != "2.bias"
    }
    papers = sgd(model, momentum=0.9, nesterov=True, weight_decay=0.1, decay_all=True)
    assert [group["weight_decay"] for group in papers.param_groups] == [0.1, 0.1]
    set_learning_rate(optimizer, 0.25)
    assert [group["lr"] for group in optimizer.param_groups] == [0.25, 0.25]


def test_nesterov_without_momentum_is_plain_sgd() -> None:
    assert not sgd(nn.Linear(1, 1), momentum=0.0, nesterov=True, weight_decay=0.0).defaults["nesterov"]
