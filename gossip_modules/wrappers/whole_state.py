"""The extra state of a wrapper as other tools keep it: a method's state as one value, the rank as a tensor."""

from __future__ import annotations

import copy
import zlib
from collections import OrderedDict
from collections.abc import ItemsView, Iterator, KeysView, Mapping, ValuesView
from typing import Any

import torch
from torch import Tensor

_BITS = 21  # of a rank, of a number of ranks, and of a digest


class WholeState:
    """A state as one value: read like a dict, but no `Mapping`.

    Tools that keep a value per key, as torch.distributed.checkpoint does, load the keys that the state has before
    loading. What a method keeps grows while it trains, so that of a new wrapper they would leave most out. They do not
    look into this object, and so load it whole. A pickle of it is that of an OrderedDict, which `torch.load` with
    `weights_only=True` takes.

    Args:
        values: the state; shared.
    """

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = dict(values)

    def __getitem__(self, key: str) -> Any:
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, key: object) -> bool:
        return key in self._values

    def __eq__(self, other: object) -> bool:
        return self._values == (other._values if isinstance(other, WholeState) else other)

    def __repr__(self) -> str:
        return repr(self._values)

    def keys(self) -> KeysView[str]:
        """As of a dict; so are the other methods."""
        return self._values.keys()

    def values(self) -> ValuesView[Any]:
        """The values."""
        return self._values.values()

    def items(self) -> ItemsView[str, Any]:
        """The pairs."""
        return self._values.items()

    def get(self, key: str, default: Any = None) -> Any:
        """The value of the key, or another one."""
        return self._values.get(key, default)

    def __deepcopy__(self, memo: dict[int, Any]) -> WholeState:
        return WholeState(copy.deepcopy(self._values, memo))

    def __reduce__(self) -> Any:
        return OrderedDict, (), None, None, iter(self._values.items())


def plain(state: Any) -> Any:
    """A dict whose values may be `WholeState` as one of dicts; shares memory."""
    if isinstance(state, WholeState):
        return dict(state.items())
    return {key: plain(value) if isinstance(value, WholeState) else value for key, value in state.items()}


def place_tensor(rank: int, world_size: int, state: Any = None) -> Tensor:
    """A rank, the number of ranks and a digest of the state in one int64 [1], which any tool keeps."""
    number = (rank << _BITS | world_size) << _BITS | digest_of(state)
    return torch.tensor([number], dtype=torch.int64, device="cpu")


def place_of(tensor: Tensor) -> dict[str, int]:
    """The rank and the number of ranks that `place_tensor` was given."""
    rank, world_size = divmod(int(tensor) >> _BITS, 1 << _BITS)
    return {"rank": rank, "world_size": world_size}


def belongs_to(tensor: Tensor, state: Any) -> bool:
    """Whether `place_tensor` was given this state, or one whose numbers, texts and shapes are the same."""
    return int(tensor) & (1 << _BITS) - 1 == digest_of(state)


def digest_of(state: Any) -> int:
    """A number below 2**21 that depends on all keys, numbers, texts and shapes in a state, such as its rounds."""
    return zlib.crc32(repr(_outline(state)).encode()) >> 32 - _BITS


def _outline(state: Any) -> Any:
    """The state with the shapes of its tensors in their place, and lists for all that has entries."""
    if isinstance(state, Tensor):
        return list(state.shape)
    if isinstance(state, Mapping | WholeState):
        return [[repr(key), _outline(value)] for key, value in state.items()]
    if isinstance(state, list | tuple):
        return [_outline(value) for value in state]
    return state if isinstance(state, bool | int | float | str) else None
