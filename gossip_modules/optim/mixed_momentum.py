"""MixedMomentum: the first moments of an optimizer are mixed in rounds, as the model is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..flat.selection import MixedBuffers
from ..flat.sharded import meshes_of
from .gossip_adamw import PROBE, PROBED, GossipAdamW
from .outer_optimizer import OuterOptimizer

MOMENTS = ("exp_avg", "momentum_buffer")
"""The names of the first moment of a parameter in the state of an optimizer: of Adam and its kin, and of SGD."""
NAME = "mixed_momentum"
"""The name of the `MixedMomentum` in its module."""

Kept: TypeAlias = Iterable[tuple[Tensor, Tensor, Tensor]]
"""Parameters, and the buffers that hold their first moments and the probes of `GossipAdamW`."""
_Optimizer = TypeVar("_Optimizer", bound=Optimizer)


class MixedMomentum(MixedBuffers):
    """Mixes the first moments of an optimizer in each round of a wrapper, with the weights of the model.

    An optimizer on rank i has the moment m_i, with the noise of this rank's batches. A round of W(t) is then

        m_i <- sum_j W_ij m_j
        x_i <- sum_j W_ij x_j

    so the next step has a moment of many ranks, as the step of all-reduce has. Messages have twice the elements.
    `docs/benchmarks/language.md` has the measurements. `GossipAdamW` needs the share of the noise that mixed moments
    keep, and measures it with a probe of at most 64 elements for each parameter, which rounds mix too: see [Note: Mixed
    moments] of `GossipAdamW`.

    The moments are buffers of the module, without a place in its `state_dict()`, and wrappers mix them like running
    statistics: in rounds, in exact averages, and late with `overlap=True`. The state of the optimizer refers to them,
    and saves and loads them. Compressed rounds send them exactly, `wire_dtype=torch.int8` and averages of codes
    (`collective="all_reduce"` of `DiLoCo`) by the code. `AllReduceDataParallel` sends none, as averaged gradients keep
    them equal. With a `Membership` give the optimizer to `track`: a joining worker then has the moments of its donor,
    and else begins with zeros. An `nn.Sequential` has this object as its last layer, which returns its input.

    Yu, Jin, Yang, "On the Linear Speedup Analysis of Communication Efficient Momentum SGD for Distributed Non-Convex
    Optimization", ICML 2019, arXiv 1905.03817, prove the linear speedup of momentum SGD whose workers average models
    and momentum alike. Wang et al., "SlowMo", ICLR 2020, arXiv 1910.00643, Section 4, call it double averaging, and
    measure it with SGP and ResNet-50 on ImageNet: 75.54 % accuracy, and 75.15 % without it. For Adam, whose second
    moments stay local, it is this library's own.

    Args:
        module: the module to wrap afterwards; mutated: it gets this object as `mixed_momentum`, with a buffer for each
            parameter that is trained.

    Raises:
        ValueError: the module has one already, has nothing to train, is sharded over processes, or has a parameter
            whose name no buffer here can have; (first training forward of the wrapper) `of` was not called.

    Example:
        >>> momentum = MixedMomentum(module)  # before the wrapper
        >>> model = GossipDataParallel(module)
        >>> optimizer = momentum.of(GossipAdamW(model.parameters(), lr=1e-3, num_ranks=8))
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        if hasattr(module, NAME):
            raise ValueError(f"got a {type(module).__name__} with a {NAME}, expected none; make one for each module")
        trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
        if not trained:
            raise ValueError(f"got a {type(module).__name__} without trained parameters, expected some")
        if meshes_of(module):
            raise ValueError(
                f"got a {type(module).__name__} that is sharded over processes (fully_shard, or a plan of DTensors), "
                "expected a whole model in each process; leave MixedMomentum out"
            )
        self.names = list(trained)
        self._trained, self._has_optimizer = list(trained.values()), False
        for name, parameter in trained.items():
            probe = parameter.detach().new_zeros(min(parameter.numel(), PROBED))
            for own, buffer in ((buffer_name(name), torch.zeros_like(parameter)), (probe_name(name), probe)):
                if hasattr(self, own):
                    raise ValueError(
                        f"got a {type(module).__name__} with a parameter {name!r}, whose buffer would be {own!r}, "
                        f"expected a name that {type(self).__name__} has not; rename the parameter"
                    )
                self.register_buffer(own, buffer, persistent=False)
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
                was made; (steps) it has no first moment, or no wrapper mixes the moments.
        """

        if isinstance(optimizer, OuterOptimizer):  # its state, groups and hooks are those of the optimizer inside
            self.of(optimizer.optimizer)
            return optimizer

        def kept() -> Kept:
            for name, parameter in zip(self.names, self._trained, strict=True):
                yield parameter, self.get_buffer(buffer_name(name)), self.get_buffer(probe_name(name))

        def check_wrapper(*_: Any) -> None:
            if not self.has_wrapper:
                raise ValueError(
                    f"got a step of {type(optimizer).__name__} with a MixedMomentum that no wrapper mixes, expected "
                    "one of the module inside a wrapper; make MixedMomentum(module) before you wrap the module, or "
                    "leave it out where no other rank trains"
                )

        def check_state(*_: Any) -> None:
            parameters = (p for group in optimizer.param_groups for p in group["params"] if p.grad is not None)
            if any(not optimizer.state.get(p) for p in parameters):
                raise ValueError(
                    f"got a step of {type(optimizer).__name__} that kept no state, expected a first moment; take "
                    "GossipAdamW, AdamW, or SGD with momentum"
                )

        keep_moments_in(optimizer, kept, lambda: self.noise_source)
        optimizer.register_step_pre_hook(check_wrapper)
        optimizer.register_step_post_hook(check_state)
        self._has_optimizer = True
        return optimizer

    def check_training(self) -> None:
        """See `MixedBuffers`."""
        if not self._has_optimizer:
            raise ValueError(
                "got a training forward of a module with a MixedMomentum and no optimizer, expected one whose moments "
                "are mixed; call optimizer = momentum.of(optimizer) before the first training forward, or leave "
                "MixedMomentum out"
            )


def buffer_name(parameter_name: str) -> str:
    """Return the name of the buffer of a parameter; names of buffers have no point."""
    return parameter_name.replace(".", "/")


def probe_name(parameter_name: str) -> str:
    """Return the name of the buffer of a parameter's probe."""
    return f"{buffer_name(parameter_name)}//{PROBE}"


def keep_moments_in(optimizer: Optimizer, kept: Callable[[], Kept], sources: Callable[[], int | Sequence[int]]) -> None:
    """Let the state of an optimizer refer to these buffers as the first moments of parameters, after each step.

    Args:
        optimizer: the optimizer; mutated: it gets hooks.
        kept: returns its parameters and their buffers.
        sources: see `GossipAdamW`.
    """

    def keep(*_: Any) -> None:
        buffers = {id(parameter): own for parameter, *own in kept()}
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            if parameter.requires_grad and id(parameter) not in buffers:
                raise ValueError(
                    f"got a {type(optimizer).__name__} with a parameter of shape {tuple(parameter.shape)} that the "
                    "MixedMomentum does not know, expected parameters that its module trained when it was made; make "
                    "it after the last change of the module, and before the wrapper"
                )
            if state := optimizer.state.get(parameter):
                moment, probe = buffers[id(parameter)]
                _keep(optimizer, state, _moment_in(optimizer, state), moment)
                if PROBE in state:
                    _keep(optimizer, state, PROBE, probe)

    if isinstance(optimizer, GossipAdamW):
        optimizer.sources = sources
    keep()
    optimizer.register_step_post_hook(keep)
    optimizer.register_load_state_dict_post_hook(keep)


def _moment_in(optimizer: Optimizer, state: dict[str, Any]) -> str:
    """Return the name of the first moment in the state of a parameter."""
    moment = next((name for name in MOMENTS if isinstance(state.get(name), Tensor)), None)
    if moment is None:
        raise ValueError(
            f"got {type(optimizer).__name__} with a state of {', '.join(map(str, state))}, expected a first moment "
            f"{' or '.join(MOMENTS)}; take GossipAdamW, AdamW, or SGD with momentum"
        )
    return moment


@torch.no_grad()
def _keep(optimizer: Optimizer, state: dict[str, Any], moment: str, buffer: Tensor) -> None:
    if state[moment].shape != buffer.shape or state[moment].dtype != buffer.dtype:
        raise ValueError(
            f"got a {moment} of {type(optimizer).__name__} with shape {tuple(state[moment].shape)} and "
            f"{state[moment].dtype}, expected {tuple(buffer.shape)} and {buffer.dtype}, as the parameter had when the "
            "MixedMomentum was made; make it after casts of the module, and do not shard the module"
        )
    if state[moment] is not buffer:
        buffer.copy_(state[moment])
        state[moment] = buffer
