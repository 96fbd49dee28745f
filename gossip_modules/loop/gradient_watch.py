"""A watched gradient, which tells of backwards, and of a gradient that was dropped without a step."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..flat.buffer import FlatBuffer
from ..flat.transformed import not_compiled
from ..state import State, leaf, transient
from .moment import Moment, version_of


class WatchedGradient(State):
    """One gradient of a model, to notice that it was dropped without a step; and the moment of the last round.

    See [Note: Steps that are left out] of `Loop`. The gradient is noted when a backward has ended: one that raised may
    be tried again, in the same step.

    Attributes:
        parameter: its parameter, the smallest one; None: nothing is trained.
        value: the gradient after the last backward since the last round; None: there was none. It has a few bytes.
        is_doubtful: whether a forward has come that is of a new step if its backward finds the gradient dropped.
        num_left_out: the steps since the last round that were found to be left out after the forward of the next one.
        num_backwards: the backwards with a gradient of the watched parameter so far.
    """

    num_backwards: int = transient(0)
    num_left_out: int = leaf(0, is_saved=False, is_copied=False)
    is_doubtful: bool = leaf(False, is_saved=False, is_copied=False)
    parameter: Tensor | None = leaf(None, is_saved=False, is_copied=False)
    value: Tensor | None = leaf(None, is_saved=False, is_copied=False)
    _parameters: Sequence[Tensor] = leaf((), is_saved=False, is_copied=False)
    _version: int = leaf(0, is_saved=False, is_copied=False)  # of `value`, when it was noted
    _round: Moment | None = leaf(None, is_saved=False, is_copied=False)  # the end of the last round
    _look: Moment | None = leaf(None, is_saved=False, is_copied=False)  # the last look since then
    # Ids of parameters that had no gradient when an optimizer stepped.
    _unused: set[int] = leaf(set(), is_saved=False, is_copied=False)
    _handle: Any = leaf(None, is_saved=False, is_copied=False)

    def __init__(self, buffer: FlatBuffer) -> None:
        self._buffer = buffer

    def begin(self) -> None:
        """A step begins."""
        parameters = self._buffer.parameters
        self.num_left_out, self.is_doubtful, self.value, self._look = 0, False, None, None
        if self._round is None or parameters is not self._parameters:
            self.close()
            self._parameters = parameters
            self._round = Moment(self._buffer.vector.parameters)
        if self.parameter is None or not self.parameter.requires_grad:
            trained = [parameter for parameter in parameters if parameter.requires_grad]
            used = [parameter for parameter in trained if id(parameter) not in self._unused]
            self._watch_smallest(used or trained)
        self._round.now()

    def choose(self) -> None:
        """An optimizer is about to step without this gradient: watch a parameter that has one, from the next round."""
        if self._buffer.parameters is self._parameters:
            trained = [parameter for parameter in self._parameters if parameter.requires_grad]
            self._unused.update(id(parameter) for parameter in trained if parameter.grad is None)
            self._watch_smallest([parameter for parameter in trained if parameter.grad is not None])

    def _watch_smallest(self, parameters: Sequence[Tensor]) -> None:
        if not parameters:
            return
        if self._handle is not None:
            self._handle.remove()
        self.parameter, self.value = min(parameters, key=Tensor.numel), None
        source = self._buffer.gradient_source(self.parameter)
        self._handle = source.register_post_accumulate_grad_hook(weakly(self._note))
        if self._round is not None:
            self._round.count([self.parameter])

    def is_dropped(self) -> bool:
        """Whether a gradient was dropped, and parameters are as the round has left them."""
        return self.is_gone() and not self.is_stepped()

    def is_gone(self) -> bool:
        """Whether a gradient was computed since the last round, and is not there any more, or was changed."""
        if self.value is None or self.parameter is None:
            return False
        is_there = self.parameter.grad is self.value and version_of(self.value) == self._version
        return not (is_there and self.parameter.requires_grad)  # else another part is trained now

    def is_stepped(self) -> bool:
        """Whether parameters have changed since the round."""
        return self._round is not None and self.parameter is not None and self._round.is_written()

    def look(self) -> bool:
        """Whether parameters have changed since the last look, or since the round if there was none."""
        if self.parameter is None:
            return False
        has_changed = self.is_stepped() if self._look is None else self._look.is_written()
        if has_changed or self._look is None:
            self._look = Moment(self._buffer.vector.parameters, [self.parameter])
        return has_changed

    def note_gossip_write(self) -> None:
        """Gossip has written the parameters, which is no change by the loop: their versions change now."""
        last, self._look = self._round, None
        is_as_it_was = last is not None and not last.num_writes()
        self._buffer.written()
        if last is not None:
            last.has_samples = False  # until the next round, since they may be numerators now
            if is_as_it_was:
                last.recount()

    def _note(self, source: Tensor) -> None:
        """A backward has accumulated the gradient, or the whole gradient of a shard, which follows at its end."""
        parameter, before, version = self.parameter, self.value, self._version
        gradient = source.grad
        # With create_graph=True autograd adds to a new tensor.
        is_added = gradient is not None and (
            gradient.requires_grad or (gradient is before and version_of(gradient) == version + 1)
        )

        def note() -> None:
            if parameter is None or parameter is not self.parameter:
                return
            is_same = is_added if source is parameter else parameter.grad is before
            if self.is_doubtful and self.value is not None and not is_same:
                # A look at the forward has found no change since the look before it.
                self.num_left_out += self._look is not None or not self.is_stepped()
            self.is_doubtful = False
            self.num_backwards += 1
            self.value = parameter.grad
            self._version = 0 if self.value is None else version_of(self.value)

        engine = torch.autograd.Variable._execution_engine
        # `fully_shard` makes the gradients of shards in a callback of its own, which was queued before this one.
        engine.queue_callback(note if source is parameter else lambda: engine.queue_callback(note))

    def close(self) -> None:
        """Watch no more; idempotent."""
        if self._handle is not None:
            self._handle.remove()
        self.restart()


def weakly(method: Callable[[Tensor], None]) -> Callable[[Tensor], None]:
    """The bound method, for the hook of a tensor, which is not to keep its object alive."""
    reference = weakref.WeakMethod(method)

    @not_compiled
    def call(tensor: Tensor) -> None:
        if (found := reference()) is not None:
            found(tensor)

    return call
