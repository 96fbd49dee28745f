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
from .loaded import VERSION, Loaded, PolicyItems, check_layout
from .outer_optimizer import OuterOptimizer, carried_state
from .rates import Rates, RateUnits
from .runs import carry, layout_of, places_of, runs, tensors_beyond
from .vector import Vector, wide, widened

_T = TypeVar("_T")
_ENTRIES = frozenset(
    (
        "num_rounds",
        "numbers",
        "policies",
        "places",
        "weights",
        "vectors",
        "optimizers",
        "links",
        "rates",
        "joins",
        "inner",
    )
)  # of a state
_OF_ONE_WORKER: PolicyItems = {("join", "zero"), ("generation", "reset")}  # of vectors that no joining worker gets


class Entry(NamedTuple):
    """A vector, and the arguments of `Memory.vector` that declared it."""

    vector: Vector
    policies: Mapping[str, Any]


class Memory:
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
    """

    def __init__(self, weights: str = "") -> None:
        self.num_rounds, self.weights = 0, weights
        self.layout: FlatLayout | None = None
        self.entries: dict[str, Entry] = {}
        self.optimizers: dict[str, OuterOptimizer] = {}
        self.units = RateUnits()
        self.rates: Rates | None = None
        self.numbers: dict[str, float] = {}
        self._x: Vector | None = None  # the model of the present round
        self._devices: list[torch.device] | None = None  # of its parts; None: there was no round yet
        self._model_layout: FlatLayout | None = None  # of the model, buffers included
        self._links: dict[int, dict[str, Any]] = {}
        self._has_passing_links = False  # of one generation; see `link`
        self._scratch: dict[str, Vector] = {}
        self._cached: dict[object, Any] = {}
        self._loaded = Loaded({})
        self._missing: list[str] = []  # new vectors that a loaded state with other vectors lacks
        self._seen: FlatLayout | None = None  # of a model without new tensors
        self._inner: Memory | None = None

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
                self._missing.append(name)
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
            self.optimizers[name] = OuterOptimizer(make, of)
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
        self.reset()
        self.fit(x)
        self.num_rounds, self.units = old[p].num_rounds, RateUnits(old[p].units.rates)
        self.numbers = dict(old[p].numbers)
        self._carry_vectors(old)
        if any(memory.inner.layout is not None for memory in old):
            self.inner.carry(x, [memory.inner for memory in old], p)

    def _carry_vectors(self, old: Sequence[Memory]) -> None:
        places, missing = places_of(self.layout), list(self._missing)
        for name, entry in {name: entry for memory in old for name, entry in memory.entries.items()}.items():
            kept = [(places_of(m.layout), m.entries[name].vector.parts) for m in old if name in m.entries]
            new = self.vector(name, **entry.policies).parts
            carry([run for theirs, parts in kept for run in runs(theirs, parts)], runs(places, new))
        self._missing = missing
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
        inner = self._inner
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

    @staticmethod
    def check(state: Mapping[str, Any], *, of: object) -> None:
        """Raise ValueError if `state` is no state of `state_dict()` of this version.

        Args:
            state: the state.
            of: the algorithm, for the error.
        """
        check_layout(state, _ENTRIES, of=of)
        if "inner" in state:
            Memory.check(state["inner"], of=f"the inner algorithm of {of}")

    def check_vectors(self, *, of: object) -> None:
        """Raise ValueError if a loaded state has other vectors in place of some that the algorithm has asked for.

        Drivers call it before a round sends anything, and a round that `writes_early` before it writes. The loaded
        state stays as it is.

        Args:
            of: the algorithm, for the error.
        """
        if self._missing and self._loaded.vectors:
            raise ValueError(
                f"{of}: got a state with the vectors {sorted(self._loaded.vectors)}, expected {self._missing} in their "
                "place: another version of the algorithm has saved it; continue with that version, or load the model "
                "alone: module.load_state_dict"
            )

    def count_tokens(self, num_tokens: int) -> None:
        """Count a step of this rank with `num_tokens` tokens."""
        for name, count in (("tokens", num_tokens), ("steps", 1)):
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

    def forget_models(self, *, is_asked: bool = True) -> None:
        """Restart vectors as declared by `average`, because all models have become equal.

        Args:
            is_asked: whether the user asked for the average and no workers come or go. Links then restart too.
        """
        if is_asked:
            self._links, self._loaded.links = {}, {}
        self._restart({("average", "reset"), *([("average", "on_request")] if is_asked else [])})
        self.forget_inner_models(is_asked=is_asked)

    def forget_inner_models(self, *, is_asked: bool = False) -> None:
        """Call `forget_models` for the memory of the inner algorithm alone, with this `is_asked`."""
        if self._inner is not None:
            self._inner.forget_models(is_asked=is_asked)

    def begin_generation(self, weights: str) -> None:
        """Restart vectors as declared by `generation`: workers have joined or left. See [Note: Sums over workers].

        Args:
            weights: the description of the new weights.
        """
        self._cached, self.weights = {}, weights
        if self._has_passing_links:
            self._links = {}
        self._restart({("generation", "reset")})
        if self._inner is not None:
            self._inner.begin_generation(weights)

    def renumber_links(self, ranks: Mapping[int, int]) -> None:
        """Keep these links only, under new ranks.

        Args:
            ranks: the new rank of each peer, by its old rank.
        """
        self._links = {ranks[peer]: link for peer, link in self._links.items() if peer in ranks}
        if self._inner is not None:
            self._inner.renumber_links(ranks)

    def forget_peer(self, peer: int) -> None:
        """Drop the state of the link to a peer."""
        self.renumber_links({other: other for other in self._links if other != peer})

    def reset(self) -> None:
        """Return to the state before the first round."""
        x, devices, layout = self._x, self._devices, self.layout
        self.__init__(self.weights)  # type: ignore[misc]
        self._x, self._devices, self.layout = x, devices, layout

    def state_dict(self, *, joins: bool = False, has_links: bool = True) -> dict[str, Any]:
        """Return the whole state; shares memory with this object.

        Args:
            joins: whether the state is for a joining worker. It then leaves out vectors with `join="zero"` or
                `generation="reset"`.
            has_links: whether the state contains links. A worker with other peers cannot use them.
        """
        self.units.put_back()
        loaded, entries = self._loaded, self.entries
        if loaded.vectors:  # see `check_vectors`
            entries = {name: entry for name, entry in entries.items() if name not in self._missing}
        policies = {**loaded.policies, **{name: entry.policies for name, entry in entries.items()}}
        vectors = {**loaded.vectors, **{name: list(entry.vector.parts) for name, entry in entries.items()}}
        optimizers = {name: state for name, (_, state) in loaded.optimizers.items()}
        optimizers |= {name: optimizer.state_dict() for name, optimizer in self.optimizers.items()}
        is_bound = any(declared.get("of_weights") for declared in policies.values())
        num_rounds = self.num_rounds
        if joins:
            left_out = [name for name, declared in policies.items() if declared.items() & _OF_ONE_WORKER]
            vectors = {name: vector for name, vector in vectors.items() if name not in left_out}
            num_rounds, optimizers = (0 if left_out else num_rounds), (optimizers if vectors else {})
        state = {
            "num_rounds": num_rounds,
            "numbers": dict(self.numbers),
            "policies": {name: dict(declared) for name, declared in policies.items() if name in vectors},
            "places": places_of(self.layout) if entries else loaded.places,
            "weights": (loaded.weights or self.weights) if is_bound else "",
            "vectors": vectors,
            "optimizers": optimizers,
            "links": {**loaded.links, **self._links} if has_links else {},
            "rates": self.units.rates,
            "joins": joins,
            "inner": None if self._inner is None else self._inner.state_dict(joins=joins, has_links=has_links),
        }
        state["version"] = VERSION if any(state[name] for name in ("vectors", "optimizers", "links")) else None
        return {name: value for name, value in state.items() if value or name == "num_rounds"}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a copy of a state of `state_dict()`. The next round checks its shapes and uses it."""
        self.reset()
        self._loaded = Loaded(state)
        self.num_rounds, self.units.rates = state.get("num_rounds", 0), state.get("rates")
        self.numbers = dict(state.get("numbers", {}))
        if "inner" in state:
            self.inner.load_state_dict(state["inner"])

    def overwrite(self, state: Mapping[str, Any]) -> None:
        """Give the entries the values of `state`, a state of `state_dict()` with the present layout, in place."""
        for name, parts in state.get("vectors", {}).items():
            self.vector(name, **state["policies"][name]).set_(Vector(parts))
        for name, optimizer in state.get("optimizers", {}).items():
            if name in self.optimizers:
                self.optimizers[name].load_state_dict(optimizer)
        self.numbers = dict(state.get("numbers", {}))

    def parts_of(self, name: str) -> Sequence[Tensor]:
        """Return the parts of the vector with this name, empty if there is no such vector; shares memory."""
        return self.entries[name].vector.parts if name in self.entries else self._loaded.vectors.get(name, ())

    # Parts.

    @property
    def _model(self) -> Vector:
        assert self._x is not None, "fit() comes first"
        return self._x

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_x": None, "_scratch": {}, "_cached": {}}  # a copy belongs to another model

    def _restart(self, policies: PolicyItems) -> None:
        """Drop the vectors with one of these policies and the optimizers that step them."""
        gone = {name: entry.vector for name, entry in self.entries.items() if entry.policies.items() & policies}
        self.entries = {name: entry for name, entry in self.entries.items() if name not in gone}
        self.optimizers = {
            name: kept for name, kept in self.optimizers.items() if all(kept.of is not x for x in gone.values())
        }
        if self._loaded.restart(policies) or gone:
            self.num_rounds, self._loaded.optimizers = 0, {}


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
