"""The error that ends a training loop, and the hooks that see one which nothing catches."""

from __future__ import annotations

import gc
import inspect
import opcode
import sys
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from weakref import WeakSet

_RAISES = {opcode.opmap[name] for name in ("RAISE_VARARGS", "RERAISE") if name in opcode.opmap}


def ends_by_error(loop: FrameType | None) -> bool:
    """Whether a `for` whose generator is being closed is left by an error, and not by `break` or `return`.

    [Note: loops that end by an error] Python closes the generator of a `for` as soon as the loop is left, with the same
    GeneratorExit whatever the reason. The error itself is nowhere to be read then, but its traceback exists, and the
    place in it that belongs to the loop is the instruction at which the loop stands. After `break` or `return` the loop
    stands at an instruction that raises nothing. This is looked up once for each loop that is left early.

    Args:
        loop: the frame that closes the generator; generators between it and the `for`, such as a progress bar, are
            passed over.
    """
    while loop is not None and loop.f_code.co_flags & inspect.CO_GENERATOR:
        loop = loop.f_back
    if loop is None or loop.f_lasti < 0:
        return False
    is_raised_again = loop.f_code.co_code[loop.f_lasti] in _RAISES
    places = (found for found in gc.get_referrers(loop) if isinstance(found, TracebackType))
    return any(place.tb_frame is loop and (is_raised_again or place.tb_lasti == loop.f_lasti) for place in places)


def hear_of_uncaught_errors(tell: Callable[[int | None], None]) -> None:
    """Have `tell` called with each error that nothing catches, before it is printed, unless it is so already.

    Its argument is the thread that the error ends; None: the main thread, and so the process. In an interactive
    interpreter an error in the main thread ends nothing, and is not told.
    """
    before, before_in_thread = sys.excepthook, threading.excepthook

    def hook(kind: type[BaseException], error: BaseException, place: TracebackType | None) -> None:
        try:
            if not (hasattr(sys, "ps1") or sys.flags.interactive):
                tell(None)
        finally:
            before(kind, error, place)

    def hook_in_thread(arguments: threading.ExceptHookArgs) -> None:
        try:
            tell(threading.get_ident())
        finally:
            before_in_thread(arguments)

    if sys.excepthook not in _hooks:
        _hooks.add(hook)
        sys.excepthook = hook
    if threading.excepthook not in _hooks:
        _hooks.add(hook_in_thread)
        threading.excepthook = hook_in_thread


_hooks: WeakSet[Callable[..., None]] = WeakSet()  # others may have put theirs in the place of ours since
