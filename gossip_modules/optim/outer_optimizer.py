"""OuterOptimizer: the outer steps of DiLoCo around any optimizer, for one worker, without a process group."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..flat.sharded import local_of
from ..rounds.periodic import Periodic
from ..rounds.requests import SGDStep
from ..rounds.stacked import Stacked
from ..schedule import Action


class OuterOptimizer(Optimizer):
    """An optimizer with the outer steps of an algorithm, for training with one worker.

    In every H-th step the outer optimizer takes the drift of the last H steps as the gradient of the anchor phi, at
    which these steps began. With `DiLoCo(H, lr=c, momentum=b)`:

        x   <- a step of `optimizer`      # H times
        D   <- phi - x
        m   <- b m + D
        phi <- phi - c (D + b m)
        x   <- phi

    It is the law of the algorithm with one worker, and needs no process group. The anchor begins as the parameters
    before the first step.

    Parameter groups, state and hooks belong to `optimizer`, so learning rate schedulers and GradScaler work with
    either object, and a step of either one counts. A hook after a step gets the parameters after the outer step. The
    state dict has the state of `optimizer`, and in "outer" the anchor, the momentum and the number of steps. A state
    dict of `optimizer` alone can be loaded too: outer steps then begin anew at the parameters of the next step.

    Kallusky et al., "SNOO: Step-K Nesterov Outer Optimizer - The Surprising Effectiveness of Nesterov Momentum Applied
    to Pseudo-Gradients", 2025, arXiv 2510.15830; Thérien et al., "MuLoCo: Muon is a practical inner optimizer for
    DiLoCo", 2025, arXiv 2505.23725.

    Args:
        optimizer: any torch optimizer; its parameters are on one device. A parameter in shards (a DTensor) steps its
            shard.
        algorithm: an algorithm that averages over all ranks every H steps, such as `DiLoCo`, `MuLoCo`, `SlowMo` or
            `IsoLoCo`, without a delay and without `weighted_by`. `anchor_device="cpu"` keeps its vectors in host
            memory.

    Raises:
        ValueError: the algorithm needs other workers; (steps) parameters were added after the first step.

    Attributes:
        optimizer: the optimizer.
        algorithm: the algorithm.
        num_steps: the number of steps so far.

    Example:
        >>> from gossip_modules import DiLoCo
        >>> x = torch.nn.Parameter(torch.tensor([1.0]))
        >>> inner = torch.optim.SGD([x], lr=0.5)
        >>> optimizer = OuterOptimizer(inner, DiLoCo(2, lr=0.5, momentum=0.5))
        >>> for _ in range(2):
        ...     x.grad = torch.ones(1)
        ...     optimizer.step()
        >>> x.item()  # drift 1, and 1 - 0.5 (1 + 0.5)
        0.25
    """

    def __init__(self, optimizer: Optimizer, algorithm: Periodic) -> None:
        # Optimizer.__init__ would make groups and hooks of its own; those of `optimizer` serve, see __getattr__.
        if not isinstance(optimizer, Optimizer):
            raise ValueError(
                f"got optimizer={optimizer!r}, expected a torch.optim.Optimizer; pass e.g. "
                "torch.optim.AdamW(model.parameters())"
            )
        _check(algorithm)
        self.optimizer, self.algorithm, self.num_steps = optimizer, algorithm, 0
        self._driver: Stacked | None = None
        self._num_elements = 0
        self._attach()

    def _attach(self) -> None:
        self.optimizer.register_step_pre_hook(self._before_step)
        self.optimizer.register_step_post_hook(self._after_step)

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer":  # a copy that has no attributes yet
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def __getstate__(self) -> dict[str, Any]:
        return dict(self.__dict__)

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self.__dict__.update(state)
        self._attach()  # copies of optimizers have no hooks

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.optimizer!r}, {self.algorithm})"

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step of `optimizer`, and after every H-th one an outer step.

        Args:
            closure: see `torch.optim.Optimizer`.
        """
        return self.optimizer.step() if closure is None else self.optimizer.step(closure)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, before the first step.

        Args:
            param_group: see `torch.optim.Optimizer`.

        Raises:
            ValueError: there were steps already.
        """
        if self._driver is not None:
            raise _other_parameters()
        self.optimizer.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of `optimizer` with the entry "outer"; shares memory with both."""
        outer: dict[str, Any] = {"num_steps": self.num_steps}
        if self._driver is not None:
            parts = self._parts
            outer |= {
                "rounds": [part.t for part in parts],
                "memories": [part.memories[0].state_dict() for part in parts],
            }
        return {**self.optimizer.state_dict(), "outer": outer}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state of `state_dict()`, or a state of `optimizer` alone.

        Args:
            state_dict: the state. Load the parameters too: it has the anchor, not the model.

        Raises:
            ValueError: the state does not fit the parameters or the algorithm.
        """
        outer = state_dict.get("outer", {})
        self.optimizer.load_state_dict({name: value for name, value in state_dict.items() if name != "outer"})
        self.num_steps, self._driver = outer.get("num_steps", 0), None
        if "memories" not in outer:
            return
        self._driver = self._make()
        if len(outer["memories"]) != len(self._parts):
            raise ValueError(
                f"got a state with {len(outer['memories'])} fragments for {self.algorithm}, expected "
                f"{len(self._parts)}; load it with the algorithm that has saved it"
            )
        for part, num_rounds, memory in zip(self._parts, outer["rounds"], outer["memories"], strict=True):
            part.t = num_rounds
            part.memories[0].load_state_dict(memory)

    @property
    def _parts(self) -> list[Stacked]:
        """The fragments of the driver, or the driver itself."""
        assert self._driver is not None, "there was no step"
        return self._driver.fragments or [self._driver]

    def _make(self) -> Stacked:
        parameters = self._parameters()
        self._num_elements = sum(p.numel() for p in parameters)
        return Stacked(self.algorithm, None, 1, shapes=[tuple(p.shape) for p in parameters])

    @torch.no_grad()
    def _before_step(self, *_: Any) -> None:
        if self._driver is None:
            self._driver = self._make()
            self._driver.step(self._read(), 0, Action.SKIP)  # the anchor begins here

    @torch.no_grad()
    def _after_step(self, *_: Any) -> None:
        self.num_steps += 1
        if not self.algorithm.is_due(self.num_steps):
            return
        assert self._driver is not None, "a hook before the step makes it"
        x, group = self._read(), self.optimizer.param_groups[0]
        if x.shape[1] != self._num_elements:
            raise _other_parameters()
        rates = SGDStep(float(group["lr"]), float(group.get("momentum", 0.0)))
        self._driver.step(x, self.num_steps, sgd=rates)
        parameters = self._parameters()
        for parameter, value in zip(parameters, x[0].split([p.numel() for p in parameters]), strict=True):
            parameter.copy_(value.view_as(parameter))

    def _parameters(self) -> list[Tensor]:
        """Return the parameters of all groups, as real numbers, and of a DTensor the shard; shares memory."""
        own = [local_of(p.detach()) for group in self.optimizer.param_groups for p in group["params"]]
        return [torch.view_as_real(p) if p.is_complex() else p for p in own]

    def _read(self) -> Tensor:
        """Return a copy of all parameters as the models of one worker, [1, d], in the widest dtype."""
        parameters = self._parameters()
        wide = functools.reduce(torch.promote_types, (p.dtype for p in parameters))
        device = self.algorithm.anchor_device or parameters[0].device
        return torch.cat([p.flatten().to(device, wide) for p in parameters])[None]


def _check(algorithm: object) -> None:
    """Raise ValueError if one worker cannot run the algorithm."""
    example = "pass e.g. DiLoCo(30, lr=0.7, momentum=0.5)"
    if not isinstance(algorithm, Periodic) or algorithm.mixes:
        raise ValueError(
            f"got algorithm={algorithm}, expected one that averages over all ranks every few steps; {example}"
        )
    if algorithm.delay or algorithm.counts_tokens:
        raise ValueError(
            f"got algorithm={algorithm}, expected no delay and no weights: there is one worker, so that nothing "
            f"travels under training; {example}"
        )


def _other_parameters() -> ValueError:
    return ValueError(
        "got other parameters after the first step, expected the same ones, since the anchor is as long as they are; "
        "add groups before the first step, or make a new OuterOptimizer"
    )
