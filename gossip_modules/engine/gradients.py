"""GradientEngine: all-reduce of gradients among workers that may die and join."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..flat.nonfinite import FiniteCheck
from ..flat.vector import FlatVector
from ..state import leaf
from ..transport.agreement import rows_of_all
from ..transport.base import Transport
from ..worlds.all_or_none import MayBeLost, all_or_none
from .engine import Engine


class GradientEngine(Engine):
    """All-reduce SGD over the generations of a membership. Step k of every worker:

        if a generation begins:                       # some workers may have missed the last average, or have joined
            x <- x of the first worker with the largest number of averages that has not just joined
        buffers <- buffers of rank 0
        forward and backward at x
        g <- mean_j g_j over the workers of the generation
        if a worker dies in it:  drop g               # on every worker, so that no optimizer steps

    [Note: lost steps] The mean takes effect on all workers or on none: [Note: all or none] of `all_or_none`. In the
    second case every worker drops its gradients. An optimizer leaves out parameters without gradients, so the models
    stay equal. The next step waits for the next generation. If a worker dies during the confirmation, some of the
    others may have stepped. So the workers compare their numbers of averages when a generation begins.

    Args:
        transport: the transport of the first generation.
        share: called on all workers with the rank whose state the others take, if a worker has missed an average.
        on_nonfinite: "raise" raises FloatingPointError at a step if x is not finite; "spread" does not check.
    """

    step: int = leaf(0, is_needed=True)

    def __init__(self, transport: Transport, *, share: Callable[[int], None], on_nonfinite: str = "raise") -> None:
        super().__init__()
        self.transport = transport
        self._share = share
        self._is_finite = FiniteCheck() if on_nonfinite == "raise" else None
        self._is_first = False  # the next step of a generation
        self._has_joined = False  # with the model of a donor from some steps before

    def rebind(self, weights: Any, transport: Transport, x: FlatVector) -> None:
        """See `Engine`."""
        self.transport = transport
        self.is_cut_off, self._is_first = False, True

    def join(self, x: FlatVector, state: Mapping[str, Any]) -> None:
        """See `Engine`."""
        super().join(x, state)
        self._has_joined = True

    @property
    def needs_generation(self) -> bool:  # type: ignore[override]
        """See `Engine`."""
        return self.is_cut_off

    def round(self, x: FlatVector) -> bool:
        """See `Engine`: the beginning of a step. The average follows in `average`."""
        rank = self.transport.rank
        if self._is_finite is not None and not self._is_finite(x):
            raise FloatingPointError(
                f"rank {self.transport.names[rank]}: before step {self.step} the model holds infinities or NaN, as all "
                "models do after an average of such gradients; expected finite parameters. Go on from a checkpoint "
                "with a smaller learning rate or clipped gradients; on_nonfinite='spread' does not look"
            )
        self.step += 1
        if self.is_cut_off:
            return False
        is_written = False
        with MayBeLost(self.transport) as sharing:
            if self._is_first:
                is_written = self._make_equal(x)
                self._is_first = False
            for buffers in x.buffers:
                self.transport.broadcast(buffers, source=0, what="sharing buffers")
        self.is_cut_off = sharing.has_lost
        return is_written

    def _make_equal(self, x: FlatVector) -> bool:
        """All workers take the model of the first worker with the largest number of averages; whether x was written.

        A worker that has just joined is behind all others.
        """
        own = torch.tensor([self.t, self._has_joined], device="cpu")
        counts, have_joined = rows_of_all(self.transport, own, what="comparing numbers of averages").unbind(1)
        if int(counts.min()) == int(counts.max()) and not have_joined.any():
            return False
        source = int((counts if have_joined.all() else counts.where(have_joined == 0, -1)).argmax())
        vector = x.raw.clone()
        self.transport.broadcast(vector, source=source, what="sharing the model of a worker that is ahead")
        self._share(source)
        x.raw.copy_(vector)
        self.t, self._has_joined = int(counts[source]), False
        return True

    @torch.no_grad()
    def average(self, parameters: Sequence[Tensor]) -> bool:
        """Replace the gradients by their means over the workers; returns False if a worker has failed meanwhile.

        Gradients are dropped then: see [Note: lost steps]. A parameter without a gradient on all workers keeps none; on
        some of them, zeros are its gradient there.

        Args:
            parameters: the parameters, the same on all workers; their gradients are mutated.

        Raises:
            ValueError: a gradient is sparse.
        """
        start, n = time.perf_counter(), self.transport.world_size
        if any(p.grad is not None and p.grad.is_sparse for p in parameters):
            raise ValueError(
                "got a sparse gradient with a membership, expected dense ones; pass sparse=False to the nn.Embedding"
            )
        has_gradient = torch.tensor([float(p.grad is not None) for p in parameters], device=parameters[0].device)
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        message, what = FlatVector.pack([*gradients, has_gradient]), f"averaging gradients of step {self.step - 1}"
        if not self.is_cut_off:
            with MayBeLost(self.transport) as average, all_or_none(self.transport, what=what):
                for x in message.segments:
                    self.transport.all_reduce(x.div_(n), what=what)
            self.is_cut_off = average.has_lost
        if self.is_cut_off:
            self.stats.num_skipped += 1
            for parameter in parameters:
                parameter.grad = None
            return False
        message.unpack_to([*gradients, has_gradient])
        for k, parameter in enumerate(parameters):
            if parameter.grad is None and has_gradient[k]:  # on another worker
                parameter.grad = gradients[k]
        self.t += 1
        self.stats.record(0)
        self.stats.wait_seconds += time.perf_counter() - start
        return True
