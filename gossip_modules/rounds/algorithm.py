"""Algorithm: the base of all methods that run in rounds. An algorithm writes its settings and one round."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch.optim import Optimizer

from ..graph_manager.base import GraphManager
from ..mixing_manager.base import MixingManager, RelaxedMixing
from ..registry import Paper
from .memory import Memory
from .requests import Inner, Mix, Request, Round

if TYPE_CHECKING:
    from .requests import SGDStep, Vectors


@dataclass(frozen=True)
class Algorithm(ABC):
    """What a round makes of the models of the ranks.

    An algorithm is a frozen dataclass: its fields are its settings, so that one object may serve several wrappers. Its
    `round` is a generator that asks with `yield` and goes on with the answer: `Mix(x)`, `Average(x)`, `Share(message)`,
    `Exchange(messages)`, `Gather(message)`. What it keeps from round to round is in its `Memory`. It knows nothing of
    processes, threads, devices, checkpoints or workers that fail; drivers do.

    A round is a transaction: it changes `v.x` and the vectors of its memory only after the last answer. Where a peer is
    lost, or an answer is refused, the driver closes the generator, and all is as before the round. Vectors of
    `m.scratch` are free at all times. `v.x` is written once, or only added to, as the last thing; `Mix(v.x)`, if there
    is one, is the last request.

    Attributes:
        short_name: the name that `algorithm=` and `--recipe` take, a word in lower case.
        title, summary, paper: for help and documentation: the name in tables, a sentence about what it does, and the
            publication.
        is_plain: whether a round is `yield Mix(v.x)` and nothing else, which drivers do without a generator.
        needs_current: whether a round must be about the model of the last step, so that it cannot overlap training.
        mixes_several: whether a round asks for more than one `Mix`, which must all be by W(t) then: not by the rounds
            of another algorithm, whose memory is of one vector.
        keeps_models: whether it keeps models of peers from round to round, so that it would undo exact averages
            in between, and cannot overlap either.
        is_skippable: whether a rank may leave a round out after it has received the answers. False where peers count on
            what it remembers of the round.
        needs_symmetric_weights: whether W(t) must be symmetric, on an undirected graph.
        needs_doubly_stochastic: whether W(t) must keep the mean.
        needs_static_graph: whether W(t) must be symmetric and never change.
        needs_sgd: whether it reads and writes the momentum of the user's optimizer, which must be `torch.optim.SGD`.
        takes_nesterov: whether that may have nesterov=True.
        needs_gradients: with `needs_sgd`, whether a parameter without a gradient must be stepped by its momentum too.
        follows_rate: whether its memory has vectors in units of the learning rate.
        takes_push_sum: whether models may carry a push-sum weight, as where it mixes v.x and nothing else.
        averages_exactly: whether rounds average over all ranks, rather than mix on a graph.
        has_own_times: whether it says itself when its rounds are, so that it cannot answer each `Mix` of another one.
        takes_wire_dtype: whether a narrow wire rounds what it mixes or averages. False where all messages are its own.
        is_whole: whether a round leaves nothing out for later, as compressed ones do.
        needs_whole_rounds: whether differences of ranks may grow where a round that mixes leaves something out.
        writes_early: whether a round changes x or memory before its last answer, so that it is no transaction.
        needs_inner_rate: whether `inner_rate` is to be asked.
        keeps_links: whether it keeps something of each link that must be the same at both of its ends.
        is_elastic: whether a round goes on without peers that fail, so that a membership may run it.
        checks_messages: whether ranks number their messages, and compare before each one what they have sent each other
            so far. False where that would take longer than it is worth, as where messages are models.
        takes_rows: whether a round works on the models of all ranks at once, stacked as the rows of one tensor [n, d].
            False where it has a message for each peer, or looks into its messages.
        has_equal_memory: whether all ranks keep the same vectors: a rank that misses a round takes those of others.
    """

    short_name: ClassVar[str] = ""
    title: ClassVar[str] = ""
    summary: ClassVar[str] = ""
    paper: ClassVar[Paper | None] = None
    is_plain: ClassVar[bool] = False
    needs_current: ClassVar[bool] = False
    mixes_several: ClassVar[bool] = False
    keeps_models: ClassVar[bool] = False
    is_skippable: ClassVar[bool] = True
    needs_symmetric_weights: ClassVar[bool] = False
    needs_doubly_stochastic: ClassVar[bool] = True
    needs_static_graph: ClassVar[bool] = False
    needs_sgd: ClassVar[bool] = False
    takes_nesterov: ClassVar[bool] = True
    needs_gradients: ClassVar[bool] = False
    follows_rate: ClassVar[bool] = False
    takes_push_sum: ClassVar[bool] = False
    averages_exactly: ClassVar[bool] = False
    has_equal_memory: ClassVar[bool] = False
    keeps_links: ClassVar[bool] = False
    has_own_times: ClassVar[bool] = False
    takes_wire_dtype: ClassVar[bool] = True
    is_whole: ClassVar[bool] = False
    needs_whole_rounds: ClassVar[bool] = False
    writes_early: ClassVar[bool] = False
    needs_inner_rate: ClassVar[bool] = False
    is_elastic: ClassVar[bool] = True
    checks_messages: ClassVar[bool] = True
    takes_rows: ClassVar[bool] = True

    @abstractmethod
    def round(self, v: Vectors, m: Memory, k: int) -> Round:
        """One round of one rank, after k optimizer steps; see the class."""

    def is_due(self, k: int) -> bool:
        """Whether there is a round after k optimizer steps; the same on all ranks."""
        return True

    def averages_at(self, k: int) -> bool:
        """Whether the round after k optimizer steps is one of those that average exactly, if the algorithm does."""
        return self.averages_exactly and self.is_due(k)

    @property
    def mixes(self) -> bool:
        """Whether it ever mixes on a graph, so that graph and weights matter."""
        return not self.averages_exactly

    @property
    def can_recover(self) -> bool:
        """Whether it has a `recover`, which makes a model finite, so that no round is ever left out."""
        return type(self).recover is not Algorithm.recover

    def begin(self, v: Vectors, m: Memory) -> None:
        """Called once, where training begins: declare here what is to start as the model is then."""

    def recover(self, v: Vectors, m: Memory) -> None:
        """Where it `can_recover`: go back to a finite model, as v.x has infinities or NaN that are to be skipped."""

    def inner_rate(self, optimizer: Optimizer) -> float:
        """The learning rate of a step that the model's own optimizer has just taken; `v.inner_rate` is the last one.

        Args:
            optimizer: holds some of the model's parameters.
        """
        return float(optimizer.param_groups[0]["lr"])

    @property
    def name(self) -> str:
        """The name of the class, in checkpoints."""
        return type(self).__name__

    @property
    def parts(self) -> tuple[Algorithm, ...]:
        """The algorithms that this one is made of: itself; see `Over`."""
        return (self,)

    def over(self, inner: Algorithm) -> Over:
        """This algorithm, with `Mix` answered by the rounds of another one: `GASLoC().over(PowerGossip())`."""
        return Over(self, inner)

    def default_graph(self, world_size: int) -> GraphManager | None:
        """The graph where the user names neither graph nor weights; None: the wrapper's own default."""
        return None

    def default_mixing(self, world_size: int) -> MixingManager | None:
        """The weights where the user names neither graph nor weights; None: those of the graph."""
        return None

    def step_size_on(self, mixing: MixingManager) -> float:
        """The consensus step size gamma of this algorithm, whose rounds mix by about I + gamma (W - I)."""
        return 1.0

    def check(self, mixing: MixingManager) -> None:
        """Raise ValueError where the algorithm is wrong with these weights."""
        check_weights(self, mixing)

    def check_step(self, mixing: MixingManager, step: SGDStep) -> None:
        """Raise ValueError where it is wrong with these weights and the rates of the first step of SGD."""

    def for_membership(self) -> Algorithm:
        """The algorithm that runs among the workers of a membership, where peers fail, come and go; itself if it can.

        Raises:
            ValueError: there is none.
        """
        if not self.is_elastic:
            raise ValueError(
                f"got {self} with a membership, expected an algorithm whose rounds go on without peers that fail, "
                "which declares is_elastic = True; take another one, such as DPSGD()"
            )
        return self

    def describe(self, dtypes: Sequence[torch.dtype]) -> str:
        """What all ranks must agree on. dtypes: of the parameters, in float32 at least."""
        return str(self)


@dataclass(frozen=True)
class Over(Algorithm):
    """An algorithm whose vectors are mixed by the rounds of another one; see `Algorithm.over`.

    The round of the outer algorithm runs as it is, and each of its `Mix(x)` is a round of the inner algorithm about x,
    with a memory of its own, `m.inner`. So a composition is an algorithm like any other, for all drivers.

    Args:
        outer: asks for `Mix`.
        inner: answers.
    """

    outer: Algorithm
    inner: Algorithm

    def __post_init__(self) -> None:
        outer, inner = self.outer, self.inner
        if not isinstance(inner, Algorithm):
            raise ValueError(
                f"got {inner!r} below {outer}, expected an algorithm whose rounds mix; pass an object of its class, "
                "such as PowerGossip()"
            )
        if not (outer.mixes and outer.takes_wire_dtype):
            raise ValueError(
                f"got {self}, expected one of them: the first one asks for no `Mix`, so that the second one would have "
                "no rounds"
            )
        first = inner.parts[0]
        if first.has_own_times:
            raise ValueError(
                f"got {self}, expected one of them: the second one moves an anchor at times of its own, which is no "
                "mixing for each round of the first one"
            )
        if first.needs_current and not first.keeps_models and (first.needs_sgd or not outer.takes_push_sum):
            raise ValueError(f"got {self}, expected one of them: both say what is made of the steps of a rank")
        if outer.mixes_several and not first.is_plain:
            raise ValueError(
                f"got {self}, expected plain gossip below the first one: it mixes two vectors in a round, and the "
                "second one keeps what it has sent of one; take D2 or ExactDiffusion"
            )
        for names, combine in ((_IF_ANY, any), (_IF_ALL, all)):
            for name in names:
                object.__setattr__(self, name, combine(getattr(part, name) for part in (outer, inner)))
        for name in _OF_OUTER:
            object.__setattr__(self, name, getattr(outer, name))

    @property
    def name(self) -> str:
        """See `Algorithm`."""
        return self.outer.name

    @property
    def parts(self) -> tuple[Algorithm, ...]:
        """The algorithms, each over the next."""
        return (self.outer, *self.inner.parts)

    def over(self, inner: Algorithm) -> Over:
        """See `Algorithm`: the last one is over it."""
        return Over(self.outer, self.inner.over(inner))

    def round(self, v: Vectors, m: Memory, k: int) -> Round:
        """See `Algorithm`."""
        outer, reply = self.outer.round(v, m, k), None
        while (request := next_request(outer, reply)) is not None:
            if isinstance(request, Mix):
                m.inner.fit(request.x, who=self.inner)
                inner = self.inner.round(v.about(request.x, m.inner), m.inner, k)
                reply = yield Inner(request.x, inner)
                m.inner.end_round()
            else:
                reply = yield request

    def is_due(self, k: int) -> bool:
        """See `Algorithm`."""
        return self.outer.is_due(k)

    def averages_at(self, k: int) -> bool:
        """See `Algorithm`."""
        return self.outer.averages_at(k)

    @property
    def mixes(self) -> bool:
        """See `Algorithm`."""
        return self.outer.mixes

    @property
    def can_recover(self) -> bool:
        """See `Algorithm`."""
        return self.outer.can_recover

    def begin(self, v: Vectors, m: Memory) -> None:
        """See `Algorithm`."""
        self.outer.begin(v, m)

    def recover(self, v: Vectors, m: Memory) -> None:
        """See `Algorithm`."""
        self.outer.recover(v, m)

    def default_graph(self, world_size: int) -> GraphManager | None:
        """See `Algorithm`."""
        return self.outer.default_graph(world_size) or self.inner.default_graph(world_size)

    def default_mixing(self, world_size: int) -> MixingManager | None:
        """See `Algorithm`."""
        return self.outer.default_mixing(world_size) or self.inner.default_mixing(world_size)

    def step_size_on(self, mixing: MixingManager) -> float:
        """See `Algorithm`."""
        return self.inner.step_size_on(mixing)

    def relaxed(self, mixing: MixingManager) -> MixingManager:
        """About the weights that answers to `Mix` are made by."""
        step_size = self.inner.step_size_on(mixing)
        return mixing if step_size == 1.0 else RelaxedMixing(mixing, step_size)

    def check(self, mixing: MixingManager) -> None:
        """See `Algorithm`."""
        outer, inner = self.outer, self.inner
        inner.check(mixing)
        if outer.averages_exactly and outer.mixes and inner.keeps_models:
            raise ValueError(
                f"got {inner} between the exact averages of {outer}, expected an algorithm that keeps no models of "
                "peers: it would relay those from before an average, and undo it; leave it out, or pass gossip_every=0"
            )
        if outer.needs_whole_rounds and not (inner.is_whole or inner.keeps_models):
            raise ValueError(
                f"got {inner} with {outer}, expected plain gossip: its memory repeats what a round has changed, and "
                "differences that compressed rounds leave out may grow by it from round to round; leave the inner "
                "algorithm out. NoLoCo and GASLoC: or pass momentum=0 (NoLoCo: and pull <= 1), take "
                "GASLoC(optimizer=...), or compress exact averages: SparseLoCo(). An algorithm of your own that leaves "
                "nothing out declares is_whole = True"
            )
        outer.check(self.relaxed(mixing))

    def check_step(self, mixing: MixingManager, step: SGDStep) -> None:
        """See `Algorithm`."""
        self.outer.check_step(self.relaxed(mixing), step)
        self.inner.check_step(mixing, step)

    def inner_rate(self, optimizer: Optimizer) -> float:
        """See `Algorithm`."""
        return (self.outer if self.outer.needs_inner_rate else self.inner).inner_rate(optimizer)

    def for_membership(self) -> Over:
        """See `Algorithm`."""
        return Over(self.outer.for_membership(), self.inner.for_membership())

    def describe(self, dtypes: Sequence[torch.dtype]) -> str:
        """See `Algorithm`."""
        return f"{self.outer.describe(dtypes)}.over({self.inner.describe(dtypes)})"

    def __repr__(self) -> str:
        return f"{self.outer!r}.over({self.inner!r})"


_IF_ANY = (
    "needs_current",
    "keeps_models",
    "needs_symmetric_weights",
    "needs_static_graph",
    "needs_sgd",
    "needs_gradients",
    "follows_rate",
    "needs_inner_rate",
    "keeps_links",
    "mixes_several",
    "writes_early",
)
_IF_ALL = (
    "is_skippable",
    "takes_nesterov",
    "takes_push_sum",
    "is_whole",
    "is_elastic",
    "checks_messages",
    "takes_rows",
)
_OF_OUTER = ("averages_exactly", "has_equal_memory", "has_own_times", "takes_wire_dtype")


def next_request(generator: Round, reply: object) -> Request | None:
    """The next request of a round that gets this reply to the last one; None: the round has ended."""
    try:
        return generator.send(reply)
    except StopIteration:
        return None


def combined(*parts: object) -> tuple[Algorithm | None, list[object]]:
    """The algorithms among the parts as one, each over the next; and the other parts, None in place of algorithms."""
    found: Algorithm | None = None
    others: list[object] = []
    for part in reversed(parts):
        if isinstance(part, Algorithm):
            found = part if found is None or isinstance(part, Over) else part.over(found)
        others.insert(0, None if isinstance(part, Algorithm) else part)
    return found, others


def check_weights(algorithm: Algorithm, mixing: MixingManager) -> None:
    """Raise ValueError where the weights lack what the algorithm declares that it needs."""
    name = type(algorithm).__name__
    needs_symmetry = algorithm.needs_symmetric_weights or algorithm.needs_static_graph
    if needs_symmetry and not (mixing.graph.is_symmetric and mixing.is_symmetric):
        raise ValueError(
            f"{name}: got {mixing}, expected symmetric weights on an undirected graph; take MetropolisHastingsMixing "
            "over a graph whose peers answer each other, e.g. RingGraph(n, peers_per_itr=2)"
        )
    if algorithm.needs_static_graph and (mixing.graph.is_dynamic or mixing.period != 1):
        raise ValueError(
            f"{name}: got {mixing} of period {mixing.period}, expected a graph that never changes, since the memory of "
            "a rank is a sum over rounds with the same neighbours and weights; take a ring with peers_per_itr=2, a "
            "torus with 4, or a hypercube with all neighbours"
        )
    if algorithm.needs_doubly_stochastic and not algorithm.averages_exactly and not mixing.is_doubly_stochastic:
        raise ValueError(
            f"{name}: got {mixing}, expected doubly stochastic weights, which keep the mean of all models; use an "
            "undirected graph, such as RingGraph(n, peers_per_itr=2), without mixing="
        )
