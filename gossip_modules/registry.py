"""METHODS: the table of training methods, each with its names, paper, class, wrapper and simulation.

The first look-up enters the methods of this library, from `gossip_modules.methods`. The table is the source of
`--algorithm` and `--recipe` of the training scripts, the names for `GossipDataParallel(algorithm=...)`, the rows of the
Lab and the tables of the documentation.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, TypeAlias

from .extras import PACKAGE, MissingExtra, load

StepSizes: TypeAlias = Mapping[str, float]
"""Step sizes of consensus by the text of a compressor, such as "TopK(0.01)"."""


@dataclass(frozen=True)
class Paper:
    """The publication of a method.

    Args:
        authors: the surnames, e.g. "Vogels, Karimireddy, Jaggi".
        title: the title.
        venue: the venue with the year, e.g. "ICML 2019".
        arxiv: the number of the preprint, e.g. "1902.00340"; "": none.
    """

    authors: str
    title: str
    venue: str
    arxiv: str = ""

    def __str__(self) -> str:
        preprint = f", arXiv {self.arxiv}" if self.arxiv else ""
        return f'{self.authors}, "{self.title}", {self.venue}{preprint}'


@dataclass(frozen=True)
class Method:
    """A training method: an algorithm, or a wrapper with arguments. `enter` puts it in METHODS.

    Args:
        name: the short name, a single word in lower case: `--recipe NAME`.
        title: the name in tables and pictures.
        summary: one sentence about what the method does.
        algorithm: the class of the algorithm; or its place, such as "dpwa.engine:PairwiseEngine", if it is in an extra.
        make: the dataclass of the settings: an `Algorithm`, or the arguments of the wrapper.
        text: the text of Python behind `--recipe NAME`: a call of `call`, its first name.
        wrap: wraps a model, given (module, `Chosen`, `WrapperOptions`, `Context`).
        example: a line of Python that wraps `model`.
        paper: the publication, if the method has one.
        options: the names of the wrapper's fields of `WrapperOptions`.
        pace: the distribution of the steps of a run. "lockstep": every rank every step. "shared_steps": ranks share
            them, fast ranks take more. "shared_rounds": the wrapper counts rounds, and late ranks skip some.
        needs_fixed_ranks: the reason why the method takes no membership, as a clause; "": it takes one.
        simulate: makes the method for the Lab, given a `lab.plan.Run`; None: the Lab runs the rounds of an algorithm,
            and knows the wrappers of this library.
        simulated_graph: returns the name of the default graph in the Lab, given (number of ranks, peers per round
            or a schedule of it).
        step_sizes: the published ones, by compressor.
        fixed: constant arguments of the wrapper; `make` is not passed on as an algorithm then.
    """

    name: str
    title: str
    summary: str
    algorithm: type[Any] | str
    make: type[Any]
    text: str
    wrap: Callable[..., Any]
    example: str = ""
    paper: Paper | None = None
    options: frozenset[str] = frozenset()
    pace: Literal["lockstep", "shared_steps", "shared_rounds"] = "lockstep"
    needs_fixed_ranks: str = ""
    simulate: Callable[..., Any] | None = None
    simulated_graph: Callable[[int, int | Mapping[int, int]], str] | None = None
    step_sizes: StepSizes = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)

    @property
    def needs_sgd(self) -> bool:
        """Whether training must be by `torch.optim.SGD` with momentum, as that is part of the method."""
        return getattr(self.algorithm, "needs_sgd", False)

    @property
    def takes_nesterov(self) -> bool:
        """Whether that momentum may be Nesterov's."""
        return getattr(self.algorithm, "takes_nesterov", True)

    @property
    def call(self) -> str:
        """The name for `--algorithm`: `DiLoCo`."""
        return self.make.__name__

    @property
    def settings(self) -> frozenset[str]:
        """The names of the settings."""
        return frozenset(option.name for option in fields(self.make) if option.init)

    @property
    def period(self) -> str:
        """The setting that counts the steps from one average or outer step to the next; "": no such setting."""
        return next((name for name in ("sync_every", "sync_period") if name in self.settings), "")

    @property
    def rates(self) -> frozenset[str]:
        """The settings that are a step size or a momentum of its own, beside the optimizer's."""
        return self.settings & {"lr", "momentum", "mu", "step_size", "interpolation"}

    @property
    def is_algorithm(self) -> bool:
        """Whether `algorithm=` of a wrapper takes it; else it is a wrapper with arguments, as in `example`."""
        return self.make is self.algorithm

    @property
    def is_complete(self) -> bool:
        """Whether `algorithm=` takes the name alone, as all settings have defaults."""
        parameters = inspect.signature(self.make).parameters.values()
        return self.is_algorithm and all(p.default is not p.empty for p in parameters)

    @property
    def inner_optimizer(self) -> str:
        """The optimizer that is part of the method, as "MuonAdamW"; "": any."""
        return getattr(self.algorithm, "inner_optimizer", "")

    @property
    def file(self) -> str:
        """The file of the algorithm: below the folder of the library, as gossip_modules/algorithms/choco.py."""
        if isinstance(self.algorithm, str):
            return f"{PACKAGE}/{self.algorithm.partition(':')[0].replace('.', '/')}.py"
        path, root = Path(inspect.getfile(self.algorithm)).resolve(), Path(__file__).resolve().parents[1]
        return str(path.relative_to(root)) if path.is_relative_to(root) else str(path)


_METHODS: dict[str, Method] = {}


class _Methods(Mapping[str, Method]):
    """All methods that are registered when it is read; without `gossip_modules.methods` there may be none."""

    def __getitem__(self, name: str) -> Method:
        return _entered()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(_entered())

    def __len__(self) -> int:
        return len(_entered())


def _entered() -> dict[str, Method]:
    """The table, with the methods of this library if its package of methods is installed."""
    try:
        load("methods")
    except MissingExtra as error:
        if error.extra != "methods":
            raise
    return _METHODS


METHODS: Mapping[str, Method] = _Methods()
"""All registered methods by name, in the order in which they were registered."""


def enter(method: Method) -> Method:
    """Enter a method in METHODS, and return it.

    Raises:
        ValueError: the name of the method is taken, or is not a word in lower case.
    """
    name = method.name
    if not name.isidentifier() or name != name.lower():
        raise ValueError(f"got the name {name!r} of a method, expected letters, digits and _ in lower case")
    if name in _names():
        raise ValueError(f"got the name {name!r} of a method, which is taken; choose another one")
    _METHODS[name] = method
    return method


def _names() -> dict[str, Method]:
    """All methods by short name, and by the name of their class in lower case."""
    return {**{method.call.lower(): method for method in _METHODS.values()}, **_METHODS}


def name_of(text: str) -> str:
    """Return the short name of a method, given a name such as "allreduce"; `text` itself for unknown names."""
    _entered()
    return _names()[text].name if text in _names() else text


def named(text: str) -> Method:
    """The method of that short name or class: "diloco", "DiLoCo".

    Raises:
        ValueError: no method has that name; the error has the names that `algorithm=` takes, and the nearest one.
        ImportError: `gossip_modules.methods`, which knows the names, is not installed.
    """
    load("methods")
    by_name = _names()
    if text.lower() not in by_name:
        names = [name for name, method in _METHODS.items() if method.is_complete]
        near = difflib.get_close_matches(text.lower(), names, n=1)
        remedy = f"did you mean {near[0]!r}?" if near else "choose one of them"
        raise ValueError(f"got algorithm={text!r}, expected an Algorithm or a name of {', '.join(names)}; {remedy}")
    return by_name[text.lower()]
