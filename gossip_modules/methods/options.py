"""The arguments of a wrapper in a training script, besides the algorithm, and the run of a method."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from datetime import timedelta
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from ..membership.membership import Membership
from ..registry import Method


@dataclass(frozen=True)
class WrapperOptions:
    """Arguments of the wrappers for a command line. `Method.options` names the arguments of a method."""

    graph: str = "auto"
    """The communication graph: a name, such as ring, or the text of one, such as "RingGraph(peers_per_itr=2)", where
    the number of ranks is left out. auto: the default of the method. By its name a graph has one peer per round with
    dpsgd, sgp, osgp, adpsgd and a2cid2 (the last two need a bipartite one), and all neighbours with the others."""
    peers_per_itr: str = "1"
    """With dpsgd, sgp and osgp and the name of a graph: peers per round, a number or <epoch>:<peers> pairs: '0:2,30:1'
    is two peers for 30 epochs, then one."""
    overlap: bool | Literal["auto"] = False
    """Run each round under the next step, not before it; osgp always does. auto: ranks measure eight rounds, then
    choose, within --max-staleness and --wire-dtype auto. wagma: take the average of a group one step later instead of
    waiting for it."""
    max_staleness: int = 0
    """With overlap: forwards that a round may complete late before training waits for it."""
    gossip_every: int = 1
    """Steps from one round to the next."""
    average_every: int = 0
    """Rounds from one exact global average to the next; 0: never."""
    schedule: str = ""
    """In place of the two before, the text of a schedule: "Schedule(average_until=1000)" begins with 1,000 exact
    averages."""
    nprocs_per_node: int = 1
    """Processes that average gradients among themselves and gossip as one."""
    wire_dtype: str = "none"
    """none, bfloat16, float16 or int8: parameters are rounded to it when they are sent. auto, with --overlap auto:
    bfloat16 where a round takes longer than the rest of a step."""


WRAPPER_OPTIONS: tuple[str, ...] = tuple(field.name for field in fields(WrapperOptions))
"""The names of all of them."""
DEFAULTS: dict[str, Any] = {field.name: field.default for field in fields(WrapperOptions)}
"""Their defaults by name."""
Options = TypeVar("Options", bound=WrapperOptions)


def unused_options(method: Method, options: WrapperOptions) -> list[str]:
    """Return the names of the set options without effect on the wrapper of a method."""
    return [name for name in WRAPPER_OPTIONS if name not in method.options and getattr(options, name) != DEFAULTS[name]]


def without_unused(method: Method, options: Options) -> Options:
    """Return `options` with the defaults of options without effect in `method`: equal for equal runs."""
    return replace(options, **{name: DEFAULTS[name] for name in unused_options(method, options)})


def _alone(function: Callable[[], Any]) -> list[Any]:
    """Return the result of `function` on this rank alone."""
    return [function()]


@dataclass(frozen=True)
class Context:
    """The run of a method.

    Args:
        rank: the rank of this process.
        world_size: the number of ranks.
        seed: the seed of the run, the same on every rank.
        timeout: the longest wait for a peer; with a membership the same as its own.
        comm_device: the device of sent messages; None: the device of the parameters.
        steps_per_epoch: optimizer steps of an epoch.
        example_inputs: makes inputs of the model as it sees them in training, on its device; None: no such inputs.
        on_every_rank: collective, calls a function and returns the results of all ranks, in their order.
        own_host: collective, returns an address of this machine for all other ranks.
        membership: the membership, in place of `rank` and `world_size`; None: a fixed number of ranks.
    """

    rank: int = 0
    world_size: int = 1
    seed: int = 1
    timeout: timedelta = timedelta(minutes=5)
    comm_device: torch.device | None = None
    steps_per_epoch: int = 1
    example_inputs: Callable[[], tuple[Tensor, ...]] | None = None
    on_every_rank: Callable[[Callable[[], Any]], list[Any]] = _alone
    own_host: Callable[[], str] = lambda: "127.0.0.1"
    membership: Membership | None = None
