"""Notices that steps take back the corrections of rounds, because a tool writes a copy of the weights."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Collection

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..flat.aliases import has_memory, instances_of
from ..flat.buffer import FlatBuffer
from ..flat.sharded import local_of
from ..state import transient
from .gradient_watch import weakly
from .hooks import StepListener, holds_any
from .masters import is_rounded
from .moment import sample

_FIRST, _FACTOR = 8, 4  # a look begins at this step, and then at so many times the last one
_NUM_LOOKS = 8  # rounds of a look, and more while corrections are taken back
_NUM_ROUNDS = 3  # in turn, whose corrections were taken back
_NUM_PROBES = 6  # parameters that are looked at
_MIN_ELEMENTS = 128  # of such a parameter: the library keeps samples of fewer, which are no copies
_MIN_MOVED = 8  # samples that a round and a step have changed
_SMALL = 0.25  # of the correction of a round, for the change over a round and a step that has taken it back
_ALONG = 0.95  # cosine of the angle between a step and the gradient, for a step along the gradient
_DOWN = 0.99  # of a step, the part in elements that go down the gradient, for a step down the gradient
_NUM_PLACES = 16  # in a flat tensor that may have a copy of a parameter
_CHUNK = 1 << 22  # elements of a flat tensor that are looked at together


class LostCorrections(StepListener):
    """Raises an error where steps take back the corrections of rounds.

    [Note: Corrections that are taken back] Copies of the parameters that are neither declared nor found are written
    over them in each step, and ranks train alone. Let A be samples of a parameter before a round, B = A + c after it,
    and A' before the next round. Where A' is A but for a small part of c, the step has taken back the correction: it
    may have written a copy. A step along the gradient at B, or one of its signs, may lead back to A as well, where
    training stands still; so may a step that finds a minimum exactly, and weights that are clipped or rounded. So a
    step counts only where it goes another way than down the gradient, and changes A. After two rounds in turn with that
    result the copy is looked for: a tensor elsewhere in memory with the values of the parameter, alone or as a part of
    a flat one. There is an error only where that tensor has the values of the parameter again after a third such round.
    Nothing is written.

    Optimizers of torch.optim keep no copies. So where such an optimizer has written the samples last, a look ends at
    once. Other steps are looked at for some rounds, early ones and then ever more seldom.

    Args:
        buffer: has the parameters.
        name: the class of the wrapper, for messages.

    Attributes:
        start: the step at which the next look begins.
        is_subscribed: whether one is under way.
    """

    is_subscribed: bool = transient(False)
    start: int = transient(_FIRST)
    _probes: list[_Probe] = transient([])
    _thread: int = transient(0)
    _stepper: str = transient("")
    _num_rounds: int = transient(0)  # with a correction, of this look

    def __init__(self, buffer: FlatBuffer, *, name: str) -> None:
        super().__init__(buffer)
        self._name = name

    def close(self) -> None:
        """End a look; idempotent."""
        super().close()
        self._keep([])

    def _keep(self, probes: list[_Probe]) -> None:
        for probe in self._probes:
            if probe not in probes:
                probe.close()
        self._probes = probes

    @torch.no_grad()
    def before_round(self, *, followed: Collection[int] = ()) -> None:
        """Compare the parameters with the values of before the last round; at the step `start` and later.

        Args:
            followed: ids of the parameters whose copies get the corrections, so that none is lost.

        Raises:
            RuntimeError: the corrections of `_NUM_ROUNDS` rounds were taken back.
        """
        if not self.is_subscribed:
            self._begin(followed)
            return
        num_ulps = _num_ulps(self.buffer)
        self._num_rounds += max(probe.compare(num_ulps) for probe in self._probes)
        self._find_copies([probe for probe in self._probes if probe.num_lost == _NUM_ROUNDS - 1])
        lost = [probe for probe in self._probes if probe.num_lost >= _NUM_ROUNDS]
        self._keep([probe for probe in self._probes if not probe.is_honest])
        if lost and (copied := [probe for probe in lost if probe.is_copied(num_ulps)]):
            self._refuse(copied)
        if lost:
            self._keep([])  # other reasons than copies
        is_suspicious = any(probe.num_lost for probe in self._probes)
        if not self._probes or (self._num_rounds >= _NUM_LOOKS and not is_suspicious):
            self.close()
            self.start *= _FACTOR

    def _begin(self, followed: Collection[int]) -> None:
        fitting = [
            x
            for x in self.buffer.parameters
            if x.requires_grad and id(x) not in followed and local_of(x).numel() >= _MIN_ELEMENTS
        ]
        chosen = fitting[:: max(1, -(-len(fitting) // _NUM_PROBES))]
        self._keep([_Probe(x, self.buffer.gradient_source(x)) for x in chosen])
        if not self._probes:
            self.start *= _FACTOR
            return
        self._thread, self._stepper, self._num_rounds = threading.get_ident(), "", 0
        self.subscribe()

    @torch.no_grad()
    def after_round(self) -> None:
        """Note what the round has written."""
        for probe in self._probes:
            probe.after = probe.now()

    def _find_copies(self, probes: list[_Probe]) -> None:
        """Look for copies of these probes' parameters among all tensors of the process."""
        if not probes:
            return
        num_ulps = _num_ulps(self.buffer)
        own = {local_of(probe.parameter).untyped_storage().data_ptr() for probe in probes}
        tensors = [x for x in instances_of(Tensor) if _is_readable(x)]
        others = [x for x in tensors if x.untyped_storage().data_ptr() not in own]
        for probe in probes:
            probe.copies = [weakref.ref(x) for x in others if _has_copy(x, probe.parameter, num_ulps)]

    def _refuse(self, lost: list[_Probe]) -> None:
        names = {id(parameter): name for name, parameter in self.buffer.module.named_parameters()}
        which = ", ".join(repr(names.get(id(probe.parameter), "")) for probe in lost)
        self.close()
        self.start *= _FACTOR
        raise RuntimeError(
            f"got parameters of a {self._name} ({which}) from which the steps of {self._stepper or 'a script'} have "
            f"taken back the corrections of {_NUM_ROUNDS} rounds: a tool writes its own copy of the weights over them, "
            "so that ranks train alone; expected copies that rounds reach: call model.follow(zip(parameters, copies)) "
            "after the copies were made, pass rounds='forward' where rounds run after steps, or keep no copies"
        )

    # See `StepListener`.

    def concerns(self, optimizer: Optimizer) -> bool:
        """See `StepListener`: masters may be stepped in place of the parameters."""
        return True

    @torch.no_grad()
    def after_step(self, optimizer: Optimizer) -> None:
        """See `StepListener`."""
        if threading.get_ident() != self._thread:
            return
        self._stepper = type(optimizer).__name__
        if type(optimizer).__module__.startswith("torch.optim"):
            for probe in self._probes:
                if holds_any(optimizer, [probe.parameter]):
                    probe.stepped = probe.now()


class _Probe:
    """Samples of one parameter.

    Args:
        parameter: the parameter.
        source: the tensor of its gradient; of another tensor, as of a sharded one, the gradient is not looked at.

    Attributes:
        parameter: the parameter.
        after: their values after the last round; None: there was none.
        stepped: their values after the last step of an optimizer of torch.optim.
        is_honest: whether steps keep corrections, so that there is nothing to look for.
        num_lost: the rounds in turn whose correction was lost.
        copies: the tensors that had the values of the parameter before the last of them.
    """

    def __init__(self, parameter: Tensor, source: Tensor) -> None:
        self.parameter = parameter
        self._before = self.now()
        self._gradient: Tensor | None = None  # after the last backward
        self.after: Tensor | None = None
        self.stepped: Tensor | None = None
        self.is_honest = False
        self.num_lost = 0
        self.copies: list[weakref.ref[Tensor]] = []
        is_own = source is parameter
        self._handle = parameter.register_post_accumulate_grad_hook(weakly(self._note)) if is_own else None

    def now(self) -> Tensor:
        """The samples, a copy."""
        return sample(self.parameter).clone()

    def _note(self, parameter: Tensor) -> None:
        if parameter.grad is not None and parameter.grad.layout is torch.strided:
            self._gradient = sample(parameter.grad).clone()

    def compare(self, num_ulps: int) -> bool:
        """A step may have come since the round; returns whether the round and a step have changed the samples.

        Args:
            num_ulps: the units in the last place by which equal values may differ.
        """
        now = self.now()
        before, after, stepped, gradient = self._before, self.after, self.stepped, self._gradient
        self._before, self.after, self.stepped, self._gradient = now, None, None, None
        if after is None:
            return False
        if stepped is not None and torch.equal(stepped, now):
            self.is_honest = True
            return False
        size = torch.linalg.vector_norm((after - before).float())
        if not bool(size > 0) or torch.equal(now, after):
            return False
        is_back = bool(torch.linalg.vector_norm((now - before).float()) <= _SMALL * size)
        unit = num_ulps * torch.finfo(now.dtype).eps * before.float().abs()
        is_changed = int(((now - before).float().abs() > 2 * unit).sum()) >= _MIN_MOVED
        is_down = gradient is None or _is_down((after - now).float(), gradient.float())
        is_lost = is_back and is_changed and not is_down
        self.num_lost = self.num_lost + 1 if is_lost else 0
        return True

    def is_copied(self, num_ulps: int) -> bool:
        """Whether one of the copies has the values of the parameter again, which have changed."""
        copies = [copy for reference in self.copies if (copy := reference()) is not None and _is_readable(copy)]
        return any(_has_copy(copy, self.parameter, num_ulps) for copy in copies)

    def close(self) -> None:
        """Look at gradients no more; idempotent."""
        if self._handle is not None:
            self._handle.remove()


def _num_ulps(buffer: FlatBuffer) -> int:
    """The units in the last place that multiplying by push-sum weights and dividing may change."""
    return 4 if bool((buffer.vector.push_sum_weight != 1).any()) else 0


def _is_down(step: Tensor, gradient: Tensor) -> bool:
    """Whether a step goes along the gradient, or down it in nearly all elements; `step` is the former minus the new."""
    is_along = torch.dot(step, gradient) >= _ALONG * torch.linalg.vector_norm(step) * torch.linalg.vector_norm(gradient)
    return bool(is_along) or bool(step.abs()[step * gradient > 0].sum() >= _DOWN * step.abs().sum())


def _is_readable(x: Tensor) -> bool:
    """Whether it has enough real numbers in memory, which others may have taken away."""
    if not has_memory(x) or x.device.type == "meta":
        return False
    return x.is_floating_point() and x.numel() >= _MIN_ELEMENTS and x.untyped_storage().nbytes() > 0


def _has_copy(other: Tensor, parameter: Tensor, num_ulps: int) -> bool:
    """Whether the other tensor, or a part of a flat one, has the values of a parameter, by samples."""
    other, parameter = other.detach(), local_of(parameter.detach())
    if other.shape == parameter.shape:
        return is_rounded(sample(other), sample(parameter), num_ulps=num_ulps)
    size = parameter.numel()
    if other.dim() != 1 or len(other) < size:
        return False
    own = parameter.reshape(-1)
    largest = own.abs().argmax()  # zeros are in many places
    dtype = own.dtype if own.element_size() < other.element_size() else other.dtype
    value = own[largest].to(other.device, dtype).double()
    tolerance, places = num_ulps * torch.finfo(dtype).eps * value.abs(), list[int]()
    for start in range(0, len(other), _CHUNK):  # as it may be as large as the model
        is_near = (other[start : start + _CHUNK].to(dtype).double() - value).abs() <= tolerance
        places += (is_near.nonzero().flatten() + start - largest.to(other.device))[:_NUM_PLACES].tolist()
    inside = [other[k : k + size] for k in places[:_NUM_PLACES] if 0 <= k <= len(other) - size]
    return any(is_rounded(sample(x), sample(own), num_ulps=num_ulps) for x in inside)
