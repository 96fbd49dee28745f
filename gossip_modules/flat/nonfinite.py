"""Checks for infinities and NaN in a model, before gossip spreads them to all ranks."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from typing import NoReturn

import torch
from torch import Tensor, nn

from ..devices import host_zeros
from ..state import State, transient
from .vector import FlatVector, in_chunks

_log = logging.getLogger("gossip_modules.nonfinite")
POLICIES = ("raise", "spread")


def check_policy(on_nonfinite: str) -> str:
    """Return the policy; raise ValueError for an unknown one."""
    if on_nonfinite not in POLICIES:
        remedy = (
            ": a membership leaves a worker with infinities or NaN out of the rounds of all others, and a GradScaler, "
            "or a check of the loss, leaves out a bad batch"
            if on_nonfinite == "skip"
            else ", an error or no check"
        )
        raise ValueError(f"got on_nonfinite={on_nonfinite!r}, expected 'raise' or 'spread'{remedy}")
    return on_nonfinite


def refuse(rank: int, what: str, *, senders: Sequence[int] = (), is_here: bool = True) -> NoReturn:
    """Raise FloatingPointError.

    Args:
        rank: this rank.
        what: "round 3" or the like.
        senders: the ranks that sent the model; empty: it is this rank's own.
        is_here: whether this process found the values, and not another process of its node.
    """
    whose = f"what ranks {list(senders)} have sent holds" if senders else "its own model holds"
    whose = whose if is_here else "another process of its node has found"
    raise FloatingPointError(
        f"rank {rank}: in {what} {whose} infinities or NaN, expected finite parameters and buffers, since gossip hands "
        "them to all ranks; this model was not changed by it. Go on from a checkpoint with a smaller learning rate, "
        "clipped gradients or a GradScaler"
    )


def log_left_out(rank: object, what: str, senders: Sequence[object]) -> None:
    """Tell that this rank goes on without such a message, whose sender gets the error; see `refuse` for arguments."""
    _log.warning(
        "rank %s: %s is left out here, since what ranks %s have sent holds infinities or NaN", rank, what, [*senders]
    )


def is_finite(x: FlatVector) -> bool:
    """Whether no element is infinite or NaN. Waits for the device of x.

    The check reads x once, and once more if the first pass finds something.
    """
    return are_finite(x.segments)


def are_finite(tensors: Iterable[Tensor]) -> bool:
    """`is_finite` of flat tensors."""
    return all(math.isfinite(_total(segment).item()) or _all_finite(segment) for segment in tensors)


class FiniteCheck(State):
    """`is_finite` for every round, without a wait for the GPU: there the answer is about the round before."""

    # Whether the x of the last call was finite, bool [1] in host memory, and the event of that copy.
    _last: tuple[Tensor, torch.Event] | None = transient(None)

    def __call__(self, x: FlatVector) -> bool:
        """Whether x, on a GPU the x of the last call, has no infinities or NaN."""
        if x.raw.device.type == "cpu" or not x.segments:  # or the shard of a process, of a model with fewer elements
            return is_finite(x)
        totals = torch.stack(tuple(map(_total, x.segments)))
        return self._is_finite(totals.sum(), lambda: is_finite(x))

    def of_part(self, tensors: Sequence[Tensor], part: slice) -> bool:
        """Whether some of many tensors, on a GPU the ones of the last call, have no infinities or NaN.

        Args:
            tensors: floating point or complex, of one device.
            part: the tensors to look at.
        """

        def real(x: Tensor) -> Tensor:
            return torch.view_as_real(x.detach()) if x.is_complex() else x.detach()

        def look() -> bool:
            return all(_all_finite(real(x).flatten()) for x in tensors)

        return self._is_finite(nn.utils.get_total_norm(list(map(real, tensors[part]))), look)

    def _is_finite(self, total: Tensor, look: Callable[[], bool]) -> bool:
        """Whether all elements are finite. `look` is exact; `total` may overflow, and is finite only if they are."""
        if total.device.type == "cpu":
            return bool(torch.isfinite(total)) or look()
        answer = True
        if self._last is None:
            self._last = host_zeros([1], torch.bool, beside=total.device), torch.Event(total.device)
        else:
            flag, copied = self._last
            copied.synchronize()  # queued a whole step ago
            answer = bool(flag)
        flag, copied = self._last
        flag.copy_(torch.isfinite(total).view(1), non_blocking=True)
        copied.record(torch.accelerator.current_stream(total.device))
        return answer or look()


def _total(segment: Tensor) -> Tensor:
    """Return a float32 scalar, finite only if all elements are."""
    return segment.sum(dtype=torch.float32 if segment.element_size() < 4 else None).float()


def _all_finite(segment: Tensor) -> bool:
    """The exact answer: a sum of large finite numbers may overflow."""
    wide = (chunk.float() if chunk.element_size() == 1 else chunk for (chunk,) in in_chunks(segment))
    return all(bool(torch.isfinite(chunk).all()) for chunk in wide)  # which torch does not do for every float8
