"""Other tensors in the memory of a module's tensors: they move with them, or the module is refused."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from .slots import Slot


class Alias(NamedTuple):
    """A tensor in the memory of a slot's, such as `weight.detach()`, a view of it, or the parameter of a frozen twin.

    Attributes:
        tensor: the alias.
        of: the tensor of the slot.
        first: its first byte, counted from the first one of `of`.
        is_whole: whether it has all elements of `of`, in the same shape and with the same strides.
    """

    tensor: Tensor
    of: Tensor
    first: int
    is_whole: bool


def check_shared_memory(slots: Sequence[Slot]) -> None:
    """Raise ValueError if a tensor on the CPU is in shared memory: other processes would not see a vector."""
    for slot in slots:
        if slot.tensor.device.type == "cpu" and slot.tensor.is_shared():
            raise ValueError(
                f"got '{slot.name}' in shared memory, by share_memory() or from another process, expected memory of "
                "this process alone: the tensors become views of one vector, and other processes would see old values "
                "for ever. Wrap copy.deepcopy(module); to let other processes read the model, send them copies, such "
                "as averaged_state_dict()"
            )


def find_aliases(slots: Sequence[Slot]) -> list[Alias]:
    """Other tensors in the memory of `slots`, before these move.

    The search visits all objects of Python, but only if memory has more owners than the tensors of `slots`. Tensors
    held by C++ alone, such as those saved by autograd, and arrays of numpy keep the old memory.

    Raises:
        ValueError: a tensor overlaps with several of them, so it cannot move along.
    """
    if not (groups := _with_more_owners(slots)):
        return []
    if any(_other_parts(groups, slots)):
        gc.collect()  # of those that nobody has any more
    for x, group in _other_parts(groups, slots):
        names = " and ".join(repr(slot.name) for slot in group[:2])
        raise ValueError(
            f"got a tensor of shape {tuple(x.shape)} that shares memory with {names}{' and others' * (len(group) > 2)} "
            "of the module, and is no view of one of them alone, expected memory that the tensors of the module have "
            "for themselves: they become views of one vector, and that tensor would keep old values. Delete it, or "
            "clone it, before you wrap the module; or make it after that"
        )
    found = [(x, group[0].tensor) for x, group in _overlapping(groups, slots)]
    return [Alias(x, of, _span(x)[0] - _span(of)[0], _is_same(x, of)) for x, of in found]


def move_aliases(aliases: Sequence[Alias]) -> None:
    """Point the aliases to the same elements of their tensors, after these have moved; values stay."""
    for x, of, first, is_whole in aliases:
        start = (of.storage_offset() * of.element_size() + first) // x.element_size()
        strides = of.stride() if is_whole else x.stride()  # others than before where the old place was not dense
        x.data = torch.empty(0, dtype=x.dtype, device=x.device).set_(of.untyped_storage(), start, x.shape, strides)


def _with_more_owners(slots: Sequence[Slot]) -> Mapping[int, list[Slot]]:
    """Return the slots of each storage with other owners, by the address of the storage."""
    groups: dict[int, list[Slot]] = {}
    for slot in slots:
        if slot.tensor.numel():
            groups.setdefault(_storage(slot.tensor), []).append(slot)
    # The storage's object of Python counts as well, with some versions of torch.
    others = _num_owners(torch.empty(1, device="cpu")) - 1
    return {key: group for key, group in groups.items() if _num_owners(group[0].tensor) > len(group) + others}


def _storage(x: Tensor) -> int:
    """Return the address of the storage of `x`, as an object of C++."""
    return x.untyped_storage()._cdata


def _num_owners(x: Tensor) -> int:
    """Return the number of tensors with the storage of `x`; some versions of torch count one more."""
    return torch._C._storage_Use_Count(_storage(x))


def _overlapping(groups: Mapping[int, list[Slot]], slots: Sequence[Slot]) -> Iterator[tuple[Tensor, list[Slot]]]:
    """Yield the other tensors of those storages, each with its overlapping slots."""
    ours = {id(slot.tensor) for slot in slots}
    for x in instances_of(Tensor):
        if id(x) not in ours and has_memory(x) and (group := groups.get(_storage(x))) is not None:
            start, stop = _span(x)
            if over := [slot for slot in group if start < _span(slot.tensor)[1] and _span(slot.tensor)[0] < stop]:
                yield x, over


def _other_parts(groups: Mapping[int, list[Slot]], slots: Sequence[Slot]) -> Iterator[tuple[Tensor, list[Slot]]]:
    """Yield the tensors of `_overlapping` that cannot move with one slot."""
    for x, over in _overlapping(groups, slots):
        (start, stop), (first, last) = _span(x), _span(over[0].tensor)
        is_inside = len(over) == 1 and first <= start and stop <= last
        if not is_inside or not (_is_dense(over[0].tensor) or _is_same(x, over[0].tensor)):
            yield x, over


def has_memory(x: Tensor) -> bool:
    """Whether it has elements in memory of its own: neither sharded, nor sparse, nor to be initialised, nor traced."""
    if type(x).__torch_dispatch__ is not Tensor.__torch_dispatch__ or nn.parameter.is_lazy(x):
        return False
    return not torch._C._functorch.is_functorch_wrapped_tensor(x) and x.layout is torch.strided and x.numel() > 0


def _span(x: Tensor) -> tuple[int, int]:
    """Return [first, last) of the bytes of its elements in their storage."""
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    start = int(x.storage_offset())
    return start * x.element_size(), int(start + last + 1) * x.element_size()


def _is_dense(x: Tensor) -> bool:
    """Whether `view_like` keeps its strides."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return x.is_contiguous() or (x.dim() in formats and x.is_contiguous(memory_format=formats[x.dim()]))


def _is_same(x: Tensor, y: Tensor) -> bool:
    return x.dtype == y.dtype and x.shape == y.shape and x.stride() == y.stride()


T = TypeVar("T")


def instances_of(kind: type[T]) -> list[T]:
    """The objects of a class and its subclasses, by one pass over all objects (50 ms per million of them).

    Objects refer to their class. `gc.get_objects` would also refer to unfinished tuples of other threads, and break
    them.
    """
    kinds: set[Any] = set(_subclasses_of(kind))
    return [x for x in gc.get_referrers(*kinds) if type(x) in kinds]


def _subclasses_of(kind: Any) -> Iterator[Any]:
    yield kind
    for subclass in type.__subclasses__(kind):
        yield from _subclasses_of(subclass)
