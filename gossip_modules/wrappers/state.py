"""The state of a wrapper in a state dict, which keeps the keys of the plain module.

[Note: Where the state is] torch would put `get_extra_state()` under the key "_extra_state". It is in the metadata of
the state dict instead, which goes with the dict through `torch.save` and `torch.load(weights_only=True)`. So a wrapper
loads the checkpoints of DistributedDataParallel; a dict without metadata stands for `set_extra_state(None)`. Under that
key is an int64 tensor [2] with the rank and the number of ranks, if there are several: tools that drop the metadata
keep it, so that the file of another rank is refused. With a membership there is no such key. The tensor has a digest of
the state as well: a tool that loads tensors into the state dict of a wrapper, as torch.distributed.checkpoint does,
leaves the state that was there, which then counts as none. Its second element is a fingerprint of the tensors of the
model: such a tool keeps one tensor per key, of any rank, so that the rank whose place it has kept gets tensors of other
ranks. If the user has removed names from a state dict, it is not compared.
"""

from __future__ import annotations

import copy
import warnings
import weakref
import zlib
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor, nn

from ..flat.sharded import local_of
from ..transport.state_tree import bytes_of

KEY = "gossip_state"  # in the metadata
SUFFIX = "_extra_state"  # torch's own
_BITS = 21  # of a rank, of a number of ranks, and of a digest
_SAMPLED = 1024  # elements of a tensor, for its fingerprint

Place: TypeAlias = tuple[int, int] | None
"""A rank and the number of ranks; None: the state belongs to no rank."""


class WholeState:
    """A state as one value: read like a dict, but no `Mapping`.

    Tools that keep a value per key, as torch.distributed.checkpoint does, load the keys that the state has before
    loading. The memory of a method grows while it trains, so that for a new wrapper they would leave most out. They do
    not look into this object, and so load it whole. A pickle of it is an OrderedDict, which `torch.load` with
    `weights_only=True` takes.

    Args:
        values: the state; shared.
    """

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = dict(values)

    def __getattr__(self, name: str) -> Any:
        """Methods of a dict: keys, values, items, get."""
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._values, name)

    def __getitem__(self, key: str) -> Any:
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __eq__(self, other: object) -> bool:
        return self._values == (other._values if isinstance(other, WholeState) else other)

    def __repr__(self) -> str:
        return repr(self._values)

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
    """A rank, the number of ranks and a digest of the state in an int64 [2], which any tool keeps.

    The second element is free for a fingerprint of the model; of a version without one, the tensor has one element.
    """
    number = (rank << _BITS | world_size) << _BITS | _digest_of(state)
    return torch.tensor([number, 0], dtype=torch.int64, device="cpu")


def place_of(tensor: Tensor) -> dict[str, int]:
    """The rank and the number of ranks that `place_tensor` was given."""
    rank, world_size = divmod(int(tensor[0]) >> _BITS, 1 << _BITS)
    return {"rank": rank, "world_size": world_size}


def belongs_to(tensor: Tensor, state: Any) -> bool:
    """Whether `place_tensor` was given this state, or one whose numbers, texts and shapes are the same."""
    return int(tensor[0]) & (1 << _BITS) - 1 == _digest_of(state)


@torch.no_grad()
def fingerprint(tensors: Mapping[str, Any], *, has_numbers: bool = True, has_shards: bool = False) -> int:
    """A number below 2**63 that depends on the names, and on names, dtypes, shapes and numbers of tensors.

    For each tensor 1,024 elements count. The upper 31 bits depend on the names alone.

    Args:
        tensors: tensors and other values, by name; for other values the names count alone.
        has_numbers: whether elements count.
        has_shards: whether the elements of DTensors in this process count too, which are others with another sharding.
    """
    names = zlib.crc32("\n".join(sorted(tensors)).encode()) >> 1
    content, samples = 0, list[Tensor]()
    for name in sorted(tensors):
        if isinstance(x := tensors[name], Tensor):
            content = zlib.crc32(f"{name} {x.dtype} {list(x.shape)}".encode(), content)
            x = local_of(x) if has_shards else x
            is_plain = has_numbers and type(x) in (Tensor, nn.Parameter)
            if is_plain and x.layout == torch.strided and not (x.is_meta or x.is_quantized):
                flat = x.detach().reshape(-1)
                samples.append(bytes_of(flat[:: max(flat.numel() // _SAMPLED, 1)]))
    devices = dict.fromkeys(x.device for x in samples)
    for device in devices:  # one copy from each
        found = torch.cat([x for x in samples if x.device == device]).cpu()
        content = zlib.crc32(found.numpy().tobytes(), content)
    return names << 32 | content


def without_place(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """The tensors of the state dict of a wrapper, or of a module of `gossip()`, by the names of the plain module."""
    prefix = "module." if any(name.startswith("module.") for name in state_dict) else ""
    return {
        name.removeprefix(prefix): value
        for name, value in state_dict.items()
        if name.startswith(prefix) and not (name == SUFFIX and isinstance(value, Tensor))
    }


def mark(state_dict: Mapping[str, Any], prefix: str, *, inside: str) -> None:
    """Put the fingerprint of the model into the place in a state dict, if there is one.

    Args:
        state_dict: whole.
        prefix: the prefix of the wrapper's keys in it.
        inside: the prefix of the module's keys after it.
    """
    place = state_dict.get(prefix + SUFFIX)
    if isinstance(place, Tensor) and place.shape == (2,) and place.dtype == torch.int64:
        place[1] = fingerprint(_inside(state_dict, prefix, inside), has_shards=True)


def _inside(state_dict: Mapping[str, Any], prefix: str, inside: str) -> dict[str, Any]:
    """The values of a module by its names."""
    own = prefix + SUFFIX
    start = prefix + inside
    return {name.removeprefix(start): x for name, x in state_dict.items() if name.startswith(start) and name != own}


def _check_fingerprint(place: Tensor, state_dict: Mapping[str, Any], prefix: str, inside: str) -> None:
    """Raise ValueError where a tool has put tensors of other ranks beside the place of this one."""
    if place.shape != (2,):
        return  # of an older version
    saved, found = int(place[1]), fingerprint(_inside(state_dict, prefix, inside), has_shards=True)
    if saved >> 32 == found >> 32 and saved != found:
        of = place_of(place)
        raise ValueError(
            f"got a state dict of rank {of['rank']} of {of['world_size']} with other tensors than this rank has saved, "
            "expected the same: of one key, torch.distributed.checkpoint keeps the tensor of any rank; save and load "
            "model.checkpoint(optimizer) with it. A state dict shares memory with its model: copy it before the model "
            f"trains on or is closed. If you changed tensors yourself, remove the key '{prefix}{SUFFIX}'"
        )


def _digest_of(state: Any) -> int:
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


def put_state(destination: Any, prefix: str, state: dict[str, Any], place: Place, *, has_key: bool = True) -> None:
    """Put the state of a wrapper into the metadata of a state dict, and its place among several ranks into its keys.

    has_key: whether that key is free.
    """
    destination._metadata[prefix[:-1]][KEY] = state
    if has_key and place is not None and place[1] > 1:
        destination[prefix + SUFFIX] = place_tensor(*place, state)


def drop_state(state_dict: dict[str, Any]) -> None:
    """Remove the state of gossip, and its place, from a state dict under the names of the plain module; in place."""
    getattr(state_dict, "_metadata", {}).get("", {}).pop(KEY, None)
    if isinstance(state_dict.get(SUFFIX), Tensor):
        del state_dict[SUFFIX]


def take_place(
    state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], place: Place, *, inside: str = ""
) -> None:
    """Remove the place from the keys; and from the metadata a state that does not belong to the tensors.

    inside: see `mark`.

    Raises:
        ValueError: it is the state dict of another rank, or of a world of another size, or has tensors of other ranks.
    """
    if isinstance(found := state_dict.get(prefix + SUFFIX), Tensor):
        check_place(place_of(found), place)
        _check_fingerprint(found, state_dict, prefix, inside)
        del state_dict[prefix + SUFFIX]
        if not belongs_to(found, local_metadata.get(KEY)):
            local_metadata.pop(KEY, None)


def check_place(state: Mapping[str, Any], place: Place) -> None:
    """Raise ValueError for the state of another rank: each has a model, a push-sum weight and memory of its own."""
    found = state.get("rank"), state.get("world_size")
    if place is not None and found not in (place, (None, None)):
        (rank, world_size), (own, own_size) = found, place
        raise ValueError(
            f"got the state of rank {rank} of {world_size}, expected that of rank {own} of {own_size}: every rank "
            "has a model of its own, so each loads what it has saved itself, with as many ranks as then (of one "
            "key, torch.distributed.checkpoint keeps the tensor of any rank). Save and load "
            "model.checkpoint(optimizer) with torch.distributed.checkpoint, also with another number of ranks; or "
            "average the files of all ranks by gossip_modules.checkpoints.average_checkpoints; to start from one model "
            "everywhere, save averaged_state_dict() and load it into the module before it is wrapped"
        )


def check_whole_state(state: Mapping[str, Any], *, wrapper: str) -> None:
    """Raise ValueError for a state that a signal handler has saved inside a round."""
    if "is_interrupted" in state:
        raise ValueError(
            f"got the state of a {wrapper} that was saved inside a gossip round or an optimizer step, as in the "
            "handler of a signal, expected one that was saved between steps; load an older one, and let the handler "
            "set a flag that the loop looks at after each step"
        )


def check_prefix(
    state_dict: Mapping[str, Any], prefix: str, module: nn.Module, *, wrapper: str, is_stateless: bool = False
) -> None:
    """Refuse the state dict of a plain module, which has none of the keys of a wrapper.

    Args:
        state_dict: about to be loaded.
        prefix: the prefix of the wrapper's keys in it.
        module: in the wrapper.
        wrapper: the name of its class.
        is_stateless: whether it keeps nothing of the model from step to step.

    Raises:
        RuntimeError: as torch does for other keys that do not fit; nothing is changed then.
    """
    if any(key.startswith(f"{prefix}module.") for key in state_dict):
        return
    if not state_dict:
        raise RuntimeError(
            f"got an empty state dict to load into a {wrapper}, expected that of a wrapper; to load one model on all "
            "ranks, as torch.distributed.checkpoint.state_dict does with broadcast_from_rank0=True, give it "
            "wrapper.module"
        )
    then = "" if is_stateless else " and wrapper.set_extra_state(None), so that nothing of another model is kept"
    for name, _ in (*module.named_parameters(), *module.named_buffers()):
        if prefix + name in state_dict:
            raise RuntimeError(
                f"got the state dict of a plain module, with the key '{prefix}{name}', to load into a {wrapper}, "
                f"expected that of a wrapper, with '{prefix}module.{name}'; load it into the module: call "
                f"wrapper.settle() on every rank, then wrapper.module.load_state_dict(...){then}"
            )


def warn_stateless() -> None:
    """Warn of a state dict without a state of gossip."""
    warnings.warn(
        "the state dict holds no gossip state: counting rounds from 0. It is that of a plain model, or one without its "
        "metadata, as torch.distributed.checkpoint makes it",
        stacklevel=3,
    )


def keeps_extra_state(module: nn.Module) -> bool:
    """Whether the class of the module puts a state of its own under the key "_extra_state"."""
    return type(module).get_extra_state is not nn.Module.get_extra_state


class Placed(Protocol):
    """A wrapper, which belongs to a rank."""

    @property
    def own_place(self) -> Place:
        """The rank that its state belongs to."""


class InnerPlace:
    """A hook of the module in a wrapper, for state dicts of the wrapper whose keys were cut to names of the module.

    It removes the key of the rank, which the module does not know. A pickle of the module does not contain the hook,
    and so needs this library no more than before.

    Args:
        wrapper: around the module; not kept alive.
    """

    def __init__(self, wrapper: Placed) -> None:
        self._wrapper = weakref.ref(wrapper)

    def __call__(
        self, module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], *args: Any
    ) -> None:
        """Called before `load_state_dict` of the module.

        Raises:
            ValueError: it is the state dict of another rank, or of a world of another size.
        """
        if not keeps_extra_state(module):
            wrapper = self._wrapper()
            take_place(state_dict, prefix, local_metadata, None if wrapper is None else wrapper.own_place)

    def __deepcopy__(self, memo: dict[int, Any]) -> InnerPlace:
        return self

    def __reduce__(self) -> Any:
        return getattr, ("", "format")  # takes any arguments, does nothing, and is there in every process
