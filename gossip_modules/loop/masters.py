"""Masters: tensors that optimizers step in place of parameters, and that a tool writes over the parameters."""

from __future__ import annotations

import itertools
import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from ..flat.buffer import FlatBuffer
from ..flat.sharded import local_of
from .hooks import STEP_HOOKS
from .moment import NUM_ROUND_TRIP_ULPS, Moment, sample

NUM_PROOFS = 2  # steps, before and after which a copy equals its parameter, and which change both
_NUM_LOOKS = 8  # after so many steps without an equal tensor an optimizer is looked at no more
_DECLARED_ULPS = 2 * NUM_ROUND_TRIP_ULPS
"""How far declared copies may be from their parameters, in units of the narrower dtype: twice the number for copies
that are found. Both may come from a checkpoint, for which push-sum weights were divided out and multiplied in again.
With a smaller number `follow` would refuse such copies; copies of another parameter differ by many orders more."""
_NEAR = 0.25  # relative distance between a master and its parameter, when it is known that there are masters

Pair: TypeAlias = tuple[Tensor, Tensor]  # a copy, or its part of a flat one, and its parameter


class Masters:
    """The masters q of parameters p of one model, in the `param_groups` of optimizers.

    [Note: Masters] Mixed-precision tools (apex O2, Megatron, DeepSpeed, fairseq, offloaded optimizers) copy gradients
    to q, step q and write q over p, so the change of a gossip round to p is lost. Before each step of q
    q <- q + (p - round(q)), which is zero where no round has been. One optimizer may have all masters, or some of them
    beside parameters of the model itself; each parameter may have an optimizer of its own; and one flat vector may hold
    the masters of a group, with zeros in between.

    A tensor of an optimizer is compared with the parameters that no optimizer steps, before each round, when the tool
    has written them. It is their master once it has equalled them before and after `NUM_PROOFS` steps that have changed
    both. Until then the correction of a round is held back during a step; both tensors get it afterwards, if they are
    equal again. So masters lose no correction, and other tensors are never written. The user may declare masters too.

    Where rounds run in the steps of an optimizer, the tool has not written the parameters yet, and then writes over the
    corrections. So tensors are compared before steps there, and masters are an error.

    Args:
        buffer: has the parameters.
        in_steps: whether rounds run in the steps of an optimizer.

    Attributes:
        follows_rounds: whether `after_round` is to be called.
        is_looking: whether an optimizer with tensors that may be masters has stepped since the last look.
        is_known: whether a checkpoint has said that there are masters: they are found by distance then, as a round may
            have corrected the parameters before the first step.
    """

    def __init__(self, buffer: FlatBuffer, *, in_steps: bool = False) -> None:
        self._buffer, self._in_steps = buffer, in_steps
        self.is_looking = self.is_known = self.follows_rounds = False
        self._thread = threading.get_ident()
        self._parameters: Sequence[Tensor] = buffer.parameters  # for which the sets were found
        self._stepped: set[int] = set()  # ids of parameters that an optimizer steps itself
        # By identity, as a class of optimizers may have no hash.
        self._sets: MutableMapping[Optimizer, MasterSet] = WeakIdKeyDictionary()
        self._declared: list[Pair] = []

    def concern(self, optimizer: Optimizer) -> bool:
        """Whether this optimizer has masters, or tensors that may turn out to be some; it is about to step."""
        if threading.get_ident() != self._thread:
            return False
        ours = {id(parameter) for parameter in self._buffer.parameters}
        if self._parameters is not self._buffer.parameters:
            # Those of the vector before are alive until here, so that no new tensor has their ids.
            self._parameters = self._buffer.parameters
            self._stepped &= ours
            self._sets.clear()
        held = [x for group in optimizer.param_groups for x in group["params"]]
        self._stepped.update(ours.intersection(map(id, held)))
        found = self._sets.get(optimizer)
        if declared := self._declared_in(optimizer, held):
            found = self._sets[optimizer] = MasterSet((), declared)
        others = [x for x in held if id(x) not in ours and x.is_floating_point() and x.numel()]
        is_new = found is None or (found.num_tensors != len(others) and not declared)
        if is_new and others and self._orphans(found):
            found = self._sets[optimizer] = MasterSet(others)  # other ones, after `add_param_group`
            if self.is_known:
                found.begin(_nearest(others, self._orphans()))
        return found is not None and not found.is_given_up

    def before_step(self, optimizer: Optimizer) -> None:
        """The masters of this optimizer get the changes of the parameters.

        Raises:
            RuntimeError: there are masters, and rounds run in steps.
        """
        found = self._sets.get(optimizer)
        if found is None:
            return
        if self._in_steps:
            self._refuse(optimizer, found)
        found.before_step()
        self.is_looking |= not (found.is_proven or self._in_steps)

    def _refuse(self, optimizer: Optimizer, found: MasterSet) -> None:
        if found.has_stepped and not found.is_proven:
            self.look()
        if self.has_proven:
            raise RuntimeError(
                f"got a {type(optimizer).__name__} of masters, which are written over parameters, with rounds='step': "
                "the round after a step runs before they are written, so that its corrections are lost; expected "
                "rounds='forward', or rounds='manual' with gossip_step() after the masters are written"
            )

    def look(self) -> None:
        """Compare tensors with the parameters before a round, after steps."""
        self.is_looking = False
        with torch.no_grad():
            open_sets = [found for found in list(self._sets.values()) if not found.is_proven and found.has_stepped]
            for found in open_sets:
                found.leave(self._stepped)
                found.compare()
            for found in open_sets:
                found.pairs += _equal(found.left(), self._orphans())
                if found.end_look():
                    STEP_HOOKS.look_again()
        self._find_followers()

    def _orphans(self, leaving: MasterSet | None = None) -> list[Tensor]:
        """The parameters without an optimizer or a master, in the order of the module; leaving: a set that goes."""
        others = [found for found in list(self._sets.values()) if found is not leaving]
        taken = self._stepped | {id(p) for found in others for _, p in found.pairs}
        ours = {id(parameter) for parameter in self._parameters} - taken - {id(p) for _, p in self._declared}
        return [parameter for parameter in self._buffer.module.parameters() if id(parameter) in ours]

    @torch.no_grad()
    def close(self) -> None:
        """Masters get the changes of the parameters for the last time."""
        for found in list(self._sets.values()):
            if found.is_proven:
                found.before_step()
        self.after_round()
        self._sets.clear()
        self._declared, self.is_looking, self.follows_rounds = [], False, False

    # Declared masters.

    def declare(self, pairs: Sequence[Pair]) -> None:
        """Take these copies, of parameters that then have no others."""
        own = {id(parameter) for _, parameter in pairs}
        self._declared = [pair for pair in self._declared if id(pair[1]) not in own] + list(pairs)
        for optimizer, found in list(self._sets.items()):
            if any(id(parameter) in own for _, parameter in found.pairs):
                del self._sets[optimizer]
        self._find_followers()
        STEP_HOOKS.look_again()

    def _declared_in(self, optimizer: Optimizer, held: Iterable[object]) -> list[Pair]:
        """The declared pairs whose copies this optimizer steps, or has in its state."""
        if not self._declared:
            return []
        states = [x for state in _states(optimizer) for x in state.values()]
        places = {_storage_of(x) for x in (*held, *states) if isinstance(x, Tensor)}
        return [pair for pair in self._declared if _storage_of(pair[0]) in places]

    def _find_followers(self) -> None:
        is_open = any(found.pairs and not found.is_proven for found in list(self._sets.values()))
        self.follows_rounds = (is_open and not self._in_steps) or bool(self._declared)

    @torch.no_grad()
    def after_round(self) -> None:
        """Declared copies that no optimizer of torch has stepped get the change of a round; for others it is kept."""
        sets = list(self._sets.values())
        given = {id(copy) for found in sets for copy, _ in found.pairs}
        for copy, parameter in self._declared:
            if id(copy) not in given:
                correct_(copy, parameter)
        for found in sets:
            found.after_round()

    @property
    def followed(self) -> set[int]:
        """The ids of the parameters whose masters get the corrections."""
        pairs = [pair for found in list(self._sets.values()) if found.is_proven for pair in found.pairs]
        return {id(parameter) for _, parameter in (*self._declared, *pairs)}

    @property
    def has_proven(self) -> bool:
        """Whether there are masters that were found."""
        return any(found.is_proven for found in list(self._sets.values()))


class MasterSet:
    """The tensors of one optimizer that may be masters.

    Args:
        tensors: the tensors.
        pairs: the masters among them, if they are declared.

    Attributes:
        pairs: the masters and their parameters, as far as they have been found.
        is_proven: whether these are masters.
        has_stepped: whether the optimizer has stepped since the last look.
        num_tensors: the number of tensors.
        is_given_up: whether none of the tensors has been equal to a parameter for too long.
    """

    def __init__(self, tensors: Sequence[Tensor], pairs: Sequence[Pair] = ()) -> None:
        self._tensors, self.num_tensors = list(tensors), len(tensors)
        self.pairs: list[Pair] = []
        self.is_proven = self.is_given_up = self.has_stepped = False
        self._num_looks = self._num_proofs = 0
        self._last = Moment()  # of the parameters, at the last look
        self._held: list[Tensor] = []  # the corrections of a round, by pair, during a step
        if pairs:
            self.begin(pairs)

    def begin(self, pairs: Sequence[Pair]) -> None:
        """These are masters, without a proof."""
        self.pairs, self.is_proven = list(pairs), bool(pairs)

    @torch.no_grad()
    def before_step(self) -> None:
        """The masters get the changes of their parameters."""
        self.has_stepped = True
        for q, p in self.pairs if self.is_proven else ():
            correct_(q, p)

    def after_round(self) -> None:
        """Keep the change of the parameters until the next look, without a proof."""
        if not self.is_proven:
            self._held = [change_beyond(q, p) for q, p in self.pairs]

    def leave(self, stepped: Collection[int]) -> None:
        """Leave out the pairs whose parameter has turned out to be stepped itself; `stepped`: the ids of such ones."""
        if any(id(p) in stepped for _, p in self.pairs):
            stay = [id(p) not in stepped for _, p in self.pairs]
            self.pairs = list(itertools.compress(self.pairs, stay))
            self._held = list(itertools.compress(self._held, stay))
            self._last = Moment(p for _, p in self.pairs)

    def compare(self) -> None:
        """Leave out the pairs that differ, and give the others the corrections of the last round."""
        stay = [is_written(q, p) for q, p in self.pairs]
        for (q, p), change, is_equal in zip(self.pairs, self._held, stay, strict=False):
            if is_equal:
                add_(q, change)
                local_of(p).copy_(local_of(q))
        is_same = bool(self.pairs) and all(stay)
        has_changed = is_same and self._last.has_changed()
        self._num_proofs = self._num_proofs + has_changed if is_same else 0
        # All parts of a flat tensor are sought again where one of them has the place of another.
        differing = {_storage_of(q) for (q, _), is_equal in zip(self.pairs, stay, strict=True) if not is_equal}
        self.pairs = [(q, p) for q, p in self.pairs if _storage_of(q) not in differing]
        self._held = []

    def left(self) -> list[Tensor]:
        """The tensors without a parameter."""
        paired = {_storage_of(q) for q, _ in self.pairs}
        return [x for x in self._tensors if _storage_of(x) not in paired]

    def end_look(self) -> bool:
        """The pairs are as they are now; whether there is nothing to look for any more."""
        self.has_stepped = False
        self._num_looks += 1
        self._last = Moment(p for _, p in self.pairs)
        self.is_proven = self._num_proofs >= NUM_PROOFS
        self.is_given_up = not self.pairs and self._num_looks >= _NUM_LOOKS
        return self.is_given_up


def _states(optimizer: Optimizer) -> Iterator[Mapping[Any, Any]]:
    states = optimizer.state.values() if isinstance(optimizer.state, Mapping) else ()
    return (state for state in states if isinstance(state, Mapping))


def declared_pairs(module: nn.Module, copies: Iterable[Any]) -> list[Pair]:
    """The pairs of `AveragingMixin.follow`, each copy in the shape of its parameter; see there for errors."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    example = "such as zip(model.parameters(), masters), or [(list(model.parameters()), flat)]"
    pairs: list[Pair] = []
    for k, entry in enumerate(copies):
        if not (isinstance(entry, Sequence) and len(entry) == 2 and isinstance(entry[1], Tensor)):
            raise ValueError(
                f"got {type(entry).__name__} as entry {k} of copies, expected a parameter and its copy: {example}"
            )
        parameters = [entry[0]] if isinstance(entry[0], Tensor) else list(entry[0])
        if strange := [x for x in parameters if id(x) not in names]:
            raise ValueError(
                f"got {len(strange)} tensors in entry {k} of copies that are no parameters of the module, expected the "
                f"parameter before its copy: {example}"
            )
        flat = local_of(entry[1].detach())
        num_elements = sum(local_of(x).numel() for x in parameters)
        is_whole = isinstance(entry[0], Tensor)
        if not flat.is_floating_point() or (flat.numel() != num_elements if is_whole else flat.numel() < num_elements):
            raise ValueError(
                f"got a copy of {flat.numel()} elements of {flat.dtype} for {names[id(parameters[0])]!r}, expected "
                f"{num_elements} floating-point elements{'' if is_whole else ' or more'}; pass a part of a flat copy "
                "as a view, flat[start:end]"
            )
        if flat.shape == local_of(parameters[0]).shape:
            pairs.append((flat, parameters[0]))
            continue
        if not flat.is_contiguous():
            raise ValueError(f"got a copy for {names[id(parameters[0])]!r} that is not contiguous, expected its shape")
        flat, at = flat.view(-1), 0
        for parameter in parameters:
            pairs.append((_part(flat, at, parameter), parameter))
            at += local_of(parameter).numel()
    for copy, parameter in pairs:
        if not is_rounded(sample(copy), sample(parameter), num_ulps=_DECLARED_ULPS):
            raise ValueError(
                f"got a copy of {names[id(parameter)]!r} with other values than the parameter, expected equal ones, in "
                "the narrower dtype: call follow() after the copies were made from the model or loaded with it, before "
                "the next training forward, with the parameters in the order of the copies"
            )
    return pairs


# Which tensor is the master of which parameter.


def _equal(tensors: Iterable[Tensor], parameters: Sequence[Tensor]) -> list[Pair]:
    """Each parameter after the tensor, or the part of a flat one, whose values it has; the others are left out."""
    by_values = defaultdict(list)
    for p in parameters:
        by_values[_key(p, p.dtype)].append(p)
    pairs, flats = [], []
    for q in tensors:
        found = next((alike for dtype in _dtypes(parameters) if (alike := by_values.get(_key(q, dtype)))), None)
        if found:
            pairs.append((q.detach(), found.pop(0)))
        else:
            flats.append(q)
    left = [p for alike in by_values.values() for p in alike]
    in_order = [p for p in parameters if any(p is x for x in left)] if flats and left else []
    for q in flats:
        parts = _parts(q, in_order, _starts(q, in_order))
        pairs += parts
        placed = {id(p) for _, p in parts}
        in_order = [p for p in in_order if id(p) not in placed]
    return pairs


def _key(x: Tensor, dtype: torch.dtype) -> tuple[object, ...]:
    x = x.detach()
    return (*local_of(x).shape, dtype, *sample(x).to(dtype).tolist())


def _dtypes(parameters: Iterable[Tensor]) -> list[torch.dtype]:
    return list(dict.fromkeys(p.dtype for p in parameters))


def _nearest(tensors: Sequence[Tensor], parameters: Sequence[Tensor]) -> list[Pair]:
    """Each parameter after the tensor of its shape that is nearest, or after its part of one flat tensor of all.

    Empty if a tensor is of no parameter, or if they are far from the parameters.
    """
    left, pairs = list(parameters), []
    if len(tensors) == 1 and _is_flat(tensors[0]) and tensors[0].numel() == sum(local_of(p).numel() for p in left):
        pairs = _parts(tensors[0], left, lambda _, fitting: iter(fitting))
    else:
        for q in tensors:
            alike = (p for p in left if local_of(q).shape == local_of(p).shape)
            if (own := min(alike, key=partial(_distance, q), default=None)) is None:
                return []
            left = [p for p in left if p is not own]
            pairs.append((q.detach(), own))
    squares = [(_distance(q, p) ** 2, float(torch.linalg.vector_norm(sample(p).float())) ** 2) for q, p in pairs]
    far, size = map(sum, zip(*squares, strict=True)) if squares else (0.0, 0.0)
    return pairs if far <= _NEAR**2 * size else []


def _parts(
    flat: Tensor, parameters: Sequence[Tensor], candidates: Callable[[int, list[Tensor]], Iterable[Tensor]]
) -> list[Pair]:
    """The parts of a flat master, from its begin, with zeros in between; each before its parameter."""
    if not _is_flat(flat):
        return []
    flat, rest, pairs, at = flat.detach(), list(parameters), [], 0
    while at < flat.numel() and rest:
        fitting = [p for p in rest if 0 < local_of(p).numel() <= flat.numel() - at]
        found = next(iter(candidates(at, fitting)), None)
        if found is not None:
            pairs.append((_part(flat, at, found), found))
            at += local_of(found).numel()
            rest = [p for p in rest if p is not found]
            continue
        others = flat[at:].nonzero()  # after padding
        if not len(others) or not int(others[0]):
            break
        at += int(others[0])
    return pairs


def _starts(flat: Tensor, parameters: Sequence[Tensor]) -> Callable[[int, list[Tensor]], Iterator[Tensor]]:
    """A function that gives the parameters with the values of the flat tensor from an offset on."""
    firsts = {id(p): float(sample(p)[0]) for p in parameters if local_of(p).numel()} if flat.dim() == 1 else {}
    dtypes = _dtypes(parameters)

    def candidates(at: int, fitting: list[Tensor]) -> Iterator[Tensor]:
        first = {dtype: float(flat[at].to(dtype)) for dtype in dtypes}
        return (p for p in fitting if firsts[id(p)] == first[p.dtype] and is_written(_part(flat, at, p), p))

    return candidates


def _part(flat: Tensor, at: int, parameter: Tensor) -> Tensor:
    own = local_of(parameter)
    return flat.detach()[at : at + own.numel()].view(own.shape)


def _is_flat(x: Tensor) -> bool:
    # The outer optimizers of this library step flat vectors too, without autograd. The elements of a sharded tensor are
    # in several processes.
    return x.dim() == 1 and x.requires_grad and x.is_leaf and local_of(x) is x


def _distance(master: Tensor, parameter: Tensor) -> float:
    other = sample(parameter).to(master.device, master.dtype)
    return float(torch.linalg.vector_norm(sample(master) - other))


def _storage_of(x: Tensor) -> tuple[torch.device, int]:
    own = local_of(x)
    return own.device, own.untyped_storage().data_ptr()


# One pair.


def is_written(copy: Tensor, parameter: Tensor) -> bool:
    """Whether the parameter equals the copy in the parameter's dtype, on samples."""
    return torch.equal(sample(copy).to(parameter.device, parameter.dtype), sample(parameter))


def is_rounded(x: Tensor, y: Tensor, *, num_ulps: int = 0) -> bool:
    """Whether x and y of one shape are equal in the narrower of their dtypes, or differ by a few units of it.

    The dtype of y counts where one is float16 and the other bfloat16, which are equally wide: y is the parameter, and x
    the copy that was rounded to it. Without this rule a float16 copy of a bfloat16 parameter would equal it or not by
    the order of the arguments.
    """
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


def change_beyond(copy: Tensor, parameter: Tensor) -> Tensor:
    """parameter - round(copy), a new tensor in the wider of their dtypes."""
    copy, own = local_of(copy.detach()), local_of(parameter.detach())
    rounded = copy.to(own.device, own.dtype)
    return own.to(torch.promote_types(own.dtype, copy.dtype)) - rounded


def add_(x: Tensor, change: Tensor) -> None:
    """x <- x + change, whatever the dtype and the device of the change."""
    own = local_of(x.detach())
    own.add_(change.to(own.device, own.dtype))
