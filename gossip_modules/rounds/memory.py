"""Memory: everything that an algorithm keeps from one round to the next, with its whole life cycle."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..flat.layout import FlatLayout, TensorSpec
from ..flat.vector import FlatVector
from .fragment import Fragment
from .outer_optimizer import OuterOptimizer
from .rates import Rates, RateUnits
from .vector import Vector, widened


class Kept(Protocol):
    """An object that an algorithm keeps besides vectors, such as the factors of links."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


_K = TypeVar("_K", bound=Kept)


@dataclass
class _Entry:
    """A vector with what was declared of it."""

    vector: Vector
    start: Literal["zero", "x"]
    average: Literal["keep", "reset"]
    generation: Literal["keep", "reset"]
    join: Literal["copy", "zero"]
    has_units: bool


class Memory:
    """What an algorithm keeps of one model: vectors, optimizers, and other objects, each by a name.

    An algorithm declares a thing where it first uses it, and gets the same one from then on. The rest happens here, for
    all algorithms: checkpoints, other devices, layers that are frozen or added, exact averages, new generations of a
    membership, and workers that join.

    Vectors have float32 at least where the model is narrower, and no buffers. Where other tensors are trained than
    before, the values of tensors that are still trained stay, and new tensors begin as declared.

    Attributes:
        num_rounds: rounds that have ended so far.
    """

    def __init__(self) -> None:
        self.num_rounds = 0
        self._x: Vector | None = None  # the model of the present round
        self._devices: list[torch.device] | None = None  # of its parts
        self._layout: FlatLayout | None = None  # of the parameters, widened
        self._entries: dict[str, _Entry] = {}
        self._optimizers: dict[str, OuterOptimizer] = {}
        self._objects: dict[str, Kept] = {}
        self._links: dict[int, dict[str, Any]] = {}
        self._scratch: dict[str, Vector] = {}
        self._loaded: dict[str, Any] = {}  # of a checkpoint, until an algorithm asks for it
        self._loaded_layout: FlatLayout | None = None  # of the vectors there, where another worker gave them
        self._seen: FlatLayout | None = None  # of a model without new tensors
        self._has_buffers = False  # whether these end in buffers, as in old checkpoints
        self._units = RateUnits()

    # For algorithms.

    def vector(
        self,
        name: str,
        *,
        start: Literal["zero", "x"] = "zero",
        average: Literal["keep", "reset"] = "keep",
        generation: Literal["keep", "reset"] = "keep",
        join: Literal["copy", "zero"] = "copy",
        in_units_of_rate: bool = False,
    ) -> Vector:
        """The vector of that name.

        Args:
            name: of the vector.
            start: its values at first: zeros, or those of the model.
            average: whether it stays or starts anew after an exact average of all models that the user asks for.
            generation: whether it stays or starts anew where workers come or go.
            join: whether a worker that joins gets the vector of its donor, or starts anew.
            in_units_of_rate: whether it is made of steps, so that it is scaled where the learning rate changes.
        """
        entry = self._entries.get(name)
        if entry is None:
            entry = _Entry(Vector(self._zeros()), start, average, generation, join, in_units_of_rate)
            self._entries[name] = entry
            if start == "x":
                entry.vector.set_(self._model)
            if (state := self._loaded.get("vectors", {}).pop(name, None)) is not None:
                self._copy(name, entry.vector, state)
        return entry.vector

    def optimizer(self, name: str, make: Callable[[Sequence[Tensor]], Optimizer], of: Vector) -> Optimizer | None:
        """The optimizer of that name, which `make` makes of the parts of a vector; None: the vector is empty."""
        if name not in self._optimizers:
            if not of.parts:
                return None
            self._optimizers[name] = OuterOptimizer(make, of)
            if (state := self._loaded.get("optimizers", {}).pop(name, None)) is not None:
                self._optimizers[name].load_state_dict(self._fitting(state, of))
        return self._optimizers[name].optimizer

    def keep(self, name: str, make: Callable[[], _K]) -> _K:
        """The object of that name, which `make` makes; it has `state_dict` and `load_state_dict`."""
        if name not in self._objects:
            self._objects[name] = make()
            if (state := self._loaded.get("objects", {}).pop(name, None)) is not None:
                self._objects[name].load_state_dict(state)
        return self._objects[name]  # type: ignore[return-value]

    def has(self, name: str) -> bool:
        """Whether there is a vector of that name, or one in the checkpoint that was loaded."""
        return name in self._entries or name in self._loaded.get("vectors", {})

    def forget(self, name: str) -> None:
        """Keep the vector of that name no longer; it need not be there."""
        self._entries.pop(name, None)
        self._loaded.get("vectors", {}).pop(name, None)

    def link(self, peer: int) -> dict[str, Any]:
        """What is kept of the link to a peer; empty at first. Both ends of a link begin again together."""
        return self._links.setdefault(peer, {})

    def scratch(self, name: str = "sent") -> Vector:
        """A vector that is kept only for its memory: of any values at the beginning of a round; it can be mixed."""
        if name not in self._scratch:
            x = self._model
            if x.flat is None:
                self._scratch[name] = Vector(self._zeros())
            else:
                layout = widened(x.flat.layout, has_buffers=True)
                self._scratch[name] = Vector.of(FlatVector.zeros(layout, x.flat.raw.device))
        return self._scratch[name]

    # For drivers.

    def fit(self, x: Vector, *, who: object = None) -> None:
        """Be of the tensors of x, on its device; called before each round.

        Args:
            x: the model.
            who: the algorithm, for a warning; None: nobody is warned.
        """
        before, self._x, self._devices = self._devices, x, [part.device for part in x.parts]
        layout = self._layout if x.flat is None else _layout_of(x.flat)
        is_moved = before is not None and before != self._devices
        if before is not None and layout == self._layout and not is_moved:
            return
        old, self._layout = self._layout, layout
        if before is None:
            return
        has_new = x.flat is None or old is None or bool(tensors_beyond(old, x.flat))
        if who is not None and not is_moved and has_new and (self._entries or self._objects):
            warnings.warn(
                f"{who}: other tensors are trained than before; what it keeps of tensors that are still trained stays, "
                "and new tensors start anew",
                stacklevel=2,
            )
        self._scratch = {}
        kept, optimizers = self._entries, self._optimizers
        self._entries, self._optimizers = {}, {}
        assert old is not None or is_moved
        for name, entry in kept.items():
            new = self._like_entry(name, entry)
            _carry(entry.vector.parts, old, new.parts, layout)
        for name, before_ in optimizers.items():
            vector = next(self._entries[key].vector for key, entry in kept.items() if entry.vector is before_.of)
            if self.optimizer(name, before_.make, vector) is not None:
                self._optimizers[name].go_on_as(before_, lambda a, b: _carry(a, old, b, layout))
        self._objects = {} if not is_moved else self._objects

    def release(self) -> None:
        """The round is over, and so is the vector that it was about."""
        self._x = None

    def new_tensors(self, x: FlatVector) -> list[Tensor]:
        """The parameters of x that this memory has not kept anything of so far; views."""
        known = self._loaded_layout if self._layout is None else self._layout
        if known is None or not (self._entries or self._loaded.get("vectors")):
            return []
        if not (new := tensors_beyond(known, x)):
            self._seen = x.layout
        return new

    def scale(self, rates: Rates | None) -> None:
        """Scale vectors that are in units of the learning rate to these rates; see `RateUnits`."""
        vectors = [entry.vector for entry in self._entries.values() if entry.has_units]
        self._units.put_back()
        if vectors and rates is not None:
            self._units.scale(vectors, rates, self._layout)

    def end_round(self) -> None:
        """A round has ended."""
        self.num_rounds += 1
        self._units.put_back()

    def forget_models(self) -> None:
        """All models have become equal: vectors that are declared so start anew."""
        self._reset(lambda entry: entry.average == "reset")

    def begin_generation(self) -> None:
        """Workers have come or gone: vectors that are declared so start anew."""
        self._reset(lambda entry: entry.generation == "reset")

    def forget_peer(self, peer: int) -> None:
        """Nothing is kept of the link to a peer any more."""
        self._links.pop(peer, None)

    def renumber_links(self, ranks: Mapping[int, int]) -> None:
        """Keep these links only. ranks: the new rank of each peer, by its old one."""
        self._links = {ranks[peer]: link for peer, link in self._links.items() if peer in ranks}

    def reset(self) -> None:
        """As before the first round."""
        x, devices = self._x, self._devices
        self.__init__()  # type: ignore[misc]
        if x is not None:
            self._x, self._devices = x, devices
            self._layout = None if x.flat is None else _layout_of(x.flat)

    def state_dict(self, *, joins: bool = False) -> dict[str, Any]:
        """Everything that is kept; shares memory with this object.

        joins: whether it is for another worker, which gets the vectors that are declared so, and may train other
            tensors.
        """
        self._units.put_back()
        entries = {name: entry for name, entry in self._entries.items() if not joins or entry.join == "copy"}
        optimizers = {} if joins and not entries else self._optimizers
        state = {
            "num_rounds": self.num_rounds,
            "vectors": {
                **self._loaded.get("vectors", {}),
                **{name: list(e.vector.parts) for name, e in entries.items()},
            },
            "optimizers": {
                **self._loaded.get("optimizers", {}),
                **{name: optimizer.state_dict() for name, optimizer in optimizers.items()},
            },
            "objects": {
                **self._loaded.get("objects", {}),
                **{n: kept.state_dict() for n, kept in self._objects.items()},
            },
            "rates": self._units.rates,
            "tensors": self._tensors() if joins else None,
        }
        return {name: value for name, value in state.items() if value or name == "num_rounds"}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict()` gave; copies it. The next round uses it, and checks its shapes."""
        self.reset()
        self._loaded = copy.deepcopy(
            {name: state[name] for name in ("vectors", "optimizers", "objects") if name in state}
        )
        self.num_rounds = state.get("num_rounds", 0)
        self._units.rates = state.get("rates")
        self._has_buffers = bool(state.get("has_buffers", False))
        if (tensors := state.get("tensors")) is not None:
            self._loaded_layout = FlatLayout.of(
                (torch.float32, [TensorSpec((numel,), name=name) for name, numel in part]) for part in tensors
            )

    def take(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict(joins=True)` of another rank; the vectors that no other rank has stay."""
        own = {name: [x.clone() for x in e.vector.parts] for name, e in self._entries.items() if e.join == "zero"}
        tensors = self._tensors()
        own = own if state.get("tensors") == tensors else {}
        self.load_state_dict({**state, "vectors": {**state.get("vectors", {}), **own}})

    def _tensors(self) -> list[list[tuple[str, int]]]:
        """The names and sizes of the tensors of each part."""
        layout = self._loaded_layout if self._layout is None else self._layout
        segments = () if layout is None else layout.segments
        return [[(spec.name, spec.numel) for _, spec in segment.places()] for segment in segments]

    # Parts.

    @property
    def _model(self) -> Vector:
        assert self._x is not None, "fit() comes first"
        return self._x

    def _zeros(self) -> list[Tensor]:
        return [
            torch.zeros_like(x, dtype=x.dtype if x.element_size() >= 4 else torch.float32) for x in self._model.parts
        ]

    def _like_entry(self, name: str, entry: _Entry) -> Vector:
        return self.vector(
            name,
            start=entry.start,
            average=entry.average,
            generation=entry.generation,
            join=entry.join,
            in_units_of_rate=entry.has_units,
        )

    def _reset(self, is_reset: Callable[[_Entry], bool]) -> None:
        gone = [name for name, entry in self._entries.items() if is_reset(entry)]
        vectors = {id(self._entries[name].vector) for name in gone}
        self._optimizers = {n: kept for n, kept in self._optimizers.items() if id(kept.of) not in vectors}
        for name in gone:
            del self._entries[name]
        if gone:
            self.num_rounds, self._loaded = 0, {}

    def _copy(self, name: str, vector: Vector, state: Sequence[Tensor]) -> None:
        if self._loaded_layout is not None and self._differs:
            _carry(state, self._loaded_layout, vector.parts, self._layout)
            return
        found, own = [x.numel() for x in state], [x.numel() for x in vector.parts]
        if self._has_buffers and len(found) == len(own):
            state = [x[:numel] for x, numel in zip(state, own, strict=True)]
            found = [x.numel() for x in state]
        if found != own:
            raise ValueError(
                f"got the state of vector {name!r} with {found} elements, expected {own}: other tensors were trained "
                "when it was saved; freeze the same parameters, or load the model alone: module.load_state_dict"
            )
        for mine, theirs in zip(vector.parts, state, strict=True):
            mine.copy_(theirs)

    @property
    def _differs(self) -> bool:
        """Whether loaded vectors are of other tensors."""
        theirs = [[(spec.name, spec.numel) for _, spec in s.places()] for s in self._loaded_layout.segments]  # type: ignore[union-attr]
        layout = self._layout
        return layout is not None and theirs != [[(p.name, p.numel) for _, p in s.places()] for s in layout.segments]

    def _fitting(self, state: Mapping[str, Any], of: Vector) -> Mapping[str, Any]:
        """The state of an optimizer of other tensors, as that of an optimizer of `of`."""
        if self._loaded_layout is None or not self._differs:
            return state
        kept = state["state"]
        values = {name: [kept[k][name] for k in sorted(kept)] for name in (kept[min(kept)] if kept else ())}
        sizes = [segment.numel for segment in self._loaded_layout.segments]
        moved: dict[int, dict[str, Any]] = {k: {} for k in range(len(of.parts))}
        for name, tensors in values.items():
            is_vector = [x.numel() for x in tensors if isinstance(x, Tensor)] == sizes and any(n != 1 for n in sizes)
            new = [torch.zeros_like(part) for part in of.parts]
            if is_vector:
                _carry(tensors, self._loaded_layout, new, self._layout)
            for k, part in enumerate(new):
                moved[k][name] = part if is_vector else copy.deepcopy(tensors[0])
        groups = [{**group, "params": list(moved)} for group in state["param_groups"][:1]]
        return {**state, "state": moved if values else {}, "param_groups": groups}


def _layout_of(flat: FlatVector) -> FlatLayout:
    return widened(flat.layout, has_buffers=False)


def _carry(old: Sequence[Tensor], before: FlatLayout | None, new: Sequence[Tensor], after: FlatLayout | None) -> None:
    """Values of tensors that both have <- those of the old one."""
    if before == after:
        for x, y in zip(new, old, strict=True):
            x.copy_(y)
        return
    assert before is not None, "flat vectors have layouts"
    assert after is not None, "flat vectors have layouts"
    places = {spec.name: (k, a, spec.numel) for k, s in enumerate(before.segments) for a, spec in s.places()}
    for k, segment in enumerate(after.segments):
        for first, spec in segment.places():
            if spec.name in places and places[spec.name][2] == spec.numel:
                j, a, numel = places[spec.name]
                new[k][first : first + numel].copy_(old[j][a : a + numel])


def tensors_beyond(known: FlatLayout, x: FlatVector) -> list[Tensor]:
    """The parameters of x that vectors of the layout `known` do not have; views."""
    layout = _layout_of(x)
    if layout == known:
        return []
    there = {(spec.name, spec.numel) for segment in known.segments for _, spec in segment.places()}
    return [
        part[first : first + spec.numel]
        for part, segment in zip(x.parameters, layout.segments, strict=True)
        for first, spec in segment.places()
        if (spec.name, spec.numel) not in there
    ]


def move_parts(
    old: Sequence[tuple[Fragment, Memory]],
    before: FlatLayout,
    new: Sequence[tuple[Fragment, Memory]],
    x: FlatVector,
    device: torch.device | None = None,
) -> None:
    """The memories of the fragments of x <- those of the fragments of a vector of other tensors, by their names.

    Args:
        old: the fragments of a vector of the layout `before`, and their memories.
        before: float32 or wider, with buffers.
        new: the fragments of x, with new memories; mutated.
        x: the model.
        device: of the memories; None: that of the model.
    """
    after = widened(x.layout, has_buffers=True)
    for fragment, memory in new:
        part = fragment.read(x, device or x.raw.device)
        memory.fit(Vector.of(part))
        memory.num_rounds = old[0][1].num_rounds
    model = old[0][1]

    def move(theirs: Sequence[Sequence[Tensor]], ours: Sequence[Sequence[Tensor]]) -> None:
        device = ours[0][0].device
        whole, result = FlatVector.zeros(before, device), FlatVector.zeros(after, device)
        for (fragment, _), parts in zip(old, theirs, strict=True):
            fragment.spread(parts, whole)
        for (fragment, _), parts in zip(new, ours, strict=True):
            fragment.spread(parts, result)
        _carry(whole.parameters, before.where(is_buffer=False), result.parameters, after.where(is_buffer=False))
        for (fragment, _), parts in zip(new, ours, strict=True):
            fragment.collect(result, parts)

    for name, entry in model._entries.items():
        vectors = [memory._like_entry(name, entry).parts for _, memory in new]
        move([memory._entries[name].vector.parts for _, memory in old], vectors)
    for name, kept in model._optimizers.items():
        key = next(key for key, entry in model._entries.items() if entry.vector is kept.of)
        made = [memory.optimizer(name, kept.make, memory._entries[key].vector) for _, memory in new]
        assert all(optimizer is not None for optimizer in made), "fragments have elements"
        mine = [memory._optimizers[name] for _, memory in new]
        theirs = [memory._optimizers[name] for _, memory in old]
        for optimizer in mine:
            optimizer.go_on_as(kept, lambda _a, _b: None)
        for state in kept.vector_states():
            move([o.state_of(state) for o in theirs], [o.state_of(state) for o in mine])
