"""The table of training methods: what each is called, where it stands, how it wraps a model, how it is simulated.

`gossip_modules.methods` fills it with the methods of this library. The recipes of the training scripts, the rows of
the simulator, the consensus experiment and the tables of the documentation are made from it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

StepSizes: TypeAlias = Mapping[tuple[str, float | None], float]
"""Step sizes of consensus by the name of a code and the value of its option, bits or ratio; None: it has no option."""


@dataclass(frozen=True)
class Paper:
    """Where a method was published."""

    authors: str
    title: str
    venue: str
    """With the year, e.g. "ICML 2019"."""
    arxiv: str = ""
    """The number of the preprint, e.g. "1902.00340"."""

    def __str__(self) -> str:
        preprint = f", arXiv {self.arxiv}" if self.arxiv else ""
        return f'{self.authors}, "{self.title}", {self.venue}{preprint}'


@dataclass(frozen=True)
class Method:
    """A training method. `register` enters it in METHODS, and with that makes it a recipe and a row of the simulator.

    Args:
        name: what a user types, a single word in lower case.
        title: what tables and pictures call it.
        summary: what it does, in one sentence.
        algorithm: the class that is the algorithm; `file` is where it stands.
        example: a line of Python that wraps `model` by it.
        make: makes the wrapper, given (module, `MethodOptions`, `Context`).
        simulate: makes the simulated method, given (`simulate.Choice`, `simulate.Setting`); None: the simulator does
            not know it.
        paper: where it was published; None: nowhere.
        graph: the graphs that it works on.
        options: the names of the fields of `MethodOptions` that it uses; see `methods.used_options` for those that
            depend on the value of another one.
        always_overlaps: whether rounds run under the next step whatever the options say.
        needs_sgd: whether training must be by `torch.optim.SGD` with momentum, as that is part of the method.
        pace: who takes the steps of a run. "lockstep": every rank every step. "shared_steps": ranks share them, fast
            ranks take more. "shared_rounds": the wrapper counts rounds, and late ranks skip some.
        gossiper: makes the gossiper of a method that is one, given (`MethodOptions`, seed); the consensus experiment
            runs it alone. None: the method is more than a gossiper, or has none.
        step_sizes: those that are published, by code.
        simulated_graph: the name of the graph that the simulator takes where none is named, given (number of ranks,
            peers per round or a schedule of it).
        codes: the names of the compressors that it takes, its default first.
        needs_fixed_ranks: why no wrapper of it takes a membership, as a clause. "": `make` hands on that of its
            context, and the wrapper itself says what it refuses, see `methods.why_fixed_ranks`.
        aliases: other names that are accepted.
    """

    name: str
    title: str
    summary: str
    algorithm: type[Any]
    make: Callable[..., Any]
    simulate: Callable[..., Any] | None = None
    paper: Paper | None = None
    example: str = ""
    graph: Literal["none", "any", "undirected", "undirected, static", "bipartite", "tree"] = "none"
    options: frozenset[str] = frozenset()
    always_overlaps: bool = False
    needs_sgd: bool = False
    pace: Literal["lockstep", "shared_steps", "shared_rounds"] = "lockstep"
    gossiper: Callable[..., Any] | None = None
    step_sizes: StepSizes = field(default_factory=dict)
    simulated_graph: Callable[[int, int | Mapping[int, int]], str] | None = None
    codes: tuple[str, ...] = ()
    needs_fixed_ranks: str = ""
    aliases: tuple[str, ...] = ()

    @property
    def file(self) -> str:
        """The file of the algorithm: below the folder that has the library, as gossip_modules/gossiper/choco.py."""
        path = Path(str(sys.modules[self.algorithm.__module__].__file__)).resolve()
        root = Path(__file__).resolve().parents[1]
        return str(path.relative_to(root)) if path.is_relative_to(root) else str(path)


_METHODS: dict[str, Method] = {}
_ALIASES: dict[str, str] = {}
METHODS: Mapping[str, Method] = _METHODS
"""All registered methods by name, in the order in which they were registered."""


def register(method: Method) -> Method:
    """Enter a method in METHODS; returns it.

    Raises:
        ValueError: its name or one of its aliases is taken, or is not a word that can be typed.
    """
    for name in (method.name, *method.aliases):
        if not name.isidentifier() or name != name.lower():
            raise ValueError(f"got the name {name!r} of a method, expected letters, digits and _ in lower case")
        if name in _METHODS or name in _ALIASES:
            raise ValueError(f"got the name {name!r} of a method, which is taken; choose another one")
    _METHODS[method.name] = method
    _ALIASES.update(dict.fromkeys(method.aliases, method.name))
    return method


def name_of(text: str) -> str:
    """The name of the method that `text` names, which may be an alias; `text` itself where there is no such method."""
    return _ALIASES.get(text, text)
