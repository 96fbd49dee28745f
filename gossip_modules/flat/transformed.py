"""Forwards outside of training steps: under a transform of torch.func, a trace or an export."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, TypeVar, cast

import torch
from torch import nn

_F = TypeVar("_F", bound=Callable[..., Any])
_REMEDY = (
    "a gossip wrapper communicates in its training forward, which is part of no graph: compile without fullgraph=True, "
    "or compile the module before you wrap it; to compile for inference use model.module, or the plain module in place "
    "of one of gossip()"
)
# Those that trace: make_fx, torch.export and FakeTensorMode. A mode of the user's own, such as FlopCounterMode, watches
# a step of training, in which other ranks wait for the round.
_TRACING = (
    torch._C._TorchDispatchModeKey.FAKE,
    torch._C._TorchDispatchModeKey.PROXY,
    torch._C._TorchDispatchModeKey.FUNCTIONAL,
)
_is_compiling = torch.compiler.is_dynamo_compiling
_compiler_of_frames = torch._C._dynamo.eval_frame.get_eval_frame_callback
_functorch_interpreter = torch._C._functorch.peek_interpreter_stack
_is_tracing = torch._C._is_tracing
_num_modes = torch._C._len_torch_dispatch_stack


def is_transformed() -> bool:
    """Whether the operations of a forward are transformed or recorded now. Such a forward must not mix.

    Transforms such as `torch.func.grad`, `jacrev` and `vmap` forbid writes to parameters, and other ranks may not call
    them. `torch.jit.trace`, `torch.export`, `make_fx` and `FakeTensorMode` record a forward.
    """
    if _is_compiling():  # Dynamo traces this line: what it takes for true here is so in every later step
        return torch.compiler._is_exporting_flag
    return (
        _functorch_interpreter() is not None
        or _is_tracing()
        or (_num_modes() > 0 and any(torch._C._get_dispatch_mode(key) is not None for key in _TRACING))
    )


def call_plain(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, wrapper: str) -> Any:
    """Run the forward of the module in a wrapper, without a round.

    Raises:
        TypeError: `torch.fx.symbolic_trace` traces the wrapper: it gives one symbol for all arguments.
    """
    if type(args) is not tuple:
        raise TypeError(
            f"got a {wrapper} to trace symbolically, expected the plain module, whose arguments have names; use "
            "torch.fx.symbolic_trace(model.module)"
        )
    return module(*args, **kwargs)


def refuse_scripting(name: str, remedy: str) -> NoReturn:
    """Raise TypeError: `torch.jit.script` calls it through `__prepare_scriptable__`."""
    raise TypeError(
        f"got a {name} to script, expected the plain module: TorchScript compiles no communication; {remedy}"
    )


def not_compiled(function: _F) -> _F:
    """Decorate a function as torch.compiler.disable(reason=...) does, but at no cost without a compiler.

    It loads torch._dynamo (seconds) at the first call under a compiler.
    """
    disabled: Any = torch._disable_dynamo(function)
    disabled._torchdynamo_disable, disabled._torchdynamo_disable_msg = True, _REMEDY

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if _is_compiling() or _compiler_of_frames() is not None:
            return disabled(*args, **kwargs)
        return function(*args, **kwargs)

    return cast("_F", call)
