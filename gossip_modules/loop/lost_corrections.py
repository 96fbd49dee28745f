"""Notices that steps take back the corrections of rounds, because a tool writes a copy of the weights."""

from __future__ import annotations

import threading
from collections.abc import Collection

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..flat.buffer import FlatBuffer
from ..flat.sharded import local_of
from ..state import transient
from .gradient_watch import weakly
from .hooks import StepListener, holds_any
from .moment import sample

_FIRST, _FACTOR = 8, 4  # a look begins at this step, and then at so many times the last one
_NUM_LOOKS = 8  # rounds of a look, and more while corrections are taken back
_NUM_ROUNDS = 3  # in turn, whose corrections were taken back
_NUM_PROBES = 6  # parameters that are looked at
_MIN_ELEMENTS = 8  # of such a parameter: few may come back to their values by chance
_SMALL = 0.25  # of the correction of a round, for the change over a round and a step that has taken it back
_ALONG = 0.95  # cosine of the angle between a step and the gradient, for a step along the gradient


class LostCorrections(StepListener):
    """Raises an error where steps take back the corrections of rounds.

    [Note: Corrections that are taken back] Copies of the parameters that are neither declared nor found are written
    over them in each step, and ranks train alone. Let A be samples of a parameter before a round, B = A + c after it,
    and A' before the next round. Where A' is A but for a small part of c, the step has taken back the correction: it
    may have written a copy. A step along the gradient at B may lead back to A as well, where training stands still. So
    a step counts only where A' - B has another direction than the gradient. After three rounds in turn with that result
    there is an error. Nothing is written.

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
        with torch.no_grad():
            self._num_rounds += max(probe.compare() for probe in self._probes)
        lost = [probe for probe in self._probes if probe.num_lost >= _NUM_ROUNDS]
        self._keep([probe for probe in self._probes if not probe.is_honest])
        if lost:
            self._refuse(lost)
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
    """

    def __init__(self, parameter: Tensor, source: Tensor) -> None:
        self.parameter = parameter
        self._before = self.now()
        self._gradient: Tensor | None = None  # after the last backward
        self.after: Tensor | None = None
        self.stepped: Tensor | None = None
        self.is_honest = False
        self.num_lost = 0
        is_own = source is parameter
        self._handle = parameter.register_post_accumulate_grad_hook(weakly(self._note)) if is_own else None

    def now(self) -> Tensor:
        """The samples, a copy."""
        return sample(self.parameter).clone()

    def _note(self, parameter: Tensor) -> None:
        if parameter.grad is not None and parameter.grad.layout is torch.strided:
            self._gradient = sample(parameter.grad).clone()

    def compare(self) -> bool:
        """A step may have come since the round; returns whether the round and a step have changed the samples."""
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
        is_lost = is_back and gradient is not None and not _are_along((after - now).float(), gradient.float())
        self.num_lost = self.num_lost + 1 if is_lost else 0
        return True

    def close(self) -> None:
        """Look at gradients no more; idempotent."""
        if self._handle is not None:
            self._handle.remove()


def _are_along(x: Tensor, y: Tensor) -> bool:
    """Whether the angle between x and y is small."""
    return bool(torch.dot(x, y) >= _ALONG * torch.linalg.vector_norm(x) * torch.linalg.vector_norm(y))
