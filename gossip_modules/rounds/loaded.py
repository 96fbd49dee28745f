"""Loaded: the state of a memory in a checkpoint, until an algorithm asks for its entries."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from ..state import Restart, begins_anew
from .runs import Places, carry, runs, sizes_of


class Loaded:
    """A copy of the state that `Memory.state_dict` returned, in this process or in another one.

    Args:
        state: the state; empty: nothing was loaded.

    Attributes:
        vectors, optimizers, links: the entries that no algorithm has asked for. An optimizer is the places of its
            tensors, None if they are not known, and its state.
        policies: for each vector the arguments of `Memory.vector`; arguments with their default value may be missing.
        places: the places of the tensors in vectors; None: not known.
        weights: the graph and the weights of that rank; None: not known.
    """

    def __init__(self, state: Mapping[str, Any]) -> None:
        names = ("vectors", "optimizers", "links", "policies", "places", "weights", "joins")
        state = copy.deepcopy({name: state[name] for name in names if name in state})
        self.vectors: dict[str, Sequence[Tensor]] = state.get("vectors", {})
        self.links: dict[int, Any] = state.get("links", {})
        self.policies: dict[str, Mapping[str, Any]] = state.get("policies", {})
        self.places: Places | None = state.get("places")
        self.weights: str | None = state.get("weights")
        self.optimizers: dict[str, tuple[Places | None, Mapping[str, Any]]] = {
            name: (self.places, optimizer) for name, optimizer in state.get("optimizers", {}).items()
        }
        self._joins = state.get("joins", False)

    def copy_to(self, name: str, parts: Sequence[Tensor], places: Places | None) -> None:
        """Copy the values of the vector with this name, if there is one, and drop it here.

        Layers may have been frozen since the state was saved. A donor may also train fewer tensors than this worker.

        Args:
            name: the name of the vector.
            parts: the parts of the vector, mutated.
            places: the places of their tensors.

        Raises:
            ValueError: a checkpoint lacks tensors of the vector, or has them with other sizes.
        """
        if (state := self.vectors.pop(name, None)) is None:
            return
        if self.places is not None and (self._joins or sizes_of(places).items() <= sizes_of(self.places).items()):
            carry(runs(self.places, state), runs(places, parts))
            return
        theirs, mine = ([x for x in side if x.numel()] for side in (state, parts))
        found, own = [x.numel() for x in theirs], [x.numel() for x in mine]
        if found != own or self.places is not None:
            raise ValueError(
                f"got the state of vector {name!r} with {found} elements, expected {own}: other tensors were trained "
                "when it was saved; freeze the same parameters before you wrap the model, but after the load those "
                "that were frozen after its last round, or load the model alone: module.load_state_dict"
            )
        for x, value in zip(mine, theirs, strict=True):
            x.copy_(value)

    def check_weights(self, name: str, weights: str) -> None:
        """Raise ValueError if the vector with this name was saved with other peers or weights."""
        if name in self.vectors and (self.weights or weights) != weights:
            raise ValueError(
                f"got the state of vector {name!r} on {self.weights}, expected {weights}, since it is a sum over "
                "rounds with the same peers and weights; resume on the same graph"
            )

    def restart(self, event: Restart) -> bool:
        """Drop the vectors that begin anew after an event; returns whether there were any."""
        gone = [name for name, policies in self.policies.items() if begins_anew(policies, event)]
        for name in gone:
            del self.policies[name]
            self.vectors.pop(name, None)
        return bool(gone)
