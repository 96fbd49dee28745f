"""Algorithm, the base class of all methods that run in rounds, and Over, an algorithm composed of two others."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch.optim import Optimizer

from ..graph_manager.base import GraphManager
from ..mixing_manager.base import MixingManager, RelaxedMixing
from ..registry import Paper
from ..schedule import Schedule, Times
from .memory import Memory
from .requests import Inner, Mix, Round

if TYPE_CHECKING:
    from .requests import SGDStep, Vectors

FORMER_FACTS: Mapping[str, str] = {
    "is_elastic": "override for_membership() and raise a ValueError where a membership does not fit",
    "mixes_several": "override check_inner() and raise a ValueError where an inner algorithm does not fit",
    "needs_doubly_stochastic": "override check() and leave super().check() out, where any weights fit",
    "needs_whole_tensors": "override check_shards() and raise a ValueError",
    "writes_early": "leave it out",
}
"""Facts that a class declared in older versions; each with what takes its place, as a clause."""


@dataclass(frozen=True)
class Algorithm(ABC):
    """A method of decentralised training: its settings, and one round as a generator.

    An algorithm is a frozen dataclass of its settings, so one object may serve several wrappers. `round` yields
    requests (`Mix(x)`, `Average(x)`, `Share(message)`, `Exchange(messages)`, `Gather(message)`) and goes on with the
    replies. The state from round to round is in a `Memory`. An algorithm has no code for processes, threads, devices,
    checkpoints or failed workers; drivers handle these.

    A round is a transaction. It changes `v.x` and the vectors of its memory only after the last reply. If a peer is
    lost or a reply is refused, the driver closes the generator, and model and memory are as before the round. A round
    may change vectors of `m.scratch` at any time. It writes `v.x` once, or only adds to it, as its last action.
    `Mix(v.x)`, if there is one, is the last request.

    Attributes:
        short_name: the name for `algorithm=` and `--recipe`, a word in lower case; "": the name of the class.
        title, summary, paper: the name in tables, a description of one sentence, and the publication, for help and
            documentation. Without title and summary the name of the class and the first line of its docstring serve.
        is_plain: whether a round is `yield Mix(v.x)` and nothing else. Drivers then run it without a generator.
        needs_current: whether a round needs the model as the last step has left it. Such a round cannot overlap
            training.
        keeps_models: whether the algorithm keeps models of peers from round to round. It would undo exact averages in
            between, and it cannot overlap training.
        is_skippable: whether a rank may leave a round out after it has received the replies. False if peers rely on the
            round's change of state on this rank.
        needs_symmetric_weights: whether W(t) must be symmetric, on an undirected graph.
        needs_static_graph: whether W(t) must be symmetric and never change.
        needs_sgd: whether the algorithm reads and writes the momentum of the user's optimizer, a `torch.optim.SGD`.
        takes_nesterov: whether that optimizer may have nesterov=True.
        needs_gradients: with `needs_sgd`, whether the optimizer must also step parameters without a gradient; their
            gradient is then zero.
        follows_rate: whether the memory has vectors in units of the learning rate.
        takes_push_sum: whether models may carry a push-sum weight, for example because a round only mixes v.x.
        averages_exactly: whether rounds average over all ranks instead of mixing on a graph.
        takes_wire_dtype: whether `wire_dtype=` applies to the algorithm's mixed or averaged vectors. False if all its
            messages are its own.
        mixes_buffers: whether rounds mix the buffers of the model too. False where a wrong buffer of one peer would
            get past the algorithm; each rank then keeps its own.
        is_whole: whether a round sends whole vectors. Compressed rounds leave a rest for later rounds.
        needs_whole_rounds: whether differences between ranks may grow if the inner algorithm is not `is_whole`.
        needs_inner_rate: whether drivers call `inner_rate` after each optimizer step.
        keeps_links: whether the memory has a state for each link, equal at both ends.
        checks_messages: whether each message has a header with its number and a digest of all earlier messages. False
            where the check costs too much, for example because messages are whole models.
        takes_rows: whether a round works on the models of all ranks at once, stacked as the rows of one tensor [n, d].
            False if it sends each peer a message of its own, or reads the bytes of messages.
        counts_tokens: whether rounds read the "tokens" and "steps" of `Memory.numbers`, which drivers count.
        has_equal_memory: whether all ranks keep the same vectors. A rank that misses a round then takes the vectors of
            another rank.
    """

    short_name: ClassVar[str] = ""
    title: ClassVar[str] = ""
    summary: ClassVar[str] = ""
    paper: ClassVar[Paper | None] = None
    is_plain: ClassVar[bool] = False
    needs_current: ClassVar[bool] = False
    keeps_models: ClassVar[bool] = False
    is_skippable: ClassVar[bool] = True
    needs_symmetric_weights: ClassVar[bool] = False
    needs_static_graph: ClassVar[bool] = False
    needs_sgd: ClassVar[bool] = False
    takes_nesterov: ClassVar[bool] = True
    needs_gradients: ClassVar[bool] = False
    follows_rate: ClassVar[bool] = False
    takes_push_sum: ClassVar[bool] = False
    averages_exactly: ClassVar[bool] = False
    has_equal_memory: ClassVar[bool] = False
    counts_tokens: ClassVar[bool] = False
    keeps_links: ClassVar[bool] = False
    takes_wire_dtype: ClassVar[bool] = True
    mixes_buffers: ClassVar[bool] = True
    is_whole: ClassVar[bool] = False
    needs_whole_rounds: ClassVar[bool] = False
    needs_inner_rate: ClassVar[bool] = False
    checks_messages: ClassVar[bool] = True
    takes_rows: ClassVar[bool] = True

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        for name in vars(cls).keys() & FORMER_FACTS.keys():
            raise TypeError(f"{cls.__name__}: got {name}, which is gone: {FORMER_FACTS[name]}")

    @abstractmethod
    def round(self, v: Vectors, m: Memory, k: int) -> Round:
        """Run one round of one rank; see the class.

        Args:
            v: the model of this rank in `v.x`, and the number, rank and peers of the round.
            m: the memory of the algorithm on this rank.
            k: the number of optimizer steps so far.

        Yields:
            Requests for communication.
        """

    def is_due(self, k: int) -> bool:
        """Whether a round runs after k optimizer steps; equal on all ranks."""
        return True

    def is_silent(self, k: int) -> bool:
        """Whether the round after k optimizer steps sends no message, on any rank; equal on all ranks."""
        return False

    @property
    def times(self) -> Sequence[Times] | None:
        """The steps at which rounds run, if the algorithm chooses them, such as the steps of each fragment.

        None: at every step of the schedule. An algorithm that overrides `is_due` overrides `times` too, if it is to run
        with a schedule that leaves steps out.
        """
        return None

    @property
    def has_own_times(self) -> bool:
        """Whether rounds run at steps that the algorithm chooses, instead of every step of the schedule.

        Such an algorithm cannot be the inner one of `Over`.
        """
        return type(self).is_due is not Algorithm.is_due

    def check_schedule(self, schedule: Schedule) -> None:
        """Raise ValueError if a schedule leaves out rounds at steps that the algorithm chooses."""
        if self.times is not None:
            schedule.check_times(self.times, of=self)
        elif self.has_own_times and schedule.gossip_every > 1:
            raise ValueError(
                f"got {schedule} with {self}, which chooses the steps of its rounds, expected gossip_every=1: the "
                "schedule may leave out steps that the algorithm needs; leave schedule out, or override "
                f"`{type(self).__name__}.times`, which says what these steps are"
            )

    def check_overlap(self, overlap: bool | str, schedule: Schedule) -> None:
        """Raise ValueError if rounds cannot run under training.

        Args:
            overlap: the argument of the wrapper.
            schedule: the schedule of the rounds.
        """
        outer = self.parts[0]
        if overlap and getattr(outer, "delay", False):
            raise ValueError(
                f"got overlap={overlap!r} beside {outer}, expected one of them: its delay says for how many steps a "
                "round travels under training; leave overlap out"
            )
        if overlap and any(part.needs_current or part.keeps_models for part in self.parts):
            raise ValueError(
                f"got overlap={overlap!r} with {self}, expected overlap=False: it needs the result of a round before "
                "the next step; leave overlap out"
            )
        if overlap and outer.has_equal_memory and schedule.average_until:
            raise ValueError(
                f"got {schedule} with overlap=True and {outer}, expected overlap=False: the algorithm begins with the "
                "model after the last average, which an overlapped one leaves different on each rank; take delay="
            )

    def check_shards(self, nprocs_per_node: int) -> None:
        """Raise ValueError if rounds cannot work on the shards of a model that several processes hold together.

        Args:
            nprocs_per_node: the number of processes of a node; 1 for a module that is sharded by `fully_shard`.
        """

    def check_inner(self, inner: Algorithm) -> None:
        """Raise ValueError if rounds of the algorithm `inner` cannot answer the `Mix` of this one; see `over`."""

    def averages_at(self, k: int) -> bool:
        """Whether a round that averages exactly over all ranks runs after k optimizer steps."""
        return self.averages_exactly and self.is_due(k)

    @property
    def mixes(self) -> bool:
        """Whether some rounds mix on a graph, with graph and weights."""
        return not self.averages_exactly

    @property
    def can_recover(self) -> bool:
        """Whether the class overrides `recover`, so that a worker can return to a model in the memory."""
        return type(self).recover is not Algorithm.recover

    def begin(self, v: Vectors, m: Memory) -> None:
        """Declare the vectors that start as copies of the model v.x, in `m`; called once, when training begins."""

    def recover(self, v: Vectors, m: Memory) -> None:
        """Replace v.x by the model in `m` from which all ranks last started.

        Drivers call it for a worker that joins between two rounds, and if the memory comes from another rank.
        """

    def inner_rate(self, optimizer: Optimizer) -> float:
        """Return the learning rate of the last step of the model's optimizer.

        `v.inner_rate` is the last result of this method.

        Args:
            optimizer: holds some of the model's parameters.
        """
        return float(optimizer.param_groups[0]["lr"])

    @property
    def name(self) -> str:
        """The name of the algorithm in checkpoints."""
        return type(self).__name__

    @property
    def parts(self) -> tuple[Algorithm, ...]:
        """The parts of this algorithm, the outermost first; see `Over`."""
        return (self,)

    def over(self, inner: Algorithm) -> Over:
        """Compose it with an inner algorithm, whose rounds answer `Mix`: `GASLoC(momentum=0).over(PowerGossip())`."""
        return Over(self, inner)

    def default_graph(self, world_size: int) -> GraphManager | None:
        """Return the graph of `world_size` ranks if the user names neither graph nor weights.

        None: the default of the wrapper.
        """
        return None

    def default_mixing(self, world_size: int) -> MixingManager | None:
        """Return the weights of `world_size` ranks if the user names neither graph nor weights.

        None: the default weights of the graph.
        """
        return None

    def step_size_on(self, mixing: MixingManager) -> float:
        """Return the consensus step size gamma on `mixing`: rounds mix by about I + gamma (W - I)."""
        return 1.0

    def check(self, mixing: MixingManager) -> None:
        """Raise ValueError if the algorithm does not work with the weights `mixing`.

        By default the weights must keep the mean of all models.
        """
        name = type(self).__name__
        needs_symmetry = self.needs_symmetric_weights or self.needs_static_graph
        if needs_symmetry and not (mixing.graph.is_symmetric and mixing.is_symmetric):
            raise ValueError(
                f"{name}: got {mixing}, expected symmetric weights on an undirected graph; take "
                "MetropolisHastingsMixing over a graph whose peers answer each other, e.g. "
                "RingGraph(n, peers_per_itr=2)"
            )
        if self.needs_static_graph and (mixing.graph.is_dynamic or mixing.period != 1):
            raise ValueError(
                f"{name}: got {mixing} of period {mixing.period}, expected a graph that never changes, since the "
                "memory of a rank is a sum over rounds with the same neighbours and weights; take a ring with "
                "peers_per_itr=2, a torus with 4, or a hypercube with all neighbours"
            )
        if not self.averages_exactly and not mixing.is_doubly_stochastic:
            raise ValueError(
                f"{name}: got {mixing}, expected doubly stochastic weights, which keep the mean of all models; use an "
                "undirected graph, such as RingGraph(n, peers_per_itr=2), without mixing="
            )

    def check_step(self, mixing: MixingManager, step: SGDStep) -> None:
        """Raise ValueError if the algorithm does not work with `mixing` and the rates of the first step of SGD."""

    def for_membership(self) -> Algorithm:
        """Return the algorithm to run in a membership, whose workers fail, join and leave: itself, or a variant.

        Raises:
            ValueError: the algorithm cannot run in a membership.
        """
        return self

    def describe(self, dtypes: Sequence[torch.dtype]) -> str:
        """Describe the settings to compare between ranks when the model is wrapped.

        Args:
            dtypes: the dtypes of the parameters, widened to float32 at least.
        """
        return str(self)


@dataclass(frozen=True)
class Over(Algorithm):
    """A composition: rounds of an inner algorithm mix the vectors of an outer one; see `Algorithm.over`.

    The round of the outer algorithm runs unchanged. Each of its `Mix(x)` becomes a round of the inner algorithm about
    x, with the memory `m.inner`. The composition is itself an algorithm, so all drivers run it.

    An inner round is its own transaction: its memory changes when it ends, even if the outer round fails afterwards.

    Args:
        outer: the algorithm that yields `Mix`.
        inner: the algorithm whose rounds answer `Mix`; may be an `Over` too.
    """

    outer: Algorithm
    inner: Algorithm

    def __post_init__(self) -> None:
        outer, inner = self.outer, self.inner
        if not isinstance(inner, Algorithm):
            raise ValueError(
                f"got {inner!r} as the inner algorithm of {outer}, expected an algorithm whose rounds mix; pass an "
                "object of its class, such as PowerGossip()"
            )
        if not (outer.mixes and outer.takes_wire_dtype):
            raise ValueError(
                f"got {self}, expected one of them: the outer algorithm never yields `Mix`, so the inner one would "
                "have no rounds"
            )
        first = inner.parts[0]
        if first.has_own_times:
            raise ValueError(
                f"got {self}, expected one of them: the inner algorithm moves an anchor at its own times, so it cannot "
                "mix in each round of the outer one"
            )
        corrects_steps = first.needs_current and not first.keeps_models and not outer.takes_push_sum
        if corrects_steps or first.needs_sgd:
            raise ValueError(f"got {self}, expected one of them: both change the optimizer steps of a rank")
        outer.check_inner(inner)
        self._set(
            needs_current=outer.needs_current or inner.needs_current,
            keeps_models=outer.keeps_models or inner.keeps_models,
            needs_symmetric_weights=outer.needs_symmetric_weights or inner.needs_symmetric_weights,
            needs_static_graph=outer.needs_static_graph or inner.needs_static_graph,
            needs_sgd=outer.needs_sgd or inner.needs_sgd,
            follows_rate=outer.follows_rate or inner.follows_rate,
            needs_inner_rate=outer.needs_inner_rate or inner.needs_inner_rate,
            keeps_links=outer.keeps_links or inner.keeps_links,
            is_skippable=outer.is_skippable and inner.is_skippable,
            takes_push_sum=outer.takes_push_sum and inner.takes_push_sum,
            mixes_buffers=outer.mixes_buffers and inner.mixes_buffers,
            is_whole=outer.is_whole and inner.is_whole,
            checks_messages=outer.checks_messages and inner.checks_messages,
            takes_rows=outer.takes_rows and inner.takes_rows,
            averages_exactly=outer.averages_exactly,
            has_equal_memory=outer.has_equal_memory,
            takes_wire_dtype=outer.takes_wire_dtype,
        )

    def _set(self, **facts: bool) -> None:
        for name, fact in facts.items():
            object.__setattr__(self, name, fact)

    @property
    def name(self) -> str:
        """See `Algorithm`."""
        return self.outer.name

    @property
    def parts(self) -> tuple[Algorithm, ...]:
        """The algorithms of the composition, the outermost first."""
        return (self.outer, *self.inner.parts)

    def over(self, inner: Algorithm) -> Over:
        """See `Algorithm`; the new algorithm becomes the innermost one."""
        return Over(self.outer, self.inner.over(inner))

    def round(self, v: Vectors, m: Memory, k: int) -> Round:
        """See `Algorithm`."""
        outer, reply = self.outer.round(v, m, k), None
        with contextlib.suppress(StopIteration):  # the outer round has ended
            while True:
                request = outer.send(reply)
                if isinstance(request, Mix):
                    m.inner.fit(request.x, who=self.inner)
                    m.inner.scale(m.rates)
                    inner = self.inner.round(v.about(request.x), m.inner, k)
                    reply = yield Inner(request.x, inner)
                    m.inner.end_round()
                else:
                    reply = yield request

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

    def is_due(self, k: int) -> bool:
        """See `Algorithm`."""
        return self.outer.is_due(k)

    def is_silent(self, k: int) -> bool:
        """See `Algorithm`."""
        return self.outer.is_silent(k)

    def averages_at(self, k: int) -> bool:
        """See `Algorithm`."""
        return self.outer.averages_at(k)

    @property
    def times(self) -> Sequence[Times] | None:
        """See `Algorithm`."""
        return self.outer.times

    @property
    def has_own_times(self) -> bool:
        """See `Algorithm`."""
        return self.outer.has_own_times

    def check_schedule(self, schedule: Schedule) -> None:
        """See `Algorithm`."""
        self.outer.check_schedule(schedule)

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
        """The weights by which a round of the inner algorithm mixes, up to compression."""
        step_size = self.inner.step_size_on(mixing)
        return mixing if step_size == 1.0 else RelaxedMixing(mixing, step_size)

    def check(self, mixing: MixingManager) -> None:
        """See `Algorithm`."""
        outer, inner = self.outer, self.inner
        inner.check(mixing)
        if outer.averages_exactly and outer.mixes and inner.keeps_models:
            raise ValueError(
                f"got {inner} between the exact averages of {outer}, expected an algorithm that keeps no models of "
                "peers: it would relay models from before an average, and undo it; leave it out, or pass gossip_every=0"
            )
        if outer.needs_whole_rounds and not (inner.is_whole or inner.keeps_models):
            raise ValueError(
                f"got {inner} with {outer}, expected plain gossip: the memory of the outer algorithm repeats the "
                "changes of earlier rounds, so differences that compressed rounds leave out may grow from round to "
                "round; leave the inner algorithm out. With NoLoCo and GASLoC you can also pass momentum=0 (NoLoCo: "
                "and pull <= 1), take GASLoC(optimizer=...), or compress exact averages: SparseLoCo(). If you wrote "
                "the inner algorithm and its rounds leave nothing out, declare is_whole = True"
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


def combined(*parts: object) -> tuple[Algorithm | None, list[object]]:
    """Compose the algorithms among the parts, each over the next.

    Returns:
        The composition, None if no part is an algorithm; and the list of parts with None in place of algorithms.
    """
    found: Algorithm | None = None
    others: list[object] = []
    for part in reversed(parts):
        if isinstance(part, Algorithm):
            found = part if found is None or isinstance(part, Over) else part.over(found)
        others.insert(0, None if isinstance(part, Algorithm) else part)
    return found, others
