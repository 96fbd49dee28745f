"""Chosen: a method with its arguments, as the text of Python names it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..compression.chunk_top_k import ChunkTopK
from ..compression.compressor import Cast, Compressor
from ..compression.quantizer import QSGD, SignNorm
from ..compression.sparsifier import RandomK, TopK
from ..compression.two_bit import TwoBit
from ..consensus_control import ConsensusControl
from ..dpwa.interpolation import ClockInterpolation, ConstantInterpolation, LossInterpolation
from ..graph_manager import named_graphs
from ..registry import METHODS, Method, name_of
from ..rounds.algorithm import Algorithm, Over
from ..schedule import Schedule
from ..wrappers.algorithm import written
from .written import read

COMPRESSORS: Mapping[str, Callable[..., Compressor]] = {
    kind.__name__: kind for kind in (SignNorm, TopK, RandomK, QSGD, Cast, ChunkTopK, TwoBit)
}
"""The compressors that a text may name, by class."""
INTERPOLATIONS: Mapping[str, Callable[..., Any]] = {
    kind.__name__: kind for kind in (ConstantInterpolation, ClockInterpolation, LossInterpolation)
}
"""The ways of dpwa to merge, by class."""
SCHEDULES: Mapping[str, Callable[..., Schedule | ConsensusControl]] = {
    kind.__name__: kind for kind in (Schedule, ConsensusControl)
}
"""The schedules, by class."""
GRAPHS: Mapping[str, Callable[..., Any]] = {
    kind.__name__: kind
    for kind in (*named_graphs.GRAPHS.values(), *named_graphs.TREES.values())
    if isinstance(kind, type)
}
"""The graphs of any number of ranks, by class; a text leaves the number out."""


@dataclass(frozen=True)
class Chosen:
    """A method with its arguments.

    Args:
        method: the entry of the registry.
        made: an algorithm, or arguments of the wrapper by name.
        given: the arguments of `method.make` that were given, by name.
    """

    method: Method
    made: Algorithm | Mapping[str, Any]
    given: Mapping[str, Any] = field(default_factory=dict)

    def over(self, inner: Chosen) -> Chosen:
        """The algorithm with its `Mix` answered by the rounds of another one; see `Algorithm.over`.

        Raises:
            ValueError: one of them is no algorithm.
        """
        if not isinstance(inner, Chosen):
            raise ValueError(
                f"got {inner!r} below {self.text}, expected an algorithm, such as "
                "'GASLoC(momentum=0).over(PowerGossip())'; take one"
            )
        own, other = self._algorithm(), inner._algorithm()
        return Chosen(self.method, own.over(other))

    def _algorithm(self) -> Any:
        made = self.made
        if isinstance(made, Mapping) and issubclass(self.method.algorithm, Algorithm) and not made.get("push_sum"):
            made = self.method.algorithm()  # D-PSGD
        if isinstance(made, Mapping):
            raise ValueError(
                f"got {self.method.call} beside .over(), expected an algorithm that runs in rounds on both sides, such "
                "as 'GASLoC().over(Choco(SignNorm(), step_size=0.4))'; take one"
            )
        return made

    @property
    def arguments(self) -> Mapping[str, Any]:
        """The arguments of the wrapper by name."""
        return self.made if isinstance(self.made, Mapping) else {"algorithm": self.made}

    @property
    def text(self) -> str:
        """The text that makes the same: equal for equal methods."""
        if not isinstance(self.made, Mapping):
            return written(self.made)
        parameters = inspect.signature(self.method.make).parameters
        given = [f"{name}={value!r}" for name, value in self.given.items() if value != parameters[name].default]
        return f"{self.method.call}({', '.join(given)})"

    @property
    def period(self) -> int:
        """The steps for which ranks may train alone; 1: they meet in every step, or the schedule says when."""
        outermost = self.made.outer if isinstance(self.made, Over) else self.made
        if isinstance(outermost, Mapping):
            found = outermost.get("sync_period") or getattr(outermost.get("schedule"), "gossip_every", 1)
        else:
            found = getattr(outermost, "sync_every", 1)
        return int(found or 1)


def names_of_algorithms() -> dict[str, Callable[..., Any]]:
    """All names that the text of an algorithm may call: methods by class and short name, and what they are made of."""
    names: dict[str, Callable[..., Any]] = {}
    for method in METHODS.values():
        make = _chooser(method)
        names |= dict.fromkeys((method.call, method.name, *method.aliases), make)
    return {**names, **COMPRESSORS, **INTERPOLATIONS}


def _chooser(method: Method) -> Callable[..., Chosen]:
    @functools.wraps(method.make, updated=())
    def choose(*args: Any, **arguments: Any) -> Chosen:
        given = inspect.signature(method.make).bind(*args, **arguments).arguments
        return Chosen(method, method.make(*args, **arguments), given)

    return choose


def read_algorithm(text: str, *, option: str = "algorithm", seed: int | None = None) -> Chosen:
    """The method that a text names: "DiLoCo(sync_every=50)", "GASLoC().over(PowerGossip())", or a short name, "sgp".

    Args:
        text: of Python; a short name stands for the `text` of its method.
        option: its name, for errors.
        seed: of the run, for those that draw at random and are given none.

    Raises:
        ValueError: the text names no method; says what is wrong in it, and which name is near.
    """
    if (name := name_of(text.strip())) in METHODS:
        text = METHODS[name].text
    made = read(text, names_of_algorithms(), option=option, seed=seed)
    if not isinstance(made, Chosen):
        raise ValueError(f"got {option}={text!r}, expected an algorithm; pass {made!r} to one, as in --recipe choco")
    return made


def read_compressor(text: str, *, seed: int | None = None) -> Compressor:
    """The compressor that a text names, such as "TopK(0.01)".

    Raises:
        ValueError: it names none.
    """
    return read(text, COMPRESSORS, option="compressor", seed=seed)


def read_schedule(text: str) -> Schedule | ConsensusControl:
    """The schedule that a text names, such as "ConsensusControl(target=2.0)".

    Raises:
        ValueError: it names none.
    """
    return read(text, SCHEDULES, option="schedule")


def read_graph(text: str, *, seed: int | None = None) -> Callable[[int], Any]:
    """A function of the number of ranks that makes the graph of a text, such as "RingGraph(peers_per_itr=2)".

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
