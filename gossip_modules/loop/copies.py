"""Copies of a model's parameters in the hands of optimizers, which gossip rounds do not reach by themselves."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Collection, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from ..flat.buffer import FlatBuffer
from ..flat.sharded import local_of
from ..state import Restart, leaf
from ..warn import levels_to_user
from .debias import Debias, Form
from .hooks import StepListener, holds_any
from .masters import NUM_PROOFS, Masters, add_, change_beyond, correct_, is_rounded
from .moment import NUM_ROUND_TRIP_ULPS, Moment, sample

_MASTERS = "param_groups"  # in place of a name of state: the tensors that the optimizer steps
_NUM_LOOKS = 32  # the steps that move the parameters and after which state is compared with them


@dataclass
class _Watch:
    """Facts about the state of one optimizer.

    Attributes:
        names: the names of the state that is a copy of the parameters now.
        averaged: the names of the state that the user averages.
        proofs: the names of the state that may be a copy, and the number of steps that have shown it.
        num_looks: the steps after which the state was compared, and the parameters had moved.
        num_idle: the compared steps that have moved nothing.
        before: the parameters before a step.
        held: corrections that are held back during a step, by parameter.
        after: samples of the largest parameter with a copy at the end of a step, by the name of the copy.
        end: the parameters at the end of a step; None: a checkpoint was loaded since then.
    """

    names: set[str] = field(default_factory=set)
    averaged: set[str] = field(default_factory=set)
    proofs: dict[str, int] = field(default_factory=dict)
    num_looks: int = 0
    num_idle: int = 0
    before: Moment | None = None
    held: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    after: dict[str, Tensor] = field(default_factory=dict)
    end: Moment | None = None

    @property
    def is_looking(self) -> bool:
        return max(self.num_looks, self.num_idle) < _NUM_LOOKS or bool(self.proofs)


class WeightCopies(StepListener):
    """Brings the corrections of gossip rounds to copies of the parameters that optimizers keep, or tells of them.

    [Note: Copies of parameters] A round corrects the parameters p. An optimizer that keeps a copy q of them and writes
    it over p, such as float32 master weights of a bfloat16 model, erases the correction in its next step. So state that
    equals p, in the narrower of the two dtypes, before and after `NUM_PROOFS` steps that change both is taken as a
    copy, and before the next step it gets the changes of p since then: q <- q + (p - round(q)). While q equals p this
    is the round of q itself, of whatever kind, and it takes no memory. Before a step and not in the round, since
    weights that evaluation swaps in are gone by then. State of an optimizer whose steps change no parameter, such as a
    moving average, is no copy.

    In the steps that prove it, the correction is held back: the step runs at p = round(q), and afterwards p gets the
    correction, and so does q if it is equal again. So copies lose no correction, and other state gets none.

    State that equals p for some steps and then differs (z of schedule-free optimizers, slow weights of Lookahead) is a
    model beside p. No correction serves all of these: the correction of p is right for slow weights and wrong for a
    moving average. A warning names the remedy, `average_optimizer_state`, once.

    Other tools step masters in place of the parameters: see [Note: Masters] of `Masters`.

    Optimizers of torch.optim keep no copies, so nothing is done in their steps. The state of others is compared with
    the parameters after their first steps, by samples; then nothing is done for optimizers that have no copies.

    Args:
        buffer: has the parameters.
        name: the class of the wrapper, for messages.
        in_steps: whether rounds run in the steps of an optimizer.

    Attributes:
        debias: the wrapper's, if it has one: optimizers keep copies of the numerators, which they step.
        masters: the masters that are stepped in place of the parameters.
    """

    sees_inner_steps = True  # the inner optimizer has state of its own

    _loaded: set[str] = leaf(set(), name="copies", load=set)  # names of copies, from a checkpoint

    def __init__(self, buffer: FlatBuffer, *, name: str, in_steps: bool = False) -> None:
        self.debias: Debias | None = None
        super().__init__(buffer)
        self._name, self._in_steps = name, in_steps
        self._told: set[str] = set()
        self.is_subscribed = True
        self._know_none()

    def _know_none(self) -> None:
        # By identity, as a class of optimizers may have no hash.
        self._watches: MutableMapping[Optimizer, _Watch] = WeakIdKeyDictionary()
        self.masters = Masters(self.buffer, in_steps=self._in_steps)
        self.masters.is_known = _MASTERS in self._loaded

    def close(self) -> None:
        """Copies get the changes of the parameters for the last time; idempotent.

        Storage holds the estimate, on which optimizers step from now on.
        """
        super().close()
        for optimizer, watch in list(self._watches.items()):
            self._correct(optimizer, watch, is_forced=self._is_weighted)
        self._watches.clear()
        self.masters.close()

    # See `StepListener`.

    def concerns(self, optimizer: Optimizer) -> bool:
        """See `StepListener`."""
        has_masters = self.masters.concern(optimizer)
        return has_masters or self._may_keep_copies(optimizer)

    def _may_keep_copies(self, optimizer: Optimizer) -> bool:
        is_of_torch = type(optimizer).__module__.startswith("torch.optim")
        return not is_of_torch and holds_any(optimizer, self.buffer.parameters)

    @torch.no_grad()
    def enter_step(self, optimizer: Optimizer) -> None:
        """See `StepListener`: copies get the changes of the parameters since the last step."""
        watch = self._watches.get(optimizer)
        if watch is None and self._may_keep_copies(optimizer):
            watch = self._watches[optimizer] = _Watch(self._loaded & set(self._names(optimizer)))
        if watch is not None and (watch.names or watch.is_looking):
            self._to_stepped(optimizer)
            self._correct(optimizer, watch)
            if watch.is_looking:
                self._hold_back(optimizer, watch)
                watch.before = Moment(self.buffer.parameters)
        self.masters.before_step(optimizer)

    @torch.no_grad()
    def leave_step(self, optimizer: Optimizer) -> None:
        """See `StepListener`: finds copies, and those that differ now."""
        watch = self._watches.get(optimizer)
        if watch is None:
            return
        if watch.is_looking and watch.before is not None:
            self._look(optimizer, watch, watch.before)
        if watch.names or watch.proofs:
            self._keep(optimizer, watch)

    # The parts of a step.

    @property
    def _is_weighted(self) -> bool:
        return self.debias is not None

    def _to_stepped(self, optimizer: Optimizer) -> bool:
        """Let storage hold what the optimizer steps, as `Debias` is about to do; whether it held something else."""
        if self.debias is None or self.debias.form is not Form.ESTIMATE:
            return False
        self.debias.enter_step(optimizer)
        return True

    def _correct(self, optimizer: Optimizer, watch: _Watch, *, is_forced: bool = False) -> None:
        """The copies <- the parameters, but for digits that rounding has left out, if those were written since."""
        if not watch.names or not (is_forced or watch.end is None or watch.end.num_writes()):
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
        if name not in watch.after or (found := self._probe(optimizer, name)) is None:
            return False
        parameter, copy = found
        return not any(self._agree(sample(copy), values) for values in (watch.after[name], sample(parameter)))

    def _hold_back(self, optimizer: Optimizer, watch: _Watch) -> None:
        """Let the parameters be what state is a copy of, if it is one, during this step.

        State that the loop has written since the last step, and not from the parameters as they are now, is no copy.
        Sharpness-aware minimisation keeps the weights before a perturbation so.
        """
        watch.held = []
        for name in [name for name in watch.proofs if self._was_replaced(optimizer, watch, name)]:
            del watch.proofs[name]
            self._told.add(name)
        for name in sorted(watch.proofs)[:1]:
            for parameter, copy in self._pairs(optimizer, name):
                watch.held.append((parameter, change_beyond(copy, parameter)))
                local_of(parameter).copy_(local_of(copy))

    def _give_back(self, optimizer: Optimizer, watch: _Watch, names: Collection[str]) -> None:
        """Add the changes that were held back to the parameters, and to state of these names that equals them again."""
        changes = {id(parameter): change for parameter, change in watch.held}
        for parameter, change in watch.held:
            add_(parameter, change)
        for name in names:
            for parameter, copy in self._pairs(optimizer, name):
                if id(parameter) in changes:
                    add_(copy, changes[id(parameter)])
                    if copy.element_size() > parameter.element_size():
                        local_of(parameter).copy_(local_of(copy))
        watch.held = []

    def _to_estimates(self, optimizer: Optimizer) -> None:
        """Turn state that an optimizer has copied from numerators, without changes of its own, into estimates."""
        for name in self._names(optimizer):
            if self._is_copy(optimizer, name):
                for _, copy in self._pairs(optimizer, name):
                    local_of(copy).div_(self.buffer.vector.push_sum_weight.to(copy.device))

    def _keeps(self, optimizer: Optimizer) -> bool:
        """Whether an optimizer that has moved nothing keeps state: not if its learning rate is 0, or its gradients."""
        if not any(group.get("lr", True) for group in optimizer.param_groups):
            return False
        return any(bool(sample(x).any()) for name in self._names(optimizer) for _, x in self._pairs(optimizer, name))

    def _look(self, optimizer: Optimizer, watch: _Watch, before: Moment) -> None:
        has_moved = before.has_changed()
        watch.num_looks += has_moved
        watch.num_idle += not has_moved
        if self.debias is not None:
            if not (has_moved or watch.num_idle > 1):
                self._to_estimates(optimizer)
            self.debias.note_reader(optimizer, is_reader=not (has_moved or watch.num_looks) and self._keeps(optimizer))
        found = {name for name in self._names(optimizer) if self._is_copy(optimizer, name)}
        self._give_back(optimizer, watch, found & watch.proofs.keys())
        if not has_moved:
            return
        for name in sorted((watch.names | watch.proofs.keys()) - found):
            self._part(optimizer, watch, name)
        for name in found - self._told - watch.names:
            watch.proofs[name] = watch.proofs.get(name, -1) + 1
            if watch.proofs[name] == NUM_PROOFS:
                del watch.proofs[name]
                watch.names.add(name)

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
        return is_rounded(copy, parameter, num_ulps=NUM_ROUND_TRIP_ULPS if self._is_weighted else 0)

    def _part(self, optimizer: Optimizer, watch: _Watch, name: str) -> None:
        """A copy is one no more."""
        watch.names.discard(name)
        watch.proofs.pop(name, None)
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

    def _keep(self, optimizer: Optimizer, watch: _Watch) -> None:
        """Note how a step has left the parameters."""
        watch.end = Moment(counted=self.buffer.parameters)
        probes = {name: self._probe(optimizer, name) for name in watch.names | watch.proofs.keys()}
        watch.after = {name: sample(found[0]).clone() for name, found in probes.items() if found is not None}

    def _probe(self, optimizer: Optimizer, name: str) -> tuple[Tensor, Tensor] | None:
        """The largest parameter with such a copy, and the copy, in which changes by others are looked for."""
        return max(self._pairs(optimizer, name), key=lambda pair: pair[0].numel(), default=None)

    def _names(self, optimizer: Optimizer) -> list[str]:
        """The names of all state that is as large as its parameter, of any parameter."""
        states = ((parameter, _state_of(optimizer, parameter)) for parameter in self.buffer.parameters)
        return list(dict.fromkeys(name for p, state in states for name, value in state.items() if _is_like(value, p)))

    def _pairs(self, optimizer: Optimizer, name: str) -> Iterator[tuple[Tensor, Tensor]]:
        """The parameters that have state of this name, and the state."""
        for parameter in self.buffer.parameters:
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
                self.debias.leave_step(optimizer)

    def catch_up(self, optimizer: Optimizer) -> None:
        """Copies in the optimizer's state get the changes of the parameters since its last step."""
        watch = self._watches.get(optimizer)
        if watch is not None and watch.names:
            with self._stepped(optimizer):
                self._correct(optimizer, watch)
                self._keep(optimizer, watch)

    def averaged(self, optimizer: Optimizer, names: Collection[str]) -> None:
        """State of these names is the average of all ranks now; so become the parameters whose copy it is."""
        watch = self._watches.get(optimizer)
        if watch is None:
            return
        watch.averaged |= set(names)
        with self._stepped(optimizer):
            if self._is_weighted:  # the average of numerators is an average of estimates
                weight = self.buffer.vector.push_sum_weight
                for name in (watch.names | self._told) & set(names):
                    for _, copy in self._pairs(optimizer, name):
                        copy.mul_(weight.to(copy.device, torch.float32 if copy.element_size() < 8 else copy.dtype))
            copies = sorted(watch.names & set(names))
            for name in copies:
                for parameter, copy in self._pairs(optimizer, name):
                    local_of(parameter).copy_(local_of(copy))
            if copies:
                self._keep(optimizer, watch)

    # State.

    def state_dict(self, *, joins: bool = False, has_links: bool = True) -> dict[str, Any]:
        """See `State`: the names of copies, where there are some, so that a checkpoint's first step knows of them."""
        names = set(self._loaded).union(*(watch.names for watch in list(self._watches.values())))
        if self.masters.has_proven:
            names.add(_MASTERS)
        return {"copies": sorted(names)} if names else {}

    def restarted(self, event: Restart) -> None:
        """See `State`."""
        if event is Restart.ALL:
            self.masters.is_known = _MASTERS in self._loaded
            for watch in list(self._watches.values()):
                watch.end, watch.after = None, {}

    def __getstate__(self) -> dict[str, Any]:
        # A copy has optimizers of its own, of which nothing is known.
        names = ("debias", "buffer", "is_subscribed", "_name", "_in_steps", "_told", "_loaded")
        return {name: self.__dict__[name] for name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._know_none()


def _state_of(optimizer: Optimizer, parameter: Tensor) -> Mapping[str, Any]:
    """The state of a parameter; empty where the optimizer keeps none by name."""
    state = optimizer.state.get(parameter) if isinstance(optimizer.state, Mapping) else None
    return state if isinstance(state, Mapping) else {}


def _is_like(value: Any, parameter: Tensor) -> bool:
    """Whether it is a tensor that may be a copy of the parameter."""
    is_tensor = isinstance(value, Tensor) and value.is_floating_point() and value.layout is torch.strided
    return is_tensor and local_of(value).shape == local_of(parameter).shape
