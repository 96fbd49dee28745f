"""Copies of a model's parameters in the hands of optimizers, which gossip rounds do not reach by themselves."""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Collection, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from ...flat.buffer import FlatBuffer
from ...flat.samples import Samples, sample
from ...flat.sharded import local_of
from ...flat.step_hooks import Stepped, holds_any
from ...old_calls import levels_to_user
from ..debias import Debias, Form

_MASTERS = "param_groups"  # in place of a name of state: the tensors that the optimizer steps
_NUM_LOOKS = 32  # the steps that move the parameters and after which state is compared with them


@dataclass
class _Watch:
    """Facts about the state of one optimizer.

    Attributes:
        names: the names of the state that is a copy of the parameters now.
        averaged: the names of the state that the user averages.
        num_looks: the steps after which the state was compared, and the parameters had moved.
        before: the parameters before a step.
        after: samples of the largest parameter at the end of a step.
        versions: the versions of the parameters, at the end of a step.
    """

    names: set[str] = field(default_factory=set)
    averaged: set[str] = field(default_factory=set)
    num_looks: int = 0
    before: Samples | None = None
    after: Tensor | None = None
    versions: list[int] = field(default_factory=list)

    @property
    def is_looking(self) -> bool:
        return self.num_looks < _NUM_LOOKS


class WeightCopies(Stepped):
    """Brings the corrections of gossip rounds to copies of the parameters that optimizers keep, or tells of them.

    [Note: Copies of parameters] A round corrects the parameters p. An optimizer that keeps a copy q of them and writes
    it over p, such as float32 master weights of a bfloat16 model, erases the correction in its next step. So state that
    equals p after a step, in the narrower of the two dtypes, is taken as a copy, and before the next step it gets the
    changes of p since then: q <- q + (p - round(q)). While q equals p this is the round of q itself, of whatever kind,
    and it takes no memory. Before a step and not in the round, since weights that evaluation swaps in are gone by then.

    State that equals p for some steps and then differs (z of schedule-free optimizers, slow weights of Lookahead) is a
    model beside p. No correction serves all of these: the correction of p is right for slow weights and wrong for a
    moving average. A warning names the remedy, `average_optimizer_state`, once.

    Other tools step masters in place of the parameters: see `MasterWeights`.

    Optimizers of torch.optim keep no copies, so nothing is done in their steps. The state of others is compared with
    the parameters after their first steps, by samples; then nothing is done for optimizers that have no copies.

    Args:
        buffer: has the parameters.
        name: the class of the wrapper, for messages.

    Attributes:
        debias: the wrapper's, if it has one: optimizers keep copies of the numerators, which they step.
    """

    order = -1  # before `Debias`: at the end of a step storage still holds what the optimizer has written

    def __init__(self, buffer: FlatBuffer, *, name: str) -> None:
        self.debias: Debias | None = None
        self._buffer, self._name = buffer, name
        self._told: set[str] = set()
        self._loaded: set[str] = set()  # names of copies, from a checkpoint
        super().__init__()

    def _hear(self) -> None:
        self._thread = threading.get_ident()
        self._is_held = False  # an optimizer of the parameters themselves has stepped
        # By identity, as a class of optimizers may have no hash.
        self._watches: MutableMapping[Optimizer, _Watch] = WeakIdKeyDictionary()
        self._sought: Sequence[Tensor] = ()  # the parameters whose masters are known
        self._masters: MutableMapping[Optimizer, MasterWeights | None] = WeakIdKeyDictionary()
        super()._hear()

    def close(self) -> None:
        """Copies get the changes of the parameters for the last time; idempotent.

        Storage holds the estimate, on which optimizers step from now on.
        """
        super().close()
        for optimizer, watch in list(self._watches.items()):
            self._correct(optimizer, watch, is_forced=self._is_weighted)
        self._watches.clear()
        self._masters.clear()

    # See `Stepped`.

    def is_stepped_by(self, optimizer: Optimizer) -> bool:
        """See `Stepped`."""
        if holds_any(optimizer, self._buffer.parameters):
            self._is_held = True
            self._masters.clear()
            return not type(optimizer).__module__.startswith("torch.optim")
        if self._is_held or threading.get_ident() != self._thread:
            return False
        module, parameters = self._buffer.module, self._buffer.parameters
        if self._sought is not parameters:
            self._sought = parameters
            self._masters.clear()
        if optimizer not in self._masters:  # they are looked for once
            is_known = _MASTERS in self._loaded
            self._masters[optimizer] = MasterWeights.of(optimizer, module, parameters, is_known=is_known)
        return self._masters[optimizer] is not None

    @torch.no_grad()
    def before_step(self, optimizer: Optimizer) -> None:
        """See `Stepped`: copies get the changes of the parameters since the last step."""
        if (masters := self._masters.get(optimizer)) is not None:
            masters.correct()
            return
        watch = self._watches.get(optimizer)
        if watch is None:
            watch = self._watches[optimizer] = _Watch(self._loaded & set(self._names(optimizer)))
        if watch.names or watch.is_looking:
            self._to_stepped(optimizer)
            self._correct(optimizer, watch)
        if watch.is_looking:
            watch.before = Samples(self._buffer.parameters)

    @torch.no_grad()
    def after_step(self, optimizer: Optimizer) -> None:
        """See `Stepped`: finds copies, and those that differ now."""
        watch = self._watches.get(optimizer)
        if watch is None:
            return
        if watch.is_looking and watch.before is not None:
            self._look(optimizer, watch, watch.before)
        if watch.names:
            self._keep(watch)

    # The parts of a step.

    @property
    def _is_weighted(self) -> bool:
        return self.debias is not None and self.debias.is_needed

    def _to_stepped(self, optimizer: Optimizer) -> bool:
        """Let storage hold what the optimizer steps, as `Debias` is about to do; whether it held something else."""
        if self.debias is None or not self._is_weighted or self.debias.form is not Form.ESTIMATE:
            return False
        self.debias.before_step(optimizer)
        return True

    def _correct(self, optimizer: Optimizer, watch: _Watch, *, is_forced: bool = False) -> None:
        """The copies <- the parameters, but for digits that rounding has left out, if those were written since."""
        parameters = self._buffer.parameters
        if not watch.names or (not is_forced and [p._version for p in parameters] == watch.versions):
            return
        for name in sorted(watch.names):
            if self._was_replaced(optimizer, watch, name):
                self._part(optimizer, watch, name)
            else:
                for parameter, copy in self._pairs(optimizer, name):
                    correct_(copy, parameter)

    def _was_replaced(self, optimizer: Optimizer, watch: _Watch, name: str) -> bool:
        """Whether a copy equals neither its value after the last step nor the parameters, which may be loaded with
        it."""
        if watch.after is None:
            return False
        copies = [copy for parameter, copy in self._pairs(optimizer, name) if parameter is self._probe]
        own = (watch.after, sample(self._probe))
        return not any(self._agree(sample(copy), values) for copy in copies for values in own)

    def _look(self, optimizer: Optimizer, watch: _Watch, before: Samples) -> None:
        found = {name for name in self._names(optimizer) if self._is_copy(optimizer, name)}
        for name in sorted(watch.names - found):
            self._part(optimizer, watch, name)
        watch.names |= found - self._told
        watch.num_looks += not before.equal(before.values)

    def _is_copy(self, optimizer: Optimizer, name: str) -> bool:
        """Whether this state equals all parameters that have it, which are not all zero."""
        is_zero = is_gradient = True
        for parameter, copy in self._pairs(optimizer, name):
            own, other = sample(parameter), sample(copy)
            if not self._agree(other, own):
                return False
            is_zero = is_zero and not own.any()
            gradient = parameter.grad
            is_gradient = is_gradient and gradient is not None and is_rounded(other, sample(gradient))
        return not is_zero and not is_gradient  # momentum of a loss whose gradient is the parameter

    def _agree(self, copy: Tensor, parameter: Tensor) -> bool:
        """Whether samples are equal; nearly, where multiplying by push-sum weights and dividing rounds parameters."""
        return is_rounded(copy, parameter, num_ulps=4 if self._is_weighted else 0)

    def _part(self, optimizer: Optimizer, watch: _Watch, name: str) -> None:
        """A copy is one no more."""
        watch.names.discard(name)
        if name in self._told or name in watch.averaged:
            return
        self._told.add(name)
        warnings.warn(
            f"got {type(optimizer).__name__}, whose state {name!r} began as a copy of the parameters and now differs "
            f"from them: gossip rounds of a {self._name} change the parameters only, so this state remains that of one "
            "rank. If steps read it, as z of schedule-free optimizers or slow weights of Lookahead, average it too: "
            f"call model.average_optimizer_state(optimizer, names=({name!r},)) on all ranks every few steps",
            stacklevel=levels_to_user(),
        )

    def _keep(self, watch: _Watch) -> None:
        """Note how a step has left the parameters."""
        watch.versions = [parameter._version for parameter in self._buffer.parameters]
        watch.after = sample(self._probe).clone()

    @property
    def _probe(self) -> Tensor:
        """The parameter in whose copies changes by others are looked for: the largest."""
        return max(self._buffer.parameters, key=Tensor.numel)

    def _names(self, optimizer: Optimizer) -> list[str]:
        """The names of all state that is as large as its parameter, of the first parameter that has some."""
        parameters = self._buffer.parameters
        first = next((parameter for parameter in parameters if _state_of(optimizer, parameter)), None)
        if first is None:
            return []
        return [name for name, value in _state_of(optimizer, first).items() if _is_like(value, first)]

    def _pairs(self, optimizer: Optimizer, name: str) -> Iterator[tuple[Tensor, Tensor]]:
        """The parameters that have state of this name, and the state."""
        for parameter in self._buffer.parameters:
            value: Any = _state_of(optimizer, parameter).get(name)
            if _is_like(value, parameter):
                yield parameter, value

    # Averages of state, on demand.

    @contextlib.contextmanager
    def _stepped(self, optimizer: Optimizer) -> Iterator[None]:
        """Inside, storage holds what the optimizer steps."""
        is_turned = self._to_stepped(optimizer)
        try:
            yield
        finally:
            if is_turned and self.debias is not None:
                self.debias.after_step(optimizer)

    def catch_up(self, optimizer: Optimizer) -> None:
        """Copies in the optimizer's state get the changes of the parameters since its last step."""
        watch = self._watches.get(optimizer)
        if watch is not None and watch.names:
            with self._stepped(optimizer):
                self._correct(optimizer, watch)
                self._keep(watch)

    def averaged(self, optimizer: Optimizer, names: Collection[str]) -> None:
        """State of these names is the average of all ranks now; so become the parameters whose copy it is."""
        watch = self._watches.get(optimizer)
        if watch is None:
            return
        watch.averaged |= set(names)
        with self._stepped(optimizer):
            if self._is_weighted:  # the average of numerators is an average of estimates
                weight = self._buffer.vector.push_sum_weight
                for name in (watch.names | self._told) & set(names):
                    for _, copy in self._pairs(optimizer, name):
                        copy.mul_(weight.to(copy.device, torch.float32 if copy.element_size() < 8 else copy.dtype))
            copies = sorted(watch.names & set(names))
            for name in copies:
                for parameter, copy in self._pairs(optimizer, name):
                    local_of(parameter).copy_(local_of(copy))
            if copies:
                self._keep(watch)

    # State.

    def state_dict(self) -> dict[str, Any]:
        """The names of copies, where there are some, so that a checkpoint's first step knows of them."""
        names = set(self._loaded).union(*(watch.names for watch in list(self._watches.values())))
        if any(masters is not None and masters.is_known for masters in list(self._masters.values())):
            names.add(_MASTERS)
        return {"copies": sorted(names)} if names else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict()` gave."""
        self._loaded = set(state.get("copies", ()))
        for watch in list(self._watches.values()):
            watch.versions, watch.after = [], None

    def __getstate__(self) -> dict[str, Any]:
        # A copy has optimizers of its own, of which nothing is known.
        return {name: self.__dict__[name] for name in ("debias", "_buffer", "_name", "_told", "_loaded")}


def _state_of(optimizer: Optimizer, parameter: Tensor) -> Mapping[str, Any]:
    """The state of a parameter; empty where the optimizer keeps none by name."""
    state = optimizer.state.get(parameter) if isinstance(optimizer.state, Mapping) else None
    return state if isinstance(state, Mapping) else {}


def _is_like(value: Any, parameter: Tensor) -> bool:
    """Whether it is a tensor that may be a copy of the parameter."""
    is_tensor = isinstance(value, Tensor) and value.is_floating_point() and value.layout is torch.strided
    return is_tensor and local_of(value).shape == local_of(parameter).shape


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
        sizes = [local_of(parameter).numel() for parameter in parameters]
        # The outer optimizers of this library step flat vectors too, without autograd.
        if sum(sizes) != flat.numel() or not masters[0].requires_grad or not flat.is_floating_point():
            return []
        parts = zip(flat.split(sizes), parameters, strict=True)
        return [(part.view(local_of(parameter).shape), parameter) for part, parameter in parts]
    left, pairs = list(parameters), []
    for q in masters:
        alike = (p for p in left if local_of(q).shape == local_of(p).shape)
        own = min(alike, key=lambda p: _distance(q, p), default=None)
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
    copy, parameter = local_of(copy), local_of(parameter)
    if copy.element_size() > parameter.element_size():
        own = parameter.detach().to(copy.device)
        copy.add_(own.to(copy.dtype) - copy.to(own.dtype).to(copy.dtype))
    else:
        copy.copy_(parameter.detach())
