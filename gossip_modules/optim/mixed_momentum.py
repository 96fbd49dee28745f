"""MixedMomentum: the first moments of an optimizer are mixed in rounds, as the model is."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

MOMENTS = ("exp_avg", "momentum_buffer")
"""The names of the first moment of a parameter in the state of an optimizer: of Adam and its kin, and of SGD."""
NAME = "mixed_momentum"
"""The name of the `MixedMomentum` in its module."""

Pairs: TypeAlias = Iterable[tuple[Tensor, Tensor]]
"""Parameters, and the buffers that hold their first moments."""
_Optimizer = TypeVar("_Optimizer", bound=Optimizer)


class MixedMomentum(nn.Module):
    """Mixes the first moments of an optimizer in each round of a wrapper, with the weights of the model.

    An optimizer on rank i has the moment m_i, with the noise of this rank's batches. A round of W(t) is then

        m_i <- sum_j W_ij m_j
        x_i <- sum_j W_ij x_j

    so the next step has a moment of many ranks, as the step of all-reduce has. Messages have twice the elements.
    `docs/benchmarks/gap.md` has the measurements.

    The moments are buffers of the module, without a place in its `state_dict()`, and wrappers mix them like running
    statistics: in rounds, in exact averages, and late with `overlap=True`. The state of the optimizer refers to them.
    Compressed rounds send them exactly.

    Yu, Jin, Yang, "On the Linear Speedup Analysis of Communication Efficient Momentum SGD for Distributed Non-Convex
    Optimization", ICML 2019, arXiv 1905.03817, mix the momentum of SGD with the model. For Adam it is this library's
    own.

    Args:
        module: the module to wrap afterwards; mutated: it gets this object as `mixed_momentum`, with a buffer for each
            parameter that is trained.

    Raises:
        ValueError: the module has one already, or nothing to train.

    Example:
        >>> momentum = MixedMomentum(module)  # before the wrapper
        >>> model = GossipDataParallel(module)
        >>> optimizer = momentum.of(GossipAdamW(model.parameters(), lr=1e-3, num_ranks=8))
    """

    mixes_buffers = True
    """For `Selection`: all buffers of this module are mixed; a wrapper that leaves one local is refused."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        if hasattr(module, NAME):
            raise ValueError(f"got a {type(module).__name__} with a {NAME}, expected none; make one for each module")
        trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
        if not trained:
            raise ValueError(f"got a {type(module).__name__} without trained parameters, expected some")
        self.names = list(trained)
        self._trained = list(trained.values())
        for name, parameter in trained.items():
            self.register_buffer(buffer_name(name), torch.zeros_like(parameter), persistent=False)
        setattr(module, NAME, self)

    def forward(self, x: Any) -> Any:
        """Return x, for modules such as `nn.Sequential` that call all their children in turn."""
        return x

    def of(self, optimizer: _Optimizer) -> _Optimizer:
        """Let rounds mix the first moments of an optimizer; returns it.

        Args:
            optimizer: over parameters of the module, with a moment `exp_avg` or `momentum_buffer`, such as
                `GossipAdamW`, `torch.optim.AdamW` or `torch.optim.SGD` with momentum. Mutated: it gets hooks.

        Raises:
            ValueError: (also in steps) the optimizer trains a parameter that the module did not train when this object
                was made; (steps) it has no first moment.
        """

        def pairs() -> Pairs:
            return zip(self._trained, (self.get_buffer(buffer_name(name)) for name in self.names), strict=True)

        keep_moments_in(optimizer, pairs)
        return optimizer


def buffer_name(parameter_name: str) -> str:
    """Return the name of the buffer of a parameter; names of buffers have no point."""
    return parameter_name.replace(".", "/")


def keep_moments_in(optimizer: Optimizer, pairs: Callable[[], Pairs]) -> None:
    """Let the state of an optimizer refer to these buffers as the first moments of parameters, after each step.

    Args:
        optimizer: the optimizer; mutated: it gets hooks.
        pairs: returns its parameters and their buffers.
    """

    def keep(*_: Any) -> None:
        buffers = {id(parameter): buffer for parameter, buffer in pairs()}
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            if parameter.requires_grad and id(parameter) not in buffers:
                raise ValueError(
                    f"got a {type(optimizer).__name__} with a parameter of shape {tuple(parameter.shape)} that the "
                    "MixedMomentum does not know, expected parameters that its module trained when it was made; make "
                    "it after the last change of the module, and before the wrapper"
                )
            if state := optimizer.state.get(parameter):
                _keep(optimizer, state, buffers[id(parameter)])

    keep()
    optimizer.register_step_post_hook(keep)
    optimizer.register_load_state_dict_post_hook(keep)


@torch.no_grad()
def _keep(optimizer: Optimizer, state: dict[str, Any], buffer: Tensor) -> None:
    moment = next((name for name in MOMENTS if isinstance(state.get(name), Tensor)), None)
    if moment is None:
        raise ValueError(
            f"got {type(optimizer).__name__} with a state of {', '.join(map(str, state))}, expected a first moment "
            f"{' or '.join(MOMENTS)}; take GossipAdamW, AdamW, or SGD with momentum"
        )
    if state[moment].shape != buffer.shape or state[moment].dtype != buffer.dtype:
        raise ValueError(
            f"got a {moment} of {type(optimizer).__name__} with shape {tuple(state[moment].shape)} and "
            f"{state[moment].dtype}, expected {tuple(buffer.shape)} and {buffer.dtype}, as the parameter had when the "
            "MixedMomentum was made; make it after casts of the module, and do not shard the module"
        )
    if state[moment] is not buffer:
        buffer.copy_(state[moment])
        state[moment] = buffer
