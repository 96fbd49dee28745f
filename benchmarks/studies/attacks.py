"""The study of workers that send wrong models: 8 workers, one or two attackers, by rules that trust all or nobody.

    python -m benchmarks.studies attacks --output benchmarks/results/attacks.csv

An attacker takes its steps as the others do, keeps a model of its own by D-PSGD, and sends something else. The scores
are of the honest workers only: of their averaged model, and of the worst one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from statistics import NormalDist
from typing import Any, TypeAlias

import networkx as nx
import numpy as np
import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from benchmarks.studies.images import DrawnDigits
from benchmarks.studies.study import TUNING_SEED, Study, StudyTask, rate_factor
from gossip_modules import ClippedGossip, TrimmedMean
from gossip_modules.graph_manager import GraphManager, NetworkXGraph, RingGraph
from gossip_modules.lab import LabPlan, LabTask, Setting
from gossip_modules.lab.comparison import LabTraining
from gossip_modules.lab.models import Models
from gossip_modules.lab.plan import Running
from gossip_modules.rounds.requests import SGDStep
from gossip_modules.rounds.rows import Indices
from gossip_modules.rounds.stacked import Stacked
from gossip_modules.rounds.vector import Vector

NUM_WORKERS, STEPS, SEEDS, RATE = 8, 300, (1, 2, 3), 0.1
GRAPHS: Mapping[str, GraphManager] = {
    "ring": RingGraph(NUM_WORKERS, peers_per_itr=2),
    "exponential": NetworkXGraph(nx.circulant_graph(NUM_WORKERS, [1, 2, 4])),
}
"""Static graphs with all neighbours in each round; those of the exponential one are 1, 2 and 4 away, both ways."""
PLACES: Mapping[str, Mapping[str, tuple[int, ...]]] = {
    "ring": {"1": (3,), "2 apart": (3, 7), "2 around a worker": (3, 5)},
    "exponential": {"1": (3,), "2": (3, 7)},
}
"""The ranks of the attackers by the graph and by their names. On the exponential graph each of two is a neighbour of
all honest workers but one or two, so that workers 1 and 5 have both."""
D_PSGD, CLIPPED, THIRD, TRIMMED = "D-PSGD", "ClippedGossip", "ClippedGossip, a third", "trimmed mean"
RULES = (D_PSGD, CLIPPED, THIRD, TRIMMED)
RADII: Mapping[str, float] = {CLIPPED: 1.0, THIRD: 1 / 3}
"""The radius of ClippedGossip, as a share of `distance_on`."""
SHARE = 0.4
"""The share of the trimmed mean: two of the five neighbours of the exponential graph at each end, and none of two."""
NONE = "none"
"""The attack of trainings without attackers."""
WORST = ("worst_validation", "worst_test")
"""The errors of the worst honest worker, in percent."""


# The attacks.

Attack: TypeAlias = Callable[[Tensor, Sequence[int], torch.Generator], Tensor]
"""attack(x, attackers, draw): the sent models of attackers, [m, d], from the models x [n, d] of all before a round."""


def honest_of(attackers: Sequence[int], num_workers: int = NUM_WORKERS) -> list[int]:
    """Return the ranks that are no attackers."""
    return [rank for rank in range(num_workers) if rank not in attackers]


def reverse(x: Tensor, attackers: Sequence[int], draw: torch.Generator) -> Tensor:
    """Return -5 times the models of attackers."""
    return -5 * x[list(attackers)]


def noise(x: Tensor, attackers: Sequence[int], draw: torch.Generator) -> Tensor:
    """Return the models of attackers with normal noise of standard deviation 10 in each entry, anew in each round."""
    own = x[list(attackers)]
    return own + 10 * torch.randn(own.shape, generator=draw, dtype=own.dtype)


def nan(x: Tensor, attackers: Sequence[int], draw: torch.Generator) -> Tensor:
    """Return NaN."""
    return torch.full_like(x[list(attackers)], math.nan)


def alie_z(n: int, m: int) -> float:
    """Return z of "A Little Is Enough" for m attackers of n workers.

    Baruch, Baruch, Goldberg, "A Little Is Enough: Circumventing Defenses For Distributed Learning", NeurIPS 2019, arXiv
    1902.06635, Algorithm 3: attackers need s = floor(n / 2 + 1) - m honest workers for a majority, and z is the largest
    number of standard deviations that s of n - m honest workers exceed: the normal quantile of (n - m - s) / (n - m).

    >>> round(alie_z(50, 24), 2), round(alie_z(8, 1), 2), alie_z(8, 2)
    (1.43, -0.18, 0.0)
    """
    supporters = n // 2 + 1 - m
    return NormalDist().inv_cdf((n - m - supporters) / (n - m))


def alie(x: Tensor, attackers: Sequence[int], draw: torch.Generator, *, z: float | None = None) -> Tensor:
    """Return the mean of the honest models minus z of their standard deviations, in each entry, for all attackers.

    Args:
        x, attackers, draw: see `Attack`.
        z: the number of standard deviations; None: `alie_z`.
    """
    honest = x[honest_of(attackers, len(x))]
    z = alie_z(len(x), len(attackers)) if z is None else z
    return (honest.mean(0) - z * honest.std(0, correction=0)).expand(len(attackers), -1)


ATTACKS: Mapping[str, Attack] = {
    "-5 x": reverse,
    "noise": noise,
    "NaN": nan,
    "ALIE": alie,
    "ALIE, z = 1.5": partial(alie, z=1.5),
}
"""The attacks by name. For one or two of eight workers z of `alie_z` is not above 0, so that ALIE sends about the mean;
1.5 is about its z for 24 of 50."""


def distance(x: Tensor) -> float:
    """Return the distance of models x [n, d] from their mean, root mean square over models."""
    return float((x - x.mean(0)).square().sum(1).mean().sqrt())


class Attacked(Stacked):
    """`Stacked` in which other models leave the attackers than they have.

    Args:
        honest: the driver without attackers, of an algorithm without overlap.
        attack: makes the models that attackers send.
        attackers: their ranks.
        models: the trained models.
        seed: of the random numbers of the attack.

    Attributes:
        distances: the `distance` of the honest models before each round.
    """

    def __init__(self, honest: Stacked, attack: Attack, attackers: Sequence[int], models: Models, *, seed: int) -> None:
        assert honest.mixing is not None, "attackers have neighbours"
        super().__init__(honest.algorithm, honest.mixing.mixing, shapes=models.shapes)
        self.attack, self.attackers = attack, list(attackers)
        self.honest, self.distances = honest_of(attackers, self.num_ranks), list[float]()
        self.draw = torch.Generator().manual_seed(seed)

    def run(self, x: Vector, k: int, sgd: SGDStep | None = None) -> None:
        """Run one round, see `Stacked`; the models of attackers become those that D-PSGD makes of true messages."""
        (rows,) = x.parts
        self.distances.append(distance(rows[self.honest]))
        own = self.rows.mix(rows)[self.attackers]
        if self.attackers:
            rows[self.attackers] = self.attack(rows, self.attackers, self.draw)
        super().run(x, k, sgd)
        rows[self.attackers] = own


@dataclass(frozen=True)
class UnderAttack(LabPlan):
    """A plan whose workers are attacked.

    Args:
        attack: the name of the attack, in ATTACKS.
        attackers: the ranks; empty: there are none.
    """

    attack: str = NONE
    attackers: tuple[int, ...] = ()

    def make(
        self, setting: Setting, models: Models, workers: Indices | None = None, *, elastic: bool = False
    ) -> Running:
        """See `LabPlan`."""
        running = super().make(setting, models, workers, elastic=elastic)
        assert isinstance(running.driver, Stacked), "a method with rounds"
        attack = ATTACKS.get(self.attack, reverse)
        return running._replace(driver=Attacked(running.driver, attack, self.attackers, models, seed=setting.seed))


# The trainings.


@dataclass(frozen=True)
class Case:
    """A training of the study but for its seed.

    Attributes:
        graph: the name of the graph.
        attack: the name of the attack, or NONE.
        place: the name of the attackers in PLACES; "": there are none.
        rule: of RULES.
    """

    graph: str
    attack: str
    place: str
    rule: str

    @property
    def name(self) -> str:
        """The method in the rows.

        >>> Case("ring", "NaN", "2 apart", "D-PSGD").name, Case("ring", "none", "", "D-PSGD").name
        ('ring, 2 apart, NaN: D-PSGD', 'ring, none: D-PSGD')
        """
        return f"{', '.join(filter(None, (self.graph, self.place, self.attack)))}: {self.rule}"

    @property
    def attackers(self) -> tuple[int, ...]:
        """The ranks of the attackers."""
        return PLACES[self.graph][self.place] if self.place else ()

    def plan(self, radius: Callable[[float], float]) -> UnderAttack:
        """Return the plan.

        Args:
            radius: returns the radius of ClippedGossip by its share in RADII.
        """
        what: Any = {D_PSGD: "dpsgd", TRIMMED: TrimmedMean(SHARE)}.get(self.rule)
        others = {"graph": GRAPHS[self.graph], "attack": self.attack, "attackers": self.attackers}
        plan = UnderAttack.of(what or ClippedGossip(radius(RADII[self.rule])), **others)
        assert isinstance(plan, UnderAttack), "`of` makes plans of its own class"
        return plan


CASES: Mapping[str, Case] = {
    case.name: case
    for graph, places in PLACES.items()
    for attack, place in [(NONE, ""), *((attack, place) for place in places for attack in ATTACKS)]
    for rule in RULES
    for case in [Case(graph, attack, place, rule)]
}
"""All trainings but for their seeds, by the method in their rows."""


def training_of(study: Study, task: StudyTask, plan: UnderAttack, rate: float, steps: int, seed: int) -> LabTraining:
    """Return a training that has not begun."""
    own = LabTask(
        task.model,
        task.loss,
        task.batch,
        lambda parameters: task.optimizer(parameters, rate),
        lambda optimizer: LambdaLR(optimizer, partial(rate_factor, steps=steps)),
    )
    setting = Setting(NUM_WORKERS, study.num_parameters, study.compute, study.network, seed)
    return LabTraining(plan, setting, own, by=study.by)


@cache
def distance_on(graph: str, steps: int) -> float:
    """Return the distance that a user would print to choose the radius of ClippedGossip on a graph.

    The distance is of the models of D-PSGD without attackers after an optimizer step, before the round, which is
    `consensus_distance()` in a loop of training: the mean over the training with the first seed.
    """
    study = ATTACK_STUDIES["attacks"]
    plan = Case(graph, NONE, "", D_PSGD).plan(lambda share: math.inf)
    training = training_of(study, study.task(), plan, RATE, steps, TUNING_SEED)
    for _ in training.run(steps):
        pass
    driver = training.method.driver
    assert isinstance(driver, Attacked), "the driver of `UnderAttack`"
    return float(np.mean(driver.distances))


def under_attack(study: Study, task: StudyTask, key: Mapping[str, Any], seed: int) -> list[dict[str, Any]]:
    """Train once, see `Study.train`; all figures are of the honest workers only."""
    case, steps, points = CASES[key["method"]], key["steps"], []
    plan = case.plan(lambda share: float(f"{share * distance_on(case.graph, steps):.2g}"))
    training = training_of(study, task, plan, key["rate"], steps, seed)
    honest, models = np.array(honest_of(plan.attackers)), training.models
    every, resolved = max(steps // study.points, 1), plan.resolved(NUM_WORKERS)
    for all_z in training.run(steps):
        if not training.step or (training.step % every and training.step < steps):
            continue
        z = all_z[honest]
        validation, test = task.score(models.mean_model(z, honest))
        each = [task.score(models.mean_model(z[[i]], honest[[i]])) for i in range(len(honest))]
        worst = dict(zip(WORST, map(max, zip(*each, strict=True)), strict=True))
        points.append({
            "plan": f"{resolved.text} {resolved.graph}", "step": training.step, "seconds": training.seconds,
            "megabytes": training.sent_bytes / 1e6, "loss": float(models.losses[honest].mean()),
            "validation": validation, "test": test, "waiting": training.waiting_share, "by": models.by,
            "consensus": distance(z), **worst,
        })  # fmt: skip
    return points


ATTACK_STUDIES: Mapping[str, Study] = {
    "attacks": Study(
        partial(DrawnDigits, 8),
        lambda workers: CASES,
        cells=tuple((NUM_WORKERS, STEPS, seed) for seed in SEEDS),
        rates=(RATE,),
        points=4,
        train=under_attack,
        more=WORST,
    )
}
"""The study by its name."""
