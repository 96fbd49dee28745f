"""Hooks on the steps of torch optimizers, for objects that watch the parameters."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from .aliases import instances_of
from .transformed import not_compiled


class Stepped:
    """An object with callbacks for optimizer steps, called until it closes or is collected; a copy is called too.

    A subclass may have two methods more: `other_step(optimizer)` is called at the steps of all other optimizers, and
    `after_closure(optimizer)` after each closure of a step, before the step changes parameters.
    """

    order: int = 0
    """Objects of a lower order are called first."""
    _buffer: Any  # has the parameters

    def __init__(self) -> None:
        self._hear()

    def _hear(self) -> None:
        STEP_HOOKS.add(self)

    def is_stepped_by(self, optimizer: Optimizer) -> bool:
        """Whether the steps of this optimizer concern it; asked again after `StepHooks.look_again`."""
        return holds_any(optimizer, self._buffer.parameters)

    def before_step(self, optimizer: Optimizer) -> None:
        """Called before a step; an error in it ends the step."""

    def after_step(self, optimizer: Optimizer) -> None:
        """Called after a step without errors, also if the step has changed nothing: see `is_left_out`."""

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

    The hooks are registered with the first object and stay: torch iterates over its hooks during a step, so they must
    not change. The lock is reentrant, because garbage collection may remove an object at any allocation under the
    lock. No code waits for anything else while holding it.
    """

    def __init__(self) -> None:
        self._members: weakref.WeakSet[Any] = weakref.WeakSet()
        self._lock = threading.RLock()
        self._is_hooked = False
        self._calls: dict[int, _Calls] = {}  # by id of the optimizer, as a class of optimizers may have no hash

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

    def _calls_of(self, optimizer: Optimizer) -> _Calls:
        """Return the calls of a step of this optimizer, found once for the optimizer and its parameters."""
        num_held = sum(len(group["params"]) for group in optimizer.param_groups)
        found = self._calls.get(key := id(optimizer))
        if found is None or found.num_held != num_held:
            with self._lock:
                members, calls = list(self._members), self._calls
            stepped = sorted((member for member in members if member.is_stepped_by(optimizer)), key=_order)
            idle = (member for member in members if member not in stepped and hasattr(member, "other_step"))
            before = [*(member.other_step for member in idle), *(member.before_step for member in stepped)]
            inside = [member.after_closure for member in stepped if hasattr(member, "after_closure")]
            after = [member.after_step for member in stepped]
            methods = (tuple(map(weakref.WeakMethod, kind)) for kind in (before, inside, after))
            found = calls[key] = _Calls(weakref.ref(optimizer, lambda _: calls.pop(key, None)), num_held, *methods)
        return found

    @not_compiled
    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        """Return new arguments for the step, with a watched closure; None: torch keeps the given ones."""
        calls = self._calls_of(optimizer)
        _call(calls.before, optimizer)
        closure = args[1] if len(args) > 1 else kwargs.get("closure")  # args[0] is the optimizer
        if closure is None or not calls.inside:
            return None

        def watched() -> Any:
            loss = closure()
            _call(calls.inside, optimizer)
            return loss

        if len(args) > 1:
            return (args[0], watched, *args[2:]), kwargs
        return args, {**kwargs, "closure": watched}

    @not_compiled
    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        _call(self._calls_of(optimizer).after, optimizer)


_Methods: TypeAlias = tuple[Callable[[], Callable[[Optimizer], None] | None], ...]  # not kept alive


def _call(methods: _Methods, optimizer: Optimizer) -> None:
    for method in methods:
        if (call := method()) is not None:
            call(optimizer)


class _Calls(NamedTuple):
    """The methods to call in the steps of an optimizer with this number of parameters, as long as it lives."""

    optimizer: weakref.ref[Optimizer]
    num_held: int
    before: _Methods
    inside: _Methods
    after: _Methods


STEP_HOOKS = StepHooks()
_order = attrgetter("order")
