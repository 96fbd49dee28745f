"""Which options of a method shape a run, and which are set without effect."""

from __future__ import annotations

import warnings
from dataclasses import fields, replace
from typing import Any, TypeVar

from torch import nn

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


def why_fixed_ranks(method: Method, options: MethodOptions) -> str:
    """Why a membership does not carry a method with these options, as a clause; "": it does."""
    if method.needs_fixed_ranks is not None:
        why = method.needs_fixed_ranks
    elif method.gossiper is None:
        why = "its entry in the registry does not say that its workers can come and go"
    elif method.gossiper(options, 0).is_elastic:
        why = ""
    else:
        why = "what it keeps of its peers must be the same at both ends of a link, also after a message is lost"
    if why:
        return why
    used = used_options(method, options)
    if "average_every" in used and options.average_every:
        return f"an average over all ranks, here with average_every={options.average_every}, fails with each of them"
    if "consensus_target" in used and options.consensus_target:
        return f"all must decide alike how often they gossip, here with consensus_target={options.consensus_target}"
    if "nprocs_per_node" in used and options.nprocs_per_node != 1:
        return f"each process is a worker that may come and go, here with nprocs_per_node={options.nprocs_per_node}"
    return f"a plan is for so many nodes, here with plan={options.plan}" if "plan" in used and options.plan else ""


def wrap(name: str, module: nn.Module, options: MethodOptions, context: Context) -> Wrapper:
    """The wrapper of a method around a model; rank 0 warns of options that are set and have no effect.

    Args:
        name: a key of METHODS.
        module: the model.
        options: of the method.
        context: of the run.

    Raises:
        ValueError: options that the method cannot have.
    """
    method = METHODS[name]
    if context.membership is not None and (why := why_fixed_ranks(method, options)):
        raise ValueError(f"got a membership for {method.title}, expected None, since {why}; take sgp, osgp or dpsgd")
    if (unused := unused_options(method, options)) and context.rank == 0:
        warnings.warn(f"{', '.join(unused)}: without effect with --recipe {name}", stacklevel=2)
    options = without_unused(method, options)
    if method.always_overlaps:
        options = replace(options, overlap=True)
    wrapper: Wrapper = method.make(module, options, context)
    return wrapper
