"""SGD with momentum over the parameters of a model, and the options with which a method can train by it."""

from __future__ import annotations

import torch
from torch import nn

from gossip_modules.methods import METHODS
from train.tasks.parameter_groups import decay_groups


def sgd(
    module: nn.Module, *, momentum: float, nesterov: bool = False, weight_decay: float, decay_all: bool = False
) -> torch.optim.SGD:
    """SGD over the trainable parameters of `module`.

    The learning rate starts at 0: set it before every step with `set_learning_rate`.

    Args:
        module: whose parameters are trained.
        momentum: 0: none.
        nesterov: Nesterov's form of the momentum.
        weight_decay: the weight decay of tensors of two or more dimensions.
        decay_all: also of biases and normalisation.
    """
    groups = decay_groups(module, weight_decay=weight_decay, decay_all=decay_all)
    return torch.optim.SGD(groups, lr=0.0, momentum=momentum, nesterov=nesterov and momentum > 0)


def check_sgd(recipe: str, *, momentum: float, nesterov: bool = False, first_moment_period: int = 0) -> None:
    """Check that a recipe can train by SGD with this momentum.

    Raises:
        ValueError: it needs a momentum and there is none, or it does not take Nesterov's form; or there is no momentum
            to average, see `RunConfig.first_moment_period`.
    """
    method = METHODS[recipe]
    if method.needs_sgd and not momentum:
        raise ValueError(
            f"got momentum={momentum} with recipe={recipe!r}, expected more: the momentum of SGD is "
            f"part of {method.title}; pass --momentum 0.9, or take --recipe d2 or gradienttracking"
        )
    if first_moment_period and not momentum:
        raise ValueError(
            f"got first_moment_period={first_moment_period} with momentum={momentum}, expected 0: there is no momentum "
            "to average; pass --momentum 0.9, or leave it out"
        )
    if nesterov and not method.takes_nesterov:
        raise ValueError(
            f"got nesterov=True with recipe={recipe!r}, expected False: the law of {method.title} is that of "
            "plain momentum; pass --no-nesterov, or take --recipe qgdsgdm"
        )
