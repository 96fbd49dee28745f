"""Push-sum weights in a flat buffer: which form of the model storage holds, and when that changes."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from enum import Enum

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from ..flat.buffer import FlatBuffer
from ..state import transient
from .hooks import StepListener
from .owner import Owner, no_owner
from .turn import Turn


class Form(Enum):
    """The model that the storage holds."""

    ESTIMATE = "z = x / w"
    NUMERATOR = "x = z * w"
    LIMITED = "z * max(w, 1)"


class Debias(StepListener):
    """Keeps a flat buffer in the form that is needed, by two transitions of one kernel per segment each.

    Gradients are taken at the estimate z; the optimizer steps on the numerator x, and ranks exchange x. So storage
    holds z at all times, whatever passes run forward or backward, but for gossip rounds and for the code of a step of
    an optimizer that holds one of the parameters; its hooks see z. Where W(t) is doubly stochastic w stays one, x is z,
    and nothing here does anything.

    [Note: a step that raises] torch has no hook for it, so storage holds numerators until something asks for the
    estimate: the next forward of the wrapper, of whatever kind, its `state_dict`, `eval`, `flush`, `averaged` or
    `close`, or the next step that ends well. Until then the parameters themselves, and the inner module, hold x.

    [Note: small weights] A step of x is 1 / w times as long for z. Where a peer is lost, the graph has holes until the
    next generation, in which weights fall to a small fraction and z runs away. So while `limits_steps` is true the
    optimizer steps on z * max(w, 1): no step of z is longer than without push-sum, and the contribution of a worker of
    small weight to the sum of all x is as small as its weight.

    Assran et al., arXiv 1811.10792, Algorithm 1, lines 2 to 4; the limit is ours.

    Args:
        buffer: mutated by the transitions.
        turn: told of the steps on numerators; see [Note: One thread at a time] of `Turn`.
        owner: attaches tensors in place of ours that are about to be stepped: then x is theirs.

    Attributes:
        form: the form of the storage now.
        owner: see above.
        limits_steps: whether a peer is lost; see [Note: small weights].
    """

    owner: Callable[[], Owner | None] = transient(no_owner)
    _readers: MutableMapping[Optimizer, bool] = transient(WeakIdKeyDictionary())  # as a set, by identity

    def __init__(self, buffer: FlatBuffer, turn: Turn, owner: Callable[[], Owner | None]) -> None:
        super().__init__(buffer)
        self._turn = turn
        self.owner = owner
        self.limits_steps = False
        self.form = Form.ESTIMATE
        self._scale: Tensor | None = None  # of the limited form
        self._has_begun_step = False  # which changes the form

    def to_estimate(self) -> None:
        """Hold z from now on."""
        if self.form is Form.LIMITED or (self.form is Form.NUMERATOR and not self._is_one()):
            with torch.no_grad():
                self.buffer.vector.divide_by_weight_(self._scale if self.form is Form.LIMITED else None)
        self.form = Form.ESTIMATE

    def to_numerator(self) -> None:
        """Hold x from now on."""
        if self.form is Form.LIMITED:
            self.to_estimate()
        if self.form is Form.ESTIMATE:
            if not self._is_one():
                with torch.no_grad():
                    self.buffer.vector.multiply_by_weight_()
            self.form = Form.NUMERATOR

    @torch.no_grad()
    def to_limited(self) -> None:
        """Hold z * max(w, 1) from now on; see [Note: small weights]."""
        self.to_estimate()
        weight = self.buffer.vector.push_sum_weight
        # On the CPU a factor of one is left out, and storage goes on holding z. On a GPU `item` would wait for the
        # device, so that the kernels multiply by one there, which changes no bit.
        if not (weight.device.type == "cpu" and weight.item() <= 1.0):
            self._scale = weight.clamp(min=1.0)
            self.buffer.vector.multiply_by_weight_(self._scale)
            self.form = Form.LIMITED

    def _is_one(self) -> bool:
        """Whether w is one, so that x is z; on a GPU nobody waits to know."""
        weight = self.buffer.vector.push_sum_weight
        return weight.device.type == "cpu" and weight.item() == 1.0

    def close(self) -> None:
        """Optimizers step on z from now on: the weight is not exchanged any more; idempotent."""
        self.to_estimate()
        super().close()

    def note_reader(self, optimizer: Optimizer, *, is_reader: bool) -> None:
        """Note whether steps of this optimizer change no parameter, as of a moving average, which reads estimates."""
        if is_reader:
            self._readers[optimizer] = True
        else:
            self._readers.pop(optimizer, None)

    def enter_step(self, optimizer: Optimizer) -> None:
        """See `StepListener`."""
        if self.form is Form.ESTIMATE and not self.limits_steps and self._is_one():
            return  # the numerator is the estimate
        self._turn.begin_step()
        self._has_begun_step = True
        if not self.buffer.is_attached() and (owner := self.owner()) is not None:
            self.to_estimate()
            owner.reattach()
        if optimizer in self._readers:
            self.to_estimate()
        elif self.limits_steps:
            self.to_limited()
        else:
            self.to_numerator()

    reenter_step = enter_step
    """See `StepListener`: a forward in a closure has gone back to the estimate."""

    def leave_step(self, optimizer: Optimizer) -> None:
        """See `StepListener`."""
        self.to_estimate()
        if self._has_begun_step:
            self._has_begun_step = False
            self._turn.end_step()

    def estimate_of(self, x: Tensor) -> Tensor:
        """A copy of a tensor in the vector, of any shape, as an estimate; storage stays in its form."""
        weight = {Form.ESTIMATE: None, Form.NUMERATOR: self.buffer.vector.push_sum_weight, Form.LIMITED: self._scale}
        if (w := weight[self.form]) is None:
            return x.clone()
        return (x.to(torch.promote_types(x.dtype, torch.float32)) / w[0].to(x.device)).to(x.dtype)
