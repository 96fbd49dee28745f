"""The models of all workers as the rows of one tensor, trained in one thread by the library's own algorithms.

A row goes through what a rank goes through: the weights, the rule and, of RelaySGD, the algorithm that
`GossipDataParallel` chooses for the same arguments, and torch's own SGD. Tests hold the two together, method by method.
Ranks as threads took three times as long: 72 ms of one core for a step of SGP by 16 ranks, 32 images each; stacked, the
networks took 22 and a round 2.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gossip_modules import Schedule
from gossip_modules.algorithms.d_psgd import DPSGD
from gossip_modules.extend import SGDStep
from gossip_modules.rounds.stacked import Stacked
from gossip_modules.wrappers.defaults import Choices

_DEFAULTS: Mapping[str, Any] = {
    "graph": None,
    "mixing": None,
    "push_sum": True,
    "gossiper": None,
    "wire_dtype": None,
    "schedule": Schedule(),
}


class Replicas:
    """n copies of a network, all computed at once: a convolution of all is one of n groups.

    Args:
        network: that all start from; of `Conv2d` without groups, `ReLU`, `Flatten` and `Linear`.
        num_workers: n.

    Attributes:
        x: the parameters [n, d], in the order of network.parameters().

    Raises:
        ValueError: the network has other layers.
    """

    def __init__(self, network: nn.Sequential, num_workers: int) -> None:
        if others := [
            layer for layer in network if not isinstance(layer, nn.Conv2d | nn.ReLU | nn.Flatten | nn.Linear)
        ]:
            raise ValueError(f"got the layers {others}, expected Conv2d, ReLU, Flatten and Linear only")
        self._layers = list(network)
        self._shapes = [parameter.shape for parameter in network.parameters()]
        flat = nn.utils.parameters_to_vector(network.parameters()).detach()
        self.x = nn.Parameter(flat.repeat(num_workers, 1))

    def logits(self, x: Tensor, images: Tensor) -> Tensor:
        """Of networks with the parameters x [n, d], of images [n, B, C, H, W], a batch for each: [n, B, classes]."""
        n, batch_size = images.shape[:2]
        parts = x.split([shape.numel() for shape in self._shapes], dim=1)
        parameters = iter(part.unflatten(1, shape) for part, shape in zip(parts, self._shapes, strict=True))
        h = images.transpose(0, 1).flatten(1, 2).contiguous(memory_format=torch.channels_last)  # [B, n C, H, W]
        for layer in self._layers:
            if isinstance(layer, nn.Conv2d):
                weight, bias = next(parameters).flatten(0, 1), next(parameters).flatten()
                h = F.conv2d(h, weight, bias, layer.stride, layer.padding, groups=n)
            elif isinstance(layer, nn.ReLU):
                h = torch.relu(h)
            elif isinstance(layer, nn.Flatten):
                h = h.reshape(batch_size, n, -1).transpose(0, 1)
            else:
                weight, bias = next(parameters), next(parameters)
                h = torch.baddbmm(bias[:, None], h, weight.transpose(1, 2))
        return h

    def backward(self, images: Tensor, labels: Tensor) -> float:
        """x.grad <- the gradient of each worker's mean loss at its own parameters; returns the mean of all losses.

        Args:
            images: [n, B, C, H, W].
            labels: int64 [n, B].
        """
        self.x.grad = None
        total = F.cross_entropy(self.logits(self.x, images).flatten(0, 1), labels.flatten(), reduction="sum")
        (total / labels.shape[1]).backward()
        return total.item() / labels.numel()

    def consensus_distance(self) -> float:
        """sqrt(mean_i ||x_i - mean_j x_j||^2)."""
        return float((self.x.data - self.x.data.mean(0)).square().sum(1).mean().sqrt())


class StackedGossip:
    """The rounds of `GossipDataParallel(model, **arguments)` on the rows of x.

    Args:
        arguments: of `GossipDataParallel`: graph, mixing, push_sum, gossiper, algorithm.
        x: the models [n, d], which rounds change.
        optimizer: an SGD over x alone, whose momentum an algorithm may change.

    Raises:
        ValueError: push-sum weights other than 1 would be needed.
    """

    def __init__(self, arguments: Mapping[str, Any], x: Tensor, optimizer: torch.optim.SGD) -> None:
        chosen = Choices(**{**_DEFAULTS, **arguments})
        mixing, gossiper = chosen.choose(len(x), overlap=False, init_sync=True, on_nonfinite="raise", nprocs_per_node=1)
        self._driver = Stacked(getattr(gossiper, "algorithm", DPSGD()), mixing)
        if self._driver.weights is not None:
            raise ValueError(f"got {mixing}, expected doubly stochastic weights: there are no push-sum weights here")
        self._x, self._optimizer = x, optimizer
        self._step: SGDStep | None = None  # since the last round
        optimizer.register_step_post_hook(self._note_step)

    def _note_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        group = optimizer.param_groups[0]
        self._step = SGDStep(group["lr"], group["momentum"])

    def round(self) -> None:
        """x <- what a round makes of it; before each step's forward, as in the wrappers."""
        self._driver.step(self._x.data, self._driver.t, sgd=self._step)
        if self._step is not None and (momentum := self._driver.momentum) is not None:
            self._optimizer.state[self._x]["momentum_buffer"].copy_(momentum)
