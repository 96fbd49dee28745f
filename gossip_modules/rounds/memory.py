"""Memory: the state of an algorithm from one round to the next, with checkpoints, moves and resets."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeVar, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..flat.layout import FlatLayout
from ..flat.vector import FlatVector
from ..state import VERSION, Restart, State, begins_anew, branch, is_of_one_worker, leaf, transient
from .loaded import Loaded
from .outer_optimizer import VectorOptimizer, carried_state
from .rates import Rates, RateUnits
from .runs import carry, layout_of, places_of, runs, tensors_beyond
from .vector import Vector, wide, widened

COUNTED = ("tokens", "steps")
"""The names of the numbers that drivers count; they belong to one rank."""

_T = TypeVar("_T")
_ENTRIES = ("policies", "places", "weights", "vectors", "optimizers", "links", "joins")  # of states, besides the leaves


class Entry(NamedTuple):
    """A vector, and the arguments of `Memory.vector` that declared it."""

    vector: Vector
    policies: Mapping[str, Any]


class Memory(State):
    """The state of an algorithm for one model: named vectors, optimizers and links.

    An algorithm declares an entry where it first uses it, and gets the same object in later rounds. The memory handles
    checkpoints, other devices, frozen and added layers, exact averages, new generations of a membership, and joining
    workers, for all algorithms alike.

    [Note: Sums over workers] A worker that dies takes its vectors with it, and a worker that joins brings a copy of the
    vectors of another worker. Some algorithms need a vector whose sum over the ranks has a certain value. Such a vector
    restarts with each generation (`generation="reset"`), at the same step on all workers. It then adapts again to the
    differences between the data of the workers. A checkpoint that is loaded under a membership, and the state for a
    joining worker, leave such vectors out. Between a death and the next generation the sum is wrong by the share of the
    dead worker, about the size of a step.

    Vectors have float32 at least, also for narrower models, and no buffers. If the set of trained tensors changes,
    tensors that are still trained keep their values, and new tensors start as declared.

    Attributes:
        num_rounds: the number of complete rounds so far.
        weights: a description of the graph and its weights.
        layout: the places of the parameters in the parts of a vector; None: there was no round yet, or no layout.
        entries, optimizers: the vectors and the optimizers, by name.
        units: the learning rates as units of vectors.
        rates: the learning rates of the present round.
        numbers: numbers of the algorithm, by name; joining workers get a copy.
        missing: new vectors that a loaded state with other vectors lacks: see `check_vectors`.
    """

    num_rounds: int = leaf(0)
    numbers: dict[str, float] = leaf({})
    units: RateUnits = branch(is_flat=True)
    rates: Rates | None = leaf(None, is_saved=False)
    entries: dict[str, Entry] = leaf({}, is_saved=False)
    optimizers: dict[str, VectorOptimizer] = leaf({}, is_saved=False)
    _links: dict[int, dict[str, Any]] = leaf({}, average="on_request", is_by_peer=True, is_saved=False)
    _has_passing_links: bool = leaf(False, is_saved=False)  # of one generation; see `link`
    _inner: Memory | None = branch()
    _loaded: Loaded = leaf(Loaded({}), is_saved=False)
    missing: list[str] = leaf([], is_saved=False)
    _seen: FlatLayout | None = leaf(None, is_saved=False)  # of a model without new tensors
    _model_layout: FlatLayout | None = leaf(None, is_saved=False)  # of the model, buffers included
    _cached: dict[object, Any] = leaf({}, generation="reset", is_saved=False, is_copied=False)
    _scratch: dict[str, Vector] = leaf({}, is_saved=False, is_copied=False)
    _x: Vector | None = transient(None)  # the model of the present round

    def __init__(self, weights: str = "") -> None:
        self.weights = weights
        self.units = RateUnits()
        self.layout: FlatLayout | None = None
        self._devices: list[torch.device] | None = None  # of its parts; None: there was no round yet

    # For algorithms.

    def vector(
        self,
        name: str,
        *,
        start: Literal["zero", "x"] = "zero",
        average: Literal["keep", "reset", "on_request"] = "keep",
        generation: Literal["keep", "reset"] = "keep",
        join: Literal["copy", "zero"] = "copy",
        in_units_of_rate: bool = False,
        of_weights: bool = False,
    ) -> Vector:
        """Return the vector with this name; the first call creates it.

        Args:
            name: the name of the vector, also in checkpoints.
            start: the first values: zeros, or the values of the model.
            average: "keep" keeps the vector after an exact average of all models, "reset" restarts it, and "on_request"
                restarts it only if the user asked for the average and no workers come or go.
            generation: whether the vector is kept or restarts when workers join or leave; see
                [Note: Sums over workers].
            join: whether a joining worker gets the vector of its donor, or starts a new one.
            in_units_of_rate: whether the vector is a sum of optimizer steps. It is then scaled when the learning rate
                changes.
            of_weights: whether the vector is a sum over rounds with the same peers and weights. A checkpoint with other
                peers or weights is then refused.
        """
        if name not in self.entries:
            policies = {
                "start": start,
                "average": average,
                "generation": generation,
                "join": join,
                "in_units_of_rate": in_units_of_rate,
                "of_weights": of_weights,
            }
            vector = Vector(self.zeros())
            if start == "x":
                vector.set_(self._model)
            if of_weights:
                self._loaded.check_weights(name, self.weights)
            if self._loaded.vectors and name not in self._loaded.vectors:
                self.missing.append(name)
            self._loaded.copy_to(name, vector.parts, places_of(self.layout))
            self.entries[name] = Entry(vector, policies)
        return self.entries[name].vector

    @property
    def momentum(self) -> Vector:
        """The momentum of the user's SGD, if the algorithm `needs_sgd`; written into the optimizer after a round."""
        return self.vector("momentum", average="on_request")

    def optimizer(self, name: str, make: Callable[[Sequence[Tensor]], Optimizer], of: Vector) -> Optimizer | None:
        """Return the optimizer with this name; the first call creates it.

        Args:
            name: the name of the optimizer, also in checkpoints.
            make: makes the optimizer from the parts of the vector.
            of: the vector of the optimizer.

        Returns:
            The optimizer; None if the vector is empty.
        """
        if name not in self.optimizers:
            if not of.parts:
                return None
            self.optimizers[name] = VectorOptimizer(make, of)
            if (loaded := self._loaded.optimizers.pop(name, None)) is not None:
                state = carried_state([loaded], places_of(self.layout), of.parts)
                self.optimizers[name].load_state_dict(state)
        return self.optimizers[name].optimizer

    def has(self, name: str) -> bool:
        """Whether a vector with this name exists here or in the checkpoint that was loaded."""
        return name in self.entries or name in self._loaded.vectors

    def forget(self, name: str) -> None:
        """Drop the vector with this name, if it exists."""
        self.entries.pop(name, None)
        self._loaded.vectors.pop(name, None)

    def link(
        self,
        peer: int,
        make: Callable[[], dict[str, Any]],
        *,
        generation: Literal["keep", "reset"] = "keep",
    ) -> dict[str, Any]:
        """Return the state of the link to a peer; the first call creates it. Both ends of a link restart together.

        Args:
            peer: the rank at the other end.
            make: returns the first state: numbers, tensors and lists of tensors, by name. Tensors keep their shapes.
            generation: whether links restart when workers have joined or left, equal for all links.
        """
        self._has_passing_links = generation == "reset"
        if peer not in self._links:
            link = make()
            if (state := self._loaded.links.pop(peer, None)) is not None:
                _check_link(link, state)
                link = state
            self._links[peer] = link
        return self._links[peer]

    def cached(self, key: object, make: Callable[[], _T]) -> _T:
        """Return a value that depends on the trained tensors, their device, the rank and the weights only.

        Checkpoints do not contain the value.

        Args:
            key: the name of the value, any hashable object.
            make: returns the value; called once, and again after one of these has changed.
        """
        if key not in self._cached:
            self._cached[key] = make()
        return cast("_T", self._cached[key])

    @property
    def inner(self) -> Memory:
        """The memory of the inner algorithm; see `Over`."""
        if self._inner is None:
            self._inner = Memory(self.weights)
        return self._inner

    def zeros(self) -> list[Tensor]:
        """Return zeros with the shapes of the parts of a vector of this memory."""
        return [torch.zeros_like(x, dtype=wide(x.dtype)) for x in self._model.parts]

    def scratch(self, name: str = "sent") -> Vector:
        """Return a vector for one round. `Mix` and `Average` accept it.

        Its values are undefined at the beginning of a round, and after a lost average of it.

        Args:
            name: the name of the vector; vectors of different names share no memory.
        """
        if name not in self._scratch:
            x = self._model
            if x.flat is None:
                self._scratch[name] = Vector(self.zeros())
            else:
                layout = widened(x.flat.layout, has_buffers=True)
                self._scratch[name] = Vector.of(FlatVector.zeros(layout, x.flat.raw.device))
        return self._scratch[name]

    @property
    def scratches(self) -> Mapping[str, Vector]:
        """The vectors of `scratch` so far, by name."""
        return self._scratch

    # For drivers.

    def fit(self, x: Vector, *, who: object = None) -> None:
        """Adapt all entries to the trained tensors and the device of x; called before each round.

        Args:
            x: the model.
            who: the algorithm, for the warning about changed tensors; None: no warning.
        """
        self._x, flat, devices, before = x, x.flat, [part.device for part in x.parts], self._devices
        if flat is not None and flat.layout is self._model_layout and devices == before:
            return
        layout = self.layout
        if flat is not None:
            if flat.layout != self._model_layout:  # with other buffers, at least
                self._scratch = {}
            self._model_layout, layout = flat.layout, layout_of(flat.layout)
        self._devices, is_moved, is_same = devices, before not in (None, devices), layout == self.layout
        if before is None or (is_same and not is_moved):
            self.layout = layout
            self._place_loaded()
            return
        has_new = flat is None or self.layout is None or bool(tensors_beyond(places_of(self.layout), flat))
        if who is not None and not is_moved and ((has_new and self.entries) or self._links):
            warnings.warn(
                f"{who}: other tensors are trained than before; the algorithm keeps its vectors for tensors that are "
                "still trained, and starts anew with all else",
                stacklevel=2,
            )
        old = copy.copy(self)
        self.layout, self._scratch, self._cached, self.entries, self.optimizers = layout, {}, {}, {}, {}
        self._links = {j: _moved(link, devices[0]) for j, link in self._links.items()} if is_same else {}
        self._carry_vectors([old])
        self._place_loaded()

    def _place_loaded(self) -> None:
        """Move a loaded state to the present trained tensors, if other tensors were trained when it was saved.

        So all entries of a state have the same places. A checkpoint from between a change of the trained tensors and
        the next round is loaded as the round would have gone on.
        """
        loaded, places = self._loaded, places_of(self.layout)
        if loaded.places not in (None, places):
            for name in list(loaded.vectors):
                self.vector(name, **loaded.policies.get(name, {}))
        for name, (theirs, state) in loaded.optimizers.items():
            if theirs not in (None, places):
                loaded.optimizers[name] = places, carried_state([(theirs, state)], places, self.zeros())

    def carry(self, x: Vector, old: Sequence[Memory], p: int) -> None:
        """Begin again with the tensors of x, and copy the values that other memories hold for them, after a new cut.

        Args:
            x: the vector.
            old: the memories of all fragments before; together they have each of their tensors once.
            p: the number of this fragment, whose counts go on.
        """
        self.units, self._inner = RateUnits(), None  # `old` has them
        self.restart()
        self.fit(x)
        self.num_rounds, self.units.rates = old[p].num_rounds, old[p].units.rates
        self.numbers = dict(old[p].numbers)
        self._carry_vectors(old)
        if any(memory.inner.layout is not None for memory in old):
            self.inner.carry(x, [memory.inner for memory in old], p)

    def _carry_vectors(self, old: Sequence[Memory]) -> None:
        places, missing = places_of(self.layout), list(self.missing)
        for name, entry in {name: entry for memory in old for name, entry in memory.entries.items()}.items():
            kept = [(places_of(m.layout), m.entries[name].vector.parts) for m in old if name in m.entries]
            new = self.vector(name, **entry.policies).parts
            carry([run for theirs, parts in kept for run in runs(theirs, parts)], runs(places, new))
        self.missing = missing
        for name in {name: 0 for memory in old for name in memory.optimizers}:
            states = [(places_of(m.layout), m.optimizers[name].state_dict()) for m in old if name in m.optimizers]
            self._loaded.optimizers[name] = places, carried_state(states, places, self.zeros())

    def release(self) -> None:
        """Drop the reference to the model of the last round."""
        self._x = None

    def new_tensors(self, x: FlatVector) -> list[Tensor]:
        """Return views of the parameters of x for which this memory has no values yet."""
        if x.layout is self._seen:
            return []
        known = places_of(self.layout) if self.entries else self._loaded.places
        new = [] if known is None else tensors_beyond(known, x)
        if not new:
            self._seen = x.layout
        return new

    def take(self, state: Mapping[str, Any]) -> None:
        """Load `state`, `state_dict(joins=True)` of another rank. Vectors with `join="zero"` keep their values."""
        own = {name: entry for name, entry in self.entries.items() if entry.policies["join"] == "zero"}
        inner, self._inner = self._inner, None
        self.load_state_dict(state)
        self.entries, self._inner = own, inner

    def scale(self, rates: Rates | None) -> None:
        """Scale the vectors in units of the learning rate to these rates; see `RateUnits`.

        `Over` scales the memory of the inner algorithm by `rates`, once that memory has the layout of the round.
        """
        if self.units.kept:
            self.units.put_back()
        if rates is not None and rates != self.units.rates:
            for name, policies in self._loaded.policies.items():
                if policies.get("in_units_of_rate"):
                    self.vector(name, **policies)
            vectors = [entry.vector for entry in self.entries.values() if entry.policies["in_units_of_rate"]]
            self.units.scale(vectors, rates, self.layout)
        self.rates = rates

    def check_vectors(self, *, of: object) -> None:
        """Raise ValueError if a loaded state has other vectors in place of some that the algorithm has asked for.

        Drivers call it before a round sends anything, and rounds that write vectors early before they write. The loaded
        state stays as it is.

        Args:
            of: the algorithm, for the error.
        """
        if self.missing and self._loaded.vectors:
            raise ValueError(
                f"{of}: got a state with the vectors {sorted(self._loaded.vectors)}, expected {self.missing} in their "
                "place: another version of the algorithm has saved it; continue with that version, or load the model "
                "alone: module.load_state_dict"
            )

    def count_tokens(self, num_tokens: int) -> None:
        """Count a step of this rank with `num_tokens` tokens."""
        for name, count in zip(COUNTED, (num_tokens, 1), strict=True):
            self.numbers[name] = self.numbers.get(name, 0) + count

    def end_round(self) -> None:
        """Count the end of a round."""
        self.num_rounds += 1
        self.put_back()

    def put_back(self) -> None:
        """Restore scaled vectors after a round or a cancelled round; see `RateUnits.put_back`."""
        if self.units.kept:
            self.units.put_back()
        if self._inner is not None:
            self._inner.put_back()

    def restart_inner(self) -> None:
        """Restart the memory of the inner algorithm as after an exact average of all models."""
        if self._inner is not None:
            self._inner.restart(Restart.AVERAGE)

    def turn_to(self, weights: str) -> None:
        """Note the description of new weights."""
        self.weights = weights
        if self._inner is not None:
            self._inner.turn_to(weights)

    # See `State`.

    def restart(self, event: Restart = Restart.ALL) -> None:
        """See `State`; also drops the vectors that begin anew, with their optimizers. See [Note: Sums over workers]."""
        gone = {name: entry.vector for name, entry in self.entries.items() if begins_anew(entry.policies, event)}
        self.entries = {name: entry for name, entry in self.entries.items() if name not in gone}
        self.optimizers = {
            name: kept for name, kept in self.optimizers.items() if all(kept.of is not x for x in gone.values())
        }
        if self._loaded.restart(event) or gone:
            self.num_rounds, self._loaded.optimizers = 0, {}
        if event is Restart.REQUEST:
            self._loaded.links = {}
        if event is Restart.GENERATION and self._has_passing_links:
            self._links = {}
        super().restart(event)

    def state_dict(self, *, joins: bool = False, has_links: bool = True) -> dict[str, Any]:
        """See `State`."""
        self.units.put_back()
        state: dict[str, Any] = super().state_dict(joins=joins, has_links=has_links)
        loaded, entries = self._loaded, self.entries
        if loaded.vectors:  # see `check_vectors`
            entries = {name: entry for name, entry in entries.items() if name not in self.missing}
        policies = {**loaded.policies, **{name: entry.policies for name, entry in entries.items()}}
        vectors = {**loaded.vectors, **{name: list(entry.vector.parts) for name, entry in entries.items()}}
        optimizers = {name: state for name, (_, state) in loaded.optimizers.items()}
        optimizers |= {name: optimizer.state_dict() for name, optimizer in self.optimizers.items()}
        is_bound = any(declared.get("of_weights") for declared in policies.values())
        if joins:
            left_out = [name for name, declared in policies.items() if is_of_one_worker(declared)]
            vectors = {name: vector for name, vector in vectors.items() if name not in left_out}
            optimizers = optimizers if vectors else {}
            state["num_rounds"] = 0 if left_out else self.num_rounds
        state |= {
            "policies": {name: dict(declared) for name, declared in policies.items() if name in vectors},
            "places": places_of(self.layout) if entries else loaded.places,
            "weights": (loaded.weights or self.weights) if is_bound else "",
            "vectors": vectors,
            "optimizers": optimizers,
            "links": {**loaded.links, **self._links} if has_links and not joins else {},
            "joins": joins,
        }
        state["version"] = VERSION if any(state[name] for name in ("vectors", "optimizers", "links")) else None
        return {name: value for name, value in state.items() if value or name == "num_rounds"}

    def entry_names(self) -> set[str]:
        """See `State`."""
        return {*super().entry_names(), *_ENTRIES}

    def check_state(self, state: Mapping[str, Any], *, of: object = None) -> None:
        """See `State`."""
        super().check_state(state, of=of)
        if "inner" in state and self._inner is None:
            Memory().check_state(state["inner"], of=f"the inner algorithm of {of}")

    def fill(self, state: Mapping[str, Any]) -> None:
        """See `State`. The next round checks the shapes of the vectors and uses them."""
        if "inner" in state and self._inner is None:
            self._inner = Memory(self.weights)
        super().fill(state)
        self._loaded = Loaded(state)

    def overwrite(self, state: Mapping[str, Any]) -> None:
        """Give the entries the values of `state`, a state of `state_dict()` with the present layout, in place.

        An optimizer that does not exist yet begins with its state.
        """
        for name, parts in state.get("vectors", {}).items():
            self.vector(name, **state["policies"][name]).set_(Vector(parts))
        for name, optimizer in state.get("optimizers", {}).items():
            if name in self.optimizers:
                self.optimizers[name].load_state_dict(optimizer)
            else:
                self._loaded.optimizers[name] = places_of(self.layout), optimizer
        self.numbers = dict(state.get("numbers", {}))

    def parts_of(self, name: str) -> Sequence[Tensor]:
        """Return the parts of the vector with this name, empty if there is no such vector; shares memory."""
        return self.entries[name].vector.parts if name in self.entries else self._loaded.vectors.get(name, ())

    # Parts.

    @property
    def _model(self) -> Vector:
        assert self._x is not None, "fit() comes first"
        return self._x


def _moved(kept: Any, device: torch.device) -> Any:
    """Move the tensors in a structure of numbers, tensors, dicts and lists to the device."""
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
    """Replace each tensor in a structure by its shape, and each number by the name of its type."""
    if isinstance(kept, Tensor):
        return tuple(kept.shape)
    if isinstance(kept, Mapping):
        return {name: _shapes(value) for name, value in kept.items()}
    return [_shapes(value) for value in kept] if isinstance(kept, list) else type(kept).__name__
