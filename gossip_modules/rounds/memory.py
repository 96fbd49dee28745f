"""Memory: everything that an algorithm keeps from one round to the next, with its whole life cycle."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..flat.layout import FlatLayout
from ..flat.vector import FlatVector
from .outer_optimizer import OuterOptimizer
from .rates import Rates, RateUnits
from .vector import Vector, widened


class Kept(Protocol):
    """An object that an algorithm keeps besides vectors, such as the factors of links."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


_K = TypeVar("_K", bound=Kept)
_T = TypeVar("_T")


@dataclass
class _Entry:
    """A vector with what was declared of it."""

    vector: Vector
    start: Literal["zero", "x"]
    average: Literal["keep", "reset"]
    generation: Literal["keep", "reset"]
    join: Literal["copy", "zero"]
    has_units: bool
    is_of_weights: bool


class Memory:
    """What an algorithm keeps of one model: vectors, optimizers, and other objects, each by a name.

    An algorithm declares a thing where it first uses it, and gets the same one from then on. The rest happens here, for
    all algorithms: checkpoints, other devices, layers that are frozen or added, exact averages, new generations of a
    membership, and workers that join.

    Vectors have float32 at least where the model is narrower, and no buffers. Where other tensors are trained than
    before, the values of tensors that are still trained stay, and new tensors begin as declared.

    Attributes:
        num_rounds: rounds that have ended so far.
        weights: the graph and its weights.
    """

    def __init__(self, weights: str = "") -> None:
        self.num_rounds, self.weights = 0, weights
        self._x: Vector | None = None  # the model of the present round
        self._layout: FlatLayout | None = None  # of the parameters, widened
        self._entries: dict[str, _Entry] = {}
        self._optimizers: dict[str, OuterOptimizer] = {}
        self._objects: dict[str, Kept] = {}
        self._links: dict[int, dict[str, Any]] = {}
        self._scratch: dict[str, Vector] = {}
        self._cached: dict[object, Any] = {}
        self._loaded: dict[str, Any] = {}  # of a checkpoint, until an algorithm asks for it
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
        of_weights: bool = False,
    ) -> Vector:
        """The vector of that name.

        Args:
            name: of the vector.
            start: its values at first: zeros, or those of the model.
            average: whether it stays or starts anew after an exact average of all models that the user asks for.
            generation: whether it stays or starts anew where workers come or go.
            join: whether a worker that joins gets the vector of its donor, or starts anew.
            in_units_of_rate: whether it is made of steps, so that it is scaled where the learning rate changes.
            of_weights: whether it is a sum over rounds with the same peers and weights, so that a checkpoint with
                others is refused.
        """
        entry = self._entries.get(name)
        if entry is None:
            entry = _Entry(Vector(self.zeros()), start, average, generation, join, in_units_of_rate, of_weights)
            self._entries[name] = entry
            if start == "x":
                entry.vector.set_(self._model)
            if (state := self._loaded.get("vectors", {}).pop(name, None)) is not None:
                self._check_weights(entry, name)
                self._copy(name, entry.vector, state)
        return entry.vector

    def optimizer(self, name: str, make: Callable[[Sequence[Tensor]], Optimizer], of: Vector) -> Optimizer | None:
        """The optimizer of that name, which `make` makes of the parts of a vector; None: the vector is empty."""
        if name not in self._optimizers:
            if not of.parts:
                return None
            self._optimizers[name] = OuterOptimizer(make, of)
            if (state := self._loaded.get("optimizers", {}).pop(name, None)) is not None:
                self._optimizers[name].load_state_dict(state)
        return self._optimizers[name].optimizer

    def keep(self, name: str, make: Callable[[], _K]) -> _K:
        """The object of that name, which `make` makes; it has `state_dict` and `load_state_dict`."""
        if name not in self._objects:
            self._objects[name] = make()
            if (state := self._loaded.get("objects", {}).pop(name, None)) is not None:
                self._objects[name].load_state_dict(state)
        return self._objects[name]  # type: ignore[return-value]

    def link(self, peer: int, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """What is kept of the link to a peer. Both ends of a link begin again together.

        Args:
            peer: at the other end.
            make: what is there at first: numbers, tensors and lists of tensors, by name. Tensors keep their shapes.
        """
        if peer not in self._links:
            link = make()
            if (state := self._loaded.get("links", {}).pop(peer, None)) is not None:
                _check_link(link, state)
                link = state
            self._links[peer] = link
        return self._links[peer]

    def cached(self, key: object, make: Callable[[], _T]) -> _T:
        """What `make` makes of the tensors that are trained, their device, the rank and the weights of its peers.

        It is made once, and again when one of these changes. Nothing of it is in a checkpoint.
        """
        if key not in self._cached:
            self._cached[key] = make()
        return cast("_T", self._cached[key])

    def zeros(self) -> list[Tensor]:
        """The parts of a new vector."""
        return [
            torch.zeros_like(x, dtype=x.dtype if x.element_size() >= 4 else torch.float32) for x in self._model.parts
        ]

    def scratch(self, name: str = "sent") -> Vector:
        """A vector that is kept only for its memory: of any values at the beginning of a round; it can be mixed."""
        if name not in self._scratch:
            x = self._model
            if x.flat is None:
                self._scratch[name] = Vector(self.zeros())
            else:
                layout = widened(x.flat.layout, has_buffers=True)
                self._scratch[name] = Vector.of(FlatVector.zeros(layout, x.flat.raw.device))
        return self._scratch[name]

    # For drivers.

    def fit(self, x: Vector, *, who: object = "") -> None:
        """Be of the tensors of x, on its device; called before each round.

        Args:
            x: the model.
            who: the algorithm, for a warning.
        """
        before, self._x = self._x, x
        layout = self._layout if x.flat is None else _layout_of(x.flat)
        is_moved = before is not None and [p.device for p in before.parts] != [p.device for p in x.parts]
        if before is not None and layout == self._layout and not is_moved:
            return
        old, self._layout = self._layout, layout
        if before is None:
            return
        if not is_moved and (self._entries or self._objects or self._links):
            warnings.warn(
                f"{who}: other tensors are trained than before; vectors that it keeps of tensors that are still "
                "trained stay, and all else starts anew",
                stacklevel=2,
            )
        self._scratch, self._cached = {}, {}
        self._links = {j: _moved(link, x.parts[0].device) for j, link in self._links.items()} if is_moved else {}
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
        """All models have become equal: links, and vectors that are declared so, start anew."""
        self._links = {}
        self._loaded.pop("links", None)
        self._reset(lambda entry: entry.average == "reset")

    def begin_generation(self) -> None:
        """Workers have come or gone: vectors that are declared so start anew."""
        self._cached = {}
        self._reset(lambda entry: entry.generation == "reset")

    def forget_peer(self, peer: int) -> None:
        """Nothing is kept of the link to a peer any more."""
        self._links.pop(peer, None)

    def renumber_links(self, ranks: Mapping[int, int]) -> None:
        """Keep these links only. ranks: the new rank of each peer, by its old one."""
        self._links = {ranks[peer]: link for peer, link in self._links.items() if peer in ranks}

    def reset(self) -> None:
        """As before the first round."""
        x = self._x
        self.__init__(self.weights)  # type: ignore[misc]
        self._x, self._layout = x, None if x is None or x.flat is None else _layout_of(x.flat)

    def state_dict(self, *, joins: bool = False, has_links: bool = True) -> dict[str, Any]:
        """Everything that is kept; shares memory with this object.

        Args:
            joins: whether it is for a worker that joins, which gets what is declared so.
            has_links: whether it has what is kept of links, which is of no use to a worker with other peers.
        """
        self._units.put_back()
        entries = {name: entry for name, entry in self._entries.items() if not joins or entry.join == "copy"}
        optimizers = {} if joins and not entries else self._optimizers
        state: dict[str, Any] = {
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
            "links": {**self._loaded.get("links", {}), **self._links} if has_links else {},
            "rates": self._units.rates,
            "weights": self._loaded.get("weights") or self._weights_of(entries.values()),
        }
        return {name: value for name, value in state.items() if value or name == "num_rounds"}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict()` gave; copies it. The next round uses it, and checks its shapes."""
        self.reset()
        self._loaded = copy.deepcopy(
            {name: state[name] for name in ("vectors", "optimizers", "objects", "links", "weights") if name in state}
        )
        self.num_rounds = state.get("num_rounds", 0)
        self._units.rates = state.get("rates")

    # Parts.

    @property
    def _model(self) -> Vector:
        assert self._x is not None, "fit() comes first"
        return self._x

    def _like_entry(self, name: str, entry: _Entry) -> Vector:
        return self.vector(
            name,
            start=entry.start,
            average=entry.average,
            generation=entry.generation,
            join=entry.join,
            in_units_of_rate=entry.has_units,
            of_weights=entry.is_of_weights,
        )

    def _reset(self, is_reset: Callable[[_Entry], bool]) -> None:
        gone = [name for name, entry in self._entries.items() if is_reset(entry)]
        vectors = {id(self._entries[name].vector) for name in gone}
        self._optimizers = {n: kept for n, kept in self._optimizers.items() if id(kept.of) not in vectors}
        for name in gone:
            del self._entries[name]
        if gone:
            self.num_rounds, self._loaded = 0, {}

    def _weights_of(self, entries: Iterable[_Entry]) -> str:
        return self.weights if any(entry.is_of_weights for entry in entries) else ""

    def _check_weights(self, entry: _Entry, name: str) -> None:
        if entry.is_of_weights and (found := self._loaded.get("weights")) and found != self.weights:
            raise ValueError(
                f"got the state of vector {name!r} on {found}, expected {self.weights}, since it is a sum over rounds "
                "with the same peers and weights; resume on the same graph"
            )

    def _copy(self, name: str, vector: Vector, state: Sequence[Tensor]) -> None:
        state, parts = ([x for x in side if x.numel()] for side in (state, vector.parts))
        found, own = [x.numel() for x in state], [x.numel() for x in parts]
        if found != own:
            raise ValueError(
                f"got the state of vector {name!r} with {found} elements, expected {own}: other tensors were trained "
                "when it was saved; freeze the same parameters, or load the model alone: module.load_state_dict"
            )
        for mine, theirs in zip(parts, state, strict=True):
            mine.copy_(theirs)


def _moved(kept: Any, device: torch.device) -> Any:
    """Numbers, tensors, and containers of these, with the tensors on the device."""
    if isinstance(kept, Tensor):
        return kept.to(device)
    if isinstance(kept, dict):
        return {name: _moved(value, device) for name, value in kept.items()}
    return [_moved(value, device) for value in kept] if isinstance(kept, list) else kept


def _check_link(link: Mapping[str, Any], state: Mapping[str, Any]) -> None:
    found, own = _shapes(state), _shapes(link)
    if found != own:
        raise ValueError(
            f"got the state of a link with {found}, expected {own}; load a checkpoint of the same model and the same "
            "trained tensors"
        )


def _shapes(kept: Any) -> Any:
    """The same, with the shape of a tensor in its place, and the type of a number."""
    if isinstance(kept, Tensor):
        return tuple(kept.shape)
    if isinstance(kept, Mapping):
        return {name: _shapes(value) for name, value in kept.items()}
    return [_shapes(value) for value in kept] if isinstance(kept, list) else type(kept).__name__


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
