"""Notices that steps take back the corrections of rounds, because a tool writes a copy of the weights."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..flat.buffer import FlatBuffer
from ..flat.sharded import local_of
from .hooks import Reader, holds_any
from .moment import sample

_FIRST, _FACTOR = 8, 4  # a look begins at this step, and then at so many times the last one
_NUM_LOOKS = 8  # rounds of a look, and more while corrections are taken back
_NUM_ROUNDS = 3  # whose corrections were taken back, as trials have shown
_NUM_PROBES = 6  # parameters that are looked at
_MIN_ELEMENTS = 8  # of such a parameter: few may come back to their values by chance
_SMALL = 0.25  # of the correction of a round, for the change over a round and a step that has taken it back


class LostCorrections(Reader):
    """Raises an error where steps take back the corrections of rounds.

    [Note: Corrections that are taken back] Copies of the parameters that are neither declared nor found are written
    over them in each step, and ranks train alone. Let A be samples of a parameter before a round, B = A + c after it,
    and A' before the next round. Where A' is A but for a small part of c, the step may have written a copy. But a step
    along the gradient undoes a correction as well, where training stands still. So a trial decides: after the next
    round and the backward that follows, the samples are set back to A. A step along the gradient, which is computed at
    B already, leads away from A by -c then, and the samples get c afterwards. A copy leads to A again. After three
    trials in turn with that result there is an error.

    Optimizers of torch.optim keep no copies. So where such an optimizer has written the samples last, a look ends at
    once, and no trial is made. Other steps are looked at for some rounds, early ones and then ever more seldom.

    Args:
        buffer: has the parameters.
        name: the class of the wrapper, for messages.

    Attributes:
        start: the step at which the next look begins.
        is_reading: whether one is under way.
    """

    def __init__(self, buffer: FlatBuffer, *, name: str) -> None:
        super().__init__(buffer)
        self._name = name
        self._reset()

    def _reset(self) -> None:
        self.start = _FIRST
        self._probes: list[_Probe] = []
        self._handle: Any = None
        self._thread = 0
        self._stepper = ""
        self._num_rounds = 0  # with a correction, of this look

    def close(self) -> None:
        """End a look; idempotent."""
        super().close()
        self._remove_handle()
        self._probes = []

    def before_round(self, *, followed: Collection[int] = ()) -> None:
        """Compare the parameters with the values of before the last round; at the step `start` and later.

        Args:
            followed: ids of the parameters whose copies get the corrections, so that none is lost.

        Raises:
            RuntimeError: the corrections of `_NUM_ROUNDS` rounds were taken back.
        """
        self._remove_handle()
        if not self.is_reading:
            self._begin(followed)
            return
        with torch.no_grad():
            self._num_rounds += max(probe.compare() for probe in self._probes)
        lost = [probe for probe in self._probes if probe.num_lost >= _NUM_ROUNDS]
        self._probes = [probe for probe in self._probes if not probe.is_honest]
        if lost:
            self._refuse(lost)
        is_suspicious = any(probe.num_lost or probe.is_on_trial for probe in self._probes)
        if not self._probes or (self._num_rounds >= _NUM_LOOKS and not is_suspicious):
            self.close()
            self.start *= _FACTOR

    def _begin(self, followed: Collection[int]) -> None:
        fitting = [
            x
            for x in self.buffer.parameters
            if local_of(x).is_contiguous() and local_of(x).numel() >= _MIN_ELEMENTS and id(x) not in followed
        ]
        self._probes = [_Probe(x) for x in fitting[:: max(1, -(-len(fitting) // _NUM_PROBES))]]
        if not self._probes:
            self.start *= _FACTOR
            return
        self._thread, self._stepper = threading.get_ident(), ""
        self._num_rounds = 0
        self.read()

    @torch.no_grad()
    def after_round(self) -> None:
        """Note what the round has written."""
        for probe in self._probes:
            probe.after = probe.samples.clone()
        if any(probe.is_on_trial for probe in self._probes):
            trained = [x for x in self.buffer.parameters if x.requires_grad]
            if trained:
                source = self.buffer.gradient_source(min(trained, key=Tensor.numel))
                self._handle = source.register_post_accumulate_grad_hook(_at_the_end_of_a_backward(self))

    def set_back(self) -> None:
        """A backward has ended: set samples on trial back to their values before the round."""
        self._remove_handle()
        for probe in self._probes:
            probe.set_back()

    def _remove_handle(self) -> None:
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

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

    # See `Reader`.

    def concerns(self, optimizer: Optimizer) -> bool:
        """See `Reader`: masters may be stepped in place of the parameters."""
        return True

    @torch.no_grad()
    def after_step(self, optimizer: Optimizer) -> None:
        """See `Reader`."""
        if threading.get_ident() != self._thread:
            return
        self._stepper = type(optimizer).__name__
        for probe in self._probes:
            probe.end_trial()
        if type(optimizer).__module__.startswith("torch.optim"):
            for probe in self._probes:
                if holds_any(optimizer, [probe.parameter]):
                    probe.stepped = probe.samples.clone()

    def __getstate__(self) -> dict[str, Any]:
        return {"buffer": self.buffer, "_name": self._name}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.is_reading = False
        self.__dict__.update(state)
        self._reset()


class _Probe:
    """Samples of one parameter.

    Attributes:
        parameter: the parameter.
        before: their values before the last round.
        after: their values after it; None: there was none.
        stepped: their values after the last step of an optimizer of torch.optim.
        is_on_trial: whether they are set back after the next backward.
        is_honest: whether steps keep corrections, so that there is nothing to look for.
        num_lost: the trials in turn in which a correction was lost.
    """

    def __init__(self, parameter: Tensor) -> None:
        self.parameter = parameter
        self.before = self.samples.clone()
        self.after: Tensor | None = None
        self.stepped: Tensor | None = None
        self.is_on_trial = self.is_honest = self._is_set_back = False
        self.num_lost = 0

    @property
    def samples(self) -> Tensor:
        """A view, whose changes autograd does not see."""
        return sample(self.parameter.data)

    def set_back(self) -> None:
        """The samples <- their values before the round, if nothing has written them since."""
        if self.is_on_trial and self.after is not None and torch.equal(self.samples, self.after):
            self.samples.copy_(self.before)
            self._is_set_back = True

    def end_trial(self) -> None:
        """A step has ended: the samples get the correction at once if it has led away from the values before it."""
        if not self._is_set_back or self.after is None:
            return
        correction = self.after - self.before
        size = torch.linalg.vector_norm(correction.float())
        change = torch.linalg.vector_norm((self.samples - self.before).float())
        if bool(size > 0) and bool(change > _SMALL * size):
            self._is_set_back = self.is_on_trial = False
            self.is_honest = True
            self._add(correction)
            self.after = None

    def compare(self) -> bool:
        """A step may have come since the round; returns whether the round and a step have changed the samples."""
        now = self.samples.clone()
        before, after, stepped = self.before, self.after, self.stepped
        self.before, self.after, self.stepped = now, None, None
        is_set_back, self._is_set_back = self._is_set_back, False
        if after is None:
            return False
        if stepped is not None and torch.equal(stepped, now):
            self.is_honest = True
            return False
        correction = after - before
        size = torch.linalg.vector_norm(correction.float())
        is_lost = bool(torch.linalg.vector_norm((now - before).float()) <= _SMALL * size)
        if not bool(size > 0) or torch.equal(now, before if is_set_back else after):
            if is_set_back:  # no step has come
                self._add(correction)
            return False
        if not is_set_back:
            self.is_on_trial = is_lost
            self.num_lost *= is_lost
            return True
        self.is_on_trial = False
        self.num_lost += 1
        if not is_lost:
            self.is_honest = True
            self._add(correction)
        return True

    def _add(self, correction: Tensor) -> None:
        samples = self.samples
        samples.add_(correction)
        self.before = samples.clone()


def _at_the_end_of_a_backward(owner: LostCorrections) -> Any:
    reference = weakref.ref(owner)

    def set_back() -> None:
        if (found := reference()) is not None:
            with torch.no_grad():
                found.set_back()

    def queue(_: Tensor) -> None:
        torch.autograd.Variable._execution_engine.queue_callback(set_back)

    return queue
