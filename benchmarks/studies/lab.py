"""The Lab: what its clock predicts for 1,024 workers, and the processor time of a worker and step.

    python -m benchmarks.studies simulator --output benchmarks/results/simulator.csv
    python -m benchmarks.studies lab --output benchmarks/results/lab.csv

The first has the numbers of `python -m gossip_modules.lab --world-size 1024 --network "1 Gbit/s" --parameters 25e6
--compute 0.25` for some methods; this command prints all methods, and its advice. The second trains 64 small decoders
by SGP, with `torch.func.vmap` and in a loop over the workers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from benchmarks.studies.computed import Cell, Computed
from benchmarks.studies.small_decoder import Text
from gossip_modules.lab import Compute, Digits, LabPlan, LabTask, Network, Setting, simulate
from gossip_modules.lab.comparison import LabTraining

SETTING = Setting(1024, 25_000_000, Compute(0.25), Network("1 Gbit/s"))
PREDICTED = ("ar", "dpsgd", "sgp", "osgp", "adpsgd", "wagma", "localsgd", "diloco", "slowmo", "noloco", "sparseloco")
"""The methods whose predictions are kept, by their names in the registry."""


def simulator_cells(rows: Callable[[], Any]) -> Iterator[Cell]:
    """Yield a cell for each method of PREDICTED."""
    for name in PREDICTED:
        yield {"recipe": name}, partial(predicted, name)


def predicted(name: str) -> Mapping[str, Any]:
    """Return the prediction for a method; the seconds are those to the target, None: it was not reached."""
    found = simulate(name, SETTING, Digits(seed=0))
    return {
        "method": found.name,
        "steps": round(found.num_steps),
        "step_seconds": round(found.step_seconds, 3),
        "seconds": round(found.seconds, 1) if found.has_reached else None,
        "rank_megabytes": round(found.rank_bytes / 1e6),
        "waiting_percent": round(100 * found.waiting_share),
        "disagreement": round(found.disagreement, 3),
        "agreed": "yes" if found.has_agreed else "no",
    }


# The processor time of a worker and step.

WORKERS, SEQUENCES = 64, 8
WARM_STEPS, STEPS, TURNS = 2, 8, 5


def lab_cells(rows: Callable[[], Any]) -> Iterator[Cell]:
    """Yield a cell for each way of computing the losses, several times in turns."""
    for turn in range(TURNS):
        for by in ("vmap", "loop"):
            yield {"by": by, "turn": turn}, partial(cpu_time, by)


def cpu_time(by: str) -> Mapping[str, Any]:
    """Return the milliseconds of processor time of one worker and step.

    Args:
        by: "vmap" or "loop".
    """
    text = Text(SEQUENCES)
    task = LabTask(text.model, text.loss, text.batch, lambda parameters: text.optimizer(parameters, 1e-3))
    training = LabTraining(LabPlan.of("sgp"), Setting(WORKERS, None, Compute(0.1), Network("1 Gbit/s")), task, by=by)
    begin = 0.0
    for step, _ in enumerate(training.run(WARM_STEPS + STEPS)):
        begin = time.process_time() if step == WARM_STEPS else begin
    milliseconds = 1e3 * (time.process_time() - begin) / STEPS / WORKERS
    return {
        "workers": WORKERS,
        "parameters": training.models.x.shape[1],
        "steps": STEPS,
        "milliseconds": round(milliseconds, 3),
    }


LAB: Mapping[str, Computed] = {
    "simulator": Computed(
        simulator_cells,
        (
            *("recipe", "method", "steps", "step_seconds", "seconds", "rank_megabytes", "waiting_percent"),
            *("disagreement", "agreed"),
        ),
    ),
    "lab": Computed(lab_cells, ("by", "turn", "workers", "parameters", "steps", "milliseconds")),
}
"""The studies by name."""
