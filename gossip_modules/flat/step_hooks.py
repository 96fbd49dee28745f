"""Hooks on the steps of torch optimizers, for objects that watch the parameters."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterable
from operator import attrgetter
from types import FrameType
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from .aliases import instances_of
from .transformed import not_compiled


class Stepped:
    """An object with callbacks for optimizer steps, called until it closes or is collected; a copy is called too.

    A subclass has some of these methods, each with the optimizer as its argument, called in this order:

    - `before_step`: before the optimizer's own pre-hooks. An error in it ends the step.
    - `enter_step`: after these, directly before the step's own code.
    - `reenter_step`: where this code goes on after code that may have computed with the model: a closure, or the begin
      of another step inside this one.
    - `leave_step`: directly after the step's own code, before the optimizer's own post-hooks.
    - `is_step`: after these. Where it returns False the step does not count for any object with the same `_buffer`.
    - `after_step`: at the end of a step that counts, also if it has changed nothing: see `is_left_out`.

    After an error in a step none of those that follow is called.

    And `other_step` is called before the steps of all other optimizers.

    [Note: Steps inside steps] A step may run others: its class calls `super().step()`, which torch hooks too where the
    parent class is in use, or it wraps another optimizer of the same parameters, as Lookahead does. An inner step of
    the same optimizer is a part of the outer one: only `reenter_step` is called. An inner step of another optimizer is
    a step of its own for objects with `sees_inner_steps`, and a part of the outer one for the others.
    """

    order: int = 0
    """Objects of a lower order are called first."""
    sees_inner_steps: bool = False
    """Whether the steps of another optimizer inside a step are steps, too; see [Note: Steps inside steps]."""
    _buffer: Any  # has the parameters

    def __init__(self) -> None:
        self._hear()

    def _hear(self) -> None:
        STEP_HOOKS.add(self)

    def is_stepped_by(self, optimizer: Optimizer) -> bool:
        """Whether the steps of this optimizer concern it; asked again after `StepHooks.look_again`."""
        return holds_any(optimizer, self._buffer.parameters)

    def close(self) -> None:
        """End the calls; idempotent."""
        STEP_HOOKS.discard(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._hear()


def holds_any(optimizer: Optimizer, parameters: Iterable[Tensor]) -> bool:
    """Whether the optimizer holds one of these parameters."""
    ours = {id(parameter) for parameter in parameters}
    return any(id(parameter) in ours for group in optimizer.param_groups for parameter in group["params"])


def existing_optimizers() -> list[Optimizer]:
    """Return all torch optimizers of the process whose `__init__` has finished."""
    return [optimizer for optimizer in instances_of(Optimizer) if hasattr(optimizer, "param_groups")]


def is_left_out(optimizer: Optimizer) -> bool:
    """Whether the last step has changed nothing, because gradients held infinities or NaN. Waits for the device.

    Optimizers with `fused=True` unscale gradients inside `step()`: GradScaler calls them in any case, and sets their
    `found_inf`, float32 [1] or scalar, during the call. GradScaler does not call other optimizers for such a step.
    Without GradScaler this is False.
    """
    found_inf = getattr(optimizer, "found_inf", None)
    return found_inf is not None and bool(found_inf)


class StepHooks:  # one for the process: STEP_HOOKS
    """The objects with callbacks for optimizer steps of this process, called by one pair of global hooks.

    The global hooks are registered with the first object and stay: torch iterates over its hooks during a step, so they
    must not change. torch calls global pre-hooks before the optimizer's own ones, and global post-hooks after these.
    So an optimizer with objects to call at the step's own code has two more hooks, the last of its own pre-hooks and
    the first of its own post-hooks.

    torch calls no hook where a step raises. So the list of a thread's running steps may have entries of steps that have
    ended by an error. Where it has an entry that should not be there, the stack of the thread tells their number.

    The lock is reentrant, because garbage collection may remove an object at any allocation under the lock. No code
    waits for anything else while holding it.
    """

    def __init__(self) -> None:
        self._members: weakref.WeakSet[Any] = weakref.WeakSet()
        self._lock = threading.RLock()
        self._is_hooked = False
        self._calls: dict[int, _Calls] = {}  # by id of the optimizer, as a class of optimizers may have no hash
        self._running = _Running()

    def add(self, member: Any) -> None:
        """Call `member`, a `Stepped` or an object with its methods, at steps until it is discarded or collected."""
        with self._lock:
            self._members.add(member)
            self.look_again()
            if not self._is_hooked:
                self._is_hooked = True
                register_optimizer_step_pre_hook(self._before_step)
                register_optimizer_step_post_hook(self._after_step)

    def discard(self, member: Any) -> None:
        """End the calls of `member`."""
        with self._lock:
            self._members.discard(member)
            self.look_again()

    def look_again(self) -> None:
        """Find the optimizers of each member again, after a member has changed its parameters."""
        self._calls = {}

    def __reduce__(self) -> str:
        return "STEP_HOOKS"  # an optimizer that is copied with all its attributes has hooks of this object

    def _calls_of(self, optimizer: Optimizer) -> _Calls:
        """Return the calls of a step of this optimizer, found once for the optimizer and its parameters."""
        num_held = sum(len(group["params"]) for group in optimizer.param_groups)
        found = self._calls.get(key := id(optimizer))
        if found is None or found.num_held != num_held:
            with self._lock:
                members, calls = list(self._members), self._calls
            stepped = sorted((member for member in members if member.is_stepped_by(optimizer)), key=_order)
            others = [member for member in members if member not in stepped]
            reference = weakref.ref(optimizer, lambda _: calls.pop(key, None))
            found = calls[key] = _Calls.of(reference, num_held, stepped, others)
        return found

    @not_compiled
    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        """Return new arguments for the step, with a watched closure; None: torch keeps the given ones."""
        calls, running = self._calls_of(optimizer), self._running.calls
        if running:
            del running[max(num_running(sys._getframe()) - 1, 0) :]
            calls = calls.inside(running)
        running.append(calls)
        _call(calls.before, optimizer)
        if calls.enter or calls.leave:
            self._place(optimizer)
        elif len(running) == 1 and _PLACE in optimizer._optimizer_step_pre_hooks:  # no longer needed
            del optimizer._optimizer_step_pre_hooks[_PLACE], optimizer._optimizer_step_post_hooks[_PLACE]
        closure = args[1] if len(args) > 1 else kwargs.get("closure")  # args[0] is the optimizer
        if closure is None or not calls.reenter:
            return None

        def watched() -> Any:
            loss = closure()
            _call(calls.reenter, optimizer)
            return loss

        if len(args) > 1:
            return (args[0], watched, *args[2:]), kwargs
        return args, {**kwargs, "closure": watched}

    def _place(self, optimizer: Optimizer) -> None:
        """Let the optimizer's own hooks begin and end with these, around the step's own code."""
        before: Any = optimizer._optimizer_step_pre_hooks  # an OrderedDict, declared as a dict
        after: Any = optimizer._optimizer_step_post_hooks
        if next(reversed(before), None) != _PLACE:
            before[_PLACE] = self._enter_step
            before.move_to_end(_PLACE)
        if next(iter(after), None) != _PLACE:
            after[_PLACE] = self._leave_step
            after.move_to_end(_PLACE, last=False)

    @not_compiled
    def _enter_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        _call(self._now().enter, optimizer)

    @not_compiled
    def _leave_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        _call(self._now().leave, optimizer)

    @not_compiled
    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not self._running.calls:  # the step has begun before the first object came
            return
        calls = self._now()
        self._running.calls.pop()
        for is_step, methods in calls.after:
            if is_step is None or (ask := is_step()) is None or ask(optimizer):
                _call(methods, optimizer)

    def _now(self) -> _Calls:
        """The calls of the step that this thread is in, the innermost one."""
        running = self._running.calls
        if len(running) > 1:
            del running[max(num_running(sys._getframe()), 1) :]
        return running[-1]


class _Running(threading.local):
    """The calls of the steps that a thread is in, the innermost last."""

    def __init__(self) -> None:
        self.calls: list[_Calls] = []


_Method: TypeAlias = Callable[[], Callable[[Optimizer], Any] | None]  # not kept alive
_Methods: TypeAlias = tuple[_Method, ...]


def _call(methods: _Methods, optimizer: Optimizer) -> None:
    for method in methods:
        if (call := method()) is not None:
            call(optimizer)


def _methods(members: Iterable[Any], name: str) -> _Methods:
    return tuple(weakref.WeakMethod(getattr(member, name)) for member in members if hasattr(member, name))


class _Calls(NamedTuple):
    """The methods to call in the steps of an optimizer with this number of parameters, as long as it lives."""

    optimizer: weakref.ref[Optimizer]
    num_held: int
    stepped: tuple[weakref.ref[Any], ...]  # the members of this step, in their order
    others: _Methods
    before: _Methods
    enter: _Methods
    reenter: _Methods
    leave: _Methods
    after: tuple[
        tuple[_Method | None, _Methods], ...
    ]  # for the members with the same parameters; see `Stepped.is_step`

    @classmethod
    def of(
        cls,
        optimizer: weakref.ref[Optimizer],
        num_held: int,
        stepped: list[Any],
        others: Iterable[Any] = (),
        *,
        reentered: Iterable[Any] = (),
    ) -> _Calls:
        """Find the methods of these members.

        Args:
            optimizer: the optimizer.
            num_held: the number of its parameters.
            stepped: the members of the step, in their order.
            others: other members.
            reentered: the members of a step around it.
        """
        idle = _methods(others, "other_step")
        by_parameters: dict[int, list[Any]] = {}
        for member in stepped:
            by_parameters.setdefault(id(getattr(member, "_buffer", member)), []).append(member)
        after = tuple(
            (next(iter(_methods(members, "is_step")), None), _methods(members, "after_step"))
            for members in by_parameters.values()
        )
        return cls(
            optimizer,
            num_held,
            tuple(map(weakref.ref, stepped)),
            idle,
            (*idle, *_methods(stepped, "before_step")),
            (*_methods(reentered, "reenter_step"), *_methods(stepped, "enter_step")),
            _methods([*reentered, *stepped], "reenter_step"),
            _methods(stepped, "leave_step"),
            after,
        )

    def inside(self, running: Iterable[_Calls]) -> _Calls:
        """The calls of this step inside other ones: see [Note: Steps inside steps]."""
        around = {id(ref()) for outer in running for ref in outer.stepped}
        is_same = any(outer.optimizer() is self.optimizer() for outer in running)
        own = [member for member in (ref() for ref in self.stepped) if member is not None]
        parts = [x for x in own if id(x) in around and (is_same or not x.sees_inner_steps)]
        steps = [x for x in own if all(x is not part for part in parts)]
        inner = _Calls.of(self.optimizer, self.num_held, steps, reentered=parts)
        return inner._replace(others=self.others, before=(*self.others, *inner.before))


_STEP = Optimizer.profile_hook_step(print).__code__  # of the function around each hooked step


def num_running(frame: FrameType | None) -> int:
    """The number of hooked steps in the stack of a frame, such as `sys._getframe()`."""
    count = 0
    while frame is not None:
        count += frame.f_code is _STEP
        frame = frame.f_back
    return count


STEP_HOOKS = StepHooks()
_PLACE = -1  # among an optimizer's own hooks, whose numbers are not negative
_order = attrgetter("order")
