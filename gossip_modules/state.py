"""State: an object whose attributes are declared with their start and policies, as one branch of a tree of state.

    class Counters(State):
        t: int = leaf(0)
        steps: int = leaf(0, average="reset")
        thread: Thread | None = transient(None)

Attributes keep their usual speed. `state_dict`, `load_state_dict`, `restart` and copies follow from the declarations,
for the object and for its branches.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from enum import Enum
from typing import Any, ClassVar, Literal, TypeVar, cast

_T = TypeVar("_T")

VERSION = 1
"""The version of the layout of states; a state that was saved without a version has version 1."""


class Restart(Enum):
    """A reason for leaves to begin anew, as far as their policies say so; see `leaf`."""

    ALL = "all"
    """All leaves begin anew."""
    REQUEST = "request"
    """The user has set all ranks to one model, by an average for instance, and no workers come or go."""
    AVERAGE = "average"
    """An exact average of all models has taken place of a round, or workers come and go."""
    GENERATION = "generation"
    """Workers have joined or left."""


Average = Literal["keep", "reset", "on_request"]
Generation = Literal["keep", "reset"]
Join = Literal["copy", "zero"]

_RESTARTED: Mapping[Restart, Collection[tuple[str, str]]] = {
    Restart.REQUEST: {("average", "reset"), ("average", "on_request")},
    Restart.AVERAGE: {("average", "reset")},
    Restart.GENERATION: {("generation", "reset")},
}
_OF_ONE_WORKER = {("join", "zero"), ("generation", "reset")}


def begins_anew(policies: Mapping[str, Any], event: Restart) -> bool:
    """Whether a value with these policies begins anew after an event; see `leaf` for the policies."""
    return event is Restart.ALL or not policies.items().isdisjoint(_RESTARTED[event])


def is_of_one_worker(policies: Mapping[str, Any]) -> bool:
    """Whether a joining worker gets no copy of a value with these policies."""
    return not policies.items().isdisjoint(_OF_ONE_WORKER)


class Leaf:
    """The declaration of an attribute of a `State`; see `leaf` and `transient` for the arguments."""

    def __init__(
        self,
        start: Any,
        *,
        name: str = "",
        policies: Mapping[str, str] | None = None,
        is_saved: bool = True,
        is_copied: bool = True,
        is_needed: bool = False,
        is_by_peer: bool = False,
        save: Callable[[Any], Any] | None = None,
        load: Callable[[Any], Any] = copy.deepcopy,
    ) -> None:
        self._start, self.name = start, name
        self.policies = policies  # None: the attribute is transient
        self.is_saved, self.is_copied, self.is_needed, self.is_by_peer = is_saved, is_copied, is_needed, is_by_peer
        self.save, self.load = save, load

    def __set_name__(self, owner: type, name: str) -> None:
        self.attribute = name
        self.name = self.name or name.strip("_")

    def start(self) -> Any:
        """Return the first value, a new one for each call."""
        return copy.deepcopy(self._start)

    def begins_anew(self, event: Restart) -> bool:
        """Whether the attribute begins anew after an event."""
        return self.policies is not None and begins_anew(self.policies, event)

    def is_in_state(self, *, joins: bool, has_links: bool) -> bool:
        """Whether a state contains the attribute; see `State.state_dict` for the arguments."""
        is_left_out = joins and (self.is_by_peer or is_of_one_worker(self.policies or {}))
        return self.is_saved and not is_left_out and (has_links or not self.is_by_peer)


class Branch:
    """The declaration of an attribute of a `State` that is a part with a state of its own; see `branch`."""

    def __init__(self, *, name: str, is_flat: bool, is_needed: bool) -> None:
        self.name, self.is_flat, self.is_needed = name, is_flat, is_needed

    def __set_name__(self, owner: type, name: str) -> None:
        self.attribute = name
        self.name = self.name or name.strip("_")


def leaf(
    start: _T,
    *,
    name: str = "",
    average: Average = "keep",
    generation: Generation = "keep",
    join: Join = "copy",
    is_saved: bool = True,
    is_copied: bool = True,
    is_needed: bool = False,
    is_by_peer: bool = False,
    save: Callable[[Any], Any] | None = None,
    load: Callable[[Any], Any] = copy.deepcopy,
) -> _T:
    """Declare an attribute of a `State`: a number, a text, a tensor, or a structure of these.

    Args:
        start: the first value; each object gets a copy. A value of None is left out of states, and a value that a state
            lacks begins anew.
        name: the name in states; empty: the name of the attribute, without underscores around it.
        average: "keep" keeps the value after an exact average of all models, "reset" restarts it, and "on_request"
            restarts it only if the user asked for the average and no workers come or go.
        generation: whether the value is kept or restarts when workers join or leave. A joining worker gets no copy of a
            value that restarts.
        join: whether a joining worker gets a copy of the value, or starts a new one.
        is_saved: whether states contain the value.
        is_copied: whether a copy of the object has the value; else its copy begins with the first one.
        is_needed: whether states without the value, but with other ones, are refused.
        is_by_peer: whether the value is a dict by rank of a peer. Joining workers get no copy; see `State.renumber`.
        save: returns the saved form of the value; without it states share memory with the object.
        load: returns the value for a saved one.
    """
    policies = {"average": average, "generation": generation, "join": join}
    options = {"is_saved": is_saved, "is_copied": is_copied, "is_needed": is_needed, "is_by_peer": is_by_peer}
    return cast("_T", Leaf(start, name=name, policies=policies, save=save, load=load, **options))


def transient(start: _T) -> _T:
    """Declare an attribute that belongs to one object in one process, such as a thread, a stream or a buffer.

    States and copies of the object do not contain it, and no event changes it.

    Args:
        start: see `leaf`.
    """
    return cast("_T", Leaf(start, is_saved=False, is_copied=False))


def branch(*, name: str = "", is_flat: bool = False, is_needed: bool = False) -> Any:
    """Declare an attribute of a `State` that is a `State`, a list of them, or None.

    Args:
        name: see `leaf`.
        is_flat: whether the entries of the branch are among the entries of the object that has it.
        is_needed: see `leaf`.
    """
    return Branch(name=name, is_flat=is_flat, is_needed=is_needed)


def check_layout(state: Mapping[str, Any], known: Collection[str], *, of: object, needed: Collection[str] = ()) -> None:
    """Raise ValueError for a state that another version of the library has saved in another layout.

    Args:
        state: the state.
        known: the names of the entries that a state may have, besides its version.
        of: the owner of the state, for the error.
        needed: the names of the entries that it must have.
    """
    entries = state.keys() - {"version"}
    if state.get("version", VERSION) == VERSION and entries <= set(known) and entries >= set(needed):
        return
    raise ValueError(
        f"got a state of {of} of version {state.get('version', 'unknown')} with the entries {sorted(entries)}, "
        f"expected version {VERSION} with entries among {sorted(known)}: another version of gossip_modules has saved "
        "it; continue with that version, or load the model alone: module.load_state_dict"
    )


class State:
    """An object whose attributes are declared by `leaf`, `branch` and `transient`.

    Declared attributes exist before `__init__` of the subclass runs. Each event is one call on the root of the tree:
    `state_dict()` saves, `load_state_dict(state)` loads, `restart(event)` begins anew, `state_dict(joins=True)` is the
    state for a joining worker, and `copy.deepcopy` copies.

    [Note: Layout of states] A subclass may save entries in another layout than its attributes. `to_layout` makes that
    layout and `from_layout` reads it, also if an older version has saved it. All errors of a load are raised by
    `from_layout` and `check_state`, for the whole tree, before anything has changed.
    """

    _declared_leaves: ClassVar[tuple[Leaf, ...]] = ()
    _declared_branches: ClassVar[tuple[Branch, ...]] = ()

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        found = {name: value for base in reversed(cls.__mro__) for name, value in vars(base).items()}
        cls._declared_leaves = tuple(value for value in found.values() if isinstance(value, Leaf))
        cls._declared_branches = tuple(value for value in found.values() if isinstance(value, Branch))

    def __new__(cls, *args: Any, **options: Any) -> Any:
        """Make the object, with the first value of each declared attribute."""
        self = super().__new__(cls)
        vars(self).update({each.attribute: each.start() for each in cls._declared_leaves})
        vars(self).update({each.attribute: None for each in cls._declared_branches})
        return self

    # Events.

    def state_dict(self, *, joins: bool = False, has_links: bool = True) -> dict[str, Any]:
        """Return the state of the object and its branches; shares memory.

        Args:
            joins: whether the state is for a joining worker.
            has_links: whether the state contains values by peer. A worker with other peers cannot use them.
        """
        self.collect()
        state = {}
        for each in self._declared_leaves:
            value = getattr(self, each.attribute)
            if value is not None and each.is_in_state(joins=joins, has_links=has_links):
                state[each.name] = value if each.save is None else each.save(value)
        for declared, part in self._present_branches():
            saved = [x.state_dict(joins=joins, has_links=has_links) for x in _listed(part)]
            if declared.is_flat:
                state.update(*saved)
            else:
                state[declared.name] = saved if isinstance(part, list) else saved[0]
        return self.to_layout(state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a copy of a state of `state_dict()`; an empty state restarts the object.

        Raises:
            ValueError: the state does not belong to this object; nothing has changed then.
        """
        self.check_state(state)
        self.fill(state)

    def check_state(self, state: Mapping[str, Any], *, of: object = None) -> None:
        """Raise ValueError if `load_state_dict` would refuse a state; nothing changes.

        Args:
            state: the state.
            of: the owner of the state, for the error.
        """
        of = self if of is None else of
        state = {name: value for name, value in self.from_layout(state).items() if value is not None}
        if not state:
            return
        needed = [each.name for each in self._declared_leaves if each.is_needed]
        needed += [each.name for each in self._declared_branches if each.is_needed]
        check_layout(state, self.entry_names(), of=of, needed=needed)
        for part, saved in self._parts_of_state(state):
            part.check_state(saved, of=of)

    def fill(self, state: Mapping[str, Any]) -> None:
        """Load a state that `check_state` does not refuse; an empty state restarts the object."""
        self.interrupt()
        state = self.from_layout(state)
        for each in self._declared_leaves:
            if each.is_saved and state.get(each.name) is not None:
                setattr(self, each.attribute, each.load(state[each.name]))
            elif each.begins_anew(Restart.ALL):
                setattr(self, each.attribute, each.start())
        for part, saved in self._parts_of_state(state):
            part.fill(saved)
        self.restarted(Restart.ALL)

    def restart(self, event: Restart = Restart.ALL) -> None:
        """Restart the attributes with a policy for this event, here and in the branches.

        Args:
            event: the event; `Restart.ALL` restarts all attributes.
        """
        if event is Restart.ALL:
            self.interrupt()
        for each in self._declared_leaves:
            if each.begins_anew(event):
                setattr(self, each.attribute, each.start())
        for _, part in self._present_branches():
            for x in _listed(part):
                x.restart(event)
        self.restarted(event)

    def renumber(self, ranks: Mapping[int, int]) -> None:
        """Keep the values of these peers only, under new ranks.

        Args:
            ranks: the new rank of each peer, by its old rank.
        """
        for each in self._declared_leaves:
            if each.is_by_peer:
                values = getattr(self, each.attribute)
                setattr(self, each.attribute, {ranks[j]: value for j, value in values.items() if j in ranks})
        for _, part in self._present_branches():
            for x in _listed(part):
                x.renumber(ranks)

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes of a copy."""
        self.collect()
        left_out = {each.attribute for each in self._declared_leaves if not each.is_copied}
        return {name: value for name, value in vars(self).items() if name not in left_out}

    # For subclasses.

    def interrupt(self) -> None:
        """End work under way, before all attributes begin anew or are loaded."""

    def collect(self) -> None:
        """Bring attributes up to date, before a state or a copy is made of them."""

    def restarted(self, event: Restart) -> None:
        """Called after attributes have been restarted or loaded, here and in all branches.

        Args:
            event: the event; `Restart.ALL` after a load.
        """

    def to_layout(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return the saved form of a state: see [Note: Layout of states].

        Args:
            state: the entries, by name.
        """
        return state

    def from_layout(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the entries of a saved form, by name: see [Note: Layout of states].

        Args:
            state: the saved form, perhaps of an older version.
        """
        return state

    def entry_names(self) -> set[str]:
        """Return the names of the entries that a state may have."""
        names = {each.name for each in self._declared_leaves if each.is_saved}
        names |= {each.name for each in self._declared_branches if not each.is_flat}
        return names.union(*(part.entry_names() for each, part in self._present_branches() if each.is_flat))

    # Parts.

    def _present_branches(self) -> Iterator[tuple[Branch, Any]]:
        """Yield the branches that are not None."""
        for each in self._declared_branches:
            if (part := getattr(self, each.attribute)) is not None:
                yield each, part

    def _parts_of_state(self, state: Mapping[str, Any]) -> Iterator[tuple[State, Any]]:
        """Yield each branch with its part of a state, which is empty if the state has none."""
        for each, part in self._present_branches():
            if each.is_flat:
                yield part, {name: state[name] for name in part.entry_names() if name in state}
            else:
                saved = state.get(each.name) or ([{}] * len(part) if isinstance(part, list) else {})
                yield from zip(_listed(part), saved if isinstance(part, list) else [saved], strict=True)


def _listed(part: Any) -> Sequence[Any]:
    return part if isinstance(part, list) else [part]
