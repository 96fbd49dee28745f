"""The clock of the Lab against two files of the emulated cluster: seconds per step, and the order of the methods."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import pandas as pd
import pytest

from benchmarks.cluster.delays import Delays
from benchmarks.cluster.methods import BOUND, CLUSTER_METHODS
from benchmarks.cluster.trials import NUM_WARM_STEPS
from benchmarks.record import RESULTS
from gossip_modules.lab import Compute, LabPlan, Network, Setting
from gossip_modules.rounds.rows import Array, Indices
from tests.harness.recorded import Recorded
from tests.library.lab.simulations import digits

METHODS: Mapping[str, str] = {
    "ddp": "ar",
    "sgp": "sgp",
    "osgp": "osgp",
    "dpsgd": "dpsgd:bipartite-exponential",
    "powergossip": "powergossip:ring",
    "localsgd": "LocalSGD(sync_every=4)",
    "diloco": "DiLoCo(sync_every=4)",
    "streamingdiloco": "StreamingDiLoCo(sync_every=4, fragments=2, delay=2)",
    "sparseloco": "SparseLoCo(sync_every=4)",
}
"""The plan of each method of the cluster that the Lab knows too."""
MEMORY_BYTE_S = 9e9 * 2
"""The memory bandwidth of the two cores of the machine, which the hosts share."""
CELLS: Mapping[str, Mapping[float, int]] = {
    "loss_cells.csv": {40.0: len(METHODS)},
    "clock_cells.csv": {40.0: 4, 200.0: 5, 600.0: 5},
}
"""The files in `benchmarks/results`, and the number of methods that the Lab knows too, by the milliseconds of sleep."""
MESSAGE_BYTE_S = 1.5e9 * 2
"""The bytes of messages per second of the two cores of the machine; `test_the_processor_time_of_messages` has them."""
BUSY = ("clock_cells.csv", 16, 1.0, 200.0)
"""The file, hosts, rate and milliseconds of sleep of a cell in which all-reduce waits for both wire and processors.

There the clock has 0.81 of the time of AllReduce and 0.84 of the time of DiLoCo.
"""
TIE = 1.15
"""Methods whose measured seconds differ by less count as equally fast: each cell was measured once."""


@dataclass(frozen=True)
class PlannedCompute(Compute):
    """The delays of the cluster, which are drawn anew for each rank and step, after the steps that warm up."""

    delays: Delays = field(default_factory=Delays)
    num_warm: int = 0

    def compute_seconds(self, step: int, workers: Indices) -> Array:
        """See `Compute`."""
        planned = self.delays if step >= self.num_warm else replace(self.delays, straggle_chance=0.0)
        factors = [planned.factor(int(rank), step, num_hosts=len(workers)) for rank in workers]
        return np.multiply(self.seconds, factors)


@dataclass(frozen=True)
class Cell:
    """What the methods of a cell have in common, and the measured milliseconds of a step of each, by name.

    Attributes:
        overhead_ms: the measured local step beside the waited compute.
        measured: medians over repeats.
    """

    file: str
    hosts: int
    rate_gbit: float
    planned_ms: float
    overhead_ms: float
    num_steps: int
    num_parameters: int
    delays: Delays
    measured: Mapping[str, float]


def cells() -> Iterator[Cell]:
    """The cells of the files."""
    for name in CELLS:
        rows = pd.read_csv(RESULTS / name).query("rank == 0")
        alone = rows[(rows["method"] == BOUND) & (rows["straggle_chance"] == 0)]
        local_ms = alone.groupby(["hosts", "planned_ms"])["fleet_step_ms"].median()
        rows = rows[rows["method"].isin(METHODS)]
        for (hosts, gbit, _, planned_ms), own in rows.groupby(["hosts", "rate_gbit", "straggle_chance", "planned_ms"]):
            if (name, hosts, gbit, planned_ms) == BUSY:
                continue
            first = own.iloc[0]
            yield Cell(
                file=name,
                hosts=int(hosts),
                rate_gbit=float(gbit),
                planned_ms=planned_ms,
                overhead_ms=local_ms[hosts, planned_ms] - planned_ms,
                num_steps=int(first["planned_steps"]),
                num_parameters=int(first["num_parameters"]),
                delays=Delays(**{name: float(first[name]) for name in OF_DELAYS}, seed=int(first["seed"])),
                measured=own.groupby("method")["fleet_step_ms"].median().to_dict(),
            )


OF_DELAYS = ("spread", "straggle_chance", "slow_factor", "slow_host")


def predicted_ms(name: str, cell: Cell) -> float:
    """Milliseconds of a step of all ranks, from the same steps as on the cluster: see `benchmarks/cluster/table.py`."""
    period = CLUSTER_METHODS[name].period
    num_warm, num_steps = (-(-steps // period) * period for steps in (NUM_WARM_STEPS, cell.num_steps))
    compute = PlannedCompute(
        cell.planned_ms / 1e3, overhead_seconds=cell.overhead_ms / 1e3, delays=cell.delays, num_warm=num_warm
    )
    memory, messages = MEMORY_BYTE_S / cell.hosts, MESSAGE_BYTE_S / cell.hosts
    network = Network(f"{cell.rate_gbit} Gbit/s", memory_byte_s=memory, message_byte_s=messages)
    setting = Setting(cell.hosts, cell.num_parameters, compute, network)
    training = Recorded(LabPlan.of(METHODS[name]).resolved(cell.hosts), setting, digits())
    clock, ends = training.method.clock, []
    for _ in training.run(num_warm + num_steps):
        # A step of a round before the forward ends when it is computed, and one of DDP when gradients are averaged.
        ends.append(clock.arrivals() if clock.begins_with_round else clock.starts.copy())
    until = -2 if clock.begins_with_round else -1
    seconds = (ends[until] - ends[until - num_steps]) / num_steps
    return 1e3 / float((1 / seconds).mean())


@pytest.mark.parametrize(
    "cell",
    list(cells()),
    ids=lambda cell: f"{cell.file}-{cell.hosts}-{cell.rate_gbit}-{cell.planned_ms}-{cell.delays.straggle_chance}",
)
def test_methods_rank_as_on_the_cluster(cell: Cell) -> None:
    predicted = {name: predicted_ms(name, cell) for name in cell.measured}
    assert len(predicted) == CELLS[cell.file][cell.planned_ms]
    assert predicted == {name: pytest.approx(ms, rel=0.15) for name, ms in cell.measured.items()}
    for faster, slower in itertools.permutations(predicted, 2):
        if cell.measured[faster] * TIE < cell.measured[slower]:
            assert predicted[faster] < predicted[slower], f"{faster} before {slower}"


def test_the_processor_time_of_messages() -> None:
    """Of steps at 10 Gbit/s, without the local step and three passes over the model: a byte sent and one received."""
    rows = pd.read_csv(RESULTS / "clock_cells.csv").query("rate_gbit == 10")
    means = rows.groupby("method")[["cpu_ms", "bytes_per_step"]].mean()
    num_bytes = means.loc["sgp", "bytes_per_step"]
    milliseconds = means.loc["sgp", "cpu_ms"] - means.loc[BOUND, "cpu_ms"] - 1e3 * 3 * num_bytes / (MEMORY_BYTE_S / 2)
    assert num_bytes / milliseconds * 1e3 == pytest.approx(MESSAGE_BYTE_S / 2, rel=0.1)
