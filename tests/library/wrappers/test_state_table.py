"""One table of all kinds of state and of all events that meet them, by what a user's algorithm or loop sees.

An algorithm of this file declares each kind of state and adds one to each in every round. A cell is the word for the
values that it finds in the round after the event, compared with the round before. So the table does not depend on the
way in which the library keeps state.
"""

from __future__ import annotations

import copy
import io
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, ClassVar

import networkx as nx
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from gossip_modules import GossipDataParallel, LocalSGD, Membership, StreamingDiLoCo
from gossip_modules.extend import Algorithm, Memory, Mix, Round, Vectors
from gossip_modules.graph_manager import NetworkXGraph
from gossip_modules.testing import Chaos, Join, Kill, Worker
from tests.harness.problems import fill_, loss_of
from tests.harness.progress import weight_of
from tests.harness.ranks import run_ranks
from tests.harness.reference import flatten
from tests.library.wrappers.test_oracle import FixedStaleness

EVENTS = ("save", "load", "join", "average", "generation", "copy", "move")
"""save: a checkpoint is written and the run goes on. load: another wrapper goes on from it. join: a worker that joins
a membership gets the state of another. average: `average_()`. generation: a worker has died, the others go on.
copy: `copy.deepcopy` of the wrapper goes on. move: the model is converted to float64."""

TABLE = """
                            save     load     join     average    generation  copy     move
steps                       kept     kept     copied   kept       kept        kept     kept
vector                      kept     kept     copied   kept       kept        kept     kept
vector, average resets      kept     kept     copied   restarted  kept        kept     kept
vector, user's average      kept     kept     copied   restarted  kept        kept     kept
vector, generation resets   kept     kept     begins   kept       restarted   kept     kept
vector, joins with zero     kept     kept     begins   kept       kept        kept     kept
numbers                     kept     kept     copied   kept       kept        kept     kept
outer optimizer             kept     kept     copied   kept       kept        kept     kept
links                       kept     kept     begins   restarted  kept        kept     restarted
vector beside links         kept     kept     begins   kept       kept        kept     kept
units of the learning rate  kept     kept     copied   kept       kept        kept     kept
frozen tensors              kept     kept     copied   kept       kept        kept     kept
momentum of SGD             kept     kept     copied   restarted  kept        kept     kept
push-sum weight             kept     kept     shared   restarted  kept        kept     kept
round with delay            kept     kept     -        applied    -           applied  applied
round of StreamingDiLoCo    kept     kept     -        applied    -           applied  applied
round with overlap          kept     kept     -        applied    -           kept     applied
round, staleness 2          kept     kept     -        applied    -           applied  applied
declared copies             kept     kept     -        kept       -           begins   kept
choice of overlap="auto"    kept     kept     refused  kept       refused     kept     kept
"""
"""kept: as without the event. copied: as the other workers have it. begins: a first value of its own. shared: a half of
the value of another worker. restarted: as before the first round. applied: the round in flight ends before the event.
refused: by an error. Declared copies of a copied wrapper are declared for it again. -: not in this table; for rounds in
flight see `tests/library/membership/test_mass.py`."""


def cells() -> list[Any]:
    """The cells: the kind of state, the event, and the word."""
    lines = TABLE.strip("\n").splitlines()
    columns = [lines[0].index(event) for event in EVENTS]
    found = []
    for line in lines[1:]:
        words = [line[first : first + 12].split()[0] for first in columns]
        for event, word in zip(EVENTS, words, strict=True):
            found += [(line[: columns[0]].strip(), event, word)] if word != "-" else []
    return found


# An algorithm that has all kinds of state.


@dataclass(frozen=True)
class Probe(Algorithm):
    """Averages models, and adds one to each kind of state in every round.

    Args:
        note: called with the values of each round before it, by kind.
    """

    note: Callable[[dict[str, float]], object] = field(repr=False, compare=False)

    needs_sgd: ClassVar[bool] = True
    needs_current: ClassVar[bool] = True
    follows_rate: ClassVar[bool] = True

    def round(self, v: Vectors, m: Memory, k: int) -> Round:
        """See `Algorithm`."""
        vectors = {
            "vector": m.vector("vector"),
            "vector, average resets": m.vector("average", average="reset"),
            "vector, user's average": m.vector("asked", average="on_request"),
            "vector, generation resets": m.vector("generation", generation="reset"),
            "vector, joins with zero": m.vector("joins", join="zero"),
            "units of the learning rate": m.vector("units", in_units_of_rate=True),
            "momentum of SGD": m.momentum,
        }
        outer = m.optimizer("outer", lambda x: torch.optim.SGD(x, lr=0.0, momentum=1.0), vectors["vector"])
        self.note(
            {
                "steps": k,
                "numbers": m.numbers.get("rounds", 0),
                "frozen tensors": sum(x.numel() for x in v.x.parts),
                "outer optimizer": momentum_of(outer),
                **{name: float(x.parts[0].flatten()[0]) for name, x in vectors.items()},
            }
        )
        yield Mix(v.x)
        m.numbers["rounds"] = m.numbers.get("rounds", 0) + 1
        for x in (part for vector in vectors.values() for part in vector.parts):
            x.add_(1.0)
        if outer is not None:
            for group in outer.param_groups:
                for x in group["params"]:
                    x.grad = torch.ones_like(x)
            outer.step()


@dataclass(frozen=True)
class LinkProbe(Algorithm):
    """Averages models, and adds one to the state of each link and to a vector; see `Probe`."""

    note: Callable[[dict[str, float]], object] = field(repr=False, compare=False)

    keeps_links: ClassVar[bool] = True
    takes_rows: ClassVar[bool] = False

    def round(self, v: Vectors, m: Memory, k: int) -> Round:
        """See `Algorithm`."""
        links, vector = [m.link(j, lambda: {"rounds": 0}) for j in v.peers], m.vector("beside")
        found = min(link["rounds"] for link in links)
        self.note({"steps": k, "links": found, "vector beside links": float(vector.parts[0].flatten()[0])})
        yield Mix(v.x)
        for link in links:
            link["rounds"] += 1
        for x in vector.parts:
            x.add_(1.0)


def momentum_of(optimizer: torch.optim.Optimizer | None) -> float:
    """The first element of the momentum of an optimizer, which counts its steps."""
    state = [] if optimizer is None else list(optimizer.state.values())
    return float(state[0]["momentum_buffer"].flatten()[0]) if state else 0.0


def make_model(seed: int) -> nn.Module:
    """Layers of float32, the first of which is frozen after some steps."""
    return fill_(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), seed)


class Run:
    """A rank that trains; each run with these arguments has the same bits."""

    def __init__(self, group: dist.ProcessGroup, seed: int = 0, *, is_frozen: bool = False, **options: Any) -> None:
        self.group, self.options, self.step = group, {**options}, 0
        model = make_model(seed)
        model.get_submodule("0").requires_grad_(not is_frozen)
        wrap = options.pop("wrap", GossipDataParallel)
        self.wrapper = wrap(model, process_group=group, **options)
        self.optimizer = self._optimizer()

    def _optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.wrapper.parameters(), lr=0.01, momentum=0.9)

    def train(self, num_steps: int) -> Run:
        for _ in range(num_steps):
            self.optimizer.zero_grad()
            loss_of(self.wrapper, self.group.rank(), self.step).backward()
            self.optimizer.step()
            self.step += 1
        return self

    def end(self) -> Tensor:
        """Apply all corrections and return the parameters."""
        self.wrapper.settle()
        self.wrapper.close()
        return flatten(self.wrapper.module)

    def checkpoint(self) -> bytes:
        file = io.BytesIO()
        torch.save({"model": self.wrapper.state_dict(), "optimizer": self.optimizer.state_dict()}, file)
        return file.getvalue()

    def loaded(self, file: bytes) -> Run:
        """Another wrapper, that goes on from a checkpoint of this one."""
        saved = torch.load(io.BytesIO(file), weights_only=True)
        is_frozen = not next(self.wrapper.module.parameters()).requires_grad
        run = Run(self.group, seed=99, is_frozen=is_frozen, **self.options)
        run.wrapper.load_state_dict(saved["model"])
        run.optimizer.load_state_dict(saved["optimizer"])
        run.step = self.step
        return run

    def meet(self, event: str) -> Run:
        """Meet an event, and return the run that goes on."""
        if event == "save":
            self.checkpoint()
        elif event == "load":
            run = self.loaded(self.checkpoint())
            self.wrapper.close()
            return run
        elif event == "average":
            self.wrapper.average_()
        elif event == "copy":
            twin = copy.copy(self)
            twin.wrapper = copy.deepcopy(self.wrapper)
            twin.optimizer = twin._optimizer()
            twin.optimizer.load_state_dict(self.optimizer.state_dict())
            self.wrapper.settle()
            self.wrapper.close()
            return twin
        elif event == "move":
            self.wrapper.double()
            for state in self.optimizer.state.values():
                state["momentum_buffer"] = state["momentum_buffer"].double()
        else:
            assert event == "flush"
            self.wrapper.flush()
        return self


# Events of ranks, seen by the algorithm.

FROZEN, LAST = 4, 9
"""The step at which the first layer is frozen, and the step of the event."""


def word_of(kind: str, before: float, after: float) -> str:
    """The word for the values of a kind in the rounds before and after an event."""
    grown = 0 if kind == "frozen tensors" else 1
    return {before + grown: "kept", 0.0: "restarted"}.get(after, f"{before} became {after}")


@lru_cache
def seen_by_ranks(probe: Callable[..., Algorithm], event: str) -> Mapping[str, str]:
    """The words for all kinds of state of a probe after an event of ranks that stay."""

    def body(group: dist.ProcessGroup) -> dict[str, str]:
        notes: list[dict[str, float]] = []
        run = Run(group, algorithm=probe(note=notes.append), push_sum=False, graph="ring").train(FROZEN)
        run.wrapper.module.get_submodule("0").requires_grad_(False)
        run.train(LAST - FROZEN)
        before = notes[-1]
        run = run.meet(event)
        for parameters in run.optimizer.param_groups:
            parameters["lr"] /= 2  # and the vector in its units with the step after the next round
        run.train(2).end()
        after = notes[-2]
        if "units of the learning rate" in after:
            after["units of the learning rate"] = 2 * notes[-1]["units of the learning rate"] - 1
        return {kind: word_of(kind, before[kind], after[kind]) for kind in before}

    first, *others = run_ranks(3, body)
    assert all(other == first for other in others)
    return first


# Events of a membership, seen by the algorithm.

DEATH, BIRTH, LONG = 9, 14, 1 << 30


@lru_cache
def seen_by_workers(probe: Callable[..., Algorithm]) -> Mapping[str, Mapping[str, str]]:
    """The words for "join" and "generation": of three workers one dies, and another one joins later."""
    notes: dict[int, list[tuple[int, dict[str, float]]]] = {rank: [] for rank in range(4)}
    last = [LONG]

    def body(worker: Worker) -> None:
        membership = worker.membership(min_workers=3, timeout=60, min_deadline=20.0)

        def note(values: dict[str, float]) -> None:
            notes[worker.rank].append((membership.generation, values))

        options: dict[str, Any] = {"membership": membership, "algorithm": probe(note=note), "push_sum": False}
        wrapper = GossipDataParallel(make_model(0), **options)
        optimizer = torch.optim.SGD(wrapper.parameters(), lr=0.01, momentum=0.9)
        membership.track(optimizer=optimizer)
        wrapper.module.get_submodule("0").requires_grad_(worker.rank == 3)  # which freezes it as it joins
        first = membership.join()
        for step in membership.steps(LONG):
            last[0] = min(last[0], step + 5 if worker.rank == 3 and step > first else LONG)
            if step >= last[0]:
                break
            optimizer.zero_grad()
            loss_of(wrapper, worker.rank, step).backward()
            optimizer.step()
            time.sleep(0.001)
        wrapper.close()

    Chaos([Kill(step=DEATH, rank=0), Join(step=BIRTH)]).run(body, 3)
    generations = sorted({generation for generation, _ in notes[1]})
    before, after = ([n for g, n in notes[1] if g == generation] for generation in generations[:2])
    joins: Any = notes[3][0][1]
    donors = next(values for _, values in notes[1] if values["steps"] == joins["steps"])
    return {
        "generation": {kind: word_of(kind, before[-1][kind], after[0][kind]) for kind in joins},
        "join": {kind: joined(joins[kind], donors[kind]) for kind in joins},
    }


def joined(value: float, of_others: float) -> str:
    """The word for the first value of a worker that has joined; a vector may lack the last rounds before its begin."""
    if value == 0.0:
        return "begins"
    return "copied" if value <= of_others else f"{value} beside {of_others}"


# Kinds of state of the wrapper.


def irregular_of(num_workers: int) -> NetworkXGraph:
    """A directed ring with one more edge, on which the push-sum weight moves."""
    more = [(0, 2)] if num_workers > 2 else []
    return NetworkXGraph(nx.DiGraph([*((i, (i + 1) % num_workers) for i in range(num_workers)), *more]))


def weight_after(event: str) -> str:
    """The word for the push-sum weight after an event of ranks that stay."""

    def body(group: dist.ProcessGroup) -> str:
        run = Run(group, graph=irregular_of(3)).train(LAST)
        before = weight_of(run.wrapper)
        run = run.meet(event)
        after = weight_of(run.wrapper)
        run.end()
        return {before: "kept", 1.0: "restarted"}.get(after, f"{before} became {after}")

    (word,) = set(run_ranks(3, body))
    return word


@lru_cache
def weight_in_membership() -> Mapping[str, str]:
    """The words for the push-sum weight of workers."""
    begun: dict[int, dict[int, float]] = {}  # the weight of each worker at the begin of a generation
    ended: dict[int, dict[int, float]] = {}  # and at its end
    last = [LONG]

    def body(worker: Worker) -> None:
        membership = worker.membership(min_workers=3, timeout=60, min_deadline=20.0)
        wrapper = GossipDataParallel(make_model(0), membership=membership, graph=irregular_of)
        optimizer = torch.optim.SGD(wrapper.parameters(), lr=0.01)
        membership.track(optimizer=optimizer)
        first = membership.join()
        for step in membership.steps(LONG):
            begun.setdefault(membership.generation, {}).setdefault(worker.rank, weight_of(wrapper))
            last[0] = min(last[0], step + 5 if worker.rank == 3 and step > first else LONG)
            if step >= last[0]:
                break
            optimizer.zero_grad()
            loss_of(wrapper, worker.rank, step).backward()
            optimizer.step()
            ended.setdefault(membership.generation, {})[worker.rank] = weight_of(wrapper)
            time.sleep(0.001)
        wrapper.close()

    Chaos([Kill(step=DEATH, rank=0), Join(step=BIRTH)]).run(body, 3)
    _, second, third = sorted(begun)
    # A worker takes back shares that a dead one has not applied, so that its weight may change, but does not restart.
    is_kept = any(begun[second][rank] != 1.0 for rank in (1, 2))
    is_shared = 0 < begun[third][3] != 1.0  # a worker may see its weight before or after the first round
    return {"generation": "kept" if is_kept else f"{ended} {begun}", "join": "shared" if is_shared else f"{begun}"}


FLIGHTS: Mapping[str, tuple[Mapping[str, Any], tuple[int, ...]]] = {
    "round with delay": ({"algorithm": LocalSGD(4, delay=3)}, (5, 6, 9)),
    "round of StreamingDiLoCo": ({"algorithm": StreamingDiLoCo(4, fragments=2, delay=3)}, (5, 6, 9)),
    "round with overlap": ({"overlap": True}, (5, 6, 9)),
    "round, staleness 2": ({"overlap": True, "max_staleness": 2, "wrap": FixedStaleness}, (4, 5, 10)),
}
"""Arguments of the wrapper, and the numbers of steps after which a round is in flight."""
END = 13


def flight_after(kind: str, event: str) -> str:
    """The word for a round in flight after an event of ranks that stay; by the bits at the end of training."""
    options, places = FLIGHTS[kind]

    def body(group: dist.ProcessGroup) -> set[str]:
        return {_flight_at(group, options, event, place) for place in places}

    return " or ".join(sorted(set.union(*run_ranks(2, body))))


def _flight_at(group: dist.ProcessGroup, options: Mapping[str, Any], event: str, place: int) -> str:
    def end(*events: str) -> Tensor:
        run = Run(group, **options).train(place)
        for each in events:
            run = run.meet(each)
        return run.train(END - place).end()

    met = end(event)
    if torch.equal(met, end()):
        return "kept"
    return "applied" if torch.equal(met, end("flush", event)) else "lost"


class RunWithMasters(Run):
    """A rank whose loop steps copies of float64, which it declares and writes over the parameters."""

    def __init__(self, group: dist.ProcessGroup, seed: int = 0, **options: Any) -> None:
        super().__init__(group, seed, **options)
        self.masters = [p.detach().double() for p in self.wrapper.module.parameters()]
        self.declare()

    def declare(self) -> None:
        self.wrapper.follow(zip(self.wrapper.module.parameters(), self.masters, strict=True))

    def train(self, num_steps: int) -> Run:
        for _ in range(num_steps):
            self.wrapper.zero_grad()
            loss_of(self.wrapper, self.group.rank(), self.step).backward()
            with torch.no_grad():
                for p, q in zip(self.wrapper.module.parameters(), self.masters, strict=True):
                    assert p.grad is not None
                    p.copy_(q.sub_(p.grad, alpha=0.05))
            self.wrapper.gossip_step()
            self.step += 1
        return self

    def is_followed(self) -> bool:
        """Whether the copies have the correction of the last round."""
        pairs = zip(self.wrapper.module.parameters(), self.masters, strict=True)
        return all(torch.allclose(p.double(), q, rtol=0, atol=1e-6) for p, q in pairs)


def masters_after(event: str) -> str:
    """The word for copies of the parameters after an event of ranks that stay."""
    options: dict[str, Any] = {"push_sum": False, "graph": "ring", "rounds": "manual"}

    def body(group: dist.ProcessGroup) -> str:
        run: Any = RunWithMasters(group, **options).train(LAST)
        if event == "load":
            wrapper, state = run.wrapper, run.wrapper.state_dict()
            run = RunWithMasters(group, seed=9, **options)
            run.wrapper.load_state_dict(state)
            run.masters = [p.detach().double() for p in run.wrapper.module.parameters()]
            run.declare()
            wrapper.close()
        elif event == "copy":
            wrapper = run.wrapper
            run.wrapper, run.masters = copy.deepcopy((run.wrapper, run.masters))
            wrapper.close()
        else:
            run = run.meet(event)
        word = "kept" if run.train(1).is_followed() else "begins"
        if word == "begins":
            run.masters = [p.detach().double() for p in run.wrapper.module.parameters()]
            run.declare()
            assert run.train(1).is_followed()
        run.end()
        return word

    (word,) = set(run_ranks(3, body))
    return word


def choice_after(event: str) -> str:
    """The word for the choice of overlap="auto" after an event of ranks that stay."""

    def body(group: dist.ProcessGroup) -> str:
        run = Run(group, overlap="auto").train(10)  # eight rounds are measured
        before = run.wrapper.overlap_choice
        assert before is not None
        run = run.meet(event).train(1)
        after = run.wrapper.overlap_choice
        run.end()
        return "kept" if after == before else "restarted" if after is None else f"{before} became {after}"

    (word,) = set(run_ranks(2, body))
    return word


def choice_in_membership() -> str:
    """The word for overlap="auto" under a membership."""
    membership = Membership(dist.HashStore(), min_workers=1)
    with pytest.raises(ValueError, match="got overlap='auto' with a membership"):
        GossipDataParallel(make_model(0), overlap="auto", membership=membership)
    membership.close()
    return "refused"


def found(kind: str, event: str) -> str:
    """The word that the library gives to a cell."""
    in_membership = event in ("join", "generation")
    if kind == "push-sum weight":
        return weight_in_membership()[event] if in_membership else weight_after(event)
    if kind == "declared copies":
        return masters_after(event)
    if kind.startswith("choice"):
        return choice_in_membership() if in_membership else choice_after(event)
    if kind in FLIGHTS:
        return flight_after(kind, event)
    probe = LinkProbe if "links" in kind else Probe
    return seen_by_workers(probe)[event][kind] if in_membership else seen_by_ranks(probe, event)[kind]


@pytest.mark.filterwarnings("ignore:.*other tensors are trained than before:UserWarning")
@pytest.mark.parametrize(("kind", "event", "word"), cells())
def test_each_kind_of_state_meets_each_event_as_the_table_says(kind: str, event: str, word: str) -> None:
    assert found(kind, event) == word
