"""Extra state that rides in a state dict's metadata, so that its keys are the plain module's own."""

from __future__ import annotations

import warnings
import weakref
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..engine.engine import Engine
from ..flat.buffer import FlatBuffer
from .optimizer_steps import OptimizerSteps
from .weights.copies import WeightCopies
from .whole_state import WholeState, belongs_to, place_of, place_tensor, plain

KEY = "gossip_state"
_SUFFIX = "_extra_state"  # torch's own


def check_prefix(
    state_dict: Mapping[str, Any], prefix: str, module: nn.Module, *, wrapper: str, is_stateless: bool = False
) -> None:
    """Refuse the state dict of a plain module, none of whose keys a wrapper has.

    Args:
        state_dict: about to be loaded.
        prefix: of the wrapper's keys in it.
        module: in the wrapper.
        wrapper: the name of its class.
        is_stateless: whether it keeps nothing of the model from step to step.

    Raises:
        RuntimeError: as torch does for other keys that do not fit; nothing is changed then.
    """
    if any(key.startswith(f"{prefix}module.") for key in state_dict):
        return
    then = "" if is_stateless else " and wrapper.set_extra_state(None), so that nothing of another model is kept"
    for name, _ in (*module.named_parameters(), *module.named_buffers()):
        if prefix + name in state_dict:
            raise RuntimeError(
                f"got the state dict of a plain module, with the key '{prefix}{name}', to load into a {wrapper}, "
                f"expected that of a wrapper, with '{prefix}module.{name}'; load it into the module: call "
                f"wrapper.settle() on every rank, then wrapper.module.load_state_dict(...){then}"
            )


def warn_stateless() -> None:
    """Say that a state dict has no state of gossip."""
    warnings.warn(
        "the state dict holds no gossip state: counting rounds from 0. It is that of a plain model, or one without its "
        "metadata, as torch.distributed.checkpoint makes it",
        stacklevel=3,
    )


class RoundState(nn.Module):
    """The state of a wrapper between two forwards: the round counter, the algorithm's own state, and whose it is.

    [Note: Where the state is] torch would put `get_extra_state()` under the key "_extra_state". It is in the metadata
    of the state dict instead, which travels with the dict through `torch.save` and `torch.load(weights_only=True)`. So
    a wrapper loads the checkpoints of DistributedDataParallel; a dict without metadata stands for
    `set_extra_state(None)`. Under that key is an int64 tensor [1] with the rank and the number of ranks, if there are
    several: tools that drop the metadata keep it, so that the file of another rank is refused. With a membership there
    is no such key. It has a digest of the state as well: a tool that loads tensors into the state dict of a wrapper, as
    torch.distributed.checkpoint does, leaves the state that was there, which then counts as none.
    """

    _engine: Engine
    _copies: WeightCopies | None
    _steps: OptimizerSteps
    _place: tuple[int, int] | None  # rank and world size, where there are such

    @abstractmethod
    def flush(self) -> None:
        """Apply everything in flight."""

    @abstractmethod
    def _set_out(self) -> None:
        """Training begins, with the model as it is now."""

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As `nn.Module.state_dict`, flushed and de-biased; gossip state rides in its metadata.

        Among several ranks the key "_extra_state" says whose it is: int64 [1].
        """
        self.flush()
        return super().state_dict(*args, **kwargs)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if hasattr(destination, "_metadata"):  # a plain dict of the caller has none: there the key stays
            state = plain(destination.pop(prefix + _SUFFIX))
            destination._metadata[prefix[:-1]][KEY] = state
            self.put_place(destination, prefix, state)

    def put_place(self, destination: dict[str, Any], prefix: str, state: dict[str, Any]) -> None:
        """Say in the keys of a state dict whose it is, among several ranks, and which state belongs to it."""
        if self._own_place is not None and self._own_place[1] > 1:
            destination[prefix + _SUFFIX] = place_tensor(*self._own_place, state)

    def take_place(self, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any]) -> None:
        """Remove that key, where it is there; and from the metadata a state that does not belong to the tensors.

        Raises:
            ValueError: it is the state dict of another rank, or of a world of another size.
        """
        if isinstance(place := state_dict.get(prefix + _SUFFIX), Tensor):
            self._check_place(place_of(place))
            del state_dict[prefix + _SUFFIX]
            if not belongs_to(place, local_metadata.get(KEY)):
                local_metadata.pop(KEY, None)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: Any, *args: Any, **kwargs: Any
    ) -> None:
        self.take_place(state_dict, prefix, local_metadata)
        if state_dict.setdefault(prefix + _SUFFIX, local_metadata.get(KEY)) is None:
            warn_stateless()
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args, **kwargs)

    def get_extra_state(self) -> dict[str, Any]:
        """The round counter, the algorithm's own state, and the rank: plain values and tensors.

        "engine", the algorithm's own state, is read like a dict; tools that keep a value per key keep it as one.
        """
        place = {} if self._place is None else dict(zip(("rank", "world_size"), self._place, strict=True))
        copies = {} if self._copies is None else self._copies.state_dict()
        engine = WholeState(self._engine.state_dict())
        return {**self._steps.state_dict(), "engine": engine, **copies, **place}

    def set_extra_state(self, state: dict[str, Any] | None) -> None:
        """Take back what `get_extra_state` gave; None starts anew, as after loading other weights into the module.

        Raises:
            ValueError: it is the state of another rank, or of a world of another size; nothing is changed then.
        """
        if state is None:
            self._steps.end()
            if self._copies is not None:
                self._copies.load_state_dict({})
            self._engine.reset()
            self._set_out()
            return
        self._check_place(state)
        self._steps.load_state_dict(state)
        self._engine.load_state_dict(plain(state["engine"]))
        if self._copies is not None:
            self._copies.load_state_dict(state)

    @property
    def _own_place(self) -> tuple[int, int] | None:
        """The rank and the world size that the state belongs to."""
        return self._place

    def _check_place(self, state: Mapping[str, Any]) -> None:
        """Each rank has a model, a push-sum weight and an algorithm's state of its own."""
        found = state.get("rank"), state.get("world_size")
        if self._own_place is not None and found != self._own_place and found != (None, None):
            (rank, world_size), (own, own_size) = found, self._own_place
            raise ValueError(
                f"got the state of rank {rank} of {world_size}, expected that of rank {own} of {own_size}: every rank "
                "has a model of its own, so each loads what it has saved itself, with as many ranks as then (of one "
                "key, torch.distributed.checkpoint keeps the tensor of one rank: give each rank a key of its own); to "
                "start from one model everywhere, save averaged_state_dict() and load it into the module before it is "
                "wrapped"
            )


class WeightState(RoundState):
    """The state of a wrapper with a push-sum weight, which is 1 in other algorithms."""

    _buffer: FlatBuffer
    _graph: str | None  # that rounds are on; None with a membership, where it follows the number of workers
    _was_on_a_ring: bool  # see `Algorithm.was_on_a_ring`

    def get_extra_state(self) -> dict[str, Any]:
        """See `RoundState`; with the push-sum weight, and the graph that rounds were on.

        The graph is None with a membership, where each number of workers has its own.
        """
        weight = self._buffer.vector.push_sum_weight.clone()
        return {"weight": weight, "graph": self._graph, **super().get_extra_state()}

    def set_extra_state(self, state: dict[str, Any] | None) -> None:
        """See `RoundState`; without state the push-sum weight is 1.

        Warns where ranks may have mixed on another graph when the state was saved, by an older version; all is loaded
        by then. With a membership it does not: which graph it was depends on how many workers there were.

        Raises:
            ValueError: the state is that of a wrapper of another kind.
        """
        if state is not None and "weight" not in state:
            raise ValueError(
                f"got gossip state without a push-sum weight, expected that of a {type(self).__name__} or its like; "
                "wrap as when it was saved, or load the model alone: module.load_state_dict"
            )
        super().set_extra_state(state)
        self._buffer.vector.push_sum_weight.copy_(torch.ones(1, device="cpu") if state is None else state["weight"])
        if state is not None and "graph" not in state and self._was_on_a_ring:
            warnings.warn(
                f"got a checkpoint of an older version, where ranks mixed on a ring if no graph was named; now it is "
                f"{self._graph}, on which models stay closer to each other. The run goes on "
                'with that; to go on with the ring: graph="ring"',
                stacklevel=2,
            )


class InnerPlace:
    """A hook of the module inside a wrapper, for state dicts of the wrapper whose keys were cut to those of the module.

    It removes the key that says whose the state dict is, which the module does not know. A pickle of the module is free
    of it, and needs this library no more than before.

    Args:
        wrapper: around the module, or gone.
    """

    def __init__(self, wrapper: RoundState) -> None:
        self._wrapper = weakref.ref(wrapper)

    def __call__(
        self, module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], *args: Any
    ) -> None:
        """Called before `load_state_dict` of the module.

        Raises:
            ValueError: it is the state dict of another rank, or of a world of another size.
        """
        if keeps_extra_state(module):
            return
        if (wrapper := self._wrapper()) is not None:
            wrapper.take_place(state_dict, prefix, local_metadata)
        elif isinstance(state_dict.get(prefix + _SUFFIX), Tensor):
            del state_dict[prefix + _SUFFIX]

    def __deepcopy__(self, memo: dict[int, Any]) -> InnerPlace:
        return self

    def __reduce__(self) -> Any:
        return getattr, ("", "format")  # takes any arguments, does nothing, and is there in every process


def keeps_extra_state(module: nn.Module) -> bool:
    """Whether the class of the module puts something of its own under the key "_extra_state"."""
    return type(module).get_extra_state is not nn.Module.get_extra_state
