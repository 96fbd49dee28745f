"""Asynchronous gossip and all-reduce with more and more workers: time to accuracy, after Jin et al. (2016).

    python -m benchmarks.studies crossover --output benchmarks/results/crossover.csv

All numbers of workers learn from equal numbers of images. Times are those of a ResNet-18 on links of 10 Gbit/s.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from benchmarks.studies.images import DrawnDigits
from benchmarks.studies.study import Study
from gossip_modules.lab import Compute, Network

BATCH, NUM_IMAGES = 2, 32_000
WORKERS = (8, 32, 100)

CROSSOVER: Mapping[str, Study] = {
    "crossover": Study(
        partial(DrawnDigits, BATCH),
        lambda workers: {"all-reduce": "ar", "dpwa": "dpwa"},
        cells=tuple((n, NUM_IMAGES // BATCH // n, seed) for seed in (1, 2, 3) for n in WORKERS),
        rates=(0.1, 0.2, 0.4),
        tuning=0.25,
        points=40,
        compute=Compute(0.2, step_spread=0.1),
        network=Network("10 Gbit/s"),
        num_parameters=11_700_000,
    )
}
"""The study by its name."""
