"""The compute utilisation of DiLoCo and other methods on links of 50 to 5,000 Mbit/s, by the clock of the Lab.

    python -m benchmarks.studies utilisation --output benchmarks/results/utilisation.csv

Four workers with a model of 30,846,720 float32 parameters compute for 26.5 ms in a step, as in a published measurement
of DiLoCo on four GPUs with shaped links. The compute utilisation is the share of this time in the time of a step.
Nothing is trained: the clock needs the methods' messages only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks.studies.computed import Cell, Computed
from gossip_modules import QSGD, DiLoCo, GASLoC, NoLoCo, PowerGossip, SparseLoCo, StreamingDiLoCo
from gossip_modules.lab import Compute, LabPlan, LabTask, Network, Setting
from gossip_modules.lab.comparison import LabTraining

WORKERS, PARAMETERS, STEP_SECONDS = 4, 30_846_720, 0.0265
MEMORY_BYTE_S = 500e9
"""Of a GPU; the codes and the outer steps read and write memory."""
MBITS, PERIODS = (50, 200, 1000, 5000), (1, 8, 32, 128)
NUM_PERIODS = 4
"""Outer steps that are counted."""
WARM_PERIODS = 2
"""Outer steps before them: late messages take so long until there are as many of them as later."""
PUBLISHED: Mapping[int, tuple[float, ...]] = {
    1: (0.07, 0.32, 1.74, 7.76),
    8: (0.55, 2.48, 12.35, 40.24),
    32: (2.41, 10.01, 36.01, 68.10),
    128: (11.55, 36.09, 71.52, 87.00),
}
"""The published utilisation of DiLoCo in percent by period, for each of MBITS."""
FOUR_BITS = QSGD(4, bucket_size=32, unbiased=True)


def methods(period: int) -> dict[str, Any]:
    """Return the methods with this many steps from one outer step to the next, by name."""
    found: dict[str, Any] = {
        "DiLoCo": DiLoCo(sync_every=period),
        "DiLoCo, 4 bits": DiLoCo(sync_every=period, compressor=FOUR_BITS),
        "SparseLoCo": SparseLoCo(sync_every=period),
        "NoLoCo": NoLoCo(sync_every=period),
        "GASLoC": GASLoC(sync_every=period),
    }
    if period > 1:
        late = StreamingDiLoCo(sync_every=period, fragments=4, delay=period - 1, arrival="carry")
        found["Streaming DiLoCo, carry"] = late
        found["Streaming DiLoCo, carry, 4 bits"] = replace(late, compressor=FOUR_BITS)
    else:
        found |= {"all-reduce": "ar", "SGP": "sgp", "PowerGossip": PowerGossip()}
    return found


def utilisation(method: Any, mbit: float, period: int) -> float:
    """Return the share of computation in the time of NUM_PERIODS periods, from 0 to 1.

    Args:
        method: for the Lab.
        mbit: the rate of a link in Mbit/s.
        period: the steps from one outer step to the next.
    """
    learns = method == "ar"  # gradients are averaged in buckets, under the backward pass
    task = LabTask(Weights, weighted_sum, _no_data, (lambda x: torch.optim.SGD(x, lr=0.0)) if learns else None)
    network = Network(f"{mbit} Mbit/s", memory_byte_s=MEMORY_BYTE_S)
    setting = Setting(WORKERS, PARAMETERS, Compute(STEP_SECONDS), network)
    training = LabTraining(LabPlan.of(method), setting, task)
    num_warm, num_steps = WARM_PERIODS * period, NUM_PERIODS * period
    starts = [training.seconds for _ in training.run(num_warm + num_steps)]
    return num_steps * STEP_SECONDS / (starts[-1] - starts[num_warm])


class Weights(nn.Module):
    """A model of a few numbers in place of the real one, whose size the clock knows."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(64, 64))


def weighted_sum(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """Return a scalar: the sum of the numbers of a `Weights`, times the batch."""
    return torch.stack([x.sum() for x in model.parameters()]).sum() * batch


def _no_data(worker: int, step: int, generator: torch.Generator) -> torch.Tensor:
    return torch.zeros(())


def cells(rows: Callable[[], Any]) -> Iterator[Cell]:
    """Yield a cell for each method, period and rate."""
    for period in PERIODS:
        for name, method in methods(period).items():
            for mbit, published in zip(MBITS, PUBLISHED[period], strict=True):
                key = {"method": name, "period": period, "mbit": mbit}
                yield (
                    key,
                    partial(_row, method, mbit, period, published if name == "DiLoCo" else math.nan),
                )


def _row(method: Any, mbit: int, period: int, published: float) -> Mapping[str, Any]:
    share = utilisation(method, mbit, period)
    return {"utilisation_percent": round(100 * share, 4), "published_percent": published}


UTILISATION: Mapping[str, Computed] = {
    "utilisation": Computed(cells, ("method", "period", "mbit", "utilisation_percent", "published_percent"))
}
"""The study by name."""
