"""FormerLayout: the layout of a vector before the tensors of the module changed, for corrections that are older."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from .layout import FlatLayout
from .slots import Slot, views_in
from .vector import FlatVector


class FormerLayout:
    """The layout that a vector had, and the places in the module of its tensors.

    A round in flight has a correction of the layout with which it began. Meanwhile a script may have put tensors of
    another dtype or shape into the module. `vector` has the values of the present tensors in the former layout, so that
    the correction can be added, and `write_back` gives them to the present tensors. Tensors of other shapes, and
    parameters that were frozen meanwhile, stay as they are.

    Args:
        layout: of the former vector.
        slots: the places of its tensors in the module.
        views: its tensors.
    """

    def __init__(self, layout: FlatLayout, slots: Sequence[Slot], views: Sequence[Tensor]) -> None:
        self.layout, self._slots = layout, slots
        self._empty = [view.to("meta") for view in views]  # dtypes, shapes and strides

    @torch.no_grad()
    def vector(self, present: FlatVector) -> FlatVector:
        """A new vector of the former layout with the values of the tensors that are in the module now.

        Args:
            present: the vector of these tensors; gives its push-sum weight and its device.
        """
        vector = FlatVector.zeros(self.layout, present.raw.device)
        vector.push_sum_weight.copy_(present.push_sum_weight)
        for view, memory in self._pairs(vector):
            view.copy_(memory)
        return vector

    @torch.no_grad()
    def write_back(self, vector: FlatVector, present: FlatVector) -> None:
        """The tensors that are in the module now <- a vector that `vector` gave; `present` <- its push-sum weight."""
        for view, memory in self._pairs(vector):
            memory.copy_(view)
        present.push_sum_weight.copy_(vector.push_sum_weight)

    def _pairs(self, vector: FlatVector) -> Iterator[tuple[Tensor, Tensor]]:
        """Each place in the vector, and the elements of the tensor that is in the module now."""
        for view, slot in zip(views_in(vector, self._empty), self._slots, strict=True):
            tensor = slot.there
            if tensor is not None and (tensor.requires_grad or not slot.is_parameter):
                memory = slot.holding(tensor).memory.detach()
                if memory.shape == view.shape:
                    yield view, memory
