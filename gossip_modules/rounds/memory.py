"""Memory: the state of an algorithm from one round to the next, with checkpoints, moves and resets."""

from __future__ import annotations

import copy
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol, TypeVar, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..flat.layout import FlatLayout
from ..flat.vector import FlatVector
from .outer_optimizer import OuterOptimizer
from .rates import Rates, RateUnits
from .runs import Run, carry, layout_of, places_of, runs, tensors_beyond
from .vector import Vector, widened


class Kept(Protocol):
    """An object with a state that `Memory.keep` keeps beside vectors."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


_LOADED = ("vectors", "optimizers", "objects", "links", "policies", "places", "weights", "has_buffers")
_K = TypeVar("_K", bound=Kept)
_T = TypeVar("_T")


class _Entry(NamedTuple):
    """A vector, and the arguments of `Memory.vector` that declared it."""

    vector: Vector
    policy: Mapping[str, Any]


class Memory:
    """The state of an algorithm for one model: named vectors, optimizers, links and other objects.

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
        num_rounds: the number of rounds that have ended so far.
        weights: a description of the graph and its weights.
    """

    def __init__(self, weights: str = "") -> None:
        self.num_rounds, self.weights = 0, weights
        self._x: Vector | None = None  # the model of the present round
        self._devices: list[torch.device] | None = None  # of its parts; None: there was no round yet
        self._layout: FlatLayout | None = None  # of the parameters, widened
        self._scratch_layout: FlatLayout | None = None  # of the models that scratch vectors are like, buffers included
        self._entries: dict[str, _Entry] = {}
        self._optimizers: dict[str, OuterOptimizer] = {}
        self._objects: dict[str, Kept] = {}
        self._links: dict[int, dict[str, Any]] = {}
        self._scratch: dict[str, Vector] = {}
        self._cached: dict[object, Any] = {}
        self._loaded: dict[str, Any] = {}  # of a checkpoint, until an algorithm asks for it
        self._seen: FlatLayout | None = None  # of a model without new tensors
        self._units = RateUnits()
        self.rates: Rates | None = None  # of the round that runs
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
        entry = self._entries.get(name)
        if entry is None:
            policy = {
                "start": start,
                "average": average,
                "generation": generation,
                "join": join,
                "in_units_of_rate": in_units_of_rate,
                "of_weights": of_weights,
            }
            entry = self._entries[name] = _Entry(Vector(self.zeros()), policy)
            if start == "x":
                entry.vector.set_(self._model)
            if (state := self._loaded.get("vectors", {}).pop(name, None)) is not None:
                if of_weights:
                    self._check_weights(name)
                self._copy(name, entry.vector, state)
        return entry.vector

    @property
    def momentum(self) -> Vector:
        """The momentum of the user's SGD, if the algorithm `needs_sgd`; written into the optimizer after a round."""
        return self.vector("momentum", average="on_request")

    def optimizer(self, name: str, make: Callable[[Sequence[Tensor]], Optimizer], of: Vector) -> Optimizer | None:
        """Return the optimizer with this name; the first call creates it.

        Args:
            name: the name of the optimizer, also in checkpoints.
            make: makes the optimizer from the parts of the vector.
            of: the vector that the optimizer steps.

        Returns:
            The optimizer; None if the vector is empty.
        """
        if name not in self._optimizers:
            if not of.parts:
                return None
            self._optimizers[name] = OuterOptimizer(make, of)
            if (state := self._loaded.get("optimizers", {}).pop(name, None)) is not None:
                self._optimizers[name].load_state_dict(self._fitting(state, of))
        return self._optimizers[name].optimizer

    def keep(self, name: str, make: Callable[[], _K]) -> _K:
        """Return the object with this name; the first call creates it with `make`."""
        if name not in self._objects:
            self._objects[name] = make()
            if (state := self._loaded.get("objects", {}).pop(name, None)) is not None:
                self._objects[name].load_state_dict(state)
        return self._objects[name]  # type: ignore[return-value]

    def has(self, name: str) -> bool:
        """Whether a vector with this name exists here or in the checkpoint that was loaded."""
        return name in self._entries or name in self._loaded.get("vectors", {})

    def forget(self, name: str) -> None:
        """Drop the vector with this name, if it exists."""
        self._entries.pop(name, None)
        self._loaded.get("vectors", {}).pop(name, None)

    def link(
        self,
        peer: int,
        make: Callable[[], dict[str, Any]],
        *,
        unpack: Callable[[Tensor], dict[str, Any]] | None = None,
    ) -> dict[str, Any]:
        """Return the state of the link to a peer; the first call creates it. Both ends of a link restart together.

        Args:
            peer: the rank at the other end.
            make: returns the first state: numbers, tensors and lists of tensors, by name. Tensors keep their shapes.
            unpack: converts the bytes in a checkpoint of version 0.1.0.
        """
        if peer not in self._links:
            link = make()
            if (state := self._loaded.get("links", {}).pop(peer, None)) is not None:
                state = unpack(state) if isinstance(state, Tensor) and unpack is not None else state
                _check_link(link, state)
                link = state
            self._links[peer] = link
        return self._links[peer]

    def cached(self, key: object, make: Callable[[], _T]) -> _T:
        """Return a value that depends on the trained tensors, their device, the rank and the weights only.

        `make` is called once, and again after one of these has changed. Checkpoints do not contain the value.
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
        return [
            torch.zeros_like(x, dtype=x.dtype if x.element_size() >= 4 else torch.float32) for x in self._model.parts
        ]

    def scratch(self, name: str = "sent") -> Vector:
        """Return a vector whose values are undefined at the beginning of a round. `Mix` accepts it."""
        if name not in self._scratch:
            x = self._model
            if x.flat is None:
                self._scratch[name] = Vector(self.zeros())
            else:
                layout = widened(x.flat.layout, has_buffers=True)
                self._scratch[name] = Vector.of(FlatVector.zeros(layout, x.flat.raw.device))
        return self._scratch[name]

    # For drivers.

    def fit(self, x: Vector, *, who: object = None) -> None:
        """Adapt all entries to the trained tensors and the device of x; called before each round.

        Args:
            x: the model.
            who: the algorithm, for the warning about changed tensors; None: no warning.
        """
        self._x, devices = x, [part.device for part in x.parts]
        if x.flat is not None and x.flat.layout is self._scratch_layout and devices == self._devices:
            return
        if x.flat is not None and x.flat.layout != self._scratch_layout:  # with other buffers, at least
            self._scratch = {}
        self._scratch_layout = None if x.flat is None else x.flat.layout
        before, self._devices = self._devices, devices
        layout = self._layout if x.flat is None else layout_of(x.flat)
        is_moved = before is not None and before != self._devices
        if before is not None and layout == self._layout and not is_moved:
            return
        old = copy.copy(self)
        old._inner = None  # it stays, and is fitted in the next round
        self._layout = layout
        if before is None:
            return
        has_new = x.flat is None or old._layout is None or bool(tensors_beyond(places_of(old._layout), x.flat))
        starts_anew = (has_new and bool(self._entries)) or bool(self._objects or self._links)
        if who is not None and not is_moved and starts_anew:
            warnings.warn(
                f"{who}: other tensors are trained than before; the algorithm keeps its vectors for tensors that are "
                "still trained, and starts anew with all else",
                stacklevel=2,
            )
        is_same = is_moved and layout == old._layout  # on another device
        self._scratch, self._cached = {}, {}
        self._links = {j: _moved(link, x.parts[0].device) for j, link in self._links.items()} if is_same else {}
        self._objects = self._objects if is_same else {}
        self._entries, self._optimizers = {}, {}
        self.carry([old])

    def carry(self, old: Sequence[Memory]) -> None:
        """Copy the values that other memories hold for the tensors of this one, for example after a new cut.

        Args:
            old: the memories of all fragments before; together they have each of their tensors once.
        """
        self.num_rounds = old[0].num_rounds
        for name, entry in old[0]._entries.items():
            new = self.vector(name, **entry.policy)
            carry([run for m in old for run in m._runs(m._entries[name].vector.parts)], self._runs(new.parts))
        for name, (memory, before) in {n: (m, o) for m in reversed(old) for n, o in m._optimizers.items()}.items():
            key = next(key for key, entry in memory._entries.items() if entry.vector is before.of)
            if self.optimizer(name, before.make, self._entries[key].vector) is None:
                continue
            own = self._optimizers[name]
            own.go_on_as(before)
            for state in before.vector_states():
                kept = [(m, m._optimizers[name]) for m in old if name in m._optimizers]
                runs = [run for m, optimizer in kept for run in m._runs(optimizer.state_of(state))]
                carry(runs, self._runs(own.state_of(state)))
        self._units.rates = old[0]._units.rates
        if inner := [m._inner for m in old if m._inner is not None and m._inner._devices is not None]:
            self.inner.fit(self._model)
            self.inner.carry(inner)

    def _runs(self, parts: Sequence[Tensor]) -> list[Run]:
        return runs(places_of(self._layout), parts)

    def release(self) -> None:
        """Drop the reference to the model of the last round."""
        self._x = None

    def new_tensors(self, x: FlatVector) -> list[Tensor]:
        """Return views of the parameters of x for which this memory has no values yet."""
        if x.layout is self._seen:
            return []
        known = places_of(self._layout) if self._entries else self._loaded.get("places")
        new = [] if known is None else tensors_beyond(known, x)
        if not new:
            self._seen = x.layout
        return new

    def take(self, state: Mapping[str, Any]) -> None:
        """Take over `state_dict(joins=True)` of another rank. Vectors with `join="zero"` keep their values."""
        own = {n: [x.clone() for x in e.vector.parts] for n, e in self._entries.items() if e.policy["join"] == "zero"}
        own = own if state.get("places") == places_of(self._layout) else {}
        inner = self._inner
        self.load_state_dict({**state, "vectors": {**state.get("vectors", {}), **own}})
        self._inner = inner

    def scale(self, rates: Rates | None) -> None:
        """Scale the vectors in units of the learning rate to these rates; see `RateUnits`.

        `Over` scales the memory of the inner algorithm by `rates`, once that memory has the layout of the round.
        """
        self._units.put_back()
        if rates is not None:
            for name, policy in self._loaded.get("policies", {}).items():
                if policy["in_units_of_rate"]:
                    self.vector(name, **policy)
            vectors = [entry.vector for entry in self._entries.values() if entry.policy["in_units_of_rate"]]
            self._units.scale(vectors, rates, self._layout)
        self.rates = rates

    def end_round(self) -> None:
        """Count a round that has ended."""
        self.num_rounds += 1
        self.put_back()

    def put_back(self) -> None:
        """Restore scaled vectors after a round or a cancelled round; see `RateUnits.put_back`."""
        if self._units.kept:
            self._units.put_back()
        if self._inner is not None:
            self._inner.put_back()

    def forget_models(self, *, is_asked: bool = True) -> None:
        """Restart vectors as declared by `average`, because all models have become equal.

        Args:
            is_asked: whether the user asked for the average and no workers come or go. Links then restart too.
        """
        if is_asked:
            self._links = {}
            self._loaded.pop("links", None)
        kinds = ("reset", "on_request") if is_asked else ("reset",)
        self._reset(lambda policy: policy["average"] in kinds)
        self.forget_inner_models(is_asked=is_asked)

    def forget_inner_models(self, *, is_asked: bool = False) -> None:
        """Do the same as `forget_models` for the memory of the inner algorithm alone."""
        if self._inner is not None:
            self._inner.forget_models(is_asked=is_asked)

    def begin_generation(self, weights: str) -> None:
        """Restart vectors as declared by `generation`: workers have joined or left. See [Note: Sums over workers]."""
        self._cached, self.weights = {}, weights
        self._reset(lambda policy: policy["generation"] == "reset")
        if self._inner is not None:
            self._inner.begin_generation(weights)

    def forget_peer(self, peer: int) -> None:
        """Drop the state of the link to a peer."""
        self._links.pop(peer, None)
        if self._inner is not None:
            self._inner.forget_peer(peer)

    def renumber_links(self, ranks: Mapping[int, int]) -> None:
        """Keep these links only, under new ranks.

        Args:
            ranks: the new rank of each peer, by its old rank.
        """
        self._links = {ranks[peer]: link for peer, link in self._links.items() if peer in ranks}
        if self._inner is not None:
            self._inner.renumber_links(ranks)

    def reset(self) -> None:
        """Return to the state before the first round."""
        x, devices, layout = self._x, self._devices, self._layout
        self.__init__(self.weights)  # type: ignore[misc]
        self._x, self._devices, self._layout = x, devices, layout

    def state_dict(self, *, joins: bool = False, has_links: bool = True) -> dict[str, Any]:
        """Return the whole state; shares memory with this object.

        Args:
            joins: whether the state is for a joining worker. It then leaves out vectors with `join="zero"` or
                `generation="reset"`.
            has_links: whether the state contains links. A worker with other peers cannot use them.
        """
        self._units.put_back()
        policies = {**self._loaded.get("policies", {}), **{name: e.policy for name, e in self._entries.items()}}
        vectors = {
            **self._loaded.get("vectors", {}),
            **{name: list(e.vector.parts) for name, e in self._entries.items()},
        }
        num_rounds, optimizers, places = self.num_rounds, self._optimizers, None
        if joins:
            left_out = [name for name, p in policies.items() if p["join"] == "zero" or p["generation"] == "reset"]
            vectors = {name: vector for name, vector in vectors.items() if name not in left_out}
            num_rounds, optimizers = (0 if left_out else num_rounds), (optimizers if vectors else {})
            places = places_of(self._layout) if self._entries else self._loaded.get("places")
        state = {
            "num_rounds": num_rounds,
            "policies": {name: dict(policy) for name, policy in policies.items() if name in vectors},
            "places": places,
            "weights": self._weights_of(policies.values()),
            "vectors": vectors,
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
            "inner": None if self._inner is None else self._inner.state_dict(joins=joins, has_links=has_links),
        }
        return {name: value for name, value in state.items() if value or name == "num_rounds"}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a copy of a state of `state_dict()`. The next round checks its shapes and uses it."""
        self.reset()
        self._loaded = copy.deepcopy({name: state[name] for name in _LOADED if name in state})
        self.num_rounds = state.get("num_rounds", 0)
        self._units.rates = state.get("rates")
        if "inner" in state:
            self.inner.load_state_dict(state["inner"])

    def parts_of(self, name: str) -> Sequence[Tensor]:
        """Return the parts of the vector with this name, empty if there is no such vector; shares memory."""
        if name in self._entries:
            return self._entries[name].vector.parts
        return self._loaded.get("vectors", {}).get(name, ())

    # Parts.

    @property
    def _model(self) -> Vector:
        assert self._x is not None, "fit() comes first"
        return self._x

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_x": None, "_scratch": {}, "_cached": {}}  # a copy belongs to another model

    def _reset(self, is_reset: Callable[[Mapping[str, Any]], bool]) -> None:
        gone = [name for name, entry in self._entries.items() if is_reset(entry.policy)]
        vectors = {id(self._entries[name].vector) for name in gone}
        self._optimizers = {n: kept for n, kept in self._optimizers.items() if id(kept.of) not in vectors}
        for name in gone:
            del self._entries[name]
        loaded = self._loaded.get("vectors", {})
        gone += [name for name, policy in self._loaded.get("policies", {}).items() if is_reset(policy)]
        for name in gone:
            loaded.pop(name, None)
            self._loaded.get("policies", {}).pop(name, None)
        if gone:
            self.num_rounds = 0
            self._loaded.pop("optimizers", None)

    def _weights_of(self, policies: Iterable[Mapping[str, Any]]) -> str:
        is_bound = any(policy.get("of_weights", False) for policy in policies)
        return self._loaded.get("weights", self.weights) if is_bound else ""

    def _check_weights(self, name: str) -> None:
        if (found := self._loaded.get("weights", self.weights)) != self.weights:
            raise ValueError(
                f"got the state of vector {name!r} on {found}, expected {self.weights}, since it is a sum over rounds "
                "with the same peers and weights; resume on the same graph"
            )

    def _copy(self, name: str, vector: Vector, state: Sequence[Tensor]) -> None:
        if (theirs := self._loaded.get("places")) is not None:  # the donor may have trained other tensors
            carry(runs(theirs, state), self._runs(vector.parts))
            return
        if self._loaded.get("has_buffers") and len(state) == len(vector.parts):  # vectors of 0.1.0 end in buffers
            state = [x[: part.numel()] for x, part in zip(state, vector.parts, strict=True)]
        state, parts = ([x for x in side if x.numel()] for side in (state, vector.parts))
        found, own = [x.numel() for x in state], [x.numel() for x in parts]
        if found != own:
            raise ValueError(
                f"got the state of vector {name!r} with {found} elements, expected {own}: other tensors were trained "
                "when it was saved; freeze the same parameters, or load the model alone: module.load_state_dict"
            )
        for mine, theirs in zip(parts, state, strict=True):
            mine.copy_(theirs)

    def _fitting(self, state: Mapping[str, Any], of: Vector) -> Mapping[str, Any]:
        """Convert the state of a donor's optimizer, which may have trained other tensors, to the tensors of `of`."""
        theirs, mine = self._loaded.get("places"), places_of(self._layout)
        if theirs is None or theirs == mine:
            return state
        kept, sizes = state["state"], Counter[int]()
        for _, _, part, _, numel in theirs:
            sizes[part] += numel
        moved: dict[int, dict[str, Any]] = {k: {} for k in range(len(of.parts))}
        for name in kept[min(kept)] if kept else ():
            values = [kept[k][name] for k in sorted(kept)]
            is_vector = all(isinstance(x, Tensor) and x.numel() == sizes[k] for k, x in enumerate(values))
            new = [torch.zeros_like(part) for part in of.parts]
            if is_vector:
                carry(runs(theirs, values), runs(mine, new))
            for k, part in enumerate(new):
                moved[k][name] = part if is_vector else copy.deepcopy(values[0])
        groups = [{**group, "params": list(moved)} for group in state["param_groups"][:1]]
        return {**state, "state": moved if kept else {}, "param_groups": groups}


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
