"""Hooks on the steps of torch optimizers, for objects that watch or keep the parameters that are stepped."""

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
    """An object that hears of optimizer steps while it lives, and until it closes; a copy hears of them too.

    A method `other_step(optimizer)`, where there is one, hears of the steps of all other optimizers, and a method
    `after_closure(optimizer)` of each closure that a step has evaluated, before it steps.
    """

    order: int = 0
    """Members of a higher order are told of a step after those of a lower one."""
    _buffer: Any  # has the parameters

    def __init__(self) -> None:
        self._hear()

    def _hear(self) -> None:
        STEP_HOOKS.add(self)

    def is_stepped_by(self, optimizer: Optimizer) -> bool:
        """Whether the steps of this optimizer concern it; asked again after `StepHooks.look_again`."""
        return holds_any(optimizer, self._buffer.parameters)

    def before_step(self, optimizer: Optimizer) -> None:
        """Called before a step; an error that it raises ends the step."""

    def after_step(self, optimizer: Optimizer) -> None:
        """Called after a step that ended well, also after one that has changed nothing: see `is_left_out`."""

    def close(self) -> None:
        """Hear of no more steps; idempotent."""
        STEP_HOOKS.discard(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._hear()


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
    with its finding in `found_inf`, float32 [1] or scalar, which is there during the call only. Other optimizers are
    not called for such a step. Waits for the device, as GradScaler does for the others; without GradScaler it looks at
    nothing.
    """
    found_inf = getattr(optimizer, "found_inf", None)
    return found_inf is not None and bool(found_inf)


class StepHooks:  # one for the process: STEP_HOOKS
    """Objects that are told of every optimizer step in the process that concerns them, by one pair of global hooks.

    The hooks come with the first object and stay: torch walks over its hooks during a step, and must not find them
    changed. The lock is reentrant, since an object may be collected, and leave, wherever its holder allocates; nobody
    waits for anything else while holding it.
    """

    def __init__(self) -> None:
        self._members: weakref.WeakSet[Any] = weakref.WeakSet()
        self._lock = threading.RLock()
        self._is_hooked = False
        self._calls: weakref.WeakKeyDictionary[Optimizer, _Calls] = weakref.WeakKeyDictionary()

    def add(self, member: Any) -> None:
        """Tell `member`, a `Stepped` or an object with its methods, of steps while it lives and is not discarded."""
        with self._lock:
            self._members.add(member)
            self.look_again()
            if not self._is_hooked:
                self._is_hooked = True
                register_optimizer_step_pre_hook(self._before_step)
                register_optimizer_step_post_hook(self._after_step)

    def discard(self, member: Any) -> None:
        """Tell it no more."""
        with self._lock:
            self._members.discard(member)
            self.look_again()

    def look_again(self) -> None:
        """A member has other parameters: the optimizers that concern it are found anew."""
        self._calls = weakref.WeakKeyDictionary()

    def _calls_of(self, optimizer: Optimizer) -> _Calls:
        """The calls of a step of this optimizer, found once for the optimizer and its parameters."""
        num_held = sum(len(group["params"]) for group in optimizer.param_groups)
        found = self._calls.get(optimizer)
        if found is None or found.num_held != num_held:
            with self._lock:
                members, calls = list(self._members), self._calls
            stepped = sorted((member for member in members if member.is_stepped_by(optimizer)), key=_order)
            idle = (member for member in members if member not in stepped and hasattr(member, "other_step"))
            before = [*(member.other_step for member in idle), *(member.before_step for member in stepped)]
            inside = [member.after_closure for member in stepped if hasattr(member, "after_closure")]
            after = [member.after_step for member in stepped]
            methods = (tuple(map(weakref.WeakMethod, kind)) for kind in (before, inside, after))
            found = calls[optimizer] = _Calls(num_held, *methods)
        return found

    @not_compiled
    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        """The arguments of the step in place of those given (torch), where a closure is among them that is watched."""
        if not self._members:
            return None
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
        if self._members:
            _call(self._calls_of(optimizer).after, optimizer)


_Methods: TypeAlias = tuple[Callable[[], Callable[[Optimizer], None] | None], ...]  # not kept alive


def _call(methods: _Methods, optimizer: Optimizer) -> None:
    for method in methods:
        if (call := method()) is not None:
            call(optimizer)


class _Calls(NamedTuple):
    """The methods to call in the steps of an optimizer with this number of parameters."""

    num_held: int
    before: _Methods
    inside: _Methods
    after: _Methods


STEP_HOOKS = StepHooks()
_order = attrgetter("order")
