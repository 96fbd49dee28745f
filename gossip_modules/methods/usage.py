"""`wrap`: a model wrapped by a method that a text names."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import TypeVar

from torch import nn

from ..registry import Method
from .chosen import read_algorithm
from .options import DEFAULTS, WRAPPER_OPTIONS, Context, WrapperOptions
from .wrapping import Wrapper

Options = TypeVar("Options", bound=WrapperOptions)


def unused_options(method: Method, options: WrapperOptions) -> list[str]:
    """The names of the options that are set and that the wrapper of a method does not take."""
    return [name for name in WRAPPER_OPTIONS if name not in method.options and getattr(options, name) != DEFAULTS[name]]


def without_unused(method: Method, options: Options) -> Options:
    """`options` with the defaults of those that have no effect: equal for runs that are equal."""
    return replace(options, **{name: DEFAULTS[name] for name in unused_options(method, options)})


def wrap(text: str, module: nn.Module, options: WrapperOptions, context: Context) -> Wrapper:
    """A model wrapped by a method; rank 0 warns of options that are set and have no effect.

    Args:
        text: the algorithm, or the short name of a method; see `read_algorithm`.
        module: the model.
        options: arguments of the wrapper.
        context: the run.

    Raises:
        ValueError: the text names no method, or options that it does not take; a membership that it does not take.
    """
    chosen = read_algorithm(text, seed=context.seed)
    method = chosen.method
    if context.membership is not None and (why := method.needs_fixed_ranks):
        raise ValueError(f"got a membership for {method.title}, expected None: {why}")
    if (unused := unused_options(method, options)) and context.rank == 0:
        warnings.warn(f"{', '.join(unused)}: without effect with {method.title}", stacklevel=2)
    wrapper: Wrapper = method.wrap(module, chosen, without_unused(method, options), context)
    return wrapper
