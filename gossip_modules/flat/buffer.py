"""FlatBuffer: the trained tensors of a module as views of one contiguous vector."""

from __future__ import annotations

import functools
import inspect
import itertools
import warnings
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.utils import stateless

from ..state import State, transient
from .aliases import check_shared_memory, find_aliases, move_aliases
from .former_layout import FormerLayout
from .layout import FlatLayout, TensorSpec
from .selection import Selection
from .sharded import Shard, Shards, local_of, meshes_of
from .slots import Slot, TensorPlace, check, check_module, in_order, real_dtype, views_in
from .tables import buffers_of, children_of, parameters_of
from .vector import FlatVector

_LAYOUTS = itertools.count(1)
_FUNCTIONAL_CALL = stateless._functional_call.__code__  # whose frame lends tensors to a module


@functools.cache
def _is_capturing_of(device_type: str) -> Callable[[], bool]:
    """The function of a kind of device that tells whether it is recording a graph."""
    found: Callable[[], bool] = getattr(torch.get_device_module(device_type), "is_current_stream_capturing", bool)
    return found


class FlatBuffer(State):
    """The trained tensors of a module as views of one FlatVector: gossip on the vector is gossip on the module.

    Trainable parameters and running statistics (BatchNorm) are re-pointed into one contiguous vector with one segment
    per dtype: matrices first, matrices of one shape side by side, then parameters of one dimension, then buffers, so
    that codes of matrices work in few batches. Frozen parameters and all other buffers stay where they are, and so do
    running statistics with an infinity or NaN: see [Note: kinds of buffers] of `Selection`. A tensor shared by several
    modules is taken once. Strides are kept, so `channels_last` stays `channels_last`. Other tensors in the same memory,
    such as `weight.detach()`, move too, so they still show the values of the module.

    `.to()`, `.half()`, `load_state_dict(assign=True)` and `copy.deepcopy` make new tensors outside of the vector:
    `is_attached()` notices, and `reattach()` takes in the new ones, with their values. `requires_grad_()`, and new or
    removed layers, change the set of trained tensors: `is_complete()` notices, and `attach()` chooses again. Ranks can
    exchange equal vectors only. Call `attach()` at the same point of training on all ranks; `is_current()` is False
    until `agree()` is called, after the ranks have compared their signatures.

    Args:
        module: mutated: `.data` of its trained tensors is re-pointed. Values do not change.
        include_buffers: whether running statistics are mixed too; a short form of a `selection`.
        selection: the mixed buffers, and the tensors that stay local; None =
            `Selection(gossip_buffers=include_buffers)`.
        num_shards: the vector is padded to this many equal, aligned shards.

    Attributes:
        vector: the tensors are views of it.
        slots: its views, with their places in the module.
        agreed: the common signature of all ranks, as far as is known: the signature at construction, and at each
            `agree()`.
        parameters: its trained parameters, in their order there.
        is_capturable: whether its device can record graphs: see `is_captured`.
        is_sharded: whether this process held shards of parameters, trained or frozen, at construction.
        num_layouts: of the class, the number of vectors made for all buffers of this process: another number says that
            `parameters` of a buffer may be others.

    Raises:
        ValueError: a selection with an unknown name, a TorchScript module, nothing to train, tensors on several
            devices, on the meta device, uninitialised or sharded, in memory shared with other processes or tensors, or
            distinct parameters that overlap in memory.

    Example:
        >>> model = nn.Linear(2, 1)
        >>> buffer = FlatBuffer(model)
        >>> buffer.vector.segments[0].zero_()  # also zeroes model.weight and model.bias
    """

    num_layouts: ClassVar[int] = 0

    # Of the vector, one per slot. The tensors of a copy are no views; attach() makes them so.
    _views: list[Tensor] = transient([])

    def __init__(
        self,
        module: nn.Module,
        *,
        include_buffers: bool = True,
        selection: Selection | None = None,
        num_shards: int = 1,
    ) -> None:
        check_module(module)
        self.module = module
        self.selection = Selection(include_buffers) if selection is None else selection
        self.selection.check(module)
        self.num_shards = num_shards
        statistics = self.selection.averaged(module).items()
        self._excluded = {name for name, x in statistics if not (x.is_meta or bool(torch.isfinite(local_of(x)).all()))}
        if self._excluded:
            warnings.warn(f"buffers with infinite or NaN values stay local: {sorted(self._excluded)}", stacklevel=2)
        self.slots: list[Slot] = []
        self._places: list[tuple[dict[str, Any], str, Tensor, int]] = []  # who holds a tensor, and its address
        self._sharded: list[tuple[Slot, Shard, int]] = []  # parameters of which this process holds a shard
        self._shards, self.is_sharded = Shards(module), bool(meshes_of(module))
        self._choice = _Choice(module, self.selection)
        self.copied_at_start = self.copied_signature()
        self.agreed: list[str] = []  # the signature that all ranks have, as far as is known
        self._is_agreed = True  # whether it is that of the vector
        self.vector: FlatVector
        self.parameters: list[Tensor] = []
        self.attach()
        self.agree()

    @property
    def tensors(self) -> list[Tensor]:
        """All views of the vector: matrices, vectors, buffers."""
        return [slot.tensor for slot in self.slots]

    def gradient_source(self, parameter: Tensor) -> Tensor:
        """The tensor of a parameter's accumulated gradient, for hooks."""
        return next((shard.gradient_source for _, shard, _ in self._sharded if shard.parameter is parameter), parameter)

    def parameters_in(self, vector: FlatVector) -> list[Tensor]:
        """For each of `parameters` its place in another vector of this layout, in its shape; shares memory."""
        slots = [slot for slot in self.slots if slot.is_parameter]
        views = views_in(vector, [slot.memory for slot in slots])
        pairs = zip(slots, views, strict=True)
        return [view if slot.shard is None else slot.shard.like(view) for slot, view in pairs]

    def copied_signature(self) -> list[str]:
        """Names, shapes and dtypes of the buffers taken from rank 0 in an average of all ranks; walks the module."""
        return [f"{name} {tuple(x.shape)} {x.dtype}" for name, x in self.selection.copied(self.module).items()]

    def signature(self) -> list[str]:
        """Names, shapes, dtypes and strides in order: equal on two ranks if and only if their vectors match."""
        return [slot.signature() for slot in self.slots]

    def places(self) -> list[TensorPlace]:
        """Return the place of each tensor in the vector, in the module's order."""
        order = self._order()
        places = [
            TensorPlace(spec.name, k, first, first + spec.numel)
            for k, segment in enumerate(self.vector.layout.segments)
            for first, spec in segment.places()
        ]
        return sorted(places, key=lambda place: order.get(place.name, len(order)))

    def _order(self) -> dict[str, int]:
        """By the name of each tensor of the module, its number in it."""
        names = (
            f"{prefix}.{attribute}" if prefix else attribute
            for prefix, owner in self.module.named_modules()
            for attribute in (*parameters_of(owner), *buffers_of(owner))
        )
        return {name: k for k, name in enumerate(names)}

    def is_current(self) -> bool:
        """Whether it is complete, attached and agreed on, as at nearly every step."""
        return self._is_agreed and self._choice.is_current() and self.is_attached()

    def agree(self, signature: Sequence[str] | None = None) -> None:
        """Record that all ranks have vectors of one signature now.

        Args:
            signature: the lines of `signature()`; None: the signature of the vector.
        """
        own = self.signature()
        self.agreed = own if signature is None else list(signature)
        self._is_agreed = self.agreed == own

    def is_attached(self) -> bool:
        """Whether the module's tensors are still ours and view the vector: one look per tensor, under 0.2 us each."""
        for table, attribute, tensor, pointer in self._places:
            if table.get(attribute) is not tensor or tensor.data_ptr() != pointer:
                return False
        return not self._sharded or all(shard.is_at(slot.there, pointer) for slot, shard, pointer in self._sharded)

    def is_captured(self) -> bool:
        """Whether the device is recording a graph, such as a CUDA graph: replays of it run kernels, and no Python."""
        return _is_capturing_of(self.vector.raw.device.type)()

    def written(self) -> None:
        """Gossip has changed parameters in place: autograd is told, and copies of them are gathered again."""
        torch.autograd.graph.increment_version(self.parameters)
        if self._sharded:
            self._shards.reshard()

    def is_complete(self) -> bool:
        """Whether the set of trained tensors is unchanged: `requires_grad`, layers, their tensors.

        One look per parameter and per submodule, under 0.2 us each.
        """
        return self._choice.is_current()

    def is_trained(self) -> bool:
        """Whether the module has a trained parameter of its own now; walks the module up to the first one."""
        if self.is_lent():
            return False
        ignored = self.selection.ignored_ids(self.module)
        return any(x.requires_grad for x in self.module.parameters() if id(x) not in ignored)

    def is_lent(self) -> bool:
        """Whether the module has other tensors for one forward, as in `functional_call`.

        Such tensors are temporary: do not mix them, and do not make them views of the vector. Call this for a module
        that is not attached.
        """
        places = [(table.get(attribute), tensor) for table, attribute, tensor, _ in self._places]
        if all(there is tensor for there, tensor in places):
            return False
        if any(
            there is not None and isinstance(tensor, nn.Parameter) and not isinstance(there, nn.Parameter)
            for there, tensor in places
        ):
            return True
        frame: FrameType | None = inspect.currentframe()
        while frame is not None:
            if frame.f_code is _FUNCTIONAL_CALL:
                return True
            frame = frame.f_back
        return False

    def has_all(self) -> bool:
        """Whether all of the module's trained tensors are in the vector, if beside others; walks the module."""
        return {id(slot.tensor) for slot in self._trained_tensors()} <= set(map(id, self.tensors))

    def keep(self, *, is_complete: bool = True) -> None:
        """Keep the present tensors of the vector, although some may be frozen by now.

        Args:
            is_complete: False: the next round chooses again.
        """
        self._choice = _Choice(self.module, self.selection)
        self._choice.is_over = not is_complete

    def frozen(self) -> list[Slot]:
        """Parameters of the vector and the module without training at present; walks the module."""
        owners = set(map(id, self.module.modules()))
        return [
            slot
            for slot in self.slots
            if slot.is_parameter
            and not slot.tensor.requires_grad
            and slot.there is slot.tensor
            and id(slot.owner) in owners
        ]

    def candidates(self, *, kept: Sequence[Slot] = (), frozen: Collection[str] = ()) -> list[Slot]:
        """Return the slots for `attach`: the present trained tensors, and others.

        Args:
            kept: other slots, of tensors in the vector.
            frozen: the names of other tensors in the module.
        """
        order = self._order() if kept else {}
        chosen = (*self._trained_tensors(frozen), *kept)
        return in_order(sorted(chosen, key=lambda slot: order.get(slot.name, len(order))))

    def attach(self, slots: list[Slot] | None = None) -> None:
        """Choose the trained tensors, and make them views of a new vector, keeping their values and strides.

        Args:
            slots: from `candidates`; None: the present trained tensors.
        """
        slots = self.candidates() if slots is None else slots
        check(slots)
        self._choice = _Choice(self.module, self.selection)
        self._lay_out(slots)

    def reattach(self) -> None:
        """Make the tensors in the places of ours views of a new vector, trained or not.

        Ranks may do this at different times: their vectors still match.

        [Note: memory that has left] A script may keep the memory of our tensors and put other tensors in their place
        for a while, as in `backup = p.data; p.data = average`. So the vector before is not written any more, and the
        tensors in the places have their values in new memory: neither `backup` nor `average` changes with the model.
        Aliases of tensors that have stayed, such as the parameter of a frozen twin, move along with these.

        A tied weight may have been replaced in one of its places alone, as by a larger embedding, and is trained in the
        others. Then `is_complete()` is False, and the next round chooses again.
        """
        self._follow_names()
        slots = [slot.holding(slot.there) for slot in self.slots if slot.there is not None]
        unique = {id(slot.tensor): slot for slot in reversed(slots)}  # two places may hold one tensor now
        slots = in_order(slot for slot in slots if unique[id(slot.tensor)] is slot)
        check(slots)
        stayed = {id(x) for _, _, x, pointer in self._places if x.data_ptr() == pointer}
        self._lay_out(slots, followed=[slot for slot in slots if slot.shard is None and id(slot.tensor) in stayed])
        if not self._sharded and self._has_others():
            self._choice.is_over = True

    def _follow_names(self) -> None:
        """Find tensors of ours that the module has under another name now, as after `torch.nn.utils.prune`."""
        if all(slot.there is not None for slot in self.slots):
            return
        moved = {id(slot.tensor): k for k, slot in enumerate(self.slots) if slot.there is None}
        for prefix, owner in self.module.named_modules():
            for table in (parameters_of(owner), buffers_of(owner)):
                for attribute, tensor in table.items():
                    if (k := moved.pop(id(tensor), None)) is not None:
                        name = f"{prefix}.{attribute}" if prefix else attribute
                        self.slots[k] = self.slots[k]._replace(owner=owner, attribute=attribute, name=name)

    def former_layout(self) -> FormerLayout:
        """The present layout of the vector, for corrections that come after `reattach` has made another one."""
        self._follow_names()
        return FormerLayout(self.vector.layout, self.slots, self._views)

    def _lay_out(self, slots: list[Slot], followed: Sequence[Slot] | None = None) -> None:
        """Make the tensors views of a new vector.

        Args:
            slots: the tensors.
            followed: those whose aliases move along; None: all.
        """
        plain = [slot for slot in slots if slot.shard is None]
        check_shared_memory(plain)
        self._views = []  # which are not to be taken for tensors of others
        aliases = find_aliases(plain if followed is None else followed)
        specs: dict[torch.dtype, list[TensorSpec]] = {}
        for slot in slots:
            specs.setdefault(real_dtype(slot.memory), []).append(slot.spec)
        # A new vector, not the old one: the tensors may still view the old one at other offsets.
        vector = FlatVector.zeros(FlatLayout.of(specs.items(), self.num_shards), slots[0].memory.device)
        if self.slots:
            vector.push_sum_weight.copy_(self.vector.push_sum_weight)
        self.slots, self.vector = slots, vector
        self._views = list(views_in(vector, [slot.memory for slot in slots]))
        with torch.no_grad():
            for slot, view in zip(slots, self._views, strict=True):
                view.copy_(slot.memory)
                slot.move(view)
            move_aliases(aliases)
        self.parameters = [slot.tensor for slot in slots if slot.is_parameter]
        self.is_capturable = _is_capturing_of(vector.raw.device.type) is not bool
        FlatBuffer.num_layouts = next(_LAYOUTS)
        tied = self._tied_places()
        self._places = [
            (table, name, tensor, tensor.data_ptr())
            for slot in plain
            for table, name, tensor in ((slot.table, slot.attribute, slot.tensor), *tied.get(id(slot.tensor), ()))
        ]
        self._sharded = [(slot, slot.shard, slot.memory.data_ptr()) for slot in slots if slot.shard is not None]
        self._is_agreed = self.signature() == self.agreed

    def _tied_places(self) -> Mapping[int, list[tuple[dict[str, Any], str, Tensor]]]:
        """The places in the module that hold a tensor of a slot too, such as a tied weight, by id of the tensor."""
        first = {(id(slot.table), slot.attribute) for slot in self.slots}
        ours, tied = set(map(id, self.tensors)), defaultdict[int, list[tuple[dict[str, Any], str, Tensor]]](list)
        for owner in self.module.modules():
            for table in (parameters_of(owner), buffers_of(owner)):
                for name, x in table.items():
                    if x is not None and id(x) in ours and (id(table), name) not in first:
                        tied[id(x)].append((table, name, x))
        return tied

    def _has_others(self) -> bool:
        """Whether a trained parameter of the module is not in the vector."""
        left = {*map(id, self.parameters), *self.selection.ignored_ids(self.module)}
        return any(x.requires_grad and id(x) not in left for x in self.module.parameters())

    def _trained_tensors(self, frozen: Collection[str] = ()) -> Iterator[Slot]:
        """The tensors that travel, and frozen parameters with these names."""
        self._shards = Shards(self.module)
        self._shards.reshard()
        shards = self._shards.of(self.module)
        seen = set(self.selection.ignored_ids(self.module))
        for prefix, owner in self.module.named_modules():
            tables: tuple[tuple[dict[str, Any], bool], ...] = ((parameters_of(owner), True), (buffers_of(owner), False))
            for table, is_parameter in tables:
                for attribute, tensor in table.items():
                    name = f"{prefix}.{attribute}" if prefix else attribute
                    if tensor is None or id(tensor) in seen:
                        continue
                    is_statistic = not is_parameter and self.selection.averages(owner, attribute, name)
                    is_trained = tensor.requires_grad or name in frozen
                    if is_trained if is_parameter else is_statistic and name not in self._excluded:
                        seen.add(id(tensor))
                        yield Slot(owner, attribute, name, tensor, is_parameter, shards.get(id(tensor)))


class _Choice:
    """The state of a module that determines its trained tensors: a change is noticed at the next step.

    Args:
        module: recorded in its present state.
        selection: the ignored parameters, and the buffers that an average takes from rank 0.
    """

    def __init__(self, module: nn.Module, selection: Selection) -> None:
        self.is_over = False
        ignored, copied = selection.ignored_ids(module), set(map(id, selection.copied(module).values()))
        owners = list(module.modules())
        tables = [table for owner in owners for table in (parameters_of(owner), buffers_of(owner))]
        children = [children_of(owner) for owner in owners]
        self._empty = [table for table in (*tables, *children) if not table]  # most of them
        self._sizes = [(table, len(table)) for table in tables if table]
        self._children = [(table, dict(table)) for table in children if table]
        self._parameters = [
            (parameters_of(owner), name, parameter is not None and parameter.requires_grad)
            for owner in owners
            for name, parameter in parameters_of(owner).items()
            if id(parameter) not in ignored
        ]
        self._copied = [
            (buffers_of(owner), name, buffer.shape)
            for owner in owners
            for name, buffer in buffers_of(owner).items()
            if id(buffer) in copied and buffer is not None
        ]

    def is_current(self) -> bool:
        """Whether the module is unchanged."""
        if self.is_over or any(self._empty):
            return False
        for table, size in self._sizes:
            if len(table) != size:
                return False
        for now, children in self._children:
            if now != children:  # other names or modules, in C; modules are equal to themselves only
                return False
        for parameters, name, is_trained in self._parameters:
            parameter = parameters.get(name)
            if (parameter is not None and parameter.requires_grad) is not is_trained:
                return False
        for buffers, name, shape in self._copied:
            if (buffer := buffers.get(name)) is None or buffer.shape != shape:
                return False
        return True
