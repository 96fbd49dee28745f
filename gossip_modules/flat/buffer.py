"""Where parameters live: a module's trained tensors as views of one contiguous vector."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .layout import FlatLayout, Part
from .vector import FlatVector

_MEMORY_FORMATS = (torch.contiguous_format, torch.channels_last, torch.channels_last_3d)
_RANK = {torch.channels_last: 4, torch.channels_last_3d: 5}


class _Slot(NamedTuple):
    """One tensor of the module and the place in the vector that it views."""

    owner: nn.Module
    attribute: str
    name: str
    tensor: Tensor
    is_parameter: bool

    @property
    def table(self) -> dict[str, Any]:
        """Where the module holds the tensor under its name."""
        return self.owner._parameters if self.is_parameter else self.owner._buffers

    @property
    def part(self) -> Part:
        """What a code may know of it. Memory order is dim 0 by the rest in any memory format."""
        return Part.of(self.tensor, is_buffer=not self.is_parameter)

    def signature(self) -> str:
        """Everything that two ranks must agree on."""
        strides = "" if self.tensor.is_contiguous() else f" strides {tuple(self.tensor.stride())}"
        return f"{self.name} {tuple(self.tensor.shape)} {self.tensor.dtype}{strides}"


class FlatBuffer:
    """The trained tensors of a module as views of one FlatVector: gossip on the vector is gossip on the module.

    Trainable parameters and persistent floating-point buffers (BatchNorm statistics) are re-pointed into one
    contiguous vector with one segment per dtype: matrices first, those of one shape side by side, then parameters of
    one dimension, then buffers, so that codes of matrices work in few batches. Frozen parameters, integer buffers,
    non-persistent buffers and buffers that hold an infinity or NaN (attention masks) stay where they are. A tensor
    shared by several modules is taken once. Strides are kept, so `channels_last` stays `channels_last`.

    `.to()`, `.half()`, `load_state_dict(assign=True)` and `copy.deepcopy` make tensors that no longer view the
    vector: `is_attached()` notices, and `reattach()` takes in the new ones, with their values. `requires_grad_()` and
    layers that come or go change which tensors are trained: `is_complete()` notices, and `attach()` chooses anew. Ranks
    whose vectors differ cannot exchange them, so `attach()` is for a point of training that all ranks come to alike.

    Args:
        module: mutated: `.data` of its trained tensors is re-pointed. Values do not change.
        include_buffers: whether floating-point buffers travel too.
        num_slices: the vector is padded to this many equal, aligned slices.

    Attributes:
        vector: what the tensors are views of.
        parameters: the trained parameters that view it, in their order there.
        parameter_segments: the part of each segment that is parameters.

    Raises:
        ValueError: nothing to train, tensors on several devices, on the meta device, uninitialised or sharded, or
            distinct parameters that overlap in memory.

    Example:
        >>> model = nn.Linear(2, 1)
        >>> buffer = FlatBuffer(model)
        >>> buffer.vector.segments[0].zero_()  # also zeroes model.weight and model.bias
    """

    def __init__(self, module: nn.Module, *, include_buffers: bool = True, num_slices: int = 1) -> None:
        self.module = module
        self.include_buffers = include_buffers
        self.num_slices = num_slices
        self._excluded: frozenset[str] = frozenset(self._non_finite_buffers()) if include_buffers else frozenset()
        if self._excluded:
            warnings.warn(f"buffers with infinite or NaN values stay local: {sorted(self._excluded)}", stacklevel=2)
        self._slots: list[_Slot] = []
        self._views: list[Tensor] = []  # of the vector, one per slot
        self._places: list[tuple[dict[str, Any], str, Tensor, int]] = []  # who holds a tensor, and its address
        self._choice = _Choice(module)
        self.vector: FlatVector
        self.parameters: list[Tensor] = []
        self.parameter_segments: tuple[Tensor, ...] = ()
        self.attach()

    @property
    def buffer_segments(self) -> list[Tensor]:
        """The part of each segment that is buffers."""
        pairs = zip(self.vector.segments, self.parameter_segments, strict=True)
        return [segment[parameters.numel() :] for segment, parameters in pairs]

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors that view the vector: matrices, vectors, buffers."""
        return [slot.tensor for slot in self._slots]

    def signature(self) -> list[str]:
        """Names, shapes, dtypes and strides in order: equal on two ranks if and only if their vectors match."""
        return [slot.signature() for slot in self._slots]

    def is_current(self) -> bool:
        """Whether it is both complete and attached, as at nearly every step."""
        return self._choice.is_current() and self.is_attached()

    def is_attached(self) -> bool:
        """Whether the module's tensors are still ours and view the vector: one look per tensor, under 0.2 us each."""
        for table, attribute, tensor, pointer in self._places:
            if table.get(attribute) is not tensor or tensor.data_ptr() != pointer:
                return False
        return True

    def pull(self) -> None:
        """The vector <- the values of tensors that the module holds in place of ours, where shapes are equal."""
        for view, tensor in self._replaced():
            view.copy_(tensor)

    def push(self) -> None:
        """The tensors that the module holds in place of ours <- the vector; the opposite of `pull()`."""
        for view, tensor in self._replaced():
            tensor.copy_(view)

    def _replaced(self) -> Iterator[tuple[Tensor, Tensor]]:
        for view, slot in zip(self._views, self._slots, strict=True):
            tensor = slot.table.get(slot.attribute)
            if tensor is None or tensor.shape != view.shape or tensor.data_ptr() == view.data_ptr():
                continue
            if tensor.requires_grad or not slot.is_parameter:  # what was frozen meanwhile stays local
                yield view, tensor.detach()

    def is_complete(self) -> bool:
        """Whether nothing has changed that says which tensors are trained: `requires_grad`, layers, their tensors.

        One look per parameter and per submodule, under 0.2 us each.
        """
        return self._choice.is_current()

    def is_trained(self) -> bool:
        """Whether the module has a parameter that is trained now; walks the module up to the first one."""
        return any(parameter.requires_grad for parameter in self.module.parameters())

    def has_all(self) -> bool:
        """Whether all of the module's trained tensors are in the vector, if beside others; walks the module."""
        return {id(slot.tensor) for slot in self._trained_tensors()} <= set(map(id, self.tensors))

    def keep(self) -> None:
        """Go on with the tensors that are in the vector, whatever is frozen meanwhile."""
        self._choice = _Choice(self.module)

    def attach(self) -> None:
        """Choose which tensors are trained, and make them views of a new vector, keeping their values and strides."""
        slots = _in_order(self._trained_tensors())
        _check(slots)
        self._choice = _Choice(self.module)
        self._lay_out(slots)

    def reattach(self) -> None:
        """Make the tensors that stand where ours stood views of a new vector, whether they are trained now or not.

        The vectors of ranks that do this at different times still match.
        """
        there = ((slot, slot.table.get(slot.attribute)) for slot in self._slots)
        slots = [slot._replace(tensor=tensor) for slot, tensor in there if tensor is not None]
        unique = {id(slot.tensor): slot for slot in reversed(slots)}  # two places may hold one tensor now
        slots = _in_order(slot for slot in slots if unique[id(slot.tensor)] is slot)
        _check(slots)
        self._lay_out(slots)

    def _lay_out(self, slots: list[_Slot]) -> None:
        dtypes = list(dict.fromkeys(_real_dtype(slot.tensor) for slot in slots))
        groups = {dtype: [slot for slot in slots if _real_dtype(slot.tensor) == dtype] for dtype in dtypes}
        parts = {dtype: [slot.part for slot in group] for dtype, group in groups.items()}
        layout = FlatLayout.of(parts.items(), self.num_slices)
        # A new vector, not the old one: the tensors may still view the old one at other offsets.
        vector = FlatVector.zeros(layout, slots[0].tensor.device)
        if self._slots:
            vector.weight.copy_(self.vector.weight)
        views: list[Tensor] = []
        with torch.no_grad():
            for segment, group in zip(vector.segments, groups.values(), strict=True):
                offset = 0
                for slot in group:
                    view = _view_like(segment, offset, slot.tensor)
                    view.copy_(slot.tensor)
                    slot.tensor.data = view
                    views.append(view)
                    offset += _real_numel(slot.tensor)
        self._slots, self._views, self.vector = slots, views, vector
        self.parameters = [slot.tensor for slot in slots if slot.is_parameter]
        self._places = [(slot.table, slot.attribute, slot.tensor, slot.tensor.data_ptr()) for slot in slots]
        self.parameter_segments = tuple(
            segment[: sum(_real_numel(slot.tensor) for slot in group if slot.is_parameter)]
            for segment, group in zip(vector.segments, groups.values(), strict=True)
        )

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_views": []}  # a copy's tensors are no views; attach() makes them so

    def _trained_tensors(self) -> Iterator[_Slot]:
        seen: set[int] = set()
        for prefix, owner in self.module.named_modules():
            tables: tuple[tuple[dict[str, Any], bool], ...] = ((owner._parameters, True), (owner._buffers, False))
            for table, is_parameter in tables:
                for attribute, tensor in table.items():
                    name = f"{prefix}.{attribute}" if prefix else attribute
                    if tensor is None or id(tensor) in seen:
                        continue
                    if tensor.requires_grad if is_parameter else self._travels(owner, attribute, name, tensor):
                        seen.add(id(tensor))
                        yield _Slot(owner, attribute, name, tensor, is_parameter)

    def _travels(self, owner: nn.Module, attribute: str, name: str, buffer: Tensor) -> bool:
        persistent = attribute not in owner._non_persistent_buffers_set
        return self.include_buffers and persistent and buffer.is_floating_point() and name not in self._excluded

    def _non_finite_buffers(self) -> Iterator[str]:
        for name, buffer in self.module.named_buffers():
            if buffer.is_floating_point() and not buffer.is_meta and not bool(torch.isfinite(buffer).all()):
                yield name


class _Choice:
    """What decides which tensors of a module are trained, to notice at every step whether it has changed.

    Args:
        module: looked at as it is now.
    """

    def __init__(self, module: nn.Module) -> None:
        owners = list(module.modules())
        self._tables: list[tuple[dict[str, Any], int]] = [
            (table, len(table)) for owner in owners for table in (owner._parameters, owner._buffers, owner._modules)
        ]
        self._children = [(owner._modules, name, child) for owner in owners for name, child in owner._modules.items()]
        self._parameters = [
            (owner._parameters, name, parameter is not None and parameter.requires_grad)
            for owner in owners
            for name, parameter in owner._parameters.items()
        ]

    def is_current(self) -> bool:
        """Whether the module still is as it was."""
        for table, size in self._tables:
            if len(table) != size:
                return False
        for children, name, child in self._children:
            if children.get(name) is not child:
                return False
        for parameters, name, is_trained in self._parameters:
            parameter = parameters.get(name)
            if (parameter is not None and parameter.requires_grad) is not is_trained:
                return False
        return True


def _in_order(slots: Iterable[_Slot]) -> list[_Slot]:
    """Matrices by shape, vectors, buffers; the sort is stable, so the module's order is kept where these are equal."""

    def key(slot: _Slot) -> tuple[bool, bool, bool, tuple[int, ...]]:
        if nn.parameter.is_lazy(slot.tensor):
            raise ValueError(
                f"got the uninitialised lazy parameter '{slot.name}', expected known shapes; "
                "run one forward pass before wrapping"
            )
        part = slot.part
        # Complex first, since their addresses must be multiples of twice as many bytes.
        return part.is_buffer, not slot.tensor.is_complex(), not part.is_matrix, part.shape if part.is_matrix else ()

    return sorted(slots, key=key)


def _real_dtype(tensor: Tensor) -> torch.dtype:
    return tensor.dtype.to_real() if tensor.is_complex() else tensor.dtype


def _real_numel(tensor: Tensor) -> int:
    return tensor.numel() * (2 if tensor.is_complex() else 1)


def _view_like(segment: Tensor, offset: int, tensor: Tensor) -> Tensor:
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


def _check(slots: list[_Slot]) -> None:
    if not any(slot.is_parameter for slot in slots):
        raise ValueError(
            "got a module without trainable parameters, expected at least one parameter with requires_grad=True; "
            "wrap the module that is trained"
        )
    for slot in slots:
        if hasattr(slot.tensor, "placements"):  # DTensor, whose import takes a second
            raise ValueError(
                f"got '{slot.name}', a DTensor: the module is sharded over processes, by fully_shard (FSDP2) or a "
                "parallel plan; expected plain tensors, since every rank gossips a whole model. Wrap the module "
                "without sharding it; the GPUs of one machine can share one model and its batch with nprocs_per_node"
            )
    devices: dict[torch.device, str] = {}
    for slot in slots:
        devices.setdefault(slot.tensor.device, slot.name)
    if len(devices) > 1:
        found = ", ".join(f"{device} (first: '{name}')" for device, name in devices.items())
        raise ValueError(f"got parameters on several devices: {found}; expected one device; move the module with .to()")
    if slots[0].tensor.is_meta:
        raise ValueError("got parameters on the meta device, expected values; materialise with module.to_empty()")
    spans = sorted(
        (slot.tensor.data_ptr(), slot.tensor.data_ptr() + slot.tensor.numel() * slot.tensor.element_size(), slot.name)
        for slot in slots
        if slot.tensor.numel()
    )
    for (_, stop, first), (start, _, second) in pairwise(spans):
        if start < stop:
            raise ValueError(
                f"got '{first}' and '{second}', distinct tensors that overlap in memory, expected separate storage; "
                "tie them by assigning one Parameter object to both modules"
            )
