"""The studies of the default: a small decoder by 8 to 64 workers over 3,000 steps, by all-reduce and by gossip.

The page docs/benchmarks/default.md joins its curves with the times of the emulated cluster.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks.studies.small_decoder import BETAS, WEIGHT_DECAY, Text
from benchmarks.studies.study import MakeOptimizer, Study
from gossip_modules import DiLoCo, GossipAdamW, LocalSGD, SlowMo
from gossip_modules.lab import LabPlan
from gossip_modules.schedule import Schedule

STEPS, SEEDS = 3000, (1, 2, 3)
RATES = (0.016, 0.032, 0.008, 0.004)
GOSSIP: Mapping[str, Any] = {
    "SGP": "sgp",
    "Overlap SGP": "osgp",
    "SGP, each 8th round exact": LabPlan.of("sgp", schedule=Schedule(average_every=8)),
    "local SGD, H = 10": LocalSGD(sync_every=10),
    "SGP, 2 peers": LabPlan.of("sgp", peers_per_itr=2),
    "AD-PSGD": "adpsgd",
    "DiLoCo, H = 30": DiLoCo(sync_every=30),
    "SlowMo, H = 12": SlowMo(sync_every=12, gossip_every=1, inner_lr="optimizer"),
    "D-PSGD ring": "dpsgd:ring",
}
"""Methods that train by GossipAdamW."""
MIXED = "momentum mixed too"
"""In the names of the methods whose models have a `MixedMomentum`."""
ROUNDED: Mapping[str, Any] = {
    "SGP, bfloat16": LabPlan.of("sgp", wire_dtype=torch.bfloat16),
    "Overlap SGP, bfloat16": LabPlan.of("osgp", wire_dtype=torch.bfloat16),
    f"SGP, bfloat16, {MIXED}": LabPlan.of("sgp", wire_dtype=torch.bfloat16),
    f"Overlap SGP, bfloat16, {MIXED}": LabPlan.of("osgp", wire_dtype=torch.bfloat16),
}
"""Methods with messages in bfloat16, for 8 workers."""
FURTHER = ("SGP, each 8th round exact", "SGP, 2 peers")
"""Methods that 16 workers do not train by."""
SEARCHED: Mapping[str, Any] = {
    "SGP": "sgp",
    "SGP, 2 peers": LabPlan.of("sgp", peers_per_itr=2),
    "SlowMo, H = 12": SlowMo(sync_every=12, gossip_every=1, inner_lr="optimizer"),
    f"SGP, {MIXED}": "sgp",
    f"SGP, 2 peers, {MIXED}": LabPlan.of("sgp", peers_per_itr=2),
    f"SGP, each 8th round exact, {MIXED}": LabPlan.of("sgp", schedule=Schedule(average_every=8)),
    f"SGP, first 10 % as all-reduce, {MIXED}": LabPlan.of("sgp", schedule=Schedule(average_until=60)),
    f"SlowMo, H = 12, {MIXED}": SlowMo(sync_every=12, gossip_every=1, inner_lr="optimizer"),
    f"Overlap SGP, {MIXED}": "osgp",
    f"D-PSGD, {MIXED}": "dpsgd",
    f"exact average in each step, {MIXED}": LabPlan.of("sgp", schedule=Schedule(average_every=1)),
    "exact average in each step": LabPlan.of("sgp", schedule=Schedule(average_every=1)),
}
"""Methods of the search for the default of 64 workers, which train by GossipAdamW."""


def gossip_adamw(workers: int, parameters: list[nn.Parameter], rate: float) -> torch.optim.Optimizer:
    """Return GossipAdamW with the settings that AdamW has in `Text`."""
    return GossipAdamW(parameters, rate, BETAS, weight_decay=WEIGHT_DECAY, num_ranks=workers)


FIRST = (
    "all-reduce, AdamW",
    f"SGP, {MIXED}",
    *("SGP", "Overlap SGP", "SGP, bfloat16", "Overlap SGP, bfloat16", "SGP, 2 peers"),
    *(f"{name}, bfloat16, {MIXED}" for name in ("SGP", "Overlap SGP")),
)
"""Methods that are trained for fewer steps too, without the name of GossipAdamW."""
SPARSE = ("local SGD, H = 10", "DiLoCo, H = 30", "SlowMo, H = 12")
"""Methods that are trained for more steps too, without the name of GossipAdamW."""


def by_gossip_adamw(own: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return these methods with the optimizer in their names."""
    return {f"{name}, GossipAdamW": method for name, method in own.items()}


def methods(workers: int) -> Mapping[str, Any]:
    """Return all-reduce and, for 8 workers, SGP by AdamW, and all others by GossipAdamW."""
    own = {f"SGP, {MIXED}": "sgp", **GOSSIP}
    if workers == 8:
        return {"all-reduce, AdamW": "ar", **by_gossip_adamw({**own, **ROUNDED}), "SGP, AdamW": "sgp"}
    return {
        "all-reduce, AdamW": "ar",
        **by_gossip_adamw({name: method for name, method in own.items() if name not in FURTHER}),
    }


def searched(workers: int) -> Mapping[str, Any]:
    """Return all-reduce by AdamW, and the methods of `SEARCHED`."""
    return {"all-reduce, AdamW": "ar", **by_gossip_adamw(SEARCHED)}


def optimizers(workers: int) -> Mapping[str, MakeOptimizer]:
    """Return GossipAdamW for the methods that have it in their names."""
    make = partial(gossip_adamw, workers)
    return {name: make for name in (*methods(8), *searched(workers)) if name.endswith("GossipAdamW")}


FEW, MANY = (8, 16), (32, 64)
"""The numbers of workers with three seeds, whose rates are chosen by whole trainings, and those with one."""


def study(cells: tuple[tuple[int, int, int], ...], **others: Any) -> Study:
    """Return a study of these cells. A worker reads four sequences of 32 symbols in each step."""
    usual: dict[str, Any] = {"methods": methods, "rates": RATES, "points": 60, "by": "compile"}
    mixed = {name for name in (*methods(8), *searched(8)) if MIXED in name}
    return Study(partial(Text, 4), cells=cells, optimizers=optimizers, mixes_momentum=mixed, **{**usual, **others})


def only(names: Collection[str], workers: int) -> Mapping[str, Any]:
    """Return the methods of these names, which lack the name of GossipAdamW."""
    return {name: make for name, make in methods(workers).items() if name.removesuffix(", GossipAdamW") in names}


DEFAULT: Mapping[str, Study] = {
    "language": study(tuple((n, STEPS, seed) for seed in SEEDS for n in FEW), tuning=1.0),
    "language_search": study(((64, 600, SEEDS[0]),), methods=searched, rates=(0.016,), points=4),
    "language_many": study(tuple((n, STEPS, SEEDS[0]) for n in MANY), tuning=0.2),
    **{
        f"language_{steps}": study(
            ((8, steps, SEEDS[0]),), methods=partial(only, names), tuning=STEPS / steps, points=4
        )
        for steps, names in ((1500, FIRST), (2000, FIRST), (6000, SPARSE))
    },
}
"""The studies by name. `language_search` trains all methods at one rate, the best one of SGP in 600 steps, and writes
`language_search.csv`; all others write `language.csv`. The last three train for other numbers of steps, at the rates
that `language` has found in 3,000."""
