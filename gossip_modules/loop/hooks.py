"""The steps of torch optimizers: hooks on all of them, and the objects that are called by these hooks.

`STEP_HOOKS`, the one `StepHooks` of the process, has the hooks of torch. Each model has one `Observer`, its `Loop`,
with the `StepListener` objects that act at the steps of the optimizers of this model, in one order.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import FrameType
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ..flat.aliases import instances_of
from ..flat.buffer import FlatBuffer
from ..flat.transformed import not_compiled
from ..state import State

_Method: TypeAlias = Callable[[], Callable[[Optimizer], Any] | None]
Methods: TypeAlias = tuple[_Method, ...]
"""References to methods of listeners, which are not kept alive."""


class StepListener(State):
    """A part of an `Observer`, called at the optimizer steps that concern it from `subscribe` to `close`.

    A subclass has some of these methods, each with the optimizer as its argument, called in this order:

    - `before_step`: before the optimizer's own pre-hooks. An error in it ends the step.
    - `enter_step`: after these, directly before the step's own code.
    - `reenter_step`: where this code goes on after code that may have computed with the model: a closure, or the begin
      of another step inside this one.
    - `leave_step`: directly after the step's own code, before the optimizer's own post-hooks.
    - `after_step`: at the end of a step that counts, also if it has changed nothing: see `is_left_out`.

    After an error in a step none of the methods that follow is called.

    Args:
        buffer: has the parameters.

    Attributes:
        is_subscribed: whether it is to be called; see `subscribe` and `close`.
        sees_inner_steps: whether the steps of another optimizer inside a step are steps, too: see [Note: Steps inside
            steps].
    """

    sees_inner_steps: bool = False

    def __init__(self, buffer: FlatBuffer) -> None:
        self.buffer = buffer
        self.is_subscribed = False

    def subscribe(self) -> None:
        """Be called at steps from now on."""
        self.is_subscribed = True
        STEP_HOOKS.look_again()

    def close(self) -> None:
        """Be called no more; idempotent."""
        self.is_subscribed = False
        STEP_HOOKS.look_again()

    def concerns(self, optimizer: Optimizer) -> bool:
        """Whether the steps of this optimizer concern it; asked again after `StepHooks.look_again`."""
        return holds_any(optimizer, self.buffer.parameters)


class Observer(StepListener):
    """The listeners of the optimizer steps of one model, in the order in which they are called; it is the last of them.

    It is called until it closes or is collected, and a copy of it is called too. It may have another method:
    `other_step`, called before the steps of optimizers that do not concern it.

    [Note: Steps inside steps] A step may run others: its class calls `super().step()`, which torch hooks too where the
    parent class is in use, or it wraps another optimizer of the same parameters, as Lookahead does. An inner step of
    the same optimizer is a part of the outer one: only `reenter_step` is called. An inner step of another optimizer is
    a step of its own for listeners with `sees_inner_steps`, and a part of the outer one for the others.

    Args:
        buffer: has the parameters.
        listeners: the listeners.
    """

    def __init__(self, buffer: FlatBuffer, listeners: Iterable[StepListener] = ()) -> None:
        super().__init__(buffer)
        self._listeners = tuple(listeners)
        self.subscribe()

    @property
    def listeners(self) -> tuple[StepListener, ...]:
        """The listeners in their order."""
        return self._listeners

    def add(self, listener: StepListener) -> None:
        """Let this listener be the last one before this object."""
        self._listeners = (*self._listeners, listener)
        listener.subscribe()

    def subscribe(self) -> None:
        """See `StepListener`."""
        STEP_HOOKS.add(self)
        super().subscribe()

    def close(self) -> None:
        """See `StepListener`."""
        STEP_HOOKS.discard(self)
        super().close()

    def end_step(self, optimizer: Optimizer, listeners: Methods) -> None:
        """A step has ended that concerns it: call `after_step` of its listeners where the step counts.

        Args:
            optimizer: the optimizer.
            listeners: these methods.
        """
        _call(listeners, optimizer)

    def stepped_by(self, optimizer: Optimizer) -> list[StepListener]:
        """The listeners that the steps of this optimizer concern."""
        return [
            listener for listener in (*self.listeners, self) if listener.is_subscribed and listener.concerns(optimizer)
        ]

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self.is_subscribed:
            self.subscribe()


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
    """The observers of the optimizer steps of this process, called by one pair of global hooks.

    The global hooks are registered with the first observer and stay: torch iterates over its hooks during a step, so
    they must not change. torch calls global pre-hooks before the optimizer's own ones, and global post-hooks after
    these. So an optimizer with listeners to call at the step's own code has two more hooks, the last of its own
    pre-hooks and the first of its own post-hooks.

    The methods to call are found once for each optimizer, and again when it or a buffer has other parameters, or when a
    listener subscribes or closes: nothing is called that has nothing to do in a step.

    torch calls no hook where a step raises. So the list of a thread's running steps may have entries of steps that have
    ended by an error. Where it has an entry that should not be there, the stack of the thread tells their number.

    The lock is reentrant, because garbage collection may remove an object at any allocation under the lock. No code
    waits for anything else while holding it.
    """

    def __init__(self) -> None:
        self._observers: weakref.WeakSet[Observer] = weakref.WeakSet()
        self._lock = threading.RLock()
        self._is_hooked = False
        self._num_layouts = 0  # for which the calls were found
        self._calls: dict[int, _Calls] = {}  # by id of the optimizer, as a class of optimizers may have no hash
        self._running = _Running()

    def add(self, observer: Observer) -> None:
        """Call this observer and its listeners at steps, until it is discarded or collected."""
        with self._lock:
            self._observers.add(observer)
            if not self._is_hooked:
                self._is_hooked = True
                register_optimizer_step_pre_hook(self._before_step)
                register_optimizer_step_post_hook(self._after_step)

    def discard(self, observer: Observer) -> None:
        """End the calls of this observer."""
        with self._lock:
            self._observers.discard(observer)

    def look_again(self) -> None:
        """Find the methods to call again, after a listener has subscribed, has closed, or has found out more."""
        self._calls = {}

    def __reduce__(self) -> str:
        return "STEP_HOOKS"  # an optimizer that is copied with all its attributes has hooks of this object

    def _calls_of(self, optimizer: Optimizer) -> _Calls:
        """Return the calls of a step of this optimizer, found once for the optimizer and its parameters."""
        if self._num_layouts != FlatBuffer.num_layouts:
            self._num_layouts = FlatBuffer.num_layouts
            self._calls = {}
        num_held = 0
        for group in optimizer.param_groups:
            num_held += len(group["params"])
        found = self._calls.get(key := id(optimizer))
        if found is None or found.num_held != num_held:
            with self._lock:
                observers, calls = list(self._observers), self._calls
            stepped = {observer: observer.stepped_by(optimizer) for observer in observers}
            reference = weakref.ref(optimizer, lambda _: calls.pop(key, None))
            others = _methods((observer for observer in observers if observer not in stepped[observer]), "other_step")
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
        for reference, listeners in calls.after:
            if (observer := reference()) is not None:
                observer.end_step(optimizer, listeners)
        if calls.beside:
            _call(calls.beside, optimizer)

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


def _call(methods: Methods, optimizer: Optimizer) -> None:
    for method in methods:
        if (call := method()) is not None:
            call(optimizer)


def _methods(members: Iterable[Any], name: str) -> Methods:
    return tuple(weakref.WeakMethod(getattr(member, name)) for member in members if hasattr(member, name))


class _Calls(NamedTuple):
    """The methods to call in the steps of an optimizer with this number of parameters, as long as it lives."""

    optimizer: weakref.ref[Optimizer]
    num_held: int
    stepped: tuple[
        tuple[weakref.ref[Observer], tuple[weakref.ref[StepListener], ...]], ...
    ]  # see `Observer.stepped_by`
    others: Methods
    before: Methods
    enter: Methods
    reenter: Methods
    leave: Methods
    after: tuple[tuple[weakref.ref[Observer], Methods], ...]  # see `Observer.end_step`
    beside: Methods  # `after_step` of listeners whose observer the step does not concern

    @classmethod
    def of(
        cls,
        optimizer: weakref.ref[Optimizer],
        num_held: int,
        stepped: Mapping[Observer, Sequence[StepListener]],
        others: Methods = (),
        *,
        reentered: Sequence[StepListener] = (),
    ) -> _Calls:
        """Find the methods of these listeners.

        Args:
            optimizer: the optimizer.
            num_held: the number of its parameters.
            stepped: the listeners of the step, by observer, in their order.
            others: see `Observer.other_step`.
            reentered: the listeners of a step around it.
        """
        listeners = [listener for members in stepped.values() for listener in members]
        return cls(
            optimizer,
            num_held,
            tuple((weakref.ref(x), tuple(map(weakref.ref, members))) for x, members in stepped.items() if members),
            others,
            (*others, *_methods(listeners, "before_step")),
            (*_methods(reentered, "reenter_step"), *_methods(listeners, "enter_step")),
            _methods([*reentered, *listeners], "reenter_step"),
            _methods(listeners, "leave_step"),
            tuple((weakref.ref(x), _methods(members, "after_step")) for x, members in stepped.items() if x in members),
            _methods(
                (listener for x, members in stepped.items() if x not in members for listener in members), "after_step"
            ),
        )

    def inside(self, running: Iterable[_Calls]) -> _Calls:
        """The calls of this step inside other ones: see [Note: Steps inside steps]."""
        around = {id(ref()) for outer in running for _, members in outer.stepped for ref in members}
        is_same = any(outer.optimizer() is self.optimizer() for outer in running)
        steps: dict[Observer, list[StepListener]] = {}
        parts: list[StepListener] = []
        for observer, members in ((ref(), [x for r in refs if (x := r()) is not None]) for ref, refs in self.stepped):
            inner = [x for x in members if id(x) in around and (is_same or not x.sees_inner_steps)]
            parts += inner
            if observer is not None:
                steps[observer] = [x for x in members if x not in inner]
        found = _Calls.of(self.optimizer, self.num_held, steps, reentered=parts)
        return found._replace(others=self.others, before=(*self.others, *found.before))


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
