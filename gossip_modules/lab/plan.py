"""LabPlan: a method with its settings, graph and schedule, and how the Lab runs it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch

from ..algorithms.d_psgd import DPSGD
from ..algorithms.moniqua import Moniqua
from ..algorithms.outer_method import OuterMethod
from ..algorithms.power_gossip import PowerGossip
from ..algorithms.relay_sgd import RelaySGD
from ..compression.compressor import Cast, Compressor
from ..compression.quantizer import QSGD, Absmax, BlockFloat, SignNorm
from ..compression.sparsifier import ChunkTopK, RandomK, TopK
from ..extras import load, place_of
from ..graph_manager import RingGraph, networkx_graph
from ..graph_manager.base import GraphManager
from ..graph_manager.butterfly_groups import ButterflyGroups
from ..graph_manager.named_graphs import NAMES, named_graph
from ..methods.chosen import Chosen, read_algorithm, read_compressor
from ..methods.wrapping import chosen_of
from ..mixing_manager.base import MetropolisHastingsMixing, MixingManager
from ..mixing_manager.graph_weights import default_mixing
from ..mixing_manager.momentum_rates import MomentumRates
from ..registry import METHODS, Method, name_of
from ..rounds.algorithm import Algorithm
from ..rounds.coded_average import sent_bytes
from ..rounds.optimizer_watch import check_momentum
from ..rounds.periodic import Periodic
from ..rounds.rows import Indices, StackedMixing
from ..rounds.stacked import Stacked
from ..rounds.wire import WIRE_DTYPES, code_of
from ..schedule import Schedule
from ..warn import levels_to_user
from ..wrappers.arguments import check_overlap
from ..wrappers.choices import Choices
from .asynchronous import Bilateral, Groups, OwnPace, Pull
from .clock import BucketClock, Compute, MessageCost, Network, OverlapClock, StepClock, WorkerLinks, check
from .models import Models

MAX_DENSE_RANKS = 512
"""For more, dense linear algebra, as for the plan of a MATCHA graph, takes longer than all other methods together."""
CODES: Mapping[str, str] = {
    "sign": "SignNorm()",
    "topk": "TopK(0.01)",
    "randomk": "RandomK(0.01)",
    "qsgd": "QSGD(8)",
    "bfloat16": "Cast(bfloat16)",
    "float16": "Cast(float16)",
}
"""Short names of compressors, and their text."""
CODE_PASSES: Mapping[type[Any], tuple[float, float]] = {
    Cast: (1.5, 2.5),
    SignNorm: (2.0, 3.5),
    QSGD: (5.2, 3.0),
    Absmax: (2.7, 3.0),
    BlockFloat: (4.0, 4.5),
    TopK: (6.0, 1.0),
    ChunkTopK: (16.5, 2.1),
    RandomK: (0.3, 0.8),
    Moniqua: (0.0, 4.0),
    PowerGossip: (-1.0, 3.0),  # a worker does not hear itself
}
"""Encoding and decoding, in the time of a pass over the model: measured, see docs/benchmarks/compression.md.

The page has later times of another processor. For `SignNorm`, `QSGD` and `Absmax` these are the earlier numbers times
the ratio of later and earlier times on that one. `BlockFloat` was measured beside `Absmax`, and has no row there.
"""
UNKNOWN_PASSES = (10.0, 4.0)
DELTA_PASSES = (9.5, 4.0)
"""Of `deltas=True`, beside those of `Cast`: of a vector whose changes take 4 bits, the processor time of
`rounds.deltas.Changes`, scaled as the encoding and the decoding of the other codes were on the same machine."""
_MEMORY_PASSES = 3.0  # of error feedback or public copies, beside the code itself
_OUTER_PASSES = 10.0  # the drift, the outer optimizer with a momentum, and the new model: measured on a cluster
_SIDE = 512  # of the matrices of a model that is not there
_MAX_PERIOD = 100_000  # steps in which a round is looked for


@dataclass(frozen=True)
class Setting:
    """The workers, the model and the cluster of a comparison, common to all methods.

    Args:
        world_size: the number n of workers.
        num_parameters: the number of float32 parameters of the real model, for the prediction of time and bytes; None:
            the trained model is the real one.
        compute: the duration of steps.
        network: the links.
        seed: the seed of the draws of methods.

    Raises:
        ValueError: a number is out of range.
    """

    world_size: int
    num_parameters: int | None
    compute: Compute
    network: Network
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("world_size", "num_parameters"):
            value = getattr(self, name)
            is_count = value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= 1)
            check(name, value, is_count, "a whole number of at least 1")


class Running(NamedTuple):
    """A method at work: the parts that a training runs step by step.

    driver: runs the rounds on the models of all workers.
    clock: has the time and the bytes; a method whose workers have their own pace is its own driver.
    schedule: the action of each step.
    averages_gradients: whether a step averages the gradients of all workers.
    narrow: the dtype of the averaged gradients on the wire; None: their own.
    """

    driver: Stacked | OwnPace
    clock: StepClock
    schedule: Schedule = Schedule()
    averages_gradients: bool = False
    narrow: torch.dtype | None = None


@dataclass(frozen=True)
class LabPlan:
    """A method with its settings, the graph of its rounds, and their schedule.

    Args:
        chosen: the method with its settings.
        graph: the graph, or its name; "": the default of the method.
        code: the short name of the compressor, if there is one; "": the default of the method.
        peers_per_itr: peers per round, or a schedule of it; None: all neighbours on static graphs, one on others.
        schedule: the steps with gossip and with averages over all.
        overlap: whether a round takes effect at a later step, under the compute.
        max_staleness: see `GossipDataParallel`; with overlap. Each round is late by so many steps.
        wire_dtype: torch.bfloat16, torch.float16 or torch.int8 rounds messages of models, as `wire_dtype=` of the
            wrappers does; for D-PSGD, SGP, Overlap SGP and MATCHA. For AllReduce a dtype of 16 bits rounds gradients,
            as the hooks of DistributedDataParallel do. None: they are not rounded.
        is_recipe: whether the recipe chose the settings, so that other settings may be tried.
        is_text: whether a text names the method, so that its draws take the seed of the setting.

    >>> LabPlan.of("choco:hypercube:topk").name
    'choco with topk on hypercube'
    >>> LabPlan.of("GASLoC(sync_every=50):ring").name
    'GASLoC(sync_every=50) on ring'
    >>> LabPlan.of("ar+float16").name
    'ar in float16'
    """

    chosen: Chosen
    graph: str | GraphManager = ""
    code: str = ""
    peers_per_itr: int | Mapping[int, int] | None = None
    schedule: Schedule = field(default_factory=Schedule)
    overlap: bool = False
    max_staleness: int = 0
    wire_dtype: torch.dtype | None = None
    is_recipe: bool = True
    is_text: bool = True

    @classmethod
    def of(cls, what: Any, **others: Any) -> LabPlan:
        """Return the plan of a method.

        Args:
            what: a plan; an algorithm, or the settings of another method, such as `SGP()`; or a text: `method`,
                `method:graph` or `method:graph:code`, with the name of a method, or the text of an algorithm with its
                code. `+bfloat16`, `+float16` or `+int8` at its end is the `wire_dtype`.
            others: further arguments of `LabPlan`.

        Raises:
            ValueError: there is no such method, graph or code, or the method has none.
        """
        if isinstance(what, LabPlan):
            return replace(what, **others)
        if not isinstance(what, str):
            return cls(chosen_of(what), is_recipe=False, is_text=False, **others)
        plain, plus, end = what.rpartition("+")
        if plus and end in _DTYPES:
            return replace(cls.of(plain, **others), wire_dtype=_DTYPES[end])
        head, bracket, tail = what.rpartition(")")
        first, *rest = (tail if bracket else what).split(":")
        text = head + bracket
        name = read_algorithm(text).method.name if text else name_of(first)
        if name not in METHODS or len(rest) > (1 if text else 2) or (text and first):
            raise ValueError(
                f"got method={what!r}, expected <method>[:<graph>[:<code>]] with a method of {', '.join(METHODS)}, or "
                "<algorithm>[:<graph>], with +bfloat16, +float16 or +int8 at the end for narrow messages; e.g. sgp, "
                "dpsgd:ring, choco:torus:topk, osgp+bfloat16 or 'DiLoCo(sync_every=50)'"
            )
        graph, code = [*rest, "", ""][:2]
        method = METHODS[name]
        if graph and (method.simulated_graph is None or graph not in NAMES):
            names = ", ".join(NAMES) if method.simulated_graph else "no graph for it"
            raise ValueError(f"got graph={graph!r} of {name}, expected {names}; e.g. dpsgd:ring")
        plan = cls(read_algorithm(text or name), **{"graph": graph, "is_recipe": not text, **others})
        return plan.with_code(code) if code else plan

    def with_code(self, code: str) -> LabPlan:
        """Return the plan with a compressor, by its short name, and the published step size.

        Raises:
            ValueError: the method takes no such code, or no step size is published for it.
        """
        method = self.method
        if code not in self.codes:
            names = ", ".join(self.codes) or "no code for it"
            raise ValueError(f"got code={code!r} of {method.name}, expected {names}; e.g. choco:torus:topk")
        if CODES[code] not in method.step_sizes:
            raise ValueError(
                f"got {method.name} with {CODES[code]} and no step_size, expected one: known are those of "
                f"{', '.join(method.step_sizes)}; write {method.call}({CODES[code]}, step_size=...)"
            )
        own = {"compressor": read_compressor(CODES[code]), "step_size": method.step_sizes[CODES[code]]}
        return replace(self.with_settings(**own), code=code)

    def with_settings(self, **settings: Any) -> LabPlan:
        """Return the plan with other settings of the method; None: the value stays."""
        return replace(self, chosen=self.chosen.with_settings(settings))

    @property
    def method(self) -> Method:
        """The entry of the method in the registry."""
        return self.chosen.method

    @property
    def text(self) -> str:
        """The method with its settings, as training takes it."""
        return self.chosen.text

    @property
    def codes(self) -> tuple[str, ...]:
        """The short names of the compressors of the method."""
        return tuple(CODES) if self.method.step_sizes else ()

    @property
    def label(self) -> str:
        """The method in tables: its name and code, or its text, the dtype of its messages, and a staleness."""
        text = self.method.name + (self.code and f":{self.code}") if self.is_recipe else self.text
        text += f"+{_name(self.wire_dtype)}" if self.wire_dtype else ""
        return text + (f" late by {self.max_staleness}" if self.max_staleness else "")

    @property
    def setting(self) -> str:
        """The method, schedule, graph and messages, as rows have them: two plans with one text train alike."""
        overlap = f" overlap={self.overlap}" if self.overlap else ""
        late = f" max_staleness={self.max_staleness}" if self.max_staleness else ""
        wire = f" wire_dtype={_name(self.wire_dtype)}" if self.wire_dtype else ""
        return f"{self.text} {self.schedule} {self.graph}{overlap}{late}{wire}"

    @property
    def name(self) -> str:
        """The method, its code, the dtype of its messages and its graph in words: 'choco with sign on torus'."""
        name = replace(self, wire_dtype=None, max_staleness=0).label
        name = name.replace(":", " with ") if self.is_recipe else name
        name += f" in {_name(self.wire_dtype)}" if self.wire_dtype else ""
        name += f" late by {self.max_staleness}" if self.max_staleness else ""
        return f"{name} on {self.graph}" if self.graph else name

    @property
    def interval(self) -> int:
        """The steps from one round to the next, by the schedule and the algorithm; 1: every step has a round.

        >>> [LabPlan.of(text).interval for text in ("sgp", "wagma", "LocalSGD(7)", "SlowMo(12, gossip_every=1)")]
        [1, 1, 7, 1]
        >>> LabPlan.of("sgp", schedule=Schedule(gossip_every=5)).interval
        5
        >>> LabPlan.of("LocalSGD(300_000)").interval  # rounds are looked for in so many steps
        100000
        """
        made = self.chosen.made
        due = due_steps(made) if isinstance(made, Algorithm) else [0, 1]
        own = due[1] - due[0] if len(due) > 1 else _MAX_PERIOD
        return max(own, self.schedule.gossip_every, self.max_staleness + 1)

    def resolved(self, num_workers: int) -> LabPlan:
        """Return the plan with the default graph of its method for `num_workers` workers."""
        own, plan, made = self.method.simulated_graph, self, self.chosen.made
        if own is not None and not self.is_text and isinstance(made, Algorithm):
            has_weights = own(num_workers, 1) != "ring" and made.default_mixing(num_workers) is not None
            if has_weights or made.default_graph(num_workers) is not None:
                own = None  # an object has the graph and the weights that it trains on
        if num_workers > MAX_DENSE_RANKS and getattr(self.chosen.made, "step_size", 0.0) is None:
            plan = self.with_settings(step_size=1.0)  # the best one takes the spectrum of W
        if self.codes and self.is_recipe and not self.code:
            plan = self.with_code(self.codes[0])
        return replace(plan, graph=self.graph or (own(num_workers, self.peers_per_itr or 1) if own else ""))

    # How it runs.

    def make(
        self, setting: Setting, models: Models, workers: Indices | None = None, *, elastic: bool = False
    ) -> Running:
        """Return the method, ready for its first forward.

        Args:
            setting: the cluster and the seed.
            models: the trained models.
            workers: the numbers of the workers that are left; None: all.
            elastic: whether workers die or join.

        Raises:
            ValueError: the graph has no such size, or the method cannot work on it, or with dying and joining workers.
        """
        workers = np.arange(setting.world_size) if workers is None else workers
        chosen = read_algorithm(self.text, seed=setting.seed) if self.is_text else self.chosen
        if elastic and (why := self.method.needs_fixed_ranks):
            raise ValueError(f"got events with {self.method.title}, expected none: {why}")
        if elastic and isinstance(chosen.made, Algorithm):
            chosen = replace(chosen, made=chosen.made.for_membership())
        if self.max_staleness and self.method.name not in _ROUNDED:
            raise ValueError(
                f"got max_staleness={self.max_staleness} of {self.method.name} in the Lab, expected 0, or a method of "
                f"{', '.join(_ROUNDED)}, whose late rounds the Lab knows; leave it out"
            )
        if self.overlap not in (True, False):
            raise ValueError(
                f"got overlap={self.overlap!r} in the Lab, expected True or False: the Lab measures no ranks that "
                "could choose; compare both"
            )
        if self.wire_dtype is not None and self.method.name not in ("ar", *_ROUNDED):
            raise ValueError(
                f"got wire_dtype={self.wire_dtype} of {self.method.name} in the Lab, expected None, or a method of "
                f"{', '.join(('ar', *_ROUNDED))}"
            )
        if self.wire_dtype is torch.int8 and self.method.name == "ar":
            raise ValueError(
                "got wire_dtype=torch.int8 of ar in the Lab, expected torch.bfloat16, torch.float16 or None: the hooks "
                "of DistributedDataParallel add gradients of 16 bits"
            )
        run = PlanRun(replace(self.resolved(len(workers)), chosen=chosen), setting, models, workers)
        make: Callable[[PlanRun], Running] | None = self.method.simulate or _RUNS.get(self.method.name)
        running = PlanRun.rounds(run) if make is None else make(run)
        if models.mixed:
            self._check_buffers(running.driver, models)
        return running

    def _check_buffers(self, driver: Stacked | OwnPace, models: Models) -> None:
        """Raise ValueError where the Lab does not mix moments as ranks do; warn for running statistics."""
        if isinstance(driver, Stacked):
            if models.has_mixed_momentum:
                check_momentum(driver.algorithm, models.module)
            if not (len(driver.fragments) > 1 or isinstance(driver.algorithm.parts[-1], RelaySGD)):
                return
        if models.has_mixed_momentum:
            raise ValueError(
                f"got a model with a MixedMomentum and {self.method.title} in the Lab, expected a method whose workers "
                "step together, without fragments or trees; take SGP, Overlap SGP or LocalSGD, or leave it out"
            )
        if isinstance(driver, Stacked):
            warnings.warn(
                f"got a model with running statistics and {self.method.title} in the Lab, which cuts models into parts "
                "without their buffers, and mixes all buffers in each round: ranks get other models. Take a model "
                "without running statistics, such as one with GroupNorm, for results that ranks repeat",
                stacklevel=levels_to_user(),
            )


class PlanRun:
    """A plan on a cluster: the parts of its method.

    Args:
        plan: resolved.
        setting: the cluster.
        models: the models that are trained.
        workers: the numbers of the workers.
    """

    def __init__(self, plan: LabPlan, setting: Setting, models: Models, workers: Indices) -> None:
        self.plan, self.setting, self.models = plan, setting, models
        self.made, self.num_ranks = plan.chosen.made, len(workers)
        self.links = WorkerLinks(setting.network, workers)
        self.model_bytes = float(4 * setting.num_parameters if setting.num_parameters else models.num_bytes)
        self.buffer_bytes = self.model_bytes * models.buffer_bytes / models.num_bytes
        self.cluster = setting.compute, self.links, self.links.plain_message(self.model_bytes + self.buffer_bytes)

    def graph(self, *, is_undirected: bool = False, is_static: bool = False) -> GraphManager:
        """Return the graph of the plan.

        Raises:
            ValueError: it is directed, or changes, and must not.
        """
        plan = self.plan
        named = isinstance(plan.graph, str)
        graph: Any = named_graph(str(plan.graph), self.num_ranks, plan.peers_per_itr) if named else plan.graph
        if is_undirected and (not graph.is_symmetric or (is_static and graph.is_dynamic)):
            wanted = "an undirected graph that never changes" if is_static else "an undirected graph"
            remedy = "hypercube, torus or ring" if is_static else "bipartite-exponential, torus or ring"
            raise ValueError(
                f"got {plan.method.name} on {graph!r}, expected {wanted}; take {remedy}, with all neighbours"
            )
        return graph

    def rounds(self) -> Running:
        """Return the rounds of an algorithm, for which training waits unless the plan overlaps them."""
        if not isinstance(self.made, Algorithm):
            raise ValueError(
                f"got {self.plan.method.name}, whose `simulate` is None, expected a method that the Lab knows: an "
                "Algorithm, or one that is registered with simulate="
            )
        algorithm, overlap = self.made, self.plan.overlap
        mixing = self.weights(algorithm)
        driver = Stacked(algorithm, mixing, self.num_ranks, overlap=overlap, shapes=self.models.shapes)
        algorithm.check_schedule(self.plan.schedule)
        outer, sender = algorithm.parts[0], algorithm.parts[-1]
        share = 1 / getattr(outer, "num_fragments", 1)
        size, buffers = share * self.model_bytes, share * self.buffer_bytes
        message = self.message_of(algorithm, mixing, share)
        message = message._replace(num_bytes=message.num_bytes + buffers)
        if outer.averages_exactly and vars(sender).get("compressor") is not None:
            others = self.num_ranks - 1  # each worker adds up the messages of all by itself
            coding = message.encode_seconds + others * message.decode_seconds
            seconds, sent = coding + self.links.gather_seconds(message.num_bytes), others * message.num_bytes
            average = MessageCost(sent, seconds)
            if vars(sender).get("collective") == "all_reduce":
                average = self.coded_average(vars(sender)["compressor"], message, size, buffers)
        else:
            average = self.exact_average(size + buffers)
        average = self.with_start(average)
        scheduled = self.with_start(self.exact_average(self.model_bytes + self.buffer_bytes))
        step = _OUTER_PASSES * self.links.memory_seconds(size) if isinstance(outer, OuterMethod) else 0.0
        late: Callable[..., StepClock] = OverlapClock if overlap else StepClock
        if delay := getattr(outer, "delay", 0):
            late = partial(OverlapClock, delay=delay, copy_seconds=step + 2 * self.links.memory_seconds(size))
        else:
            average = average._replace(encode_seconds=average.encode_seconds + step)
            message = message._replace(encode_seconds=message.encode_seconds + step)
        sizes = {"buffer_bytes": buffers, "model_bytes": size, "average": average, "scheduled": scheduled}
        clock = late(self.setting.compute, self.links, message, **sizes)
        return Running(driver, clock, self.plan.schedule)

    def exact_average(self, num_bytes: float) -> MessageCost:
        """Return the cost of an all-reduce of so many bytes."""
        return MessageCost(2 * (1 - 1 / self.num_ranks) * num_bytes, self.links.all_reduce_seconds(num_bytes))

    def with_start(self, average: MessageCost) -> MessageCost:
        """Return the cost of an average with the time until all workers have begun it."""
        return average._replace(encode_seconds=average.encode_seconds + self.setting.network.average_start_s)

    def coded_average(self, code: Compressor, message: MessageCost, size: float, buffers: float) -> MessageCost:
        """Return the cost of an average of codes in two phases.

        Args:
            code: the code.
            message: the cost of coding a vector of the parameters.
            size, buffers: the bytes of the parameters and of the buffers.
        """
        n, dtype = self.num_ranks, torch.float32 if self.setting.num_parameters else self.models.x.dtype
        coded = buffers * self.models.coded_share
        vectors = [int(part / dtype.itemsize) for part in (size, coded) if part]
        sent = sum(sent_bytes(d, dtype, n, code) for d in vectors) + 2 * (1 - 1 / n) * (buffers - coded)
        coding = ((1 + 1 / n) * message.encode_seconds + 3 * message.decode_seconds) * (size + coded) / size
        return MessageCost(sent, coding + 2 * self.links.gather_seconds(sent / (2 * max(n - 1, 1))))

    def weights(self, algorithm: Algorithm) -> MixingManager | None:
        """Return W(t) on the graph of the plan, or the weights that the algorithm has; None: it only averages."""
        n, outer, graph = self.num_ranks, algorithm.parts[0], self.plan.graph
        if not outer.mixes:
            return None
        own_mixing = algorithm.default_mixing(n) if graph in ("", "ring") else None
        if own_mixing is not None:
            return own_mixing
        if not graph:
            return Choices(algorithm=algorithm).weights(n)
        is_static = any(part.needs_static_graph for part in algorithm.parts)
        return default_mixing(self.graph(is_undirected=True, is_static=is_static), push_sum=False)

    def message_of(self, algorithm: Algorithm, mixing: MixingManager | None, share: float) -> MessageCost:
        """Return the cost of a message of an algorithm, for a share of the model.

        Encoding and decoding take the measured time of the compressor, or of the algorithm itself; the time of a slow
        code if neither was measured.
        """
        sender, size = algorithm.parts[-1], share * self.model_bytes
        code = vars(sender).get("compressor")
        if isinstance(sender, RelaySGD) and mixing is not None:
            num_links = sum(len(mixing.graph.phone_book(rank)) for rank in range(self.num_ranks)) / 2
            relayed = (self.num_ranks - 1) / num_links if num_links else 1.0  # half, on a link of one of two trees
            return self.links.plain_message(relayed * size)
        if code is not None and (self.setting.num_parameters or isinstance(sender, Periodic)):
            dtype = torch.float32 if self.setting.num_parameters else self.models.x.dtype
            num_bytes = float(code.num_bytes(int(size / dtype.itemsize), dtype))
        else:
            num_bytes = measured_share(sender, self.models, self.setting) * size
            if num_bytes == size:
                return self.links.plain_message(size)
        kinds = type(getattr(sender, "compressor", None)), type(sender)
        passes = next((CODE_PASSES[kind] for kind in kinds if kind in CODE_PASSES), UNKNOWN_PASSES)
        return _own_message(self.links, size, num_bytes, passes, has_memory=code is not None)

    # The wrappers of this library, which are no algorithms.

    def gossip(self) -> Running:
        """Return D-PSGD, SGP or Overlap SGP, or MATCHA: gossip of the models themselves."""
        arguments, plan = self.plan.chosen.arguments, self.plan
        overlap, schedule = plan.overlap or bool(arguments.get("overlap")), plan.schedule
        check_overlap(overlap, plan.max_staleness)
        if plan.method.name == "matcha":
            mixing = self.matcha_weights()
        else:
            mixing = default_mixing(self.graph(), push_sum=arguments["push_sum"])
        compute, links, message = self.cluster
        size = self.model_bytes + self.buffer_bytes
        if plan.wire_dtype is not None:
            message = self.rounded(plan.wire_dtype, size)
        clock: StepClock = StepClock(compute, links, message, model_bytes=size)
        if overlap:
            late = plan.max_staleness + 1
            clock = OverlapClock(compute, links, message, model_bytes=size, delay=late, is_alone=True)
            schedule = replace(schedule, gossip_every=max(schedule.gossip_every, late))
        driver = Stacked(DPSGD(), mixing, overlap=overlap, max_staleness=plan.max_staleness, wire_dtype=plan.wire_dtype)
        return Running(driver, clock, schedule)

    def rounded(self, wire_dtype: torch.dtype, size: float) -> MessageCost:
        """Return the cost of a vector of `size` bytes that is sent in another dtype."""
        dtype = torch.float32 if self.setting.num_parameters else self.models.x.dtype
        code = code_of(wire_dtype)
        num_bytes = code.num_bytes(int(size / dtype.itemsize), dtype)
        return _message(self.links, size, num_bytes, CODE_PASSES[type(code)])

    def matcha_weights(self) -> MixingManager:
        """Return the weights of MATCHA's matchings."""
        kind, made, seed = load(place_of("MatchaGraph")), self.made, self.setting.seed
        if made.plan:
            return default_mixing(kind.from_plan(made.plan, seed=seed, world_size=self.num_ranks), push_sum=False)
        if self.num_ranks > MAX_DENSE_RANKS:
            raise ValueError(
                f"got matcha with {self.num_ranks} workers, expected at most {MAX_DENSE_RANKS}: its plan is n x n "
                "matrices; take dpsgd"
            )
        base = networkx_graph(self.graph(is_undirected=True, is_static=True))
        return default_mixing(kind(base, budget=made.budget, seed=seed), push_sum=False)

    def all_reduce(self) -> Running:
        """Return AllReduce SGD, which averages gradients in buckets, or models if there is nothing to learn."""
        learns, driver, narrow = self.models.learns, Stacked(DPSGD(), None, self.num_ranks), self.plan.wire_dtype
        size, n = self.model_bytes, self.num_ranks
        message = MessageCost(size) if narrow is None else self.rounded(narrow, size)
        seconds = message.encode_seconds + message.decode_seconds + self.links.all_reduce_seconds(message.num_bytes)
        average = MessageCost(2 * (n - 1) / n * message.num_bytes, seconds)
        kind = BucketClock if learns else StepClock
        clock = kind(self.setting.compute, self.links, message, model_bytes=size, average=average)
        return Running(driver, clock, Schedule(average_every=1), averages_gradients=learns, narrow=narrow)

    def ad_psgd(self) -> Running:
        """Return AD-PSGD, or A2CiD2."""
        graph = self.graph()
        if not graph.is_bipartite or graph.num_peers(0) > 1:
            raise ValueError(
                f"got {self.plan.method.name} on {graph!r}, expected a bipartite graph with one peer per round; take "
                "bipartite-exponential"
            )
        rates = MomentumRates.on(graph) if self.plan.method.name == "a2cid2" else None
        return own_pace(Bilateral(StackedMixing(default_mixing(graph, push_sum=False)), *self.cluster, rates=rates))

    def wagma(self) -> Running:
        """Return WAGMA-SGD."""
        made = self.made
        if not made.wait_avoiding or made.group_size == 1:
            raise ValueError(
                f"got {self.plan.text} in the Lab, expected groups of two or more that avoid waiting; for averages "
                f"over all workers only, take LocalSGD(sync_every={made.sync_period})"
            )
        groups = ButterflyGroups(self.num_ranks, group_size=made.group_size)
        return own_pace(Groups(*self.cluster, groups, sync_period=made.sync_period))

    def dpwa(self) -> Running:
        """Return dpwa."""
        made = self.made
        rule, standing = made.interpolation, load("dpwa.interpolation:Standing")
        if rule is None:
            rule = load("dpwa.config:DEFAULT_INTERPOLATION")
        if made.divergence_threshold or rule.needs_loss or rule.needs_peer_loss:
            raise ValueError(
                f"got {self.plan.text} in the Lab, expected an interpolation without losses, since workers of the Lab "
                "report none; take ConstantInterpolation or ClockInterpolation, and leave divergence_threshold out"
            )

        def factor(own: float, peer: float) -> float:
            return float(rule.factor(standing(own), standing(peer)))

        pull = Pull(*self.cluster, factor=factor, probability=made.fetch_probability, seed=self.setting.seed)
        return own_pace(pull)


_ROUNDED = ("dpsgd", "sgp", "osgp", "matcha")
"""The methods whose messages of models the Lab rounds."""
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in WIRE_DTYPES}
_RUNS: Mapping[str, Callable[[PlanRun], Running]] = {
    "ar": PlanRun.all_reduce,
    **dict.fromkeys(_ROUNDED, PlanRun.gossip),
    **dict.fromkeys(("adpsgd", "a2cid2"), PlanRun.ad_psgd),
    "wagma": PlanRun.wagma,
    "dpwa": PlanRun.dpwa,
}
"""The methods that are no algorithms, by name."""


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _message(links: WorkerLinks, size: float, num_bytes: float, passes: tuple[float, float]) -> MessageCost:
    """Return the cost of a message whose encoding and decoding take so many passes over a vector of `size` bytes."""
    encode, decode = (each * links.memory_seconds(size) for each in passes)
    return MessageCost(float(num_bytes), encode, decode)


def _own_message(
    links: WorkerLinks, size: float, num_bytes: float, passes: tuple[float, float], *, has_memory: bool
) -> MessageCost:
    """Return the cost of a message that its sender decodes too; a memory takes further passes: see `_message`."""
    encode, decode = passes
    return _message(links, size, num_bytes, (encode + decode + _MEMORY_PASSES * has_memory, decode))


def code_costs(links: WorkerLinks, size: float) -> Mapping[str, MessageCost]:
    """Return the cost of a message by each code, and with deltas, which are taken to send no bytes at all.

    Args:
        links: the links of the workers.
        size: the bytes of the model, float32.
    """
    d, costs = int(size / torch.float32.itemsize), dict[str, MessageCost]()
    for name, text in CODES.items():
        code = read_compressor(text)
        num_bytes, passes = code.num_bytes(d, torch.float32), CODE_PASSES[type(code)]
        is_wire = isinstance(code, Cast)
        make = _message if is_wire else partial(_own_message, has_memory=True)
        costs[name] = make(links, size, num_bytes, passes)
    shares = {Moniqua: 1 / torch.float32.itemsize, PowerGossip: 1 / _SIDE}
    for kind, share in shares.items():
        costs[kind.__name__] = _own_message(links, size, share * size, CODE_PASSES[kind], has_memory=False)
    encode, decode = (a + b for a, b in zip(CODE_PASSES[Cast], DELTA_PASSES, strict=True))
    costs["deltas"] = _message(links, size, 0.0, (encode, decode))
    return costs


def own_pace(method: OwnPace) -> Running:
    """Return a method that is its own driver and clock."""
    return Running(method, method)


def due_steps(algorithm: Algorithm) -> list[int]:
    """Return the first two steps that have a round with messages; fewer if there are no two."""
    steps = (k for k in range(_MAX_PERIOD) if algorithm.is_due(k) and not algorithm.is_silent(k))
    return list(islice(steps, 2))


def measured_share(algorithm: Algorithm, models: Models, setting: Setting) -> float:
    """Return the share of a model in a message of an algorithm: measured in two rounds of two workers.

    PowerGossip sends factors of rows and of columns in turn.

    Args:
        algorithm: the algorithm; an outer method sends its vector.
        models: the models that are trained.
        setting: if the real model is another one, it is taken to be made of matrices of 512 x 512.
    """
    if isinstance(algorithm, Periodic):
        return 1.0
    shapes = models.shapes if setting.num_parameters is None else [torch.Size((_SIDE, _SIDE))]
    num_elements = sum(shape.numel() for shape in shapes)
    driver = Stacked(algorithm, MetropolisHastingsMixing(RingGraph(2)), shapes=shapes)
    draw = torch.Generator().manual_seed(0)
    sample = torch.randn(1, num_elements, generator=draw, dtype=models.x.dtype, device="cpu").repeat(2, 1)
    due = due_steps(algorithm) or [0]
    num_messages = sum(len(driver.step(sample, k)) for k in due)
    return driver.sent_bytes / max(num_messages, 1) / sample[0].nbytes
