"""Periodic: algorithms with a round every H steps, optionally by fragments of the model and under training."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import cached_property
from typing import Any, ClassVar, NamedTuple, TypeAlias, TypeGuard

import torch
from torch import Tensor, nn

from ..checks import is_number
from ..flat.layout import FlatLayout
from ..flat.slots import TensorPlace
from ..flat.vector import FlatVector
from ..schedule import Times
from .algorithm import Algorithm
from .requests import Vectors
from .vector import Vector


@dataclass(frozen=True)
class Periodic(Algorithm):
    """An algorithm with a round every `sync_every` optimizer steps.

    [Note: Fragments and delays] Fragment p of P has rounds at the steps p H / P, p H / P + H, ..., with its own memory,
    as if it were a model. With a delay, a thread answers the first request of a round under training, and the round
    resumes `delay` steps after it began. `v.x` is then the model at that later step.

    [Note: Late arrival] With a delay a rank has the model x when phi arrives, and had the model s when the round began.
    `arrival` chooses what becomes of the steps of the delay, x - s:

        "blend"       x <- alpha x + (1 - alpha) phi        # alpha = own_weight; 0 drops the steps of the delay
        "carry"       x <- phi + (x - s)                    # keeps all of them; takes a copy of the fragment
        "adaptive"    carries where the drifts of the ranks agree, and else drops the steps; see `OuterMethod`

    Running statistics are blended with 1/2, or alpha; with "carry" and "adaptive" they are always carried.

    Args:
        sync_every: H, the number of optimizer steps from one round to the next, at least 1.
        fragments: the parts of the model that have rounds at different steps, evenly spread over the H steps. A number
            cuts the model into equal runs in the order of the module. Or pass a list of names of modules or parameters
            for each fragment, with each trained tensor in exactly one. If there are more than H fragments, several have
            rounds in one step, one after the other.
        delay: tau, the number of optimizer steps for which a round runs in a thread, less than H; 0: training waits
            for the round; "auto": the smallest number of steps, equal on all ranks, after which all ranks have had the
            reply of the round before, see [Note: delay="auto"] of `AgreedDelay`. Not for methods that mix on a graph,
            with a membership, nodes or shards.
        own_weight: alpha, the weight of the rank's own model at the end of a round: x <- alpha x + (1 - alpha) phi;
            0 <= alpha < 1. None: 1/2 with a delay, else 0. At 0 the steps during the delay are lost.
        arrival: "blend" or "carry"; see [Note: Late arrival]. Without a delay "carry" is x <- phi.
        anchor_device: "cpu" keeps the memory of the algorithm in host memory and computes rounds there: see
            [Note: Memory of the host] of `Rounds`. None: the device of the model. Ranks may choose differently.

    Raises:
        ValueError: an argument is out of its range.
    """

    sync_every: int
    _: KW_ONLY
    fragments: Fragments = 1
    delay: int | str = 0
    own_weight: float | None = None
    arrival: str = "blend"
    anchor_device: torch.device | str | None = field(default=None, repr=False)

    arrivals: ClassVar[tuple[str, ...]] = ("blend", "carry")
    """The values of `arrival`."""

    def __post_init__(self) -> None:
        name = type(self).__name__
        if isinstance(self.sync_every, bool) or not isinstance(self.sync_every, int) or self.sync_every < 1:
            raise ValueError(
                f"{name}: got sync_every={self.sync_every!r}, expected a whole number of at least 1, the optimizer "
                "steps between two outer steps; 30 to 500 are usual"
            )
        if self.anchor_device is not None and str(self.anchor_device) != "cpu":
            raise ValueError(
                f"{name}: got anchor_device={self.anchor_device!r}, expected 'cpu', or None for the device of the model"
            )
        if not is_fragments(self.fragments):
            raise ValueError(
                f"{name}: got fragments={self.fragments!r}, expected their number, at least 1, or for each of them a "
                "list of names of modules, as in [['embed', 'layers.0'], ['layers.1', 'head']]; one name in a fragment "
                "is a list too: [['embed'], ['head']]"
            )
        most = self.sync_every - 1
        is_steps = isinstance(self.delay, int) and not isinstance(self.delay, bool) and 0 <= self.delay <= most
        if self.delay == "auto" and not self.averages_exactly:
            raise ValueError(
                f"{name}: got delay='auto', expected a number of steps: its rounds are among neighbours, and a delay "
                "that fits all ranks would take messages among all of them; pass delay=1, for example"
            )
        if not is_steps and not (self.delay == "auto" and most):
            raise ValueError(
                f"{name}: got delay={self.delay!r} with sync_every={self.sync_every}, expected 0 <= delay <= {most} "
                "optimizer steps, or 'auto' with a period of at least 2, since an outer step must end before the "
                "fragment takes its next one"
            )
        if self.arrival not in self.arrivals:
            raise ValueError(
                f"{name}: got arrival={self.arrival!r}, expected one of {', '.join(map(repr, self.arrivals))}; 'blend' "
                "averages the late model with the anchor, and 'carry' keeps its steps"
            )
        if self.keeps_sent and self.own_weight is not None:
            raise ValueError(
                f"{name}: got own_weight={self.own_weight!r} with arrival={self.arrival!r}, expected one of them: the "
                "weight belongs to arrival='blend'"
            )
        if not (is_number(self.kept) and 0 <= self.kept < 1):
            raise ValueError(
                f"{name}: got own_weight={self.own_weight!r}, expected 0 <= own_weight < 1; 0 replaces the "
                "model by the anchor"
            )

    @property
    def is_in_pieces(self) -> bool:
        """Whether rounds run in pieces: see `Rounds`."""
        return self.num_fragments > 1 or bool(self.delay) or self.anchor_device is not None

    @property
    def num_fragments(self) -> int:
        """The number of fragments."""
        return self.fragments if isinstance(self.fragments, int) else len(self.fragments)

    @property
    def module_names(self) -> Sequence[str]:
        """The names of modules and parameters in the settings; a wrapper checks that the model has them."""
        return () if isinstance(self.fragments, int) else [name for names in self.fragments for name in names]

    @property
    def kept(self) -> float:
        """alpha: `own_weight`, or its default; 0 if the steps of the delay are carried."""
        if self.keeps_sent:
            return 0.0
        return (0.5 if self.delay else 0.0) if self.own_weight is None else self.own_weight

    @property
    def keeps_sent(self) -> bool:
        """Whether rounds under training need the model with which they began."""
        return self.arrival != "blend"

    def arrive(self, v: Vectors, phi: Vector, *, carries: bool = True) -> None:
        """x <- phi; the last action of a round. See [Note: Late arrival].

        Args:
            v: the argument of `round`.
            phi: the vector that replaces the model.
            carries: whether the steps of the delay are carried, if the algorithm `keeps_sent`.
        """
        if v.sent is not None and carries:
            v.x.carry_(phi, v.sent)
        else:
            v.x.interpolate_(phi, self.kept)

    def is_due(self, k: int) -> bool:
        """See `Algorithm`."""
        return bool(self.starting_at(k))

    @property
    def times(self) -> tuple[Times, ...]:
        """See `Algorithm`: the steps of each fragment."""
        return tuple(Times(first, self.sync_every) for first in self._firsts)

    def averages_at(self, k: int) -> bool:
        """See `Algorithm`."""
        return self.averages_exactly and bool(self.starting_at(k))

    def starting_at(self, k: int) -> list[int]:
        """Return the fragments that begin a round after k optimizer steps."""
        firsts, every = self._firsts, self.sync_every
        return [p for p, first in enumerate(firsts) if k >= first and (k - first) % every == 0]

    def number_of(self, fragment: int, k: int) -> int:
        """Return the number of rounds of a fragment before step k, at which it begins a round."""
        return (k - self._firsts[fragment]) // self.sync_every

    @cached_property
    def _firsts(self) -> Sequence[int]:
        """The step of the first round of each fragment."""
        num_fragments = self.num_fragments
        return [p * self.sync_every // num_fragments or self.sync_every for p in range(num_fragments)]


Fragments: TypeAlias = int | Sequence[Sequence[str]]
"""The cut of a model into fragments: a number of equal runs of its elements, or a list of module names for each."""

_GRAIN = 64  # equal runs are cut at multiples of so many elements


class Range(NamedTuple):
    """Elements [first, last) of a segment of a flat vector."""

    segment: int
    first: int
    last: int


@dataclass(frozen=True)
class Fragment:
    """Some elements of a flat vector, and their layout side by side.

    Args:
        ranges: the elements, in ascending order; neighbouring ranges do not touch.
        layout: the layout of a vector of these elements alone, one segment for each dtype with elements.
    """

    ranges: tuple[Range, ...]
    layout: FlatLayout

    @classmethod
    def of(cls, layout: FlatLayout, ranges: Iterable[Range]) -> Fragment:
        """Make the fragment of these elements of vectors with this layout."""
        merged: list[Range] = []
        for new in sorted(ranges):
            if merged and merged[-1].segment == new.segment and merged[-1].last == new.first:
                merged[-1] = merged[-1]._replace(last=new.last)
            elif new.first < new.last:
                merged.append(new)
        sizes = []
        for k, segment in enumerate(layout.segments):
            specs = [spec for r in merged if r.segment == k for spec in segment.cut(r.first, r.last)]
            if specs:
                sizes.append((segment.dtype, specs))
        return cls(tuple(merged), FlatLayout.of(sizes))

    def read(self, x: FlatVector, device: torch.device) -> FlatVector:
        """Return a copy of the elements of x."""
        own = FlatVector.zeros(self.layout, device)
        for place, part in self.pairs(x, own):
            part.copy_(place)
        return own

    def write(self, own: FlatVector, x: FlatVector) -> None:
        """The elements of x <- a vector of this fragment alone."""
        for place, part in self.pairs(x, own):
            place.copy_(part)

    def pairs(self, x: FlatVector, own: FlatVector) -> list[tuple[Tensor, Tensor]]:
        """Return views of each range in x and of the same elements in `own`, a vector of this fragment alone."""
        segments, offsets = iter(own.segments), dict.fromkeys((r.segment for r in self.ranges), 0)
        flat = {k: next(segments) for k in offsets}
        pairs = []
        for k, first, last in self.ranges:
            start = offsets[k]
            offsets[k] = stop = start + last - first
            pairs.append((x.segments[k][first:last], flat[k][start:stop]))
        return pairs


def cut(layout: FlatLayout, fragments: Fragments, places: Sequence[TensorPlace] | None) -> list[Fragment]:
    """Cut a model into fragments. Each element is in exactly one.

    Args:
        layout: the layout of the flat vector.
        fragments: the argument of `Periodic`.
        places: the places of the tensors in the vector, in the order of the model; None: not known, so equal runs
            follow the order of the vector.

    Raises:
        ValueError: a tensor is in no fragment, or in several.
    """
    if not isinstance(fragments, int):
        assert places is not None, "fragments are names of modules, but the places of the tensors are not known"
        return [Fragment.of(layout, ranges) for ranges in _by_name(places, fragments)]
    if places is None:
        places = [TensorPlace("", k, 0, segment.numel) for k, segment in enumerate(layout.segments)]
    return [Fragment.of(layout, ranges) for ranges in _evenly(places, fragments)]


def is_fragments(fragments: object) -> bool:
    """Whether a value is a number of fragments, or a list with a list of names for each fragment."""
    if isinstance(fragments, int):
        return not isinstance(fragments, bool) and fragments >= 1
    return _is_list(fragments) and all(
        _is_list(names) and all(isinstance(name, str) for name in names) for names in fragments
    )


def check_names(algorithm: Periodic, module: nn.Module) -> None:
    """Raise ValueError if the settings of an algorithm have names that the model does not have.

    Args:
        algorithm: the algorithm.
        module: the model.
    """
    if not (names := algorithm.module_names):
        return
    known = [name for name, _ in (*module.named_modules(), *module.named_parameters(), *module.named_buffers()) if name]
    if unknown := [name for name in names if name not in known]:
        raise ValueError(
            f"got {algorithm}, but {unknown} are names of no module, parameter or buffer of the model, "
            f"expected names such as {[name for name, _ in module.named_children()]}; see module.named_modules()"
        )


def _evenly(places: Sequence[TensorPlace], num_fragments: int) -> list[list[Range]]:
    """Return runs of equally many elements, in the order of the places."""
    total = sum(place.last - place.first for place in places)
    stops = [min(-(-total * p // num_fragments // _GRAIN) * _GRAIN, total) for p in range(num_fragments)] + [total]
    cuts: list[list[Range]] = [[] for _ in range(num_fragments)]
    start = 0
    for place in places:
        stop = start + place.last - place.first
        for p, ranges in enumerate(cuts):
            first, last = max(start, stops[p]), min(stop, stops[p + 1])
            if first < last:
                ranges.append(Range(place.segment, place.first + first - start, place.first + last - start))
        start = stop
    return cuts


def _by_name(places: Sequence[TensorPlace], fragments: Sequence[Sequence[str]]) -> list[list[Range]]:
    """Return the tensors of the named modules of each fragment."""
    cuts: list[list[Range]] = [[] for _ in fragments]
    for place in places:
        owners = [p for p, names in enumerate(fragments) if any(f"{place.name}.".startswith(f"{n}.") for n in names)]
        if len(owners) != 1:
            raise ValueError(
                f"got fragments={fragments!r}, {len(owners)} of them with '{place.name}', expected each trained tensor "
                "in exactly one; name whole modules, as in [['embed', 'layers.0'], ['layers.1', 'head']], or give the "
                "number of fragments"
            )
        cuts[owners[0]].append(Range(*place[1:]))
    return cuts


def _is_list(x: object) -> TypeGuard[Sequence[Any]]:
    """Whether a value is a sequence with elements; a string is not."""
    return isinstance(x, Sequence) and not isinstance(x, str) and len(x) > 0
