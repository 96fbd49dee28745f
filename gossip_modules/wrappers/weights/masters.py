"""Master weights: tensors that an optimizer steps in place of the parameters, and a tool then writes over these."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ...flat.samples import sample


class MasterWeights:
    """The masters q of parameters p, in the `param_groups` of an optimizer (apex O2, Megatron, fairseq, offloading).

    The tool copies gradients to q, steps q and writes q over p, so the change of a gossip round to p is lost. Tensors
    are taken as masters if they equal the parameters at the first step of their optimizer, and the parameters have
    changed by the next one though no optimizer holds them: a tool writes them then. Before each further step
    q <- q + (p - round(q)), which is zero where no round has been.

    Args:
        pairs: each q, or its part of a flat one, and its p.
    """

    def __init__(self, pairs: Sequence[tuple[Tensor, Tensor]], *, is_known: bool = False) -> None:
        self._pairs = pairs
        self._before = [] if is_known else [sample(parameter).clone() for _, parameter in pairs]

    @property
    def is_known(self) -> bool:
        """Whether the parameters have changed, so that these are masters."""
        return not self._before

    @classmethod
    def of(
        cls, optimizer: Optimizer, module: nn.Module, parameters: Sequence[Tensor], *, is_known: bool = False
    ) -> MasterWeights | None:
        """The tensors that this optimizer steps, if they equal these parameters of the module; else None.

        is_known: whether it is known from a checkpoint that there are masters: shapes are compared then, since a round
            may have corrected the parameters by the first step.
        """
        ours = {id(parameter) for parameter in parameters}
        in_order = [parameter for parameter in module.parameters() if id(parameter) in ours]
        pairs = _paired([x for group in optimizer.param_groups for x in group["params"]], in_order)
        # Equal up to the rounding of a round before the first step, among ranks that begin alike.
        is_equal = is_known or all(is_rounded(sample(q), sample(p), num_ulps=8) for q, p in pairs)
        return cls(pairs, is_known=is_known) if is_equal and any(sample(p).any() for _, p in pairs) else None

    @torch.no_grad()
    def correct(self) -> None:
        """The masters get the changes of the parameters beyond them."""
        if self._before:
            if all(torch.equal(sample(p), before) for (_, p), before in zip(self._pairs, self._before, strict=True)):
                return
            self._before = []
        for q, p in self._pairs:
            correct_(q, p)


def _paired(masters: Sequence[Tensor], parameters: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Each parameter after its master, which has its shape and is nearest; or after its part of a flat master."""
    if len(masters) == 1 and masters[0].dim() == 1:
        flat = masters[0].detach()
        sizes = [parameter.numel() for parameter in parameters]
        # The outer optimizers of this library step flat vectors too, without autograd.
        if sum(sizes) != flat.numel() or not masters[0].requires_grad or not flat.is_floating_point():
            return []
        parts = zip(flat.split(sizes), parameters, strict=True)
        return [(part.view(parameter.shape), parameter) for part, parameter in parts]
    left, pairs = list(parameters), []
    for q in masters:
        own = min((p for p in left if q.shape == p.shape), key=lambda p: _distance(q, p), default=None)
        if own is None:
            return []
        left = [p for p in left if p is not own]
        pairs.append((q.detach(), own))
    return [] if left else pairs


def _distance(master: Tensor, parameter: Tensor) -> float:
    other = sample(parameter).to(master.device, master.dtype)
    return float(torch.linalg.vector_norm(sample(master) - other))


def is_rounded(x: Tensor, y: Tensor, *, num_ulps: int = 0) -> bool:
    """Whether x and y of one shape are equal in the narrower of their dtypes, or differ by a few units of it."""
    if not (x.is_floating_point() and y.is_floating_point()):
        return False
    dtype = min(x.dtype, y.dtype, key=lambda dtype: (dtype.itemsize, dtype is not y.dtype))
    x, y = x.to(y.device, dtype), y.to(dtype)
    if not num_ulps:
        return torch.equal(x, y)
    return torch.allclose(x.double(), y.double(), rtol=num_ulps * torch.finfo(dtype).eps, atol=0.0)


def correct_(copy: Tensor, parameter: Tensor) -> None:
    """copy <- copy + (parameter - round(copy)): digits that the parameter has no room for stay in the copy."""
    if copy.element_size() > parameter.element_size():
        own = parameter.detach().to(copy.device)
        copy.add_(own.to(copy.dtype) - copy.to(own.dtype).to(copy.dtype))
    else:
        copy.copy_(parameter.detach())
