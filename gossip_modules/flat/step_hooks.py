"""Hooks on the steps of torch optimizers, for whoever keeps the parameters that are stepped."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import Any, NamedTuple

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from .instances import instances_of


class Stepped:
    """An object that hears of optimizer steps while it lives, and until it closes; a copy hears of them too."""

    order: int = 0
    """Members of a higher order are told of the end of a step after those of a lower one."""

    def __init__(self) -> None:
        STEP_HOOKS.add(self)

    def is_stepped_by(self, optimizer: Optimizer) -> bool:
        """Whether the steps of this optimizer concern it; asked again after `StepHooks.look_again`."""
        raise NotImplementedError

    def before_step(self, optimizer: Optimizer) -> None:
        """Called before a step; an error that it raises ends the step."""

    def after_step(self, optimizer: Optimizer) -> None:
        """Called after a step that ended well, also after one that has changed nothing: see `is_left_out`."""

    def close(self) -> None:
        """Hear of no more steps; idempotent."""
        STEP_HOOKS.discard(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        STEP_HOOKS.add(self)


def holds_any(optimizer: Optimizer, parameters: Iterable[Tensor]) -> bool:
    """Whether the optimizer holds one of these parameters."""
    ours = {id(parameter) for parameter in parameters}
    return any(id(parameter) in ours for group in optimizer.param_groups for parameter in group["params"])


def existing_optimizers() -> list[Optimizer]:
    """All torch optimizers of the process that are made to their end."""
    return [optimizer for optimizer in instances_of(Optimizer) if hasattr(optimizer, "param_groups")]


def is_left_out(optimizer: Optimizer) -> bool:
    """Whether the step that has just ended has changed nothing, because gradients held infinities or NaN.

    Optimizers that unscale gradients themselves (`fused=True`) do so inside `step()`: GradScaler calls it in any case,
    with what it has found in `found_inf`, float32 [1] or scalar, which is there during the call only. Other optimizers
    are not called for such a step. Waits for the device, as GradScaler does for the others; without GradScaler it looks
    at nothing.
    """
    found_inf = getattr(optimizer, "found_inf", None)
    return found_inf is not None and bool(found_inf)


class StepHooks:  # one for the process: STEP_HOOKS
    """Objects that are told of every optimizer step in the process that concerns them, by one pair of global hooks.

    The hooks are there while there are such objects. torch walks over its hooks during a step, and must not find them
    changed: where the last object goes within a step, or while another thread lives that has taken one since the hooks
    came, they stay, without effect, until the next object comes or goes. (Whether that thread is within a step now
    cannot be asked: reading the frames of a thread that runs is not safe.) The lock is reentrant, since an object may
    be collected, and leave, wherever its holder allocates; nobody waits for anything else while holding it.
    """

    def __init__(self) -> None:
        self._members: weakref.WeakSet[Any] = weakref.WeakSet()
        self._lock = threading.RLock()
        self._handles: tuple[RemovableHandle, ...] = ()
        self._steppers: set[int] = set()  # threads that have taken a step since the hooks came
        self._concerned: weakref.WeakKeyDictionary[Optimizer, _Concerned] = weakref.WeakKeyDictionary()

    def add(self, member: Any) -> None:
        """Tell `member`, a `Stepped` or an object with its methods, of steps while it lives and is not discarded."""
        with self._lock:
            self._members.add(member)
            self.look_again()
            weakref.finalize(member, self._unhook_if_idle).atexit = False
            if not self._handles:
                self._handles = (
                    register_optimizer_step_pre_hook(self._before_step),
                    register_optimizer_step_post_hook(self._after_step),
                )

    def discard(self, member: Any) -> None:
        """Tell it no more."""
        with self._lock:
            self._members.discard(member)
            self.look_again()
        self._unhook_if_idle()

    def look_again(self) -> None:
        """A member has other parameters: which optimizers concern it is found out anew."""
        self._concerned = weakref.WeakKeyDictionary()

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

    def _concerned_by(self, optimizer: Optimizer) -> _Concerned:
        """The members for the steps of this optimizer, found out once for each optimizer and its parameters."""
        num_held = sum(len(group["params"]) for group in optimizer.param_groups)
        found = self._concerned.get(optimizer)
        if found is None or found.num_held != num_held:
            with self._lock:
                members, concerned = list(self._members), self._concerned
            stepped = sorted((member for member in members if member.is_stepped_by(optimizer)), key=_order)
            idle = {*members}.difference(stepped)
            others = tuple(weakref.WeakMethod(member.other_step) for member in idle if hasattr(member, "other_step"))
            found = concerned[optimizer] = _Concerned(num_held, tuple(map(weakref.ref, stepped)), others)
        return found

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._steppers.add(threading.get_ident())
        concerned = self._concerned_by(optimizer)
        for other in concerned.others:
            if (tell := other()) is not None:
                tell()
        for reference in concerned.members:
            if (member := reference()) is not None:
                member.before_step(optimizer)

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for reference in self._concerned_by(optimizer).members:
            if (member := reference()) is not None:
                member.after_step(optimizer)


class _Concerned(NamedTuple):
    """What the steps of one optimizer mean.

    Attributes:
        num_held: the number of its parameters.
        members: those that it concerns, by order.
        others: `other_step` of those that it does not concern, where they have one.
    """

    num_held: int
    members: tuple[Callable[[], Stepped | None], ...]
    others: tuple[Callable[[], Callable[[], None] | None], ...]


STEP_HOOKS = StepHooks()
_order = attrgetter("order")
_STEP = Optimizer.profile_hook_step(lambda: None).__code__  # what torch puts around every step, to call the hooks
