"""Push-sum storage: the estimate z = x / w where the module computes, the numerator x where it is stepped and sent."""

from __future__ import annotations

from enum import Enum
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from .flat_buffer import FlatBuffer


class Form(Enum):
    """What the storage holds."""

    ESTIMATE = "z = x / w"
    NUMERATOR = "x = z * w"


class Debias:
    """Keeps a flat buffer in the form that is needed, by two transitions of one kernel per segment each.

    Gradients are taken at the estimate z; the optimizer steps on the numerator x, and x is what is sent. So a forward
    asks for z, and the end of every backward pass restores x. Where W(t) is doubly stochastic w stays one, x is z and
    nothing here does anything.

    [Note: Backward] A backward pass starts where a gradient reaches an output of the forward: there z comes back if
    an earlier backward through the same graph left x, and the end of that pass is known, also when checkpoints run
    backward passes inside it. Where no output can be watched (it is an object of a class of the user's own), the pass
    starts with the first gradient of a parameter.

    Assran et al., arXiv 1811.10792, Algorithm 1, lines 2 to 4.

    Args:
        buffer: mutated by the transitions.
        is_needed: whether weights leave one.
    """

    def __init__(self, buffer: FlatBuffer, *, is_needed: bool) -> None:
        self.buffer = buffer
        self.is_needed = is_needed
        self.form = Form.ESTIMATE
        self._is_in_backward = False
        self._handle: RemovableHandle | None = None
        self.watch()

    @torch.no_grad()
    def to_estimate(self) -> None:
        """Hold z from now on: for forward and backward, evaluation, checkpoints."""
        if self.is_needed and self.form is Form.NUMERATOR:
            self.buffer.vector.divide_by_weight_()
            self.form = Form.ESTIMATE

    @torch.no_grad()
    def to_numerator(self) -> None:
        """Hold x from now on: for the optimizer and for gossip."""
        if self.is_needed and self.form is Form.ESTIMATE:
            self.buffer.vector.multiply_by_weight_()
            self.form = Form.NUMERATOR

    def watch(self) -> None:
        """(Again) restore x at the end of every backward pass of the buffer's parameters, which may be new ones."""
        if self._handle is not None:
            self._handle.remove()
        if self.is_needed:
            self._handle = torch.autograd.graph.register_multi_grad_hook(
                self.buffer.parameters, self._in_backward, mode="any"
            )

    def watch_output(self, output: Any) -> None:
        """[Note: Backward] output: of the forward, tensors in any nesting of lists, tuples and dicts."""
        self._is_in_backward = False  # a backward that raised has not said that it is over
        for x in tree_leaves(output):
            if isinstance(x, Tensor) and x.grad_fn is not None:
                x.register_hook(self._in_backward)

    def _in_backward(self, _: Tensor) -> None:
        if self.is_needed and not self._is_in_backward:
            self._is_in_backward = True
            self.to_estimate()
            torch.autograd.Variable._execution_engine.queue_callback(self._after_backward)

    def _after_backward(self) -> None:
        self._is_in_backward = False
        self.to_numerator()

    def stop(self) -> None:
        """Hold z for good."""
        self.to_estimate()
        if self._handle is not None:
            self._handle.remove()
        self.is_needed = False

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_handle": None}  # hooks are on the parameters of the original
