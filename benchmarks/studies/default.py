"""The studies of the default: a small decoder by 2 to 64 workers over 3,000 steps, by all-reduce and by gossip.

The page docs/benchmarks/default.md joins its curves with the times of the emulated cluster.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks.studies.small_decoder import BETAS, WEIGHT_DECAY, Text
from benchmarks.studies.study import MakeOptimizer, Study
from gossip_modules import DiLoCo, GossipAdamW, LocalSGD, SlowMo
from gossip_modules.compression import Absmax
from gossip_modules.lab import LabPlan
from gossip_modules.schedule import Schedule

STEPS, SEEDS = 3000, (1, 2, 3)
RATES = (0.016, 0.032, 0.008, 0.004)
ALL_REDUCE, GOSSIP_ADAMW = "all-reduce, AdamW", ", GossipAdamW"
MIXED = ", momentum mixed too"
"""In the names of the methods whose models have a `MixedMomentum`."""
SLOWMO = SlowMo(sync_every=12, gossip_every=1, inner_lr="optimizer")


def by_gossip_adamw(methods: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return these methods with the optimizer in their names."""
    return {f"{name}{GOSSIP_ADAMW}": method for name, method in methods.items()}


FIRST: Mapping[str, Any] = {
    ALL_REDUCE: "ar",
    **by_gossip_adamw({f"SGP{MIXED}": "sgp", "SGP": "sgp"}),
}
TWO_MIXED: Mapping[str, Any] = by_gossip_adamw({f"SGP, 2 peers{MIXED}": LabPlan.of("sgp", peers_per_itr=2)})
LOCAL_MIXED: Mapping[str, Any] = by_gossip_adamw(
    {f"local SGD, H = {every}{MIXED}": LocalSGD(sync_every=every) for every in (2, 4)}
)
CODED_MIXED: Mapping[str, Any] = by_gossip_adamw(
    {
        f"local SGD, H = 4, {bits} bits{MIXED}": DiLoCo(
            4, lr=1.0, momentum=0.0, compressor=Absmax(bits, block_size), collective="all_reduce"
        )
        for bits, block_size in ((4, 32), (8, 64))
    }
)
"""Local SGD whose averages of models and moments are sent by a code."""
OVERLAP: Mapping[str, Any] = by_gossip_adamw({"Overlap SGP": "osgp"})
SPARSE: Mapping[str, Any] = by_gossip_adamw(
    {"local SGD, H = 10": LocalSGD(sync_every=10), "DiLoCo, H = 30": DiLoCo(sync_every=30), "SlowMo, H = 12": SLOWMO}
)
"""Methods with fewer messages; the last one has an outer step over gossip."""
OTHERS: Mapping[str, Any] = by_gossip_adamw({"AD-PSGD": "adpsgd", "D-PSGD ring": "dpsgd:ring"})
ROUNDED: Mapping[str, Any] = by_gossip_adamw(
    {
        f"{name}, bfloat16{mixed}": LabPlan.of(method, wire_dtype=torch.bfloat16)
        for mixed in ("", MIXED)
        for name, method in (("SGP", "sgp"), ("Overlap SGP", "osgp"))
    }
)
"""Methods with messages in bfloat16."""
EIGHT_BITS: Mapping[str, Any] = by_gossip_adamw(
    {
        f"{name}, int8{mixed}": LabPlan.of(method, wire_dtype=torch.int8)
        for name, method, mixed in (("SGP", "sgp", ""), ("Overlap SGP", "osgp", ""), ("Overlap SGP", "osgp", MIXED))
    }
)
"""Methods with messages in codes of 8 bits."""
TWO: Mapping[str, Any] = by_gossip_adamw({"SGP, 2 peers": LabPlan.of("sgp", peers_per_itr=2)})
MANY: Mapping[str, Any] = {
    **FIRST,
    **TWO_MIXED,
    **LOCAL_MIXED,
    **OVERLAP,
    **SPARSE,
    **OTHERS,
    **{name: method for name, method in ROUNDED.items() if name.startswith("Overlap SGP")},
}
"""The methods of 32 and 64 workers."""
EIGHT: Mapping[str, Any] = {
    **MANY,
    **CODED_MIXED,
    **TWO,
    **ROUNDED,
    **EIGHT_BITS,
    **by_gossip_adamw({"SGP, each 8th round exact": LabPlan.of("sgp", schedule=Schedule(average_every=8))}),
    "SGP, AdamW": "sgp",
}
"""The methods of 8 workers."""
SHORTER: Mapping[str, Any] = {**FIRST, **LOCAL_MIXED, **CODED_MIXED, **OVERLAP, **TWO, **ROUNDED, **EIGHT_BITS}
"""The methods of 8 workers that are trained for fewer steps too."""
TWO_WORKERS: Mapping[str, Any] = {
    ALL_REDUCE: "ar",
    "SGP, AdamW": "sgp",
    "Overlap SGP, AdamW": "osgp",
    "local SGD, H = 10, AdamW": LocalSGD(sync_every=10),
    **by_gossip_adamw(
        {"SGP": "sgp", f"SGP{MIXED}": "sgp", "Overlap SGP": "osgp", "local SGD, H = 10": LocalSGD(sync_every=10)}
    ),
    **CODED_MIXED,
}
"""The methods of two workers."""
SEARCHED: Mapping[str, Any] = {
    **FIRST,
    **TWO,
    **TWO_MIXED,
    **LOCAL_MIXED,
    **by_gossip_adamw(
        {
            "SlowMo, H = 12": SLOWMO,
            f"SGP, each 8th round exact{MIXED}": LabPlan.of("sgp", schedule=Schedule(average_every=8)),
            f"SGP, first 10 % as all-reduce{MIXED}": LabPlan.of("sgp", schedule=Schedule(average_until=60)),
            f"SlowMo, H = 12{MIXED}": SLOWMO,
            f"Overlap SGP{MIXED}": "osgp",
            f"D-PSGD{MIXED}": "dpsgd",
            f"exact average in each step{MIXED}": LabPlan.of("sgp", schedule=Schedule(average_every=1)),
            "exact average in each step": LabPlan.of("sgp", schedule=Schedule(average_every=1)),
        }
    ),
}
"""The methods of the search for the default of 64 workers."""


def gossip_adamw(workers: int, parameters: list[nn.Parameter], rate: float) -> torch.optim.Optimizer:
    """Return GossipAdamW with the settings that AdamW has in `Text`."""
    return GossipAdamW(parameters, rate, BETAS, weight_decay=WEIGHT_DECAY, num_ranks=workers)


def study(
    every: Mapping[str, Any], numbers: Sequence[int], *, seeds: Sequence[int] = SEEDS, steps: int = STEPS, **own: Any
) -> Study:
    """Return a study of these methods and numbers of workers. A worker reads four sequences of 32 symbols per step.

    16 workers train by the methods of `MANY` and `CODED_MIXED` only.
    """

    def methods(workers: int) -> Mapping[str, Any]:
        return {name: method for name, method in every.items() if workers != 16 or name in {*MANY, *CODED_MIXED}}

    def optimizers(workers: int) -> Mapping[str, MakeOptimizer]:
        return {name: partial(gossip_adamw, workers) for name in every if name.endswith(GOSSIP_ADAMW)}

    usual: dict[str, Any] = {"rates": RATES, "points": 60, "by": "compile", "tuning": STEPS / steps}
    return Study(
        partial(Text, 4),
        methods,
        cells=tuple((n, steps, seed) for seed in seeds for n in numbers),
        optimizers=optimizers,
        mixes_momentum={name for name in every if MIXED in name},
        **{**usual, **own},
    )


DEFAULT: Mapping[str, Study] = {
    "language": study(EIGHT, [8, 16]),
    "language_two": study(TWO_WORKERS, [2]),
    "language_many": study(MANY, [32, 64], seeds=SEEDS[:1], tuning=0.2),
    "language_many_whole": study({ALL_REDUCE: "ar"}, [32, 64], seeds=SEEDS[:1], rates=RATES[:2]),
    "language_search": study(SEARCHED, [64], seeds=SEEDS[:1], steps=600, rates=(0.016,), points=4),
    **{
        f"language_{steps}": study(methods, [8], seeds=SEEDS[:1], steps=steps, points=4)
        for steps, methods in ((1500, SHORTER), (2000, SHORTER), (6000, SPARSE))
    },
}
"""The studies by name. With up to 16 workers, rates are chosen by whole trainings, with more by a fifth of the steps.
`language_search` trains all methods at one rate, the best one of SGP in 600 steps, and writes `language_search.csv`;
`language_two` writes `language_two.csv`, and all others write `language.csv`. The last three train 8 workers for other
numbers of steps, at the rates that `language` has found."""
