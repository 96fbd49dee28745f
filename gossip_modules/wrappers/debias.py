"""Push-sum storage: the estimate z = x / w where the module computes, the numerator x where it is stepped and sent."""

from __future__ import annotations

import sys
import threading
import weakref
from enum import Enum
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from ..flat.buffer import FlatBuffer


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

    [Note: a step that raises] torch has no hook for it, so storage holds numerators until something asks for the
    estimate: the next forward of the wrapper, of whatever kind, its `state_dict`, `eval`, `flush`, `averaged` or
    `close`, or the next step that ends well. Until then the parameters themselves, and the inner module, hold x.

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
            if not self._is_one():
                self.buffer.vector.divide_by_weight_()
            self.form = Form.ESTIMATE

    @torch.no_grad()
    def to_numerator(self) -> None:
        """Hold x from now on."""
        if self.is_needed and self.form is Form.ESTIMATE:
            if not self._is_one():
                self.buffer.vector.multiply_by_weight_()
            self.form = Form.NUMERATOR

    def _is_one(self) -> bool:
        """Whether w is one, so that x is z; on a GPU nobody waits to know."""
        weight = self.buffer.vector.push_sum_weight
        return weight.device.type == "cpu" and weight.item() == 1.0

    def stop(self) -> None:
        """Optimizers step on z from now on: the weight is not exchanged any more."""
        self.to_estimate()
        self._is_stopped = True
        _watched.discard(self)

    def is_stepped_by(self, optimizer: Optimizer) -> bool:
        """Whether the optimizer holds one of our parameters."""
        if self._is_stopped:
            return False
        ours = {id(parameter) for parameter in self.buffer.parameters}
        return any(id(parameter) in ours for group in optimizer.param_groups for parameter in group["params"])

    def _watch(self) -> None:
        if self.is_needed and not self._is_stopped:
            _watched.add(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._watch()


class _Watched:
    """The Debias objects that are needed, told of every optimizer step in the process by one pair of global hooks.

    The hooks are there while there are such objects. torch walks over its hooks during a step, and must not find them
    changed: where the last object goes within a step, or while another thread lives that has taken one since the hooks
    came, they stay, without effect, until the next object comes or goes. (Whether that thread is within a step now
    cannot be asked: reading the frames of a thread that runs is not safe.) The lock is reentrant, since an object may
    be collected, and leave, wherever its holder allocates; nobody waits for anything else while holding it.
    """

    def __init__(self) -> None:
        self._members: weakref.WeakSet[Debias] = weakref.WeakSet()
        self._lock = threading.RLock()
        self._handles: tuple[RemovableHandle, ...] = ()
        self._steppers: set[int] = set()  # threads that have taken a step since the hooks came

    def add(self, debias: Debias) -> None:
        """Tell `debias` of steps as long as it lives and is not discarded."""
        with self._lock:
            self._members.add(debias)
            weakref.finalize(debias, self._unhook_if_idle).atexit = False
            if not self._handles:
                self._handles = (
                    register_optimizer_step_pre_hook(self._before_step),
                    register_optimizer_step_post_hook(self._after_step),
                )

    def discard(self, debias: Debias) -> None:
        """Tell it no more."""
        with self._lock:
            self._members.discard(debias)
        self._unhook_if_idle()

    def _unhook_if_idle(self) -> None:
        """Also called by the garbage collector, when an object has died, in any thread."""
        with self._lock:
            if not any(True for _ in self._members) and not self._may_be_stepping():
                handles, self._handles = self._handles, ()
                self._steppers.clear()
                for handle in handles:
                    handle.remove()

    def _may_be_stepping(self) -> bool:
        """Whether an optimizer is inside its step in this thread, or may be in another one."""
        own = threading.get_ident()
        if any(ident != own and ident in self._steppers for ident in sys._current_frames()):
            return True
        frame = sys._getframe()
        while (above := frame.f_back) is not None:
            if above.f_code is _STEP:
                return True
            frame = above
        return False

    def _stepped_by(self, optimizer: Optimizer) -> list[Debias]:
        with self._lock:
            members = list(self._members)
        return [debias for debias in members if debias.is_stepped_by(optimizer)]

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._steppers.add(threading.get_ident())
        for debias in self._stepped_by(optimizer):
            debias.to_numerator()

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for debias in self._stepped_by(optimizer):
            debias.to_estimate()


_STEP = Optimizer.profile_hook_step(lambda: None).__code__  # what torch puts around every step, to call the hooks
_watched = _Watched()
