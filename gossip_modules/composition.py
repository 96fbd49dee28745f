"""What a gossip wrapper cannot be combined with: other tools that keep, shard or average the same parameters."""

from __future__ import annotations

import gc
import sys
from collections.abc import Collection, Iterator

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from .averaging import AveragingMixin

_REMEDY = "one wrapper keeps the models of all ranks together: remove the other one, and wrap the plain module once"
_NODE_REMEDY = (
    "every rank gossips a whole model: do not shard it. The GPUs of one machine can share one model and its batch with "
    "nprocs_per_node"
)


def check_inside(module: nn.Module, *, wrapper: str) -> None:
    """Refuse a module that another tool keeps equal, averages or shards already; when it is wrapped.

    Args:
        module: about to be wrapped.
        wrapper: the name of the class that is about to do so.

    Raises:
        ValueError: naming the submodule and what it is.
    """
    for name, part in module.named_modules():
        for other, remedy in _tools_of(part):
            where = f"'{name}' inside is {other}" if name else f"it is {other}"
            raise ValueError(f"got a module to wrap in {wrapper} of which {where}, expected a plain module; {remedy}")


def check_outside(module: nn.Module, parameters: Collection[Tensor]) -> None:
    """Refuse what was put around or over a wrapper after it was made.

    Args:
        module: the wrapper.
        parameters: what it gossips.

    Raises:
        RuntimeError: naming what it is.
    """
    name = type(module).__name__
    around = DistributedDataParallel._active_ddp_module
    if around is not None and any(part is module for part in around.modules()):
        raise RuntimeError(
            f"got a {name} inside a {type(around).__name__}, which averages its gradients over all ranks as well; "
            f"expected no other wrapper around it; {_REMEDY}. Launchers that wrap by themselves, such as Accelerate's "
            "prepare() or a DDP strategy, are to be given the optimizer and the data only"
        )
    for part in module.modules():
        for other, remedy in _tools_of(part, with_wrappers=False):
            raise RuntimeError(f"got a {name} to which a tool was applied that makes it {other}; {remedy}")
    for optimizer in _sharded_optimizers():
        ours = set(map(id, parameters))
        if any(id(parameter) in ours for group in optimizer.param_groups for parameter in group["params"]):
            raise RuntimeError(
                f"got a ZeroRedundancyOptimizer over the parameters of a {name}: it steps each parameter on one rank "
                "and sends it to the others, so that their models would be overwritten; expected an optimizer of each "
                "rank's own; use the optimizer inside it directly, e.g. torch.optim.AdamW(model.parameters())"
            )


def _tools_of(module: nn.Module, *, with_wrappers: bool = True) -> Iterator[tuple[str, str]]:
    """What else keeps the module's parameters, in words, and what to do about it."""
    if with_wrappers and isinstance(module, DistributedDataParallel | AveragingMixin):
        yield f"a {type(module).__name__}", _REMEDY
    # Set by fully_shard (FSDP2) and, also in the modules inside, by FullyShardedDataParallel (FSDP1).
    if getattr(module, "_is_fsdp_managed_module", False):
        yield "sharded over processes by fully_shard or FullyShardedDataParallel (FSDP)", _NODE_REMEDY
    # Whoever uses it has imported it; we need not.
    contract = sys.modules.get("torch.distributed._composable.contract")
    if contract is not None and "replicate" in (contract._get_registry(module) or ()):
        yield "replicated by replicate(), which averages gradients over all ranks", _REMEDY


def _sharded_optimizers() -> Iterator[Optimizer]:
    """The living instances of ZeroRedundancyOptimizer; nothing is looked for where its module was never imported."""
    zero = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    if zero is not None:
        yield from (x for x in gc.get_objects() if type(x) is zero.ZeroRedundancyOptimizer)
