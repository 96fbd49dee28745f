"""Which options of a method shape a run, and which are set without effect."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from functools import lru_cache
from typing import Any, NoReturn, TypeVar

import torch.distributed as dist
from torch import nn

from ..membership.membership import Membership
from ..membership.participant import Participant
from ..registry import METHODS, Method
from .compressors import COMPRESSORS
from .options import METHOD_OPTIONS, Context, MethodOptions
from .wrapping import Wrapper

Options = TypeVar("Options", bound=MethodOptions)
_DEFAULTS: dict[str, Any] = {field.name: field.default for field in fields(MethodOptions)}


def used_options(method: Method, options: MethodOptions) -> frozenset[str]:
    """The names of the options that shape a run by `method`: some are used only beside a certain value of another."""
    used = method.options
    if "plan" in used and options.plan:  # it says who talks to whom, and how often
        used -= {"graph", "budget"}
    if "compressor" in used and (option := COMPRESSORS[options.compressor].option):
        used |= {option}
    if "interpolation" in used and options.interpolation == "constant":
        used |= {"interpolation_value"}
    if "consensus_target" in used and options.consensus_target:
        used |= {"consensus_remedy"}
    if method.always_overlaps or ({"overlap", "gossip_every"} <= used and options.overlap):
        used |= {"max_staleness"}
    return used


def possible_options(method: Method) -> frozenset[str]:
    """The names of the options that `method` can use, some of them only beside a certain value of another one."""
    possible = method.options
    if "compressor" in possible:
        possible |= {code.option for code in COMPRESSORS.values() if code.option}
    if "interpolation" in possible:
        possible |= {"interpolation_value"}
    if "consensus_target" in possible:
        possible |= {"consensus_remedy"}
    if method.always_overlaps or {"overlap", "gossip_every"} <= possible:
        possible |= {"max_staleness"}
    return possible


def unused_options(method: Method, options: MethodOptions) -> list[str]:
    """The names of the options that are set and have no effect with `method`."""
    used = used_options(method, options)
    return [name for name in METHOD_OPTIONS if name not in used and getattr(options, name) != _DEFAULTS[name]]


def without_unused(method: Method, options: Options) -> Options:
    """`options` with the defaults of those that have no effect: equal for runs that are equal."""
    return replace(options, **{name: _DEFAULTS[name] for name in unused_options(method, options)})


class _Taken(Exception):
    """A wrapper has come to a `_Trial`: it takes a membership."""


class _Trial(Membership):
    """A membership in which nobody trains, to ask a wrapper whether it takes one."""

    def __init__(self) -> None:
        super().__init__(dist.HashStore(), min_workers=1, host="127.0.0.1")

    def attach(self, participant: Participant, description: Mapping[str, str]) -> NoReturn:
        """The last thing that a wrapper does, when it has refused nothing."""
        raise _Taken


def why_fixed_ranks(method: Method, options: MethodOptions) -> str:
    """Why a membership does not carry a method with these options, as a clause or an error; "": it does.

    The wrapper is asked: `method` wraps a model of two numbers, and what it refuses is the answer. That may be the
    membership, or something else that is wrong with the options, such as a file that is not there. A `make` that does
    not hand the membership on, and would train alone, is noticed too.
    """
    options = _resolved(method, _plain(options))
    if options.nprocs_per_node != 1:
        return f"the scripts start each process as a worker, here with nprocs_per_node={options.nprocs_per_node}"
    return method.needs_fixed_ranks or _refusal(method.make, options)


@lru_cache(maxsize=64)
def _refusal(make: Callable[..., Wrapper], options: MethodOptions) -> str:
    """Cached, as MATCHA plans a graph for each number of workers."""
    try:
        wrapper = make(nn.Linear(1, 1, device="cpu"), options, Context(membership=_Trial()))
    except _Taken:
        return ""
    except (ValueError, RuntimeError) as error:
        return str(error)
    wrapper.close()
    return "its entry in the registry does not hand on the membership of its context"


def wrap(name: str, module: nn.Module, options: MethodOptions, context: Context) -> Wrapper:
    """The wrapper of a method around a model; rank 0 warns of options that are set and have no effect.

    Args:
        name: a key of METHODS.
        module: the model.
        options: of the method.
        context: of the run.

    Raises:
        ValueError: options that the method cannot have; a membership that it does not take.
    """
    method = METHODS[name]
    if context.membership is not None and (why := why_fixed_ranks(method, options)):
        raise ValueError(
            f"got a membership for {method.title}, expected None, or options with which its wrapper takes one. "
            f"Cause: {why}"
        )
    if (unused := unused_options(method, options)) and context.rank == 0:
        warnings.warn(f"{', '.join(unused)}: without effect with --recipe {name}", stacklevel=2)
    wrapper: Wrapper = method.make(module, _resolved(method, options), context)
    return wrapper


def _resolved(method: Method, options: Options) -> Options:
    """`options` as `method` uses them."""
    options = without_unused(method, options)
    return replace(options, overlap=True) if method.always_overlaps else options


def _plain(options: MethodOptions) -> MethodOptions:
    """`options` alone, without what a run adds to them."""
    return MethodOptions(**{name: getattr(options, name) for name in METHOD_OPTIONS})
