"""Push-sum storage: the estimate z = x / w where the module computes, the numerator x where it is stepped and sent."""

from __future__ import annotations

import threading
import weakref
from enum import Enum
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from .flat_buffer import FlatBuffer


class Form(Enum):
    """What the storage holds."""

    ESTIMATE = "z = x / w"
    NUMERATOR = "x = z * w"


class Debias:
    """Keeps a flat buffer in the form that is needed, by two transitions of one kernel per segment each.

    Gradients are taken at the estimate z; the optimizer steps on the numerator x, and x is what is sent. So storage
    holds z at all times, whatever passes run forward or backward, but for gossip rounds and for the step of an
    optimizer that holds one of the parameters. Where W(t) is doubly stochastic w stays one, x is z, and nothing here
    does anything.

    Assran et al., arXiv 1811.10792, Algorithm 1, lines 2 to 4.

    Args:
        buffer: mutated by the transitions.
        is_needed: whether weights leave one.
    """

    def __init__(self, buffer: FlatBuffer, *, is_needed: bool) -> None:
        self.buffer = buffer
        self.is_needed = is_needed
        self.form = Form.ESTIMATE
        self._is_stopped = False
        self._watch()

    @torch.no_grad()
    def to_estimate(self) -> None:
        """Hold z from now on."""
        if self.is_needed and self.form is Form.NUMERATOR:
            self.buffer.vector.divide_by_weight_()
            self.form = Form.ESTIMATE

    @torch.no_grad()
    def to_numerator(self) -> None:
        """Hold x from now on."""
        if self.is_needed and self.form is Form.ESTIMATE:
            self.buffer.vector.multiply_by_weight_()
            self.form = Form.NUMERATOR

    def stop(self) -> None:
        """Optimizers step on z from now on: the weight is not exchanged any more."""
        self.to_estimate()
        self._is_stopped = True

    def is_stepped_by(self, optimizer: Optimizer) -> bool:
        """Whether the optimizer holds one of our parameters."""
        if self._is_stopped:
            return False
        ours = {id(parameter) for parameter in self.buffer.parameters}
        return any(id(parameter) in ours for group in optimizer.param_groups for parameter in group["params"])

    def _watch(self) -> None:
        if self.is_needed:
            _watched.add(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._watch()


class _Watched:
    """The living Debias objects, told of every optimizer step in the process by one pair of global hooks."""

    def __init__(self) -> None:
        self._members: weakref.WeakSet[Debias] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._is_hooked = False

    def add(self, debias: Debias) -> None:
        """Tell `debias` of steps as long as it lives."""
        with self._lock:
            self._members.add(debias)
            if not self._is_hooked:
                register_optimizer_step_pre_hook(self._before_step)
                register_optimizer_step_post_hook(self._after_step)
                self._is_hooked = True

    def _stepped_by(self, optimizer: Optimizer) -> list[Debias]:
        with self._lock:
            members = list(self._members)
        return [debias for debias in members if debias.is_stepped_by(optimizer)]

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for debias in self._stepped_by(optimizer):
            debias.to_numerator()

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for debias in self._stepped_by(optimizer):
            debias.to_estimate()


_watched = _Watched()
