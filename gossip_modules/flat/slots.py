"""Slots: the tensors of a module that are trained, in the order in which they travel."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .layout import TensorSpec
from .sharded import Shard

_MEMORY_FORMATS = (torch.contiguous_format, torch.channels_last, torch.channels_last_3d)
_RANK = {torch.channels_last: 4, torch.channels_last_3d: 5}


class Slot(NamedTuple):
    """One tensor of the module and the place in the vector that it views."""

    owner: nn.Module
    attribute: str
    name: str
    tensor: Tensor
    is_parameter: bool
    shard: Shard | None = None  # of a parameter that is sharded over processes

    @property
    def table(self) -> dict[str, Any]:
        """Where the module holds the tensor under its name."""
        return self.owner._parameters if self.is_parameter else self.owner._buffers

    @property
    def there(self) -> Any:
        """The tensor that the module has in this place now; the shard of a parameter that is gathered."""
        manager = None if self.shard is None else self.shard.manager
        return self.table.get(self.attribute) if manager is None else manager.sharded_param

    @property
    def memory(self) -> Tensor:
        """The elements that this process holds."""
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
        """What a code may know of it. Memory order is dim 0 by the rest in any memory format."""
        return TensorSpec.of(self.memory, is_buffer=not self.is_parameter, name=self.name)

    def signature(self) -> str:
        """Everything that two ranks must agree on."""
        shard = "" if self.shard is None else self.shard.describe()
        strides = "" if self.tensor.is_contiguous() else f" strides {tuple(self.tensor.stride())}"
        return f"{self.name} {tuple(self.tensor.shape)} {self.tensor.dtype}{strides}{shard}"


class TensorPlace(NamedTuple):
    """Where a tensor of the module is in the flat vector: elements [first, last) of a segment."""

    name: str
    segment: int
    first: int
    last: int


def check_module(module: nn.Module) -> None:
    """Refuse modules that keep their tensors outside of Python, where nobody else can exchange them.

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
    """Matrices by shape, vectors, buffers; the sort is stable, so the module's order is kept where these are equal."""

    def key(slot: Slot) -> tuple[bool, bool, bool, tuple[int, ...]]:
        if nn.parameter.is_lazy(slot.tensor):
            raise ValueError(
                f"got the uninitialised lazy parameter '{slot.name}', expected known shapes; "
                "run one forward pass before wrapping"
            )
        spec = slot.spec
        # Complex first, since their addresses must be multiples of twice as many bytes.
        return spec.is_buffer, not slot.tensor.is_complex(), not spec.is_matrix, spec.shape if spec.is_matrix else ()

    return sorted(slots, key=key)


def real_dtype(tensor: Tensor) -> torch.dtype:
    """The dtype of the numbers that travel: a complex number is two."""
    return tensor.dtype.to_real() if tensor.is_complex() else tensor.dtype


def real_numel(tensor: Tensor) -> int:
    """How many numbers travel."""
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


def check(slots: Sequence[Slot]) -> None:
    """Refuse what cannot be one vector.

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
    """All on one device."""
    devices: dict[torch.device, str] = {}
    for slot in slots:
        devices.setdefault(slot.memory.device, slot.name)
    if len(devices) > 1:
        found = ", ".join(f"{device} (first: '{name}')" for device, name in devices.items())
        raise ValueError(f"got parameters on several devices: {found}; expected one device; move the module with .to()")
    if slots[0].memory.is_meta:
        raise ValueError("got parameters on the meta device, expected values; materialise with module.to_empty()")


def _check_overlaps(slots: Sequence[Slot]) -> None:
    """No two in the same memory."""
    memories = [(slot.memory, slot.name) for slot in slots if slot.memory.numel()]
    spans = sorted((x.data_ptr(), x.data_ptr() + x.numel() * x.element_size(), name) for x, name in memories)
    for (_, stop, first), (start, _, second) in pairwise(spans):
        if start < stop:
            raise ValueError(
                f"got '{first}' and '{second}', distinct tensors that overlap in memory, expected separate storage; "
                "tie them by assigning one Parameter object to both modules"
            )
