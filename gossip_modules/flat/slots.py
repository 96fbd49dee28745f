"""Slots: the trained tensors of a module, in their order in the flat vector."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .layout import TensorSpec
from .selection import MixedBuffers
from .sharded import Shard
from .tables import buffers_of, parameters_of
from .vector import FlatVector

_MEMORY_FORMATS = (torch.contiguous_format, torch.channels_last, torch.channels_last_3d)
_RANK = {torch.channels_last: 4, torch.channels_last_3d: 5}


class Slot(NamedTuple):
    """One tensor of the module, and its place in the vector."""

    owner: nn.Module
    attribute: str
    name: str
    tensor: Tensor
    is_parameter: bool
    shard: Shard | None = None  # of a parameter that is sharded over processes

    @property
    def table(self) -> dict[str, Any]:
        """The dict of the owner with the tensor under `attribute`."""
        return parameters_of(self.owner) if self.is_parameter else buffers_of(self.owner)

    @property
    def there(self) -> Any:
        """The present tensor of the module in this place; of a gathered parameter, its shard."""
        manager = None if self.shard is None else self.shard.manager
        return self.table.get(self.attribute) if manager is None else manager.sharded_param

    @property
    def memory(self) -> Tensor:
        """The elements in this process."""
        return self.tensor if self.shard is None else self.shard.memory

    def holding(self, tensor: Tensor) -> Slot:
        """The slot with another tensor in this place."""
        shard = None if self.shard is None else Shard(tensor, self.shard.manager)
        return self._replace(tensor=tensor, shard=shard)

    def move(self, view: Tensor) -> None:
        """Let the tensor have its elements there; it takes the values of the new place."""
        if self.shard is None:
            self.tensor.data = view
        else:
            self.shard.move(view)

    @property
    def spec(self) -> TensorSpec:
        """The spec of the elements in this process. In any memory format, memory order is dim 0 by the rest."""
        takes_code = not self.is_parameter and isinstance(self.owner, MixedBuffers)
        return TensorSpec.of(self.memory, is_buffer=not self.is_parameter, name=self.name, takes_code=takes_code)

    def signature(self) -> str:
        """Return name, shape, dtype, strides and shard as text: ranks with equal texts can exchange the tensor."""
        shard = "" if self.shard is None else self.shard.describe()
        strides = "" if self.tensor.is_contiguous() else f" strides {tuple(self.tensor.stride())}"
        return f"{self.name} {tuple(self.tensor.shape)} {self.tensor.dtype}{strides}{shard}"


class TensorPlace(NamedTuple):
    """The place of a tensor of the module in the flat vector: elements [first, last) of a segment."""

    name: str
    segment: int
    first: int
    last: int


def check_module(module: nn.Module) -> None:
    """Refuse TorchScript modules: their tensors live outside of Python, and cannot become views of a vector.

    Raises:
        ValueError: see `FlatBuffer`.
    """
    for name, part in module.named_modules():
        if isinstance(part, torch.jit.ScriptModule):
            what = f"'{name}', a torch.jit.ScriptModule" if name else "a torch.jit.ScriptModule"
            raise ValueError(
                f"got {what}, expected a module of Python, whose parameters can become views of one vector; wrap the "
                "module that was scripted or traced, and script it after training"
            )


def in_order(slots: Iterable[Slot]) -> list[Slot]:
    """Return the slots sorted: matrices by shape, vectors, buffers; equal ones keep the module's order.

    Buffers that take a code are behind the others.
    """

    def key(slot: Slot) -> tuple[bool, bool, bool, bool, tuple[int, ...]]:
        if nn.parameter.is_lazy(slot.tensor):
            raise ValueError(
                f"got the uninitialised lazy parameter '{slot.name}', expected known shapes; "
                "run one forward pass before wrapping"
            )
        spec = slot.spec
        # Complex first, since their addresses must be multiples of twice as many bytes.
        shape = spec.shape if spec.is_matrix else ()
        return spec.is_buffer, not slot.tensor.is_complex(), spec.takes_code, not spec.is_matrix, shape

    return sorted(slots, key=key)


def real_dtype(tensor: Tensor) -> torch.dtype:
    """Return the dtype of a tensor's real numbers: a complex number is two."""
    return tensor.dtype.to_real() if tensor.is_complex() else tensor.dtype


def real_numel(tensor: Tensor) -> int:
    """Return the number of a tensor's real numbers: a complex number is two."""
    return tensor.numel() * (2 if tensor.is_complex() else 1)


def view_like(segment: Tensor, offset: int, tensor: Tensor) -> Tensor:
    """The elements of `segment` from `offset` in the dtype and shape of `tensor`, and its strides if they are dense."""
    strides: tuple[int, ...] = torch.empty(tensor.shape, device="meta").stride()
    for memory_format in _MEMORY_FORMATS:
        fits = tensor.dim() == _RANK.get(memory_format, tensor.dim())
        if fits and tensor.is_contiguous(memory_format=memory_format):
            strides = tensor.stride()
            break
    # A storage of its own over the same bytes: who pickles one parameter gets its bytes, not the whole vector.
    start = (segment.storage_offset() + offset) * segment.element_size()
    storage = segment.untyped_storage()[start : start + tensor.numel() * tensor.element_size()]
    return torch.empty(0, dtype=tensor.dtype, device=segment.device).set_(storage, 0, tensor.shape, strides)


def views_in(vector: FlatVector, tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """The place of each tensor in a vector that has the tensors of a dtype one after the other, in its shape."""
    segments, offsets = {x.dtype: x for x in vector.segments}, defaultdict[torch.dtype, int](int)
    for x in tensors:
        dtype = real_dtype(x)
        yield view_like(segments[dtype], offsets[dtype], x)
        offsets[dtype] += real_numel(x)


def check(slots: Sequence[Slot]) -> None:
    """Refuse tensors without a parameter, on several devices or in the same memory.

    Raises:
        ValueError: see `FlatBuffer`.
    """
    if not any(slot.is_parameter for slot in slots):
        raise ValueError(
            "got a module without trainable parameters, expected at least one parameter with requires_grad=True; "
            "wrap the module that is trained"
        )
    _check_devices(slots)
    _check_overlaps(slots)


def _check_devices(slots: Sequence[Slot]) -> None:
    """Refuse tensors on several devices, or on the meta device."""
    devices: dict[torch.device, str] = {}
    for slot in slots:
        devices.setdefault(slot.memory.device, slot.name)
    if len(devices) > 1:
        found = ", ".join(f"{device} (first: '{name}')" for device, name in devices.items())
        raise ValueError(f"got parameters on several devices: {found}; expected one device; move the module with .to()")
    if slots[0].memory.is_meta:
        raise ValueError("got parameters on the meta device, expected values; materialise with module.to_empty()")


def _check_overlaps(slots: Sequence[Slot]) -> None:
    """Refuse two tensors in the same memory."""
    memories = [(slot.memory, slot.name) for slot in slots if slot.memory.numel()]
    spans = sorted((x.data_ptr(), x.data_ptr() + x.numel() * x.element_size(), name) for x, name in memories)
    for (_, stop, first), (start, _, second) in pairwise(spans):
        if start < stop:
            raise ValueError(
                f"got '{first}' and '{second}', distinct tensors that overlap in memory, expected separate storage; "
                "tie them by assigning one Parameter object to both modules"
            )
