"""Whether tensors have been written since a moment: versions, and samples of elements where versions do not tell."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from ..flat.layout import FlatLayout
from ..flat.sharded import local_of
from ..flat.vector import FlatVector

version_of = operator.attrgetter("_version")
"""The number of operations in place on a tensor so far; views that share it count together."""
_SAMPLE = 64  # elements of a tensor that are compared
_SAMPLE_OF_MANY = 8  # elements of each parameter of a vector


def sample(x: Tensor) -> Tensor:
    """Some numbers of x, the same ones in tensors of one shape: flat, without autograd, maybe a view.

    A complex number is two.
    """
    local = local_of(x.detach())
    flat = (torch.view_as_real(local) if local.is_complex() else local).reshape(-1)
    return flat[:: max(1, flat.numel() // _SAMPLE)]


NUM_ROUND_TRIP_ULPS = 4
"""How far a parameter may be from where it was after z -> x = z w -> z = x / w, in units of its dtype (`eps`).

The two operations of a round trip are off by half a unit each, so by one together. A copy and its parameter may each
have made one trip, which is two; and a step inside a step (`StepListener.reenter_step`) makes another one. With a
smaller number such a step would count as one that has changed something, and copies of weights would be told apart from
their parameters. With a much larger one the change of a step with a small learning rate would be no change."""


class Moment:
    """A moment of training, to tell whether tensors have been written since.

    An operation in place changes the version of a tensor, also where it writes the values that the tensor has. A write
    through `.data`, or through other memory of the same storage, changes no version, but elements. So versions tell
    first, at no cost, and then samples do.

    Args:
        sampled: the tensors whose elements are compared.
        counted: the tensors whose versions are compared.

    Attributes:
        has_samples: False once the library itself has written the tensors, until `now()`.
    """

    def __init__(self, sampled: Iterable[Tensor] = (), counted: Iterable[Tensor] = ()) -> None:
        self._views = [sample(x) for x in sampled if x.numel()]
        self._values = [view.clone() for view in self._views]
        self.has_samples = True
        self.count(counted)

    def count(self, tensors: Iterable[Tensor]) -> None:
        """Compare the versions of these tensors from now on."""
        self._counted = tuple(tensors)
        self.recount()

    def recount(self) -> None:
        """Compare versions with the present ones."""
        self._num_versions = self._versions()

    def _versions(self) -> int:
        num = 0
        for x in self._counted:
            num += version_of(x)
        return num

    def now(self) -> None:
        """Let this be the moment."""
        self._num_versions = self._versions()
        for value, view in zip(self._values, self._views, strict=True):
            value.copy_(view)
        self.has_samples = True

    def num_writes(self) -> int:
        """The operations in place on the counted tensors since the moment."""
        return self._versions() - self._num_versions

    def has_changed(self, *, num_ulps: int = 0) -> bool:
        """Whether elements differ, by more than so many units of their dtype."""
        if not num_ulps:
            return not all(map(torch.equal, self._values, self._views))
        pairs = zip(self._values, self._views, strict=True)
        return not all(torch.allclose(x, y, rtol=num_ulps * torch.finfo(x.dtype).eps, atol=0.0) for x, y in pairs)

    def is_written(self) -> bool:
        """Whether the tensors have been written since the moment."""
        return self.num_writes() != 0 or (self.has_samples and self.has_changed())


class ParameterSamples:
    """Some elements of each parameter of flat vectors with one layout, to notice which parameters were written.

    Args:
        layout: of the vectors.
        device: of the vectors.
    """

    def __init__(self, layout: FlatLayout, device: torch.device) -> None:
        self.layout = layout
        self._places: list[Tensor] = []  # of the sampled elements of each segment, int64
        owners: list[int] = []  # of each sampled element the number of its parameter
        num_parameters = 0
        for segment in layout.segments:
            places: list[int] = []
            for first, spec in segment.places():
                if spec.is_buffer:
                    continue
                chosen = range(first, first + spec.numel, max(1, spec.numel // _SAMPLE_OF_MANY))
                places += chosen
                owners += [num_parameters] * len(chosen)
                num_parameters += 1
            self._places.append(torch.tensor(places, dtype=torch.int64, device="cpu").to(device))
        self._owners = torch.tensor(owners, dtype=torch.int64, device="cpu")
        self._num_parameters = num_parameters

    def read(self, x: FlatVector) -> list[Tensor]:
        """Copies of the elements of x: one flat tensor for each segment."""
        return [segment[places] for segment, places in zip(x.segments, self._places, strict=True)]

    def read_to(self, values: Sequence[Tensor], x: FlatVector) -> None:
        """`values`, which `read` gave, <- the elements of x."""
        for out, segment, places in zip(values, x.segments, self._places, strict=True):
            torch.index_select(segment, 0, places, out=out)

    def are_equal(self, values: Sequence[Tensor], others: Sequence[Tensor]) -> Tensor:
        """For each parameter whether its elements are equal in both, NaN to NaN: bool [parameters], on the CPU.

        Args:
            values: as `read` gave them.
            others: as `read` gave them, or empty; then none is equal.
        """
        if not others:
            return torch.zeros(self._num_parameters, dtype=torch.bool, device="cpu")
        same = torch.cat([((x == y) | (x.isnan() & y.isnan())).cpu() for x, y in zip(values, others, strict=True)])
        num_equal = torch.ones(self._num_parameters, dtype=torch.int64, device="cpu")
        return num_equal.scatter_reduce_(0, self._owners, same.long(), "amin").bool()

    def merge(self, values: Sequence[Tensor], others: Sequence[Tensor], chosen: Tensor) -> None:
        """`values` <- `others` for the chosen parameters: bool [parameters], on the CPU."""
        start, of_elements = 0, chosen[self._owners]
        for x, y in zip(values, others, strict=True):
            here = of_elements[start : start + len(x)].to(x.device)
            start += len(x)
            x.copy_(torch.where(here, y, x))

    def copy_parameters(self, x: FlatVector, source: FlatVector, chosen: Tensor) -> None:
        """x <- `source` for the chosen parameters, whole: bool [parameters], on the CPU."""
        number = 0
        for own, other, segment in zip(x.segments, source.segments, self.layout.segments, strict=True):
            for first, spec in segment.places():
                if not spec.is_buffer:
                    if chosen[number]:
                        own[first : first + spec.numel].copy_(other[first : first + spec.numel])
                    number += 1
