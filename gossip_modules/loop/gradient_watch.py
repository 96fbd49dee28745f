"""Watches on gradients: a gradient that was dropped without a step, and training in eval mode."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..flat.buffer import FlatBuffer
from ..flat.transformed import not_compiled
from .samples import Samples


class WatchedGradient:
    """One gradient of a model, to notice that it was dropped without a step.

    See [Note: Steps that are left out] of `OptimizerSteps`. The gradient is noted when a backward has ended: one that
    raised may be tried again, in the same step.

    Attributes:
        is_doubtful: whether a forward has come that is of a new step if its backward finds the gradient dropped.
        num_left_out: the steps since the last round that were found to be left out after the forward of the next one.
        num_backwards: the backwards with a gradient of the watched parameter so far.
    """

    def __init__(self) -> None:
        self.num_left_out = 0
        self.is_doubtful = False
        self.num_backwards = 0
        self._buffer: FlatBuffer | None = None
        self._parameters: Sequence[Tensor] = ()
        self._parameter: Tensor | None = None
        self._version = 0  # of the parameter, as the round has left it
        self._samples = Samples(())  # of the parameters after the round
        self._has_samples = False
        self._seen: tuple[int, list[Tensor]] | None = None  # the version and samples at the last look
        self._unused: set[int] = set()  # ids of parameters that had no gradient when an optimizer stepped
        self._gradient: Tensor | None = None  # after the last backward; of a small parameter, so a few bytes
        self._gradient_version = 0
        self._thread = 0
        self._handle: Any = None

    def watch(self, buffer: FlatBuffer) -> None:
        """A step begins."""
        self.num_left_out, self.is_doubtful, self._gradient = 0, False, None
        self._buffer, self._seen = buffer, None
        if buffer.parameters is not self._parameters:
            self.close()
            self._parameters = buffer.parameters
            self._samples = Samples(buffer.vector.parameters)
        if self._parameter is None or not self._parameter.requires_grad:
            trained = [parameter for parameter in self._parameters if parameter.requires_grad]
            used = [parameter for parameter in trained if id(parameter) not in self._unused]
            self._watch_smallest(used or trained)
        if self._parameter is not None:
            self._version = self._parameter._version
        self._samples.take()
        self._has_samples = True
        self._thread = threading.get_ident()

    def choose(self, parameters: Sequence[Tensor]) -> None:
        """An optimizer is about to step: watch a parameter that has a gradient, from the next round on."""
        if self._parameter is not None and self._parameter.grad is None and parameters is self._parameters:
            trained = [parameter for parameter in parameters if parameter.requires_grad]
            self._unused.update(id(parameter) for parameter in trained if parameter.grad is None)
            self._watch_smallest([parameter for parameter in trained if parameter.grad is not None])

    def _watch_smallest(self, parameters: Sequence[Tensor]) -> None:
        if not parameters:
            return
        if self._handle is not None:
            self._handle.remove()
        self._parameter = min(parameters, key=Tensor.numel)
        source = self._parameter if self._buffer is None else self._buffer.gradient_source(self._parameter)
        self._handle = source.register_post_accumulate_grad_hook(weakly(self._note))
        self._version, self._gradient = self._parameter._version, None

    def is_dropped(self) -> bool:
        """Whether a gradient was dropped, and parameters are as the round has left them."""
        return self.is_gone() and not self.is_stepped()

    def is_gone(self) -> bool:
        """Whether a gradient was computed since the last round, and is not there any more, or was changed."""
        if self._gradient is None or self._parameter is None:
            return False
        is_there = self._parameter.grad is self._gradient and self._gradient._version == self._gradient_version
        return not (is_there and self._parameter.requires_grad)  # else another part is trained now

    def is_stepped(self) -> bool:
        """Whether parameters have changed since the round."""
        if self._parameter is None:
            return False
        is_written = self._parameter._version != self._version
        return is_written or (self._has_samples and not self._samples.equal(self._samples.values))

    def look(self) -> bool:
        """Whether parameters have changed since the last look, or since the round if there was none."""
        if self._parameter is None or self._buffer is None:
            return False
        if self._seen is None:
            has_changed = self.is_stepped()
        else:
            version, values = self._seen
            has_changed = self._parameter._version != version or not self._samples.equal(values)
        if has_changed or self._seen is None:
            self._seen = self._parameter._version, self._samples.now()
        return has_changed

    def own_write(self, buffer: FlatBuffer) -> None:
        """A round has written the parameters, which is no change by the loop: their versions change now."""
        is_as_it_was = self._parameter is not None and self._parameter._version == self._version
        buffer.written()
        self._seen = None
        self._has_samples = False  # until the next round, since they may be numerators now
        if is_as_it_was and self._parameter is not None:
            self._version = self._parameter._version

    def forget(self) -> None:
        """An optimizer has stepped; in which thread it did says whether the loop of this model is meant."""
        if threading.get_ident() == self._thread:
            self._gradient = None

    def _note(self, source: Tensor) -> None:
        """A backward has accumulated the gradient, or the whole gradient of a shard, which follows at its end."""
        parameter, before, version = self._parameter, self._gradient, self._gradient_version
        gradient = source.grad
        # With create_graph=True autograd adds to a new tensor.
        is_added = gradient is not None and (
            gradient.requires_grad or (gradient is before and gradient._version == version + 1)
        )

        def note() -> None:
            if parameter is None or parameter is not self._parameter:
                return
            is_same = is_added if source is parameter else parameter.grad is before
            if self.is_doubtful and self._gradient is not None and not is_same:
                # A look at the forward has found no change since the look before it.
                self.num_left_out += self._seen is not None or not self.is_stepped()
            self.is_doubtful = False
            self.num_backwards += 1
            self._gradient = parameter.grad
            self._gradient_version = 0 if self._gradient is None else self._gradient._version

        engine = torch.autograd.Variable._execution_engine
        # `fully_shard` makes the gradients of shards in a callback of its own, which was queued before this one.
        engine.queue_callback(note if source is parameter else lambda: engine.queue_callback(note))

    def close(self) -> None:
        """Watch no more; idempotent."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None
        self._parameters, self._parameter, self._gradient = (), None, None
        self._samples, self._has_samples, self._seen = Samples(()), False, None
        self._unused.clear()


def weakly(method: Callable[[Tensor], None]) -> Callable[[Tensor], None]:
    """The bound method, for the hook of a tensor, which is not to keep its object alive."""
    reference = weakref.WeakMethod(method)

    @not_compiled
    def call(tensor: Tensor) -> None:
        if (found := reference()) is not None:
            found(tensor)

    return call


class UnsyncedSteps:
    """Notices that a model is trained in eval mode, where each rank would train alone without a word.

    A forward in eval mode is an evaluation, even where autograd records it (adversarial examples, saliency maps). It
    is training where gradients of parameters are computed after it and parameters have changed by the next forward.
    In a forward of train mode the wrapper calls `forget()`, where `is_watching`.

    Attributes:
        is_watching: whether a forward in eval mode was the last one, so that there is something to forget.
    """

    def __init__(self) -> None:
        self._has_told = False
        self._handle: torch.utils.hooks.RemovableHandle | None = None
        self.forget()

    def forget(self) -> None:
        """The last forward in eval mode counts no more: a forward trains, or a checkpoint is about to be loaded."""
        if self._handle is not None:
            self._handle.remove()
        self._handle, self.is_watching, self._has_gradients = None, False, False
        self._versions: list[int] = []

    def check(self, buffer: FlatBuffer, *, name: str) -> None:
        """A forward in eval mode that autograd records.

        Args:
            buffer: has the parameters that the wrapper gossips.
            name: the name of the wrapper's class.

        Raises:
            RuntimeError: since the last such forward, without a round in between, gradients were computed and
                parameters were stepped. Once for each wrapper.
        """
        trained = [parameter for parameter in buffer.parameters if parameter.requires_grad]
        versions = [parameter._version for parameter in trained]
        is_step = self._has_gradients and self.is_watching and versions != self._versions
        self.forget()
        if self._has_told or not trained:
            return
        if is_step:
            self._has_told = True
            raise RuntimeError(
                f"got an optimizer step after a forward in eval mode, which starts no gossip round: expected training "
                f"forwards in train mode; call model.train() before the training loop, or, to train in eval mode (with "
                f"frozen BatchNorm statistics, say), wrap with {name}(..., gossip_in_eval_mode=True)"
            )
        self.is_watching, self._versions = True, versions

        def note(*_: object) -> None:
            self._has_gradients = True

        sources = [buffer.gradient_source(parameter) for parameter in trained]
        self._handle = torch.autograd.graph.register_multi_grad_hook(sources, note, mode="any")
