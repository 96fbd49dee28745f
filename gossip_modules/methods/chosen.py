"""Chosen: a method with its arguments, as the text of Python names it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from ..algorithms.rda import RDA
from ..compression import (
    QSGD,
    Absmax,
    BlockFloat,
    Cast,
    ChunkTopK,
    Compressor,
    Identity,
    RandomK,
    SignNorm,
    TopK,
    TwoBit,
)
from ..extras import MissingExtra, load
from ..graph_manager import named_graphs
from ..old_names import remedy_of_removed
from ..registry import METHODS, Method, name_of
from ..rounds.algorithm import Algorithm, Over
from ..schedule import Schedule
from ..wrappers.choices import written
from .written import read

COMPRESSORS: Mapping[str, Callable[..., Compressor]] = {
    kind.__name__: kind
    for kind in (SignNorm, TopK, RandomK, QSGD, Absmax, BlockFloat, Cast, ChunkTopK, TwoBit, Identity)
}
"""The compressors that a text may name, by class."""
MERGES: Mapping[str, Callable[..., RDA]] = {"RDA": RDA}
"""The merges of drifts, by class."""
INTERPOLATIONS = ("ConstantInterpolation", "ClockInterpolation", "LossInterpolation")
"""The classes of dpwa that a text may name: ways to merge."""
SCHEDULES: Mapping[str, Callable[..., Schedule]] = {"Schedule": Schedule}
"""The schedules, by class."""
GRAPHS: Mapping[str, Callable[..., Any]] = {
    kind.__name__: kind
    for kind in (*named_graphs.GRAPHS.values(), *named_graphs.TREES.values())
    if isinstance(kind, type)
}
"""The graphs of any number of ranks, by class; a text leaves the number out."""


@dataclass(frozen=True)
class Chosen:
    """A method with its settings.

    Args:
        method: the entry of the registry.
        made: an object of `method.make`, or an algorithm of that class over others.
    """

    method: Method
    made: Any

    @property
    def arguments(self) -> Mapping[str, Any]:
        """The arguments of the wrapper by name."""
        is_algorithm = isinstance(self.made, Algorithm)
        if is_algorithm and not (self.method.fixed and isinstance(self.made, self.method.make)):
            return {"algorithm": self.made}
        own = {} if is_algorithm else {field.name: getattr(self.made, field.name) for field in fields(self.made)}
        return {**own, **self.method.fixed}

    @property
    def text(self) -> str:
        """The text of the method, equal for equal methods."""
        return written(self.made)

    @property
    def period(self) -> int:
        """The number of steps that ranks may train alone; 1: they meet in every step, or as the schedule says."""
        outermost = self.made.parts[0] if isinstance(self.made, Algorithm) else self.made
        name = self.method.period
        return int(getattr(outermost, name) or 1) if name else 1

    def with_settings(self, settings: Mapping[str, Any]) -> Chosen:
        """Return the method with other values of its settings; None keeps a value. Unknown settings are ignored."""
        own = {name: value for name, value in settings.items() if value is not None and name in self.method.settings}
        if isinstance(self.made, Over):
            return replace(self, made=replace(self.made, outer=replace(self.made.outer, **own)))
        return replace(self, made=replace(self.made, **own))


def read_algorithm(text: str, *, option: str = "algorithm", seed: int | None = None) -> Chosen:
    """Return the method of a text: "DiLoCo(sync_every=50)", "GASLoC(momentum=0).over(PowerGossip())", or a name, "sgp".

    Args:
        text: of Python; a short name stands for the `text` of its method.
        option: the name of the option, for errors.
        seed: the seed of the run, for methods with random draws and without a seed in the text.

    Raises:
        ValueError: the text names no method; the error has the mistake and the nearest name.
    """
    if (name := name_of(text.strip())) in METHODS:
        text = METHODS[name].text
    names: dict[str, Callable[..., Any]] = {
        name: method.make for method in METHODS.values() for name in (method.call, method.name)
    }
    made = read(text, {**names, **COMPRESSORS, **MERGES, **_interpolations()}, option=option, seed=seed)
    kind = type(made.parts[0] if isinstance(made, Algorithm) else made)
    chosen = next((method for method in METHODS.values() if method.make is kind), None)
    if chosen is None:
        raise ValueError(f"got {option}={text!r}, expected an algorithm; pass {made!r} to one, as in --recipe choco")
    return Chosen(chosen, made)


def _interpolations() -> Mapping[str, Callable[..., Any]]:
    """The ways of dpwa to merge, by class; none if dpwa is not installed."""
    try:
        return {name: load(f"dpwa.interpolation:{name}") for name in INTERPOLATIONS}
    except MissingExtra:
        return {}


def read_compressor(text: str, *, seed: int | None = None) -> Compressor:
    """Return the compressor of a text, such as "TopK(0.01)".

    Raises:
        ValueError: it names none.
    """
    return read(text, COMPRESSORS, option="compressor", seed=seed)


def read_schedule(text: str) -> Schedule:
    """Return the schedule of a text, such as "Schedule(average_every=8)".

    Raises:
        ValueError: it names none.
    """
    name = text.strip().partition("(")[0]
    if remedy := remedy_of_removed(name):
        raise ValueError(f"got schedule={text!r}, expected a Schedule: {name} is gone; {remedy}")
    return read(text, SCHEDULES, option="schedule")


def read_graph(text: str, *, seed: int | None = None) -> Callable[[int], Any]:
    """Return a function that makes the graph of a text for a number of ranks.

    Args:
        text: the text, such as "RingGraph(peers_per_itr=2)".
        seed: the seed of random graphs without seed=; None: their own default.

    Raises:
        ValueError: it names none.
    """
    makers = {name: _with_size_left_out(kind) for name, kind in GRAPHS.items()}
    return read(text, makers, option="graph", seed=seed)


def _with_size_left_out(kind: Callable[..., Any]) -> Callable[..., Callable[[int], Any]]:
    def make(**arguments: Any) -> Callable[[int], Any]:
        return lambda world_size: kind(world_size, **arguments)

    signature = inspect.signature(kind)
    parameters = [p.replace(kind=p.KEYWORD_ONLY) for p in list(signature.parameters.values())[1:]]
    make.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return make
